"""Reads and writes the chunk index `vgpu-index.bin` (spec/chunk-index.md).

Pure: bytes in, records out. Touches no file, network or GPU; callers bring buffers.
Every count is held against the size of the input before anything is allocated for it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

from blake3 import blake3

from image_format.content_root import content_root
from image_format.file_names import INDEX_NAME, check_content_name, check_name, check_pack_name, object_key
from vgpu_errors import FormatTooNew, ImageError, LimitExceeded, Truncated, UnknownFeature

MAGIC = b"VGPUIDX1"
MAJOR, MINOR = 1, 1
CHUNK_SIZE = 4 << 20
MIN_CHUNK_SIZE, MAX_CHUNK_SIZE = 4 << 10, 64 << 20
HASH_BLAKE3 = 1
MAX_INDEX_BYTES = 512 << 20
MAX_REGIONS = 1 << 20
MAX_NAMES_BYTES = 64 << 20
MAX_HEADER_SIZE = 4096
MAX_RECORD_SIZE = 1024

# magic, major, minor, header size, region/chunk/pack record size, chunk size, hash, reserved,
# region/chunk/pack count, names size, content root, reserved
_HEADER = struct.Struct("<8sHH6II4Q32s24s")
_REGION = struct.Struct("<HHIQQQQII16s")
_CHUNK = struct.Struct("<32sIHHQII8s")
_PACK = struct.Struct("<IIQ32sI12s")


class RegionKind(IntEnum):
    """What a region's bytes were. Other values belong to later versions."""

    FILE = 1
    VRAM = 2


class Codec(IntEnum):
    """How a chunk is stored: not at all because it is all zero, or as it is."""

    ZERO = 0
    RAW = 1


class Region(NamedTuple):
    """A run of content with one name: a file of the checkpoint, or an object in GPU memory.

    Device, address and uuid are those of GPU memory; they are zero for a file.
    """

    name: str
    length: int
    first_chunk: int
    chunk_count: int
    kind: int = RegionKind.FILE
    device: int = 0
    flags: int = 0
    address: int = 0
    uuid: bytes = bytes(16)


class Chunk(NamedTuple):
    """A piece of a region: its identity and where it lies."""

    id: bytes
    pack: int
    codec: int
    offset: int
    stored_length: int
    length: int


class Pack(NamedTuple):
    """A file that holds chunks: for a file region the file itself, for VRAM a `vgpu-pack-NNNNN.bin` of slots."""

    name: str
    size: int
    sha256: bytes = bytes(32)
    flags: int = 0


