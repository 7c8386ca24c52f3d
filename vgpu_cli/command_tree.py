"""Turns an argparse parser into plain data: commands, options and words, for shell completion and man pages.

Reads the parser and changes nothing. This is the only place that looks into argparse's own attributes; `completion` and
`man_pages` work on the result.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

# What a word on the command line names, by its metavar in the help texts.
_PATHS = frozenset({"SOURCE", "PATH", "FILE", "KEY", "KEY.pub", "A", "B", "ARCHIVE", "TARGET", "IMAGE", "PEM"})
_FOLDERS = frozenset({"DIR", "D"})


@dataclass(frozen=True)
class Word:
    """An option or a positional argument: its names (none for a positional), what follows, and what it is for."""

    names: tuple[str, ...]
    metavar: str
    help: str
    choices: tuple[str, ...] = ()
    is_repeated: bool = False

    @property
    def takes_value(self) -> bool:
        """A value follows the option."""
        return bool(self.metavar)

    @property
    def is_path(self) -> bool:
        """Names of files complete it."""
        return self.metavar in _PATHS

    @property
    def is_folder(self) -> bool:
        """Names of folders complete it."""
        return self.metavar in _FOLDERS


@dataclass(frozen=True)
class Command:
    """A command line: `vgpu`, `vgpu trust`, `vgpu trust add`."""

    words: tuple[str, ...]
    help: str
    description: str
    usage: str
    epilog: str
    options: tuple[Word, ...]
    positionals: tuple[Word, ...]
    children: tuple[Command, ...]

    @property
    def name(self) -> str:
        """The whole command."""
        return " ".join(self.words)

    def walk(self) -> Iterator[Command]:
        """This command and all below it."""
        yield self
        for child in self.children:
            yield from child.walk()


def tree(parser: argparse.ArgumentParser, help_text: str = "") -> Command:
    """The parser's command and those below it."""
    options: list[Word] = []
    positionals: list[Word] = []
    children: list[Command] = []
    for action in parser._actions:  # noqa: SLF001 - argparse offers no other way to its own tree
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            children += _children(action)
        elif action.help != argparse.SUPPRESS:
            (options if action.option_strings else positionals).append(_word(parser, action))
    return Command(
        words=tuple(parser.prog.split()),
        help=help_text,
        description=parser.description or "",
        usage=" ".join(parser.format_usage().removeprefix("usage: ").split()),
        epilog=parser.epilog or "",
        options=tuple(options),
        positionals=tuple(positionals),
        children=tuple(children),
    )


def _children(action: argparse._SubParsersAction[argparse.ArgumentParser]) -> list[Command]:
    helps = {choice.dest: choice.help or "" for choice in action._choices_actions}  # noqa: SLF001
    return [tree(child, helps.get(name, "")) for name, child in action.choices.items()]


def _word(parser: argparse.ArgumentParser, action: argparse.Action) -> Word:
    choices = tuple(map(str, action.choices)) if action.choices is not None else ()
    expanded = parser._get_formatter()._expand_help(action) if action.help else ""  # noqa: SLF001 - fills in %(default)s
    return Word(
        names=tuple(action.option_strings),
        metavar="" if action.nargs == 0 else _metavar(action, choices),
        help=" ".join(expanded.split()),
        choices=choices,
        is_repeated=action.nargs in ("*", "+", argparse.REMAINDER),
    )


def _metavar(action: argparse.Action, choices: tuple[str, ...]) -> str:
    if isinstance(action.metavar, tuple):
        return " ".join(action.metavar)
    if action.metavar:
        return action.metavar
    if choices:
        return "|".join(choices)
    return action.dest.upper() if action.option_strings else action.dest
