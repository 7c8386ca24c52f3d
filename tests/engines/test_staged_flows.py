"""Staged mode with real podman, runc or crun and CRIU: what test_podman_flows.py does, and suspend and resume.

The counter checks its GPU memory at every step, so "it goes on" means that content and addresses are as they were.
"""

from __future__ import annotations

import json

import pytest

from tests.engines.gpu_container import GpuContainer, restore
from tests.engines.prepared import trust
from tests.hosts import software_gpu

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]

ARCHIVE = "/var/tmp/counter.tar.zst"
STAGED = ["--annotation", "vgpu.snapshot/mode=staged"]


@pytest.fixture
def counter(node):
    """A running counter container in staged mode, removed afterwards whatever happened to it."""
    try:
        container = GpuContainer(node).start(node.image("glibc"), options=STAGED)
        container.wait_for_step(3)
        yield container
    finally:
        clean(node)


def clean(*nodes):
    for node in nodes:
        node.run(["podman", "rm", "-a", "-f", "-t", "0"])
        node.run(["rm", "-f", ARCHIVE])


def record_of(host):
    return json.loads(host.run(["vgpu", "inspect", ARCHIVE, "--json"]).stdout)["record"]


def shown(host):
    containers = json.loads(host.run(["vgpu", "ps", "--json"]).stdout)["containers"]
    return containers[0] if containers else None


def vgpu(host, verb, *words, check=True):
    identifier = host.run(["podman", "inspect", "--format", "{{.Id}}", "counter"]).stdout.strip()
    return host.run(["vgpu", verb, identifier, *words], check=check, timeout=120)


def test_export_remove_import(counter):
    step = counter.step()
    counter.export(ARCHIVE)
    record = record_of(counter.host)
    assert record["mode"] == "staged"
    assert record["features"]["required"] == ["staged"]
    assert sum(held["size"] for held in record["processes"][0]["objects"]) >= 16 << 20
    assert json.loads(counter.host.run(["vgpu", "verify", ARCHIVE, "--json"]).stdout)["trusted"] is True
    counter.remove()
    restored = restore(counter.host, ARCHIVE)
    step = restored.goes_on(step)
    restored.export(ARCHIVE)  # and again: what was restored maps memory that the agent made
    assert record_of(counter.host)["generation"] == 2
    restored.remove()
    restore(counter.host, ARCHIVE).goes_on(step)


def test_checkpoint_and_restore_in_place(counter):
    step = counter.step()
    counter.podman("checkpoint")
    counter.podman("restore")
    counter.goes_on(step)


def test_leave_running_goes_on_and_the_archive_restores_on_the_second_node(nodes):
    first, second = nodes
    trust(second, first)
    try:
        container = GpuContainer(first).start(first.image("glibc"), options=STAGED)
        step = container.wait_for_step(3)
        container.export(ARCHIVE, "--leave-running")
        later = container.goes_on(step)
        container.export(ARCHIVE, "-R")
        container.goes_on(later)
        assert record_of(first)["mode"] == "staged"
        first.copy_to(second, ARCHIVE)
        restore(second, ARCHIVE).goes_on(later)
    finally:
        clean(first, second)


@pytest.mark.first_row
@pytest.mark.parametrize("target", ["memory", "folder"])
def test_suspend_and_resume(counter, target):
    host = counter.host
    if target == "folder":
        host.run(["mkdir", "-p", "/var/tmp/suspended"])
    step = counter.step()
    for _ in range(2):
        vgpu(host, "suspend", *(["--to", "/var/tmp/suspended"] if target == "folder" else []))
        entry = shown(host)
        assert entry["suspended"] is True
        assert "suspended" in host.run(["vgpu", "ps"]).stdout
        refused = counter.podman("checkpoint", "--export", ARCHIVE, check=False)
        assert refused.returncode != 0
        assert "suspended" in refused.stderr
        vgpu(host, "resume")
        step = counter.goes_on(step)
    assert shown(host)["mode"] == "staged"


@pytest.mark.first_row
def test_a_suspended_container_can_be_removed(counter):
    vgpu(counter.host, "suspend")
    counter.remove()
    assert counter.host.run(["sh", "-c", "sleep 5; ls /dev/shm | grep -c vgpu-suspended || true"]).stdout.strip() == "0"


