"""Verifies a checkpoint directory before anything in it is used (spec/signature.md, section 5).

First the seal (`seal_documents`), then that the directory holds exactly the sealed files, then every chunk of them.
A restore leaves the VRAM chunks to the GPU (`defer_vram`): it hashes them where the application will use them.
Changes nothing, follows no link, and reads each file through a descriptor that it has checked.
The restore gate, `vgpu verify` and `ocistore` call it.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from image_format import seal_documents
from image_format.chunk_index import Codec
from image_format.file_names import ALLOWED_UNSIGNED, PARTIAL_PREFIX, REFERENCE_NAME, SEAL_NAMES
from image_format.hashing import FileToHash, HashedFile, entry_fault, hash_files, open_plain, read_exactly, twin
from image_format.seal_documents import MAX_SIZES, Claimed, Claims
from vgpu_errors import (
    ContentElsewhere,
    ContentMismatch,
    LimitExceeded,
    NoSuchImage,
    Truncated,
    UnexpectedEntry,
    Unsigned,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from image_format.chunk_index import Index
    from image_format.record import Record
    from image_format.trust.freshness import SignedTimes
    from image_format.trust.policy import Policy

CUT_OFF = "was left by a write that was cut off"


@dataclass(frozen=True)
class Verified:
    """A checkpoint that is whole. Without a key it was unsigned and the policy allows that.

    `bytes_deferred` are bytes of VRAM whose chunks nobody has looked at yet; what uses them must compare them first.
    `signed` is what `freshness.check` looks at; a caller who lets the checkpoint run must call it.
    `record` and `index` are None only where an unsigned checkpoint carries no documents of ours at all.
    """

    record: Record | None
    index: Index | None
    key_id: str | None
    key_name: str | None
    manifest_digest: str | None
    bytes_checked: int
    seconds: float
    bytes_deferred: int = 0
    signed: SignedTimes | None = None

    @classmethod
    def of(cls, claims: Claims | None, *, started: float, bytes_deferred: int = 0) -> Verified:
        """The result for claims that the content has borne out."""
        seconds = time.monotonic() - started
        if claims is None:
            return cls(None, None, None, None, None, 0, seconds)
        key_id, key_name = (claims.key.key.key_id, claims.key.name) if claims.key else (None, None)
        return cls(
            record=claims.record,
            index=claims.index,
            key_id=key_id,
            key_name=key_name,
            manifest_digest=claims.manifest_digest,
            bytes_checked=sum(region.length for region in claims.index.regions) - bytes_deferred,
            seconds=seconds,
            bytes_deferred=bytes_deferred,
            signed=claims.signed,
        )


def verify_directory(
    path: Path | str,
    policy: Policy,
    *,
    threads: int | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    defer_vram: bool = False,
) -> Verified:
    """Check signature, documents, the list of files and every chunk, in this order.

    With `defer_vram` packs are held against their sizes only, and their chunks are left to the GPU.
    """
    started, where = time.monotonic(), str(path)
    with Directory(path) as directory:
        claims = seal_documents.check(directory.documents(), policy, where=where)
        if claims is None:
            directory.expect_finished()
            return Verified.of(None, started=started)
        check_sizes({name: status.st_size for name, status in directory.entries().items()}, claims.index, where=where)
        files = files_to_hash(claims.index, with_packs=not defer_vram)
        hashed = hash_files(
            directory.fd,
            files,
            where=where,
            threads=threads,
            chunk_size=claims.index.chunk_size,
            on_progress=on_progress,
        )
        check_files(hashed, claims.index, where=where)
        if not defer_vram:
            check_vram(hashed, claims.index, where=where)
    deferred = sum(region.length for region in claims.index.vram) if defer_vram else 0
    return Verified.of(claims, started=started, bytes_deferred=deferred)


def read_claims(path: Path | str) -> tuple[Record, Index]:
    """Record and index of a directory without trust, to be shown and not to be used."""
    claimed = read_claimed_directory(path)
    return claimed.record, claimed.index


def read_claimed_directory(path: Path | str) -> Claimed:
    """The same with names."""
    with Directory(path) as directory:
        documents = directory.documents()
    if not documents:
        raise Unsigned(where=path)
    return seal_documents.read_claimed(documents, where=str(path))


def check_sizes(sizes: Mapping[str, int], index: Index, *, where: str) -> None:
    """The files there are exactly the sealed ones and those that may come later, with the sealed sizes."""
    wanted = {pack.name: pack.size for pack in index.packs}
    missing = sorted(set(wanted) - set(sizes))
    if missing and REFERENCE_NAME in sizes:
        size_bytes = sum(wanted[name] for name in missing)
        what = "in the store of the node that made it or in a registry"
        raise ContentElsewhere(where=where, count=len(missing), size_bytes=size_bytes, what=what)
    for name in missing:
        raise UnexpectedEntry(where=where, entry=name, what="is missing")
    for name in sorted(set(sizes) - set(wanted) - set(SEAL_NAMES) - ALLOWED_UNSIGNED - {REFERENCE_NAME}):
        raise UnexpectedEntry(where=where, entry=ascii(name)[1:-1], what="is not among the sealed files")
    for name, size in sorted(wanted.items()):
        if sizes[name] < size:
            raise Truncated(where=f"{where}: {name}", found=sizes[name], needed=size)
        if sizes[name] > size:
            raise ContentMismatch(where=f"{where}: {name}", what=f"{sizes[name]} bytes, not {size}")


def files_to_hash(index: Index, *, with_packs: bool) -> list[FileToHash]:
    """What must be read to compare every chunk."""
    files = [FileToHash(region.name, region.length, lengths=index.lengths_of(region)) for region in index.files]
    if with_packs:
        slots = index.slots()
        files += [FileToHash(pack.name, pack.size, slots[pack.name]) for pack in index.vram_packs]
    return files


def check_files(hashed: Sequence[HashedFile], index: Index, *, where: str) -> None:
    """Every chunk of the files has the sealed id."""
    by_name = {file.name: file for file in hashed}
    for region in index.files:
        file, start = by_name[region.name], 0
        for position, chunk in enumerate(index.chunks_of(region)):
            if file.id_at(position) != chunk.id:
                what = f"bytes {start} to {start + chunk.length}"
                raise ContentMismatch(where=f"{where}: {region.name}", what=what)
            start += chunk.length


def check_vram(hashed: Sequence[HashedFile], index: Index, *, where: str) -> None:
    """Every VRAM chunk that lies in a pack has the sealed id; those that lie in none were compared by the index itself."""
    by_name = {file.name: file for file in hashed}
    for region in index.vram:
        for position, chunk in enumerate(index.chunks_of(region)):
            if chunk.codec == Codec.ZERO:
                continue
            pack = index.packs[chunk.pack]
            if by_name[pack.name].id_at(chunk.offset // index.chunk_size) != chunk.id:
                end = chunk.offset + chunk.length
                what = f"bytes {chunk.offset} to {end}, chunk {position} of GPU object {region.name}"
                raise ContentMismatch(where=f"{where}: {pack.name}", what=what)


class Directory:
    """A checkpoint directory held open, so that all looks at it see the same one."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.fd = -1
        self._entries: dict[str, os.stat_result] | None = None

    def __enter__(self) -> Self:
        try:
            self.fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise NoSuchImage(path=self.path, what=str(error.strerror)) from error
        return self

    def __exit__(self, *exc_info: object) -> None:
        os.close(self.fd)

    def entries(self) -> dict[str, os.stat_result]:
        """All entries by name; refuses whatever is not a plain file."""
        found = self._list()
        for name, status in sorted(found.items()):
            fault = entry_fault(name, status)
            if fault:
                raise UnexpectedEntry(where=self.path, entry=ascii(name)[1:-1], what=fault)
        repeated = twin(found)
        if repeated:
            raise UnexpectedEntry(where=self.path, entry=repeated, what="is the same file as another entry")
        return found

    def documents(self) -> dict[str, bytes]:
        """Those of the four sealed documents that are there."""
        return {name: self._read(name) for name in SEAL_NAMES if name in self._list()}

    def expect_finished(self) -> None:
        """Refuse what was still being sealed or unpacked: without documents nothing else would show it."""
        for name in sorted(self._list()):
            if name.startswith(PARTIAL_PREFIX):
                raise UnexpectedEntry(where=self.path, entry=ascii(name)[1:-1], what=CUT_OFF)

    @staticmethod
    def listed(directory_fd: int) -> dict[str, os.stat_result]:
        """The entries of a directory that is open, whatever they are."""
        with os.scandir(directory_fd) as entries:
            return {entry.name: entry.stat(follow_symlinks=False) for entry in entries}

    def _list(self) -> dict[str, os.stat_result]:
        if self._entries is None:
            self._entries = self.listed(self.fd)
        return self._entries

    def _read(self, name: str) -> bytes:
        descriptor, size = open_plain(self.fd, name, where=str(self.path))
        try:
            if size > MAX_SIZES[name]:
                raise LimitExceeded(where=self.path / name, what="its size", found=size, limit=MAX_SIZES[name])
            data = bytearray(size)
            read_exactly(descriptor, memoryview(data), 0, where=str(self.path / name))
        finally:
            os.close(descriptor)
        return bytes(data)
