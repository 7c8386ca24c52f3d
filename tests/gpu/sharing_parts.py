"""Processes of sharing_roles.py for tests/gpu/sharing_facts.py: started, told what to do, and killed whatever happens.

Every wait has a deadline. Knows nothing of what is found out with them.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, Self

from tests.gpu.bare_node import ROOT

CALLS = ("lock", "checkpoint", "restore", "unlock")


class Refused(Exception):
    """The driver refused what the fact is about: that is the fact."""


class Part:
    """One process of sharing_roles.py."""

    def __init__(self, environment: dict[str, str], role: str, peer: socket.socket | None = None) -> None:
        self.role = role
        command = [sys.executable, "-m", "tests.gpu.sharing_roles", role]
        command += [str(peer.fileno())] if peer is not None else []
        self.process = subprocess.Popen(
            command, env=environment, cwd=ROOT, start_new_session=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            pass_fds=[peer.fileno()] if peer is not None else [],
        )  # fmt: skip
        self.pid = self.process.pid
        self._heard = b""

    def wait_until_ready(self, deadline_s: float = 40) -> Self:
        self._answer(deadline_s)
        return self

    def do(self, name: str, *, deadline_s: float = 20, **order: Any) -> Any:
        """Have it do something; what came of it."""
        self.process.stdin.write(json.dumps({"do": name, **order}).encode() + b"\n")
        self.process.stdin.flush()
        return self._answer(deadline_s).get("result")

    def _answer(self, deadline_s: float) -> dict[str, Any]:
        ends = time.monotonic() + deadline_s
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._heard:
                left = ends - time.monotonic()
                if left <= 0 or not selector.select(left):
                    raise TimeoutError(f"{self.role} ({self.pid}) says nothing for {deadline_s:.0f} s")
                more = os.read(self.process.stdout.fileno(), 1 << 16)
                if not more:
                    raise Refused(f"{self.role} has ended with {self.process.wait(timeout=10)}")
                self._heard += more
        line, _, self._heard = self._heard.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        if "failed" in answer:
            raise Refused(f"{self.role}: {answer['failed']}")
        return answer

    def end(self) -> None:
        end_group(self.process)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """A process that the driver has lost may take its time to die, and nobody waits for that."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=10)


class DriverCalls:
    """The driver's checkpoint calls, made in a process of their own."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._part = Part(environment, "driver")

    def __enter__(self) -> Self:
        try:
            self._part.wait_until_ready()
        except BaseException:
            self._part.end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._part.end()

    def each(self, call: str, pids: list[int], *, deadline_s: float = 40) -> dict[int, tuple[int, float]]:
        """pid -> code and seconds; all processes at once."""
        answers = self._part.do("each", call=call, pids=pids, deadline_s=deadline_s)
        return {int(pid): (int(code), float(taken)) for pid, (code, taken) in answers.items()}

    def codes(self, pids: list[int]) -> str:
        """All four calls, those that come after a failed restore included: "checkpoint 0 0, restore 801 801"."""
        said = []
        for call in CALLS:
            try:
                answers = self.each(call, pids)
            except TimeoutError:
                said.append(f"{call} does not return")
                break
            said.append(f"{call} {' '.join(str(answers[pid][0]) for pid in pids)}")
            print(f"      {call}: {answers}", flush=True)
        return ", ".join(said)

    def used(self) -> dict[int, int]:
        """pid -> bytes on all devices, by NVML."""
        return {int(pid): int(size) for pid, size in self._part.do("used").items()}


@contextlib.contextmanager
def parts(environment: dict[str, str], *roles: str) -> Iterator[list[Part]]:
    """Processes of these roles; two of them have a socket between them."""
    ends = socket.socketpair() if len(roles) == 2 else (None,)
    playing: list[Part] = []
    try:
        playing += [Part(environment, role, end) for role, end in zip(roles, ends, strict=True)]
        for part in playing:
            part.wait_until_ready()
        yield playing
    finally:
        for part in playing:
            part.end()
        for end in ends:
            if end is not None:
                end.close()
