"""Cuts a sealed checkpoint into packs for transport (spec/transport.md, section 2). Pure: decides, and reads no content.

How the parts fit, for whoever pushes or pulls:

    plan = plan_packs(index, earlier=earlier_packs(parents_packed_index))   # here; index: the sealed one
    plan = measure_packs(plan, directory, threads=…)                        # pack_streams: one pass, sha256 and sizes
    data = packed_index_bytes(plan)                                         # the packed index, same content root
    for n, pack in enumerate(plan.packs):                                   # pack.layout.sha256, .size; pack.media_type
        stream = open_pack(plan, n, directory)                              # pack_streams: seekable, the same bytes
    describe_small_files / write_small_files                                # small_files: the tar of the other files

    with Unpacker(sealed_index, packed_index, into) as unpacker:            # unpacking: chunk by chunk, verified
        unpacker.write(n, stream, start=…)
    or unpack(documents, packed_index, into, packs=…, small_files=…)        # all of it, signature last

What is shared when: a pack's bytes follow from nothing but its own chunks' ids, its kind and the compression, so equal
content at equal positions is an equal blob. Packs of earlier checkpoints that `earlier` names are used whole, as they
are, where at least half of each is still needed; only what they lack goes into new packs. Such a pack cannot be made
from this directory: `pack.is_earlier`; whoever pushes looks whether the registry has it and plans again without those
that it lacks. Refuses a packed index as its source. The transport verbs call it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from blake3 import blake3

from image_format import chunk_index
from image_format.file_names import INDEX_NAME, pack_name
from image_format.index_model import MAX_PACK_CHUNKS, Chunk, Codec, Index, Pack, Region, RegionKind, zero_ids
from image_format.packs.pack_model import (
    RAW_PACK_TYPE,
    ZSTD_PACK_TYPE,
    Compression,
    EarlierPack,
    Layout,
    PackedPlan,
    Place,
    PlannedChunk,
    PlannedPack,
    Source,
    aligned,
    pack_media_type,
)
from vgpu_errors import ImageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

__all__ = [
    "RAW_PACK_TYPE",
    "ZSTD_PACK_TYPE",
    "Compression",
    "EarlierPack",
    "Layout",
    "PackedPlan",
    "Place",
    "PlannedChunk",
    "PlannedPack",
    "Source",
    "aligned",
    "earlier_packs",
    "pack_media_type",
    "packed_index",
    "packed_index_bytes",
    "plan_packs",
    "sources_of",
]

# Packs of pages end where a chunk's id says so, because runs of memory shift: not before the first, at the last number
# of chunk sizes, and in between where the id's first byte is below the mark (one chunk in 32).
MIN_PAGES_CHUNKS = 16
PAGES_MARK = 8

_KEY_TAG = b"vgpu-pack-v1\0"
_NOT_PACKED = -1


def plan_packs(
    index: Index, *, earlier: Iterable[EarlierPack] = (), compression: Compression | None = None
) -> PackedPlan:
    """Cut a sealed index into packs; those of `earlier`, the best source first, are used where they still serve."""
    if index.is_packed:
        raise ImageError(where=INDEX_NAME, what="is a packed index; only a sealed one is cut into packs")
    planner = _Planner(index, compression or Compression())
    reusable = _merged(earlier)
    for kind in RegionKind:
        planner.plan_kind(kind, [pack for pack in reusable if pack.kind == kind])
    return PackedPlan(index, tuple(planner.packs), planner.pack_of, planner.compression)


def earlier_packs(packed: Index) -> list[EarlierPack]:
    """The packs of a packed index, for a plan that wants to use them."""
    if not packed.is_packed:
        raise ImageError(where=INDEX_NAME, what="is a sealed index and lists no packs for transport")
    first = len(packed.small_files)
    places: list[dict[bytes, tuple[Place, int]]] = [{} for _ in packed.transport_packs]
    for region in packed.regions:
        if not region.is_small:
            for chunk in packed.chunks_of(region):
                if chunk.codec != Codec.ZERO:
                    place = Place(chunk.codec, chunk.offset, chunk.stored_length)
                    places[chunk.pack - first][chunk.id] = (place, chunk.length)
    packs = zip(packed.transport_packs, places, strict=True)
    return [EarlierPack(pack.flags, pack.size, pack.sha256, held) for pack, held in packs]


def _merged(packs: Iterable[EarlierPack]) -> list[EarlierPack]:
    """One of each blob and kind: several images may name the same one and list different chunks of it."""
    merged: dict[tuple[int, int, bytes], EarlierPack] = {}
    for pack in packs:
        blob = (pack.kind, pack.size, pack.sha256)
        before = merged.get(blob)
        merged[blob] = pack if before is None else before._replace(places={**pack.places, **before.places})
    return list(merged.values())


def sources_of(index: Index, region: Region) -> Iterator[tuple[Chunk, Source]]:
    """The chunks of a region of a sealed index, and where each one's bytes are, zeros in files among them."""
    start = 0
    for chunk in index.chunks_of(region):
        if region.kind != RegionKind.VRAM:
            yield chunk, Source(region.name, start)
        else:
            yield chunk, Source(index.packs[chunk.pack].name if chunk.codec else "", chunk.offset)
        start += chunk.length


