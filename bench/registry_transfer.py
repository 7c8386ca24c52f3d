"""How fast a checkpoint goes into a registry and out again, beside skopeo copying the same blobs over the same loopback.

    python -m bench.registry_transfer [--gib 2] [--folder DIR] [--out DIR] [--only simulator|debian]

Push includes comparing every chunk with its signed id and the sha256 of every pack; pull includes comparing every chunk
before it is written and synchronising the files; skopeo computes and checks sha256. The simulator runs in a process of
its own. Debian's docker-registry and skopeo run in a test host that shares this machine's network (needs root).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import multiprocessing
import os
import pathlib
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

from bench import measurement
from image_format.record import Container
from image_format.registry import Registry
from image_format.sealing import seal
from image_format.store import Store
from image_format.transport import Notes, look, open_source, pull_into_directory, push
from image_format.trust.keys import load_signing_key, make_node_key
from image_format.trust.policy import Policy
from tests.format.make_vectors import base_files, base_record
from tests.hosts.host import TestHost
from tests.simulators.registry import RegistrySimulator

GIB = 1 << 30
PIECE = 64 << 20
DEBIAN = "127.0.0.1:5057"
SHARED = "/bench"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--gib", type=float, default=2, help="size of the checkpoint")
    arguments.add_argument("--folder", help="where the files go (default: TMPDIR)")
    arguments.add_argument("--out", type=pathlib.Path, default=measurement.FOLDER, help="where the measurement goes")
    arguments.add_argument("--only", choices=("simulator", "debian"))
    options = arguments.parse_args()
    transcript = measurement.Transcript()
    transcript.say_load("before")
    with tempfile.TemporaryDirectory(prefix="vgpu-bench-", dir=options.folder) as folder:
        bench = Bench(pathlib.Path(folder), int(options.gib * GIB), transcript)
        rows: list[dict[str, Any]] = []
        if options.only != "debian":
            with simulator(bench.folder / "simulator") as address:
                rows += bench.run("simulator", address, None)
        if options.only != "simulator":
            with TestHost(binds=[(str(bench.folder), SHARED)]) as host, debian(host):
                rows += bench.run("debian", DEBIAN, host)
    transcript.say_load("after")
    print(measurement.write("registry-transfer", rows, log=transcript.text(), folder=options.out))


class Bench:
    """Two checkpoints of which one percent differs, and what is done with them."""

    def __init__(self, folder: pathlib.Path, size: int, transcript: measurement.Transcript) -> None:
        self.folder, self.size, self.say = folder, size, transcript.say
        (folder / "etc").mkdir()
        make_node_key(folder / "etc")
        self.policy = Policy.load(folder / "etc")
        self.first = self._checkpoint("first", 1)
        self.second = self._checkpoint("second", 2)

    def run(self, name: str, address: str, host: TestHost | None) -> list[dict[str, Any]]:
        """All rows of one registry."""
        notes = Notes.of_store(Store.open(self.folder / f"store-{name}").root)
        reference = f"{address}/bench/model"
        rows = []
        push_s, sent = self._timed(f"{name}: push", lambda: self._push(self.first, f"{reference}:1", notes))
        again_s, nothing = self._timed(f"{name}: push again", lambda: self._push(self.first, f"{reference}:1", notes))
        _, changed = self._timed(f"{name}: push, 1% changed", lambda: self._push(self.second, f"{reference}:2", notes))
        pull_s, _ = self._timed(f"{name}: pull", lambda: self._pull(f"{reference}:1", self.folder / f"out-{name}"))
        base: dict[str, dict[str, Any]] = {"up": {}, "down": {}}
        if host is not None:
            base = self._skopeo(host, reference)
        rows.append(
            measurement.row(f"registry_{name}_push", "push of new content", "GB/s", [self._rate(push_s)], **base["up"])
        )
        rows.append(
            measurement.row(
                f"registry_{name}_pull", "pull to a directory", "GB/s", [self._rate(pull_s)], **base["down"]
            )
        )
        rows.append(measurement.row(f"registry_{name}_again", "push of the same again", "s", [round(again_s, 3)]))
        rows.append(measurement.row(f"registry_{name}_again_bytes", "bytes it sent", "bytes", [float(nothing)]))
        share = round(100 * changed / sent, 3)
        rows.append(
            measurement.row(f"registry_{name}_changed", "push after 1% changed: share of the bytes", "%", [share])
        )
        shutil.rmtree(self.folder / f"out-{name}")
        return rows

    def _skopeo(self, host: TestHost, reference: str) -> dict[str, dict[str, Any]]:
        """The same blobs: out of the registry into a layout, and into another repository of another registry."""
        insecure = ["--src-tls-verify=false", "--dest-tls-verify=false"]
        copy = ["skopeo", "copy", "-q", *insecure]
        layout, target = f"oci:{SHARED}/layout:1", f"docker://{DEBIAN}/other/model:1"
        down_s, _ = self._timed("skopeo: out", lambda: _inside(host, [*copy, f"docker://{reference}:1", layout]))
        # The registry must not have the blobs anywhere, or skopeo would find and mount them.
        _inside(host, ["rm", "-rf", "/run/registry/docker"])
        up_s, _ = self._timed("skopeo: in", lambda: _inside(host, [*copy, layout, target]))
        shutil.rmtree(self.folder / "layout")
        return {
            "up": {"baseline_what": "skopeo copy of the same blobs", "baseline_raw": [self._rate(up_s)]},
            "down": {"baseline_what": "skopeo copy of the same blobs", "baseline_raw": [self._rate(down_s)]},
        }

    def _timed(self, what: str, work: Callable[[], int]) -> tuple[float, int]:
        started = time.monotonic()
        moved = work()
        seconds = time.monotonic() - started
        self.say(f"{what}: {seconds:.2f} s, {moved} bytes moved, {self._rate(seconds):.3f} GB/s of the checkpoint")
        return seconds, moved

    def _rate(self, seconds: float) -> float:
        return round(self.size / seconds / 1e9, 4)

    def _push(self, directory: pathlib.Path, reference: str, notes: Notes) -> int:
        with open_source(str(directory), self.policy, self.folder) as source, Registry(reference) as registry:
            return push(source, registry, notes).counts.sent

    def _pull(self, reference: str, directory: pathlib.Path) -> int:
        with Registry(reference) as registry:
            return pull_into_directory(registry, look(registry, self.policy), directory).counts.fetched

    def _checkpoint(self, name: str, generation: int) -> pathlib.Path:
        """Memory of random bytes; of the second one every hundredth chunk differs."""
        directory = self.folder / name
        directory.mkdir()
        for file, data in base_files().items():
            (directory / file).write_bytes(data)
        if generation == 1:
            with (directory / "memory.img").open("wb") as memory:
                for start in range(0, self.size, PIECE):
                    memory.write(os.urandom(min(PIECE, self.size - start)))
        else:
            shutil.copy(self.first / "memory.img", directory / "memory.img")
            with (directory / "memory.img").open("rb+") as memory:
                for start in range(0, self.size, 100 * (4 << 20)):
                    memory.seek(start)
                    memory.write(os.urandom(4096))
        record = dataclasses.replace(base_record(), generation=generation, container=Container("b" * 64, "podman"))
        seal(directory, record, load_signing_key(self.folder / "etc" / "node.key"))
        return directory


@contextlib.contextmanager
def simulator(folder: pathlib.Path) -> Iterator[str]:
    """The simulator in a process of its own, so that it does not share our interpreter's lock."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.Process(target=_serve, args=(folder, theirs), daemon=True)
    process.start()
    try:
        yield ours.recv()
    finally:
        ours.send("end")
        process.join(20)


