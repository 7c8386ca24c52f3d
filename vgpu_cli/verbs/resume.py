"""`vgpu resume CONTAINER...`: gives suspended containers their GPU memory back and lets them go on.

The memory is proved on the GPU against the ids taken at the suspend before a process sees it. Where it cannot be done, too
little free GPU memory for example, the container stays suspended and the command can be run again. Several containers come back
beside each other, each when it can: they were suspended at one cut, so those that are first wait for the others on the GPU.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from gpu_state.client import DEFAULT_SOCKET, AgentClient
from oci_hook.settings import CONFIG_PATH, read_settings
from vgpu_cli.together import add_containers, ask_all, chosen, say_all
from vgpu_errors import NeedsRoot

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence
    from typing import Any

    from gpu_state.known_containers import KnownContainer
    from vgpu_cli.output import Output

HELP = "give a suspended container its GPU memory back"
DESCRIPTION = (
    "Gives a suspended container its GPU memory back, proves it on the GPU against the ids taken at the suspend, and lets "
    "the container go on. Where it cannot be done, the container stays suspended and the command can be run again."
)
EXAMPLES = (
    ("vgpu resume train", "let it go on"),
    ("vgpu resume --group train", "let all suspended containers of a group go on"),
)
ANSWER_S = 60.0
LOOK_S = 30.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_containers(parser, "suspended containers")
    parser.add_argument(
        "--socket", metavar="PATH", default=DEFAULT_SOCKET, help="the agent's socket (default: %(default)s)"
    )


def run(args: argparse.Namespace, out: Output) -> int:
    """Resume it."""
    if os.geteuid() != 0:
        raise NeedsRoot(what="'vgpu resume'")
    containers = chosen(args)
    if args.group:  # a resume that failed for some of it can be run again
        containers = _suspended(args.socket, containers) or containers
    deadline_s = read_settings(CONFIG_PATH).deadline_checkpoint_s
    wanted = {one.id: {"container": one.id, "deadline_s": deadline_s} for one in containers}
    answers = ask_all(args.socket, "resume", wanted, deadline_s=deadline_s + ANSWER_S)
    say_all(out, answers, _describe)
    return 0


def _suspended(socket: str, containers: Sequence[KnownContainer]) -> list[KnownContainer]:
    with AgentClient.connect(socket) as agent:
        return [
            one
            for one in containers
            if agent.request("inventory", {"container": one.id, "cgroup": one.cgroup}, deadline_s=LOOK_S)["suspended"]
        ]


def _describe(out: Output, container: str, done: Mapping[str, Any]) -> None:
    out.line(f"resumed {container[:12]} in {sum(float(phase['seconds']) for phase in done['phases']):.2f} s")
