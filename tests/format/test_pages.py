"""Files of memory pages: cut by CRIU's pagemaps, equal memory is equal chunks, damaged images cost nothing but that."""

import itertools
import os
import struct
import tarfile
import tracemalloc
from dataclasses import replace

import pytest

from image_format import chunk_index, pagemap
from image_format.archives import archive_scan, stream_cuts
from image_format.archives.archive import verify_archive
from image_format.archives.stream_hashing import StreamHasher
from image_format.hashing import FileToHash
from image_format.index_model import CHUNK_SIZE, MAX_SMALL_FILE, RegionKind, zero_id
from image_format.sealing import seal
from image_format.trust.keys import load_signing_key
from image_format.verifying import verify_directory
from tests.format.pages_images import MAGICS, PAGE, Run, entry, message, page_at, pages
from tests.format.pages_images import pagemap as make_pagemap
from vgpu_errors import ContentMismatch, ImageError

HEAP, STACK = 0x5555_5540_0000 - 3 * PAGE, 0x7FFC_0000_0000
# Over an aligned piece's edge, two runs in one piece, one that is not in the file, one far away.
RUNS = (Run(HEAP, 300), Run(HEAP + 310 * PAGE, 2), Run(HEAP + 400 * PAGE, 9, is_present=False), Run(STACK, 64))


@pytest.fixture
def key(node):
    return load_signing_key(node / "node.key")


def fill(folder, runs=RUNS, pages_id=1, **more):
    (folder / f"pagemap-{pages_id}.img").write_bytes(make_pagemap(pages_id, runs))
    (folder / f"pages-{pages_id}.img").write_bytes(pages(runs, **more))
    return folder


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "pages"
    made.mkdir()
    (made / "core-1.img").write_bytes(b"x" * 300)
    return fill(made)


def lengths(runs, size=None, chunk_size=CHUNK_SIZE, **more):
    found = pagemap.read(make_pagemap(1, runs, **more))
    size = sum(run.count for run in runs if run.is_present) * PAGE if size is None else size
    cuts = found.cuts(size, chunk_size)
    return None if cuts is None else list(cuts)


# ---- pagemaps ------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["flags", "wide", "old"])
def test_runs_are_read_in_every_form_that_criu_wrote(form):
    found = pagemap.read(make_pagemap(7, RUNS, form=form))
    assert found.pages_name == "pages-7.img"
    present = [run for run in RUNS if run.is_present]
    assert list(zip(found.addresses, found.counts, strict=True)) == [(run.address, run.count) for run in present]


def test_an_image_of_criu_1_has_one_magic_number():
    assert pagemap.read(make_pagemap(7, RUNS, magics=MAGICS[4:])).pages_id == 7


def test_chunks_end_where_an_aligned_piece_of_the_address_space_ends():
    assert lengths(RUNS) == [3 * PAGE, (297 + 2) * PAGE, 64 * PAGE]
    assert lengths((Run(CHUNK_SIZE - PAGE, 2 * 1024 + 2),)) == [PAGE, CHUNK_SIZE, CHUNK_SIZE, PAGE]


@pytest.mark.parametrize("page", pagemap.PAGE_SIZES)
def test_the_page_size_is_that_which_fits_the_file(page):
    found = pagemap.read(make_pagemap(1, (Run(CHUNK_SIZE - page, 3),)))
    assert list(found.cuts(3 * page, CHUNK_SIZE)) == [page, 2 * page]


DAMAGED = {
    "nothing": b"",
    "half a magic": MAGICS[:6],
    "another magic": struct.pack("<2I", 0x54564319, 0x58313116) + make_pagemap(1, RUNS)[8:],
    "no head": MAGICS,
    "half a size": make_pagemap(1, RUNS)[:-1],
    "size beyond the end": MAGICS + struct.pack("<I", 100) + b"x",
    "huge entry": MAGICS + entry(message((1, 1))) + struct.pack("<I", 1 << 31) + bytes(100),
    "no address": MAGICS + entry(message((1, 1))) + entry(message((2, 3))),
    "no count": MAGICS + entry(message((1, 1))) + entry(message((1, PAGE))),
    "endless number": MAGICS + entry(message((1, 1))) + entry(b"\x08" + b"\xff" * 12),
    "cut number": MAGICS + entry(message((1, 1))) + entry(b"\x08\xff"),
    "group": MAGICS + entry(message((1, 1))) + entry(b"\x0b\x0c"),
    "text beyond the entry": MAGICS + entry(message((1, 1))) + entry(b"\x32\x7f"),
    "count beyond 64 bits": MAGICS + entry(message((1, 1))) + entry(message((1, PAGE), (5, 1 << 69))),
}


