"""Talks to the node agent: one connection, one request at a time (spec/agent-protocol.md).

Standard library only, because the runtime shim loads it. Never prints, never retries a verb, never kills an agent.
Called by the runtime shim's checkpoint and restore and by `vgpu doctor` and `vgpu ps`.

A lease that `freeze` returns belongs to this connection: close it, or die, and the agent thaws the container.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import time
from typing import TYPE_CHECKING, Any

from vgpu_errors import AgentRefused, AgentUnreachable, DeadlineExceeded, from_json

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType
    from typing import Self

    Event = Mapping[str, Any]

DEFAULT_SOCKET = "/run/vgpu/agent.sock"
AGENT_PROGRAM = "/usr/bin/vgpu-agent"
AGENT_LOG = "/var/log/vgpu/agent.log"
MAX_LINE_BYTES = 32 << 20  # the answer of a staged freeze lists every object
_POLL_S = 0.05
_FAILED_STARTS = 3


class AgentClient:
    """One connection to the agent; a context manager."""

    def __init__(self, connection: socket.socket, socket_path: str) -> None:
        self._connection = connection
        self._socket_path = socket_path
        self._received = bytearray()
        self._last_id = 0

    @classmethod
    def connect(
        cls,
        socket_path: str = DEFAULT_SOCKET,
        *,
        start_on_demand: bool = True,
        deadline_s: float = 10.0,
        program: str = AGENT_PROGRAM,
    ) -> AgentClient:
        """Connect; where nobody listens, start `vgpu-agent --on-demand` and wait for its socket until the deadline.

        An agent that fails to start again and again is not waited for.
        """
        ends_at = time.monotonic() + deadline_s
        started: int | None = None
        failures = 0
        while True:
            try:
                return cls(_connected(socket_path, ends_at), socket_path)
            except OSError as problem:
                if not start_on_demand:
                    raise AgentUnreachable(socket=socket_path, what=problem.strerror or str(problem)) from problem
                if time.monotonic() >= ends_at:
                    raise AgentUnreachable(
                        socket=socket_path, what=f"{problem.strerror or problem} after {deadline_s:g} s"
                    ) from problem
            status = None if started is None else _status_of(started)
            failures += bool(status)
            if failures == _FAILED_STARTS:
                raise AgentUnreachable(socket=socket_path, what=f"{program} ended with status {status}; {_words_at()}")
            if started is None or status is not None:
                # An agent that was just leaving may still hold the lock: the next try gets it.
                started = start_agent(program, socket_path)
            time.sleep(_POLL_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def is_connected(self) -> bool:
        """Whether there is still an agent at the other end; one that hangs counts as there."""
        waiting = select.poll()
        waiting.register(self._connection, select.POLLRDHUP)
        return not waiting.poll(0)  # POLLHUP and POLLERR come unasked; what was not read yet does not hide them

    def hang_up(self) -> None:
        """From another thread: whoever waits for an answer gets none, and the agent undoes what it had begun."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the connection up; the agent thaws what a lease of it still holds."""
        self._connection.close()

    def request(
        self,
        verb: str,
        args: Mapping[str, Any] | None = None,
        *,
        deadline_s: float,
        on_event: Callable[[Event], None] | None = None,
    ) -> dict[str, Any]:
        """Send one verb and return its result; the agent's error comes back as the same class."""
        self._last_id += 1
        ends_at = time.monotonic() + deadline_s
        self._send({"id": self._last_id, "verb": verb, "args": dict(args or {})}, ends_at, verb, deadline_s)
        while True:
            reply = self._read_reply(ends_at, verb, deadline_s)
            if reply.get("id") != self._last_id:
                continue  # the rest of a request that ran past its deadline here
            if "event" in reply:
                if on_event is not None:
                    on_event(reply)
                continue
            if reply.get("ok") is True:
                result = reply.get("result")
                return result if isinstance(result, dict) else {}
            error = reply.get("error")
            raise from_json(error if isinstance(error, dict) else {"message": f"the agent answered {reply!r}"})

    def _send(self, request: dict[str, Any], ends_at: float, verb: str, deadline_s: float) -> None:
        try:
            self._connection.settimeout(_left(ends_at))
            self._connection.sendall(json.dumps(request).encode() + b"\n")
        except TimeoutError as problem:
            raise DeadlineExceeded(phase=f"sending {verb} to the agent", seconds=f"{deadline_s:g}") from problem
        except OSError as problem:
            raise AgentUnreachable(socket=self._socket_path, what=problem.strerror or str(problem)) from problem

    def _read_reply(self, ends_at: float, verb: str, deadline_s: float) -> dict[str, Any]:
        line = self._read_line(ends_at, verb, deadline_s)
        try:
            reply = json.loads(line)
        except (ValueError, RecursionError) as problem:
            raise AgentUnreachable(socket=self._socket_path, what="its answer is no JSON") from problem
        if not isinstance(reply, dict):
            raise AgentUnreachable(socket=self._socket_path, what="its answer is no JSON object")
        if reply.get("id") is None and reply.get("ok") is False:
            error = reply.get("error")
            raise from_json(error) if isinstance(error, dict) else AgentRefused(verb=verb, what="no reason given")
        return reply

    def _read_line(self, ends_at: float, verb: str, deadline_s: float) -> bytes:
        while (end := self._received.find(b"\n")) < 0:
            if len(self._received) > MAX_LINE_BYTES:
                raise AgentUnreachable(socket=self._socket_path, what="its answer has no end")
            try:
                self._connection.settimeout(_left(ends_at))
                piece = self._connection.recv(65536)
            except TimeoutError as problem:
                raise DeadlineExceeded(phase=f"the agent's {verb}", seconds=f"{deadline_s:g}") from problem
            except OSError as problem:
                raise AgentUnreachable(socket=self._socket_path, what=problem.strerror or str(problem)) from problem
            if not piece:
                raise AgentUnreachable(socket=self._socket_path, what=f"it closed the connection during {verb}")
            self._received += piece
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        return line


