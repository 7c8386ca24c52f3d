"""The agent's main socket: who may ask, one thread per client, lines in and lines out (spec/agent-protocol.md).

Serves root alone, whatever the socket file's mode says. A client that sends no protocol gets one error and is closed.
Does no GPU work itself: every request goes to service.py. Run by agent.py.
"""

from __future__ import annotations

import contextlib
import json
import logging
import select
import socket
import struct
import threading
import time
from typing import TYPE_CHECKING, Any

from gpu_state.lease_table import Caller
from gpu_state.phases import Phases
from gpu_state.processes import ProcessIdentity, identity_of
from gpu_state.requests import Request
from vgpu_errors import AgentRefused, VgpuError

if TYPE_CHECKING:
    from gpu_state.service import Service

MAX_CLIENTS = 128
MAX_LINE_BYTES = 1 << 20
_HUNG_UP = select.POLLRDHUP | select.POLLHUP | select.POLLERR
log = logging.getLogger("vgpu-agent")


class Server:
    """All clients of the agent."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._guard = threading.Lock()
        self._clients: set[socket.socket] = set()
        self._stop_reason: str | None = None
        self.last_active = time.monotonic()

    def accept(self, listener: socket.socket) -> bool:
        """Take one client in; False where none waits."""
        try:
            connection, _ = listener.accept()
        except (BlockingIOError, InterruptedError):
            return False
        connection.setblocking(True)
        with self._guard:
            is_full = len(self._clients) >= MAX_CLIENTS
            if not is_full:
                self._clients.add(connection)
        if is_full:
            connection.close()
            return True
        threading.Thread(target=self._serve, args=(connection,), daemon=True, name="client").start()
        return True

    def is_idle(self) -> bool:
        """No client, no lease, no verb under way."""
        with self._guard:
            has_clients = bool(self._clients)
        return not has_clients and not self._service.has_work()

    def cancel_all(self, reason: str) -> None:
        """Let every request under way fail for `reason` and hang up on all clients."""
        self._stop_reason = reason
        with self._guard:
            clients = list(self._clients)
        for connection in clients:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RD)

    def _serve(self, connection: socket.socket) -> None:
        try:
            pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if uid != 0:
                _send(connection, _refusal(None, AgentRefused(verb="a client", what=f"uid {uid} is not root")))
                return
            caller = Caller(identity_of(pid) or ProcessIdentity(pid, 0), lambda: self._why_cancelled(connection))
            try:
                self._converse(connection, caller)
            finally:
                self._service.client_gone(caller)
        except OSError as problem:
            log.debug("client: %s", problem)
        finally:
            self._forget(connection)

    def _converse(self, connection: socket.socket, caller: Caller) -> None:
        received = bytearray()
        while piece := connection.recv(65536):
            received += piece
            while (end := received.find(b"\n")) >= 0:
                line = bytes(received[:end])
                del received[: end + 1]
                if not self._answer(connection, caller, line):
                    return
            if len(received) > MAX_LINE_BYTES:
                _send(connection, _refusal(None, AgentRefused(verb="a request", what="the line is too long")))
                return

    def _answer(self, connection: socket.socket, caller: Caller, line: bytes) -> bool:
        self.last_active = time.monotonic()
        try:
            request = Request.from_line(line)
        except AgentRefused as refusal:
            _send(connection, _refusal(None, refusal))
            return False
        phases = Phases(lambda event: _send(connection, {"id": request.id, **event}))
        _send(connection, self._reply(request, caller, phases))
        self.last_active = time.monotonic()
        return True

    def _reply(self, request: Request, caller: Caller, phases: Phases) -> dict[str, Any]:
        try:
            return {"id": request.id, "ok": True, "result": self._service.perform(request, caller, phases)}
        except VgpuError as error:
            log.info("%s: %s", request.verb, error)
            return _refusal(request.id, error)
        except OSError:
            raise  # the client's own connection: nobody is left to be told
        except Exception as bug:
            log.exception("%s failed in a way that nobody foresaw", request.verb)
            return _refusal(request.id, VgpuError(what=f"{request.verb}: {type(bug).__name__}: {bug}"))

    def _why_cancelled(self, connection: socket.socket) -> str | None:
        if self._stop_reason is not None:
            return self._stop_reason
        state = select.poll()
        state.register(connection, _HUNG_UP)
        return "the client went away" if state.poll(0) else None

    def _forget(self, connection: socket.socket) -> None:
        with self._guard:
            self._clients.discard(connection)
        connection.close()
        self.last_active = time.monotonic()


def _refusal(request_id: int | None, error: VgpuError) -> dict[str, Any]:
    return {"id": request_id, "ok": False, "error": error.to_json()}


def _send(connection: socket.socket, doc: dict[str, Any]) -> None:
    connection.sendall(json.dumps(doc).encode() + b"\n", socket.MSG_NOSIGNAL)
