"""One deadline for a whole request, handed down to every wait.

Knows nothing of what is done; raises, never kills. Used by every module of the agent that waits.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from vgpu_errors import Cancelled, DeadlineExceeded

if TYPE_CHECKING:
    from collections.abc import Callable

    Clock = Callable[[], float]


class Deadline:
    """The moment at which a request must have ended; also over when its client has gone or the agent must stop."""

    def __init__(
        self, seconds: float, *, why_cancelled: Callable[[], str | None] = lambda: None, clock: Clock = time.monotonic
    ) -> None:
        self.seconds = seconds
        self._clock = clock
        self._ends_at = clock() + seconds
        self._why_cancelled = why_cancelled

    def remaining(self) -> float:
        """Seconds left, never negative."""
        return max(self._ends_at - self._clock(), 0.0)

    def within(self, seconds: float) -> Deadline:
        """A deadline for one part: `seconds` from now, or ours where that is sooner."""
        return Deadline(min(seconds, self.remaining()), why_cancelled=self._why_cancelled, clock=self._clock)

    def again(self) -> Deadline:
        """The same time from now on."""
        return Deadline(self.seconds, why_cancelled=self._why_cancelled, clock=self._clock)

    def unless(self, why_cancelled: Callable[[], str | None]) -> Deadline:
        """The same moment, and over as well for what `why_cancelled` says."""
        ours = self._why_cancelled
        same = Deadline(self.seconds, why_cancelled=lambda: ours() or why_cancelled(), clock=self._clock)
        same._ends_at = self._ends_at
        return same

    def later(self, seconds: float) -> Deadline:
        """So many seconds more than what is left."""
        return Deadline(self.remaining() + seconds, why_cancelled=self._why_cancelled, clock=self._clock)

    def why_cancelled(self) -> str | None:
        """Why nobody wants it any more, None where somebody does."""
        return self._why_cancelled()

    def check(self, phase: str) -> None:
        """Raise where there is no time left for `phase`, or nobody who wants it."""
        if (reason := self._why_cancelled()) is not None:
            raise Cancelled(phase=phase, what=reason)
        if self.remaining() <= 0:
            raise self.exceeded(phase)

    def exceeded(self, phase: str) -> DeadlineExceeded:
        """The error that names `phase` as the one that took too long."""
        return DeadlineExceeded(phase=phase, seconds=f"{self.seconds:g}")
