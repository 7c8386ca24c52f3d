"""How fast the staging worker moves GPU memory: out to host memory and to packs, in again with proof, and what a stop takes.

An application process allocates N GiB on GPU 0 and exports it; the agent's own StagingWorker does everything else, so what is
measured is what a checkpoint does, Python included. Nothing is compared with the driver here (tests/gpu has that).
Run on a machine with an NVIDIA GPU as `python -m bench.staging_rates --gib 32 [--only memory,packs,disk] [--disk DIR]
[--huge-pages] [--measurements FOLDER]`; `--huge-pages` needs root, sets nr_hugepages for the run and puts it back. With `--software-gpu` it
rehearses on the test double and writes nothing. Host memory needed: N GiB for `memory`, N GiB for `packs` after that.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.measurement import row, write
from gpu_state.deadline import Deadline
from gpu_state.driver_location import driver_folder
from gpu_state.nvml import Nvml
from gpu_state.staging.fd_lines import FDS_A_LINE, FdLines
from gpu_state.staging.worker_client import StagingWorker
from image_format.file_names import FRAGMENT_NAME, INDEX_NAME

if TYPE_CHECKING:
    from collections.abc import Iterator

GIB = 1 << 30
CHUNK = 4 << 20
NR_HUGEPAGES = Path("/proc/sys/vm/nr_hugepages")
HUGE_PAGE = 2 << 20
LIMIT_S = 300.0


def main() -> int:
    options = read_options()
    with contextlib.ExitStack() as stack:
        folder = software_gpu(stack, options.gib) if options.software_gpu else driver_folder()
        bench = Bench(options, folder, stack)
        for part in options.only.split(","):
            getattr(bench, part)()
    for entry in bench.rows:
        print(
            f"{entry['key']}: {entry['value']} {entry['unit']}  {entry.get('ratio', '')}  ({entry['what']}) raw {entry['raw']}"
        )
    if options.measurements and not options.software_gpu:
        print(write("staging-rates", bench.rows, folder=options.measurements, gpu=bench.gpu, driver=bench.driver).name)
    return 0


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=32)
    parser.add_argument("--object-mib", type=int, default=1024)
    parser.add_argument("--only", default="memory,packs,disk")
    parser.add_argument("--rounds", type=int, default=2, help="repetitions of fast steps")
    parser.add_argument(
        "--changed", type=float, default=0.1, help="share of memory that a step of the application rewrites"
    )
    parser.add_argument("--disk", type=Path, default=Path("/var/tmp"))
    parser.add_argument("--disk-gib", type=float, default=8, help="how much of it goes to the disk")
    parser.add_argument("--huge-pages", action="store_true")
    parser.add_argument("--software-gpu", action="store_true")
    parser.add_argument("--measurements", type=Path, help="folder for the measurement file")
    return parser.parse_args()


class Bench:
    def __init__(self, options: argparse.Namespace, folder: str | None, stack: contextlib.ExitStack) -> None:
        self.options = options
        self.folder = folder
        self.stack = stack
        self.rows: list[dict[str, Any]] = []
        self.label = f"{options.gib:g}gib"
        nvml = Nvml.load()
        self.driver = nvml.driver_release() if nvml else None
        self.gpu = None if options.software_gpu else gpu_name()

    # ---- suspend to memory, resume from it -------------------------------------------------------

    def memory(self) -> None:
        with self.started(self.options.gib) as (app, worker), tempfile.TemporaryDirectory(dir="/dev/shm") as shm:
            pool = self.pool_folder(shm, app.size)
            began = time.monotonic()
            store = {"kind": "memory", "name": f"vgpu-bench-{os.getpid()}.pool"} | ({"folder": pool} if pool else {})
            facts = worker.prepare(store, [], 0, Deadline(LIMIT_S))
            self.add(
                f"prepare_pool_{self.label}", "make, touch and pin the pool, ahead of the freeze", "s", [since(began)]
            )
            print(f"pool on huge pages: {facts['is_huge']}")
            first = self.ask(worker, "round")
            whole = f"all of {app.size / 1e9:.1f} GB beside the running application, to pinned host memory"
            self.add(f"rate_out_{self.label}", whole, "GB/s", [rate(app.size, first["seconds"])])
            self.still(worker)
            self.changed(app, worker)
            app.write(1.0)
            still = self.ask(worker, "final", set_aside=False)
            what = "everything changed, copied during the stop, hash included (suspend to memory)"
            self.add(f"suspend_data_{self.label}", what, "s", [still["seconds"]])
            self.add(f"rate_out_stopped_{self.label}", what, "GB/s", [rate(app.size, still["seconds"])])
            self.ask(worker, "drain")
            self.ask(worker, "fragment")
            self.bring_in(app, worker, None, f"rate_in_{self.label}", "pinned host memory")

    def still(self, worker: StagingWorker) -> None:
        done = [self.ask(worker, "final", set_aside=True) for _ in range(self.options.rounds)]
        assert all(report["changed_bytes"] == 0 for report in done)
        self.add(
            f"final_unchanged_{self.label}", "the stop when nothing has changed", "s", [r["seconds"] for r in done]
        )

    def changed(self, app: Application, worker: StagingWorker) -> None:
        app.write(self.options.changed)
        done = self.ask(worker, "final", set_aside=True)
        share = done["changed_bytes"] / app.size
        what = (
            f"the stop when {share:.0%} has changed, {done['set_aside_bytes'] / 1e9:.2f} GB of it set aside on the GPU"
        )
        self.add(f"final_changed_{self.label}", what, "s", [done["seconds"]])

    def pool_folder(self, shm: str, size: int) -> str | None:
        if not self.options.huge_pages:
            return shm
        wanted = size // HUGE_PAGE + 64
        before = NR_HUGEPAGES.read_text()
        self.stack.callback(NR_HUGEPAGES.write_text, before)
        NR_HUGEPAGES.write_text(str(wanted))
        print(f"huge pages: asked for {wanted}, got {NR_HUGEPAGES.read_text().strip()}")
        folder = self.stack.enter_context(tempfile.TemporaryDirectory(prefix="vgpu-huge-"))
        subprocess.run(["mount", "-t", "hugetlbfs", "none", folder], check=True)
        self.stack.callback(subprocess.run, ["umount", "-l", folder], check=True)
        return folder

    # ---- packs -----------------------------------------------------------------------------------

    def packs(self) -> None:
        self.to_packs(Path("/dev/shm"), "shm", self.options.gib)

    def disk(self) -> None:
        self.to_packs(self.options.disk, "disk", min(self.options.disk_gib, self.options.gib))

    def to_packs(self, parent: Path, where: str, gib: float) -> None:
        label = f"{gib:g}gib"
        with self.started(gib) as (app, worker), tempfile.TemporaryDirectory(dir=parent) as scratch:
            first, second = Path(scratch) / "first", Path(scratch) / "second"
            first.mkdir()
            second.mkdir()
            facts = worker.prepare(packs_in(first), [], 0, Deadline(LIMIT_S))
            key = "pinned_to_disk" if where == "disk" else f"pinned_to_{where}"
            self.add(key, f"pinned memory of the agent, packs in {parent}", "GiB", [facts["ring_bytes"] / GIB])
            seconds = self.dump(worker, first)
            what = f"{app.size / 1e9:.1f} GB to packs in {parent}, stop, drain and sync included"
            self.add(f"rate_packs_{where}_{label}", what, "GB/s", [rate(app.size, seconds)])
            write_index(first)
            worker.prepare(packs_in(second, first), [], 0, Deadline(LIMIT_S))
            again = self.dump(worker, second)
            key = "unchanged_second_dump" if where == "shm" else f"unchanged_second_dump_{where}"
            what = f"data phase of a second checkpoint of the unchanged process, packs in {parent}, {label}"
            self.rows.append(
                row(key, what, "s", [round(again, 4)], baseline_what="the first", baseline_raw=[round(seconds, 4)])
            )
            self.bring_in(app, worker, packs_in(first), f"rate_in_packs_{where}_{label}", f"packs in {parent}")

    def dump(self, worker: StagingWorker, directory: Path) -> float:
        began = time.monotonic()
        self.ask(worker, "round")
        self.ask(worker, "final", set_aside=True)
        worker.drain(Deadline(LIMIT_S))
        self.ask(worker, "fragment", path=str(directory / FRAGMENT_NAME))
        return since(began)

    # ---- in --------------------------------------------------------------------------------------

    def bring_in(
        self, app: Application, worker: StagingWorker, store: dict[str, Any] | None, key: str, where: str
    ) -> None:
        """Into new objects, after the application has gone: its memory may be most of the GPU's."""
        self.ask(worker, "let_go")
        app.close()
        began = time.monotonic()
        self.ask(worker, "create", objects=app.docs)
        created = since(began)
        began = time.monotonic()
        self.ask(worker, "fill", **({"store": store} if store else {}))
        filled = since(began)
        began = time.monotonic()
        assert self.ask(worker, "verify")["verified_bytes"] == app.size
        verified = since(began)
        what = f"{app.size / 1e9:.1f} GB from {where} into new objects; create {created:.3f} s, fill {filled:.3f} s, proof {verified:.3f} s"
        self.add(key, what, "GB/s", [rate(app.size, filled)])
        self.add(
            f"{key}_proved",
            f"the same with creation and proof, from {where}",
            "GB/s",
            [rate(app.size, created + filled + verified)],
        )
        self.ask(worker, "let_go")

    # ---- shared ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def started(self, gib: float) -> Iterator[tuple[Application, StagingWorker]]:
        app = Application(self.folder, int(gib * GIB) // CHUNK * CHUNK, self.options.object_mib << 20)
        worker = StagingWorker(self.folder)
        try:
            worker.prepare(None, [app.uuid], 0, Deadline(LIMIT_S))
            began = time.monotonic()
            worker.send_objects(app.docs, app.fds, Deadline(LIMIT_S))
            self.add(f"import_{gib:g}gib", f"import and map {len(app.docs)} objects in the worker", "s", [since(began)])
            app.close_fds()
            yield app, worker
        finally:
            worker.close()
            app.close()

    def ask(self, worker: StagingWorker, verb: str, **args: Any) -> dict[str, Any]:
        began = time.monotonic()
        result = worker.request(verb, args, Deadline(LIMIT_S)) if verb != "drain" else worker.drain(Deadline(LIMIT_S))
        print(f"{verb}: {since(began):.4f} s {dict(list(result.items())[:9])}", flush=True)
        return result

    def add(self, key: str, what: str, unit: str, raw: list[float]) -> None:
        if all(entry["key"] != key for entry in self.rows):
            self.rows.append(row(key, what, unit, [round(value, 4) for value in raw]))


class Application:
    """The process whose memory is moved; every 4 MiB of it differ."""

    def __init__(self, folder: str | None, size: int, object_bytes: int) -> None:
        ours, theirs = socket.socketpair()
        environment = dict(os.environ)
        if folder is not None:
            environment["LD_LIBRARY_PATH"] = f"{folder}:{environment.get('LD_LIBRARY_PATH', '')}"
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        with theirs:
            command = [sys.executable, __file__, "--as-application", str(theirs.fileno())]
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
        self.lines = FdLines(ours)
        self.size = size
        sizes = [object_bytes] * (size // object_bytes) + ([size % object_bytes] if size % object_bytes else [])
        self.docs: list[dict[str, Any]] = []
        self.fds: list[int] = []
        for start in range(0, len(sizes), FDS_A_LINE):
            result, fds = self.do(do="alloc", sizes=sizes[start : start + FDS_A_LINE])
            self.uuid = result["uuid"]
            for n, length in enumerate(sizes[start : start + FDS_A_LINE], start):
                self.docs.append({"name": f"1/{n}", "size": length, "uuid": self.uuid, "address": hex((n + 1) << 40)})
            self.fds += fds

    def do(self, **request: Any) -> tuple[dict[str, Any], list[int]]:
        self.lines.send(request)
        received = self.lines.receive()
        if received is None:
            raise RuntimeError("the application ended")
        return received

    def write(self, share: float) -> None:
        self.do(do="write", share=share)

    def close_fds(self) -> None:
        while self.fds:
            os.close(self.fds.pop())

    def close(self) -> None:
        self.close_fds()
        self.process.kill()
        self.process.wait(30)
        self.lines.close()


def application(fd: int) -> None:
    from gpu_state.staging import cuda_calls
    from gpu_state.staging.cuda_calls import DeviceContext, call
    from gpu_state.staging.device_objects import create_object

    cuda_calls.start()
    context, lines = DeviceContext(0), FdLines(socket.socket(fileno=fd))
    held, value = [], 1
    while (received := lines.receive()) is not None:
        request = received[0]
        new = [create_object(size, context) for size in request.get("sizes", ())]
        held += new
        share = request.get("share", 1.0)
        for item in new or held:
            chunks = item.size // CHUNK
            for chunk in range(max(1, int(chunks * share))):
                call("cuMemsetD32Async", item.address() + chunk * CHUNK, value, CHUNK // 4, 0)
                value += 1
        call("cuCtxSynchronize")
        lines.send({"uuid": context.uuid}, [item.fd for item in new])


def packs_in(directory: Path, *parents: Path) -> dict[str, Any]:
    return {"kind": "packs", "directory": str(directory), "parents": [str(parent) for parent in parents]}


def write_index(directory: Path) -> None:
    """The index that a seal would make of the fragment, so that the directory can be a parent."""
    shutil.copy(directory / FRAGMENT_NAME, directory / INDEX_NAME)


def rate(size: int, seconds: float) -> float:
    return size / seconds / 1e9


def since(began: float) -> float:
    return time.monotonic() - began


def gpu_name() -> str | None:
    done = subprocess.run(
        ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else None


def software_gpu(stack: contextlib.ExitStack, gib: float) -> str:
    from tests.software_gpu.build import build
    from tests.software_gpu.devices import make_devices

    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    make_devices(folder / "gpus", 1, int(gib * 3 * GIB) + (2 << 30), "bench")
    (folder / "nodes").mkdir()
    os.environ |= {"SOFTWARE_GPU_DIR": str(folder / "gpus"), "SOFTWARE_GPU_NODE_DIR": str(folder / "nodes")}
    return str(build())


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as-application"]:
        application(int(sys.argv[2]))
    else:
        sys.exit(main())
