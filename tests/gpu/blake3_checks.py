"""The ids that the GPU kernels make, against the `blake3` package: one process, one table of cases, JSON on stdout.

Runs on whatever libcuda.so.1 the process finds: tests/native/test_gpu_blake3.py brings the software driver,
tests/gpu/test_blake3.py leaves the real one. `python -m tests.gpu.blake3_checks` prints {case: "" or what is wrong}.
"""

from __future__ import annotations

import json
import random
import sys
import traceback
from contextlib import contextmanager

from blake3 import blake3

from gpu_state.staging import cuda_calls
from gpu_state.staging.chunk_hasher import CHUNK_SIZE, LAUNCH_CHUNKS, ChunkHasher, HashRange, zero_chunk_id
from gpu_state.staging.cuda_calls import call

LENGTHS = (
    *(1, 2, 3, 4, 15, 16, 17, 63, 64, 65, 127, 128, 129, 1023, 1024, 1025, 2047, 2048, 2049, 3071, 3072, 3073),
    *(4096, 4097, 5120, 5121, 6144, 6145, 7168, 7169, 8192, 8193, 16384, 31744, 102400, 102401),
    *(256 * 1024 - 1, 256 * 1024, 256 * 1024 + 1, 512 * 1024 + 1025, 3 << 20, (3 << 20) + 5 * 1024 + 7),
    *(CHUNK_SIZE - 1025, CHUNK_SIZE - 1024, CHUNK_SIZE - 1, CHUNK_SIZE, CHUNK_SIZE + 1, 2 * CHUNK_SIZE + 77),
)
POISON = 0xA5
random_bytes = random.Random(1).randbytes


class Stage:
    """A hasher, and device memory with known content."""

    def __init__(self) -> None:
        cuda_calls.start()
        self.context = cuda_calls.DeviceContext(0)
        self.hasher = ChunkHasher(self.context)

    @contextmanager
    def memory(self, content, room=64):
        """Device memory that holds `content` and poison behind it."""
        padded = bytes(content) + bytes([POISON]) * room
        address = int(call("cuMemAlloc", len(padded)))
        try:
            call("cuMemcpyHtoD", address, padded, len(padded))
            yield address
        finally:
            call("cuMemFree", address)

    def read(self, address, size):
        host = bytearray(size)
        call("cuMemcpyDtoH", host, address, size)
        return bytes(host)


def expected(content):
    """The ids by the blake3 package."""
    view = memoryview(content)
    return b"".join(blake3(view[at : at + CHUNK_SIZE]).digest() for at in range(0, len(view), CHUNK_SIZE))


def check_lengths(stage):
    content = random_bytes(max(LENGTHS))
    for length in LENGTHS:
        with stage.memory(content[:length]) as address:
            assert bytes(stage.hasher.hash(address, length)) == expected(content[:length]), f"{length} bytes"


def check_random_lengths(stage):
    dice = random.Random(2)
    content = random_bytes(CHUNK_SIZE)
    with stage.memory(content) as address:
        for _ in range(60):
            length = min(int(2 ** dice.uniform(0, 22)), CHUNK_SIZE)
            start = dice.randrange(0, CHUNK_SIZE - length + 1) // 16 * 16
            found = bytes(stage.hasher.hash(address + start, length))
            assert found == expected(content[start : start + length]), f"{length} bytes at {start}"


def check_known_answer(stage):
    """From the official test vectors: input byte i is i mod 251."""
    content = bytes(i % 251 for i in range(1025))
    with stage.memory(content) as address:
        assert bytes(stage.hasher.hash(address, 1)).hex() == (
            "2d3adedff11b61f14c886e35afa036736dcd87a74d27b5c1510225d0f592e213"
        )
        assert bytes(stage.hasher.hash(address, 1025)).hex() == (
            "d00278ae47eb27b34faecf67b4fe263f82d5412916c1ffd97c8cb7fb814b8444"
        )


def check_many_chunks(stage):
    content = random_bytes(9 * CHUNK_SIZE + 12345)
    with stage.memory(content) as address:
        assert bytes(stage.hasher.hash(address, len(content))) == expected(content)


def check_same_leaf_in_two_places(stage):
    """The place in the chunk is part of a leaf, the place of the chunk in the range is not part of an id."""
    with stage.memory(random_bytes(CHUNK_SIZE) * 2) as address:
        found = bytes(stage.hasher.hash(address, 2 * CHUNK_SIZE))
    assert found[:32] == found[32:]


def check_empty_range(stage):
    with stage.memory(b"x" * 16) as address:
        assert bytes(stage.hasher.hash(address, 0)) == b""
        assert bytes(stage.hasher.hash_ranges(())) == b""
        found = bytes(stage.hasher.hash_ranges([HashRange(address, 0), HashRange(address, 3), HashRange(address, 0)]))
    assert found == expected(b"xxx")


