"""What works on one GPU: context, hasher, streams, and scratch memory in which chunks are set aside.

One thread drives a lane at a time. Holds no policy and no table; copy_out.py and copy_in.py decide what moves.
"""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from gpu_state.staging.chunk_hasher import HashRange
from gpu_state.staging.cuda_calls import call, wait_for
from gpu_state.staging.device_objects import create_object
from gpu_state.staging.slots import CHUNK_BYTES
from vgpu_errors import NotEnoughDeviceMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from gpu_state.staging.cuda_calls import Check, DeviceContext
    from gpu_state.staging.device_objects import DeviceObject
    from gpu_state.staging.slots import Place

# While one scratch buffer drains over the link (4.9 ms for 256 MiB at 55 GB/s) the next is hashed: three are enough.
SCRATCH_COUNT = 3
SCRATCH_CHUNKS = 64
COPY_STREAMS = 2
# Left to the application: its next allocation must not fail because a checkpoint runs beside it.
MARGIN_BYTES = 512 << 20
GRANULARITY = 2 << 20
MAX_COPY_BYTES = 256 << 20  # a single copy: long enough for full rate, short enough to be cancelled behind


class HashWork(Protocol):
    """A place for one hash in flight (chunk_hasher.HashRun)."""

    def start(self, ranges: Sequence[HashRange], stream: Any) -> None:
        """Hash on a stream; where ranges have destinations, what was hashed is what was copied."""
        ...

    def ids(self, check: Check) -> memoryview:
        """Wait; 32 bytes for each chunk, the ranges' chunks numbered through, valid until the next start."""
        ...

    def close(self) -> None:
        """Let the buffers go."""
        ...


class Hasher(Protocol):
    """BLAKE3-256 of every 4 MiB on one GPU (chunk_hasher.ChunkHasher; tests have a slow one)."""

    def new_run(self) -> HashWork:
        """A place for work in flight."""
        ...

    def close(self) -> None:
        """Let module and buffers go."""
        ...


class Piece(NamedTuple):
    """One chunk to move: its place and where it lies on the GPU."""

    address: int
    place: Place


class Stretch(NamedTuple):
    """Pieces that lie one after the other on both sides."""

    address: int
    place: Place
    length: int


def stretches_of(pieces: Sequence[Piece], limit: int = MAX_COPY_BYTES) -> Iterator[Stretch]:
    """Join neighbours, so that one copy moves as much as possible."""
    current: Stretch | None = None
    for address, place in pieces:
        if (
            current is not None
            and current.place.store is place.store
            and current.place.offset + current.length == place.offset
            and current.address + current.length == address
            and current.length + place.length <= limit
        ):
            current = Stretch(current.address, current.place, current.length + place.length)
            continue
        if current is not None:
            yield current
        current = Stretch(address, place, place.length)
    if current is not None:
        yield current


@dataclass(slots=True)
class Scratch:
    """Device memory of ours for a batch; free again when its events are done."""

    address: int
    chunks: int
    busy: list[Any]


