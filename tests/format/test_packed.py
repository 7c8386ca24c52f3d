"""Packs: fixed cuts, equal content in equal blobs, only what is missing after a change, streams from anywhere, and back."""

import hashlib
import io
import os
import resource
import shutil
import tarfile
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import zstandard

from image_format import chunk_index, seal_documents
from image_format.archives.small_files import read_small_files, write_small_files
from image_format.index_model import MAX_SMALL_FILE, PACK_ALIGNMENT, Codec, RegionKind
from image_format.packs import pack_streams, target_files
from image_format.packs.open_files import MAX_OPEN
from image_format.packs.pack_streams import measure_packs, open_pack
from image_format.packs.packed import (
    RAW_PACK_TYPE,
    ZSTD_PACK_TYPE,
    Compression,
    PlannedChunk,
    Source,
    earlier_packs,
    packed_index,
    packed_index_bytes,
    plan_packs,
)
from image_format.packs.unpacking import MARK_NAME, Unpacker, unpack
from image_format.trust.policy import Policy, TrustedKey
from image_format.verifying import verify_directory
from tests.format import independent_reader
from tests.format.make_vectors import TRUSTED, pattern
from tests.format.packed_images import CHUNK, Image, chunks, text
from tests.format.pages_images import PAGE, Run
from vgpu_errors import ContentMismatch, ImageError, NoSuchImage, NotEnoughSpace, Truncated, UnexpectedEntry, Unsigned

BULK = MAX_SMALL_FILE + 100


def image(**more):
    """Something of every kind: 430 chunks of GPU memory, 257 of a file that compresses, pages, small files."""
    values = {
        "files": {"core-1.img": b"x" * 300, "empty.img": b"", "log.img": text(BULK), "small.img": pattern(5000, 1)},
        "objects": {1: chunks(300, 1, 100), 2: [bytes(CHUNK)], 3: chunks(50, 3), 5: chunks(60, 5), 8: chunks(20, 8)},
        "runs": (Run(0x5000_0000, 200), Run(0x7000_0000, 100)),
    }
    return Image(**values | more)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("packed") / "sealed"
    image().write(made)
    return made


@pytest.fixture(scope="module")
def index(folder):
    return chunk_index.from_bytes((folder / "vgpu-index.bin").read_bytes())


@pytest.fixture(scope="module")
def plan(folder, index):
    return measure_packs(plan_packs(index), folder)


def counts(plan, kind):
    return [len(pack.chunks) for pack in plan.packs if pack.kind == kind]


def shas(plan):
    return {pack.layout.sha256 for pack in plan.packs}


# ---- cutting -------------------------------------------------------------------------------------


def test_packs_of_gpu_memory_are_cut_by_position(index):
    # 301 chunks alone; then regions of 1 (zero, not stored), 50 and 60 share one; 20 more would be 131.
    assert counts(plan_packs(index), RegionKind.VRAM) == [128, 128, 45, 110, 20]


def test_packs_are_those_that_the_spec_says(tmp_path, index, folder):
    runs = tuple(Run(0x5000_0000 + n * 4 * PAGE, 3) for n in range(400))
    others = [
        Image({"x.img": b""}, {}, runs),
        Image({"x.img": b""}, {1: chunks(20, 1), 2: chunks(128, 2), 3: chunks(109, 3)}),
    ]
    cases = [(index, (folder / "vgpu-index.bin").read_bytes())]
    for number, made in enumerate(others):
        cases.append((made.write(tmp_path / str(number)), (tmp_path / str(number) / "vgpu-index.bin").read_bytes()))
    for parsed, data in cases:
        found = [(pack.kind, [chunk.id for chunk in pack.chunks]) for pack in plan_packs(parsed).packs]
        assert found == independent_reader.packs_of(independent_reader.read_index(data))
        assert len(found) > 1


def test_what_is_small_or_zero_lies_in_no_pack(index):
    plan = plan_packs(index)
    for region in index.regions:
        numbers = plan.pack_of[region.first_chunk : region.first_chunk + region.chunk_count]
        is_packed = not region.is_small and region.name != "7/2"
        assert all((number >= 0) == is_packed for number in numbers), region.name


def test_a_packed_index_is_not_cut_again(plan):
    with pytest.raises(ImageError, match="packed index"):
        plan_packs(packed_index(plan))
    with pytest.raises(ImageError, match="sealed index"):
        earlier_packs(plan.index)


