"""Brings GPU processes back: restores the checkpointed ones, then unlocks the locked ones, always in that order.

Goes by the state that the driver reports and not by what somebody meant to do before; so the same steps serve a wanted
thaw, the undo of a freeze that failed anywhere, and the start of an agent whose predecessor was killed.
A call whose caller was killed may still take effect, a lock of a stopped process even much later: such a process counts as
running only after the driver has answered another call for it.
Used by freeze.py (undo), leases.py and the `thaw` and `release` verbs.

A crash after any call leaves every process either as it was or one state closer to running; running it again goes on.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from gpu_state.driver import ILLEGAL_STATE, NOT_READY, NOT_SUPPORTED, OUT_OF_MEMORY, ProcessState
from gpu_state.phases import Phases
from vgpu_errors import (
    DeadlineExceeded,
    DriverCallFailed,
    DriverWorkerLost,
    GpuStateLost,
    NotEnoughDeviceMemory,
    VgpuError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from gpu_state.deadline import Deadline
    from gpu_state.processes import ProcessIdentity
    from gpu_state.remote_driver import CheckpointDriver

_RETRY_S = 0.1
_FLUSH_S = 5.0
_PASSING = (ILLEGAL_STATE, NOT_READY)
_FAILED = {"call": "cuCheckpointProcessGetState", "code": 0, "name": "CU_PROCESS_STATE_FAILED"}
_IMPORTED = (
    "The driver accepts the checkpoint of a process that maps device memory imported from another process, "
    "and cannot restore it; from outside nobody can see such memory."
)


class Thaw:
    """One attempt to bring a container's processes back to running."""

    def __init__(
        self,
        driver: CheckpointDriver,
        container: str,
        deadline: Deadline,
        *,
        device_map: Mapping[str, str] | None = None,
        unanswered: Collection[int] | None = None,
    ) -> None:
        self._driver = driver
        self._container = container
        self._deadline = deadline
        self._device_map = device_map or {}
        # Pids whose last driver call nobody has seen the end of; None: this is no undo, every call was answered.
        self._is_patient = unanswered is not None
        self._unanswered = set(unanswered or ())

    def run(self, processes: Sequence[tuple[ProcessIdentity, str]], phases: Phases | None = None) -> None:
        """Restore all, then unlock all those that could be restored; then raise what failed first."""
        phases = phases or Phases()
        with phases("restore", f"{len(processes)} processes"):
            failures = self.restore_all(processes)
        lost = {pid for pid, _ in failures}
        with phases("unlock"):
            failures += self.unlock_all([process for process in processes if process[0].pid not in lost])
        raise_first(failures)

    def restore_all(self, processes: Sequence[tuple[ProcessIdentity, str]]) -> list[tuple[int, Exception]]:
        """Bring device memory back, all processes at a time."""
        return for_each(processes, lambda process: self._settle(*process, acts_on=(ProcessState.CHECKPOINTED,)))

    def unlock_all(self, processes: Sequence[tuple[ProcessIdentity, str]]) -> list[tuple[int, Exception]]:
        """Let CUDA calls go on. After the restore of all, because processes may wait for each other."""
        both = (ProcessState.LOCKED, ProcessState.CHECKPOINTED)  # a checkpoint in flight may have ended only now
        return for_each(processes, lambda process: self._settle(*process, acts_on=both))

    def _settle(self, identity: ProcessIdentity, comm: str, acts_on: tuple[ProcessState, ...]) -> None:
        while identity.is_alive():
            try:
                if self._is_settled(identity, comm, acts_on):
                    return
            except (DriverCallFailed, DriverWorkerLost) as problem:
                if not identity.is_alive():
                    return
                if not self._is_worth_a_retry(problem):
                    raise self._explained(identity, comm, problem) from problem
                time.sleep(_RETRY_S)

    def _is_settled(self, identity: ProcessIdentity, comm: str, acts_on: tuple[ProcessState, ...]) -> bool:
        pid = identity.pid
        state = self._driver.get_state(pid, self._deadline)
        if state is ProcessState.FAILED:
            raise self._lost(identity, comm, _FAILED, "The driver itself has given it up.")
        if state in acts_on and state is ProcessState.CHECKPOINTED:
            self._driver.restore(pid, self._device_map, self._deadline)
        elif state in acts_on:
            self._driver.unlock(pid, self._deadline)
        elif state is ProcessState.RUNNING and pid in self._unanswered:
            self._flush(pid)
        else:
            return True
        return False

    def _flush(self, pid: int) -> None:
        """Ask for another lock: whatever the driver answers, it has done with what was asked before."""
        soon = self._deadline.within(_FLUSH_S)
        try:
            self._driver.lock(pid, soon)
        except DeadlineExceeded as late:
            if not isinstance(late.__cause__, DriverCallFailed):
                self._deadline.check(str(late.fields["phase"]))
                return
        self._unanswered.discard(pid)

    def _is_worth_a_retry(self, problem: VgpuError) -> bool:
        if not self._is_patient or self._deadline.remaining() <= _RETRY_S:
            return False
        return isinstance(problem, DriverWorkerLost) or problem.fields["code"] in _PASSING

    def _explained(self, identity: ProcessIdentity, comm: str, problem: VgpuError) -> VgpuError:
        if not isinstance(problem, DriverCallFailed):
            return problem
        code = problem.fields["code"]
        if code == OUT_OF_MEMORY:
            return self._too_little_memory(identity.pid)
        if code == NOT_SUPPORTED and problem.fields["call"] == "cuCheckpointProcessRestore":
            return self._lost(identity, comm, problem.fields, _IMPORTED)
        return problem

    def _lost(self, identity: ProcessIdentity, comm: str, call: Mapping[str, object], what: str) -> VgpuError:
        named = {key: call[key] for key in ("call", "code", "name")}
        return GpuStateLost(pid=identity.pid, comm=comm, container=self._container, what=what, **named)

    def _too_little_memory(self, pid: int) -> VgpuError:
        devices = self._driver.node(self._deadline).devices
        free = ", ".join("unknown" if device.free_bytes is None else str(device.free_bytes) for device in devices)
        return NotEnoughDeviceMemory(
            device=", ".join(device.uuid for device in devices), free_bytes=free, pid=pid, needed_bytes="more"
        )


def for_each(
    processes: Sequence[tuple[ProcessIdentity, str]], work: Callable[[tuple[ProcessIdentity, str]], None]
) -> list[tuple[int, Exception]]:
    """Run `work` on all processes at a time; the failures in the order of the processes, with their pids."""
    if not processes:
        return []

    def attempt(process: tuple[ProcessIdentity, str]) -> tuple[int, Exception] | None:
        try:
            work(process)
        except Exception as problem:  # noqa: BLE001 - every process gets its turn; all failures are returned
            return process[0].pid, problem
        return None

    with ThreadPoolExecutor(len(processes)) as threads:
        return [failure for failure in threads.map(attempt, processes) if failure is not None]


def raise_first(failures: Sequence[tuple[int, Exception]]) -> None:
    """Raise the first failure, with the others as notes."""
    if not failures:
        return
    (_, first), *others = failures
    for _, other in others:
        first.add_note(f"also: {other}")
    raise first
