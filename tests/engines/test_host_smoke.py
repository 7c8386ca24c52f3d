"""The test hosts themselves: what the other engine tests stand on works with the plain engines and no part of ours."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.hosts.host import CommandFailed, TestHost
from tests.hosts.roots import HostUnavailable

RUNTIMES = ("crun", "runc")
COUNT = "i=0; while :; do i=$((i+1)); echo $i >/count; sleep 0.05; done"


def count_in(machine, container):
    """The counter's last value, as the container itself sees it."""
    for _ in range(50):
        text = machine.run(["podman", "exec", container, "cat", "/count"]).stdout.strip()
        if text:
            return int(text)
        time.sleep(0.05)
    pytest.fail(f"{container} does not count")


@pytest.fixture
def containers(request):
    """Removes every container of the hosts that the test took."""
    machines = []
    yield machines
    for machine in machines:
        machine.run(["podman", "rm", "-af", "-t", "0"])


def needs(machine, tool):
    """A packed root is trimmed for a GPU machine; a built one has everything, and there a missing tool is a failure."""
    if os.environ.get("VGPU_HOST_ROOT_ARCHIVE") and not any(
        (machine.root_image / folder / tool).exists() for folder in ("usr/bin", "usr/sbin")
    ):
        pytest.skip(f"the packed root has no {tool}")


def test_criu_accepts_the_host(host):
    assert "Looks good" in host.run(["criu", "check"]).stdout


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_podman_checkpoints_exports_removes_and_restores(host, runtime, containers):
    containers.append(host)
    podman = ["podman", "--runtime", runtime]
    host.run([*podman, "run", "-d", "--name", "count", host.image("plain"), "sh", "-c", COUNT])
    time.sleep(0.5)
    host.run([*podman, "container", "checkpoint", "--export", "/var/tmp/count.tar.zst", "count"])
    host.run(["podman", "rm", "count"])
    assert host.run(["podman", "ps", "-aq"]).stdout == ""
    host.run(["podman", "container", "restore", "--import", "/var/tmp/count.tar.zst"])
    first = count_in(host, "count")
    assert first >= 5, "the counter began anew"
    time.sleep(0.3)
    assert count_in(host, "count") > first


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_an_archive_of_one_host_restores_on_the_other(pair, runtime, containers):
    containers += pair
    source, target = pair
    source.run(
        ["podman", "--runtime", runtime, "run", "-d", "--name", "move", source.image("plain"), "sh", "-c", COUNT]
    )
    time.sleep(0.3)
    source.run(["podman", "container", "checkpoint", "--export", "/var/tmp/move.tar.zst", "move"])
    before = source.run(["podman", "image", "inspect", "-f", "{{.Id}}", source.image("plain")]).stdout
    assert target.run(["podman", "image", "inspect", "-f", "{{.Id}}", target.image("plain")]).stdout == before
    source.copy_to(target, "/var/tmp/move.tar.zst")
    target.run(["podman", "container", "restore", "--import", "/var/tmp/move.tar.zst"])
    assert count_in(target, "move") >= 3


def test_a_process_that_holds_the_gpu_device_is_refused_by_criu(host, containers):
    containers.append(host)
    host.run(["mknod", "-m", "666", "/dev/nvidia0", "c", "10", "229"])
    # A loop: CRIU ends a sleep in progress with EINTR, also when it refuses the dump.
    hold = ["sh", "-c", "exec 3</dev/nvidia0; while :; do sleep 1; done"]
    host.run(["podman", "run", "-d", "--name", "held", "--device", "/dev/nvidia0", host.image("plain"), *hold])
    time.sleep(0.3)
    refused = host.run(["podman", "container", "checkpoint", "held"], check=False)
    host.run(["rm", "/dev/nvidia0"])
    assert refused.returncode != 0
    log = host.run(["sh", "-c", "cat /var/lib/containers/storage/overlay-containers/*/userdata/dump.log"]).stdout
    assert "Can't dump file" in log
    assert host.run(["podman", "inspect", "-f", "{{.State.Status}}", "held"]).stdout.strip() == "running"


