"""What the commands print: tables for people, one JSON document for programs.

Decides nothing. With `--json` only `json()` prints, otherwise only `table()` and `line()`; a verb may call all three.
rich is used on a terminal alone, so that pipes and logs get plain aligned text and start-up stays cheap.
Called by every verb.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class Output:
    """One per call of `vgpu`."""

    def __init__(self, is_json: bool) -> None:
        self.is_json = is_json

    def json(self, doc: object) -> None:
        """The result as one document on one line; only with `--json`."""
        if self.is_json:
            print(json.dumps(doc, ensure_ascii=False, default=str), flush=True)

    def line(self, text: str) -> None:
        """One line for people."""
        if not self.is_json:
            print(text, flush=True)

    def table(self, title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """A table for people; cells are shown as they are, without markup."""
        if self.is_json:
            return
        cells = [["" if cell is None else str(cell) for cell in row] for row in rows]
        if sys.stdout.isatty():
            _rich_table(title, columns, cells)
        else:
            print(plain_table(title, columns, cells), flush=True)


def plain_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned with spaces; the last one is left as long as it is."""
    lines = [list(columns), *[list(row) for row in rows]]
    widths = [max(len(line[n]) for line in lines) for n in range(len(columns))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([title, *text] if title else text)


def _rich_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    try:
        from rich.console import Console  # noqa: PLC0415 - 60 ms that only a terminal pays
        from rich.table import Table  # noqa: PLC0415
        from rich.text import Text  # noqa: PLC0415
    except ImportError:
        print(plain_table(title, columns, rows), flush=True)
        return
    table = Table(title=title or None, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*[Text(cell) for cell in row])
    Console().print(table)