def test_replicas_have_equal_packs_wherever_their_slots_are(tmp_path, plan):
    other = image(slots_from=3, files=image().files | {"core-1.img": b"another process"})
    again = measure_packs(plan_packs(other.write(tmp_path / "b")), tmp_path / "b")
    assert shas(again) == shas(plan)
    assert again.index.content_root != plan.index.content_root


def test_a_change_in_one_region_leaves_the_packs_of_others_alone(tmp_path, plan):
    objects = image().objects
    objects[1][130] = pattern(CHUNK, 99)
    changed = image(objects=objects)
    again = measure_packs(plan_packs(changed.write(tmp_path / "b")), tmp_path / "b")
    assert len(shas(again) - shas(plan)) == 1


def test_pages_that_shift_change_only_the_packs_around_them(tmp_path):
    runs = tuple(Run(0x5000_0000 + n * 4 * PAGE, 3) for n in range(400))
    packs = []
    for name, made in (("a", runs), ("b", (*runs[:30], Run(0x5000_0000 + 29 * 4 * PAGE + 3 * PAGE, 1), *runs[30:]))):
        folder = tmp_path / name
        packs.append(shas(measure_packs(plan_packs(Image({"x": b""}, {}, made).write(folder)), folder)))
    assert len(packs[0]) > 8
    assert len(packs[1] - packs[0]) <= 3


def test_equal_packs_are_one(tmp_path):
    same = chunks(128, 1)
    made = Image({"core-1.img": b"x"}, {1: same, 2: same, 3: [*same[:127], same[0]]})
    plan = plan_packs(made.write(tmp_path / "a"))
    assert [len(pack.chunks) for pack in plan.packs] == [128, 127]


# ---- earlier packs -------------------------------------------------------------------------------


def after(tmp_path, plan, change, name="b"):
    """A later checkpoint, planned over the packs of an earlier one."""
    made = image()
    change(made)
    folder = tmp_path / name
    index = made.write(folder)
    later = plan_packs(index, earlier=earlier_packs(chunk_index.from_bytes(packed_index_bytes(plan))))
    return measure_packs(later, folder), folder


def moved(plan, later):
    return sum(pack.layout.size for pack in later.packs if pack.layout.sha256 not in shas(plan))


def spread_changes(made):
    for number, where in ((1, (5, 130, 290)), (3, (7,)), (8, (2,))):
        for place in where:
            made.objects[number][place] = pattern(CHUNK, 1000 + place)


def test_after_a_change_everywhere_only_the_changed_chunks_are_new(tmp_path, plan):
    later, _ = after(tmp_path, plan, spread_changes)
    assert moved(plan, later) == 5 * CHUNK
    assert [pack.is_earlier for pack in later.packs].count(False) == 1
    found = chunk_index.from_bytes(packed_index_bytes(later))
    assert found.content_root == later.index.content_root


def test_nothing_changed_means_the_same_packs(tmp_path, plan):
    later, _ = after(tmp_path, plan, lambda made: None)
    assert shas(later) == shas(plan)
    assert packed_index_bytes(later) == packed_index_bytes(plan)
    assert all(pack.is_earlier for pack in later.packs)


def test_a_pack_of_which_less_than_half_is_needed_is_let_go(tmp_path, plan):
    def change(made):
        made.objects[1][:70] = chunks(70, 77)

    later, _ = after(tmp_path, plan, change)
    assert len([pack for pack in later.packs if pack.kind == RegionKind.VRAM and pack.is_earlier]) == 4
    assert counts(later, RegionKind.VRAM).count(128) == 2


def test_an_earlier_pack_cannot_be_made_again_here(tmp_path, plan):
    later, folder = after(tmp_path, plan, spread_changes)
    number = next(n for n, pack in enumerate(later.packs) if pack.is_earlier)
    with pytest.raises(ImageError, match="earlier"):
        open_pack(later, number, folder)


def test_a_grandchild_uses_packs_of_both(tmp_path, plan):
    child, _ = after(tmp_path, plan, spread_changes)

    def change(made):
        spread_changes(made)
        made.objects[5][9] = pattern(CHUNK, 5000)

    made = image()
    change(made)
    folder = tmp_path / "c"
    index = made.write(folder)
    earlier = earlier_packs(chunk_index.from_bytes(packed_index_bytes(child)))
    later = measure_packs(plan_packs(index, earlier=earlier), folder)
    assert moved(child, later) == CHUNK


