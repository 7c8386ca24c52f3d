"""What bench/launch_cost.c does, in PyTorch: nanoseconds of one elementwise kernel on a tiny tensor, in blocks, as JSON lines.

    torch_launch.py --out FILE --gate FILE [--core N] [--bursts 100] [--burst 256] [--loops 10] [--loop 10000]

Burst: launches into an idle stream, without the wait for their end; loop: with it. Called by bench/launch_cost.py, with and
without the preload in turn. Real driver only.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import pathlib
import sys
import time

import torch

WARM_UP_S = 0.5
GATE_WAIT_S = 600


def main() -> int:
    args = parse_arguments()
    small = torch.ones(64, device="cuda")
    one_block(small, args.burst)
    torch.cuda.synchronize()
    with args.out.open("a", buffering=1) as out:
        out.write('{"ready": true}\n')
        ends = time.monotonic() + GATE_WAIT_S
        while not args.gate.exists():
            if time.monotonic() > ends:
                return 2
            time.sleep(0.001)
        if args.core >= 0:
            os.sched_setaffinity(0, {args.core})  # this thread alone: the driver's and the preload's stay elsewhere
        out.write(json.dumps(measure(small, args)) + "\n")
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--gate", type=pathlib.Path, required=True)
    parser.add_argument("--core", type=int, default=-1)
    parser.add_argument("--bursts", type=int, default=100)
    parser.add_argument("--burst", type=int, default=256)
    parser.add_argument("--loops", type=int, default=10)
    parser.add_argument("--loop", type=int, default=10000)
    return parser.parse_args()


def measure(small: torch.Tensor, args: argparse.Namespace) -> dict[str, object]:
    gc.collect()
    gc.disable()
    ends = time.monotonic() + WARM_UP_S
    while time.monotonic() < ends:
        one_block(small, args.burst)
        torch.cuda.synchronize()
    bursts, loops = [], []
    for _ in range(args.bursts):
        bursts.append(one_block(small, args.burst))
        torch.cuda.synchronize()
    for _ in range(args.loops):
        began = time.perf_counter_ns()
        one_block(small, args.loop)
        torch.cuda.synchronize()
        loops.append((time.perf_counter_ns() - began) / args.loop)
    rounded = {"burst_ns": [round(taken, 2) for taken in bursts], "loop_ns": [round(taken, 2) for taken in loops]}
    return {"result": True, **rounded}


def one_block(small: torch.Tensor, count: int) -> float:
    """Nanoseconds a launch, without the wait for the GPU."""
    add = small.add_
    began = time.perf_counter_ns()
    for _ in range(count):
        add(1.0)
    return (time.perf_counter_ns() - began) / count


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())
