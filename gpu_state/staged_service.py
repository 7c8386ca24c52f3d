"""Staged mode in the agent: which freezes have a staged side, where its content lies, and how a later agent finds it again.

Knows no socket and no driver call of its own; the order of steps is in staged_freeze.py, staged_thaw.py and staged_restore.py.
Called by service.py, which holds a container's lease while anything here is at work on it.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_state.fd_keeper import Keeper
from gpu_state.group_company import NOBODY, Company
from gpu_state.import_marks import ImportMarks
from gpu_state.inventory_proof import Tolerance
from gpu_state.phases import Phases
from gpu_state.staged_choice import wants_preload
from gpu_state.staged_descriptors import StagedDescriptors
from gpu_state.staged_freeze import StagedFreeze, StagedTools
from gpu_state.staged_inventory import StagedInventory
from gpu_state.staged_restore import Prefill, WantedProcess, checked_record, moved, wanted_processes
from gpu_state.staged_taking import staged_process
from gpu_state.staged_thaw import Memory, StagedThaw
from vgpu_errors import AgentRefused, VgpuError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from gpu_state.deadline import Deadline
    from gpu_state.inventory import FoundProcess
    from gpu_state.leases import Journal, Lease
    from gpu_state.registration import Registration
    from gpu_state.remote_driver import CheckpointDriver
    from gpu_state.staged_inventory import Look
    from gpu_state.staged_lease import StagedPart
    from gpu_state.staging_seam import Staging, StagingFactory

# A worker with contexts and a pinned pool resumes at once; without it a resume pays for both. It keeps about half a gigabyte
# of each GPU, so it is let go after a while; not so where a reserve says that this is what the node is for.
WARM_S = 60.0
log = logging.getLogger("vgpu-agent")


class StagedService:
    """The staged sides of all containers of this node."""

    def __init__(
        self,
        run_dir: Path,
        driver: CheckpointDriver,
        journal: Journal,
        registration: Registration,
        staging: StagingFactory,
        *,
        tolerance: Tolerance | None = None,
        warm_s: float = WARM_S,
    ) -> None:
        self._run_dir = run_dir
        self._warm_s = warm_s
        self._driver = driver
        self._journal = journal
        self._registration = registration
        self._staging = staging
        self._tolerance = tolerance or Tolerance()
        self._marks = ImportMarks(run_dir / "staged")
        self._guard = threading.Lock()
        self._freezes: dict[str, StagedFreeze] = {}
        self._prefills: dict[str, Prefill] = {}
        self._warm: dict[str, tuple[Staging, float]] = {}

    # ---- freeze, drain, end --------------------------------------------------------------------------------

    def freeze_to(
        self,
        container: str,
        image_path: str,
        *,
        leaves_running: bool,
        parents: Sequence[str] = (),
        company: Company = NOBODY,
    ) -> StagedFreeze:
        """The staged side of a checkpoint into `image_path`, without what lies in the packs of `parents`."""
        return self._freeze(container, image_path, company, set_aside=leaves_running, parents=parents)

    def freeze_marked_only(self, container: str, company: Company = NOBODY) -> StagedFreeze:
        """For a client that names no image path: nothing is staged, and what must not go to the driver is refused."""
        return self._freeze(container, None, company)

    def suspend_to(self, container: str, target: str | None, company: Company = NOBODY) -> StagedFreeze:
        """The staged side of a suspend, to the folder `target` or to memory."""
        folder = self._suspend_folder(container, target)
        return self._freeze(container, str(folder), company, kind="packs" if target else "memory", is_suspend=True)

    def _freeze(
        self,
        container: str,
        store: str | None,
        company: Company,
        *,
        kind: str = "packs",
        set_aside: bool = False,
        is_suspend: bool = False,
        parents: Sequence[str] = (),
    ) -> StagedFreeze:
        is_staged = wants_preload(self._run_dir / "containers" / container / "mode")
        tools = StagedTools(
            preloads=self._registration,
            marks=self._marks,
            keeper=self._keeper,
            open_store=lambda: self._staging.open(str(store), kind=kind, parents=parents),
            wants_preload=is_staged if store is not None else lambda _pid: False,
            tolerance=self._tolerance,
            company=company,
        )
        return StagedFreeze(
            container,
            tools,
            self._driver,
            self._journal,
            store=store,
            is_suspend=is_suspend,
            copies_while_running=not is_suspend,
            set_aside=set_aside,
        )

    def keep(self, container: str, freeze: StagedFreeze) -> None:
        """A freeze holds: remember its staged side until it is drained and the lease has ended."""
        with self._guard:
            before = self._freezes.get(container)
            self._freezes[container] = freeze
        if before is not None:
            before.close(keeps_store=True)

    def drain(self, container: str, deadline: Deadline, phases: Phases) -> dict[str, Any]:
        """Have the content of the last freeze in its store; what the client needs for record and seal."""
        freeze = self._of(container, "drain")
        fragment = freeze.drain(deadline, phases)
        lease = self._journal.of(container)
        if lease is not None and lease.staged is not None and fragment is not None:
            self._journal.write(replace(lease, staged=lease.staged.completed()))
        return {"fragment": str(fragment) if fragment else None, "staged": staged_json(freeze)}

    def end(self, container: str, *, keeps_store: bool) -> None:
        """The processes run again or have ended, and the store is sealed or given up."""
        with self._guard:
            freeze = self._freezes.pop(container, None)
        if freeze is not None:
            freeze.close(keeps_store=keeps_store)
            freeze.memory.let_keeper_go()

    def has_freeze(self, container: str) -> bool:
        """A staged side waits to be drained or ended."""
        with self._guard:
            return container in self._freezes

    def _of(self, container: str, verb: str) -> StagedFreeze:
        with self._guard:
            freeze = self._freezes.get(container)
        if freeze is None:
            raise AgentRefused(verb=verb, what=f"container {container} has no staged checkpoint under way")
        return freeze

    # ---- the way back ----------------------------------------------------------------------------------------

    def bring_back(self, lease: Lease, deadline: Deadline, phases: Phases | None) -> None:
        """Give the staged processes of a lease their memory back and open their gates."""
        part = lease.staged
        if part is None:
            return
        with self._guard:
            freeze = self._freezes.get(lease.container)
        if freeze is not None and not part.is_suspended:
            freeze.thaw(phases, deadline).run(part)
            freeze.memory.clear()
            return
        self._from_store(lease, part, deadline, phases)

    def _from_store(self, lease: Lease, part: StagedPart, deadline: Deadline, phases: Phases | None) -> None:
        """By what an earlier agent left: the keeper's descriptors, or a store that is complete."""
        tell = phases or Phases()
        workers = []

        def rebuild(wanted: StagedPart, within: Deadline) -> Mapping[str, int]:
            if not wanted.is_complete or wanted.store is None:
                return {}
            worker = self._staging.open(wanted.store, kind="")
            workers.append(worker)
            objects = {name: held for process in wanted.processes for name, held in process.names().items()}
            with tell("fill"):
                return worker.fill(moved(objects, lease.device_map), within, tell.bytes)

        memory = Memory(self._keeper(lease.container), rebuild)
        prefill = self._prefills.get(lease.container)
        try:
            if prefill is not None:
                with tell("wait for fill"):
                    memory.add(prefill.descriptors(deadline, tell))
            StagedThaw(lease.container, *self._ways(), memory, deadline=deadline, phases=phases).run(part)
        finally:
            memory.clear()
            self.end_prefill(lease.container)
            for worker in workers:
                worker.close(keeps_store=True)

    def restored_part(self, container: str, found: list[FoundProcess], handle: str) -> StagedPart:
        """What a restore is to hand over: the prefilled objects, to the processes that CRIU has brought back."""
        prefill = self._prefills.get(container)
        if prefill is None or prefill.handle != handle:
            raise AgentRefused(verb="thaw", what=f"there is no prefill {handle} of container {container}")
        return prefill.part_for(found)

    # ---- restore -----------------------------------------------------------------------------------------------

    def prefill(
        self, container: str, image_path: str, content_root: str, device_map: Mapping[str, str], deadline: Deadline
    ) -> dict[str, Any]:
        """Begin to make and fill the objects of an image, while the low-level runtime restores the CPU side."""
        self.end_prefill(container)
        wanted = wanted_processes(checked_record(image_path, content_root))
        prefill = self._begin_fill(container, wanted, image_path, deadline, device_map=device_map)
        return {"handle": prefill.handle, "objects": prefill.count, "bytes": prefill.bytes}

    def begin_resume(self, lease: Lease, deadline: Deadline) -> Prefill | None:
        """Begin to fill a suspended container's memory, while the driver brings its control state back."""
        part = lease.staged
        if part is None or part.store is None or not part.bytes:
            return None
        wanted = tuple(
            WantedProcess(process.ns_pid, process.comm, process.objects, process.imports, process.descriptors)
            for process in part.processes
        )
        self.end_prefill(lease.container)
        put_away = partial(self._cool_down, lease.container)
        return self._begin_fill(lease.container, wanted, part.store, deadline, put_away, device_map=lease.device_map)

    def keep_warm(self, container: str, freeze: StagedFreeze) -> None:
        """A suspend is done: keep its worker for a while, the container may come back soon."""
        staging = freeze.take_staging()
        freeze.close(keeps_store=True)
        if staging is not None:
            self._put_warm(container, staging)

    def _put_warm(self, container: str, staging: Staging) -> None:
        with self._guard:
            self._warm[container] = staging, time.monotonic()

    def _cool_down(self, container: str, staging: Staging) -> None:
        """After a resume: the worker waits for what becomes of the store, without the application's memory."""
        if not staging.is_usable:
            staging.close(keeps_store=True)
            return
        staging.let_objects_go_soon()
        self._put_warm(container, staging)

    def _take_warm(self, container: str) -> Staging | None:
        with self._guard:
            staging, _ = self._warm.pop(container, (None, 0.0))
        if staging is None or staging.is_usable:
            return staging
        staging.close(keeps_store=True)
        return None

    def _begin_fill(
        self,
        container: str,
        wanted: tuple[WantedProcess, ...],
        store: str,
        deadline: Deadline,
        put_away: Callable[[Staging], None] | None = None,
        *,
        device_map: Mapping[str, str],
    ) -> Prefill:
        def open_store() -> Staging:
            return self._take_warm(container) or self._staging.open(store, kind="")

        prefill = Prefill(wanted, open_store, put_away, store=store, device_map=device_map)
        with self._guard:
            self._prefills[container] = prefill
        try:
            prefill.start(deadline)
        except BaseException:
            self.end_prefill(container)
            raise
        return prefill

    def has_prefill(self, container: str) -> bool:
        """Objects are being filled for a restore of this container."""
        with self._guard:
            return container in self._prefills

    def end_prefill(self, container: str) -> None:
        """Stop filling and let go what nobody has taken."""
        with self._guard:
            prefill = self._prefills.pop(container, None)
        if prefill is not None:
            prefill.close()

    def hold_socket(self, container: str, cgroup: str, deadline: Deadline) -> None:
        """Listen for a container that was just restored and has no state file yet."""
        self._registration.hold(container, cgroup, deadline)

    # ---- suspend -------------------------------------------------------------------------------------------------

    def _suspend_folder(self, container: str, target: str | None) -> Path:
        """Where the content of a suspended container lies, or where it is noted."""
        if target is None:
            folder = self._run_dir / "suspended" / container
        else:
            if not Path(target).is_absolute() or not Path(target).is_dir():
                raise AgentRefused(verb="suspend", what=f"{target} is no folder, by its absolute path")
            folder = Path(target) / f"vgpu-suspended-{container}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700, parents=True)
        return folder

    def forget_store(self, container: str, part: StagedPart) -> None:
        """A suspended container runs again or is gone: remove its content."""
        if part.store is None or not part.is_suspend:
            return
        warm = self._take_warm(container)
        if warm is not None:
            warm.close(keeps_store=False)
        with contextlib.suppress(VgpuError, OSError):
            self._staging.open(part.store, kind="").close(keeps_store=False)
        shutil.rmtree(part.store, ignore_errors=True)

    def settle(self, container: str) -> None:
        """A suspended container whose agent was killed: its content is in the store, so nobody keeps device memory for it."""
        self._keeper(container).drop()

    def sweep(self) -> None:
        """Forget marks of processes that have ended, and let workers go that were kept in vain."""
        self._marks.sweep()
        with self._guard:
            old = [name for name, (_, since) in self._warm.items() if time.monotonic() - since > self._warm_s]
            idle = [self._warm.pop(name)[0] for name in old]
        for staging in idle:
            staging.close(keeps_store=True)

    def blockers(
        self, container: str, cgroup: str, found: list[FoundProcess], deadline: Deadline
    ) -> dict[int, dict[str, Any]]:
        """Host pid -> what its preload says it holds, for `vgpu doctor`; without what all its processes share."""
        links = self._registration.links(container)
        staged = [process for process in found if process.pid in links]
        others = [process for process in found if process.pid not in links]
        try:
            with StagedInventory(container, self._registration).look(staged, others, deadline) as look:
                told = [process for process in staged if process.identity in look.held]
                holdings = {process.pid: _holdings_json(process, look) for process in told}
                known = [staged_process(process, look) for process in told]
                for pid, blocker in StagedDescriptors(container, cgroup).blockers(known, look.fds):
                    holdings[pid]["blockers"].append(blocker.to_json())
                return holdings
        except VgpuError as problem:  # one that does not answer keeps nobody from telling what the others hold
            if len(staged) < 2:
                return {process.pid: {"problem": str(problem)} for process in staged}
        parts = [self.blockers(container, cgroup, [one, *others], deadline) for one in staged]
        return {pid: told for part in parts for pid, told in part.items()}

    def modes(self, container: str) -> dict[int, str]:
        """Host pid -> "staged", of the processes that are."""
        return dict.fromkeys(self._registration.links(container), "staged")

    def _ways(self) -> tuple[Registration, CheckpointDriver, ImportMarks]:
        return self._registration, self._driver, self._marks

    def _keeper(self, container: str) -> Keeper:
        return Keeper(self._run_dir / "keep", container)


