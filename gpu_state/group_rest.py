"""Brings processes that work together to rest at one consistent cut: ranks that are behind run on until all are level.

`decide` is pure: what each rank's gate shows in, permits out. It asks one question of a rank, whether its device is idle behind
the closed gate. One that is not has submitted work that may wait for somebody: it is ahead. One that is has submitted too little:
it is behind, and gets permits, one call at first, then more whenever it used what it had, also when it has come to work meanwhile
and stands at its gate still. Once a rank that was ahead is found idle the roles are dealt out anew and everybody begins at one
again, so that an overshoot is answered by a smaller one (docs/decisions/0011-permits-at-the-gate.md).
Where nothing changes, one of those ahead counts as behind too: threads and streams of one rank can wait for each other's.
Ranks that are merely busy must not be fed faster than they work. So what is behind gets less where its calls take long, and roles
that change again and again, or a long time, end in pauses in which nobody gets anything.
The constants are those with which simulated rings, pipelines and servers come level soonest (tests/unit/test_group_rest.py).

`GroupRest` asks and does what is decided; called by staged_freeze.py at the stop. What fails opens every gate again, whoever has
died meanwhile. A single process, or preloads that do not know HALT, come to rest one by one.
"""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

from gpu_state.deadline import Deadline
from gpu_state.preload_peer import LOST
from vgpu_errors import DeadlineExceeded, VgpuError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gpu_state.preload_link import GateState, PreloadLink

# A rank is given so many calls at once at most; half of it after each change of roles, for they are nearer then.
MOST_PERMITS, LEAST_MOST = 64, 4
# Calls that keep a rank at work for so long are given by half as many.
LONG_S = 0.2
# A rank that is behind and at work, with threads at its gate, is given more after so long, each time a little later.
BUSY_WAIT_S, BUSY_WAIT_GROWS, MOST_BUSY_WAIT_S = 0.03, 1.3, 0.2
# One that has had so many and is at work counts as ahead after all.
MOST_WHILE_BEHIND = 64
# Where nobody passes for so long, or roles stay as they are for four times as long, one more rank counts as behind.
PATIENCE_S, PATIENCE_GROWS, PATIENCE_WITH_ROLES = 0.2, 1.25, 4
# So many changes of roles for each rank cost nothing. After each further one nobody gets anything for a while, which doubles.
FREE_CHANGES = 2
PAUSE_S, MOST_PAUSE_S = 0.01, 10.0
# The same whatever happens: after so long, for so long, which doubles.
ACTIVE_S, LULL_S = 5.0, 1.0
FIRST_WAIT_MS = 20
LEAST_WAIT_MS, MOST_WAIT_MS = 5, 100
LAST_LOOK_MS = 200
OPEN_S = 5.0
# A rank that ends in its own time is missed by nobody; where others still wait for it so much later, it was killed.
DEATH_S = 2.0
_ANSWER_S = 5.0
_SHARE = 0.8  # of the time that is left; the rest of the stop needs some too

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class RankMemory:
    """What is remembered of one rank: its role, how it was when last asked, and what it was given.

    `behind_since` is the call at which it was found behind. `given` is of the last request alone; `granted` is what it was
    last given, when, and before which call.
    """

    is_ahead: bool = False
    is_idle: bool = False
    passed: int = 0
    behind_since: int = 0
    given: int = 0
    granted: int = 0
    granted_at: float = 0.0
    granted_before: int = 0
    step: int = 1
    has_used_one: bool = False
    busy_wait_s: float = BUSY_WAIT_S


@dataclass(frozen=True, slots=True)
class Memory:
    """What is remembered between two decisions, by the ranks' process ids; times are those of the caller's clock."""

    ranks: Mapping[int, RankMemory] = field(default_factory=dict)
    began_at: float = 0.0
    changed_at: float = 0.0
    moved_at: float = 0.0
    changes: int = 0
    patience_s: float = PATIENCE_S

    @property
    def most_permits(self) -> int:
        """With each change of roles the ranks are nearer to each other, and an overshoot would cost another one."""
        return max(MOST_PERMITS >> self.changes, LEAST_MOST)

    def pauses(self, now: float) -> bool:
        """Nobody gets permits for a while, so that ranks that need nobody become idle."""
        late = self.changes - FREE_CHANGES * len(self.ranks)
        if late > 0 and now < self.changed_at + min(PAUSE_S * 2**late, MOST_PAUSE_S):
            return True
        left, lull = now - self.began_at, LULL_S
        while left >= ACTIVE_S + lull:
            left, lull = left - ACTIVE_S - lull, lull * 2
        return left >= ACTIVE_S


