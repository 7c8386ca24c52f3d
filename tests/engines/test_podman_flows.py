"""What a podman user does with a GPU container: checkpoint, export, import, elsewhere, again; on every row that can.

After each step the program's own check of its GPU memory has to hold and its counter has to go on.
"""

from __future__ import annotations

import json

import pytest

from tests.engines.gpu_container import GpuContainer, restore
from tests.engines.prepared import bundle_config, inspect, trust

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]

ARCHIVE = "/var/tmp/counter.tar.zst"


@pytest.fixture
def counter(node):
    """A running counter container, removed afterwards whatever happened to it."""
    container = GpuContainer(node)
    container.start(node.image("glibc"))
    container.wait_for_step(3)
    yield container
    clean(node)


def clean(*nodes):
    for node in nodes:
        node.run(["podman", "rm", "-a", "-f", "-t", "0"], check=False)
        node.run(["rm", "-f", ARCHIVE])


def test_checkpoint_and_restore_in_place(counter):
    step = counter.step()
    counter.podman("checkpoint")
    assert inspect(counter.host, "counter")["State"]["Checkpointed"]
    counter.podman("restore")
    counter.goes_on(step)


def test_export_remove_import(counter):
    step = counter.step()
    counter.export(ARCHIVE)
    counter.remove()
    restore(counter.host, ARCHIVE).goes_on(step)


@pytest.mark.parametrize("compression", ["none", "gzip", "zstd"])
def test_archive_verifies_whatever_its_compression(counter, compression):
    counter.export(ARCHIVE, "--compress", compression)
    verified = json.loads(counter.host.run(["vgpu", "verify", ARCHIVE, "--json"]).stdout)
    assert verified["trusted"] is True
    shown = json.loads(counter.host.run(["vgpu", "inspect", ARCHIVE, "--json"]).stdout)
    assert len(shown["record"]["processes"]) == 1


def test_import_under_a_new_name(counter):
    step = counter.step()
    counter.export(ARCHIVE)
    counter.remove()
    restore(counter.host, ARCHIVE, "--name", "second", name="second").goes_on(step)


def test_import_on_the_second_node(nodes):
    first, second = nodes
    trust(second, first)
    try:
        container = GpuContainer(first).start(first.image("glibc"), mib=64)
        step = container.wait_for_step(3)
        container.export(ARCHIVE)
        container.remove()
        first.copy_to(second, ARCHIVE)
        restore(second, ARCHIVE).goes_on(step)
    finally:
        clean(first, second)


def test_create_image_push_pull_restore_on_the_second_node(nodes, registry):
    first, second = nodes
    trust(second, first)
    base = f"{registry}/vgpu-test:glibc"
    image = f"{registry}/frozen:1"
    try:
        first.run(["podman", "tag", first.image("glibc"), base])
        first.run(["podman", "push", "-q", base])
        container = GpuContainer(first).start(base)
        step = container.wait_for_step(3)
        container.podman("checkpoint", "--create-image", image)
        assert json.loads(first.run(["vgpu", "verify", image, "--json"]).stdout)["trusted"] is True
        first.run(["podman", "push", "-q", image])
        container.remove()
        second.run(["podman", "pull", "-q", image])
        second.run(["podman", "container", "restore", "--name", "counter", image], timeout=120)
        GpuContainer(second).goes_on(step)
    finally:
        clean(first, second)


def test_leave_running_goes_on_at_once_and_the_archive_restores_elsewhere(nodes):
    first, second = nodes
    trust(second, first)
    try:
        container = GpuContainer(first).start(first.image("glibc"))
        step = container.wait_for_step(3)
        container.export(ARCHIVE, "--leave-running")
        later = container.goes_on(step)
        container.export(ARCHIVE, "-R")
        container.goes_on(later)
        first.copy_to(second, ARCHIVE)
        restored = restore(second, ARCHIVE)
        assert restored.goes_on(later) >= later
    finally:
        clean(first, second)


def test_exec_into_a_restored_container_sees_the_preload(counter):
    counter.export(ARCHIVE)
    counter.remove()
    restored = restore(counter.host, ARCHIVE)
    done = counter.host.run(["podman", "exec", restored.name, "env"])
    assert "LD_PRELOAD=/run/vgpu-preload/libvgpu.so" in done.stdout


def test_stop_and_start_after_a_restore(counter):
    step = counter.step()
    counter.export(ARCHIVE)
    counter.remove()
    restored = restore(counter.host, ARCHIVE)
    restored.goes_on(step)
    counter.host.run(["podman", "stop", "-t", "0", restored.name])
    counter.host.run(["podman", "exec", "-l", "true"], check=False)
    counter.host.run(["podman", "start", restored.name])
    restored.wait_for_step(step + 1)
    mounts = bundle_config(counter.host, restored.name).read_text()
    assert "vgpu-preload" not in mounts


