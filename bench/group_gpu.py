"""The figures of a group of processes on real GPUs: two NCCL ranks that hold 32 GiB each, on two GPUs, as one container.

    python -m bench.group_gpu suspend pause rate nccl_cost [--gib 32] [--measurements DIR] [--rehearse]

  suspend    group_suspend_2x32gib, group_resume_2x32gib    to memory and back, wall time
  rate       group_rate_out_2x32gib                         both GPUs at once, over one of them alone in the same run
  pause      group_pause_2x32gib                            the ranks stopped for a complete snapshot that leaves them running
  graph      group_pause_graph_2x32gib                      the same with the collective in a CUDA graph
  nccl_cost  nccl_preload_cost                              a training step with all_reduce, with the preload over without
  plain      group_plain_2x32gib                            the driver's own checkpoint of the ranks; it cannot restore them

The plain driver takes NCCL ranks away and then cannot bring them back (tests/gpu/sharing_facts.py), so `suspend` has no
baseline. Every other baseline is taken in the same run. NVLink multicast stays off.
`--rehearse` goes through the steps with tests/gpu/programs/driver_group_hold.py on the software driver and writes nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import shutil
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

from bench import measurement
from bench.gpu_programs import DRIVER_PHASES, PACKS, PROGRAMS, longest_gap, python, seconds, show, snapshot
from bench.paired import Paired
from bench.parts import going_on, parser_of, run
from tests.gpu.bare_node import BareNode, Program
from tests.hosts import gpus

RANKS = 2
# Multicast objects, and host memory made by cuMemCreate, cannot be taken away and given back: NCCL does without either.
NCCL = ("NCCL_NVLS_ENABLE=0", "NCCL_CUMEM_HOST_ENABLE=0")
BESIDE = ("find", "inventory", "export", "copy", "drain", "let")  # while the application runs
PAUSE_BAR_S, RATE_BAR, COST_BAR = 1.2, 1.8, 1.005
WARM_STEPS = 10


def main() -> int:
    parser = parser_of(__doc__, PARTS, name="group")
    parser.add_argument("--gib", type=int, default=32, help="GiB of each rank")
    parser.add_argument("--block-steps", type=int, default=150, help="nccl_cost: steps of a block")
    parser.add_argument("--pairs", type=int, default=12, help="nccl_cost: blocks of each kind")
    parser.add_argument("--share", action="store_true", help="rehearsal: ranks import each other's memory")
    parser.add_argument("--nccl", nargs="*", default=NCCL, metavar="NAME=VALUE", help="NCCL's variables")
    return run(parser.parse_args(), PARTS, lambda: shutil.rmtree(PACKS, ignore_errors=True))


# ---- suspend and rate --------------------------------------------------------------------------------


def suspend(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Suspend to memory and resume, and what the data plane reached meanwhile."""
    with node_of(args, reserve_gib=RANKS * args.gib + 2) as node:
        group = start_group(node, args)
        out_s, in_s, out_rate, in_rate = suspend_rounds(args, node, group, RANKS)
        named = f"{RANKS} NCCL ranks x {args.gib} GiB on {RANKS} GPUs, wall time; the plain driver cannot restore them"
        yield from row_of(args, "group_suspend", f"suspend to memory, {named}", "s", out_s)
        yield from row_of(args, "group_resume", f"resume from memory, {named}", "s", in_s)
        yield from row_of(args, "group_rate_in", "resume: making, filling and proving, both GPUs", "GB/s", in_rate)
        group.end()
        if "rate" not in args.parts:  # which would do the same
            return
        args.group_rates = out_rate


