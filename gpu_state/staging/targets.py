"""Where GPU memory goes: packs in a directory, or a pool in host memory (spec/chunk-index.md, sections 3 to 5).

PackTarget writes under partial names; `finish` gives the packs their names, and is the only step after which a file looks
like a pack. A crash before it leaves nothing that anything takes for whole; the next checkpoint into the directory removes
the partial files. MemoryTarget is one large pack in a memory file system, so a new agent can find it again.
Both refer to content by place (slots.py); copy_out.py decides what is sent.
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple, Protocol

from gpu_state.staging import host_memory
from gpu_state.staging.cuda_calls import call
from gpu_state.staging.device_lane import stretches_of
from gpu_state.staging.pack_writer import WRITER_THREADS, Extent, Load, PackFile, PackWriters, explain
from gpu_state.staging.slots import CHUNK_BYTES, PACK_SLOTS, Place, SlotTable, Store
from image_format.file_names import PARTIAL_PREFIX, pack_name
from vgpu_errors import NotEnoughSpace, UnexpectedEntry

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from gpu_state.staging.cuda_calls import Check
    from gpu_state.staging.device_lane import Lane, Piece
    from gpu_state.staging.host_memory import HostMemory
    from gpu_state.staging.parents import ParentPack
    from gpu_state.staging.pinned_ring import PinnedRing

# A parent's pack that is used less than that would make the image carry more dead bytes than are worth a copy; and beyond so
# many packs an image costs a registry more requests than its content does (spec/transport.md).
LEAST_LIVE_SHARE = 0.4
MOST_PACKS = 512


class Target(Protocol):
    """What copy_out.py needs of a target. `guard` is held around every change of the table."""

    table: SlotTable
    guard: Lock

    def new_groups(self, count: int) -> int:
        """Numbers for groups of 128 consecutive chunks; returns the first."""
        ...

    def store_for(self, group: int) -> Store:
        """The store that the next new content of a group goes to."""
        ...

    def send(self, lane: Lane, pieces: Sequence[Piece], check: Check) -> None:
        """Begin copying; the device memory must stay until the lane has settled."""
        ...

    def flush(self, check: Check) -> None:
        """Wait until everything that was sent has arrived. Lanes must have settled."""
        ...

    def arrange(self) -> None:
        """Fix in which packs the content is: places and `name_of` do not change any more."""
        ...

    def name_of(self, store: Store) -> str:
        """The name of the pack that a store is."""
        ...

    def finish(self, check: Check) -> None:
        """Commit: nothing will be sent any more."""
        ...

    def abort(self) -> None:
        """Leave nothing behind."""
        ...


class _Groups:
    """Numbers of packs: one for each group, further ones where a pack is full."""

    def __init__(self) -> None:
        self._count = 0
        self._stores: dict[int, Store] = {}

    def new(self, count: int) -> int:
        first, self._count = self._count, self._count + count
        return first

    def store_for(self, group: int) -> Store:
        store = self._stores.get(group)
        if store is None or store.is_full:
            # Full while the group's chunks have changed: other chunks still refer to what they held.
            number = group if store is None else self.new(1)
            store = self._stores[group] = Store(number, PACK_SLOTS)
        return store


class _Move(NamedTuple):
    """A slot that moves from a parent's pack into one of ours, on disk."""

    source: Path
    offset: int
    place: Place


