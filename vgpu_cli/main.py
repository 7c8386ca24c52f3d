"""Entry point of `vgpu`: finds the verb, runs it, turns an error into a message and an exit code.

A verb is a module in `vgpu_cli/verbs`; putting it there is all that adds one. It has
    HELP          one line, lower case, no full stop: `vgpu --help` lists it
    DESCRIPTION   a paragraph for `vgpu VERB --help` and the man page
    EXAMPLES      pairs of a command and what it does: (("vgpu verify x.tar", "check an archive"),)
    NO_JSON       only where the verb prints no document with `--json`: why
    add_arguments(parser)
    run(args, out) -> exit code
and, unless it has NO_JSON, a schema `spec/<verb>-output.schema.json` of what `out.json(...)` prints.
The four texts are literals: they are read from the source, so that only the chosen verb is imported.
Actions below a verb (`vgpu trust add`) are made with `parsing.add_actions` and `parsing.add_action`.
Errors are printed here and nowhere else: two lines on stderr, or one JSON document on stdout with `--json`
(spec/error-output.schema.json).
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vgpu_cli.output import Output, json_text, printable
from vgpu_cli.parsing import Parser, add_common, examples_text, paragraph
from vgpu_errors import NodeError, ToolMissing, VgpuError

if TYPE_CHECKING:
    from collections.abc import Sequence

INTERRUPTED = 130
BROKEN_PIPE = 141
VERBS_FOLDER = Path(__file__).parent / "verbs"
TEXTS = ("HELP", "DESCRIPTION", "EXAMPLES", "NO_JSON")
DESCRIPTION = "Checkpoint, sign, ship and restore GPU containers with the engine's own commands."


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


def texts_of(verb: str) -> dict[str, Any]:
    """The module's texts, read without running the module."""
    import ast  # noqa: PLC0415 - only the help pages need it

    tree = ast.parse((VERBS_FOLDER / f"{verb}.py").read_text(encoding="utf-8"))
    found: dict[str, Any] = {}
    for statement in tree.body:
        if isinstance(statement, ast.Assign):
            names = {getattr(target, "id", "") for target in statement.targets} & set(TEXTS)
            found |= {name: ast.literal_eval(statement.value) for name in names}
    return found


def help_of(verb: str) -> str:
    """The one line on a verb."""
    return str(texts_of(verb).get("HELP", ""))


def build_parser(verb: str | None) -> Parser:
    """The parser with the arguments of one verb; without a verb, with the list of all."""
    parser, sub = _top_parser()
    if verb is not None:
        _add_verb(sub, verb)
        return parser
    for name in verbs():
        sub.add_parser(name, help=help_of(name))
    return parser


def full_parser() -> Parser:
    """The parser with the arguments of every verb, for shell completion and man pages."""
    parser, sub = _top_parser()
    for name in verbs():
        _add_verb(sub, name)
    return parser


def _top_parser() -> tuple[Parser, Any]:
    parser = Parser(prog="vgpu", description=DESCRIPTION, epilog="'vgpu VERB --help' explains one verb.")
    add_common(parser, is_top=True)
    return parser, parser.add_subparsers(dest="verb", metavar="VERB", required=True, parser_class=Parser)


def _add_verb(sub: Any, verb: str) -> None:
    module = importlib.import_module(f"vgpu_cli.verbs.{verb}")
    description = paragraph(getattr(module, "DESCRIPTION", module.HELP))
    if reason := getattr(module, "NO_JSON", ""):
        description += "\n\n" + paragraph(f"With --json it prints no document: {reason}")
    epilog = examples_text(getattr(module, "EXAMPLES", ()))
    parser = sub.add_parser(verb, help=module.HELP, description=description, epilog=epilog)
    add_common(parser)
    module.add_arguments(parser)
    parser.set_defaults(run=module.run)


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


def _report(error: VgpuError, is_json: bool) -> int:
    if is_json:
        print(json_text({"error": error.to_json()}), flush=True)
    else:
        notes = [f"  note: {note}" for note in getattr(error, "__notes__", [])]
        lines = [f"vgpu: error: {error.message}", *notes, f"  what to do: {error.remedy}"]
        print("\n".join(map(printable, lines)), file=sys.stderr, flush=True)
    return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
