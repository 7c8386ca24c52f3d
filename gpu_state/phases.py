"""Times the phases of a request and tells the client about each as it begins and ends.

Prints nothing; the runtime shim decides what a user sees. Used by freeze.py and thaw.py.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Tell = Callable[[dict[str, Any]], None]


class Phases:
    """The phases of one request, in order."""

    def __init__(self, tell: Tell = lambda _event: None) -> None:
        self._tell = tell
        self._taken: list[tuple[str, float]] = []

    @contextmanager
    def __call__(self, phase: str, detail: str = "") -> Iterator[None]:
        """Run one phase; a phase that fails has no end event, the error follows instead."""
        began = time.monotonic()
        self._tell({"event": "phase", "phase": phase, "state": "start", "seconds": 0.0, "detail": detail})
        yield
        seconds = round(time.monotonic() - began, 4)
        self._taken.append((phase, seconds))
        self._tell({"event": "phase", "phase": phase, "state": "end", "seconds": seconds, "detail": detail})

    def bytes(self, phase: str, done: int, total: int) -> None:
        """Tell how far a phase that moves bytes has come."""
        self._tell({"event": "bytes", "phase": phase, "done": done, "total": total})

    def to_json(self) -> list[dict[str, Any]]:
        """The form of `phases` in results."""
        return [{"phase": phase, "seconds": seconds} for phase, seconds in self._taken]
