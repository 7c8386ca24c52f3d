"""Packs and pagemaps: what was planned comes back, what was spoilt is refused or comes out the same."""

import io
import tempfile
from pathlib import Path

from blake3 import blake3
from hypothesis import strategies as st

from image_format import chunk_index, pagemap
from image_format.index_model import MAX_PACK_CHUNKS, Chunk, Codec, Index, Pack, Region, RegionKind, zero_id
from image_format.packs.packed import (
    Layout,
    Place,
    aligned,
    earlier_packs,
    packed_index,
    packed_index_bytes,
    plan_packs,
)
from image_format.packs.unpacking import Unpacker
from tests.format import independent_reader
from tests.format.make_packed_vectors import PACKED_INDEX, SMALL_FILES, Packed
from tests.format.pages_images import Run
from tests.format.pages_images import pagemap as make_pagemap
from tests.fuzz.mutations import attempt, fuzz, mutated
from vgpu_errors import VgpuError

CHUNK = 4096
WHOLE = Packed()


# ---- plans ---------------------------------------------------------------------------------------


def chunk_id(number, length):
    """Number 0 is zeros."""
    return zero_id(length) if number == 0 else blake3(number.to_bytes(4) + length.to_bytes(4)).digest()


# A region: its kind, the numbers of its chunks' contents, and the length of the last chunk.
REGION = st.tuples(
    st.sampled_from([RegionKind.VRAM, RegionKind.PAGES]),
    st.lists(st.integers(min_value=0, max_value=40), min_size=1, max_size=20),
    st.integers(min_value=1, max_value=12),
    st.sampled_from([CHUNK, 512, 1]),
)


def sealed_index(regions):
    """An index as sealing makes it; contents are known by their ids alone."""
    made, chunks, packs = [], [], []
    ordered = sorted(enumerate(regions), key=lambda pair: pair[1][0] == RegionKind.VRAM)
    for number, (kind, contents, repeats, tail) in ordered:
        lengths = [CHUNK] * (len(contents) * repeats - 1) + [tail]
        first, start = len(chunks), 0
        for content, length in zip(contents * repeats, lengths, strict=True):
            codec = Codec.RAW if content else Codec.ZERO
            chunks.append(
                Chunk(
                    chunk_id(content, length),
                    len(packs),
                    codec,
                    start if content else 0,
                    length * bool(content),
                    length,
                )
            )
            start += length
        name = f"7/{number}" if kind == RegionKind.VRAM else f"pages-{number:03}.img"
        made.append(Region(name, sum(lengths), first, len(lengths), kind))
        packs.append(Pack(name, start))
    return Index(tuple(made), tuple(chunks), tuple(packs), CHUNK)


def laid_out(plan):
    """Layouts as measuring would find them, all raw."""
    layouts = {}
    for pack in plan.packs:
        offset, places = 0, []
        for chunk in pack.chunks:
            places.append(Place(Codec.RAW, offset, chunk.length))
            offset = aligned(offset + chunk.length)
        layouts[pack.key] = Layout(offset, blake3(pack.key).digest(), tuple(places))
    return plan.with_layouts(layouts)


def check_plan(index, plan):
    found = chunk_index.from_bytes(packed_index_bytes(plan))
    assert found.content_root == index.compute_content_root()
    assert (found.regions, found.chunks, found.packs) == (
        index.regions,
        packed_index(plan).chunks,
        packed_index(plan).packs,
    )
    for chunk in found.chunks:
        assert (chunk.codec == Codec.ZERO) == (chunk.id == zero_id(chunk.length))
    for pack in plan.packs:
        assert len({chunk.id for chunk in pack.chunks}) == len(pack.chunks)
        assert sum(aligned(chunk.length) for chunk in pack.chunks) <= MAX_PACK_CHUNKS * CHUNK


