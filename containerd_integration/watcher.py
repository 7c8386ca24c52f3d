"""Who hears of phases and bytes of a checkpoint or a restore: the command's progress lines, or nobody.

Called by `checkpointing` and `restoring`; the verb `containerd` brings its own.
"""

from __future__ import annotations

import contextlib
from typing import Protocol


class Watcher(Protocol):
    """Hears of phases and bytes."""

    def phase(self, name: str) -> contextlib.AbstractContextManager[object]:
        """A phase begins; it ends with the block."""

    def bytes(self, done: int, whole: int) -> None:
        """How far the phase is."""


class Silent:
    """Says nothing."""

    def phase(self, name: str) -> contextlib.AbstractContextManager[object]:
        """Nobody asks."""
        del name
        return contextlib.nullcontext()

    def bytes(self, done: int, whole: int) -> None:
        """Nobody asks."""
