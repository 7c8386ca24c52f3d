"""What the PyTorch programs of several ranks share: how a rank joins its group, agreements between ranks, padding.

A rank takes the device of its number. The store is a file, or a TCP server of rank 0 without libuv, because that keeps an
io_uring, which CRIU cannot dump. `--cpu` goes through the same steps by gloo on a machine without a GPU, and says nothing about
one. Called by torch_ddp.py, torch_tensor_parallel.py and torch_nvshmem.py.
"""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING

import ranks
import torch
import torch.distributed as dist

if TYPE_CHECKING:
    import argparse
    import pathlib

PORT = 29533
DEADLINE = dt.timedelta(seconds=600)  # a collective may be in flight while the group is away
PADDING_WORDS = 2**27  # 1 GiB


def parser(description: str) -> argparse.ArgumentParser:
    """The options that all of them have."""
    options = ranks.parser(description, ranks=2)
    options.add_argument("--store", choices=["file", "tcp"], default="file")
    options.add_argument("--cpu", action="store_true", help="gloo without a GPU: a rehearsal of the steps")
    return options


def join(args: argparse.Namespace, rank: int) -> torch.device:
    """Make this process rank `rank` of the group; its device, which is the current one from here on."""
    device = torch.device("cpu") if args.cpu else torch.device("cuda", rank % torch.cuda.device_count())
    if not args.cpu:
        torch.cuda.set_device(device)
    more = {} if args.cpu else {"device_id": device}
    backend = "gloo" if args.cpu else "nccl"
    made = store(args.store, args.out, rank, args.ranks)
    dist.init_process_group(backend, store=made, rank=rank, world_size=args.ranks, timeout=DEADLINE, **more)
    return device


def store(kind: str, out: pathlib.Path, rank: int, count: int) -> dist.Store:
    """A file beside the lines is new in every run, because the lines are."""
    if kind == "file":
        return dist.FileStore(f"{out}.store", count)
    return dist.TCPStore("127.0.0.1", PORT, count, is_master=rank == 0, timeout=DEADLINE, use_libuv=False)


def agree(claim: bool, device: torch.device) -> bool:
    """Whether any rank says so; all ranks get the same answer, so that none goes on alone."""
    said = torch.tensor([1 if claim else 0], dtype=torch.int32, device=device)
    dist.all_reduce(said, op=dist.ReduceOp.MAX)
    return bool(said.item())


def held_bytes(device: torch.device) -> int:
    """What PyTorch has allocated there."""
    return 0 if device.type == "cpu" else torch.cuda.memory_allocated(device)


class Padding:
    """Tensors of 1 GiB that nobody touches, up to `gib` in all, with the sums they must keep."""

    def __init__(self, gib: int, device: torch.device) -> None:
        missing = 0 if device.type == "cpu" else max(0, gib * 2**30 - held_bytes(device))
        self._tensors = [filled(number, device) for number in range(missing // 2**30)]
        self._sums = [int(tensor.sum().item()) for tensor in self._tensors]

    def is_right(self) -> bool:
        """Every sum is what it was."""
        return self._sums == [int(tensor.sum().item()) for tensor in self._tensors]


def filled(number: int, device: torch.device) -> torch.Tensor:
    """Words that depend on their place, so that a moved or lost page changes the sum."""
    words = torch.arange(PADDING_WORDS, dtype=torch.int64, device=device)
    return words.mul_(6364136223846793005 - number)
