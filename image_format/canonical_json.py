"""Canonical JSON (RFC 8785) for our own documents, and a strict reader (spec/record.md, section 1).

Writes one form only: sorted keys, no spaces, UTF-8. Refuses what two readers could read differently: floats,
integers beyond 2^53, duplicate keys, lone surrogates, deep nesting.
Every document of the image passes through here. Touches no file.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

from vgpu_errors import ImageError, LimitExceeded

MAX_INTEGER = 2**53 - 1
MAX_DEPTH = 32
MAX_BYTES = 16 << 20


def write(doc: Any, *, where: str = "document") -> bytes:
    """The canonical bytes of a document."""
    _check(doc, where)
    text = json.dumps(_sorted(doc), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.encode()


def read(data: bytes | bytearray | memoryview, *, where: str, max_bytes: int = MAX_BYTES) -> Any:
    """Parse a document that somebody else wrote."""
    if len(data) > max_bytes:
        raise LimitExceeded(where=where, what="its size", found=len(data), limit=max_bytes)
    try:
        text = bytes(data).decode()
        doc = json.loads(
            text,
            object_pairs_hook=_object_without_duplicates,
            parse_float=_refuse_number,
            parse_constant=_refuse_number,
            parse_int=_bounded_integer,
        )
    except RecursionError as error:
        raise LimitExceeded(where=where, what="nesting", found="deeper", limit=MAX_DEPTH) from error
    except ValueError as error:
        raise ImageError(where=where, what=f"not acceptable JSON: {error}") from error
    _check(doc, where)
    return doc


def read_object(data: bytes | bytearray | memoryview, *, where: str, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """Parse a document whose top level is an object."""
    doc = read(data, where=where, max_bytes=max_bytes)
    if not isinstance(doc, dict):
        raise ImageError(where=where, what="the top level is not an object")
    return doc


def _check(doc: Any, where: str) -> None:
    stack = [(doc, 0)]
    while stack:
        value, depth = stack.pop()
        if depth > MAX_DEPTH:
            raise LimitExceeded(where=where, what="nesting", found="deeper", limit=MAX_DEPTH)
        if isinstance(value, dict):
            for key, item in value.items():
                _check_text(key, where)
                stack.append((item, depth + 1))
        elif isinstance(value, list | tuple):
            stack.extend((item, depth + 1) for item in value)
        else:
            _check_scalar(value, where)


def _check_scalar(value: Any, where: str) -> None:
    if value is None or isinstance(value, bool):
        return
    if isinstance(value, str):
        _check_text(value, where)
    elif not isinstance(value, int):
        raise ImageError(where=where, what=f"a {type(value).__name__} has no canonical form here")
    elif abs(value) > MAX_INTEGER:
        raise LimitExceeded(where=where, what="an integer", found=value, limit=MAX_INTEGER)


def _check_text(text: Any, where: str) -> None:
    if not isinstance(text, str):
        raise ImageError(where=where, what="an object key is not a string")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ImageError(where=where, what="a string holds a lone surrogate") from error


def _sorted(value: Any) -> Any:
    # RFC 8785 sorts by UTF-16 code units, which differs from code points above U+FFFF.
    if isinstance(value, dict):
        return {key: _sorted(value[key]) for key in sorted(value, key=lambda key: key.encode("utf-16-be"))}
    if isinstance(value, list | tuple):
        return [_sorted(item) for item in value]
    return value


def _object_without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    doc = dict(pairs)
    if len(doc) != len(pairs):
        raise ValueError("an object has the same key twice")
    return doc


def _refuse_number(text: str) -> NoReturn:
    raise ValueError(f"{text[:32]} is not an integer")


def _bounded_integer(text: str) -> int:
    if len(text) > len(str(MAX_INTEGER)) + 1:
        raise ValueError(f"{text[:20]}... is beyond 2^53")
    return int(text)
