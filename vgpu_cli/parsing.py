"""The parts of the command line that all verbs share: the parser, the common options, actions below a verb.

Decides nothing about a verb. Raises for a wrong command line instead of printing, so that every error leaves `vgpu`
through one door. `main` builds the parsers with it; verbs with actions (`vgpu trust add`) call `add_actions` and
`add_action`.
"""

from __future__ import annotations

import argparse
import textwrap
from typing import TYPE_CHECKING, Any, NoReturn

from vgpu_errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

HELP_WIDTH = 100
DEFAULT_ETC = "/etc/vgpu"


class Parser(argparse.ArgumentParser):
    """Raises for a wrong command line."""

    def __init__(self, **settings: Any) -> None:
        settings.setdefault("formatter_class", _help_format)
        super().__init__(**settings)

    def error(self, message: str) -> NoReturn:
        """Called by argparse itself."""
        raise UserError(what=f"{self.prog}: {message}", remedy=f"'{self.prog} --help' lists what it takes.")


def add_common(parser: argparse.ArgumentParser, *, is_top: bool = False) -> None:
    """`--json` and `--etc`; each place takes them, and a later one must not overwrite what stood before it."""
    no_default = argparse.SUPPRESS
    parser.add_argument(
        "--json", action="store_true", default=False if is_top else no_default, help="print one JSON document"
    )
    parser.add_argument(
        "--etc", metavar="DIR", default=DEFAULT_ETC if is_top else no_default, help="settings (default: /etc/vgpu)"
    )


def add_actions(parser: argparse.ArgumentParser) -> Any:
    """The place for a verb's actions; `args.action` names the chosen one."""
    return parser.add_subparsers(dest="action", metavar="ACTION", required=True, parser_class=Parser)


def add_action(actions: Any, name: str, help: str, description: str = "") -> argparse.ArgumentParser:  # noqa: A002 - argparse's word
    """One action that takes the common options too."""
    parser: argparse.ArgumentParser = actions.add_parser(name, help=help, description=paragraph(description or help))
    add_common(parser)
    return parser


def paragraph(text: str) -> str:
    """A paragraph as the help pages show it: a sentence, broken at their width."""
    text = " ".join(text.split())
    sentence = text[:1].upper() + text[1:]
    stop = "" if sentence.endswith((".", "!", "?")) else "."
    return textwrap.fill(sentence + stop, HELP_WIDTH - 2)


def examples_text(examples: Sequence[tuple[str, str]]) -> str:
    """The end of a help page: what a command does, and the command below it."""
    lines = [f"  {what}:\n    {command}" for command, what in examples]
    return "\n".join(["examples:", *lines]) if lines else ""


def _help_format(prog: str) -> argparse.HelpFormatter:
    # A fixed width makes the help blocks in the documentation reproducible.
    return argparse.RawDescriptionHelpFormatter(prog, width=HELP_WIDTH)
