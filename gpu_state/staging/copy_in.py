"""Fills device objects from packs or from a pool in host memory, and proves by hashing on the GPU that they hold what was signed.

Packs are read with O_DIRECT by several threads into the pinned ring and sent on from there; a pool is sent as it lies.
Nothing is declared good before `verify`, or `fill_and_verify`, which proves each GiB of a pool while the next ones cross the
link: the caller hands objects to an application only after it. Called by worker.py.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from gpu_state.staging.chunk_hasher import HashRange
from gpu_state.staging.cuda_calls import call, is_done, wait_for
from gpu_state.staging.rates import Progress
from gpu_state.staging.slots import CHUNK_BYTES, ID_BYTES
from vgpu_errors import Cancelled, ContentMismatch, ImageError, Truncated, UnexpectedEntry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from gpu_state.staging.cuda_calls import Check
    from gpu_state.staging.device_lane import HashWork, Lane
    from gpu_state.staging.device_objects import DeviceObject
    from gpu_state.staging.pinned_ring import PinnedRing, Slot
    from gpu_state.staging.rates import Tell
    from gpu_state.staging.targets import MemoryTarget
    from image_format.vram import VramFragment, VramRegion

T = TypeVar("T")

READER_THREADS = 16
HASH_CHUNKS = 256
IN_FLIGHT = 3
# Each thread has another slot under way: sixteen that asked every 20 us would keep the interpreter busy.
UNHURRIED_S = 1e-3


class Copy(NamedTuple):
    """Bytes of a read that go to one address; `start` counts from the beginning of the read."""

    uuid: str
    address: int
    start: int
    length: int


@dataclass(slots=True)
class Read:
    """A run of a pack, at most a ring slot long, and where its bytes go."""

    pack: str
    offset: int
    length: int = 0
    copies: list[Copy] = field(default_factory=list)


@dataclass(slots=True)
class FillPlan:
    """Everything that a fill does, in the packs' order. `zeros` are ranges of which nothing is stored."""

    reads: list[Read]
    zeros: list[tuple[str, int, int]]

    @property
    def copied_bytes(self) -> int:
        """Bytes that cross the link."""
        return sum(copy.length for read in self.reads for copy in read.copies)


def plan_fill(fragment: VramFragment, objects: Mapping[str, DeviceObject], read_bytes: int) -> FillPlan:
    """Join neighbours into long reads and copies; content that several chunks have is read once."""
    wanted: defaultdict[tuple[str, int, int], list[tuple[str, int]]] = defaultdict(list)
    zeros: list[tuple[str, int, int]] = []
    for region in fragment.regions:
        memory = objects[region.name]
        address, uuid = memory.address(), memory.context.uuid
        for chunk in region.chunks:
            if chunk.pack is not None:
                wanted[chunk.pack, chunk.offset, chunk.length].append((uuid, address))
            elif zeros and zeros[-1][0] == uuid and zeros[-1][1] + zeros[-1][2] == address:
                zeros[-1] = (uuid, zeros[-1][1], zeros[-1][2] + chunk.length)
            else:
                zeros.append((uuid, address, chunk.length))
            address += chunk.length
    return FillPlan(_join(wanted, read_bytes), zeros)


def _join(wanted: Mapping[tuple[str, int, int], Sequence[tuple[str, int]]], read_bytes: int) -> list[Read]:
    reads: list[Read] = []
    for pack, offset, length in sorted(wanted):
        last = reads[-1] if reads else None
        if (
            last is None
            or last.pack != pack
            or last.offset + last.length != offset
            or last.length + length > read_bytes
        ):
            last = Read(pack, offset)
            reads.append(last)
        for uuid, address in wanted[pack, offset, length]:
            _add_copy(last, Copy(uuid, address, last.length, length))
        last.length += length
    return reads


