"""The pause of a snapshot that leaves a decode running, at two sizes in one run: both are held, and snapshots come in turn.

One agent, one GPU; the program whose turn it is not holds its memory and rests, so that it takes no time of the GPU. Says for
each size the stop, the driver's own calls within it, and the stop without them. The part `pauses` of bench/staged_gpu.py.
"""

from __future__ import annotations

import argparse
import pathlib
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from bench import measurement
from bench.gpu_programs import (
    DRIVER_PHASES,
    PACKS,
    begin_decode,
    begin_second_pass,
    finish,
    longest_gap,
    second_pass,
    seconds,
    show,
    slowdown,
    snapshot,
)
from bench.parts import going_on
from tests.gpu.bare_node import BareNode, Program
from tests.hosts import gpus


@dataclass
class Pauses:
    """Of one size: what each snapshot cost."""

    program: Program
    gate: pathlib.Path
    gaps: list[float] = field(default_factory=list)
    driver: list[float] = field(default_factory=list)
    rest: list[float] = field(default_factory=list)
    costs: list[float] = field(default_factory=list)

    @property
    def resting(self) -> pathlib.Path:
        """While this file is there, the program stands still."""
        return self.gate.with_suffix(".rest")

    def take(self, node: BareNode, name: str) -> None:
        """One snapshot, the program being the only one at work."""
        self.resting.unlink(missing_ok=True)
        time.sleep(1.5)
        shutil.rmtree(PACKS, ignore_errors=True)
        began = time.monotonic()
        done = snapshot(node, self.program)
        wall = time.monotonic() - began
        time.sleep(0.5)
        self.resting.touch()
        times = second_pass(self.program)
        gap = longest_gap([t for t in times if t > began - 1.0])
        driver = round(sum(seconds(done, *DRIVER_PHASES)), 4)
        show(f"{name}: pause {gap:.3f} s, driver {driver:.3f} s, rest {gap - driver:.3f} s, wall {wall:.2f} s", done)
        shutil.rmtree(PACKS, ignore_errors=True)
        assert gap > 0.1 or not gpus.is_real(), "the process was never stopped"
        self.gaps.append(gap)
        self.driver.append(driver)
        self.rest.append(round(gap - driver, 4))
        self.costs += slowdown(times, began, done)


def pauses(args: argparse.Namespace, sizes: tuple[int, ...] = (16, 100)) -> Iterator[dict[str, Any]]:
    """Both sizes in one agent, one snapshot of each in turn; the one whose turn it is not holds its memory and rests."""
    with BareNode(software_memory=1 << 30) as node:
        held = {gib: Pauses(*begin_decode(node, gib, tokens=1500)) for gib in sizes}
        for gib, one in held.items():
            begin_second_pass(one.program, one.gate)
            one.resting.touch()
            print(f"    {gib} GiB are there", flush=True)
        for number in range(args.rounds):
            for gib in sizes if number % 2 == 0 else sizes[::-1]:
                with going_on(args, f"snapshot {number + 1} of {gib} GiB"):
                    say_memory()
                    held[gib].take(node, f"snapshot {number + 1} of {gib} GiB")
        for gib, one in held.items():
            one.resting.unlink(missing_ok=True)
            with going_on(args, f"tokens of {gib} GiB"):
                finish(one.program, one.gate)
    yield from pause_rows(held)


def pause_rows(held: dict[int, Pauses]) -> Iterator[dict[str, Any]]:
    """The larger sizes have the smallest one as their baseline: the pause is not to depend on the size."""
    small, first = min(held), held[min(held)]
    for gib, one in held.items():
        if not one.gaps:
            continue
        texts = (
            ("", "decode stopped for a complete snapshot, no CRIU, sizes in turn in one run", one.gaps, first.gaps),
            ("_driver", "the driver's lock, checkpoint, restore and unlock within the stop", one.driver, first.driver),
            ("_own", "the stop without the driver's own calls", one.rest, first.rest),
        )
        for suffix, what, raw, base in texts:
            more = (
                {"baseline_what": f"{small} GiB in the same run", "baseline_raw": base} if gib > small and base else {}
            )
            yield measurement.row(f"leave_running_pause{suffix}_{gib}gib", what, "s", raw, **more)
        if one.costs:
            what = f"decode step during the copy over before, {gib} GiB"
            yield measurement.row("running_copy_cost", what, "ratio", one.costs)


def say_memory() -> None:
    """A node short of memory stops longer: the driver waits for pages."""
    lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
    print(f"    {next(line for line in lines if line.startswith('MemAvailable'))}", flush=True)
