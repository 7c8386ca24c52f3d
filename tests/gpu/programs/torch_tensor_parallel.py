"""Transformer decode split over ranks, the all-reduces of NCCL inside one CUDA graph, twice over: equal tokens, or status 3.

Each rank holds its heads and its part of the inner layer of a decoder of Llama's shape with random bf16 weights, a static cache,
and known padding up to `--gib`. Two all-reduces a layer join the parts. Each rank writes one JSON line a token. After the first
pass the ranks decode on until `--gate FILE` is there, and then repeat the second pass until FILE.stop is. Real driver only;
`--cpu` rehearses without a graph.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import ranks
import torch
import torch.distributed as dist
import torch_ranks

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

HEAD = 128
ASKED_EVERY = 32  # tokens between two looks at the gate, which the ranks take together
WARM_UP = 3


def main() -> int:
    args = parse_arguments()
    return ranks.run_ranks(args.ranks, lambda rank: run(args, rank))


def parse_arguments() -> argparse.Namespace:
    parser = torch_ranks.parser(__doc__)
    parser.add_argument("--gib", type=int, default=4, help="GiB of device memory a rank, with padding")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=1500)
    return parser.parse_args()


@torch.inference_mode()
def run(args: argparse.Namespace, rank: int) -> int:
    """One rank: the first pass, idle decoding, second passes until somebody has seen enough."""
    device = torch_ranks.join(args, rank)
    lines, gate = ranks.Lines(args.out, rank), ranks.Gate(args.gate)
    decoder = Decoder(args, rank, device)
    padding = torch_ranks.Padding(args.gib, device)
    first = decoder.decode(args.tokens, lambda step, token: lines.step(1, step, token=token))
    lines.write(ready=True, bytes=torch_ranks.held_bytes(device))
    while not torch_ranks.agree(gate.is_open(), device):
        decoder.decode(ASKED_EVERY, lambda _step, _token: None)
    compared, differs_at, is_over = 0, None, False
    while not is_over and differs_at is None:
        again = decoder.decode(args.tokens, lambda step, token: lines.step(2, step, token=token), until=gate)
        compared += len(again)
        differs_at = next((at for at, pair in enumerate(zip(first, again, strict=False)) if pair[0] != pair[1]), None)
        is_over = torch_ranks.agree(gate.is_stopped(), device)
    verdict = {"steps": compared, "differs_at": differs_at, "padding": padding.is_right()}
    is_right = differs_at is None and compared > 0 and verdict["padding"]
    lines.write(done=True, ok=is_right, **verdict)
    return 0 if is_right else ranks.WRONG


class Layer:
    """This rank's part of one layer: some of the heads, some of the inner width."""

    def __init__(
        self, args: argparse.Namespace, draw: Callable[[int, int], torch.Tensor], device: torch.device
    ) -> None:
        self.hidden, self.heads = args.hidden, args.hidden // HEAD // args.ranks
        width, inner = self.heads * HEAD, args.hidden * 7 // 2 // args.ranks
        self.query_key_value = draw(args.hidden, 3 * width)
        self.output = draw(width, args.hidden)
        self.gate_up = draw(args.hidden, 2 * inner)
        self.down = draw(inner, args.hidden)
        self.keys = torch.zeros(1, self.heads, args.context, HEAD, dtype=torch.bfloat16, device=device)
        self.values = torch.zeros_like(self.keys)

    def __call__(self, hidden: torch.Tensor, position: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        query, key, value = (normed(hidden) @ self.query_key_value).view(3, 1, self.heads, 1, HEAD).unbind(0)
        self.keys.index_copy_(2, position, key)
        self.values.index_copy_(2, position, value)
        scores = (query @ self.keys.transpose(-1, -2)).float().mul(HEAD**-0.5).masked_fill(~mask, float("-inf"))
        mixed = scores.softmax(-1).to(torch.bfloat16) @ self.values
        hidden = hidden + joined(mixed.reshape(1, -1) @ self.output)
        gate, up = (normed(hidden) @ self.gate_up).chunk(2, dim=-1)
        return hidden + joined((torch.nn.functional.silu(gate) * up) @ self.down)


class Decoder:
    """The static buffers, the graph, and the loop around it."""

    def __init__(self, args: argparse.Namespace, rank: int, device: torch.device) -> None:
        def draw(rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
            return torch.randn(rows, columns, dtype=torch.bfloat16, device=device, generator=generator) * 0.02

        common, own = (torch.Generator(device).manual_seed(seed) for seed in (7, 100 + rank))
        self.context, self.device = args.context, device
        self.embedding = draw(args.vocabulary, args.hidden, common)  # the same in every rank, as the tokens are
        self.layers = [Layer(args, lambda rows, columns: draw(rows, columns, own), device) for _ in range(args.layers)]
        self.token = torch.zeros(1, dtype=torch.int64, device=device)
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        self.places = torch.arange(args.context, device=device)
        self.replay: Callable[[], None] = self.step if args.cpu else self.captured().replay

    def step(self) -> None:
        mask = (self.places <= self.position).view(1, 1, 1, -1)
        hidden = self.embedding[self.token]
        for layer in self.layers:
            hidden = layer(hidden, self.position, mask)
        self.token.copy_((normed(hidden) @ self.embedding.t()).argmax(dim=-1))
        self.position.add_(1)

    def captured(self) -> torch.cuda.CUDAGraph:
        """One step in a graph, collectives included; the communicator exists before, for it cannot be made in a capture."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                self.step()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # The watchdog thread of the process group asks for events meanwhile, which only this mode allows.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self.step()
        return graph

    def decode(self, tokens: int, report: Callable[[int, int], None], until: ranks.Gate | None = None) -> list[int]:
        self.token.fill_(1)
        self.position.zero_()
        for layer in self.layers:  # what an earlier pass left there changes the last bits of masked attention
            layer.keys.zero_()
            layer.values.zero_()
        found = []
        for step in range(min(tokens, self.context)):
            self.replay()
            found.append(int(self.token.item()))
            report(step, found[-1])
            if until is not None and step % ASKED_EVERY == 0 and torch_ranks.agree(until.is_stopped(), self.device):
                break
        return found


def joined(part: torch.Tensor) -> torch.Tensor:
    """The sum over all ranks."""
    dist.all_reduce(part)
    return part


def normed(hidden: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(hidden, (hidden.shape[-1],))


if __name__ == "__main__":
    sys.exit(main())
