"""Command line of the test hosts: build a row's root, enter it, pack it for a machine without a network.

`python -m tests.hosts build ROW | enter ROW [--name A] [--project] [--gpu] [-- COMMAND...] | pack ROW OUT.tar.xz |
carry ROW FOLDER`
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from tests.hosts.host import TestHost
from tests.hosts.packing import carry, pack
from tests.hosts.roots import root_for
from tests.hosts.rows import ROWS


def main() -> int:
    options = _parser().parse_args()
    return options.do(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.hosts", description="Test hosts: Debian roots with engines.")
    verbs = parser.add_subparsers(required=True, metavar="build|enter|pack|carry")
    for name, do in (("build", _build), ("enter", _enter), ("pack", _pack), ("carry", _carry)):
        verb = verbs.add_parser(name, help=do.__doc__)
        verb.add_argument("row", choices=sorted(ROWS))
        verb.add_argument("--archive", help="use this packed root instead of building one")
        verb.set_defaults(do=do)
        if name == "enter":
            verb.add_argument("--name", default="node-a", help="host name (default: node-a)")
            verb.add_argument("--project", action="store_true", help="install vgpu-snapshot from the working tree")
            verb.add_argument("--gpu", action="store_true", help="with two software GPUs")
            verb.add_argument("command", nargs="*", help="command to run (default: a shell)")
        if name == "pack":
            verb.add_argument("out", type=Path)
        if name == "carry":
            verb.add_argument("folder", type=Path)
    return parser


def _build(options: argparse.Namespace) -> int:
    """make the row's root, or find it in the cache"""
    print(root_for(options.row, options.archive))
    return 0


def _enter(options: argparse.Namespace) -> int:
    """run a command, or a shell, in a fresh host of the row"""
    with TestHost(options.row, options.name, archive=options.archive) as host:
        if options.project:
            host.install_project()
        if options.gpu:
            host.install_software_gpu()
        process = host.popen(options.command or ["/bin/sh", "-i"], start_new_session=False)
        try:
            return process.wait()
        finally:
            process.kill()


def _pack(options: argparse.Namespace) -> int:
    """write the row's root, without what tests do not need, as a tar.xz"""
    pack(root_for(options.row, options.archive), options.out)
    print(f"{options.out}: {options.out.stat().st_size / 1e6:.1f} MB")
    return 0


def _carry(options: argparse.Namespace) -> int:
    """fill a folder with all that hosts need on a machine without a network; source its env.sh there"""
    carry(options.row, options.folder)
    size = sum(path.stat().st_size for path in options.folder.rglob("*") if path.is_file())
    print(f"{options.folder}: {size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except subprocess.SubprocessError as error:
        sys.exit(f"tests.hosts: {error}")
