"""Which chunk index a reader takes (spec/chunk-index.md, sections 3 to 5 and 8): the rules over its tables.

Pure: an index in, an error out that names the region, chunk or pack at fault. The sizes of the tables were checked
before (`chunk_index`); here it is checked that all places are such that a reader who follows them never reads a byte
twice under two names, beyond an end, or from another kind of content. `chunk_index.from_bytes` calls it.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

from image_format.file_names import check_pack_name, object_key, pack_name
from image_format.index_model import MAX_PACK_CHUNKS, PACK_ALIGNMENT, Codec, RegionKind, chunk_count_of, zero_id
from vgpu_errors import ImageError, LimitExceeded, UnknownFeature

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from image_format.index_model import Chunk, Index, Pack, Region

_SEALED_CODECS = frozenset({int(Codec.ZERO), int(Codec.RAW)})
_PACKED_CODECS = frozenset(int(codec) for codec in Codec)


def check(index: Index, where: str) -> None:
    """Refuse an index that breaks a rule."""
    _check_regions(index, where)
    if index.is_packed:
        _check_transport_packs(index, where)
    else:
        _check_sealed_packs(index, where)
    _check_chunks(index, where)


# ---- regions -------------------------------------------------------------------------------------


def _check_regions(index: Index, where: str) -> None:
    next_chunk = 0
    for n, region in enumerate(index.regions):
        at = f"{where}: region {n}"
        if n and not _is_after(region, index.regions[n - 1], at):
            raise ImageError(where=at, what=f"the name {region.name} is a repeat or out of order")
        if region.first_chunk != next_chunk:
            raise ImageError(where=at, what=f"its chunks begin at {region.first_chunk}, not at {next_chunk}")
        if not _can_hold(region, index.chunk_size):
            raise ImageError(where=at, what=f"{region.chunk_count} chunks cannot hold {region.length} bytes")
        next_chunk += region.chunk_count
    if next_chunk != len(index.chunks):
        raise ImageError(where=where, what=f"{len(index.chunks)} chunks, of which the regions use {next_chunk}")


def _can_hold(region: Region, chunk_size: int) -> bool:
    least = chunk_count_of(region.length, chunk_size)
    if region.kind == RegionKind.PAGES:
        return least <= region.chunk_count <= region.length
    return region.chunk_count == least


def _is_after(region: Region, previous: Region, at: str) -> bool:
    kinds = [entry.kind == RegionKind.VRAM for entry in (previous, region)]
    if kinds[0] != kinds[1]:
        return kinds[1]
    if not kinds[1]:
        return region.name > previous.name
    return object_key(region.name, where=at) > object_key(previous.name, where=at)


# ---- packs ---------------------------------------------------------------------------------------


def _check_sealed_packs(index: Index, where: str) -> None:
    files = index.files
    if len(index.packs) < len(files) or (len(index.packs) > len(files) and not index.vram):
        raise ImageError(where=where, what=f"{len(index.packs)} packs for {len(files)} file regions")
    _check_own_packs(index, files, where)
    previous = ""
    for n, pack in enumerate(index.vram_packs, len(files)):
        if check_pack_name(pack.name, where=f"{where}: pack {n}") <= previous:
            raise ImageError(where=f"{where}: pack {n}", what=f"the name {pack.name} is a repeat or out of order")
        previous = pack.name


def _check_own_packs(index: Index, files: Sequence[Region], where: str) -> None:
    for n, (region, pack) in enumerate(zip(files, index.packs, strict=False)):
        if (pack.name, pack.size, pack.flags) != (region.name, region.length, 0):
            raise ImageError(where=f"{where}: region {n}", what=f"pack {n} is not the file itself")


def _check_transport_packs(index: Index, where: str) -> None:
    files = index.small_files
    if len(index.packs) < len(files):
        raise ImageError(where=where, what=f"{len(index.packs)} packs for {len(files)} small files")
    _check_own_packs(index, files, where)
    for number, pack in enumerate(index.transport_packs):
        at = f"{where}: pack {len(files) + number}"
        if pack.name != pack_name(number):
            raise ImageError(where=at, what=f"the name {pack.name!a} is not that of pack {number}")
        if pack.flags not in set(RegionKind):
            raise ImageError(where=at, what=f"its class {pack.flags} is no kind of region")
        if not any(pack.sha256):
            raise ImageError(where=at, what="it has no sha256")
        if pack.size % PACK_ALIGNMENT:
            raise ImageError(where=at, what=f"its size {pack.size} is no multiple of {PACK_ALIGNMENT}")
        if pack.size > MAX_PACK_CHUNKS * index.chunk_size:
            raise LimitExceeded(
                where=at, what="its size", found=pack.size, limit=f"{MAX_PACK_CHUNKS} chunks of {index.chunk_size}"
            )


# ---- chunks --------------------------------------------------------------------------------------


def _check_chunks(index: Index, where: str) -> None:
    places = _PackedPlaces(index) if index.is_packed else _Slots(index)
    codecs = _PACKED_CODECS if index.is_packed else _SEALED_CODECS
    own_pack = -1
    for region in index.regions:
        keeps_file = region.is_small if index.is_packed else region.kind != RegionKind.VRAM
        own_pack += keeps_file
        for chunk, at in _measured_chunks(index, region, where):
            if chunk.codec not in codecs:
                raise UnknownFeature(where=f"{where}: chunk {at.number}", feature=f"chunk codec {chunk.codec}")
            fault = _own_file_fault(chunk, region, own_pack, at) if keeps_file else places.fault(chunk, region)
            if fault:
                raise ImageError(where=f"{where}: chunk {at.number}", what=fault)
    for n, what in places.remaining_faults():
        raise ImageError(where=f"{where}: pack {n}", what=what)


class _At(NamedTuple):
    number: int
    start: int


def _measured_chunks(index: Index, region: Region, where: str) -> Iterator[tuple[Chunk, _At]]:
    """The chunks of a region and where each one begins in it; refuses lengths that do not make up the region."""
    start = 0
    for number, chunk in enumerate(index.chunks_of(region), region.first_chunk):
        most = min(index.chunk_size, region.length - start)
        is_fitting = 0 < chunk.length <= most if region.kind == RegionKind.PAGES else chunk.length == most
        if not is_fitting:
            what = f"is not the {most} bytes at {start} of {region.name}"
            raise ImageError(where=f"{where}: chunk {number}", what=what)
        yield chunk, _At(number, start)
        start += chunk.length
    if start != region.length:
        raise ImageError(where=f"{where}: {region.name}", what=f"its chunks hold {start} bytes, not {region.length}")


def _own_file_fault(chunk: Chunk, region: Region, pack: int, at: _At) -> str | None:
    stored = (at.start, chunk.length) if chunk.codec else (0, 0)
    if chunk.codec > Codec.RAW or (chunk.pack, (chunk.offset, chunk.stored_length)) != (pack, stored):
        return f"is not the {chunk.length} bytes at {at.start} of {region.name}"
    return None


def _zero_fault(chunk: Chunk) -> str | None:
    if chunk.pack or chunk.offset or chunk.stored_length:
        return "a zero chunk has no place"
    return None if chunk.id == zero_id(chunk.length) else "its id is not that of zeros"


class _Slots:
    """Which slots of the sealed packs hold VRAM chunks: one slot, one content."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._first = len(index.files)
        self._taken: dict[tuple[int, int], tuple[bytes, int]] = {}

    def fault(self, chunk: Chunk, region: Region) -> str | None:
        """What is wrong with the place of a VRAM chunk, or None; takes note of the place."""
        del region
        return _zero_fault(chunk) if chunk.codec == Codec.ZERO else self._stored_fault(chunk)

    def remaining_faults(self) -> list[tuple[int, str]]:
        """Packs that hold nothing."""
        used = {pack for pack, _ in self._taken}
        packs = enumerate(self._index.packs[self._first :], self._first)
        return [(n, f"no chunk lies in {pack.name}") for n, pack in packs if n not in used]

    def _stored_fault(self, chunk: Chunk) -> str | None:
        if not self._first <= chunk.pack < len(self._index.packs):
            return f"there is no pack {chunk.pack}"
        pack = self._index.packs[chunk.pack]
        if chunk.stored_length != chunk.length or chunk.offset % self._index.chunk_size:
            return f"is not at the beginning of a slot of {pack.name}"
        if chunk.offset + chunk.length > pack.size:
            return f"lies beyond the end of {pack.name}"
        content = (chunk.id, chunk.length)
        if self._taken.setdefault((chunk.pack, chunk.offset), content) != content:
            return f"lies over another chunk at {chunk.offset} of {pack.name}"
        return None