def _add_copy(read: Read, copy: Copy) -> None:
    if read.copies:
        last = read.copies[-1]
        if (last.uuid, last.address + last.length, last.start + last.length) == (copy.uuid, copy.address, copy.start):
            read.copies[-1] = last._replace(length=last.length + copy.length)
            return
    read.copies.append(copy)


class PackSource:
    """Packs in a directory, by way of the ring."""

    def __init__(self, directory: Path, ring: PinnedRing, threads: int = READER_THREADS) -> None:
        self._directory = directory
        self._ring = ring
        self._threads = threads
        self._descriptors: dict[str, int] = {}
        self._guard = threading.Lock()

    @property
    def read_bytes(self) -> int:
        """The longest read."""
        return self._ring.slot_bytes

    def fill(self, lanes: Mapping[str, Lane], reads: Sequence[Read], progress: Progress, check: Check) -> None:
        """Read and send everything; returns when the GPUs hold it."""
        threads = [_Reader(self, lanes, progress, check) for _ in range(min(self._threads, max(len(reads), 1)))]
        queue = deque(reads)
        try:
            with ThreadPoolExecutor(len(threads), "vgpu-read") as pool:
                for result in [pool.submit(reader.run, queue) for reader in threads]:
                    result.result()
        finally:
            for descriptor in self._descriptors.values():
                os.close(descriptor)
            self._descriptors.clear()

    def take_slot(self, check: Check) -> Slot:
        """A free slot of the ring."""
        return self._ring.take(check)

    def give_slot(self, slot: Slot) -> None:
        """Back into the ring."""
        self._ring.give(slot)

    def read(self, read: Read, view: memoryview) -> None:
        """One run of a pack into a slot, all of it."""
        descriptor, done = self._descriptor(read.pack), 0
        while done < read.length:
            got = os.preadv(descriptor, [view[done : read.length]], read.offset + done)
            if not got:
                where = str(self._directory / read.pack)
                raise Truncated(where=where, found=read.offset + done, needed=read.offset + read.length)
            done += got

    def _descriptor(self, pack: str) -> int:
        with self._guard:
            if pack not in self._descriptors:
                self._descriptors[pack] = _open_pack(self._directory / pack)
            return self._descriptors[pack]


class _Reader:
    """One thread: read into a slot, submit the copies, and give slots back as the copies are made."""

    def __init__(self, source: PackSource, lanes: Mapping[str, Lane], progress: Progress, check: Check) -> None:
        self._source = source
        self._lanes = lanes
        self._progress = progress
        self._check = check
        self._sent: deque[tuple[Slot, list[tuple[Lane, Any]], int]] = deque()

    def run(self, queue: deque[Read]) -> None:
        try:
            while True:
                self._check()
                try:
                    read = queue.popleft()
                except IndexError:
                    return
                self._send(read)
        except BaseException:
            queue.clear()  # the other threads end, too
            raise
        finally:
            while self._sent:
                self._give_oldest()

    def _send(self, read: Read) -> None:
        slot = self._take_slot()
        events: list[tuple[Lane, Any]] = []
        try:
            self._source.read(read, slot.view)
            for uuid in dict.fromkeys(copy.uuid for copy in read.copies):
                lane = self._lanes[uuid]
                lane.enter()
                stream = lane.copy_stream()
                for copy in read.copies:
                    if copy.uuid == uuid:
                        call("cuMemcpyHtoDAsync", copy.address, slot.address + copy.start, copy.length, stream)
                events.append((lane, lane.record(stream)))
        finally:
            self._sent.append((slot, events, read.length))

    def _take_slot(self) -> Slot:
        # What this thread holds comes back first: two threads that wait for each other's slots would wait for ever.
        while self._sent and (len(self._sent) > 1 or all(is_done(event) for _, event in self._sent[0][1])):
            self._give_oldest()
        return self._source.take_slot(self._check_with_return)

    def _check_with_return(self) -> None:
        self._check()
        if self._sent:
            self._give_oldest()

    def _give_oldest(self) -> None:
        slot, events, size = self._sent.popleft()
        for lane, event in events:
            lane.enter()
            wait_for(event, pause_s=UNHURRIED_S)
            lane.spent(event)
        self._source.give_slot(slot)
        self._progress.add(size)


