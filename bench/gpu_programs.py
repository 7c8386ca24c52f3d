"""Starts the programs of tests/gpu/programs on a bare node, and reads figures off their lines and off the agent's phases.

What the benches of staged mode share; measures nothing by itself and prints only what the agent said. Where there is no GPU,
stand-ins take the programs' places, for rehearsals. Called by bench/staged_gpu.py and bench/group_gpu.py.
"""

from __future__ import annotations

import json
import pathlib
import statistics
import sys
import time
from typing import Any

from tests.gpu.bare_node import ROOT, BareNode, Program
from tests.hosts import gpus, software_gpu

PROGRAMS = ROOT / "tests" / "gpu" / "programs"
PACKS = pathlib.Path("/dev/shm/vgpu-bench-packs")
GIB = 2**30
DATA_PHASES = ("copy", "final", "drain")
DRIVER_PHASES = ("lock", "checkpoint", "restore", "unlock")


def snapshot(
    node: BareNode, program: Program, *, folder: pathlib.Path = PACKS, parents: list[str] | None = None
) -> dict[str, Any]:
    """What the shim does for a checkpoint that leaves the container running, without CRIU in the middle."""
    folder.mkdir(parents=True, exist_ok=True)
    args = program.names | {
        "image_path": str(folder),
        "leave_running": True,
        "parents": parents or [],
        "unfreeze_cgroup": None,
        "copy_deadline_s": 170.0,
    }
    done = node.request("freeze", args)
    back = node.request("release", {"lease": done["lease"], "keep": False})
    drained = node.request("drain", {"container": program.id}) if done.get("staged") else {"phases": []}
    done["phases"] = [*done["phases"], *back["phases"], *drained["phases"]]
    return done


def hold(node: BareNode, gib: int, *, has_preload: bool = True) -> Program:
    program = node.start("hold", python("torch_hold.py", "--gib", str(gib)), has_preload=has_preload)
    if gpus.is_real():
        program.wait_for(lambda lines: len(lines) > 3, "first steps")
    else:
        time.sleep(1.0)
    return program


def decode(node: BareNode, gib: int) -> tuple[Program, pathlib.Path]:
    program, gate = begin_decode(node, gib)
    begin_second_pass(program, gate)
    return program, gate


def begin_decode(node: BareNode, gib: int, *, tokens: int = 100000) -> tuple[Program, pathlib.Path]:
    """Start it; the file that lets it begin its second pass."""
    gate = node.folder / f"gate{gib}"
    options = ("--gib", str(gib), "--context", "4096", "--tokens", str(tokens), "--gate", str(gate))
    if gpus.is_real():
        return node.start("decode", python("torch_decode.py", *options)), gate
    stand_in = [sys.executable, str(PROGRAMS / "driver_group_hold.py"), "--ranks", "1", "--out", "@OUT@"]
    return node.start("decode", stand_in), gate


def begin_second_pass(program: Program, gate: pathlib.Path) -> None:
    if gpus.is_real():
        program.wait_for(lambda lines: any("ready" in line for line in lines), "first pass")
        gate.touch()
        program.wait_for(lambda lines: sum(line.get("pass") == 2 for line in lines) > 50, "second pass")
    else:
        time.sleep(1.0)


def second_pass(program: Program) -> list[float]:
    """When each token of the second pass came; the stand-in of a rehearsal has one pass."""
    return [line["t"] for line in program.lines() if "t" in line and line.get("pass", 2) == 2]


def finish(program: Program, gate: pathlib.Path) -> None:
    if not gpus.is_real():
        return
    gate.with_suffix(".stop").touch()
    lines = program.wait_for(lambda lines: "done" in lines[-1], "end of the second pass")
    assert lines[-1]["ok"], "tokens or padding differ"
    print(f"    {lines[-1]['tokens']} tokens equal to the pass without a checkpoint", flush=True)


def goes_on(program: Program) -> None:
    if not gpus.is_real():
        return
    before = len(program.lines())
    lines = program.wait_for(lambda lines: len(lines) > before + 40, "further steps")
    assert all(line["ok"] for line in lines)


def python(name: str, *options: str, out: bool = True) -> list[str]:
    if not gpus.is_real():
        return [str(software_gpu.programs("glibc")["counter"]), "--out", "@OUT@", "--mib", "64", "--interval", "20"]
    return [sys.executable, str(PROGRAMS / name), *(["--out", "@OUT@"] if out else []), *options]


def gpu_pid(program: Program) -> int:
    pids = (program.cgroup_folder / "cgroup.procs").read_text().split()
    for pid in pids:
        if "libcuda" in pathlib.Path(f"/proc/{pid}/maps").read_text():
            return int(pid)
    message = f"no GPU process in {program.cgroup}"
    raise AssertionError(message)


def longest_gap(times: list[float]) -> float:
    return round(max((b - a for a, b in zip(times, times[1:], strict=False)), default=0.0), 4)


def slowdown(times: list[float], began: float, done: dict[str, Any]) -> list[float]:
    """Median step during the rounds of copying over the median step before them."""
    copying = sum(seconds(done, "copy"))
    before = steps([t for t in times if t < began])
    during = steps([t for t in times if began < t < began + copying])
    if len(before) < 5 or len(during) < 5:
        return []
    return [round(statistics.median(during) / statistics.median(before), 4)]


def steps(times: list[float]) -> list[float]:
    return [b - a for a, b in zip(times, times[1:], strict=False)]


def seconds(doc: dict[str, Any], *phases: str) -> list[float]:
    return [float(item["seconds"]) for item in doc["phases"] if item["phase"].split(" ")[0] in phases]


def rates(doc: dict[str, Any], gib: int, *phases: str) -> list[float]:
    taken = sum(seconds(doc, *phases))
    return [round(gib * GIB / taken / 1e9, 2)] if taken else []


def show(what: str, doc: dict[str, Any]) -> None:
    phases = ", ".join(f"{item['phase']} {float(item['seconds']):.3f}" for item in doc["phases"])
    print(f"    {what}: {phases}", flush=True)
    staged = doc.get("staged") or {}
    for number, done in enumerate(staged.get("rounds", ())):
        print(f"      round {number}: {json.dumps(done)}", flush=True)
    for reason in (doc.get("driver_reasons") or {}).values():
        print(f"      driver's way: {reason}", flush=True)
