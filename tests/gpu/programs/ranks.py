"""What the programs of several processes share: their options, how ranks are forked, the lines they write, their gate.

The process that forks the ranks never touches a GPU, so that it can import what takes long once for all of them. A rank that
ends badly takes the others with it: who waits for them must see an end, not a group that hangs in a collective.
A line is one JSON object of one `write`, so that ranks may share the file. Standard library only; real or software driver.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import signal
import time
import traceback
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

# Multicast objects cannot be checkpointed, and some machines forbid them: off before any library looks.
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
os.environ.update(NO_MULTICAST)
WRONG, STUCK = 3, 4
STRAGGLER_S = 30.0  # how long the other ranks may take once one has ended well
_POLL_S = 0.02


def parser(description: str, *, ranks: int) -> argparse.ArgumentParser:
    """The options that all of them have."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--ranks", type=int, default=ranks)
    options.add_argument("--out", type=pathlib.Path, required=True, help="file that the lines are appended to")
    options.add_argument(
        "--gate", type=pathlib.Path, required=True, help="FILE opens the second pass, FILE.stop ends it"
    )
    return options


class Lines:
    """What one rank writes: steps, `ready` when the first pass is over, a verdict at the end."""

    def __init__(self, path: pathlib.Path, rank: int) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._rank = rank

    def write(self, **fields: object) -> None:
        """One line, whole."""
        os.write(self._file, json.dumps({"rank": self._rank, **fields}).encode() + b"\n")

    def step(self, which_pass: int, step: int, **fields: object) -> None:
        """A step of a pass, with the time at which it was over."""
        self.write(**{"pass": which_pass, "step": step, "t": time.monotonic(), **fields})


class Gate:
    """The files by which somebody outside tells the program what to do."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path

    def is_open(self) -> bool:
        """The second pass may begin."""
        return self._path.exists()

    def is_stopped(self) -> bool:
        """Enough was seen."""
        return self.has("stop")

    def has(self, word: str) -> bool:
        """Whether FILE.word is there."""
        return self._path.with_suffix(f".{word}").exists()

    def wait(self) -> None:
        """Until it is open."""
        while not self.is_open():
            time.sleep(_POLL_S)


def run_ranks(count: int, work: Callable[[int], int]) -> int:
    """Fork `count` ranks, wait for all; the status of the first that ended badly, or 0."""
    ranks = {fork_rank(rank, work): rank for rank in range(count)}
    ends_at = None
    while ranks:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            if ends_at is not None and time.monotonic() > ends_at:
                print(f"ranks {sorted(ranks.values())} do not end", flush=True)
                end_all(ranks)
                return STUCK
            time.sleep(_POLL_S)
        elif pid in ranks:
            rank, code = ranks.pop(pid), os.waitstatus_to_exitcode(status)
            if code != 0:
                print(f"rank {rank} ended with {code}", flush=True)
                end_all(ranks)
                return code if code > 0 else 1
            ends_at = ends_at or time.monotonic() + STRAGGLER_S
    return 0


def fork_rank(rank: int, work: Callable[[int], int]) -> int:
    """One rank; leaves by `_exit`, because a library's own end may wait for ranks that are gone."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        code = work(rank)
    except BaseException:  # noqa: BLE001 - it ends here
        traceback.print_exc()
    os._exit(code)


def end_all(ranks: Iterable[int]) -> list[int]:
    """End what is left of these processes; how each of them ended."""
    codes = []
    for pid in ranks:
        os.kill(pid, signal.SIGKILL)  # harmless where it has ended by itself: nobody has waited for it yet
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    return codes
