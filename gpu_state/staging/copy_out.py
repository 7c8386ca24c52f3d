"""Copies device objects to a target: rounds beside the running application, then what is left while it stands still.

In a round a batch of chunks is hashed and set aside on the GPU by one kernel, and what was set aside is copied: id and bytes
belong together whatever the application writes meanwhile. Zero chunks, unchanged chunks and content the target already has
never cross the link. In `final` the application stands still, so chunks are hashed and copied where they lie; where it will
not run again before `drain`, the copies go on while the caller does other work.
Every byte's state is in the table of tracked objects; a failure anywhere makes the whole target worthless: `abort`.
Called by worker.py; bench/staging_rates.py uses it in the same way.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from gpu_state.inventory_proof import Tally
from gpu_state.staging.chunk_hasher import HashRange, zero_chunk_id
from gpu_state.staging.device_lane import Aside, Piece
from gpu_state.staging.rates import Progress
from gpu_state.staging.round_policy import RoundPolicy, RoundReport
from gpu_state.staging.slots import CHUNK_BYTES, ID_BYTES, ZERO
from gpu_state.staging.tracked import batches_of, changed_spans, in_order, number_groups
from vgpu_errors import Cancelled, VgpuError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from gpu_state.staging.cuda_calls import Check
    from gpu_state.staging.device_lane import HashWork, Lane, Scratch
    from gpu_state.staging.rates import Tell
    from gpu_state.staging.slots import Place
    from gpu_state.staging.targets import Target
    from gpu_state.staging.tracked import Span, Tracked
    from image_format.vram import VramFragment

T = TypeVar("T")

# Chunks of one launch in place: 1 GiB, 2 ms at 500 GB/s; so the first copies begin early and cancelling is quick.
SURVEY_CHUNKS = 256
IN_FLIGHT = 3
LONGEST_PAUSE_S = 0.01


class _Batch(NamedTuple):
    """Chunks that are being hashed and set aside."""

    work: HashWork
    scratch: Scratch
    spans: list[Span]


@dataclass(frozen=True, slots=True)
class FinalReport:
    """What the stop took. `set_aside_bytes` lie on the GPU until `drain`; `copied_bytes` have left it, or are under way."""

    total_bytes: int
    changed_bytes: int
    zero_bytes: int
    dedup_bytes: int
    set_aside_bytes: int
    copied_bytes: int
    hash_s: float
    seconds: float


class _Counts:
    """Bytes that `_take` found, by kind, on one GPU."""

    def __init__(self) -> None:
        self.changed = self.zero = self.dedup = self.new = 0


class CopyOut:
    """One checkpoint or suspend of a container, over all its GPUs."""

    def __init__(
        self,
        lanes: Mapping[str, Lane],
        target: Target,
        *,
        tell: Tell = lambda _event: None,
        check: Check = lambda: None,
    ) -> None:
        self._lanes = lanes  # by device uuid
        self._target = target
        self._tell = tell
        self._outer_check = check
        self._tracked: dict[str, Tracked] = {}
        self._asides: list[tuple[Lane, Aside]] = []
        self._is_broken = False
        self._final_began = 0.0
        self.reports: list[RoundReport] = []

    # ---- what is copied --------------------------------------------------------------------------

    def add(self, objects: Iterable[Tracked]) -> None:
        """Take objects in. One that is known by its name and size keeps what was copied of it."""
        fresh = []
        for item in objects:
            known = self._tracked.get(item.name)
            if known is not None and known.size == item.size and known.uuid == item.uuid:
                known.memory, known.device, known.address = item.memory, item.device, item.address
            else:
                self.forget([item.name])
                fresh.append(item)
        number_groups(fresh, self._target.new_groups)
        self._tracked.update((item.name, item) for item in fresh)

    def forget(self, names: Iterable[str]) -> None:
        """The application has freed these objects."""
        for name in names:
            item = self._tracked.pop(name, None)
            for place in item.places if item is not None else ():
                self._target.table.drop(place)

    @property
    def names(self) -> set[str]:
        """The objects by name."""
        return set(self._tracked)

    @property
    def total_bytes(self) -> int:
        """Bytes of all objects."""
        return sum(item.size for item in self._tracked.values())

    @property
    def unplaced_chunks(self) -> int:
        """Chunks that were never copied: as many slots may be needed at once."""
        return sum(item.places.count(None) for item in self._tracked.values())

    def room(self) -> int:
        """Device memory in which changed chunks could be set aside."""
        return sum(self._lanes[uuid].room() for uuid in {item.uuid for item in self._tracked.values()})

    # ---- rounds ----------------------------------------------------------------------------------

    def rounds(self, policy: RoundPolicy) -> list[RoundReport]:
        """Rounds until the rest is small enough for the stop or does not shrink."""
        while policy.wants_another(self.reports, self.room()):
            self.round(policy)
        return self.reports

    def round(self, policy: RoundPolicy | None = None) -> RoundReport:
        """Copy, beside the running application, what is not in the target yet; it has arrived there when this returns."""
        policy = policy or RoundPolicy()
        began, number = time.monotonic(), len(self.reports) + 1
        with self._breaking():
            spans = self._on_all(self._survey if self.reports else self._all)
            changed = sum(span.size for found in spans.values() for span in found)
            progress = Progress(f"round {number}", changed, self._tell)
            counts: list[_Counts] = []
            if policy.is_worth_copying(changed, self.reports):
                found = self._on_all(lambda lane: self._copy_beside(lane, spans[lane.context.uuid], policy, progress))
                counts = list(found.values())
                self._target.flush(self._check)
        progress.end()
        report = RoundReport(
            number=number,
            total_bytes=self.total_bytes,
            changed_bytes=changed,
            copied_bytes=sum(count.new for count in counts),
            zero_bytes=sum(count.zero for count in counts),
            dedup_bytes=sum(count.dedup for count in counts),
            is_skipped=not counts,
            seconds=time.monotonic() - began,
        )
        self.reports.append(report)
        return report

    def _survey(self, lane: Lane) -> list[Span]:
        """What differs from the last copy at this moment."""
        return [span for batch, ids in self._hashed(lane) for span in changed_spans(batch, ids)]

    def _all(self, lane: Lane) -> list[Span]:
        items = (item for item in self._tracked.values() if item.uuid == lane.context.uuid)
        return [item.whole() for item in in_order(items)]

    def _copy_beside(self, lane: Lane, spans: Sequence[Span], policy: RoundPolicy, progress: Progress) -> _Counts:
        counts = _Counts()
        waiting: deque[_Batch] = deque()
        for chunks in batches_of(spans, lane.scratch_chunks()) if spans else ():
            if len(waiting) == IN_FLIGHT - 1:
                self._settle_batch(lane, waiting.popleft(), counts, progress)
            self._keep_pace(policy, progress)
            waiting.append(self._set_aside(lane, chunks))
        while waiting:
            self._settle_batch(lane, waiting.popleft(), counts, progress)
            self._keep_pace(policy, progress)
        lane.settle(self._check)
        lane.drop_scratches()
        return counts

    def _set_aside(self, lane: Lane, spans: list[Span]) -> _Batch:
        scratch = lane.scratch(self._check)
        ranges, start = [], scratch.address
        for span in spans:
            ranges.append(HashRange(span.address, span.size, start))
            start += span.chunks * CHUNK_BYTES
        return _Batch(lane.start_hash(ranges), scratch, spans)

    def _settle_batch(self, lane: Lane, batch: _Batch, counts: _Counts, progress: Progress) -> None:
        ids = bytes(batch.work.ids(self._check))
        lane.hashed(batch.work)
        pieces: list[Piece] = []
        start = 0
        for span in batch.spans:
            base = batch.scratch.address + start * CHUNK_BYTES
            pieces += self._take(span, ids[start * ID_BYTES :], base, counts)
            start += span.chunks
        self._target.send(lane, pieces, self._check)
        lane.release_scratch(batch.scratch)
        progress.add(sum(span.size for span in batch.spans))

    def _keep_pace(self, policy: RoundPolicy, progress: Progress) -> None:
        while policy.pace_bytes_s and (ahead_s := progress.done / policy.pace_bytes_s - progress.seconds) > 0:
            self._check()
            time.sleep(min(ahead_s, LONGEST_PAUSE_S))

    # ---- the stop --------------------------------------------------------------------------------

    def final(self, *, set_aside: bool, settles: bool = True) -> FinalReport:
        """The application stands still: hash everything, take what differs. The rest of the work is `drain`'s.

        With `set_aside` changed chunks are kept in free device memory as far as that goes; everything else has left the GPU
        when this returns, so that the application's memory may change or go. Where it does not `settle`, copies are still
        under way then: the memory must not change before `drain`, but the application may have given it away to us.
        """
        began = self._final_began = time.monotonic()
        progress = Progress("final", self.total_bytes, self._tell)
        with self._breaking():
            found = self._on_all(lambda lane: self._take_still(lane, progress, set_aside=set_aside, settles=settles))
        progress.end()
        counts = [count for count, _, _ in found.values()]
        aside_bytes = sum(size for _, size, _ in found.values())
        return FinalReport(
            total_bytes=self.total_bytes,
            changed_bytes=sum(count.changed for count in counts),
            zero_bytes=sum(count.zero for count in counts),
            dedup_bytes=sum(count.dedup for count in counts),
            set_aside_bytes=aside_bytes,
            copied_bytes=sum(count.new for count in counts) - aside_bytes,
            hash_s=max((hash_s for _, _, hash_s in found.values()), default=0.0),
            seconds=time.monotonic() - began,
        )

    def _take_still(
        self, lane: Lane, progress: Progress, *, set_aside: bool, settles: bool
    ) -> tuple[_Counts, int, float]:
        began = time.monotonic()
        counts = _Counts()
        later: list[Piece] = []
        for batch, ids in self._hashed(lane):
            pieces = self._take_batch(batch, ids, counts)
            if set_aside:
                later += pieces
            else:
                self._target.send(lane, pieces, self._check)
            progress.add(sum(span.size for span in batch))
        hash_s = time.monotonic() - began
        size = self._keep_aside(lane, later) if later else 0
        if settles:
            lane.settle(self._check)
        return counts, size, hash_s

    def _take_batch(self, batch: list[Span], ids: bytes, counts: _Counts) -> list[Piece]:
        pieces: list[Piece] = []
        start = 0
        for span in batch:
            pieces += self._take(span, ids[start : start + span.chunks * ID_BYTES], span.address, counts)
            start += span.chunks * ID_BYTES
        return pieces

    def _keep_aside(self, lane: Lane, pieces: list[Piece]) -> int:
        aside = Aside(lane)
        self._asides.append((lane, aside))
        self._target.send(lane, aside.take(pieces), self._check)
        return aside.bytes

    # ---- after the stop --------------------------------------------------------------------------

    def drain(self) -> float:
        """Copy what was set aside and commit the target; the application may have gone on long ago.

        Returns the seconds since `final` began when the last copy had arrived.
        """
        with self._breaking():
            total = sum(aside.bytes for _, aside in self._asides)
            progress = Progress("drain", total, self._tell)
            for lane, aside in self._asides:
                lane.enter()
                # A stop that did not hold was followed by another: what has changed since is not wanted, its slot is taken.
                wanted = [piece for piece in aside.pieces if piece.place.references]
                self._target.send(lane, wanted, self._check)
                lane.settle(self._check)
                progress.add(aside.bytes)
                aside.free()
            self._asides.clear()
            for lane in list(self._lanes.values()):  # copies that `final` left under way
                lane.enter()
                lane.settle(self._check)
            copied_s = time.monotonic() - self._final_began
            self._target.flush(self._check)
            self._target.finish(self._check)
            progress.end()
        return copied_s

    def fragment(self) -> VramFragment:
        """The VRAM part of the chunk index; after `final` nothing of it changes any more."""
        from image_format.vram import ChunkPlace, VramFragment, VramRegion  # noqa: PLC0415 - needed at the very end only

        self._target.arrange()

        def place_of(item: Tracked, number: int) -> ChunkPlace:
            place = item.places[number]
            if place is None:
                raise VgpuError(what=f"chunk {number} of {item.name} was never copied")
            if place is ZERO:
                return ChunkPlace(item.id_of(number), None, 0, item.length_of(number))
            return ChunkPlace(place.id, self._target.name_of(place.store), place.offset, place.length)

        return VramFragment.of(
            VramRegion(
                item.device,
                item.uuid,
                item.address,
                item.size,
                item.name,
                tuple(place_of(item, number) for number in range(item.count)),
            )
            for item in self._tracked.values()
        )

    def tally(self) -> dict[str, Tally]:
        """What became of every byte, by device uuid."""
        return {uuid: self._tally(uuid) for uuid in {item.uuid for item in self._tracked.values()}}

    def abort(self) -> None:
        """Give up: free what is held on the GPUs, remove what was written."""
        self._is_broken = True
        with contextlib.ExitStack() as stack:
            stack.callback(self._target.abort)
            for _, aside in self._asides:
                stack.callback(aside.free)
            for lane in self._lanes.values():  # before the memory goes that is copied from and to
                stack.callback(lane.settle)
                stack.callback(lane.enter)
            self._asides = []

    def _tally(self, uuid: str) -> Tally:
        seen: set[int] = set()
        moved = zero = dedup = 0
        for item in self._tracked.values():
            for number, place in enumerate(item.places if item.uuid == uuid else ()):
                length = item.length_of(number)
                if place is ZERO:
                    zero += length
                elif place is not None and (place.store.is_parent or id(place) in seen):
                    dedup += length
                elif place is not None:
                    seen.add(id(place))
                    moved += length
        total = sum(item.size for item in self._tracked.values() if item.uuid == uuid)
        return Tally(total, moved, zero, dedup)

    # ---- shared ----------------------------------------------------------------------------------

    def _hashed(self, lane: Lane) -> Iterator[tuple[list[Span], bytes]]:
        """Hash all objects of a GPU where they lie, a few batches ahead of whoever looks at the ids."""
        waiting: deque[tuple[list[Span], HashWork]] = deque()
        batches = batches_of(self._all(lane), SURVEY_CHUNKS)
        for batch in batches:
            waiting.append((batch, lane.start_hash([HashRange(span.address, span.size) for span in batch])))
            if len(waiting) == IN_FLIGHT:
                yield self._ids_of(lane, *waiting.popleft())
        while waiting:
            yield self._ids_of(lane, *waiting.popleft())

    def _ids_of(self, lane: Lane, batch: list[Span], work: HashWork) -> tuple[list[Span], bytes]:
        ids = bytes(work.ids(self._check))
        lane.hashed(work)
        return batch, ids

    def _take(self, span: Span, ids: bytes, base: int, counts: _Counts) -> list[Piece]:
        """Note the ids of a span whose chunks lie at `base`; returns what the target does not have."""
        item, pieces = span.item, []
        if ids[: span.chunks * ID_BYTES] == item.ids[span.first * ID_BYTES : (span.first + span.chunks) * ID_BYTES]:
            return []
        with self._target.guard:
            for n in range(span.chunks):
                place = self._note(item, span.first + n, ids[n * ID_BYTES : (n + 1) * ID_BYTES], counts)
                if place is not None:
                    pieces.append(Piece(base + n * CHUNK_BYTES, place))
        return pieces

    def _note(self, item: Tracked, number: int, chunk_id: bytes, counts: _Counts) -> Place | None:
        if item.id_of(number) == chunk_id:
            return None
        table, length = self._target.table, item.length_of(number)
        table.drop(item.places[number])
        item.ids[number * ID_BYTES : (number + 1) * ID_BYTES] = chunk_id
        counts.changed += length
        if chunk_id == zero_chunk_id(length):
            item.places[number] = ZERO
            counts.zero += length
            return None
        if (place := table.known(chunk_id)) is not None:
            item.places[number] = place
            counts.dedup += length
            return None
        place = item.places[number] = table.add(chunk_id, self._target.store_for(item.group_of(number)), length)
        counts.new += length
        return place

    def _on_all(self, work: Callable[[Lane], T]) -> dict[str, T]:
        """The same on every GPU at once; the first failure ends the others at their next look."""

        def run(lane: Lane) -> T:
            lane.enter()
            with self._breaking():
                return work(lane)

        lanes = [self._lanes[uuid] for uuid in sorted({item.uuid for item in self._tracked.values()})]
        if len(lanes) == 1:
            return {lanes[0].context.uuid: run(lanes[0])}
        with ThreadPoolExecutor(max(len(lanes), 1), "vgpu-lane") as pool:
            results = list(pool.map(run, lanes))
        return {lane.context.uuid: result for lane, result in zip(lanes, results, strict=True)}

    @contextlib.contextmanager
    def _breaking(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._is_broken = True
            raise

    def _check(self) -> None:
        self._outer_check()
        if self._is_broken:
            raise Cancelled(phase="copying device memory", what="another part of it failed")
