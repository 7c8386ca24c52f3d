"""How the GPUs of a node are connected, through NVML: on the software GPUs, and with an NVML that tells less or nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_state.nvml import Nvml
from gpu_state.nvml_links import Link, links
from tests.software_gpu.build import build
from tests.software_gpu.devices import make_devices

ROOT = Path(__file__).parents[2]
LOOK = """
import json
from gpu_state.nvml import Nvml
from gpu_state.nvml_links import links
print(json.dumps([link.to_json() for link in links(Nvml.load())]))
"""
WORKER = """
import json
from gpu_state.deadline import Deadline
from gpu_state.driver_location import driver_folder
from gpu_state.remote_driver import RemoteDriver
from gpu_state.worker_pool import WorkerPool
pool = WorkerPool(driver_folder())
try:
    print(json.dumps([link.to_json() for link in RemoteDriver(pool).node(Deadline(60)).links]))
finally:
    pool.close()
"""


@pytest.fixture
def node(tmp_path):
    """Runs a program on four software GPUs; returns what it printed."""
    uuids = make_devices(tmp_path / "gpus", 4, 1 << 20, "links")
    (tmp_path / "no-nodes").mkdir()
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "LD_LIBRARY_PATH": str(build()),
        "SOFTWARE_GPU_DIR": str(tmp_path / "gpus"),
        "SOFTWARE_GPU_NODE_DIR": str(tmp_path / "no-nodes"),
    }

    def run(program, connections=""):
        (tmp_path / "gpus" / "links").write_text(connections)
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=100)
        assert done.returncode == 0, done.stderr
        found = [Link(**doc) for doc in json.loads(done.stdout)]
        return {(uuids.index(link.a), uuids.index(link.b)): link for link in found}

    return run


def test_every_pair_is_told_once(node):
    found = node(LOOK)
    assert sorted(found) == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    assert {(link.reads, link.writes, link.nvlinks, link.way) for link in found.values()} == {(True, True, 0, "node")}


def test_nvlinks_are_counted_directly_and_through_switches(node):
    found = node(LOOK, "0 1 1 4 0\n0 2 1 2 0\n1 3 0 0 0\n2 3 1 3 1\n")
    assert {pair: link.nvlinks for pair, link in found.items() if link.nvlinks} == {(0, 1): 4, (0, 2): 2, (2, 3): 3}
    assert [pair for pair, link in found.items() if not link.reaches] == [(1, 3)]


def test_the_driver_worker_brings_them_to_the_agent(node):
    found = node(WORKER, "0 1 1 18 1\n2 3 0 0 0\n")
    assert (found[0, 1].nvlinks, found[2, 3].reaches, found[0, 2].reaches) == (18, False, True)


class Partial:
    """An NVML with these calls; each fails that is not listed with what it writes."""

    def __init__(self, **calls):
        self.calls = calls

    def __getattr__(self, name):
        if name not in self.calls:
            raise AttributeError(name)
        return self.calls[name]


def writes(value):
    def call(*args):
        out = args[-1]._obj
        if isinstance(value, str):
            out.value = value.encode()
        else:
            out.value = value
        return 0

    return call


def handle_of(index, out):
    out._obj.value = index + 1
    return 0


def uuid_of(handle, text, _size):
    text.value = f"GPU-{handle.value}".encode()
    return 0


LISTED = {
    "nvmlDeviceGetCount_v2": writes(2),
    "nvmlDeviceGetHandleByIndex_v2": handle_of,
    "nvmlDeviceGetUUID": uuid_of,
}
NOT_SUPPORTED = {"nvmlDeviceGetP2PStatus": lambda *_: 3, "nvmlDeviceGetNvLinkState": lambda *_: 3}


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ({}, []),
        (LISTED, [Link("GPU-1", "GPU-2")]),
        (LISTED | NOT_SUPPORTED, [Link("GPU-1", "GPU-2")]),
        (LISTED | {"nvmlDeviceGetP2PStatus": writes(0)}, [Link("GPU-1", "GPU-2", True, True)]),
        (LISTED | {"nvmlDeviceGetP2PStatus": writes(1)}, [Link("GPU-1", "GPU-2", False, False)]),
        (LISTED | {"nvmlDeviceGetTopologyCommonAncestor": writes(50)}, [Link("GPU-1", "GPU-2", way="system")]),
        (LISTED | {"nvmlDeviceGetTopologyCommonAncestor": writes(7)}, [Link("GPU-1", "GPU-2")]),
        (LISTED | {"nvmlDeviceGetCount_v2": writes(1)}, []),
    ],
)
def test_what_nvml_does_not_tell_is_not_known(calls, expected):
    assert links(Nvml(Partial(**calls))) == expected


def test_a_pair_is_a_pair_of_peers_where_both_directions_hold():
    def one_way(a, _b, _what, status):
        status._obj.value = 0 if a.value == 1 else 4
        return 0

    (found,) = links(Nvml(Partial(**LISTED | {"nvmlDeviceGetP2PStatus": one_way})))
    assert (found.reads, found.writes, found.reaches) == (False, False, False)
