"""What a containerd user does with a GPU container through `ctr`: checkpoint while it goes on, checkpoint and end, restore.

containerd pauses the container before it calls the runtime; the shim has to lift the pause, and to leave the cgroup as
it was found. The low-level runtime is runc on both rows: containerd's `-no-subreaper` is no option of crun's.
"""

from __future__ import annotations

import pathlib
import subprocess
import time

import pytest

from tests.engines.ctr_container import RUNC, CtrContainer
from tests.engines.prepared import configured

pytestmark = [pytest.mark.engines, pytest.mark.timeout(180)]


@pytest.fixture(scope="session")
def containerd(node):
    """The node with containerd and the image in it."""
    node.start_containerd()
    node.run(["ctr", "image", "import", node.image_archive("glibc")])
    return node


@pytest.fixture
def container(containerd, request):
    """A running GPU container of the test's own name; containerd 1.7 stumbles over equal content of two checkpoints."""
    name = request.node.originalname.removeprefix("test_")[:40].strip("_")
    with configured(containerd, low_level_runtime=RUNC):
        started = CtrContainer(containerd, name).start()
        started.wait_for_step(3)
        yield started
        started.remove()
        containerd.run(["sh", "-c", "ctr image ls -q | grep -v vgpu-test | xargs -r ctr image rm --sync"])


def test_the_preload_is_in_the_container_and_not_in_its_config(container):
    assert "LD_PRELOAD=/run/vgpu-preload/libvgpu.so" in container.exec("env").stdout
    bundle = f"run/containerd/io.containerd.runtime.v2.task/default/{container.name}/config.json"
    assert "vgpu-preload" not in pathlib.Path(container.node.root, bundle).read_text()


def test_a_checkpoint_leaves_it_running_and_thawed(container):
    step = container.step()
    container.task("checkpoint")
    assert container.status() == "RUNNING"
    assert not container.is_frozen()
    container.goes_on(step)


def test_a_checkpoint_to_a_path_is_sealed(container):
    step = container.step()
    container.task("checkpoint", "--image-path", "/var/tmp/ctr-image", "--work-path", "/var/tmp/ctr-work")
    container.node.run(["vgpu", "verify", "/var/tmp/ctr-image"])
    container.goes_on(step)
    container.node.run(["rm", "-rf", "/var/tmp/ctr-image", "/var/tmp/ctr-work"])


def test_a_checkpoint_with_exit_ends_it(container):
    container.task("checkpoint", "--exit")
    assert container.status() == "STOPPED"
    assert container.node.run(["ls", "/run/vgpu/state"]).stdout == ""


def test_checkpoint_and_restore_live(container):
    node, step = container.node, container.step()
    checkpoint = ["ctr", "container", "checkpoint", "--image", "--task", "--rw", container.name, "localhost/frozen:1"]
    node.run(checkpoint, timeout=90)
    container.goes_on(step)
    container.remove()
    restored = CtrContainer(node, "restored")
    try:
        node.run(["ctr", "container", "restore", "--live", "--rw", "restored", "localhost/frozen:1"], timeout=90)
        assert restored.status() == "RUNNING"
        assert not restored.is_frozen()
        step = restored.goes_on(step)
        assert "LD_PRELOAD=/run/vgpu-preload/libvgpu.so" in restored.exec("env").stdout
        if node.row == "testing":  # runc 1.1 of trixie cannot checkpoint a container that was restored
            restored.task("checkpoint")
            restored.goes_on(step)
    finally:
        restored.remove()


def test_a_container_that_its_user_paused_stays_paused(container):
    """The engine's pause and the user's look alike: the cgroup is left as it was found."""
    step = container.step()
    container.task("pause")
    assert container.is_frozen()
    container.node.run(
        [
            *("/usr/bin/vgpu-runtime", "--root", "/run/containerd/runc/default", "checkpoint", "--leave-running"),
            *("--image-path", "/var/tmp/ctr-image", "--work-path", "/var/tmp/ctr-work", container.name),
        ]
    )
    assert container.is_frozen()
    container.node.run(["vgpu", "verify", "/var/tmp/ctr-image"])
    container.task("resume")
    container.goes_on(step)
    container.node.run(["rm", "-rf", "/var/tmp/ctr-image", "/var/tmp/ctr-work"])


def test_a_failed_checkpoint_leaves_it_running_and_thawed(container):
    """The reason reaches ctr through containerd's own log file."""
    step, node = container.step(), container.node
    node.run(["pkill", "-STOP", "-f", "^counter"])
    try:
        done = container.task("checkpoint", check=False)
    finally:
        node.run(["pkill", "-CONT", "-f", "^counter"])
    assert done.returncode != 0
    assert "(counter)" in done.stderr
    assert not container.is_frozen()
    container.goes_on(step)


def test_a_runtime_that_containerd_kills_leaves_nothing_frozen(container):
    """The agent undoes what the shim had begun, and containerd's resume finds the container running."""
    node, step = container.node, container.step()
    node.write("/usr/local/bin/slow-runc", SLOW, 0o755)
    with configured(node, low_level_runtime="/usr/local/bin/slow-runc"):
        process = node.popen(
            ["ctr", "task", "checkpoint", container.name], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        node.wait_for(["test", "-e", "/run/slow"])
        process.kill()
        process.wait(timeout=10)
        node.run(["pkill", "-KILL", "-o", "-f", "^/usr/bin/python3 -IS /usr/bin/vgpu-runtime .*checkpoint "])
    ends = time.monotonic() + 10
    while container.status() != "RUNNING" and time.monotonic() < ends:
        time.sleep(0.05)
    assert container.status() == "RUNNING"
    assert not container.is_frozen()
    container.goes_on(step)


SLOW = f"""\
#!/bin/sh
case " $* " in *" checkpoint "*) touch /run/slow; exec sleep 20 ;; esac
exec {RUNC} "$@"
"""
