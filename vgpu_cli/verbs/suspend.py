"""`vgpu suspend CONTAINER`: takes a running container's GPU memory away, to host memory or to a folder, until `vgpu resume`.

The processes stay where they are and block at their next GPU call; the GPUs are free for others. Writes no image: what is
suspended ends with the container or the node. Refuses what the agent refuses, with the container running as before.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_state.client import DEFAULT_SOCKET, AgentClient
from oci_hook.settings import CONFIG_PATH, read_settings
from vgpu_cli.known import find_container
from vgpu_errors import NeedsRoot

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from vgpu_cli.output import Output

HELP = "take a container's GPU memory away until 'vgpu resume'"
DESCRIPTION = (
    "Takes the GPU memory of a running container away, to host memory or to a folder. The processes stay where they are "
    "and block at their next GPU call; the GPUs are free for others. Writes no checkpoint: what is suspended ends with the "
    "container or the node."
)
EXAMPLES = (
    ("vgpu suspend train", "suspend to host memory"),
    ("vgpu suspend train --to /var/tmp/train", "suspend to a folder"),
)
ANSWER_S = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("container", metavar="CONTAINER", help="name or id of a running GPU container")
    parser.add_argument("--to", metavar="DIR", help="put the memory into this folder (default: host memory)")
    parser.add_argument(
        "--socket", metavar="PATH", default=DEFAULT_SOCKET, help="the agent's socket (default: %(default)s)"
    )


def run(args: argparse.Namespace, out: Output) -> int:
    """Suspend it."""
    if os.geteuid() != 0:
        raise NeedsRoot(what="'vgpu suspend'")
    container = find_container(args.container)
    deadline_s = read_settings(CONFIG_PATH).deadline_checkpoint_s
    wanted: dict[str, Any] = {"container": container.id, "cgroup": container.cgroup, "deadline_s": deadline_s}
    if args.to:
        wanted["to"] = str(Path(args.to).absolute())
    with AgentClient.connect(args.socket) as agent:
        done = agent.request("suspend", wanted, deadline_s=2 * deadline_s + ANSWER_S)
    out.json({"container": container.id, **done})
    for pid, reason in done["driver_reasons"].items():
        out.line(f"process {pid} went the driver's way, its GPU memory is in its host memory: {reason}")
    size = (done["staged"] or {}).get("bytes", 0)
    out.line(f"suspended {container.id[:12]}: {size / (1 << 30):.2f} GiB in {total_s(done):.2f} s")
    return 0


def total_s(done: Mapping[str, Any]) -> float:
    """Seconds of all phases together."""
    return sum(float(phase["seconds"]) for phase in done["phases"])
