"""Which recorded GPUs need each other, and where they go so that they find each other again (spec/record.md, section 6).

Pure: a record and facts in, pairs and a placement out. Needs no link to be known; what nobody knows counts less than what holds.
fitness.py writes the requirements with it, judges them, and makes the device map.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from gpu_state.node_facts import DeviceFacts, NodeFacts
    from gpu_state.nvml_links import Link
    from image_format.gpu_objects import ImportEntry, ObjectEntry
    from image_format.record import DeviceEntry, ProcessEntry, Record

PEERS, NVLINK = "gpu.peers", "gpu.nvlink"
MAX_PAIRS = 2016  # 64 GPUs
# Under a second; what was found by then is taken. On a node where all GPUs are alike the first placement ends the search.
MAX_STEPS = 10_000

_PAIR = re.compile(r"(0|[1-9][0-9]{0,3})-([1-9][0-9]{0,3})")

Pair: TypeAlias = tuple[int, int]
Placement: TypeAlias = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Wishes:
    """Pairs of positions in the record's `devices`."""

    peers: tuple[Pair, ...] = ()
    nvlink: tuple[Pair, ...] = ()


# ---- what a record needs -------------------------------------------------------------------------


def peer_pairs(record: Record) -> list[Pair]:
    """GPUs of which one is given access to memory on the other."""
    positions = {device.uuid: n for n, device in enumerate(record.devices)}
    found = {
        tuple(sorted((positions[home], positions[guest])))
        for process in record.processes
        for home, guest in _accesses(process, ordinals(record, process))
        if home in positions and guest in positions
    }
    return sorted((first, second) for first, second in found if first != second)


def nvlink_pairs(record: Record, facts: NodeFacts) -> list[Pair]:
    """GPUs that this node connects by NVLink."""
    known = by_pair(facts.links)
    numbered = combinations(enumerate(device.uuid for device in record.devices), 2)
    return [(n, m) for (n, a), (m, b) in numbered if (link := known.get(frozenset((a, b)))) and link.nvlinks]


def ordinals(record: Record, process: ProcessEntry) -> dict[int, str]:
    """The process's own number of a GPU -> its uuid, as far as anything of the process names both."""
    named: list[tuple[int | None, str]] = [(entry.device, entry.uuid) for entry in process.objects]
    named += [(entry.device, entry.uuid) for entry in process.imports]
    named += [(entry.device, entry.uuid) for entry in record.communicators if entry.ns_pid == process.ns_pid]
    named += [(entry.device, entry.uuid or "") for entry in record.nvshmem if entry.ns_pid == process.ns_pid]
    return {device: uuid for device, uuid in named if device is not None}


def _accesses(process: ProcessEntry, numbers: Mapping[int, str]) -> Iterator[tuple[str, str]]:
    entries: tuple[ObjectEntry | ImportEntry, ...] = (*process.objects, *process.imports)
    for entry in entries:
        for mapping in entry.mappings:
            for device, flags in mapping.access:
                if flags and device in numbers:
                    yield entry.uuid, numbers[device]


def pair_texts(pairs: Iterable[Pair]) -> tuple[str, ...]:
    """The value of the requirement."""
    return tuple(f"{first}-{second}" for first, second in pairs)


def pairs_in(value: Any, count: int) -> tuple[Pair, ...] | None:
    """The pairs of a requirement's value; None where it does not speak of `count` devices."""
    if not isinstance(value, list | tuple) or len(value) > MAX_PAIRS:
        return None
    matches = [_PAIR.fullmatch(str(text)) for text in value]
    pairs = tuple((int(match[1]), int(match[2])) for match in matches if match)
    are_sound = len(pairs) == len(matches) and all(first < second < count for first, second in pairs)
    return pairs if are_sound else None


def wishes_of(record: Record) -> Wishes:
    """What the record's requirements want of the placement; a value that says nothing wants nothing."""
    count = len(record.devices)
    values = {requirement.key: requirement.value for requirement in record.requirements}
    peers, nvlink = (pairs_in(values.get(key, ()), count) or () for key in (PEERS, NVLINK))
    return Wishes(peers, nvlink)


# ---- what a node has -----------------------------------------------------------------------------


def by_pair(links: Iterable[Link]) -> dict[frozenset[str], Link]:
    """Links by the two GPUs, in whichever order."""
    return {frozenset((link.a, link.b)): link for link in links}


