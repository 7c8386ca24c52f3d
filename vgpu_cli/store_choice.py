"""Finds the store that a command works on: `--store DIR`, or what runtime.conf says. Used by store, gc, pack and unpack."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from vgpu_errors import NeedsRoot, NoSuchImage, UserError

if TYPE_CHECKING:
    import argparse

    from image_format.store import Store

CONFIG_NAME = "runtime.conf"
_SPAN = re.compile(r"([0-9]{1,6})([smhdw])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def add_store_option(parser: argparse.ArgumentParser) -> None:
    """`--store DIR`."""
    parser.add_argument("--store", metavar="DIR", help="the store (default: store_dir of runtime.conf)")


def store_root(args: argparse.Namespace) -> Path:
    """Where the store is."""
    from oci_hook.settings import read_settings  # noqa: PLC0415 - a path on the command line needs no settings

    if args.store:
        return Path(args.store).absolute()
    return Path(read_settings(str(Path(args.etc) / CONFIG_NAME)).store_dir)


def open_store(args: argparse.Namespace, what: str, *, create: bool = False) -> Store:
    """The store of this command."""
    from image_format.store import Store  # noqa: PLC0415 - blake3 takes 20 ms

    root = store_root(args)
    if os.geteuid() != 0 and not os.access(root, os.R_OK):
        raise NeedsRoot(what=what)
    try:
        return Store.open(root, create=create)
    except NoSuchImage as error:
        if not root.is_dir():
            error.remedy = "'store = on' in runtime.conf begins one with the next checkpoint; --store names another."
        raise


def seconds_of(text: str) -> float:
    """`90m`, `12h`, `30d`, `4w`."""
    span = _SPAN.fullmatch(text)
    if not span:
        raise UserError(what=f"{text!a} is no span of time", remedy="Give one as 90m, 12h, 30d or 4w.")
    return float(int(span[1]) * _SECONDS[span[2]])