def test_two_hosts_reach_each_other_by_name_and_nothing_else(pair):
    first, second = pair
    second.daemon(["busybox", "nc", "-l", "-p", "7000", "-e", "hostname"], log="/var/log/nc.log")
    second.wait_for(["sh", "-c", "ss -ltn | grep -q :7000"])
    assert first.run(["busybox", "nc", second.name, "7000"], input="").stdout.strip() == second.name
    assert first.run(["hostname"]).stdout.strip() == first.name
    assert first.run(["ip", "route", "get", "192.0.2.1"], check=False).returncode != 0


def test_a_registry_on_one_host_serves_the_other(pair, containers):
    containers += pair
    first, second = pair
    needs(first, "docker-registry")
    first.start_registry()
    pushed = "10.0.0.1:5000/plain:1"
    first.run(["podman", "push", "-q", first.image("plain"), pushed])
    second.run(["podman", "pull", "-q", pushed])
    assert second.run(["podman", "run", "--rm", pushed, "echo", "pulled"]).stdout.strip() == "pulled"


def test_containerd_runs_a_container(host):
    needs(host, "containerd")
    host.start_containerd()
    host.run(["ctr", "image", "import", host.image_archive("plain")])
    # The machine's cgroup v2 has no cpu controller, hence no shares.
    run = ["ctr", "run", "--rm", "--cpu-shares", "0", "localhost/vgpu-test:plain", "hello", "echo", "from containerd"]
    assert host.run(run).stdout.strip() == "from containerd"


def test_a_command_past_its_deadline_is_killed(host):
    with pytest.raises(subprocess.TimeoutExpired):
        host.run(["sh", "-c", "sleep 4711 & sleep 4711"], timeout=0.3)
    assert "4711" not in host.run(["ps", "-eo", "args"]).stdout.replace("ps -eo args", "")


def test_a_failing_command_tells_what_it_said(host):
    with pytest.raises(CommandFailed, match="no such thing"):
        host.run(["sh", "-c", "echo no such thing >&2; exit 3"])


def test_a_host_leaves_no_process_and_no_cgroup(row, row_root):
    with TestHost(row, "brief") as machine:
        machine.daemon(["sleep", "4712"], log="/var/log/sleep.log")
        pid = machine.init_pid
        assert cgroups_of(os.getpid())
    assert not Path(f"/proc/{pid}").exists()
    assert not [name for name in cgroups_of(os.getpid()) if name == machine._cgroup]


def test_a_host_dies_with_its_maker(row, row_root):
    program = (
        "import sys, time\nfrom tests.hosts.host import TestHost\n"
        f"with TestHost({row!r}, 'orphan') as machine:\n    print(machine.init_pid, flush=True)\n    time.sleep(60)\n"
    )
    maker = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    init = int(maker.stdout.readline())
    maker.send_signal(signal.SIGKILL)
    maker.wait(timeout=10)
    maker.stdout.close()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{init}").exists():
        assert time.monotonic() < deadline, "the host outlived its maker"
        time.sleep(0.05)
    with TestHost(row, "next"):  # the next host of any maker sweeps the dead one's cgroups
        assert not [name for name in cgroups_of(os.getpid()) if name.startswith(f"vgpu-host-{maker.pid}-")]


def test_a_broken_root_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.hosts.host.root_for", lambda *_: tmp_path)
    with pytest.raises(HostUnavailable, match="could not be entered"):
        TestHost("trixie", "broken").__enter__()


def cgroups_of(_pid):
    """Names of all test hosts' cgroups, in every hierarchy that this machine mounts."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    found = [
        path for _, where, kind, *_ in mounts if kind.startswith("cgroup") for path in Path(where).glob("vgpu-host-*")
    ]
    return {path.name for path in found}
