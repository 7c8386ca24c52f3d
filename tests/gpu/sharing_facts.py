"""What the driver does with memory and events that processes share, one line a fact: `python3 -m tests.gpu.sharing_facts`.

    events       interprocess events, both processes checkpointed and restored; where they live
    host         host memory made by cuMemCreate (HOST_NUMA), and the same imported by another process
    registered   a shared mapping that is registered with the driver
    nvml         whom NVML counts imported memory for
    slices       two processes on one GPU, one of them with a kernel that waits, before and after the driver's calls;
                 with --set-timeslice also whether a longer time slice, set after the restore, brings the switching back
    nccl         two NCCL ranks by the plain driver's calls

Design and refusals of staged mode rest on these; the log goes to docs/measurements. Every wait is bounded, every process is
killed whatever happens, and a fact that cannot be found out does not keep the next one. The processes that play the parts are
in sharing_roles.py. `--rehearse` takes the software driver, which refuses a part of it.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

from bench.parts import bounded, going_on
from tests.gpu.bare_node import ROOT, software_environment
from tests.gpu.sharing_parts import DriverCalls, Part, Refused, end_group, parts
from tests.hosts import gpus

FACT_S = 75
NCCL_S = 150
MIB = 2**20
REHEARSAL_BYTES = 64 * MIB
DEFAULT_SLICE, LONG_SLICE = 0, 3  # of nvidia-smi compute-policy
SMI_S = 20


# ---- the facts -----------------------------------------------------------------------------------------


def events(environment: dict[str, str]) -> Iterator[str]:
    with DriverCalls(environment) as driver, parts(environment, "event-maker", "event-opener") as (maker, opener):
        yield f"an interprocess event lives in {maker.do('shared_maps')} of its maker, {opener.do('shared_maps')} of who opened it"
        before = orders(maker, opener)
        codes = driver.codes([maker.pid, opener.pid])
        after = orders(maker, opener)
        yield (
            f"interprocess events, maker and opener taken away and given back ({codes}): "
            f"the opener's stream waits for the maker's before: {before}, after: {after}"
        )


def orders(maker: Part, opener: Part) -> str:
    """Whether a stream of one process waits for the event of the other, and goes on with it."""
    maker.do("record")
    opener.do("wait")
    waits = opener.do("is_waiting")
    maker.do("let_go")
    return "yes" if waits and opener.do("goes_on") else "no"


def host(environment: dict[str, str]) -> Iterator[str]:
    with DriverCalls(environment) as driver, parts(environment, "host-maker") as (alone,):
        yield f"a process with host memory made by cuMemCreate: {driver.codes([alone.pid])}; {content(alone)}"
    with DriverCalls(environment) as driver, parts(environment, "host-maker", "host-importer") as (_, importer):
        yield f"a process that imports such memory: {driver.codes([importer.pid])}; {content(importer)}"


def registered(environment: dict[str, str]) -> Iterator[str]:
    with DriverCalls(environment) as driver, parts(environment, "registered") as (alone,):
        yield f"a process with a registered shared mapping: {driver.codes([alone.pid])}; {content(alone)}"


def content(part: Part) -> str:
    """Whether its words are there, asked after the driver's calls; a lost process does not answer."""
    try:
        return "its content is right" if part.do("is_right", deadline_s=10) else "its content is WRONG"
    except (Refused, TimeoutError) as lost:
        return f"it is lost ({lost})"


def nvml(environment: dict[str, str]) -> Iterator[str]:
    size = int(environment["SHARING_FACTS_BYTES"])
    with DriverCalls(environment) as driver, parts(environment, "device-maker", "device-importer") as (maker, importer):
        before = driver.used()
        importer.do("take")
        shared = driver.used()
        maker.do("let_go")
        after = driver.used()
        shown = [
            f"{used.get(maker.pid, 0) // MIB} and {used.get(importer.pid, 0) // MIB} MiB"
            for used in (before, shared, after)
        ]
        yield (
            f"NVML counts for maker and importer of {size // MIB} MiB: {shown[0]} before the import, "
            f"{shown[1]} with it, {shown[2]} after the maker has let go"
        )


def slices(environment: dict[str, str]) -> Iterator[str]:
    for taken in ("both", "the one that waits", "the other"):
        with DriverCalls(environment) as driver, parts(environment, "spinner", "short-work") as (spinner, short):
            before = beside(spinner, short)
            pids = {"both": [spinner.pid, short.pid], "the one that waits": [spinner.pid], "the other": [short.pid]}[
                taken
            ]
            codes = driver.codes(pids)
            yield (
                f"one GPU, a kernel of one process waits while another process works; before: {before}; "
                f"{taken} taken away and given back ({codes}): {beside(spinner, short)}"
            )

    if environment.get("SHARING_FACTS_TIMESLICE"):
        yield with_time_slice(environment)


def with_time_slice(environment: dict[str, str]) -> str:
    """The same with the GPU's time slice set after the restore; it is the default again at the end."""
    with DriverCalls(environment) as driver, parts(environment, "spinner", "short-work") as (spinner, short):
        codes = driver.codes([spinner.pid])
        try:
            said = set_time_slice(LONG_SLICE)
            return f"taken away and given back ({codes}), then the time slice set to {LONG_SLICE} ({said}): {beside(spinner, short)}"
        finally:
            print(f"      the time slice is the default again ({set_time_slice(DEFAULT_SLICE)})", flush=True)


