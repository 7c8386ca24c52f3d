"""The agent's end of the control socket, for the preload's tests (spec/preload-protocol.md).

Speaks frames on a real socket and keeps what it hears; judges nothing and knows no GPU. Every wait has a deadline.
"""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import struct
import threading
import time
from pathlib import Path

MAGIC = 0x55504756
HELLO, WELCOME, DETACH, DETACHED, PING, PONG = range(1, 7)
HEADER = struct.Struct("<IHHII")


class Peer:
    """One connected process."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.frames: queue.Queue[tuple[int, int, dict] | None] = queue.Queue()
        self.hello: dict = {}
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        self.pid, self.uid, _ = struct.unpack("3i", credentials)

    def send(self, kind, sequence=0, payload=b"{}", *, magic=MAGIC, version=1, claimed=None):
        size = len(payload) if claimed is None else claimed
        self.connection.sendall(HEADER.pack(magic, version, kind, size, sequence) + payload)

    def expect(self, kind, deadline_s=5.0):
        """The next frame, which must be of this type; gives its sequence and payload."""
        frame = self.frames.get(timeout=deadline_s)
        assert frame is not None, "the connection ended"
        assert frame[0] == kind
        return frame[1:]

    def wait_end(self, deadline_s=5.0):
        while self.frames.get(timeout=deadline_s) is not None:
            pass

    def hang_up(self):
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()

    def read_all(self):
        with contextlib.suppress(OSError):
            while (header := self._exactly(HEADER.size)) is not None:
                magic, version, kind, size, sequence = HEADER.unpack(header)
                assert (magic, version) == (MAGIC, 1)
                payload = self._exactly(size)
                if payload is None:
                    break
                self.frames.put((kind, sequence, json.loads(payload)))
        self.frames.put(None)

    def _exactly(self, size):
        content = b""
        while len(content) < size:
            piece = self.connection.recv(size - len(content))
            if not piece:
                return None
            content += piece
        return content


class AgentDouble:
    """Listens on the path; `arrivals` holds every peer that said HELLO, welcomed or not."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.arrivals: queue.Queue[Peer] = queue.Queue()
        self.peers: list[Peer] = []
        self.welcomes = True
        self.listener: socket.socket | None = None

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *exception):
        self.stop()

    def start(self, *, accepts=True, backlog=64):
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(str(self.path))
        self.listener.listen(backlog)
        if accepts:
            threading.Thread(target=self._accept, args=(self.listener,), daemon=True).start()

    def stop_listening(self):
        """As before a dump: nobody can come, who is here stays."""
        self.path.unlink(missing_ok=True)
        if self.listener is not None:
            with contextlib.suppress(OSError):
                self.listener.shutdown(socket.SHUT_RDWR)
            self.listener.close()
            self.listener = None

    def stop(self):
        self.stop_listening()
        for peer in self.peers:
            peer.hang_up()
        self.peers.clear()

    def arrival(self, deadline_s=5.0) -> Peer:
        return self.arrivals.get(timeout=deadline_s)

    def nobody_comes_for(self, seconds):
        time.sleep(seconds)
        return self.arrivals.empty()

    def _accept(self, listener):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                peer = Peer(connection)
                self.peers.append(peer)
                threading.Thread(target=self._serve, args=(peer,), daemon=True).start()

    def _serve(self, peer):
        reader = threading.Thread(target=peer.read_all, daemon=True)
        reader.start()
        first = peer.frames.get()
        if first is None:
            return
        kind, _, peer.hello = first
        assert kind == HELLO
        if self.welcomes:
            with contextlib.suppress(OSError):
                peer.send(WELCOME, payload=b'{"protocol":1}')
        self.arrivals.put(peer)
