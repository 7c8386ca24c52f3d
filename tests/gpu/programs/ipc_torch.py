"""Two PyTorch processes that share tensors of 64 MiB and 1 MiB through torch.multiprocessing, contents checked both ways.

The parent makes the tensors and sends them through a queue, as programs do; the child checks them, writes others, and the
parent checks those; three rounds, with the tensors freed in between, so that what is closed and freed is seen too. Prints
one line a check; a wrong word ends it with status 3. Real driver only (tests/gpu/ipc_run.py).
"""

from __future__ import annotations

import gc
import sys

import torch
import torch.multiprocessing as multiprocessing

SIZES_MIB = (64, 1)
ROUNDS = 3
WORDS_A_MIB = 2**18
DEADLINE_S = 120


def expected(mib: int, seed: int) -> torch.Tensor:
    """The same words in every process."""
    return torch.arange(mib * WORDS_A_MIB, dtype=torch.int32, device="cuda") * 3 + seed


def consume(offered: multiprocessing.Queue, answers: multiprocessing.Queue) -> None:
    """Check what comes, write what the parent then checks, let go of it, say so."""
    for number in range(ROUNDS):
        for mib in SIZES_MIB:
            tensor = offered.get(timeout=DEADLINE_S)
            is_right = bool(torch.equal(tensor, expected(mib, number)))
            tensor.copy_(expected(mib, number + 1000))
            torch.cuda.synchronize()
            del tensor
            gc.collect()
            answers.put(is_right)


def main() -> int:
    multiprocessing.set_start_method("spawn")
    offered, answers = multiprocessing.Queue(), multiprocessing.Queue()
    child = multiprocessing.Process(target=consume, args=(offered, answers))
    child.start()
    results = []
    for number in range(ROUNDS):
        for mib in SIZES_MIB:
            tensor = expected(mib, number)
            torch.cuda.synchronize()
            offered.put(tensor)
            results += [answers.get(timeout=DEADLINE_S), bool(torch.equal(tensor, expected(mib, number + 1000)))]
            print(f"round {number}, {mib} MiB: {results[-2:]}", flush=True)
            del tensor
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()
    child.join(timeout=DEADLINE_S)
    print(f"the child ended with {child.exitcode}", flush=True)
    return 0 if all(results) and child.exitcode == 0 else 3


if __name__ == "__main__":
    sys.exit(main())
