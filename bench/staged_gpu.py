"""The figures of staged mode on a real GPU, each part by name; rows by bench/measurement.py, raw values in them.

    python -m bench.staged_gpu suspend pauses pause_16 pause_100 train unchanged preload [--measurements DIR] [--rehearse]

`pauses` holds a 16 GiB and a 100 GiB program at the same time and snapshots them in turn, so that the two can be compared.
Every ratio's baseline is taken in the same run: the plain driver checkpoint of the same program without the preload, the
same program without the preload, or the same program before the copy began. `--rehearse` goes through the steps with the
counter program on the software driver and writes nothing.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import time
from typing import Any

from bench import measurement
from bench.gpu_programs import (
    DATA_PHASES,
    PACKS,
    decode,
    finish,
    goes_on,
    gpu_pid,
    hold,
    longest_gap,
    python,
    second_pass,
    seconds,
    show,
    slowdown,
    snapshot,
    steps,
)
from bench.parts import parser_of, run
from bench.pause_sizes import pauses
from image_format.file_names import FRAGMENT_NAME, INDEX_NAME
from tests.gpu.bare_node import BareNode
from tests.hosts import gpus


def main() -> int:
    args = parser_of(__doc__, PARTS, name="staged-mode").parse_args()
    return run(args, PARTS, lambda: shutil.rmtree(PACKS, ignore_errors=True))


# ---- suspend and resume ----------------------------------------------------------------------------


def suspend(args: argparse.Namespace, gib: int = 32) -> list[dict[str, Any]]:
    """Suspend to memory and resume, beside the driver's own checkpoint and restore of the same program."""
    out_s, in_s, out_rate, in_rate = [], [], [], []
    with BareNode(reserve=f"{gib + 2}G" if gpus.is_real() else "256M") as node:
        program = hold(node, gib)
        print(f"    the reserve was ready after {node.wait_for_reserve():.1f} s", flush=True)
        for number in range(args.rounds):
            began = time.monotonic()
            done = node.request("suspend", program.names)
            out_s.append(time.monotonic() - began)
            show(f"suspend {number + 1}: {out_s[-1]:.3f} s", done)
            began = time.monotonic()
            back = node.request("resume", {"container": program.id})
            in_s.append(time.monotonic() - began)
            show(f"resume {number + 1}: {in_s[-1]:.3f} s", back)
            goes_on(program)
            # Both run beside other phases, so their own time counts, the hashing included.
            out_rate.append(round(done["staged"]["bytes"] / done["staged"]["copied_s"] / 1e9, 2))
            in_rate.append(round(back["fill"]["bytes"] / back["fill"]["seconds"] / 1e9, 2))
    rows = []
    plain = plain_driver(gib) if gib == 32 or args.rehearse else None
    for key, what, raw, base in (
        (f"suspend_{gib}gib", "suspend to memory, PyTorch process, wall time", out_s, plain and plain["checkpoint"]),
        (f"resume_{gib}gib", "resume from memory, PyTorch process, wall time", in_s, plain and plain["restore"]),
    ):
        more = (
            {"baseline_what": "the driver's own calls on the same program without the preload", "baseline_raw": base}
            if base
            else {}
        )
        rows.append(measurement.row(key, what, "s", [round(x, 4) for x in raw], **more))
    rows += (
        [measurement.row(f"rate_out_{gib}gib", "bytes over the time from the first copy to the last", "GB/s", out_rate)]
        if out_rate
        else []
    )
    rows += (
        [measurement.row(f"rate_in_{gib}gib", "bytes over the time of making, filling and proving", "GB/s", in_rate)]
        if in_rate
        else []
    )
    return rows


