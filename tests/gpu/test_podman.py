"""The main job on this machine's GPU, end to end, as `make gpu-demo` shows it."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.mark.gpu
@pytest.mark.timeout(400)
def test_pytorch_container_is_exported_imported_left_running_and_a_tampered_archive_refused():
    assert os.geteuid() == 0, "test hosts need root"
    command = [sys.executable, "-m", "tests.gpu.podman_run", "--gib", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=390, check=False)
    assert done.stdout.rstrip().endswith("gpu-demo: ok"), done.stdout[-4000:] + done.stderr[-4000:]
