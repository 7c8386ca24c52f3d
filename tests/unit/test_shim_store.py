"""What the shim does with the store: keeps, refers, brings back, finds a parent; and what it does when that fails."""

import json
import os
import shutil
from pathlib import Path

import pytest

from image_format.file_names import FRAGMENT_NAME, REFERENCE_NAME
from image_format.record import Parent
from image_format.references.reference import ReferenceNote, read_note
from image_format.store import Store
from image_format.trust.keys import make_node_key
from image_format.trust.policy import Policy
from image_format.verifying import verify_directory
from image_format.vram import ChunkPlace, VramFragment, VramRegion, write_fragment
from oci_hook.settings import Settings, parse_settings
from runtime_shim import parent_side, seen, store_side
from runtime_shim.arguments import parse
from runtime_shim.phase_log import PhaseLog
from runtime_shim.progress import Progress
from tests.format.make_vectors import GPU
from tests.format.store_stage import PAGES, Stage
from vgpu_errors import BadConfiguration, ContentElsewhere, Expired, OlderGeneration, RegistryError, UnsupportedRequest

ID = "c" * 64


@pytest.fixture
def etc(tmp_path, monkeypatch):
    folder = tmp_path / "etc"
    folder.mkdir()
    make_node_key(folder)
    monkeypatch.setattr(parent_side.Policy, "load", classmethod(lambda cls, directory=folder: REAL_LOAD(directory)))
    return folder


REAL_LOAD = Policy.load


@pytest.fixture
def stage(tmp_path, etc):
    return Stage(tmp_path, etc)


@pytest.fixture
def settings(stage, tmp_path):
    found = Settings()
    found.store_dir, found.log, found.progress = str(stage.store.root), str(tmp_path / "log"), "json"
    return found


def keep(settings, folder):
    clock = PhaseLog()
    store_side.keep(settings, folder, ID, Progress(settings), clock)
    return [phase for phase, _ in clock.taken]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("", ("off", "embedded", "/var/lib/vgpu/store")),
        ("store = on\narchive = reference\nstore_dir = /srv/store/\n", ("on", "reference", "/srv/store")),
    ],
)
def test_settings(lines, expected):
    found = parse_settings(lines, "runtime.conf")
    assert (found.store, found.archive, found.store_dir) == expected


@pytest.mark.parametrize("line", ["store = yes", "archive = small", "store_dir = here"])
def test_bad_settings_are_named(line):
    with pytest.raises(BadConfiguration, match=line.split()[0]):
        parse_settings(line, "runtime.conf")


def test_without_a_store_nothing_happens(stage, settings):
    folder = stage.seal()
    assert keep(settings, folder) == []
    assert stage.everything() == []
    settings.archive = "reference"
    with pytest.raises(BadConfiguration, match="store = on"):
        store_side.refuse_reference_without_store(settings)


def test_a_checkpoint_is_kept_and_stays_whole(stage, settings, etc):
    settings.store = "on"
    folder = stage.seal()
    assert keep(settings, folder) == ["store"]
    verify_directory(folder, Policy.load(etc))
    assert [entry.container_id for entry in stage.store.checkpoints()] == [ID]
    assert stage.store.references() == ()


def test_a_reference_comes_back_at_the_restore(stage, settings, etc):
    settings.store, settings.archive = "on", "reference"
    folder = stage.seal()
    keep(settings, folder)
    assert not (folder / PAGES).exists()
    assert ID in stage.store.references()[0].where
    store_side.bring_back(settings, folder, ID, Policy.load(etc))
    assert not (folder / REFERENCE_NAME).exists()
    verify_directory(folder, Policy.load(etc))
    store_side.bring_back(settings, folder, ID, Policy.load(etc))  # whole now, nothing to do
    assert "files from" in Path(settings.log).read_text()


def test_a_restore_without_the_content_says_where_it_is_and_changes_nothing(stage, settings, etc, tmp_path):
    settings.store, settings.archive = "on", "reference"
    folder = stage.seal()
    keep(settings, folder)
    settings.store_dir = str(tmp_path / "none")
    before = sorted(os.listdir(folder))
    with pytest.raises(ContentElsewhere, match="has no store in"):
        store_side.bring_back(settings, folder, ID, Policy.load(etc))
    assert sorted(os.listdir(folder)) == before


@pytest.mark.parametrize("is_there", [True, False])
def test_the_registries_that_an_archive_names_are_asked_last(stage, settings, etc, tmp_path, monkeypatch, is_there):
    settings.store, settings.archive = "on", "reference"
    folder, whole = stage.seal(), tmp_path / "whole"
    shutil.copytree(folder, whole)
    keep(settings, folder)
    note = read_note(folder)
    location = "registry.example/x@sha256:" + "a" * 64
    (folder / REFERENCE_NAME).write_bytes(ReferenceNote(note.manifest_digest, note.missing, (location,)).to_bytes())
    settings.store_dir = str(tmp_path / "other")

    def fetch(asked, policy, store, *, deadline_s):
        assert asked.locations == (location,)
        assert 0 < deadline_s <= settings.deadline_restore_s
        if not is_there:
            raise RegistryError(where=location, what="404")
        store.add(whole, links=False)

    monkeypatch.setattr("image_format.transport.fetching.fetch_missing", fetch)
    if is_there:
        store_side.bring_back(settings, folder, ID, Policy.load(etc))
        verify_directory(folder, Policy.load(etc))
        return
    with pytest.raises(ContentElsewhere) as caught:
        store_side.bring_back(settings, folder, ID, Policy.load(etc))
    assert "404" in caught.value.__notes__[0]
    assert f"vgpu pull {location}" in caught.value.remedy


