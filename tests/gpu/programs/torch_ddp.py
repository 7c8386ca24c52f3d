"""DDP training over NCCL, several ranks, run twice from one seed: the loss streams of every rank must be bit-equal.

A stack of linear layers under AdamW in fp32, sized to `--gib` of weights, gradients and moments a rank. Each rank writes one
JSON line a step: pass, step, monotonic time, its own loss and the sum over all ranks as hex. Between the passes it waits for
`--gate FILE`; the second pass ends when FILE.stop appears, and begins anew where it is over before, so that any number of
checkpoints falls into it. A loss that differs ends the program with status 3. Real driver only, deterministic mode.
"""

from __future__ import annotations

import gc
import itertools
import os
import sys
import time
from typing import TYPE_CHECKING

os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"

import ranks
import torch
import torch.distributed as dist
import torch_ranks

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

BYTES_PER_PARAMETER = 16  # weight, gradient and two moments; the buckets of DDP are the gradients themselves


def main() -> int:
    args = parse_arguments()
    return ranks.run_ranks(args.ranks, lambda rank: run(args, rank))


def parse_arguments() -> argparse.Namespace:
    parser = torch_ranks.parser(__doc__)
    parser.add_argument("--gib", type=float, default=4, help="GiB of state a rank")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--width", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--pause-s", type=float, default=0.0, help="rest after each step of the second pass")
    return parser.parse_args()


def run(args: argparse.Namespace, rank: int) -> int:
    """One rank: a first pass, and second ones until somebody has seen enough."""
    device = torch_ranks.join(args, rank)
    torch.use_deterministic_algorithms(mode=True)
    lines, gate = ranks.Lines(args.out, rank), ranks.Gate(args.gate)
    first = []
    for step, (losses, _) in enumerate(train(args, rank, device)):
        first.append(losses)
        lines.step(1, step, losses=losses)
    lines.write(ready=True, bytes=torch_ranks.held_bytes(device))
    gate.wait()
    compared, differs_at = 0, None
    for step, losses in enumerate(second_passes(args, rank, device, gate)):
        lines.step(2, step, losses=losses)
        compared += 1
        if losses != first[step % args.steps]:
            differs_at = step
            break
        time.sleep(args.pause_s)
    lines.write(done=True, ok=differs_at is None and compared > 0, steps=compared, differs_at=differs_at)
    return 0 if differs_at is None and compared > 0 else ranks.WRONG


def second_passes(args: argparse.Namespace, rank: int, device: torch.device, gate: ranks.Gate) -> Iterator[list[str]]:
    """One training after the other, each from the seed, until all ranks know that it is enough."""
    while True:
        for losses, is_enough in train(args, rank, device, gate):
            yield losses
            if is_enough:
                return
        gc.collect()


def train(
    args: argparse.Namespace, rank: int, device: torch.device, gate: ranks.Gate | None = None
) -> Iterator[tuple[list[str], bool]]:
    """The losses of each step, and whether somebody wants an end."""
    torch.manual_seed(11)
    model = network(args, device)
    ids = None if args.cpu else [device.index]
    parallel = torch.nn.parallel.DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-4, fused=not args.cpu)
    data = torch.Generator(device).manual_seed(1000 + rank)
    for _ in itertools.repeat(None, args.steps):
        batch = torch.randn(args.batch, args.width, device=device, generator=data)
        optimizer.zero_grad(set_to_none=False)
        loss = (parallel(batch) - batch).square().mean()
        loss.backward()
        optimizer.step()
        # The end is agreed upon in the collective that every rank takes part in anyway.
        shared = torch.stack(
            [loss.detach(), torch.tensor(float(gate is not None and gate.is_stopped()), device=device)]
        )
        dist.all_reduce(shared)
        total, wishes = shared.tolist()
        yield [float(loss.item()).hex(), total.hex()], wishes > 0


def network(args: argparse.Namespace, device: torch.device) -> torch.nn.Module:
    """As many layers as the state may hold."""
    layers = max(1, int(args.gib * 2**30) // (args.width * args.width * BYTES_PER_PARAMETER))
    blocks = [
        part
        for _ in range(layers)
        for part in (torch.nn.Linear(args.width, args.width, device=device), torch.nn.GELU())
    ]
    return torch.nn.Sequential(*blocks)


if __name__ == "__main__":
    sys.exit(main())
