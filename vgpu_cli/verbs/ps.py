"""`vgpu ps`: the GPU containers of this node with their processes, devices, GPU memory, mode and last checkpoint.

Shows what the state files, the agent and, where its API socket is there, podman say; starts no engine, changes nothing.
Where the agent does not answer, processes are listed from /proc and what only the driver knows stays open.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from gpu_state.client import DEFAULT_SOCKET, AgentClient
from gpu_state.known_containers import KnownContainer, known_containers
from gpu_state.processes import GpuProcess, gpu_holdings
from vgpu_cli.container_names import container_names
from vgpu_errors import AgentUnreachable, NeedsRoot, VgpuError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from vgpu_cli.output import Output

HELP = "list the GPU containers of this node"
DESCRIPTION = (
    "Lists the containers with a GPU that went through vgpu-runtime: their processes, GPUs, GPU memory, the mode in which "
    "that is moved, and when they were last checkpointed. Where the agent does not answer, the processes are listed "
    "without what only the driver knows."
)
EXAMPLES = (("vgpu ps", "list them"), ("vgpu --json ps", "the same for programs"))

COLUMNS = ["container", "name", "engine", "processes", "devices", "gpu memory", "mode", "group", "last checkpoint"]
_AGENT_S = 30.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--socket", metavar="PATH", default=DEFAULT_SOCKET, help="the agent's socket (default: %(default)s)"
    )
    parser.add_argument("--no-start", action="store_true", help="do not start the agent where it does not run")


def run(args: argparse.Namespace, out: Output) -> int:
    """List them."""
    if os.geteuid() != 0:
        raise NeedsRoot(what="'vgpu ps'")
    known = known_containers()
    names = container_names() if known else {}
    processes, problem = _processes(args, known)
    listed = [_entry(container, names.get(container.id), *processes[container.id]) for container in known]
    out.json({"containers": listed, "problem": problem})
    if not known:
        out.line("No GPU containers run on this node.")
        return 0
    out.table("", COLUMNS, [_row(entry) for entry in listed])
    if problem is not None:
        out.line(f"States and GPU memory are unknown: {problem}")
    return 0


def _processes(
    args: argparse.Namespace, known: Sequence[KnownContainer]
) -> tuple[dict[str, tuple[list[dict[str, Any]], bool]], str | None]:
    if not known:
        return {}, None
    try:
        with AgentClient.connect(args.socket, start_on_demand=not args.no_start) as agent:
            answers = {container.id: _asked(agent, container) for container in known}
    except AgentUnreachable as error:
        return {container.id: (_from_proc(container), False) for container in known}, error.message
    problems = [problem for *_, problem in answers.values() if problem]
    return {name: (found, held) for name, (found, held, _) in answers.items()}, "; ".join(problems) or None


def _asked(agent: AgentClient, container: KnownContainer) -> tuple[list[dict[str, Any]], bool, str | None]:
    wanted = {"container": container.id, "cgroup": container.cgroup}
    try:
        answer = agent.request("inventory", wanted, deadline_s=_AGENT_S)
        return answer["processes"], answer.get("suspended") is True, None
    except AgentUnreachable:
        raise
    except VgpuError as error:
        return _from_proc(container), False, error.message


def _from_proc(container: KnownContainer) -> list[dict[str, Any]]:
    try:
        held = gpu_holdings(container.cgroup)
    except VgpuError:
        return []
    return [GpuProcess(p.pid, p.ns_pid, p.comm, "unknown").to_json() for p in held if p.device_files]


def _entry(
    container: KnownContainer, name: str | None, processes: list[dict[str, Any]], is_suspended: bool
) -> dict[str, Any]:
    known_bytes = [process["gpu_bytes"] for process in processes if process["gpu_bytes"] is not None]
    return {
        "id": container.id,
        "name": name,
        "engine": container.engine,
        "pid": container.pid,
        "processes": processes,
        "devices": sorted({uuid for process in processes for uuid in process["devices"]}),
        "gpu_bytes": sum(known_bytes) if known_bytes else None,
        "mode": "+".join(sorted({process["mode"] for process in processes})) or None,
        "suspended": is_suspended,
        "group": container.group,
        "last_checkpoint": container.last_checkpoint,
    }


def _row(entry: dict[str, Any]) -> list[str]:
    suspended = "suspended" if entry["suspended"] else None
    running = [f"{p['comm']} ({p['pid']}, {suspended or p['state']})" for p in entry["processes"]]
    size_bytes = entry["gpu_bytes"]
    return [
        entry["id"][:12],
        entry["name"] or "",
        entry["engine"],
        ", ".join(running) or "none",
        ", ".join(entry["devices"]),
        "" if size_bytes is None else f"{size_bytes / (1 << 30):.2f} GiB",
        entry["mode"] or "",
        entry["group"] or "",
        checkpoint_text(entry["last_checkpoint"], time.time()),
    ]


def checkpoint_text(checkpoint: dict[str, Any] | None, now: float) -> str:
    """How long ago, and where."""
    if not checkpoint or not isinstance(checkpoint.get("time"), int | float):
        return "never"
    age_s = max(int(now - checkpoint["time"]), 0)
    for unit, seconds in (("d", 86400), ("h", 3600), ("min", 60)):
        if age_s >= seconds:
            return f"{age_s // seconds} {unit} ago"
    return f"{age_s} s ago"
