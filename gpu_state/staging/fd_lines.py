"""JSON lines with descriptors over a Unix stream socket: `{"...", "fds": n}` comes with the next n descriptors.

At most 200 descriptors go with a line (the kernel takes 253); whoever has more sends several lines. Both ends of the staging
worker's socketpair use it; the peer is our own process, so a line that is no JSON is a bug, not an attack.
"""

from __future__ import annotations

import array
import json
import os
import socket
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

FDS_A_LINE = 200
_READ_BYTES = 1 << 16
_ANCILLARY_BYTES = socket.CMSG_SPACE(FDS_A_LINE * array.array("i").itemsize)


class FdLines:
    """One end. Several threads may send; one reads."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._buffer = bytearray()
        self._fds: deque[int] = deque()

    def send(self, doc: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """One line; the descriptors stay the sender's."""
        if len(fds) > FDS_A_LINE:
            raise ValueError(f"{len(fds)} descriptors do not go with one line")
        line = memoryview(json.dumps(doc | {"fds": len(fds)}).encode() + b"\n")
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        with self._sending:
            sent = self._connection.sendmsg([line], rights)
            self._connection.sendall(line[sent:])

    def receive(self) -> tuple[dict[str, Any], list[int]] | None:
        """The next line and its descriptors, now the receiver's; None at the end."""
        while (end := self._buffer.find(b"\n")) < 0:
            data, ancillary, _, _ = self._connection.recvmsg(_READ_BYTES, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
            for level, kind, payload in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    found = array.array("i")
                    found.frombytes(payload[: len(payload) - len(payload) % found.itemsize])
                    self._fds.extend(found)
            if not data:
                return None
            self._buffer += data
        doc = json.loads(self._buffer[:end])
        del self._buffer[: end + 1]
        return doc, [self._fds.popleft() for _ in range(doc.pop("fds", 0))]

    def close(self) -> None:
        """Close the socket and every descriptor that nobody took."""
        while self._fds:
            os.close(self._fds.popleft())
        self._connection.close()
