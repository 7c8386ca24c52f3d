"""`vgpu suspend CONTAINER...`: takes running containers' GPU memory away, to host memory or to a folder, until `vgpu resume`.

The processes stay where they are and block at their next GPU call; the GPUs are free for others. Writes no image: what is
suspended ends with the container or the node. Refuses what the agent refuses, with all containers running as before: several
are suspended at one cut (gpu_state/group_meeting.py).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_state.client import DEFAULT_SOCKET
from oci_hook.settings import CONFIG_PATH, read_settings
from vgpu_cli.together import add_containers, ask_all, chosen, group_of, refuse_parts_of_groups, say_all
from vgpu_errors import NeedsRoot

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from vgpu_cli.output import Output

HELP = "take a container's GPU memory away until 'vgpu resume'"
DESCRIPTION = (
    "Takes the GPU memory of a running container away, to host memory or to a folder. The processes stay where they are "
    "and block at their next GPU call; the GPUs are free for others. Writes no checkpoint: what is suspended ends with the "
    "container or the node. Several containers are suspended at one cut, all or none."
)
EXAMPLES = (
    ("vgpu suspend train", "suspend to host memory"),
    ("vgpu suspend train --to /var/tmp/train", "suspend to a folder"),
    ("vgpu suspend rank0 rank1", "suspend two containers that work together"),
    ("vgpu suspend --group train", "suspend all containers with the annotation vgpu.snapshot/group=train"),
)
ANSWER_S = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_containers(parser, "running GPU containers")
    parser.add_argument("--alone", action="store_true", help="leave other containers of its group running")
    parser.add_argument("--to", metavar="DIR", help="put the memory into this folder (default: host memory)")
    parser.add_argument(
        "--socket", metavar="PATH", default=DEFAULT_SOCKET, help="the agent's socket (default: %(default)s)"
    )


def run(args: argparse.Namespace, out: Output) -> int:
    """Suspend it."""
    if os.geteuid() != 0:
        raise NeedsRoot(what="'vgpu suspend'")
    containers = chosen(args)
    if not args.alone:
        refuse_parts_of_groups(containers)
    deadline_s = read_settings(CONFIG_PATH).deadline_checkpoint_s
    common = {"deadline_s": deadline_s, **group_of(args, containers)}
    if args.to:
        common["to"] = str(Path(args.to).absolute())
    wanted = {one.id: {"container": one.id, "cgroup": one.cgroup, **common} for one in containers}
    # Once until all have come, once to get ready, once for the stop.
    answers = ask_all(args.socket, "suspend", wanted, deadline_s=3 * deadline_s + ANSWER_S)
    say_all(out, answers, _describe)
    return 0


def _describe(out: Output, container: str, done: Mapping[str, Any]) -> None:
    for pid, reason in done["driver_reasons"].items():
        out.line(f"process {pid} went the driver's way, its GPU memory is in its host memory: {reason}")
    size = (done["staged"] or {}).get("bytes", 0)
    out.line(f"suspended {container[:12]}: {size / (1 << 30):.2f} GiB in {total_s(done):.2f} s")


def total_s(done: Mapping[str, Any]) -> float:
    """Seconds of all phases together."""
    return sum(float(phase["seconds"]) for phase in done["phases"])
