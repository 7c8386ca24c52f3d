"""The ids that a real GPU makes are those of the `blake3` package."""

import json
import subprocess
import sys

import pytest

from tests.gpu.blake3_checks import CHECKS

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def results():
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.blake3_checks"], capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", CHECKS)
def test_ids_are_right_for(results, name):
    assert results[name] == ""
