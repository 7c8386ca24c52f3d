"""The main job on a real GPU: PyTorch under podman, frozen, exported, removed, imported; beside plain driver + CRIU + podman.

The container runs this machine's own Python (bind mounts over an overlay of its root), holds `--gib` GiB of tensors and
one captured CUDA graph, and checks its own memory at every step (programs/torch_counter.py).
Order: plain and ours in turn, `--rounds` times; then leave-running; then a tampered archive, which must be refused.
`--archive` names what ours writes: everything into podman's archive, or packs into the node's store (docs/store.md), or each in
turn. `--storage memory` puts /var/lib into memory, so that no disk stands between the two that are compared.
Writes the phases to docs/measurements (keys podman_export_phases, podman_import_phases, podman_export_<N>gib). `make gpu-demo`,
`make gpu-test`.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Self

from bench import measurement
from tests.engines.gpu_container import DEVICE
from tests.hosts import gpus, software_gpu
from tests.hosts.host import TestHost

ROOT = pathlib.Path(__file__).resolve().parents[2]
OUT = "/tmp/steps"
ARCHIVE = "/var/lib/containers/ckpt.tar"
MACHINE = "/var/lib/machine"
SHARED = ("usr", "opt")
LOG = "/var/log/vgpu/runtime.log"
LOW_LEVEL = {"trixie": "/usr/bin/crun", "testing": "/usr/sbin/runc"}


def main() -> int:
    args = parse_arguments()
    if not gpus.is_real() and not args.rehearse:
        print(
            "this machine has no NVIDIA GPU; --rehearse goes through the steps on the software driver", file=sys.stderr
        )
        return 1
    say(f"{gpus.describe()}")
    with TestHost(args.row, "gpu-node", binds=(*gpus.binds(), ("/", "/run/machine"))) as host:
        prepare(host, args.row, storage=args.storage)
        configure(host, mode=args.mode)
        rows = compare(host, args)
        if not args.only_compare:
            configure(host, archive="embedded")
            leave_running(host, args)
            refuse_tampered(host, args)
    if args.measurements and gpus.is_real():
        path = measurement.write(
            f"podman-{args.gib}gib" + ("-staged" if args.mode == "staged" else ""),
            rows,
            folder=args.measurements,
            **measurement.gpu_names(),
        )
        say(f"wrote {path.name}")
    print("gpu-demo: ok", flush=True)
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--row", default="trixie")
    parser.add_argument("--mode", choices=["driver", "staged"], default="driver")
    parser.add_argument("--archive", nargs="+", choices=["embedded", "reference"], default=["embedded"])
    parser.add_argument("--storage", choices=["disk", "memory"], default="disk")
    parser.add_argument("--only-compare", action="store_true", help="neither leave-running nor the tampered archive")
    parser.add_argument(
        "--rehearse", action="store_true", help="on software GPUs, with the C counter; measures nothing"
    )
    parser.add_argument("--measurements", type=pathlib.Path, help="folder for the measurement file")
    return parser.parse_args()


def prepare(host: TestHost, row: str, *, storage: str = "disk") -> None:
    """vgpu-snapshot as an administrator sets it up, and a root for the container that has the machine's Python."""
    say("installing vgpu-snapshot, 'vgpu setup podman'")
    if storage == "memory":
        in_memory = "mount -t tmpfs -o size=110G tmpfs /mnt && cp -a /var/lib/. /mnt/ && mount --bind /mnt /var/lib"
        host.run(["sh", "-c", in_memory])
    gpus.install(host)
    host.install_project()
    host.run(["vgpu", "setup", "podman", *gpus.setup_options(), "--low-level-runtime", LOW_LEVEL[row]], timeout=120)
    host.run(["sh", "-c", f"mkdir -p /var/log/vgpu && echo 'log = {LOG}' >>/etc/vgpu/runtime.conf"])
    host.run(["mkdir", "-p", MACHINE, "/run/upper", "/run/work"])
    host.run(["sh", "-c", "mount -t tmpfs tmpfs /run/upper && mkdir /run/upper/u /run/upper/w"])
    host.run(
        [
            "mount",
            "-t",
            "overlay",
            "-o",
            "lowerdir=/run/machine,upperdir=/run/upper/u,workdir=/run/upper/w",
            "overlay",
            MACHINE,
        ]
    )
    for mount in json.loads(host.read("/etc/cdi/vgpu.json"))["containerEdits"]["mounts"]:
        target = (
            MACHINE + mount["containerPath"]
        )  # a mount needs a file to lie on, and /usr is read-only in the container
        host.run(["sh", "-c", f"mkdir -p {target.rpartition('/')[0]} && touch {target}"])
    host.copy_in(ROOT / "tests/gpu/programs/torch_counter.py", f"{MACHINE}/opt/torch_counter.py")
    if not gpus.is_real():
        host.copy_in(software_gpu.programs("glibc")["counter"], f"{MACHINE}/opt/counter")
    host.copy_in(ROOT / "tests/gpu/plain_driver.py", "/var/lib/plain_driver.py")
    host.image("machine")


