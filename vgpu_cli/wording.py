"""How sizes, counts and long values are put into words for people. Used by the verbs' tables; never in JSON."""

from __future__ import annotations

from typing import Any

_UNITS = (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10))


def size_text(value: int | None) -> str:
    """Bytes with a unit; what is not known is said to be so."""
    if value is None:
        return "not known"
    for unit, shift in _UNITS:
        if value >= 1 << shift:
            return f"{value / (1 << shift):.2f} {unit}"
    return f"{value} B"


def count_text(count: int, noun: str) -> str:
    """A number with its noun: 1 file, 2 files."""
    if count == 1:
        return f"1 {noun}"
    return f"{count} {noun[:-1]}ies" if noun.endswith("y") else f"{count} {noun}{'es' if noun.endswith('s') else 's'}"


def short_text(value: Any, longest: int = 60) -> str:
    """A value on one line, cut where it is long."""
    text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else "none" if value is None else str(value)
    return text if len(text) <= longest else f"{text[: longest - 3]}..."
