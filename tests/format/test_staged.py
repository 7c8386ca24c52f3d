"""GPU memory in a checkpoint: fragments, the seal over packs, proof on the CPU or left to the GPU, archives in one pass."""

import errno
import os
import tarfile
import tracemalloc
from dataclasses import replace

import pytest
from blake3 import blake3

from image_format import chunk_index, sealing, vram
from image_format.archives import archive_scan, stream_cuts
from image_format.archives.archive import verify_archive
from image_format.chunk_index import CHUNK_SIZE, Index, Pack
from image_format.file_names import FRAGMENT_NAME, MAX_PACKS, is_pack
from image_format.record import Record
from image_format.sealing import remove_old_seal, seal
from image_format.trust.keys import load_signing_key
from image_format.verifying import read_claims, verify_directory
from image_format.vram import ChunkPlace, VramFragment, VramRegion, pack_name, read_fragment, write_fragment
from tests.format.make_staged_vectors import FIRST, SECOND, TAIL, THIRD, entry, large, small
from tests.format.make_vectors import GPU, SMALL_CHUNK, base_files, pattern
from vgpu_errors import (
    ContentMismatch,
    ImageError,
    LimitExceeded,
    NoSuchImage,
    Truncated,
    UnexpectedEntry,
    UnsafeName,
    Unsigned,
    VgpuError,
)


@pytest.fixture
def key(node):
    return load_signing_key(node / "node.key")


@pytest.fixture
def staged():
    return large()


@pytest.fixture
def folder(image, staged):
    """As the data plane leaves it: CRIU's files, packs, the fragment."""
    for name, data in staged.packs.items():
        (image / name).write_bytes(data)
    write_fragment(image / FRAGMENT_NAME, VramFragment.of(staged.regions))
    return image


def seal_staged(folder, staged, key):
    return seal(folder, staged.record, key, vram=folder / FRAGMENT_NAME)


# ---- fragments -----------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [small, large])
def test_a_fragment_comes_back_with_its_regions_in_order(make, tmp_path):
    made = make()
    fragment = VramFragment.of(reversed(made.regions), chunk_size=made.chunk_size)
    write_fragment(tmp_path / "f", fragment)
    again = read_fragment(tmp_path / "f")
    assert again == fragment
    assert [region.name for region in again.regions][-1].startswith("12/")
    assert again.length == sum(region.length for region in made.regions)
    assert (tmp_path / "f").stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["f"]


def test_objects_are_in_order_of_numbers_not_of_text():
    regions = [VramRegion(0, GPU, 0, 0, f"{pid}/{number}", ()) for pid, number in ((10, 2), (9, 10), (9, 2), (9, 0))]
    assert [region.name for region in VramFragment.of(regions).regions] == ["9/0", "9/2", "9/10", "10/2"]


def region(*places, name="7/1", uuid=GPU, length=None):
    total = sum(place.length for place in places) if length is None else length
    return VramRegion(0, uuid, 4096, total, name, places)


def place(data=b"x" * SMALL_CHUNK, pack=FIRST, offset=0):
    return ChunkPlace(blake3(data).digest(), pack, offset, len(data))


@pytest.mark.parametrize(
    ("regions", "error"),
    [
        ([region(place(), name="7")], UnsafeName),
        ([region(place(), name="7/01")], UnsafeName),
        ([region(place(), uuid="GPU-1")], ImageError),
        ([region(place(), uuid="6f0c4d1e-2b6a-4d0e-9a61-0d5a6c3b2f10")], ImageError),
        ([region(place(pack="pages-1.img"))], UnsafeName),
        ([region(place(offset=100))], ImageError),
        ([region(place(), place(b"y" * SMALL_CHUNK))], ImageError),
        ([region(place(b"y" * 9), place(offset=SMALL_CHUNK))], ImageError),
        ([region(place(pack=None))], ImageError),
        ([region(place(), length=SMALL_CHUNK + 1)], ImageError),
        ([region(place()), region(place())], ImageError),
        ([region(place()._replace(id=b"short"))], ImageError),
    ],
)
def test_a_fragment_that_no_reader_would_take_is_not_written(tmp_path, regions, error):
    with pytest.raises(error):
        write_fragment(tmp_path / "f", VramFragment.of(regions, chunk_size=SMALL_CHUNK))
    assert os.listdir(tmp_path) == []


