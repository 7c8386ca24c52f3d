"""Says in numbers what a chunk index holds: how much, how much of it is zero, stored, or there twice.

Pure: an index in, numbers out. `vgpu inspect` shows them; `difference` compares two indexes.
Terms are those of spec/chunk-index.md: a region's *bytes* are zero, stored or shared, and these three add up to them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from image_format.chunk_index import Codec, RegionKind

if TYPE_CHECKING:
    from collections.abc import Iterable

    from image_format.chunk_index import Chunk, Index


@dataclass(frozen=True)
class Extent:
    """Bytes of content, and what became of them.

    `shared_bytes` belong to chunks that an earlier chunk of the same index equals; `packed_bytes` is what the stored
    ones take in their packs, less than `stored_bytes` where chunks are compressed.
    """

    bytes: int = 0
    zero_bytes: int = 0
    shared_bytes: int = 0
    packed_bytes: int = 0

    @property
    def stored_bytes(self) -> int:
        """What neither is zero nor was there before."""
        return self.bytes - self.zero_bytes - self.shared_bytes

    def __add__(self, other: Extent) -> Extent:
        return Extent(
            self.bytes + other.bytes,
            self.zero_bytes + other.zero_bytes,
            self.shared_bytes + other.shared_bytes,
            self.packed_bytes + other.packed_bytes,
        )

    def to_json(self) -> dict[str, int]:
        """The numbers of `--json` output."""
        return {
            "bytes": self.bytes,
            "zeroBytes": self.zero_bytes,
            "sharedBytes": self.shared_bytes,
            "storedBytes": self.stored_bytes,
        }


@dataclass(frozen=True)
class RegionSummary:
    """One region in numbers."""

    name: str
    kind: str
    chunks: int
    extent: Extent


def kind_name(kind: int) -> str:
    """The word for a region kind; a number where this version has none."""
    return RegionKind(kind).name.lower() if kind in set(RegionKind) else str(kind)


def summarise(index: Index) -> list[RegionSummary]:
    """Every region, in the order of the index."""
    seen: set[bytes] = set()
    return [
        RegionSummary(region.name, kind_name(region.kind), region.chunk_count, _extent(index.chunks_of(region), seen))
        for region in index.regions
    ]


def total(summaries: Iterable[RegionSummary]) -> Extent:
    """All of them together."""
    return sum((summary.extent for summary in summaries), Extent())


def _extent(chunks: Iterable[Chunk], seen: set[bytes]) -> Extent:
    size = zero = shared = packed = 0
    for chunk in chunks:
        size += chunk.length
        if chunk.codec == Codec.ZERO:
            zero += chunk.length
        elif chunk.id in seen:
            shared += chunk.length
        else:
            seen.add(chunk.id)
            packed += chunk.stored_length
    return Extent(size, zero, shared, packed)
