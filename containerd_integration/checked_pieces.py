"""A blob's bytes on their way out of a file or a registry; the last piece is given out only after the digest has held.

Called by `imported_file` and `remote_image`.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from containerd_integration.flat_tar import PIECE_BYTES
from vgpu_errors import ContentMismatch, Truncated

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from image_format.archives.containerd_index import Descriptor


class CheckedPieces:
    """`read` gives up to so many of the next bytes, and none at the end."""

    def __init__(self, read: Callable[[int], bytes], blob: Descriptor, where: str) -> None:
        self._read, self._blob, self._where = read, blob, where
        self._iterator = self._pieces()

    def __iter__(self) -> Iterator[bytes]:
        return self._iterator

    def drain(self) -> None:
        """Read what a reader left over, up to the check."""
        for _ in self._iterator:
            pass

    def _pieces(self) -> Iterator[bytes]:
        digest, left = hashlib.sha256(), self._blob.size
        while left:
            piece = self._read(min(left, PIECE_BYTES))
            if not piece:
                raise Truncated(where=self._where, found=self._blob.size - left, needed=self._blob.size)
            digest.update(piece)
            left -= len(piece)
            if not left and f"sha256:{digest.hexdigest()}" != self._blob.digest:
                raise ContentMismatch(where=self._where, what="sha256")
            yield piece
