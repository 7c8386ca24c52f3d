"""Reads and writes the chunk index `vgpu-index.bin`, sealed or packed (spec/chunk-index.md).

Pure: bytes in, records out. Touches no file, network or GPU; callers bring buffers.
Every count is held against the size of the input before anything is allocated for it; what the tables say is held
against the rules in `index_rules`.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from image_format import index_rules
from image_format.file_names import INDEX_NAME, check_content_name, check_name, object_key
from image_format.index_model import (
    CHUNK_SIZE,
    MAX_CHUNK_SIZE,
    MAX_CHUNKS,
    MAX_INDEX_BYTES,
    MIN_CHUNK_SIZE,
    MINOR,
    Chunk,
    Codec,
    Index,
    Pack,
    Region,
    RegionKind,
    chunk_count_of,
    zero_id,
)
from vgpu_errors import FormatTooNew, ImageError, LimitExceeded, Truncated, UnknownFeature

__all__ = [
    "CHUNK_SIZE",
    "MAJOR",
    "MAX_INDEX_BYTES",
    "MINOR",
    "Chunk",
    "Codec",
    "Index",
    "Pack",
    "Region",
    "RegionKind",
    "chunk_count_of",
    "from_bytes",
    "to_bytes",
    "zero_id",
]

MAGIC = b"VGPUIDX1"
MAJOR = 1
HASH_BLAKE3 = 1
FLAG_PACKED = 1
MAX_REGIONS = 1 << 20
MAX_NAMES_BYTES = 64 << 20
MAX_HEADER_SIZE = 4096
MAX_RECORD_SIZE = 1024
# Up to this minor version header and records have exactly these sizes; later ones may be longer.
_LAST_FIXED_MINOR = 1

# magic, major, minor, header size, region/chunk/pack record size, chunk size, hash, flags,
# region/chunk/pack count, names size, content root, reserved
_HEADER = struct.Struct("<8sHH6II4Q32s24s")
_REGION = struct.Struct("<HHIQQQQII16s")
_CHUNK = struct.Struct("<32sIHHQII8s")
_PACK = struct.Struct("<IIQ32sI12s")
# The fields of a chunk record in the order of `Chunk`, and where the bytes between them lie.
_CHUNK_FIELDS = "<32sIH2xQII8x"
_CHUNK_RESERVED = (38, 39, *range(56, 64))


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
        index.lowest_minor,
        _HEADER.size,
        _REGION.size,
        _CHUNK.size,
        _PACK.size,
        index.chunk_size,
        HASH_BLAKE3,
        FLAG_PACKED if index.is_packed else 0,
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
_KINDS = (frozenset({1}), frozenset({1, 2}), frozenset({1, 2, 3}))


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
    is_packed: bool

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
    index = Index(regions, chunks, packs, header.chunk_size, header.minor, header.content_root, header.is_packed)
    index_rules.check(index, where)
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
    region_size, chunk_record_size, pack_size, chunk_size, hash_id, flags = sizes[:6]
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
        is_packed=minor > _LAST_FIXED_MINOR and bool(flags & FLAG_PACKED),
    )
    known_flags = FLAG_PACKED if minor > _LAST_FIXED_MINOR else 0
    _check_header(header, where, has_reserved=bool(flags & ~known_flags or any(reserved)))
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
        if header.minor <= _LAST_FIXED_MINOR and what != "chunk size" and found != least:
            raise ImageError(where=where, what=f"the {what} is {found}, version {MAJOR}.{header.minor} has {least}")
    if header.chunk_size & (header.chunk_size - 1):
        raise ImageError(where=where, what=f"the chunk size {header.chunk_size} is no power of two")
    if has_reserved and header.minor <= MINOR:
        raise ImageError(where=where, what="reserved bytes of the header are not zero")


def _check_counts(header: _Header, size: int, where: str) -> None:
    limits = (
        ("the number of regions", header.region_count, MAX_REGIONS),
        ("the number of packs", header.pack_count, MAX_REGIONS),
        ("the number of chunks", header.chunk_count, MAX_CHUNKS),
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
        is_file = kind != RegionKind.VRAM
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
        if is_known and ((flags and not header.is_packed) or any(reserved)):
            raise ImageError(where=at, what="reserved bytes are not zero")
        name = check_name(_name(names, offset, size, at), where=at)
        # Those of a later minor version's sealed index mean something that is passed over here.
        packs.append(Pack(name, pack_size, sha256, flags if header.is_packed else 0))
    return packs


def _read_chunks(table: memoryview, header: _Header, where: str, *, is_known: bool) -> list[Chunk]:
    size = header.chunk_record_size
    if is_known:
        _check_reserved(bytes(table), size, where)
    record = struct.Struct(f"{_CHUNK_FIELDS}{size - _CHUNK.size}x")
    return [Chunk._make(fields) for fields in record.iter_unpack(table)]


def _check_reserved(table: bytes, size: int, where: str) -> None:
    """Column by column: a look at each of a million records would take longer than reading them."""
    for place in _CHUNK_RESERVED:
        column = table[place::size]
        if column.count(0) != len(column):
            number = len(column) - len(column.lstrip(b"\0"))
            raise ImageError(where=f"{where}: chunk {number}", what="reserved bytes are not zero")


def _name(names: bytes, offset: int, size: int, at: str) -> str:
    if offset + size > len(names):
        raise Truncated(where=f"{at}: name table", found=len(names), needed=offset + size)
    return names[offset : offset + size].decode("ascii", errors="backslashreplace")
