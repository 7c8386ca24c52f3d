"""Reference mode: what is taken out comes back or the error says from where; nothing unsigned decides anything."""

import errno
import gzip
import io
import json
import os
import tarfile
import tracemalloc
from pathlib import Path

import pytest
import zstandard
from jsonschema import Draft202012Validator

from image_format import source
from image_format.archives.archive import verify_archive
from image_format.file_names import INDEX_NAME, REFERENCE_NAME, SIGNATURE_NAME
from image_format.references import reference, reference_archive, reference_directory
from image_format.references.reference import ReferenceNote
from image_format.store import Store, placing
from image_format.trust.policy import Policy
from image_format.verifying import verify_directory
from tests.format import store_stage
from tests.format.store_stage import MIB, PAGES, Cut, Stage, in_child, make_archive, pattern_bytes
from vgpu_errors import (
    BadSignature,
    ContentElsewhere,
    ContentMismatch,
    DeadlineExceeded,
    FormatTooNew,
    ImageError,
    LimitExceeded,
    UnexpectedEntry,
    UnsafeName,
    Unsigned,
    UnsupportedRequest,
    UntrustedKey,
    UserError,
    VgpuError,
)

LOCATION = "registry.example:5000/team/run@sha256:" + "a" * 64
SCHEMA = Draft202012Validator(json.loads((Path(__file__).parents[2] / "spec/reference.schema.json").read_text()))


@pytest.fixture
def stage(tmp_path, node):
    return Stage(tmp_path, node)


def refer(stage, folder, **more):
    kept = stage.store.add(folder)
    return reference.refer(folder, stage.store, kept, names_it="an archive of a test", **more)


# ---- the note ------------------------------------------------------------------------------------


def note_doc(**changes):
    return {"version": 1, "manifestDigest": "0" * 64, "missing": [PAGES], "locations": [LOCATION]} | changes


def test_a_note_comes_back_with_what_it_does_not_know():
    doc = note_doc(later={"a": 1})
    note = ReferenceNote.from_bytes(json.dumps(doc).encode())
    assert json.loads(note.to_bytes()) == doc
    SCHEMA.validate(doc)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"version": 2}, FormatTooNew),
        ({"manifestDigest": "x"}, ImageError),
        ({"missing": ["../x"]}, UnsafeName),
        ({"missing": [PAGES, PAGES]}, ImageError),
        ({"missing": [".hidden"]}, UnsafeName),
        ({"locations": ["registry/x:latest"]}, ImageError),
        ({"locations": ["$(reboot)@sha256:" + "a" * 64]}, ImageError),
        ({"locations": [LOCATION] * 17}, LimitExceeded),
        ({"missing": None}, ImageError),
    ],
)
def test_a_bad_note_is_refused(changes, error):
    with pytest.raises(error):
        ReferenceNote.from_bytes(json.dumps(note_doc(**changes)).encode())
    assert not SCHEMA.is_valid(note_doc(**changes))


# ---- directories in place ------------------------------------------------------------------------


def test_the_bulk_goes_to_the_store_and_comes_back(stage, policy):
    folder = stage.seal()
    before = {name: (folder / name).read_bytes() for name in os.listdir(folder)}
    note = refer(stage, folder, locations=[LOCATION])
    assert sum(path.stat().st_size for path in folder.iterdir()) < 64 << 10
    assert set(os.listdir(folder)) == set(before) - set(note.missing) | {REFERENCE_NAME}
    SCHEMA.validate(json.loads((folder / REFERENCE_NAME).read_bytes()))
    with pytest.raises(ContentElsewhere):
        verify_directory(folder, policy)
    assert stage.store.gc(keep=0).removed == ()
    names = reference.complete(folder, policy, stage.store.root)
    assert set(names) == set(note.missing)
    assert {name: (folder / name).read_bytes() for name in os.listdir(folder)} == before
    verify_directory(folder, policy)


def test_a_store_that_lacks_it_or_is_not_there_is_named_with_where_to_get_it(stage, policy, tmp_path):
    folder = stage.seal()
    refer(stage, folder, locations=[LOCATION])
    before = sorted(os.listdir(folder))
    for root in (tmp_path / "none", Store.open(tmp_path / "empty").root):
        with pytest.raises(ContentElsewhere, match=str(root)) as caught:
            reference.complete(folder, policy, root)
        assert f"vgpu pull {LOCATION}" in caught.value.remedy
        assert caught.value.fields["count"] == 1 + len(stage.staged.packs)
    assert sorted(os.listdir(folder)) == before
    note = reference.read_note(folder)
    (folder / REFERENCE_NAME).write_bytes(ReferenceNote(note.manifest_digest, note.missing).to_bytes())
    with pytest.raises(ContentElsewhere) as caught:
        reference.complete(folder, policy, tmp_path / "none")
    assert "vgpu unpack" in caught.value.remedy


