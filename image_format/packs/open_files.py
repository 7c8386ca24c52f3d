"""Files by name, of which only so many are open at once: a checkpoint of 1 TB has thousands, a process 1024 descriptors.

Any thread may use any file; one that is in use stays open. What opens and closes a file is given. Decides nothing about
names and writes nothing. `pack_streams` reads through it, `target_files` writes.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MAX_OPEN = 128

Handle = TypeVar("Handle")


@dataclass
class _Entry(Generic[Handle]):
    handle: Handle
    users: int = 0


class OpenFiles(Generic[Handle]):
    """Opens a file when it is asked for, and closes the one that was not asked for the longest."""

    def __init__(
        self, open_file: Callable[[str], Handle], close_file: Callable[[Handle], None], *, at_most: int = MAX_OPEN
    ) -> None:
        self._open_file, self._close_file = open_file, close_file
        self._at_most = at_most
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry[Handle]] = {}  # the last one that was asked for at the end

    @contextlib.contextmanager
    def use(self, name: str) -> Iterator[Handle]:
        """The file, open for as long as the block runs."""
        with self._lock:
            entry = self._entries.pop(name, None) or _Entry(self._open_file(name))
            entry.users += 1
            self._entries[name] = entry
            if len(self._entries) > self._at_most:
                self._close_idle(self._at_most)
        try:
            yield entry.handle
        finally:
            with self._lock:
                entry.users -= 1

    def close(self) -> None:
        """Let go of all files."""
        with self._lock:
            self._close_idle(0)

    def _close_idle(self, at_most: int) -> None:
        idle = [name for name, entry in self._entries.items() if not entry.users]
        for name in idle[: max(0, len(self._entries) - at_most)]:
            self._close_file(self._entries.pop(name).handle)
