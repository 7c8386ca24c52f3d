"""How fast a checkpoint is sealed and verified, against one thread of a plain Python loop over the same files.

Paired and interleaved: each round runs the baseline and every candidate once on the same files in tmpfs.
Changes nothing outside of its temporary folder, but for `--write`. Called by `make bench`:

    python3 -m bench.verify_speed [--gib 2] [--rounds 5] [--write]
"""

from __future__ import annotations

import argparse
import os
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from blake3 import blake3

from bench.measurement import Transcript, interleaved_rates, row, write
from image_format.archives.archive import verify_archive
from image_format.chunk_index import CHUNK_SIZE
from image_format.record import Container, LowLevelRuntime, Record
from image_format.sealing import seal
from image_format.trust.keys import SigningKey
from image_format.trust.policy import Policy, TrustedKey
from image_format.verifying import verify_directory

FILES = 4


def main() -> int:
    options = read_options()
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="vgpu-verify-speed-") as scratch:
        folder = Path(scratch) / "checkpoint"
        size_bytes = make_files(folder, options.gib << 30)
        key = SigningKey.generate()
        policy = Policy(keys={key.key_id: TrustedKey("bench", Path("bench.pub"), key.public)})
        record = Record("2026-11-29T00:00:00Z", Container("c", "bench"), LowLevelRuntime("runc", "0", "/usr/bin/runc"))
        seal(folder, record, key)
        archive = Path(scratch) / "checkpoint.tar"
        with tarfile.open(archive, "w") as tar:
            tar.add(folder, "checkpoint")
        runs = {
            "plain_loop": lambda: plain_loop(folder),
            "verify_1": lambda: verify_directory(folder, policy, threads=1),
            "verify": lambda: verify_directory(folder, policy),
            "seal": lambda: seal(folder, record, key),
            "verify_tar": lambda: verify_archive(archive, policy),
        }
        out = Transcript()
        out.say_load("before")
        rates = interleaved_rates(runs, options.rounds, size_bytes, out)
        out.say_load("after")
    rows = made_rows(rates, size_bytes)
    for made in rows:
        out.say(f"{made['what']}: {made['value']} GB/s, {made['ratio']} x the plain loop ({made['baseline']} GB/s)")
    if options.write:
        print(write("verify-speed", rows, log=out.text()))
    return 0


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="write docs/measurements/<date>-verify-speed.json")
    return parser.parse_args()


def make_files(folder: Path, size_bytes: int) -> int:
    folder.mkdir()
    block = os.urandom(CHUNK_SIZE)
    chunks = size_bytes // CHUNK_SIZE // FILES
    for n in range(FILES):
        with (folder / f"pages-{n}.img").open("wb") as file:
            for position in range(chunks):
                file.write(position.to_bytes(8) + block[8:])
    return FILES * chunks * CHUNK_SIZE


def plain_loop(folder: Path) -> None:
    """What b3sum does with one thread, written the obvious way in Python."""
    for path in sorted(folder.glob("*.img")):
        with path.open("rb") as file:
            while data := file.read(CHUNK_SIZE):
                blake3(data).digest()


def made_rows(rates: dict[str, list[float]], size_bytes: int) -> list[dict[str, Any]]:
    whats = {
        "verify_1": "verify a directory, 1 thread",
        "verify": "verify a directory, a thread for each core",
        "seal": "seal a directory, a thread for each core",
        "verify_tar": "verify an uncompressed archive, a thread for each core",
    }
    base = f"single-threaded BLAKE3 loop in Python over the same {size_bytes / 1e9:.2f} GB in tmpfs"
    return [
        row(f"verify_speed_{key}", what, "GB/s", rates[key], baseline_what=base, baseline_raw=rates["plain_loop"])
        for key, what in whats.items()
    ]


if __name__ == "__main__":
    sys.exit(main())
