"""The chunk hasher on the software driver: ids equal to the `blake3` package, memory that is not there refused, PTX current.

The kernels run as C of the software driver here; that the PTX does the same is tests/gpu/test_blake3.py's to show.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from gpu_state.staging import build_kernel
from tests.gpu.blake3_checks import CHECKS
from tests.software_gpu.build import build
from tests.software_gpu.devices import make_devices

LOST_MEMORY = """
from tests.gpu.blake3_checks import Stage, call
from vgpu_errors import DriverCallFailed
stage = Stage()
with stage.memory(b"x" * 4096, room=0) as address:
    try:
        stage.hasher.hash(address, {length})
    except DriverCallFailed as problem:
        print(problem.fields["code"])
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    directory = tmp_path_factory.mktemp("software-gpu")
    make_devices(directory / "gpus", 1, 256 << 20, "blake3")
    (directory / "no-nodes").mkdir()
    return {
        **os.environ,
        "LD_LIBRARY_PATH": str(build()),
        "SOFTWARE_GPU_DIR": str(directory / "gpus"),
        "SOFTWARE_GPU_NODE_DIR": str(directory / "no-nodes"),
    }


def run(environment, *arguments):
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False, timeout=100
    )


@pytest.fixture(scope="module")
def results(environment):
    done = run(environment, "-m", "tests.gpu.blake3_checks")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", CHECKS)
def test_ids_are_right_for(results, name):
    assert results[name] == ""


def test_memory_that_is_not_there_is_an_error(environment):
    assert run(environment, "-c", LOST_MEMORY.format(length=10000)).stdout.strip() == "700"


def test_committed_ptx_is_that_of_the_source():
    assert build_kernel.faults() == []


def test_a_changed_source_is_noticed(tmp_path, monkeypatch):
    changed = tmp_path / "blake3.cu"
    changed.write_text(build_kernel.SOURCE.read_text().replace("#define TILE 256", "#define TILE 128"))
    monkeypatch.setattr(build_kernel, "SOURCE", changed)
    assert len(build_kernel.faults()) == 2
