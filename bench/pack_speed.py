"""How fast checkpoints are cut into packs and come out of them, and where trying zstd pays.

Over files in tmpfs, interleaved: planning, measuring raw and with zstd, streaming, unpacking; beside them SHA-256 alone,
which every new blob costs, and what the samples cost that decide whether a chunk is compressed (pack_streams.SAMPLE_BYTES).
Changes nothing outside of its temporary folder, but for `--write`. Called by `make bench`:

    python3 -m bench.pack_speed [--mib 512] [--rounds 5] [--write]
"""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import shutil
import struct
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.measurement import Transcript, interleaved_rates, row, write
from image_format import chunk_index
from image_format.archives.small_files import write_small_files
from image_format.chunk_index import CHUNK_SIZE
from image_format.file_names import INDEX_NAME
from image_format.index_model import RegionKind
from image_format.packs.pack_streams import Compressor, measure_packs, open_pack
from image_format.packs.packed import Compression, PackedPlan, packed_index, plan_packs
from image_format.packs.unpacking import unpack
from image_format.record import Container, LowLevelRuntime, Record
from image_format.sealing import seal
from image_format.trust.keys import SigningKey

DOCUMENTS = (INDEX_NAME, "vgpu-record.json", "vgpu-manifest.json", "vgpu-signature.json")


def main() -> int:
    options = read_options()
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="vgpu-pack-speed-") as scratch:
        folder = Path(scratch) / "checkpoint"
        size_bytes = make_file(folder, options.mib << 20)
        record = Record("2026-11-29T00:00:00Z", Container("c", "bench"), LowLevelRuntime("runc", "0", "/usr/bin/runc"))
        seal(folder, record, SigningKey.generate())
        runs = Runs(folder, Path(scratch) / "out")
        out = Transcript()
        out.say_load("before")
        rates = interleaved_rates(runs.all(), options.rounds, size_bytes, out)
        out.say_load("after")
    rows = made_rows(rates, size_bytes)
    for made in rows:
        out.say(f"{made['what']}: {made['value']} GB/s, {made['ratio']} x SHA-256 alone ({made['baseline']} GB/s)")
    if options.write:
        print(write("pack-speed", rows, log=out.text()))
    return 0


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="write docs/measurements/<date>-pack-speed.json")
    return parser.parse_args()


def make_file(folder: Path, size_bytes: int) -> int:
    """Half of the chunks noise, half of them memory of a program: pointers and counters that compress."""
    folder.mkdir()
    noise = os.urandom(CHUNK_SIZE)
    memory = b"".join(struct.pack("<QQ", 0x7F00_0000_0000 + 64 * n, n % 997) for n in range(CHUNK_SIZE // 16))
    with (folder / "memory.img").open("wb") as file:
        for position in range(size_bytes // CHUNK_SIZE):
            file.write(position.to_bytes(8) + (memory if position % 2 else noise)[8:])
    return size_bytes // CHUNK_SIZE * CHUNK_SIZE


class Runs:
    """What is timed; each over the whole file."""

    def __init__(self, folder: Path, target: Path) -> None:
        self._folder, self._target = folder, target
        self._index = chunk_index.from_bytes((folder / INDEX_NAME).read_bytes())
        self._raw = plan_packs(self._index, compression=Compression.none())
        self._plans = {name: measure_packs(plan, folder) for name, plan in self._all_plans().items()}
        small = io.BytesIO()
        write_small_files(self._index, folder, small)
        self._small_files = small.getvalue()
        self._documents = {name: (folder / name).read_bytes() for name in DOCUMENTS}

    def all(self) -> dict[str, Callable[[], object]]:
        plans = self._all_plans()
        return {
            "sha256": self.sha256,
            "measure_raw": lambda: measure_packs(plans["raw"], self._folder),
            "measure_zstd": lambda: measure_packs(plans["zstd"], self._folder),
            "sample": self.sample,
            "stream_raw": lambda: self.stream(self._plans["raw"]),
            "unpack_raw": lambda: self.unpack(self._plans["raw"]),
            "unpack_zstd": lambda: self.unpack(self._plans["zstd"]),
        }

    def sha256(self) -> None:
        buffer = memoryview(bytearray(CHUNK_SIZE))
        digest = hashlib.sha256()
        with (self._folder / "memory.img").open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                digest.update(buffer[:count])

    def sample(self) -> None:
        compressor = Compressor(Compression())
        buffer = memoryview(bytearray(CHUNK_SIZE))
        with (self._folder / "memory.img").open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                compressor.is_worth_trying(buffer[:count])

    def stream(self, plan: PackedPlan) -> None:
        buffer = memoryview(bytearray(CHUNK_SIZE))
        for number in range(len(plan.packs)):
            with open_pack(plan, number, self._folder) as stream:
                while stream.raw.readinto(buffer):  # type: ignore[attr-defined]  # as uploads read it
                    pass

    def unpack(self, plan: PackedPlan) -> None:
        shutil.rmtree(self._target, ignore_errors=True)
        self._target.mkdir()
        packed = chunk_index.from_bytes(chunk_index.to_bytes(packed_index(plan)))

        def give(number: int, start: int) -> Any:
            stream = open_pack(plan, number, self._folder)
            stream.seek(start)
            return stream

        unpack(self._documents, packed, self._target, open_pack=give, small_files=io.BytesIO(self._small_files))

    def _all_plans(self) -> dict[str, PackedPlan]:
        return {
            "raw": self._raw,
            "zstd": plan_packs(self._index, compression=Compression(frozenset({RegionKind.FILE}))),
        }


def made_rows(rates: dict[str, list[float]], size_bytes: int) -> list[dict[str, Any]]:
    whats = {
        "measure_raw": "measure raw packs (BLAKE3 of each chunk, SHA-256 of each pack), a thread for each core",
        "measure_zstd": "measure packs of which every second chunk is compressed, a thread for each core",
        "sample": "look at the samples of every chunk, 1 thread",
        "stream_raw": "stream raw packs, 1 thread",
        "unpack_raw": "unpack raw packs that are made meanwhile, a thread for each core",
        "unpack_zstd": "unpack packs of which every second chunk is compressed, made meanwhile, a thread for each core",
    }
    base = f"SHA-256 in 1 thread over the same {size_bytes / 1e9:.2f} GB in tmpfs"
    return [
        row(f"pack_speed_{key}", what, "GB/s", rates[key], baseline_what=base, baseline_raw=rates["sha256"])
        for key, what in whats.items()
    ]


if __name__ == "__main__":
    sys.exit(main())
