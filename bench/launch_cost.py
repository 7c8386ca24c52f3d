"""What the preload costs a loop of small launches: many short processes with and without it in turn, compared in pairs.

    python -m bench.launch_cost within driver torch [--pairs 24] [--measurements DIR] [--rehearse]

  within   in one process, cuLaunchKernel through the preload and the driver's own function past it, burst by burst in turn
  driver   bench/launch_cost.c: cuLaunchKernel of an empty kernel, where the gate is the largest share of the call
  torch    tests/gpu/programs/torch_launch.py: an elementwise kernel on a tiny tensor

A run of such a loop differs from the next one of the same program by more than the preload could add: by where its memory lies,
by the core's clock, by what else the core does. So:
- one process is one sample, of which the fastest block and the median block count, because memory lies otherwise in each;
- processes come in pairs that follow each other at once, in the order A B B A, so a drift is in both;
- all are measured on one core, which nothing else of this bench may use: neither their own other threads, nor the agent;
- they start side by side and wait at a gate, so that only one works at a time, and start-up costs no machine time;
- the median of the paired differences is given with an interval that assumes no distribution.
`within` needs none of that: what it compares shares process, memory, stream and core, and lies side by side in time.
An agent runs and is connected, as on a node; it does nothing meanwhile.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from bench import measurement
from bench.paired import Paired
from bench.parts import going_on, parser_of, run
from tests.gpu.bare_node import ROOT, BareNode, Program
from tests.hosts import gpus

SOURCE = ROOT / "bench" / "launch_cost.c"
TORCH = ROOT / "tests" / "gpu" / "programs" / "torch_launch.py"
SHAPES = {"burst_ns": "launches into an idle stream", "loop_ns": "launches and the wait for the last"}
CHOICES = {"fastest block": min, "median block": statistics.median}
BAR = 1.01
WITHIN_PROCESSES, WITHIN_BURSTS = 4, 2000
Samples = dict[tuple[str, str], list[float]]


def main() -> int:
    parser = parser_of(__doc__, PARTS, name="preload-launch")
    parser.add_argument("--pairs", type=int, default=24)
    parser.add_argument("--at-once", type=int, default=8, help="processes that are started side by side")
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)))
    args = parser.parse_args()
    keep_off(args.core)
    return run(args, PARTS)


def keep_off(core: int) -> None:
    """This process, and so all that it starts, leaves the core alone; the measured thread moves there by itself."""
    others = os.sched_getaffinity(0) - {core}
    if others:
        os.sched_setaffinity(0, others)


def driver(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The driver API, in C."""
    with BareNode() as node:
        program = compiled(node.folder)
        command = [
            *library_path(),
            str(program),
            *(() if gpus.is_real() else ("--bursts", "20", "--loops", "2", "--loop", "200")),
        ]
        yield from compared(args, node, command, "cuLaunchKernel of an empty kernel")


