"""What the shim makes of what processes told of their libraries: taken into the record, or left out with a note."""

from dataclasses import replace

import pytest

from gpu_state.nvml_links import Link
from image_format.record import Record
from runtime_shim.record_building import with_groups
from tests.format.make_shared_vectors import OTHER_GPU, Shared, communicators, nvshmem
from tests.format.make_vectors import GPU
from tests.unit.test_fitness import FACTS

NODE = replace(FACTS, links=(Link(OTHER_GPU, GPU, True, True, 18, "node"),))


@pytest.fixture
def bare():
    return replace(Shared().record, communicators=(), nvshmem=(), requirements=())


@pytest.fixture
def notes():
    return []


def told(**changes):
    doc = {
        "communicators": [entry.to_json() for entry in communicators()],
        "nvshmem": [entry.to_json() for entry in nvshmem()],
    }
    return doc | changes


def test_what_was_told_is_in_the_record_with_its_requirements(bare, notes):
    made = with_groups(bare, NODE, told(), notes.append)
    assert (made.communicators, made.nvshmem, notes) == (communicators(), nvshmem(), [])
    assert [(r.key, r.value) for r in made.requirements] == [
        ("gpu.peers", ("0-1",)),
        ("gpu.nvlink", ("0-1",)),
        ("nccl.version", ("2.28.9",)),
    ]
    assert Record.from_bytes(made.stamped().to_bytes()).communicators == communicators()


def test_requirements_that_were_there_stay(bare):
    first = Shared().record.requirements[:1]
    assert with_groups(replace(bare, requirements=first), FACTS, {}).requirements[:1] == first


@pytest.mark.parametrize(
    "told", [{}, {"communicators": [], "nvshmem": []}, {"communicators": None, "nvshmem": {"a": 1}}]
)
def test_a_process_without_libraries_adds_nothing(bare, told):
    made = with_groups(bare, replace(NODE, links=()), told)
    assert (made.communicators, made.nvshmem) == ((), ())
    assert [requirement.key for requirement in made.requirements] == ["gpu.peers"]


@pytest.mark.parametrize(
    ("key", "change", "named"),
    [
        ("communicators", {"rank": 3}, "communicators[0].rank"),
        ("communicators", {"nsPid": 99}, "there is no GPU process 99"),
        ("communicators", {"id": None}, "communicators[0].id"),
        ("communicators", {"sequence": {"collectives": 1 << 60, "pointToPoint": 0}}, "collectives"),
        ("nvshmem", {"heap": ["7/77"]}, "7/77 is neither object nor import"),
        ("nvshmem", {"teams": "all"}, "nvshmem[0].teams"),
    ],
)
def test_an_entry_that_no_reader_would_take_is_left_out_and_noted(bare, notes, key, change, named):
    doc = told()
    doc[key][0] |= change
    made = with_groups(bare, NODE, doc, notes.append)
    left = made.communicators if key == "communicators" else made.nvshmem
    assert len(left) == len(doc[key]) - 1
    assert len(notes) == 1
    assert named in notes[0]
    assert Record.from_bytes(made.stamped().to_bytes())


def test_more_than_a_record_may_hold_is_cut(bare, notes):
    many = [communicators()[0].to_json()] * 8200
    made = with_groups(bare, NODE, {"communicators": many}, notes.append)
    assert len(made.communicators) == 8192
    assert any("8200" in note for note in notes)
