"""Device objects of a checkpoint in the making: what their chunks held when they were last copied, and where that lies.

Pure but for the address of the memory. The order of chunks in packs follows from the objects alone: by device, then by first
address; a group of 128 consecutive chunks goes to one pack, so equal content gives equal packs. Used by copy_out.py.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from gpu_state.staging.slots import CHUNK_BYTES, ID_BYTES, PACK_SLOTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from gpu_state.staging.device_objects import DeviceObject
    from gpu_state.staging.slots import Place


class Tracked:
    """One object. `device` and `address` are the application's words for it, `uuid` says which GPU it is on."""

    def __init__(self, name: str, memory: DeviceObject, *, device: int, uuid: str, address: int) -> None:
        self.name = name
        self.memory = memory
        self.device = device
        self.uuid = uuid
        self.address = address
        self.size = memory.size
        self.count = -(-self.size // CHUNK_BYTES)
        self._first_group = 0
        self._first_slot = 0
        self.reset()

    def reset(self) -> None:
        """Nothing is copied yet: another target begins."""
        self.ids = bytearray(self.count * ID_BYTES)  # all zero; no content has that id
        self.places: list[Place | None] = [None] * self.count

    def id_of(self, number: int) -> bytes:
        """The id that a chunk had."""
        return bytes(self.ids[number * ID_BYTES : (number + 1) * ID_BYTES])

    def length_of(self, number: int) -> int:
        """Bytes of a chunk; the last may be shorter."""
        return min(CHUNK_BYTES, self.size - number * CHUNK_BYTES)

    def number_from(self, group: int, slot: int) -> None:
        """The chunks begin at that slot of that group."""
        self._first_group, self._first_slot = group, slot

    def group_of(self, number: int) -> int:
        """The group whose pack a chunk goes to."""
        return self._first_group + (self._first_slot + number) // PACK_SLOTS

    def whole(self) -> Span:
        """All of it."""
        return Span(self, 0, self.count)


class Span(NamedTuple):
    """Consecutive chunks of one object."""

    item: Tracked
    first: int
    chunks: int

    @property
    def address(self) -> int:
        """Where they lie in this process."""
        return self.item.memory.address() + self.first * CHUNK_BYTES

    @property
    def size(self) -> int:
        """Their bytes."""
        return min(self.chunks * CHUNK_BYTES, self.item.size - self.first * CHUNK_BYTES)


def in_order(objects: Iterable[Tracked]) -> list[Tracked]:
    """By device, then by address."""
    return sorted(objects, key=lambda item: (item.device, item.uuid, item.address, item.name))


def number_groups(objects: Iterable[Tracked], new_groups: Callable[[int], int]) -> None:
    """Give every chunk its group; no group has chunks of two devices."""
    for _, items in groupby(in_order(objects), key=lambda item: (item.device, item.uuid)):
        found = list(items)
        group, slot = new_groups(-(-sum(item.count for item in found) // PACK_SLOTS)), 0
        for item in found:
            item.number_from(group + slot // PACK_SLOTS, slot % PACK_SLOTS)
            slot += item.count


def batches_of(spans: Sequence[Span], limit: int) -> Iterator[list[Span]]:
    """The same chunks in the same order, at most `limit` at a time."""
    batch: list[Span] = []
    room = limit
    for item, first, chunks in spans:
        done = 0
        while done < chunks:
            taken = min(chunks - done, room)
            batch.append(Span(item, first + done, taken))
            done, room = done + taken, room - taken
            if not room:
                yield batch
                batch, room = [], limit
    if batch:
        yield batch


def changed_spans(batch: Sequence[Span], ids: bytes) -> Iterator[Span]:
    """Where a batch's ids are not those of the last copy; neighbours joined."""
    start = 0
    for item, first, chunks in batch:
        end = start + chunks * ID_BYTES
        known = item.ids[first * ID_BYTES : (first + chunks) * ID_BYTES]
        if ids[start:end] != known:
            yield from _joined(item, first, _differing(ids[start:end], known))
        start = end


def _differing(new: bytes, old: bytes | bytearray) -> list[int]:
    starts = range(0, len(new), ID_BYTES)
    return [at // ID_BYTES for at in starts if new[at : at + ID_BYTES] != old[at : at + ID_BYTES]]


def _joined(item: Tracked, first: int, numbers: Sequence[int]) -> Iterator[Span]:
    begin = 0
    for at in range(1, len(numbers) + 1):
        if at == len(numbers) or numbers[at] != numbers[at - 1] + 1:
            yield Span(item, first + numbers[begin], at - begin)
            begin = at