class _Planner:
    """Collects packs kind by kind."""

    def __init__(self, index: Index, compression: Compression) -> None:
        self.index = index
        self.compression = compression
        self.packs: list[PlannedPack] = []
        self.pack_of = [_NOT_PACKED] * len(index.chunks)
        self._by_key: dict[bytes, int] = {}
        self._zero_ids = zero_ids(chunk.length for chunk in index.chunks)

    def plan_kind(self, kind: RegionKind, earlier: Sequence[EarlierPack]) -> None:
        """All packs of one kind of region."""
        groups = self._groups(kind)
        taken = self._take_earlier(groups, earlier)
        leftover: list[_Wanted] = []
        for group in groups:
            missing = [wanted for wanted in group if wanted.chunk.id not in taken]
            if len(missing) == len(group):
                self._add(kind, group)
            else:
                leftover += missing
        for first in range(0, len(leftover), MAX_PACK_CHUNKS):
            self._add(kind, leftover[first : first + MAX_PACK_CHUNKS])

    def _groups(self, kind: RegionKind) -> list[list[_Wanted]]:
        regions = [region for region in self.index.regions if region.kind == kind and not region.is_small]
        cut = _cut_pages if kind == RegionKind.PAGES else _cut_at_positions
        groups = cut([self._wanted(region) for region in regions], self.index.chunk_size)
        stored = ([wanted for wanted in group if not wanted.is_zero] for group in groups)
        return [group for group in stored if group]

    def _wanted(self, region: Region) -> list[_Wanted]:
        chunks = sources_of(self.index, region)
        return [
            _Wanted(number, PlannedChunk(chunk.id, chunk.length, source), chunk.id == self._zero_ids[chunk.length])
            for number, (chunk, source) in enumerate(chunks, region.first_chunk)
        ]

    def _take_earlier(self, groups: Sequence[list[_Wanted]], earlier: Sequence[EarlierPack]) -> set[bytes]:
        if not earlier:
            return set()
        wanted: dict[bytes, list[_Wanted]] = {}
        for group in groups:
            for entry in group:
                wanted.setdefault(entry.chunk.id, []).append(entry)
        taken: set[bytes] = set()
        for pack in earlier:
            ids = [
                chunk_id
                for chunk_id, (_, length) in pack.places.items()
                if chunk_id in wanted and chunk_id not in taken and wanted[chunk_id][0].chunk.length == length
            ]
            used = sum(aligned(pack.places[chunk_id][0].stored_length) for chunk_id in ids)
            if ids and 2 * used >= pack.size:
                taken.update(ids)
                self._add_earlier(pack, {chunk_id: wanted[chunk_id] for chunk_id in ids})
        return taken

    def _add_earlier(self, pack: EarlierPack, wanted: Mapping[bytes, Sequence[_Wanted]]) -> None:
        chunks = tuple(entries[0].chunk for entries in wanted.values())
        layout = Layout(pack.size, pack.sha256, tuple(pack.places[chunk.id][0] for chunk in chunks))
        key = bytes([pack.kind]) + pack.sha256
        self._place(PlannedPack(pack.kind, chunks, key, layout, is_earlier=True), wanted.values())

    def _add(self, kind: int, group: Sequence[_Wanted]) -> None:
        by_id = {wanted.chunk.id: wanted.chunk for wanted in group}
        chunks = tuple(by_id.values())
        key = self._key(kind, by_id)
        self._place(PlannedPack(kind, chunks, key), [group])

    def _place(self, pack: PlannedPack, wanted: Iterable[Iterable[_Wanted]]) -> None:
        number = self._by_key.setdefault(pack.key, len(self.packs))
        if number == len(self.packs):
            self.packs.append(pack)
        for entries in wanted:
            for entry in entries:
                self.pack_of[entry.number] = number

    def _key(self, kind: int, ids: Iterable[bytes]) -> bytes:
        level = self.compression.level if kind in self.compression.kinds else 0
        hasher = blake3(_KEY_TAG)
        hasher.update(bytes([kind, level]))
        hasher.update(b"".join(ids))
        return hasher.digest()


