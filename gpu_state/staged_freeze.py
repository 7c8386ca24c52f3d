"""The staged side of a freeze: the agent takes the large memory itself, so that the driver only sees control state.

staged_choice.py says which processes are staged, and refuses those that nobody can take; staged_inventory.py what each has.
An object that several processes share is taken once, under its owner's name. Called by freeze.py, in this order:

1. begin      inventory, export, rounds of copying          the application runs; a crash leaves packs without a seal
2. stop:
   keep       the keeper (fd_keeper.py) holds all fds       the same
   journal    objects and store are written down            the next agent opens gates that are open already
   rest       gates closed at one cut, contexts synchronised  the next agent opens the gates
   prove      what is listed, by the driver's own figure    the same
   final      begins to take what changed since             the same
   release    unmapped and given away; addresses reserved   the next agent maps from the keeper's fds, opens
3. settle     `final` has ended; all that is listed was taken  the same
Between 2 and 3 come the driver's lock and checkpoint (freeze.py), the longest part of the stop, and `final` works beside them
on the agent's own mappings: nothing changes behind a closed gate, and objects live on when the application lets go of them.
In a suspend the copies that `final` has begun go on until `drain`. A gate is never left to itself: the undo of `rest` is pushed
before it is asked for, and the journal names every process whose gate may be closed.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from gpu_state.group_rest import GroupRest
from gpu_state.kcmp import same_files
from gpu_state.preload_link import close_all
from gpu_state.staged_choice import StagedChoice
from gpu_state.staged_groups import ask_groups
from gpu_state.staged_inventory import StagedInventory
from gpu_state.staged_lease import StagedPart, StagedProcess
from gpu_state.staged_proof import StagedProof
from gpu_state.staged_thaw import Memory, StagedThaw
from gpu_state.thaw import for_each, raise_first
from vgpu_errors import PreloadFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from concurrent.futures import Future
    from pathlib import Path

    from gpu_state.deadline import Deadline
    from gpu_state.fd_keeper import Keeper
    from gpu_state.import_marks import ImportMarks
    from gpu_state.inventory import FoundProcess
    from gpu_state.inventory_proof import Proof, Tally, Tolerance
    from gpu_state.leases import Journal, Lease
    from gpu_state.phases import Phases
    from gpu_state.preload_link import PreloadLink
    from gpu_state.processes import ProcessIdentity
    from gpu_state.remote_driver import CheckpointDriver
    from gpu_state.staged_inventory import Look
    from gpu_state.staging_seam import Preloads, Round, Staging
    from gpu_state.undo import Undo

MAX_ROUNDS = 10


@dataclass(frozen=True, slots=True)
class StagedTools:
    """What the staged side works with."""

    preloads: Preloads
    marks: ImportMarks
    keeper: Callable[[str], Keeper]
    open_store: Callable[[], Staging]
    wants_preload: Callable[[int], bool]
    tolerance: Tolerance


@dataclass(slots=True)
class StagedFigures:
    """What is told of a staged freeze afterwards."""

    reasons: dict[int, str] = field(default_factory=dict)
    rounds: list[Round] = field(default_factory=list)
    copied_s: float | None = None
    proofs: list[Proof] = field(default_factory=list)
    groups: dict[str, list[dict[str, Any]]] = field(default_factory=dict)


class StagedFreeze:
    """The staged processes of one freeze."""

    def __init__(
        self,
        container: str,
        tools: StagedTools,
        driver: CheckpointDriver,
        journal: Journal,
        *,
        store: str | None,
        is_suspend: bool = False,
        copies_while_running: bool = True,
        set_aside: bool = True,
    ) -> None:
        self._container = container
        self._tools = tools
        self._driver = driver
        self._journal = journal
        self.store = store
        self._is_suspend = is_suspend
        self._copies_while_running = copies_while_running
        self._set_aside = set_aside
        self._staging: Staging | None = None
        self._inventory = StagedInventory(container, tools.preloads)
        self._choice = StagedChoice(
            container, tools.preloads, tools.marks, tools.wants_preload, self._inventory, has_store=store is not None
        )
        self._keeper = tools.keeper(container)
        self._known: dict[ProcessIdentity, StagedProcess] = {}
        self._proof: StagedProof | None = None
        self._final: Future[Mapping[str, Tally]] | None = None
        self.memory = Memory(self._keeper)
        self.figures = StagedFigures()
        self.part: StagedPart | None = None
        self.fragment: Path | None = None

    # ---- while the application runs ----------------------------------------------------------------------

    def begin(self, found: list[FoundProcess], deadline: Deadline, phases: Phases) -> None:
        """Choose, take descriptors of all objects, and copy in rounds."""
        if not self._choice.may_be_staged(found):
            self._choose(found, deadline)
            return
        with phases("inventory"):
            self._choice.await_preloads(found, deadline)
            chosen = self._choose(found, deadline)
        with chosen:
            if not chosen.held:
                return
            with phases("export", f"{len(chosen.held)} processes"):
                self._take(found, chosen, deadline)
        if self._copies_while_running:
            self._rounds(found, deadline, phases)

    def _choose(self, found: list[FoundProcess], deadline: Deadline) -> Look:
        chosen = self._choice.choose(found, deadline)
        self.figures.reasons = dict(self._choice.reasons)
        return chosen

    def _take(self, found: list[FoundProcess], look: Look, deadline: Deadline) -> None:
        """Descriptors of objects that are new, each object once; those that are no more are let go."""
        processes = [process for process in found if process.identity in look.held]
        # First, because an object may go on under the name of another process.
        now = {name for process in processes for name in self._staged(process, look).names()}
        self._forget(
            [name for process in processes for name in self._names_before(process) if name not in now], deadline
        )
        for process in processes:
            self._take_of(process, look, deadline)

    def _take_of(self, process: FoundProcess, look: Look, deadline: Deadline) -> None:
        staged = self._staged(process, look)
        shared = {name: fd for name in staged.names() if (fd := look.take(name)) is not None}
        self._refuse_exchanged(process, shared)
        before = self._names_before(process)
        new = {name: held for name, held in staged.names().items() if name not in before}
        fds = {name: shared.pop(name) for name in new if name in shared}
        close_all(shared)
        try:
            exported = self._link(process.identity, process.shown.comm).export(
                [held.id for name, held in new.items() if name not in fds], deadline
            )
            fds |= {staged.name_of(number): fd for number, fd in exported.items()}
            self._worker().add(new, fds, deadline)
        except BaseException:
            close_all(fds)
            raise
        self.memory.add(fds)
        self._known[process.identity] = staged

    def _staged(self, process: FoundProcess, look: Look) -> StagedProcess:
        held, ns_pid = look.held[process.identity], self._link(process.identity, process.shown.comm).ns_pid
        return StagedProcess(process.identity, process.shown.comm, ns_pid, held.objects, held.imports)

    def _names_before(self, process: FoundProcess) -> set[str]:
        known = self._known.get(process.identity)
        return set(known.names()) if known else set()

    def _refuse_exchanged(self, process: FoundProcess, shared: Mapping[str, int]) -> None:
        """What we hold under a name is what its importers will be given: it must be what they share now."""
        known = [name for name in shared if name in self.memory.fds]
        numbers = same_files([fd for name in known for fd in (self.memory.fds[name], shared[name])])
        for name, ours, told in zip(known, numbers[::2], numbers[1::2], strict=True):
            if ours != told:
                close_all(shared)
                what = f"object {name} is other memory than before"
                raise PreloadFailed(pid=process.pid, request=f"SHARES of process {process.pid}", what=what)

    def _forget(self, names: list[str], deadline: Deadline) -> None:
        if names:
            self._worker().forget(names, deadline)
            self.memory.forget(names)

    def _worker(self) -> Staging:
        if self._staging is None:
            self._staging = self._tools.open_store()
        return self._staging

    def _rounds(self, found: list[FoundProcess], deadline: Deadline, phases: Phases) -> None:
        for number in range(MAX_ROUNDS):
            if not self._worker().wants_another(deadline):
                return
            with phases("copy", f"round {number + 1}"):
                self.figures.rounds.append(self._worker().round(deadline, phases.bytes))
            self._refresh(found, deadline)

    def _refresh(self, found: list[FoundProcess], deadline: Deadline) -> None:
        alive = [process for process in found if process.identity in self._known and process.identity.is_alive()]
        with self._inventory.look(alive, self._others(found), deadline) as look:
            self._take(alive, look, deadline)

    def _others(self, found: list[FoundProcess]) -> list[FoundProcess]:
        """GPU processes that are not staged."""
        return [process for process in found if process.identity not in self._known]

    # ---- the stop ------------------------------------------------------------------------------------------

    def stop(self, found: list[FoundProcess], lease: Lease, undo: Undo, deadline: Deadline, phases: Phases) -> Lease:
        """Bring the staged processes to rest and take their memory; returns the lease that says so."""
        self._forget_ended(found, deadline)
        if self._others(found):  # processes that began to use the GPU meanwhile
            with self._choose(found, deadline) as chosen:
                self._take(found, chosen, deadline)
        known = self._staged_of(found)
        if not known:
            return lease
        undo.push(self._await_final)
        undo.push(self._bring_back)
        # Before the gates close: the keeper costs a process start, and most of what it holds is known by now.
        self._keeper.start([process.pid for process in known])
        self._keeper.put(self.memory.fds, deadline)
        lease = self._note(lease)
        with phases("rest", f"{len(known)} processes"):
            self._group().run(deadline)
            self._forget_ended(known, deadline)  # a rank may have come to its end on the way
            known = self._staged_of(known)
            self._last_look(known, self._others(found), deadline)
            self.figures.groups = ask_groups(list(self._links().values()), deadline)
            lease = self._note(lease)
        self._begin_final(deadline)
        with phases("release"):
            self._each(lambda link: link.release(deadline))
        return lease

    def _begin_final(self, deadline: Deadline) -> None:
        worker = self._worker()
        executor = ThreadPoolExecutor(1, "vgpu-final")
        # Nothing runs again before a suspend's drain, so its copies need not be waited for.
        self._final = executor.submit(worker.final, deadline, set_aside=self._set_aside, settles=not self._is_suspend)
        executor.shutdown(wait=False)

    def _await_final(self) -> None:
        """In the undo: the worker answers one request at a time, and this one is over at the stop's own deadline."""
        if self._final is not None:
            wait([self._final])

    def settle(self, phases: Phases) -> None:
        """Everything has been taken, and it is everything. Before this returns nobody may let the processes go on."""
        if self._final is None:
            return
        with phases("final copy"):
            tallies = self._final.result()
        with phases("prove"):
            if self._proof is not None:
                self.figures.proofs += self._proof.check_taken(tallies)

    def _last_look(self, known: list[FoundProcess], others: list[FoundProcess], deadline: Deadline) -> None:
        """At rest the inventory is final: objects made since the last round are taken as well, and everything is listed."""
        with self._inventory.look(known, others, deadline) as look:
            for process in known:
                self._choice.refuse_grave(process, look.held[process.identity].blockers)
            before = set(self.memory.fds)
            self._take(known, look, deadline)
        self._proof = StagedProof(
            tuple(self._known.values()),
            sum(holdings.driver_bytes for holdings in look.holdings.values()),
            self._used_bytes(deadline),
            self._tools.tolerance,
            is_marked=bool(self._tools.marks.of(self._container) & self._known.keys()),
        )
        self._proof.check_listed()
        new = {name: fd for name, fd in self.memory.fds.items() if name not in before}
        if new:
            self._keeper.put(new, deadline)

    def _used_bytes(self, deadline: Deadline) -> list[int]:
        """NVML's figures for the staged processes, one for each process and device."""
        by_device = self._driver.node(deadline).device_bytes.values()
        pids = [identity.pid for identity in self._known]
        return [used[pid] for used in by_device for pid in pids if used.get(pid)]

    def _note(self, lease: Lease) -> Lease:
        self.part = StagedPart(tuple(self._known.values()), self.store, is_suspend=self._is_suspend)
        lease = replace(lease, staged=self.part)
        self._journal.write(lease)
        return lease

    def _staged_of(self, found: list[FoundProcess]) -> list[FoundProcess]:
        return [process for process in found if process.identity in self._known]

    def _forget_ended(self, found: list[FoundProcess], deadline: Deadline) -> None:
        living = {process.identity for process in found if process.identity.is_alive()}
        for identity in self._known.keys() - living:
            self._forget(list(self._known.pop(identity).names()), deadline)

    def _each(self, work: Callable[[PreloadLink], object]) -> None:
        def do(process: tuple[ProcessIdentity, str]) -> None:
            work(self._link(*process))

        processes = tuple((process.identity, process.comm) for process in self._known.values())
        raise_first(for_each(processes, do))

    def _group(self) -> GroupRest:
        return GroupRest(
            self._links(),
            {rank.pid: f"process {rank.pid} ({rank.comm})" for rank in self._known.values()},
            {rank.pid: rank.identity.is_alive for rank in self._known.values()},
        )

    def _links(self) -> dict[int, PreloadLink]:
        return {process.pid: self._link(process.identity, process.comm) for process in self._known.values()}

    def _link(self, identity: ProcessIdentity, comm: str) -> PreloadLink:
        link = self._tools.preloads.links(self._container).get(identity.pid)
        if link is None:
            raise PreloadFailed(pid=identity.pid, request=f"anything of {comm}", what="its connection ended")
        return link

    def _bring_back(self) -> None:
        """The undo of all of `stop`; runs after the driver has been undone and the control socket is back.

        Tells nobody: the client may be gone, and that must not keep a gate closed.
        """
        if self.part is not None:
            self.thaw().run(self.part)

    # ---- afterwards ------------------------------------------------------------------------------------------

    def thaw(self, phases: Phases | None = None, deadline: Deadline | None = None) -> StagedThaw:
        """The way back, with what is in our hands."""
        return StagedThaw(
            self._container, self._tools.preloads, self._driver, self._tools.marks, self.memory,
            deadline=deadline, phases=phases,
        )  # fmt: skip

    def modes(self) -> Mapping[int, str]:
        """Host pid -> mode, of the processes that were frozen."""
        staged = {identity.pid: "staged" for identity in self._known}
        return staged | dict.fromkeys(self.figures.reasons, "driver")

    @property
    def is_empty(self) -> bool:
        """No process is staged."""
        return not self._known

    def drain(self, deadline: Deadline, phases: Phases) -> Path | None:
        """Have everything in the store, and the place of each chunk written down."""
        if self._staging is None:
            return None
        with phases("drain"):
            self._staging.drain(deadline, phases.bytes)
            self.figures.copied_s = self._staging.copied_s
            self.fragment = self._staging.write_fragment(deadline)
        return self.fragment

    def let_memory_go(self, deadline: Deadline) -> None:
        """Give the device memory up: its content is in the store."""
        if self._staging is not None:
            self._staging.let_objects_go(deadline)
        self._keeper.drop()
        self.memory.clear()

    def take_staging(self) -> Staging | None:
        """The worker, now the caller's."""
        staging, self._staging = self._staging, None
        return staging

    def close(self, *, keeps_store: bool) -> None:
        """End the worker and let every descriptor go.

        Only for processes that run again, or have ended, or whose content the store has.
        """
        staging, self._staging = self._staging, None
        if staging is not None:
            staging.close(keeps_store=keeps_store)
        self.memory.clear()

    def discard(self) -> None:
        """The undo of `begin`: nothing of this freeze is left."""
        self.close(keeps_store=False)
