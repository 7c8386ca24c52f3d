"""Asks the staged processes of a container what they hold and share, and says what each has under its name.

Asks only: the applications go on, nothing is taken. A look while they run can meet an import that is just coming or going;
what looks so is asked again. Descriptors of what is shared stay with the look, for whoever takes the objects.
Called by staged_choice.py before anything stops, by staged_freeze.py in the rounds and at rest, and for `vgpu doctor`.
"""

from __future__ import annotations

import contextlib
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from gpu_state.kcmp import same_files
from gpu_state.preload_link import close_all
from gpu_state.preload_peer import LOST
from gpu_state.processes import ns_pid_of
from gpu_state.shared_objects import SHARE_KINDS, Held, Party, Surroundings, resolve
from vgpu_errors import PreloadFailed, VgpuError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Self

    from gpu_state.deadline import Deadline
    from gpu_state.inventory import FoundProcess
    from gpu_state.preload_link import PreloadLink
    from gpu_state.preload_objects import Holdings, Share
    from gpu_state.processes import ProcessIdentity
    from gpu_state.staging_seam import Preloads

LOOKS = 4
# Another container's process may be coming to rest just now, and a stop must not wait for that.
STRANGER_S = 1.0
_AGAIN_S = 0.02
Item = TypeVar("Item")
Result = TypeVar("Result")
log = logging.getLogger("vgpu-agent")


@dataclass(slots=True)
class Look:
    """What each process has, what its preload said, and the descriptors of shared objects by name."""

    held: dict[ProcessIdentity, Held] = field(default_factory=dict)
    ns_pids: dict[ProcessIdentity, int] = field(default_factory=dict)
    holdings: dict[ProcessIdentity, Holdings] = field(default_factory=dict)
    fds: dict[str, int] = field(default_factory=dict)

    def take(self, name: str) -> int | None:
        """The descriptor of a shared object, now the caller's; None where it is not shared."""
        return self.fds.pop(name, None)

    def close(self) -> None:
        """Let go of descriptors that nobody took."""
        close_all(self.fds)
        self.fds = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(slots=True)
class _Told:
    """One process's answers."""

    process: FoundProcess
    link: PreloadLink
    holdings: Holdings
    shares: tuple[Share, ...]
    fds: dict[int, int]

    @property
    def is_in_flux(self) -> bool:
        """Something came or went between the two answers."""
        known = {share.id for share in self.shares}
        named = {b.object for b in self.holdings.blockers if b.kind in SHARE_KINDS and b.object is not None}
        return self.link.knows_groups and bool(known - self.fds.keys() or named - known)