def configure(host: TestHost, **settings: str) -> None:
    """Settings in runtime.conf; one that is there already gets the new value."""
    for key, value in settings.items():
        host.run(["sed", "-i", f"/^{key} *=/d", "/etc/vgpu/runtime.conf"])
        host.run(["sh", "-c", f"echo '{key} = {value}' >>/etc/vgpu/runtime.conf"])


def run_container(host: TestHost, name: str, runtime: str, program: list[str], options: Sequence[str] = ()) -> None:
    """A container with all GPUs and this machine's Python."""
    mounts = [f"--volume={MACHINE}/{folder}:/{folder}:ro" for folder in SHARED]
    environment = ["-e", "HOME=/tmp", "-e", "PYTHONDONTWRITEBYTECODE=1", "-e", "PATH=/usr/bin:/bin"]
    host.run(
        ["podman", "run", "-d", "--runtime", runtime, "--device", DEVICE, "--name", name, *mounts, *environment, *options,
         "localhost/vgpu-test:machine", *program], timeout=120,
    )  # fmt: skip


def start(host: TestHost, name: str, runtime: str, gib: int) -> None:
    program = [sys.executable, "/opt/torch_counter.py", "--gib", str(gib), "--out", OUT]
    if not gpus.is_real():
        program = ["/opt/counter", "--mib", "32", "--interval", "50", "--out", OUT]
    run_container(host, name, runtime, program)
    wait_for_step(host, name, 3, timeout=120)


def steps(host: TestHost, name: str) -> list[str]:
    done = host.run(["podman", "exec", name, "cat", OUT], check=False)
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    wrong = [line for line in lines if not line.endswith(" ok")]
    if wrong:
        message = f"wrong GPU memory: {wrong[:3]}"
        raise AssertionError(message)
    return lines


def wait_for_step(host: TestHost, name: str, number: int, *, timeout: float = 60) -> int:
    ends = time.monotonic() + timeout
    while True:
        lines = steps(host, name)
        step = int(lines[-1].split()[1]) if lines else 0
        if step >= number:
            return step
        if time.monotonic() > ends:
            logs = host.run(["podman", "logs", name], check=False)
            message = f"{name} is at step {step}, not {number}: {logs.stdout[-2000:]}{logs.stderr[-2000:]}"
            raise AssertionError(message)
        time.sleep(0.1)


def compare(host: TestHost, args: argparse.Namespace) -> list[dict]:
    """Plain and ours in turn; one row a phase."""
    taken: dict[str, list[dict[str, float]]] = {"plain": [], **{archive: [] for archive in args.archive}}
    for number in range(args.rounds):
        taken["plain"].append(plain_cycle(host, args, number))
        for archive in args.archive:
            configure(host, archive=archive, store="on" if archive == "reference" else "off")
            taken[archive].append(our_cycle(host, args, f"{archive}{number}"))
    return [row for archive in args.archive for row in rows_of(archive, taken[archive], taken["plain"], args)]


