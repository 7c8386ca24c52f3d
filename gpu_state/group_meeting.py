"""Where the freezes of several containers meet, so that all come to rest at one cut or none stays frozen.

Containers whose processes work together, but lie in containers of their own, are frozen by one request each. Those that name the
same group (`group` of `freeze` and `suspend`, spec/agent-protocol.md) wait for each other at the stages below:

1. gathered   the request of every member has come          nothing has been done for anybody
2. copied     every member has copied what it could         the applications run
3. rested     one GroupRest closes the gates of all         before, nobody's gate is closed; after, everybody's
4. agreed     everybody can use this cut                    else all open their gates, and go on with 3
5. frozen     the driver has everybody                      before, nobody may answer, so nobody's gate opens
6. stored     of a suspend: everything is in the stores     before, nobody gives device memory up

What fails one member before the last of its stages fails all of them: each undoes its own freeze by itself, and its error names
the member that failed. Afterwards each goes on alone. Freezes nothing itself, writes no journal and knows no container but by its
name: a killed agent leaves what freeze.py says of each. Called by service.py; the stages are waited for in freeze.py,
staged_freeze.py and suspension.py.
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpu_state.deadline import Deadline
from gpu_state.group_company import NOBODY, Member, Ranks, Stage
from gpu_state.group_terms import named, short
from vgpu_errors import (
    AgentRefused,
    Cancelled,
    DeadlineExceeded,
    GroupIncomplete,
    GroupMemberFailed,
    VgpuError,
    from_json,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpu_state.group_company import Company
    from gpu_state.group_terms import GroupTerms
    from gpu_state.preload_link import PreloadLink

_LOOK_S = 0.05
# A client that asks for all of a group has asked within this time; one that comes late to a failure does not wait for nobody.
LINGER_S = 60.0
_SUSPEND_REMEDY = "Name all containers of the group in one 'vgpu suspend', or use '--group'."


@dataclass(frozen=True, slots=True)
class _Failure:
    """Why a meeting is over. `member` is whose fault it is, None where nobody's or everybody's."""

    problem: VgpuError
    member: str | None


class Meeting:
    """One freeze of one group, safe for all threads.

    All members take the same steps in the same order; `_steps` counts them, `_passed` is the last one that all have taken.
    """

    def __init__(self, terms: GroupTerms) -> None:
        self.terms = terms
        self._changed = threading.Condition()
        self._steps: dict[str, int] = {}
        self._ranks: dict[str, Ranks] = {}
        self._deadlines: dict[str, Deadline] = {}
        self._passed = 0
        self._is_at_work = False
        self._is_whole = True
        self._is_agreed = False
        self._is_over = False
        self._failure: _Failure | None = None
        self._failed_at = 0.0

    @property
    def is_gathering(self) -> bool:
        """Others may still join."""
        with self._changed:
            return self._failure is None and not self._passed

    @property
    def lingers(self) -> bool:
        """It has failed just now: others that its client has asked for may be on their way."""
        with self._changed:
            has_just_failed = self._failure is not None and time.monotonic() - self._failed_at < LINGER_S
            return has_just_failed and self.terms.attempt is not None

    def is_expected(self, container: str, terms: GroupTerms) -> bool:
        """A member that its client has asked for, and that has not come yet."""
        with self._changed:
            return terms == self.terms and container not in self._steps

    def join(self, container: str, terms: GroupTerms) -> None:
        """Take a member in. One with another idea of who belongs to the group ends the meeting."""
        verb, members = terms.verb, set(terms.members)
        if container not in members:
            raise AgentRefused(verb=verb, what=f"container {container} is not among the members of group {terms.name}")
        with self._changed:
            self._refuse_if_failed(container)
            if (verb, terms.attempt) != (self.terms.verb, self.terms.attempt):
                raise AgentRefused(verb=verb, what=f"a {self.terms.verb} of group {terms.name} is under way")
            if container in self._steps:
                raise AgentRefused(verb=verb, what=f"container {container} waits for its group already")
            if odd := sorted(members ^ set(self.terms.members)):
                what = f"its members do not agree whether {named(odd)} is one of group {terms.name}"
                self._end(_Failure(AgentRefused(verb=verb, what=what), None))
                raise AgentRefused(verb=verb, what=what)
            self._steps[container] = 0

    def arrive(
        self, container: str, stage: Stage, deadline: Deadline, *, ranks: Ranks | None = None, is_whole: bool = True
    ) -> bool:
        """Wait until all members have come so far, and what is to be done together is done; whether all said `is_whole`."""
        with self._changed:
            self._refuse_if_failed(container)
            self._steps[container] += 1
            step = self._steps[container]
            self._deadlines[container] = deadline
            self._is_whole = self._is_whole and is_whole
            if ranks is not None:
                self._ranks[container] = ranks
            is_last = not self._missing(step)
            self._is_at_work = is_last
        if is_last:
            self._do(container, stage)
        else:
            self._await(container, stage, step, deadline)
        return self._is_agreed

    def fail(self, container: str, problem: Exception) -> Exception:
        """A member has failed: `problem`, or what has failed another one before and so is the reason."""
        with self._changed:
            if self._is_over:
                return problem
            if self._failure is None:
                self._end(_Failure(_as_error(problem), container))
                return problem
            is_reason = isinstance(problem, Cancelled) and self._failure.member != container
            return self._error_for(container, self._failure) if is_reason else problem

    def why_failed(self, container: str) -> str | None:
        """For whoever is in the midst of something: the others do not need it any more."""
        with self._changed:
            return str(self._error_for(container, self._failure)) if self._failure is not None else None

    # ---- waiting -----------------------------------------------------------------------------------------

    def _await(self, container: str, stage: Stage, step: int, deadline: Deadline) -> None:
        with self._changed:
            while self._passed < step:
                self._refuse_if_failed(container)
                if not self._is_at_work:  # nobody leaves while its processes are being brought to rest
                    self._check(container, stage, step, deadline)
                self._changed.wait(_LOOK_S)

    def _check(self, container: str, stage: Stage, step: int, deadline: Deadline) -> None:
        try:
            deadline.check("waiting for its group")
        except DeadlineExceeded as late:
            self._end(_Failure(self._too_late(stage, step, deadline), None))
            self._refuse_if_failed(container, late)
        except Cancelled as gone:
            self._end(_Failure(gone, container))
            raise

    def _too_late(self, stage: Stage, step: int, deadline: Deadline) -> VgpuError:
        missing, terms, seconds = named(self._missing(step)), self.terms, f"{deadline.seconds:g}"
        if stage is not Stage.GATHERED:
            return DeadlineExceeded(
                phase=f"the {terms.verb} of group {terms.name}, of which {missing} {stage.value},", seconds=seconds
            )
        remedy = _SUSPEND_REMEDY if terms.verb == "suspend" else None
        return GroupIncomplete(missing=missing, group=terms.name, verb=terms.verb, seconds=seconds, remedy=remedy)

    def _missing(self, step: int) -> list[str]:
        return [member for member in self.terms.members if self._steps.get(member, 0) < step]

    # ---- what is done together ---------------------------------------------------------------------------

    def _do(self, container: str, stage: Stage) -> None:
        """By the last one to come, for all: they wait for it."""
        try:
            if stage is Stage.RESTED:
                self._rest_all()
        except BaseException as problem:
            with self._changed:
                self._is_at_work = False
                self._end(_Failure(_as_error(problem), self._whose(problem)))
                raise self._error_for(container, self._failure or _Failure(_as_error(problem), None)) from problem
        with self._changed:
            self._is_at_work, self._is_agreed, self._is_whole = False, self._is_whole, True
            # From here on each member is on its own.
            self._is_over = stage is (Stage.STORED if self.terms.verb == "suspend" else Stage.FROZEN)
            self._passed += 1
            self._changed.notify_all()

    def _rest_all(self) -> None:
        links: dict[int, PreloadLink] = {}
        names: dict[int, str] = {}
        whose: dict[int, Ranks] = {}
        for container, ranks in self._ranks.items():
            links.update(ranks.links)
            names.update({pid: f"{name} of container {short(container)}" for pid, name in ranks.names.items()})
            whose.update(dict.fromkeys(ranks.links, ranks))
        together = Deadline(
            min(deadline.remaining() for deadline in self._deadlines.values()), why_cancelled=self._why_anybody_left
        )
        Ranks(links, names, lambda pid: whose[pid].has_died(pid)).rest(together)

    def _why_anybody_left(self) -> str | None:
        for container, deadline in self._deadlines.items():
            if (reason := deadline.why_cancelled()) is not None:
                return f"container {short(container)}: {reason}"
        return None

    def _whose(self, problem: BaseException) -> str | None:
        pid = problem.fields.get("pid") if isinstance(problem, VgpuError) else None
        return next((container for container, ranks in self._ranks.items() if pid in ranks.links), None)

    # ---- failing -----------------------------------------------------------------------------------------

    def _end(self, failure: _Failure) -> None:
        if self._failure is None:
            self._failure, self._failed_at = failure, time.monotonic()
        self._changed.notify_all()

    def _refuse_if_failed(self, container: str, cause: BaseException | None = None) -> None:
        if self._failure is not None:
            raise self._error_for(container, self._failure) from cause

    def _error_for(self, container: str, failure: _Failure) -> VgpuError:
        """A copy, because each member notes on it what it could not undo."""
        problem = failure.problem
        if failure.member in (None, container):
            return from_json(problem.to_json())
        return GroupMemberFailed(
            verb=self.terms.verb, container=short(container), group=self.terms.name, member=short(str(failure.member)),
            what=str(problem), remedy=problem.remedy,
        )  # fmt: skip


class Meetings:
    """The groups whose members are being waited for."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._open: dict[str, Meeting] = {}

    @contextmanager
    def joined(self, container: str, terms: GroupTerms | None) -> Iterator[Company]:
        """The company of one request; what fails in here fails the others too."""
        if terms is None:
            yield NOBODY
            return
        meeting = self._join(container, terms)
        member = Member(meeting, container)
        with member.telling():
            yield member

    def _join(self, container: str, terms: GroupTerms) -> Meeting:
        with self._guard:
            self._open = {name: one for name, one in self._open.items() if one.is_gathering or one.lingers}
            meeting = self._open.get(terms.name)
            if meeting is None or not (meeting.is_gathering or meeting.is_expected(container, terms)):
                meeting = Meeting(terms)
            meeting.join(container, terms)
            self._open[terms.name] = meeting
            return meeting


def _as_error(problem: BaseException) -> VgpuError:
    if isinstance(problem, VgpuError):
        return problem
    if isinstance(problem, OSError):  # its client's connection, which is the only one that phases write to
        return Cancelled(phase="its request", what="the client went away")
    return VgpuError(what=f"{type(problem).__name__}: {problem}")
