"""The NRI plugin on containerd's own socket: pods of the ordinary handler get the preload library, `ctr` and others do not."""

from __future__ import annotations

import contextlib
import json
import signal
import time

import pytest

from tests.engines.nri_pods import Pod, prepare_cri
from tests.engines.prepared import prepare
from tests.hosts.host import TestHost
from tests.hosts.rows import is_wanted
from vgpu_errors import VgpuError

ROW = "testing"  # containerd 2 has NRI on without being asked
pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(120),
    pytest.mark.host_rows(ROW),
    pytest.mark.skipif(not is_wanted(ROW), reason="VGPU_ROWS leaves the row out"),
]
LOG = "/var/log/nri-plugin.log"
COUNTER = ("counter", "--out", "/tmp/steps", "--mib", "4", "--interval", "50")
LIBRARY = "/run/vgpu-preload/libvgpu.so"


@pytest.fixture(scope="module")
def node():
    with TestHost(ROW, "nri-node") as host:
        prepare(host, images=(), memory=128 << 20)
        prepare_cri(host)
        host.daemon(["vgpu", "nri"], log=LOG)
        wait_for(host, "serves containerd")
        yield host


@pytest.fixture
def pods(node):
    """Makes pods that are gone after the test."""
    made = []

    def make(name, **settings):
        made.append(Pod(node, name, **settings))
        return made[-1]

    yield make
    for pod in made:
        pod.remove()


def wait_for(host, words, *, after=0, timeout=15):
    ends = time.monotonic() + timeout
    while words not in (text := host.read(LOG)[after:]):
        assert time.monotonic() < ends, f"no {words!r} in the plugin's log:\n{text}"
        time.sleep(0.05)


def stored_spec(pod):
    """As containerd keeps it, and would put it into a checkpoint."""
    found = pod.host.run(["ctr", "-n", "k8s.io", "container", "info", pod.container]).stdout
    return json.loads(found)["Spec"]


def test_a_gpu_pod_runs_with_the_preload_library(pods):
    pod = pods("gpu").start(*COUNTER)
    assert pod.wait_for_line("/tmp/steps", "step 3").count(" ok") >= 3
    assert f"LD_PRELOAD={LIBRARY}" in pod.exec("cat", "/proc/1/environ")
    assert LIBRARY in pod.exec("cat", "/proc/1/maps")
    spec = stored_spec(pod)
    assert spec["annotations"]["vgpu.snapshot/preload-libc"] == "glibc"
    assert LIBRARY in [mount["destination"] for mount in spec["mounts"]]


def test_a_process_of_kubectl_exec_has_it_too(pods):
    pod = pods("exec").start(*COUNTER)
    assert f"LD_PRELOAD={LIBRARY}" in pod.exec("env")


def test_the_agent_knows_it_and_suspends_it(node, pods):
    pod = pods("known").start(*COUNTER)
    pod.wait_for_line("/tmp/steps", "step 2")
    listed = json.loads(node.run(["vgpu", "ps", "--json"]).stdout)
    assert pod.container in json.dumps(listed)
    node.run(["vgpu", "suspend", pod.container])
    before = pod.exec("cat", "/tmp/steps")
    time.sleep(0.3)
    assert pod.exec("cat", "/tmp/steps") == before
    node.run(["vgpu", "resume", pod.container])
    steps = len(before.splitlines())
    assert "ok" in pod.wait_for_line("/tmp/steps", f"step {steps + 2} ")


def test_nothing_is_left_of_a_removed_pod(node):
    pod = Pod(node, "gone").start(*COUNTER)
    identifier = pod.container
    assert identifier in node.run(["ls", "/run/vgpu/containers"]).stdout
    pod.remove()
    node.wait_for(["sh", "-c", f"! ls /run/vgpu/containers /run/vgpu/state | grep -q {identifier}"], timeout=10)


@pytest.mark.parametrize(
    ("gpu", "annotations"),
    [(False, {}), (True, {"vgpu.snapshot/inject": "false"})],
    ids=["no GPU", "switched off"],
)
def test_others_are_left_alone(pods, gpu, annotations):
    pod = pods("plain", annotations=annotations).start("sleep", "60", gpu=gpu)
    assert "LD_PRELOAD" not in pod.exec("env")
    assert not [mount for mount in stored_spec(pod)["mounts"] if "vgpu" in mount["destination"]]


def test_a_pod_that_asks_without_a_gpu_gets_it(pods):
    pod = pods("asks", annotations={"vgpu.snapshot/inject": "true"}).start("sleep", "60", gpu=False)
    assert f"LD_PRELOAD={LIBRARY}" in pod.exec("env")


def test_a_pod_that_asks_and_cannot_have_it_is_refused(node, pods):
    """No build fits: the answer of a plugin that fails must reach the pod's events."""
    pod = pods("refused", annotations={"vgpu.snapshot/inject": "true"})
    current = "/usr/lib/vgpu-snapshot/preload/glibc/current"
    before = node.read(current)
    node.write(current, "not a build\n")
    try:
        with pytest.raises(VgpuError, match="asks for the preload library"):
            pod.create(*COUNTER)
        pods("goes-on").start(*COUNTER)
    finally:
        node.write(current, before)


def test_it_comes_back_when_containerd_restarts(node, pods):
    at = len(node.read(LOG))
    node.run(["pkill", "-TERM", "-x", "containerd"])
    wait_for(node, "closed the connection", after=at)
    node.start_containerd()
    wait_for(node, "serves containerd", after=at)
    assert f"LD_PRELOAD={LIBRARY}" in pods("after").start(*COUNTER).exec("env")


def test_a_plugin_that_is_killed_costs_no_pod(node, pods):
    node.run(["pkill", f"-{signal.SIGKILL}", "-f", "vgpu nri"], check=False)
    pod = pods("without").start(*COUNTER)
    pod.wait_for_line("/tmp/steps", "step 2")
    assert "LD_PRELOAD" not in pod.exec("env")
    at = len(node.read(LOG))
    node.daemon(["vgpu", "nri"], log=LOG)
    with contextlib.suppress(AssertionError):
        wait_for(node, "serves containerd", after=at if at < len(node.read(LOG)) else 0)
    assert "LD_PRELOAD" in pods("again").start(*COUNTER).exec("env")
