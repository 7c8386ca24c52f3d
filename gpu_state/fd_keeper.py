"""Holds the descriptors of a container's GPU memory while its processes have given it away, beside the agent.

A descriptor alone keeps device memory and its content (measured on an H200). Were the agent the only holder, its death between
RELEASE and MAP would take the memory of a running application with it. So a small process holds them too, from before RELEASE
until after MAP, and hands them to the next agent over `/run/vgpu/keep/<container>.sock`. It loads no driver and decides nothing.

It ends when told, when the processes whose memory it is have all ended, and when nobody has put anything in for a minute.
Used by staged_freeze.py and staged_thaw.py. The socket is root's alone; one message is one JSON object with its descriptors.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vgpu_errors import NodeError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gpu_state.deadline import Deadline

FDS_A_MESSAGE = 200
EMPTY_S = 60.0
_MESSAGE_BYTES = 1 << 17
_LOOK_S = 1.0
_SLICE_S = 0.01
_ANCILLARY = socket.CMSG_SPACE(FDS_A_MESSAGE * array.array("i").itemsize)
_START = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from gpu_state.fd_keeper import main; "
    "sys.exit(main(int(sys.argv[2]), json.loads(sys.argv[3])))"
)


class Keeper:
    """The agent's side: one keeper process of one container."""

    def __init__(self, folder: Path, container: str) -> None:
        self._path = folder / f"{container}.sock"

    def start(self, pids: Sequence[int]) -> None:
        """Start the process, which watches `pids`; one that is there from before is replaced."""
        try:
            self._start(pids)
        except OSError as problem:
            raise NodeError(what=f"the keeper of GPU memory could not be started: {problem}") from problem

    def _start(self, pids: Sequence[int]) -> None:
        self.drop()
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._socket() as listener:
            _bind_short(listener, self._path)
            listener.listen(4)
            arguments = [json.dumps(sys.path), str(listener.fileno()), json.dumps(list(pids))]
            subprocess.Popen(
                [sys.executable, "-IS", "-c", _START, *arguments],
                pass_fds=[listener.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
            )

    def put(self, fds: Mapping[str, int], deadline: Deadline) -> None:
        """Have it hold these as well; returns when it does."""
        try:
            held = self._put(fds, deadline)
        except OSError as problem:
            raise NodeError(what=f"the keeper of GPU memory does not answer: {problem}") from problem
        if held < len(fds):
            raise NodeError(what=f"the keeper of GPU memory holds {held} objects of {len(fds)}")

    def _put(self, fds: Mapping[str, int], deadline: Deadline) -> int:
        names, held = list(fds), 0
        with self._connected(deadline) as connection:
            for start in range(0, len(names), FDS_A_MESSAGE):
                part = names[start : start + FDS_A_MESSAGE]
                _send(connection, {"put": part}, [fds[name] for name in part])
                held = int(_receive(connection)[0].get("has") or 0)
        return held

    def take(self, deadline: Deadline) -> dict[str, int]:
        """Copies of everything that it holds; empty where there is no keeper."""
        found: dict[str, int] = {}
        try:
            with self._connected(deadline) as connection:
                _send(connection, {"take": True}, [])
                while (names := (message := _receive(connection))[0].get("names")) is not None:
                    found |= dict(zip(names, message[1], strict=True))
        except OSError:
            pass
        return found

    def drop(self) -> None:
        """End it; what it alone held is gone."""
        with contextlib.suppress(OSError), self._socket() as connection:
            connection.settimeout(_LOOK_S)
            _connect_short(connection, self._path)
            _send(connection, {"end": True}, [])
            connection.recv(1)
        self._path.unlink(missing_ok=True)

    @staticmethod
    def _socket() -> socket.socket:
        return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)

    def _connected(self, deadline: Deadline) -> socket.socket:
        connection = self._socket()
        connection.settimeout(max(min(deadline.remaining(), 10.0), 0.1))
        try:
            _connect_short(connection, self._path)
        except OSError:
            connection.close()
            raise
        return connection


# ---- the keeper process --------------------------------------------------------------------------------


class _Held:
    """What the process holds, and for whom."""

    def __init__(self, pids: Sequence[int]) -> None:
        self.fds: dict[str, int] = {}
        self.last_change = time.monotonic()
        self._watched = [pidfd for pid in pids if (pidfd := _pidfd(pid)) is not None]

    def put(self, names: Sequence[str], fds: Sequence[int]) -> None:
        self.last_change = time.monotonic()
        for name, fd in zip(names, fds, strict=True):
            if name in self.fds:
                os.close(self.fds[name])
            self.fds[name] = fd

    def is_wanted(self) -> bool:
        """Somebody lives whose memory it is, or it was started only now."""
        if not self.fds and time.monotonic() - self.last_change > EMPTY_S:
            return False
        return any(not select.select([pidfd], [], [], 0)[0] for pidfd in self._watched)


def main(fd: int, pids: Sequence[int]) -> int:
    """Hold descriptors until nobody can want them any more."""
    listener = socket.socket(fileno=fd)
    listener.settimeout(_LOOK_S)
    held = _Held(pids)
    while held.is_wanted():
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        with connection:
            connection.settimeout(_LOOK_S * 10)
            with contextlib.suppress(OSError, ValueError):
                if _converse(connection, held):
                    return 0
    return 0


def _converse(connection: socket.socket, held: _Held) -> bool:
    """Serve one connection; true when it says to end."""
    while True:
        message, fds = _receive(connection)
        if "put" in message:
            held.put(message["put"], fds)
            _send(connection, {"has": len(held.fds)}, [])
        elif "take" in message:
            names = list(held.fds)
            for start in range(0, len(names), FDS_A_MESSAGE):
                part = names[start : start + FDS_A_MESSAGE]
                _send(connection, {"names": part}, [held.fds[name] for name in part])
            _send(connection, {"all": True}, [])
        else:
            return "end" in message


def _pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def _send(connection: socket.socket, message: dict[str, Any], fds: list[int]) -> None:
    extra = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    connection.sendmsg([json.dumps(message).encode()], extra, socket.MSG_NOSIGNAL)


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    data, ancillary, _, _ = connection.recvmsg(_MESSAGE_BYTES, _ANCILLARY, socket.MSG_CMSG_CLOEXEC)
    numbers = array.array("i")
    for level, kind, raw in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers.frombytes(raw)
    message = json.loads(data) if data else {}
    return message if isinstance(message, dict) else {}, list(numbers)


def _bind_short(listener: socket.socket, path: Path) -> None:
    # Through the descriptor of the folder: a container id and a long run folder pass the 107 bytes of a socket's path.
    fd = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        short = Path(f"/proc/self/fd/{fd}/{path.name}")
        short.unlink(missing_ok=True)
        listener.bind(str(short))
        short.chmod(0o600)
    finally:
        os.close(fd)


def _connect_short(connection: socket.socket, path: Path) -> None:
    fd = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        connection.connect(f"/proc/self/fd/{fd}/{path.name}")
    finally:
        os.close(fd)
