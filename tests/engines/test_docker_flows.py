"""What a Docker user does with a GPU container: `docker checkpoint create`, `docker start --checkpoint`, on one node and two.

dockerd is Debian's, with its own containerd; the calls are the API's, made through the `docker` package.
What every engine does is in test_support_matrix.py.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import time

import docker
import pytest

from tests.engines.engine_drivers.base import IMAGE, PROGRAM, EngineRefused, flip
from tests.engines.engine_drivers.docker_engine import ADMINISTRATORS, DEVICE, DockerEngine
from tests.engines.gpu_container import STEP
from tests.engines.prepared import LOG, trust
from tests.hosts.host import two_hosts
from tests.hosts.rows import is_wanted
from tools.doc_examples import examples

GPU = {"device_requests": [docker.types.DeviceRequest(driver="cdi", device_ids=[DEVICE])]}

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(180),
    pytest.mark.host_rows("docker"),
    pytest.mark.skipif(not is_wanted("docker"), reason="VGPU_ROWS leaves Docker's host out"),
]


@pytest.fixture(scope="module")
def engines():
    """Docker on two nodes; the second trusts the first."""
    with two_hosts("docker", names=("node-a", "node-b")) as hosts:
        found = [DockerEngine(host) for host in hosts]
        for engine in found:
            engine.set_up()
        trust(hosts[1], hosts[0])
        yield found


@pytest.fixture
def engine(engines):
    return engines[0]


@pytest.fixture
def container(engine, request):
    """A running GPU container of the test's own name."""
    name = request.node.originalname.removeprefix("test_")[:40].strip("_")
    engine.start(name)
    engine.wait_for_step(name, 3)
    yield name
    engine.remove(name)


def pid_of(engine, name):
    return engine.client.api.inspect_container(name)["State"]["Pid"]


def test_the_administrators_keys_and_ours_are_what_dockerd_reads(engine):
    info = engine.client.info()
    assert info["Runtimes"]["vgpu-runtime"]["path"] == "/usr/bin/vgpu-runtime"
    assert info["DefaultRuntime"] == "runc"
    assert info["ExperimentalBuild"]
    assert {"Source": "cdi", "ID": "vgpu.snapshot/gpu=all"} in info["DiscoveredDevices"]
    found = json.loads(engine.host.read("/etc/docker/daemon.json"))
    assert {key: found[key] for key in ADMINISTRATORS} == ADMINISTRATORS


def test_the_preload_is_in_the_container_and_not_in_its_config(engine, container):
    assert "LD_PRELOAD=/run/vgpu-preload/libvgpu.so" in engine.exec(container, "cat", "/proc/1/environ")
    identifier = engine.client.containers.get(container).id
    bundle = f"run/docker/containerd/daemon/io.containerd.runtime.v2.task/moby/{identifier}/config.json"
    assert "vgpu-preload" not in pathlib.Path(engine.host.root, bundle).read_text()


def test_a_process_started_by_docker_exec_has_the_preload_too(engine, container):
    assert "LD_PRELOAD=/run/vgpu-preload/libvgpu.so" in engine.exec(container, "env")


def test_a_checkpoint_leaves_it_running_and_thawed(engine, container):
    step = engine.step(container)
    engine.checkpoint(container, "one", leave_running=True)
    assert engine.is_running(container)
    assert not engine.is_frozen(pid_of(engine, container))
    engine.goes_on(container, step)
    assert engine.checkpoints(container) == ["one"]
    engine.host.run(["vgpu", "verify", f"{engine.folder(container)}/one"])


def test_a_checkpoint_ends_it_and_start_goes_on_from_there(engine, container):
    step = engine.step(container)
    engine.checkpoint(container, "one", leave_running=False)
    assert not engine.is_running(container)
    assert engine.host.run(["ls", "/run/vgpu/state"]).stdout == ""
    engine.start_from(container, "one")
    step = engine.goes_on(container, step)
    assert not engine.is_frozen(pid_of(engine, container))
    engine.checkpoint(container, "two", leave_running=False)
    engine.start_from(container, "two")
    engine.goes_on(container, step)


