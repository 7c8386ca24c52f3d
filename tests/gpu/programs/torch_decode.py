"""Transformer decode on a static cache inside one CUDA graph, twice over the same tokens: the second pass must equal the first.

A decoder of Llama's shape with random bf16 weights, padded with known tensors to `--gib`. Writes one JSON line a token:
pass, step, monotonic time, token. After the first pass it waits for `--gate FILE` to appear, and then repeats the second until
FILE.stop does, so that checkpoints fall into it; while FILE.rest exists it stands still between two tokens. A token or a padding
sum that differs ends it with status 3. Real driver only.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import time

import torch

HIDDEN, HEADS, HEAD, INNER, VOCABULARY = 4096, 32, 128, 14336, 32000
LAYER_PARAMETERS = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER


def main() -> int:
    args = parse_arguments()
    torch.manual_seed(7)
    decoder = Decoder(args.layers, args.context)
    padding = Padding(args.gib)
    out = args.out.open("a", buffering=1)
    first = decoder.run(args.tokens, lambda step, token: write(out, 1, step, token))
    out.write(json.dumps({"ready": True, "bytes": torch.cuda.memory_allocated()}) + "\n")
    while not args.gate.exists():
        decoder.run(args.idle_tokens, lambda _step, _token: None)
    verdict = repeat(decoder, first, out, args.gate.with_suffix(".stop")) | {"padding": padding.is_right()}
    verdict["ok"] = verdict["differs_at"] is None and verdict["padding"]
    out.write(json.dumps(verdict) + "\n")
    return 0 if verdict["ok"] else 3


def repeat(decoder: Decoder, first: list[int], out: object, stop: pathlib.Path) -> dict[str, object]:
    """Second passes until somebody has seen enough; each is compared with the first one."""
    tokens, differs_at = 0, None
    rest = stop.with_suffix(".rest")

    def report(step: int, token: int) -> None:
        write(out, 2, step, token)
        while rest.exists() and not stop.exists():
            time.sleep(0.005)

    while not stop.exists() and differs_at is None:
        again = decoder.run(len(first), report, until=stop)
        tokens += len(again)
        differs_at = next((at for at, pair in enumerate(zip(first, again, strict=False)) if pair[0] != pair[1]), None)
    return {"done": True, "tokens": tokens, "differs_at": differs_at}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=int, default=16, help="GiB of device memory in all")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--idle-tokens", type=int, default=50)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--gate", type=pathlib.Path, required=True)
    return parser.parse_args()


def write(out: object, which: int, step: int, token: int) -> None:
    out.write(json.dumps({"pass": which, "step": step, "t": time.monotonic(), "token": token}) + "\n")


class Layer:
    def __init__(self, context: int) -> None:
        self.query_key_value = weight(HIDDEN, 3 * HIDDEN)
        self.output = weight(HIDDEN, HIDDEN)
        self.gate_up = weight(HIDDEN, 2 * INNER)
        self.down = weight(INNER, HIDDEN)
        self.keys = torch.zeros(1, HEADS, context, HEAD, dtype=torch.bfloat16, device="cuda")
        self.values = torch.zeros_like(self.keys)

    def __call__(self, hidden: torch.Tensor, position: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        query, key, value = (normed(hidden) @ self.query_key_value).view(3, 1, HEADS, 1, HEAD).unbind(0)
        self.keys.index_copy_(2, position, key)
        self.values.index_copy_(2, position, value)
        mixed = (
            (query @ self.keys.transpose(-1, -2))
            .float()
            .mul(HEAD**-0.5)
            .masked_fill(~mask, float("-inf"))
            .softmax(-1)
            .to(torch.bfloat16)
        ) @ self.values
        hidden = hidden + mixed.reshape(1, HIDDEN) @ self.output
        gate, up = (normed(hidden) @ self.gate_up).chunk(2, dim=-1)
        return hidden + (torch.nn.functional.silu(gate) * up) @ self.down


class Decoder:
    """The static buffers, the graph, and the loop around it."""

    def __init__(self, layers: int, context: int) -> None:
        self.context = context
        self.embedding = weight(VOCABULARY, HIDDEN)
        self.layers = [Layer(context) for _ in range(layers)]
        self.token = torch.zeros(1, dtype=torch.int64, device="cuda")
        self.position = torch.zeros(1, dtype=torch.int64, device="cuda")
        self.places = torch.arange(context, device="cuda")
        self.graph = self.capture()

    def step(self) -> None:
        mask = (self.places <= self.position).view(1, 1, 1, -1)
        hidden = self.embedding[self.token]
        for layer in self.layers:
            hidden = layer(hidden, self.position, mask)
        self.token.copy_((normed(hidden) @ self.embedding.t()).argmax(dim=-1))
        self.position.add_(1)

    def capture(self) -> torch.cuda.CUDAGraph:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        return graph

    def run(self, tokens: int, report: object, until: pathlib.Path | None = None) -> list[int]:
        self.token.fill_(1)
        self.position.zero_()
        for layer in self.layers:  # what an earlier pass left there changes the last bits of masked attention
            layer.keys.zero_()
            layer.values.zero_()
        found = []
        for step in range(min(tokens, self.context)):
            self.graph.replay()
            found.append(int(self.token.item()))
            report(step, found[-1])
            if until is not None and step % 32 == 0 and until.exists():
                break
        return found


class Padding:
    """Tensors that nobody touches, with the sums they must keep."""

    def __init__(self, gib: int) -> None:
        missing = max(0, gib * 2**30 - torch.cuda.memory_allocated())
        self.tensors = [filled(number) for number in range(missing // 2**30)]
        self.sums = [int(tensor.sum().item()) for tensor in self.tensors]

    def is_right(self) -> bool:
        return self.sums == [int(tensor.sum().item()) for tensor in self.tensors]


def filled(number: int) -> torch.Tensor:
    words = torch.arange(2**27, dtype=torch.int64, device="cuda")
    return words.mul_(6364136223846793005 - number)


def weight(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, dtype=torch.bfloat16, device="cuda") * 0.02


def normed(hidden: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(hidden, (HIDDEN,))


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())