def test_the_signature_is_looked_at_before_anything_comes_back(stage, tmp_path):
    folder = stage.seal()
    refer(stage, folder)
    before = sorted(os.listdir(folder))
    with pytest.raises(UntrustedKey):
        reference.complete(folder, Policy(), stage.store.root)
    (folder / SIGNATURE_NAME).unlink()
    with pytest.raises(Unsigned):
        reference.complete(folder, Policy(), stage.store.root)
    assert set(os.listdir(folder)) == set(before) - {SIGNATURE_NAME}


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"manifestDigest": "1" * 64}, ContentMismatch),
        ({"missing": ["core-1.img"]}, ImageError),
        ({"missing": ["vgpu-index.bin"]}, ImageError),
        ({"missing": ["passwd"]}, ImageError),
    ],
)
def test_a_note_about_something_else_changes_nothing(stage, policy, changes, error):
    folder = stage.seal()
    refer(stage, folder)
    doc = json.loads((folder / REFERENCE_NAME).read_bytes())
    (folder / REFERENCE_NAME).write_bytes(json.dumps(doc | changes).encode())
    before = sorted(os.listdir(folder))
    with pytest.raises(error):
        reference.complete(folder, policy, stage.store.root)
    assert sorted(os.listdir(folder)) == before


def test_a_file_that_the_note_forgets_is_missed_by_the_verification(stage, policy):
    folder = stage.seal()
    note = refer(stage, folder)
    (folder / REFERENCE_NAME).write_bytes(ReferenceNote(note.manifest_digest, note.missing[1:]).to_bytes())
    reference.complete(folder, policy, stage.store.root)
    with pytest.raises(UnexpectedEntry, match="missing"):
        verify_directory(folder, policy)


def test_damage_in_the_store_is_found_after_it_came_back(stage, policy):
    folder = stage.seal()
    refer(stage, folder)
    (kept,) = stage.store.checkpoints()
    with (kept.path / PAGES).open("r+b") as file:
        file.write(b"damage")
    reference.complete(folder, policy, stage.store.root)
    with pytest.raises(ContentMismatch):
        verify_directory(folder, policy)


def test_a_kill_at_any_step_leaves_a_directory_that_comes_back_whole(stage, policy):
    made = []

    def fresh():
        folder = stage.seal(f"image-{len(made)}", generation=len(made) + 1)
        made.append(folder)
        return folder, stage.store.add(folder)

    folder, kept = fresh()
    with pytest.MonkeyPatch.context() as patch:
        cut = Cut(patch, -1)
        reference.refer(folder, stage.store, kept, names_it="a test")
    for at in range(1, cut.count + 1):
        folder, kept = fresh()
        with pytest.MonkeyPatch.context() as patch:
            work = lambda: reference.refer(folder, stage.store, kept, names_it="a test")  # noqa: B023, E731
            assert in_child(patch, work, at) == 9
        stage.store.gc(keep=0)
        if reference.is_reference(folder):
            reference.complete(folder, policy, stage.store.root)
        reference.sweep(folder)
        verify_directory(folder, policy)


@pytest.mark.parametrize("links", [True, False])
def test_a_kill_at_any_step_of_the_way_back_is_made_good_by_the_next_try(stage, policy, links):
    folder = stage.seal()
    kept = stage.store.add(folder)
    at, died = 0, 9
    while died == 9:
        at += 1
        reference.refer(folder, stage.store, kept, names_it="a test")
        with pytest.MonkeyPatch.context() as patch:
            died = in_child(patch, lambda: reference.complete(folder, policy, stage.store.root, links=links), at)
        reference.sweep(folder)
        if reference.is_reference(folder):
            reference.complete(folder, policy, stage.store.root, links=links)
        verify_directory(folder, policy)
    assert died == 0
    assert at > 5


def test_an_error_at_any_step_leaves_the_directory_whole_and_no_note(stage, policy, monkeypatch):
    folder = stage.seal()
    kept = stage.store.add(folder)
    before = sorted(os.listdir(folder))
    real = Path.unlink

    def unlink(path, **kwargs):
        if path == folder / PAGES:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path, **kwargs)

    monkeypatch.setattr(Path, "unlink", unlink)
    with pytest.raises(OSError, match="Input"):
        reference.refer(folder, stage.store, kept, names_it="a test")
    monkeypatch.undo()
    assert sorted(os.listdir(folder)) == before
    assert stage.store.references() == ()
    verify_directory(folder, policy)


