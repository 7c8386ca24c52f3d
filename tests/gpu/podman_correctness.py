"""PyTorch under podman in staged mode on a real GPU: what is computed must be bit-equal with and without checkpoints in between.

Two containers, each running its program twice over, the second time with checkpoints in the middle: a transformer decode with a
captured graph and a static cache (tokens equal) and a training loop in deterministic mode (loss stream equal). Each goes through
suspend and resume, leave-running, and export, removal and import. Real driver only: `python3 -m tests.gpu.podman_correctness`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass

from tests.gpu.podman_run import ARCHIVE, MACHINE, ROOT, Clock, configure, prepare, run_container, say
from tests.hosts import gpus
from tests.hosts.host import TestHost

GATE, STOP = "/tmp/gate", "/tmp/gate.stop"
LINES = "/tmp/lines"


@dataclass(frozen=True)
class Job:
    """A program of tests/gpu/programs, and how many steps of its second pass are enough."""

    name: str
    program: str
    options: tuple[str, ...]


JOBS = (
    Job("decode", "torch_decode.py", ("--gib", "16")),
    Job("train", "torch_train.py", ("--gib", "16", "--steps", "400", "--pause-s", "0.2")),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--row", default="trixie")
    parser.add_argument("--storage", choices=["disk", "memory"], default="disk")
    parser.add_argument("--archive", choices=["embedded", "reference"], default="embedded")
    parser.add_argument("--jobs", nargs="+", choices=[job.name for job in JOBS], default=[job.name for job in JOBS])
    args = parser.parse_args()
    if not gpus.is_real():
        print("this needs an NVIDIA GPU and PyTorch", file=sys.stderr)
        return 1
    say(f"{gpus.describe()}")
    with TestHost(args.row, "gpu-node", binds=(*gpus.binds(), ("/", "/run/machine"))) as host:
        prepare(host, args.row, storage=args.storage)
        configure(host, mode="staged", archive=args.archive, store="on" if args.archive == "reference" else "off")
        jobs = [job for job in JOBS if job.name in args.jobs]
        for job in jobs:
            host.copy_in(ROOT / "tests/gpu/programs" / job.program, f"{MACHINE}/opt/{job.program}")
        for job in jobs:
            run(host, job)
    print("gpu-correctness: ok", flush=True)
    return 0


def run(host: TestHost, job: Job) -> None:
    say(job.name)
    command = [sys.executable, f"/opt/{job.program}", *job.options, "--out", LINES, "--gate", GATE]
    run_container(host, job.name, "vgpu-runtime", command)
    wait_for(host, job, lambda lines: any("ready" in line for line in lines), "the first pass")
    host.run(["podman", "exec", job.name, "touch", GATE])
    for what, step in STEPS.items():
        steps = second_pass(host, job)
        clock = Clock()
        step(host, job.name)
        print(f"    {what}: {clock.seconds():.2f} s", flush=True)
        wait_for(host, job, lambda _lines, before=steps: second_pass(host, job) > before + 5, f"steps after {what}")
    host.run(["podman", "exec", job.name, "touch", STOP])
    last = wait_for(host, job, lambda lines: "done" in lines[-1], "the verdict")[-1]
    print(f"    {json.dumps(last)}", flush=True)
    assert last["ok"], f"{job.name}: the second pass differs from the first"
    host.run(["podman", "rm", "-f", "-t", "0", job.name])


def suspend_resume(host: TestHost, name: str) -> None:
    host.run(["vgpu", "suspend", name], timeout=120)
    host.run(["vgpu", "resume", name], timeout=120)


def leave_running(host: TestHost, name: str) -> None:
    host.run(["podman", "container", "checkpoint", "-R", "--export", ARCHIVE, "--compress", "none", name], timeout=300)


def export_import(host: TestHost, name: str) -> None:
    host.run(["podman", "container", "checkpoint", "--export", ARCHIVE, "--compress", "none", name], timeout=300)
    host.run(["podman", "rm", "-f", "-t", "0", name])
    host.run(["podman", "container", "restore", "--import", ARCHIVE], timeout=300)


STEPS = {"suspend and resume": suspend_resume, "leave-running": leave_running, "export and import": export_import}


def second_pass(host: TestHost, job: Job) -> int:
    return sum(line.get("pass") == 2 for line in read_lines(host, job))


def read_lines(host: TestHost, job: Job) -> list[dict]:
    text = host.run(["podman", "exec", job.name, "cat", LINES], check=False).stdout
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


def wait_for(host: TestHost, job: Job, is_there: object, what: str, timeout: float = 120) -> list[dict]:
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
