"""What the commands print: tables for people, one JSON document for programs.

Decides nothing. With `--json` only `json()` prints, otherwise only `table()` and `line()`; a verb may call all three.
Much of what is shown was written by somebody else: a character that a terminal would act upon is shown as `?`.
rich is used on a terminal alone, so that pipes and logs get plain aligned text and start-up stays cheap.
Called by every verb.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence


class Output:
    """One per call of `vgpu`."""

    def __init__(self, is_json: bool) -> None:
        self.is_json = is_json
        self._has_printed = False

    def json(self, doc: object) -> None:
        """The result as one document on one line; only with `--json`."""
        if self.is_json:
            print(json_text(doc), flush=True)

    def line(self, text: str) -> None:
        """One line for people."""
        if not self.is_json:
            print(printable(text), flush=True)
            self._has_printed = True

    def table(
        self, title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], *, numbers: Collection[str] = ()
    ) -> None:
        """A table for people; cells are shown as they are, without markup, `numbers` are columns aligned to the right."""
        if self.is_json:
            return
        if title and self._has_printed:
            print()
        self._has_printed = True
        cells = [["" if cell is None else printable(str(cell)) for cell in row] for row in rows]
        if sys.stdout.isatty():
            _rich_table(title, columns, cells, numbers)
        else:
            print(plain_table(title, columns, cells, numbers), flush=True)


def json_text(doc: object) -> str:
    """One line that every standard output can take: a name that is no UTF-8 is written with escapes."""
    text = json.dumps(doc, ensure_ascii=False, default=str)
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return json.dumps(doc, default=str)
    return text


def printable(text: str) -> str:
    """The text without what a terminal would act upon or standard output cannot encode."""
    if not text.isprintable():
        text = "".join(letter if letter.isprintable() else "?" for letter in text)
    encoding = sys.stdout.encoding or "ascii"
    return text.encode(encoding, errors="replace").decode(encoding)


def plain_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], numbers: Collection[str] = ()
) -> str:
    """Columns aligned with spaces; the last one is left as long as it is."""
    lines = [list(columns), *[list(row) for row in rows]]
    widths = [max(len(line[n]) for line in lines) for n in range(len(columns))]
    text = ["  ".join(_aligned(line, columns, widths, numbers)).rstrip() for line in lines]
    return "\n".join([title, *text] if title else text)


def _aligned(
    cells: Sequence[str], columns: Sequence[str], widths: Sequence[int], numbers: Collection[str]
) -> Iterable[str]:
    for cell, column, width in zip(cells, columns, widths, strict=True):
        yield cell.rjust(width) if column in numbers else cell.ljust(width)


def _rich_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], numbers: Collection[str]) -> None:
    try:
        from rich.console import Console  # noqa: PLC0415 - 60 ms that only a terminal pays
        from rich.table import Table  # noqa: PLC0415
        from rich.text import Text  # noqa: PLC0415
    except ImportError:
        print(plain_table(title, columns, rows, numbers), flush=True)
        return
    table = Table(title=title or None, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold", justify="right" if column in numbers else "left")
    for row in rows:
        table.add_row(*[Text(cell) for cell in row])
    Console().print(table)
