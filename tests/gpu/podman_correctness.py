"""PyTorch under podman in staged mode on a real GPU: what is computed must be bit-equal with and without checkpoints in between.

Each job is a container that runs its program twice over, the second time with checkpoints in the middle: a transformer decode with
a captured graph and a static cache (tokens equal), a training loop in deterministic mode (loss stream equal), and both split over
two ranks on two GPUs with NCCL (`tensor-parallel`, `ddp`). Each goes through suspend and resume, leave-running, and export, removal
and import, and then says its verdict; a job has a time limit, and a failed one is told before the next begins.
The two-rank jobs want `--row testing`: ranks hold sockets, which CRIU before 4.2 cannot dump on newer kernels.
Real driver only: `python3 -m tests.gpu.podman_correctness`. `--rehearse` goes through the steps of the two-rank jobs on two
software GPUs with vmm_share.py, which holds TCP connections and shared memory as ranks do; that is no GPU result.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace

from bench.parts import bounded
from tests.gpu.podman_run import ARCHIVE, MACHINE, ROOT, Clock, configure, prepare, run_container, say
from tests.hosts import gpus
from tests.hosts.host import TestHost

GATE, STOP = "/tmp/gate", "/tmp/gate.stop"
LINES, COPIED = "/tmp/lines", "/var/tmp/lines"
PROGRAMS = ROOT / "tests" / "gpu" / "programs"
LIMIT_S = 240.0
SHARED_MEMORY = "1g"  # podman's own 64 MiB are little for NCCL's segments
LINES_S, CALL_S = 60.0, 120
# The container's network may look different where it is restored, its loopback does not; no io_uring, which CRIU cannot dump;
# no multicast objects and no host memory by cuMemCreate, which the driver cannot bring back.
RANK_VARIABLES = (
    "NCCL_SOCKET_IFNAME=lo",
    "NCCL_CUMEM_HOST_ENABLE=0",
    "NCCL_NVLS_ENABLE=0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST=1",
    "NVSHMEM_DISABLE_NVLS=1",
    "UV_USE_IO_URING=0",
)
REHEARSAL_PACKAGES = "/opt/site"


@dataclass(frozen=True)
class Job:
    """A program of tests/gpu/programs, what it imports beside it, and how its container is started and checkpointed."""

    name: str
    program: str
    options: tuple[str, ...]
    modules: tuple[str, ...] = ()
    ranks: int = 1
    variables: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()  # of `podman container checkpoint` and `restore`
    python: str = sys.executable

    @property
    def files(self) -> tuple[str, ...]:
        return (self.program, *self.modules)

    @property
    def podman_options(self) -> tuple[str, ...]:
        shared = () if self.ranks == 1 else (f"--shm-size={SHARED_MEMORY}",)
        return (*shared, *(word for variable in self.variables for word in ("-e", variable)))


RANKS = {
    "modules": ("ranks.py", "torch_ranks.py"),
    "ranks": 2,
    "variables": RANK_VARIABLES,
    "flags": ("--tcp-established",),
}
JOBS = (
    Job("decode", "torch_decode.py", ("--gib", "16")),
    Job("train", "torch_train.py", ("--gib", "16", "--steps", "400", "--pause-s", "0.2")),
    Job("ddp", "torch_ddp.py", ("--gib", "4", "--steps", "40", "--pause-s", "0.05"), **RANKS),
    Job("tensor-parallel", "torch_tensor_parallel.py", ("--gib", "4", "--tokens", "1000", "--layers", "8"), **RANKS),
)


def main() -> int:
    args = parse_arguments()
    if not gpus.is_real() and not args.rehearse:
        print("this needs an NVIDIA GPU and PyTorch", file=sys.stderr)
        return 1
    say(f"{gpus.describe()}")
    jobs = [job if gpus.is_real() else rehearsal(job) for job in JOBS if job.name in args.jobs]
    failed = []
    with TestHost(args.row, "gpu-node", binds=(*gpus.binds(), ("/", "/run/machine"))) as host:
        prepare(host, args.row, storage=args.storage)
        configure(host, mode="staged", archive=args.archive, store="on" if args.archive == "reference" else "off")
        for name in sorted({file for job in jobs for file in job.files}):
            host.copy_in(PROGRAMS / name, f"{MACHINE}/opt/{name}")
        if not gpus.is_real():
            carry_bindings(host)
        if any(job.ranks > 1 for job in jobs):
            lock_by_nftables(host)
        failed += [job.name for job in jobs if not goes_well(host, job, args.limit_s)]
    print(f"gpu-correctness: {'ok' if not failed else 'FAILED: ' + ', '.join(failed)}", flush=True)
    return 1 if failed else 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", default="trixie")
    parser.add_argument("--storage", choices=["disk", "memory"], default="disk")
    parser.add_argument("--archive", choices=["embedded", "reference"], default="embedded")
    parser.add_argument("--jobs", nargs="+", choices=[job.name for job in JOBS], default=["decode", "train"])
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="time of one job, its verdict included")
    parser.add_argument("--rehearse", action="store_true")
    return parser.parse_args()


def rehearsal(job: Job) -> Job:
    """The same steps with a program that needs no PyTorch."""
    options = ("--mib", "4", "--tcp", "--ranks", "2", "--devices", "2")
    variables = (*job.variables, f"PYTHONPATH={REHEARSAL_PACKAGES}")
    return replace(
        job, program="vmm_share.py", modules=("ranks.py", "turns.py"), options=options, variables=variables, ranks=2,
        flags=("--tcp-established",), python="/usr/bin/python3",
    )  # fmt: skip


def lock_by_nftables(host: TestHost) -> None:
    """CRIU stops established TCP connections by iptables unless it is told otherwise, and the hosts have none."""
    host.run(["mkdir", "-p", "/etc/criu"])
    for runtime in ("runc", "crun"):
        host.run(["sh", "-c", f"echo 'network-lock nftables' >>/etc/criu/{runtime}.conf"])


def carry_bindings(host: TestHost) -> None:
    """cuda-bindings of this interpreter, for the container's own."""
    import cuda.bindings

    folder = os.path.dirname(os.path.dirname(cuda.bindings.__file__))
    host.run(["mkdir", "-p", f"{MACHINE}{REHEARSAL_PACKAGES}"])
    host.run(["cp", "-r", f"/run/machine{folder}", f"{MACHINE}{REHEARSAL_PACKAGES}/cuda"], timeout=120)