@dataclass(frozen=True, slots=True)
class Decision:
    """`permits` for each rank and how long to wait for what comes of them; `is_level`: all are idle and nobody may move."""

    permits: Mapping[int, int]
    wait_ms: int
    is_level: bool
    memory: Memory


def decide(states: Mapping[int, GateState], memory: Memory, now: float) -> Decision:
    """The next step, by what every rank's gate shows."""
    memory = replace(memory, ranks={rank: was for rank, was in memory.ranks.items() if rank in states})
    seen = _one_more_behind(states, _seen(states, memory, now), now)
    if all(_is_idle(state) for state in states.values()):
        # Permits that are left would let somebody move after the look.
        is_level = not any(rank.given for rank in memory.ranks.values())
        return Decision(dict.fromkeys(states, 0), LEAST_WAIT_MS, is_level, _given(seen, dict.fromkeys(states, 0), now))
    permits = {rank: _permits(state, seen.ranks[rank], seen, now) for rank, state in states.items()}
    quiet_ms = int((now - seen.moved_at) * 1000)
    wait_ms = min(max(quiet_ms, LEAST_WAIT_MS), MOST_WAIT_MS)
    return Decision(permits, wait_ms, is_level=False, memory=_given(seen, permits, now))


def _permits(state: GateState, rank: RankMemory, memory: Memory, now: float) -> int:
    if state.is_capturing:  # only it can end what it has begun
        return rank.step
    if rank.is_ahead or memory.pauses(now):
        return 0
    if _is_idle(state):
        return rank.step
    return rank.step if state.waiting and now - rank.granted_at >= rank.busy_wait_s else 0


def _seen(states: Mapping[int, GateState], memory: Memory, now: float) -> Memory:
    """What the answers add: who moved, whether roles have changed, and how many calls each may be given next."""
    was = memory.ranks
    if not was or any(_is_idle(state) and was[rank].is_ahead for rank, state in states.items()):
        dealt = {rank: _dealt(state) for rank, state in states.items()}
        changes = memory.changes + 1 if was else 0
        began_at = memory.began_at if was else now
        return replace(memory, ranks=dealt, began_at=began_at, changed_at=now, moved_at=now, changes=changes)
    ranks = {rank: _seen_of(state, was[rank], now, memory.most_permits) for rank, state in states.items()}
    moved = any(state.passed > was[rank].passed for rank, state in states.items())
    return replace(memory, ranks=ranks, moved_at=now if moved else memory.moved_at)


def _dealt(state: GateState) -> RankMemory:
    return RankMemory(
        is_ahead=not _is_idle(state), is_idle=_is_idle(state), passed=state.passed, behind_since=state.passed
    )