@pytest.mark.parametrize("data", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_pagemap_says_nothing(data):
    assert pagemap.read(data) is None


@pytest.mark.parametrize(
    ("runs", "size"),
    [
        (RUNS, 366 * PAGE - 1),
        (RUNS, 0),
        ((), 0),
        ((Run(8 * PAGE, 4), Run(0, 4)), None),
        ((Run(0, 4), Run(3 * PAGE, 4)), None),
        ((Run((1 << 64) - PAGE, 2),), None),
        ((Run(100, 2),), None),
        ((Run(0, 1 << 60),), None),
    ],
)
def test_runs_that_do_not_fit_their_file_give_no_cuts(runs, size):
    assert lengths(runs, size) is None


def test_fields_that_are_not_known_are_passed_over():
    more = entry(message((1, PAGE), (2, 3), (4, 4)) + b"\x32\x02hi" + b"\x3d" + bytes(4) + b"\x41" + bytes(8))
    assert list(pagemap.read(MAGICS + entry(message((1, 1))) + more).counts) == [3]


def test_a_file_that_two_pagemaps_claim_is_cut_by_none():
    maps = {name: pagemap.read(make_pagemap(1, RUNS)) for name in ("pagemap-1.img", "pagemap-shmem-2.img")}
    sizes = {"pages-1.img": 365 * PAGE + PAGE}
    assert list(pagemap.cuts_of({"pagemap-1.img": maps["pagemap-1.img"]}, sizes, CHUNK_SIZE)) == ["pages-1.img"]
    assert pagemap.cuts_of(maps, sizes, CHUNK_SIZE) == {}


# ---- what it is good for -------------------------------------------------------------------------


def ids_of(folder):
    index = chunk_index.from_bytes((folder / "vgpu-index.bin").read_bytes())
    region = next(region for region in index.regions if region.name == "pages-1.img")
    return [(chunk.id, chunk.length) for chunk in index.chunks_of(region)]


def test_equal_memory_gives_equal_chunks_where_it_shifts_in_the_file(folder, record, key):
    seal(folder, record, key)
    before = ids_of(folder)
    fill(folder, (Run(HEAP - 7000 * PAGE, 5), *RUNS))
    seal(folder, record, key)
    assert len(ids_of(folder)) == len(before) + 1
    assert ids_of(folder)[1:] == before


def test_a_changed_page_changes_one_chunk(folder, record, key):
    seal(folder, record, key)
    before = ids_of(folder)
    fill(folder, content=lambda address: page_at(address, int(address == STACK + 9 * PAGE)))
    seal(folder, record, key)
    after = ids_of(folder)
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, True, False]


# ---- sealed --------------------------------------------------------------------------------------


def test_pages_are_sealed_and_verified(folder, record, key, policy):
    seal(folder, record, key)
    found = verify_directory(folder, policy)
    index = found.index
    kinds = {region.name: region.kind for region in index.regions}
    assert kinds == {"core-1.img": 1, "pagemap-1.img": 1, "pages-1.img": 3}
    assert (index.minor, found.record.format_version) == (2, "1.2")
    assert [(entry.kind, entry.count) for entry in found.record.regions_summary] == [("file", 2), ("pages", 1)]
    assert found.bytes_checked == sum((folder / name).stat().st_size for name in kinds)
    assert (folder / "pages-1.img").read_bytes() == pages(RUNS)


@pytest.mark.parametrize("place", [0, 3 * PAGE - 1, 3 * PAGE, 366 * PAGE - 1])
def test_a_changed_byte_is_found_and_its_chunk_named(folder, record, key, policy, place):
    seal(folder, record, key)
    data = bytearray((folder / "pages-1.img").read_bytes())
    data[place] ^= 1
    (folder / "pages-1.img").write_bytes(data)
    ends = list(itertools.accumulate(length for _, length in ids_of(folder)))
    end = next(end for end in ends if place < end)
    with pytest.raises(ContentMismatch, match=rf"pages-1\.img: .*to {end}\b"):
        verify_directory(folder, policy)