def test_a_store_that_fails_leaves_the_checkpoint_whole_and_is_told(stage, settings, etc, tmp_path, capsys):
    settings.store, settings.archive = "on", "reference"
    (tmp_path / "file").touch()
    settings.store_dir = str(tmp_path / "file")
    folder = stage.seal()
    keep(settings, folder)
    verify_directory(folder, Policy.load(etc))
    assert not (folder / REFERENCE_NAME).exists()
    assert "not in the store" in Path(settings.log).read_text()
    notes = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert any("not in the store" in note.get("detail", "") for note in notes)


def test_images_are_not_to_be_written_to_at_a_restore():
    store_side.refuse_writing_to_images(parse(["rt", "restore", "--detach", "c1"]))
    with pytest.raises(UnsupportedRequest, match="auto-dedup"):
        store_side.refuse_writing_to_images(parse(["rt", "restore", "--auto-dedup", "c1"]))


# ---- parents -------------------------------------------------------------------------------------


def fragment_of(stage, ids):
    places = tuple(ChunkPlace(chunk_id, "vgpu-pack-00000.bin", n << 22, 4 << 20) for n, chunk_id in enumerate(ids))
    path = stage.folder / FRAGMENT_NAME
    write_fragment(path, VramFragment.of([VramRegion(0, GPU, 0, len(ids) * (4 << 20), "7/1", places)]))
    return path


def test_the_newest_checkpoint_is_the_parent_and_leased_meanwhile(stage, settings):
    settings.store = "on"
    for generation in (1, 2):
        stage.store.add(stage.seal(f"g{generation}", generation=generation, day=generation))
    newest = stage.store.latest_of(ID)
    with parent_side.leased_parent(settings, ID, is_wanted=True) as parent:
        assert parent.directory == newest.path
        assert parent.entry == Parent(newest.manifest_digest, 2)
        assert len(stage.store.gc(keep=0).removed) == 1
        some = next(iter(parent.ids))
        assert parent.shares_with(fragment_of(stage, [b"n" * 32, some]))
        assert not parent.shares_with(fragment_of(stage, [b"n" * 32]))
        assert not parent.shares_with(None)
    assert len(stage.store.gc(keep=0).removed) == 1


def test_no_parent_where_there_is_none_or_none_is_wanted(stage, settings, tmp_path):
    kept = stage.store.add(stage.seal())
    cases = [("off", ID, True), ("on", ID, False), ("on", "e" * 64, True)]
    for store, container, is_wanted in cases:
        settings.store = store
        with parent_side.leased_parent(settings, container, is_wanted=is_wanted) as parent:
            assert parent is None
    settings.store = "on"
    (kept.path / "vgpu-signature.json").write_bytes(b"{}")
    with parent_side.leased_parent(settings, ID, is_wanted=True) as parent:
        assert parent is None
    assert "no parent" in Path(settings.log).read_text()
    assert stage.store.leases() == ()
    settings.store_dir = str(tmp_path / "new")
    with parent_side.leased_parent(settings, ID, is_wanted=True) as parent:
        assert parent is None
    Store.open(tmp_path / "new", create=False)


def test_an_error_in_the_block_is_not_swallowed(stage, settings):
    settings.store = "on"
    with (
        pytest.raises(ContentElsewhere),
        parent_side.leased_parent(settings, ID, is_wanted=True),
    ):
        raise ContentElsewhere(where="x", count=0, size_bytes=0, what="")
    assert stage.store.leases() == ()


# ---- freshness -----------------------------------------------------------------------------------


def test_an_older_generation_is_refused_or_told_as_the_policy_says(stage, settings, etc, tmp_path, monkeypatch):
    memory = seen.SeenGenerations(tmp_path / "seen")
    monkeypatch.setattr(seen, "SeenGenerations", lambda: memory)
    verified = verify_directory(stage.seal(generation=3), Policy.load(etc))
    seen.note(settings, ID, 5)
    seen.check(verified, Policy.load(etc), settings, where="image")
    assert "generation 5" in Path(settings.log).read_text()
    (etc / "policy.json").write_text('{"version": 2, "default": "refuse-untrusted", "olderGeneration": "refuse"}')
    with pytest.raises((OlderGeneration, Expired)):
        seen.check(verified, Policy.load(etc), settings, where="image")


def test_a_memory_that_cannot_be_written_stops_nobody(settings, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(seen, "SeenGenerations", lambda: type(MEMORY)(tmp_path / "file"))
    seen.note(settings, ID, 1)
    assert "not remembered" in Path(settings.log).read_text()


MEMORY = seen.SeenGenerations()