def _seen_of(state: GateState, was: RankMemory, now: float, most: int) -> RankMemory:
    seen = replace(was, is_idle=_is_idle(state), passed=state.passed)
    if not seen.is_idle and not seen.is_ahead and seen.passed - seen.behind_since >= MOST_WHILE_BEHIND:
        return RankMemory(is_ahead=True, passed=seen.passed)
    if not was.granted or state.passed - was.granted_before < was.granted:
        return seen
    if now - was.granted_at > LONG_S:
        step = max(was.step // 2, 1)
    else:  # 1, 1, 2, 4 and so on
        step = min(was.step * 2, most) if was.has_used_one else 1
    return replace(seen, granted=0, step=step, has_used_one=True)


def _given(memory: Memory, permits: Mapping[int, int], now: float) -> Memory:
    ranks = {rank: _granted(memory.ranks[rank], calls, now) for rank, calls in permits.items()}
    return replace(memory, ranks=ranks)


def _granted(rank: RankMemory, permits: int, now: float) -> RankMemory:
    if not permits:
        return replace(rank, given=0)
    wait_s = rank.busy_wait_s if rank.is_idle else min(rank.busy_wait_s * BUSY_WAIT_GROWS, MOST_BUSY_WAIT_S)
    return replace(rank, given=permits, granted=permits, granted_at=now, granted_before=rank.passed, busy_wait_s=wait_s)


def _one_more_behind(states: Mapping[int, GateState], memory: Memory, now: float) -> Memory:
    """Where nothing changes, one of the ranks that are at work and stand at their gates may be behind all the same."""
    quiet_s = max(now - memory.moved_at, (now - memory.changed_at) / PATIENCE_WITH_ROLES)
    able = [rank for rank, state in states.items() if state.waiting and memory.ranks[rank].is_ahead]
    if not able or quiet_s < memory.patience_s or memory.pauses(now):
        return memory
    chosen = min(able, key=lambda rank: (memory.ranks[rank].passed, rank))
    behind = replace(memory.ranks[chosen], is_ahead=False, behind_since=memory.ranks[chosen].passed)
    ranks = {**memory.ranks, chosen: behind}
    return replace(memory, ranks=ranks, moved_at=now, changed_at=now, patience_s=memory.patience_s * PATIENCE_GROWS)


def _is_idle(state: GateState) -> bool:
    return state.is_idle and not state.is_capturing


def plight(name: str, state: GateState | None) -> str:
    """What one rank waits for, in words."""
    if state is None:
        return f"{name} has not closed its gate"
    passed = f"{state.passed} calls let through"
    if state.is_capturing:
        return f"{name} captures a stream and does not end it ({passed})"
    if _is_idle(state):
        at_gate = f"{state.waiting} threads at its gate" if state.waiting else "no thread at its gate"
        return f"{name} is idle, has submitted nothing that the others wait for, and has {at_gate} ({passed})"
    inside = f" and {state.inside} threads inside a call" if state.inside else ""
    return f"{name} has work on its device that does not end{inside} ({passed})"


class GroupRest:
    """The staged processes of one freeze, on their way to rest."""

    def __init__(
        self,
        links: Mapping[int, PreloadLink],
        names: Mapping[int, str],
        has_died: Callable[[int], bool] = lambda _rank: False,
    ) -> None:
        """All by process id."""
        self._links = dict(links)
        self._names = names
        self._has_died = has_died
        self._states: dict[int, GateState] = {}
        self._death: VgpuError | None = None

    def run(self, deadline: Deadline) -> None:
        """Close all gates at one cut; every process has done its work when this returns."""
        if len(self._links) > 1 and all(link.knows_groups for link in self._links.values()):
            try:
                self._come_level(deadline)
            except BaseException:
                self.open_all()
                raise
        self._each(lambda _rank, link: link.rest(deadline))

    def open_all(self) -> None:
        """Let everybody go on, as far as they live; the undo of the stop does so again, and names who is left."""
        soon = Deadline(OPEN_S)

        def open_one(_rank: int, link: PreloadLink) -> None:
            with contextlib.suppress(VgpuError):
                link.open(soon)

        self._each(open_one)

    def _come_level(self, deadline: Deadline) -> None:
        soon = Deadline(deadline.remaining() * _SHARE)
        self._each(lambda _rank, link: link.halt(deadline.within(soon.remaining() + _ANSWER_S)))
        decision = Decision(dict.fromkeys(self._links, 0), FIRST_WAIT_MS, is_level=False, memory=Memory())
        while not decision.is_level:
            soon = soon.within(DEATH_S) if self._death is not None and soon.seconds > DEATH_S else soon
            if soon.remaining() <= 0:
                raise self._death or self._not_level(deadline)
            deadline.check("bringing the processes to rest together")
            self._states = self._pass(decision, deadline)
            decision = decide(self._states, decision.memory, time.monotonic())

    def _pass(self, decision: Decision, deadline: Deadline) -> dict[int, GateState]:
        within = deadline.within(decision.wait_ms / 1000 + _ANSWER_S)
        return self._each(lambda rank, link: link.let_pass(decision.permits[rank], decision.wait_ms, within))

    def _not_level(self, deadline: Deadline) -> DeadlineExceeded:
        # What was let through last may still be at work, and would hide who submits nothing of use.
        nobody = Decision(dict.fromkeys(self._links, 0), LAST_LOOK_MS, is_level=False, memory=Memory())
        with contextlib.suppress(VgpuError):
            self._states = self._pass(nobody, deadline)
        each = "; ".join(plight(self._names[rank], self._states.get(rank)) for rank in self._links)
        return DeadlineExceeded(
            phase=f"bringing the processes to rest together: {each}. It", seconds=f"{deadline.seconds:g}"
        )

    def _each(self, work: Callable[[int, PreloadLink], Answer]) -> dict[int, Answer]:
        """All at a time; the first failure, with the others as notes. A rank that has ended is none any more."""

        def attempt(rank: int) -> Answer | VgpuError:
            try:
                return work(rank, self._links[rank])
            except VgpuError as problem:
                return problem

        if not self._links:
            return {}
        with ThreadPoolExecutor(len(self._links)) as threads:
            done = dict(zip(self._links, threads.map(attempt, self._links), strict=True))
        failures = [one for rank, one in done.items() if isinstance(one, VgpuError) and not self._has_ended(rank, one)]
        if failures:
            for other in failures[1:]:
                failures[0].add_note(f"also: {other}")
            raise failures[0]
        return {rank: one for rank, one in done.items() if not isinstance(one, VgpuError)}

    def _has_ended(self, rank: int, problem: VgpuError) -> bool:
        if problem.fields.get("what") != LOST or not self._has_died(rank):
            return False
        del self._links[rank]
        self._death = problem
        return True
