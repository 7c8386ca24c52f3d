"""Keys of ours in a JSON document of somebody else's: looked at, set, taken out again, everything else left as it is.

Pure. A key is a path of names, such as ("runtimes", "vgpu-runtime"). Refuses to set a key below something that is no table.
Called by `daemon_json` and by `vgpu setup --undo` (vgpu_cli/installed_files.py).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Key = tuple[str, ...]


class NotATable(ValueError):
    """Part of a key's path is there and holds no table."""


def get(document: Mapping[str, Any], key: Key) -> Any:
    """The value, or None where there is none."""
    value: Any = document
    for name in key:
        if not isinstance(value, dict):
            raise NotATable(".".join(key[:-1]))
        value = value.get(name)
        if value is None:
            return None
    return value


def put(document: dict[str, Any], key: Key, value: object) -> None:
    """Set the value, making tables on the way."""
    table = document
    for name in key[:-1]:
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise NotATable(".".join(key[:-1]))
    table[key[-1]] = value


def take_out(document: dict[str, Any], key: Key) -> None:
    """Remove the key, and the tables that held nothing else; a key that is not there is fine."""
    path: list[tuple[dict[str, Any], str]] = []
    table: Any = document
    for name in key:
        if not isinstance(table, dict) or name not in table:
            return
        path.append((table, name))
        table = table[name]
    holder, last = path.pop()
    del holder[last]
    for holder, name in reversed(path):
        if holder[name]:
            return
        del holder[name]


def without(content: bytes, added: Sequence[tuple[Key, object]]) -> bytes | None:
    """The file without the keys that still have the value they were added with; None where nothing else is in it.

    A file that is no JSON object any more comes back as it is.
    """
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        return content
    if not isinstance(document, dict):
        return content
    for key, value in added:
        if _get_or_none(document, key) == value:
            take_out(document, key)
    return to_text(document).encode() if document else None


def to_text(document: Mapping[str, Any]) -> str:
    """As people write such files."""
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def _get_or_none(document: Mapping[str, Any], key: Key) -> Any:
    try:
        return get(document, key)
    except NotATable:
        return None
