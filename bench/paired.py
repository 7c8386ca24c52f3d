"""Paired comparison of two ways to do the same: median of the differences with an interval that assumes no distribution.

Pure numbers. Pair n is two runs that lie next to each other in time, so what drifts is in both. Called by the benches of what
the preload costs.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """From `low` to `high` the median lies with probability `confidence`."""

    low: float
    high: float
    confidence: float


@dataclass(frozen=True)
class Paired:
    """What the first way takes more than the second."""

    pairs: int
    difference: float
    differences: Interval
    ratio: float
    ratios: Interval

    @classmethod
    def of(cls, first: Sequence[float], second: Sequence[float]) -> Paired:
        """Of equally many runs of each, in the order of the pairs."""
        differences = [a - b for a, b in zip(first, second, strict=True)]
        ratios = [a / b for a, b in zip(first, second, strict=True)]
        return cls(
            pairs=len(differences),
            difference=statistics.median(differences),
            differences=interval_of_median(differences),
            ratio=statistics.median(ratios),
            ratios=interval_of_median(ratios),
        )

    def text(self, unit: str) -> str:
        """For the log."""
        wide = self.differences
        return f"difference {self.difference:.4g} {unit} [{wide.low:.4g}, {wide.high:.4g}], {self.ratio_text()}"

    def ratio_text(self) -> str:
        """For the row's `what`."""
        share = self.ratios
        sure = f"{share.confidence * 100:.1f} % interval of the median of {self.pairs} pairs"
        return f"paired ratio {self.ratio:.4f} [{share.low:.4f}, {share.high:.4f}], {sure}"


def interval_of_median(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """Between two order statistics: how many values lie below the median is a fair coin thrown that often."""
    ordered, count = sorted(values), len(values)
    if not ordered:
        raise ValueError("no values, no interval")
    rank, outside = 0, 0.0
    while rank < (count - 1) // 2:
        more = outside + 2 * comb(count, rank) / 2**count
        if more > 1 - confidence:
            break
        rank, outside = rank + 1, more
    if rank == 0:  # too few values: all of them, with what they are worth
        return Interval(ordered[0], ordered[-1], 1 - 2 / 2**count if count > 1 else 0.0)
    return Interval(ordered[rank - 1], ordered[count - rank], 1 - outside)
