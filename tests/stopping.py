"""Stops a process and waits until it has stopped: SIGSTOP reaches the threads one after the other, after kill() has returned.

Called by every test that looks at what happens to a stopped process.
"""

from __future__ import annotations

import os
import pathlib
import signal
import time


def stop(pid: int, *, timeout: float = 10.0) -> None:
    """SIGSTOP, returning when no thread of the process runs any more."""
    os.kill(pid, signal.SIGSTOP)
    ends = time.monotonic() + timeout
    while any(state not in "Tt" for state in _states(pid)):
        if time.monotonic() > ends:
            message = f"process {pid} did not stop within {timeout} s"
            raise AssertionError(message)
        time.sleep(0.002)


def _states(pid: int) -> list[str]:
    tasks = pathlib.Path(f"/proc/{pid}/task").iterdir()
    return [(task / "stat").read_text().rpartition(")")[2].split()[0] for task in tasks]
