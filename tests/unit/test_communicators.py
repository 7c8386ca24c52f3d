"""What the agent believes of COMMUNICATORS_ARE, and what it refuses (spec/preload-protocol.md)."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path

import pytest

from gpu_state.communicators import MAX_COMMUNICATORS, MAX_TEAMS, Communicators
from gpu_state.preload_frames import FrameError
from image_format.communicators import Communicator as RecordedCommunicator
from image_format.communicators import ShmemElement
from image_format.fields import Fields

UUID = "GPU-00102030-4050-6070-8090-a0b0c0d0e0f0"
PAGE = Path(__file__).parents[2] / "spec/preload-protocol.md"


@pytest.fixture
def answer():
    page = PAGE.read_text().partition("### COMMUNICATORS")[2]
    return json.loads(re.search(r"```json\n(.*?)```", page, re.DOTALL)[1])


def test_the_pages_example_reads_and_writes_back(answer):
    read = Communicators.from_json(answer)
    assert read.to_json() == answer
    assert read.communicators[1].parent == read.communicators[0].id
    assert (read.communicators[1].color, read.communicators[1].key) == (1, 0)
    assert read.nvshmem[0].teams[0].parent == "world"


def test_the_record_takes_what_is_told_once_process_and_device_are_named(answer):
    read = Communicators.from_json(answer)
    more = {"nsPid": 7, "uuid": UUID}
    for entry in read.communicators:
        assert RecordedCommunicator.from_json(Fields(entry.to_json() | more, "it")).id == entry.id
    for element in read.nvshmem:
        assert ShmemElement.from_json(Fields(element.to_json() | more | {"heap": []}, "it")).pe == element.pe


def test_members_that_came_later_are_ignored_and_absent_ones_mean_none(answer):
    later = answer | {"more": 1}
    later["communicators"] = [entry | {"later": []} for entry in answer["communicators"]]
    assert Communicators.from_json(later) == Communicators.from_json(answer)
    assert Communicators.from_json({}) == Communicators()


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("communicators", {}),
        ("communicators.0", None),
        ("communicators.0.rank", 2),  # of 2
        ("communicators.0.rank", -1),
        ("communicators.0.rank", True),
        ("communicators.0.size", "2"),
        ("communicators.0.size", 1 << 60),
        ("communicators.0.id", "A" * 32),
        ("communicators.0.id", "a" * 31),
        ("communicators.0.device", None),
        ("communicators.0.library", 'nccl"'),
        ("communicators.0.version", ""),
        ("communicators.0.sequence", []),
        ("communicators.0.sequence.collectives", -1),
        ("communicators.1.parent", ""),
        ("communicators.1.split", 7),
        ("communicators.1.split.color", -1),
        ("communicators.1.split.key", 0.5),
        ("nvshmem", [{}, {}]),
        ("nvshmem.0.pe", 4),
        ("nvshmem.0.device", -1),
        ("nvshmem.0.teams.0.name", "a\nb"),
        ("starting", -1),
        ("unlisted", "many"),
    ],
)
def test_what_cannot_be_is_refused(path, value, answer):
    spoilt = copy.deepcopy(answer)
    *way, last = [int(step) if step.isdigit() else step for step in path.split(".")]
    place = spoilt
    for step in way:
        place = place[step]
    place[last] = value
    with pytest.raises(FrameError):
        Communicators.from_json(spoilt)


def test_lists_beyond_their_limits_are_refused(answer):
    one, element = answer["communicators"][0], answer["nvshmem"][0]
    Communicators.from_json({"communicators": [one] * MAX_COMMUNICATORS})
    with pytest.raises(FrameError, match="1025 communicators"):
        Communicators.from_json({"communicators": [one] * (MAX_COMMUNICATORS + 1)})
    with pytest.raises(FrameError, match="teams"):
        Communicators.from_json({"nvshmem": [element | {"teams": element["teams"] * (MAX_TEAMS + 1)}]})