def goes_well(host: TestHost, job: Job, limit_s: float) -> bool:
    """One job within its time; what went wrong is told, and its container removed."""
    say(job.name)
    clock = Clock()
    try:
        with bounded(limit_s):
            run(host, job)
    except Exception as problem:  # noqa: BLE001 - the other jobs are worth having
        place = traceback.extract_tb(problem.__traceback__)[-1]
        print(f"    FAILED: {type(problem).__name__}: {str(problem)[:3000]} ({place.name}:{place.lineno})", flush=True)
        return False
    finally:
        host.run(["podman", "rm", "-f", "-t", "0", job.name], check=False, timeout=CALL_S)
        print(f"    ({clock.seconds():.1f} s in all)", flush=True)
    return True


def run(host: TestHost, job: Job) -> None:
    clock = Clock()
    host.run(["rm", "-f", COPIED])
    command = [job.python, f"/opt/{job.program}", *job.options, "--out", LINES, "--gate", GATE]
    run_container(host, job.name, "vgpu-runtime", command, job.podman_options)
    wait_for(host, job, lambda lines: ranks_with("ready", lines) == job.ranks, "the first pass")
    print(f"    the first pass: {clock.seconds():.2f} s", flush=True)
    host.run(["podman", "exec", job.name, "touch", GATE])
    wait_for(host, job, lambda lines: second_pass(lines, job) > 0, "the second pass")
    for what, step in STEPS.items():
        steps = second_pass(read_lines(host, job), job)
        clock = Clock()
        step(host, job)
        print(f"    {what}: {clock.seconds():.2f} s", flush=True)
        more = Clock()
        wait_for(
            host, job, lambda lines, before=steps: second_pass(lines, job) > before + 5, f"steps after {what}"
        )  # fmt: skip
        print(f"      goes on after step {steps}: {more.seconds():.2f} s", flush=True)
    host.run(["podman", "exec", job.name, "touch", STOP])
    last = wait_for(host, job, lambda lines: ranks_with("done", lines) == job.ranks, "the verdict")
    verdicts = [line for line in last if "done" in line]
    print(f"    {json.dumps(verdicts)}", flush=True)
    assert all(verdict["ok"] for verdict in verdicts), f"{job.name}: the second pass differs from the first"


def suspend_resume(host: TestHost, job: Job) -> None:
    for verb in ("suspend", "resume"):
        done = host.run(["vgpu", verb, job.name], timeout=CALL_S)
        print(f"      {done.stdout.strip()}", flush=True)


def leave_running(host: TestHost, job: Job) -> None:
    checkpoint(host, job, "-R")


def export_import(host: TestHost, job: Job) -> None:
    checkpoint(host, job)
    host.run(["podman", "rm", "-f", "-t", "0", job.name])
    clock = Clock()
    host.run(["podman", "container", "restore", *job.flags, "--import", ARCHIVE], timeout=CALL_S)
    print(f"      import {clock.seconds():.2f} s", flush=True)


def checkpoint(host: TestHost, job: Job, *more: str) -> None:
    clock = Clock()
    command = ["podman", "container", "checkpoint", *more, *job.flags, "--export", ARCHIVE, "--compress", "none"]
    host.run([*command, job.name], timeout=CALL_S)
    size = (host.root / ARCHIVE.lstrip("/")).stat().st_size
    print(f"      checkpoint {clock.seconds():.2f} s, {size / 1e9:.3f} GB", flush=True)


STEPS: dict[str, Callable[[TestHost, Job], None]] = {
    "suspend and resume": suspend_resume,
    "leave-running": leave_running,
    "export and import": export_import,
}


def ranks_with(word: str, lines: list[dict]) -> int:
    """How many ranks have written such a line; a program of one process names none."""
    return len({line.get("rank", 0) for line in lines if word in line})


def second_pass(lines: list[dict], job: Job) -> int:
    """Steps of the second pass that every rank has made."""
    made = [sum(line.get("pass") == 2 and line.get("rank", 0) == rank for line in lines) for rank in range(job.ranks)]
    return min(made)


def read_lines(host: TestHost, job: Job) -> list[dict]:
    """Of the container, also when its program has ended with the verdict."""
    done = host.run(["podman", "exec", job.name, "cat", LINES], check=False)
    text = done.stdout
    if done.returncode != 0:
        host.run(["podman", "cp", f"{job.name}:{LINES}", COPIED], check=False)
        text = host.run(["cat", COPIED], check=False).stdout
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


def wait_for(
    host: TestHost, job: Job, is_there: Callable[[list[dict]], bool], what: str, timeout: float = LINES_S
) -> list[dict]:
    ends = time.monotonic() + timeout
    while True:
        lines = read_lines(host, job)
        if lines and is_there(lines):
            return lines
        if time.monotonic() > ends:
            logs = host.run(["podman", "logs", job.name], check=False)
            message = f"{job.name}: no sign of {what}: {lines[-3:]} {logs.stdout[-1500:]}{logs.stderr[-1500:]}"
            raise AssertionError(message)
        time.sleep(0.3)


if __name__ == "__main__":
    sys.exit(main())
