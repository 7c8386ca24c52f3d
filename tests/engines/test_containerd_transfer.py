"""`ctr`'s own checkpoint images on their way to another node: as a file and through a registry, on containerd 2.1 and 1.7.

Also what containerd hands to the runtime at a restore, and staged mode.
"""

from __future__ import annotations

import json

import pytest

from tests.engines.ctr_container import IMAGE, RUNC, CtrContainer
from tests.engines.prepared import configured, trust

pytestmark = [pytest.mark.engines, pytest.mark.timeout(180)]

FILE = "/var/tmp/frozen.tar"
STAGED = ["--annotation", "vgpu.snapshot/mode=staged"]


@pytest.fixture(scope="module")
def two_nodes(nodes, registry):
    """Both nodes with containerd and the image, which `ctr container restore` wants under its own name."""
    first, second = nodes
    for node in nodes:
        node.start_containerd()
        node.run(["ctr", "image", "import", node.image_archive("glibc")])
    trust(second, first)
    with configured(first, low_level_runtime=RUNC), configured(second, low_level_runtime=RUNC):
        yield first, second, f"{registry}/frozen:1"


@pytest.fixture
def counter(two_nodes, request):
    """A running container of the test's own name: content of two checkpoints must differ for containerd 1.7."""
    name = request.node.originalname.removeprefix("test_")[:40].strip("_")
    container = CtrContainer(two_nodes[0], name).start()
    container.wait_for_step(3)
    yield container
    for node in two_nodes[:2]:
        for one in (name, "restored"):
            CtrContainer(node, one).remove()
        node.run(["sh", "-c", "ctr image ls -q | grep -v vgpu-test | xargs -r ctr image rm --sync"])
        node.run(["sh", "-c", f"rm -rf {FILE} /tmp/ctrd-checkpoint*"])


def freeze(container, reference):
    """`ctr container checkpoint` with all that it can take along; returns the last step before it."""
    step = container.step()
    container.ctr("container", "checkpoint", "--rw", "--image", "--task", container.name, reference)
    container.goes_on(step)
    return step


def restore_with_ctr(node, reference):
    node.run(["ctr", "container", "restore", "--rw", "--live", "restored", reference], timeout=90)
    return CtrContainer(node, "restored")


def checkpoint_again(container):
    """A restored container can be checkpointed like any other, where its runc can."""
    if container.node.row == "testing":  # runc 1.1 of trixie cannot
        step = container.step()
        container.task("checkpoint")
        container.goes_on(step)


def test_file_carries_it_to_the_second_node(counter, two_nodes):
    first, second, reference = two_nodes
    step = freeze(counter, reference)
    first.run(["ctr", "image", "export", "--skip-manifest-json", FILE, reference])
    verified = json.loads(first.run(["vgpu", "verify", FILE, "--json"]).stdout)
    assert (verified["kind"], verified["trusted"]) == ("containerd archive", True)
    first.copy_to(second, FILE)
    second.run(["ctr", "image", "import", "--no-unpack", FILE])
    restored = restore_with_ctr(second, reference)
    restored.goes_on(step)
    checkpoint_again(restored)


def test_registry_carries_it_to_the_second_node(counter, two_nodes):
    first, second, reference = two_nodes
    step = freeze(counter, reference)
    first.run(["ctr", "image", "push", "--plain-http", reference], timeout=90)
    second.run(["ctr", *fetch(second), "--plain-http", reference], timeout=90)
    restored = restore_with_ctr(second, reference)
    restored.goes_on(step)
    checkpoint_again(restored)