# ---- archives ------------------------------------------------------------------------------------


def members(path):
    data = path.read_bytes()
    plain = {
        b"\x1f\x8b": gzip.decompress,
        b"\x28\xb5": lambda d: zstandard.ZstdDecompressor().decompressobj().decompress(d),
    }
    data = plain.get(data[:2], bytes)(data)
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return {
            entry.name: (
                entry.type,
                entry.uid,
                entry.mtime,
                entry.linkname,
                dict(entry.pax_headers).get("SCHILY.xattr.user.a"),
                tar.extractfile(entry).read() if entry.isreg() else None,
            )
            for entry in tar
        }


@pytest.mark.parametrize("compression", ["none", "gzip", "zstd"])
def test_an_archive_becomes_a_reference_and_whole_again(stage, policy, tmp_path, compression):
    folder = stage.seal()
    (folder / "dump.log").write_text("a log")
    whole = make_archive(tmp_path / "whole.tar", folder, compression)
    before = members(whole)
    small, again = tmp_path / "small.tar", tmp_path / "again.tar"
    packed = reference_archive.pack(whole, small, policy, stage.store, locations=[LOCATION])
    assert small.stat().st_size < 128 << 10
    assert small.read_bytes()[:2] == whole.read_bytes()[:2] or compression == "none"
    inside = members(small)
    gone = {f"checkpoint/{name}" for name in packed.names}
    assert set(inside) == set(before) - gone | {f"checkpoint/{REFERENCE_NAME}"}
    assert all(inside[name] == before[name] for name in set(inside) & set(before))
    note = ReferenceNote.from_bytes(inside[f"checkpoint/{REFERENCE_NAME}"][-1])
    assert note == ReferenceNote(packed.manifest_digest, tuple(sorted(packed.names)), (LOCATION,))
    assert [entry.where for entry in stage.store.references()] == [str(small)]
    with pytest.raises(ContentElsewhere):
        verify_archive(small, policy)
    unpacked = reference_archive.unpack(small, again, policy, stage.store.root)
    assert unpacked.moved_bytes == packed.moved_bytes > 3 * MIB
    after = members(again)
    assert {name: entry[-1] for name, entry in after.items()} == {name: entry[-1] for name, entry in before.items()}
    assert verify_archive(again, policy).compression == compression
    assert list(tmp_path.glob(".*partial")) == []
    assert list((stage.store.root / "incoming").iterdir()) == []
    verify_directory(stage.store.directory_of(packed.manifest_digest), policy)


def test_compression_may_be_chosen_and_an_imported_reference_comes_back(stage, policy, tmp_path):
    whole = make_archive(tmp_path / "whole.tar", stage.seal(), "gzip")
    small = tmp_path / "small.tar"
    reference_archive.pack(whole, small, policy, stage.store, compression="zstd")
    assert small.read_bytes()[:2] == b"\x28\xb5"
    unpacked = tmp_path / "imported"
    unpacked.mkdir()
    for name, entry in members(small).items():
        if name.startswith("checkpoint/") and entry[-1] is not None:
            (unpacked / name.removeprefix("checkpoint/")).write_bytes(entry[-1])
    reference.complete(unpacked, policy, stage.store.root)
    verify_directory(unpacked, policy)


def test_a_second_archive_of_the_same_checkpoint_adds_nothing(stage, policy, tmp_path):
    whole = make_archive(tmp_path / "whole.tar", stage.seal())
    reference_archive.pack(whole, tmp_path / "one.tar", policy, stage.store)
    before = stage.contents()
    reference_archive.pack(whole, tmp_path / "two.tar", policy, stage.store)
    assert stage.contents() == before
    assert len(stage.store.references()) == 2


def flipped(path, folder, name, at):
    data = bytearray((folder / name).read_bytes())
    data[at] ^= 1
    (folder / name).write_bytes(data)
    return make_archive(path, folder)


def cut_off(path):
    os.truncate(path, path.stat().st_size - 20_000)
    return path


def unsigned(path, folder):
    (folder / SIGNATURE_NAME).unlink()
    return make_archive(path, folder)


