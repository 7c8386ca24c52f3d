"""Fuzzes every parser of the table: whatever the input, only the errors named there come out, in bounded time and memory."""

import pytest

from tests.fuzz.entry_points import NOT_FUZZED, REACHED, entry_points
from tests.fuzz.mutations import EXTRA_SECONDS, TARGET_COUNT, bounded, fuzz
from tests.fuzz.targets import TARGETS
from vgpu_errors import VgpuError

pytestmark = pytest.mark.timeout(0 if EXTRA_SECONDS else 120)


@pytest.mark.parametrize("name", TARGETS)
def test_a_parser_fails_only_as_it_says(name):
    target = TARGETS[name]
    bounded(lambda: target.parse(target.seed), ())

    def check(given):
        outcome = bounded(lambda: target.parse(given), target.allowed)
        if isinstance(outcome, VgpuError):
            assert outcome.message
            assert outcome.exit_code >= 10
            assert "{" not in type(outcome).__doc__ or outcome.fields

    fuzz(check, target.inputs())


def test_every_parser_of_the_project_has_a_target_or_a_reason():
    listed = {point for points in REACHED.values() for point in points} | set(NOT_FUZZED)
    assert sorted(entry_points() - listed) == [], "give it a target, or a reason in tests/fuzz/entry_points.py"
    assert sorted(listed - entry_points()) == [], "is not there any more"


def test_every_target_that_is_named_is_there():
    assert set(REACHED) <= set(TARGETS)
    assert not {point for points in REACHED.values() for point in points} & set(NOT_FUZZED)


def test_the_time_is_shared_out_between_all_targets():
    assert len(TARGETS) < TARGET_COUNT
