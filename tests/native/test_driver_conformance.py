"""The software driver answers every checkpoint call as the real driver was seen to answer it."""

import os
import pathlib
import subprocess
import sys

from tests.software_gpu import build

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_software_driver_gives_the_real_drivers_answers(tmp_path):
    driver = build.build(ROOT / "build" / "software_gpu")
    env = os.environ | {
        "LD_LIBRARY_PATH": str(driver),
        "SOFTWARE_GPU_DIR": str(tmp_path / "gpu"),
        "SOFTWARE_GPU_COUNT": "1",
        "SOFTWARE_GPU_MEMORY": str(64 << 20),
        "SOFTWARE_GPU_NODE_DIR": str(tmp_path / "dev"),
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.conformance"],
        env=env,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
