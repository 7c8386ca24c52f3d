"""One connection to a preload: frames and descriptors in, requests out, each with a deadline (spec/preload-protocol.md).

Read by the thread of registration.py alone; any thread may ask, one at a time. Believes nothing: descriptors that nobody
asked for end the connection, and are closed. Touches no GPU. Used by registration.py and preload_link.py.
"""

from __future__ import annotations

import array
import contextlib
import os
import queue
import select
import socket
import threading
from typing import TYPE_CHECKING, Any

from gpu_state.preload_frames import (
    MAX_ANSWER_PAYLOAD,
    MAX_FDS,
    MAX_PAYLOAD,
    STAGED_VERSION,
    VERSION,
    Frame,
    FrameError,
    FrameReader,
    FrameType,
    Hello,
)
from vgpu_errors import PreloadFailed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gpu_state.deadline import Deadline
    from gpu_state.open_descriptors import Place

_READ_BYTES = 1 << 18
_SLICE_S = 0.05
LOST = "its connection ended"
_OWNER_SEND_S = 0.5
_ANCILLARY = socket.CMSG_SPACE(MAX_FDS * array.array("i").itemsize)


class Answer:
    """The frames that answer one request, and the descriptors that came with them, by object id."""

    def __init__(self, payload: dict[str, Any], fds: dict[int, int]) -> None:
        self.payload = payload
        self.fds = fds


