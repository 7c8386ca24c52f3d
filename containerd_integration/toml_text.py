"""Writes a plain document as TOML 1.0: tables, strings, numbers, booleans and lists of them.

Exists because the standard library reads TOML only. Refuses dates and None with TypeError: no setting here holds one.
Called by `config`; the test reads every output back with tomllib.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


def to_toml(document: Mapping[str, Any]) -> str:
    """The document as text, sub-tables after the plain keys of their table."""
    return "\n".join(_table(document, ())).strip() + "\n"


def _table(table: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    plain = {key: value for key, value in table.items() if not isinstance(value, dict)}
    if path and (plain or not table):
        yield ""
        yield "[" + ".".join(_key(part) for part in path) + "]"
    for key, value in plain.items():
        yield f"{_key(key)} = {_value(value)}"
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _table(value, (*path, key))


def _key(name: str) -> str:
    is_bare = name != "" and all(char.isascii() and (char.isalnum() or char in "_-") for char in name)
    return name if is_bare else _string(name)


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, list):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(key)} = {_value(item)}" for key, item in value.items()) + "}"
    raise TypeError(type(value).__name__)


def _string(text: str) -> str:
    # A TOML basic string takes JSON's escapes, but a raw DEL must be escaped too.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
