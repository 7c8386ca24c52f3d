"""Reads the containers.conf files that podman reads before our drop-in, and podman's version.

Only looks; a file that does not parse is named in the error, because podman would refuse to start on it as well.
Called by `vgpu setup podman`.
"""

from __future__ import annotations

import re
import subprocess
import tomllib
from typing import TYPE_CHECKING, Any

from podman_integration.containers_conf import DROP_IN_PATH
from vgpu_errors import BadConfiguration

if TYPE_CHECKING:
    from pathlib import Path

MAIN_FILES = ("/usr/share/containers/containers.conf", "/etc/containers/containers.conf")
VERSION_DEADLINE_S = 15


def configuration_before_ours(root: Path) -> list[dict[str, Any]]:
    """The parsed files in podman's order, up to the place where our drop-in sorts."""
    ours = root / DROP_IN_PATH.lstrip("/")
    paths = [root / name.lstrip("/") for name in MAIN_FILES]
    paths += sorted(path for path in ours.parent.glob("*.conf") if path.name < ours.name)
    return [_parse(path) for path in paths if path.is_file()]


def podman_version() -> tuple[int, ...] | None:
    """Version of the podman in PATH, or None when there is none or it does not answer."""
    try:
        answer = subprocess.run(
            ["podman", "--version"], capture_output=True, text=True, timeout=VERSION_DEADLINE_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return parse_version(answer.stdout)


def parse_version(text: str) -> tuple[int, ...] | None:
    """The numbers of 'podman version 5.8.6'."""
    found = re.search(r"(?<!\d)(\d{1,9})\.(\d{1,9})\.(\d{1,9})", text)
    return tuple(int(number) for number in found.groups()) if found else None


def _parse(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # tomllib lets those of long numbers and deep arrays through
        raise BadConfiguration(path=path, what=f"not valid TOML: {error}") from error
