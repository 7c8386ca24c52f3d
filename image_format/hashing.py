"""Chunk ids of files: BLAKE3-256 of every 4 MiB, in threads, through reused buffers (spec/chunk-index.md, section 4).

Of a pack only the slots in use are hashed, each as far as its chunk goes.
Opens only plain regular files, with one link unless they are packs, relative to a directory it is given, and never
follows a link.
Memory is bounded: one chunk buffer per thread, whatever the files' sizes. Sealing and verifying call it.
"""

from __future__ import annotations

import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

from blake3 import blake3

from image_format.chunk_index import CHUNK_SIZE, chunk_count_of
from image_format.file_names import is_pack
from vgpu_errors import ContentMismatch, ImageError, UnexpectedEntry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

ID_BYTES = 32
# A task long enough that opening the file does not show, short enough that threads end together.
SPAN_CHUNKS = 16
MAX_THREADS = 16


class FileToHash(NamedTuple):
    """A file by its name in the directory, and the size it must have; for a pack, the slots in use and their lengths."""

    name: str
    size: int
    slots: Mapping[int, int] | None = None

    def cuts(self, chunk_size: int) -> list[Cut]:
        """The pieces to hash."""
        if self.slots is not None:
            return [Cut(position, length) for position, length in sorted(self.slots.items())]
        count = chunk_count_of(self.size, chunk_size)
        return [Cut(n, min(chunk_size, self.size - n * chunk_size)) for n in range(count)]


class Cut(NamedTuple):
    """A piece of a file that has an id: it begins at that many chunk sizes."""

    position: int
    length: int


class HashedFile(NamedTuple):
    """A file's chunk ids, 32 bytes each, one after the other."""

    name: str
    size: int
    ids: bytearray

    def id_at(self, position: int) -> bytes:
        """One chunk's id."""
        return bytes(self.ids[position * ID_BYTES : (position + 1) * ID_BYTES])


def thread_count(wanted: int | None = None) -> int:
    """How many threads to hash with: what was asked for, or the cores this process may use."""
    return max(1, min(wanted or len(os.sched_getaffinity(0)), MAX_THREADS))


def open_plain(directory_fd: int, name: str, *, where: str) -> tuple[int, int]:
    """Open a regular file without following anything; returns its descriptor and size."""
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory_fd)
    except FileNotFoundError as error:
        raise UnexpectedEntry(where=where, entry=name, what="is missing") from error
    except OSError as error:
        raise UnexpectedEntry(where=where, entry=name, what=f"cannot be opened ({error.strerror})") from error
    status = os.fstat(descriptor)
    fault = entry_fault(name, status)
    if fault:
        os.close(descriptor)
        raise UnexpectedEntry(where=where, entry=name, what=fault)
    return descriptor, status.st_size


def entry_fault(name: str, status: os.stat_result) -> str | None:
    """Why an entry may not be part of a checkpoint, or None. Packs may be shared with other checkpoints by hard links."""
    if stat.S_ISLNK(status.st_mode):
        return "is a symbolic link"
    if stat.S_ISDIR(status.st_mode):
        return "is a directory"
    if not stat.S_ISREG(status.st_mode):
        return "is not a regular file"
    if status.st_nlink != 1 and not is_pack(name):
        return "has several hard links"
    return None


def twin(entries: Mapping[str, os.stat_result]) -> str | None:
    """A name whose file has another name in the same directory, or None: an archive would carry a link."""
    seen: set[tuple[int, int]] = set()
    for name, status in sorted(entries.items()):
        if status.st_nlink > 1 and (status.st_dev, status.st_ino) in seen:
            return name
        seen.add((status.st_dev, status.st_ino))
    return None


