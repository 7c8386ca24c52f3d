"""The guard of a restore: ends what the pid file names when the shim is killed, and nothing else."""

import signal
import subprocess
import sys
import time

import pytest

from runtime_shim.guard import Guard, end_container

SHIM = """
import sys, time
from pathlib import Path
from runtime_shim.guard import Guard
pid_file, pid, stands_down = sys.argv[1:]
with Guard(pid_file) as guard:
    assert not Path(pid_file).exists(), "a pid file from before is still there"
    Path(pid_file).write_text(pid)
    if stands_down == "yes":
        guard.stand_down()
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def container():
    process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


def killed_shim(tmp_path, container, *, stands_down):
    pid_file = tmp_path / "pidfile"
    pid_file.write_text("1")
    words = [str(pid_file), str(container.pid), stands_down]
    shim = subprocess.Popen([sys.executable, "-c", SHIM, *words], stdout=subprocess.PIPE, text=True)
    assert shim.stdout.readline() == "held\n"
    shim.kill()
    shim.communicate(timeout=10)


def test_a_killed_shim_takes_the_container_along(tmp_path, container):
    killed_shim(tmp_path, container, stands_down="no")
    assert container.wait(timeout=10) == -signal.SIGKILL


def test_a_container_that_runs_outlives_the_shim(tmp_path, container):
    killed_shim(tmp_path, container, stands_down="yes")
    time.sleep(0.5)
    assert container.poll() is None


def test_the_end_of_the_block_ends_the_guard_alone(tmp_path, container):
    pid_file = tmp_path / "pidfile"
    with Guard(str(pid_file)) as guard:
        pid_file.write_text(str(container.pid))
    guard.stand_down()
    time.sleep(0.2)
    assert container.poll() is None


def test_without_a_pid_file_there_is_no_guard():
    with Guard(None):
        pass


@pytest.mark.parametrize("content", [None, "", "x", "999999999"])
def test_a_pid_file_that_names_nobody_is_passed_over(tmp_path, content):
    pid_file = tmp_path / "pidfile"
    if content is not None:
        pid_file.write_text(content)
    end_container(str(pid_file))
