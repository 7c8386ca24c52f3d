"""Verifies a checkpoint inside an engine's archive, in one pass and without unpacking it (spec/archive-layout.md, 4).

Takes tar, tar+gzip and tar+zstd as podman, CRI-O and containerd's CRI plugin write them: the sealed files lie under
`checkpoint/`. How far the chunks in a pack's slots go is said by the index; engines write it before the packs. It is
not trusted then and only tells where to cut: the ids are compared with the same index after the signature holds. Where
it comes late, a second pass may be needed. Refuses path tricks, links, devices and repeated members. What lies beside `checkpoint/` is not signed;
it is listed, and spec.dump is compared with the signed security settings.
`vgpu verify`, `vgpu inspect` and `ocistore` call it.
"""

from __future__ import annotations

import gzip
import json
import os
import queue
import time
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple, Self, cast

import zstandard
from blake3 import blake3

from image_format import chunk_index, seal_documents, security_config
from image_format.chunk_index import CHUNK_SIZE, MAX_INDEX_BYTES, chunk_count_of
from image_format.file_names import ALLOWED_UNSIGNED, INDEX_NAME, SEAL_NAMES, check_name, is_pack
from image_format.hashing import ID_BYTES, FileToHash, HashedFile, thread_count
from image_format.seal_documents import MAX_SIZES
from image_format.tar_reader import Kind, Member, Readable, TarReader
from image_format.verifying import Verified, check_files, check_sizes, check_vram
from vgpu_errors import ImageError, LimitExceeded, NoSuchImage, UnexpectedEntry, Unsigned

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from image_format.chunk_index import Index
    from image_format.policy import Policy
    from image_format.record import Record
    from image_format.seal_documents import Claimed

PREFIX = "checkpoint/"
SPEC_NAME = "spec.dump"
MAX_SPEC_BYTES = 16 << 20
MAX_CHUNKS = MAX_INDEX_BYTES // 64
MAX_ZSTD_WINDOW = 128 << 20
READ_BYTES = 1 << 20
# An index is parsed before it is trusted only up to this size: 4 TiB of content, a few hundred MB of memory.
MAX_EARLY_INDEX_BYTES = 64 << 20


class Outside(NamedTuple):
    """A member that no signature covers."""

    name: str
    size: int


@dataclass(frozen=True)
class VerifiedArchive:
    """What was verified, what was not, and how the unsigned spec.dump differs (None: there is none)."""

    verified: Verified
    outside: tuple[Outside, ...]
    compression: str
    config_differences: tuple[str, ...] | None


@dataclass(frozen=True)
class ArchiveClaims:
    """Record and index without trust."""

    claimed: Claimed
    documents: dict[str, bytes]
    outside: tuple[Outside, ...]
    compression: str