def test_a_packed_index_comes_back():
    def check(regions, earlier_regions):
        index = sealed_index(regions)
        plan = laid_out(plan_packs(index))
        check_plan(index, plan)
        spelled = [region._asdict() | {"chunks": index.chunks_of(region)} for region in index.regions]
        wanted = independent_reader.packs_of({"regions": spelled, "chunk_size": CHUNK})
        assert [(pack.kind, [chunk.id for chunk in pack.chunks]) for pack in plan.packs] == wanted
        other = laid_out(plan_packs(sealed_index(earlier_regions)))
        later = laid_out(plan_packs(index, earlier=earlier_packs(packed_index(other))))
        check_plan(index, later)
        again = laid_out(plan_packs(index, earlier=earlier_packs(packed_index(plan))))
        check_plan(index, again)
        new = [pack for pack in again.packs if not pack.is_earlier]
        # Packs that mostly repeat what others hold are let go; nothing else is made anew.
        assert {chunk.id for pack in new for chunk in pack.chunks} <= {c.id for pack in plan.packs for c in pack.chunks}

    regions = st.lists(REGION, max_size=6)
    fuzz(check, regions, regions)


# ---- spoilt packs and indexes --------------------------------------------------------------------


def unpacked(blobs):
    """The bulk files that come out."""
    sealed = chunk_index.from_bytes(blobs["vgpu-index.bin"])
    packed = chunk_index.from_bytes(blobs[PACKED_INDEX])
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        with Unpacker(sealed, packed, folder) as unpacker:
            for number in range(unpacker.pack_count):
                unpacker.write(number, io.BytesIO(blobs.get(f"pack-{number}", b"")))
        return {path.name: path.read_bytes() for path in Path(folder).iterdir() if not path.name.startswith(".")}


def test_a_spoilt_packed_index_is_refused_or_gives_the_same_files():
    whole = unpacked(WHOLE.blobs)
    assert whole["log.img"] == WHOLE.files["log.img"]

    def check(data):
        outcome = attempt(lambda: unpacked(WHOLE.blobs | {PACKED_INDEX: data}))
        assert isinstance(outcome, VgpuError) or outcome == whole

    fuzz(check, mutated(WHOLE.blobs[PACKED_INDEX]))


def test_a_spoilt_pack_is_refused_or_gives_the_same_files():
    whole = unpacked(WHOLE.blobs)
    names = [name for name in WHOLE.blobs if name.startswith("pack-")]

    def check(pair):
        name, data = pair
        outcome = attempt(lambda: unpacked(WHOLE.blobs | {name: data}))
        assert isinstance(outcome, VgpuError) or outcome == whole

    assert SMALL_FILES in WHOLE.blobs
    fuzz(check, st.sampled_from(names).flatmap(lambda name: st.tuples(st.just(name), mutated(WHOLE.blobs[name]))))


# ---- pagemaps ------------------------------------------------------------------------------------

RUNS = st.lists(
    st.tuples(st.integers(min_value=0, max_value=3000), st.integers(min_value=1, max_value=3000), st.booleans()),
    max_size=12,
)


def made_runs(steps):
    address, runs = 0x40_0000, []
    for gap, count, is_present in steps:
        address += gap * 4096
        runs.append(Run(address, count, is_present))
        address += count * 4096
    return runs


def test_a_pagemap_of_any_bytes_never_breaks():
    seed = make_pagemap(1, made_runs([(0, 3, True), (9, 2000, True), (5, 1, False), (1, 7, True)]))

    def check(data, size):
        found = pagemap.read(data)
        if found is None:
            return
        for chunk_size in (4096, 65536, 4 << 20):
            if sum(found.counts) <= 1 << 20:
                cuts = found.cuts(size, chunk_size)
                assert cuts is None or (sum(cuts) == size and max(cuts) <= chunk_size)

    fuzz(check, mutated(seed) | st.binary(max_size=200), st.sampled_from([0, 100, 4096, 2010 * 4096]))


def test_cuts_keep_what_one_aligned_piece_holds_together():
    def check(steps, form, shift):
        runs = made_runs(steps)
        size = sum(run.count for run in runs if run.is_present) * 4096
        chunk_size = 4096 << shift
        cuts = pagemap.read(make_pagemap(5, runs, form=form)).cuts(size, chunk_size)
        pieces = [(run.address + n * 4096) // chunk_size for run in runs if run.is_present for n in range(run.count)]
        wanted = {}
        for piece in pieces:
            wanted[piece] = wanted.get(piece, 0) + 4096
        assert (list(cuts) if cuts else []) == list(wanted.values())

    fuzz(check, RUNS, st.sampled_from(["flags", "wide", "old"]), st.integers(min_value=0, max_value=10))
