"""`vgpu completion SHELL`: prints the script that completes `vgpu` on bash, zsh or fish.

Changes nothing: where the script goes is the user's matter; `make install` puts it where each shell looks.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from vgpu_cli.completion import SHELLS, script

if TYPE_CHECKING:
    import argparse

    from vgpu_cli.output import Output

HELP = "print the script that completes vgpu in a shell"
DESCRIPTION = (
    "Prints a completion script for one shell. It knows the verbs and options of this version and starts no program. "
    "'make install' puts the three scripts where bash, zsh and fish look for them."
)
EXAMPLES = (
    ("source <(vgpu completion bash)", "complete in this bash"),
    ("vgpu completion fish > ~/.config/fish/completions/vgpu.fish", "complete in every fish of this user"),
)
NO_JSON = "what it prints is a program for a shell"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The shell."""
    parser.add_argument("shell", choices=SHELLS, help="for which shell")


def run(args: argparse.Namespace, out: Output) -> int:  # noqa: ARG001 - the script is neither a table nor a document
    """Print the script."""
    from vgpu_cli.command_tree import tree  # noqa: PLC0415 - 'main' imports the verbs, not the verbs 'main'
    from vgpu_cli.main import full_parser  # noqa: PLC0415

    sys.stdout.write(script(args.shell, tree(full_parser())))
    return 0