class Peer:
    """One preload's connection."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self.connection = connection
        self.pid = pid
        self.hello: Hello | None = None
        # What the preload's answers have shown since HELLO: "open", "halted", "rested" or "released".
        self.phase = "open"
        self._reader = FrameReader()
        self._asking = threading.Lock()
        self._sending = threading.Lock()
        self._sequence = 1 << 16  # clear of what the owner thread uses
        self._answers: queue.SimpleQueue[Frame | None] | None = None
        self._may_send_fds = False
        self._is_closed = False
        self._fds: list[int] = []
        self._collected: dict[int, int] = {}

    # ---- the owning thread -----------------------------------------------------------------------------

    def receive(self) -> list[Frame] | None:
        """Frames that the owner must deal with; None where the peer has hung up. Answers go to whoever asked."""
        data, ancillary, _, _ = self.connection.recvmsg(_READ_BYTES, _ANCILLARY, socket.MSG_CMSG_CLOEXEC)
        self._fds += _descriptors(ancillary)
        if not data:
            return None
        if self._fds and not self._may_send_fds:
            raise FrameError("descriptors that nobody asked for")
        return [frame for frame in self._reader.feed(data) if not self._is_answer(frame)]

    def close(self) -> None:
        """End the connection; whoever still waits for an answer learns of it."""
        self._is_closed = True
        answers = self._answers
        if answers is not None:
            answers.put(None)
        with contextlib.suppress(OSError):
            self.connection.close()
        self._close_fds()

    def tell(self, kind: FrameType, sequence: int, payload: dict[str, Any]) -> None:
        """Send one small frame from the owning thread, which must not wait for a peer that does not read."""
        version = STAGED_VERSION if self.hello is not None and self.hello.is_staged else VERSION
        if not self._sending.acquire(timeout=_OWNER_SEND_S):
            raise OSError("the preload does not read")
        try:
            self.connection.send(Frame(kind, sequence, payload, version).to_bytes(), socket.MSG_NOSIGNAL)
        finally:
            self._sending.release()

    def _is_answer(self, frame: Frame) -> bool:
        if frame.type == FrameType.FDS:
            self._take_fds(frame.payload)
            return True
        answers = self._answers
        if answers is None or frame.sequence != self._sequence:
            return False
        answers.put(frame)
        return True

    def _take_fds(self, payload: dict[str, Any]) -> None:
        ids = payload.get("objects")
        if not isinstance(ids, list) or not all(isinstance(number, int) for number in ids) or len(ids) > len(self._fds):
            raise FrameError("descriptors and object ids do not match")
        for number in ids:
            fd = self._fds.pop(0)
            if number in self._collected:
                os.close(self._collected[number])
            self._collected[number] = fd

    def _close_fds(self) -> None:
        for fd in [*self._fds, *self._collected.values()]:
            with contextlib.suppress(OSError):
                os.close(fd)
        self._fds.clear()
        self._collected.clear()

    # ---- from other threads ------------------------------------------------------------------------------

    def ask(
        self,
        kind: FrameType,
        payload: dict[str, Any],
        *,
        deadline: Deadline,
        answer: FrameType,
        fds: Sequence[tuple[int, int]] = (),
        places: Sequence[tuple[Place, int]] = (),
    ) -> Answer:
        """Send a request, before it the descriptors `fds` (object id, fd) and `places` (number, fd), and wait for its answer."""
        what = f"{kind.name} of process {self.pid}"
        self._take_turn(deadline, what)
        try:
            self._close_fds()
            self._answers = queue.SimpleQueue()
            self._sequence += 1
            self._may_send_fds = answer in (FrameType.EXPORTED, FrameType.SHARES_ARE)
            self._reader.max_payload = MAX_ANSWER_PAYLOAD
            self._send_all(kind, payload, [*_for_objects(fds), *_for_places(places)], deadline, what)
            return self._await(answer, deadline, what)
        finally:
            self._answers, self._may_send_fds = None, False
            self._reader.max_payload = MAX_PAYLOAD
            self._asking.release()

    def _take_turn(self, deadline: Deadline, what: str) -> None:
        """One request at a time; another thread's may take as long as a process needs to come to rest."""
        while not self._asking.acquire(timeout=_SLICE_S):
            deadline.check(what)

    def _send_all(
        self,
        kind: FrameType,
        payload: dict[str, Any],
        parcels: Sequence[tuple[dict[str, Any], list[int]]],
        deadline: Deadline,
        what: str,
    ) -> None:
        with self._sending:
            for named, fds in parcels:
                frame = Frame(FrameType.FDS, self._sequence, named, STAGED_VERSION)
                self._send(frame.to_bytes(), fds, deadline, what)
            self._send(Frame(kind, self._sequence, payload, STAGED_VERSION).to_bytes(), [], deadline, what)

    def _send(self, data: bytes, fds: list[int], deadline: Deadline, what: str) -> None:
        left = memoryview(data)
        while left:
            deadline.check(what)
            if self._is_closed:
                raise self._lost(what)
            extra = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            try:
                left = left[self.connection.sendmsg([left], extra, socket.MSG_NOSIGNAL) :]
                fds = []
            except BlockingIOError:
                select.select([], [self.connection], [], _SLICE_S)
            except (OSError, ValueError) as problem:
                raise self._lost(what) from problem

    def _await(self, wanted: FrameType, deadline: Deadline, what: str) -> Answer:
        answers = self._answers
        while answers is not None:
            try:
                frame = answers.get(timeout=_SLICE_S)
            except queue.Empty:
                deadline.check(what)
                continue
            if frame is None:
                raise self._lost(what)
            if frame.type == FrameType.FAILED:
                self._close_fds()
                raise PreloadFailed(pid=self.pid, request=what, what=_reason(frame.payload))
            if frame.type == wanted:
                collected, self._collected = self._collected, {}
                return Answer(frame.payload, collected)
        raise self._lost(what)

    def _lost(self, what: str) -> PreloadFailed:
        return PreloadFailed(pid=self.pid, request=what, what=LOST)


def _for_objects(fds: Sequence[tuple[int, int]]) -> Iterator[tuple[dict[str, Any], list[int]]]:
    """What FDS frames say, and their descriptors."""
    for start in range(0, len(fds), MAX_FDS):
        part = fds[start : start + MAX_FDS]
        yield {"objects": [number for number, _ in part]}, [fd for _, fd in part]


def _for_places(places: Sequence[tuple[Place, int]]) -> Iterator[tuple[dict[str, Any], list[int]]]:
    for start in range(0, len(places), MAX_FDS):
        part = places[start : start + MAX_FDS]
        yield places_json([place for place, _ in part]), [fd for _, fd in part]


def places_json(places: Sequence[Place]) -> dict[str, Any]:
    """Numbers of the process and what was seen under each, as RELEASE and FDS frames name them."""
    return {
        "numbers": [place.number for place in places],
        "devices": [place.device for place in places],
        "inodes": [place.inode for place in places],
    }


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> Iterator[int]:
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers = array.array("i")
            numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
            yield from numbers


def _reason(payload: dict[str, Any]) -> str:
    code, number = payload.get("code"), payload.get("object")
    text = str(payload.get("what", "no reason given"))[:500]
    text += f", code {code}" if isinstance(code, int) and code else ""
    return text + (f", object {number}" if isinstance(number, int) else "")
