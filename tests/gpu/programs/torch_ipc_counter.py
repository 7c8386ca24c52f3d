"""A producer and a consumer that share tensors through torch.multiprocessing all the time, on one GPU, with events of CUDA IPC.

Two tensors of `--mib` and 1 MiB stay shared for the whole run; every fourth round a new one is sent, checked and let go. In each
round the producer writes, the consumer waits for the producer's event on the device, checks every word and writes others, and the
producer waits for the consumer's event and checks those. A wrong word ends it with status 3. Real driver only; `--cpu` rehearses
the steps with tensors in shared host memory, without events.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import ranks
import torch
import torch.multiprocessing as multiprocessing

if TYPE_CHECKING:
    import argparse

WORDS_A_MIB = 2**18
FRESH_EVERY, FRESH_MIB = 4, 4
FIRST_ROUNDS = 3
ANSWER_S = 300.0  # the other side may be suspended for a while
CONSUMER_OFFSET = 1000


def main() -> int:
    parser = ranks.parser(__doc__, ranks=2)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--cpu", action="store_true", help="host memory: a rehearsal of the steps")
    args = parser.parse_args()
    context = multiprocessing.get_context("fork")  # nothing of CUDA has begun yet
    there, back = context.Queue(), context.Queue()
    sides = {0: produce, 1: consume}
    return ranks.run_ranks(2, lambda rank: sides[rank](Side(args, rank), there, back))


class Side:
    """What both sides have: device, lines, an event that the other one waits for."""

    def __init__(self, args: argparse.Namespace, rank: int) -> None:
        self.args, self.lines, self.gate = args, ranks.Lines(args.out, rank), ranks.Gate(args.gate)
        self.device = torch.device("cpu") if args.cpu else torch.device("cuda", 0)
        self._event = None if args.cpu else torch.cuda.Event(interprocess=True)
        self._other: torch.cuda.Event | None = None

    def words(self, mib: int, seed: int) -> torch.Tensor:
        """Words that depend on their place and on `seed`."""
        return torch.arange(mib * WORDS_A_MIB, dtype=torch.int32, device=self.device) * 3 + seed

    def handle(self) -> bytes | None:
        """The event's, for the other side."""
        if self._event is None:
            return None
        self._event.record()
        return self._event.ipc_handle()

    def open_event(self, handle: bytes | None) -> None:
        self._other = None if handle is None else torch.cuda.Event.from_ipc_handle(self.device, handle)

    def record(self) -> None:
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """On the device: what comes next in the stream comes after what the other side recorded."""
        if self._other is not None:
            torch.cuda.current_stream().wait_event(self._other)

    def fill(self, tensors: list[torch.Tensor], seed: int) -> None:
        for tensor in tensors:
            tensor.copy_(self.words(tensor.numel() // WORDS_A_MIB, seed))

    def are_right(self, tensors: list[torch.Tensor], seed: int) -> bool:
        return all(torch.equal(tensor, self.words(tensor.numel() // WORDS_A_MIB, seed)) for tensor in tensors)

    def end(self, steps: int, *, is_right: bool) -> int:
        self.lines.write(done=True, ok=is_right and steps > 0, steps=steps)
        return 0 if is_right and steps > 0 else ranks.WRONG


def produce(side: Side, there: Any, back: Any) -> int:
    """Writes first in every round, and says when it is over."""
    held = [side.words(mib, 0) for mib in (side.args.mib, 1)]
    there.put((held, side.handle()))
    side.open_event(back.get(timeout=ANSWER_S))
    step, steps, is_right = 0, 0, True
    while is_right and not side.gate.is_stopped():
        which_pass = 2 if side.gate.is_open() else 1
        side.fill(held, step)
        fresh = [side.words(FRESH_MIB, step)] if step % FRESH_EVERY == 0 else []
        side.record()
        there.put((which_pass, step, fresh))
        was_right = back.get(timeout=ANSWER_S)
        side.wait()
        is_right = was_right and side.are_right(held, step + CONSUMER_OFFSET)
        side.lines.step(which_pass, step, ok=is_right)
        steps += which_pass == 2
        step += 1
        if step == FIRST_ROUNDS:
            side.lines.write(ready=True)
    there.put(None)
    back.get(timeout=ANSWER_S)  # the consumer lets go before the memory's owner ends
    return side.end(steps, is_right=is_right)


def consume(side: Side, there: Any, back: Any) -> int:
    """Checks what came, writes what the producer then checks."""
    held, handle = there.get(timeout=ANSWER_S)
    side.open_event(handle)
    back.put(side.handle())
    steps, is_right = 0, True
    while (told := there.get(timeout=ANSWER_S)) is not None:
        which_pass, step, fresh = told
        side.wait()
        is_right = is_right and side.are_right([*held, *fresh], step)
        side.fill(held, step + CONSUMER_OFFSET)
        side.record()
        side.lines.step(which_pass, step, ok=is_right)
        steps += which_pass == 2
        if step == FIRST_ROUNDS - 1:
            side.lines.write(ready=True)
        del told, fresh
        back.put(is_right)
    del held
    back.put(True)
    back.close()
    back.join_thread()
    return side.end(steps, is_right=is_right)


if __name__ == "__main__":
    sys.exit(main())
