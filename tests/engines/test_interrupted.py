"""Kills whoever takes part in a checkpoint or restore, at a moment that a gate holds open, and looks at what is left.

After a checkpoint that was interrupted the application runs on with right memory (or, where only the reporter died, is
in a whole image), nothing stays frozen, and the next checkpoint works. After a restore that was interrupted the archive
restores. Not tested: CRIU killed while its code runs inside the application, which CRIU itself cannot undo.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import subprocess
import time
from signal import SIGKILL

import pytest

import vgpu_errors
from tests.engines.gpu_container import GpuContainer, restore
from tests.engines.prepared import LOW_LEVEL, SOFTWARE_STATE, configured, digest, inspect

pytestmark = [pytest.mark.engines, pytest.mark.timeout(180)]

ARCHIVE = "/var/tmp/interrupted.tar"
GATE = "/usr/local/bin/gated-runtime"
GATE_SCRIPT = """\
#!/bin/sh
RT={runtime}
hold() {{
    touch /run/gate/reached
    left=300
    while [ ! -e /run/gate/go ] && [ $left -gt 0 ]; do sleep 0.1; left=$((left - 1)); done
}}
case " $* " in *" {verb} "*"--image-path "*) ;; *) exec "$RT" "$@" ;; esac
{steps}
"""
STEPS = {
    "before": 'hold\nexec "$RT" "$@"',
    "after": '"$RT" "$@"\nstatus=$?\nhold\nexit $status',
    "never": "trap 'exit 143' TERM\nwhile :; do sleep 0.2; done",
}
PATTERNS = {
    "shim": "^/usr/bin/python3 -IS /usr/bin/vgpu-runtime .*(checkpoint|restore) .*--image-path ",  # not podman's probe with --help
    "agent": "^/usr/bin/python3 -IS /usr/bin/vgpu-agent",
    "worker": "gpu_state.driver_worker",
    "runtime": f"{GATE}",
    "podman": "^podman container (checkpoint|restore)",
    "application": "^counter ",
}


@pytest.fixture
def counter(node):
    container = GpuContainer(node).start(node.image("glibc"))
    container.wait_for_step(3)
    yield container
    node.run(["podman", "rm", "-af", "-t", "0"])
    node.run(["rm", "-f", ARCHIVE])


class Gate:
    """The low-level runtime, held at one moment of one verb."""

    def __init__(self, node) -> None:
        self.node = node

    def wait(self) -> None:
        self.node.wait_for(["test", "-e", "/run/gate/reached"], interval=0.05)

    def open(self) -> None:
        self.node.write("/run/gate/go", "")


@contextlib.contextmanager
def gated(node, verb, moment):
    node.run(["sh", "-c", "rm -rf /run/gate; mkdir /run/gate"])
    script = GATE_SCRIPT.format(runtime=LOW_LEVEL[node.row], verb=verb, steps=STEPS[moment])
    node.write(GATE, script, 0o755)
    gate = Gate(node)
    with configured(node, low_level_runtime=GATE):
        try:
            yield gate
        finally:
            gate.open()


@contextlib.contextmanager
def started(node, *words):
    """A podman command under way; at the end it has ended, by itself or by force."""
    process = node.popen(
        ["podman", "container", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=10)


def signal(node, who, name="KILL"):
    """Send a signal to one of those who take part, the eldest of that name; it must be there."""
    node.run(["pkill", f"-{name}", "-o", "-f", PATTERNS[who]])


def outer_pid(node, who):
    """The pid as this machine counts, to be killed without the time that entering the host takes."""
    inner = node.run(["pgrep", "-o", "-f", PATTERNS[who]]).stdout.strip()
    namespace = os.stat(f"/proc/{node.init_pid}/ns/pid").st_ino
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.stat(folder / "ns/pid").st_ino == namespace and f"\t{inner}\n" in (folder / "status").read_text():
                return int(folder.name)
    raise AssertionError(f"no {who}")


def gone(node, who):
    node.wait_for(["sh", "-c", f"! pgrep -f '{PATTERNS[who]}'"], timeout=30)


def nothing_is_frozen(node):
    frozen = "cat /sys/fs/cgroup/libpod_parent/*/cgroup.events /sys/fs/cgroup/machine.slice/*/cgroup.events 2>/dev/null; true"
    node.wait_for(["sh", "-c", f"! ({frozen}) | grep -q 'frozen 1'"], timeout=10)


def runs_on(counter, step):
    """It counts, nothing is frozen, and the next checkpoint and restore work."""
    nothing_is_frozen(counter.host)
    step = counter.goes_on(step)
    counter.podman("checkpoint")
    counter.podman("restore")
    counter.goes_on(step)


# ---- checkpoint ----------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["before", "after"], ids=["frozen", "dumped"])
def test_the_shim_is_killed_and_the_application_runs_on(counter, moment):
    node, step = counter.host, counter.step()
    with gated(node, "checkpoint", moment) as gate, started(node, "checkpoint", "counter") as podman:
        gate.wait()
        signal(node, "shim")
        assert podman.wait(timeout=30) == 125
    runs_on(counter, step)


@pytest.fixture
def large(node):
    """Enough memory that its way out of the device can be met under way."""
    container = GpuContainer(node).start(node.image("glibc"), mib=448, interval_ms=200)
    container.wait_for_step(1)
    yield container
    node.run(["podman", "rm", "-af", "-t", "0"])
    node.run(["rm", "-f", ARCHIVE])


def slowed(node, call):
    """The software driver takes its time for the next such call: the moment to kill in must not be missed.

    Nor taken too early: what an earlier test's agent undoes has a journal entry for as long as that takes.
    """
    ends = time.monotonic() + 30
    while list(pathlib.Path(node.root, "run/vgpu/journal").glob("*.json")):
        assert time.monotonic() < ends, "an earlier freeze is not undone"
        time.sleep(0.05)
    node.write(f"{SOFTWARE_STATE}/fault-{call}", "0 2000")


def await_journal(node):
    """The journal entry is written before the first lock."""
    journal, ends = pathlib.Path(node.root, "run/vgpu/journal"), time.monotonic() + 30
    while not list(journal.glob("*.json")):
        assert time.monotonic() < ends, "neither freeze nor thaw began"
        time.sleep(0.005)


def await_shim(node):
    node.wait_for(["pgrep", "-f", PATTERNS["shim"]], interval=0.02)
    return outer_pid(node, "shim")


def running_agent(node):
    node.run(["vgpu", "ps"])
    return outer_pid(node, "agent")


@pytest.mark.first_row
def test_the_shim_is_killed_during_the_freeze(large):
    node, step = large.host, large.step()
    slowed(node, "checkpoint")
    with started(node, "checkpoint", "counter") as podman:
        shim = await_shim(node)
        await_journal(node)
        os.kill(shim, SIGKILL)
        assert podman.wait(timeout=30) == 125
    runs_on(large, step)


@pytest.mark.first_row
def test_the_agent_is_killed_during_the_freeze(large):
    node, step = large.host, large.step()
    slowed(node, "checkpoint")
    agent = running_agent(node)
    with started(node, "checkpoint", "counter") as podman:
        await_journal(node)
        os.kill(agent, SIGKILL)
        assert podman.wait(timeout=30) == 125
        said = podman.stdout.read()
        # A dying agent's threads end one after the other: one of them may still report the end of the worker.
        assert any(error.remedy in said for error in (vgpu_errors.AgentUnreachable, vgpu_errors.DriverWorkerLost)), said
    node.run(["vgpu", "ps"])  # the next one to ask starts an agent, which finds the journal
    runs_on(large, step)


@pytest.mark.first_row
def test_a_stopped_process_is_refused_by_name(counter):
    """The driver could not lock it before it runs again."""
    node, step = counter.host, counter.step()
    signal(node, "application", "STOP")
    try:
        done = counter.podman("checkpoint", check=False)
    finally:
        signal(node, "application", "CONT")
    assert done.returncode == 125
    assert "(counter)" in done.stderr
    assert f"exit status {vgpu_errors.GpuProcessUnreadable.exit_code}" in done.stderr
    runs_on(counter, step)


@pytest.mark.first_row
@pytest.mark.parametrize("options", [[], ["--leave-running"]], ids=["ends", "leaves-running"])
@pytest.mark.parametrize("moment", ["before", "after"], ids=["frozen", "dumped"])
def test_an_agent_that_is_killed_while_frozen_is_started_anew(counter, moment, options):
    """The lease is in the journal and its owner is alive, so the checkpoint goes on to its end."""
    node, step = counter.host, counter.step()
    with (
        gated(node, "checkpoint", moment) as gate,
        started(node, "checkpoint", "--export", ARCHIVE, *options, "counter") as podman,
    ):
        gate.wait()
        signal(node, "agent")
        gone(node, "agent")
        gate.open()
        assert podman.wait(timeout=60) == 0, podman.stdout.read()
    node.run(["vgpu", "verify", ARCHIVE])
    if options:
        return runs_on(counter, step)
    counter.remove()
    return runs_on(restore(node, ARCHIVE), step)


@pytest.mark.first_row
def test_the_driver_worker_is_killed_while_frozen(counter):
    node, step = counter.host, counter.step()
    with (
        gated(node, "checkpoint", "before") as gate,
        started(node, "checkpoint", "--leave-running", "counter") as podman,
    ):
        gate.wait()
        signal(node, "worker")
        gate.open()
        assert podman.wait(timeout=60) == 0, podman.stdout.read()
    runs_on(counter, step)


@pytest.mark.parametrize("moment", ["before", "after"], ids=["undumped", "dumped"])
def test_the_low_level_runtime_is_killed_and_the_application_runs_on(counter, moment):
    node, step = counter.host, counter.step()
    with gated(node, "checkpoint", moment) as gate, started(node, "checkpoint", "counter") as podman:
        gate.wait()
        signal(node, "runtime")
        assert podman.wait(timeout=30) == 125
        assert "exit status 137" in podman.stdout.read()
    runs_on(counter, step)


def test_podman_is_killed_and_the_checkpoint_comes_to_its_end(counter):
    """The shim is not podman's prisoner: it finishes, and the whole image restores in place."""
    node, step = counter.host, counter.step()
    with gated(node, "checkpoint", "before") as gate, started(node, "checkpoint", "counter"):
        gate.wait()
        signal(node, "podman")
        gate.open()
        gone(node, "shim")
    node.wait_for(["sh", "-c", "podman inspect -f '{{.State.Status}}' counter | grep -q exited"])
    counter.podman("restore")
    runs_on(counter, step)


