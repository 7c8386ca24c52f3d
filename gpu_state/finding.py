"""One requirement of a checkpoint that a node does not meet, as it is shown and written.

Plain data; fitness.py and pair_fitness.py find them, the runtime shim refuses by them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from image_format.record import Requirement

Level = Literal["must", "should"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One requirement that this node does not meet."""

    key: str
    level: Level
    needed: str
    found: str
    what: str
    remedy: str

    def to_json(self) -> dict[str, str]:
        """The entry of `--json` output."""
        return {
            "key": self.key,
            "level": self.level,
            "needed": self.needed,
            "found": self.found,
            "what": self.what,
            "remedy": self.remedy,
        }

    def __str__(self) -> str:
        return f"[{self.level}] {self.what}: needed {self.needed}, found {self.found}. {self.remedy}"


def level_of(requirement: Requirement) -> Level:
    """The requirement's own level."""
    return "should" if requirement.level == "should" else "must"
