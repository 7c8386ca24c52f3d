"""The agent's bounded pinned memory: a ring of equal slots between the GPU and files (DESIGN section 4, Memory).

Never larger than its limit, nor than what is going to be moved; made before any freeze. Holds no content for long.
Used by pack_writer.py on the way out and by copy_in.py on the way in.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpu_state.staging import host_memory

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
        self, expected_bytes: int, *, limit: int = DEFAULT_LIMIT, slot_bytes: int = SLOT_BYTES, check: Callable[[], None] = lambda: None
    ) -> None:
        self.slot_bytes = min(slot_bytes, limit, host_memory.round_up(max(expected_bytes, 1), host_memory.HUGE_PAGE))
        count = max(1, min(limit, max(expected_bytes, 1)) // self.slot_bytes)
        self._memory: HostMemory = host_memory.anonymous(count * self.slot_bytes)
        try:
            self._memory.touch(check=check)
            self._memory.register()
        except BaseException:
            self._memory.close()
            raise
        self._free = [self._slot(n) for n in range(count)]
        self.slot_count = count
        self._changed = threading.Condition()

    @property
    def size(self) -> int:
        """Pinned bytes."""
        return self._memory.size

    @property
    def is_huge(self) -> bool:
        """Whether it lies on huge pages that were set aside for such use."""
        return self._memory.is_huge

    def take(self, check: Callable[[], None] = lambda: None) -> Slot:
        """A free slot, waited for; `check` raises when there is no point in waiting."""
        with self._changed:
            while not self._free:
                check()
                self._changed.wait(_SLICE_S)
            return self._free.pop()

    def give(self, slot: Slot) -> None:
        """Back into the ring."""
        with self._changed:
            self._free.append(slot)
            self._changed.notify()

    def close(self) -> None:
        """Unpin and unmap; nobody may use a slot any more."""
        for slot in self._free:
            slot.view.release()
        self._free = []
        self._memory.close()

    def _slot(self, number: int) -> Slot:
        start = number * self.slot_bytes
        return Slot(self._memory.address + start, self._memory.view[start : start + self.slot_bytes])
