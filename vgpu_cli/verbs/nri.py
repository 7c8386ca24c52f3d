"""`vgpu nri`: serves containerd or CRI-O as an NRI plugin that puts the preload library into GPU containers.

Runs until it is ended; the work is done by containerd_integration/nri. Guide: docs/nri.md. Also the program that a
runtime starts by itself: it then gets the connection in NRI_PLUGIN_SOCKET.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from vgpu_errors import NeedsRoot

if TYPE_CHECKING:
    import argparse

    from vgpu_cli.output import Output

HELP = "serve as an NRI plugin that injects into GPU containers"
DESCRIPTION = (
    "Adds the preload library, its environment and annotations to GPU containers that containerd or CRI-O creates, with "
    "the rules of vgpu-runtime, where the cluster keeps its runtime handler. Comes back when the runtime restarts."
)
EXAMPLES = (
    ("vgpu nri", "serve the runtime of this node until the end"),
    ("vgpu nri --socket /run/nri.sock --index 50", "another socket, and a place among other plugins"),
)
NO_JSON = "it serves until it is ended and reports nothing"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where the runtime is."""
    parser.add_argument("--socket", metavar="PATH", default="/var/run/nri/nri.sock", help="default: %(default)s")
    parser.add_argument(
        "--index", metavar="NN", default="90", help="place among the plugins, two digits (default: %(default)s)"
    )
    parser.add_argument(
        "--containerd",
        metavar="SOCKET",
        default="/run/containerd/containerd.sock",
        help="where a container's image layers are asked for (default: %(default)s)",
    )
    parser.add_argument("--snapshotter", metavar="NAME", default="overlayfs", help="default: %(default)s")


def run(args: argparse.Namespace, out: Output) -> int:
    """Serve; every line goes to the service's journal."""
    from containerd_integration.nri.plugin import Plugin, keep_serving, tree_from_containerd  # noqa: PLC0415
    from oci_hook.settings import read_settings  # noqa: PLC0415

    if os.geteuid() != 0:
        raise NeedsRoot(what="vgpu nri")
    del out
    settings = read_settings(f"{args.etc}/runtime.conf", is_strict=True)
    tree_of = tree_from_containerd(args.containerd, args.snapshotter)
    plugin = Plugin(settings, _say, tree_of, index=os.environ.get("NRI_PLUGIN_IDX", args.index))
    keep_serving(plugin, args.socket, _say)
    return 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