def test_one_blob_that_two_images_name_is_one_pack(index, plan):
    """Each of them lists half of its chunks."""
    (whole,) = [pack for pack in earlier_packs(packed_index(plan)) if len(pack.places) == 110]
    ids = list(whole.places)
    halves = [whole._replace(places={key: whole.places[key] for key in part}) for part in (ids[:55], ids[55:])]
    later = plan_packs(index, earlier=halves)
    assert [len(pack.chunks) for pack in later.packs if pack.is_earlier] == [110]


def test_blobs_of_two_kinds_are_two_packs(index, plan):
    packs = earlier_packs(packed_index(plan))
    later = plan_packs(index, earlier=[pack._replace(sha256=b"\1" * 32) for pack in packs])
    assert {pack.kind for pack in later.packs if pack.is_earlier} == {1, 2, 3}


# ---- streams -------------------------------------------------------------------------------------


def test_streams_are_what_was_measured(folder, plan):
    for number, pack in enumerate(plan.packs):
        with open_pack(plan, number, folder) as stream:
            data = stream.read()
        assert (len(data), hashlib.sha256(data).digest()) == (pack.layout.size, pack.layout.sha256)
        if pack.media_type == RAW_PACK_TYPE:
            pieces = [(folder / c.source.name).read_bytes()[c.source.offset :][: c.length] for c in pack.chunks]
            assert data == b"".join(piece.ljust(-(-len(piece) // 4096) * 4096, b"\0") for piece in pieces)


def test_a_stream_goes_on_from_any_offset(folder, plan):
    compressed = next(n for n, pack in enumerate(plan.packs) if pack.media_type == ZSTD_PACK_TYPE)
    for number in (compressed, compressed + 1, len(plan.packs) - 1):
        with open_pack(plan, number, folder) as stream:
            whole = stream.read()
            for start in (0, 1, 4095, 4096, 5000, len(whole) // 2 + 3, len(whole) - 1, len(whole), len(whole) + 5):
                assert stream.seek(start) == start
                assert stream.tell() == start
                assert stream.read(9000) == whole[start : start + 9000]
            assert stream.seek(-10, os.SEEK_END) == len(whole) - 10
            assert stream.read() == whole[-10:]


def test_compression_is_kept_only_where_it_pays(folder, plan):
    types = [(pack.kind, pack.media_type) for pack in plan.packs]
    # The file's last chunk has a hundred bytes and a pack of its own.
    assert types[:2] == [(RegionKind.FILE, ZSTD_PACK_TYPE), (RegionKind.FILE, RAW_PACK_TYPE)]
    assert {media_type for _, media_type in types[2:]} == {RAW_PACK_TYPE}


def test_chunks_smaller_than_a_block_are_worth_a_block():
    assert not pack_streams.is_worth_it(4000, 4096)
    assert not pack_streams.is_worth_it(100, 4096)
    assert pack_streams.is_worth_it(4096, 8192)
    assert not pack_streams.is_worth_it(8100, 8193)


def test_a_sample_decides_whether_a_large_chunk_is_compressed_at_all():
    compressor = pack_streams.Compressor(Compression())
    tried = []
    real = compressor._zstd
    compressor._zstd = type(
        "Spy", (), {"compress": lambda self, data: (tried.append(len(data)), real.compress(data))[1]}
    )()
    noise = memoryview(pattern(1 << 20, 5))
    assert compressor.compress(noise, RegionKind.FILE) is None
    assert max(tried) == pack_streams.SAMPLE_BYTES
    assert compressor.compress(noise, RegionKind.VRAM) is None
    assert len(compressor.compress(memoryview(text(1 << 20)), RegionKind.FILE)) < 20_000


def test_gpu_memory_is_compressed_when_asked(tmp_path):
    made = Image({"core-1.img": b"x"}, {1: [text(1 << 16)]}, chunk_size=1 << 16)
    index = made.write(tmp_path / "a")
    plan = measure_packs(plan_packs(index, compression=Compression(frozenset({2}), 3)), tmp_path / "a")
    assert plan.packs[0].media_type == ZSTD_PACK_TYPE
    assert plan.packs[0].layout.size == PACK_ALIGNMENT
    assert plan.packs[0].key != plan_packs(index).packs[0].key


def test_measuring_refuses_what_is_not_what_was_sealed(tmp_path):
    index = image().write(tmp_path / "a")
    data = bytearray((tmp_path / "a/vgpu-pack-00000.bin").read_bytes())
    data[200 * CHUNK] ^= 1
    (tmp_path / "a/vgpu-pack-00000.bin").write_bytes(data)
    with pytest.raises(ContentMismatch, match=rf"vgpu-pack-00000.*at {200 * CHUNK}"):
        measure_packs(plan_packs(index), tmp_path / "a")


def test_known_layouts_spare_the_reading(folder, plan, index):
    known = {pack.key: pack.layout for pack in plan.packs}
    read = []
    again = measure_packs(plan_packs(index), folder, known=known, on_bytes=read.append)
    assert again == plan
    assert read == []


def test_a_plan_says_that_it_was_not_measured(index):
    plan = plan_packs(index)
    assert not plan.is_measured
    with pytest.raises(ImageError, match="measured"):
        packed_index(plan)


def test_measuring_takes_a_buffer_for_each_thread(tmp_path):
    size = 1 << 20
    made = Image({"big.img": pattern(40 * size, 3)}, {}, chunk_size=size)
    index = made.write(tmp_path / "a")
    plan = plan_packs(index, compression=Compression.none())
    tracemalloc.start()
    measure_packs(plan, tmp_path / "a", threads=2)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * size + (1 << 20)


# ---- the packed index ----------------------------------------------------------------------------


def test_the_packed_index_has_the_content_root_of_the_sealed_one(plan, index):
    found = chunk_index.from_bytes(packed_index_bytes(plan))
    assert (found.content_root, found.minor, found.is_packed) == (index.content_root, 2, True)
    assert found.regions == index.regions
    assert [(chunk.id, chunk.length) for chunk in found.chunks] == [(chunk.id, chunk.length) for chunk in index.chunks]
    assert [pack.sha256 for pack in found.transport_packs] == [pack.layout.sha256 for pack in plan.packs]
    codecs = {
        chunk.codec for chunk in found.chunks_of(next(region for region in found.regions if region.name == "7/2"))
    }
    assert codecs == {Codec.ZERO}


def bent(plan, change):
    found = packed_index(plan)
    regions = {region.name: region for region in found.regions}
    chunk_list, packs = list(found.chunks), list(found.packs)
    change(regions, chunk_list, packs)
    return chunk_index.to_bytes(replace(found, chunks=tuple(chunk_list), packs=tuple(packs)))


def with_chunk(region, place, **changes):
    def change(regions, chunk_list, packs):
        at = regions[region].first_chunk + place
        chunk_list[at] = chunk_list[at]._replace(**changes)

    return change


def with_pack(number, **changes):
    def change(regions, chunk_list, packs):
        packs[number] = packs[number]._replace(**changes)

    return change


def over_another(regions, chunk_list, packs):
    at = regions["7/1"].first_chunk
    chunk_list[at + 1] = chunk_list[at + 1]._replace(offset=chunk_list[at].offset)


def partly_over(regions, chunk_list, packs):
    first = regions["pages-1.img"].first_chunk
    chunk_list[first] = chunk_list[first]._replace(codec=1, offset=chunk_list[first + 1].offset - PACK_ALIGNMENT)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (with_chunk("7/1", 0, offset=100), "multiple of 4096"),
        (with_chunk("7/1", 0, offset=1 << 40), "beyond the end"),
        (with_chunk("7/1", 0, stored_length=100), "cannot be"),
        (with_chunk("7/1", 0, codec=2), "cannot be"),
        (with_chunk("7/1", 0, codec=3), "chunk codec 3"),
        (with_chunk("7/1", 0, pack=0), "no pack 0"),
        (with_chunk("7/1", 0, pack=99), "no pack 99"),
        (with_chunk("7/1", 0, codec=0), "no place"),
        (with_chunk("7/1", 0, codec=0, pack=0, offset=0, stored_length=0), "not that of zeros"),
        (with_chunk("7/2", 0, codec=1, stored_length=CHUNK), "no pack 0"),
        (with_chunk("log.img", 0, stored_length=0), "cannot be"),
        (with_chunk("log.img", 0, pack=8), "is of kind"),
        (with_chunk("small.img", 0, codec=2), "is not the"),
        (with_chunk("small.img", 0, pack=0), "is not the"),
        (over_another, "lies over another"),
        (with_pack(0, flags=1), "not the file itself"),
        (with_pack(4, flags=0), "is no kind"),
        (with_pack(4, flags=9), "is no kind"),
        (with_pack(4, flags=3), "is of kind"),
        (with_pack(4, sha256=bytes(32)), "no sha256"),
        (with_pack(4, size=4097), "no multiple"),
        (with_pack(4, size=129 * CHUNK), "exceed|limit|more"),
        (with_pack(4, name="vgpu-pack-00001.bin"), "not that of pack 0"),
        (lambda regions, chunk_list, packs: packs.append(packs[-1]._replace(name="vgpu-pack-00009.bin")), "not that of"),
    ],
)  # fmt: skip
def test_a_packed_index_that_breaks_a_rule_is_refused(plan, change, what):
    with pytest.raises(ImageError, match=what):
        chunk_index.from_bytes(bent(plan, change))


def test_chunks_that_lie_partly_over_each_other_are_refused(tmp_path):
    made = Image({"a.img": pattern(1 << 21, 1)}, {}, chunk_size=1 << 16)
    plan = measure_packs(plan_packs(made.write(tmp_path / "a")), tmp_path / "a")

    def change(regions, chunk_list, packs):
        chunk_list[3] = chunk_list[3]._replace(offset=chunk_list[3].offset - PACK_ALIGNMENT)

    with pytest.raises(ImageError, match="overlap"):
        chunk_index.from_bytes(bent(plan, change))


def test_a_pack_that_holds_nothing_is_refused(plan):
    def change(regions, chunk_list, packs):
        packs.append(packs[-1]._replace(name=f"vgpu-pack-{len(plan.packs):05}.bin"))

    with pytest.raises(ImageError, match="no chunk lies in"):
        chunk_index.from_bytes(bent(plan, change))


def test_a_packed_index_is_no_sealed_one(plan, folder):
    with pytest.raises(ImageError, match="describes no directory"):
        seal_documents.read_claimed(documents(folder) | {"vgpu-index.bin": packed_index_bytes(plan)}, where="x")


# ---- small files ---------------------------------------------------------------------------------


def test_small_files_are_one_blob_that_is_always_the_same(folder, index):
    blobs = []
    for _ in range(2):
        out = io.BytesIO()
        written = write_small_files(index, folder, out)
        assert (len(out.getvalue()), hashlib.sha256(out.getvalue()).digest()) == (written.size, written.sha256)
        blobs.append(out.getvalue())
    assert blobs[0] == blobs[1]
    found = dict(read_small_files(io.BytesIO(blobs[0]), index, where="blob"))
    assert found == {region.name: (folder / region.name).read_bytes() for region in index.small_files}
    assert "empty.img" in found


def tar_of(members):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return io.BytesIO(zstandard.ZstdCompressor().compress(out.getvalue()))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda files: files.pop("core-1.img"), UnexpectedEntry),
        (lambda files: files.update({"vgpu-signature.json": b"x"}), UnexpectedEntry),
        (lambda files: files.update({"../core-1.img": b"x"}), ImageError),
        (lambda files: files.update({"core-1.img": b"y" * 300}), ContentMismatch),
        (lambda files: files.update({"core-1.img": b"x" * 301}), ContentMismatch),
        (lambda files: files.update({"log.img": text(BULK)}), UnexpectedEntry),
    ],
)
def test_small_files_that_are_not_the_sealed_ones_are_refused(folder, index, change, error):
    files = {region.name: (folder / region.name).read_bytes() for region in index.small_files}
    change(files)
    with pytest.raises(error):
        dict(read_small_files(tar_of(files.items()), index, where="blob"))


