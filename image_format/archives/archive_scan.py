"""One pass over an engine's archive: takes the documents, hashes the sealed files, lists what lies beside them.

Decides nothing about trust (`archive` does). Refuses path tricks, links, devices and repeated members as they come
(spec/archive-layout.md, section 4). Memory is bounded: the documents, the ids, and the buffers of `stream_hashing`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from image_format.archives.archive_sources import Decompressed
from image_format.archives.stream_cuts import StreamCuts
from image_format.archives.stream_hashing import StreamHasher
from image_format.archives.tar_reader import Kind, Member, TarReader
from image_format.file_names import ALLOWED_UNSIGNED, INDEX_NAME, SEAL_NAMES, check_name
from image_format.hashing import HashedFile, thread_count
from image_format.index_model import MAX_CHUNKS
from image_format.seal_documents import MAX_SIZES
from vgpu_errors import LimitExceeded, UnexpectedEntry

if TYPE_CHECKING:
    from image_format.archives.archive_sources import RewindableSource
    from image_format.index_model import Index

PREFIX = "checkpoint/"
SPEC_NAME = "spec.dump"
MAX_SPEC_BYTES = 16 << 20


class Outside(NamedTuple):
    """A member that no signature covers."""

    name: str
    size: int


@dataclass
class Scan:
    """What one pass over an archive found."""

    where: str
    chunk_size: int
    documents: dict[str, bytes] = field(default_factory=dict)
    hashed: list[HashedFile] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    outside: list[Outside] = field(default_factory=list)
    spec: bytes | None = None
    compression: str = "none"
    prefix: str = PREFIX
    _cuts: StreamCuts = field(init=False)
    _seen: set[str] = field(default_factory=set)
    _chunks: int = 0

    @classmethod
    def of(
        cls,
        source: RewindableSource,
        where: str,
        *,
        chunk_size: int,
        threads: int | None,
        is_hashing: bool = True,
        index: Index | None = None,
        prefix: str = PREFIX,
    ) -> Scan:
        """Read the whole archive; an index that is known already tells where to cut."""
        scan = cls(where, chunk_size, prefix=prefix)
        scan._cuts = StreamCuts.of(chunk_size, index)
        stream = Decompressed(source, where=where, is_seeking=not is_hashing)
        scan.compression = stream.compression
        tar = TarReader(stream, where=where)
        with StreamHasher(thread_count(threads), chunk_size) as hasher:
            for member in tar:
                scan._take(member, tar, hasher if is_hashing else None)
        return scan

    def is_cut_as(self, index: Index) -> bool:
        """All pieces were hashed as this index cuts them."""
        return self._cuts.fits(index, self.hashed)

    def _take(self, member: Member, tar: TarReader, hasher: StreamHasher | None) -> None:
        self._refuse_repeat(member)
        if member.name == self.prefix.rstrip("/") and member.kind is not Kind.DIRECTORY:
            raise UnexpectedEntry(where=self.where, entry=member.name, what=f"is a {member.kind}, not a directory")
        if member.kind is Kind.DIRECTORY and member.name == self.prefix.rstrip("/"):
            return
        if member.name.startswith(self.prefix):
            self._take_inside(member.name.removeprefix(self.prefix), member, tar, hasher)
        elif member.kind is not Kind.DIRECTORY:
            self.outside.append(Outside(member.name, member.size))
            if member.name == SPEC_NAME and member.kind is Kind.FILE and member.size <= MAX_SPEC_BYTES:
                self.spec = tar.read(member.size)

    def _refuse_repeat(self, member: Member) -> None:
        if member.name in self._seen and member.kind is not Kind.DIRECTORY:
            raise UnexpectedEntry(where=self.where, entry=ascii(member.name)[1:-1], what="appears twice")
        self._seen.add(member.name)

    def _take_inside(self, name: str, member: Member, tar: TarReader, hasher: StreamHasher | None) -> None:
        check_name(name, where=self.where)
        if member.kind is not Kind.FILE:
            raise UnexpectedEntry(where=self.where, entry=name, what=f"is a {member.kind}")
        self.sizes[name] = member.size
        if name in SEAL_NAMES:
            if member.size > MAX_SIZES[name]:
                limit = MAX_SIZES[name]
                raise LimitExceeded(where=f"{self.where}: {name}", what="its size", found=member.size, limit=limit)
            self.documents[name] = tar.read(member.size)
            if name == INDEX_NAME and hasher is not None:
                self._cuts.learn_index(self.documents[name])
        elif name in ALLOWED_UNSIGNED:
            self.outside.append(Outside(member.name, member.size))
        elif hasher is not None:
            self._hash(name, member.size, tar, hasher)

    def _hash(self, name: str, size: int, tar: TarReader, hasher: StreamHasher) -> None:
        target = self._cuts.cut(name, size)
        self._chunks += target.count(self.chunk_size)
        if self._chunks > MAX_CHUNKS:
            raise LimitExceeded(where=self.where, what="the number of chunks", found=self._chunks, limit=MAX_CHUNKS)
        kept = bytearray() if self._cuts.wants(name, size) else None
        self.hashed.append(hasher.hash(target, tar.read_into, kept))
        if kept is not None:
            self._cuts.learn_pagemap(kept)
