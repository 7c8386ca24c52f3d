"""Puts a file in place as a whole or not at all: temporary name, synchronised, renamed, directory synchronised.

So that a crash at any moment leaves either the old file or the new one (spec/archive-layout.md, section 3).
Writes below a directory that is held open, follows no link. Sealing and unpacking use it.
"""

from __future__ import annotations

import contextlib
import errno
import os
from typing import TYPE_CHECKING

from image_format.file_names import PARTIAL_PREFIX
from vgpu_errors import ImageError, NoSuchImage, NotEnoughSpace

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class WholeFiles:
    """Writes and removes whole files in one directory."""

    def __init__(self, directory_fd: int, path: Path) -> None:
        self._directory_fd = directory_fd
        self._path = path

    def write(self, name: str, data: bytes | memoryview) -> None:
        """Put these bytes under this name; what was there before is replaced."""
        try:
            self._write(name, data)
        except OSError as error:
            raise explained(error, self._path / name, len(data)) from error

    def remove(self, name: str) -> None:
        """Remove a file that may be absent."""
        with explained_removal(self._path), contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._directory_fd)

    def sync(self) -> None:
        """What was removed and renamed is on the disk."""
        try:
            os.fsync(self._directory_fd)
        except OSError as error:
            raise explained(error, self._path, 0) from error

    def _write(self, name: str, data: bytes | memoryview) -> None:
        partial = PARTIAL_PREFIX + name
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(partial, flags, 0o600, dir_fd=self._directory_fd)
        try:
            write_all(descriptor, data)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(partial, name, src_dir_fd=self._directory_fd, dst_dir_fd=self._directory_fd)
        os.fsync(self._directory_fd)


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Write to the end of a file, all of it."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def explained(error: OSError, path: Path, needed_bytes: int) -> Exception:
    """Why a file cannot be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        status = os.statvfs(path.parent)
        free_bytes = status.f_bavail * status.f_frsize
        return NotEnoughSpace(path=path.parent, free_bytes=free_bytes, needed_bytes=needed_bytes)
    return ImageError(where=path, what=f"cannot be written ({error.strerror})")


@contextlib.contextmanager
def explained_removal(path: Path) -> Iterator[None]:
    """Errors of removing what an earlier seal left."""
    try:
        yield
    except OSError as error:
        raise ImageError(where=path, what=f"an old seal cannot be removed ({error.strerror})") from error


@contextlib.contextmanager
def open_directory(path: Path) -> Iterator[int]:
    """A directory held open."""
    try:
        directory_fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise NoSuchImage(path=path, what=str(error.strerror)) from error
    try:
        yield directory_fd
    finally:
        os.close(directory_fd)