def test_a_place_in_a_pack_that_is_not_listed_is_refused():
    with pytest.raises(ImageError, match=THIRD):
        vram.to_bytes(VramFragment((region(place(pack=THIRD)),), (Pack(FIRST, SMALL_CHUNK),), SMALL_CHUNK))


def test_an_index_with_files_is_no_fragment():
    made = small()
    with pytest.raises(ImageError, match="no files"):
        vram.from_bytes(made.seal().documents["vgpu-index.bin"])
    with pytest.raises(ImageError, match="4096"):
        vram.merge(Index((), (), ()), VramFragment.of(made.regions, chunk_size=SMALL_CHUNK), [])


def test_numbers_of_packs_are_bounded():
    assert (pack_name(0), pack_name(MAX_PACKS - 1)) == ("vgpu-pack-00000.bin", "vgpu-pack-99999.bin")
    assert is_pack(pack_name(MAX_PACKS - 1))
    for number in (-1, MAX_PACKS):
        with pytest.raises(LimitExceeded):
            pack_name(number)


def test_a_fragment_is_written_whole_or_not(tmp_path, monkeypatch):
    fragment = VramFragment.of(large().regions)
    write_fragment(tmp_path / "f", VramFragment((), ()))
    before = (tmp_path / "f").read_bytes()

    def full(fd):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(vram.os, "fsync", full)
    with pytest.raises(ImageError, match="No space"):
        write_fragment(tmp_path / "f", fragment)
    assert {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)} == {"f": before}


# ---- sealing -------------------------------------------------------------------------------------


def test_a_staged_checkpoint_is_sealed_and_verified(folder, staged, key, policy):
    sealed = seal_staged(folder, staged, key)
    assert not (folder / FRAGMENT_NAME).exists()
    found = verify_directory(folder, policy)
    assert found.manifest_digest == sealed.manifest_digest
    assert (found.bytes_checked, found.bytes_deferred) == (staged.bytes_checked, 0)
    assert sealed.bytes_hashed == sum(map(len, base_files().values()))
    assert VramFragment.from_index(found.index).regions == VramFragment.of(staged.regions).regions
    record = found.record
    assert (record.format_version, record.required_features) == ("1.1", ("staged",))
    assert [(entry.kind, entry.count) for entry in record.regions_summary] == [("file", 4), ("vram", 3)]
    assert record.processes == staged.record.processes


def test_without_gpu_memory_nothing_of_version_1_1_is_written(image, record, key):
    plain = seal(image, record, key).content_root
    documents = {name: (image / name).read_bytes() for name in ("vgpu-index.bin", "vgpu-record.json")}
    assert documents["vgpu-index.bin"][8:12] == b"\1\0\0\0"
    assert Record.from_bytes(documents["vgpu-record.json"]).required_features == ()
    write_fragment(image / FRAGMENT_NAME, VramFragment((), ()))
    assert seal(image, record, key, vram=image / FRAGMENT_NAME).content_root == plain
    assert {name: (image / name).read_bytes() for name in documents} == documents


def test_a_staged_process_alone_needs_the_feature(image, record, key):
    processes = (replace(record.processes[0], mode="staged"),)
    seal(image, replace(record, processes=processes), key)
    found = read_claims(image)[0]
    assert (found.format_version, found.required_features) == ("1.1", ("staged",))
    assert found.to_json()["processes"] == [entry.to_json() for entry in processes]
    assert replace(found, processes=record.processes).stamped().required_features == ()


