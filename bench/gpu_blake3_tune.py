"""Compiles variants of gpu_state/staging/blake3.cu, checks each against the blake3 package and times it: what its #defines were chosen by.

Run as `python -m bench.gpu_blake3_tune [--only NAME...] [--runs 10] [--mib 4096]` on a machine with an NVIDIA GPU and nvcc; elsewhere it
says so and measures nothing. Variants whose name begins with `wrong:` leave work out, to show what is left without it; their ids are not checked.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.gpu_blake3 import PATTERN_CHUNKS, fill, rate
from gpu_state.staging import cuda_calls
from gpu_state.staging.build_kernel import SOURCE
from gpu_state.staging.chunk_hasher import ARGUMENTS, CHUNK_SIZE, LAUNCH_CHUNKS, NODES_PER_TILE, TILE
from gpu_state.staging.cuda_calls import DeviceContext, call
from vgpu_errors import NodeError

READ_256, STREAM = '"ld.global.L2::256B.v4.u32"', '"st.global.cs.v4.u32"'
SMALL = {"TILE": 128, "NODES_PER_TILE": 8, "BLOCKS_PER_SM": 8}
VARIANTS: dict[str, dict[str, Any]] = {
    "committed": {},
    "no additions moved": {"SPREAD": 0},
    "all of a+b+m moved": {"SPREAD": 2},
    "3 blocks": {"BLOCKS_PER_SM": 3},
    "5 blocks": {"BLOCKS_PER_SM": 5},
    "tile 128, 8 blocks": SMALL,
    "tile 512, 2 blocks": {"TILE": 512, "NODES_PER_TILE": 32, "BLOCKS_PER_SM": 2, "COPY_ROW": 0},
    "L2 256B": {"READ": READ_256},
    "read-only cache": {"READ": '"ld.global.nc.v4.u32"'},
    "copy as read": {"COPY_ROW": 0},
    "copy 64": {"COPY_ROW": 64},
    "copy 64, L2 256B": {"COPY_ROW": 64, "READ": READ_256},
    "copy 128, streaming": {"WRITE": STREAM},
    "copy 128, streaming, L2 256B": {"WRITE": STREAM, "READ": READ_256},
    "copy 128, 3 blocks, L2 256B": {"READ": READ_256, "BLOCKS_PER_SM": 3},
    "copy 128, 2 blocks, L2 256B": {"READ": READ_256, "BLOCKS_PER_SM": 2},
    "copy 128, tile 128, L2 256B": {**SMALL, "READ": READ_256},
    "copy 256, tile 128, 5 blocks": {**SMALL, "BLOCKS_PER_SM": 5, "COPY_ROW": 256},
    "copy 256, tile 128, 5 blocks, L2 256B": {**SMALL, "BLOCKS_PER_SM": 5, "COPY_ROW": 256, "READ": READ_256},
    "wrong: 1 round of 7": {"rounds": 1},
    "wrong: 1 round of 7, L2 256B": {"rounds": 1, "READ": READ_256},
    "wrong: 1 round of 7, copy 256, L2 256B": {
        **SMALL, "rounds": 1, "READ": READ_256, "COPY_ROW": 256, "BLOCKS_PER_SM": 5
    },
    "wrong: 4 rounds of 7": {"rounds": 4},
}  # fmt: skip


def main() -> int:
    options = read_options()
    chosen = {name: VARIANTS[name] for name in options.only or VARIANTS}
    if shutil.which("nvcc") is None:
        print("gpu_blake3_tune: nothing measured: no nvcc", file=sys.stderr)
        return 0
    try:
        cuda_calls.start()
        context = DeviceContext(0)
    except NodeError as problem:
        print(f"gpu_blake3_tune: nothing measured: {problem}", file=sys.stderr)
        return 0
    size = options.mib << 20
    address, ids = fill(size)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        made = pool.map(lambda name: compile_variant(Path(folder), name, chosen[name]), chosen)
        for name, (cubin, registers) in zip(chosen, made, strict=True):
            time_variant(context, name, cubin, registers, (address, size, options.runs), b"".join(ids))
    return 0


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", choices=VARIANTS)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--mib", type=int, default=4096, help="at most 4096: one launch")
    return parser.parse_args()


def compile_variant(folder: Path, name: str, settings: dict[str, Any]) -> tuple[Path, str]:
    stem = re.sub(r"\W+", "-", name)
    source, cubin = folder / f"{stem}.cu", folder / f"{stem}.cubin"
    text = SOURCE.read_text()
    if "rounds" in settings:
        calls = [line for line in text.splitlines() if line.startswith("    round_of<")]
        for line in calls[settings["rounds"] :]:
            text = text.replace(line + "\n", "")
    source.write_text(text)
    defines = [f"-D{key}={value}" for key, value in settings.items() if key != "rounds"]
    major, minor = (call("cuDeviceGetAttribute", which, call("cuDeviceGet", 0)) for which in (75, 76))
    done = subprocess.run(
        ["nvcc", "-cubin", f"-arch=sm_{major}{minor}", "-Xptxas", "-v", *defines, "-o", str(cubin), str(source)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise SystemExit(done.stderr)
    return cubin, "/".join(re.findall(r"Used (\d+) registers", done.stderr))


def time_variant(
    context: DeviceContext, name: str, cubin: Path, registers: str, work: tuple[int, int, int], ids: bytes
) -> None:
    address, size, runs = work
    tile, nodes = int(VARIANTS[name].get("TILE", TILE)), int(VARIANTS[name].get("NODES_PER_TILE", NODES_PER_TILE))
    module = call("cuModuleLoadData", cubin.read_bytes())
    scratch_size = LAUNCH_CHUNKS * (4 + 4096 // tile * nodes * 32)
    scratch, output = int(call("cuMemAlloc", scratch_size)), int(call("cuMemAlloc", LAUNCH_CHUNKS * 32))
    call("cuMemsetD8", scratch, 0, scratch_size)
    stream = context.new_stream()
    results = {}
    for kernel, length in (("vgpu_blake3_chunks", size), ("vgpu_blake3_chunks_copy", size // 2)):
        function = call("cuModuleGetFunction", module, kernel.encode())
        chunks, destination = length // CHUNK_SIZE, address + length if length < size else 0
        values = (0, 0, address, length, destination, scratch, 0, output)
        shape = (chunks * (4096 // tile), 1, 1, tile, 1, 1)
        results[kernel] = time_launches(function, shape, values, stream, length, runs)
        check_ids(name, output, chunks, ids)
    call("cuModuleUnload", module)
    call("cuMemFree", scratch)
    call("cuMemFree", output)
    plain, copy = results.values()
    middle = statistics.median(plain)
    print(
        f"{name:38} {registers:7} hash {middle:8.1f} copy {statistics.median(copy):8.1f} GB/s  raw {plain} {copy}",
        flush=True,
    )


def time_launches(
    function: Any, shape: tuple[int, ...], values: tuple[int, ...], stream: Any, length: int, runs: int
) -> list[float]:
    begin, end = call("cuEventCreate", 0), call("cuEventCreate", 0)
    rates = []
    for number in range(runs + 2):
        call("cuEventRecord", begin, stream)
        call("cuLaunchKernel", function, *shape, 0, stream, (values, ARGUMENTS), 0)
        call("cuEventRecord", end, stream)
        call("cuEventSynchronize", end)
        if number >= 2:
            rates.append(rate(length, call("cuEventElapsedTime", begin, end) / 1000))
    return rates


def check_ids(name: str, output: int, chunks: int, ids: bytes) -> None:
    found = bytearray(chunks * 32)
    call("cuMemcpyDtoH", found, output, len(found))
    wanted = (ids * (chunks // PATTERN_CHUNKS + 1))[: len(found)]
    if not name.startswith("wrong:") and bytes(found) != wanted:
        print(f"{name}: wrong ids")


if __name__ == "__main__":
    sys.exit(main())