@pytest.mark.parametrize("data", [b"", b"no zstd at all", b"\x28\xb5\x2f\xfd" + b"\xff" * 40])
def test_damaged_blobs_of_small_files_are_refused(index, data):
    with pytest.raises(ImageError):
        dict(read_small_files(io.BytesIO(data), index, where="blob"))


def test_a_small_file_that_changed_is_not_pushed(tmp_path):
    index = image().write(tmp_path / "a")
    (tmp_path / "a/core-1.img").write_bytes(b"y" * 300)
    with pytest.raises(ContentMismatch, match=r"core-1\.img"):
        write_small_files(index, tmp_path / "a", io.BytesIO())


# ---- unpacking -----------------------------------------------------------------------------------


@pytest.fixture
def blobs(folder, plan, index):
    """What a registry would hold."""
    small = io.BytesIO()
    write_small_files(index, folder, small)
    packs = []
    for number in range(len(plan.packs)):
        with open_pack(plan, number, folder) as stream:
            packs.append(stream.read())
    return packs, small.getvalue()


def documents(folder):
    names = ("vgpu-index.bin", "vgpu-record.json", "vgpu-manifest.json", "vgpu-signature.json")
    return {name: (folder / name).read_bytes() for name in names}


def run_unpack(folder, plan, blobs, into, **more):
    into.mkdir(exist_ok=True)
    packs, small = blobs

    def give(number, start):
        stream = io.BytesIO(packs[number])
        stream.seek(start)
        return stream

    packed = chunk_index.from_bytes(packed_index_bytes(plan))
    unpack(documents(folder), packed, into, **{"open_pack": give, "small_files": io.BytesIO(small)} | more)


