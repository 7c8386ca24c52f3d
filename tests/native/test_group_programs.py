"""The group program (tests/software_gpu/programs/ring.c) alone on the software driver: every mode is right, and notices what is wrong.

What the tests of groups rest on: that its lines say "ok" only where the content is. No preload, no agent; no GPU result.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.software_gpu import devices
from tests.software_gpu.build import DRIVER, PROGRAMS, build

LINE = re.compile(r"rank (\d+) step (\d+) sum [0-9a-f]+ ok")
MODES = (
    ("ring", "fd", 4),
    ("ring", "handle", 2),
    ("ring", "mixed", 8),
    ("graph", "mixed", 4),
    ("guests", "mixed", 4),
    ("server", "fd", 4),
    ("server", "handle", 3),
    ("pipeline", "mixed", 4),
    ("outlive", "fd", 3),
)


@pytest.fixture
def group(tmp_path):
    """Starts the program on four software GPUs; everything is ended afterwards."""
    environment = {
        "PATH": os.environ["PATH"],
        "LD_LIBRARY_PATH": str(build()),
        "SOFTWARE_GPU_DIR": str(tmp_path / "gpus"),
        "SOFTWARE_GPU_NODE_DIR": str(tmp_path),
    }
    devices.make_devices(tmp_path / "gpus", 4, 128 << 20, salt="group")
    started = []

    def start(mode, *options):
        command = [str(build() / "ring"), "--out", str(tmp_path / "out"), "--mode", mode, "--interval", "2", *options]
        started.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=20)


def steps(tmp_path):
    """Rank -> the steps it has told."""
    found: dict[int, list[int]] = {}
    out = tmp_path / "out"
    for line in out.read_text().splitlines() if out.exists() else ():
        match = LINE.fullmatch(line)
        assert match, line
        found.setdefault(int(match[1]), []).append(int(match[2]))
    return found


def wait_for(condition, within_s=15):
    ends_at = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < ends_at, "waited in vain"
        time.sleep(0.01)


@pytest.mark.parametrize(("mode", "share", "ranks"), MODES)
def test_every_rank_gets_to_the_end_and_finds_what_it_must(group, tmp_path, mode, share, ranks):
    options = ["--share", share, "--ranks", str(ranks), "--devices", str(min(ranks, 4)), "--step-limit", "20"]
    process = group(mode, *options, "--epoch", "5", "--ahead", "2")
    assert process.wait(30) == 0, process.stderr.read()
    told = steps(tmp_path)
    assert set(told) == set(range(1 if mode == "outlive" else 0, ranks))
    assert {each[-1] for each in told.values()} == {20}


def test_launches_that_find_no_room_wait_for_the_slow_rank(group, tmp_path):
    process = group("ring", "--ranks", "2", "--ahead", "120", "--step-limit", "240", "--interval", "1")
    assert process.wait(30) == 0, process.stderr.read()
    assert steps(tmp_path)[1] == [120, 240]


def test_the_ranks_of_a_fork_server_work_beside_a_second_stream(group, tmp_path):
    process = group("ring", "--fork-server", "1", "--beat", "2", "--step-limit", "20")
    assert process.wait(30) == 0, process.stderr.read()
    assert {line.split(" beat ")[0] for line in (tmp_path / "out.beat").read_text().splitlines()} == {
        f"rank {n}" for n in range(4)
    }


@pytest.mark.parametrize("mode", ["ring", "graph", "server", "pipeline", "outlive"])
def test_one_wrong_byte_in_shared_memory_is_noticed(group, tmp_path, mode):
    """Whole words of what is shared are changed behind its back, again and again, until a rank stumbles."""
    process = group(mode, "--ranks", "3")
    wait_for(lambda: len(steps(tmp_path)) >= 2)
    mapping = next(line for line in rank_maps(process.pid) if "software-gpu:" in line[1] and line[2] >= 2 << 20)
    pid, _, size, start = mapping
    wait_for(lambda: spoil(pid, start, size) or process.poll() is not None)
    assert process.wait(20) != 0
    assert "WRONG" in (tmp_path / "out").read_text()


def rank_maps(parent):
    """Shared device memory of the last rank: pid, name, size, address."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    for line in Path(f"/proc/{children[-1]}/maps").read_text().splitlines():
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        yield int(children[-1]), line, end - start, start


def spoil(pid, start, size):
    """One word in each page of the first half of a mapping; the flags lie in the second."""
    try:
        with Path(f"/proc/{pid}/mem").open("r+b", buffering=0) as memory:
            for place in range(start + 8, start + size // 2, 4096):
                memory.seek(place)
                memory.write(b"spoiled!")
    except OSError:
        return True  # the process has ended
    return False


def test_a_rank_that_stalls_keeps_all_waiting_until_it_goes_on(group, tmp_path):
    group("ring", "--stall-rank", "2", "--stall-step", "5", "--share", "handle")
    wait_for(lambda: all(each[-1] == 4 for each in steps(tmp_path).values()) and len(steps(tmp_path)) == 4)
    time.sleep(0.1)
    assert max(each[-1] for each in steps(tmp_path).values()) == 4
    (tmp_path / "out.go").touch()
    wait_for(lambda: min(each[-1] for each in steps(tmp_path).values()) > 10)


@pytest.mark.skipif(not shutil.which("gcc"), reason="needs gcc")
def test_the_program_compiles_with_an_ordinary_compiler(tmp_path):
    flags = ["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter", f"-I{DRIVER}", "-pthread"]
    command = ["gcc", *flags, str(PROGRAMS / "ring.c"), "-o", str(tmp_path / "ring"), "-ldl"]
    subprocess.run(command, check=True, timeout=60)
