"""Freezes a container's GPU processes: all or none (spec/agent-protocol.md, `freeze`).

Reads the order of steps from top to bottom in `Freeze.run`. Does not touch the cgroup, CRIU or the image.
Called by the `freeze` verb alone.

What a crash of the agent leaves behind after each step, and who cleans up:
1. find: nothing. In staged mode the memory is copied beside the running application here (staged_freeze.py, `begin`).
2. journal: an entry without locked processes. The next agent finds them running and removes the entry.
   staged stop: gates of staged processes are closed, their memory is held by agent and keeper. The next agent maps and opens.
3. detach: the container's control socket is gone. The next agent makes it anew.
4. lock: some processes block in their next CUDA call. The next agent unlocks them by the journal.
5. checkpoint: some processes have their device memory in host memory. The next agent restores, then unlocks them.
6. verify, staged settle: as 5. Where several containers are frozen together, each waits here for all (group_meeting.py).
The driver worker dies with the agent; a driver call that it had begun is finished or dropped by the driver, and the next
agent waits for it (thaw.py, unanswered).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from gpu_state.deadline import Deadline
from gpu_state.driver import ProcessState
from gpu_state.group_company import NOBODY, Company
from gpu_state.inventory import FoundProcess, Inventory, with_modes, with_state
from gpu_state.leases import Journal, Lease, new_lease_id
from gpu_state.thaw import Thaw, for_each, raise_first
from gpu_state.undo import Undo
from vgpu_errors import (
    Cancelled,
    DeadlineExceeded,
    DriverCallFailed,
    DriverWorkerLost,
    GpuProcessUnreadable,
    NodeError,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpu_state.phases import Phases
    from gpu_state.processes import ProcessIdentity
    from gpu_state.remote_driver import CheckpointDriver
    from gpu_state.staged_freeze import StagedFreeze

# Time for the undo while the client waits for the answer, beside the freeze's own deadline. What is not undone by then stays
# in the journal, and service.py goes on with it.
UNDO_S = 30.0


class ControlSockets(Protocol):
    """The preloads' connections, which CRIU must not find."""

    def pause(self, container: str, deadline: Deadline) -> None:
        """Close the container's socket and wait until every preload has let go."""
        ...

    def resume(self, container: str) -> None:
        """Listen again."""
        ...


@dataclass(frozen=True, slots=True)
class FreezeOrder:
    """What is to be frozen, and for whom."""

    container: str
    cgroup: str
    owner: ProcessIdentity
    unfreeze_cgroup: str | None = None


@dataclass(frozen=True, slots=True)
class Tools:
    """What a freeze works with."""

    driver: CheckpointDriver
    inventory: Inventory
    sockets: ControlSockets
    journal: Journal


@dataclass(frozen=True, slots=True)
class Frozen:
    """A freeze that holds."""

    lease: Lease
    processes: list[FoundProcess]