def test_unpacked_is_sealed_again_byte_for_byte(folder, plan, blobs, tmp_path, trusting):
    count = []
    run_unpack(folder, plan, blobs, tmp_path / "out", on_bytes=count.append, threads=2)
    names = sorted(os.listdir(folder))
    assert sorted(os.listdir(tmp_path / "out")) == names
    for name in names:
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes(), name
    found = verify_directory(tmp_path / "out", trusting)
    assert found.key_id == TRUSTED.key_id
    assert sum(count) > 3 << 20


@pytest.fixture
def trusting():
    return Policy(keys={TRUSTED.key_id: TrustedKey("vectors", Path("trusted.pub"), TRUSTED.public)})


def test_unpacked_files_have_no_holes(folder, plan, blobs, tmp_path):
    run_unpack(folder, plan, blobs, tmp_path / "out")
    for entry in os.scandir(tmp_path / "out"):
        with open(entry.path, "rb") as file:
            size = entry.stat().st_size
            if size:
                assert os.lseek(file.fileno(), 0, os.SEEK_HOLE) == size, entry.name
        assert entry.stat().st_mode & 0o777 == 0o600


def test_unpacking_takes_two_chunks_for_each_thread(tmp_path):
    """Buffers for O_DIRECT are not Python's, so that next to nothing is left to count."""
    size = 1 << 20
    made = Image({"big.img": pattern(40 * size, 3), "core-1.img": b"x"}, {}, chunk_size=size)
    index = made.write(tmp_path / "a")
    plan = measure_packs(plan_packs(index, compression=Compression.none()), tmp_path / "a")
    packed = chunk_index.from_bytes(packed_index_bytes(plan))
    with open_pack(plan, 0, tmp_path / "a") as stream:
        (tmp_path / "pack").write_bytes(stream.read())
    (tmp_path / "b").mkdir()
    with Unpacker(index, packed, tmp_path / "b") as unpacker, (tmp_path / "pack").open("rb", buffering=0) as blob:
        tracemalloc.start()
        unpacker.write(0, blob)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert unpacker.missing(0) == []
    assert peak < 1 << 18
    assert (tmp_path / "b/big.img").read_bytes() == (tmp_path / "a/big.img").read_bytes()


