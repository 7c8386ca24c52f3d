"""Gives staged processes their memory back and opens their gates: the one way out of a staged freeze, wanted or not.

Goes by the phase that each preload reports and by what is at hand, not by what somebody meant to do; so the same steps serve
a wanted thaw, the undo of a freeze that failed anywhere, a restore, and an agent whose predecessor was killed.
Runs after the driver has restored and unlocked the process (thaw.py) and the control socket is back.

For each process: wait for its preload; where its memory was given away, hand it back (MAP), imports with the rest; then, with all
memory back, the application's own descriptors, whose placeholders may have come to other processes meanwhile; then OPEN.
A process that has ended keeps nobody waiting, and its objects are still there for those that have imported them.
Memory comes from descriptors in this agent, from the keeper, or is made anew from the store, in this order; where none of
them has it, DeviceContentLost names it and the gate stays closed: the process would read nothing of its own.
A crash after any call leaves the process at rest or running; running it again goes on.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from gpu_state.deadline import Deadline
from gpu_state.driver import ProcessState
from gpu_state.open_descriptors import placeholders_of
from gpu_state.phases import Phases
from gpu_state.preload_link import close_all
from gpu_state.thaw import for_each, raise_first
from vgpu_errors import DeviceContentLost, DriverCallFailed, PreloadFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from gpu_state.fd_keeper import Keeper
    from gpu_state.import_marks import ImportMarks
    from gpu_state.processes import ProcessIdentity
    from gpu_state.remote_driver import CheckpointDriver
    from gpu_state.staged_lease import StagedPart, StagedProcess
    from gpu_state.staging_seam import Preloads

    # Names -> descriptors, made anew from the store.
    Rebuild = Callable[[StagedPart, Deadline], Mapping[str, int]]

UNDO_S = 30.0
ATTEMPTS = 3
GIVINGS = 3
_LOOK_S = 0.01
log = logging.getLogger("vgpu-agent")


class Memory:
    """Where the content of a container's objects is at hand: descriptors here, in the keeper, or a store to make it from."""

    def __init__(self, keeper: Keeper, rebuild: Rebuild | None = None) -> None:
        self.fds: dict[str, int] = {}
        self._keeper = keeper
        self._rebuild = rebuild
        self._has_asked_keeper = False

    def add(self, fds: Mapping[str, int]) -> None:
        """Take descriptors over."""
        self.fds |= fds

    def forget(self, names: Iterable[str]) -> None:
        """Close the descriptors of objects that are no more."""
        close_all({name: self.fds.pop(name) for name in names if name in self.fds})

    def clear(self) -> None:
        """Close all descriptors."""
        self.forget(list(self.fds))

    def let_keeper_go(self) -> None:
        """The processes have their memory: nobody needs to keep it for them."""
        self._keeper.drop()

    def have(self, part: StagedPart, names: Iterable[str], deadline: Deadline) -> set[str]:
        """Bring these objects to hand, as far as that can be done; the names that could not be."""
        missing = {name for name in names if name not in self.fds}
        if missing and not self._has_asked_keeper:
            self._has_asked_keeper = True
            kept = self._keeper.take(deadline)
            self.fds |= {name: kept.pop(name) for name in missing & set(kept)}
            close_all(kept)
            missing -= set(self.fds)
        if missing and self._rebuild is not None:
            self.fds |= self._rebuild(part, deadline)
            missing -= set(self.fds)
        return missing