def reaches(link: Link | None) -> bool | None:
    """Whether two GPUs reach each other's memory; None where nobody knows."""
    return None if link is None else link.reaches


def is_linked(link: Link | None) -> bool | None:
    """Whether two GPUs are connected by NVLink; None where nobody knows."""
    return None if link is None or link.nvlinks is None else link.nvlinks > 0


# ---- where they go -------------------------------------------------------------------------------


def place(recorded: Sequence[DeviceEntry], facts: NodeFacts, wishes: Wishes) -> dict[str, str]:
    """Old uuid -> new uuid for each recorded GPU that has a place.

    As many as possible find one, then as many pairs as possible hold, then as many GPUs as possible stay what they are.
    """
    plain = place_plainly(recorded, facts)
    if not (wishes.peers or wishes.nvlink) or not facts.links:
        return plain
    search = _Search(recorded, facts, wishes)
    return search.best(plain)


def place_plainly(recorded: Sequence[DeviceEntry], facts: NodeFacts) -> dict[str, str]:
    """A GPU that is present stays; the others go, in recorded order, to the free ones of the same model."""
    here = {device.uuid: device for device in facts.devices}
    placed = {d.uuid: d.uuid for d in recorded if d.uuid in here and here[d.uuid].memory_bytes >= d.memory_bytes}
    free = [device for device in facts.devices if device.uuid not in placed]
    for device in recorded:
        fit = next((d for d in free if is_fit(d, device)), None) if device.uuid not in placed else None
        if fit is not None:
            free.remove(fit)
            placed[device.uuid] = fit.uuid
    return {device.uuid: placed[device.uuid] for device in recorded if device.uuid in placed}


def is_fit(device: DeviceFacts, wanted: DeviceEntry) -> bool:
    """The same model with enough memory; the very same GPU is of its own model, whatever its name."""
    is_same = device.uuid == wanted.uuid or device.name == wanted.name
    return is_same and device.memory_bytes >= wanted.memory_bytes


_Score: TypeAlias = tuple[int, int, int, int]


class _Search:
    """All placements, best first where that is cheap to know, cut where none can be better."""

    def __init__(self, recorded: Sequence[DeviceEntry], facts: NodeFacts, wishes: Wishes) -> None:
        self._recorded = recorded
        self._devices = facts.devices
        self._links = by_pair(facts.links)
        self._wishes = wishes
        self._steps = 0

    def best(self, first: dict[str, str]) -> dict[str, str]:
        """The best placement, and `first` where none is better."""
        self._found, self._score = first, self._score_of(first, len(self._recorded))
        self._go_on({}, 0)
        return self._found

    def _go_on(self, placed: dict[str, str], at: int) -> None:
        self._steps += 1
        reachable = self._score_of(placed, at)
        if self._steps > MAX_STEPS or reachable <= self._score:
            return
        if at == len(self._recorded):
            self._found, self._score = dict(placed), reachable
            return
        wanted = self._recorded[at]
        taken = set(placed.values())
        for device in sorted(self._devices, key=lambda device: device.uuid != wanted.uuid):
            if device.uuid not in taken and is_fit(device, wanted):
                self._go_on(placed | {wanted.uuid: device.uuid}, at + 1)
        self._go_on(placed, at + 1)

    def _score_of(self, placed: Mapping[str, str], decided: int) -> _Score:
        """What a placement is worth if everything that is not yet decided turns out well."""
        open_count = len(self._recorded) - decided
        stays = sum(old == new for old, new in placed.items())
        return (
            len(placed) + open_count,
            sum(self._worth(pair, placed, decided, reaches) for pair in self._wishes.peers),
            sum(self._worth(pair, placed, decided, is_linked) for pair in self._wishes.nvlink),
            stays + open_count,
        )

    def _worth(self, pair: Pair, placed: Mapping[str, str], decided: int, holds: Any) -> int:
        """2 where a pair holds or may still, 1 where nobody knows, 0 where it does not."""
        if pair[1] >= decided:
            return 2
        homes = [placed.get(self._recorded[n].uuid) for n in pair]
        if None in homes:
            return 0
        told = holds(self._links.get(frozenset(str(home) for home in homes)))
        return 1 if told is None else 2 * told
