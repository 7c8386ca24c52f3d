"""A PyTorch program that proves its own GPU memory at every step.

Holds `--gib` GiB of int64 tensors with known sums and one captured CUDA graph that counts. Each step replays the
graph, checks the counter and one tensor's exact sum, and appends a line to `--out`; a wrong value ends it with
status 3. Runs on the real driver only (tests/gpu/), inside a container that shares the machine's own Python.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import time

import torch

WORDS_PER_GIB = 2**27
WRAP = 2**64


def main() -> int:
    args = parse_arguments()
    state = State(args.gib, args.device)
    for step in range(1, args.steps + 1):
        total, counter = state.advance(step)
        ok = counter == step and total == state.expected[step % len(state.tensors)]
        append(args.out, f"step {step} counter {counter} sum {total} {'ok' if ok else 'WRONG'}")
        if not ok:
            return 3
        time.sleep(args.interval)
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=int, default=8, help="GiB of tensors, one tensor a GiB")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--interval", type=float, default=0.1, help="seconds between steps")
    parser.add_argument("--steps", type=int, default=10**9)
    parser.add_argument("--device", default="cuda:0")
    return parser.parse_args()


class State:
    """The tensors, what they must sum to, and the graph."""

    def __init__(self, gib: int, device: str) -> None:
        self.tensors = [fill(n, device) for n in range(gib)]
        self.expected = [wrapped_sum(t) for t in self.tensors]
        self.counter = torch.zeros(1, dtype=torch.int64, device=device)
        self.mixed = torch.ones(2**20, dtype=torch.float32, device=device)
        self.graph = capture(self.count)
        self.counter.zero_()

    def count(self) -> None:
        self.counter += 1
        self.mixed.mul_(1.0001).add_(0.5).fmod_(3.0)

    def advance(self, step: int) -> tuple[int, int]:
        self.graph.replay()
        total = wrapped_sum(self.tensors[step % len(self.tensors)])
        return total, int(self.counter.item())


def fill(number: int, device: str) -> torch.Tensor:
    """One GiB whose words depend on their place, so that a moved or lost page changes the sum."""
    words = torch.arange(WORDS_PER_GIB, dtype=torch.int64, device=device)
    return words.mul_(6364136223846793005 - number).add_(number * 1442695040888963407 % 2**62)


def wrapped_sum(tensor: torch.Tensor) -> int:
    """The sum modulo 2**64, and exact, because int64 addition wraps."""
    return int(tensor.sum().item()) % WRAP


def capture(work: object) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def append(path: pathlib.Path, line: str) -> None:
    with path.open("a") as out:
        out.write(line + "\n")


if __name__ == "__main__":
    sys.exit(main())
