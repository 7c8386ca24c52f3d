"""N ranks in one container, one GPU each, NCCL with its default peer-to-peer transport: holds filled memory and works in step.

Each rank holds `--gib` GiB of tensors with known sums. A step is one all_reduce whose every word is checked and the sum of one
held tensor; with `--model` it is a small training step whose gradients are all-reduced. Writes one JSON line a step and rank:
rank, step, monotonic time, ok; so the longest gap of a rank is how long it stood still. `--graph` puts the step's kernels and
its all_reduce into one CUDA graph.

`--blocks N` works when told: block number B begins when FILE.B exists (`--gate FILE`), and its line has the seconds of each of
its steps. Everything ends when FILE.stop exists. A wrong word ends all ranks with status 3. Real driver only.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

WORDS_A_MIB = 2**18
WAIT_S = 900


def main() -> int:
    args = parse_arguments()
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=rank_main, args=(rank, args)) for rank in range(args.ranks)]
    for rank in ranks:
        rank.start()
    while all(rank.is_alive() for rank in ranks):
        time.sleep(0.1)
    for rank in ranks:  # one that ended with an error leaves the others waiting in a collective for ever
        rank.join(timeout=20)
        if rank.is_alive():
            rank.kill()
    return max(abs(rank.exitcode or 0) for rank in ranks)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--gib", type=int, default=32, help="GiB of held tensors, each rank")
    parser.add_argument("--message-mib", type=int, default=64)
    parser.add_argument("--interval", type=float, default=0.005, help="rest after each step")
    parser.add_argument("--model", action="store_true", help="a step is a small training step")
    parser.add_argument("--graph", action="store_true", help="the step's work is one CUDA graph")
    parser.add_argument("--blocks", type=int, default=0, help="steps of a block; 0: work without being told")
    parser.add_argument("--gate", type=pathlib.Path, help="FILE of FILE.B and FILE.stop")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    return parser.parse_args()


def rank_main(rank: int, args: argparse.Namespace) -> None:
    torch.cuda.set_device(rank % torch.cuda.device_count())
    store = dist.FileStore(str(args.out.with_suffix(".store")), args.ranks)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=args.ranks)
    group = Rank(rank, args)
    with args.out.open("a", buffering=1) as out:  # a line is one write, so lines of several ranks do not mix
        ok = group.blocks(out) if args.blocks else group.loop(out)
    os._exit(0 if ok else 3)  # an orderly end would wait for the other ranks, who may be gone


class Rank:
    """What one rank holds and does."""

    def __init__(self, rank: int, args: argparse.Namespace) -> None:
        self.rank, self.ranks, self.args = rank, args.ranks, args
        self.held = [filled(number, rank) for number in range(args.gib)]
        self.sums = [int(tensor.sum().item()) for tensor in self.held]
        self.base = torch.arange(args.message_mib * WORDS_A_MIB, dtype=torch.int32, device="cuda") * 3
        self.message = torch.empty_like(self.base)
        self.number = torch.zeros(1, dtype=torch.int32, device="cuda")
        self.model = Model() if args.model else None
        self.work = captured(self.reduce) if args.graph else self.reduce

    def reduce(self) -> None:
        """message = base + rank + number, summed over all ranks."""
        torch.add(self.base, self.number + self.rank, out=self.message)
        dist.all_reduce(self.message)

    def step(self, number: int) -> bool:
        self.number.fill_(number)
        self.work()
        ranks = self.ranks
        ok = bool(torch.equal(self.message, self.base * ranks + (ranks * number + ranks * (ranks - 1) // 2)))
        if self.held:
            at = number % len(self.held)
            ok = ok and int(self.held[at].sum().item()) == self.sums[at]
        if self.model is not None:
            self.model.step()
            torch.cuda.synchronize()
        return ok

    def loop(self, out: object) -> bool:
        """One step after the other until somebody ends the program."""
        stop = pathlib.Path(f"{self.args.gate}.stop") if self.args.gate else None
        for number in range(1, 2**30):
            ok = self.step(number)
            self.write(out, step=number, ok=ok)
            if not ok:
                return False
            # Asked of all ranks at once, or one would leave while the other waits for it.
            if stop is not None and number % 16 == 0 and self.everybody(stop.exists()):
                return True
            time.sleep(self.args.interval)
        return True

    def blocks(self, out: object) -> bool:
        """One block of timed steps each time that the next gate file is there."""
        ok = all(self.step(number) for number in range(1, 4))
        self.timed(5)
        self.write(out, ready=True, ok=ok)
        for block in range(10**6):
            if not wait_for(self.args.gate, block):
                return ok
            taken = self.timed(self.args.blocks)
            ok = self.step(block + 1) and ok
            self.write(out, block=block, ok=ok, seconds=[round(value, 7) for value in taken])
        return ok

    def timed(self, steps: int) -> list[float]:
        work = self.model.step if self.model is not None else self.work
        taken = []
        for _ in range(steps):
            began = time.perf_counter()
            work()
            torch.cuda.synchronize()
            taken.append(time.perf_counter() - began)
        return taken

    def everybody(self, word: bool) -> bool:
        votes = torch.tensor([int(word)], device="cuda")
        dist.all_reduce(votes, op=dist.ReduceOp.MAX)
        return bool(votes.item())

    def write(self, out: object, **line: object) -> None:
        out.write(json.dumps({"rank": self.rank, "t": time.monotonic(), **line}) + "\n")


class Model:
    """A few linear layers with gradients that all ranks sum up: what a step of data-parallel training launches."""

    WIDTH, LAYERS, BATCH = 4096, 8, 2048

    def __init__(self) -> None:
        torch.manual_seed(5)
        kind = {"device": "cuda", "dtype": torch.bfloat16}
        made = [torch.nn.Linear(self.WIDTH, self.WIDTH, bias=False, **kind) for _ in range(self.LAYERS)]
        self.layers = torch.nn.Sequential(*made)
        self.batch = torch.randn(self.BATCH, self.WIDTH, **kind)

    def step(self) -> None:
        self.layers.zero_grad(set_to_none=False)
        self.layers(self.batch).float().square().mean().backward()
        with torch.no_grad():
            for parameter in self.layers.parameters():
                dist.all_reduce(parameter.grad)
                parameter.add_(parameter.grad, alpha=-1e-6)


def captured(work: object) -> object:
    """A call that replays `work`; the collectives' own watchdog must not be caught in the capture."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    time.sleep(1.0)  # the watchdog has seen the end of what ran before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        work()
    return graph.replay


def wait_for(gate: pathlib.Path, block: int) -> bool:
    """Until this block may begin; False where all is over."""
    wanted, stop = pathlib.Path(f"{gate}.{block}"), pathlib.Path(f"{gate}.stop")
    ends = time.monotonic() + WAIT_S
    while time.monotonic() < ends:
        if wanted.exists():
            return True
        if stop.exists():
            return False
        time.sleep(0.001)
    return False


def filled(number: int, rank: int) -> torch.Tensor:
    """One GiB whose words depend on their place, the tensor and the rank."""
    words = torch.arange(2**27, dtype=torch.int64, device="cuda")
    return words.mul_(6364136223846793005 - number).add_(rank)


if __name__ == "__main__":
    sys.exit(main())