class MemorySource:
    """A pool that a suspend filled."""

    read_bytes = 256 << 20

    def __init__(self, pool: MemoryTarget) -> None:
        self._pool = pool

    def address(self, pack: str, offset: int, length: int) -> int:
        """Where a run of the pool lies; Truncated where the pool ends too early."""
        memory = self._pool.memory_of(pack)
        if offset + length > memory.size:
            raise Truncated(where=memory.name, found=memory.size, needed=offset + length)
        return memory.address + offset

    def fill(self, lanes: Mapping[str, Lane], reads: Sequence[Read], progress: Progress, check: Check) -> None:
        """Send everything; returns when the GPUs hold it."""
        for read in reads:
            start = self.address(read.pack, read.offset, read.length)
            for copy in read.copies:
                check()
                lane = lanes[copy.uuid]
                lane.enter()
                call("cuMemcpyHtoDAsync", copy.address, start + copy.start, copy.length, lane.copy_stream())
                progress.add(copy.length)
        for lane in lanes.values():
            lane.enter()
            lane.settle(check)


class CopyIn:
    """One restore or resume of a container: objects by region name, and what they must hold."""

    def __init__(
        self,
        lanes: Mapping[str, Lane],
        objects: Mapping[str, DeviceObject],
        fragment: VramFragment,
        *,
        tell: Tell = lambda _event: None,
        check: Check = lambda: None,
    ) -> None:
        self._lanes = lanes
        self._objects = objects
        self._fragment = fragment
        self._tell = tell
        self._outer_check = check
        self._is_broken = False
        for region in fragment.regions:
            if region.name not in objects or objects[region.name].size != region.length:
                raise ImageError(where=region.name, what=f"there is no device object of {region.length} bytes for it")

    def fill(self, source: PackSource | MemorySource) -> int:
        """Write every byte of every object; returns how many crossed the link."""
        plan = plan_fill(self._fragment, self._objects, source.read_bytes)
        progress = Progress("fill", plan.copied_bytes, self._tell)
        for uuid, address, length in plan.zeros:
            lane = self._lanes[uuid]
            lane.enter()
            call("cuMemsetD8Async", address, 0, length, lane.hash_stream)
        try:
            source.fill(self._lanes, plan.reads, progress, self._check)
        finally:
            for lane in self._lanes.values():
                lane.enter()
                lane.settle()
        progress.end()
        return plan.copied_bytes

    def verify(self) -> int:
        """Hash all objects on their GPUs; ContentMismatch names the object and the chunk that differ. Returns bytes hashed."""
        return self._on_all("verify", lambda _lane, _parts: None)

    def fill_and_verify(self, source: MemorySource) -> int:
        """Write every byte of every object and prove it; returns bytes hashed. A pool needs no plan: its runs are found on the way."""
        return self._on_all("fill", lambda lane, parts: self._send(lane, parts, source))

    def _on_all(self, phase: str, prepare: Callable[[Lane, Sequence[_Part]], None]) -> int:
        """All GPUs at once; `prepare` is called for each batch before it is hashed."""
        progress = Progress(phase, self._fragment.length, self._tell)
        regions: defaultdict[str, list[VramRegion]] = defaultdict(list)
        for region in self._fragment.regions:
            regions[self._objects[region.name].context.uuid].append(region)
        with ThreadPoolExecutor(max(len(regions), 1), "vgpu-verify") as pool:
            work = [
                pool.submit(self._prove, self._lanes[uuid], found, progress, prepare) for uuid, found in regions.items()
            ]
            for result in work:
                result.result()
        progress.end()
        return progress.done

    def _prove(
        self,
        lane: Lane,
        regions: Sequence[VramRegion],
        progress: Progress,
        prepare: Callable[[Lane, Sequence[_Part]], None],
    ) -> None:
        lane.enter()
        waiting: deque[tuple[HashWork, list[_Part]]] = deque()
        try:
            for parts in _parts_of(regions):
                prepare(lane, parts)
                waiting.append((lane.start_hash([self._range(part) for part in parts]), parts))
                if len(waiting) == IN_FLIGHT:
                    self._compare(lane, *waiting.popleft(), progress)
            while waiting:
                self._compare(lane, *waiting.popleft(), progress)
        except BaseException:
            self._is_broken = True
            lane.settle()  # nothing may be under way when the caller lets objects or pool go
            raise

    def _send(self, lane: Lane, parts: Sequence[_Part], source: MemorySource) -> None:
        """Submit a batch's copies, and have its hash wait for them."""
        for part in parts:
            address = self._range(part).address
            for pack, offset, length in _runs_of(part):
                if pack is None:
                    call("cuMemsetD8Async", address, 0, length, lane.hash_stream)
                else:
                    origin = source.address(pack, offset, length)
                    call("cuMemcpyHtoDAsync", address, origin, length, lane.copy_stream())
                address += length
        lane.hash_after_copies()

    def _range(self, part: _Part) -> HashRange:
        start = part.first * CHUNK_BYTES
        length = min(part.chunks * CHUNK_BYTES, part.region.length - start)
        return HashRange(self._objects[part.region.name].address() + start, length)

    def _compare(self, lane: Lane, work: HashWork, parts: Sequence[_Part], progress: Progress) -> None:
        ids = bytes(work.ids(self._check))
        lane.hashed(work)
        start = 0
        for part in parts:
            size = part.chunks * ID_BYTES
            part.refuse_others(ids[start : start + size])
            start += size
            progress.add(self._range(part).length)

    def _check(self) -> None:
        self._outer_check()
        if self._is_broken:
            raise Cancelled(phase="filling device memory", what="another part of it failed")