def test_zeros_are_said_to_be_zeros(folder, record, key, policy):
    fill(folder, content=lambda address: bytes(PAGE) if address >= STACK else page_at(address))
    seal(folder, record, key)
    index = verify_directory(folder, policy).index
    assert [chunk.codec for chunk in index.chunks_of(index.regions[2])] == [1, 1, 0]


@pytest.mark.parametrize("damage", ["cut", "absent", "text", "claimed twice", "other file", "huge"])
def test_a_pagemap_that_is_no_good_costs_only_the_cuts(folder, record, key, policy, damage, monkeypatch):
    path = folder / "pagemap-1.img"
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-2])
    elif damage == "absent":
        path.unlink()
    elif damage == "text":
        path.write_text("x" * 100)
    elif damage == "claimed twice":
        (folder / "pagemap-shmem-8.img").write_bytes(path.read_bytes())
    elif damage == "other file":
        path.write_bytes(make_pagemap(2, RUNS))
    else:
        monkeypatch.setattr(pagemap, "MAX_PAGEMAP_BYTES", 50)
    seal(folder, record, key)
    found = verify_directory(folder, policy)
    assert (found.index.minor, found.record.format_version) == (0, "1.0")
    assert {region.kind for region in found.index.regions} == {RegionKind.FILE}


