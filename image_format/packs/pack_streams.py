"""Makes the bytes of planned packs out of a sealed directory: measures them once, then streams them from any offset.

The bytes are deterministic: chunks in the plan's order, each at the next multiple of 4096, zeros in between and behind
the last (spec/transport.md, section 3). A chunk is compressed only where a sample says that it pays, and stored
compressed only if it did. Measuring compares every chunk with its id, so that what is pushed is what was sealed.
Memory is bounded: one chunk per thread, two where it compresses. Keeps no copy of a pack, writes nothing.
"""

from __future__ import annotations

import hashlib
import io
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, BinaryIO, Self, cast

import zstandard
from blake3 import blake3

from image_format.hashing import open_plain, read_exactly, thread_count
from image_format.index_model import PACK_ALIGNMENT, Codec
from image_format.packs.open_files import OpenFiles
from image_format.packs.packed import Layout, PackedPlan, Place, aligned
from vgpu_errors import ContentMismatch, ImageError, NoSuchImage

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from image_format.packs.packed import Compression, PlannedChunk, PlannedPack

# Samples of a chunk tell whether all of it is worth the time (bench/pack_speed.py has what they cost); a chunk counts
# as compressible when a tenth goes away.
SAMPLE_BYTES = 32 << 10
_ZEROS = bytes(PACK_ALIGNMENT)