def test_the_checkpoint_folder_carries_it_to_another_node(engines, container):
    """Docker has no export; the folder below a container made from the same image is enough."""
    first, second = engines
    step = first.step(container)
    path = first.export(container)
    first.host.copy_to(second.host, path)
    try:
        second.bring_in(path, container)
        step = second.goes_on(container, step, has_its_files=False)
        second.checkpoint(container, "again", leave_running=True)
        second.goes_on(container, step, has_its_files=False)
    finally:
        second.remove(container)


def test_a_node_that_does_not_trust_the_signer_refuses(engines, container):
    first, second = engines
    second.start(f"{container}-2")
    try:
        path = second.export(f"{container}-2")
        second.host.copy_to(first.host, path)
        with pytest.raises(EngineRefused, match="does not trust"):
            first.bring_in(path, "stranger")
    finally:
        second.remove(f"{container}-2")
        first.remove("stranger")


@pytest.mark.parametrize("name", ["vgpu-record.json", "vgpu-index.bin", "core-1.img"])
def test_a_changed_checkpoint_is_refused_and_the_intact_one_starts(engine, container, name):
    step = engine.step(container)
    engine.checkpoint(container, "one", leave_running=False)
    path = pathlib.Path(engine.host.root, engine.folder(container).lstrip("/"), "one", name)
    flip(path, path.stat().st_size // 2)
    with pytest.raises(EngineRefused, match=r"OCI runtime restore failed: .*(differs|digest|not the signed)"):
        engine.start_from(container, "one")
    assert not engine.is_running(container)
    flip(path, path.stat().st_size // 2)
    engine.start_from(container, "one")
    engine.goes_on(container, step)


def test_a_checkpoint_without_its_signature_is_refused(engine, container):
    engine.checkpoint(container, "one", leave_running=False)
    folder = pathlib.Path(engine.host.root, engine.folder(container).lstrip("/"), "one")
    (folder / "vgpu-signature.json").unlink()
    with pytest.raises(EngineRefused, match="carries no signature"):
        engine.start_from(container, "one")


def test_a_container_that_its_user_paused_stays_paused(engine, container):
    step = engine.step(container)
    engine.client.containers.get(container).pause()
    engine.checkpoint(container, "one", leave_running=True)
    assert engine.is_frozen(pid_of(engine, container))
    engine.client.containers.get(container).unpause()
    engine.goes_on(container, step)


def test_a_failed_checkpoint_leaves_it_running_and_names_the_reason(engine, container):
    step = engine.step(container)
    engine.host.run(["pkill", "-STOP", "-f", "^counter"])
    try:
        with pytest.raises(EngineRefused, match=r"\(counter\)"):
            engine.checkpoint(container, "one", leave_running=True)
    finally:
        engine.host.run(["pkill", "-CONT", "-f", "^counter"])
    assert not engine.is_frozen(pid_of(engine, container))
    engine.goes_on(container, step)
    assert engine.checkpoints(container) == []


def test_the_limits_that_the_documentation_states(engine, container):
    """docs/docker.md, "Limits": each of them is Docker's own."""
    engine.checkpoint(container, "one", leave_running=True)
    with pytest.raises(EngineRefused, match="already exists"):
        engine.checkpoint(container, "one", leave_running=True)
    engine.checkpoint(container, "two", leave_running=False, folder="/var/tmp/checkpoints")
    engine.host.run(["vgpu", "verify", "/var/tmp/checkpoints/two"])
    with pytest.raises(EngineRefused, match="custom checkpointdir is not supported"):
        engine.start_from(container, "two", **{"checkpoint-dir": "/var/tmp/checkpoints"})
    engine.start_from(container, "one")


def test_a_process_with_an_open_file_of_its_own_cannot_move(engines):
    """docs/docker.md, "Limits": the file is in the container's file system, which stays behind."""
    first, second = engines
    script = "exec 7>/tmp/open; exec counter --out /tmp/steps --mib 4 --interval 50"
    first.client.containers.run(
        IMAGE, ["sh", "-c", script], name="opener", runtime="vgpu-runtime", network_mode="host", detach=True, **GPU
    )
    try:
        step = first.wait_for_step("opener", 2)
        path = first.export("opener")
        first.host.copy_to(second.host, path)
        with pytest.raises(EngineRefused, match="restore failed"):
            second.bring_in(path, "opener")
        first.bring_back("opener")
        first.goes_on("opener", step)
    finally:
        first.remove("opener")
        second.remove("opener")


def test_a_restart_policy_starts_it_from_the_beginning(engine):
    """docs/docker.md, "Limits"."""
    engine._container_of("run", "restarted", restart_policy={"Name": "always"})
    try:
        step = engine.wait_for_step("restarted", 8)
        engine.checkpoint("restarted", "one", leave_running=False)
        ends = time.monotonic() + 15
        while not engine.is_running("restarted"):
            assert time.monotonic() < ends
            time.sleep(0.1)
        engine.wait_for_step("restarted", 1)
        steps = [int(STEP.search(line)["step"]) for line in engine.lines("restarted")]
        assert steps[step:].count(1) == 1, "it is the same program from its first step, in the same file"
    finally:
        engine.remove("restarted")


def test_the_commands_of_the_documentation_do_what_the_page_says(engines):
    """docs/docker.md, typed as a reader would: IMAGE stands for the reader's own, scp for the way between machines."""
    hosts = {"first node": engines[0], "second node": engines[1]}
    for engine in engines:
        engine.host.run(["mkdir", "-p", "/var/tmp/reader"])
    try:
        for example in examples("docs/docker.md"):
            for line in example.commands if example.where else ():
                here = hosts[example.where]
                if line.startswith("scp "):
                    engines[0].host.copy_to(here.host, "/var/tmp/reader/moving.tar")
                    continue
                words = line.replace(" IMAGE", f" {IMAGE} {' '.join(PROGRAM)}")
                type_line(here, words)
                if "start --checkpoint" in line or line.startswith("docker run"):
                    here.wait_for_step("job", 4)
        engines[1].goes_on("job", engines[1].step("job"), has_its_files=False)
    finally:
        for engine in engines:
            engine.remove("job")


def type_line(engine, line):
    """In a shell; where Docker stumbles over its own left-overs, a moment later again, as the page says."""
    for _ in range(30):
        done = engine.host.run(["sh", "-c", f"cd /var/tmp/reader && {line}"], check=False, timeout=90)
        if done.returncode == 0 or "already exists" not in done.stderr:
            break
        time.sleep(0.3)
    assert done.returncode == 0, f"{line}: {done.stderr}"


def test_a_container_with_rm_loses_its_checkpoint(engine):
    """docs/docker.md, "Limits"."""
    engine._container_of("run", "removed-at-exit", auto_remove=True)
    engine.wait_for_step("removed-at-exit", 1)
    with pytest.raises(EngineRefused):
        engine.checkpoint("removed-at-exit", "one", leave_running=False)
    engine.remove("removed-at-exit")


def test_a_container_without_a_gpu_passes_through(engine):
    name = "no-gpu"
    command = ["sh", "-c", "n=0; while :; do n=$((n+1)); echo step $n - ok >> /tmp/steps; sleep 0.05; done"]
    engine.client.containers.run(
        "localhost/vgpu-test:glibc", command, name=name, runtime="vgpu-runtime", network_mode="host", detach=True
    )
    step = engine.wait_for_step(name, 3)
    assert "LD_PRELOAD" not in engine.exec(name, "env")
    engine.checkpoint(name, "one", leave_running=False)
    assert "vgpu-" not in engine.host.run(["ls", f"{engine.folder(name)}/one"]).stdout
    engine.start_from(name, "one")
    engine.goes_on(name, step)
    engine.remove(name)


def test_undo_takes_our_keys_out_and_dockerd_starts_without_them(engines):
    """The last test of the module: the second node is no vgpu node afterwards."""
    host = engines[1].host
    host.run(["vgpu", "setup", "docker", "--undo"])
    assert host.read("/etc/docker/daemon.json") == json.dumps(ADMINISTRATORS)
    host.run(["dockerd", "--validate", "--config-file", "/etc/docker/daemon.json"])


def test_every_call_of_the_module_ended_without_a_traceback(engine):
    assert "Traceback" not in engine.host.read(LOG)
    with contextlib.suppress(FileNotFoundError):
        assert "Traceback" not in engine.host.read("/var/log/dockerd.log")
