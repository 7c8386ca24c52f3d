"""Writes man(7) text: escapes, paragraphs, options, and the small Markdown that our pages use.

Pure: text in, lines of roff out. Knows headings, paragraphs, lists, two- and three-column tables, fences, `code`, *names*
and links; what else Markdown has is shown as it stands. `man_pages` builds the pages with it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_INLINE = re.compile(r"`([^`]+)`|\*([^*\s][^*]*)\*|\[([^\]]+)\]\([^)]+\)")
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)


def escaped(text: str) -> str:
    """Plain text that troff shows as it stands: no requests, no escapes, hyphens that can be copied."""
    text = (
        text.replace("\\", "\\e").replace("-", "\\-").replace("`", "\\(ga").replace("^", "\\(ha").replace("~", "\\(ti")
    )
    return f"\\&{text}" if text.startswith((".", "'")) else text


def inline(text: str) -> str:
    """The same with `code` and *names* in bold and links by their text."""
    pieces: list[str] = []
    end = 0
    for found in _INLINE.finditer(text):
        pieces.append(escaped(text[end : found.start()]))
        bold = found[1] or found[2]
        pieces.append(f"\\fB{escaped(bold)}\\fP" if bold else escaped(found[3]))
        end = found.end()
    line = "".join([*pieces, escaped(text[end:])])
    return f"\\&{line}" if line.startswith((".", "'")) else line


def quoted(text: str) -> str:
    """An argument of a request."""
    return '"' + escaped(text).replace('"', "\\(dq") + '"'


def heading(name: str, section: int, title: str, source: str, manual: str) -> str:
    """The first line; no date, so that equal sources give equal pages."""
    return f".TH {quoted(name.upper())} {section} {quoted('')} {quoted(source)} {quoted(manual)}" + _title_comment(
        title
    )


def _title_comment(title: str) -> str:
    return f'\n.\\" {escaped(title)}'


def tagged(tag: str, text: str) -> list[str]:
    """A term and what it means."""
    return [".TP", f"\\fB{tag}\\fP", *paragraph(text)]


def paragraph(text: str) -> list[str]:
    """One sentence a line, as troff likes it."""
    return [inline(line.strip()) for line in text.splitlines() if line.strip()] or ["\\&"]


def example(text: str) -> list[str]:
    """Lines that are not filled."""
    return [".PP", ".RS 4", ".nf", *[escaped(line) if line else "\\&" for line in text.splitlines()], ".fi", ".RE"]


# ---- Markdown ------------------------------------------------------------------------------------


def markdown(text: str) -> list[str]:
    """The body of a page; `##` is a section, `###` a subsection, `#` is left to the caller."""
    return [line for block in _blocks(_COMMENT.sub("", text)) for line in _block(block)]


def _blocks(text: str) -> Iterator[list[str]]:
    block: list[str] = []
    is_fenced = False
    for line in text.splitlines():
        if line.startswith("```"):
            is_fenced = not is_fenced
        ends = not is_fenced and (not line.strip() or line.startswith("#"))
        if ends and block:
            yield block
            block = []
        if line.startswith("#") and not is_fenced:
            yield [line]
        elif line.strip() or is_fenced:
            block.append(line)
    if block:
        yield block


def _block(lines: list[str]) -> Iterable[str]:
    for start, write in _WRITERS:
        if lines[0].startswith(start):
            return write(lines)
    return [".PP", *paragraph("\n".join(lines))]


def _subsection(lines: list[str]) -> Iterable[str]:
    return [f".SS {quoted(lines[0][4:])}"]


def _section(lines: list[str]) -> Iterable[str]:
    return [f".SH {quoted(lines[0][3:].upper())}"]


def _title(_lines: list[str]) -> Iterable[str]:
    return []


def _fence(lines: list[str]) -> Iterable[str]:
    return example("\n".join(line for line in lines if not line.startswith("```")))


def _items(lines: list[str]) -> Iterable[str]:
    return [line for item in lines for line in (".IP \\(bu 2", *paragraph(item.removeprefix("- ")))]


def _table(lines: list[str]) -> Iterator[str]:
    """A row is a term with what stands behind it; the middle column of three is in parentheses."""
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    for term, *rest in rows:
        middle = f" ({header[1]}: {rest[0]})" if len(rest) > 1 else ""
        yield from (".TP", inline(term), *paragraph(rest[-1] + middle))


_WRITERS = (
    ("### ", _subsection),
    ("## ", _section),
    ("# ", _title),
    ("```", _fence),
    ("|", _table),
    ("- ", _items),
)