def test_where_memory_lies_and_lay_is_no_part_of_the_content_root():
    made = small()
    root = made.extend(sealing.build_index([], chunk_size=SMALL_CHUNK)).compute_content_root()
    moved = {FIRST: THIRD, SECOND: FIRST, THIRD: SECOND, None: None}
    regions = [
        replace(item, address=item.address + 4096, uuid="GPU-" + "0" * 8 + "-0000" * 3 + "-" + "0" * 12,
                chunks=tuple(chunk._replace(pack=moved[chunk.pack]) for chunk in item.chunks))
        for item in made.regions
    ]  # fmt: skip
    assert VramFragment.of(regions, chunk_size=SMALL_CHUNK).to_index().compute_content_root() == root
    for change in ({"device": 5}, {"name": "7/3"}):
        bent = [replace(made.regions[1], **change), *(made.regions[:1] + made.regions[2:])]
        assert VramFragment.of(bent, chunk_size=SMALL_CHUNK).to_index().compute_content_root() != root


def test_unnamed_packs_of_an_older_checkpoint_are_removed(folder, staged, key, policy):
    (folder / pack_name(7)).write_bytes(b"old")
    seal_staged(folder, staged, key)
    assert not (folder / pack_name(7)).exists()
    verify_directory(folder, policy)


def test_packs_may_be_shared_with_another_checkpoint_by_hard_links(folder, staged, key, policy, tmp_path):
    os.link(folder / FIRST, tmp_path / FIRST)
    seal_staged(folder, staged, key)
    assert verify_directory(folder, policy).bytes_checked == staged.bytes_checked
    os.link(folder / SECOND, folder / pack_name(50))
    with pytest.raises(UnexpectedEntry, match="same file"):
        verify_directory(folder, policy)
    (folder / pack_name(50)).unlink()
    os.link(folder / "core-1.img", tmp_path / "core-1.img")
    with pytest.raises(UnexpectedEntry, match="hard links"):
        verify_directory(folder, policy)


def test_one_file_under_two_names_is_not_sealed(folder, staged, key):
    (folder / SECOND).unlink()
    os.link(folder / FIRST, folder / SECOND)
    with pytest.raises(UnexpectedEntry, match="same file"):
        seal_staged(folder, staged, key)


def spoil_record(staged):
    first = staged.objects[7][0]
    staged.objects[7] = (replace(first, size=first.size + 1),)


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda folder, staged: (folder / SECOND).unlink(), UnexpectedEntry),
        (lambda folder, staged: os.truncate(folder / SECOND, TAIL - 1), Truncated),
        (lambda folder, staged: ((folder / SECOND).unlink(), (folder / SECOND).symlink_to(FIRST)), UnexpectedEntry),
        (lambda folder, staged: spoil_record(staged), ImageError),
        (lambda folder, staged: staged.objects.clear(), ImageError),
        (lambda folder, staged: (folder / "sub").mkdir(), UnexpectedEntry),
        (lambda folder, staged: staged.add(12, entry(4, TAIL), [staged.place(None, bytes(TAIL))]), ImageError),
    ],
)
def test_a_seal_that_fails_leaves_packs_and_fragment(folder, staged, key, spoil, error):
    fragment = (folder / FRAGMENT_NAME).read_bytes()
    spoil(folder, staged)
    packs = {name for name in os.listdir(folder) if is_pack(name)}
    with pytest.raises(error):
        seal_staged(folder, staged, key)
    assert {name for name in os.listdir(folder) if "vgpu" in name} == packs | {FRAGMENT_NAME}
    assert (folder / FRAGMENT_NAME).read_bytes() == fragment


@pytest.mark.parametrize("data", [b"", b"VGPUIDX1", None])
def test_a_seal_without_readable_fragment_takes_the_old_signature_all_the_same(folder, staged, key, policy, data):
    seal_staged(folder, staged, key)
    if data is not None:
        (folder / FRAGMENT_NAME).write_bytes(data)
    with pytest.raises((Truncated, NoSuchImage)):
        seal_staged(folder, staged, key)
    assert {name for name in os.listdir(folder) if is_pack(name)} == set(staged.packs)
    with pytest.raises(Unsigned):
        verify_directory(folder, policy)