class Lane:
    """One GPU at work. Made, used and closed with its context current (`enter`)."""

    def __init__(self, context: DeviceContext, make_hasher: Callable[[DeviceContext], Hasher]) -> None:
        self.context = context
        self.enter()
        self.hasher = make_hasher(context)
        self.hash_stream = context.new_stream(is_urgent=False)
        self._copy_streams = [context.new_stream() for _ in range(COPY_STREAMS)]
        self._turn = 0
        self._events: deque[Any] = deque()
        self._scratches: deque[Scratch] = deque()
        self._idle: list[HashWork] = []

    def enter(self) -> None:
        """Make the context current for this thread."""
        self.context.make_current()

    def start_hash(self, ranges: Sequence[HashRange]) -> HashWork:
        """Hash on the hash stream; give the work back with `hashed` once its ids were read."""
        work = self._idle.pop() if self._idle else self.hasher.new_run()
        work.start(ranges, self.hash_stream)
        return work

    def hashed(self, work: HashWork) -> None:
        """The ids were read."""
        self._idle.append(work)

    def copy_stream(self) -> Any:
        """The streams in turn: the link never waits between two copies."""
        self._turn = (self._turn + 1) % COPY_STREAMS
        return self._copy_streams[self._turn]

    def record(self, stream: Any) -> Any:
        """An event behind what was submitted to a stream; give it back with `spent`."""
        event = self._events.popleft() if self._events else self.context.new_event()
        call("cuEventRecord", event, stream)
        return event

    def spent(self, event: Any) -> None:
        """The event can be used again."""
        self._events.append(event)

    def hash_after_copies(self) -> None:
        """What is hashed from now on is hashed behind the copies submitted until now."""
        for stream in self._copy_streams:
            event = self.record(stream)
            call("cuStreamWaitEvent", self.hash_stream, event, 0)
            self.spent(event)

    def warm_up(self, works: int) -> None:
        """Have the driver do now what it would do at the first hash: load the kernels, make the places for work."""
        self.enter()
        memory = int(call("cuMemAlloc", 2 * CHUNK_BYTES))
        try:
            for destination in (0, memory + CHUNK_BYTES):
                ranges = [HashRange(memory, CHUNK_BYTES, destination)] * 2
                begun = [self.start_hash(ranges) for _ in range(works)]
                for work in begun:
                    work.ids(lambda: None)
                    self.hashed(work)
        finally:
            call("cuMemFree", memory)

    def settle(self, check: Check = lambda: None) -> None:
        """Wait until every copy that was submitted has been made."""
        for event in [self.record(stream) for stream in (*self._copy_streams, self.hash_stream)]:
            wait_for(event, check)
            self.spent(event)

    def scratch_chunks(self) -> int:
        """How many chunks a scratch buffer takes; makes the buffers where there are none."""
        if not self._scratches:
            self._scratches.extend(self._make_scratches())
        return self._scratches[0].chunks

    def scratch(self, check: Check = lambda: None) -> Scratch:
        """A scratch buffer, once its last content has been copied away."""
        self.scratch_chunks()
        oldest = self._scratches[0]
        self._scratches.rotate(-1)
        for event in oldest.busy:
            wait_for(event, check)
            self.spent(event)
        oldest.busy.clear()
        return oldest

    def release_scratch(self, scratch: Scratch) -> None:
        """Free again once the copies submitted until now are made."""
        scratch.busy.extend(self.record(stream) for stream in self._copy_streams)

    def drop_scratches(self) -> None:
        """Give the scratch memory back to the device."""
        self.enter()
        self.settle()
        while self._scratches:
            call("cuMemFree", self._scratches.pop().address)

    def close(self) -> None:
        """Free everything on the GPU but the context."""
        self.drop_scratches()
        while self._idle:
            self._idle.pop().close()
        self.hasher.close()
        while self._events:
            call("cuEventDestroy", self._events.pop())
        for stream in (*self._copy_streams, self.hash_stream):
            call("cuStreamDestroy", stream)

    def room(self, margin: int = MARGIN_BYTES) -> int:
        """Device memory that may be taken for a while."""
        free_bytes, total_bytes = self.context.memory()
        # A share of a small device, so that a margin made for 140 GiB does not rule out everything there.
        return max(0, free_bytes - min(margin, total_bytes // 16))

    def _make_scratches(self) -> list[Scratch]:
        room, least = self.room(), SCRATCH_COUNT * CHUNK_BYTES
        if room < least:
            raise NotEnoughDeviceMemory(device=self.context.uuid, free_bytes=room, pid=os.getpid(), needed_bytes=least)
        # Half of what there is: containers that are frozen together may be on one GPU, each with a worker of its own.
        chunks = min(SCRATCH_CHUNKS, max(room // 2, least) // least)
        return [Scratch(int(call("cuMemAlloc", chunks * CHUNK_BYTES)), chunks, []) for _ in range(SCRATCH_COUNT)]


class Aside:
    """Device memory that holds changed chunks until they are copied, after the application has gone on."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._memory: DeviceObject | None = None
        self.pieces: list[Piece] = []
        self.bytes = 0

    def take(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Copy as many pieces as there is room for, in order; returns those for which there is none."""
        fit, size, room = 0, 0, self._lane.room()
        while fit < len(pieces) and size + pieces[fit].place.length <= room:
            size += pieces[fit].place.length
            fit += 1
        if not fit or not self._allocate(size):
            return list(pieces)
        self._copy(pieces[:fit])
        self.bytes = size
        return list(pieces[fit:])

    def free(self) -> None:
        """Give the memory back."""
        self._lane.enter()
        self.pieces = []
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()

    def _copy(self, pieces: Sequence[Piece]) -> None:
        assert self._memory is not None
        address = start = self._memory.address()
        for stretch in stretches_of(pieces):
            call("cuMemcpyDtoDAsync", address, stretch.address, stretch.length, self._lane.copy_stream())
            address += stretch.length
        for piece in pieces:
            self.pieces.append(Piece(start, piece.place))
            start += piece.place.length

    def _allocate(self, size: int) -> bool:
        """By cuMemCreate: 32 GiB take a millisecond (measured on an H200)."""
        try:
            self._memory = create_object(-(-size // GRANULARITY) * GRANULARITY, self._lane.context)
        except NotEnoughDeviceMemory:  # the application took the room in between
            return False
        return True
