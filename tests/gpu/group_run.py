"""Groups of processes that share GPU memory, taken away and given back without an engine: `python3 -m tests.gpu.group_run [PART...]`.

Every program (group_subjects.py) runs as one container of a bare node in staged mode. Between its first lines and its verdict it
is suspended and resumed, and snapshot while it goes on, three times over; a program on one of two GPUs is also resumed on the
other one. The program checks its own memory, tokens or losses, so a verdict says that nothing changed. While it is suspended no
line may come and none of its processes may hold GPU memory. Ranks that wait for each other in kernels have a GPU each or are left
out, because the driver does not take a waiting kernel off its GPU after a restore; --crowded runs them all the same, and then they
are expected to fail. Every program has a time limit, a failed one is told and the next one begins. `--rehearse` takes the software driver and, for programs that need PyTorch or CuPy, a stand-in; that is no GPU result.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
import traceback
from typing import Any, Self

from bench.parts import bounded
from tests.gpu.bare_node import ROOT, BareNode, Program
from tests.gpu.group_subjects import PARTS, Subject, ring_program
from tests.hosts import gpus
from vgpu_errors import VgpuError

PACKS = pathlib.Path("/dev/shm/vgpu-group-packs")
REQUEST_S, LINES_S, END_S, STILL_S = 40.0, 25.0, 25.0, 0.4
TAIL, REFUSALS = 3000, 4
SOFTWARE_DEVICES, SOFTWARE_MEMORY = 2, 1 << 30
CROWDED = "left out: ranks that wait for each other in kernels need a GPU each (docs/multi-gpu.md); --crowded runs them"
SHOWN_S = 0.01  # shorter phases are not told
READ_NVML = """
import json
from gpu_state.nvml import Nvml
nvml = Nvml.load()
devices = nvml.devices() if nvml else []
print(json.dumps([[device.uuid, device.free_bytes, device.process_bytes] for device in devices]))
"""


def main() -> int:
    args = parse_arguments()
    if not gpus.is_real() and not args.rehearse:
        print("no NVIDIA GPU here; --rehearse takes the software driver", file=sys.stderr)
        return 1
    say(f"{gpus.describe()}; parts {' '.join(args.parts)}")
    subjects = [subject for part in args.parts for subject in PARTS[part](is_real=gpus.is_real())]
    verdicts = {subject.name: verdict_of(subject, args) for subject in subjects}
    say("verdicts")
    for name, verdict in verdicts.items():
        print(f"    {name:28} {verdict}", flush=True)
    return 1 if any(verdict.startswith("FAILED") for verdict in verdicts.values()) else 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {' '.join(PARTS)}; default: all")
    parser.add_argument("--cycles", type=int, default=3, help="suspends and snapshots of each program")
    parser.add_argument("--limit-s", type=float, default=60.0, help="time of one program, all of its steps together")
    parser.add_argument("--only", nargs="+", default=(), metavar="NAME", help="of the chosen parts only these programs")
    parser.add_argument(
        "--crowded", action="store_true", help="also ranks that wait in kernels for others on their GPU"
    )
    parser.add_argument("--rehearse", action="store_true")
    args = parser.parse_args()
    unknown = [part for part in args.parts if part not in PARTS]
    if unknown:
        parser.error(f"no part {unknown[0]}; there are {' '.join(PARTS)}")
    args.parts = args.parts or list(PARTS)
    return args


def verdict_of(subject: Subject, args: argparse.Namespace) -> str:
    """Run one program through all of it; never raises."""
    if args.only and subject.name not in args.only:
        return "left out: not asked for"
    say(f"{subject.name}{' (a stand-in)' if subject.is_stand_in else ''}")
    began, failure = time.monotonic(), "FAILED"
    try:
        with (
            bounded(args.limit_s),
            BareNode(software_devices=SOFTWARE_DEVICES, software_memory=SOFTWARE_MEMORY) as node,
        ):
            flow = Flow(node, subject, args.cycles)
            if flow.is_crowded and args.crowded:
                failure = "failed, as expected of ranks on one GPU"
            verdict = CROWDED if flow.is_crowded and not args.crowded else flow.run()
    except Exception as problem:  # noqa: BLE001 - the other programs are worth having
        place = traceback.extract_tb(problem.__traceback__)[-1]
        verdict = f"{failure}: {type(problem).__name__}: {str(problem)[:600]} ({pathlib.Path(place.filename).name}:{place.lineno})"
    finally:
        shutil.rmtree(PACKS, ignore_errors=True)
    print(f"    {verdict} ({time.monotonic() - began:.1f} s)", flush=True)
    return verdict


class Flow:
    """One program on one node."""

    def __init__(self, node: BareNode, subject: Subject, cycles: int) -> None:
        self.node, self.subject, self.cycles = node, subject, cycles
        self.gate = node.folder / "gate"
        self.says = node.folder / "program.log"
        self.devices = [device["uuid"] for device in node.request("hello", {}, REQUEST_S)["devices"]]
        self.gone: set[int] = set(subject.guests)
        self.is_crowded = subject.spins and subject.ranks > len(self.devices)

    def run(self) -> str:
        """Every step in order; the verdict."""
        if len(self.devices) < self.subject.gpus:
            return f"left out: needs {self.subject.gpus} GPUs, there are {len(self.devices)}"
        self.program = self.start()
        try:
            with Step("ready") as step:
                self.wait(lambda: self.is_ready() or self.skipped(), "the first lines", timeout=45)
                step.note(f"processes {self.program.pids()}")
            if self.skipped():
                return f"left out: {self.skipped()}"
            self.gate.touch()
            self.goes_on()
            for number in range(1, self.cycles + 1):
                self.suspend_and_resume(str(number))
                self.leave_running(str(number))
                if number == 1 and self.subject.exporter_leaves:
                    self.leave()
            if self.subject.swaps and len(self.devices) > 1:
                self.swap()
            return self.finish()
        except BaseException:
            self.show_output()
            raise
        finally:
            self.program.end()

    def start(self) -> Program:
        words = {"@GATE@": str(self.gate), "@RING@": "", "@GPUS@": str(len(self.devices))}
        if "@RING@" in self.subject.command:
            words["@RING@"] = str(ring_program(self.node.folder))
        command = [words.get(word, word) for word in self.subject.command]
        return self.node.start(self.subject.name.replace(" ", "-"), command, says=self.says)

    # ---- steps ---------------------------------------------------------------------------------------

    def suspend_and_resume(self, name: str, device_map: dict[str, str] | None = None) -> None:
        before = read_nvml(self.node)
        pids = self.program.pids()
        with Step(f"suspend {name}") as step:
            done = self.request(step, "suspend", self.program.names)
            step.tell(done)
            assert done.get("staged"), f"nothing was staged: {done.get('driver_reasons')}"
        with Step("  nothing runs, nothing held") as step:
            step.note(self.check_suspended(pids, before))
        with Step(f"resume {name}") as step:
            back = self.node.request(
                "resume", {"container": self.program.id, "device_map": device_map or {}}, REQUEST_S
            )
            step.tell(back)
        with Step("  goes on"):
            self.goes_on()

    def request(self, step: Step, verb: str, args: dict[str, Any]) -> dict[str, Any]:
        """Once more where a rank came or went in the middle of it, which is refused and leaves the others as they were."""
        for _ in range(REFUSALS if self.subject.guests else 0):
            try:
                return self.node.request(verb, args, REQUEST_S)
            except VgpuError as problem:
                step.note(f"[refused: {str(problem)[:160]}]")
                self.goes_on()
        return self.node.request(verb, args, REQUEST_S)

    def check_suspended(self, pids: list[int], before: dict[str, tuple[int, dict[int, int]]]) -> str:
        """No line comes, and NVML knows none of the processes any more."""
        time.sleep(STILL_S / 4)  # a line that was on its way
        lines = sum(self.counts().values())
        time.sleep(STILL_S)
        assert sum(self.counts().values()) == lines, "lines came while it was suspended"
        now = read_nvml(self.node)
        holders = sorted({pid for _, held in now.values() for pid in held} & set(pids))
        assert not holders, f"processes {holders} still hold GPU memory: {now}"
        held = sum(size for _, sizes in before.values() for pid, size in sizes.items() if pid in pids)
        freed = sum((now[uuid][0] or 0) - (before[uuid][0] or 0) for uuid in now)
        return f"{held / 2**30:.2f} GiB were held, {freed / 2**30:.2f} GiB more are free"

    def leave_running(self, name: str) -> None:
        """What the shim does for a checkpoint that leaves the container running, without CRIU in the middle."""
        shutil.rmtree(PACKS, ignore_errors=True)
        PACKS.mkdir(parents=True)
        order = self.program.names | {
            "image_path": str(PACKS), "leave_running": True, "parents": [], "unfreeze_cgroup": None, "copy_deadline_s": REQUEST_S,
        }  # fmt: skip
        since = time.monotonic()
        with Step(f"leave-running {name}") as step:
            done = self.request(step, "freeze", order)
            step.tell(done)
            step.tell(self.node.request("release", {"lease": done["lease"], "keep": False}, REQUEST_S))
        with Step("  drain and goes on") as step:
            if done.get("staged"):
                self.node.request("drain", {"container": self.program.id}, REQUEST_S)
            assert done.get("staged"), f"nothing was staged: {done.get('driver_reasons')}"
            self.goes_on()
            step.note(f"stood still for {self.longest_gap(since):.3f} s")

    def leave(self) -> None:
        """The process that made the memory ends; the others keep it."""
        with Step("the exporter ends") as step:
            self.gate.with_suffix(".leave").touch()
            self.wait(lambda: any(line.get("left") for line in self.program.lines()), "the exporter's end")
            self.gone.add(0)
            self.goes_on()
            step.note(f"processes {self.program.pids()}")

    def swap(self) -> None:
        """Resume on the other of the first two GPUs; the driver wants every GPU in the map."""
        one, other, *rest = self.devices
        self.suspend_and_resume("on the other GPU", {one: other, other: one} | {uuid: uuid for uuid in rest})
        held = {uuid: set(sizes) & set(self.program.pids()) for uuid, (_, sizes) in read_nvml(self.node).items()}
        print(f"      processes by GPU: { {uuid[:12]: sorted(pids) for uuid, pids in held.items()} }", flush=True)
        assert held.get(other), f"nothing of it is on GPU {other}"

    def finish(self) -> str:
        """The program's own verdict."""
        with Step("verdict") as step:
            if self.subject.is_text:
                self.program.process.send_signal(signal.SIGTERM)
            self.gate.with_suffix(".stop").touch()
            status = self.program.process.wait(timeout=END_S)
            verdicts = [line for line in self.program.lines() if "done" in line]
            step.note(f"status {status} {json.dumps(verdicts)[:600]}")
        counts = self.counts()
        missing = set(range(self.subject.ranks)) - self.gone - {line["rank"] for line in verdicts}
        is_right = status == 0 and (self.subject.is_text or (not missing and all(line["ok"] for line in verdicts)))
        assert is_right, f"status {status}, ranks without a verdict {sorted(missing)}"
        return f"ok: {sum(counts.values())} lines of {len(counts)} ranks, every one right"

    # ---- what the program says -----------------------------------------------------------------------

    def counts(self) -> dict[int, int]:
        """Rank -> lines of steps; a wrong one is a failure at once."""
        found: dict[int, int] = {}
        for rank, is_right, line in self.steps():
            assert is_right, f"wrong GPU memory: {line}"
            found[rank] = found.get(rank, 0) + 1
        return found

    def steps(self) -> list[tuple[int, bool, object]]:
        if self.subject.is_text:
            text = self.program.out.read_text() if self.program.out.exists() else ""
            lines = [line for line in text.splitlines() if line.startswith("rank ")]
            return [(int(line.split()[1]), line.endswith(" ok"), line) for line in lines]
        return [(line["rank"], line.get("ok", True), line) for line in self.program.lines() if "step" in line]

    def is_ready(self) -> bool:
        if self.subject.is_text:
            return set(self.counts()) >= set(range(self.subject.ranks)) - self.gone
        return {line["rank"] for line in self.program.lines() if "ready" in line} == set(range(self.subject.ranks))

    def skipped(self) -> str | None:
        lines = [] if self.subject.is_text else self.program.lines()
        return next((str(line["skipped"]) for line in lines if "skipped" in line), None)

    def goes_on(self) -> None:
        """Some more right steps of every rank that is there."""
        before = self.counts()
        ranks = set(range(self.subject.ranks)) - self.gone

        def has_more() -> bool:
            now = self.counts()
            return all(now.get(rank, 0) >= before.get(rank, 0) + self.subject.more for rank in ranks)

        self.wait(has_more, f"{self.subject.more} more steps of ranks {sorted(ranks)}")

    def wait(self, is_there: Any, what: str, timeout: float = LINES_S) -> None:
        ends = time.monotonic() + timeout
        while not is_there():
            status = self.program.process.poll()
            if status is not None and not is_there():
                message = f"{what} did not come: the program ended with {status}"
                raise AssertionError(message)
            if time.monotonic() > ends:
                message = f"{what} did not come in {timeout:.0f} s; lines {self.counts()}"
                raise AssertionError(message)
            time.sleep(0.05)

    def longest_gap(self, since: float) -> float:
        """Of the lines of all ranks together; the programs' clock is this one."""
        if self.subject.is_text:
            return 0.0
        times = sorted(line["t"] for line in self.program.lines() if line.get("t", 0) > since)
        return max((late - early for early, late in itertools.pairwise(times)), default=0.0)

    def show_output(self) -> None:
        text = self.says.read_text(errors="replace") if self.says.exists() else ""
        print(f"      the program's output: {text[-TAIL:]}", flush=True)