@pytest.mark.parametrize("call", ["unlink", "replace", "fsync"])
def test_an_error_at_any_step_leaves_packs_and_fragment(folder, staged, key, policy, monkeypatch, call):
    real, count = getattr(os, call), 0
    fragment = (folder / FRAGMENT_NAME).read_bytes()

    def striking(*args, **kwargs):
        nonlocal count
        count -= 1
        if count == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(*args, **kwargs)

    monkeypatch.setattr(sealing.os, call, striking)
    for at in range(1, 20):
        count = at
        try:
            seal_staged(folder, staged, key)
        except VgpuError:
            assert {name for name in os.listdir(folder) if "vgpu" in name} == {*staged.packs, FRAGMENT_NAME}
            assert (folder / FRAGMENT_NAME).read_bytes() == fragment
        else:
            assert count > 0  # no call was left to strike at
            break
    assert at > 3
    verify_directory(folder, policy)


def test_a_record_that_no_reader_would_take_is_not_sealed(image, record, key, monkeypatch):
    processes = (replace(record.processes[0], comm="x" * (70 << 10)),)
    with pytest.raises(LimitExceeded):
        seal(image, replace(record, processes=processes), key)
    assert not (image / "vgpu-signature.json").exists()


def test_removing_an_old_seal_takes_packs_and_fragment(folder):
    remove_old_seal(folder)
    assert [name for name in os.listdir(folder) if "vgpu" in name] == []


# ---- verifying -----------------------------------------------------------------------------------


@pytest.fixture
def sealed(folder, staged, key):
    seal_staged(folder, staged, key)
    return folder


def change(path, at):
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


def test_a_changed_chunk_is_found_on_the_cpu_and_named(sealed, policy):
    change(sealed / FIRST, 2 * TAIL - 1)
    with pytest.raises(ContentMismatch, match=r"vgpu-pack-00000\.bin: .*bytes 0 to 4096, chunk 0 of GPU object 7/1"):
        verify_directory(sealed, policy)


def test_dead_bytes_are_not_vouched_for(sealed, policy):
    change(sealed / FIRST, 2 * TAIL)
    verify_directory(sealed, policy)


def test_deferring_leaves_chunks_but_no_size_and_no_file(sealed, staged, policy, monkeypatch):
    opened = []
    real = os.open
    monkeypatch.setattr(
        os, "open", lambda path, *rest, **more: (opened.append(str(path)), real(path, *rest, **more))[1]
    )
    change(sealed / FIRST, 0)
    found = verify_directory(sealed, policy, defer_vram=True)
    assert found.bytes_deferred == sum(item.length for item in staged.regions)
    assert found.bytes_checked == staged.bytes_checked - found.bytes_deferred
    assert not any(map(is_pack, opened))
    change(sealed / "core-1.img", 0)
    with pytest.raises(ContentMismatch, match=r"core-1\.img"):
        verify_directory(sealed, policy, defer_vram=True)
    change(sealed / "core-1.img", 0)
    os.truncate(sealed / FIRST, 10)
    with pytest.raises(Truncated):
        verify_directory(sealed, policy, defer_vram=True)


# ---- large ones ----------------------------------------------------------------------------------


