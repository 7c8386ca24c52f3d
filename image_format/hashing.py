"""Chunk ids of files: BLAKE3-256 of every 4 MiB, in threads, through reused buffers (spec/chunk-index.md, section 4).

Of a pack only the slots in use are hashed, each as far as its chunk goes; a file of pages is cut as `lengths` says.
Opens only plain regular files, with one link where they are small, relative to a directory it is given, and never
follows a link.
Memory is bounded: one chunk buffer per thread, whatever the files' sizes. Sealing and verifying call it.
"""

from __future__ import annotations

import itertools
import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

from blake3 import blake3

from image_format.file_names import is_pack
from image_format.index_model import CHUNK_SIZE, MAX_SMALL_FILE, chunk_count_of
from vgpu_errors import ContentMismatch, ImageError, UnexpectedEntry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

ID_BYTES = 32
# A task long enough that opening the file does not show, short enough that threads end together.
SPAN_CHUNKS = 16
SPAN_CUTS = 4096
MAX_THREADS = 16


class FileToHash(NamedTuple):
    """A file by its name in the directory, and the size it must have.

    For a pack, the slots in use and their lengths; for a file of pages, the lengths of its chunks in order.
    """

    name: str
    size: int
    slots: Mapping[int, int] | None = None
    lengths: Sequence[int] | None = None

    def count(self, chunk_size: int) -> int:
        """How many ids the file may have."""
        return chunk_count_of(self.size, chunk_size) if self.lengths is None else len(self.lengths)

    def cuts(self, chunk_size: int) -> Iterator[Cut]:
        """The pieces to hash."""
        if self.lengths is not None:
            ends = itertools.accumulate(self.lengths)
            yield from (
                Cut(n, end - length, length) for n, (end, length) in enumerate(zip(ends, self.lengths, strict=True))
            )
        elif self.slots is not None:
            yield from (Cut(n, n * chunk_size, length) for n, length in sorted(self.slots.items()))
        else:
            starts = range(0, self.size, chunk_size)
            yield from (Cut(n, start, min(chunk_size, self.size - start)) for n, start in enumerate(starts))


class Cut(NamedTuple):
    """A piece of a file that has an id: the number of the id, where the piece begins, and its length."""

    position: int
    offset: int
    length: int

    @property
    def end(self) -> int:
        """Where the next piece may begin."""
        return self.offset + self.length


class HashedFile(NamedTuple):
    """A file's chunk ids, 32 bytes each, one after the other; `lengths` as in `FileToHash`."""

    name: str
    size: int
    ids: bytearray
    lengths: Sequence[int] | None = None

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
    """Why an entry may not be part of a checkpoint, or None. Packs and bulk files may have further names in a store."""
    if stat.S_ISLNK(status.st_mode):
        return "is a symbolic link"
    if stat.S_ISDIR(status.st_mode):
        return "is a directory"
    if not stat.S_ISREG(status.st_mode):
        return "is not a regular file"
    if status.st_nlink != 1 and not is_pack(name) and not (status.st_size > MAX_SMALL_FILE and may_have_links(status)):
        return "has several hard links"
    return None


def may_have_links(status: os.stat_result) -> bool:
    """Nobody can change it through another name who could not change it here: it is ours or root's, and theirs to write."""
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


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
    hashed = [HashedFile(f.name, f.size, bytearray(ID_BYTES * f.count(chunk_size)), f.lengths) for f in files]
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


def reads_of(cuts: Iterable[Cut], chunk_size: int) -> Iterator[list[Cut]]:
    """Neighbours that fit into one buffer, so that short chunks do not cost a call each."""
    together: list[Cut] = []
    for cut in cuts:
        if together and (cut.offset != together[-1].end or cut.end - together[0].offset > chunk_size):
            yield together
            together = []
        together.append(cut)
    if together:
        yield together


def _spans(files: Iterable[FileToHash], hashed: Iterable[HashedFile], chunk_size: int) -> list[_Span]:
    spans: list[_Span] = []
    for file, target in zip(files, hashed, strict=True):
        span = _Span(target, [])
        spans.append(span)  # an empty file is still opened and looked at
        for cut in file.cuts(chunk_size):
            is_full = bool(span.cuts) and cut.end - span.cuts[0].offset > SPAN_CHUNKS * chunk_size
            if is_full or len(span.cuts) == SPAN_CUTS:
                span = _Span(target, [])
                spans.append(span)
            span.cuts.append(cut)
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
            reads = list(reads_of(span.cuts, self._chunk_size))
            for cuts in reads:
                os.posix_fadvise(descriptor, cuts[0].offset, cuts[-1].end - cuts[0].offset, os.POSIX_FADV_WILLNEED)
            for cuts in reads:
                if self.is_stopped:
                    return
                self._hash_chunks(descriptor, file, cuts)
        finally:
            os.close(descriptor)

    def _hash_chunks(self, descriptor: int, file: HashedFile, cuts: Sequence[Cut]) -> None:
        start = cuts[0].offset
        view = self._buffer()[: cuts[-1].end - start]
        read_exactly(descriptor, view, start, where=f"{self._where}: {file.name}")
        for cut in cuts:
            piece = view[cut.offset - start : cut.end - start]
            file.ids[cut.position * ID_BYTES : (cut.position + 1) * ID_BYTES] = blake3(piece).digest()
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
