"""Starts the driver worker, hands it calls, kills it when a call runs past its deadline, lets it go when idle.

A query that runs past its deadline (the driver asks the process itself, which may be stopped) does not take the calls of
other containers with it: its worker is replaced, and ends when those are done.

A pool of one: a second worker would cost another cuInit and another half gigabyte on every GPU.
Knows nothing of what a call means; whoever asked must find out the processes' state afterwards (thaw.py does).
Used through remote_driver.py by the agent and by `vgpu doctor`.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from gpu_state.driver_location import worker_environment
from vgpu_errors import DriverCallFailed, DriverMissing, DriverWorkerLost, VgpuError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpu_state.deadline import Deadline

IDLE_S = 60.0
QUERIES = ("node", "get_state")
_SLICE_S = 0.1
_START = "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from gpu_state.driver_worker import main; sys.exit(main(int(sys.argv[2])))"


class _Pending:
    """One call that waits for its answer."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.is_done = threading.Event()
        self.reply: dict[str, Any] | None = None


class _Child:
    """One running worker process and the calls it has not answered yet."""

    def __init__(self, driver_dir: str | None) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-IS", "-c", _START, json.dumps(sys.path), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=worker_environment(driver_dir),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                cwd="/",
            )
        self._connection = ours
        self._guard = threading.Lock()
        self._pending: dict[int, _Pending] = {}
        self._last_id = 0
        self._is_over = False
        self._is_retired = False
        self.last_used = time.monotonic()
        threading.Thread(target=self._read, daemon=True, name="driver-worker-replies").start()

    def send(self, call: str, args: Mapping[str, Any]) -> _Pending:
        """Hand one call over."""
        with self._guard:
            self.last_used = time.monotonic()
            self._last_id += 1
            pending = _Pending(self._last_id)
            if self._is_over:
                pending.is_done.set()
                return pending
            self._pending[pending.number] = pending
            request = {"id": pending.number, "call": call, "args": dict(args)}
            with contextlib.suppress(OSError):  # a worker that died is noticed by the reader
                self._connection.sendall(json.dumps(request).encode() + b"\n")
        return pending

    def is_over(self) -> bool:
        """The worker takes no calls any more."""
        return self._is_over or self._is_retired or self.process.poll() is not None

    def retire(self, abandoned: _Pending) -> None:
        """Nobody waits for this query any more: take no new calls, and end with the last of the others."""
        with self._guard:
            self._pending.pop(abandoned.number, None)
            self._is_retired = True
        self._end_if_retired()

    def _end_if_retired(self) -> None:
        with self._guard:
            is_done = self._is_retired and not self._pending
        if is_done:
            self.end()

    def is_idle(self, idle_s: float) -> bool:
        """Nobody waits for it and nobody has for a while."""
        with self._guard:
            return not self._pending and time.monotonic() - self.last_used >= idle_s

    def end(self) -> None:
        """Kill the worker; calls that still wait learn that it is lost."""
        self.process.kill()
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(subprocess.TimeoutExpired):  # a process stuck in the kernel driver dies later
            self.process.wait(1.0)

    def _read(self) -> None:
        with contextlib.suppress(OSError, ValueError), self._connection.makefile("rb") as lines:
            for line in lines:
                reply = json.loads(line)
                with self._guard:
                    pending = self._pending.pop(reply["id"], None)
                    self.last_used = time.monotonic()
                if pending is not None:
                    pending.reply = reply
                    pending.is_done.set()
                self._end_if_retired()
        with self._guard:
            self._is_over = True
            left, self._pending = list(self._pending.values()), {}
        for pending in left:
            pending.is_done.set()
        self._connection.close()


class WorkerPool:
    """The agent's one driver worker, there when it is needed."""

    def __init__(self, driver_dir: str | None = None, *, idle_s: float = IDLE_S) -> None:
        self._driver_dir = driver_dir
        self._idle_s = idle_s
        self._guard = threading.Lock()
        self._child: _Child | None = None

    def call(self, call: str, args: Mapping[str, Any], deadline: Deadline, phase: str) -> Any:
        """Run one driver call in the worker and return its value."""
        deadline.check(phase)
        child = self._running_child()
        pending = child.send(call, args)
        while not pending.is_done.wait(min(_SLICE_S, max(deadline.remaining(), 0.001))):
            try:
                deadline.check(phase)
            except VgpuError:
                if call in QUERIES:
                    child.retire(
                        pending
                    )  # hangs because its process is stopped: no reason to fail other containers' calls
                else:
                    child.end()  # nothing else stops a call that changes states
                raise
        return _value_of(pending.reply, call, args.get("pid", 0))

    def worker_pid(self) -> int | None:
        """The worker's pid while there is one."""
        with self._guard:
            return None if self._child is None or self._child.is_over() else self._child.process.pid

    def release_when_idle(self) -> None:
        """Let the worker, and with it the device memory of its context, go after a while without calls."""
        with self._guard:
            if self._child is not None and self._child.is_idle(self._idle_s):
                self._child.end()
                self._child = None

    def close(self) -> None:
        """End the worker now."""
        with self._guard:
            if self._child is not None:
                self._child.end()
                self._child = None

    def _running_child(self) -> _Child:
        with self._guard:
            if self._child is None or self._child.is_over():
                self._child = _Child(self._driver_dir)
            return self._child


def _value_of(reply: dict[str, Any] | None, call: str, pid: int) -> Any:
    if reply is None:
        raise DriverWorkerLost(call=call, pid=pid)
    if "failed" in reply:
        raise DriverCallFailed(**reply["failed"])
    if "missing" in reply:
        raise DriverMissing(what=reply["missing"])
    if "bug" in reply:
        raise VgpuError(what=f"the driver worker failed in {call}: {reply['bug']}")
    return reply["value"]
