"""The agent's bounded pinned memory: a ring of equal slots between the GPU and files (docs/staged-mode.md).

Never larger than its limit, nor than what is going to be moved; made before any freeze. Holds no content for long.
A worker of the reserve lends it pinned memory, so that it is there at once.
Used by pack_writer.py on the way out and by copy_in.py on the way in.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpu_state.staging import host_memory
from gpu_state.staging.slots import CHUNK_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpu_state.staging.host_memory import HostMemory

DEFAULT_LIMIT = 4 << 30
# A copy of 32 MiB takes 0.6 ms at 55 GB/s: the calls around it do not show.
SLOT_BYTES = 32 << 20
_SLICE_S = 0.05


@dataclass(frozen=True, slots=True)
class Slot:
    """One piece of the ring."""

    address: int
    view: memoryview


class PinnedRing:
    """Slots to take and give back, from any thread. A context must be current where it is made and closed."""

    def __init__(
        self,
        expected_bytes: int,
        *,
        limit: int = DEFAULT_LIMIT,
        slot_bytes: int = SLOT_BYTES,
        lent: HostMemory | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._limit, self._slot_limit = limit, slot_bytes
        self._changed = threading.Condition()
        self._lent = lent
        self._make(expected_bytes if lent is None else lent.size, check)

    def _make(self, expected_bytes: int, check: Callable[[], None]) -> None:
        limit, slot_bytes = self._limit, self._slot_limit
        expected_bytes = host_memory.round_up(max(expected_bytes, 1), CHUNK_BYTES)
        self.slot_bytes = max(CHUNK_BYTES, min(slot_bytes, limit, expected_bytes) // CHUNK_BYTES * CHUNK_BYTES)
        count = max(1, min(limit, expected_bytes) // self.slot_bytes)
        self.size = count * self.slot_bytes
        self._memory: HostMemory = self._lent or self._pinned(self.size, check)
        self._free = [self._slot(n) for n in range(count)]
        self.slot_count = count

    @staticmethod
    def _pinned(size: int, check: Callable[[], None]) -> HostMemory:
        memory = host_memory.anonymous(size)
        try:
            memory.touch(check=check)
            memory.register()
        except BaseException:
            memory.close()
            raise
        return memory

    def enlarge(self, expected_bytes: int, check: Callable[[], None] = lambda: None) -> None:
        """More is going to be moved than was known: a larger ring, unless this one is in use or nearly as large."""
        with self._changed:
            if len(self._free) == self.slot_count and min(expected_bytes, self._limit) >= 2 * self.size:
                self.close()
                self._make(expected_bytes, check)

    @property
    def is_huge(self) -> bool:
        """Whether it lies on huge pages that were set aside for such use."""
        return self._memory.is_huge

    def take(self, check: Callable[[], None] = lambda: None) -> Slot:
        """A free slot, waited for; `check` raises when there is no point in waiting."""
        with self._changed:
            while not self._free:
                check()  # may give a slot of its own back
                if not self._free:
                    self._changed.wait(_SLICE_S)
            return self._free.pop()

    def give(self, slot: Slot) -> None:
        """Back into the ring."""
        with self._changed:
            self._free.append(slot)
            self._changed.notify()

    def close(self) -> None:
        """Unpin and unmap what is ours; nobody may use a slot any more."""
        for slot in self._free:
            slot.view.release()
        self._free = []
        if self._lent is None:
            self._memory.close()
        self._lent = None

    def _slot(self, number: int) -> Slot:
        start = number * self.slot_bytes
        return Slot(self._memory.address + start, self._memory.view[start : start + self.slot_bytes])