class StagedThaw:
    """One attempt to bring the staged processes of a container back."""

    def __init__(
        self,
        container: str,
        preloads: Preloads,
        driver: CheckpointDriver,
        marks: ImportMarks,
        memory: Memory,
        *,
        deadline: Deadline | None = None,
        phases: Phases | None = None,
    ) -> None:
        self._container = container
        self._preloads = preloads
        self._driver = driver
        self._marks = marks
        self._memory = memory
        self._deadline = deadline or Deadline(UNDO_S)
        self._phases = phases or Phases()

    def run(self, part: StagedPart) -> None:
        """Map all, then open all; then raise what failed first."""
        processes = [process for process in part.processes if process.identity.is_alive()]
        wanted = self._by_identity(processes)
        with self._phases("reconnect", f"{len(processes)} processes"):
            failures = for_each(self._pairs(processes), lambda pair: self._await_ready(wanted[pair[0]]))
        ready = self._without(processes, failures)
        with self._phases("map"):
            self._marks.add(self._container, [process.identity for process in ready if self._needs_memory(process)])
            self._bring_memory(part, ready)
            failures += for_each(self._pairs(ready), lambda pair: self._map(part, wanted[pair[0]]))
            mapped = self._without(processes, failures)
            failures += for_each(self._pairs(mapped), lambda pair: self._give_descriptors(part, wanted[pair[0]]))
        mapped = self._without(processes, failures)
        with self._phases("open"):
            failures += for_each(self._pairs(mapped), lambda pair: self._open(pair[0]))
        raise_first(failures)
        self._memory.let_keeper_go()

    # ---- steps -------------------------------------------------------------------------------------------

    def _await_ready(self, process: StagedProcess) -> None:
        """The driver lets the process work, and its preload is connected."""
        identity = process.identity
        while identity.is_alive():
            if self._is_with_driver(identity.pid):
                raise PreloadFailed(
                    pid=identity.pid, request="MAP", what="the driver has not brought the process itself back yet"
                )
            if identity.pid in self._preloads.links(self._container):
                return
            self._deadline.check(f"waiting for the preload library of process {identity.pid}")
            time.sleep(_LOOK_S)

    def _is_with_driver(self, pid: int) -> bool:
        try:
            return self._driver.get_state(pid, self._deadline) is not ProcessState.RUNNING
        except DriverCallFailed:
            return False  # gone, or no CUDA yet

    def _bring_memory(self, part: StagedPart, processes: Sequence[StagedProcess]) -> None:
        names = {name for process in processes if self._needs_memory(process) for name in process.objects_wanted()}
        if names:
            self._memory.have(part, names, self._deadline)

    def _needs_memory(self, process: StagedProcess) -> bool:
        link = self._preloads.links(self._container).get(process.pid)
        return link is not None and link.phase == "released"

    def _map(self, part: StagedPart, process: StagedProcess) -> None:
        for attempt in range(ATTEMPTS):
            link = self._preloads.links(self._container).get(process.pid)
            if link is None or link.phase != "released":
                if link is None and process.identity.is_alive():
                    self._await_ready(process)
                    continue
                return
            fds = self._fds_of(part, process)
            try:
                link.map(fds, self._deadline)
            except PreloadFailed:
                if not process.identity.is_alive():
                    return
                if attempt == ATTEMPTS - 1:
                    raise
                log.warning("MAP of process %s failed, asking again", process.pid)
                time.sleep(_LOOK_S * 10)

    def _fds_of(self, part: StagedPart, process: StagedProcess) -> dict[int, int]:
        """One open file for each object, to exporter and importers alike: by it the next freeze knows it as one."""
        wanted = process.wanted()
        self._refuse_lost(part, process, wanted.values())
        return {number: self._memory.fds[name] for number, name in wanted.items()}

    def _give_descriptors(self, part: StagedPart, process: StagedProcess) -> None:
        """The same open files under the numbers where placeholders are by now; a thread may still send one to another process."""
        tokens = part.tokens()
        for _ in range(GIVINGS if tokens else 0):
            link = self._preloads.links(self._container).get(process.pid)
            found = placeholders_of([process.pid], tokens)
            if link is None or link.phase == "open" or not found:
                return
            self._refuse_lost(part, process, (tokens[token] for _, token in found))
            link.give([(place, self._memory.fds[tokens[token]]) for place, token in found], self._deadline)

    def _refuse_lost(self, part: StagedPart, process: StagedProcess, names: Iterable[str]) -> None:
        missing = [name for name in dict.fromkeys(names) if name not in self._memory.fds]
        if missing:
            sizes = part.sizes()
            lost = sum(sizes.get(name, 0) for name in missing)
            raise DeviceContentLost(
                pid=process.pid, comm=process.comm, container=self._container,
                what=f"{lost} bytes in {len(missing)} objects, {missing[0]} the first of them, are held by no one any more",
            )  # fmt: skip

    def _open(self, identity: ProcessIdentity) -> None:
        while identity.is_alive():
            link = self._preloads.links(self._container).get(identity.pid)
            if link is not None:
                link.open(self._deadline)
                return
            self._deadline.check(f"opening the gate of process {identity.pid}")
            time.sleep(_LOOK_S)

    # ---- small things --------------------------------------------------------------------------------------

    @staticmethod
    def _pairs(processes: Sequence[StagedProcess]) -> list[tuple[ProcessIdentity, str]]:
        return [(process.identity, process.comm) for process in processes]

    @staticmethod
    def _by_identity(processes: Sequence[StagedProcess]) -> dict[ProcessIdentity, StagedProcess]:
        return {process.identity: process for process in processes}

    @staticmethod
    def _without(processes: Sequence[StagedProcess], failures: Sequence[tuple[int, Exception]]) -> list[StagedProcess]:
        failed = {pid for pid, _ in failures}
        return [process for process in processes if process.pid not in failed]
