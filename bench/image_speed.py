"""What ids, digests and proofs cost beside the tools people use, on this machine's disk and memory.

    python -m bench.image_speed write inspect tar podman [--gib 16] [--disk DIR] [--measurements DIR]

write    packs written with the id of each chunk and the sha256 of each pack, against the same writes alone (O_DIRECT)
inspect  `vgpu inspect` of a checkpoint with 140 GiB of GPU memory in its index, as a user runs it
tar      seal and verify of a directory of CRIU's size, beside tar and tar with zstd of the same files
podman   podman's own part of an export with `--compress none` and `zstd`, beside the shim's (test host, software GPU, root)
Each pair is interleaved in one run. Changes nothing outside of its temporary folders.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import mmap
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from blake3 import blake3

from bench import measurement
from bench.measurement import Transcript, row
from image_format import chunk_index
from image_format.chunk_index import CHUNK_SIZE
from image_format.packs.target_files import TargetFiles
from image_format.record import Container, LowLevelRuntime, Record
from image_format.sealing import make_documents, seal
from image_format.trust.keys import SigningKey
from image_format.trust.policy import Policy, TrustedKey
from image_format.verifying import verify_directory
from image_format.vram import ChunkPlace, VramFragment, VramRegion, merge, pack_name

GIB = 1 << 30
PACK_CHUNKS = 128
# Two a core: while one waits for the disk the other hashes.
THREADS = 2 * (os.cpu_count() or 1)
RECORD = Record("2026-11-29T00:00:00Z", Container("c", "bench"), LowLevelRuntime("runc", "0", "/usr/bin/runc"))
UUID = "GPU-6f0c4d1e-2b6a-4d0e-9a61-0d5a6c3b2f10"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=sorted(PARTS))
    parser.add_argument("--gib", type=float, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--disk", type=pathlib.Path, default=pathlib.Path("/var/tmp"))
    parser.add_argument("--measurements", type=pathlib.Path)
    options = parser.parse_args()
    out = Transcript()
    out.say_load("before")
    rows = [made for part in options.parts for made in PARTS[part](options, out)]
    out.say_load("after")
    for made in rows:
        base = f", {made['ratio']} x {made['baseline_what']} ({made['baseline']})" if "ratio" in made else ""
        out.say(f"{made['key']}: {made['value']} {made['unit']} ({made['what']}{base})")
    if options.measurements:
        print(measurement.write("image-speed", rows, log=out.text(), folder=options.measurements).name)
    return 0


# ---- write -----------------------------------------------------------------------------------------


def write_packs(options: argparse.Namespace, out: Transcript) -> list[dict[str, Any]]:
    packs = max(1, int(options.gib * GIB) // (PACK_CHUNKS * CHUNK_SIZE))
    rows = []
    for where, parent in (("disk", options.disk), ("tmpfs", pathlib.Path("/dev/shm"))):
        rates: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(options.rounds):
            for has_ids in (False, True):
                with tempfile.TemporaryDirectory(dir=parent, prefix="vgpu-image-speed-") as folder:
                    rate = written(pathlib.Path(folder), packs, has_ids=has_ids)
                rates[has_ids].append(round(rate, 3))
                out.say(f"{where}, {packs} packs, {'with' if has_ids else 'without'} ids and digests: {rate:.3f} GB/s")
        what = f"{packs * PACK_CHUNKS * CHUNK_SIZE / 1e9:.1f} GB of packs to {where}, each chunk's id and each pack's sha256"
        rows.append(
            row(f"image_write_{where}", what, "GB/s", rates[True],
                baseline_what="the same writes alone", baseline_raw=rates[False])
        )  # fmt: skip
    return rows


def written(folder: pathlib.Path, packs: int, *, has_ids: bool) -> float:
    """GB/s, the final sync included; each thread has a pack at a time."""
    content = mmap.mmap(-1, CHUNK_SIZE * 4)
    content.write(os.urandom(CHUNK_SIZE * 4))
    directory_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    began = time.monotonic()
    try:
        with TargetFiles(directory_fd, folder) as files, ThreadPoolExecutor(THREADS) as pool:
            for _ in pool.map(lambda number: one_pack(files, number, content, has_ids=has_ids), range(packs)):
                pass
            files.sync()
    finally:
        os.close(directory_fd)
    return packs * PACK_CHUNKS * CHUNK_SIZE / (time.monotonic() - began) / 1e9


def one_pack(files: TargetFiles, number: int, content: mmap.mmap, *, has_ids: bool) -> None:
    name, digest = pack_name(number), hashlib.sha256()
    files.create(name, PACK_CHUNKS * CHUNK_SIZE)
    for chunk in range(PACK_CHUNKS):
        at = chunk % 4 * CHUNK_SIZE
        view = memoryview(content)[at : at + CHUNK_SIZE]
        if has_ids:
            blake3(view).digest()
            digest.update(view)
        files.write(name, chunk * CHUNK_SIZE, view)


# ---- inspect ---------------------------------------------------------------------------------------


def inspect(options: argparse.Namespace, out: Transcript) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="vgpu-image-speed-") as scratch:
        folder = pathlib.Path(scratch)
        for name, data in large_documents().items():
            (folder / name).write_bytes(data)
        command = [sys.executable, "-m", "vgpu_cli.main", "--json", "inspect", str(folder)]
        # As installed: with compiled modules, which the first run leaves for the others.
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
        subprocess.run(command, env=environment, capture_output=True, check=False)
        taken = []
        for _ in range(options.rounds + 2):
            began = time.monotonic()
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            taken.append(round(time.monotonic() - began, 4))
            assert str(140 * GIB) in done.stdout, done.stdout[:300] + done.stderr
            out.say(f"inspect: {taken[-1]} s")
    return [
        row(
            "image_inspect_140gib",
            "vgpu inspect of a checkpoint with 35,840 chunks, the process's start included",
            "s",
            taken,
        )
    ]


def large_documents() -> dict[str, bytes]:
    """140 GiB in ten objects; the packs themselves are not there, for nothing but the documents is read."""
    regions, chunk = [], 0
    for number in range(10):
        places = []
        for _ in range(14 * GIB // CHUNK_SIZE):
            places.append(
                ChunkPlace(
                    blake3(chunk.to_bytes(8)).digest(),
                    pack_name(chunk // PACK_CHUNKS),
                    chunk % PACK_CHUNKS * CHUNK_SIZE,
                    CHUNK_SIZE,
                )
            )
            chunk += 1
        regions.append(VramRegion(0, UUID, (number + 1) << 40, 14 * GIB, f"7/{number + 1}", tuple(places)))
    fragment = VramFragment.of(regions)
    index = merge(chunk_index.Index((), (), ()), fragment, [pack.size for pack in fragment.packs])
    objects = [
        {
            "id": n + 1,
            "size": 14 * GIB,
            "device": 0,
            "uuid": UUID,
            "kind": "alloc",
            "requested": 14 * GIB,
            "mappings": [],
        }
        for n in range(10)
    ]
    doc = json.loads(RECORD.to_bytes()) | {
        "mode": "staged",
        "formatVersion": "1.1",
        "features": {"required": ["staged"], "optional": []},
    }
    doc["processes"] = [{"nsPid": 7, "comm": "train", "mode": "staged", "devices": [UUID], "objects": objects}]
    doc["devices"] = [{"uuid": UUID, "name": "NVIDIA H200", "memoryBytes": 150754820096}]
    return make_documents(index, Record.from_bytes(json.dumps(doc).encode()), SigningKey.generate())


# ---- tar -------------------------------------------------------------------------------------------


def beside_tar(options: argparse.Namespace, out: Transcript) -> list[dict[str, Any]]:
    size = int(min(options.gib, 4) * GIB) // (4 * CHUNK_SIZE) * 4 * CHUNK_SIZE
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="vgpu-image-speed-") as scratch:
        folder = pathlib.Path(scratch) / "checkpoint"
        make_images(folder, size)
        key = SigningKey.generate()
        policy = Policy(keys={key.key_id: TrustedKey("bench", pathlib.Path("bench.pub"), key.public)})
        tar = ["tar", "-C", scratch, "-cf"]
        runs: dict[str, Callable[[], object]] = {
            "tar": lambda: subprocess.run([*tar, f"{scratch}/plain.tar", "checkpoint"], check=True),
            "tar_zstd": lambda: subprocess.run(
                [*tar, f"{scratch}/small.tar.zst", "-I", "zstd -3 -T0", "checkpoint"], check=True
            ),
            "seal": lambda: seal(folder, RECORD, key),
            "verify": lambda: verify_directory(folder, policy),
        }
        taken: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(options.rounds):
            for name, run in runs.items():
                began = time.monotonic()
                run()
                taken[name].append(round(size / (time.monotonic() - began) / 1e9, 3))
                out.say(f"{name}: {taken[name][-1]} GB/s of {size / 1e9:.1f} GB in tmpfs")
    what = {"seal": "seal a directory", "verify": "verify a directory, warm"}
    return [
        row(f"image_{name}", f"{text}, a thread for each core", "GB/s", taken[name], baseline_what=base, baseline_raw=taken[other])
        for name, text in what.items()
        for other, base in (("tar", "tar of the same files"), ("tar_zstd", "tar with zstd -3 on all cores"))
    ]  # fmt: skip


def make_images(folder: pathlib.Path, size: int) -> None:
    folder.mkdir()
    block = os.urandom(CHUNK_SIZE)
    for number in range(4):
        with (folder / f"pages-{number}.img").open("wb") as file:
            for position in range(size // 4 // CHUNK_SIZE):
                file.write(position.to_bytes(8) + block[8:])


# ---- podman ----------------------------------------------------------------------------------------


def beside_podman(options: argparse.Namespace, out: Transcript) -> list[dict[str, Any]]:
    from tests.engines.gpu_container import GpuContainer
    from tests.engines.prepared import prepare
    from tests.hosts.host import TestHost

    mib = 1024
    taken: dict[str, list[tuple[float, float]]] = {"none": [], "zstd": []}
    with TestHost("trixie", "bench") as host:
        prepare(host, memory=(mib + 512) << 20)
        for number in range(options.rounds):
            for compress, found in taken.items():
                container = GpuContainer(host, f"c{number}{compress}").start(
                    "localhost/vgpu-test:glibc", mib=mib, interval_ms=1000
                )
                container.wait_for_step(2)
                found.append(exported(host, container.name, compress))
                own, shim = found[-1]
                out.say(f"podman export --compress {compress}: {own} s of podman's own, {shim} s in the shim")
    what = f"the shim's part of an export of {mib} MiB of GPU memory in driver mode (software GPU), seal included"
    return [
        row(f"image_podman_{compress}", what, "s", [shim for _, shim in found],
            baseline_what=f"podman's own part, --compress {compress}", baseline_raw=[own for own, _ in found])
        for compress, found in taken.items()
    ]  # fmt: skip


def exported(host: Any, name: str, compress: str) -> tuple[float, float]:
    """Seconds of podman itself, and seconds in the shim as its log has them."""
    from tests.engines.prepared import LOG

    command = ["podman", "container", "checkpoint", "--export", "/var/tmp/c.tar", "--compress", compress, name]
    began = time.monotonic()
    host.run(command, timeout=300)
    total = time.monotonic() - began
    host.run(["podman", "rm", "-f", name])
    lines = [line.partition(" phases ")[2] for line in host.read(LOG).splitlines() if " phases {" in line]
    shim = [doc for doc in map(json.loads, lines) if doc["verb"] == "checkpoint"][-1]["seconds"]
    return round(total - shim, 3), round(shim, 3)


PARTS = {"write": write_packs, "inspect": inspect, "tar": beside_tar, "podman": beside_podman}

if __name__ == "__main__":
    sys.exit(main())
