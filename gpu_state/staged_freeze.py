"""The staged side of a freeze: the agent takes the large memory itself, so that the driver only sees control state.

staged_choice.py says which processes are staged, and refuses those that nobody can take; staged_inventory.py what each has;
staged_taking.py holds it, what several processes share once. Called by freeze.py, in this order:

1. begin      inventory, export, rounds of copying          the application runs; a crash leaves packs without a seal
2. stop:
   keep       the keeper (fd_keeper.py) holds all fds       the same
   journal    objects and store are written down            the next agent opens gates that are open already
   rest       gates closed at one cut, contexts synchronised  the next agent opens the gates
   prove      what is listed, by the driver's own figure    the same
   final      begins to take what changed since             the same
   release    unmapped and given away; addresses reserved   the next agent maps from the keeper's fds, opens
   park       placeholders under the applications' own descriptors (staged_descriptors.py)  the next agent puts them back
3. settle     `final` has ended; all that is listed was taken  the same
Between 2 and 3 come the driver's lock and checkpoint (freeze.py), the longest part of the stop, and `final` works beside them
on the agent's own mappings: nothing changes behind a closed gate, and objects live on when the application lets go of them.
In a suspend the copies that `final` has begun go on until `drain`. A gate is never left to itself: the undo of `rest` is pushed
before it is asked for, and the journal names every process whose gate may be closed.
"""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from gpu_state.group_company import NOBODY, Company, Ranks
from gpu_state.staged_choice import StagedChoice
from gpu_state.staged_descriptors import REST_S, RUNNING_S, StagedDescriptors
from gpu_state.staged_groups import ask_groups
from gpu_state.staged_inventory import StagedInventory
from gpu_state.staged_lease import StagedPart
from gpu_state.staged_proof import StagedProof
from gpu_state.staged_taking import StagedTaking
from gpu_state.staged_thaw import Memory, StagedThaw
from gpu_state.thaw import for_each, raise_first
from vgpu_errors import GpuObjectBlocks

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
    from gpu_state.staged_lease import StagedProcess
    from gpu_state.staging_seam import Preloads, Round, Staging
    from gpu_state.undo import Undo

MAX_ROUNDS = 10
MAX_CUTS = 3