class PackTarget:
    """New packs in a directory, and the packs of parents that are still of use."""

    def __init__(
        self, directory: Path, ring: PinnedRing, *, parents: Iterable[Path] = (), threads: int = WRITER_THREADS
    ) -> None:
        self.directory = directory
        self.table = SlotTable()
        self.guard = Lock()
        self._groups = _Groups()
        self._ring = ring
        self._files: dict[Store, PackFile] = {}
        self._names: dict[Store, str] = {}
        self._moves: list[_Move] = []
        self._made: list[Path] = []
        self._is_arranged = False
        self._threads = threads
        for parent in parents:
            self._know(parent)
        self._writers = PackWriters(ring, threads)

    @property
    def written_bytes(self) -> int:
        """Bytes of chunks that went through the ring into files."""
        return self._writers.written_bytes

    def new_groups(self, count: int) -> int:
        """Numbers for groups."""
        return self._groups.new(count)

    def store_for(self, group: int) -> Store:
        """The pack of a group."""
        return self._groups.store_for(group)

    def send(self, lane: Lane, pieces: Sequence[Piece], check: Check) -> None:
        """GPU to ring, and on to the writers: at most a slot's worth for one file at a time."""

        def checks() -> None:
            check()
            self._writers.check()

        for load in self._loads(pieces):
            self._send_load(lane, load, checks)

    def flush(self, check: Check) -> None:
        """Wait for the writers."""
        self._writers.flush(check)

    def arrange(self) -> None:
        """Names for all packs in use; parents' packs that are mostly dead give their live slots to packs of ours."""
        if self._is_arranged:
            return
        self._is_arranged = True
        live: defaultdict[Store, list[Place]] = defaultdict(list)
        for place in self.table.places.values():
            if place.references:
                live[place.store].append(place)
        group = self._groups.new(1)  # of all that move: so they end up in as few packs as they fill
        for store in list(_not_worth_keeping(live)):
            self._relocate(store, live.pop(store), live, group)
        own = {store.number for store in live if not store.is_parent}
        for store in live:
            self._names[store] = pack_name(self._number(store, own))

    def name_of(self, store: Store) -> str:
        """The pack's name, after `arrange`."""
        return self._names[store]

    def finish(self, check: Check) -> None:
        """Cut, sync and name the packs: afterwards they look whole."""
        self.arrange()
        self.flush(check)
        self._move_slots()
        with ThreadPoolExecutor(self._threads, "vgpu-sync") as pool:
            for _ in pool.map(self._commit, list(self._names)):
                check()
        for store in [store for store in self._files if store not in self._names]:
            self._discard(store)
        self._writers.close()
        _sync_directory(self.directory)

    def abort(self) -> None:
        """End the writers and remove every file of ours."""
        self._writers.close()
        for store in list(self._files):
            self._discard(store)
        for path in self._made:
            path.unlink(missing_ok=True)

    def _know(self, parent: Path) -> None:
        from gpu_state.staging.parents import places_of  # noqa: PLC0415 - reads indexes, which most workers never do

        old, new = parent.stat(), self.directory.stat()
        if old.st_dev == new.st_dev and old.st_ino != new.st_ino:
            for place in places_of(parent):
                self.table.places.setdefault(place.id, place)

    def _loads(self, pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
        room = max(self._ring.slot_bytes // CHUNK_BYTES, 1)
        load: list[Piece] = []
        for piece in pieces:
            if load and (len(load) == room or load[0].place.store is not piece.place.store):
                yield load
                load = []
            load.append(piece)
        if load:
            yield load

    def _send_load(self, lane: Lane, pieces: Sequence[Piece], check: Check) -> None:
        file = self._file(pieces[0].place.store)
        slot = self._ring.take(check)
        stream, start, extents = lane.copy_stream(), 0, []
        for stretch in stretches_of(pieces):
            call("cuMemcpyDtoHAsync", slot.address + start, stretch.address, stretch.length, stream)
            extents.append(Extent(start, stretch.place.offset, stretch.length))
            start += stretch.length
        self._writers.submit(Load(file, slot, extents, lane, lane.record(stream)))

    def _file(self, store: Store) -> PackFile:
        with self.guard:
            if store not in self._files:
                path = self.directory / f"{PARTIAL_PREFIX}pack-{store.number:05}.bin"
                path.unlink(missing_ok=True)
                try:
                    self._files[store] = PackFile(path)
                except OSError as problem:
                    raise explain(problem, path, CHUNK_BYTES) from problem
            return self._files[store]

    def _relocate(self, store: Store, places: list[Place], live: defaultdict[Store, list[Place]], group: int) -> None:
        for place in sorted(places, key=lambda place: place.offset):
            source, offset = _pack(store).path, place.offset
            place.store = self._groups.store_for(group)
            place.offset = place.store.allocate()
            live[place.store].append(place)
            self._moves.append(_Move(source, offset, place))

    def _number(self, store: Store, own: set[int]) -> int:
        if not store.is_parent:
            return store.number
        number = int(_pack(store).path.name[len("vgpu-pack-") : -len(".bin")])
        while number in own:
            number = self._groups.new(1)
        own.add(number)
        return number

    def _move_slots(self) -> None:
        from gpu_state.staging.parents import copy_bytes  # noqa: PLC0415 - as above

        for source, offset, place in self._moves:
            file = self._file(place.store)
            gap = -place.length % CHUNK_BYTES
            try:
                copy_bytes(source, file.path, offset, place.offset, place.length)
                if gap:
                    copy_bytes(source, file.path, offset + place.length, place.offset + place.length, gap)
            except OSError as problem:
                raise explain(problem, file.path, place.length) from problem

    def _commit(self, store: Store) -> None:
        path = self.directory / self._names[store]
        path.unlink(missing_ok=True)
        try:
            if store.is_parent:
                from gpu_state.staging.parents import adopt  # noqa: PLC0415 - as above

                adopt(_pack(store).path, path)
            else:
                file = self._files[store]
                os.ftruncate(file.descriptor, max(store.used) + CHUNK_BYTES)
                os.fsync(file.descriptor)
                file.close()
                file.path.rename(path)
                del self._files[store]
        except OSError as problem:
            raise explain(problem, path, CHUNK_BYTES) from problem
        self._made.append(path)

    def _discard(self, store: Store) -> None:
        file = self._files.pop(store)
        file.close()
        file.path.unlink(missing_ok=True)


class _Segment(NamedTuple):
    """One file of a pool."""

    path: Path
    memory: HostMemory
    store: Store


class MemoryTarget:
    """A pool of host memory, pinned for all GPUs; copies go straight into it, at link rate and without a thread.

    It is one file as a rule. What comes after it was made, objects of further processes above all, gets files of its own:
    PATH.1, PATH.2 and so on, which stand for packs 1, 2.
    One that is `lasting` serves one suspend after the other: giving up a copy forgets the content and keeps the memory.
    """

    def __init__(self, path: Path, *, is_lasting: bool = False) -> None:
        self.path = path
        self.is_lasting = is_lasting
        self.table = SlotTable()
        self.guard = Lock()
        self._segments: list[_Segment] = []

    @classmethod
    def prepare(
        cls,
        size: int,
        name: str,
        *,
        folder: Path | None = None,
        is_lasting: bool = False,
        check: Check = lambda: None,
    ) -> MemoryTarget:
        """Make, touch and pin a pool. Takes seconds for tens of GiB: long before the freeze."""
        target = cls((folder or host_memory.pool_folder(size)) / name, is_lasting=is_lasting)
        target.extend(size, check)
        return target

    @classmethod
    def reopen(cls, path: Path, check: Check = lambda: None) -> MemoryTarget:
        """A pool that an earlier worker filled; to read from."""
        target = cls(path)
        while target._next_path().exists():
            target._add(host_memory.open_file(target._next_path(), check), is_new=False)
        if not target._segments:
            raise UnexpectedEntry(where=str(path.parent), entry=path.name, what="is missing")
        return target

    def extend(self, size: int, check: Check = lambda: None) -> None:
        """Room for so many more bytes."""
        size = host_memory.round_up(max(size, 1), CHUNK_BYTES)
        path = self._next_path()
        self._add(host_memory.make_file(path, size, check))

    @property
    def free_slots(self) -> int:
        """Chunks that there is still room for."""
        return sum(segment.store.free_slots for segment in self._segments)

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(segment.memory.size for segment in self._segments)

    @property
    def is_huge(self) -> bool:
        """Whether it lies on huge pages."""
        return all(segment.memory.is_huge for segment in self._segments)

    @property
    def first_memory(self) -> HostMemory:
        """The file that it was made with; whoever has no suspend to serve may work in it."""
        return self._segments[0].memory

    def memory_of(self, pack: str) -> HostMemory:
        """The file that stands for a pack."""
        for segment in self._segments:
            if self.name_of(segment.store) == pack:
                return segment.memory
        raise UnexpectedEntry(where=str(self.path), entry=pack, what="is not in the pool")

    def new_groups(self, count: int) -> int:
        """A pool is not divided."""
        del count
        return 0

    def store_for(self, group: int) -> Store:
        """The first file with room; NotEnoughSpace when all are full."""
        del group
        for segment in self._segments:
            if not segment.store.is_full:
                return segment.store
        raise NotEnoughSpace(path=self.path, free_bytes=0, needed_bytes=CHUNK_BYTES)

    def send(self, lane: Lane, pieces: Sequence[Piece], check: Check) -> None:
        """GPU to pool."""
        for stretch in stretches_of(pieces):
            check()
            memory = self._segments[stretch.place.store.number].memory
            address = memory.address + stretch.place.offset
            call("cuMemcpyDtoHAsync", address, stretch.address, stretch.length, lane.copy_stream())

    def flush(self, check: Check) -> None:
        """A settled lane has copied everything."""

    def arrange(self) -> None:
        """Nothing moves any more anyway."""

    def name_of(self, store: Store) -> str:
        """The files stand for packs by number, whatever they are called."""
        return pack_name(store.number)

    def finish(self, check: Check) -> None:
        """The pool is as durable as memory is."""

    def abort(self) -> None:
        """Leave nothing behind: of the content where the pool lasts, else of the pool."""
        (self.recycle if self.is_lasting else self.remove)()

    def recycle(self) -> None:
        """Forget the content; the memory stays pinned for the next. What was added for the last goes."""
        more, self._segments = self._segments[1:], self._segments[:1]
        self.table = SlotTable()
        self._segments = [_Segment(path, memory, _store(0, memory)) for path, memory, _ in self._segments]
        self._remove(more)

    def remove(self) -> None:
        """Unpin, unmap and remove the pool."""
        self._remove(self._segments)

    def _remove(self, segments: Sequence[_Segment]) -> None:
        with contextlib.ExitStack() as stack:
            for segment in segments:
                stack.callback(segment.memory.close)
                stack.callback(segment.path.unlink, missing_ok=True)  # at once; unpinning takes seconds

    def let_go(self) -> None:
        """Unpin and unmap; the files stay for another worker."""
        with contextlib.ExitStack() as stack:
            for segment in self._segments:
                stack.callback(segment.memory.close)

    def _next_path(self) -> Path:
        count = len(self._segments)
        return self.path.with_name(f"{self.path.name}.{count}") if count else self.path

    def _add(self, memory: HostMemory, *, is_new: bool = True) -> None:
        path = Path(memory.name)
        try:
            memory.register()
        except BaseException:
            memory.close()
            if is_new:
                path.unlink(missing_ok=True)
            raise
        self._segments.append(_Segment(path, memory, _store(len(self._segments), memory)))


def _store(number: int, memory: HostMemory) -> Store:
    return Store(number, memory.size // CHUNK_BYTES)


def _not_worth_keeping(live: Mapping[Store, Sequence[Place]]) -> Iterator[Store]:
    """Parents' packs that are mostly dead; and while there are too many packs, those with the least in use."""
    moved_slots = moved_packs = 0
    for pack in sorted((_pack(store) for store in live if store.is_parent), key=lambda pack: pack.live_share):
        packs = len(live) - moved_packs + -(-moved_slots // PACK_SLOTS)
        if pack.live_share >= LEAST_LIVE_SHARE and packs <= MOST_PACKS:
            return
        yield pack
        moved_packs, moved_slots = moved_packs + 1, moved_slots + len(pack.used)


def _pack(store: Store) -> ParentPack:
    from gpu_state.staging.parents import ParentPack  # noqa: PLC0415 - as above

    assert isinstance(store, ParentPack)
    return store


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
