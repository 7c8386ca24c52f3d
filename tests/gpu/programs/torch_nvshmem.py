"""Put and get over NVSHMEM between ranks, through PyTorch's symmetric memory with its NVSHMEM backend, contents checked each turn.

In every step each rank in turn fills its block and puts it into the next rank's, which checks it; then each rank fills its block
and every rank gets the next one's and checks that. A wrong word ends it with status 3. Where PyTorch or the machine has no
NVSHMEM it says so in a line `skipped` and ends with status 0. Real driver only.
"""

from __future__ import annotations

import os
import sys

# The ranks are on one host: bootstrap over the loopback, and no network transport.
os.environ.setdefault("NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME", "lo")
os.environ.setdefault("NVSHMEM_REMOTE_TRANSPORT", "none")

from typing import TYPE_CHECKING

import ranks
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
import torch_ranks

if TYPE_CHECKING:
    import argparse

WORDS_A_MIB = 2**18
FIRST_STEPS = 3
GET_OFFSET = 1000


def main() -> int:
    parser = torch_ranks.parser(__doc__)
    parser.add_argument("--mib", type=int, default=64)
    args = parser.parse_args()
    return ranks.run_ranks(args.ranks, lambda rank: run(args, rank))


def run(args: argparse.Namespace, rank: int) -> int:
    """One rank."""
    lines, gate = ranks.Lines(args.out, rank), ranks.Gate(args.gate)
    missing = what_is_missing(args)
    if missing is not None:
        lines.write(skipped=missing)
        return 0
    device = torch_ranks.join(args, rank)
    symmetric_memory.set_backend("NVSHMEM")
    block = symmetric_memory.empty(args.mib * WORDS_A_MIB, dtype=torch.int32, device=device)
    symmetric_memory.rendezvous(block, dist.group.WORLD)
    step, steps, is_right, is_over = 0, 0, True, False
    while is_right and not is_over:
        which_pass = 2 if torch_ranks.agree(gate.is_open(), device) else 1
        is_right = puts(args, rank, block, step) and gets(args, rank, block, step)
        lines.step(which_pass, step, ok=is_right)
        steps += which_pass == 2
        step += 1
        if step == FIRST_STEPS:
            lines.write(ready=True)
        is_over = torch_ranks.agree(gate.is_stopped() or not is_right, device)
    lines.write(done=True, ok=is_right and steps > 0, steps=steps)
    return 0 if is_right and steps > 0 else ranks.WRONG


def what_is_missing(args: argparse.Namespace) -> str | None:
    """Why NVSHMEM cannot be used here."""
    if args.cpu or not torch.cuda.is_available():
        return "there is no GPU"
    if not hasattr(symmetric_memory, "is_nvshmem_available") or not hasattr(symmetric_memory, "set_backend"):
        return f"PyTorch {torch.__version__} has no NVSHMEM backend of its symmetric memory"
    if not symmetric_memory.is_nvshmem_available():
        return f"PyTorch {torch.__version__} does not find libnvshmem_host.so.3, or was built without it"
    if not hasattr(torch.ops.symm_mem, "nvshmem_put") or not hasattr(torch.ops.symm_mem, "nvshmem_get"):
        return f"PyTorch {torch.__version__} has no operators nvshmem_put and nvshmem_get"
    return None


def puts(args: argparse.Namespace, rank: int, block: torch.Tensor, step: int) -> bool:
    """Each rank puts its block into the next rank's, one after the other, for a put overwrites what was there."""
    is_right = True
    for turn in range(args.ranks):
        if rank == turn:
            block.copy_(words(block, step * args.ranks + turn))
            torch.ops.symm_mem.nvshmem_put(block, (rank + 1) % args.ranks)
        settle()
        if rank == (turn + 1) % args.ranks:
            is_right = is_right and torch.equal(block, words(block, step * args.ranks + turn))
    return is_right


def gets(args: argparse.Namespace, rank: int, block: torch.Tensor, step: int) -> bool:
    """Each rank in turn gets the next rank's block; what it had before it has no more, so the next one fills its own again."""
    is_right = True
    for turn in range(args.ranks):
        block.copy_(words(block, GET_OFFSET + step * args.ranks + rank))
        settle()
        source = (rank + 1) % args.ranks
        if rank == turn:
            torch.ops.symm_mem.nvshmem_get(block, source)
            is_right = torch.equal(block, words(block, GET_OFFSET + step * args.ranks + source))
        settle()
    return is_right


def settle() -> None:
    """What every rank has begun is over before any goes on."""
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()


def words(like: torch.Tensor, seed: int) -> torch.Tensor:
    """Words that depend on their place and on `seed`."""
    return torch.arange(like.numel(), dtype=torch.int32, device=like.device) * 3 + seed


if __name__ == "__main__":
    sys.exit(main())
