"""The kit's install.sh and uninstall.sh on a node, as its init containers run them: the node's root is at /host."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.hosts.host import TestHost
from tests.hosts.roots import REPOSITORY
from tests.hosts.rows import is_wanted

ROW = "testing"
pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(180),
    pytest.mark.host_rows(ROW),
    pytest.mark.skipif(not is_wanted(ROW), reason="VGPU_ROWS leaves the row out"),
]
MANIFEST = "usr/lib/vgpu-snapshot/installed-files.txt"
SYSTEMCTL = '#!/bin/sh\necho "$*" >>/var/log/systemctl\n'


@pytest.fixture(scope="module")
def node():
    """A node with nothing of ours on it, and the image's files beside it."""
    with TestHost(ROW, "kit-node") as host:
        package(host)
        for name in ("install.sh", "uninstall.sh"):
            host.copy_in(REPOSITORY / "deploy/node" / name, f"/opt/vgpu/{name}")
        host.write("/usr/bin/systemctl", SYSTEMCTL, 0o755)
        host.write("/var/log/systemctl", "")
        host.run(["sh", "-c", "mkdir /host && mount --rbind / /host"])
        yield host


def package(host):
    """What `make package` makes for the node's Python; the installation it is made of is taken away again."""
    host.install_project()
    name = f"vgpu-snapshot-0.1.0-py{host.python_version()}.tar.gz"
    pack = f"tar -C / -I 'gzip -1' -cf /opt/vgpu/packages/{name} --no-recursion -T /{MANIFEST} {MANIFEST}"
    host.run(["sh", "-c", f"mkdir -p /opt/vgpu/packages && {pack}"])
    remove = [sys.executable, str(REPOSITORY / "packaging/install.py"), "--destdir", str(host.root), "--uninstall"]
    subprocess.run(remove, check=True, timeout=60, capture_output=True)


def install(host, check=True, **environment):
    return host.run(["/opt/vgpu/install.sh"], env=environment, timeout=90, check=check)


def test_a_node_whose_python_has_no_package_is_refused_and_untouched(node):
    done = install(node, check=False, VGPU_PACKAGES="/var/empty")
    assert done.returncode == 1
    assert "no package for the node's Python" in done.stderr
    assert not (node.root / "usr/bin/vgpu-runtime").exists()


def test_an_install_that_failed_after_the_setup_is_not_taken_for_a_whole_one(node):
    """The next one finds containerd's files changed already, and restarts it all the same: see the next test."""
    node.write("/etc/vgpu-broken/other.pub", "no key")
    done = install(node, check=False, VGPU_LOW_LEVEL_RUNTIME="/usr/sbin/runc", VGPU_TRUSTED="/etc/vgpu-broken")
    assert done.returncode != 0
    assert (node.root / "etc/containerd/conf.d/50-vgpu.toml").exists()
    assert node.read("/var/log/systemctl") == ""
    assert "vgpu-key" not in node.run(["ls", "/run"]).stdout


def test_install_sets_the_node_up_and_restarts_containerd_once(node):
    done = install(node, VGPU_LOW_LEVEL_RUNTIME="/usr/sbin/runc")
    assert "containerd was restarted" in done.stdout
    assert node.read("/var/log/systemctl").splitlines() == [
        "daemon-reload",
        "enable --now vgpu-agent",
        "restart containerd",
    ]
    assert "low_level_runtime = /usr/sbin/runc" in node.read("/etc/vgpu/runtime.conf")
    assert "vgpu-runtime" in node.run(["containerd", "config", "dump"]).stdout
    assert node.run(["vgpu-runtime", "--version"]).stdout.startswith("runc")


def test_a_second_install_restarts_nothing(node):
    node.write("/var/log/systemctl", "")
    key = node.read("/etc/vgpu/node.pub")
    done = install(node, VGPU_LOW_LEVEL_RUNTIME="/usr/sbin/runc")
    assert "was restarted" not in done.stdout
    assert done.stderr == ""
    assert "restart containerd" not in node.read("/var/log/systemctl")
    assert node.read("/etc/vgpu/node.pub") == key


def test_keys_of_other_nodes_are_trusted(node):
    node.write("/etc/vgpu-trusted/other.pub", other_key())
    before = node.run(["vgpu", "trust", "ls"]).stdout
    install(node)
    after = node.run(["vgpu", "trust", "ls"]).stdout
    assert len(after.splitlines()) == len(before.splitlines()) + 1
    install(node)
    assert node.run(["vgpu", "trust", "ls"]).stdout == after
    assert "vgpu-key" not in node.run(["ls", "/run"]).stdout


def other_key():
    import tempfile
    from pathlib import Path

    from image_format.trust.keys import make_node_key

    with tempfile.TemporaryDirectory() as folder:
        make_node_key(Path(folder))
        return (Path(folder) / "node.pub").read_text()


def test_uninstall_refuses_while_containers_run(node):
    node.write("/run/vgpu/state/busy.json", "{}")
    done = node.run(["/opt/vgpu/uninstall.sh"], check=False)
    assert done.returncode == 1
    assert "busy.json" in done.stderr
    node.run(["rm", "/run/vgpu/state/busy.json"])
    assert (node.root / "usr/bin/vgpu-runtime").exists()


def test_uninstall_takes_back_the_programs_and_the_setup_and_keeps_the_key(node):
    key = node.read("/etc/vgpu/node.key")
    node.run(["/opt/vgpu/uninstall.sh"], timeout=90)
    assert not list((node.root / "usr/bin").glob("vgpu*"))
    assert not (node.root / "usr/lib/vgpu-snapshot").exists()
    assert not (node.root / "etc/containerd/conf.d/50-vgpu.toml").exists()
    assert node.read("/etc/vgpu/node.key") == key
    assert "nothing is installed" in node.run(["/opt/vgpu/uninstall.sh"]).stdout
