"""Copies a tar member by member, headers as they are, so that some may be left out and others put in.

What is copied keeps every byte of its headers: owners, times, attributes, links. Reads through `tar_reader`, so its rules
hold. Memory is bounded by one member's headers and one buffer. `reference_archive` uses it.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import secrets
import tarfile
from typing import IO, TYPE_CHECKING, NamedTuple, cast

import zstandard

from image_format.archives.tar_reader import BLOCK, Member, Readable, TarReader
from image_format.store.placing import explained, sync
from vgpu_errors import LimitExceeded, UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

COMPRESSIONS = ("none", "gzip", "zstd")
MAX_HEADER_BYTES = 4 << 20
_BUFFER_BYTES = 4 << 20
_RECORD_BYTES = 20 * BLOCK
_GZIP_LEVEL = 1
_ZSTD_LEVEL = 1


class RawMember(NamedTuple):
    """A member, and all its header blocks as they stand in the archive."""

    member: Member
    headers: bytes


class TarEditor:
    """Goes through a tar; what of a member's data nobody has taken is skipped."""

    def __init__(self, source: Readable, *, where: str) -> None:
        self._recorder = _Recorder(source, where)
        self._tar = TarReader(self._recorder, where=where)
        self._left = 0
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))

    def __iter__(self) -> Iterator[RawMember]:
        padding, members = 0, iter(self._tar)
        while True:
            for _ in self.data():
                pass
            self._recorder.start()
            member = next(members, None)
            headers = self._recorder.stop()[padding:]
            if member is None:
                return
            self._left, padding = member.size, -member.size % BLOCK
            yield RawMember(member, headers)

    def data(self) -> Iterator[memoryview]:
        """What is left of the current member, piece by piece in one buffer."""
        while self._left:
            view = self._buffer[: min(self._left, len(self._buffer))]
            self._tar.read_into(view)
            self._left -= len(view)
            yield view


class _Recorder:
    """Remembers the bytes of headers while the reader goes through them."""

    def __init__(self, source: Readable, where: str) -> None:
        self._source = source
        self._where = where
        self._record: bytearray | None = None

    def start(self) -> None:
        self._record = bytearray()

    def stop(self) -> bytes:
        record, self._record = self._record, None
        return bytes(record or b"")

    def readinto(self, view: memoryview, /) -> int | None:
        count = self._source.readinto(view)
        if self._record is not None and count:
            if len(self._record) + count > MAX_HEADER_BYTES:
                raise LimitExceeded(where=self._where, what="a member's headers", found="more", limit=MAX_HEADER_BYTES)
            self._record += view[:count]
        return count


class TarWriter:
    """Writes members one after the other."""

    def __init__(self, out: IO[bytes]) -> None:
        self._out = out
        self._size = 0

    def copy(
        self, raw: RawMember, pieces: Iterator[memoryview], also: Callable[[memoryview], object] | None = None
    ) -> None:
        """A member as it was; `also` sees its data."""
        self._write(raw.headers)
        for piece in pieces:
            self._write(piece)
            if also is not None:
                also(piece)
        self._write(bytes(-raw.member.size % BLOCK))

    def add(self, name: str, size: int, pieces: Iterator[memoryview], *, when_s: int) -> None:
        """A new file for root alone."""
        entry = tarfile.TarInfo(name)
        entry.size, entry.mode, entry.mtime = size, 0o600, when_s
        self._write(entry.tobuf(tarfile.PAX_FORMAT))
        for piece in pieces:
            self._write(piece)
        self._write(bytes(-size % BLOCK))

    def end(self) -> None:
        """The two empty blocks, and the rest of a record."""
        self._write(bytes(2 * BLOCK))
        self._write(bytes(-self._size % _RECORD_BYTES))

    def _write(self, data: bytes | memoryview) -> None:
        self._out.write(data)
        self._size += len(data)


@contextlib.contextmanager
def new_file(target: Path, compression: str, check: Callable[[Path], object] | None = None) -> Iterator[IO[bytes]]:
    """A file that gets its name when the block has ended without an error and `check` has seen it whole."""
    refuse_existing(target)
    partial = target.with_name(f".{target.name}.{secrets.token_hex(8)}.partial")
    with explained(target, 0):
        descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                with _compressed(file, compression) as out:
                    yield out
                file.flush()
                os.fsync(file.fileno())
            if check is not None:
                check(partial)
            publish(partial, target)
        finally:
            partial.unlink(missing_ok=True)


def refuse_existing(target: Path) -> None:
    """Nothing that is there is ever replaced."""
    if os.path.lexists(target):
        raise UserError(what=f"{target} is there already", remedy="Give another name, or remove it first.")


def publish(partial: Path, target: Path) -> None:
    """Give a finished file its name, unless somebody else has taken that meanwhile."""
    try:
        os.link(partial, target)
    except FileExistsError:
        refuse_existing(target)
    except OSError:  # a file system without hard links
        refuse_existing(target)
        partial.rename(target)
    sync(target.parent)


@contextlib.contextmanager
def _compressed(file: IO[bytes], compression: str) -> Iterator[IO[bytes]]:
    if compression == "none":
        yield file
    elif compression == "gzip":
        with gzip.GzipFile(fileobj=file, mode="wb", compresslevel=_GZIP_LEVEL, mtime=0, filename="") as out:
            yield cast("IO[bytes]", out)
    else:
        with zstandard.ZstdCompressor(level=_ZSTD_LEVEL, threads=-1).stream_writer(file, closefd=False) as out:
            yield cast("IO[bytes]", out)