class _PackedPlaces:
    """Which stretches of the packs for transport hold chunks: no byte belongs to two contents."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._first = len(index.small_files)
        # Pack, then offset: codec, stored length, id and length of what begins there.
        self._taken: dict[int, dict[int, tuple[int, int, bytes, int]]] = {}

    def fault(self, chunk: Chunk, region: Region) -> str | None:
        """What is wrong with the place of a chunk, or None; takes note of the place."""
        if chunk.codec == Codec.ZERO:
            return _zero_fault(chunk)
        if not self._first <= chunk.pack < len(self._index.packs):
            return f"there is no pack {chunk.pack}"
        pack = self._index.packs[chunk.pack]
        return self._class_fault(pack, region) or self._length_fault(chunk) or self._place_fault(chunk, pack)

    def remaining_faults(self) -> list[tuple[int, str]]:
        """Packs that hold nothing, and chunks that lie partly over another."""
        packs = enumerate(self._index.packs[self._first :], self._first)
        faults = [(n, f"no chunk lies in {pack.name}") for n, pack in packs if n not in self._taken]
        for n, taken in self._taken.items():
            for (offset, place), (next_offset, _) in itertools.pairwise(sorted(taken.items())):
                if offset + place[1] > next_offset:
                    faults.append((n, f"the chunks at {offset} and {next_offset} overlap"))
        return faults

    @staticmethod
    def _class_fault(pack: Pack, region: Region) -> str | None:
        return None if pack.flags == region.kind else f"is of kind {region.kind}, and {pack.name} of {pack.flags}"

    @staticmethod
    def _length_fault(chunk: Chunk) -> str | None:
        is_stored = (
            chunk.stored_length == chunk.length if chunk.codec == Codec.RAW else 0 < chunk.stored_length < chunk.length
        )
        return None if is_stored else f"{chunk.stored_length} stored bytes cannot be {chunk.length}"

    def _place_fault(self, chunk: Chunk, pack: Pack) -> str | None:
        if chunk.offset % PACK_ALIGNMENT:
            return f"begins at {chunk.offset} of {pack.name}, no multiple of {PACK_ALIGNMENT}"
        if chunk.offset + chunk.stored_length > pack.size:
            return f"lies beyond the end of {pack.name}"
        content = (chunk.codec, chunk.stored_length, chunk.id, chunk.length)
        if self._taken.setdefault(chunk.pack, {}).setdefault(chunk.offset, content) != content:
            return f"lies over another chunk at {chunk.offset} of {pack.name}"
        return None