def within(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Through the preload and past it, in the same processes."""
    with BareNode() as node:
        program = compiled(node.folder)
        command = [*library_path(), str(program)]
        offset = subprocess.run(
            [*command, "--tell-direct"], env=node.environment, check=True, timeout=60, capture_output=True, text=True
        ).stdout.strip()
        command += ["--direct", offset, "--bursts", str(WITHIN_BURSTS if gpus.is_real() else 20)]
        through: list[float] = []
        direct: list[float] = []
        for number in range(WITHIN_PROCESSES):
            with going_on(args, f"process {number + 1}"):
                found = blocks_of(node, command, args.core)
                print(f"    {Paired.of(found['through_ns'], found['direct_ns']).text('ns')}", flush=True)
                through += found["through_ns"]
                direct += found["direct_ns"]
        yield within_row(through, direct)


def blocks_of(node: BareNode, command: list[str], core: int) -> dict[str, list[float]]:
    """Of one process."""
    one = Run(node, command, core, has_preload=True)
    try:
        one.program.wait_for(bool, "ready", timeout=90)
        return one.result()
    finally:
        one.program.end()
        node.programs.remove(one.program)


def within_row(through: list[float], direct: list[float]) -> dict[str, Any]:
    """Of all pairs of bursts together; `raw` is each hundredth by size, for there are thousands."""
    found = Paired.of(through, direct)
    name = (
        "cuLaunchKernel of an empty kernel, bursts into an idle stream, through the preload and past it in one process"
    )
    print(f"    {name}: {found.text('ns')}; bar {BAR} {'met' if found.ratio <= BAR else 'MISSED'}", flush=True)
    return measurement.row(
        "preload_launch", f"{name}; {found.ratio_text()}; difference {found.difference:.1f} ns; raw: hundredths", "ns",
        hundredths(through), baseline_what="the driver's own function in the same process", baseline_raw=hundredths(direct),
    )  # fmt: skip


def hundredths(values: list[float]) -> list[float]:
    """The values at each hundredth, smallest first."""
    return [round(value, 2) for value in statistics.quantiles(values, n=100)]


def torch(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """PyTorch."""
    if not gpus.is_real():
        print("    PyTorch needs a GPU: the rehearsal of `driver` goes through the same steps", flush=True)
        return
    with BareNode() as node:
        yield from compared(args, node, [sys.executable, str(TORCH)], "PyTorch, add_ on a tensor of 64 words")


def compared(args: argparse.Namespace, node: BareNode, command: list[str], what: str) -> Iterator[dict[str, Any]]:
    """All pairs, and a row of each shape and choice."""
    samples: dict[bool, Samples] = {True: {}, False: {}}
    order = [kind for number in range(args.pairs) for kind in ((True, False) if number % 2 == 0 else (False, True))]
    at_once = max(2, args.at_once // 2 * 2)  # both of a pair are in one batch
    for first in range(0, len(order), at_once):
        with going_on(args, f"pairs {first // 2 + 1} and on"):
            for pair in pairs_of(args, node, command, order[first : first + at_once]):
                for kind, found in pair.items():
                    for at, value in found.items():
                        samples[kind].setdefault(at, []).append(value)
    for at in sorted(samples[True]):
        yield row_of(what, at, samples[True][at], samples[False][at])


def pairs_of(
    args: argparse.Namespace, node: BareNode, command: list[str], kinds: list[bool]
) -> Iterator[dict[bool, dict[tuple[str, str], float]]]:
    """Start a batch side by side, and measure one after the other."""
    began = time.monotonic()
    runs = [Run(node, command, args.core, has_preload=kind) for kind in kinds]
    try:
        for one in runs:
            one.program.wait_for(bool, "ready", timeout=90)
        print(f"    {len(runs)} processes are ready after {time.monotonic() - began:.1f} s", flush=True)
        for first, second in zip(runs[::2], runs[1::2], strict=True):
            pair = {one.has_preload: one.measure() for one in (first, second)}
            shown = {kind: " ".join(f"{value:.1f}" for value in found.values()) for kind, found in pair.items()}
            print(f"    with {shown[True]}, without {shown[False]} ns", flush=True)
            yield pair
    finally:
        for one in runs:
            one.program.end()
            node.programs.remove(one.program)


class Run:
    """One process that waits at its gate."""

    def __init__(self, node: BareNode, command: list[str], core: int, *, has_preload: bool) -> None:
        self.has_preload = has_preload
        self.gate = node.folder / f"gate-{time.monotonic_ns()}"
        words = [*command, "--out", "@OUT@", "--gate", str(self.gate), "--core", str(core)]
        self.program: Program = node.start("launch", words, has_preload=has_preload)

    def result(self) -> dict[str, list[float]]:
        """Let it work; nanoseconds a launch of each block."""
        self.check_preload()
        self.gate.touch()
        return self.program.wait_for(lambda lines: any("result" in line for line in lines), "result", timeout=60)[-1]

    def measure(self) -> dict[tuple[str, str], float]:
        """(shape, choice) -> nanoseconds a launch."""
        found = self.result()
        return {
            (shape, choice): round(choose(found[shape]), 2) for shape in SHAPES for choice, choose in CHOICES.items()
        }

    def check_preload(self) -> None:
        """The comparison is worth nothing where a process is not what it is taken for."""
        maps = pathlib.Path(f"/proc/{self.program.process.pid}/maps").read_text()
        assert ("libvgpu.so" in maps) == self.has_preload, f"the preload is{' not' * self.has_preload} in the process"


def row_of(what: str, at: tuple[str, str], with_preload: list[float], without: list[float]) -> dict[str, Any]:
    """The medians over all processes, and the paired figures in words."""
    shape, choice = at
    found = Paired.of(with_preload, without)
    name = f"{what}: {SHAPES[shape]}, {choice} of a process"
    print(f"    {name}: {found.text('ns')}; bar {BAR} {'met' if found.ratio <= BAR else 'MISSED'}", flush=True)
    return measurement.row(
        "preload_launch", f"{name}; {found.ratio_text()}", "ns", with_preload,
        baseline_what="without the preload, in pairs", baseline_raw=without,
    )  # fmt: skip


def compiled(folder: pathlib.Path) -> pathlib.Path:
    """The C program, by whatever compiler is here."""
    program = folder / "launch_cost"
    for compiler in (["gcc"], ["cc"], [sys.executable, "-m", "ziglang", "cc"]):
        command = [*compiler, "-O2", str(SOURCE), "-o", str(program), "-ldl"]
        try:
            subprocess.run(command, check=True, timeout=120, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as problem:
            print(f"    {compiler[0]}: {getattr(problem, 'stderr', problem)}", flush=True)
            continue
        return program
    message = f"nothing here compiles {SOURCE}"
    raise RuntimeError(message)


def library_path() -> list[str]:
    """For a C program, which knows no other place of the driver's library."""
    if not gpus.is_real():
        return []
    folders = f"{gpus.setup_options()[1]}:{os.environ.get('LD_LIBRARY_PATH', '')}".rstrip(":")
    return ["env", f"LD_LIBRARY_PATH={folders}"]


PARTS = {"within": within, "driver": driver, "torch": torch}

if __name__ == "__main__":
    sys.exit(main())
