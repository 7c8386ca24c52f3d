"""Times what a preload could slow down: small kernel launches, and allocations that come and go. One JSON document into `--out`.

Every figure is a list of seconds per call, one entry a repeat; the caller runs it with and without the preload in turn.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import time

import torch

LAUNCHES, ALLOCATIONS, REPEATS = 10_000, 50, 9


def main() -> int:
    # A launch loop of some microseconds a turn shows where the scheduler puts it: one core for the whole run.
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    small = torch.ones(1024, device="cuda")
    graph = decode_like_graph()
    launches = [timed(lambda: small.add_(1.0), LAUNCHES) for _ in range(REPEATS)]
    replays = [timed(graph.replay, 100) for _ in range(REPEATS)]
    torch.cuda.empty_cache()
    allocations = [timed(allocate_and_free, ALLOCATIONS) for _ in range(REPEATS)]
    pathlib.Path(sys.argv[2]).write_text(
        json.dumps({"launch": launches, "graph": replays, "alloc": allocations}) + "\n"
    )
    return 0


def timed(call: object, count: int) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(count):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / count


def allocate_and_free() -> None:
    """Past PyTorch's cache: the driver's allocation and free each time."""
    tensor = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    del tensor
    torch.cuda.empty_cache()


def decode_like_graph() -> torch.cuda.CUDAGraph:
    """About 200 kernels, half of them memory-bound, as one decode step has."""
    weights = [torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda") for _ in range(64)]
    hidden = torch.randn(1, 4096, dtype=torch.bfloat16, device="cuda")
    stream = torch.cuda.Stream()

    def step() -> None:
        value = hidden
        for weight in weights:
            value = torch.nn.functional.rms_norm(value @ weight, (4096,))
        hidden.copy_(value)

    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


if __name__ == "__main__":
    sys.exit(main())
