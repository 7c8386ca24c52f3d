"""What changed between two checkpoints: facts of the record, and content region by region.

Pure: two records and two indexes in, a `Difference` out; reads no content, because equal chunk ids mean equal content.
Chunks are compared by their place in a region, so that "changed" is what a process wrote; what a push of the later one
sends after the earlier one is counted by id, wherever in the image the content lies. `vgpu diff` prints it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any

from image_format.chunk_index import Codec, RegionKind
from image_format.content_summary import kind_name
from image_format.packs.packed import EarlierPack, Place, plan_packs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from image_format.chunk_index import Chunk, Index, Region
    from image_format.gpu_processes import ProcessEntry
    from image_format.packs.packed import PlannedPack
    from image_format.record import Record

# What differs between any two checkpoints, and what the content says better than the record.
_NOT_FACTS = frozenset({"contentRoot", "regionsSummary", "processes", "phases", "parents"})
MAX_FACTS = 1000
ID_SHOWN = 16
# Their chunks lie at multiples of the chunk size; those of other kinds are cut along runs of pages.
EVENLY_CUT = frozenset({RegionKind.FILE, RegionKind.VRAM})


@dataclass(frozen=True)
class Fact:
    """One field of the record by its path; None where a side does not have it."""

    path: str
    before: Any
    after: Any


@dataclass(frozen=True)
class ProcessChange:
    """A GPU process that came, went, or differs."""

    ns_pid: int
    comm: str
    what: str
    facts: tuple[Fact, ...] = ()


@dataclass(frozen=True)
class ContentCount:
    """Bytes of the later content: as they were, changed, or now zero where they were not."""

    equal_bytes: int = 0
    changed_bytes: int = 0
    zeroed_bytes: int = 0
    equal_chunks: int = 0
    changed_chunks: int = 0
    zeroed_chunks: int = 0

    def __add__(self, other: ContentCount) -> ContentCount:
        return ContentCount(*[getattr(self, f.name) + getattr(other, f.name) for f in fields(self)])


@dataclass(frozen=True)
class RegionChange:
    """One region: `change` is equal, changed, added or removed; `before` and `after` are its bytes."""

    name: str
    kind: str
    change: str
    before: int
    after: int
    count: ContentCount = field(default_factory=ContentCount)


@dataclass(frozen=True)
class Transfer:
    """What is new in the later checkpoint, and what a push of it sends where the earlier one already is.

    `bytes` and `chunks` are the new content; a push sends whole packs (`packed`), so `sent_bytes` is at least as much.
    Both are bytes before compression. Small files go along in any case and are not counted as packs.
    """

    bytes: int = 0
    chunks: int = 0
    sent_bytes: int = 0
    packs: int = 0


@dataclass(frozen=True)
class Difference:
    """All of it."""

    facts: tuple[Fact, ...]
    processes: tuple[ProcessChange, ...]
    regions: tuple[RegionChange, ...]
    transfer: Transfer

    @property
    def count(self) -> ContentCount:
        """All regions together."""
        return sum((region.count for region in self.regions), ContentCount())


def compare(before: tuple[Record, Index], after: tuple[Record, Index]) -> Difference:
    """What changed from one checkpoint to a later one."""
    (old_record, old_index), (new_record, new_index) = before, after
    return Difference(
        facts=tuple(record_facts(old_record, new_record)),
        processes=tuple(process_changes(old_record.processes, new_record.processes)),
        regions=tuple(region_changes(old_index, new_index)),
        transfer=transfer(old_index, new_index),
    )


# ---- records -------------------------------------------------------------------------------------


def record_facts(before: Record, after: Record) -> list[Fact]:
    """The fields that differ, by path.

    Requirements go by their key, devices by their uuid, communicators by id and rank, elements of NVSHMEM by their process.
    """
    names = short_names({entry.id for record in (before, after) for entry in record.communicators})
    return _differences(_facts_of(before, names), _facts_of(after, names))[:MAX_FACTS]


def process_changes(before: Sequence[ProcessEntry], after: Sequence[ProcessEntry]) -> list[ProcessChange]:
    """Processes that came, went, or differ."""
    old, new = _by(before, lambda entry: entry.ns_pid), _by(after, lambda entry: entry.ns_pid)
    changes = [ProcessChange(pid, entry.comm, "removed") for pid, entry in old.items() if pid not in new]
    for pid, entry in new.items():
        if pid not in old:
            changes.append(ProcessChange(pid, entry.comm, "added"))
        elif facts := _differences(_process_facts(old[pid]), _process_facts(entry)):
            changes.append(ProcessChange(pid, entry.comm, "changed", tuple(facts)))
    return sorted(changes, key=lambda change: change.ns_pid)


def short_names(ids: set[str]) -> dict[str, str]:
    """What is shown of a communicator's id: its beginning where that tells it from all others."""
    counts = Counter(text[:ID_SHOWN] for text in ids)
    return {text: text[:ID_SHOWN] if counts[text[:ID_SHOWN]] == 1 else text for text in ids}


def _facts_of(record: Record, names: Mapping[str, str]) -> dict[str, Any]:
    doc = {key: value for key, value in record.to_json().items() if key not in _NOT_FACTS}
    doc["requirements"] = {entry.key: entry.to_json() for entry in record.requirements}
    doc["devices"] = {entry.uuid: entry.to_json() for entry in record.devices}
    doc |= _group_facts(record, names)
    return dict(_leaves(doc, ""))