def _serve(folder: pathlib.Path, pipe: Any) -> None:
    with RegistrySimulator(folder) as started:
        pipe.send(started.address)
        pipe.recv()


@contextlib.contextmanager
def debian(host: TestHost) -> Iterator[None]:
    """Debian's registry on this machine's loopback, its store in the host's memory."""
    host.write("/etc/bench-registry.yml", CONFIG)
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = host.popen(["docker-registry", "serve", "/etc/bench-registry.yml"], network=False, **quiet)
    try:
        deadline = time.monotonic() + 20
        while True:
            with contextlib.suppress(Exception), Registry(f"{DEBIAN}/x/y") as registry:
                registry.head_blob("sha256:" + "0" * 64)
                break
            if time.monotonic() > deadline:
                raise TimeoutError("docker-registry did not start")
            time.sleep(0.2)
        yield
    finally:
        process.kill()
        process.wait(10)


CONFIG = f"""\
version: 0.1
log:
  level: error
  accesslog:
    disabled: true
storage:
  filesystem:
    rootdirectory: /run/registry
http:
  addr: {DEBIAN}
"""


def _inside(host: TestHost, command: list[str]) -> int:
    process = host.popen(command, network=False)
    if process.wait(timeout=600):
        raise RuntimeError(f"{command} ended with {process.returncode}")
    return 0


if __name__ == "__main__":
    main()
