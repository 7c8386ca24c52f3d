"""Counts bytes of a phase and tells the client now and then: done, total, rate, time left.

Prints nothing. Used by copy_out.py, copy_in.py and worker.py.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    Tell = Callable[[dict[str, Any]], None]

INTERVAL_S = 0.25


class Progress:
    """One phase; `add` may be called from any thread."""

    def __init__(
        self, phase: str, total: int, tell: Tell = lambda _event: None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._phase = phase
        self._total = total
        self._tell = tell
        self._clock = clock
        self._guard = threading.Lock()
        self._began = self._told = clock()
        self.done = 0

    def add(self, size: int) -> None:
        """So many more bytes are done."""
        with self._guard:
            self.done += size
            now = self._clock()
            is_due = now - self._told >= INTERVAL_S
            if is_due:
                self._told = now
        if is_due:
            self._tell(self.event())

    def event(self) -> dict[str, Any]:
        """The event of this moment; rate in bytes per second."""
        seconds = self.seconds
        rate = self.done / seconds if seconds > 0 else 0.0
        left = (self._total - self.done) / rate if rate > 0 else None
        return {
            "event": "progress",
            "phase": self._phase,
            "done": self.done,
            "total": self._total,
            "rate": round(rate),
            "eta_s": None if left is None else round(max(left, 0.0), 2),
        }

    def end(self) -> None:
        """Tell the last figures."""
        self._tell(self.event())

    @property
    def seconds(self) -> float:
        """Since the phase began."""
        return self._clock() - self._began