def set_time_slice(which: int) -> str:
    """By nvidia-smi, for all GPUs; what it says."""
    command = ["nvidia-smi", "compute-policy", f"--set-timeslice={which}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SMI_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as problem:
        return f"not to be set: {problem}"
    return f"status {done.returncode}: {' '.join((done.stdout + done.stderr).split())[:200]}"


def beside(spinner: Part, short: Part) -> str:
    """How long short work takes beside a kernel that waits, and how that kernel ends."""
    spinner.do("begin")
    try:
        slowest = f"{short.do('slowest_s', times=20, deadline_s=25)} s for the slowest of 20 pieces of work"
    except (Refused, TimeoutError) as problem:
        slowest = f"no work is done ({problem})"
    try:
        return f"{slowest}, the kernel ends with {spinner.do('end_it', deadline_s=5)}"
    except (Refused, TimeoutError) as problem:
        return f"{slowest}, the kernel does not end ({problem})"


def nccl(environment: dict[str, str]) -> Iterator[str]:
    if not gpus.is_real():
        raise Refused("NCCL needs GPUs")
    with tempfile.TemporaryDirectory(prefix="vgpu-facts-") as folder, DriverCalls(environment) as driver:
        out = pathlib.Path(folder, "ranks")
        program = ROOT / "tests/gpu/programs/torch_group_hold.py"
        command = [sys.executable, str(program), "--out", str(out), "--gib", "1"]
        group = subprocess.Popen(command, env=environment, cwd=ROOT, start_new_session=True)
        try:
            before = wait_for_steps(out, group)
            pids = ranks_of(group.pid)
            codes = driver.codes(pids)
            time.sleep(2.0)
            gone_on = len(out.read_text().splitlines()) - before
            alive = sum(pathlib.Path(f"/proc/{pid}").exists() for pid in pids)
            yield (
                f"{len(pids)} NCCL ranks by the plain driver: {codes}; "
                f"{'they went on' if gone_on > 5 else 'they are lost'} ({gone_on} steps in 2 s, {alive} processes alive)"
            )
        finally:
            end_group(group)


def wait_for_steps(out: pathlib.Path, group: subprocess.Popen[bytes], deadline_s: float = 90) -> int:
    """Until both ranks work; the lines so far."""
    ends = time.monotonic() + deadline_s
    while time.monotonic() < ends and group.poll() is None:
        lines = out.read_text().splitlines() if out.exists() else []
        if len(lines) > 20:
            return len(lines)
        time.sleep(0.1)
    raise TimeoutError(f"the ranks did not begin (status {group.poll()})")


def ranks_of(root: int) -> list[int]:
    """The processes below that hold the GPU's device files."""
    found, waiting = [], [root]
    while waiting:
        pid = waiting.pop()
        waiting += map(int, pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        files = pathlib.Path(f"/proc/{pid}/fd").iterdir()
        if any(os.path.realpath(file).startswith("/dev/nvidia") for file in files):
            found.append(pid)
    return sorted(found)


FACTS: dict[str, Callable[[dict[str, str]], Iterator[str]]] = {
    "events": events,
    "host": host,
    "registered": registered,
    "nvml": nvml,
    "slices": slices,
    "nccl": nccl,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("facts", nargs="*", help=f"only these of {', '.join(FACTS)}")
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument(
        "--set-timeslice",
        action="store_true",
        help="changes a setting of the GPUs for a while: only where they are yours",
    )
    parser.set_defaults(has_failed=False)
    args = parser.parse_args()
    if not gpus.is_real() and not args.rehearse:
        print("no NVIDIA GPU here; --rehearse takes the software driver", file=sys.stderr)
        return 1
    print(gpus.describe(), flush=True)
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(143))  # through the `finally` that kills the parts
    with tempfile.TemporaryDirectory(prefix="vgpu-facts-") as folder:
        environment = environment_of(pathlib.Path(folder))
        environment |= {"SHARING_FACTS_TIMESLICE": "1"} if args.set_timeslice and gpus.is_real() else {}
        for name in args.facts or FACTS:
            with going_on(args, name), bounded(NCCL_S if name in ("nccl", "slices") else FACT_S):
                tell(name, FACTS[name](environment))
    return 1 if args.has_failed else 0


def tell(name: str, lines: Iterator[str]) -> None:
    """One line a fact; a refusal is one as well."""
    try:
        for line in lines:
            print(f"{name}: {line}", flush=True)
    except Refused as refused:
        print(f"{name}: not to be had here: {refused}", flush=True)


def environment_of(folder: pathlib.Path) -> dict[str, str]:
    """With the driver's folder in the library path, and our own modules."""
    environment = dict(os.environ)
    environment["PYTHONPATH"] = f"{ROOT}:{environment.get('PYTHONPATH', '')}".rstrip(":")
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    if not gpus.is_real():
        environment |= software_environment(folder, 1 << 30, 2)
        return environment | {"SHARING_FACTS_BYTES": str(REHEARSAL_BYTES)}
    folders = f"{gpus.setup_options()[1]}:{environment.get('LD_LIBRARY_PATH', '')}".rstrip(":")
    off = {"NCCL_NVLS_ENABLE": "0"}  # NVLink multicast stays off
    return environment | off | {"LD_LIBRARY_PATH": folders, "SHARING_FACTS_BYTES": str(1 << 30)}


if __name__ == "__main__":
    sys.exit(main())