class Step:
    """One step: its time and what is worth saying of it, in one line, whether it fails or not."""

    def __init__(self, name: str) -> None:
        self._name, self._words = name, ""

    def __enter__(self) -> Self:
        self._began = time.monotonic()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        failed = "  FAILED" if kind is not None else ""
        print(f"    {self._name:28} {time.monotonic() - self._began:7.3f} s {self._words}{failed}", flush=True)

    def note(self, words: str) -> None:
        self._words += f" {words}"

    def tell(self, done: dict[str, Any]) -> None:
        """What the agent answered: bytes, phases that took long, processes that went the driver's way."""
        if done.get("staged"):
            self.note(f"{done['staged']['bytes'] / 2**30:.2f} GiB")
        slow = [item for item in done["phases"] if float(item["seconds"]) >= SHOWN_S]
        self.note(", ".join(f"{item['phase']} {float(item['seconds']):.3f}" for item in slow))
        for reason in (done.get("driver_reasons") or {}).values():
            self.note(f"[driver's way: {reason}]")


def read_nvml(node: BareNode) -> dict[str, tuple[int, dict[int, int]]]:
    """GPU uuid -> free bytes and what each process holds, read in a process of its own."""
    folders = [str(node.environment.get("LD_LIBRARY_PATH", ""))]
    if gpus.is_real():
        folders.insert(0, gpus.setup_options()[1])
    environment = {**node.environment, "LD_LIBRARY_PATH": ":".join(filter(None, folders))}
    environment.pop("LD_PRELOAD", None)
    done = subprocess.run(
        [sys.executable, "-c", READ_NVML],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    read = json.loads(done.stdout)
    return {uuid: (free, {int(pid): size for pid, size in held.items()}) for uuid, free, held in read}


def say(text: str) -> None:
    print(f"\n== {time.strftime('%H:%M:%S')} {text}", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main())