def _holdings_json(process: FoundProcess, look: Look) -> dict[str, Any]:
    held, told = look.held[process.identity], look.holdings[process.identity]
    return {
        "objects": len(held.objects),
        "object_bytes": sum(one.size for one in held.objects),
        "imports": len(held.imports),
        "driver_bytes": told.driver_bytes,
        "blockers": [blocker.to_json() for blocker in held.blockers],
    }


def staged_json(freeze: StagedFreeze) -> dict[str, Any]:
    """What `freeze` and `drain` tell of the staged side."""
    part, figures = freeze.part, freeze.figures
    return {
        "objects": {
            str(process.ns_pid): [held.to_json() for held in process.objects]
            for process in (part.processes if part else ())
        },
        "imports": {
            str(process.ns_pid): [held.to_json() for held in process.imports]
            for process in (part.processes if part else ())
            if process.imports
        },
        "descriptors": {
            str(process.ns_pid): [parked.to_json() for parked in process.descriptors]
            for process in (part.processes if part else ())
            if process.descriptors
        },
        "groups": figures.groups,
        "bytes": part.bytes if part else 0,
        "rounds": [
            {"changed_bytes": done.changed_bytes, "copied_bytes": done.copied_bytes, "seconds": round(done.seconds, 4)}
            for done in figures.rounds
        ],
        "copied_s": figures.copied_s,
        "proof": [proof.to_json() for proof in figures.proofs],
    }
