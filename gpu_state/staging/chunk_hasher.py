"""BLAKE3-256 ids of 4 MiB chunks of device memory, made on the GPU by the kernels of blake3.cu.

Reads device memory (and writes it only where a range has a destination); compares nothing and stores nothing. Each range is
cut into chunks from its own start, the last one shorter; an empty range has none. Called by copy_out.py and copy_in.py.
A HashRun is one place for work in flight: scratch, ids and range table, allocated once and used again and again. Ids go by
the kernel itself into pinned memory, not by a copy, which would queue behind the large copies of the data.
"""

from __future__ import annotations

import ctypes
import struct
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from blake3 import blake3

from gpu_state.staging.cuda_calls import call, wait_for
from gpu_state.undo import Undo

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType
    from typing import Self

    from gpu_state.staging.cuda_calls import DeviceContext

PTX = Path(__file__).with_name("blake3.ptx")
CHUNK_SIZE = 4 << 20
ID_SIZE = 32
ADDRESS_ALIGNMENT = 16

# The same as in blake3.cu; build_kernel.py compares them.
TILE = 256
NODES_PER_TILE = 16
LAUNCH_CHUNKS = 1024
TILES_PER_CHUNK = CHUNK_SIZE // 1024 // TILE
SCRATCH_SIZE = LAUNCH_CHUNKS * (4 + TILES_PER_CHUNK * NODES_PER_TILE * ID_SIZE)

_RANGE = struct.Struct("<QQQQ")
ARGUMENTS = (
    ctypes.c_uint64,  # ranges
    ctypes.c_uint32,  # range_count
    ctypes.c_uint64,  # address
    ctypes.c_uint64,  # length
    ctypes.c_uint64,  # destination
    ctypes.c_uint64,  # scratch
    ctypes.c_uint32,  # first_chunk
    ctypes.c_uint64,  # ids
)
_PINNED = 3  # CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP
_SMALLEST_BUFFER = 64 << 10


class HashRange(NamedTuple):
    """Device memory to hash; with a destination every byte that was hashed is also written there (up to 15 more as zeros)."""

    address: int
    length: int
    destination: int = 0


