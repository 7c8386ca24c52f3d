"""The real driver still answers the checkpoint calls as it did when the software driver was made after it."""

import pytest

from tests.gpu import conformance


@pytest.mark.gpu
def test_real_driver_gives_the_recorded_answers():
    assert conformance.answers() == conformance.EXPECTED
