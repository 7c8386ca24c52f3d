"""A checkpoint image as one file: an OCI layout in a tar, plain, gzip or zstd.

The index comes first and the large CRIU tar last, so that a reader of a compressed file knows early what it reads.
`ctr image import --no-unpack` takes the plain form too. Written as FILE.partial; the rename is the commit.
Reading is in image_format/archives/containerd_archive.py. Called by `checkpointing`.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import tarfile
from typing import IO, TYPE_CHECKING, cast

import zstandard

from containerd_integration.flat_tar import PieceReader
from image_format.archives import containerd_index
from image_format.archives.containerd_archive import LAYOUT_TEXT, blob_name
from image_format.archives.ocistore import INDEX_NAME, LAYOUT_NAME

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from containerd_integration.api.content import ContentStore
    from containerd_integration.flat_tar import FlatTar
    from image_format.archives.containerd_index import Descriptor

COMPRESSIONS = ("none", "gzip", "zstd")
GZIP_LEVEL, ZSTD_LEVEL = 1, 1


def write_file(  # noqa: PLR0913 - what is written, and who hears of it
    path: Path,
    index: bytes,
    store: ContentStore,
    blobs: Iterable[Descriptor],
    tar: FlatTar,
    criu: Descriptor,
    *,
    compression: str,
    on_bytes: Callable[[int], object],
    on_commit: Callable[[], object] = lambda: None,
) -> None:
    """Write all blobs; nothing of that name is there before the last one is. `on_commit` is called before the rename."""
    partial = path.with_name(f".{path.name}.partial")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(partial, flags, 0o600), "wb") as file:
            with _compressed(file, compression) as out, tarfile.open(fileobj=out, mode="w|") as archive:
                for name, data in _documents(index):
                    _add(archive, name, len(data), [data])
                for blob in blobs:
                    _add(archive, blob_name(blob.digest), blob.size, store.stream(blob.digest))
                _add(archive, blob_name(criu.digest), criu.size, _counted(tar.pieces(), on_bytes))
            file.flush()
            os.fsync(file.fileno())
        on_commit()
        partial.rename(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _documents(index: bytes) -> Iterator[tuple[str, bytes]]:
    blob = containerd_index.described(index)
    top = {"digest": blob.digest, "mediaType": blob.media_type, "size": blob.size}
    yield LAYOUT_NAME, LAYOUT_TEXT
    yield INDEX_NAME, json.dumps({"schemaVersion": 2, "manifests": [top]}, sort_keys=True).encode()
    yield blob_name(blob.digest), index


def _add(archive: tarfile.TarFile, name: str, size: int, pieces: Iterable[bytes]) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = size, 0o644
    archive.addfile(entry, cast("IO[bytes]", _File(pieces)))


class _File(PieceReader):
    """Pieces as the file object that tarfile copies from."""

    def read(self, size: int = -1) -> bytes:
        """Up to `size` bytes; tarfile asks until it has all."""
        buffer = bytearray(size)
        view, filled = memoryview(buffer), 0
        while filled < size and (count := self.readinto(view[filled:])):
            filled += count
        return bytes(view[:filled])


def _counted(pieces: Iterable[bytes], on_bytes: Callable[[int], object]) -> Iterator[bytes]:
    for piece in pieces:
        yield piece
        on_bytes(len(piece))


@contextlib.contextmanager
def _compressed(file: IO[bytes], compression: str) -> Iterator[IO[bytes]]:
    if compression == "gzip":
        with gzip.GzipFile(filename="", fileobj=file, mode="wb", compresslevel=GZIP_LEVEL, mtime=0) as out:
            yield cast("IO[bytes]", out)
    elif compression == "zstd":
        compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL, threads=-1, write_checksum=True)
        with compressor.stream_writer(file, closefd=False) as writer:
            yield writer
    else:
        yield file
