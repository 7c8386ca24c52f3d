"""Where an archive's bytes come from, and what undoes their compression (spec/archive-layout.md, section 4).

Reads forward, and once more from the start where asked; never writes. Errors of the compression libraries become ours.
`archive`, `ocistore` and `containerd_archive` read through it.
"""

from __future__ import annotations

import gzip
import os
import zlib
from pathlib import Path
from typing import IO, TYPE_CHECKING, Self, cast

import zstandard

from vgpu_errors import ImageError, NoSuchImage

if TYPE_CHECKING:
    from collections.abc import Callable

    from image_format.archives.tar_reader import Readable

MAX_ZSTD_WINDOW = 128 << 20
READ_BYTES = 1 << 20


class RewindableSource:
    """Compressed bytes that can be read twice. `skip` is offered only where seeking is cheap and unseen."""

    def readinto(self, view: memoryview, /) -> int:
        """Fill some of the buffer; 0 at the end."""
        raise NotImplementedError

    def rewind(self) -> None:
        """Begin again."""
        raise NotImplementedError

    def seek_forward(self, count: int) -> int:
        """Skip bytes and say how many; 0 where they must be seen."""
        del count
        return 0

    def read(self, size: int = -1, /) -> bytes:
        """For the decompressors."""
        view = memoryview(bytearray(READ_BYTES if size < 0 else min(size, READ_BYTES)))
        return bytes(view[: self.readinto(view)])


class FileSource(RewindableSource):
    """A file, or a stretch of one."""

    def __init__(
        self,
        path: Path | str,
        on_progress: Callable[[int, int], None] | None = None,
        *,
        start: int = 0,
        size: int | None = None,
    ) -> None:
        self._path = Path(path)
        self._on_progress = on_progress
        self._start, self._size = start, size
        self._position = 0
        self._fd = -1

    def __enter__(self) -> Self:
        try:
            self._fd = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe has no content
            self._size = os.fstat(self._fd).st_size if self._size is None else self._size
            os.posix_fadvise(self._fd, self._start, self._size, os.POSIX_FADV_SEQUENTIAL)
        except OSError as error:
            self.close()
            raise NoSuchImage(path=self._path, what=str(error.strerror)) from error
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    @property
    def size(self) -> int:
        """How many bytes there are."""
        return self._size or 0

    def readinto(self, view: memoryview, /) -> int:
        """Fill some of the buffer; 0 at the end."""
        view = view[: max(0, self.size - self._position)]
        if not view:
            return 0
        try:
            count = os.preadv(self._fd, [view], self._start + self._position)
        except OSError as error:
            raise ImageError(where=self._path, what=f"cannot be read ({error.strerror})") from error
        self._position += count
        if self._on_progress is not None:
            self._on_progress(self._position, self.size)
        return count

    def rewind(self) -> None:
        """Begin again."""
        self._position = 0

    def seek_forward(self, count: int) -> int:
        """Skip bytes; never past the end, so that a short file shows."""
        skipped = max(0, min(count, self.size - self._position))
        self._position += skipped
        return skipped


class Decompressed:
    """Plain tar bytes out of a source, whatever its compression; the library's errors become ours."""

    def __init__(self, source: RewindableSource, *, where: str, is_seeking: bool) -> None:
        self._where = where
        self._head = source.read(4)
        self.compression, self._inner = self._choose(source)
        if self.compression == "none" and is_seeking:
            self.skip = source.seek_forward

    def _choose(self, source: RewindableSource) -> tuple[str, Readable]:
        if self._head[:2] == b"\x1f\x8b":
            source.rewind()
            self._head = b""
            return "gzip", gzip.GzipFile(fileobj=cast("IO[bytes]", source))
        if self._head == b"\x28\xb5\x2f\xfd":
            source.rewind()
            self._head = b""
            decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_ZSTD_WINDOW)
            return "zstd", decompressor.stream_reader(
                cast("IO[bytes]", source), read_size=READ_BYTES, read_across_frames=True
            )
        return "none", source

    def readinto(self, view: memoryview, /) -> int | None:
        """Some of the next plain bytes; 0 at the end."""
        if self._head:
            count = min(len(view), len(self._head))
            view[:count], self._head = self._head[:count], self._head[count:]
            return count
        try:
            return self._inner.readinto(view)
        except (EOFError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError) as error:
            raise ImageError(where=self._where, what=f"damaged {self.compression} stream: {error}") from error