def test_a_pack_of_a_directory_that_is_gone_is_not_opened(plan, tmp_path):
    with pytest.raises(NoSuchImage):
        open_pack(plan, len(plan.packs) - 1, tmp_path / "absent")


@pytest.mark.parametrize("is_direct", [False, True])
def test_every_way_of_writing_gives_the_same_bytes(folder, plan, blobs, tmp_path, monkeypatch, is_direct):
    if not is_direct:
        monkeypatch.setattr(target_files.TargetFiles, "_open_direct", lambda *_: -1)
    run_unpack(folder, plan, blobs, tmp_path / "out")
    assert (tmp_path / "out/pages-1.img").read_bytes() == (folder / "pages-1.img").read_bytes()


@pytest.mark.parametrize("place", [0, 4096, -1])
def test_a_changed_pack_is_refused_and_nothing_is_sealed(folder, plan, blobs, tmp_path, trusting, place):
    packs, small = blobs
    data = bytearray(packs[-1])
    data[place] ^= 1
    with pytest.raises(ContentMismatch, match=f"pack {len(packs) - 1} at"):
        run_unpack(folder, plan, ([*packs[:-1], bytes(data)], small), tmp_path / "out")
    assert not (tmp_path / "out/vgpu-signature.json").exists()
    with pytest.raises(Unsigned):
        verify_directory(tmp_path / "out", trusting)
    with pytest.raises(UnexpectedEntry, match="cut off"):
        verify_directory(tmp_path / "out", replace(trusting, default="allow-unsigned"))