def _group_facts(record: Record, names: Mapping[str, str]) -> dict[str, Any]:
    communicators: dict[str, dict[str, Any]] = {}
    for entry in record.communicators:
        communicators.setdefault(names[entry.id], {})[str(entry.rank)] = _without(entry.to_json(), "id", "rank")
    elements = {
        str(entry.ns_pid): _without(entry.to_json(), "nsPid")
        | {"teams": {team.name: _without(team.to_json(), "name") for team in entry.teams}}
        for entry in record.nvshmem
    }
    return {key: found for key, found in (("communicators", communicators), ("nvshmem", elements)) if found}


def _without(doc: dict[str, Any], *keys: str) -> dict[str, Any]:
    """What the path does not say already."""
    return {key: value for key, value in doc.items() if key not in keys}


def _process_facts(process: ProcessEntry) -> dict[str, Any]:
    """Objects by their number; imports by what each is of, because that says what a process would get back."""
    doc = process.to_json()
    doc["objects"] = len(process.objects)
    if process.imports:
        doc["imports"] = {str(entry.id): {"of": entry.of, "kind": entry.kind} for entry in process.imports}
    if process.descriptors:  # a token is another one each time
        doc["descriptors"] = {str(entry.number): entry.of for entry in process.descriptors}
    return dict(_leaves(doc, ""))


def _leaves(value: Any, at: str) -> Iterable[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{at}.{key}" if at else key)
    else:
        yield at, value


def _differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Fact]:
    paths = sorted({*before, *after})
    return [Fact(p, before.get(p), after.get(p)) for p in paths if before.get(p) != after.get(p)]


# ---- content -------------------------------------------------------------------------------------


def region_changes(before: Index, after: Index) -> list[RegionChange]:
    """Every region of both, by kind and name: those of the later index in its order, then the removed ones."""
    old, new = _by(before.regions, _region_key), _by(after.regions, _region_key)
    changes = [_change(old.get(key), region, before, after) for key, region in new.items()]
    gone = [region for key, region in old.items() if key not in new]
    return changes + [RegionChange(region.name, kind_name(region.kind), "removed", region.length, 0) for region in gone]


def _region_key(region: Region) -> tuple[int, str]:
    return region.kind, region.name


def _change(old: Region | None, new: Region, before: Index, after: Index) -> RegionChange:
    is_evenly_cut = new.kind in EVENLY_CUT and before.chunk_size == after.chunk_size
    count_by = count_by_place if is_evenly_cut else count_by_id
    count = count_by(before.chunks_of(old) if old else (), after.chunks_of(new))
    # By ids in order, and not by the count: chunks of pages may have changed places.
    is_equal = old is not None and _ids(before, old) == _ids(after, new)
    change = "added" if old is None else "equal" if is_equal else "changed"
    return RegionChange(new.name, kind_name(new.kind), change, old.length if old else 0, new.length, count)


def _ids(index: Index, region: Region) -> list[tuple[bytes, int]]:
    return [(chunk.id, chunk.length) for chunk in index.chunks_of(region)]


def count_by_place(before: Sequence[Chunk], after: Sequence[Chunk]) -> ContentCount:
    """Compare two runs of chunks place by place: what a process wrote."""
    padded = chain(before, repeat(None))
    return _count((old is not None and old.id == new.id, new) for new, old in zip(after, padded, strict=False))


def count_by_id(before: Sequence[Chunk], after: Sequence[Chunk]) -> ContentCount:
    """Compare two runs of chunks whose cuts may lie elsewhere: a chunk is equal when it was there at all."""
    known = {chunk.id for chunk in before}
    return _count((new.id in known, new) for new in after)


def _count(pairs: Iterable[tuple[bool, Chunk]]) -> ContentCount:
    equal, changed, zeroed = [0, 0], [0, 0], [0, 0]
    for is_equal, chunk in pairs:
        bucket = equal if is_equal else zeroed if chunk.codec == Codec.ZERO else changed
        bucket[0] += chunk.length
        bucket[1] += 1
    return ContentCount(equal[0], changed[0], zeroed[0], equal[1], changed[1], zeroed[1])


def transfer(before: Index, after: Index) -> Transfer:
    """Content of the later index that is neither zero nor anywhere in the earlier one, and the packs that carry it."""
    known = {chunk.id for chunk in before.chunks}
    wanted = {chunk.id: chunk.length for chunk in after.chunks if chunk.codec != Codec.ZERO and chunk.id not in known}
    new = [
        pack
        for pack in plan_packs(after, earlier=map(_as_pushed, plan_packs(before).packs)).packs
        if not pack.is_earlier
    ]
    small = sum(region.length for region in after.small_files)
    sent = sum(chunk.length for pack in new for chunk in pack.chunks)
    return Transfer(sum(wanted.values()), len(wanted), sent + small, len(new))


def _as_pushed(pack: PlannedPack) -> EarlierPack:
    """A pack of the earlier checkpoint as a registry has it, but for its size and digest, which nobody has measured."""
    places = {chunk.id: (Place(Codec.RAW, 0, chunk.length), chunk.length) for chunk in pack.chunks}
    return EarlierPack(pack.kind, 0, pack.key, places)


def _by(entries: Iterable[Any], key: Callable[[Any], Any]) -> dict[Any, Any]:
    return {key(entry): entry for entry in entries}