def test_mixed_container(node):
    """One process is started without the library: it goes the driver's way, and the record says why."""
    program = (
        "counter --out /tmp/steps --mib 16 --interval 50 & "
        "unset LD_PRELOAD; exec counter --out /tmp/plain --mib 16 --interval 50 --seed 5"
    )
    try:
        container = GpuContainer(node)
        node.run(
            ["podman", "run", "-d", "--runtime", "vgpu-runtime", "--device", "vgpu.snapshot/gpu=all", "--name", "counter",
             *STAGED, node.image("glibc"), "sh", "-c", program],
            timeout=90,
        )  # fmt: skip
        step = container.wait_for_step(3)
        container.export(ARCHIVE)
        record = record_of(node)
        assert sorted(process["mode"] for process in record["processes"]) == ["driver", "staged"]
        reasons = [process.get("modeReason") for process in record["processes"] if process["mode"] == "driver"]
        assert reasons == ["it has no preload library in staged mode"]
        container.remove()
        restored = restore(node, ARCHIVE)
        restored.goes_on(step)
        plain = node.run(["podman", "exec", "counter", "tail", "-n", "1", "/tmp/plain"]).stdout
        assert plain.strip().endswith("ok")
    finally:
        clean(node)


@pytest.mark.first_row
def test_a_tampered_pack_is_refused_by_the_gpu_proof(counter):
    """Size and signature are right, so only the hash on the GPU can tell; the container is not left half restored."""
    host = counter.host
    counter.export(ARCHIVE, "--compress", "none")
    counter.remove()
    host.run(["sh", "-c", f"mkdir /var/tmp/t && cd /var/tmp/t && tar xf {ARCHIVE}"])
    pack = host.run(["sh", "-c", "ls /var/tmp/t/checkpoint/vgpu-pack-*.bin"]).stdout.split()[0]
    host.run(["sh", "-c", f"printf XX | dd of={pack} bs=1 seek=70000 conv=notrunc status=none"])
    host.run(["sh", "-c", f"cd /var/tmp/t && tar cf {ARCHIVE} . && rm -r /var/tmp/t"])
    refused = restore(host, ARCHIVE, check=False)
    assert refused.returncode != 0
    assert "differs" in refused.stderr
    assert shown(host) is None


# Runs on the host: starts the checkpoint, waits for the first partial pack, kills one program by its pid.
KILLER = """
import glob, os, subprocess, sys, time
checkpoint = subprocess.Popen(["podman", "container", "checkpoint", "--export", sys.argv[2], "--leave-running", "counter"])
place = "/var/lib/containers/storage/overlay-containers/*/userdata/checkpoint/.vgpu-partial-*"
while checkpoint.poll() is None and not glob.glob(place):
    time.sleep(0.005)
for pid in [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]:
    try:
        words = open(f"/proc/{pid}/cmdline").read()
    except OSError:
        continue
    if sys.argv[1] in words and "conmon" not in words:  # which names its runtime
        os.kill(pid, 9)
        print("killed", pid)
sys.exit(checkpoint.wait())
"""


@pytest.mark.first_row
@pytest.mark.parametrize("victim", ["/usr/bin/vgpu-agent", "gpu_state.staging.worker", "/usr/bin/vgpu-runtime"])
def test_a_kill_in_the_middle_leaves_the_container_running(node, victim):
    """Agent, staging worker or shim are killed while the copy or the stop is under way; the next checkpoint works."""
    try:
        container = GpuContainer(node).start(node.image("glibc"), mib=128, options=STAGED)
        step = container.wait_for_step(3)
        node.write("/var/tmp/killer.py", KILLER)
        failed = node.run(["python3", "/var/tmp/killer.py", victim, ARCHIVE], check=False, timeout=120)
        assert "killed" in failed.stdout
        assert failed.returncode != 0, failed.stdout + failed.stderr
        assert shown(node) is not None  # starts an agent where there is none
        step = container.goes_on(step)
        container.export(ARCHIVE, "--leave-running")
        container.goes_on(step)
    finally:
        clean(node)


def test_musl_container(node):
    try:
        # NVIDIA has no driver for musl: the software driver's musl build is mounted for this test alone.
        driver = ["-v", f"{software_gpu.DRIVER_FOLDERS['musl']}/libcuda.so.1:/usr/lib/libcuda.so.1:ro"]
        container = GpuContainer(node).start(node.image("musl"), options=[*STAGED, *driver])
        step = container.wait_for_step(3)
        container.export(ARCHIVE)
        assert record_of(node)["mode"] == "staged"
        container.remove()
        restore(node, ARCHIVE).goes_on(step)
    finally:
        clean(node)


def test_several_processes(node):
    try:
        container = GpuContainer(node).start(node.image("glibc"), processes=3, options=STAGED)
        step = container.wait_for_step(3)
        container.export(ARCHIVE, "-R")
        step = container.goes_on(step)
        container.export(ARCHIVE)
        assert [process["mode"] for process in record_of(node)["processes"]] == ["staged"] * 3
        container.remove()
        restore(node, ARCHIVE).goes_on(step)
    finally:
        clean(node)


@pytest.mark.first_row
def test_doctor_names_what_blocks(counter):
    shown_by_doctor = json.loads(vgpu(counter.host, "doctor", "--json", check=False).stdout)
    texts = [check["what"] for check in shown_by_doctor["checks"]]
    assert any("to move" in text for text in texts)