@pytest.mark.first_row
def test_restore_pulls_what_containerd_does_not_have(counter, two_nodes):
    """One command on the second node, which has neither the checkpoint nor the container's image."""
    first, second, reference = two_nodes
    step = counter.step()
    first.run(["vgpu", "containerd", "checkpoint", counter.name, reference], timeout=90)
    first.run(["ctr", "image", "push", "--plain-http", reference], timeout=90)
    second.run(["sh", "-c", "ctr image ls -q | xargs -r ctr image rm --sync"])
    second.run(["vgpu", "containerd", "restore", "--plain-http", reference, "restored"], timeout=90)
    restored = CtrContainer(second, "restored")
    restored.goes_on(step)
    assert second.run(["ctr", "image", "ls", "-q"]).stdout.split() == [IMAGE]
    assert second.run(["sh", "-c", "ls -A /var/lib/vgpu/containerd; ctr leases ls -q"]).stdout == ""
    checkpoint_again(restored)
    restored.remove()
    done = second.run(["vgpu", "containerd", "restore", "--plain-http", f"{reference}0", "restored"], check=False)
    assert done.returncode == 73
    assert f"containerd has no image {reference}0, so it was asked for in its registry" in done.stderr


def fetch(node):
    """containerd 1.7's pull unpacks, and stumbles over a checkpoint; its fetch does not."""
    return ["image", "pull"] if node.row == "testing" else ["content", "fetch"]


@pytest.mark.first_row
def test_a_node_that_does_not_trust_the_maker_refuses(counter, two_nodes):
    first, second, reference = two_nodes
    freeze(counter, reference)
    first.run(["ctr", "image", "export", "--skip-manifest-json", FILE, reference])
    first.copy_to(second, FILE)
    second.run(["mv", "/etc/vgpu/trusted", "/etc/vgpu/trusted.off"])
    try:
        done = second.run(["vgpu", "containerd", "restore", "--import", FILE, "restored"], check=False, timeout=90)
    finally:
        second.run(["mv", "/etc/vgpu/trusted.off", "/etc/vgpu/trusted"])
    assert done.returncode == 33
    assert "which this node does not trust" in done.stderr
    assert CtrContainer(second, "restored").status() == "GONE"


def test_the_runtime_gets_what_containerd_says_and_ends_with_it(counter, two_nodes):
    """`-no-subreaper` with a single dash reaches runc; a runtime whose parent dies is killed by the kernel."""
    first, _, reference = two_nodes
    step = freeze(counter, reference)
    counter.remove()
    first.write("/usr/local/bin/telling-runc", TELLING, 0o755)
    first.run(["rm", "-f", "/run/told"])
    with configured(first, low_level_runtime="/usr/local/bin/telling-runc"):
        restore_with_ctr(first, reference).goes_on(step)
    words = first.read("/run/told").split()
    assert "-no-subreaper" in words
    assert "Signal=9" in words  # PR_SET_PDEATHSIG of the low-level runtime, as the shim's own


TELLING = f"""\
#!/usr/bin/python3 -IS
import ctypes, os, sys
if "restore" in sys.argv:
    signal = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(signal), 0, 0, 0)
    with open("/run/told", "a") as file:
        print(*sys.argv, f"Signal={{signal.value}}", file=file)
os.execv("{RUNC}", ["{RUNC}", *sys.argv[1:]])
"""


def test_staged_mode_under_containerd(two_nodes, request):
    first, second, _ = two_nodes
    container = CtrContainer(first, "staged").start(*STAGED)
    try:
        container.wait_for_step(3)
        step = container.step()
        container.task("checkpoint")
        step = container.goes_on(step)
        assert not container.is_frozen()
        first.run(["vgpu", "containerd", "checkpoint", "staged", "--export", FILE], timeout=90)
        record = json.loads(first.run(["vgpu", "inspect", FILE, "--json"]).stdout)["record"]
        assert record["mode"] == "staged"
        assert sum(held["size"] for held in record["processes"][0]["objects"]) >= 8 << 20
        first.copy_to(second, FILE)
        second.run(["vgpu", "containerd", "restore", "--import", FILE, "restored"], timeout=90)
        CtrContainer(second, "restored").goes_on(step)
    finally:
        container.remove()
        CtrContainer(second, "restored").remove()
        for node in (first, second):
            node.run(["sh", "-c", f"ctr image ls -q | grep -v vgpu-test | xargs -r ctr image rm --sync; rm -f {FILE}"])