def test_second_checkpoint_of_a_restored_container(counter):
    if counter.host.low_level_version().startswith("runc 1.1."):
        pytest.fail("the rows of the tests must not use runc 1.1: it cannot checkpoint a restored container")
    step = counter.step()
    for _ in range(3):
        counter.export(ARCHIVE)
        counter.remove()
        step = restore(counter.host, ARCHIVE).goes_on(step)
    record = json.loads(counter.host.run(["vgpu", "inspect", ARCHIVE, "--json"]).stdout)["record"]
    assert record["generation"] == 3


def test_container_without_a_gpu_is_left_alone(node):
    """Its config.json is the low-level runtime's, byte for byte, and its checkpoint is podman's alone."""
    try:
        node.run(
            [
                "podman",
                "run",
                "-d",
                "--name",
                "plain",
                "--runtime",
                "vgpu-runtime",
                node.image("glibc"),
                "sleep",
                "1000",
            ]
        )
        config = bundle_config(node, "plain")
        assert config.stat().st_nlink == 1
        assert "vgpu" not in config.read_text().replace("vgpu-test", "").replace("vgpu-runtime", "")
        assert "LD_PRELOAD" not in node.run(["podman", "exec", "plain", "env"]).stdout
        node.run(["podman", "container", "checkpoint", "--export", ARCHIVE, "plain"])
        listed = node.run(["tar", "--zstd", "-tf", ARCHIVE]).stdout
        assert "vgpu-" not in listed
        node.run(["podman", "rm", "-f", "-t", "0", "plain"])
        node.run(["podman", "container", "restore", "--import", ARCHIVE])
        assert inspect(node, "plain")["State"]["Running"]
    finally:
        clean(node)


def test_config_json_is_put_back_after_create_and_restore(counter):
    assert "vgpu-preload" not in bundle_config(counter.host, "counter").read_text()
    counter.export(ARCHIVE)
    counter.remove()
    restore(counter.host, ARCHIVE)
    assert "vgpu-preload" not in bundle_config(counter.host, "counter").read_text()


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["--init"], id="init"),
        pytest.param(["--read-only"], id="read-only"),
        pytest.param(["-t"], id="tty"),
        pytest.param(["--rm"], id="rm"),
        pytest.param(["--env", "LD_PRELOAD="], id="empty-preload"),
        pytest.param(["--hostname", "fixed"], id="hostname"),
    ],
)
def test_container_options(node, options):
    try:
        container = GpuContainer(node).start(node.image("glibc"), options=options)
        step = container.wait_for_step(3)
        container.export(ARCHIVE)
        container.remove()
        restore(node, ARCHIVE).goes_on(step)
    finally:
        clean(node)


@pytest.mark.parametrize("option", ["--tcp-established", "--file-locks"])
def test_checkpoint_options_reach_criu(counter, option):
    step = counter.step()
    counter.export(ARCHIVE, option)
    counter.remove()
    restore(counter.host, ARCHIVE, option).goes_on(step)


def test_pre_checkpoint_is_refused_with_the_reason(counter):
    refused = counter.podman("checkpoint", "--pre-checkpoint", "--export", ARCHIVE, check=False)
    assert refused.returncode != 0
    assert "pre-dump" in refused.stderr
    counter.goes_on(counter.step())


def test_several_gpu_processes_in_one_container(node):
    try:
        container = GpuContainer(node).start(node.image("glibc"), processes=3)
        step = container.wait_for_step(3)
        shown = json.loads(node.run(["vgpu", "ps", "--json"]).stdout)
        assert [len(item["processes"]) for item in shown["containers"]] == [3]
        container.export(ARCHIVE)
        container.remove()
        restore(node, ARCHIVE).goes_on(step)
    finally:
        clean(node)


def test_musl_container(node):
    try:
        container = GpuContainer(node).start(node.image("musl"))
        step = container.wait_for_step(3)
        container.export(ARCHIVE)
        container.remove()
        restore(node, ARCHIVE).goes_on(step)
    finally:
        clean(node)


def test_preload_registers_the_process_with_the_agent(counter):
    counter.host.run(["vgpu", "doctor", "--json"], check=False)
    shown = json.loads(counter.host.run(["vgpu", "ps", "--json"]).stdout)
    assert [process["registered"] for item in shown["containers"] for process in item["processes"]] == [True]
