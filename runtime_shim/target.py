"""Finds the container that a checkpoint call means, and whether it has a GPU side at all.

Answers None for a container without GPU processes and without our preload: that one is left alone.
Called by checkpoint.py.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from gpu_state.processes import gpu_holdings, pids_of
from runtime_shim import state_file
from vgpu_errors import NoSuchContainer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from runtime_shim.arguments import Arguments
    from runtime_shim.low_level import LowLevel

RUNTIME_CALL_S = 30.0


class Target:
    """A running container: its init process, cgroup, bundle, and what the shim noted about it at creation."""

    def __init__(self, container_id: str, pid: int, cgroup: str, bundle: str, state: Mapping[str, Any]) -> None:
        self.id = container_id
        self.pid = pid
        self.cgroup = cgroup
        self.bundle = bundle
        self.state = state

    def config(self) -> dict[str, Any]:
        """Its config.json as the engine wrote it."""
        with open(f"{self.bundle}/config.json", "rb") as file:  # noqa: PTH123
            config: dict[str, Any] = json.load(file)
        return config

    def resident_bytes(self) -> int:
        """Resident memory of all its processes: about what CRIU will write."""
        return sum(map(resident_bytes, pids_of(self.cgroup)))


def find_target(call: Arguments, low_level: LowLevel) -> Target | None:
    """The container of this call where it has a GPU side, else None."""
    container_id = call.container_id
    if container_id is None:
        return None  # the low-level runtime says what is missing
    state = state_file.read(container_id)
    found = low_level.call(call.global_words, "state", container_id, deadline_s=RUNTIME_CALL_S)
    try:
        answer = json.loads(found.stdout)
        # crun 1.21 names "/" for a container with a user namespace; what the engine said at the creation is right.
        pid, bundle = int(answer["pid"]), str((state or answer)["bundle"])
    except (ValueError, KeyError, TypeError) as problem:
        raise NoSuchContainer(container=container_id) from problem
    cgroup = state_file.cgroup_of(pid)
    if state is None and not any(held.device_files for held in gpu_holdings(cgroup)):
        return None
    return Target(container_id, pid, cgroup, bundle, state or {})


def resident_bytes(pid: int) -> int:
    """Resident memory of one process, 0 once it has gone."""
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as statm:  # noqa: PTH123 - one read, no path object
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0
