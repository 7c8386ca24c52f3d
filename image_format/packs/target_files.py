"""Files that are written chunk by chunk at their places: of full size from the start, without holes, past the page cache.

Space is taken before the first byte, so that a full disk shows early; every byte is written, because engines' archives
do not carry sparse files. Whole blocks go with O_DIRECT where the file system can (a fresh page in the cache costs
forty times the CPU), the rest through the cache. Never writes through a link, nor into a file with a second name.
`unpacking` calls it.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
from typing import TYPE_CHECKING, NamedTuple, Self

from image_format.hashing import read_exactly
from image_format.index_model import PACK_ALIGNMENT
from image_format.packs.open_files import OpenFiles
from image_format.whole_files import explained
from vgpu_errors import UnexpectedEntry

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_ZERO_BYTES = 1 << 20


class _Open(NamedTuple):
    cached: int
    direct: int


class TargetFiles:
    """The files of one directory that are being filled; any thread may write, each to its own places."""

    def __init__(self, directory_fd: int, path: Path) -> None:
        self._directory_fd = directory_fd
        self._path = path
        self._names: list[str] = []
        self._open = OpenFiles(self._open_both, _close_both)
        self._zeros = aligned_buffer(_ZERO_BYTES)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._open.close()

    def create(self, name: str, size: int) -> None:
        """Make a file of that size, or take the one that is there."""
        try:
            os.close(self._open_plain(name, os.O_CREAT))
        except OSError as error:
            raise explained(error, self._path / name, size) from error
        self._names.append(name)
        with self._used(name, size) as file:
            os.ftruncate(file.cached, size)
            if size:
                os.posix_fallocate(file.cached, 0, size)

    def write(self, name: str, offset: int, view: memoryview) -> None:
        """Put the bytes in place; a buffer of `aligned_buffer` goes past the cache."""
        with self._used(name, len(view)) as file:
            done = self._write_direct(file, offset, view) if file.direct >= 0 else 0
            _write_all(file.cached, offset + done, view[done:])

    def fill(self, name: str, start: int, end: int) -> None:
        """Write zeros."""
        while start < end:
            count = min(end - start, _ZERO_BYTES - start % PACK_ALIGNMENT)
            self.write(name, start, self._zeros[:count])
            start += count

    def read(self, name: str, offset: int, view: memoryview) -> None:
        """Fill the buffer with what is in place."""
        with self._used(name, 0) as file:
            read_exactly(file.cached, view, offset, where=str(self._path / name))

    def sync(self) -> None:
        """All of it is on the disk."""
        for name in self._names:
            with self._used(name, 0) as file:
                os.fsync(file.cached)

    @contextlib.contextmanager
    def _used(self, name: str, needed_bytes: int) -> Iterator[_Open]:
        try:
            with self._open.use(name) as file:
                yield file
        except OSError as error:
            raise explained(error, self._path / name, needed_bytes) from error

    def _open_both(self, name: str) -> _Open:
        cached = self._open_plain(name)
        try:
            return _Open(cached, self._open_direct(name))
        except OSError:
            os.close(cached)
            raise

    def _open_plain(self, name: str, creating: int = 0) -> int:
        flags = os.O_RDWR | creating | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(name, flags, 0o600, dir_fd=self._directory_fd)
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
            os.close(descriptor)
            raise UnexpectedEntry(where=self._path, entry=name, what="is no plain file of its own")
        return descriptor

    def _open_direct(self, name: str) -> int:
        flags = os.O_WRONLY | os.O_DIRECT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            return os.open(name, flags, dir_fd=self._directory_fd)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            return -1

    def _write_direct(self, file: _Open, offset: int, view: memoryview) -> int:
        """As many whole blocks as can go past the cache."""
        whole = len(view) - len(view) % PACK_ALIGNMENT
        if offset % PACK_ALIGNMENT or not whole:
            return 0
        try:
            _write_all(file.direct, offset, view[:whole])
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return 0  # larger blocks than ours, or a buffer that is not aligned: all of it goes through the cache
        return whole


def aligned_buffer(size: int) -> memoryview:
    """Zeros that begin at a page: the memory that O_DIRECT takes."""
    return memoryview(mmap.mmap(-1, max(size, 1)))[:size]


def _write_all(descriptor: int, offset: int, view: memoryview) -> None:
    while view:
        count = os.pwrite(descriptor, view, offset)
        offset, view = offset + count, view[count:]


def _close_both(file: _Open) -> None:
    os.close(file.cached)
    if file.direct >= 0:
        os.close(file.direct)