class _Part(NamedTuple):
    """Consecutive chunks of one region."""

    region: VramRegion
    first: int
    chunks: int

    def refuse_others(self, ids: bytes) -> None:
        """ContentMismatch where these are not the ids that were signed."""
        chunks = self.region.chunks[self.first : self.first + self.chunks]
        if ids == b"".join(chunk.id for chunk in chunks):
            return
        for number, chunk in enumerate(chunks):
            if ids[number * ID_BYTES : (number + 1) * ID_BYTES] != chunk.id:
                where = f"GPU memory {self.region.name}"
                raise ContentMismatch(where=where, what=f"chunk {self.first + number} from {chunk.pack or 'zeros'}")


def _runs_of(part: _Part) -> Iterator[tuple[str | None, int, int]]:
    """Pack, offset and length of chunks that lie one after the other in their pack; None for zeros."""
    pack: str | None = None
    start = length = 0
    for chunk in part.region.chunks[part.first : part.first + part.chunks]:
        if length and chunk.pack == pack and (pack is None or chunk.offset == start + length):
            length += chunk.length
            continue
        if length:
            yield pack, start, length
        pack, start, length = chunk.pack, chunk.offset, chunk.length
    if length:
        yield pack, start, length


def _parts_of(regions: Sequence[VramRegion]) -> Iterator[list[_Part]]:
    parts: list[_Part] = []
    room = HASH_CHUNKS
    for region in regions:
        first = 0
        while first < len(region.chunks):
            count = min(room, len(region.chunks) - first)
            parts.append(_Part(region, first, count))
            first, room = first + count, room - count
            if not room:
                yield parts
                parts, room = [], HASH_CHUNKS
    if parts:
        yield parts


def _open_pack(path: Path) -> int:
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        try:
            return os.open(path, flags | os.O_DIRECT)
        except OSError as problem:
            if problem.errno != errno.EINVAL:
                raise
            return os.open(path, flags)
    except OSError as problem:
        raise UnexpectedEntry(
            where=str(path.parent), entry=path.name, what=f"cannot be read ({problem.strerror})"
        ) from problem
