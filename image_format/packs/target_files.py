"""Files that are written chunk by chunk at their places: of full size from the start, without holes, past the page cache.

Space is taken before the first byte, so that a full disk shows early; every byte is written, because engines' archives
do not carry sparse files. Whole blocks go with O_DIRECT where the file system can (a fresh page in the cache costs
forty times the CPU), the rest through the cache. Never writes through a link, nor into a file with a second name.
`unpacking` calls it.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from image_format.hashing import read_exactly
from image_format.index_model import PACK_ALIGNMENT
from image_format.whole_files import explained
from vgpu_errors import UnexpectedEntry

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

_ZERO_BYTES = 1 << 20


@dataclass
class _Open:
    cached: int
    direct: int


class TargetFiles:
    """The files of one directory that are being filled; any thread may write, each to its own places."""

    def __init__(self, directory_fd: int, path: Path) -> None:
        self._directory_fd = directory_fd
        self._path = path
        self._lock = threading.Lock()
        self._open: dict[str, _Open] = {}
        self._zeros = aligned_buffer(_ZERO_BYTES)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        with self._lock:
            for descriptors in self._open.values():
                _close(descriptors.cached)
                _close(descriptors.direct)
            self._open.clear()

    def create(self, name: str, size: int) -> bool:
        """Make a file of that size, or take the one that is there; True where it had that size before."""
        try:
            cached = self._open_plain(name)
            had_size = os.fstat(cached).st_size == size
            os.ftruncate(cached, size)
            if size:
                os.posix_fallocate(cached, 0, size)
            self._open[name] = _Open(cached, self._open_direct(name))
        except OSError as error:
            raise explained(error, self._path / name, size) from error
        return had_size

    def write(self, name: str, offset: int, view: memoryview) -> None:
        """Put the bytes in place; a buffer of `aligned_buffer` goes past the cache."""
        file = self._open[name]
        try:
            done = self._write_direct(file, offset, view) if file.direct >= 0 else 0
            _write_all(file.cached, offset + done, view[done:])
        except OSError as error:
            raise explained(error, self._path / name, len(view)) from error

    def fill(self, name: str, start: int, end: int) -> None:
        """Write zeros."""
        while start < end:
            count = min(end - start, _ZERO_BYTES - start % PACK_ALIGNMENT)
            self.write(name, start, self._zeros[:count])
            start += count

    def read(self, name: str, offset: int, view: memoryview) -> None:
        """Fill the buffer with what is in place."""
        read_exactly(self._open[name].cached, view, offset, where=str(self._path / name))

    def sync(self, names: Iterable[str] | None = None) -> None:
        """All of it is on the disk."""
        for name in self._open if names is None else names:
            try:
                os.fsync(self._open[name].cached)
            except OSError as error:
                raise explained(error, self._path / name, 0) from error

    def _open_plain(self, name: str) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
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


def _close(descriptor: int) -> None:
    if descriptor >= 0:
        os.close(descriptor)
