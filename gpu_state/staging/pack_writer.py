"""Threads that write ring slots into pack files, with O_DIRECT where the file system has it.

A file has one writer at a time as long as there are others to write: appending takes the file's lock in the kernel. The first
failure ends all writing and is raised at the next `submit` or `flush`. Used by targets.py.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpu_state.staging.cuda_calls import wait_for
from gpu_state.staging.slots import CHUNK_BYTES
from vgpu_errors import Cancelled, CheckpointFailed, NotEnoughSpace

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from gpu_state.staging.cuda_calls import Check
    from gpu_state.staging.device_lane import Lane
    from gpu_state.staging.pinned_ring import PinnedRing, Slot

WRITER_THREADS = 16
_SLICE_S = 0.05
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM)
_ZEROS = memoryview(mmap.mmap(-1, CHUNK_BYTES))  # page-aligned, as O_DIRECT wants it


class PackFile:
    """One pack in the making, under a name that nobody takes for a pack."""

    def __init__(self, path: Path) -> None:
        self.path = path
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self.descriptor = os.open(path, flags | os.O_DIRECT, 0o600)
        except OSError as problem:
            if problem.errno != errno.EINVAL:
                raise
            path.unlink(missing_ok=True)
            self.descriptor = os.open(path, flags, 0o600)

    def write(self, buffers: Sequence[memoryview], offset: int) -> None:
        """All of it, whatever the kernel takes at a time."""
        left = deque(buffers)
        while left:
            written = self._write_some(left, offset)
            offset += written
            while left and written >= len(left[0]):
                written -= len(left.popleft())
            if written:
                left[0] = left[0][written:]

    def close(self) -> None:
        """Close the descriptor; the file stays."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _write_some(self, buffers: deque[memoryview], offset: int) -> int:
        try:
            return os.pwritev(self.descriptor, buffers, offset)
        except OSError as problem:
            if problem.errno != errno.EINVAL:
                raise
            # Another thread may have taken the flag away meanwhile: the second try tells.
            flags = fcntl.fcntl(self.descriptor, fcntl.F_GETFL)
            fcntl.fcntl(self.descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)  # opens with it but cannot do it
            return os.pwritev(self.descriptor, buffers, offset)


@dataclass(frozen=True, slots=True)
class Extent:
    """`length` bytes at `start` of a ring slot that belong at `offset` of the file."""

    start: int
    offset: int
    length: int

    def buffers(self, view: memoryview) -> list[memoryview]:
        """What to write: a short last chunk is followed by zeros up to its slot's end, because a pack has no holes."""
        gap = -self.length % CHUNK_BYTES
        content = view[self.start : self.start + self.length]
        return [content, _ZEROS[:gap]] if gap else [content]


@dataclass(frozen=True, slots=True)
class Load:
    """A ring slot on its way into one file; its content is there when the event is done."""

    file: PackFile
    slot: Slot
    extents: Sequence[Extent]
    lane: Lane
    event: Any


class PackWriters:
    """The threads and what waits for them."""

    def __init__(self, ring: PinnedRing, threads: int = WRITER_THREADS) -> None:
        self._ring = ring
        self._changed = threading.Condition()
        self._copying: deque[Load] = deque()  # the GPU still writes into their slots
        self._waiting: dict[PackFile, deque[Load]] = {}
        self._busy: dict[PackFile, int] = {}
        self._failure: Exception | None = None
        self._is_over = False
        self.written_bytes = 0
        self._threads = [threading.Thread(target=self._work, daemon=True, name="vgpu-pack") for _ in range(threads)]
        self._threads.append(threading.Thread(target=self._watch, daemon=True, name="vgpu-copied"))
        for thread in self._threads:
            thread.start()

    def check(self) -> None:
        """Raise the first failure of a writer."""
        if self._failure is not None:
            raise self._failure

    def submit(self, load: Load) -> None:
        """Hand a slot over; it goes back into the ring when it was written."""
        with self._changed:
            self.check()
            self._copying.append(load)
            self._changed.notify_all()

    def flush(self, check: Check = lambda: None) -> None:
        """Wait until everything handed over is in its file."""
        with self._changed:
            while self._copying or self._waiting or self._busy:
                check()
                self._changed.wait(_SLICE_S)
        self.check()

    def close(self) -> None:
        """End the threads; what was not written is dropped."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _watch(self) -> None:
        """One thread polls the events, in the order of the copies: many would keep the interpreter busy."""
        while (load := self._oldest()) is not None:
            try:
                load.lane.enter()
                wait_for(load.event, self._check_running)
                load.lane.spent(load.event)
            except Exception as problem:  # noqa: BLE001 - kept for whoever waits, as an error of the tree
                self._fail(problem, load)
            with self._changed:
                self._copying.popleft()
                self._waiting.setdefault(load.file, deque()).append(load)
                self._changed.notify_all()

    def _oldest(self) -> Load | None:
        with self._changed:
            while not self._copying and not self._is_over:
                self._changed.wait()
            return self._copying[0] if self._copying else None

    def _work(self) -> None:
        while (load := self._next()) is not None:
            try:
                for extent in load.extents if self._failure is None else ():
                    load.file.write(extent.buffers(load.slot.view), extent.offset)
                    self.written_bytes += extent.length
            except Exception as problem:  # noqa: BLE001 - as above
                self._fail(problem, load)
            finally:
                self._ring.give(load.slot)
                self._done(load)

    def _check_running(self) -> None:
        if self._is_over:
            raise Cancelled(phase="writing packs", what="the checkpoint was given up")

    def _next(self) -> Load | None:
        with self._changed:
            while not self._waiting and not self._is_over:
                self._changed.wait()
            if self._is_over:
                return None
            file = min(self._waiting, key=lambda waiting: self._busy.get(waiting, 0))
            load = self._waiting[file].popleft()
            if not self._waiting[file]:
                del self._waiting[file]
            self._busy[file] = self._busy.get(file, 0) + 1
            return load

    def _done(self, load: Load) -> None:
        with self._changed:
            self._busy[load.file] -= 1
            if not self._busy[load.file]:
                del self._busy[load.file]
            self._changed.notify_all()

    def _fail(self, problem: Exception, load: Load) -> None:
        if self._failure is None:
            self._failure = explain(problem, load.file.path, sum(extent.length for extent in load.extents))


def explain(problem: Exception, path: Path, size: int) -> Exception:
    """The error of the tree for a failed write."""
    if not isinstance(problem, OSError):
        return problem
    if problem.errno in _NO_SPACE:
        status = os.statvfs(path.parent)
        return NotEnoughSpace(path=path.parent, free_bytes=status.f_bavail * status.f_frsize, needed_bytes=size)
    return CheckpointFailed(what=f"{path} could not be written: {problem.strerror}")