def test_small_files_of_pages_stay_files(folder, record, key, policy):
    runs = (Run(HEAP, MAX_SMALL_FILE // PAGE),)
    fill(folder, runs)
    seal(folder, record, key)
    assert verify_directory(folder, policy).index.minor == 0


# ---- archives ------------------------------------------------------------------------------------


def pack(folder, path, names=None):
    with tarfile.open(path, "w") as tar:
        for name in names or sorted(os.listdir(folder)):
            tar.add(folder / name, f"checkpoint/{name}")
    return path


@pytest.fixture
def passes(monkeypatch):
    count = []
    real = archive_scan.Scan.of
    monkeypatch.setattr(archive_scan.Scan, "of", lambda *args, **kw: (count.append(1), real(*args, **kw))[1])
    return count


def index_first(names):
    return sorted(names, key=lambda name: (name != "vgpu-index.bin", name))


@pytest.mark.parametrize(
    ("order", "passes_needed"),
    [(sorted, 1), (index_first, 1), (lambda names: sorted(names, reverse=True), 1),
     (lambda names: sorted(names, key=lambda name: (not name.startswith("pages-"), name)), 2)],
    ids=["by name", "index first", "backwards", "pages first"],
)  # fmt: skip
def test_archives_take_one_pass_where_something_says_how_to_cut(
    folder, record, key, policy, tmp_path, passes, order, passes_needed
):
    seal(folder, record, key)
    found = verify_archive(pack(folder, tmp_path / "a.tar", order(os.listdir(folder))), policy, threads=2)
    assert found.verified.bytes_checked == verify_directory(folder, policy).bytes_checked
    assert len(passes) == passes_needed
    data = bytearray((folder / "pages-1.img").read_bytes())
    data[3 * PAGE] ^= 1
    (folder / "pages-1.img").write_bytes(data)
    with pytest.raises(ContentMismatch, match=r"pages-1\.img"):
        verify_archive(pack(folder, tmp_path / "b.tar", order(os.listdir(folder))), policy)


def test_a_sealed_index_that_cuts_otherwise_takes_a_second_pass(folder, record, key, policy, tmp_path, passes):
    good = (folder / "pagemap-1.img").read_bytes()
    (folder / "pagemap-1.img").write_bytes(good)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pagemap, "cuts_of", lambda *_: {})  # as version 1.0 did
        seal(folder, record, key)
    verify_archive(pack(folder, tmp_path / "a.tar"), policy)
    assert len(passes) == 2


def test_pagemaps_kept_from_a_stream_are_bounded(folder, record, key, policy, tmp_path, passes, monkeypatch):
    monkeypatch.setattr(stream_cuts, "MAX_PAGEMAPS_BYTES", 10)
    seal(folder, record, key)
    verify_archive(pack(folder, tmp_path / "a.tar"), policy)
    assert len(passes) == 2


def test_memory_is_bounded_however_many_chunks_there_are(tmp_path, record, key, policy):
    """64 MiB in chunks of a page each."""
    folder = tmp_path / "many"
    folder.mkdir()
    runs = [Run(n * CHUNK_SIZE, 1) for n in range(4096)] + [Run(1 << 44, 12 << 10)]
    data = page_at(0)
    fill(folder, runs, content=lambda address: data)
    seal(folder, record, key)
    path = pack(folder, tmp_path / "a.tar")
    verify_directory(folder, policy)
    for verify in (
        lambda: verify_directory(folder, policy, threads=2),
        lambda: verify_archive(path, policy, threads=2),
    ):
        tracemalloc.start()
        verify()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 3 * CHUNK_SIZE + (8 << 20)


def test_what_waits_to_be_hashed_is_bounded_by_threads_and_not_by_the_file():
    count = 20_000
    with StreamHasher(2, PAGE) as hasher:
        tracemalloc.start()
        file = hasher.hash(FileToHash("vgpu-pack-00000.bin", count * PAGE), lambda view: None)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert file.id_at(count - 1) == zero_id(PAGE)
    assert peak < 5 * 32 * count


def test_pagemaps_that_claim_one_file_are_none_however_many():
    cuts = stream_cuts.StreamCuts(CHUNK_SIZE)
    size = 2 * MAX_SMALL_FILE
    runs = [Run(HEAP, size // PAGE)]
    cuts.learn_pagemap(make_pagemap(7, runs))
    assert cuts.cut("pages-7.img", size).lengths is not None
    for _ in range(2):
        cuts.learn_pagemap(make_pagemap(7, runs))
        assert cuts.cut("pages-7.img", size).lengths is None


# ---- the index -----------------------------------------------------------------------------------


@pytest.fixture
def index(folder, record, key):
    seal(folder, record, key)
    return chunk_index.from_bytes((folder / "vgpu-index.bin").read_bytes())


def test_the_content_root_covers_the_lengths(index):
    chunks = list(index.chunks)
    first = index.regions[2].first_chunk
    chunks[first], chunks[first + 1] = (
        chunks[first]._replace(length=chunks[first + 1].length),
        chunks[first + 1]._replace(length=chunks[first].length),
    )
    assert replace(index, chunks=tuple(chunks)).compute_content_root() != index.content_root


@pytest.mark.parametrize("change", [{"length": 0}, {"length": CHUNK_SIZE + 1}, {"offset": 1}, {"stored_length": 1}])
def test_chunks_that_do_not_make_up_their_region_are_refused(index, change):
    chunks = list(index.chunks)
    at = index.regions[2].first_chunk + 1
    chunks[at] = chunks[at]._replace(**change)
    with pytest.raises(ImageError, match=r"chunk \d+: is not the"):
        chunk_index.from_bytes(chunk_index.to_bytes(replace(index, chunks=tuple(chunks))))


@pytest.mark.parametrize("record_size", [64, 80])
@pytest.mark.parametrize("place", [38, 39, 56, 63])
def test_reserved_bytes_of_a_chunk_are_refused_by_its_number(index, place, record_size):
    data = longer_chunk_records(index, record_size)
    assert chunk_index.from_bytes(data).chunks == index.chunks
    data[128 + 64 * len(index.regions) + 2 * record_size + place] = 1
    with pytest.raises(ImageError, match="chunk 2: reserved"):
        chunk_index.from_bytes(data)


def longer_chunk_records(index, record_size):
    """What a writer of version 1.2 does not write, but every reader takes."""
    data = chunk_index.to_bytes(index)
    first, count = 128 + 64 * len(index.regions), len(index.chunks)
    records = (data[first + 64 * n : first + 64 * (n + 1)].ljust(record_size, b"\7") for n in range(count))
    made = bytearray(data[:first] + b"".join(records) + data[first + 64 * count :])
    struct.pack_into("<I", made, 20, record_size)
    return made


def test_flags_of_packs_of_a_later_minor_version_are_passed_over(index):
    data = bytearray(chunk_index.to_bytes(index))
    struct.pack_into("<H", data, 10, 3)
    struct.pack_into("<I", data, 128 + 64 * (len(index.regions) + len(index.chunks)) + 48, 1)
    assert chunk_index.from_bytes(data).packs == index.packs
    struct.pack_into("<H", data, 10, 2)
    with pytest.raises(ImageError, match="reserved"):
        chunk_index.from_bytes(data)