class StagedInventory:
    """The staged processes of one container, as their preloads tell."""

    def __init__(self, container: str, preloads: Preloads) -> None:
        self._container = container
        self._preloads = preloads

    def look(self, processes: Sequence[FoundProcess], unstaged: Sequence[FoundProcess], deadline: Deadline) -> Look:
        """What these processes have; `unstaged` are the other GPU processes of the container."""
        for attempt in range(LOOKS):
            told = self._ask_all(processes, deadline)
            try:
                if attempt < LOOKS - 1 and any(one.is_in_flux for one in told):
                    deadline.check("asking what the processes share")
                    time.sleep(_AGAIN_S)
                    continue
                return self._resolved(told, unstaged, deadline)
            finally:
                for one in told:
                    close_all(one.fds)
        raise AssertionError  # the last attempt returns or raises

    def _ask_all(self, processes: Sequence[FoundProcess], deadline: Deadline) -> list[_Told]:
        links = self._preloads.links(self._container)
        found, problems = _in_parallel(lambda one: self._ask(one, links.get(one.pid), deadline), processes)
        # One that has ended has nothing any more.
        told = [one for one in found if one is not None]
        if not problems:
            return told
        for one in told:
            close_all(one.fds)
        for other in problems[1:]:
            problems[0].add_note(f"also: {other}")
        raise problems[0]

    def _ask(self, process: FoundProcess, link: PreloadLink | None, deadline: Deadline) -> _Told | None:
        try:
            return self._told(process, link, deadline)
        except PreloadFailed as problem:
            if problem.fields["what"] == LOST and process.identity.has_ended():
                return None
            raise

    def _told(self, process: FoundProcess, link: PreloadLink | None, deadline: Deadline) -> _Told:
        if link is None:
            raise PreloadFailed(pid=process.pid, request=f"INVENTORY of process {process.pid}", what=LOST)
        holdings = link.holdings(deadline)
        shares: tuple[Share, ...] = ()
        fds: dict[int, int] = {}
        if link.knows_groups and (holdings.imports or any(held.shared for held in holdings.objects)):
            shares, fds = link.shares(deadline)
        return _Told(process, link, holdings, shares, fds)

    def _resolved(self, told: list[_Told], unstaged: Sequence[FoundProcess], deadline: Deadline) -> Look:
        files, strangers = self._files(told, deadline)
        parties = [
            Party(
                one.process.pid,
                one.link.ns_pid,
                one.process.shown.comm,
                one.link.devices,
                one.holdings,
                one.shares,
                found,
            )
            for one, found in zip(told, files, strict=True)
        ]
        living = (process for process in unstaged if process.identity.is_alive())
        others = tuple(f"process {process.pid} ({process.shown.comm})" for process in living)
        held = resolve(parties, Surroundings(strangers, others, _living_for(parties)))
        look = Look()
        for one, party in zip(told, parties, strict=True):
            found = look.held[one.process.identity] = held[party.ns_pid]
            look.holdings[one.process.identity] = one.holdings
            look.ns_pids[one.process.identity] = party.ns_pid
            shared = [item.id for item in found.objects if item.id in one.fds]
            look.fds |= {party.name_of(number): one.fds.pop(number) for number in shared}
        return look

    def _files(self, told: list[_Told], deadline: Deadline) -> tuple[list[dict[int, int]], dict[int, str]]:
        """For each process which open file each share is, and which of these files other containers have, and who."""
        if not any(one.fds for one in told):
            return [{} for _ in told], {}
        foreign = self._foreign(deadline)
        try:
            ours, theirs = [one.fds for one in told], [fds for _, fds in foreign]
            numbers = iter(same_files([fd for fds in (*ours, *theirs) for fd in fds.values()]))
            files = [{share: next(numbers) for share in one.fds} for one in told]
            return files, {next(numbers): who for who, fds in foreign for _ in fds}
        finally:
            for _, fds in foreign:
                close_all(fds)

    def _foreign(self, deadline: Deadline) -> list[tuple[str, dict[int, int]]]:
        """What processes of other containers share; one that does not answer is passed over, it must not hold up this one."""
        links = [
            (f"process {link.pid} of container {container}", link)
            for container, found in self._preloads.others(self._container).items()
            for link in found.values()
            if link.tells_shares
        ]
        soon = deadline.within(STRANGER_S)
        return _in_parallel(lambda one: _shares_of_stranger(*one, soon), links)[0]


def _shares_of_stranger(who: str, link: PreloadLink, deadline: Deadline) -> tuple[str, dict[int, int]]:
    try:
        return who, link.shares(deadline)[1]
    except VgpuError as problem:
        log.warning("%s did not say what it shares: %s", who, problem)
        return who, {}


def _in_parallel(work: Callable[[Item], Result], items: Sequence[Item]) -> tuple[list[Result], list[Exception]]:
    """The results, and what went wrong, each in the order of the items."""

    def attempt(item: Item) -> Result | Exception:
        try:
            return work(item)
        except Exception as problem:  # noqa: BLE001 - all are returned
            return problem

    if not items:
        return [], []
    with ThreadPoolExecutor(len(items)) as threads:
        done = list(threads.map(attempt, items))
    return [one for one in done if not isinstance(one, Exception)], [one for one in done if isinstance(one, Exception)]


def _living_for(parties: Iterable[Party]) -> frozenset[int]:
    """The pids in the parties' namespaces, where one of them names a process that is no party."""
    known = {party.ns_pid for party in parties}
    named: set[int] = set()
    for party in parties:
        named |= {pid for held in party.holdings.objects if held.shared for pid in held.shared.peers}
        named |= {held.exporter_pid for held in party.holdings.imports if held.exporter_pid is not None}
    return _pids_beside([party.pid for party in parties]) if named - known else frozenset()


def _pids_beside(pids: Iterable[int]) -> frozenset[int]:
    """Every pid of the namespaces of these processes, as it is there."""
    namespaces = {name for pid in pids if (name := _namespace_of(str(pid))) is not None}
    beside = (entry.name for entry in Path("/proc").iterdir() if entry.name.isdigit())
    found = (ns_pid_of(int(name)) for name in beside if _namespace_of(name) in namespaces)
    return frozenset(pid for pid in found if pid is not None)


def _namespace_of(pid: str) -> str | None:
    with contextlib.suppress(OSError):
        return str(Path(f"/proc/{pid}/ns/pid").readlink())
    return None
