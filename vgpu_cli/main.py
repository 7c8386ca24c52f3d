"""Entry point of `vgpu`: finds the verb, runs it, turns an error into a message and an exit code.

A verb is a module in `vgpu_cli/verbs` with `HELP`, `add_arguments(parser)` and `run(args, out) -> exit code`.
Only the chosen verb is imported; the help texts of the others are read from their source.
Errors are printed here and nowhere else: two lines on stderr, or one JSON document on stdout with `--json`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from vgpu_cli.output import Output
from vgpu_errors import NodeError, ToolMissing, UserError, VgpuError

if TYPE_CHECKING:
    from collections.abc import Sequence

INTERRUPTED = 130
BROKEN_PIPE = 141
HELP_WIDTH = 100
VERBS_FOLDER = Path(__file__).parent / "verbs"


class Parser(argparse.ArgumentParser):
    """Raises for a wrong command line, so that every error leaves through one door."""

    def __init__(self, **settings: Any) -> None:
        settings.setdefault("formatter_class", _help_format)
        super().__init__(**settings)

    def error(self, message: str) -> NoReturn:
        """Called by argparse itself."""
        raise UserError(what=f"{self.prog}: {message}", remedy=f"'{self.prog} --help' lists what it takes.")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    is_json = "--json" in arguments
    try:
        return _run(arguments)
    except VgpuError as error:
        return _report(error, is_json)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader went away; a second write at interpreter exit must not complain either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except Exception as error:
        if os.environ.get("VGPU_TRACEBACK"):
            raise
        return _report(_told(error), is_json)


def _told(error: Exception) -> VgpuError:
    """What the user is told about an error that none of ours foresaw; a bug still gets a message and a remedy."""
    if isinstance(error, ModuleNotFoundError):
        lacks = f"the installation for Python {sys.version_info.major}.{sys.version_info.minor} is not complete"
        return ToolMissing(tool=f"the Python package {error.name}", what=lacks)
    if isinstance(error, OSError):
        return NodeError(what=f"{error.filename or 'system call'}: {error.strerror or error}")
    return VgpuError(what=f"unexpected {type(error).__name__}: {error}")


def verbs() -> tuple[str, ...]:
    """Every verb there is a module for."""
    return tuple(sorted(path.stem for path in VERBS_FOLDER.glob("*.py") if not path.stem.startswith("_")))


def help_of(verb: str) -> str:
    """The module's `HELP`, read without running the module."""
    import ast  # noqa: PLC0415 - only the help pages need it

    tree = ast.parse((VERBS_FOLDER / f"{verb}.py").read_text(encoding="utf-8"))
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and any(getattr(name, "id", "") == "HELP" for name in statement.targets):
            return str(ast.literal_eval(statement.value))
    return ""


def build_parser(verb: str | None) -> Parser:
    """The parser with the arguments of one verb; without a verb, with the list of all."""
    parser = Parser(
        prog="vgpu",
        description="Checkpoint, sign, ship and restore GPU containers with the engine's own commands.",
        epilog="'vgpu VERB --help' explains one verb.",
    )
    _add_common(parser, is_top=True)
    sub = parser.add_subparsers(dest="verb", metavar="VERB", required=True, parser_class=Parser)
    if verb is not None:
        module = importlib.import_module(f"vgpu_cli.verbs.{verb}")
        verb_parser = sub.add_parser(verb, help=module.HELP, description=module.HELP)
        _add_common(verb_parser, is_top=False)
        module.add_arguments(verb_parser)
        verb_parser.set_defaults(run=module.run)
        return parser
    for name in verbs():
        sub.add_parser(name, help=help_of(name))
    return parser


def chosen_verb(arguments: Sequence[str]) -> str | None:
    """The verb on the command line, if it names one that exists."""
    words = iter(arguments)
    for word in words:
        if word == "--etc":
            next(words, None)
        elif not word.startswith("-"):
            return word if word in verbs() else None
    return None


def _run(arguments: list[str]) -> int:
    parser = build_parser(chosen_verb(arguments))
    args = parser.parse_args(arguments)
    out = Output(args.json)
    code = args.run(args, out)
    sys.stdout.flush()
    return int(code)


def _add_common(parser: argparse.ArgumentParser, *, is_top: bool) -> None:
    """Both places take the options; the verb's copy must not overwrite what stood before the verb."""
    no_default = argparse.SUPPRESS
    parser.add_argument(
        "--json", action="store_true", default=False if is_top else no_default, help="print one JSON document"
    )
    parser.add_argument(
        "--etc", metavar="DIR", default="/etc/vgpu" if is_top else no_default, help="settings (default: /etc/vgpu)"
    )


def _report(error: VgpuError, is_json: bool) -> int:
    if is_json:
        print(json.dumps({"error": error.to_json()}, ensure_ascii=False), flush=True)
    else:
        notes = [f"  note: {note}" for note in getattr(error, "__notes__", [])]
        lines = [f"vgpu: error: {error.message}", *notes, f"  what to do: {error.remedy}"]
        print("\n".join(lines), file=sys.stderr, flush=True)
    return error.exit_code


def _help_format(prog: str) -> argparse.HelpFormatter:
    # A fixed width makes the help blocks in the documentation reproducible.
    return argparse.HelpFormatter(prog, width=HELP_WIDTH)


if __name__ == "__main__":
    sys.exit(main())
