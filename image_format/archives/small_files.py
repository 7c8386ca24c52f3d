"""The small files of a checkpoint as one blob: a tar with zstd (spec/transport.md, section 4).

Holds exactly the file regions of at most 1 MiB, flat, in the order of the index, without times, owners or modes, so that
the same files give the same bytes. Reading takes nothing on trust: every member is held against the signed index, by
name, size and ids, before it is written. The transport verbs and `unpacking` call it.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import tarfile
from typing import IO, TYPE_CHECKING, NamedTuple, cast

import zstandard
from blake3 import blake3

from image_format.archives.tar_reader import Kind, TarReader
from image_format.hashing import open_plain, read_exactly
from image_format.whole_files import explained, open_directory, write_all
from vgpu_errors import ContentMismatch, ImageError, UnexpectedEntry

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from image_format.archives.tar_reader import Member, Readable
    from image_format.index_model import Index, Region

MEDIA_TYPE = "application/vnd.vgpu.checkpoint.criu.v1.tar+zstd"
LEVEL = 3
MAX_ZSTD_WINDOW = 8 << 20
_READ_BYTES = 1 << 20


class Written(NamedTuple):
    """What the blob is."""

    sha256: bytes
    size: int


def write_small_files(index: Index, directory: Path, out: IO[bytes]) -> Written:
    """Write the blob; a file that is not what the index says is not written."""
    counted = _Counted(out)
    compressor = zstandard.ZstdCompressor(level=LEVEL, write_checksum=False)
    with (
        open_directory(directory) as directory_fd,
        compressor.stream_writer(cast("IO[bytes]", counted), closefd=False) as plain,
        tarfile.open(fileobj=cast("IO[bytes]", plain), mode="w|", format=tarfile.PAX_FORMAT) as tar,
    ):
        for region in index.small_files:
            data = _content(directory_fd, region, directory)
            _check(region, index, data, str(directory))
            tar.addfile(_entry(region), io.BytesIO(data))
    return Written(counted.digest.digest(), counted.size)


def read_small_files(source: Readable, index: Index, *, where: str) -> Iterator[tuple[str, bytes]]:
    """The files in the blob, each as it comes and only if it is the sealed one; refuses a blob with more or fewer."""
    wanted = {region.name: region for region in index.small_files}
    tar = TarReader(_Plain(source, where), where=where)
    for member in tar:
        region = wanted.pop(member.name, None)
        if region is None or member.kind is not Kind.FILE:
            raise UnexpectedEntry(where=where, entry=ascii(member.name)[1:-1], what="is not a small file of the index")
        yield member.name, _member(tar, member, region, index, where)
    for name in sorted(wanted):
        raise UnexpectedEntry(where=where, entry=name, what="is missing")


def unpack_small_files(source: Readable, index: Index, directory_fd: int, path: Path) -> None:
    """Write the files into a directory, each whole and synchronised."""
    for name, data in read_small_files(source, index, where="small files"):
        try:
            _write(directory_fd, name, data)
        except OSError as error:
            raise explained(error, path / name, len(data)) from error


def _member(tar: TarReader, member: Member, region: Region, index: Index, where: str) -> bytes:
    if member.size != region.length:
        raise ContentMismatch(where=f"{where}: {region.name}", what=f"{member.size} bytes, not {region.length}")
    data = tar.read(member.size)
    _check(region, index, data, where)
    return data


def _write(directory_fd: int, name: str, data: bytes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=directory_fd)
    descriptor = os.open(name, flags, 0o600, dir_fd=directory_fd)
    try:
        write_all(descriptor, data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _content(directory_fd: int, region: Region, directory: Path) -> bytes:
    descriptor, size = open_plain(directory_fd, region.name, where=str(directory))
    try:
        if size != region.length:
            where = f"{directory}: {region.name}"
            raise ContentMismatch(where=where, what=f"{size} bytes, not {region.length}")
        data = bytearray(size)
        read_exactly(descriptor, memoryview(data), 0, where=f"{directory}: {region.name}")
    finally:
        os.close(descriptor)
    return bytes(data)


def _check(region: Region, index: Index, data: bytes, where: str) -> None:
    start = 0
    for chunk in index.chunks_of(region):
        if blake3(memoryview(data)[start : start + chunk.length]).digest() != chunk.id:
            what = f"bytes {start} to {start + chunk.length}"
            raise ContentMismatch(where=f"{where}: {region.name}", what=what)
        start += chunk.length


def _entry(region: Region) -> tarfile.TarInfo:
    info = tarfile.TarInfo(region.name)
    info.size, info.mode = region.length, 0o600
    return info


class _Counted:
    """Passes bytes on and knows what they were."""

    def __init__(self, out: IO[bytes]) -> None:
        self._out = out
        self.size = 0
        self.digest = hashlib.sha256()

    def write(self, data: bytes) -> int:
        self._out.write(data)
        self.digest.update(data)
        self.size += len(data)
        return len(data)


class _Plain:
    """The tar's bytes out of a zstd stream; a damaged one is an error of the image."""

    def __init__(self, source: Readable, where: str) -> None:
        self._where = where
        decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_ZSTD_WINDOW)
        self._inner = decompressor.stream_reader(
            cast("IO[bytes]", _Reads(source)), read_size=_READ_BYTES, read_across_frames=True
        )

    def readinto(self, view: memoryview, /) -> int:
        try:
            return self._inner.readinto(view)
        except (zstandard.ZstdError, EOFError) as error:
            raise ImageError(where=self._where, what=f"damaged zstd stream: {error}") from error


class _Reads:
    """`read` for the decompressor, out of a source that fills buffers."""

    def __init__(self, source: Readable) -> None:
        self._source = source

    def read(self, size: int) -> bytes:
        view = memoryview(bytearray(size))
        return bytes(view[: self._source.readinto(view) or 0])