def verify_archive(
    path: Path | str,
    policy: Policy,
    *,
    threads: int | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> VerifiedArchive:
    """Verify a checkpoint archive on disk; progress counts bytes of the file."""
    with FileSource(path, on_progress) as source:
        return verify_stream(source, policy, where=str(path), threads=threads)


def read_archive_claims(path: Path | str) -> ArchiveClaims:
    """Record and index of an archive without trust, to be shown and not to be used."""
    with FileSource(path) as source:
        return read_stream_claims(source, where=str(path))


def verify_stream(
    source: RewindableSource, policy: Policy, *, where: str, threads: int | None = None
) -> VerifiedArchive:
    """Verify what a source holds.

    A second pass is needed only for an index with another chunk size than ours, or one that comes after packs whose
    slots hold shorter chunks.
    """
    started = time.monotonic()
    scan = _Scan.of(source, where, chunk_size=CHUNK_SIZE, threads=threads)
    claims = seal_documents.check(scan.documents, policy, where=where)
    differences = None
    if claims is not None:
        check_sizes(scan.sizes, claims.index, where=where)
        if not scan.is_cut_as(claims.index):
            source.rewind()
            scan = _Scan.of(source, where, chunk_size=claims.index.chunk_size, threads=threads, index=claims.index)
            check_sizes(scan.sizes, claims.index, where=where)
        check_files(scan.hashed, claims.index, where=where)
        check_vram(scan.hashed, claims.index, where=where)
        differences = config_differences(claims.record, scan.spec)
    verified = Verified.of(claims, started=started)
    return VerifiedArchive(verified, tuple(scan.outside), scan.compression, differences)


def read_stream_claims(source: RewindableSource, *, where: str) -> ArchiveClaims:
    """The same without trust and without hashing."""
    scan = _Scan.of(source, where, chunk_size=CHUNK_SIZE, threads=None, is_hashing=False)
    if not scan.documents:
        raise Unsigned(where=where)
    claimed = seal_documents.read_claimed(scan.documents, where=where)
    return ArchiveClaims(claimed, scan.documents, tuple(scan.outside), scan.compression)


def config_differences(record: Record, spec: bytes | None) -> tuple[str, ...] | None:
    """How an unsigned spec.dump differs from the signed security settings; None where one of them is absent."""
    if spec is None or not record.security:
        return None
    try:
        config = security_config.load(spec)
    except (ValueError, RecursionError) as error:
        return (f"{SPEC_NAME} is not acceptable JSON: {error}",)
    # The engine's bundle is not known here; the paths it makes carry the container's id.
    now = security_config.project(config, bundle="", container_id=record.container.id)
    return tuple(security_config.differences(json.loads(json.dumps(record.security, default=dict)), now))


# ---- sources -------------------------------------------------------------------------------------


class RewindableSource:
    """Compressed bytes that can be read twice. `skip` is offered only where seeking is cheap and unseen."""

    def readinto(self, view: memoryview, /) -> int:
        """Fill some of the buffer; 0 at the end."""
        raise NotImplementedError

    def rewind(self) -> None:
        """Begin again."""
        raise NotImplementedError

    def seek_forward(self, count: int) -> int:
        """Skip bytes and say how many; 0 where they must be seen."""
        del count
        return 0

    def read(self, size: int = -1, /) -> bytes:
        """For the decompressors."""
        view = memoryview(bytearray(READ_BYTES if size < 0 else min(size, READ_BYTES)))
        return bytes(view[: self.readinto(view)])


class FileSource(RewindableSource):
    """A file, or a stretch of one."""

    def __init__(
        self,
        path: Path | str,
        on_progress: Callable[[int, int], None] | None = None,
        *,
        start: int = 0,
        size: int | None = None,
    ) -> None:
        self._path = Path(path)
        self._on_progress = on_progress
        self._start, self._size = start, size
        self._position = 0
        self._fd = -1

    def __enter__(self) -> Self:
        try:
            self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            self._size = os.fstat(self._fd).st_size if self._size is None else self._size
            os.posix_fadvise(self._fd, self._start, self._size, os.POSIX_FADV_SEQUENTIAL)
        except OSError as error:
            self.close()
            raise NoSuchImage(path=self._path, what=str(error.strerror)) from error
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    @property
    def size(self) -> int:
        """How many bytes there are."""
        return self._size or 0

    def readinto(self, view: memoryview, /) -> int:
        """Fill some of the buffer; 0 at the end."""
        view = view[: max(0, self.size - self._position)]
        if not view:
            return 0
        try:
            count = os.preadv(self._fd, [view], self._start + self._position)
        except OSError as error:
            raise ImageError(where=self._path, what=f"cannot be read ({error.strerror})") from error
        self._position += count
        if self._on_progress is not None:
            self._on_progress(self._position, self.size)
        return count

    def rewind(self) -> None:
        """Begin again."""
        self._position = 0

    def seek_forward(self, count: int) -> int:
        """Skip bytes; never past the end, so that a short file shows."""
        skipped = max(0, min(count, self.size - self._position))
        self._position += skipped
        return skipped


class _Decompressed:
    """Plain tar bytes out of a source, whatever its compression; the library's errors become ours."""

    def __init__(self, source: RewindableSource, *, where: str, is_seeking: bool) -> None:
        self._where = where
        self._head = source.read(4)
        self.compression, self._inner = self._choose(source)
        if self.compression == "none" and is_seeking:
            self.skip = source.seek_forward

    def _choose(self, source: RewindableSource) -> tuple[str, Readable]:
        if self._head[:2] == b"\x1f\x8b":
            source.rewind()
            self._head = b""
            return "gzip", gzip.GzipFile(fileobj=cast("IO[bytes]", source))
        if self._head == b"\x28\xb5\x2f\xfd":
            source.rewind()
            self._head = b""
            decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_ZSTD_WINDOW)
            return "zstd", decompressor.stream_reader(
                cast("IO[bytes]", source), read_size=READ_BYTES, read_across_frames=True
            )
        return "none", source

    def readinto(self, view: memoryview, /) -> int | None:
        if self._head:
            count = min(len(view), len(self._head))
            view[:count], self._head = self._head[:count], self._head[count:]
            return count
        try:
            return self._inner.readinto(view)
        except (EOFError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError) as error:
            raise ImageError(where=self._where, what=f"damaged {self.compression} stream: {error}") from error


# ---- one pass ------------------------------------------------------------------------------------


