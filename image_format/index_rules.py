"""Which chunk index a reader takes (spec/chunk-index.md, sections 3 to 5 and 8): the rules over its tables.

Pure: an index in, an error out that names the region, chunk or pack at fault. The sizes of the tables were checked
before (`chunk_index`); here it is checked that all places are such that a reader who follows them never reads a byte
twice under two names, beyond an end, or from another kind of content. `chunk_index.from_bytes` calls it.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import TYPE_CHECKING, NoReturn

from image_format.file_names import check_pack_name, object_key, pack_name
from image_format.index_model import MAX_PACK_CHUNKS, PACK_ALIGNMENT, Codec, RegionKind, chunk_count_of, zero_ids
from vgpu_errors import ImageError, LimitExceeded, UnknownFeature

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from image_format.index_model import Chunk, Index, Pack, Region

# Plain numbers: comparing with a member of an enumeration costs more than all else that is done for a chunk.
_ZERO, _RAW, _ZSTD = (int(codec) for codec in Codec)

_Fault = tuple[int, str]


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
    own_pack = -1
    for region in index.regions:
        chunks = index.chunks_of(region)
        _check_lengths(region, chunks, index.chunk_size, where)
        keeps_file = region.is_small if index.is_packed else region.kind != RegionKind.VRAM
        own_pack += keeps_file
        faults = _own_file_faults(chunks, region, own_pack) if keeps_file else places.faults(chunks, region)
        for number, fault in faults:
            _refuse(chunks[number], fault, places.codecs, f"{where}: chunk {region.first_chunk + number}")
    for n, what in places.remaining_faults():
        raise ImageError(where=f"{where}: pack {n}", what=what)


def _refuse(chunk: Chunk, fault: str, codecs: frozenset[int], at: str) -> NoReturn:
    if chunk.codec not in codecs:
        raise UnknownFeature(where=at, feature=f"chunk codec {chunk.codec}")
    raise ImageError(where=at, what=fault)


def _check_lengths(region: Region, chunks: Sequence[Chunk], chunk_size: int, where: str) -> None:
    """Refuse chunks that do not make up the region."""
    start = 0
    is_even = region.kind != RegionKind.PAGES
    for number, chunk in enumerate(chunks, region.first_chunk):
        length = chunk.length
        most = min(chunk_size, region.length - start)
        if length != most and (is_even or not 0 < length < most):
            what = f"is not the {most} bytes at {start} of {region.name}"
            raise ImageError(where=f"{where}: chunk {number}", what=what)
        start += length
    if start != region.length:
        raise ImageError(where=f"{where}: {region.name}", what=f"its chunks hold {start} bytes, not {region.length}")


def _own_file_faults(chunks: Sequence[Chunk], region: Region, own_pack: int) -> Iterator[_Fault]:
    """Chunks that do not lie in the region's own file, each where it begins in the region."""
    start = 0
    for number, (_, pack, codec, offset, stored_length, length) in enumerate(chunks):
        place = (start, length) if codec else (0, 0)
        if codec > _RAW or pack != own_pack or (offset, stored_length) != place:
            yield number, f"is not the {length} bytes at {start} of {region.name}"
        start += length


class _Places:
    """Which stretches of the packs hold chunks: no byte belongs to two contents."""

    codecs: frozenset[int]

    def __init__(self, index: Index, first: int) -> None:
        self._packs = index.packs
        self._first = first
        self._chunk_size = index.chunk_size
        # Pack, then offset: what begins there.
        self._taken: defaultdict[int, dict[int, Chunk]] = defaultdict(dict)
        zero_lengths = {chunk.length for chunk in index.chunks if not chunk.codec}
        self._zero_ids = zero_ids(length for length in zero_lengths if length <= index.chunk_size)

    def faults(self, chunks: Sequence[Chunk], region: Region) -> Iterator[_Fault]:
        """What is wrong with the places of a region's chunks; takes note of them."""
        for number, chunk in enumerate(chunks):
            fault = self._place_fault(chunk, region) if chunk.codec else self._zero_fault(chunk)
            if fault is not None:
                yield number, fault

    def remaining_faults(self) -> list[_Fault]:
        """Packs that hold nothing."""
        packs = enumerate(self._packs[self._first :], self._first)
        return [(n, f"no chunk lies in {pack.name}") for n, pack in packs if n not in self._taken]

    def _place_fault(self, chunk: Chunk, region: Region) -> str | None:
        raise NotImplementedError

    def _zero_fault(self, chunk: Chunk) -> str | None:
        if chunk.pack or chunk.offset or chunk.stored_length:
            return "a zero chunk has no place"
        return None if chunk.id == self._zero_ids[chunk.length] else "its id is not that of zeros"

    def _end_fault(self, chunk: Chunk, pack: Pack) -> str | None:
        """Beyond the pack's end, or where another content begins: chunks at one place are equal in every field."""
        offset = chunk.offset
        if offset + chunk.stored_length > pack.size:
            return f"lies beyond the end of {pack.name}"
        if self._taken[chunk.pack].setdefault(offset, chunk) != chunk:
            return f"lies over another chunk at {offset} of {pack.name}"
        return None


class _Slots(_Places):
    """The slots of the sealed packs that hold VRAM chunks: one slot, one content."""

    codecs = frozenset({_ZERO, _RAW})

    def __init__(self, index: Index) -> None:
        super().__init__(index, len(index.files))

    def _place_fault(self, chunk: Chunk, region: Region) -> str | None:
        del region
        if not self._first <= chunk.pack < len(self._packs):
            return f"there is no pack {chunk.pack}"
        pack = self._packs[chunk.pack]
        if chunk.codec != _RAW or chunk.stored_length != chunk.length or chunk.offset % self._chunk_size:
            return f"is not at the beginning of a slot of {pack.name}"
        return self._end_fault(chunk, pack)


class _PackedPlaces(_Places):
    """The stretches of the packs for transport, each of one kind of regions."""

    codecs = frozenset(int(codec) for codec in Codec)

    def __init__(self, index: Index) -> None:
        super().__init__(index, len(index.small_files))

    def remaining_faults(self) -> list[_Fault]:
        """Packs that hold nothing, and chunks that lie partly over another."""
        faults = super().remaining_faults()
        for n, taken in self._taken.items():
            for (offset, chunk), (next_offset, _) in itertools.pairwise(sorted(taken.items())):
                if offset + chunk.stored_length > next_offset:
                    faults.append((n, f"the chunks at {offset} and {next_offset} overlap"))
        return faults

    def _place_fault(self, chunk: Chunk, region: Region) -> str | None:
        if not self._first <= chunk.pack < len(self._packs):
            return f"there is no pack {chunk.pack}"
        pack = self._packs[chunk.pack]
        if pack.flags != region.kind:
            return f"is of kind {region.kind}, and {pack.name} of {pack.flags}"
        if not _is_stored(chunk):
            return f"{chunk.stored_length} stored bytes cannot be {chunk.length}"
        if chunk.offset % PACK_ALIGNMENT:
            return f"begins at {chunk.offset} of {pack.name}, no multiple of {PACK_ALIGNMENT}"
        return self._end_fault(chunk, pack)


def _is_stored(chunk: Chunk) -> bool:
    """The stored length is one that the codec can have."""
    if chunk.codec == _RAW:
        return chunk.stored_length == chunk.length
    return chunk.codec == _ZSTD and 0 < chunk.stored_length < chunk.length
