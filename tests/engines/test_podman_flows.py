"""What a podman user does with a GPU container: checkpoint, export, import, elsewhere, again; on every row that can.

After each step the program's own check of its GPU memory has to hold and its counter has to go on.
"""

from __future__ import annotations

import json
import pathlib
import subprocess

import pytest

from tests.engines.gpu_container import RUNTIME, GpuContainer, restore
from tests.engines.prepared import bundle_config, digest, image_path, inspect, trust
from tests.hosts import software_gpu

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


@pytest.mark.first_row
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
        # podman writes the name of the runtime into the image that it runs with, not that of the container's.
        first.run(["podman", "--runtime", RUNTIME, "container", "checkpoint", "--create-image", image, "counter"])
        assert json.loads(first.run(["vgpu", "verify", image, "--json"]).stdout)["trusted"] is True
        first.run(["podman", "push", "-q", image])
        container.remove()
        second.run(["podman", "pull", "-q", image])
        second.run(["podman", "--runtime", RUNTIME, "container", "restore", "--name", "counter", image], timeout=120)
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
        run = ["podman", "run", "-d", "--name", "plain", "--runtime", RUNTIME]
        node.run([*run, node.image("glibc"), "sh", "-c", "while :; do sleep 1; done"])
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


@pytest.mark.first_row
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
        # NVIDIA has no driver for musl: the software driver's musl build is mounted for this test alone.
        driver = ["-v", f"{software_gpu.DRIVER_FOLDERS['musl']}/libcuda.so.1:/usr/lib/libcuda.so.1:ro"]
        container = GpuContainer(node).start(node.image("musl"), options=driver)
        step = container.wait_for_step(3)
        container.export(ARCHIVE)
        container.remove()
        restore(node, ARCHIVE).goes_on(step)
    finally:
        clean(node)


@pytest.mark.first_row
def test_preload_registers_the_process_with_the_agent(counter):
    counter.host.run(["vgpu", "doctor", "--json"], check=False)
    shown = json.loads(counter.host.run(["vgpu", "ps", "--json"]).stdout)
    assert [process["registered"] for item in shown["containers"] for process in item["processes"]] == [True]


@pytest.mark.first_row
def test_the_users_own_preload_is_kept(node):
    own = "/lib/x86_64-linux-gnu/libgcc_s.so.1"
    try:
        container = GpuContainer(node).start(node.image("glibc"), options=["--env", f"LD_PRELOAD={own}"])
        step = container.wait_for_step(3)
        for _ in range(2):
            done = node.run(["podman", "exec", "counter", "sh", "-c", "echo $LD_PRELOAD; cat /proc/1/maps"])
            assert done.stdout.splitlines()[0] == f"/run/vgpu-preload/libvgpu.so:{own}"
            assert own in done.stdout.partition("\n")[2]
            container.export(ARCHIVE)
            container.remove()
            step = restore(node, ARCHIVE).goes_on(step)
    finally:
        clean(node)


@pytest.mark.first_row
@pytest.mark.parametrize(
    ("options", "program"),
    [
        pytest.param(["--annotation", "vgpu.snapshot/inject=false"], [], id="switched-off"),
        pytest.param(
            [], ["sh", "-c", "exec env -u LD_PRELOAD counter --out /tmp/steps --mib 16 --interval 50"], id="unset"
        ),
    ],
)
def test_a_program_without_the_preload_is_checkpointed_by_the_driver_alone(node, options, program):
    try:
        container = GpuContainer(node).start(node.image("glibc"), options=options, program=program)
        step = container.wait_for_step(3)
        assert "libvgpu" not in node.run(["podman", "exec", "counter", "cat", "/proc/1/maps"]).stdout
        container.export(ARCHIVE)
        container.remove()
        restore(node, ARCHIVE).goes_on(step)
    finally:
        clean(node)


@pytest.mark.first_row
def test_an_image_without_a_loader_gets_no_preload_and_is_checkpointed(node):
    """Its program is static, so nothing can be preloaded; a child of it that uses the GPU is frozen by the driver."""
    try:
        libraries = "/lib/x86_64-linux-gnu"
        options = ["-v", f"{libraries}:/opt/lib:ro", "-v", "/var/tmp/counter:/opt/counter:ro"]
        node.copy_in(software_gpu.programs("glibc")["counter"], "/var/tmp/counter")
        loader = "/opt/lib/ld-linux-x86-64.so.2 --library-path /opt/lib:/usr/lib64 /opt/counter"
        program = ["sh", "-c", f"{loader} --out /tmp/steps --mib 16 --interval 50; true"]
        container = GpuContainer(node).start(node.image("plain"), options=options, program=program)
        step = container.wait_for_step(3)
        assert "LD_PRELOAD" not in node.run(["podman", "exec", "counter", "env"]).stdout
        container.export(ARCHIVE)
        container.remove()
        restore(node, ARCHIVE).goes_on(step)
    finally:
        clean(node)