def other_signature(path, folder):
    data = (folder / SIGNATURE_NAME).read_bytes()
    (folder / SIGNATURE_NAME).write_bytes(data.replace(b'"payload":"ey', b'"payload":"eX', 1))
    return make_archive(path, folder)


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda path, folder: flipped(path, folder, PAGES, MIB), ContentMismatch),
        (lambda path, folder: flipped(path, folder, "core-1.img", 3), ContentMismatch),
        (lambda path, folder: flipped(path, folder, INDEX_NAME, 200), ContentMismatch),
        (lambda path, folder: make_archive(path, folder, extra=[("checkpoint/core-1.img", b"again")]), UnexpectedEntry),
        (lambda path, folder: make_archive(path, folder, extra=[("checkpoint/more.img", b"more")]), UnexpectedEntry),
        (lambda path, folder: make_archive(path, folder, extra=[("checkpoint/../../x", b"")]), UnsafeName),
        (lambda path, folder: cut_off(make_archive(path, folder)), ImageError),
        (unsigned, Unsigned),
        (other_signature, (BadSignature, ImageError)),
    ],
)
def test_a_bad_archive_leaves_no_archive_and_no_checkpoint(stage, policy, tmp_path, spoil, error):
    folder = stage.seal()
    path = spoil(tmp_path / "bad.tar", folder)
    with pytest.raises(error):
        reference_archive.pack(path, tmp_path / "small.tar", policy, stage.store)
    assert not (tmp_path / "small.tar").exists()
    assert list(tmp_path.glob(".*")) == []
    assert stage.store.checkpoints() == ()
    assert stage.contents() == []
    assert stage.store.references() == ()


def test_nothing_is_unpacked_before_the_signature_holds(stage, tmp_path):
    whole = make_archive(tmp_path / "whole.tar", stage.seal())
    with pytest.raises(UntrustedKey):
        reference_archive.pack(whole, tmp_path / "small.tar", Policy(), stage.store)
    assert stage.everything() == []


def test_an_unpack_that_finds_damage_leaves_no_archive(stage, policy, tmp_path):
    whole = make_archive(tmp_path / "whole.tar", stage.seal())
    packed = reference_archive.pack(whole, tmp_path / "small.tar", policy, stage.store)
    kept = stage.store.directory_of(packed.manifest_digest)
    with (kept / PAGES).open("r+b") as file:
        file.write(b"damage")
    with pytest.raises(ContentMismatch):
        reference_archive.unpack(tmp_path / "small.tar", tmp_path / "again.tar", policy, stage.store.root)
    assert not (tmp_path / "again.tar").exists()
    with pytest.raises(ContentElsewhere, match="none"):
        reference_archive.unpack(tmp_path / "small.tar", tmp_path / "again.tar", policy, tmp_path / "none")


def test_what_is_there_is_not_replaced_and_what_is_done_is_not_done_again(stage, policy, tmp_path):
    whole = make_archive(tmp_path / "whole.tar", stage.seal())
    small = tmp_path / "small.tar"
    small.write_bytes(b"mine")
    with pytest.raises(UserError, match="already"):
        reference_archive.pack(whole, small, policy, stage.store)
    assert small.read_bytes() == b"mine"
    small.unlink()
    with pytest.raises(UnsupportedRequest):
        reference_archive.unpack(whole, tmp_path / "x.tar", policy, stage.store.root)
    reference_archive.pack(whole, small, policy, stage.store)
    with pytest.raises(UnsupportedRequest):
        reference_archive.pack(small, tmp_path / "x.tar", policy, stage.store)


def test_an_archive_is_repacked_in_bounded_memory(stage, policy, tmp_path):
    whole = make_archive(tmp_path / "whole.tar", stage.seal(pages=96 * MIB))
    tracemalloc.start()
    try:
        reference_archive.pack(whole, tmp_path / "small.tar", policy, stage.store, threads=2)
        reference_archive.unpack(tmp_path / "small.tar", tmp_path / "again.tar", policy, stage.store.root, threads=2)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 40 * MIB
    assert members(tmp_path / "again.tar")[f"checkpoint/{PAGES}"][-1] == pattern_bytes(96 * MIB, 1)


# ---- directories elsewhere -----------------------------------------------------------------------


