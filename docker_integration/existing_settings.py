"""Reads dockerd's daemon.json.

Only looks; a file that does not parse is named in the error, because dockerd would refuse to start on it as well.
Called by `vgpu setup docker`.
"""

from __future__ import annotations

import json
from typing import Any

from docker_integration.daemon_json import PATH
from vgpu_errors import BadConfiguration


def parse(content: bytes | None) -> dict[str, Any]:
    """The document in the file; an absent or empty one is an empty table."""
    if content is None or not content.strip():
        return {}
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise BadConfiguration(path=PATH, what=f"not valid JSON: {error}") from error
    if not isinstance(document, dict):
        raise BadConfiguration(path=PATH, what="is not a JSON object")
    return document
