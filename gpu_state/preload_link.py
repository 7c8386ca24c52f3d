"""What the agent can ask of one preload in staged mode, typed and with deadlines (spec/preload-protocol.md, version 2).

Decides no order; the preload only obeys, so whoever closes a gate here must see to it that it opens again.
Called by staged_inventory.py, staged_freeze.py, group_rest.py, staged_groups.py and staged_thaw.py; registration.py hands the links out.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpu_state.communicators import Communicators
from gpu_state.preload_frames import FrameError, FrameType
from gpu_state.preload_objects import Holdings, Share, shares_from_json
from gpu_state.preload_peer import places_json
from vgpu_errors import PreloadFailed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gpu_state.deadline import Deadline
    from gpu_state.open_descriptors import Place
    from gpu_state.preload_peer import Peer

# The preload ends its own wait a little before ours, so that its answer, not our deadline, says what happened.
_REST_MARGIN_S = 0.5
_MOST = 1e12


@dataclass(frozen=True, slots=True)
class Rested:
    """A process at rest: its gate is closed and its contexts are synchronised."""

    waited_ms: float
    sync_ms: float


@dataclass(frozen=True, slots=True)
class GateState:
    """A process with its gate closed, before it is at rest (PASSED).

    `passed` counts the calls that were let through since HALT; `is_idle` says that no thread is inside, nothing is being
    captured, and all work that was submitted is done.
    """

    passed: int
    waiting: int
    inside: int
    is_capturing: bool
    is_idle: bool

    @classmethod
    def from_json(cls, doc: Mapping[str, object]) -> GateState:
        """Parse the payload of PASSED; a count that is none is taken for 0."""
        passed, waiting, inside = (int(_number(doc.get(key))) for key in ("passed", "waiting", "inside"))
        return cls(passed, waiting, inside, doc.get("capturing") is True, doc.get("idle") is True)


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
        """One of "open", "halted" (gate closed), "rested" (and no work left) and "released" (and the memory given away)."""
        return self._peer.phase

    @property
    def devices(self) -> tuple[str, ...]:
        """The uuids of the process's devices, in its own order."""
        return self._peer.hello.devices if self._peer.hello is not None else ()

    @property
    def knows_groups(self) -> bool:
        """It halts, lets calls pass, and can give imports away."""
        return self._peer.hello is not None and self._peer.hello.knows_groups

    @property
    def tells_shares(self) -> bool:
        """It answers SHARES."""
        return self._peer.hello is not None and self._peer.hello.tells_shares

    def holdings(self, deadline: Deadline) -> Holdings:
        """What the process holds of the GPU."""
        answer = self._peer.ask(FrameType.INVENTORY, {}, deadline=deadline, answer=FrameType.INVENTORY_IS)
        try:
            return Holdings.from_json(answer.payload)
        except FrameError as problem:
            raise PreloadFailed(
                pid=self.pid, request="INVENTORY", what=f"its answer is damaged: {problem}"
            ) from problem

    def shares(self, deadline: Deadline) -> tuple[tuple[Share, ...], dict[int, int]]:
        """What the process shares, and a descriptor for each share that has one, by id; the caller owns them."""
        answer = self._peer.ask(FrameType.SHARES, {}, deadline=deadline, answer=FrameType.SHARES_ARE)
        try:
            return shares_from_json(answer.payload, answer.fds), answer.fds
        except FrameError as problem:
            close_all(answer.fds)
            raise PreloadFailed(
                pid=self.pid, request=f"SHARES of process {self.pid}", what=f"its answer is damaged: {problem}"
            ) from problem

    def communicators(self, deadline: Deadline) -> Communicators:
        """The process's part in communicators of NCCL and in NVSHMEM."""
        answer = self._peer.ask(FrameType.COMMUNICATORS, {}, deadline=deadline, answer=FrameType.COMMUNICATORS_ARE)
        try:
            return Communicators.from_json(answer.payload)
        except FrameError as problem:
            request = f"COMMUNICATORS of process {self.pid}"
            raise PreloadFailed(pid=self.pid, request=request, what=f"its answer is damaged: {problem}") from problem

    def export(self, ids: Sequence[int], deadline: Deadline) -> dict[int, int]:
        """A descriptor for each object that is still there; the caller owns them. The application keeps running."""
        if not ids:
            return {}
        asked = {"objects": list(ids)}
        return self._peer.ask(FrameType.EXPORT, asked, deadline=deadline, answer=FrameType.EXPORTED).fds

    def halt(self, deadline: Deadline) -> None:
        """Close the gate and wait for nothing but the end of a stream's capture."""
        self._peer.phase = "halted"
        payload = {"deadline_ms": _wait_ms(deadline)}
        self._peer.ask(FrameType.HALT, payload, deadline=deadline, answer=FrameType.HALTED)

    def let_pass(self, calls: int, wait_ms: int, deadline: Deadline) -> GateState:
        """Let up to so many calls through the closed gate, in place of what earlier requests left over."""
        payload = {"calls": calls, "wait_ms": wait_ms}
        answer = self._peer.ask(FrameType.LET_PASS, payload, deadline=deadline, answer=FrameType.PASSED)
        return GateState.from_json(answer.payload)

    def rest(self, deadline: Deadline) -> Rested:
        """Close the gate and wait until nothing of the process is at work on the GPU."""
        # Before the request: a request whose answer is lost may have closed the gate.
        self._peer.phase = "rested"
        payload = {"deadline_ms": _wait_ms(deadline)}
        answer = self._peer.ask(FrameType.REST, payload, deadline=deadline, answer=FrameType.RESTED).payload
        return Rested(_number(answer.get("waited_ms")), _number(answer.get("sync_ms")))

    def release(self, deadline: Deadline) -> None:
        """Unmap and give away all objects and imports; the addresses stay reserved and the gate closed."""
        self._peer.phase = "released"
        self._peer.ask(FrameType.RELEASE, {"imports": True}, deadline=deadline, answer=FrameType.RELEASED)

    def park(self, places: Sequence[tuple[Place, int]], deadline: Deadline) -> None:
        """Put placeholders under numbers of the application's, each with its token; only behind `release`."""
        payload = {"imports": True, **places_json([place for place, _ in places])}
        payload["tokens"] = [token for _, token in places]
        self._peer.ask(FrameType.RELEASE, payload, deadline=deadline, answer=FrameType.RELEASED)

    def map(self, fds: Mapping[int, int], deadline: Deadline) -> None:
        """Give objects and imports back by their descriptors, at the addresses they had; one that is mapped already stays."""
        payload = {"objects": list(fds)}
        self._peer.ask(FrameType.MAP, payload, deadline=deadline, answer=FrameType.MAPPED, fds=list(fds.items()))
        self._peer.phase = "rested"

    def give(self, places: Sequence[tuple[Place, int]], deadline: Deadline) -> None:
        """Put descriptors in the place of placeholders; only behind `map`."""
        payload: dict[str, object] = {"objects": []}
        self._peer.ask(FrameType.MAP, payload, deadline=deadline, answer=FrameType.MAPPED, places=places)

    def open(self, deadline: Deadline) -> None:
        """Let the process go on."""
        self._peer.ask(FrameType.OPEN, {}, deadline=deadline, answer=FrameType.OPENED)
        self._peer.phase = "open"


def close_all(fds: Mapping[int, int] | Mapping[str, int]) -> None:
    """Close descriptors that are not needed any more."""
    for fd in fds.values():
        os.close(fd)


def _wait_ms(deadline: Deadline) -> int:
    left = deadline.remaining()
    return max(int(max(left - _REST_MARGIN_S, left * 0.8) * 1000), 1)


def _number(value: object) -> float:
    # The peer is a container: its number may be of any length, or none at all.
    return float(value) if isinstance(value, int | float) and abs(value) < _MOST else 0.0
