"""Brings frozen containers back to running, for a client or without one: the only code that thaws under a lease.

Without a client means: its connection ended, the agent must go, an undo failed half-way, or an earlier agent was killed and
left a journal entry. Each has its deadline; what cannot be thawed keeps its entry for the next attempt.
Used by service.py and suspension.py; the steps are in thaw.py and staged_thaw.py.
"""

from __future__ import annotations

import logging
import os
import select
import threading
from typing import TYPE_CHECKING

from gpu_state.deadline import Deadline
from gpu_state.processes import thaw_cgroup
from gpu_state.thaw import Thaw
from vgpu_errors import DeviceContentLost, GpuStateLost

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpu_state.freeze import Tools
    from gpu_state.lease_table import LeaseTable
    from gpu_state.leases import Lease
    from gpu_state.phases import Phases
    from gpu_state.staged_service import StagedService

# A 140 GiB device takes the driver about 90 s out and 30 s in at the rates measured, and a thaw may have to wait for the one
# before it does the other.
ABANDON_S = 180.0
_LOOK_S = 1.0
_RETRY_S = 2.0
log = logging.getLogger("vgpu-agent")


class WayBack:
    """Thaws, now or as soon as it can be done."""

    def __init__(self, tools: Tools, staged: StagedService, table: LeaseTable) -> None:
        self._tools = tools
        self._staged = staged
        self._table = table

    def thaw(self, lease: Lease, deadline: Deadline, phases: Phases | None, *, is_patient: bool = False) -> None:
        """The one way back: cgroup first, so that the processes can work at their own restore; journal last."""
        if lease.unfreeze_cgroup is not None and is_patient:
            thaw_cgroup(lease.unfreeze_cgroup)
        thaw = Thaw(
            self._tools.driver,
            lease.container,
            deadline,
            device_map=lease.device_map,
            unanswered=[process.pid for process, _ in lease.processes] if is_patient else None,
        )
        failures: list[Exception] = []
        try:
            thaw.run(lease.processes, phases)
        except Exception as problem:  # noqa: BLE001 - the other processes get their memory all the same; raised below
            failures.append(problem)
        finally:
            self._tools.sockets.resume(lease.container)
        if lease.staged is not None and lease.staged.processes:
            try:
                self._staged.bring_back(lease, deadline, phases)
            except Exception as problem:  # noqa: BLE001 - as above
                failures.append(problem)
        if failures:
            for other in failures[1:]:
                failures[0].add_note(f"also: {other}")
            raise failures[0]
        # After a failure the entry stays: the next start of the agent tries again with whatever is still alive.
        self._tools.journal.remove(lease.container)
        if lease.staged is not None:
            self._staged.forget_store(lease.container, lease.staged)

    # ---- without a client --------------------------------------------------------------------------------

    def abandon(self, lease: Lease, *, is_final: bool = True) -> None:
        """Thaw without a client. Where it is not the final attempt, the lease stays in force after a failure."""
        with self._table.alone(lease.container, "thaw", wait_s=ABANDON_S):
            if not self._table.is_known(lease):
                return
            try:
                self.thaw(lease, Deadline(ABANDON_S), None, is_patient=True)
            except Exception as problem:
                log.exception("container %s could not be thawed", lease.container)
                if not is_final and not isinstance(problem, (GpuStateLost, DeviceContentLost)):
                    return
            self._table.take(lease)
            self._staged.end(lease.container, keeps_store=False)

    def abandon_all(self) -> None:
        """Thaw everything; the agent must go."""
        for lease in self._table.frozen():
            self.abandon(lease)

    def go_on_undoing(self, container: str) -> None:
        """An undo that failed has left its journal entry: go on with it when the client has its answer."""
        for lease in self._tools.journal.entries():
            if lease.container == container:
                self._table.put(lease, None)
                threading.Thread(target=self._keep_trying, args=(lease,), daemon=True).start()

    def take_over(self) -> list[Lease]:
        """The leases that an agent left that was killed, in force again: a client may ask for its own at once."""
        leases = list(self._tools.journal.entries())
        for lease in leases:
            self._table.put(lease, None)
        return leases

    def recover(self, leases: Iterable[Lease]) -> None:
        """Do what is to be done about leases that were taken over: thaw, or wait for an owner that is still there."""
        for lease in leases:
            if lease.is_suspended:
                self._staged.settle(lease.container)
                continue
            if lease.owner.is_alive():
                threading.Thread(target=self._await_owner, args=(lease,), daemon=True).start()
            else:
                log.warning("container %s was left frozen by an agent that was killed: thawing", lease.container)
                self.abandon(lease)

    def _keep_trying(self, lease: Lease) -> None:
        while self._table.is_orphan(lease):
            threading.Event().wait(_RETRY_S)
            self.abandon(lease, is_final=False)

    def _await_owner(self, lease: Lease) -> None:
        try:
            fd = os.pidfd_open(lease.owner.pid)
        except OSError:
            self.abandon(lease)
            return
        try:
            waiting = select.poll()
            waiting.register(fd, select.POLLIN)
            while self._table.is_orphan(lease):
                if waiting.poll(_LOOK_S * 1000) or not lease.owner.is_alive():
                    self.abandon(lease)
                    return
        finally:
            os.close(fd)