def start_agent(program: str, socket_path: str) -> int:
    """Start the agent in a session of its own, holding nothing of ours: no stdio, no inherited descriptor, no cwd."""
    arguments = [program, "--on-demand", "--socket", socket_path]
    environment = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
    try:
        return os.posix_spawn(program, arguments, environment, file_actions=_detached_stdio(), setsid=True)
    except OSError as problem:
        raise AgentUnreachable(socket=socket_path, what=f"{program}: {problem.strerror}") from problem


def _detached_stdio() -> list[tuple[int, ...] | tuple[int, int, str, int, int]]:
    # Descriptors that an engine passed without close-on-exec (console, attach pipes) would keep conmon waiting for ever.
    log = AGENT_LOG if os.path.isdir(os.path.dirname(AGENT_LOG)) else os.devnull  # noqa: PTH112, PTH120 - no pathlib here
    actions: list[Any] = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - no pathlib here
        fd = int(name)
        if fd > 2 and _is_inherited(fd):
            actions.append((os.POSIX_SPAWN_CLOSE, fd))
    return actions


def _is_inherited(fd: int) -> bool:
    try:
        return os.get_inheritable(fd)
    except OSError:  # the descriptor that listed the folder
        return False


def _connected(socket_path: str, ends_at: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        connection.settimeout(_left(ends_at))
        connection.connect(socket_path)
    except BaseException:
        connection.close()
        raise
    return connection


def _status_of(pid: int) -> int | None:
    """How the agent ended, as a shell counts it; None while it runs, 0 where somebody else has asked already."""
    try:
        ended, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return 0
    code = os.waitstatus_to_exitcode(status)
    return None if ended != pid else 128 - code if code < 0 else code


def _words_at() -> str:
    if os.path.exists(AGENT_LOG):  # noqa: PTH110 - no pathlib here
        return f"{AGENT_LOG} has its words"
    return f"its words are kept once {os.path.dirname(AGENT_LOG)} exists"  # noqa: PTH120


def _left(ends_at: float) -> float:
    return max(ends_at - time.monotonic(), 0.001)
