"""What the agent can ask of one preload in staged mode, typed and with deadlines (spec/preload-protocol.md, version 2).

Decides no order; the preload only obeys, so whoever closes a gate here must see to it that it opens again.
Called by staged_freeze.py and staged_thaw.py; registration.py hands the links out.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpu_state.preload_frames import FrameError, FrameType
from gpu_state.preload_objects import Holdings
from vgpu_errors import PreloadFailed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gpu_state.deadline import Deadline
    from gpu_state.preload_peer import Peer

# The preload ends its own wait a little before ours, so that its answer, not our deadline, says what happened.
_REST_MARGIN_S = 0.5
_MOST_MS = 1e12


@dataclass(frozen=True, slots=True)
class Rested:
    """A process at rest: its gate is closed and its contexts are synchronised."""

    waited_ms: float
    sync_ms: float


class PreloadLink:
    """One connected preload."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    @property
    def pid(self) -> int:
        """The process as this host sees it."""
        return self._peer.pid

    @property
    def ns_pid(self) -> int:
        """The process as it sees itself."""
        return self._peer.hello.ns_pid if self._peer.hello is not None else self._peer.pid

    @property
    def phase(self) -> str:
        """One of "open", "rested" (gate closed, memory mapped) and "released" (gate closed, memory given away)."""
        return self._peer.phase

    def holdings(self, deadline: Deadline) -> Holdings:
        """What the process holds of the GPU."""
        answer = self._peer.ask(FrameType.INVENTORY, {}, deadline=deadline, answer=FrameType.INVENTORY_IS)
        try:
            return Holdings.from_json(answer.payload)
        except FrameError as problem:
            raise PreloadFailed(
                pid=self.pid, request="INVENTORY", what=f"its answer is damaged: {problem}"
            ) from problem

    def export(self, ids: Sequence[int], deadline: Deadline) -> dict[int, int]:
        """A descriptor for each object; the caller owns them. The application keeps running."""
        if not ids:
            return {}
        fds = self._peer.ask(FrameType.EXPORT, {"objects": list(ids)}, deadline=deadline, answer=FrameType.EXPORTED).fds
        missing = set(ids) - set(fds)
        if missing:
            close_all(fds)
            what = f"no descriptor came for object {min(missing)}"
            raise PreloadFailed(pid=self.pid, request=f"EXPORT of process {self.pid}", what=what)
        return fds

    def rest(self, deadline: Deadline) -> Rested:
        """Close the gate and wait until nothing of the process is at work on the GPU."""
        left = deadline.remaining()
        wait_ms = int(max(left - _REST_MARGIN_S, left * 0.8) * 1000)
        # Before the request: a request whose answer is lost may have closed the gate.
        self._peer.phase = "rested"
        payload = {"deadline_ms": max(wait_ms, 1)}
        answer = self._peer.ask(FrameType.REST, payload, deadline=deadline, answer=FrameType.RESTED).payload
        return Rested(_number(answer.get("waited_ms")), _number(answer.get("sync_ms")))

    def release(self, deadline: Deadline) -> None:
        """Unmap and give away all objects; the addresses stay reserved and the gate closed."""
        self._peer.phase = "released"
        self._peer.ask(FrameType.RELEASE, {}, deadline=deadline, answer=FrameType.RELEASED)

    def map(self, fds: Mapping[int, int], deadline: Deadline) -> None:
        """Give objects back by their descriptors, at the addresses they had; one that is mapped already stays."""
        payload = {"objects": list(fds)}
        self._peer.ask(FrameType.MAP, payload, deadline=deadline, answer=FrameType.MAPPED, fds=list(fds.items()))
        self._peer.phase = "rested"

    def open(self, deadline: Deadline) -> None:
        """Let the process go on."""
        self._peer.ask(FrameType.OPEN, {}, deadline=deadline, answer=FrameType.OPENED)
        self._peer.phase = "open"


def close_all(fds: Mapping[int, int] | Mapping[str, int]) -> None:
    """Close descriptors that are not needed any more."""
    for fd in fds.values():
        os.close(fd)


def _number(value: object) -> float:
    # The peer is a container: its number may be of any length, or none at all.
    return float(value) if isinstance(value, int | float) and abs(value) < _MOST_MS else 0.0
