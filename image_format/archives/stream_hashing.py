"""Chunk ids of files that pass by once: the reading thread fills buffers, others hash them (spec/chunk-index.md, 4).

Memory is bounded: one chunk buffer more than there are threads. Of a pack whose slots are known only these are hashed.
`archive_scan` calls it.
"""

from __future__ import annotations

import queue
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Self

from blake3 import blake3

from image_format.hashing import ID_BYTES, FileToHash, HashedFile, reads_of
from image_format.index_model import chunk_count_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from image_format.hashing import Cut

_DEADLINE_S = 600


class StreamHasher:
    """Hashes chunks beside the thread that reads and decompresses."""

    def __init__(self, threads: int, chunk_size: int) -> None:
        self._pool = ThreadPoolExecutor(threads, "vgpu-hash")
        self._buffer_count = threads + 1
        self._made = 0
        self._chunk_size = chunk_size
        self._free: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        self._running: deque[Future[None]] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def hash(
        self, target: FileToHash, read_into: Callable[[memoryview], None], keep: bytearray | None = None
    ) -> HashedFile:
        """Read the whole file, in order, and hash its pieces; `keep` gets a copy of the content."""
        file = HashedFile(target.name, target.size, bytearray(), target.lengths)
        for length, cuts in self._reads(target):
            buffer = self._take_buffer()
            view = buffer[:length]
            read_into(view)
            if keep is not None:
                keep += view
            last = cuts[-1].position + 1 if cuts else 0
            # Grows with what was really read, not with what a header claims.
            file.ids.extend(bytes(max(0, last * ID_BYTES - len(file.ids))))
            self._running.append(self._pool.submit(self._hash, buffer, file, cuts))
            self._wait(at_most=self._buffer_count)
        self._wait(at_most=0)
        return file

    def _reads(self, target: FileToHash) -> Iterator[tuple[int, list[Cut]]]:
        """How many bytes to read next, and the pieces among them; they are numbered from the start of the file."""
        if target.slots is None:
            for cuts in reads_of(target.cuts(self._chunk_size), self._chunk_size):
                yield cuts[-1].end - cuts[0].offset, cuts
            return
        slots = {cut.position: cut for cut in target.cuts(self._chunk_size)}
        for position in range(chunk_count_of(target.size, self._chunk_size)):
            length = min(self._chunk_size, target.size - position * self._chunk_size)
            slot = slots.get(position)
            yield length, [slot._replace(length=min(slot.length, length))] if slot is not None else []

    def _take_buffer(self) -> memoryview:
        """A buffer that no thread uses any more."""
        if self._free.empty() and self._made < self._buffer_count:
            self._made += 1
            return memoryview(bytearray(self._chunk_size))
        return self._free.get(timeout=_DEADLINE_S)

    def _wait(self, *, at_most: int) -> None:
        """Until no more pieces than that are being hashed."""
        while len(self._running) > at_most:
            self._running.popleft().result(timeout=_DEADLINE_S)

    def _hash(self, buffer: memoryview, file: HashedFile, cuts: list[Cut]) -> None:
        try:
            for cut in cuts:
                start = cut.offset - cuts[0].offset
                piece = buffer[start : start + cut.length]
                file.ids[cut.position * ID_BYTES : (cut.position + 1) * ID_BYTES] = blake3(piece).digest()
        finally:
            self._free.put(buffer)