class ChunkHasher:
    """The kernels, loaded for one device."""

    def __init__(self, context: DeviceContext, ptx: Path = PTX) -> None:
        self.context = context
        context.make_current()
        with Undo() as undo:
            self._module = call("cuModuleLoadData", ptx.read_bytes() + b"\0")
            undo.push(call, "cuModuleUnload", self._module)
            self.hashes = call("cuModuleGetFunction", self._module, b"vgpu_blake3_chunks")
            self.copies = call("cuModuleGetFunction", self._module, b"vgpu_blake3_chunks_copy")
            self._own_stream = context.new_stream()
            undo.push(call, "cuStreamDestroy", self._own_stream)
            self._own_run = self.new_run()

    def hash(self, address: int, length: int) -> memoryview:
        """The ids of one range, one after the other; valid until the next call."""
        return self.hash_ranges((HashRange(address, length),))

    def hash_ranges(self, ranges: Sequence[HashRange]) -> memoryview:
        """The ids of all ranges, in their order; valid until the next call."""
        self._own_run.start(ranges, self._own_stream)
        return self._own_run.ids()

    def new_run(self) -> HashRun:
        """A place for work in flight. The caller closes it before the hasher."""
        return HashRun(self)

    def close(self) -> None:
        """Let kernels and buffers go."""
        self._own_run.close()
        self.context.make_current()
        call("cuStreamDestroy", self._own_stream)
        call("cuModuleUnload", self._module)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class HashRun:
    """Work in flight on one stream. `start` again only after `ids`, whose view it overwrites."""

    def __init__(self, hasher: ChunkHasher) -> None:
        self._hasher = hasher
        self._context = hasher.context
        self._chunk_count = 0
        self._context.make_current()
        with Undo() as undo:
            self._scratch = int(call("cuMemAlloc", SCRATCH_SIZE))
            undo.push(call, "cuMemFree", self._scratch)
            call("cuMemsetD8", self._scratch, 0, SCRATCH_SIZE)
            call("cuCtxSynchronize")
            self.event = self._context.new_event()
        self._ids = _PinnedBuffer()
        self._host_table = _PinnedBuffer()
        self._device_table, self._device_table_size = 0, 0

    def start(self, ranges: Sequence[HashRange], stream: Any) -> None:
        """Queue the kernels on a stream and return. Nothing waits for the default stream."""
        for item in ranges:
            if item.address % ADDRESS_ALIGNMENT or item.destination % ADDRESS_ALIGNMENT:
                raise ValueError(f"{item} is not aligned to {ADDRESS_ALIGNMENT} bytes")
        if len({bool(item.destination) for item in ranges}) > 1:
            raise ValueError("either every range has a destination or none")
        self._context.make_current()
        self._chunk_count = sum(chunk_count(item.length) for item in ranges)
        self._ids.make_room(self._chunk_count * ID_SIZE)
        if len(ranges) == 1:
            self._launch_one(ranges[0], stream)
        elif self._chunk_count:
            self._launch_table(ranges, stream)
        call("cuEventRecord", self.event, stream)

    def ids(self, check: Callable[[], None] = lambda: None) -> memoryview:
        """Wait for the kernels; the ids of all chunks, valid until the next `start`."""
        self._context.make_current()
        wait_for(self.event, check)
        return self._ids.view[: self._chunk_count * ID_SIZE]

    def close(self) -> None:
        """Let the buffers go; work in flight is waited for."""
        self._context.make_current()
        call("cuEventSynchronize", self.event)
        call("cuEventDestroy", self.event)
        call("cuMemFree", self._scratch)
        if self._device_table:
            call("cuMemFree", self._device_table)
        self._ids.close()
        self._host_table.close()

    def _launch_one(self, item: HashRange, stream: Any) -> None:
        for first in range(0, self._chunk_count, LAUNCH_CHUNKS):
            start, count = first * CHUNK_SIZE, min(LAUNCH_CHUNKS, self._chunk_count - first)
            destination = item.destination + start if item.destination else 0
            values = (item.address + start, min(count * CHUNK_SIZE, item.length - start), destination)
            self._launch((0, 0, *values, self._scratch, 0, self._ids.address + first * ID_SIZE), count, stream)

    def _launch_table(self, ranges: Sequence[HashRange], stream: Any) -> None:
        self._send_table(ranges, stream)
        destination = ranges[0].destination
        for first in range(0, self._chunk_count, LAUNCH_CHUNKS):
            values = (self._device_table, len(ranges), 0, 0, destination, self._scratch, first, self._ids.address)
            self._launch(values, min(LAUNCH_CHUNKS, self._chunk_count - first), stream)

    def _send_table(self, ranges: Sequence[HashRange], stream: Any) -> None:
        size = len(ranges) * _RANGE.size
        self._host_table.make_room(size)
        if size > self._device_table_size:
            if self._device_table:
                call("cuMemFree", self._device_table)
            self._device_table, self._device_table_size = 0, 0
            self._device_table = int(call("cuMemAlloc", self._host_table.size))
            self._device_table_size = self._host_table.size
        first_chunk = 0
        for number, item in enumerate(ranges):
            _RANGE.pack_into(self._host_table.view, number * _RANGE.size, *item, first_chunk)
            first_chunk += chunk_count(item.length)
        call("cuMemcpyHtoDAsync", self._device_table, self._host_table.address, size, stream)

    def _launch(self, values: tuple[int, ...], chunks: int, stream: Any) -> None:
        kernel = self._hasher.copies if values[4] else self._hasher.hashes
        grid = (chunks * TILES_PER_CHUNK, 1, 1, TILE, 1, 1)
        call("cuLaunchKernel", kernel, *grid, 0, stream, (values, ARGUMENTS), 0)


class _PinnedBuffer:
    """Pinned memory that grows; its content does not outlast the growth."""

    def __init__(self) -> None:
        self.address, self.size, self.view = 0, 0, memoryview(b"")

    def make_room(self, size: int) -> None:
        """At least `size` bytes; nothing may be in flight on it."""
        if size <= self.size:
            return
        self.close()
        wanted = max(_SMALLEST_BUFFER, 1 << (size - 1).bit_length())
        address = int(call("cuMemHostAlloc", wanted, _PINNED))
        self.address, self.size = address, wanted
        self.view = memoryview((ctypes.c_uint8 * wanted).from_address(address)).cast("B")

    def close(self) -> None:
        """Free it. Views that were handed out must not be used any more."""
        if self.address:
            address, self.address, self.size, self.view = self.address, 0, 0, memoryview(b"")
            call("cuMemFreeHost", address)


def chunk_count(length: int) -> int:
    """How many chunks a range of that length has."""
    return -(-length // CHUNK_SIZE)


@lru_cache(maxsize=4096)
def zero_chunk_id(length: int = CHUNK_SIZE) -> bytes:
    """The id of a chunk of `length` zero bytes."""
    return blake3(_zeros()[:length]).digest()


@cache
def _zeros() -> memoryview:
    return memoryview(bytes(CHUNK_SIZE))