def test_a_checkpoint_that_hangs_is_ended_by_its_deadline(counter):
    node, step, started_at = counter.host, counter.step(), time.monotonic()
    with gated(node, "checkpoint", "never"), configured(node, deadline_checkpoint_s=2):
        done = counter.podman("checkpoint", check=False)
    assert done.returncode == 125
    assert "took longer than 2 s" in done.stderr
    assert vgpu_errors.CheckpointFailed.remedy in done.stderr
    assert time.monotonic() - started_at < 20
    runs_on(counter, step)


@pytest.mark.first_row
def test_ctrl_c_undoes_the_checkpoint(counter):
    """A terminal signals podman and the shim alike."""
    node, step = counter.host, counter.step()
    with gated(node, "checkpoint", "before") as gate, started(node, "checkpoint", "counter") as podman:
        gate.wait()
        signal(node, "shim", "INT")
        gate.open()
        assert podman.wait(timeout=30) == 125
    runs_on(counter, step)


# ---- restore -------------------------------------------------------------------------------------


@pytest.fixture
def archive(counter):
    """The step at which the archive was taken; the container is removed."""
    step = counter.step()
    counter.export(ARCHIVE, "--compress", "none")
    counter.remove()
    sealed = digest(counter.host, ARCHIVE)
    yield step
    assert digest(counter.host, ARCHIVE) == sealed


