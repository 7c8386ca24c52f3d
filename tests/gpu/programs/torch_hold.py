"""Holds `--gib` GiB of tensors with known sums and checks one of them at every step; the plain subject of suspend and resume.

Appends one JSON line a step: step, monotonic time, ok. A wrong sum ends it with status 3. Real driver only.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import time

import torch


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=int, default=32)
    parser.add_argument("--interval", type=float, default=0.02)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    args = parser.parse_args()
    tensors = [filled(number) for number in range(args.gib)]
    sums = [int(tensor.sum().item()) for tensor in tensors]
    with args.out.open("a", buffering=1) as out:
        for step in range(1, 10**9):
            number = step % len(tensors)
            ok = int(tensors[number].sum().item()) == sums[number]
            out.write(json.dumps({"step": step, "t": time.monotonic(), "ok": ok}) + "\n")
            if not ok:
                return 3
            time.sleep(args.interval)
    return 0


def filled(number: int) -> torch.Tensor:
    """One GiB whose words depend on their place."""
    words = torch.arange(2**27, dtype=torch.int64, device="cuda")
    return words.mul_(6364136223846793005 - number)


if __name__ == "__main__":
    sys.exit(main())
