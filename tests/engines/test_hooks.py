"""vgpu-hook in podman's hooks_dir, with the runtime that podman has anyway; and the way back from every setup.

The hooks inject, note and clean up. Checkpoints of the GPU side are the runtime's work: without it CRIU refuses.
"""

from __future__ import annotations

import hashlib
import json
import pathlib

import pytest

from tests.engines.gpu_container import GpuContainer
from tests.engines.prepared import LOW_LEVEL, SOFTWARE_DRIVER, SOFTWARE_STATE, bundle_config, inspect
from tests.hosts.host import TestHost

pytestmark = [pytest.mark.engines, pytest.mark.timeout(180)]

LIBRARY = "/run/vgpu-preload/libvgpu.so"
SETUP = ("--driver-dir", SOFTWARE_DRIVER, "--cdi-mount", f"{SOFTWARE_STATE}:{SOFTWARE_STATE}:rw")
FOLDERS = ("etc", "usr/lib/systemd", "usr/share/containers", "var/lib/vgpu", "var/log/vgpu")


@pytest.fixture(scope="module")
def installed(row, row_root):
    """A host with the program installed and nothing set up."""
    with TestHost(row, "hooks") as machine:
        machine.install_software_gpu()
        machine.install_project()
        machine.image("glibc")
        yield machine


@pytest.fixture
def hooked(installed):
    """The host with the hooks alone."""
    installed.run(["vgpu", "setup", "podman", "--hooks-only", *SETUP])
    yield installed
    installed.run(["podman", "rm", "-af", "-t", "0"])
    installed.run(["vgpu", "setup", "podman", "--undo"])


def stock(node):
    return LOW_LEVEL[node.row].rpartition("/")[2]


def started(node):
    """A GPU container that asks for the preload; the hooks concern no other."""
    options = ["--annotation", "vgpu.snapshot/inject=true"]
    return GpuContainer(node).start(node.image("glibc"), runtime=stock(node), options=options)


def files(node):
    """Path -> digest or link target, of all that a setup may write to."""
    found = {}
    for folder in FOLDERS:
        for path in sorted(pathlib.Path(node.root, folder).rglob("*")):
            name = str(path.relative_to(node.root))
            if path.is_symlink():
                found[name] = str(path.readlink())
            elif path.is_file():
                found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def environment_of_first_process(node):
    return node.run(["podman", "exec", "counter", "cat", "/proc/1/environ"]).stdout.split("\0")


def traces(node):
    return node.run(["sh", "-c", "ls /run/vgpu/state /run/vgpu/containers 2>/dev/null; true"]).stdout.split()


def test_a_gpu_container_gets_the_preload_before_it_is_created(hooked):
    container = started(hooked)
    container.wait_for_step(3)
    assert f"LD_PRELOAD={LIBRARY}" in environment_of_first_process(hooked)
    assert LIBRARY in hooked.run(["podman", "exec", "counter", "cat", "/proc/1/maps"]).stdout
    identifier = inspect(hooked, "counter")["Id"]
    state = json.loads(hooked.read(f"/run/vgpu/state/{identifier}.json"))
    assert (state["engine"], state["preload_libc"]) == ("podman", "glibc")
    shown = json.loads(hooked.run(["vgpu", "ps", "--json"]).stdout)
    assert [len(item["processes"]) for item in shown["containers"]] == [1]


@pytest.mark.first_row
def test_stop_cleans_up_and_a_new_start_injects_once(hooked):
    container = started(hooked)
    container.wait_for_step(1)
    hooked.run(["podman", "stop", "-t", "0", "counter"])
    assert [name for name in traces(hooked) if name.startswith(inspect(hooked, "counter")["Id"])] == []
    hooked.run(["podman", "start", "counter"])
    container.wait_for_step(1)
    config = json.loads(bundle_config(hooked, "counter").read_text())
    assert [mount["destination"] for mount in config["mounts"]].count(LIBRARY) == 1
    assert [entry for entry in config["process"]["env"] if "LD_PRELOAD" in entry] == [f"LD_PRELOAD={LIBRARY}"]


@pytest.mark.first_row
@pytest.mark.parametrize(
    ("annotation", "device", "is_injected"),
    [
        ("true", [], True),
        ("false", ["--device", "vgpu.snapshot/gpu=all"], False),
        (None, ["--device", "vgpu.snapshot/gpu=all"], False),
    ],
    ids=["asked-for", "refused", "not-asked-for"],
)
def test_the_annotation_decides(hooked, annotation, device, is_injected):
    words = ["--annotation", f"vgpu.snapshot/inject={annotation}"] if annotation else []
    program = [hooked.image("glibc"), "sh", "-c", "while :; do sleep 1; done"]
    hooked.run(["podman", "run", "-d", "--runtime", stock(hooked), "--name", "counter", *words, *device, *program])
    assert (f"LD_PRELOAD={LIBRARY}" in environment_of_first_process(hooked)) is is_injected
    destinations = [
        mount["destination"] for mount in json.loads(bundle_config(hooked, "counter").read_text())["mounts"]
    ]
    assert (LIBRARY in destinations) is is_injected


def test_without_the_runtime_criu_refuses_and_the_container_goes_on(hooked):
    container = started(hooked)
    step = container.wait_for_step(3)
    done = container.podman("checkpoint", check=False)
    assert done.returncode == 125
    container.goes_on(step)


@pytest.mark.first_row
@pytest.mark.parametrize(
    "options", [(), ("--hooks-only",), ("--default-runtime",)], ids=lambda words: " ".join(words) or "plain"
)
def test_undo_leaves_the_host_as_it_was(installed, options):
    before = files(installed)
    installed.run(["vgpu", "setup", "podman", *SETUP, *options])
    assert files(installed) != before
    installed.run(["vgpu", "setup", "podman", "--undo"])
    assert files(installed) == before
    run = ["podman", "run", "--rm", "--name", "after", installed.image("glibc"), "echo", "still here"]
    assert installed.run(run).stdout.strip() == "still here"