def test_a_directory_becomes_a_reference_beside_it_and_whole_again(stage, policy, tmp_path):
    folder = stage.seal()
    before = {name: (folder / name).read_bytes() for name in os.listdir(folder)}
    packed = reference_directory.pack(folder, tmp_path / "ref", policy, stage.store)
    assert {name: (folder / name).read_bytes() for name in os.listdir(folder)} == before
    assert (folder / PAGES).stat().st_nlink == 1  # whoever owns it may write to it
    assert set(packed.names) == {PAGES, *stage.staged.packs}
    reference_directory.unpack(tmp_path / "ref", tmp_path / "again", policy, stage.store.root)
    assert {name: (tmp_path / "again" / name).read_bytes() for name in os.listdir(tmp_path / "again")} == before
    assert (tmp_path / "again" / PAGES).stat().st_nlink == 1
    assert reference.is_reference(tmp_path / "ref")
    for wrong in (
        lambda: reference_directory.pack(tmp_path / "ref", tmp_path / "x", policy, stage.store),
        lambda: reference_directory.unpack(folder, tmp_path / "x", policy, stage.store.root),
        lambda: reference_directory.pack(folder, tmp_path / "ref", policy, stage.store),
        lambda: reference_directory.unpack(tmp_path / "ref", tmp_path / "x", policy, tmp_path / "none"),
        lambda: reference_directory.pack(folder, tmp_path / "x", Policy(), stage.store),
    ):
        with pytest.raises(VgpuError):
            wrong()
        assert not (tmp_path / "x").exists()
    assert list(tmp_path.glob(".*")) == []


# ---- what was found in review ----------------------------------------------------------------------


def test_a_reference_is_verified_with_its_content_where_the_store_has_it(stage, policy, tmp_path):
    whole = make_archive(tmp_path / "whole.tar", stage.seal())
    small = tmp_path / "small.tar"
    reference_archive.pack(whole, small, policy, stage.store, compression="gzip")
    folder = stage.seal("two", generation=2)
    reference_directory.pack(folder, tmp_path / "ref", policy, stage.store)
    expected = source.verify(str(whole), policy).result
    found = source.verify(str(small), policy, store_root=stage.store.root).result
    assert (found.outside, found.config_differences) == (expected.outside, expected.config_differences)
    assert found.verified.bytes_checked == expected.verified.bytes_checked
    assert found.compression == "gzip"
    assert source.verify(str(tmp_path / "ref"), policy, store_root=stage.store.root).result.verified.key_id
    assert os.listdir(stage.store.root / "incoming") == []
    for where in (small, tmp_path / "ref"):
        with pytest.raises(ContentElsewhere, match="has no store in"):
            source.verify(str(where), policy, store_root=tmp_path / "none")
        with pytest.raises(ContentElsewhere):
            source.verify(str(where), policy)
    for kept in stage.store.checkpoints():
        with (kept.path / PAGES).open("r+b") as file:
            file.write(b"damage")
    for where in (small, tmp_path / "ref"):
        with pytest.raises(ContentMismatch, match=f"{where}: {PAGES}"):
            source.verify(str(where), policy, store_root=stage.store.root)


@pytest.mark.parametrize("kind", ["archive", "directory"])
def test_what_the_store_had_before_is_proved_before_an_archive_relies_on_it(stage, policy, tmp_path, kind):
    folder = stage.seal()
    kept = stage.store.add(folder, links=False)
    with (kept.path / PAGES).open("r+b") as file:
        file.write(b"damage")
    whole = make_archive(tmp_path / "whole.tar", folder) if kind == "archive" else folder
    pack = reference_archive.pack if kind == "archive" else reference_directory.pack
    with pytest.raises(ContentMismatch) as caught:
        pack(whole, tmp_path / "s", policy, stage.store)
    assert "vgpu store rm" in caught.value.remedy
    assert not (tmp_path / "s").exists()
    assert stage.store.references() == ()


def test_a_copy_from_the_store_ends_with_the_time_and_leaves_a_reference(stage, policy, monkeypatch):
    folder = stage.seal()
    reference.refer(folder, stage.store, stage.store.add(folder), names_it="a test")
    before = sorted(os.listdir(folder))
    monkeypatch.setattr(placing, "_link", lambda *_: False)
    monkeypatch.setattr(placing, "_share_extents", lambda *_: False)
    monkeypatch.setattr(placing, "_PIECE_BYTES", MIB)
    left = iter(range(3))

    def check():
        if next(left, None) is None:
            raise DeadlineExceeded(phase="a test", seconds=0)

    with pytest.raises(DeadlineExceeded):
        reference.complete(folder, policy, stage.store.root, check=check)
    assert sorted(os.listdir(folder)) == before
    reference.complete(folder, policy, stage.store.root)
    verify_directory(folder, policy)


def test_twins_come_back_as_two_files(stage, policy, monkeypatch):
    files = store_stage.base_files()
    monkeypatch.setattr(store_stage, "base_files", lambda: {**files, "pages-3.img": pattern_bytes(3 * MIB, 1)})
    folder = stage.seal()
    reference.refer(folder, stage.store, stage.store.add(folder), names_it="a test")
    reference.complete(folder, policy, stage.store.root)
    verify_directory(folder, policy)
