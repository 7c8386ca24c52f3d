"""Files that encrypt or decrypt as they are read or written, one frame in memory at a time (spec/encryption.md, section 2).

Refuses a source that is shorter or longer than was said, and gives out no plain byte before its frame was proved.
Called through `encryption`: a push reads `EncryptingStream`, a pull writes into `DecryptingWriter` or reads `DecryptingStream`.
"""

from __future__ import annotations

import io
import os
from typing import TYPE_CHECKING

from image_format.encryption.frame_cipher import FRAME_SIZE, HEADER_BYTES, OVERHEAD, frame_count, plain_size_of
from vgpu_errors import ContentMismatch, Truncated

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, BinaryIO

    from image_format.encryption.frame_cipher import Blob, Bytes

SEALED_FRAME = FRAME_SIZE + OVERHEAD


class _Pieces(io.RawIOBase):
    """A read-only file made of pieces that are computed; the last piece stays in memory."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self._at = 0
        self._held: tuple[int, bytes] = (-1, b"")

    def _place(self, at: int) -> tuple[int, int]:
        """Number of the piece that holds the byte, and where the piece begins."""
        raise NotImplementedError

    def _piece(self, number: int) -> bytes:
        raise NotImplementedError

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.size}[whence]
        if base + offset < 0:
            raise ValueError("before the beginning")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Fill the whole buffer, or as much of it as there is until the end."""
        rest = memoryview(buffer).cast("B")
        wanted = len(rest)
        while len(rest) and self._at < self.size:
            number, start = self._place(self._at)
            if self._held[0] != number:
                self._held = (number, self._piece(number))
            found = memoryview(self._held[1])[self._at - start :][: len(rest)]
            rest[: len(found)] = found
            rest = rest[len(found) :]
            self._at += len(found)
        return wanted - len(rest)


class EncryptingStream(_Pieces):
    """The encrypted form of a file that can seek. The same content gives the same bytes, from any offset on."""

    def __init__(self, blob: Blob, readable: BinaryIO, plain_size: int) -> None:
        self._blob = blob
        self._readable = readable
        self._plain_size = plain_size
        self._frames = frame_count(plain_size)
        super().__init__(HEADER_BYTES + self._frames * OVERHEAD + plain_size)

    def _place(self, at: int) -> tuple[int, int]:
        if at < HEADER_BYTES:
            return -2, 0
        number = (at - HEADER_BYTES) // SEALED_FRAME
        return number, HEADER_BYTES + number * SEALED_FRAME

    def _piece(self, number: int) -> bytes:
        if number < 0:
            return self._blob.header
        is_last = number == self._frames - 1
        start = number * FRAME_SIZE
        self._readable.seek(start)
        plain = _read_all(self._readable, min(FRAME_SIZE, self._plain_size - start), self._blob.name)
        if is_last and self._readable.read(1):
            raise ContentMismatch(where=self._blob.name, what=f"more than {self._plain_size} bytes")
        return self._blob.seal(plain, number, is_last=is_last)

    def close(self) -> None:
        """Close the source, too."""
        if not self.closed:
            self._readable.close()
        super().close()


class DecryptingStream(_Pieces):
    """The plain form of an encrypted file that can seek."""

    def __init__(self, blob: Blob, readable: BinaryIO, sealed_size: int) -> None:
        self._blob = blob
        self._readable = readable
        self._sealed_size = sealed_size
        super().__init__(plain_size_of(sealed_size, where=blob.name))
        self._frames = frame_count(self.size)
        self._readable.seek(0)
        blob.check_header(_read_all(readable, HEADER_BYTES, blob.name))
        self._held = (self._frames - 1, self._piece(self._frames - 1))  # whoever cut the end off is found out first

    def _place(self, at: int) -> tuple[int, int]:
        number = at // FRAME_SIZE
        return number, number * FRAME_SIZE

    def _piece(self, number: int) -> bytes:
        start = HEADER_BYTES + number * SEALED_FRAME
        self._readable.seek(start)
        sealed = _read_all(self._readable, min(SEALED_FRAME, self._sealed_size - start), self._blob.name)
        return self._blob.open(sealed, number, is_last=number == self._frames - 1)

    def close(self) -> None:
        """Close the source, too."""
        if not self.closed:
            self._readable.close()
        super().close()


class DecryptingWriter:
    """Takes an encrypted blob as it comes and hands on each frame that was proved; `close` proves that it was all."""

    def __init__(self, blob: Blob, write: Callable[[bytes], object], sealed_size: int) -> None:
        self._blob = blob
        self._write = write
        self._sealed_size = sealed_size
        self.plain_size = plain_size_of(sealed_size, where=blob.name)
        self._frames = frame_count(self.plain_size)
        self._pending = bytearray()
        self._number = -1
        self._taken = 0

    def write(self, piece: Bytes) -> int:
        """Take the next bytes."""
        size = memoryview(piece).nbytes
        if self._taken + size > self._sealed_size:
            raise ContentMismatch(where=self._blob.name, what=f"more than {self._sealed_size} bytes")
        self._taken += size
        rest = memoryview(piece).cast("B")
        while len(rest):
            missing = self._wanted() - len(self._pending)
            self._pending += rest[:missing]
            rest = rest[missing:]
            if len(self._pending) == self._wanted():
                self._advance()
        return size

    def close(self) -> None:
        """Refuse a blob that has not come to its end."""
        if self._number != self._frames:
            raise Truncated(where=self._blob.name, found=self._taken, needed=self._sealed_size)

    def _wanted(self) -> int:
        if self._number < 0:
            return HEADER_BYTES
        return min(SEALED_FRAME, self._sealed_size - HEADER_BYTES - self._number * SEALED_FRAME)

    def _advance(self) -> None:
        if self._number < 0:
            self._blob.check_header(bytes(self._pending))
        else:
            is_last = self._number == self._frames - 1
            self._write(self._blob.open(self._pending, self._number, is_last=is_last))
        self._number += 1
        self._pending.clear()


def _read_all(readable: BinaryIO, size: int, where: str) -> bytes:
    """Exactly so many bytes, however few come at a time."""
    data = readable.read(size)
    if len(data) == size:
        return data
    pieces = [data]
    found = len(data)
    while found < size and (piece := readable.read(size - found)):
        pieces.append(piece)
        found += len(piece)
    if found < size:
        raise Truncated(where=where, found=found, needed=size)
    return b"".join(pieces)
