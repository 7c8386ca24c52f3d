"""What becomes of descriptors of shared memory that the applications themselves hold, or have on the way to each other.

A descriptor of memory that is taken away names the old memory for ever, and keeps it; so while the memory is away a placeholder
lies under each number of a staged process, and afterwards a descriptor of what all parties have then (staged_thaw.py). A process
that is not staged has nobody who could do that, and nobody can exchange what lies unread in a socket: these are refused by name,
after a while in which a descriptor may find its way. Objects that are shared by handle alone are in nobody's table.
Called by staged_freeze.py: `refuse_held_elsewhere` while the applications run and at rest, `park` when the memory is away. And by
staged_service.py: `blockers` for `vgpu doctor`.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gpu_state.kcmp import OpenFiles
from gpu_state.open_descriptors import Sight, look_at
from gpu_state.preload_objects import Blocker, DeviceObject
from gpu_state.processes import pids_of
from gpu_state.staged_lease import ParkedDescriptor
from vgpu_errors import GpuObjectBlocks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from gpu_state.deadline import Deadline
    from gpu_state.open_descriptors import HeldDescriptor, Place, WaitingDescriptors
    from gpu_state.preload_link import PreloadLink
    from gpu_state.processes import ProcessIdentity
    from gpu_state.shared_objects import ImportedObject
    from gpu_state.staged_lease import StagedProcess

    Known = dict[ProcessIdentity, StagedProcess]

# A descriptor is on its way for as long as its receiver needs to come for it; at rest it cannot while it waits at its gate.
RUNNING_S, REST_S, AWAY_S = 1.0, 0.1, 1.0
_LOOK_S = 0.01
# A descriptor that changes its place during a look can be missed by it, hardly by two.
_CLEAN_LOOKS = 2
BY_DESCRIPTOR = "descriptor"


class StagedDescriptors:
    """The tables of one container's processes, during one freeze."""

    def __init__(self, container: str, cgroup: str) -> None:
        self._container = container
        self._cgroup = cgroup
        self._tokens: dict[str, int] = {}

    def refuse_held_elsewhere(
        self, known: Iterable[StagedProcess], fds: Mapping[str, int], deadline: Deadline, patience_s: float = RUNNING_S
    ) -> None:
        """Wait until no descriptor is held by a process that is not staged, nor on its way; GpuObjectBlocks for one that stays."""
        known = tuple(known)
        files = _given_by_descriptor(known, fds)
        if not files:
            return
        staged, soon = {process.pid for process in known}, deadline.within(patience_s)
        while True:
            deadline.check("looking for descriptors of shared GPU memory")
            sight = look_at(pids_of(self._cgroup), files)
            problem = self._problem(sight, staged)
            if problem is None:
                return
            if soon.remaining() <= 0:
                raise problem
            time.sleep(_LOOK_S)

    def blockers(self, known: Iterable[StagedProcess], fds: Mapping[str, int]) -> list[tuple[int, Blocker]]:
        """What `refuse_held_elsewhere` would refuse after its wait, for `vgpu doctor`: each with the process whose object it is."""
        known = tuple(known)
        owners = {name: process.pid for process in known for name in process.names()}
        staged = {process.pid for process in known}
        files = _given_by_descriptor(known, fds)
        held = look_at(pids_of(self._cgroup), files).held if files else ()
        return [(owners[one.of], _blocker(one)) for one in held if one.place.pid not in staged]

    def park(
        self,
        known: Known,
        fds: Mapping[str, int],
        note: Callable[[], None],
        link_of: Callable[[StagedProcess], PreloadLink],
        deadline: Deadline,
    ) -> None:
        """Put a placeholder in the place of every descriptor that is left, each written down (`note`) before it is put.

        The preloads hold none any more. The applications' threads run on: what one sends just now is found in the next look.
        """
        files = _given_by_descriptor(known.values(), fds)
        soon, clean = deadline.within(AWAY_S), 0 if files else _CLEAN_LOOKS
        while clean < _CLEAN_LOOKS:
            deadline.check("parking descriptors of shared GPU memory")
            sight = look_at(pids_of(self._cgroup), files)
            held = _of_staged(sight, known)
            problem = self._problem(sight, {process.pid for process in known.values()})
            clean = clean + 1 if problem is None and not held else 0
            if clean == 0 and soon.remaining() <= 0:
                raise problem or self._blocks(held[0].place.pid, f"its descriptor {held[0].place.number} stays in use")
            if held:
                self._write_down(known, held)
                note()
                self._exchange(known, held, link_of, deadline)
            elif problem is not None:
                time.sleep(_LOOK_S)

    def _write_down(self, known: Known, held: list[HeldDescriptor]) -> None:
        for identity, process in known.items():
            new = {
                one.place.number: ParkedDescriptor(one.place.number, one.of, one.closes_on_exec, self._token(one.of))
                for one in held
                if one.place.pid == process.pid
            }
            kept = (one for one in process.descriptors if one.number not in new)
            known[identity] = replace(process, descriptors=(*kept, *new.values()))

    def _exchange(
        self,
        known: Known,
        held: list[HeldDescriptor],
        link_of: Callable[[StagedProcess], PreloadLink],
        deadline: Deadline,
    ) -> None:
        for process in known.values():
            places: list[tuple[Place, int]] = [
                (one.place, self._token(one.of)) for one in held if one.place.pid == process.pid
            ]
            if places:
                link_of(process).park(sorted(places, key=lambda place: place[1]), deadline)

    def _token(self, name: str) -> int:
        """Whoever has it was given a descriptor of the object; so it must not be guessed."""
        return self._tokens.setdefault(name, secrets.randbits(63))

    # ---- refusals ------------------------------------------------------------------------------------------

    def _problem(self, sight: Sight, staged: set[int]) -> GpuObjectBlocks | None:
        for one in sight.held:
            if one.place.pid not in staged:
                return self._held_elsewhere(one)
        return self._on_its_way(sight.waiting[0]) if sight.waiting else None

    def _held_elsewhere(self, one: HeldDescriptor) -> GpuObjectBlocks:
        owner, number = one.of.split("/")
        what = (
            f"its descriptor {one.place.number} is GPU memory, object {number} of process {owner} of the container, and it is not "
            "staged itself, so nobody could give it the memory that comes back; close the descriptor once it has been sent"
        )
        return self._blocks(one.place.pid, what)

    def _on_its_way(self, one: WaitingDescriptors) -> GpuObjectBlocks:
        what = (
            f"descriptors lie unread in its socket, descriptor {one.number} ({one.count} of them), and GPU memory that the container's "
            "processes share may be among them; receive what was sent"
        )
        return self._blocks(one.pid, what)

    def _blocks(self, pid: int, what: str) -> GpuObjectBlocks:
        return GpuObjectBlocks(pid=pid, comm=_comm_of(pid), container=self._container, what=what)


def _blocker(one: HeldDescriptor) -> Blocker:
    pid = one.place.pid
    what = f"process {pid} ({_comm_of(pid)}) has it as descriptor {one.place.number}"
    return Blocker("descriptor", 0, 0, what, object=int(one.of.split("/")[1]))


def _of_staged(sight: Sight, known: Known) -> list[HeldDescriptor]:
    staged = {process.pid for process in known.values()}
    return [one for one in sight.held if one.place.pid in staged]


def _given_by_descriptor(known: Iterable[StagedProcess], fds: Mapping[str, int]) -> OpenFiles:
    """The objects of which an application was given a descriptor, as far as they are at hand."""
    names: set[str] = set()
    for process in known:
        names |= {name for name, held in process.names().items() if _is_by_descriptor(held)}
        names |= {held.of for held in process.imports if _is_by_descriptor(held)}
    return OpenFiles({name: fds[name] for name in sorted(names) if name in fds})


def _is_by_descriptor(held: DeviceObject | ImportedObject) -> bool:
    if isinstance(held, DeviceObject) and held.shared is not None:
        return BY_DESCRIPTOR in held.shared.ways
    return held.kind == "import"


def _comm_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").rstrip("\n")
    except OSError:
        return "ended"
