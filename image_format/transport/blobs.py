"""The blobs of a push: what each one is, whether the registry has it, and how it gets there (docs/registry.md).

For each blob, in this order: it is there; it is in another repository of the registry, and mounted; it is sent.
Blobs with equal digests are one. Several are under way at a time; the first fault stops all. `pushing` calls it.
"""

from __future__ import annotations

import hashlib
import io
import os
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, BinaryIO, NamedTuple, cast

from image_format.registry.parallel import IN_FLIGHT, for_each

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from image_format.registry import Registry
    from image_format.transport.watching import Counts, Watcher


@dataclass(frozen=True)
class Blob:
    """Something to send: a stream from any offset, of known digest and size."""

    open_stream: Callable[[int], BinaryIO]
    digest: str
    size: int

    @classmethod
    def of_bytes(cls, data: bytes) -> Blob:
        """Out of memory."""
        return cls(lambda offset: io.BytesIO(data[offset:]), "sha256:" + hashlib.sha256(data).hexdigest(), len(data))

    @classmethod
    def of_file(cls, file: IO[bytes]) -> Blob:
        """A file that stays open and is read from several places at once."""
        descriptor = file.fileno()
        size = os.fstat(descriptor).st_size
        digest = hashlib.sha256()
        with _Window(descriptor, 0) as window:
            while piece := window.read(1 << 20):
                digest.update(piece)
        return cls(lambda offset: cast("BinaryIO", _Window(descriptor, offset)), "sha256:" + digest.hexdigest(), size)


class Stream(NamedTuple):
    """Something to send whose digest is not known yet."""

    open_stream: Callable[[int], BinaryIO]
    size: int


class Sender:
    """Brings blobs into one repository."""

    def __init__(
        self,
        registry: Registry,
        siblings: Mapping[str, str],
        tries: Iterable[str],
        counts: Counts,
        watcher: Watcher,
        *,
        phase: str = "push",
    ) -> None:
        self._registry = registry
        self._siblings = siblings
        self._tries = tuple(tries)
        self._counts = counts
        self._watcher = watcher
        self._phase = phase

    def is_there(self, digest: str, size: int) -> bool:
        """The repository has the blob, from now on if another one of the registry could give it."""
        if self._registry.head_blob(digest) is not None:
            self._counts.add("skipped", size)
        elif self._mount(digest):
            self._counts.add("mounted", size)
        else:
            return False
        return True

    def bring(self, blob: Blob) -> None:
        """Send one blob if it is not there."""
        if not self.is_there(blob.digest, blob.size):
            self._watcher.grow(self._phase, blob.size)
            self._send(blob)

    def send_streams(self, streams: Sequence[Stream], *, in_flight: int = IN_FLIGHT) -> tuple[str, ...]:
        """Send what nobody has, each once; the digests that were learnt on the way."""
        digests = [""] * len(streams)

        def send(number: int) -> None:
            open_stream, size = streams[number]
            digests[number] = self._registry.upload_stream(open_stream, size, self._moved)

        for_each(send, range(len(streams)), self._registry.stop, in_flight=in_flight)
        return tuple(digests)

    def _send(self, blob: Blob) -> None:
        self._registry.upload_blob(blob.open_stream, blob.digest, blob.size, self._moved)

    def _moved(self, count: int) -> None:
        self._counts.add("sent", count)
        self._watcher.moved(self._phase, count)

    def _mount(self, digest: str) -> bool:
        known = self._siblings.get(digest)
        candidates = dict.fromkeys([known, *self._tries] if known else self._tries)
        return any(
            self._registry.mount_blob(digest, repository)
            for repository in candidates
            if repository != self._registry.repository
        )


class _Window(io.RawIOBase):
    """Reads an open file from an offset of its own."""

    def __init__(self, descriptor: int, offset: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._offset = offset

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        size = os.fstat(self._descriptor).st_size if whence == os.SEEK_END else 0
        self._offset = {os.SEEK_SET: 0, os.SEEK_CUR: self._offset, os.SEEK_END: size}[whence] + offset
        return self._offset

    def readinto(self, buffer: bytearray | memoryview, /) -> int:  # type: ignore[override]  # any writable buffer
        count = os.preadv(self._descriptor, [buffer], self._offset)
        self._offset += count
        return count
