"""Where each distinct content of a checkpoint lies: places by chunk id, counted by the chunks that refer to them.

Pure: no file, no GPU. A place is a slot of a store (a pack in the making, a pack of an earlier checkpoint, a pool in host
memory) and is never overwritten while any chunk refers to it. Content that is already there is referred to, not taken twice:
that is deduplication, within a checkpoint and against its parents. Used by targets.py and copy_out.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field

CHUNK_BYTES = 4 << 20  # also the size of a slot (spec/chunk-index.md)
ID_BYTES = 32
PACK_SLOTS = 128


class Store:
    """A run of slots. `slots` is how many it may have."""

    def __init__(self, number: int, slots: int, *, is_parent: bool = False) -> None:
        self.number = number
        self.is_parent = is_parent
        self.used: set[int] = set()  # offsets that chunks refer to
        self._slots = slots
        self._next = 0
        self._free: list[int] = []

    @property
    def free_slots(self) -> int:
        """How often `allocate` will succeed."""
        return self._slots - self._next + len(self._free)

    @property
    def is_full(self) -> bool:
        """`allocate` would fail."""
        return self.free_slots == 0

    def allocate(self) -> int:
        """The offset of a slot; one that was given back comes first, so that rewritten memory does not make a store grow."""
        if self._free:
            offset = self._free.pop()
        else:
            offset = self._next * CHUNK_BYTES
            self._next += 1
        self.used.add(offset)
        return offset

    def free(self, offset: int) -> None:
        """Nobody refers to the slot any more."""
        self.used.discard(offset)
        if not self.is_parent:
            self._free.append(offset)


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
            place.store.used.add(place.offset)
        return place

    def add(self, chunk_id: bytes, store: Store, length: int) -> Place:
        """A new place in `store` for content that is not known yet."""
        place = Place(chunk_id, store, store.allocate(), length, 1)
        self.places[chunk_id] = place
        return place

    def drop(self, place: Place | None) -> None:
        """One chunk has other content now."""
        if place is None or place is ZERO:
            return
        place.references -= 1
        if place.references == 0:
            place.store.free(place.offset)
            if not place.store.is_parent:
                del self.places[place.id]
