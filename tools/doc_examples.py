"""Finds the shell blocks of the documentation and the marker before each: where the tests run it, or why they do not.

    <!-- run on: first node -->        typed at that machine by tests/engines/test_documentation.py
    <!-- not run: what it would need -->

Refuses a block without a marker, so that no example goes unnoticed. Called by the tests.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).parents[1]
BLOCK = re.compile(r"(?P<before>[^\n]*)\n```sh\n(?P<text>.*?)```", re.DOTALL)
MARKER = re.compile(r"<!-- (?P<kind>run on|not run): (?P<what>.+) -->")


class UnmarkedExample(ValueError):
    """A shell block does not say whether it is run."""


class Example(NamedTuple):
    """One block; `where` is None for one that is not run."""

    where: str | None
    commands: tuple[str, ...]


def examples(page: str) -> list[Example]:
    """The blocks of a page (its path in the repository), in order."""
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    return [_example(page, block) for block in BLOCK.finditer(text)]


def _example(page: str, block: re.Match[str]) -> Example:
    marker = MARKER.fullmatch(block["before"].strip())
    if marker is None:
        message = f"{page}: no '<!-- run on: ... -->' or '<!-- not run: ... -->' before:\n{block['text']}"
        raise UnmarkedExample(message)
    lines = (re.sub(r"\s+# .*$", "", line) for line in block["text"].splitlines())
    commands = tuple(line for line in lines if line.strip())
    return Example(marker["what"] if marker["kind"] == "run on" else None, commands)