class Freeze:
    """One attempt to freeze a container."""

    def __init__(
        self,
        order: FreezeOrder,
        tools: Tools,
        *,
        staged: StagedFreeze | None = None,
        company: Company = NOBODY,
        undo_s: float = UNDO_S,
    ) -> None:
        self._order = order
        self._staged = staged
        self._company = company
        self._driver = tools.driver
        self._inventory = tools.inventory
        self._sockets = tools.sockets
        self._journal = tools.journal
        self._undo_s = undo_s
        self._unanswered: set[int] = set()

    def run(self, deadline: Deadline, phases: Phases, copy_deadline: Deadline | None = None) -> Frozen:
        """Do all steps, or undo those that were done and raise. `copy_deadline` is for what runs beside the application."""
        order = self._order
        with phases("find"):
            found = self._running(deadline)
        with Undo() as undo, self._company.telling():
            if self._staged is not None:
                undo.push(self._staged.discard)
                self._staged.begin(found, order.cgroup, copy_deadline or deadline, phases)
                if (
                    self._company.copied(copy_deadline or deadline, phases) or not self._staged.is_empty
                ):  # that took its time
                    deadline = deadline.again()
                    found = self._running(deadline)
            lease = self._lease(found)
            self._journal.write(lease)
            undo.push(self._forget, undo, lease)
            if self._staged is not None:
                lease = self._staged.stop(found, lease, undo, deadline, phases)
                # Bringing all to rest takes time, in which one may come to its end; it holds nothing any more.
                found = [process for process in found if process.identity.is_alive()]
                lease = replace(lease, processes=tuple((process.identity, process.shown.comm) for process in found))
            with phases("detach"):
                undo.push(self._sockets.resume, order.container)
                self._sockets.pause(order.container, deadline)
            # Pushed before the first lock: what a killed worker has done is known by the processes' states alone.
            undo.push(self._bring_back, lease)
            with phases("lock", f"{len(found)} processes"):
                raise_first(for_each(lease.processes, lambda p: self._ask(self._driver.lock, p[0].pid, deadline)))
            with phases("checkpoint", f"{len(found)} processes"):
                raise_first(for_each(lease.processes, lambda p: self._ask(self._driver.checkpoint, p[0].pid, deadline)))
            with phases("verify"):
                self._verify(found, deadline)
            if self._staged is not None:
                self._staged.settle(phases)
            self._company.frozen(deadline, phases)
            undo.keep()
        modes = self._staged.modes() if self._staged is not None else {}
        return Frozen(lease, with_modes(with_state(found, ProcessState.CHECKPOINTED), modes))

    def _running(self, deadline: Deadline) -> list[FoundProcess]:
        order = self._order
        found = self._inventory.find(order.container, order.cgroup, deadline)
        for process in found:
            if process.shown.state != ProcessState.RUNNING:
                raise GpuProcessUnreadable(
                    pid=process.pid, comm=process.shown.comm, container=order.container, path="GPU state",
                    what=f"it is {process.shown.state}, so somebody else is at work on it",
                )  # fmt: skip
        return found

    def _lease(self, found: list[FoundProcess]) -> Lease:
        order = self._order
        return Lease(
            id=new_lease_id(),
            container=order.container,
            cgroup=order.cgroup,
            owner=order.owner,
            processes=tuple((process.identity, process.shown.comm) for process in found),
            unfreeze_cgroup=order.unfreeze_cgroup,
        )

    def _ask(self, call: Callable[[int, Deadline], None], pid: int, deadline: Deadline) -> None:
        try:
            call(pid, deadline)
        except (Cancelled, DeadlineExceeded, DriverWorkerLost) as problem:
            if not isinstance(problem.__cause__, DriverCallFailed):  # the driver's own time-out is an answer
                self._unanswered.add(pid)
            raise

    def _verify(self, found: list[FoundProcess], deadline: Deadline) -> None:
        deadline.check("verify")
        order = self._order
        for held in self._inventory.holdings(order.cgroup):
            if held.device_files:
                raise GpuProcessUnreadable(
                    pid=held.pid, comm=held.comm, container=order.container, path=held.device_files[0],
                    what="it still holds that file after the checkpoint of all GPU processes",
                )  # fmt: skip
        for process in found:
            state = self._driver.get_state(process.pid, deadline)
            if state is not ProcessState.CHECKPOINTED:
                raise NodeError(what=f"process {process.pid} ({process.shown.comm}) is {state} after its checkpoint")

    def _bring_back(self, lease: Lease) -> None:
        # A deadline of its own: the request's is over when this is needed most.
        thaw = Thaw(self._driver, lease.container, Deadline(self._undo_s), unanswered=self._unanswered)
        thaw.run(lease.processes)

    def _forget(self, undo: Undo, lease: Lease) -> None:
        # An undo that failed keeps its journal entry: service.py, or the next start of the agent, tries again.
        if not undo.failures:
            self._journal.remove(lease.container)
