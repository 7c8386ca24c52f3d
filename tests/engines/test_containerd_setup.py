"""`vgpu setup containerd` and its undo, read by a real containerd of both versions, from each file an administrator may have."""

from __future__ import annotations

import tomllib

import pytest

from tests.hosts.host import TestHost

pytestmark = [pytest.mark.engines, pytest.mark.timeout(120)]

MAIN = "/etc/containerd/config.toml"
V2, V3 = "io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime"
OWN = 'version = 2\n[plugins."io.containerd.grpc.v1.cri"]\nsandbox_image = "pause:mine"\n'


@pytest.fixture(scope="module")
def machine(row, row_root):
    with TestHost(row, "setup") as host:
        host.install_project()
        host.run(["cp", MAIN, "/root/config.toml"])
        yield host
        host.run(["cp", "/root/config.toml", MAIN])


def dumped(host):
    """What containerd itself makes of all files."""
    return tomllib.loads(host.run(["containerd", "config", "dump"]).stdout)


def handlers(document):
    plugins = document["plugins"]
    return (plugins[V3] if V3 in plugins else plugins[V2])["containerd"]["runtimes"]


def given(host, what):
    if what == "debian":
        host.run(["cp", "/root/config.toml", MAIN])
    elif what == "none":
        host.run(["rm", "-f", MAIN])
    else:
        host.write(MAIN, "version = 3\n" if what == "version 3" else OWN)


@pytest.mark.parametrize("what", ["debian", "none", "own", "version 3"])
def test_containerd_reads_the_handler_and_undo_takes_it_back(machine, what):
    if what == "version 3" and machine.row == "trixie":
        pytest.skip("containerd 1.7 knows no config version 3")
    given(machine, what)
    before = machine.run(
        ["sh", "-c", f"cat {MAIN}; find /etc/containerd /etc/cdi /etc/vgpu 2>/dev/null"], check=False
    ).stdout
    machine.run(["vgpu", "setup", "containerd", "--kubelet", "--push-to", "registry:5000/team"])
    found = handlers(dumped(machine))
    assert found["vgpu-runtime"]["options"]["BinaryName"] == "/usr/bin/vgpu-runtime"
    assert found["vgpu-runtime"]["runtime_type"] == found["runc"]["runtime_type"] == "io.containerd.runc.v2"
    assert found["vgpu-runtime"]["pod_annotations"] == ["vgpu.snapshot/*"]
    if what == "own":
        assert "pause:mine" in machine.run(["containerd", "config", "dump"]).stdout
    assert "watch --push-to registry:5000/team" in machine.read("/etc/systemd/system/vgpu-kubelet-watch.service")
    again = machine.run(["vgpu", "setup", "containerd"]).stdout
    assert "wrote" not in again
    assert machine.run(["test", "-e", "/etc/systemd/system/vgpu-kubelet-watch.service"]).returncode == 0
    machine.run(["vgpu", "setup", "--undo"])
    assert (
        machine.run(
            ["sh", "-c", f"cat {MAIN}; find /etc/containerd /etc/cdi /etc/vgpu 2>/dev/null"], check=False
        ).stdout
        == before
    )
    if what != "none":
        assert "vgpu-runtime" not in handlers(dumped(machine))
    assert machine.run(["ls", "/etc/systemd/system"]).stdout.count("vgpu") == 0
