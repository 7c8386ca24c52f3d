"""The descriptors of a freeze's objects: each object once, under its owner's name, in the agent and in the staging worker.

Takes what is new and lets go what is no more, as a look (staged_inventory.py) says; the application goes on meanwhile, and at rest
nothing may be missing. Decides no order of steps and closes no gate. Called by staged_freeze.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpu_state.kcmp import same_files
from gpu_state.preload_link import close_all
from gpu_state.preload_peer import LOST
from gpu_state.staged_lease import StagedProcess
from vgpu_errors import PreloadFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from gpu_state.deadline import Deadline
    from gpu_state.inventory import FoundProcess
    from gpu_state.preload_link import PreloadLink
    from gpu_state.processes import ProcessIdentity
    from gpu_state.staged_inventory import Look
    from gpu_state.staged_thaw import Memory
    from gpu_state.staging_seam import Preloads, Staging


class StagedTaking:
    """What one freeze has in hand, by process."""

    def __init__(self, container: str, preloads: Preloads, memory: Memory, open_store: Callable[[], Staging]) -> None:
        self._container = container
        self._preloads = preloads
        self._memory = memory
        self._open_store = open_store
        self.staging: Staging | None = None
        self.known: dict[ProcessIdentity, StagedProcess] = {}

    def worker(self) -> Staging:
        """The staging worker, started at first use."""
        if self.staging is None:
            self.staging = self._open_store()
        return self.staging

    # ---- who ---------------------------------------------------------------------------------------------

    def staged(self, found: Iterable[FoundProcess]) -> list[FoundProcess]:
        """Those of which we hold the memory."""
        return [process for process in found if process.identity in self.known]

    def others(self, found: Iterable[FoundProcess]) -> list[FoundProcess]:
        """GPU processes that are not staged."""
        return [process for process in found if process.identity not in self.known]

    def links(self) -> dict[int, PreloadLink]:
        """Pid -> the preload, of those that have not come to their end."""
        connected = self._preloads.links(self._container)
        ranks = [rank for rank in self.known.values() if rank.pid in connected or not rank.identity.has_ended()]
        return {rank.pid: self.link(rank.identity, rank.comm) for rank in ranks}

    def link(self, identity: ProcessIdentity, comm: str) -> PreloadLink:
        """The preload of a process that must be there."""
        link = self._preloads.links(self._container).get(identity.pid)
        if link is None:
            raise PreloadFailed(pid=identity.pid, request=f"anything of process {identity.pid} ({comm})", what=LOST)
        return link

    # ---- what --------------------------------------------------------------------------------------------

    def take(self, found: Sequence[FoundProcess], look: Look, deadline: Deadline) -> None:
        """Descriptors of objects that are new; those that are no more are let go."""
        processes = {process: staged_process(process, look) for process in found if process.identity in look.held}
        # First, because an object may go on under the name of another process.
        now = {name for staged in processes.values() for name in staged.names()}
        before = [name for process in processes for name in self._names_before(process)]
        self._forget([name for name in before if name not in now], deadline)
        for process, staged in processes.items():
            self._take_of(process, staged, look, deadline)

    def refuse_missing(self, look: Look) -> None:
        """At rest nothing comes and goes: everything that a look told of must be in our hands."""
        for identity, held in look.held.items():
            missing = {one.id for one in held.objects} - {one.id for one in self.known[identity].objects}
            if missing:
                request = f"EXPORT of process {identity.pid}"
                raise PreloadFailed(
                    pid=identity.pid, request=request, what=f"no descriptor came for object {min(missing)}"
                )

    def forget_ended(self, found: Iterable[FoundProcess], deadline: Deadline) -> None:
        """Let go what processes had that are no more."""
        living = {process.identity for process in found if process.identity.is_alive()}
        for identity in self.known.keys() - living:
            self._forget(list(self.known.pop(identity).names()), deadline)

    def _take_of(self, process: FoundProcess, staged: StagedProcess, look: Look, deadline: Deadline) -> None:
        shared = {name: fd for name in staged.names() if (fd := look.take(name)) is not None}
        self._refuse_exchanged(process, shared)
        before = self._names_before(process)
        new = {name: held for name, held in staged.names().items() if name not in before}
        fds = {name: shared.pop(name) for name in new if name in shared}
        close_all(shared)
        try:
            wanted = [held.id for name, held in new.items() if name not in fds]
            exported = self.link(process.identity, process.shown.comm).export(wanted, deadline)
            fds |= {staged.name_of(number): fd for number, fd in exported.items()}
            # An object that the application has freed since the look has no descriptor any more.
            self.worker().add({name: held for name, held in new.items() if name in fds}, fds, deadline)
        except BaseException:
            close_all(fds)
            raise
        self._memory.add(fds)
        there = tuple(held for name, held in staged.names().items() if name in before or name in fds)
        self.known[process.identity] = StagedProcess(staged.identity, staged.comm, staged.ns_pid, there, staged.imports)

    def _names_before(self, process: FoundProcess) -> set[str]:
        known = self.known.get(process.identity)
        return set(known.names()) if known else set()

    def _refuse_exchanged(self, process: FoundProcess, shared: Mapping[str, int]) -> None:
        """What we hold under a name is what its importers will be given: it must be what they share now."""
        known = [name for name in shared if name in self._memory.fds]
        numbers = same_files([fd for name in known for fd in (self._memory.fds[name], shared[name])])
        for name, ours, told in zip(known, numbers[::2], numbers[1::2], strict=True):
            if ours != told:
                close_all(shared)
                what = f"object {name} is other memory than before"
                raise PreloadFailed(pid=process.pid, request=f"SHARES of process {process.pid}", what=what)

    def _forget(self, names: list[str], deadline: Deadline) -> None:
        if names:
            self.worker().forget(names, deadline)
            self._memory.forget(names)


def staged_process(process: FoundProcess, look: Look) -> StagedProcess:
    """What the process has, as a look tells it."""
    held, named = look.held[process.identity], (process.identity, process.shown.comm)
    return StagedProcess(*named, look.ns_pids[process.identity], held.objects, held.imports)