class _Wanted(NamedTuple):
    number: int
    chunk: PlannedChunk
    is_zero: bool


def _cut_at_positions(regions: Iterable[list[_Wanted]], chunk_size: int) -> list[list[_Wanted]]:
    """Packs by position alone: a large region is cut every 128 chunks, small ones share packs as whole regions."""
    del chunk_size
    groups: list[list[_Wanted]] = [[]]
    for region in regions:
        if len(region) >= MAX_PACK_CHUNKS:
            groups += [region[first : first + MAX_PACK_CHUNKS] for first in range(0, len(region), MAX_PACK_CHUNKS)]
            groups.append([])
        elif len(groups[-1]) + len(region) > MAX_PACK_CHUNKS:
            groups.append(region)
        else:
            groups[-1] = groups[-1] + region
    return groups


def _cut_pages(regions: Iterable[list[_Wanted]], chunk_size: int) -> list[list[_Wanted]]:
    """Packs that end where a chunk's id says so: what shifts, or comes in between, changes only the packs around it."""
    least, most = MIN_PAGES_CHUNKS * chunk_size, MAX_PACK_CHUNKS * chunk_size
    groups: list[list[_Wanted]] = [[]]
    size = 0
    for region in regions:
        for wanted in region:
            if wanted.is_zero:
                continue
            length = aligned(wanted.chunk.length)
            if size + length > most:
                groups.append([])
                size = 0
            groups[-1].append(wanted)
            size += length
            if size >= least and wanted.chunk.id[0] < PAGES_MARK:
                groups.append([])
                size = 0
    return groups


# ---- the packed index ----------------------------------------------------------------------------


def packed_index(plan: PackedPlan) -> Index:
    """The sealed index with the places that its chunks have in the packs; the content root is the same."""
    index = plan.index
    own = tuple(Pack(region.name, region.length) for region in index.small_files)
    packs = tuple(_blob(number, pack) for number, pack in enumerate(plan.packs))
    places = [_places_of(pack) for pack in plan.packs]
    chunks: list[Chunk] = []
    own_number = 0
    for region in index.regions:
        for number, chunk in enumerate(index.chunks_of(region), region.first_chunk):
            pack = plan.pack_of[number]
            if region.is_small:
                chunks.append(chunk._replace(pack=own_number))
            elif pack == _NOT_PACKED:
                chunks.append(Chunk(chunk.id, 0, Codec.ZERO, 0, 0, chunk.length))
            else:
                place = places[pack][chunk.id]
                chunks.append(Chunk(chunk.id, len(own) + pack, *place, chunk.length))
        own_number += region.is_small
    return Index(index.regions, tuple(chunks), own + packs, index.chunk_size, is_packed=True)


def packed_index_bytes(plan: PackedPlan) -> bytes:
    """Its bytes; what a reader would refuse is not given out."""
    data = chunk_index.to_bytes(packed_index(plan))
    chunk_index.from_bytes(data, where="packed index")
    return data


def _blob(number: int, pack: PlannedPack) -> Pack:
    return Pack(pack_name(number), pack.measured.size, pack.measured.sha256, pack.kind)


def _places_of(pack: PlannedPack) -> dict[bytes, Place]:
    return {chunk.id: place for chunk, place in zip(pack.chunks, pack.measured.places, strict=True)}
