"""Gives a file a second name: a hard link, else shared extents, else a copy (spec/store.md, section 3).

The new name must not exist. A hard link is made only of a plain file that nobody but its owner may write to; what is
made otherwise is synchronised before its name is there. Called by the store for everything that comes in and goes out.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
from typing import TYPE_CHECKING

from image_format.file_names import PARTIAL_PREFIX
from image_format.hashing import may_have_links
from vgpu_errors import ImageError, NotEnoughSpace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

# What a crash left under such a name is rubbish, in the store and in a checkpoint directory.
PARTIAL = f"{PARTIAL_PREFIX}store-"
_FICLONE = 0x40049409
_PIECE_BYTES = 64 << 20
# Another file system, one without links, too many links, not allowed for this kind of file.
_NO_LINK = frozenset({errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS})


def place(
    source: Path,
    target: Path,
    size: int,
    *,
    links: bool,
    lasting: bool = True,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Put the content of a file, which has this size, under another name; on disk too, where it is to last.

    `check` is called before each piece of a copy and raises where there is no time left for it.
    """
    with explained(target, size):
        descriptor = open_sized(source, size)
        try:
            if links and _link(descriptor, source, target):
                return
            _copy(descriptor, target, size, lasting=lasting, check=check)
        finally:
            os.close(descriptor)


def swap_for_link(content: Path, name: Path) -> None:
    """Let a name stand for the file `content`, in one step; without links on this file system it stays as it is."""
    temporary = name.with_name(f"{PARTIAL}{secrets.token_hex(8)}")
    try:
        os.link(content, temporary, follow_symlinks=False)
    except OSError as error:
        if error.errno in _NO_LINK:
            return
        raise
    temporary.replace(name)


def open_sized(path: Path, size: int) -> int:
    """A descriptor of a plain file that has this size; how many names it has does not matter here."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise ImageError(where=path, what=f"cannot be opened ({error.strerror})") from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_size != size:
        os.close(descriptor)
        raise ImageError(where=path, what=f"is not the file of {size} bytes that it should be")
    return descriptor


def sync(path: Path) -> None:
    """Bring a file or a directory to disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, data: bytes) -> None:
    """A small file, whole and on disk or not there."""
    partial = path.with_name(f"{PARTIAL}{secrets.token_hex(8)}")
    with explained(path, len(data)):
        try:
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(descriptor)
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        sync(path.parent)


@contextlib.contextmanager
def explained(path: Path, size: int) -> Iterator[None]:
    """Turn the system's errors into ours."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            status = os.statvfs(path.parent)
            free = status.f_bavail * status.f_frsize
            raise NotEnoughSpace(path=path.parent, free_bytes=free, needed_bytes=size) from error
        raise ImageError(where=path, what=f"cannot be written ({error.strerror})") from error


def _link(descriptor: int, source: Path, target: Path) -> bool:
    status = os.fstat(descriptor)
    if not may_have_links(status):
        return False
    os.fchmod(descriptor, 0o600)
    os.fsync(descriptor)  # whoever writes a checkpoint need not; a store must not lose what later ones share
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno in _NO_LINK:
            return False
        raise
    linked = os.lstat(target)
    if not stat.S_ISREG(linked.st_mode) or (linked.st_dev, linked.st_ino) != (status.st_dev, status.st_ino):
        target.unlink()
        raise ImageError(where=source, what="was replaced while it was taken over")
    return True


def _copy(reading: int, target: Path, size: int, *, lasting: bool, check: Callable[[], None]) -> None:
    partial = target.with_name(f"{PARTIAL}{secrets.token_hex(8)}")
    writing = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        if not _share_extents(reading, writing):
            _copy_bytes(reading, writing, size, check)
        if lasting:
            os.fsync(writing)
        try:
            os.link(partial, target)  # unlike a rename it never takes the place of a file
        except OSError as error:
            if error.errno not in _NO_LINK:
                raise
            partial.rename(target)
    finally:
        os.close(writing)
        partial.unlink(missing_ok=True)


def _share_extents(reading: int, writing: int) -> bool:
    try:
        fcntl.ioctl(writing, _FICLONE, reading)
    except OSError:
        return False
    return True


def _copy_bytes(reading: int, writing: int, size: int, check: Callable[[], None]) -> None:
    offset = 0
    while offset < size:
        check()
        done = _copy_piece(reading, writing, offset, min(size - offset, _PIECE_BYTES))
        if not done:
            raise OSError(errno.EIO, "the file became shorter while it was copied")
        offset += done


def _copy_piece(reading: int, writing: int, offset: int, length: int) -> int:
    try:
        return os.copy_file_range(reading, writing, length, offset, offset)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
    return os.sendfile(writing, reading, offset, length) if os.lseek(writing, offset, os.SEEK_SET) == offset else 0
