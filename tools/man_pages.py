"""Writes the man pages: vgpu.1 and vgpu-agent.8 from the programs' own command lines, the others from docs/.

Refuses nothing and writes only into the folder it is given. Equal sources give equal bytes. Called by
`packaging/install.py`, and by hand:
    python -m tools.man_pages FOLDER
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tools.man_text import escaped, example, heading, inline, markdown, paragraph, quoted, tagged
from vgpu_cli import VERSION
from vgpu_cli.command_tree import tree
from vgpu_cli.main import BROKEN_PIPE, INTERRUPTED, full_parser
from vgpu_errors import all_errors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vgpu_cli.command_tree import Command, Word

REPOSITORY = Path(__file__).parents[1]
DOCS = REPOSITORY / "docs"
SOURCE = f"vgpu-snapshot {VERSION}"
FILES = """\
- `/etc/vgpu/runtime.conf`: settings, see *runtime.conf*(5)
- `/etc/vgpu/policy.json`: which checkpoints this node accepts
- `/etc/vgpu/node.key`, `/etc/vgpu/node.pub`: the node's key pair
- `/etc/vgpu/trusted/`: the keys of others that this node trusts
"""


@dataclass(frozen=True)
class ManPage:
    """A page and where it belongs."""

    name: str
    section: int
    text: str

    @property
    def file_name(self) -> str:
        """vgpu.1"""
        return f"{self.name}.{self.section}"


def pages() -> list[ManPage]:
    """All of them."""
    return [
        ManPage("vgpu", 1, _text(_vgpu_page())),
        ManPage("vgpu-runtime", 8, _text(_docs_page("vgpu-runtime"))),
        ManPage("vgpu-agent", 8, _text(_docs_page("vgpu-agent", _agent_command()))),
        ManPage("vgpu-hook", 8, _text(_docs_page("vgpu-hook"))),
        ManPage("runtime.conf", 5, _text(_settings_page())),
    ]


def write(folder: Path) -> list[Path]:
    """Write the pages as man1/vgpu.1 and so on, and return their paths below the folder."""
    written = []
    for page in pages():
        path = Path(f"man{page.section}") / page.file_name
        (folder / path.parent).mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(page.text, encoding="utf-8")
        written.append(path)
    return written


# ---- vgpu.1 --------------------------------------------------------------------------------------


def _vgpu_page() -> Iterator[str]:
    root = tree(full_parser())
    yield heading("vgpu", 1, "generated from the command line's own help", SOURCE, "User Commands")
    yield from _name("vgpu", "checkpoint, sign, ship and restore GPU containers")
    yield from (".SH SYNOPSIS", escaped(root.usage), ".SH DESCRIPTION", *paragraph(root.description))
    yield from paragraph("Checkpoint and restore themselves are the engine's own commands; see *vgpu-runtime*(8).")
    yield ".SH OPTIONS"
    yield from _options(root.options)
    yield ".SH COMMANDS"
    for command in root.children:
        yield from _command(command, root)
    yield from _exit_status()
    yield from (".SH ENVIRONMENT", *tagged("VGPU_TRACEBACK", "Shows the traceback of an unexpected error."))
    yield from (".SH FILES", *markdown(FILES), ".SH SEE ALSO")
    yield inline(
        "*runtime.conf*(5), *vgpu-runtime*(8), *vgpu-agent*(8), *vgpu-hook*(8), *podman-container-checkpoint*(1)"
    )


def _command(command: Command, root: Command) -> Iterator[str]:
    yield from (f".SS {quoted(command.name)}", escaped(command.usage), ".PP", *paragraph(_joined(command.description)))
    common = {name for word in root.options for name in word.names}
    for word in command.positionals:
        yield from tagged(escaped(word.metavar), word.help)
    yield from _options([word for word in command.options if not common & set(word.names)])
    for action in command.children:
        yield from (".PP", f"\\fB{escaped(action.name)}\\fP:", *paragraph(_joined(action.description)))
        for word in (*action.positionals, *action.options):
            if not common & set(word.names):
                yield from _option(word)
    if command.epilog:
        yield from example(command.epilog)


def _options(words: tuple[Word, ...] | list[Word]) -> Iterator[str]:
    for word in words:
        yield from _option(word)


def _option(word: Word) -> list[str]:
    value = f" {word.metavar}" if word.names and word.metavar else word.metavar
    return tagged(escaped(", ".join(word.names) + value), word.help or "See above.")


def _exit_status() -> Iterator[str]:
    yield from (".SH EXIT STATUS", *tagged("0", "Done."))
    for cls in sorted(all_errors(), key=lambda cls: cls.exit_code):
        message = " ".join((cls.__doc__ or "").split())
        yield from tagged(str(cls.exit_code), f"{cls.__name__}: {message}\n{cls.remedy}")
    yield from tagged(str(INTERRUPTED), "Interrupted.")
    yield from tagged(str(BROKEN_PIPE), "The reader of the output went away.")
    yield from (".PP", *paragraph("With `--json` an error is one document on standard output, with its code in it."))


# ---- the others ----------------------------------------------------------------------------------


def _agent_command() -> Command:
    from gpu_state import agent  # noqa: PLC0415 - only this page needs it

    return tree(agent._parser())  # noqa: SLF001 - the page is made of the program's own parser


def _docs_page(name: str, command: Command | None = None) -> Iterator[str]:
    """docs/man/NAME.8.md; the options of a program with an argparse parser are put below `## Options`."""
    text = (DOCS / "man" / f"{name}.8.md").read_text(encoding="utf-8")
    title = text.splitlines()[0].removeprefix(f"# {name} - ")
    yield heading(name, 8, f"generated from docs/man/{name}.8.md", SOURCE, "System Administration")
    yield from _name(name, title)
    if command is not None:
        yield from (".SH SYNOPSIS", escaped(command.usage))
    for line in markdown(text):
        yield line
        if command is not None and line == '.SH "OPTIONS"':
            yield from _options(command.options)


def _settings_page() -> Iterator[str]:
    """The section `runtime.conf` of docs/operations.md."""
    text = (DOCS / "operations.md").read_text(encoding="utf-8")
    section = text.split("\n## runtime.conf\n")[1].split("\n## ")[0]
    yield heading("runtime.conf", 5, "generated from docs/operations.md", SOURCE, "File Formats")
    yield from _name("runtime.conf", "settings of vgpu-runtime, vgpu-hook and vgpu-agent")
    yield from (".SH DESCRIPTION", *markdown(section), ".SH FILES", *markdown("- `/etc/vgpu/runtime.conf`"))
    yield from (".SH SEE ALSO", inline("*vgpu*(1), *vgpu-runtime*(8), *vgpu-agent*(8), *vgpu-hook*(8)"))


def _name(name: str, what: str) -> tuple[str, str]:
    return ".SH NAME", f"{escaped(name)} \\- {escaped(what)}"


def _joined(text: str) -> str:
    """A paragraph that a help page has broken at its width."""
    return " ".join(text.split())


def _text(lines: Iterator[str]) -> str:
    """The page; a heading begins a paragraph by itself, and mandoc complains of a second."""
    kept: list[str] = []
    for line in lines:
        if not (line == ".PP" and kept and kept[-1].startswith((".SH", ".SS"))):
            kept.append(line)
    return "\n".join(kept) + "\n"


def main(argv: list[str]) -> int:
    """Write the pages into a folder."""
    os.environ["NO_COLOR"] = "1"  # argparse of Python 3.14 colours its help on a terminal
    for path in write(Path(argv[0])):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
