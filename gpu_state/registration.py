"""The control sockets of containers, where preload libraries register their processes (spec/preload-protocol.md).

One socket per container whose state file lies in /run/vgpu/state, or that a thaw holds open before there is a state file.
A peer must be a process of that container's cgroup, else its connection is closed. Owned by one thread; other threads hand
work to it, and ask preloads of staged mode through `links` (preload_link.py).
Around a CRIU dump `pause` takes the socket away and waits until every preload has let go, `resume` brings it back.
Called by freeze.py (through ControlSockets), inventory.py, staged_*.py and the `watch` verb.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import selectors
import socket
import struct
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from gpu_state.preload_frames import Frame, FrameError, FrameType, Hello
from gpu_state.preload_link import PreloadLink
from gpu_state.preload_peer import Peer
from gpu_state.processes import is_in_cgroup
from gpu_state.state_watch import StateWatch

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpu_state.deadline import Deadline

SOCKET_NAME = "agent.sock"
MAX_PEERS = 512  # of one container; each costs a descriptor and at most 64 KiB
DETACH_S = 10.0
_RESCAN_S = 5.0
_SLICE_S = 0.05
_HOLD_S = 30.0


@dataclass(eq=False, slots=True)
class _Container:
    """One container's socket and the preloads connected to it."""

    id: str
    cgroup: str
    listener: socket.socket | None = None
    peers: set[Peer] = field(default_factory=set)
    is_paused: bool = False
    # Until then the container needs no state file: the runtime shim writes it when a restore has ended.
    held_until: float = 0.0


