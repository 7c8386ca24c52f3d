"""What a transfer tells while it runs; whoever shows it to people or programs is a `Watcher` (vgpu_cli/transfer_view)."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field


class Watcher:
    """Sees nothing; the base of those that show something. All methods may be called from any thread."""

    def phase(self, name: str, total_bytes: int) -> None:
        """A phase begins, maybe beside others; `total_bytes` is what `moved` will add up to, as far as is known."""

    def grow(self, name: str, more_bytes: int) -> None:
        """A phase has more to do than was known."""

    def moved(self, name: str, count: int) -> None:
        """A phase is so many bytes further; negative where a fault threw something away."""

    def note(self, text: str) -> None:
        """Something a person may want to know: a wait, another way that was taken."""


@dataclass
class Counts:
    """Bytes by what became of them."""

    sent: int = 0
    skipped: int = 0
    mounted: int = 0
    fetched: int = 0
    reused: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, kind: str, count: int) -> None:
        """From any thread."""
        with self._lock:
            setattr(self, kind, getattr(self, kind) + count)