@dataclass
class _Scan:
    """What one pass over an archive found."""

    where: str
    chunk_size: int
    documents: dict[str, bytes] = field(default_factory=dict)
    hashed: list[HashedFile] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    outside: list[Outside] = field(default_factory=list)
    spec: bytes | None = None
    compression: str = "none"
    slots: Mapping[str, Mapping[int, int]] | None = None
    _blind: list[FileToHash] = field(default_factory=list)
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
    ) -> _Scan:
        """Read the whole archive; an index that is known already tells where to cut packs."""
        scan = cls(where, chunk_size, slots=index.slots() if index else None)
        stream = _Decompressed(source, where=where, is_seeking=not is_hashing)
        scan.compression = stream.compression
        tar = TarReader(stream, where=where)
        with _Hasher(thread_count(threads), chunk_size) as hasher:
            for member in tar:
                scan._take(member, tar, hasher if is_hashing else None)
        return scan

    def is_cut_as(self, index: Index) -> bool:
        """All pieces were hashed as this index cuts them."""
        if index.chunk_size != self.chunk_size:
            return False
        slots = index.slots()
        blind = {file.name: dict(file.cuts(self.chunk_size)) for file in self._blind}
        return all(slots[name].items() <= cuts.items() for name, cuts in blind.items())

    def _take(self, member: Member, tar: TarReader, hasher: _Hasher | None) -> None:
        self._refuse_repeat(member)
        if member.name == PREFIX.rstrip("/") and member.kind is not Kind.DIRECTORY:
            raise UnexpectedEntry(where=self.where, entry=member.name, what=f"is a {member.kind}, not a directory")
        if member.name.startswith(PREFIX):
            self._take_inside(member.name.removeprefix(PREFIX), member, tar, hasher)
        elif member.kind is not Kind.DIRECTORY:
            self.outside.append(Outside(member.name, member.size))
            if member.name == SPEC_NAME and member.kind is Kind.FILE and member.size <= MAX_SPEC_BYTES:
                self.spec = tar.read(member.size)

    def _refuse_repeat(self, member: Member) -> None:
        if member.name in self._seen and member.kind is not Kind.DIRECTORY:
            raise UnexpectedEntry(where=self.where, entry=ascii(member.name)[1:-1], what="appears twice")
        self._seen.add(member.name)

    def _take_inside(self, name: str, member: Member, tar: TarReader, hasher: _Hasher | None) -> None:
        check_name(name, where=self.where)
        if member.kind is not Kind.FILE:
            raise UnexpectedEntry(where=self.where, entry=name, what=f"is a {member.kind}")
        self.sizes[name] = member.size
        if name in SEAL_NAMES:
            if member.size > MAX_SIZES[name]:
                limit = MAX_SIZES[name]
                raise LimitExceeded(where=f"{self.where}: {name}", what="its size", found=member.size, limit=limit)
            self.documents[name] = tar.read(member.size)
            if name == INDEX_NAME and self.slots is None and hasher is not None:
                self.slots = _early_slots(self.documents[name], self.chunk_size)
        elif name in ALLOWED_UNSIGNED:
            self.outside.append(Outside(member.name, member.size))
        elif hasher is not None:
            self._hash(name, member.size, tar, hasher)

    def _hash(self, name: str, size: int, tar: TarReader, hasher: _Hasher) -> None:
        slots = self.slots.get(name) if self.slots is not None and is_pack(name) else None
        target = FileToHash(name, size, slots)
        if is_pack(name) and slots is None:
            self._blind.append(target)
        self._chunks += chunk_count_of(size, self.chunk_size)
        if self._chunks > MAX_CHUNKS:
            raise LimitExceeded(where=self.where, what="the number of chunks", found=self._chunks, limit=MAX_CHUNKS)
        file = HashedFile(name, size, bytearray())
        lengths = None if slots is None else dict(slots)
        for position in range(chunk_count_of(size, self.chunk_size)):
            buffer = hasher.take_buffer()
            view = buffer[: min(self.chunk_size, size - position * self.chunk_size)]
            tar.read_into(view)
            file.ids.extend(bytes(ID_BYTES))  # grows with what was really read, not with what a header claims
            length = len(view) if lengths is None else min(lengths.get(position, 0), len(view))
            hasher.submit(buffer, view[:length], file, position)
        hasher.wait_for_idle()
        self.hashed.append(file)


def _early_slots(data: bytes, chunk_size: int) -> Mapping[str, Mapping[int, int]] | None:
    """Where an index that nobody has vouched for yet says that slots end, or None where it is of no use."""
    if len(data) > MAX_EARLY_INDEX_BYTES:
        return None
    try:
        index = chunk_index.from_bytes(data)
    except ImageError:
        return None  # it is refused by name after the signature
    return index.slots() if index.chunk_size == chunk_size else None


class _Hasher:
    """Hashes chunks beside the thread that reads and decompresses; one buffer more than there are threads."""

    def __init__(self, threads: int, chunk_size: int) -> None:
        self._pool = ThreadPoolExecutor(threads, "vgpu-hash")
        self._buffer_count = threads + 1
        self._made = 0
        self._chunk_size = chunk_size
        self._free: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        self._running: list[Future[None]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def take_buffer(self) -> memoryview:
        """A buffer that no thread uses any more."""
        if self._free.empty() and self._made < self._buffer_count:
            self._made += 1
            return memoryview(bytearray(self._chunk_size))
        return self._free.get(timeout=600)

    def submit(self, buffer: memoryview, view: memoryview, file: HashedFile, position: int) -> None:
        """Hash the view, then give the buffer back."""
        self._running.append(self._pool.submit(self._hash, buffer, view, file, position))

    def wait_for_idle(self) -> None:
        """All submitted ids are in place."""
        for future in self._running:
            future.result(timeout=600)
        self._running.clear()

    def _hash(self, buffer: memoryview, view: memoryview, file: HashedFile, position: int) -> None:
        try:
            file.ids[position * ID_BYTES : (position + 1) * ID_BYTES] = blake3(view).digest()
        finally:
            self._free.put(buffer)
