"""What a chunk index says, as data (spec/chunk-index.md): regions, chunks, packs, and the content root over them.

Pure data; `chunk_index` turns it into bytes and back, `index_rules` says which of it a reader takes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, NamedTuple

from blake3 import blake3

from image_format.content_root import content_root

if TYPE_CHECKING:
    from collections.abc import Iterable

CHUNK_SIZE = 4 << 20
MIN_CHUNK_SIZE, MAX_CHUNK_SIZE = 4 << 10, 64 << 20
MAX_INDEX_BYTES = 512 << 20
MAX_CHUNKS = MAX_INDEX_BYTES // 64
# A file above this size travels in packs of its own kind; the smaller ones travel together (spec/transport.md).
MAX_SMALL_FILE = 1 << 20
# Where a chunk may begin in a pack of a packed index: pages of memory and blocks of every disk begin there.
PACK_ALIGNMENT = 4096
MAX_PACK_CHUNKS = 128
MINOR = 2
_ZEROS = memoryview(bytes(1 << 20))


class RegionKind(IntEnum):
    """What a region's bytes were. Other values belong to later versions."""

    FILE = 1
    VRAM = 2
    PAGES = 3


class Codec(IntEnum):
    """How a chunk is stored: not at all because it is all zero, as it is, or as one zstd frame."""

    ZERO = 0
    RAW = 1
    ZSTD = 2


class Region(NamedTuple):
    """A run of content with one name: a file of the checkpoint, or an object in GPU memory.

    A file of pages is one of CRIU's, cut along the addresses that its pages had: its chunks differ in length.
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

    @property
    def is_small(self) -> bool:
        """In a packed index it keeps its own file, because it travels with the other small ones."""
        return self.kind == RegionKind.FILE and self.length <= MAX_SMALL_FILE


class Chunk(NamedTuple):
    """A piece of a region: its identity and where it lies."""

    id: bytes
    pack: int
    codec: int
    offset: int
    stored_length: int
    length: int


class Pack(NamedTuple):
    """A file that holds chunks.

    In a sealed index that is the file itself, or a `vgpu-pack-NNNNN.bin` of slots for VRAM. In a packed index it is a
    small file, or a pack for transport with its sha256; `flags` is the kind of regions then that it holds chunks of.
    """

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
    is_packed: bool = False

    @cached_property
    def files(self) -> tuple[Region, ...]:
        """The regions that are files, pages among them; in a sealed index the pack of each has the same number."""
        return tuple(region for region in self.regions if region.kind != RegionKind.VRAM)

    @cached_property
    def small_files(self) -> tuple[Region, ...]:
        """The files that no pack for transport holds."""
        return tuple(region for region in self.regions if region.is_small)

    @cached_property
    def vram(self) -> tuple[Region, ...]:
        """The regions that were GPU memory."""
        return tuple(region for region in self.regions if region.kind == RegionKind.VRAM)

    @property
    def vram_packs(self) -> tuple[Pack, ...]:
        """The packs of a sealed index that hold slots."""
        return self.packs[len(self.files) :]

    @property
    def transport_packs(self) -> tuple[Pack, ...]:
        """The packs of a packed index that are blobs."""
        return self.packs[len(self.small_files) :]

    @property
    def lowest_minor(self) -> int:
        """The lowest minor version that can carry this index."""
        if self.is_packed or any(region.kind == RegionKind.PAGES for region in self.regions):
            return 2
        return 1 if self.vram else 0

    def chunks_of(self, region: Region) -> tuple[Chunk, ...]:
        """The chunks of one region in order."""
        return self.chunks[region.first_chunk : region.first_chunk + region.chunk_count]

    def lengths_of(self, region: Region) -> list[int] | None:
        """How long each chunk is where they differ; None where all but the last have the chunk size."""
        if region.kind != RegionKind.PAGES:
            return None
        return [chunk.length for chunk in self.chunks_of(region)]

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
        pages = [region for region in self.regions if region.kind == RegionKind.PAGES]
        lengths = (chunk.length for region in pages for chunk in self.chunks_of(region))
        return content_root(self.chunk_size, regions, (chunk.id for chunk in self.chunks), lengths)


@lru_cache(maxsize=4096)
def zero_id(length: int) -> bytes:
    """The id of that many zero bytes; a chunk with this id need not be stored."""
    return zero_ids((length,))[length]


def zero_ids(lengths: Iterable[int]) -> dict[int, bytes]:
    """The same by length. It costs what the longest costs, however many an index of somebody else lists."""
    hasher, done, ids = blake3(), 0, {}
    for length in sorted(set(lengths)):
        while done < length:
            step = min(length - done, len(_ZEROS))
            hasher.update(_ZEROS[:step])
            done += step
        ids[length] = hasher.digest()
    return ids


def chunk_count_of(length: int, chunk_size: int) -> int:
    """How many chunks a region of that length has, where they all have the chunk size."""
    return -(-length // chunk_size)