def rate(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Bytes over time out of both GPUs at once, and out of each of them alone."""
    group_rates: list[float] = getattr(args, "group_rates", [])
    alone: list[float] = []
    with node_of(args, reserve_gib=(1 if group_rates else RANKS) * args.gib + 2) as node:
        if not group_rates:
            group = start_group(node, args)
            group_rates = suspend_rounds(args, node, group, RANKS)[2]
            group.end()
        for device in range(RANKS):
            with going_on(args, f"GPU {device} alone"):
                single = start_single(node, args, device)
                alone += suspend_rounds(args, node, single, 1)[2]
                single.end()
    base = {"baseline_what": "one GPU alone, the same run", "baseline_raw": alone} if alone else {}
    for row in row_of(
        args, "group_rate_out", "suspend: first copy to last, both GPUs at once", "GB/s", group_rates, **base
    ):
        verdict(f"rate over one GPU {row.get('ratio')}", row.get("ratio", 0) >= RATE_BAR, f">= {RATE_BAR}")
        yield row


def suspend_rounds(
    args: argparse.Namespace, node: BareNode, program: Program, ranks: int
) -> tuple[list[float], list[float], list[float], list[float]]:
    """Seconds out and in, GB/s out and in, of each round."""
    out_s: list[float] = []
    in_s: list[float] = []
    out_rate: list[float] = []
    in_rate: list[float] = []
    for number in range(args.rounds):
        with going_on(args, f"round {number + 1}"):
            if gpus.is_real():
                print(f"    the reserve was ready after {node.wait_for_reserve():.1f} s", flush=True)
            began = time.monotonic()
            done = node.request("suspend", program.names)
            taken = time.monotonic() - began
            show(f"suspend {number + 1}: {taken:.3f} s", done)
            began = time.monotonic()
            back = node.request("resume", {"container": program.id})
            out_s.append(round(taken, 4))
            in_s.append(round(time.monotonic() - began, 4))
            show(f"resume {number + 1}: {in_s[-1]:.3f} s", back)
            out_rate.append(round(done["staged"]["bytes"] / done["staged"]["copied_s"] / 1e9, 2))
            in_rate.append(round(back["fill"]["bytes"] / back["fill"]["seconds"] / 1e9, 2))
            print(f"      {done['staged']['bytes']} bytes, out {out_rate[-1]} GB/s, in {in_rate[-1]} GB/s", flush=True)
            go_on(program, ranks)
    return out_s, in_s, out_rate, in_rate


# ---- leave-running -------------------------------------------------------------------------------------


def pause(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """How long ranks that all_reduce without end stand still for a complete snapshot."""
    yield from pauses(args, "group_pause", "all_reduce steps")


def graph(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The same where the collective is in a CUDA graph, as in a tensor-parallel decode."""
    yield from pauses(args, "group_pause_graph", "all_reduce in a CUDA graph", "--graph")


def pauses(args: argparse.Namespace, key: str, what: str, *options: str) -> Iterator[dict[str, Any]]:
    gaps, stops, drivers, walls = [], [], [], []
    with node_of(args) as node:
        group = start_group(node, args, *options)
        for number in range(args.rounds):
            with going_on(args, f"round {number + 1}"):
                shutil.rmtree(PACKS, ignore_errors=True)
                time.sleep(1.0)
                began = time.monotonic()
                done = snapshot(node, group)
                wall = time.monotonic() - began
                go_on(group, RANKS)
                gap = max(longest_gaps(group, began))
                phases = sum(float(item["seconds"]) for item in done["phases"] if word(item["phase"]) not in BESIDE)
                driver = sum(seconds(done, *DRIVER_PHASES))
                show(f"snapshot {number + 1}: gap {gap:.3f} s, by phases {phases:.3f} s, wall {wall:.2f} s", done)
                print(f"      driver {driver:.3f} s, gaps of the ranks {longest_gaps(group, began)}", flush=True)
                assert gap > 0.05 or not gpus.is_real(), "the ranks were never stopped"
                gaps.append(gap)
                stops.append(round(phases, 4))
                drivers.append(round(driver, 4))
                walls.append(round(wall, 3))
    text = f"{RANKS} NCCL ranks x {args.gib} GiB, {what}, stopped for a complete snapshot"
    for row in row_of(args, key, f"{text}: longest gap between two steps of a rank, no CRIU", "s", gaps):
        verdict(f"pause {row['value']} s", row["value"] <= PAUSE_BAR_S, f"<= {PAUSE_BAR_S} s")
        yield row
    yield from row_of(args, f"{key}_agent", f"{text}: sum of the agent's phases of the stop", "s", stops)
    yield from row_of(args, f"{key}_driver", f"{text}: the driver's own calls within", "s", drivers)
    yield from row_of(args, f"{key}_wall", f"{text}: all of it, the copy included", "s", walls)


def longest_gaps(group: Program, since: float) -> list[float]:
    """Of each rank, by its own lines."""
    lines = [line for line in group.lines() if line["t"] > since - 1.0]
    return [longest_gap([line["t"] for line in lines if line["rank"] == rank]) for rank in range(RANKS)]


def word(phase: str) -> str:
    return phase.split(" ", maxsplit=1)[0]


# ---- what the preload costs ------------------------------------------------------------------------------


def nccl_cost(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A training step with all_reduce: groups with and without the preload, alive at the same time, at work in turn.

    Two groups of each kind, because every process lies in memory in its own way; blocks in the order A B B A, so that a
    drift of the machine is in both; of each block the median step of rank 0.
    """
    with_preload: list[float] = []
    without: list[float] = []
    with node_of(args) as node:
        groups = [(kind, BlockGroup(node, args, has_preload=kind)) for kind in (True, False, False, True)]
        for _, group in groups:
            group.wait_until_ready()
        for number in range(args.pairs):
            pair = groups[:2] if number % 2 == 0 else groups[2:]
            with going_on(args, f"pair {number + 1}"):
                medians = {kind: group.block() for kind, group in pair}
                with_preload.append(medians[True])
                without.append(medians[False])
                print(
                    f"    pair {number + 1}: with {medians[True]:.4f} ms, without {medians[False]:.4f} ms", flush=True
                )
    if not with_preload:
        return
    found = Paired.of(with_preload, without)
    print(f"    {found.text('ms')}", flush=True)
    row = measurement.row(
        "nccl_preload_cost",
        f"training step with 8 all_reduces of 32 MiB, {RANKS} ranks, median of {args.block_steps} steps; {found.ratio_text()}",
        "ms", with_preload, baseline_what="without the preload, alternating", baseline_raw=without,
    )  # fmt: skip
    verdict(f"ratio of medians {row['ratio']}, paired {found.ratio:.4f}", found.ratio <= COST_BAR, f"<= {COST_BAR}")
    yield row


class BlockGroup:
    """A group that works a block of steps when it is told to."""

    def __init__(self, node: BareNode, args: argparse.Namespace, *, has_preload: bool) -> None:
        name = "with" if has_preload else "without"
        self.args = args
        self.gate = node.folder / f"gate-{name}-{len(node.programs)}"
        options = ("--model", "--blocks", str(args.block_steps), "--gate", str(self.gate))
        self.program = node.start(name, command(args, *options, gib=0), has_preload=has_preload)
        self.blocks = 0

    def wait_until_ready(self) -> None:
        self.program.wait_for(lambda lines: sum("ready" in line for line in lines) == RANKS, "ready", timeout=150)

    def block(self) -> float:
        """The median step of one block, in ms."""
        number, self.blocks = self.blocks, self.blocks + 1
        pathlib.Path(f"{self.gate}.{number}").touch()
        lines = self.program.wait_for(
            lambda lines: sum(line.get("block") == number for line in lines) == RANKS, f"block {number}", timeout=60
        )
        assert all(line["ok"] for line in lines), "a wrong word"
        taken = next(line["seconds"] for line in lines if line.get("block") == number and line["rank"] == 0)
        return round(statistics.median(taken[WARM_STEPS:] or taken) * 1e3, 5)


# ---- the plain driver ------------------------------------------------------------------------------------


def plain(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The driver's own checkpoint of the ranks, both at once, and what becomes of their restore. They are lost with it."""
    from tests.gpu.sharing_parts import DriverCalls

    with node_of(args) as node, DriverCalls(node.environment) as driver:
        group = start_group(node, args, has_preload=False)
        pids = [int(pid) for pid in (group.cgroup_folder / "cgroup.procs").read_text().split() if uses_gpu(pid)]
        taken = 0.0
        for name in DRIVER_PHASES:
            began = time.monotonic()
            answers = driver.each(name, pids, deadline_s=90)
            took = time.monotonic() - began
            print(f"    {name}: {answers} in {took:.3f} s", flush=True)
            taken += took if name in ("lock", "checkpoint") else 0.0
            codes = [code for code, _ in answers.values()]
            if name == "checkpoint" and not any(codes):
                yield from row_of(
                    args, "group_plain", "the driver's own checkpoint of both ranks at once; its restore of them fails",
                    "s", [round(taken, 4)],
                )  # fmt: skip


def uses_gpu(pid: str) -> bool:
    with contextlib.suppress(OSError):
        files = pathlib.Path(f"/proc/{pid}/fd").iterdir()
        return any("nvidia" in str(file.resolve()) for file in files)
    return False


# ---- parts -------------------------------------------------------------------------------------------------


def node_of(args: argparse.Namespace, *, reserve_gib: int = 0) -> BareNode:
    reserve = f"{reserve_gib}G" if gpus.is_real() else "256M" if reserve_gib else "0"
    return BareNode(reserve=reserve, software_devices=RANKS)


def start_group(node: BareNode, args: argparse.Namespace, *options: str, has_preload: bool = True) -> Program:
    began = time.monotonic()
    group = node.start("group", command(args, *options, gib=args.gib), has_preload=has_preload)
    group.wait_for(lambda lines: steps_of(lines, RANKS) > 5, "first steps", timeout=150)
    print(f"    the group works after {time.monotonic() - began:.1f} s", flush=True)
    return group


def start_single(node: BareNode, args: argparse.Namespace, device: int) -> Program:
    """One process with one rank's memory, alone on one GPU."""
    one = ["env", f"CUDA_VISIBLE_DEVICES={device}", *command(args, "--ranks", "1", gib=args.gib)]
    single = node.start(f"gpu{device}", one)
    single.wait_for(lambda lines: steps_of(lines, 1) > 5, "first steps", timeout=100)
    return single


def command(args: argparse.Namespace, *options: str, gib: int) -> list[str]:
    if gpus.is_real():
        return ["env", *args.nccl, *python("torch_group_hold.py", "--gib", str(gib), *options)]
    kept = [option for option in options if option not in ("--model", "--graph")]
    share = ["--share"] if args.share else []
    program = str(PROGRAMS / "driver_group_hold.py")
    return [sys.executable, program, "--out", "@OUT@", "--mib", "32", "--interval", "0.02", *share, *kept]


def go_on(program: Program, ranks: int) -> None:
    """Twenty further steps of each rank, all of them right."""
    before = steps_of(program.lines(), ranks)
    lines = program.wait_for(lambda lines: steps_of(lines, ranks) > before + 20, "further steps", timeout=60)
    assert all(line["ok"] for line in lines), "a wrong word"


def steps_of(lines: list[dict[str, Any]], ranks: int) -> int:
    """How many steps the slowest rank has written."""
    return min(sum(line["rank"] == rank and "step" in line for line in lines) for rank in range(ranks))


def row_of(
    args: argparse.Namespace, key: str, what: str, unit: str, raw: list[float], **baseline: Any
) -> Iterator[dict[str, Any]]:
    if raw:
        yield measurement.row(f"{key}_{RANKS}x{args.gib}gib", what, unit, raw, **baseline)


def verdict(what: str, is_met: bool, bar: str) -> None:
    print(f"    {what}: bar {bar} {'met' if is_met else 'MISSED'}", flush=True)


PARTS = {
    "suspend": suspend,
    "rate": rate,
    "pause": pause,
    "graph": graph,
    "nccl_cost": nccl_cost,
    "plain": plain,
}

if __name__ == "__main__":
    sys.exit(main())