def rows_of(archive: str, ours: list[dict], plain: list[dict], args: argparse.Namespace) -> list[dict]:
    """Each phase of our cycles, beside the plain ones where those have it too; the totals under keys of their own."""
    what = f"{args.gib} GiB of tensors, {args.mode} mode, {archive} archive"
    rows = []
    for part in ("export", "import"):
        for phase in sorted({phase for cycle in ours for phase in cycle if phase.startswith(part)}):
            base = [cycle[phase] for cycle in plain if phase in cycle]
            more = (
                {"baseline_what": "plain driver + CRIU + podman, same container", "baseline_raw": base} if base else {}
            )
            keys = [f"podman_{part}_phases", *([f"podman_{part}_{args.gib}gib"] if phase == f"{part}: total" else [])]
            raw = [cycle[phase] for cycle in ours if phase in cycle]
            rows += [measurement.row(key, f"{phase}, {what}", "s", raw, **more) for key in keys]
    return rows


def plain_cycle(host: TestHost, args: argparse.Namespace, number: int) -> dict[str, float]:
    """Driver lock + checkpoint, podman's own checkpoint, rm, import, restore + unlock; no part of ours in it."""
    name, runtime = f"plain{number}", LOW_LEVEL[args.row].rpartition("/")[2]
    say(f"plain driver + CRIU + podman, round {number + 1}")
    start(host, name, runtime, args.gib)
    with PlainDriver(host) as driver:
        clock = Clock()
        freeze = driver.tell("freeze", init_pid(host, name))
        began = Clock()
        host.run(["podman", "container", "checkpoint", "--export", ARCHIVE, "--compress", "none", name], timeout=300)
        taken = {"export: driver lock": freeze["lock"], "export: driver checkpoint": freeze["checkpoint"]}
        taken |= {"export: podman": began.seconds(), "export: total": clock.seconds()}
        step = last_exported_step(host)
        host.run(["podman", "rm", "-f", "-t", "0", name])
        clock = Clock()
        host.run(["podman", "container", "restore", "--import", ARCHIVE], timeout=300)
        restore_s = clock.seconds()
        thaw = driver.tell("thaw", init_pid(host, name))
        taken |= {
            "import: podman": restore_s,
            "import: driver restore": thaw["restore"],
            "import: driver unlock": thaw["unlock"],
        }
        taken |= {"import: total": clock.seconds()}
    go_on_and_remove(host, name, step)
    report(taken)
    return taken


def our_cycle(host: TestHost, args: argparse.Namespace, name: str) -> dict[str, float]:
    say(f"podman with --runtime vgpu-runtime: {name}")
    start(host, name, "vgpu-runtime", args.gib)
    clock = Clock()
    host.run(["podman", "container", "checkpoint", "--export", ARCHIVE, "--compress", "none", name], timeout=300)
    taken = {"export: total": clock.seconds()}
    taken |= runtime_phases(host, "checkpoint", "export", taken["export: total"])
    print(f"    the archive has {(host.root / ARCHIVE.lstrip('/')).stat().st_size / 1e9:.3f} GB", flush=True)
    step = last_exported_step(host)
    host.run(["podman", "rm", "-f", "-t", "0", name])
    clock = Clock()
    host.run(["podman", "container", "restore", "--import", ARCHIVE], timeout=300)
    taken |= {"import: total": clock.seconds()}
    taken |= runtime_phases(host, "restore", "import", taken["import: total"])
    go_on_and_remove(host, name, step)
    report(taken)
    return taken


def runtime_phases(host: TestHost, verb: str, part: str, total_s: float) -> dict[str, float]:
    """The phases that the shim noted in its log; what is left of the total is podman's own."""
    lines = [line.partition(" phases ")[2] for line in host.read(LOG).splitlines() if " phases {" in line]
    noted = [doc for doc in map(json.loads, lines) if doc["verb"] == verb][-1]
    taken = {f"{part}: shim {phase}": seconds for phase, seconds in noted["phases"].items()}
    return taken | {f"{part}: shim": noted["seconds"], f"{part}: rest of podman": round(total_s - noted["seconds"], 4)}