def hash_files(
    directory_fd: int,
    files: Sequence[FileToHash],
    *,
    where: str,
    threads: int | None = None,
    chunk_size: int = CHUNK_SIZE,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[HashedFile]:
    """Hash the files side by side; the first fault ends it."""
    hashed = [HashedFile(f.name, f.size, bytearray(ID_BYTES * chunk_count_of(f.size, chunk_size))) for f in files]
    spans = _spans(files, hashed, chunk_size)
    meter = _Meter(sum(cut.length for span in spans for cut in span.cuts), on_progress)
    worker = _SpanHasher(directory_fd, where, chunk_size, meter)
    if meter.total <= chunk_size:  # threads cost more than they bring
        for span in spans:
            worker.run(span)
        return hashed
    with ThreadPoolExecutor(thread_count(threads), "vgpu-hash") as pool:
        try:
            for _ in pool.map(worker.run, spans):
                pass
        except BaseException:
            worker.is_stopped = True
            pool.shutdown(cancel_futures=True)
            raise
    return hashed


class _Span(NamedTuple):
    file: HashedFile
    cuts: list[Cut]


def _spans(files: Iterable[FileToHash], hashed: Iterable[HashedFile], chunk_size: int) -> list[_Span]:
    spans: list[_Span] = []
    for file, target in zip(files, hashed, strict=True):
        cuts = file.cuts(chunk_size)
        firsts = range(0, max(len(cuts), 1), SPAN_CHUNKS)  # an empty file is still opened and looked at
        spans += (_Span(target, cuts[first : first + SPAN_CHUNKS]) for first in firsts)
    return spans


class _SpanHasher:
    """What a thread does with one span; each thread keeps one buffer."""

    def __init__(self, directory_fd: int, where: str, chunk_size: int, meter: _Meter) -> None:
        self.is_stopped = False
        self._directory_fd = directory_fd
        self._where = where
        self._chunk_size = chunk_size
        self._meter = meter
        self._local = threading.local()

    def run(self, span: _Span) -> None:
        if self.is_stopped:
            return
        file = span.file
        descriptor, size = open_plain(self._directory_fd, file.name, where=self._where)
        try:
            if size != file.size:
                raise ContentMismatch(where=f"{self._where}: {file.name}", what=f"{size} bytes, not {file.size}")
            for cut in span.cuts:
                os.posix_fadvise(descriptor, cut.position * self._chunk_size, cut.length, os.POSIX_FADV_WILLNEED)
            for cut in span.cuts:
                if self.is_stopped:
                    return
                self._hash_chunk(descriptor, file, cut)
        finally:
            os.close(descriptor)

    def _hash_chunk(self, descriptor: int, file: HashedFile, cut: Cut) -> None:
        position = cut.position
        view = self._buffer()[: cut.length]
        read_exactly(descriptor, view, position * self._chunk_size, where=f"{self._where}: {file.name}")
        file.ids[position * ID_BYTES : (position + 1) * ID_BYTES] = blake3(view).digest()
        self._meter.add(len(view))

    def _buffer(self) -> memoryview:
        if not hasattr(self._local, "view"):
            self._local.view = memoryview(bytearray(self._chunk_size))
        view: memoryview = self._local.view
        return view


def read_exactly(descriptor: int, view: memoryview, offset: int, *, where: str) -> None:
    """Fill the buffer from the file; a file that shrank meanwhile is an error."""
    done = 0
    while done < len(view):
        try:
            count = os.preadv(descriptor, [view[done:]], offset + done)
        except OSError as error:
            raise ImageError(where=where, what=f"cannot be read ({error.strerror})") from error
        if count == 0:
            raise ContentMismatch(where=where, what="it became shorter while it was read")
        done += count


class _Meter:
    """Counts bytes over all threads and tells whoever watches."""

    def __init__(self, total: int, on_progress: Callable[[int, int], None] | None) -> None:
        self.total = total
        self._on_progress = on_progress
        self._done = 0
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        if self._on_progress is None:
            return
        with self._lock:
            self._done += count
            self._on_progress(self._done, self.total)
