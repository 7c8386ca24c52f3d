"""Packs of earlier checkpoints whose chunks need not be copied again.

Reads an index and the sizes of packs; believes the index: whoever names a parent has verified its signature. What is taken
over from a parent is proven like everything else, by hashing at the restore. Used by targets.py.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from typing import TYPE_CHECKING

from gpu_state.staging.slots import CHUNK_BYTES, Place, Store
from image_format import chunk_index
from image_format.file_names import INDEX_NAME
from image_format.vram import VramFragment
from vgpu_errors import VgpuError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_FICLONE = 0x40049409


class ParentPack(Store):
    """A pack that is there already."""

    def __init__(self, path: Path, size: int) -> None:
        super().__init__(-1, 0, is_parent=True)
        self.path = path
        self.size = size

    @property
    def live_share(self) -> float:
        """How much of it is still in use; the rest is dead bytes that the image carries along."""
        return len(self.used) * CHUNK_BYTES / self.size


def places_of(directory: Path) -> Iterator[Place]:
    """What a checkpoint directory holds of GPU memory; nothing where its index cannot be read or a pack is short."""
    try:
        index = chunk_index.from_bytes((directory / INDEX_NAME).read_bytes(), where=str(directory))
    except (OSError, VgpuError):
        return  # a parent saves work; without it the work is done
    fragment = VramFragment.from_index(index)
    packs: dict[str, ParentPack] = {}
    for pack in fragment.packs:
        with contextlib.suppress(OSError):
            path = directory / pack.name
            if path.lstat().st_size >= pack.size:
                packs[pack.name] = ParentPack(path, pack.size)
    for region in fragment.regions:
        for chunk in region.chunks:
            if chunk.pack in packs:
                yield Place(chunk.id, packs[chunk.pack], chunk.offset, chunk.length)


def adopt(source: Path, target: Path) -> None:
    """The parent's pack under a name of ours: a second link, else shared extents where the file system can, else a copy.

    The link comes first: the store knows the file by it, and need not read it again to know what it holds.
    """
    try:
        os.link(source, target)
    except OSError as problem:
        if problem.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP):
            raise
        if not _share_extents(source, target):
            copy_bytes(source, target, 0, 0, source.stat().st_size)


def _share_extents(source: Path, target: Path) -> bool:
    reading = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    writing = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.ioctl(writing, _FICLONE, reading)
    except OSError:
        target.unlink()
        return False
    finally:
        os.close(reading)
        os.close(writing)
    return True


def copy_bytes(source: Path, target: Path, source_offset: int, target_offset: int, length: int) -> None:
    """A piece of one file into another, in the kernel."""
    reading = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    writing = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        while length:
            done = os.copy_file_range(reading, writing, length, source_offset, target_offset)
            if not done:
                raise OSError(errno.EIO, f"{source} ends too early")
            source_offset, target_offset, length = source_offset + done, target_offset + done, length - done
    finally:
        os.close(reading)
        os.close(writing)
