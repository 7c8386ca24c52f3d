"""Whom a freeze has to wait for, as freeze.py, staged_freeze.py and suspension.py see it: nobody, or the other members of its group.

What the members do together, and what becomes of a failure, is in group_meeting.py, which makes the members.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from gpu_state.group_rest import GroupRest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager

    from gpu_state.deadline import Deadline
    from gpu_state.group_meeting import Meeting
    from gpu_state.phases import Phases
    from gpu_state.preload_link import PreloadLink

# Whoever copies until its deadline is over says so itself; the others would only say that they waited.
_GRACE_S = 5.0


class Stage(Enum):
    """What members wait for together, with the words for who has not come."""

    GATHERED = "was asked to come"
    COPIED = "still copies"
    RESTED = "does not come to rest"
    AGREED = "looks at what it has at rest"
    FROZEN = "is still being frozen"
    STORED = "is still being stored"


@dataclass(frozen=True, slots=True)
class Ranks:
    """The staged processes of one container, by process id."""

    links: Mapping[int, PreloadLink]
    names: Mapping[int, str]
    has_died: Callable[[int], bool] = lambda _pid: False

    def rest(self, deadline: Deadline) -> None:
        """Bring them to rest."""
        GroupRest(self.links, self.names, self.has_died).run(deadline)


class Company:
    """Whom a freeze has to wait for. This is nobody: a container on its own."""

    def until(self, deadline: Deadline) -> Deadline:
        """The same deadline, which is over as well when another member has failed."""
        return deadline

    def gather(self, deadline: Deadline, phases: Phases) -> None:
        """Before anything is done."""

    def copied(self, deadline: Deadline, phases: Phases) -> bool:
        """Before anything stops; true where others were waited for, so that time has passed."""
        del deadline, phases
        return False

    def rest(self, ranks: Ranks, deadline: Deadline) -> None:
        """Bring the processes to rest, with those of all others."""
        ranks.rest(deadline)

    def agrees(self, deadline: Deadline, *, is_whole: bool) -> bool:
        """Whether all can use the cut that `rest` has found; else all let their processes go on and rest again."""
        del deadline
        return is_whole

    def sit_out(self, deadline: Deadline) -> None:
        """The same of a container in which nothing has to come to rest."""

    def frozen(self, deadline: Deadline, phases: Phases) -> None:
        """Before anybody may let processes go on."""

    def stored(self, deadline: Deadline, phases: Phases) -> None:
        """Before anybody gives device memory up."""

    def telling(self) -> AbstractContextManager[None]:
        """What fails in here fails the others too, before it is undone."""
        return nullcontext()


NOBODY = Company()


class Member(Company):
    """One container at a meeting."""

    def __init__(self, meeting: Meeting, container: str) -> None:
        self._meeting = meeting
        self._container = container

    def until(self, deadline: Deadline) -> Deadline:
        """As the base class says."""
        return deadline.unless(lambda: self._meeting.why_failed(self._container))

    def gather(self, deadline: Deadline, phases: Phases) -> None:
        """Wait for the requests of all members."""
        with phases("gather", f"{len(self._meeting.terms.members)} containers"):
            self._meeting.arrive(self._container, Stage.GATHERED, deadline)

    def copied(self, deadline: Deadline, phases: Phases) -> bool:
        """Wait until nobody copies any more."""
        with phases("wait for the group"):
            self._meeting.arrive(self._container, Stage.COPIED, deadline.later(_GRACE_S))
        return True

    def rest(self, ranks: Ranks, deadline: Deadline) -> None:
        """Bring the processes of all members to rest at one cut."""
        self._meeting.arrive(self._container, Stage.RESTED, deadline, ranks=ranks)

    def agrees(self, deadline: Deadline, *, is_whole: bool) -> bool:
        """Wait until all have looked; the same answer to everybody."""
        return self._meeting.arrive(self._container, Stage.AGREED, deadline, is_whole=is_whole)

    def sit_out(self, deadline: Deadline) -> None:
        """As long as the others look for a cut."""
        nobody = Ranks({}, {})
        self.rest(nobody, deadline)
        while not self.agrees(deadline, is_whole=True):
            self.rest(nobody, deadline)

    def frozen(self, deadline: Deadline, phases: Phases) -> None:
        """Wait until the driver has everybody."""
        with phases("wait for the group"):
            self._meeting.arrive(self._container, Stage.FROZEN, deadline)

    def stored(self, deadline: Deadline, phases: Phases) -> None:
        """Wait until everybody's memory is in its store."""
        with phases("wait for the group"):
            self._meeting.arrive(self._container, Stage.STORED, deadline)

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Fail the others, or say which of them has failed where that is the reason."""
        try:
            yield
        except Exception as problem:
            told = self._meeting.fail(self._container, problem)
            if told is problem:
                raise
            raise told from problem