class Registration:
    """All control sockets of the agent."""

    def __init__(self, run_dir: Path) -> None:
        self._state_dir, self._containers_dir = run_dir / "state", run_dir / "containers"
        self._state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        _make_readable(self._containers_dir)
        self._containers: dict[str, _Container] = {}
        self._selector = selectors.DefaultSelector()
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._is_closing = False
        self._watch = StateWatch(self._state_dir)
        self._thread = threading.Thread(target=self._run, daemon=True, name="control-sockets")

    def start(self) -> None:
        """Listen for every known container, and from now on for new ones."""
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._drain_wake)
        if (fd := self._watch.fileno()) is not None:
            self._selector.register(fd, selectors.EVENT_READ, self._watch.clear)
        self._scan()
        self._thread.start()

    def close(self) -> None:
        """Take all sockets away; preloads notice and wait for the next agent."""
        self._is_closing = True
        self._wake()
        self._thread.join(5.0)

    def watch(self, container: str, deadline: Deadline) -> None:
        """Make the container's socket now rather than at the next look into the state folder."""
        self._do(lambda: self._refresh(container, force=True), deadline, "watch")

    def pause(self, container: str, deadline: Deadline) -> None:
        """Close the container's socket, and wait until every preload of it has let go."""
        # A helper thread answers at once unless its process is stopped, and then CRIU could not dump it either.
        soon = deadline.within(DETACH_S)
        self._do(lambda: self._detach(container), soon, "detach")
        while self._peer_count(container):
            soon.check("waiting for the preload library to detach")
            threading.Event().wait(_SLICE_S / 5)

    def resume(self, container: str) -> None:
        """Listen for the container again, if it is still there."""
        self._post(lambda: self._reattach(container))

    def hold(self, container: str, cgroup: str, deadline: Deadline) -> None:
        """Listen for a container that has no state file yet, from now until a while after the deadline."""
        until = time.monotonic() + deadline.remaining() + _HOLD_S
        self._do(lambda: self._hold(container, cgroup, until), deadline, "listening for the preload library")

    def links(self, container: str) -> dict[int, PreloadLink]:
        """Host pid -> a way to ask its preload, of the processes whose preload speaks staged mode and is connected."""
        known = self._containers.get(container)
        peers = list(known.peers) if known else []
        return {peer.pid: PreloadLink(peer) for peer in peers if peer.hello is not None and peer.hello.is_staged}

    def others(self, container: str) -> dict[str, dict[int, PreloadLink]]:
        """Container -> `links`, of all other containers that have any."""
        names = [name for name in list(self._containers) if name != container]
        return {name: links for name in names if (links := self.links(name))}

    def registered(self, container: str) -> dict[int, tuple[str, ...]]:
        """Host pid -> device uuids, of the processes whose preload is connected."""
        known = self._containers.get(container)
        peers = list(known.peers) if known else []
        return {peer.pid: peer.hello.devices for peer in peers if peer.hello is not None}

    def hellos(self, container: str) -> dict[int, Hello]:
        """Host pid -> what its preload said."""
        known = self._containers.get(container)
        peers = list(known.peers) if known else []
        return {peer.pid: peer.hello for peer in peers if peer.hello is not None}

    # ---- the owning thread -------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_closing:
            for key, _ in self._selector.select(_RESCAN_S):
                with contextlib.suppress(OSError):
                    key.data()
            while not self._work.empty():
                self._work.get()()
            self._scan()
        for container in list(self._containers.values()):
            self._drop(container)
        self._watch.close()

    def _scan(self) -> None:
        wanted = {path.stem for path in self._state_dir.glob("*.json") if not path.name.startswith(".")}
        now = time.monotonic()
        for gone in [name for name in self._containers if name not in wanted]:
            if self._containers[gone].held_until < now:
                self._drop(self._containers.pop(gone))
        for name in wanted - self._containers.keys():
            self._refresh(name)

    def _refresh(self, name: str, *, force: bool = False) -> None:
        cgroup = self._cgroup_of(name)
        known = self._containers.get(name)
        if cgroup is None:
            return
        if known is None:
            known = self._containers[name] = _Container(name, cgroup)
        known.cgroup = cgroup
        if not known.is_paused and (known.listener is None or force):
            self._unlisten(known)
            self._listen(known)

    def _hold(self, name: str, cgroup: str, until: float) -> None:
        known = self._containers.get(name)
        if known is None:
            known = self._containers[name] = _Container(name, cgroup)
        known.cgroup, known.held_until = cgroup, until
        if not known.is_paused and known.listener is None:
            self._listen(known)

    def _cgroup_of(self, name: str) -> str | None:
        try:
            doc = json.loads((self._state_dir / f"{name}.json").read_text())
        except (OSError, ValueError, RecursionError):
            return None
        cgroup = doc.get("cgroup") if isinstance(doc, dict) else None
        return cgroup if isinstance(cgroup, str) and cgroup.strip("/") else None

    def _listen(self, container: _Container) -> None:
        folder = self._containers_dir / container.id
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            # Never makes the folder: that it is there tells the shim that the container has the preload.
            _bind_short(listener, folder)
            listener.listen(64)
        except OSError:  # a container without preload, or one that is just going; the next look decides
            listener.close()
            return
        container.listener = listener
        self._selector.register(listener, selectors.EVENT_READ, lambda: self._accept(container, listener))

    def _unlisten(self, container: _Container) -> None:
        if container.listener is None:
            return
        self._selector.unregister(container.listener)
        container.listener.close()
        container.listener = None
        (self._containers_dir / container.id / SOCKET_NAME).unlink(missing_ok=True)

    def _accept(self, container: _Container, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        connection.setblocking(False)
        pid, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if len(container.peers) >= MAX_PEERS or pid <= 0 or not is_in_cgroup(pid, container.cgroup):
            connection.close()
            return
        peer = Peer(connection, pid)
        container.peers.add(peer)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._hear(container, peer))

    def _hear(self, container: _Container, peer: Peer) -> None:
        try:
            frames = peer.receive()
            for frame in frames or ():
                self._answer(peer, frame)
        except (OSError, FrameError):
            frames = None
        if frames is None:
            self._hang_up(container, peer)

    def _answer(self, peer: Peer, frame: Frame) -> None:
        match frame.type:
            case FrameType.HELLO:
                hello = Hello.from_json(frame.payload)
                peer.phase = hello.phase
                peer.hello = hello
                peer.tell(FrameType.WELCOME, frame.sequence, {"protocol": 2 if hello.is_staged else 1})
            case FrameType.PING:
                peer.tell(FrameType.PONG, frame.sequence, {})
            case FrameType.DETACHED:
                raise FrameError("the preload has let go")
            case _:
                pass

    def _hang_up(self, container: _Container, peer: Peer) -> None:
        if peer in container.peers:
            container.peers.discard(peer)
            self._selector.unregister(peer.connection)
            peer.close()

    def _detach(self, name: str) -> None:
        container = self._containers.get(name)
        if container is None:
            return
        container.is_paused = True
        self._unlisten(container)
        for peer in list(container.peers):
            try:
                peer.tell(FrameType.DETACH, 0, {})
            except OSError:
                self._hang_up(container, peer)

    def _reattach(self, name: str) -> None:
        container = self._containers.get(name)
        if container is not None and container.is_paused:
            container.is_paused = False
            self._refresh(name)
            if container.listener is None and container.held_until > time.monotonic():
                self._listen(container)

    def _drop(self, container: _Container) -> None:
        self._unlisten(container)
        for peer in list(container.peers):
            self._hang_up(container, peer)

    # ---- from other threads ------------------------------------------------------------------------

    def _peer_count(self, name: str) -> int:
        container = self._containers.get(name)
        return len(container.peers) if container else 0

    def _post(self, work: Callable[[], None]) -> None:
        self._work.put(work)
        self._wake()

    def _do(self, work: Callable[[], None], deadline: Deadline, phase: str) -> None:
        done = threading.Event()

        def run() -> None:
            try:
                work()
            finally:
                done.set()

        self._post(run)
        while not done.wait(_SLICE_S):
            deadline.check(phase)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b"\0")

    def _drain_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)


def _make_readable(folder: Path) -> None:
    # Any user of the container passes through; the agent's umask would keep them out.
    if not folder.is_dir():
        folder.mkdir(parents=True)
        folder.chmod(0o755)


def _bind_short(listener: socket.socket, folder: Path) -> None:
    # Through the descriptor of the folder, because sun_path holds 107 bytes and a container id alone has 64.
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        path = Path(f"/proc/self/fd/{fd}/{SOCKET_NAME}")
        path.unlink(missing_ok=True)
        listener.bind(str(path))
        path.chmod(0o666)
    finally:
        os.close(fd)