def leave_running(host: TestHost, args: argparse.Namespace) -> None:
    say("leave-running")
    start(host, "lively", "vgpu-runtime", args.gib)
    for _ in range(2):
        step = wait_for_step(host, "lively", 1)
        clock = Clock()
        host.run(
            ["podman", "container", "checkpoint", "-R", "--export", ARCHIVE, "--compress", "none", "lively"],
            timeout=300,
        )
        print(
            f"    {clock.seconds():.1f} s in all; shim: {runtime_phases(host, 'checkpoint', 'export', clock.seconds())}",
            flush=True,
        )
        wait_for_step(host, "lively", step + 3)
    host.run(["podman", "rm", "-f", "-t", "0", "lively"])


def refuse_tampered(host: TestHost, args: argparse.Namespace) -> None:
    """One bit of one page file changed: refused before anything runs, and the untouched copy still restores."""
    say("a tampered archive")
    flipped = flip_a_page_bit(host)
    refused = host.run(["podman", "container", "restore", "--import", ARCHIVE], check=False, timeout=300)
    print(f"    {refused.stderr.strip()}", flush=True)
    if refused.returncode == 0 or "signed digest" not in refused.stderr:
        message = "the tampered archive was not refused as such"
        raise AssertionError(message)
    host.run(["podman", "rm", "-f", "-a", "-t", "0"])
    flip_a_page_bit(host, flipped)
    host.run(["podman", "container", "restore", "--import", ARCHIVE], timeout=300)
    go_on_and_remove(host, "lively", wait_for_step(host, "lively", 1))


def flip_a_page_bit(host: TestHost, at: int | None = None) -> int:
    """Flip one bit in the middle of the archive, which is page content; returns where."""
    path = host.root / ARCHIVE.lstrip("/")
    place = path.stat().st_size // 2 if at is None else at
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))
    return place


def last_exported_step(host: TestHost) -> int:
    """The last step before the dump, out of the archive's root file system diff."""
    listed = host.run(["sh", "-c", f"tar -xOf {ARCHIVE} rootfs-diff.tar | tar -xOf - tmp/steps"]).stdout.splitlines()
    return int(listed[-1].split()[1])


def go_on_and_remove(host: TestHost, name: str, step: int) -> None:
    now = wait_for_step(host, name, step + 3)
    print(f"    went on from step {step}, is at {now}, counter, sums and graph right", flush=True)
    host.run(["podman", "rm", "-f", "-t", "0", name])


def init_pid(host: TestHost, name: str) -> str:
    return host.run(["podman", "inspect", "-f", "{{.State.Pid}}", name]).stdout.strip()


class PlainDriver:
    """plain_driver.py running in the host."""

    def __init__(self, host: TestHost) -> None:
        folder = gpus.setup_options()[1]
        self._process = host.popen(
            ["python3", "-S", "/var/lib/plain_driver.py"],
            env={"LD_LIBRARY_PATH": folder}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def __enter__(self) -> Self:
        self._answer()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.stdin.close()
        self._process.wait(timeout=30)

    def tell(self, verb: str, *pids: str) -> dict[str, float]:
        self._process.stdin.write(" ".join([verb, *pids]) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict:
        line = self._process.stdout.readline()
        if not line:
            message = f"plain_driver.py ended with status {self._process.wait(timeout=5)}"
            raise AssertionError(message)
        return json.loads(line)


class Clock:
    def __init__(self) -> None:
        self._began = time.monotonic()

    def seconds(self) -> float:
        return round(time.monotonic() - self._began, 4)


def report(taken: dict[str, float]) -> None:
    for phase, seconds in taken.items():
        print(f"    {phase:32} {seconds:8.3f} s", flush=True)


def say(text: str) -> None:
    print(f"\n== {time.strftime('%H:%M:%S')} {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