@dataclass(frozen=True, slots=True)
class StagedTools:
    """What the staged side works with."""

    preloads: Preloads
    marks: ImportMarks
    keeper: Callable[[str], Keeper]
    open_store: Callable[[], Staging]
    wants_preload: Callable[[int], bool]
    tolerance: Tolerance
    company: Company = NOBODY


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
        self._inventory = StagedInventory(container, tools.preloads)
        self._choice = StagedChoice(
            container, tools.preloads, tools.marks, tools.wants_preload, self._inventory, has_store=store is not None
        )
        self._keeper = tools.keeper(container)
        self._proof: StagedProof | None = None
        self._final: Future[Mapping[str, Tally]] | None = None
        self.memory = Memory(self._keeper)
        self._descriptors = StagedDescriptors(container, "")
        self._taking = StagedTaking(container, tools.preloads, self.memory, tools.open_store)
        self.figures = StagedFigures()
        self.part: StagedPart | None = None
        self.fragment: Path | None = None

    # ---- while the application runs ----------------------------------------------------------------------

    def begin(self, found: list[FoundProcess], cgroup: str, deadline: Deadline, phases: Phases) -> None:
        """Choose, take descriptors of all objects, and copy in rounds."""
        self._descriptors = StagedDescriptors(self._container, cgroup)
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
                self._taking.take(found, chosen, deadline)
            self._refuse_held_elsewhere(deadline)
        if self._copies_while_running:
            self._rounds(found, deadline, phases)

    def _choose(self, found: list[FoundProcess], deadline: Deadline) -> Look:
        chosen = self._choice.choose(found, deadline)
        self.figures.reasons = dict(self._choice.reasons)
        return chosen

    def _rounds(self, found: list[FoundProcess], deadline: Deadline, phases: Phases) -> None:
        for number in range(MAX_ROUNDS):
            if not self._taking.worker().wants_another(deadline):
                return
            with phases("copy", f"round {number + 1}"):
                self.figures.rounds.append(self._taking.worker().round(deadline, phases.bytes))
            self._refresh(found, deadline)

    def _refresh(self, found: list[FoundProcess], deadline: Deadline) -> None:
        alive = [process for process in self._taking.staged(found) if process.identity.is_alive()]
        with self._inventory.look(alive, self._taking.others(found), deadline) as look:
            self._taking.take(alive, look, deadline)

    # ---- the stop ------------------------------------------------------------------------------------------

    def stop(self, found: list[FoundProcess], lease: Lease, undo: Undo, deadline: Deadline, phases: Phases) -> Lease:
        """Bring the staged processes to rest and take their memory; returns the lease that says so."""
        self._taking.forget_ended(found, deadline)
        if others := self._taking.others(found):  # processes that began to use the GPU meanwhile
            with self._choose(found, deadline) as chosen:
                self._taking.take(found, chosen, deadline)
            others = self._taking.others(found)
        known = self._taking.staged(found)
        if not known:
            self._tools.company.sit_out(deadline)
            return lease
        undo.push(self._await_final)
        undo.push(self._bring_back)
        # Before the gates close: the keeper costs a process start, and most of what it holds is known by now.
        self._keeper.start([process.pid for process in known])
        self._keeper.put(self.memory.fds, deadline)
        lease = self._note(lease)
        with phases("rest", f"{len(known)} processes"):
            self._come_to_rest(known, others, deadline)
            self.figures.groups = ask_groups(list(self._taking.links().values()), deadline)
            lease = self._note(lease)
        self._begin_final(deadline)
        with phases("release"):
            self._each(lambda link: link.release(deadline))
            return self._park(lease, deadline)

    def _come_to_rest(self, known: list[FoundProcess], others: list[FoundProcess], deadline: Deadline) -> None:
        """At a cut at which nobody has to come for a descriptor of shared memory; else all go on until it is received."""
        for cut in itertools.count(1):
            self._refuse_held_elsewhere(deadline)
            self._tools.company.rest(self._ranks(), deadline)
            self._taking.forget_ended(known, deadline)  # a rank may have come to its end on the way
            self._last_look(self._taking.staged(known), others, deadline)
            is_whole = True
            try:
                self._refuse_held_elsewhere(deadline, REST_S)
            except GpuObjectBlocks:
                if cut == MAX_CUTS:
                    raise
                is_whole = False
            if self._tools.company.agrees(deadline, is_whole=is_whole):
                return
            self._each(lambda link: link.open(deadline))

    def _refuse_held_elsewhere(self, deadline: Deadline, patience_s: float = RUNNING_S) -> None:
        known = self._taking.known.values()
        self._descriptors.refuse_held_elsewhere(known, self.memory.fds, deadline, patience_s)

    def _park(self, lease: Lease, deadline: Deadline) -> Lease:
        """The applications' own descriptors of what has gone."""

        def note() -> None:
            nonlocal lease
            lease = self._note(lease)

        def link_of(process: StagedProcess) -> PreloadLink:
            return self._taking.link(process.identity, process.comm)

        self._descriptors.park(self._taking.known, self.memory.fds, note, link_of, deadline)
        return lease

    def _begin_final(self, deadline: Deadline) -> None:
        worker = self._taking.worker()
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
                if process.identity in look.held:
                    self._choice.refuse_grave(process, look.held[process.identity].blockers)
            before = set(self.memory.fds)
            self._taking.take(known, look, deadline)
            self._taking.refuse_missing(look)
        self._proof = StagedProof(
            tuple(self._taking.known.values()),
            sum(holdings.driver_bytes for holdings in look.holdings.values()),
            self._used_bytes(deadline),
            self._tools.tolerance,
            is_marked=bool(self._tools.marks.of(self._container) & self._taking.known.keys()),
        )
        self._proof.check_listed()
        new = {name: fd for name, fd in self.memory.fds.items() if name not in before}
        if new:
            self._keeper.put(new, deadline)

    def _used_bytes(self, deadline: Deadline) -> list[int]:
        """NVML's figures for the staged processes, one for each process and device."""
        by_device = self._driver.node(deadline).device_bytes.values()
        pids = [identity.pid for identity in self._taking.known]
        return [used[pid] for used in by_device for pid in pids if used.get(pid)]

    def _note(self, lease: Lease) -> Lease:
        self.part = StagedPart(tuple(self._taking.known.values()), self.store, is_suspend=self._is_suspend)
        lease = replace(lease, staged=self.part)
        self._journal.write(lease)
        return lease

    def _each(self, work: Callable[[PreloadLink], object]) -> None:
        def do(process: tuple[ProcessIdentity, str]) -> None:
            work(self._taking.link(*process))

        processes = tuple((process.identity, process.comm) for process in self._taking.known.values())
        raise_first(for_each(processes, do))

    def _ranks(self) -> Ranks:
        ranks = self._taking.known.values()
        return Ranks(
            self._taking.links(),
            {rank.pid: f"process {rank.pid} ({rank.comm})" for rank in ranks},
            lambda pid: any(rank.pid == pid and rank.identity.has_ended() for rank in ranks),
        )

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
        staged = {identity.pid: "staged" for identity in self._taking.known}
        return staged | dict.fromkeys(self.figures.reasons, "driver")

    @property
    def is_empty(self) -> bool:
        """No process is staged."""
        return not self._taking.known

    def drain(self, deadline: Deadline, phases: Phases) -> Path | None:
        """Have everything in the store, and the place of each chunk written down."""
        if self._taking.staging is None:
            return None
        with phases("drain"):
            self._taking.staging.drain(deadline, phases.bytes)
            self.figures.copied_s = self._taking.staging.copied_s
            self.fragment = self._taking.staging.write_fragment(deadline)
        return self.fragment

    def let_memory_go(self, deadline: Deadline) -> None:
        """Give the device memory up: its content is in the store."""
        if self._taking.staging is not None:
            self._taking.staging.let_objects_go(deadline)
        self._keeper.drop()
        self.memory.clear()

    def take_staging(self) -> Staging | None:
        """The worker, now the caller's."""
        staging, self._taking.staging = self._taking.staging, None
        return staging

    def close(self, *, keeps_store: bool) -> None:
        """End the worker and let every descriptor go.

        Only for processes that run again, or have ended, or whose content the store has.
        """
        staging, self._taking.staging = self._taking.staging, None
        if staging is not None:
            staging.close(keeps_store=keeps_store)
        self.memory.clear()

    def discard(self) -> None:
        """The undo of `begin`: nothing of this freeze is left."""
        self.close(keeps_store=False)
