"""Where to cut the files of a stream before it is known what was sealed (spec/archive-layout.md, section 4).

A reader that sees each byte once must know how long chunks are when they pass by. The index says it, where it comes
first; for files of memory pages CRIU's own pagemaps do, which precede them. Neither is trusted: whatever they say, the
ids that come out are compared with the index that the signature covers, and `fits` says whether the cuts were its own.
`archive_scan` calls it. Keeps pagemaps up to a bound, and no content.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from image_format import chunk_index, pagemap
from image_format.file_names import is_pack
from image_format.hashing import FileToHash
from image_format.index_model import RegionKind
from vgpu_errors import ImageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from image_format.hashing import HashedFile
    from image_format.index_model import Index

# An index is parsed before it is trusted only up to this size: 4 TiB of content, a few hundred MB of memory.
MAX_EARLY_INDEX_BYTES = 64 << 20
MAX_PAGEMAPS_BYTES = 2 * pagemap.MAX_PAGEMAP_BYTES


@dataclass
class StreamCuts:
    """What is known so far of how files are cut."""

    chunk_size: int
    slots: Mapping[str, Mapping[int, int]] | None = None
    lengths: Mapping[str, Sequence[int]] | None = None
    # By the file of pages that a pagemap says it belongs to; None where two say so.
    _pagemaps: dict[str, pagemap.Pagemap | None] = field(default_factory=dict)
    _pagemap_bytes: int = 0
    _blind: list[FileToHash] = field(default_factory=list)

    @classmethod
    def of(cls, chunk_size: int, index: Index | None) -> StreamCuts:
        """Those of an index, or none yet."""
        cuts = cls(chunk_size)
        if index is not None:
            cuts._take(index)
        return cuts

    def learn_index(self, data: bytes) -> None:
        """An index that nobody has vouched for passes by; one that is of no use is refused after the signature."""
        if self.slots is not None or len(data) > MAX_EARLY_INDEX_BYTES:
            return
        try:
            index = chunk_index.from_bytes(data)
        except ImageError:
            return
        if index.chunk_size == self.chunk_size and not index.is_packed:
            self._take(index)

    def wants(self, name: str, size: int) -> bool:
        """The file is a pagemap that `learn_pagemap` should see."""
        if self.lengths is not None or not pagemap.is_pagemap(name) or size > pagemap.MAX_PAGEMAP_BYTES:
            return False
        return self._pagemap_bytes + size <= MAX_PAGEMAPS_BYTES

    def learn_pagemap(self, data: bytes | bytearray) -> None:
        """A pagemap passes by."""
        self._pagemap_bytes += len(data)
        found = pagemap.read(data)
        if found is not None:
            self._pagemaps[found.pages_name] = found if found.pages_name not in self._pagemaps else None

    def cut(self, name: str, size: int) -> FileToHash:
        """How to cut this file."""
        if is_pack(name):
            slots = self.slots.get(name) if self.slots is not None else None
            target = FileToHash(name, size, slots)
            if slots is None:
                self._blind.append(target)
            return target
        return FileToHash(name, size, lengths=self._lengths(name, size))

    def fits(self, index: Index, hashed: Iterable[HashedFile]) -> bool:
        """All pieces were hashed as this index cuts them."""
        if index.chunk_size != self.chunk_size:
            return False
        cut = {file.name: file.lengths for file in hashed}
        for region in index.files:
            lengths = index.lengths_of(region)
            found = cut.get(region.name)
            if lengths != (None if found is None else list(found)):
                return False
        return self._fits_slots(index)

    def _fits_slots(self, index: Index) -> bool:
        slots = index.slots()
        for file in self._blind:
            lengths = {cut.position: cut.length for cut in file.cuts(self.chunk_size)}
            if not slots[file.name].items() <= lengths.items():
                return False
        return True

    def _take(self, index: Index) -> None:
        self.slots = index.slots()
        self.lengths = {
            region.name: [chunk.length for chunk in index.chunks_of(region)]
            for region in index.files
            if region.kind == RegionKind.PAGES
        }

    def _lengths(self, name: str, size: int) -> Sequence[int] | None:
        if self.lengths is not None:
            lengths = self.lengths.get(name)
            return lengths if lengths is not None and sum(lengths) == size else None
        found = self._pagemaps.get(name)
        return found.cuts(size, self.chunk_size) if found and pagemap.is_cut_by_pages(name, size) else None