def restores(node, step):
    """Whatever the broken attempt left can be removed, and the archive restores."""
    node.run(["podman", "rm", "-af", "-t", "0"])
    node.wait_for(["sh", "-c", "! pgrep counter"], timeout=10)
    nothing_is_frozen(node)
    runs_on(restore(node, ARCHIVE), step)


@pytest.mark.parametrize("moment", ["before", "after"], ids=["verified", "not-thawed"])
@pytest.mark.parametrize("who", ["shim", "runtime"])
def test_a_restore_whose_runtime_is_killed_leaves_a_whole_archive(node, archive, who, moment):
    with gated(node, "restore", moment) as gate, started(node, "restore", "--import", ARCHIVE) as podman:
        gate.wait()
        signal(node, who)
        assert podman.wait(timeout=30) == 125
    restores(node, archive)


@pytest.mark.first_row
def test_an_agent_that_is_killed_before_the_thaw_is_started_anew(node, archive):
    with gated(node, "restore", "after") as gate, started(node, "restore", "--import", ARCHIVE) as podman:
        gate.wait()
        signal(node, "agent")
        gone(node, "agent")
        gate.open()
        assert podman.wait(timeout=60) == 0, podman.stdout.read()
    runs_on(GpuContainer(node), archive)


@pytest.mark.first_row
def test_an_agent_that_is_killed_during_the_thaw_ends_the_restore(large):
    node, step = large.host, large.step()
    large.export(ARCHIVE, "--compress", "none")
    large.remove()
    with gated(node, "restore", "after") as gate, started(node, "restore", "--import", ARCHIVE) as podman:
        gate.wait()
        agent = running_agent(node)
        slowed(node, "restore")
        gate.open()
        await_journal(node)
        os.kill(agent, SIGKILL)
        assert podman.wait(timeout=30) == 125
        said = podman.stdout.read()
        assert any(error.remedy in said for error in (vgpu_errors.AgentUnreachable, vgpu_errors.DriverWorkerLost)), said
    restores(node, step)


@pytest.mark.first_row
def test_a_thaw_that_hangs_is_ended_by_the_deadline(node, archive):
    with (
        gated(node, "restore", "after") as gate,
        configured(node, deadline_restore_s=6),
        started(node, "restore", "--import", ARCHIVE) as podman,
    ):
        gate.wait()
        signal(node, "worker", "STOP")
        gate.open()
        assert podman.wait(timeout=30) == 125
        assert vgpu_errors.DeadlineExceeded.remedy in podman.stdout.read()
    restores(node, archive)


@pytest.mark.first_row
def test_podman_is_killed_during_a_restore(node, archive):
    with gated(node, "restore", "before") as gate, started(node, "restore", "--import", ARCHIVE):
        gate.wait()
        signal(node, "podman")
        gate.open()
        gone(node, "shim")
    # podman never heard of the container that came back; as after any killed podman, the runtime has to end it.
    node.run(["vgpu-runtime", "delete", "--force", inspect(node, "counter")["Id"]])
    restores(node, archive)


def test_a_restore_that_hangs_is_ended_by_its_deadline(node, archive):
    with gated(node, "restore", "never"), configured(node, deadline_restore_s=3):
        done = restore(node, ARCHIVE, check=False)
    assert done.returncode == 125
    assert vgpu_errors.RestoreFailed.remedy in done.stderr
    restores(node, archive)
