"""Fuzzes what reference mode reads of others' making: the note, and archives on their way into the store and out of it."""

import json
import shutil

import pytest
from hypothesis import strategies as st

from image_format.references import reference_archive
from image_format.references.reference import ReferenceNote
from image_format.trust.keys import make_node_key
from image_format.trust.policy import Policy
from image_format.verifying import verify_directory
from tests.format.store_stage import MIB, Stage, make_archive
from tests.fuzz.test_image_format import attempt, fuzz, mutated
from vgpu_errors import VgpuError

NOTE = json.dumps(
    {
        "version": 1,
        "manifestDigest": "0" * 64,
        "missing": ["pages-1.img", "vgpu-pack-00000.bin"],
        "locations": ["registry.example/a/b@sha256:" + "1" * 64],
    }
).encode()


@pytest.fixture
def made(tmp_path):
    (tmp_path / "etc").mkdir()
    make_node_key(tmp_path / "etc")
    stage = Stage(tmp_path, tmp_path / "etc")
    whole = make_archive(tmp_path / "whole.tar", stage.seal(pages=MIB + 5000))
    return stage, Policy.load(tmp_path / "etc"), whole


def test_a_note_fails_only_with_our_errors_and_comes_back():
    def check(data):
        note = attempt(lambda: ReferenceNote.from_bytes(data))
        if not isinstance(note, VgpuError):
            assert ReferenceNote.from_bytes(note.to_bytes()).manifest_digest == note.manifest_digest

    fuzz(check, mutated(NOTE))


def patched(data, edits):
    data = bytearray(data)
    for at, byte in edits:
        data[at % len(data)] = byte
    return bytes(data)


EDITS = st.lists(st.tuples(st.integers(min_value=0, max_value=2**31), st.integers(0, 255)), min_size=1, max_size=3)


def test_a_damaged_archive_is_packed_only_where_its_checkpoint_is_whole(made, tmp_path):
    stage, policy, whole = made
    data = whole.read_bytes()

    def check(edits):
        bad, small = tmp_path / "bad.tar", tmp_path / "small.tar"
        bad.write_bytes(patched(data, edits))
        outcome = attempt(lambda: reference_archive.pack(bad, small, policy, stage.store))
        assert small.exists() is not isinstance(outcome, VgpuError)
        for entry in stage.store.checkpoints():
            verify_directory(entry.path, policy)
            stage.store.remove(entry, force=True)
        small.unlink(missing_ok=True)

    fuzz(check, EDITS)
    assert not list(tmp_path.glob(".*"))


def test_a_damaged_reference_is_unpacked_only_to_a_whole_archive(made, tmp_path):
    stage, policy, whole = made
    reference_archive.pack(whole, tmp_path / "ref.tar", policy, stage.store)
    data = (tmp_path / "ref.tar").read_bytes()

    def check(edits):
        bad, again = tmp_path / "bad.tar", tmp_path / "again.tar"
        bad.write_bytes(patched(data, edits))
        outcome = attempt(lambda: reference_archive.unpack(bad, again, policy, stage.store.root))
        assert again.exists() is not isinstance(outcome, VgpuError)
        again.unlink(missing_ok=True)

    fuzz(check, EDITS)
    assert len(stage.store.checkpoints()) == 1
    assert list((stage.store.root / "incoming").iterdir()) == []
    shutil.rmtree(stage.store.root)