def measure_packs(
    plan: PackedPlan,
    directory: Path | str,
    *,
    threads: int | None = None,
    known: Mapping[bytes, Layout] | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> PackedPlan:
    """Size, sha256 and places of every pack that has none yet; `known` layouts by key spare the reading."""
    plan = plan.with_layouts(known or {})
    missing = [pack for pack in plan.packs if pack.layout is None]
    with SourceFiles(directory) as files:
        measurer = _Measurer(files, plan.index.chunk_size, plan.compression, on_bytes)
        with ThreadPoolExecutor(thread_count(threads), "vgpu-measure") as pool:
            try:
                found = dict(pool.map(measurer.run, missing))
            except BaseException:
                measurer.is_stopped = True
                pool.shutdown(cancel_futures=True)
                raise
    return plan.with_layouts(found)


def open_pack(plan: PackedPlan, number: int, directory: Path | str) -> BinaryIO:
    """The bytes of one pack; seekable, so that an upload can go on from any offset. Closing it closes the files."""
    pack = plan.packs[number]
    if pack.is_earlier:
        raise ImageError(where=f"pack {number}", what="is one of an earlier checkpoint and cannot be made again here")
    return cast("BinaryIO", io.BufferedReader(PackStream(pack, directory, plan.compression), 1 << 20))


class SourceFiles:
    """The files of a sealed directory, read from any thread."""

    def __init__(self, directory: Path | str) -> None:
        self._where = str(directory)
        self._open = OpenFiles(self._open_plain, os.close)
        try:
            self._directory_fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise NoSuchImage(path=directory, what=str(error.strerror)) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of all files."""
        self._open.close()
        if self._directory_fd >= 0:
            os.close(self._directory_fd)
            self._directory_fd = -1

    def read(self, chunk: PlannedChunk, view: memoryview, skip: int = 0) -> None:
        """Fill the buffer with the chunk's bytes from there on."""
        name, offset = chunk.source
        with self._open.use(name) as descriptor:
            read_exactly(descriptor, view, offset + skip, where=f"{self._where}: {name}")

    def mismatch(self, chunk: PlannedChunk, what: str) -> ContentMismatch:
        """The error that names a chunk's place."""
        return ContentMismatch(where=f"{self._where}: {chunk.source.name}", what=f"{what} at {chunk.source.offset}")

    def _open_plain(self, name: str) -> int:
        descriptor, _ = open_plain(self._directory_fd, name, where=self._where)
        return descriptor


class Compressor:
    """Decides for a chunk and compresses it; the same bytes in, the same bytes out."""

    def __init__(self, compression: Compression) -> None:
        self._compression = compression
        self._zstd = zstandard.ZstdCompressor(level=compression.level, write_checksum=False, write_content_size=True)

    def compress(self, view: memoryview, kind: int) -> bytes | None:
        """The stored form, or None where the chunk is stored as it is."""
        if kind not in self._compression.kinds or not self.is_worth_trying(view):
            return None
        data = self._zstd.compress(view)
        return data if is_worth_it(len(data), len(view)) else None

    def is_worth_trying(self, view: memoryview) -> bool:
        """Whether samples of the chunk compress."""
        if len(view) <= 4 * SAMPLE_BYTES:
            return True
        starts = (0, (len(view) - SAMPLE_BYTES) // 2, len(view) - SAMPLE_BYTES)
        packed = sum(len(self._zstd.compress(view[start : start + SAMPLE_BYTES])) for start in starts)
        return is_worth_it(packed, len(starts) * SAMPLE_BYTES)


def is_worth_it(stored: int, length: int) -> bool:
    """A tenth is saved, and at least one block."""
    return stored * 10 <= length * 9 and aligned(stored) < aligned(length)


class _Measurer:
    """What a thread does with one pack."""

    def __init__(
        self, files: SourceFiles, chunk_size: int, compression: Compression, on_bytes: Callable[[int], None] | None
    ) -> None:
        self.is_stopped = False
        self._files = files
        self._chunk_size = chunk_size
        self._compression = compression
        self._on_bytes = on_bytes
        self._local = threading.local()

    def run(self, pack: PlannedPack) -> tuple[bytes, Layout]:
        digest, offset, places = hashlib.sha256(), 0, []
        for chunk in pack.chunks:
            if self.is_stopped:
                break
            place, stored = self._stored(chunk, pack.kind, offset)
            digest.update(stored)
            digest.update(_ZEROS[: -place.stored_length % PACK_ALIGNMENT])
            places.append(place)
            offset = place.end
            if self._on_bytes is not None:
                self._on_bytes(chunk.length)
        return pack.key, Layout(offset, digest.digest(), tuple(places))

    def _stored(self, chunk: PlannedChunk, kind: int, offset: int) -> tuple[Place, memoryview | bytes]:
        view = self._buffer()[: chunk.length]
        self._files.read(chunk, view)
        if blake3(view).digest() != chunk.id:
            raise self._files.mismatch(chunk, f"{chunk.length} bytes")
        data = self._compressor().compress(view, kind)
        if data is None:
            return Place(Codec.RAW, offset, chunk.length), view
        return Place(Codec.ZSTD, offset, len(data)), data

    def _buffer(self) -> memoryview:
        if not hasattr(self._local, "view"):
            self._local.view = memoryview(bytearray(self._chunk_size))
        view: memoryview = self._local.view
        return view

    def _compressor(self) -> Compressor:
        if not hasattr(self._local, "compressor"):
            self._local.compressor = Compressor(self._compression)
        compressor: Compressor = self._local.compressor
        return compressor


class PackStream(io.RawIOBase):
    """One pack as a file that is made while it is read."""

    def __init__(self, pack: PlannedPack, directory: Path | str, compression: Compression) -> None:
        super().__init__()
        self._files = SourceFiles(directory)
        self._chunks, self._layout, self._kind = pack.chunks, pack.measured, pack.kind
        self._compressor = Compressor(compression)
        self._position = 0
        self._current = 0
        self._compressed: tuple[int, bytes] = (-1, b"")

    def readable(self) -> bool:
        """It is there to be read."""
        return True

    def seekable(self) -> bool:
        """Any place can be read at once."""
        return True

    def tell(self) -> int:
        """Where the next byte comes from."""
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Go to a place in the pack."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._layout.size}[whence]
        self._position = max(0, base + offset)
        self._current = 0
        return self._position

    def close(self) -> None:
        """Close the files behind it."""
        if hasattr(self, "_files"):  # not where opening them failed
            self._files.close()
        super().close()

    def readinto(self, buffer: bytearray | memoryview, /) -> int:  # type: ignore[override]  # any writable buffer
        """Some of the next bytes; 0 at the end."""
        view = memoryview(buffer).cast("B")
        if not view or self._position >= self._layout.size:
            return 0
        place = self._find()
        skip = self._position - place.offset
        if skip < place.stored_length:
            view = view[: place.stored_length - skip]
            self._copy(self._chunks[self._current], place, view, skip)
        else:
            view = view[: place.end - self._position]
            view[:] = bytes(len(view))
        self._position += len(view)
        return len(view)

    def _find(self) -> Place:
        places = self._layout.places
        while places[self._current].end <= self._position:
            self._current += 1
        return places[self._current]

    def _copy(self, chunk: PlannedChunk, place: Place, view: memoryview, skip: int) -> None:
        if place.codec == Codec.RAW:
            self._files.read(chunk, view, skip)
            return
        view[:] = self._compress(chunk, place)[skip : skip + len(view)]

    def _compress(self, chunk: PlannedChunk, place: Place) -> bytes:
        number, data = self._compressed
        if number == self._current:
            return data
        view = memoryview(bytearray(chunk.length))
        self._files.read(chunk, view)
        data = self._compressor.compress(view, self._kind) or b""
        if len(data) != place.stored_length:
            raise self._files.mismatch(chunk, f"{len(data)} compressed bytes, not {place.stored_length},")
        self._compressed = (self._current, data)
        return data