def test_a_user_namespace_is_refused_before_anything_stops(node):
    """CRIU cannot bring it back: from inside the namespace it may open neither its images nor podman's mounts."""
    try:
        container = GpuContainer(node).start(node.image("glibc"), options=["--uidmap", "0:100000:65536"])
        step = container.wait_for_step(3)
        refused = container.export(ARCHIVE, check=False)
        assert refused.returncode == 125
        assert "user namespace" in refused.stderr
        container.goes_on(step)
    finally:
        clean(node)


def test_restore_keep_leaves_an_image_that_restores_again(counter):
    step = counter.step()
    counter.podman("checkpoint")
    counter.podman("restore", "--keep")
    step = counter.goes_on(step)
    assert json.loads(counter.host.run(["vgpu", "verify", image_path(counter), "--json"]).stdout)["trusted"] is True
    counter.podman("checkpoint", "--keep")
    counter.podman("restore")
    counter.goes_on(step)


def test_two_restores_from_one_archive_at_once(counter):
    node, step = counter.host, counter.step()
    counter.export(ARCHIVE)
    counter.remove()
    sealed = digest(node, ARCHIVE)
    names = ("one", "two")
    started = [
        node.popen(["podman", "container", "restore", "--import", ARCHIVE, "--name", name], stderr=subprocess.PIPE)
        for name in names
    ]
    for process in started:
        said = process.communicate(timeout=60)[1]
        assert process.returncode == 0, said.decode()
    for name in names:
        GpuContainer(node, name).goes_on(step)
    assert digest(node, ARCHIVE) == sealed


@pytest.mark.first_row
def test_a_second_checkpoint_leaves_nothing_of_the_first_in_the_archive(counter):
    """podman uses one image path again after leave-running, and exports whatever lies there."""
    counter.podman("checkpoint", "--leave-running")
    folder = pathlib.Path(counter.host.root, image_path(counter).lstrip("/"))
    (folder / "core-4711.img").write_bytes(b"stale")
    (folder / "vgpu-pack-00000.bin").write_bytes(b"stale")
    counter.export(ARCHIVE, "--leave-running")
    listed = counter.host.run(["tar", "--zstd", "-tf", ARCHIVE]).stdout
    assert "core-4711" not in listed
    assert "vgpu-pack-00000" not in listed
    assert json.loads(counter.host.run(["vgpu", "verify", ARCHIVE, "--json"]).stdout)["trusted"] is True


@pytest.mark.first_row
@pytest.mark.parametrize("options", [["--ignore-rootfs"], ["--ignore-volumes"], ["--print-stats"]], ids=" ".join)
def test_podman_export_options(node, options):
    """With --ignore-rootfs the steps lie in a volume, for podman leaves the container's own files behind."""
    try:
        node.run(["mkdir", "-p", "/var/tmp/steps"])
        container = GpuContainer(node, out="/steps/out").start(
            node.image("glibc"), options=["-v", "/var/tmp/steps:/steps"]
        )
        step = container.wait_for_step(3)
        container.export(ARCHIVE, *options)
        container.remove()
        restored = [word for word in options if word != "--ignore-volumes"]
        restore(node, ARCHIVE, *restored)
        container.goes_on(step)
    finally:
        clean(node)
        node.run(["rm", "-rf", "/var/tmp/steps"])


def test_checkpoint_and_restore_through_the_rest_api(counter):
    """What podman-py and podman-remote send. The service restores with its own runtime, whatever the archive says."""
    node, step = counter.host, counter.step()
    command = ["podman", "--runtime", RUNTIME, "system", "service"]
    service = node.daemon([*command, "--time", "30", "unix:///run/api.sock"], log="/var/log/api.log")
    try:
        node.wait_for(["test", "-S", "/run/api.sock"])
        remote = ["podman", "--remote", "--url", "unix:///run/api.sock", "container"]
        node.run([*remote, "checkpoint", "--export", ARCHIVE, "counter"])
        counter.remove()
        node.run([*remote, "restore", "--import", ARCHIVE])
        counter.goes_on(step)
    finally:
        service.kill()
        service.wait(timeout=10)
