"""How fast the GPU makes chunk ids, for several sizes, and what share of the GPU's integer rate that is.

Run as `python -m bench.gpu_blake3 [--runs 20] [--largest-gib 32] [--write]` on a machine with an NVIDIA GPU; elsewhere it
says so and measures nothing. Times the committed kernels through ChunkHasher: by events (kernels alone) and by the clock
(call to ids). Every size's ids are compared with the blake3 package first.

The rate is bound by 32-bit integer instructions: a compression of 64 bytes is 7 rounds of 8 mixings of 12 instructions (4
additions, 4 xors, 4 rotations; a + b + m counts as one) and 8 xors, and there are 17 compressions for 16 blocks, the 17th joining nodes.
Xors and rotations can run only on the integer pipe, 64 lanes in each multiprocessor.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from blake3 import blake3

from bench.measurement import gpu_names, row, write
from gpu_state.staging import cuda_calls
from gpu_state.staging.chunk_hasher import CHUNK_SIZE, ChunkHasher, HashRange, HashRun
from gpu_state.staging.cuda_calls import call
from vgpu_errors import NodeError

MIB, GIB = 1 << 20, 1 << 30
PATTERN_CHUNKS = 16
MIXINGS = 7 * 8
COMPRESSIONS_PER_BYTE = 17 / 16 / 64
OPERATIONS_PER_BYTE = (MIXINGS * 12 + 8) * COMPRESSIONS_PER_BYTE
INTEGER_PIPE_PER_BYTE = (MIXINGS * 8 + 8) * COMPRESSIONS_PER_BYTE
INTEGER_LANES, ALL_LANES = 64, 128  # of a multiprocessor, compute capability 8.0 and 9.0
SM_COUNT, CLOCK_KHZ = 16, 13  # CUdevice_attribute
LOAD = "from bench.gpu_blake3 import time_load; print(time_load())"


def main() -> int:
    options = read_options()
    try:
        cuda_calls.start()
        context = cuda_calls.DeviceContext(0)
    except NodeError as problem:
        print(f"gpu_blake3: nothing measured: {problem}", file=sys.stderr)
        return 0
    sizes = [
        size for size in (4 * MIB, 32 * MIB, 256 * MIB, GIB, 4 * GIB, 32 * GIB) if size <= options.largest_gib * GIB
    ]
    rates: dict[str, list[float]] = {}
    with ChunkHasher(context) as hasher:
        address, ids = fill(max(sizes))
        check(hasher, address, max(sizes), ids)
        for size in sizes:
            rates |= measure_size(hasher, address, size, options.runs)
        rates |= measure_copy(hasher, address, min(max(sizes) // 2, 4 * GIB), options.runs)
        rates |= measure_regions(hasher, address, max(sizes), options.runs)
    loads = {name: [load_in_child(name) for _ in range(3)] for name in ("without", "with")}
    return report(rates, loads, peak_operations(context), max(sizes), is_written=options.write)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--largest-gib", type=int, default=32)
    parser.add_argument("--write", action="store_true", help="write docs/measurements/<date>-gpu-blake3.json")
    return parser.parse_args()


def fill(size: int) -> tuple[int, list[bytes]]:
    """Device memory with 16 random chunks again and again, and their ids."""
    pattern = os.urandom(PATTERN_CHUNKS * CHUNK_SIZE)
    address = int(call("cuMemAlloc", max(size, len(pattern))))
    call("cuMemcpyHtoD", address, pattern, len(pattern))
    done = len(pattern)
    while done < size:
        step = min(done, size - done)
        call("cuMemcpyDtoD", address + done, address, step)
        done += step
    call("cuCtxSynchronize")
    return address, [blake3(pattern[n * CHUNK_SIZE :][:CHUNK_SIZE]).digest() for n in range(PATTERN_CHUNKS)]


def check(hasher: ChunkHasher, address: int, size: int, ids: list[bytes]) -> None:
    wanted = b"".join(ids[n % PATTERN_CHUNKS] for n in range(size // CHUNK_SIZE))
    if bytes(hasher.hash(address, size)) != wanted:
        raise SystemExit("gpu_blake3: wrong ids")


def measure_size(hasher: ChunkHasher, address: int, size: int, runs: int) -> dict[str, list[float]]:
    name = f"{size // GIB}gib" if size >= GIB else f"{size // MIB}mib"
    by_clock = []
    for number in range(runs + 3):
        started = time.perf_counter()
        hasher.hash(address, size)
        if number >= 3:
            by_clock.append(rate(size, time.perf_counter() - started))
    return {name: time_kernels(hasher, [HashRange(address, size)], runs), f"{name}_wall": by_clock}


def measure_copy(hasher: ChunkHasher, address: int, size: int, runs: int) -> dict[str, list[float]]:
    """Set aside and hashed, in one pass and in two; bytes count once."""
    target = address + size

    def in_two(run: HashRun, stream: Any) -> None:
        call("cuMemcpyDtoDAsync", target, address, size, stream)
        run.start([HashRange(target, size)], stream)

    def copy_alone(run: HashRun, stream: Any) -> None:
        call("cuMemcpyDtoDAsync", target, address, size, stream)
        run.start((), stream)

    return {
        "copy": time_kernels(hasher, [HashRange(address, size, target)], runs),
        "copy_then_hash": time_work(hasher, in_two, size, runs),
        "copy_alone": time_work(hasher, copy_alone, size, runs),
    }


def measure_regions(hasher: ChunkHasher, address: int, size: int, runs: int) -> dict[str, list[float]]:
    """252 regions of a model (measured on an H200) in one launch, none a multiple of a chunk long."""
    length = (size // 252 - 2 * MIB) // (2 * MIB) * (2 * MIB) + 1000 * 1000
    ranges = [HashRange(address + n * (size // 252) // 16 * 16, length) for n in range(252)]
    return {"252_regions": time_kernels(hasher, ranges, runs)} if length > 0 else {}


def time_kernels(hasher: ChunkHasher, ranges: list[HashRange], runs: int) -> list[float]:
    size = sum(item.length for item in ranges)
    return time_work(hasher, lambda run, stream: run.start(ranges, stream), size, runs)


def time_work(hasher: ChunkHasher, queue: Callable[[HashRun, Any], None], size: int, runs: int) -> list[float]:
    stream, run = hasher.context.new_stream(), hasher.new_run()
    begin, end = call("cuEventCreate", 0), call("cuEventCreate", 0)
    rates = []
    for number in range(runs + 3):
        call("cuEventRecord", begin, stream)
        queue(run, stream)
        call("cuEventRecord", end, stream)
        run.ids()
        call("cuEventSynchronize", end)
        if number >= 3:
            rates.append(rate(size, call("cuEventElapsedTime", begin, end) / 1000))
    run.close()
    return rates


def rate(size: int, seconds: float) -> float:
    return round(size / seconds / 1e9, 2)


def time_load() -> float:
    """Milliseconds from a context to kernels that can be launched."""
    cuda_calls.start()
    context = cuda_calls.DeviceContext(0)
    started = time.perf_counter()
    with ChunkHasher(context):
        return round((time.perf_counter() - started) * 1000, 2)


def load_in_child(cache: str) -> float:
    environment = {**os.environ, "CUDA_CACHE_DISABLE": "1" if cache == "without" else "0"}
    return float(
        subprocess.run([sys.executable, "-c", LOAD], env=environment, check=True, capture_output=True, text=True).stdout
    )


def peak_operations(context: cuda_calls.DeviceContext) -> dict[str, float]:
    """Instructions a second at the highest clock, of the integer pipe and of all pipes."""
    lanes_per_s = (
        1e3
        * call("cuDeviceGetAttribute", CLOCK_KHZ, context.handle)
        * call("cuDeviceGetAttribute", SM_COUNT, context.handle)
    )
    return {"integer": INTEGER_LANES * lanes_per_s, "all": ALL_LANES * lanes_per_s}


def report(rates: dict, loads: dict, peaks: dict[str, float], largest: int, *, is_written: bool) -> int:
    main_name = next(name for name in ("4gib", "1gib", "256mib") if name in rates)
    whats = {
        name: f"BLAKE3 ids, {name.replace('_wall', '')}, {'call to ids' if 'wall' in name else 'kernels'}"
        for name in rates
    }
    whats |= {
        "copy": "set aside and hash in one pass, bytes counted once",
        "copy_then_hash": "the driver's device copy, then hash of the copy, bytes counted once",
        "copy_alone": "the driver's device copy alone, bytes counted once",
        "252_regions": f"252 regions of {largest / 252e6:.0f} MB, one launch",
    }
    rows = [row("gpu_blake3", f"BLAKE3 on the GPU ({main_name})", "GB/s", rates[main_name])]
    rows += [row(f"gpu_blake3_{name}", whats[name], "GB/s", raw) for name, raw in rates.items()]
    rows += [
        row(f"gpu_blake3_load_{name}_cache", f"load of the PTX {name} the driver's cache", "ms", raw)
        for name, raw in loads.items()
    ]
    bytes_per_s = statistics.median(rates[main_name]) * 1e9
    rows += [
        row("gpu_blake3_operations", "32-bit operations per byte", "1/byte", [round(OPERATIONS_PER_BYTE, 3)]),
        row("gpu_blake3_integer_share", "of the integer pipe's peak at the highest clock (xors and rotations)", "%",
            [round(100 * bytes_per_s * INTEGER_PIPE_PER_BYTE / peaks["integer"], 1)]),
        row("gpu_blake3_issue_share", "of the peak of all pipes at the highest clock (all operations)", "%",
            [round(100 * bytes_per_s * OPERATIONS_PER_BYTE / peaks["all"], 1)]),
    ]  # fmt: skip
    for entry in rows:
        print(f"{entry['key']}: {entry['value']} {entry['unit']} ({entry['what']}); raw {entry['raw']}")
    if is_written:
        print(write("gpu-blake3", rows, **gpu_names()).name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
