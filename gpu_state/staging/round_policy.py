"""Decides how many rounds a copy beside the running application makes, and when the rest is left to the stop.

Pure numbers; copy_out.py measures, worker.py asks. A round more is worth its while only as long as what changes gets less.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class RoundReport:
    """What one round did: what had other content than before, and what of it was copied, is zero, or was there already.

    A chunk that is as it was again when it is looked at for the second time is in none of the three.
    A round is skipped when copying would not get ahead of the application.
    """

    number: int
    total_bytes: int
    changed_bytes: int
    copied_bytes: int
    zero_bytes: int
    dedup_bytes: int
    is_skipped: bool
    seconds: float

    @property
    def rate(self) -> float:
        """Bytes copied a second."""
        return self.copied_bytes / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class RoundPolicy:
    """The numbers. Rates are those of the link and of device memory measured on an H200, rounded down."""

    max_rounds: int = 5
    # What the stop may spend on copies. Setting aside runs at 2 TB/s, the link at 45 GB/s.
    stop_s: float = 0.1
    link_bytes_s: float = 45e9
    aside_bytes_s: float = 1.5e12
    # A round that leaves more than this share of what the one before copied does not get ahead of the application.
    shrink: float = 0.7
    # Bytes a second that a round may move, so that hashing takes no more than a share of the GPU; None: as fast as it goes.
    pace_bytes_s: float | None = None

    def rest_for_stop(self, room_bytes: int) -> int:
        """How many changed bytes the stop can take, with so much device memory free to set them aside."""
        aside = min(room_bytes, int(self.stop_s * self.aside_bytes_s))
        return aside + int(self.stop_s * self.link_bytes_s)

    def is_worth_copying(self, changed_bytes: int, reports: Sequence[RoundReport]) -> bool:
        """Whether copying what changed since the last round gets ahead of the application."""
        return not reports or changed_bytes <= self.shrink * reports[-1].changed_bytes

    def wants_another(self, reports: Sequence[RoundReport], room_bytes: int) -> bool:
        """Whether there should be one more round."""
        if not reports:
            return True
        last = reports[-1]
        if len(reports) >= self.max_rounds or last.is_skipped:
            return False
        if len(reports) == 1:  # nothing is known yet of what changes meanwhile
            return last.changed_bytes > self.rest_for_stop(room_bytes) // 4
        return last.changed_bytes > self.rest_for_stop(room_bytes)