@dataclass(frozen=True)
class Index:
    """The parsed index. Files come first, by name; then VRAM, by pid and object id. Packs come in the same order."""

    regions: tuple[Region, ...]
    chunks: tuple[Chunk, ...]
    packs: tuple[Pack, ...]
    chunk_size: int = CHUNK_SIZE
    minor: int = MINOR
    content_root: bytes = field(default=bytes(32))

    @property
    def files(self) -> tuple[Region, ...]:
        """The regions that are files; the pack of each has the same number."""
        return tuple(region for region in self.regions if region.kind == RegionKind.FILE)

    @property
    def vram(self) -> tuple[Region, ...]:
        """The regions that were GPU memory."""
        return tuple(region for region in self.regions if region.kind == RegionKind.VRAM)

    @property
    def vram_packs(self) -> tuple[Pack, ...]:
        """The packs that hold slots."""
        return self.packs[len(self.files) :]

    def chunks_of(self, region: Region) -> tuple[Chunk, ...]:
        """The chunks of one region in order."""
        return self.chunks[region.first_chunk : region.first_chunk + region.chunk_count]

    def slots(self) -> dict[str, dict[int, int]]:
        """For each pack of VRAM chunks the slots in use: number of the slot to length of its chunk."""
        used: dict[str, dict[int, int]] = {pack.name: {} for pack in self.vram_packs}
        for region in self.vram:
            for chunk in self.chunks_of(region):
                if chunk.codec != Codec.ZERO:
                    used[self.packs[chunk.pack].name][chunk.offset // self.chunk_size] = chunk.length
        return used

    def compute_content_root(self) -> bytes:
        """BLAKE3 over what the regions hold, wherever it is stored (spec/chunk-index.md, section 6).

        Where an object was mapped is said in the index, but is no part of what it holds.
        """
        regions = [region._replace(address=0) if region.kind == RegionKind.VRAM else region for region in self.regions]
        return content_root(self.chunk_size, regions, (chunk.id for chunk in self.chunks))


@lru_cache(maxsize=4096)
def zero_id(length: int) -> bytes:
    """The id of that many zero bytes; a chunk with this id need not be stored."""
    return blake3(bytes(length)).digest()


def chunk_count_of(length: int, chunk_size: int) -> int:
    """How many chunks a region of that length has."""
    return -(-length // chunk_size)


# ---- writing -------------------------------------------------------------------------------------


def to_bytes(index: Index) -> bytes:
    """The index file; the content root is computed here."""
    names = bytearray()
    regions = [_pack_region(region, names) for region in index.regions]
    packs = [_pack_pack(pack, names) for pack in index.packs]
    chunks = [_CHUNK.pack(*chunk[:3], 0, *chunk[3:], b"") for chunk in index.chunks]
    header = _HEADER.pack(
        MAGIC,
        MAJOR,
        1 if index.vram else 0,
        _HEADER.size,
        _REGION.size,
        _CHUNK.size,
        _PACK.size,
        index.chunk_size,
        HASH_BLAKE3,
        0,
        len(regions),
        len(chunks),
        len(packs),
        len(names),
        index.compute_content_root(),
        b"",
    )
    return b"".join([header, *regions, *chunks, *packs, bytes(names)])


def _pack_region(region: Region, names: bytearray) -> bytes:
    offset, length = _add_name(region.name, names)
    numbers = (region.kind, region.device, region.flags, region.address, region.length)
    return _REGION.pack(*numbers, region.first_chunk, region.chunk_count, offset, length, region.uuid)


def _pack_pack(pack: Pack, names: bytearray) -> bytes:
    offset, length = _add_name(pack.name, names)
    return _PACK.pack(offset, length, pack.size, pack.sha256, pack.flags, b"")


def _add_name(name: str, names: bytearray) -> tuple[int, int]:
    encoded = name.encode("ascii")
    offset = len(names)
    names += encoded
    return offset, len(encoded)


# ---- reading -------------------------------------------------------------------------------------

# By minor version: what a version does not define, its files do not hold.
_KINDS = (frozenset({1}), frozenset({1, 2}))


class _Header(NamedTuple):
    minor: int
    header_size: int
    region_size: int
    chunk_record_size: int
    pack_size: int
    chunk_size: int
    region_count: int
    chunk_count: int
    pack_count: int
    names_size: int
    content_root: bytes

    @property
    def total_size(self) -> int:
        tables = self.region_count * self.region_size + self.chunk_count * self.chunk_record_size
        return self.header_size + tables + self.pack_count * self.pack_size + self.names_size


def from_bytes(data: bytes | memoryview, *, where: str = INDEX_NAME) -> Index:
    """Parse and check an index file."""
    view = memoryview(data)
    header = _read_header(view, where)
    tables = _tables(view, header)
    names = bytes(tables[3])
    is_known = header.minor <= MINOR
    regions = tuple(_read_regions(tables[0], header, names, where, is_known=is_known))
    packs = tuple(_read_packs(tables[2], header, names, where, is_known=is_known))
    chunks = tuple(_read_chunks(tables[1], header, where, is_known=is_known))
    index = Index(regions, chunks, packs, header.chunk_size, header.minor, header.content_root)
    _check_regions(index, where)
    _check_chunks(index, where)
    if index.compute_content_root() != header.content_root:
        raise ImageError(where=where, what="the content root in the header is not that of the tables")
    return index


def _read_header(view: memoryview, where: str) -> _Header:
    if len(view) > MAX_INDEX_BYTES:
        raise LimitExceeded(where=where, what="its size", found=len(view), limit=MAX_INDEX_BYTES)
    if len(view) < _HEADER.size:
        raise Truncated(where=where, found=len(view), needed=_HEADER.size)
    magic, major, minor, header_size, *sizes, content, reserved = _HEADER.unpack_from(view)
    if magic != MAGIC:
        raise ImageError(where=where, what="is not a chunk index (magic)")
    if major != MAJOR:
        raise FormatTooNew(where=where, found=f"{major}.{minor}", known=f"{MAJOR}.x")
    region_size, chunk_record_size, pack_size, chunk_size, hash_id, reserved_word = sizes[:6]
    region_count, chunk_count, pack_count, names_size = sizes[6:]
    if hash_id != HASH_BLAKE3:
        raise UnknownFeature(where=where, feature=f"chunk hash {hash_id}")
    header = _Header(
        minor,
        header_size,
        region_size,
        chunk_record_size,
        pack_size,
        chunk_size,
        region_count,
        chunk_count,
        pack_count,
        names_size,
        content,
    )
    _check_header(header, where, has_reserved=bool(reserved_word or any(reserved)))
    _check_counts(header, len(view), where)
    return header


def _check_header(header: _Header, where: str, *, has_reserved: bool) -> None:
    sizes = (
        ("header size", header.header_size, _HEADER.size, MAX_HEADER_SIZE),
        ("region record size", header.region_size, _REGION.size, MAX_RECORD_SIZE),
        ("chunk record size", header.chunk_record_size, _CHUNK.size, MAX_RECORD_SIZE),
        ("pack record size", header.pack_size, _PACK.size, MAX_RECORD_SIZE),
        ("chunk size", header.chunk_size, MIN_CHUNK_SIZE, MAX_CHUNK_SIZE),
    )
    for what, found, least, most in sizes:
        if not least <= found <= most:
            raise LimitExceeded(where=where, what=f"the {what}", found=found, limit=f"{least} to {most}")
        if header.minor <= MINOR and what != "chunk size" and found != least:
            raise ImageError(where=where, what=f"the {what} is {found}, version {MAJOR}.{header.minor} has {least}")
    if header.chunk_size & (header.chunk_size - 1):
        raise ImageError(where=where, what=f"the chunk size {header.chunk_size} is no power of two")
    if has_reserved and header.minor <= MINOR:
        raise ImageError(where=where, what="reserved bytes of the header are not zero")


def _check_counts(header: _Header, size: int, where: str) -> None:
    limits = (
        ("the number of regions", header.region_count, MAX_REGIONS),
        ("the number of packs", header.pack_count, MAX_REGIONS),
        ("the number of chunks", header.chunk_count, MAX_INDEX_BYTES // _CHUNK.size),
        ("the size of the names", header.names_size, MAX_NAMES_BYTES),
    )
    for what, found, limit in limits:
        if found > limit:
            raise LimitExceeded(where=where, what=what, found=found, limit=limit)
    if header.total_size > size:
        raise Truncated(where=where, found=size, needed=header.total_size)
    if header.total_size < size:
        raise ImageError(where=where, what=f"{size - header.total_size} bytes follow the last table")


def _tables(view: memoryview, header: _Header) -> list[memoryview]:
    sizes = (
        header.region_count * header.region_size,
        header.chunk_count * header.chunk_record_size,
        header.pack_count * header.pack_size,
        header.names_size,
    )
    tables, start = [], header.header_size
    for size in sizes:
        tables.append(view[start : start + size])
        start += size
    return tables


def _read_regions(table: memoryview, header: _Header, names: bytes, where: str, *, is_known: bool) -> list[Region]:
    regions = []
    for n in range(header.region_count):
        fields = _REGION.unpack_from(table, n * header.region_size)
        kind, device, flags, address, length, first_chunk, chunk_count, offset, size, uuid = fields
        at = f"{where}: region {n}"
        if kind not in _KINDS[min(header.minor, MINOR)]:
            raise UnknownFeature(where=at, feature=f"region kind {kind}")
        is_file = kind == RegionKind.FILE
        if is_known and (flags or (is_file and (device or address or any(uuid)))):
            raise ImageError(where=at, what="a field that such a region does not have is not zero")
        name = _name(names, offset, size, at)
        if is_file:
            check_content_name(name, where=at)
        else:
            object_key(name, where=at)
        regions.append(Region(name, length, first_chunk, chunk_count, kind, device, flags, address, uuid))
    return regions


def _read_packs(table: memoryview, header: _Header, names: bytes, where: str, *, is_known: bool) -> list[Pack]:
    packs = []
    for n in range(header.pack_count):
        offset, size, pack_size, sha256, flags, reserved = _PACK.unpack_from(table, n * header.pack_size)
        at = f"{where}: pack {n}"
        if is_known and (flags or any(reserved)):
            raise ImageError(where=at, what="reserved bytes are not zero")
        packs.append(Pack(check_name(_name(names, offset, size, at), where=at), pack_size, sha256, flags))
    return packs


def _read_chunks(table: memoryview, header: _Header, where: str, *, is_known: bool) -> list[Chunk]:
    chunks = []
    for n in range(header.chunk_count):
        fields = _CHUNK.unpack_from(table, n * header.chunk_record_size)
        chunk_id, pack, codec, reserved, offset, stored_length, length, tail = fields
        if is_known and (reserved or any(tail)):
            raise ImageError(where=f"{where}: chunk {n}", what="reserved bytes are not zero")
        chunks.append(Chunk(chunk_id, pack, codec, offset, stored_length, length))
    return chunks


def _name(names: bytes, offset: int, size: int, at: str) -> str:
    if offset + size > len(names):
        raise Truncated(where=f"{at}: name table", found=len(names), needed=offset + size)
    return names[offset : offset + size].decode("ascii", errors="backslashreplace")


# ---- rules over the tables -----------------------------------------------------------------------


def _check_regions(index: Index, where: str) -> None:
    next_chunk = 0
    for n, region in enumerate(index.regions):
        at = f"{where}: region {n}"
        if n and not _is_after(region, index.regions[n - 1], at):
            raise ImageError(where=at, what=f"the name {region.name} is a repeat or out of order")
        if region.first_chunk != next_chunk:
            raise ImageError(where=at, what=f"its chunks begin at {region.first_chunk}, not at {next_chunk}")
        if region.chunk_count != chunk_count_of(region.length, index.chunk_size):
            raise ImageError(where=at, what=f"{region.chunk_count} chunks cannot hold {region.length} bytes")
        next_chunk += region.chunk_count
    if next_chunk != len(index.chunks):
        raise ImageError(where=where, what=f"{len(index.chunks)} chunks, of which the regions use {next_chunk}")
    _check_packs(index, where)


def _is_after(region: Region, previous: Region, at: str) -> bool:
    if region.kind != previous.kind:
        return region.kind > previous.kind
    if region.kind == RegionKind.FILE:
        return region.name > previous.name
    return object_key(region.name, where=at) > object_key(previous.name, where=at)


def _check_packs(index: Index, where: str) -> None:
    files = index.files
    if len(index.packs) < len(files) or (len(index.packs) > len(files) and not index.vram):
        raise ImageError(where=where, what=f"{len(index.packs)} packs for {len(files)} file regions")
    for n, (region, pack) in enumerate(zip(files, index.packs, strict=False)):
        if (pack.name, pack.size) != (region.name, region.length):
            raise ImageError(where=f"{where}: region {n}", what=f"pack {n} is not the file itself")
    previous = ""
    for n, pack in enumerate(index.vram_packs, len(files)):
        if check_pack_name(pack.name, where=f"{where}: pack {n}") <= previous:
            raise ImageError(where=f"{where}: pack {n}", what=f"the name {pack.name} is a repeat or out of order")
        previous = pack.name


_CODECS = frozenset(int(codec) for codec in Codec)


def _at(where: str, region: Region, position: int) -> str:
    return f"{where}: chunk {region.first_chunk + position}"


def _check_chunks(index: Index, where: str) -> None:
    slots = _Slots(index)
    for n, region in enumerate(index.regions):
        is_file = region.kind == RegionKind.FILE
        for position, chunk in enumerate(index.chunks_of(region)):
            start = position * index.chunk_size
            length = min(index.chunk_size, region.length - start)
            if chunk.codec not in _CODECS:
                raise UnknownFeature(where=_at(where, region, position), feature=f"chunk codec {chunk.codec}")
            stored = (start, length) if chunk.codec else (0, 0)
            if chunk.length != length or (is_file and (chunk.pack, (chunk.offset, chunk.stored_length)) != (n, stored)):
                raise ImageError(
                    where=_at(where, region, position), what=f"is not the {length} bytes at {start} of {region.name}"
                )
            fault = None if is_file else slots.fault(chunk)
            if fault:
                raise ImageError(where=_at(where, region, position), what=fault)
    for n, pack in slots.unused():
        raise ImageError(where=f"{where}: pack {n}", what=f"no chunk lies in {pack.name}")


class _Slots:
    """Which slots of the packs hold VRAM chunks: one slot, one content."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._first = len(index.files)
        self._taken: dict[tuple[int, int], tuple[bytes, int]] = {}

    def fault(self, chunk: Chunk) -> str | None:
        """What is wrong with the place of a VRAM chunk, or None; takes note of the place."""
        return self._zero_fault(chunk) if chunk.codec == Codec.ZERO else self._stored_fault(chunk)

    def unused(self) -> list[tuple[int, Pack]]:
        """Packs that hold nothing."""
        used = {pack for pack, _ in self._taken}
        packs = enumerate(self._index.packs[self._first :], self._first)
        return [(n, pack) for n, pack in packs if n not in used]

    @staticmethod
    def _zero_fault(chunk: Chunk) -> str | None:
        if chunk.pack or chunk.offset or chunk.stored_length:
            return "a zero chunk has no place"
        return None if chunk.id == zero_id(chunk.length) else "its id is not that of zeros"

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
