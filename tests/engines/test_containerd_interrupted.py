"""Ctrl-C and SIGTERM in the middle of `vgpu containerd checkpoint|restore`: what was begun is undone, whatever the moment.

The moments: the low-level runtime is at work, which cannot be called off; the container has ended and is being stored.
"""

from __future__ import annotations

import subprocess
import time

import pytest

from tests.engines.ctr_container import RUNC, CtrContainer
from tests.engines.prepared import configured

pytestmark = [pytest.mark.engines, pytest.mark.timeout(120)]

REFERENCE = "localhost/frozen:1"
FILE = "/var/tmp/interrupted.tar"
PARTIAL = "/var/tmp/.interrupted.tar.partial"
SLOW_RUNC = "/usr/local/bin/slow-runc"
# At work for longer than the 2 s after which containerd gives up asking the shim for a task's state.
SLOW = f"""\
#!/bin/sh
case " $* " in *" --image-path "*) echo "$$" >/run/at-work; sleep 2.2 ;; esac
exec {RUNC} "$@"
"""


@pytest.fixture(scope="module")
def machine(node):
    node.start_containerd()
    node.run(["ctr", "image", "import", node.image_archive("glibc")])
    node.write(SLOW_RUNC, SLOW, 0o755)
    return node


@pytest.fixture
def slow(machine):
    """Checkpoints and restores of the low-level runtime take their time."""
    machine.run(["rm", "-f", "/run/at-work"])
    with configured(machine, low_level_runtime=SLOW_RUNC):
        yield machine


@pytest.fixture
def counter(machine):
    with configured(machine, low_level_runtime=RUNC):
        container = CtrContainer(machine, "counter").start()
        container.wait_for_step(3)
        yield container
        for name in ("counter", "again"):
            CtrContainer(machine, name).remove()
    machine.run(["sh", "-c", "ctr image ls -q | grep -v vgpu-test | xargs -r ctr image rm --sync"])
    machine.run(["sh", "-c", f"rm -rf {FILE} {PARTIAL} /tmp/ctrd-checkpoint*"])


def interrupted(node, words, is_the_moment, *signals):
    """Run the command, send the signals at the moment; its status and what it said."""
    process = node.popen(["vgpu", "containerd", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    node.wait_for(["sh", "-c", is_the_moment], interval=0.02)
    for name in signals:
        node.run(["pkill", f"-{name}", "-f", f"vgpu containerd {words[0]}"])
        time.sleep(0.3)  # a second one comes in the middle of the undo
    _, said = process.communicate(timeout=60)
    return process.returncode, said


def nothing_is_left(node, *, snapshots=("counter",)):
    assert node.run(["ctr", "leases", "ls", "-q"]).stdout == ""
    assert node.run(["sh", "-c", "ls -A /var/lib/vgpu/containerd"]).stdout == ""
    listed = [line.split()[0] for line in node.run(["ctr", "snapshot", "ls"]).stdout.splitlines()[1:]]
    assert sorted(name for name in listed if not name.startswith("sha256:")) == sorted(snapshots)
    assert REFERENCE not in node.run(["ctr", "image", "ls", "-q"]).stdout.split()


@pytest.mark.first_row
def test_ctrl_c_while_the_runtime_is_at_work_leaves_the_container_running(counter, slow):
    step = counter.step()
    code, said = interrupted(slow, ("checkpoint", "counter", REFERENCE, "-R"), "test -e /run/at-work", "INT")
    assert code == 130, said
    it_runs_as_before(counter, step, said)


def test_a_container_that_the_runtime_ends_all_the_same_is_started_again(counter, slow):
    """The runtime cannot be called off; further signals come in the middle of the undo."""
    step = counter.step()
    words = ("checkpoint", "counter", REFERENCE)
    code, said = interrupted(slow, words, "test -e /run/at-work", "TERM", "TERM", "INT")
    assert code == 143, said
    it_runs_as_before(counter, step, said)


def it_runs_as_before(counter, step, said):
    assert "what was begun is undone" in said
    assert "note:" not in said
    assert counter.status() == "RUNNING"
    assert not counter.is_frozen()
    counter.goes_on(step)
    nothing_is_left(counter.node)


@pytest.mark.first_row
def test_a_checkpoint_that_is_ended_while_it_stores_brings_the_container_back(counter, machine):
    step = counter.step()
    machine.run(["mkfifo", PARTIAL])  # the export blocks here
    code, said = interrupted(
        machine, ("checkpoint", "counter", "--export", FILE), "ctr task ls | grep -q STOPPED", "HUP"
    )
    assert code == 129, said
    counter.goes_on(step)
    nothing_is_left(machine)
    # The pipe itself is the test's own, and is still there where the signal came before the export had begun.
    assert machine.run(["find", "/var/tmp", "-name", "*interrupted*", "-type", "f"]).stdout == ""
    machine.run(["rm", "-f", PARTIAL])


@pytest.mark.first_row
def test_a_restore_whose_runtime_is_at_work_leaves_nothing(counter, machine, request):
    machine.run(["vgpu", "containerd", "checkpoint", "counter", "--export", FILE], timeout=60)
    counter.remove()
    slow = request.getfixturevalue("slow")
    code, said = interrupted(slow, ("restore", "--import", FILE, "again"), "test -e /run/at-work", "TERM", "INT")
    assert code == 143, said
    assert "note:" not in said
    assert CtrContainer(slow, "again").status() == "GONE"
    assert slow.run(["ctr", "container", "ls", "-q"]).stdout == ""
    nothing_is_left(slow, snapshots=())
    assert slow.run(["sh", "-c", "pgrep -f ^counter || true"]).stdout == ""
    assert slow.run(["ls", "/run/vgpu/state"]).stdout == ""


@pytest.mark.first_row
def test_a_folder_of_a_container_that_went_on_is_not_restored_over_it(counter, machine):
    """A command that was killed during the dump leaves one; recovering from it would end what runs."""
    step = counter.step()
    folder = "/var/lib/vgpu/containerd/checkpoint-1"
    machine.write(f"{folder}/needed.json", '{"container": "counter", "namespace": "default"}')
    done = machine.run(["vgpu", "containerd", "recover", folder], check=False)
    machine.run(["rm", "-r", folder])
    assert done.returncode == 15
    assert "has not ended" in done.stderr
    counter.goes_on(step)
