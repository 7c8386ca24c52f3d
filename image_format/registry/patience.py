"""How often and how long to try again: back-off with jitter, Retry-After, an end (docs/registry.md).

Counts only attempts that brought nothing further: a transfer that moves on, however often it is cut, goes on.
Every part of the registry client that repeats something asks it.
"""

from __future__ import annotations

import datetime as dt
import email.utils
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vgpu_errors import Cancelled, RegistryGaveUp

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable


@dataclass(frozen=True)
class Retries:
    """The limits."""

    attempts: int = 6
    base_s: float = 0.5
    cap_s: float = 30.0
    longest_wait_s: float = 300.0
    connect_timeout_s: float = 10.0
    read_timeout_s: float = 60.0


class Patience:
    """For one piece of work; not shared between threads."""

    def __init__(
        self,
        retries: Retries,
        stop: threading.Event,
        where: str,
        on_notice: Callable[[str], None] | None = None,
    ) -> None:
        self._retries = retries
        self._stop = stop
        self._where = where
        self._on_notice = on_notice
        self._failures = 0

    def moved_on(self) -> None:
        """Something was gained since the last failure."""
        self._failures = 0

    def check(self) -> None:
        """Raise if the work was cancelled."""
        if self._stop.is_set():
            raise Cancelled(phase="The transfer", what="it was interrupted")

    def failed(self, what: str, retry_after: str | None = None) -> None:
        """Wait before the next attempt, or raise because this was the last one."""
        self._failures += 1
        if self._failures >= self._retries.attempts:
            raise RegistryGaveUp(where=self._where, attempts=self._failures, what=what)
        pause = self._pause(retry_after)
        if pause > self._retries.longest_wait_s:
            raise RegistryGaveUp(where=self._where, attempts=self._failures, what=f"{what}; it asks for {pause:.0f} s")
        if self._on_notice is not None:
            self._on_notice(f"{self._where}: {what}; again in {pause:.1f} s")
        self._stop.wait(pause)
        self.check()

    def _pause(self, retry_after: str | None) -> float:
        # Half fixed, half random: many nodes that were refused together must not come back together.
        backed_off = min(self._retries.cap_s, self._retries.base_s * 2 ** (self._failures - 1))
        jittered: float = backed_off * random.uniform(0.5, 1.0)  # noqa: S311 - no secret
        return max(jittered, seconds_of(retry_after))


def seconds_of(retry_after: str | None) -> float:
    """Retry-After in seconds, whether it is a number or a date; 0 where it says nothing."""
    text = (retry_after or "").strip()
    if text.isascii() and text.isdigit() and len(text) < 10:
        return float(text)
    try:
        when = email.utils.parsedate_to_datetime(text)
    except ValueError:
        return 0.0
    when = when if when.tzinfo else when.replace(tzinfo=dt.UTC)
    return max(0.0, (when - dt.datetime.now(tz=dt.UTC)).total_seconds())