def check_ranges(stage):
    """As many as a model has, in any order of addresses."""
    dice = random.Random(3)
    content = random_bytes(3 * CHUNK_SIZE)
    with stage.memory(content) as address:
        places = [(dice.randrange(0, CHUNK_SIZE, 16), int(2 ** dice.uniform(0, 17))) for _ in range(250)]
        places += [(16, 2 * CHUNK_SIZE + 5), (32, CHUNK_SIZE), (0, 0)]
        dice.shuffle(places)
        found = bytes(stage.hasher.hash_ranges([HashRange(address + at, length) for at, length in places]))
    assert found == b"".join(expected(content[at : at + length]) for at, length in places)


def check_more_than_a_launch_holds(stage):
    dice = random.Random(4)
    content = random_bytes(1 << 20)
    with stage.memory(content) as address:
        places = [(dice.randrange(0, 1 << 19, 16), dice.randrange(1, 3000)) for _ in range(2 * LAUNCH_CHUNKS + 3)]
        for _ in range(2):
            found = bytes(stage.hasher.hash_ranges([HashRange(address + at, length) for at, length in places]))
            assert found == b"".join(expected(content[at : at + length]) for at, length in places)


def check_zeros(stage):
    for length in (1, 1024, 70000, CHUNK_SIZE - 1, CHUNK_SIZE):
        with stage.memory(bytes(length)) as address:
            assert bytes(stage.hasher.hash(address, length)) == zero_chunk_id(length), length
    assert zero_chunk_id() == blake3(bytes(CHUNK_SIZE)).digest()
    assert zero_chunk_id(0) == blake3(b"").digest()


def check_copy(stage):
    for length in (1, 16, 33, 1024, 70001, CHUNK_SIZE - 1, CHUNK_SIZE, 2 * CHUNK_SIZE + 4321):
        content, padded = random_bytes(length), -(-length // 16) * 16
        with stage.memory(content) as source, stage.memory(bytes([POISON]) * padded) as destination:
            found = bytes(stage.hasher.hash_ranges([HashRange(source, length, destination)]))
            copied = stage.read(destination, padded + 64)
        assert found == expected(content), length
        assert copied == content + bytes(padded - length) + bytes([POISON]) * 64, length


def check_copy_of_ranges(stage):
    content = random_bytes(2 * CHUNK_SIZE)
    places = [(0, 5000, CHUNK_SIZE + 4096), (8192, CHUNK_SIZE + 48, 0), (64, 16, CHUNK_SIZE + 65536)]
    with stage.memory(content) as source, stage.memory(bytes(2 * CHUNK_SIZE)) as destination:
        ranges = [HashRange(source + at, length, destination + to) for at, length, to in places]
        found = bytes(stage.hasher.hash_ranges(ranges))
        copied = stage.read(destination, 2 * CHUNK_SIZE)
    assert found == b"".join(expected(content[at : at + length]) for at, length, _ in places)
    for at, length, to in places:
        assert copied[to : to + length] == content[at : at + length]


def check_runs_in_flight(stage):
    """Two places on two streams, each used again and again."""
    contents = [random_bytes(CHUNK_SIZE + 1000 * n) for n in range(2)]
    streams = [stage.context.new_stream() for _ in contents]
    runs = [stage.hasher.new_run() for _ in contents]
    with stage.memory(contents[0]) as first, stage.memory(contents[1]) as second:
        for _ in range(3):
            for run, stream, address, content in zip(runs, streams, (first, second), contents, strict=True):
                run.start([HashRange(address, len(content))], stream)
            for run, content in zip(runs, contents, strict=True):
                assert bytes(run.ids()) == expected(content)
        for run in runs:
            run.close()
    for stream in streams:
        call("cuStreamDestroy", stream)


def check_refusals(stage):
    for ranges in (
        [HashRange(8, 100)],
        [HashRange(16, 100, 24)],
        [HashRange(16, 100), HashRange(16, 100, 32)],
    ):
        try:
            stage.hasher.hash_ranges(ranges)
        except ValueError:
            continue
        raise AssertionError(f"{ranges} was taken")


CHECKS = {name.removeprefix("check_"): check for name, check in list(globals().items()) if name.startswith("check_")}


def main() -> int:
    stage = Stage()
    results = {}
    for name, check in CHECKS.items():
        try:
            check(stage)
            results[name] = ""
        except AssertionError as problem:
            results[name] = str(problem) or traceback.format_exc()
    stage.hasher.close()
    stage.context.close()
    json.dump(results, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
