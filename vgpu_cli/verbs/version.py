"""`vgpu version`: what is installed on this node, from files alone.

Starts nothing and asks no driver; `vgpu doctor` does. Called by people and by bug reports.
"""

from __future__ import annotations

import platform
from pathlib import Path
from typing import TYPE_CHECKING

from vgpu_cli import VERSION

if TYPE_CHECKING:
    import argparse

    from vgpu_cli.output import Output

HELP = "show the version and the preload builds that are installed"
DESCRIPTION = (
    "Shows the version of vgpu-snapshot, of the Python that runs it, and the builds of the preload library that new "
    "containers get. Looks at files only; 'vgpu doctor' asks the driver and the agent."
)
EXAMPLES = (("vgpu version", "show what is installed"),)

PRELOAD_FOLDER = Path("/usr/lib/vgpu-snapshot/preload")
LIBC_NAMES = ("glibc", "musl")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`version` takes no argument of its own."""


def run(args: argparse.Namespace, out: Output) -> int:  # noqa: ARG001
    """Print the versions."""
    builds = {name: _current_build(name) for name in LIBC_NAMES}
    out.json({"version": VERSION, "python": platform.python_version(), "preload": builds})
    out.line(f"vgpu-snapshot {VERSION} (Python {platform.python_version()})")
    for name, build in builds.items():
        out.line(f"preload for {name}: {build or 'not installed'}")
    return 0


def _current_build(libc: str) -> str | None:
    try:
        return (PRELOAD_FOLDER / libc / "current").read_text(encoding="ascii").strip() or None
    except OSError:
        return None
