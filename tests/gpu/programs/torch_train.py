"""A training loop that rewrites all of its optimizer state every step, run twice from one seed: the losses must be bit-equal.

A stack of linear layers under AdamW in fp32, sized to `--gib` of weights, gradients and moments. Writes one JSON line a step:
pass, step, monotonic time, loss as hex. Between the passes it waits for `--gate FILE`, so that a checkpoint falls into the
second one, which FILE.stop ends before its last step; a loss that differs ends it with status 3. Real driver only, deterministic mode.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
import time

os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"

import torch

WIDTH = 8192
BYTES_PER_PARAMETER = 16


def main() -> int:
    args = parse_arguments()
    torch.use_deterministic_algorithms(mode=True)
    out = args.out.open("a", buffering=1)
    first = train(args, lambda step, loss: write(out, 1, step, loss))
    out.write(json.dumps({"ready": True}) + "\n")
    while not args.gate.exists():
        time.sleep(0.01)
    stop = args.gate.with_suffix(".stop")
    second = train(args, lambda step, loss: write(out, 2, step, loss), pause_s=args.pause_s, stop=stop)
    is_equal = first[: len(second)] == second
    out.write(json.dumps({"done": True, "ok": is_equal, "steps": len(second)}) + "\n")
    return 0 if is_equal else 3


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=int, default=32)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--pause-s", type=float, default=0.0, help="rest after each step of the second pass")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--gate", type=pathlib.Path, required=True)
    return parser.parse_args()


def train(
    args: argparse.Namespace, report: object, pause_s: float = 0.0, stop: pathlib.Path | None = None
) -> list[str]:
    torch.manual_seed(11)
    layers = max(1, args.gib * 2**30 // (WIDTH * WIDTH * BYTES_PER_PARAMETER))
    blocks = [part for _ in range(layers) for part in (torch.nn.Linear(WIDTH, WIDTH, device="cuda"), torch.nn.GELU())]
    model = torch.nn.Sequential(*blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    losses = []
    for step in range(args.steps):
        batch = torch.randn(args.batch, WIDTH, device="cuda")
        optimizer.zero_grad(set_to_none=False)
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.item()).hex())
        report(step, losses[-1])
        time.sleep(pause_s)
        if stop is not None and stop.exists():
            break
    del model, optimizer
    torch.cuda.empty_cache()
    return losses


def write(out: object, which: int, step: int, loss: str) -> None:
    out.write(json.dumps({"pass": which, "step": step, "t": time.monotonic(), "loss": loss}) + "\n")


if __name__ == "__main__":
    sys.exit(main())