def test_a_short_pack_is_refused(folder, plan, blobs, tmp_path):
    packs, small = blobs
    with pytest.raises(Truncated):
        run_unpack(folder, plan, ([packs[0][:5000], *packs[1:]], small), tmp_path / "out")


def frames(length):
    claim = bytearray(zstandard.ZstdCompressor().compress(bytes(4096)))
    return {
        "longer": zstandard.ZstdCompressor().compress(bytes(length + 1)),
        "shorter": zstandard.ZstdCompressor().compress(bytes(length - 1)),
        "no size": zstandard.ZstdCompressor(write_content_size=False).compress(bytes(length)),
        "damaged": zstandard.ZstdCompressor().compress(bytes(length))[:-3],
        "no frame": bytes(claim[1:]),
    }


@pytest.mark.parametrize("kind", frames(4096))
def test_a_frame_that_does_not_hold_its_chunk_is_refused(tmp_path, kind):
    size = 1 << 16
    made = Image({"log.img": text(1 << 21)}, {}, chunk_size=size)
    index = made.write(tmp_path / "a")
    plan = measure_packs(plan_packs(index), tmp_path / "a")
    with open_pack(plan, 0, tmp_path / "a") as stream:
        data = bytearray(stream.read())
    place = plan.packs[0].layout.places[0]
    frame = frames(size)[kind][: place.stored_length]
    data[: place.stored_length] = frame.ljust(place.stored_length, b"\0")
    packed = chunk_index.from_bytes(packed_index_bytes(plan))
    (tmp_path / "b").mkdir()
    with Unpacker(index, packed, tmp_path / "b") as unpacker, pytest.raises(ImageError):
        unpacker.write(0, io.BytesIO(bytes(data)))


def test_a_packed_index_of_another_checkpoint_is_refused(folder, index, plan, tmp_path):
    other = image(files={"core-1.img": b"y"})
    other_index = other.write(tmp_path / "a")
    with pytest.raises(ContentMismatch, match="content root"):
        Unpacker(other_index, chunk_index.from_bytes(packed_index_bytes(plan)), tmp_path)
    with pytest.raises(ImageError):
        Unpacker(index, index, tmp_path)


def test_an_interrupted_run_goes_on_where_it_was(folder, plan, index, blobs, tmp_path, trusting):
    packs, small = blobs
    packed = chunk_index.from_bytes(packed_index_bytes(plan))
    (tmp_path / "out").mkdir()
    with Unpacker(index, packed, tmp_path / "out") as unpacker:
        unpacker.write(0, io.BytesIO(packs[0]))
        with pytest.raises(Truncated):
            unpacker.write(4, io.BytesIO(packs[4][: 10 * CHUNK + 7]))
        with pytest.raises(ImageError, match="lacks"):
            unpacker.finish(documents(folder))
    with Unpacker(index, packed, tmp_path / "out") as unpacker:
        assert len(unpacker.missing(0)) == 1
        assert unpacker.find_present(threads=2) > 10 * CHUNK
        assert unpacker.missing(0) == []
        (stretch,) = unpacker.missing(4)
        assert stretch.start == 10 * CHUNK
        for number, pack in enumerate(packs):
            for stretch in unpacker.missing(number):
                unpacker.write(number, io.BytesIO(pack[stretch.start : stretch.end]), stretch)
        with pytest.raises(ImageError, match="small files"):
            unpacker.finish(documents(folder))
        unpacker.write_small_files(io.BytesIO(small))
        unpacker.finish(documents(folder))
    verify_directory(tmp_path / "out", trusting)


def test_chunks_that_another_directory_has_need_not_come(folder, plan, blobs, tmp_path, trusting):
    later, later_folder = after(tmp_path, plan, spread_changes)
    packed = chunk_index.from_bytes(packed_index_bytes(later))
    (tmp_path / "out").mkdir()
    with Unpacker(later.index, packed, tmp_path / "out") as unpacker:
        taken = unpacker.fill_from(folder, plan.index)
        missing = [(n, stretch) for n in range(unpacker.pack_count) for stretch in unpacker.missing(n)]
        assert sum(stretch.end - stretch.start for _, stretch in missing) == 5 * CHUNK
        assert taken > 400 * CHUNK
        for number, stretch in missing:
            with open_pack(later, number, later_folder) as stream:
                stream.seek(stretch.start)
                unpacker.write(number, stream, stretch)
        unpacker.write_small_files(io.BytesIO(blobs[1]))
        unpacker.finish(documents(later_folder))
    verify_directory(tmp_path / "out", trusting)


