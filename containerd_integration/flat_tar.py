"""A checkpoint directory as the tar that containerd keeps, and back: flat, regular files only.

The tar is made anew from the directory whenever it is read and never lies on disk: `pieces` gives the same bytes each
time, so that they can be hashed first and sent then. Refuses, in both directions, what is no plain file with a plain name.
Called by `checkpointing` and `restoring`.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tarfile
from typing import TYPE_CHECKING

from image_format.archives.containerd_index import CRIU_TYPE, Descriptor
from image_format.archives.tar_reader import Kind, TarReader
from image_format.file_names import check_name
from vgpu_errors import Truncated, UnexpectedEntry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

PIECE_BYTES = 1 << 20
BLOCK = tarfile.BLOCKSIZE
MODE = 0o600


class FlatTar:
    """The tar of one directory; nothing in it may change between two readings."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files = [
            (name, _plain_size(directory, name)) for name in sorted(entry.name for entry in directory.iterdir())
        ]

    @property
    def size(self) -> int:
        """Bytes of the whole tar."""
        blocks = sum(len(_header(name, size)) + -(-size // BLOCK) * BLOCK for name, size in self._files)
        return blocks + 2 * BLOCK

    def described(self, on_bytes: Callable[[int], object] | None = None) -> Descriptor:
        """Hash it."""
        digest = hashlib.sha256()
        for piece in self.pieces():
            digest.update(piece)
            if on_bytes is not None:
                on_bytes(len(piece))
        return Descriptor(CRIU_TYPE, f"sha256:{digest.hexdigest()}", self.size)

    def pieces(self) -> Iterator[bytes]:
        """All bytes in their order."""
        for name, size in self._files:
            yield _header(name, size)
            yield from self._content(name, size)
            if size % BLOCK:
                yield bytes(BLOCK - size % BLOCK)
        yield bytes(2 * BLOCK)

    def _content(self, name: str, size: int) -> Iterator[bytes]:
        with (self.directory / name).open("rb", buffering=0) as file:
            left = size
            while left:
                data = file.read(min(left, PIECE_BYTES))
                if not data:
                    raise Truncated(where=self.directory / name, found=size - left, needed=size)
                left -= len(data)
                yield data


def unpack(pieces: Iterable[bytes], directory: Path, *, where: str) -> None:
    """Write the files of a tar into an empty directory."""
    tar = TarReader(PieceReader(pieces), where=where)
    buffer = memoryview(bytearray(PIECE_BYTES))
    for member in tar:
        if member.kind is Kind.DIRECTORY and member.name in ("", "."):
            continue
        check_name(member.name, where=where)
        if member.kind is not Kind.FILE:
            raise UnexpectedEntry(where=where, entry=member.name, what=f"is a {member.kind}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            descriptor = os.open(directory / member.name, flags, MODE)
        except FileExistsError as error:
            raise UnexpectedEntry(where=where, entry=member.name, what="appears twice") from error
        with os.fdopen(descriptor, "wb", buffering=0) as file:
            left = member.size
            while left:
                view = buffer[: min(left, PIECE_BYTES)]
                tar.read_into(view)
                file.write(view)
                left -= len(view)


class PieceReader:
    """Pieces of any length as something that fills buffers."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = iter(pieces)
        self._rest = memoryview(b"")

    def readinto(self, view: memoryview, /) -> int:
        """Fill some of the buffer; 0 at the end."""
        while not self._rest:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._rest = memoryview(piece)
        count = min(len(view), len(self._rest))
        view[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count


def _plain_size(directory: Path, name: str) -> int:
    check_name(name, where=str(directory))
    found = (directory / name).lstat()
    if not stat.S_ISREG(found.st_mode):
        raise UnexpectedEntry(where=directory, entry=name, what="is not a regular file")
    return found.st_size


def _header(name: str, size: int) -> bytes:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = size, MODE
    return entry.tobuf(tarfile.PAX_FORMAT)
