"""Which packs of an earlier checkpoint the next one takes along, and which give it their live slots only."""

import os
from pathlib import Path

import pytest

from gpu_state.staging.parents import ParentPack, adopt
from gpu_state.staging.slots import CHUNK_BYTES, PACK_SLOTS, Store
from gpu_state.staging.targets import MOST_PACKS, _not_worth_keeping


def parent(used, slots=100):
    pack = ParentPack(Path("vgpu-pack-00000.bin"), slots * CHUNK_BYTES)
    pack.used = {slot * CHUNK_BYTES for slot in range(used)}
    return pack


def own():
    return Store(0, PACK_SLOTS)


def moved(*packs):
    return [len(pack.used) for pack in _not_worth_keeping({pack: [] for pack in packs})]


@pytest.mark.parametrize(("used", "is_moved"), [(1, True), (39, True), (40, False), (100, False)])
def test_a_pack_with_less_than_two_fifths_in_use_gives_its_slots(used, is_moved):
    assert moved(parent(used), own()) == ([used] if is_moved else [])


def test_few_packs_stay_as_they_are():
    assert moved(*(parent(60) for _ in range(MOST_PACKS))) == []


def test_of_too_many_packs_those_least_in_use_are_merged_until_they_are_few_enough():
    packs = [parent(40 + number % 60) for number in range(MOST_PACKS + 20)]
    gone = moved(*packs)
    assert gone == sorted(gone)
    assert max(gone) <= min(sorted(len(pack.used) for pack in packs)[len(gone) :])
    assert len(packs) - len(gone) + -(-sum(gone) // PACK_SLOTS) <= MOST_PACKS


def test_packs_of_our_own_are_never_moved():
    assert moved(*(own() for _ in range(MOST_PACKS + 5))) == []


def test_a_pack_is_taken_along_by_a_link(tmp_path):
    (tmp_path / "old").write_bytes(b"pack")
    adopt(tmp_path / "old", tmp_path / "new")
    assert (tmp_path / "new").read_bytes() == b"pack"
    assert os.stat(tmp_path / "new").st_ino == os.stat(tmp_path / "old").st_ino
