"""`vgpu resume CONTAINER`: gives a suspended container its GPU memory back and lets it go on.

The memory is proved on the GPU against the ids taken at the suspend before a process sees it. Where it cannot be done, too
little free GPU memory for example, the container stays suspended and the command can be run again.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from gpu_state.client import DEFAULT_SOCKET, AgentClient
from oci_hook.settings import CONFIG_PATH, read_settings
from vgpu_cli.known import find_container
from vgpu_errors import NeedsRoot

if TYPE_CHECKING:
    import argparse

    from vgpu_cli.output import Output

HELP = "give a suspended container its GPU memory back"
DESCRIPTION = (
    "Gives a suspended container its GPU memory back, proves it on the GPU against the ids taken at the suspend, and lets "
    "the container go on. Where it cannot be done, the container stays suspended and the command can be run again."
)
EXAMPLES = (("vgpu resume train", "let it go on"),)
ANSWER_S = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("container", metavar="CONTAINER", help="name or id of a suspended container")
    parser.add_argument(
        "--socket", metavar="PATH", default=DEFAULT_SOCKET, help="the agent's socket (default: %(default)s)"
    )


def run(args: argparse.Namespace, out: Output) -> int:
    """Resume it."""
    if os.geteuid() != 0:
        raise NeedsRoot(what="'vgpu resume'")
    container = find_container(args.container)
    deadline_s = read_settings(CONFIG_PATH).deadline_checkpoint_s
    with AgentClient.connect(args.socket) as agent:
        wanted = {"container": container.id, "deadline_s": deadline_s}
        done = agent.request("resume", wanted, deadline_s=deadline_s + ANSWER_S)
    out.json({"container": container.id, **done})
    seconds = sum(float(phase["seconds"]) for phase in done["phases"])
    out.line(f"resumed {container.id[:12]} in {seconds:.2f} s")
    return 0
