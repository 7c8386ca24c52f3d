"""What a plan of packs is made of, as data (spec/transport.md, sections 2 and 3).

Pure data; `packed` makes plans, `pack_streams` measures and streams them, `unpacking` reads what came of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from image_format.index_model import PACK_ALIGNMENT, Codec, RegionKind
from vgpu_errors import ImageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from image_format.index_model import Index

RAW_PACK_TYPE = "application/vnd.vgpu.checkpoint.pack.v1.raw"
ZSTD_PACK_TYPE = "application/vnd.vgpu.checkpoint.pack.v1+zstd"


@dataclass(frozen=True)
class Compression:
    """Which kinds of regions are tried with zstd, and how hard. Weights gain nothing, so VRAM stays raw by default."""

    kinds: frozenset[int] = frozenset({int(RegionKind.FILE), int(RegionKind.PAGES)})
    level: int = 1

    @classmethod
    def none(cls) -> Compression:
        """Everything raw."""
        return cls(frozenset())


class Source(NamedTuple):
    """Where a chunk's bytes lie in the sealed directory."""

    name: str
    offset: int


class PlannedChunk(NamedTuple):
    """A chunk that a pack will hold."""

    id: bytes
    length: int
    source: Source


class Place(NamedTuple):
    """Where a chunk lies in its pack, and how."""

    codec: int
    offset: int
    stored_length: int

    @property
    def end(self) -> int:
        """Where the next chunk may begin."""
        return aligned(self.offset + self.stored_length)


class Layout(NamedTuple):
    """What measuring a pack found: the blob's size and digest, and a place for each of its chunks."""

    size: int
    sha256: bytes
    places: tuple[Place, ...]


class EarlierPack(NamedTuple):
    """A pack of an earlier packed index: its blob, and what lies in it by chunk id."""

    kind: int
    size: int
    sha256: bytes
    places: Mapping[bytes, tuple[Place, int]]


class PlannedPack(NamedTuple):
    """A pack to be: its chunks in order, and its layout once that is known.

    Packs with equal keys have equal bytes. The layout of an earlier pack is known from the start.
    """

    kind: int
    chunks: tuple[PlannedChunk, ...]
    key: bytes
    layout: Layout | None = None
    is_earlier: bool = False

    @property
    def media_type(self) -> str:
        """That of the blob; a pack is raw only if all that it holds is."""
        return pack_media_type(place.codec for place in self.measured.places)

    @property
    def measured(self) -> Layout:
        """The layout, which must be known."""
        if self.layout is None:
            raise ImageError(where=f"pack {self.key.hex()[:16]}", what="has not been measured")
        return self.layout


@dataclass(frozen=True)
class PackedPlan:
    """How a sealed index is cut: its packs, and for each of its chunks the pack's number, or -1 for none."""

    index: Index
    packs: tuple[PlannedPack, ...]
    pack_of: Sequence[int]
    compression: Compression = field(default_factory=Compression)

    @property
    def is_measured(self) -> bool:
        """All layouts are known."""
        return all(pack.layout is not None for pack in self.packs)

    def with_layouts(self, layouts: Mapping[bytes, Layout]) -> PackedPlan:
        """The plan with layouts by the packs' keys."""
        packs = tuple(pack._replace(layout=pack.layout or layouts.get(pack.key)) for pack in self.packs)
        return replace(self, packs=packs)


def aligned(offset: int) -> int:
    """The next place where a chunk may begin."""
    return -(-offset // PACK_ALIGNMENT) * PACK_ALIGNMENT


def pack_media_type(codecs: Iterable[int]) -> str:
    """The type of a pack whose chunks have these codecs."""
    return ZSTD_PACK_TYPE if Codec.ZSTD in set(codecs) else RAW_PACK_TYPE
