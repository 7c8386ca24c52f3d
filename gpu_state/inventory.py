"""Lists the GPU processes of a container: the cgroup's processes joined with what the driver says of each.

Never leaves out a process that holds a device: where the driver does not know its state, that is GpuProcessUnreadable.
(Leaving such processes out is how other tools write checkpoints without the GPU's memory and report success.)
A process that only maps libcuda and has no device has not initialised CUDA, unless the driver says that it is
checkpointed. Changes nothing. Used by freeze.py, thaw.py and the `inventory` verb.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gpu_state.driver import ProcessState
from gpu_state.processes import (
    GpuProcess,
    ProcessHoldings,
    ProcessIdentity,
    device_minors,
    gpu_holdings,
    why_it_cannot_run,
)
from vgpu_errors import DriverCallFailed, GpuProcessUnreadable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gpu_state.deadline import Deadline
    from gpu_state.remote_driver import CheckpointDriver, DriverNode

    # container -> (host pid -> the device uuids that its preload registered)
    Registered = Callable[[str], Mapping[int, tuple[str, ...]]]

_LOOK_S = 0.02


@dataclass(frozen=True, slots=True)
class FoundProcess:
    """A GPU process, and the identity that tells it from a later one with the same pid."""

    identity: ProcessIdentity
    shown: GpuProcess

    @property
    def pid(self) -> int:
        """The pid as this host sees it."""
        return self.identity.pid

    def to_json(self) -> dict[str, object]:
        """The form of `processes` in every result."""
        return self.shown.to_json()


class Inventory:
    """Finds GPU processes."""

    def __init__(
        self,
        driver: CheckpointDriver,
        registered: Registered = lambda _container: {},
        holdings: Callable[[str], list[ProcessHoldings]] = gpu_holdings,
    ) -> None:
        self._driver = driver
        self._registered = registered
        self.holdings = holdings

    def find(
        self, container: str, cgroup: str, deadline: Deadline, *, waits_until_runnable: bool = False
    ) -> list[FoundProcess]:
        """Every GPU process of the container; raises for one that the driver cannot read.

        After a restore CRIU may not have let go of every process yet: then `waits_until_runnable`.
        """
        held = self.holdings(cgroup)
        while waits_until_runnable and any(why_it_cannot_run(holdings.pid) for holdings in held):
            deadline.check("waiting for the restored processes to run")
            time.sleep(_LOOK_S)
            held = self.holdings(cgroup)
        if not held:
            return []
        node, registered = self._driver.node(deadline), self._registered(container)
        found = []
        for holdings in held:
            state = self._state_of(container, holdings, deadline)
            if state is not None:
                found.append(FoundProcess(holdings.identity, _shown(holdings, state, node, registered)))
        return found

    def _state_of(self, container: str, held: ProcessHoldings, deadline: Deadline) -> ProcessState | None:
        # Measured on driver 580: the state of a stopped process is not told until it runs again.
        if (reason := why_it_cannot_run(held.pid)) is not None:
            raise _unreadable(container, held, reason)
        try:
            state = self._driver.get_state(held.pid, deadline)
        except DriverCallFailed as problem:
            if not held.device_files or not held.identity.is_alive():
                return None
            raise _unreadable(container, held, problem.message) from problem
        return None if state is ProcessState.RUNNING and not held.device_files else state


def with_state(found: list[FoundProcess], state: ProcessState) -> list[FoundProcess]:
    """The same processes, shown in another state."""
    return [replace(process, shown=replace(process.shown, state=state.value)) for process in found]


def with_modes(found: list[FoundProcess], modes: Mapping[int, str]) -> list[FoundProcess]:
    """The same processes, each with the mode in which it was frozen."""
    return [
        replace(process, shown=replace(process.shown, mode=modes.get(process.pid, process.shown.mode)))
        for process in found
    ]


def _unreadable(container: str, held: ProcessHoldings, what: str) -> GpuProcessUnreadable:
    path = held.device_files[0] if held.device_files else "the driver library"
    return GpuProcessUnreadable(pid=held.pid, comm=held.comm, container=container, path=path, what=what)


def _shown(
    held: ProcessHoldings, state: ProcessState, node: DriverNode, registered: Mapping[int, tuple[str, ...]]
) -> GpuProcess:
    return GpuProcess(
        pid=held.pid,
        ns_pid=held.ns_pid,
        comm=held.comm,
        state=state.value,
        devices=_devices(held, node) or registered.get(held.pid, ()),
        gpu_bytes=node.process_bytes.get(held.pid),
        registered=held.pid in registered,
    )


def _devices(held: ProcessHoldings, node: DriverNode) -> tuple[str, ...]:
    minors = device_minors(held.device_files)
    return tuple(node.minors[minor] for minor in minors if minor in node.minors)
