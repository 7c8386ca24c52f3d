"""Suspends containers and resumes them: the processes stay, frozen, and their GPU memory goes to a store and comes back.

Order of a suspend, and what a crash of the agent after each step leaves:
1. freeze   a frozen container, which the next agent thaws
2. drain    the same; the content is in the store as well, and so is that of its whole group (group_meeting.py)
3. journal  `suspended`: from here on the next agent leaves the container as it is, until `resume`
4. let go   the same, and the device memory is free
What fails before 3 brings the container back. Used by service.py, which has the container to itself meanwhile.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gpu_state.deadline import Deadline
from gpu_state.group_company import NOBODY, Company
from gpu_state.staged_lease import StagedPart
from gpu_state.way_back import ABANDON_S
from vgpu_errors import AgentRefused

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gpu_state.freeze import Frozen
    from gpu_state.lease_table import LeaseTable
    from gpu_state.leases import Journal, Lease
    from gpu_state.phases import Phases
    from gpu_state.staged_freeze import StagedFreeze
    from gpu_state.staged_service import StagedService
    from gpu_state.way_back import WayBack

log = logging.getLogger("vgpu-agent")


class Suspension:
    """The containers of this node that are suspended."""

    def __init__(self, journal: Journal, staged: StagedService, table: LeaseTable, way_back: WayBack) -> None:
        self._journal = journal
        self._staged = staged
        self._table = table
        self._way_back = way_back

    def suspend(
        self,
        container: str,
        target: str | None,
        freeze: Callable[[StagedFreeze], Frozen],
        deadline: Deadline,
        phases: Phases,
        company: Company = NOBODY,
    ) -> tuple[StagedFreeze, Frozen, str | None]:
        """Freeze, and keep it so with the content in memory or in the folder `target`; also says where it lies."""
        staged = self._staged.suspend_to(container, target, company)
        try:
            frozen = freeze(staged)
        except Exception:
            self._staged.forget_store(container, StagedPart((), staged.store, is_suspend=True))
            raise
        try:
            with company.telling():
                staged.drain(deadline, phases)
                company.stored(deadline, phases)
            lease = self._put_away(frozen.lease, staged, deadline, phases)
        except Exception:
            self._staged.keep(container, staged)
            self._back(frozen.lease)
            raise
        self._table.put(lease, None)
        return staged, frozen, lease.staged.store if lease.staged else None

    def resume(
        self, container: str, device_map: Mapping[str, str], deadline: Deadline, phases: Phases
    ) -> tuple[Lease, dict[str, Any] | None]:
        """Give the memory back and let the container run; what the fill moved."""
        lease = self._journal.of(container)
        if lease is None or lease.staged is None or not lease.is_suspended:
            raise AgentRefused(verb="resume", what=f"container {container} is not suspended")
        lease = replace(lease, device_map=device_map or lease.device_map)
        # What fails leaves the container suspended: the journal entry goes last.
        fill = self._staged.begin_resume(lease, deadline)
        try:
            self._way_back.thaw(lease, deadline, phases)
        finally:
            self._staged.end_prefill(container)
        self._table.take(lease)
        return lease, None if fill is None else {"bytes": fill.bytes, "seconds": fill.seconds}

    def sweep(self) -> None:
        """Forget suspended containers whose processes have all ended, with their content."""
        self._staged.sweep()
        for lease in self._table.suspended():
            if not any(process.is_alive() for process, _ in lease.processes):
                log.info("suspended container %s is gone", lease.container)
                with self._table.alone(lease.container, "sweep", wait_s=ABANDON_S):
                    self._table.take(lease)
                    self._journal.remove(lease.container)
                    if lease.staged is not None:
                        self._staged.forget_store(lease.container, lease.staged)

    def _put_away(self, lease: Lease, staged: StagedFreeze, deadline: Deadline, phases: Phases) -> Lease:
        """Everything is in the store: the device memory goes. The journal says `suspended` only from here on."""
        part = lease.staged or StagedPart((), staged.store)
        lease = replace(lease, staged=replace(part, is_complete=True, is_suspend=True, is_suspended=True))
        self._journal.write(lease)
        with phases("let memory go"):
            staged.let_memory_go(deadline)
        self._staged.keep_warm(lease.container, staged)
        return lease

    def _back(self, lease: Lease) -> None:
        try:
            self._way_back.thaw(lease, Deadline(ABANDON_S), None)
            self._staged.end(lease.container, keeps_store=False)
        except Exception:
            self._way_back.go_on_undoing(lease.container)
            raise