@pytest.fixture
def big(tmp_path, record, key):
    """Slots of 4 MiB, of them every third dead, every fifth short; the pack ends with its last chunk."""
    folder = tmp_path / "big"
    folder.mkdir()
    (folder / "core-1.img").write_bytes(b"x")
    data = pattern(CHUNK_SIZE, 5)
    regions, objects = [], []
    with (folder / FIRST).open("wb") as file:
        for slot in range(20):
            file.seek(slot * CHUNK_SIZE)
            content = data[: CHUNK_SIZE // 2] if slot % 5 == 4 else data[slot:] + data[:slot]
            file.write(content)
            if slot % 3 == 2:
                continue
            chunk = ChunkPlace(blake3(content).digest(), FIRST, slot * CHUNK_SIZE, len(content))
            regions.append(VramRegion(0, GPU, 0, len(content), f"7/{slot}", (chunk,)))
            objects.append(entry(slot, len(content), mappings=()))
    write_fragment(folder / FRAGMENT_NAME, VramFragment.of(regions))
    processes = (replace(record.processes[0], mode="staged", objects=tuple(objects)),)
    seal(folder, replace(record, mode="staged", processes=processes), key, vram=folder / FRAGMENT_NAME)
    return folder


def test_packs_are_proved_in_threads_with_bounded_memory(big, policy):
    progress = []
    tracemalloc.start()
    found = verify_directory(big, policy, threads=2, on_progress=lambda done, total: progress.append((done, total)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert progress[-1] == (found.bytes_checked, found.bytes_checked)
    assert peak < 2 * CHUNK_SIZE + (2 << 20)
    assert verify_directory(big, policy, threads=1).bytes_checked == found.bytes_checked
    change(big / FIRST, 2 * CHUNK_SIZE + 9)
    verify_directory(big, policy)  # slot 2 is dead
    change(big / FIRST, 18 * CHUNK_SIZE + 9)
    with pytest.raises(ContentMismatch, match="7/18"):
        verify_directory(big, policy)


def pack_tar(folder, path, names):
    with tarfile.open(path, "w") as tar:
        for name in names:
            tar.add(folder / name, f"checkpoint/{name}")
    return path


@pytest.fixture
def passes(monkeypatch):
    count = []
    real = archive_scan.Scan.of
    monkeypatch.setattr(archive_scan.Scan, "of", lambda *args, **kwargs: (count.append(1), real(*args, **kwargs))[1])
    return count


@pytest.mark.parametrize("is_late", [False, True])
def test_an_archive_takes_one_pass_unless_the_index_comes_late(big, policy, tmp_path, passes, is_late):
    names = sorted(os.listdir(big), reverse=is_late)
    path = pack_tar(big, tmp_path / "a.tar", names)
    tracemalloc.start()
    found = verify_archive(path, policy, threads=2)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.verified.bytes_checked == verify_directory(big, policy).bytes_checked
    assert len(passes) == (2 if is_late else 1)
    assert peak < 3 * CHUNK_SIZE + (4 << 20)
    change(big / FIRST, 4 * CHUNK_SIZE + CHUNK_SIZE // 2 - 1)
    with pytest.raises(ContentMismatch, match="7/4"):
        verify_archive(pack_tar(big, path, names), policy)


def test_an_index_too_large_to_be_looked_at_early_takes_two_passes(big, policy, tmp_path, passes, monkeypatch):
    monkeypatch.setattr(stream_cuts, "MAX_EARLY_INDEX_BYTES", 100)
    verify_archive(pack_tar(big, tmp_path / "a.tar", sorted(os.listdir(big))), policy)
    assert len(passes) == 2


def test_whole_slots_take_one_pass_wherever_the_index_is(image, record, key, policy, tmp_path, passes):
    made = large()
    made.packs[FIRST] = made.packs[FIRST][: 2 * TAIL]
    for name, data in made.packs.items():
        (image / name).write_bytes(data)
    write_fragment(image / FRAGMENT_NAME, VramFragment.of(made.regions))
    seal_staged(image, made, key)
    verify_archive(pack_tar(image, tmp_path / "a.tar", sorted(os.listdir(image), reverse=True)), policy)
    assert len(passes) == 1


def test_an_early_index_that_is_not_the_signed_one_decides_nothing(big, policy, tmp_path):
    """The index is swapped for one under which a dead slot and a short one look whole: the manifest does not name it."""
    index = read_claims(big)[1]
    (big / "vgpu-index.bin").write_bytes(chunk_index.to_bytes(replace(index, packs=index.packs[:1], regions=index.files,
                                                                     chunks=index.chunks[:1])))  # fmt: skip
    with pytest.raises(ImageError):
        verify_archive(pack_tar(big, tmp_path / "a.tar", sorted(os.listdir(big))), policy)