def test_damage_in_the_other_directory_is_passed_over(folder, plan, index, tmp_path):
    shutil.copytree(folder, tmp_path / "damaged")
    data = bytearray((folder / "vgpu-pack-00000.bin").read_bytes())
    data[3 * CHUNK] ^= 1
    (tmp_path / "damaged/vgpu-pack-00000.bin").write_bytes(data[: 250 * CHUNK])
    packed = chunk_index.from_bytes(packed_index_bytes(plan))
    (tmp_path / "out").mkdir()
    with Unpacker(index, packed, tmp_path / "out") as unpacker:
        unpacker.fill_from(tmp_path / "damaged", index)
        first = next(n for n, pack in enumerate(plan.packs) if pack.kind == RegionKind.VRAM)
        assert unpacker.missing(first) == [(3 * CHUNK, 4 * CHUNK)]


def test_nothing_is_written_through_a_second_name_or_a_link(index, plan, tmp_path):
    packed = chunk_index.from_bytes(packed_index_bytes(plan))
    for name, make in (("a", os.link), ("b", os.symlink)):
        into, elsewhere = tmp_path / name, tmp_path / f"{name}-elsewhere"
        into.mkdir()
        elsewhere.write_bytes(b"precious")
        make(elsewhere, into / "log.img")
        with pytest.raises(ImageError), Unpacker(index, packed, into):
            pass
        assert elsewhere.read_bytes() == b"precious"


def test_a_file_too_many_is_noticed_before_the_signature(folder, plan, blobs, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/stranger.img").write_bytes(b"x")
    with pytest.raises(UnexpectedEntry, match="stranger"):
        run_unpack(folder, plan, blobs, tmp_path / "out")
    assert MARK_NAME in os.listdir(tmp_path / "out")


def test_a_full_disk_shows_before_anything_is_written(index, plan, tmp_path, monkeypatch):
    def full(fd, start, size):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "posix_fallocate", full)
    (tmp_path / "out").mkdir()
    before = os.listdir("/proc/self/fd")
    with (
        pytest.raises(NotEnoughSpace),
        Unpacker(index, chunk_index.from_bytes(packed_index_bytes(plan)), tmp_path / "out"),
    ):
        pass
    assert len(os.listdir("/proc/self/fd")) == len(before)


@pytest.fixture
def few_descriptors():
    """Fewer than there are files in the test."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 2 * MAX_OPEN + 20, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_more_files_than_descriptors_are_read_and_written(tmp_path, few_descriptors):
    names = [f"vgpu-pack-{n:05}.bin" for n in range(2 * MAX_OPEN + 100)]
    fd = os.open(tmp_path, os.O_RDONLY)
    with target_files.TargetFiles(fd, tmp_path) as files:
        for name in names:
            files.create(name, PAGE)
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda name: files.write(name, 0, memoryview(name.encode())), names))
        files.sync()
        assert len(os.listdir("/proc/self/fd")) < 2 * MAX_OPEN + 100
    os.close(fd)

    def found(name):
        view = memoryview(bytearray(len(name)))
        sources.read(PlannedChunk(b"", len(name), Source(name, 0)), view)
        return bytes(view).decode()

    with pack_streams.SourceFiles(tmp_path) as sources, ThreadPoolExecutor(8) as pool:
        assert list(pool.map(found, names)) == names


def test_a_file_that_vanished_is_not_made_again(tmp_path):
    fd = os.open(tmp_path, os.O_RDONLY)
    with target_files.TargetFiles(fd, tmp_path) as files:
        for n in range(MAX_OPEN + 1):
            files.create(f"{n}.img", 1)
        (tmp_path / "0.img").unlink()
        with pytest.raises(ImageError, match=r"0\.img"):
            files.write("0.img", 0, memoryview(b"x"))
    os.close(fd)
    assert not (tmp_path / "0.img").exists()


def test_packs_are_taken_from_several_threads(folder, plan, index, blobs, tmp_path, trusting):
    packs, small = blobs
    (tmp_path / "out").mkdir()
    with Unpacker(index, chunk_index.from_bytes(packed_index_bytes(plan)), tmp_path / "out") as unpacker:
        threads = [threading.Thread(target=unpacker.write, args=(n, io.BytesIO(data))) for n, data in enumerate(packs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        unpacker.write_small_files(io.BytesIO(small))
        unpacker.finish(documents(folder))
    verify_directory(tmp_path / "out", trusting)