def suspend_100(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The same with 100 GiB, for the rates."""
    return suspend(args, gib=100)


def plain_driver(gib: int) -> dict[str, list[float]]:
    """Lock and checkpoint, restore and unlock, by the driver alone."""
    import cuda.bindings.driver as cuda

    with BareNode() as node:
        program = hold(node, gib, has_preload=False)
        if not gpus.is_real():
            return {"checkpoint": [1.0], "restore": [1.0]}
        cuda.cuInit(0)
        lock = cuda.CUcheckpointLockArgs()
        lock.timeoutMs = 10_000
        pid, taken = gpu_pid(program), {}
        for name, calls in (
            (
                "checkpoint",
                (
                    lambda: cuda.cuCheckpointProcessLock(pid, lock),
                    lambda: cuda.cuCheckpointProcessCheckpoint(pid, None),
                ),
            ),
            (
                "restore",
                (lambda: cuda.cuCheckpointProcessRestore(pid, None), lambda: cuda.cuCheckpointProcessUnlock(pid, None)),
            ),
        ):
            began = time.monotonic()
            for call in calls:
                code = int(call()[0])
                assert code == 0, f"{name}: {code}"
            taken[name] = [round(time.monotonic() - began, 4)]
        print(f"    the driver alone: {taken}", flush=True)
        goes_on(program)
        return taken


# ---- leave-running ---------------------------------------------------------------------------------


def pause_16(args: argparse.Namespace) -> list[dict[str, Any]]:
    return pause(args, 16)


def pause_100(args: argparse.Namespace) -> list[dict[str, Any]]:
    return pause(args, 100)


def pause(args: argparse.Namespace, gib: int) -> list[dict[str, Any]]:
    """How long a decode process stands still for a complete snapshot, and what the copy beside it costs."""
    gaps, costs, walls = [], [], []
    with BareNode() as node:
        program, gate = decode(node, gib)
        for number in range(args.rounds):
            time.sleep(1.0)
            shutil.rmtree(PACKS, ignore_errors=True)
            began = time.monotonic()
            done = snapshot(node, program)
            walls.append(time.monotonic() - began)
            time.sleep(0.5)
            times = second_pass(program)
            gaps.append(longest_gap([t for t in times if t > began - 1.0]))
            assert gaps[-1] > 0.1 or not gpus.is_real(), "the process was never stopped"
            costs += slowdown(times, began, done)
            show(f"snapshot {number + 1}: pause {gaps[-1]:.3f} s, wall {walls[-1]:.2f} s", done)
        finish(program, gate)
    rows = [
        measurement.row(f"leave_running_pause_{gib}gib", "decode stopped for a complete snapshot, no CRIU", "s", gaps),
        measurement.row(f"leave_running_wall_{gib}gib", "the whole snapshot, the copy included", "s", walls),
    ]
    if costs:
        rows.append(
            measurement.row("running_copy_cost", f"decode step during the copy over before, {gib} GiB", "ratio", costs)
        )
    return rows


def train(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The same for a training loop that rewrites all of its state; losses must be bit-equal."""
    gaps, costs, dirty = [], [], []
    with BareNode() as node:
        gate = node.folder / "gate"
        command = python("torch_train.py", "--gib", "24", "--steps", "80", "--gate", str(gate))
        program = node.start("train", command)
        program.wait_for(lambda lines: any("ready" in line for line in lines), "first pass")
        gate.touch()
        program.wait_for(lambda lines: sum(line.get("pass") == 2 for line in lines) > 10, "second pass")
        began = time.monotonic()
        done = snapshot(node, program)
        show("snapshot of the training loop", done)
        lines = program.wait_for(lambda lines: "done" in lines[-1], "end of the second pass")
        assert lines[-1]["ok"], "the losses differ"
        print(f"    {lines[-1]['steps']} losses bit-equal with and without the checkpoint", flush=True)
        times = [line["t"] for line in lines if line.get("pass") == 2]
        gaps.append(longest_gap(times))
        costs += slowdown(times, began, done)
        staged = done["staged"]
        dirty = [round(r["changed_bytes"] / staged["bytes"], 4) for r in staged["rounds"]]
    rows = [
        measurement.row(
            "leave_running_pause_train_32gib", f"training stopped; dirty share per round {dirty}", "s", gaps
        )
    ]
    if costs:
        rows.append(measurement.row("running_copy_cost", "training step during the copy over before", "ratio", costs))
    return rows


def unchanged(args: argparse.Namespace, gib: int = 32) -> list[dict[str, Any]]:
    """A second checkpoint of a process that has changed next to nothing, with the first as its parent: data phase over data phase."""
    first_folder, second_folder = PACKS / "first", PACKS / "second"
    with BareNode() as node:
        program = hold(node, gib)
        first = snapshot(node, program, folder=first_folder)
        goes_on(program)
        # A fragment is an index without files: as the parent's index it says the same as the sealed one would.
        shutil.copy(first_folder / FRAGMENT_NAME, first_folder / INDEX_NAME)
        second = snapshot(node, program, folder=second_folder, parents=[str(first_folder)])
        goes_on(program)
        show("first", first)
        show("second", second)
    data = [sum(seconds(doc, *DATA_PHASES)) for doc in (first, second)]
    return [
        measurement.row(
            "unchanged_second_dump", f"data phases of a second checkpoint, {gib} GiB unchanged", "s", [data[1]],
            baseline_what="the first checkpoint's data phases", baseline_raw=[data[0]],
        )
    ]  # fmt: skip


def preload(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Steady-state cost: the same programs with and without the preload in turn."""
    return with_and_without(args, small_work) + with_and_without(args, large_work)


def preload_small(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Launches and allocations alone."""
    return with_and_without(args, small_work)


def with_and_without(args: argparse.Namespace, work: Any) -> list[dict[str, Any]]:
    taken: dict[tuple[str, bool], list[float]] = {}
    with BareNode() as node:
        for number in range(args.rounds):  # which of the two comes first changes from round to round
            for has_preload in (number % 2 == 1, number % 2 == 0):
                for key, value in work(node, has_preload=has_preload):
                    taken.setdefault((key, has_preload), []).append(value)
    what = {
        "preload_decode": "decode step in a CUDA graph, median of a run",
        "preload_train": "training step, median of a run",
        "preload_launch": "small elementwise kernel, seconds a launch, best of 9 loops of a run",
        "preload_alloc": "allocation and free of 64 MiB through PyTorch, past its cache, best of 9 loops of a run",
    }
    return [
        measurement.row(
            key, text, "s", taken[key, True], baseline_what="without the preload", baseline_raw=taken[key, False]
        )
        for key, text in what.items()
        if (key, True) in taken
    ]


def small_work(node: BareNode, *, has_preload: bool) -> list[tuple[str, float]]:
    """Launches and allocations; (key, best seconds)."""
    if not gpus.is_real():
        return []
    small = node.start("small", python("torch_small_work.py"), has_preload=has_preload)
    found = small.wait_for(bool, "result")[-1]
    small.end()
    return [("preload_launch", min(found["launch"])), ("preload_alloc", min(found["alloc"]))]


def large_work(node: BareNode, *, has_preload: bool) -> list[tuple[str, float]]:
    """Decode and training, one run of each."""
    if not gpus.is_real():
        return []
    gate = str(node.folder / "never")
    decoder = node.start(
        "decode",
        python("torch_decode.py", "--gib", "6", "--layers", "8", "--tokens", "500", "--gate", gate),
        has_preload=has_preload,
    )
    lines = decoder.wait_for(lambda lines: any("ready" in line for line in lines), "first pass")
    decoder.end()
    trainer = node.start(
        "train", python("torch_train.py", "--gib", "4", "--steps", "40", "--gate", gate), has_preload=has_preload
    )
    losses = trainer.wait_for(lambda lines: any("ready" in line for line in lines), "first pass")
    trainer.end()
    return [
        ("preload_decode", statistics.median(steps([line["t"] for line in lines if "t" in line][50:]))),
        ("preload_train", statistics.median(steps([line["t"] for line in losses if "t" in line][10:]))),
    ]


PARTS = {
    "pauses": pauses,
    "suspend": suspend,
    "suspend_100": suspend_100,
    "pause_16": pause_16,
    "pause_100": pause_100,
    "train": train,
    "unchanged": unchanged,
    "preload": preload,
    "preload_small": preload_small,
}

if __name__ == "__main__":
    sys.exit(main())
