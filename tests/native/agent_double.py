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
INVENTORY, INVENTORY_IS, EXPORT, EXPORTED, REST, RESTED, RELEASE, RELEASED, MAP, MAPPED, OPEN, FAILED, FDS, OPENED = (
    range(10, 24)
)
SHARES, SHARES_ARE, HALT, HALTED, LET_PASS, PASSED, COMMUNICATORS, COMMUNICATORS_ARE = range(24, 32)
FDS_A_FRAME = 200
HEADER = struct.Struct("<IHHII")


def named(numbers, seen):
    """Numbers of a process and what the agent saw under them."""
    return {
        "numbers": list(numbers),
        "devices": [one.st_dev for one in seen],
        "inodes": [one.st_ino for one in seen],
    }


class Peer:
    """One connected process."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.frames: queue.Queue[tuple[int, int, dict] | None] = queue.Queue()
        self.hello: dict = {}
        self.version = 1
        self.sequence = 100
        self.descriptors: list[int] = []
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        self.pid, self.uid, _ = struct.unpack("3i", credentials)

    def send(self, kind, sequence=0, payload=b"{}", *, magic=MAGIC, version=None, claimed=None, fds=()):
        size = len(payload) if claimed is None else claimed
        header = HEADER.pack(magic, self.version if version is None else version, kind, size, sequence)
        if fds:
            socket.send_fds(self.connection, [header], list(fds))
            header = b""
        self.connection.sendall(header + payload)

    def expect(self, kind, deadline_s=5.0):
        """The next frame, which must be of this type; gives its sequence and payload."""
        frame = self.frames.get(timeout=deadline_s)
        assert frame is not None, "the connection ended"
        assert frame[0] == kind
        return frame[1:]

    def ask(self, kind, payload=None, deadline_s=10.0):
        """Send a request of version 2; the type and payload of the next frame that answers it."""
        self.sequence += 1
        self.send(kind, self.sequence, json.dumps(payload or {}).encode())
        return self.answer(deadline_s)

    def answer(self, deadline_s=10.0):
        frame = self.frames.get(timeout=deadline_s)
        assert frame is not None, "the connection ended"
        assert frame[1] == self.sequence
        return frame[0], frame[2]

    def ask_for(self, wanted, kind, payload=None, deadline_s=10.0):
        found, answer = self.ask(kind, payload, deadline_s)
        assert found == wanted, (found, answer)
        return answer

    def inventory(self):
        return self.ask_for(INVENTORY_IS, INVENTORY)

    def export(self, ids=None):
        """A descriptor for each object, which the caller closes."""
        kind, answer, found = self.ask_with_descriptors(EXPORT, {"objects": ids})
        assert (kind, answer) == (EXPORTED, {"count": len(found)})
        return found

    def shares(self):
        """The shared objects, and a descriptor for each by id, which the caller closes."""
        kind, answer, found = self.ask_with_descriptors(SHARES)
        assert kind == SHARES_ARE, answer
        return answer, found

    def ask_with_descriptors(self, kind, payload=None):
        found = {}
        kind, answer = self.ask(kind, payload)
        while kind == FDS:
            assert len(answer["objects"]) <= FDS_A_FRAME
            found.update((name, self.descriptors.pop(0)) for name in answer["objects"])
            kind, answer = self.answer()
        return kind, answer, found

    def rest(self, deadline_ms=5000):
        return self.ask_for(RESTED, REST, {"deadline_ms": deadline_ms})

    def halt(self, deadline_ms=5000):
        return self.ask_for(HALTED, HALT, {"deadline_ms": deadline_ms})

    def let_pass(self, calls=0, wait_ms=1000):
        return self.ask_for(PASSED, LET_PASS, {"calls": calls, "wait_ms": wait_ms})

    def release(self, *, imports=False):
        return self.ask_for(RELEASED, RELEASE, {"imports": True} if imports else {})

    def park(self, places):
        """Placeholders under numbers: number -> what was seen there (os.stat_result) and the token."""
        tokens = [token for _, token in places.values()]
        payload = {"imports": True, "tokens": tokens, **named(places, [seen for seen, _ in places.values()])}
        return self.ask_for(RELEASED, RELEASE, payload)

    def give_numbers(self, places):
        """Descriptors in the place of what is under numbers: number -> what was seen there and the descriptor."""
        payload = named(places, [seen for seen, _ in places.values()])
        self.send(FDS, 1, json.dumps(payload).encode(), fds=[fd for _, fd in places.values()])

    def give(self, fds):
        """The descriptors, without MAP."""
        items = list(fds.items())
        for at in range(0, len(items), FDS_A_FRAME):
            part = dict(items[at : at + FDS_A_FRAME])
            self.send(FDS, 1, json.dumps({"objects": list(part)}).encode(), fds=part.values())

    def map(self, fds):
        self.give(fds)
        return self.ask_for(MAPPED, MAP, {"objects": list(fds)})

    def open_gate(self):
        return self.ask_for(OPENED, OPEN)

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
                assert magic == MAGIC
                assert version == self.version or kind == HELLO
                self.version = version
                payload = self._exactly(size)
                if payload is None:
                    break
                self.frames.put((kind, sequence, json.loads(payload)))
        self.frames.put(None)

    def _exactly(self, size):
        content = b""
        while len(content) < size:
            piece, descriptors, _, _ = socket.recv_fds(self.connection, size - len(content), 253)
            self.descriptors += descriptors
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
                peer.send(WELCOME, payload=b'{"protocol":%d}' % peer.version)
        self.arrivals.put(peer)
