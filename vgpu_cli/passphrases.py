"""Where a passphrase comes from: a file, an environment variable, or the terminal. Used by `vgpu keys`, `sign` and `pull`.

Refuses a passphrase on the command line, where every user of the node could read it, and a file that others can read.
Never prints one, and never keeps one longer than the call.
"""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from vgpu_errors import BadConfiguration, UserError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

MAX_BYTES = 1023


def add_options(parser: argparse.ArgumentParser) -> None:
    """The two ways for programs; people are asked on their terminal."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--passphrase-file", metavar="FILE", help="read the key's passphrase from this file")
    group.add_argument("--passphrase-env", metavar="NAME", help="take it from this environment variable")


def asker(args: argparse.Namespace, key: str) -> Callable[[], bytes]:
    """Asks for the passphrase of an existing key, once it turns out to need one."""
    return lambda: given(args) or _typed(f"Passphrase of {key}: ")


def given(args: argparse.Namespace) -> bytes | None:
    """The passphrase that the options name; None where they name none."""
    if args.passphrase_file is not None:
        return _from_file(Path(args.passphrase_file))
    if args.passphrase_env is not None:
        secret = os.environb.get(os.fsencode(args.passphrase_env))
        if not secret:
            remedy = "Set and export it, or use --passphrase-file."
            raise UserError(what=f"the environment variable {args.passphrase_env} is empty or not set", remedy=remedy)
        return secret
    return None


def typed_twice(key: str) -> bytes:
    """A new passphrase from the terminal."""
    first = _typed(f"New passphrase for {key}: ")
    if _typed("The same again: ") != first:
        raise UserError(what="the two passphrases differ", remedy="Run the command again.")
    return first


def _typed(prompt: str) -> bytes:
    if not sys.stdin.isatty():
        remedy = "Use --passphrase-file or --passphrase-env."
        raise UserError(what="a passphrase is needed, and there is no terminal to ask on", remedy=remedy)
    import getpass  # noqa: PLC0415 - only a terminal needs it

    return getpass.getpass(prompt).encode()


def _from_file(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(MAX_BYTES + 2)
    except OSError as error:
        remedy = "Name a file that holds the passphrase."
        raise BadConfiguration(path=path, what=f"cannot be read ({error.strerror})", remedy=remedy) from error
    if stat.S_ISREG(mode) and mode & (stat.S_IRWXG | stat.S_IRWXO):
        what = f"has mode {stat.S_IMODE(mode):04o}; a file with a passphrase must be 0600"
        raise BadConfiguration(path=path, what=what, remedy=f"Run 'chmod 600 {path}'.")
    secret = data.removesuffix(b"\n").removesuffix(b"\r")
    if not secret:
        raise BadConfiguration(
            path=path, what="holds no passphrase", remedy="Write it into the first line of the file."
        )
    return secret
