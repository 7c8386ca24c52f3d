"""Several processes that share device memory and write it by turns; the process that forked them says whose turn it is.

Party 0 makes the memory and offers it, the others take it. In each round one party writes all of it and every party checks every
word. Party 0 leaves when FILE.leave is there beside the gate, and the others go on with its memory. What the memory is and how
it is offered is the program's (vmm_share.py, cupy_share.py). With --keep a party keeps its descriptors, which a checkpoint must not
leave behind with the old memory, and an importer looks at the memory through them too. Standard library only; real or software driver.
"""

from __future__ import annotations

import array
import json
import os
import socket
from typing import TYPE_CHECKING, Any, Protocol

import ranks

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

ANSWER_S = 300.0  # a party may be suspended for a while
FIRST_ROUNDS = 3
LOOKS_BY_DESCRIPTOR = 8  # every so many rounds
MOST_DESCRIPTORS = 16
MOST_BYTES = 1 << 16
PULSE = b"."


def parser(description: str) -> argparse.ArgumentParser:
    """The options that both programs have."""
    options = ranks.parser(description, ranks=3)
    options.add_argument("--mib", type=int, default=64)
    options.add_argument("--keep", action="store_true", help="keep the descriptors of the memory open")
    options.add_argument(
        "--tcp", action="store_true", help="with a TCP connection between each party and the coordinator"
    )
    return options


class Memory(Protocol):
    """What one party has of the shared memory."""

    def offer(self) -> tuple[dict[str, Any], list[int]]:
        """Make it; what the others need to take it, and descriptors."""

    def take(self, offered: dict[str, Any], descriptors: list[int]) -> None:
        """Map what another party made."""

    def write(self, number: int) -> None:
        """Fill it with the words of round `number`."""

    def is_right(self, number: int) -> bool:
        """Whether it holds the words of round `number`."""

    def is_right_by(self, descriptors: list[int], number: int) -> bool:
        """The same of what these descriptors are, which stay open."""


class Channel:
    """Messages between the coordinator and one party, with descriptors; a byte of TCP goes with each where there is a connection."""

    def __init__(self, end: socket.socket, pulse: socket.socket | None) -> None:
        self._end, self._pulse = end, pulse
        for one in (end, pulse):
            if one is not None:
                one.settimeout(ANSWER_S)

    def say(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        if self._pulse is not None:
            self._pulse.sendall(PULSE)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        self._end.sendmsg([json.dumps(message).encode()], ancillary)

    def hear(self) -> tuple[dict[str, Any], list[int]]:
        room = socket.CMSG_SPACE(MOST_DESCRIPTORS * 4)
        data, ancillary, _, _ = self._end.recvmsg(MOST_BYTES, room)
        if not data or (self._pulse is not None and self._pulse.recv(1) != PULSE):
            message = "the other end is gone"
            raise EOFError(message)
        found = array.array("i")
        for _, _, content in ancillary:
            found.frombytes(content[: len(content) - len(content) % 4])
        return json.loads(data), list(found)


def run_parties(args: argparse.Namespace, memory_of: Callable[[int], Memory]) -> int:
    """Fork the parties, lead them through their rounds, wait for them."""
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(args.ranks)]
    pulses = [loopback_pair() if args.tcp else (None, None) for _ in range(args.ranks)]

    def work(number: int) -> int:
        for at in range(args.ranks):  # a party that holds the ends of others hides that they have ended
            close(pairs[at][0], pulses[at][0], *((pairs[at][1], pulses[at][1]) if at != number else ()))
        return party(args, number, Channel(pairs[number][1], pulses[number][1]), memory_of(number))

    children = {ranks.fork_rank(number, work): number for number in range(args.ranks)}
    close(*(inner for _, inner in pairs), *(inner for _, inner in pulses))
    channels = {number: Channel(pairs[number][0], pulses[number][0]) for number in range(args.ranks)}
    try:
        lead(channels, ranks.Gate(args.gate))
    except (OSError, EOFError) as problem:
        codes = ranks.end_all(children)
        print(f"a party is lost: {problem}; the parties ended with {codes}", flush=True)
        return max([code for code in codes if code > 0], default=1)
    return max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children)


def loopback_pair() -> tuple[socket.socket, socket.socket]:
    """An established TCP connection of this machine with itself, as ranks of one host have them."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        outer = socket.create_connection(server.getsockname())
        inner, _ = server.accept()
    return outer, inner


def close(*ends: socket.socket | None) -> None:
    for end in ends:
        if end is not None:
            end.close()


def lead(channels: dict[int, Channel], gate: ranks.Gate) -> None:
    """The rounds: whose turn it is, until somebody has seen enough."""
    offered, descriptors = channels[0].hear()
    for number in list(channels)[1:]:
        channels[number].say(offered, descriptors)
        channels[number].hear()
    for descriptor in descriptors:
        os.close(descriptor)
    step = 0
    while not gate.is_stopped():
        if 0 in channels and gate.has("leave"):
            channels.pop(0).say({"do": "leave"})
        alive = list(channels)
        which_pass = 2 if gate.is_open() else 1
        tell([channels[alive[step % len(alive)]]], {"do": "write", "number": step})
        tell(channels.values(), {"do": "check", "number": step, "pass": which_pass})
        step += 1
        if step == FIRST_ROUNDS:
            tell(channels.values(), {"do": "be ready"})
    tell(channels.values(), {"do": "end"})


def tell(channels: Sequence[Channel], message: dict[str, Any]) -> None:
    """To all of them, and wait for each."""
    for channel in channels:
        channel.say(message)
    for channel in channels:
        channel.hear()


def party(args: argparse.Namespace, number: int, channel: Channel, memory: Memory) -> int:
    """One party."""
    lines, steps = ranks.Lines(args.out, number), 0
    kept: list[int] = []
    if number == 0:
        offered, descriptors = memory.offer()
        channel.say(offered, descriptors)
        for descriptor in () if args.keep else descriptors:
            os.close(descriptor)
    else:
        offered, descriptors = channel.hear()
        kept = [os.dup(descriptor) for descriptor in descriptors if args.keep]
        memory.take(offered, descriptors)
        channel.say({})
    while True:
        order, _ = channel.hear()
        if order["do"] == "write":
            memory.write(order["number"])
        elif order["do"] == "check":
            is_right = memory.is_right(order["number"])
            if kept and order["number"] % LOOKS_BY_DESCRIPTOR == 0:
                is_right = is_right and memory.is_right_by(kept, order["number"])
            lines.step(order["pass"], order["number"], ok=is_right)
            steps += order["pass"] == 2
            if not is_right:
                lines.write(done=True, ok=False, steps=steps, differs_at=order["number"])
                return ranks.WRONG
        elif order["do"] == "be ready":
            lines.write(ready=True)
        elif order["do"] == "leave":
            lines.write(left=True)
            return 0
        else:
            lines.write(done=True, ok=steps > 0, steps=steps)
            channel.say({})
            return 0 if steps else ranks.WRONG
        channel.say({})
