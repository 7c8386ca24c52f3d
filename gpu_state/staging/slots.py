"""Where each distinct content of a checkpoint lies: places by chunk id, counted by the chunks that refer to them.

Pure: no file, no GPU. A place belongs to a store (a pack that is being written, a pack of an earlier checkpoint, the pool of
host memory) and is never overwritten while any chunk refers to it. Content that is already there is referred to, not taken twice:
that is deduplication, within a checkpoint and against its parents. Used by targets.py and copy_out.py.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

CHUNK_BYTES = 4 << 20
ID_BYTES = 32
PACK_CHUNKS = 128


class Store:
    """Something with offsets. `capacity` is in bytes; None grows without end."""

    def __init__(self, number: int, capacity: int | None, *, is_parent: bool = False) -> None:
        self.number = number
        self.capacity = capacity
        self.is_parent = is_parent
        self.end = 0
        self.used_bytes = 0
        self._free: defaultdict[int, list[int]] = defaultdict(list)  # length -> offsets

    def has_room(self, length: int) -> bool:
        """Whether `allocate` would succeed."""
        return bool(self._free.get(length)) or self.capacity is None or self.end + length <= self.capacity

    def allocate(self, length: int) -> int:
        """An offset: one that was given back if there is, so that rewritten memory does not make a store grow."""
        self.used_bytes += length
        if self._free.get(length):
            return self._free[length].pop()
        offset, self.end = self.end, self.end + length
        return offset

    def free(self, offset: int, length: int) -> None:
        """The bytes are not referred to any more."""
        self.used_bytes -= length
        self._free[length].append(offset)


@dataclass(slots=True, eq=False)
class Place:
    """Where one content lies; `references` is how many chunks have it."""

    id: bytes
    store: Store
    offset: int
    length: int
    references: int = 0


ZERO = Place(b"", Store(-1, 0), 0, 0)  # content that need not be stored


@dataclass
class SlotTable:
    """All places of one checkpoint in the making."""

    places: dict[bytes, Place] = field(default_factory=dict)

    def known(self, chunk_id: bytes) -> Place | None:
        """The place of that content, now referred to once more."""
        place = self.places.get(chunk_id)
        if place is not None:
            place.references += 1
        return place

    def add(self, chunk_id: bytes, store: Store, length: int) -> Place:
        """A new place in `store` for content that is not known yet."""
        place = Place(chunk_id, store, store.allocate(length), length, 1)
        self.places[chunk_id] = place
        return place

    def drop(self, place: Place | None) -> None:
        """One chunk has other content now."""
        if place is None or place is ZERO:
            return
        place.references -= 1
        if place.references == 0 and not place.store.is_parent:
            del self.places[place.id]
            place.store.free(place.offset, place.length)
