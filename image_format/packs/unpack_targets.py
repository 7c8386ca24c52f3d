"""What goes where when packs are unpacked: from the places in packs to those in a sealed directory. Pure.

Refuses a packed index whose content is not that of the sealed one. `unpacking` calls it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from image_format.index_model import Codec, RegionKind
from image_format.packs.pack_model import Source, aligned
from image_format.packs.packed import sources_of
from vgpu_errors import ContentMismatch, ImageError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from image_format.index_model import Index


class Range(NamedTuple):
    """A stretch of a pack."""

    start: int
    end: int


class Entry(NamedTuple):
    """A chunk in a pack, and every place in the directory that it belongs to."""

    offset: int
    stored_length: int
    codec: int
    id: bytes
    length: int
    targets: tuple[Source, ...]

    @property
    def end(self) -> int:
        """Where the next chunk may begin."""
        return aligned(self.offset + self.stored_length)


def check_pair(sealed: Index, packed: Index) -> None:
    """Refuse indexes that are not a sealed and a packed one of the same content."""
    if sealed.is_packed or not packed.is_packed:
        raise ImageError(where="packed index", what="and sealed index are not one of each")
    if sealed.content_root != packed.content_root:
        raise ContentMismatch(where="packed index", what="content root")


def entries_of(sealed: Index, packed: Index) -> list[list[Entry]]:
    """For each pack its chunks in order of their places."""
    first = len(packed.small_files)
    targets: list[dict[int, dict[Source, None]]] = [{} for _ in packed.transport_packs]
    chunks: list[dict[int, tuple[int, int, bytes, int]]] = [{} for _ in packed.transport_packs]
    for region, packed_region in zip(sealed.regions, packed.regions, strict=True):
        if region.is_small:
            continue
        places = packed.chunks_of(packed_region)
        for (sealed_chunk, target), chunk in zip(sources_of(sealed, region), places, strict=True):
            if chunk.codec == Codec.ZERO or not target.name:
                continue
            pack = chunk.pack - first
            chunks[pack][chunk.offset] = (chunk.stored_length, chunk.codec, sealed_chunk.id, sealed_chunk.length)
            targets[pack].setdefault(chunk.offset, {})[target] = None
    return [
        [Entry(offset, *chunks[n][offset], tuple(targets[n][offset])) for offset in sorted(chunks[n])]
        for n in range(len(chunks))
    ]


def without(entry: Entry, names: Collection[str]) -> Entry:
    """The chunk with those of its places that are in other files."""
    return entry._replace(targets=tuple(target for target in entry.targets if target.name not in names))


def sizes_of(sealed: Index) -> dict[str, int]:
    """The files that packs fill."""
    files = {region.name: region.length for region in sealed.files if not region.is_small}
    return files | {pack.name: pack.size for pack in sealed.vram_packs}


def gaps(covered: Sequence[Range], size: int) -> Iterator[Range]:
    """What lies between these stretches, which are in order, and behind them."""
    position = 0
    for start, end in covered:
        if start > position:
            yield Range(position, start)
        position = max(position, end)
    if position < size:
        yield Range(position, size)


def local_chunks(index: Index) -> dict[bytes, Source]:
    """Where another sealed directory has chunks, by their ids."""
    return {
        chunk.id: source
        for region in index.regions
        if not region.is_small
        for chunk, source in sources_of(index, region)
        if chunk.codec != Codec.ZERO or region.kind != RegionKind.VRAM
    }
