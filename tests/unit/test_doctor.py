"""What `vgpu doctor` says of a node and of a container, and what `vgpu ps` lists."""

import json
import socket
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpu_state import doctor
from gpu_state.known_containers import known_containers
from gpu_state.node_facts import DeviceFacts, NodeFacts, RuntimeFacts
from gpu_state.nvml_links import Link
from gpu_state.processes import GpuProcess, ProcessHoldings, identity_of
from tests.unit.agent_stage import CONTAINER, Stage, cgroup2_mount, wait_until
from vgpu_cli import container_names, known
from vgpu_cli.output import Output
from vgpu_cli.verbs import doctor as doctor_verb
from vgpu_cli.verbs import ps
from vgpu_errors import NoSuchContainer

FACTS = NodeFacts("580.159.04", "13.0", (), "4.2.1", RuntimeFacts("runc", "1.3.6"), "6.18.44", 2, "x86_64", (), {})
needs_cgroup = pytest.mark.skipif(cgroup2_mount() is None, reason="needs root and a writable cgroup2 hierarchy")


# ---- the rules --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("release", "cuda", "status"),
    [
        ("580.159.04", "13.0", "ok"),
        ("570.86.10", "12.8", "ok"),
        ("565.57.01", "12.7", "fail"),
        (None, "12.8", "ok"),
        (None, "12.7", "fail"),
        (None, None, "fail"),
    ],
)
def test_the_driver_must_have_the_checkpoint_calls(release, cuda, status):
    assert doctor.driver(replace(FACTS, driver_release=release, cuda_version=cuda), "").status == status


def test_a_driver_that_does_not_load_is_named_with_its_reason():
    check = doctor.driver(replace(FACTS, cuda_version=None), "no such library")
    assert check.status == "fail"
    assert "no such library" in check.what
    assert "driver_dir" in check.remedy


@pytest.mark.parametrize(
    ("version", "kernel", "status"),
    [
        (None, "6.18.44", "fail"),
        ("3.17.1", "6.18.44", "fail"),
        ("3.17.1", "6.13.0-rc1", "fail"),
        ("3.17.1", "6.1.0-18-amd64", "ok"),
        ("4.1", "6.18.44", "ok"),
        ("4.1.1", "6.18.44", "ok"),
        ("4.2.1", "7.0", "ok"),
    ],
)
def test_criu_must_know_the_kernel(version, kernel, status):
    assert doctor.criu(version, kernel).status == status


@pytest.mark.parametrize(
    ("code", "output", "status"),
    [
        (0, "Looks good.", "ok"),
        (1, "Error (criu/cr-check.c:1): Dirty tracking is OFF. soft-dirty", "warn"),
        (1, "Warn  (criu/x.c:1): CLONE_PARENT | CLONE_NEWPID don't work together\nError: soft-dirty", "warn"),
        (1, "Error (criu/vdso.c:1): Unexpected rt vDSO area bounds", "fail"),
        (1, "Error: soft-dirty\nError: something grave", "fail"),
        (1, "", "fail"),
        (None, "timed out", "fail"),
    ],
)
def test_criu_check_is_read(code, output, status):
    assert doctor.criu_check(code, output).status == status


@pytest.mark.parametrize(
    ("found", "status"),
    [
        (None, "fail"),
        (RuntimeFacts("runc", "1.1.15"), "warn"),
        (RuntimeFacts("runc", "1.3.6"), "ok"),
        (RuntimeFacts("crun", "1.21"), "ok"),
    ],
)
def test_the_low_level_runtime_is_judged(found, status):
    assert doctor.runtime(found).status == status


def test_only_crun_needs_libcriu():
    assert doctor.libcriu(RuntimeFacts("runc", "1.3.6"), is_present=False) is None
    assert doctor.libcriu(RuntimeFacts("crun", "1.21"), is_present=False).status == "fail"
    assert doctor.libcriu(RuntimeFacts("crun", "1.21"), is_present=True).status == "ok"


@pytest.mark.parametrize(
    ("check", "status"),
    [
        (partial(doctor.cuda_plugin, []), "ok"),
        (partial(doctor.cuda_plugin, ["/usr/lib/criu/cuda_plugin.so"]), "warn"),
        (partial(doctor.registered_runtime, None, "/usr/bin/vgpu-runtime"), "fail"),
        (partial(doctor.registered_runtime, "/opt/vgpu-runtime", "/usr/bin/vgpu-runtime"), "fail"),
        (partial(doctor.registered_runtime, "/usr/bin/vgpu-runtime", "/usr/bin/vgpu-runtime"), "ok"),
        (partial(doctor.cgroup, 1, False), "fail"),
        (partial(doctor.cgroup, 2, True), "ok"),
        (partial(doctor.key_file, None, 0), "fail"),
        (partial(doctor.key_file, 0o644, 0), "fail"),
        (partial(doctor.key_file, 0o600, 1000), "fail"),
        (partial(doctor.key_file, 0o600, 0), "ok"),
        (partial(doctor.preload, {"glibc": "a", "musl": None}), "warn"),
        (partial(doctor.preload, {"glibc": "a", "musl": "b"}), "ok"),
        (partial(doctor.space, "/var/tmp", 1 << 30, 0), "warn"),
        (partial(doctor.space, "/var/tmp", 9 << 30, 0), "ok"),
        (partial(doctor.space, "/var/tmp", 9 << 30, 10 << 30), "warn"),
        (partial(doctor.device_nodes, [], 1), "warn"),
        (partial(doctor.device_nodes, ["/dev/nvidia0"], 1), "ok"),
        (partial(doctor.device_nodes, [], 0), "ok"),
    ],
)
def test_other_rules(check, status):
    found = check()
    assert found.status == status
    assert bool(found.remedy) == (status != "ok")


TWO = (DeviceFacts(0, "GPU-a", "X", 1), DeviceFacts(1, "GPU-b", "X", 1))


@pytest.mark.parametrize(
    ("devices", "links", "status", "said"),
    [
        ((), (), None, ""),
        (TWO[:1], (), None, ""),
        (TWO, (Link("GPU-a", "GPU-b", True, True, 18),), "ok", "1 of 1 pairs of GPUs reach each other's memory, 1 by NVLink"),
        (TWO, (Link("GPU-a", "GPU-b", False, True, 0),), "ok", "0 of 1 pairs of GPUs reach each other's memory, 0 by"),
        (TWO, (Link("GPU-a", "GPU-b"),), "warn", "of 1 nothing is known"),
        (TWO, (), "warn", "of 1 nothing is known"),
    ],
)  # fmt: skip
def test_how_gpus_are_connected_is_told(devices, links, status, said):
    found = doctor.gpu_links(replace(FACTS, devices=devices, links=links))
    assert (found.status if found else None) == status
    assert said in (found.what if found else "")


@pytest.mark.parametrize(
    ("files", "named"),
    [
        (["/dev/null", "/dev/nvidia0", "/dev/nvidiactl", "/tmp/x"], []),
        (["/dev/nvidia-caps/nvidia-cap1", "/dev/nvidia-caps/nvidia-cap1"], ["MIG"]),
        (["/dev/nvidia-fs0", "/dev/nvidia-modeset"], ["GPUDirect", "graphics"]),
    ],
)
def test_what_a_process_holds_and_the_driver_does_not_checkpoint(files, named):
    found = doctor.blockers(7, "python", files)
    assert len(found) == len(named)
    assert all(check.status == "fail" and check.remedy for check in found)
    assert all(word in check.what for word, check in zip(named, found, strict=True))


@pytest.mark.parametrize(("state", "status"), [("running", "ok"), ("locked", "fail"), ("checkpointed", "fail")])
def test_a_container_that_somebody_froze_is_not_ready(state, status):
    assert doctor_verb.judge_processes([GpuProcess(1, 1, "python", state)]).status == status


# ---- the looking ----------------------------------------------------------------------------------------


@pytest.fixture
def stage():
    stage = Stage()
    yield stage
    stage.close()


@pytest.fixture
def told(stage, monkeypatch, capsys):
    """Runs a verb against this stage and returns its exit code and document."""
    monkeypatch.setattr(container_names, "PODMAN_SOCKET", stage.folder / "no-podman.sock")
    monkeypatch.setattr(container_names, "ENGINE_COMMANDS", ())
    for module in (ps, known):
        monkeypatch.setattr(module, "known_containers", lambda: known_containers(stage.run_dir / "state"))

    def run(verb, is_json=True, **args):
        defaults = {"socket": stage.socket, "no_start": True, "etc": str(stage.folder), "container": None}
        code = verb.run(SimpleNamespace(**(defaults | args)), Output(is_json))
        text = capsys.readouterr().out
        return code, json.loads(text) if is_json else text

    return run


def checks_of(doc):
    return {check["key"]: check for check in doc["checks"]}


@needs_cgroup
def test_a_node_with_an_agent_is_described(stage, told):
    stage.start_agent()
    code, doc = told(doctor_verb)
    checks = checks_of(doc)
    assert checks["agent"]["status"] == checks["driver"]["status"] == "ok"
    assert "CUDA 13.0" in checks["driver"]["what"]
    assert checks["node key"]["status"] == "fail"
    assert (code, doc["ok"]) == (20, False)
    assert {"criu", "low-level runtime", "cgroup", "policy", "preload"} <= checks.keys()


@needs_cgroup
def test_a_dead_agent_is_the_first_finding(told):
    code, doc = told(doctor_verb)
    assert code == 20
    assert doc["checks"][0]["key"] == "agent"
    assert "does not answer" in doc["checks"][0]["what"]


@needs_cgroup
@pytest.mark.parametrize("has_agent", [True, False])
def test_the_low_level_runtime_of_runtime_conf_is_the_one_that_is_judged(stage, told, has_agent):
    if has_agent:
        stage.start_agent()
    runtime = stage.folder / "other-runc"
    runtime.write_text("#!/bin/sh\necho runc version 1.3.6\n")
    runtime.chmod(0o755)
    (stage.folder / "runtime.conf").write_text(f"low_level_runtime = {runtime}\n")
    checks = checks_of(told(doctor_verb)[1])
    assert checks["settings"]["status"] == "ok"
    assert checks["low-level runtime"]["what"].startswith("other-runc 1.3.6")


@needs_cgroup
def test_a_bad_line_of_runtime_conf_is_named(stage, told):
    (stage.folder / "runtime.conf").write_text("inject = sometimes\n")
    settings = checks_of(told(doctor_verb)[1])["settings"]
    assert settings["status"] == "fail"
    assert "inject" in settings["what"]


@needs_cgroup
@pytest.mark.parametrize("has_driver", [True, False])
def test_the_driver_is_judged_without_the_agent_too(stage, told, monkeypatch, has_driver):
    from gpu_state import driver_location

    for name, value in stage.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("LD_LIBRARY_PATH")
    folder = stage.driver if has_driver else stage.folder / "no-driver"
    monkeypatch.setattr(driver_location, "driver_folder", lambda: str(folder))
    _, doc = told(doctor_verb)
    assert checks_of(doc)["driver"]["status"] == ("ok" if has_driver else "fail")


@needs_cgroup
def test_a_container_is_found_by_the_beginning_of_its_id(stage, told):
    stage.start_agent()
    stage.write_state()
    counter = stage.counter("one")
    code, doc = told(doctor_verb, container=CONTAINER[:3])
    assert code == 0
    assert f"({counter.pid}) running" in checks_of(doc)["processes"]["what"]
    assert checks_of(doc)["unseen memory"]["status"] == "warn"
    with pytest.raises(NoSuchContainer):
        told(doctor_verb, container="another")


@needs_cgroup
def test_an_unreadable_process_is_named_before_the_freeze(stage, told, monkeypatch):
    stage.start_agent()
    stage.write_state()
    holder = stage.spawn(["sh", "-c", f"exec 9<{stage.nodes}/nvidia0; exec sleep 60"], cgroup="")
    wait_until(lambda: Path(f"/proc/{holder.pid}/comm").read_text() == "sleep\n", "the holder")
    # The agent knows this stage's device files by its environment; this process is told.
    held = ProcessHoldings(identity_of(holder.pid), holder.pid, "sleep", (f"{stage.nodes}/nvidia0",), maps_driver=False)
    monkeypatch.setattr(doctor_verb, "gpu_holdings", lambda _cgroup: [held])
    code, doc = told(doctor_verb, container=CONTAINER)
    assert code == 20
    assert f"Process {holder.pid}" in checks_of(doc)["processes"]["what"]


@needs_cgroup
def test_a_container_without_gpu_processes_is_ready(stage, told):
    stage.start_agent()
    stage.write_state()
    code, doc = told(doctor_verb, container=CONTAINER)
    assert (code, doc["checks"][0]["status"]) == (0, "ok")


@needs_cgroup
def test_ps_lists_containers_with_what_the_agent_knows(stage, told):
    stage.start_agent()
    stage.write_state()
    counter = stage.counter("one")
    code, doc = told(ps)
    (entry,) = doc["containers"]
    assert (code, entry["id"], entry["engine"], entry["mode"]) == (0, CONTAINER, "podman", "driver")
    assert [process["pid"] for process in entry["processes"]] == [counter.pid]
    assert entry["devices"] == stage.uuids
    assert entry["gpu_bytes"] >= 2 << 20
    _, text = told(ps, is_json=False)
    assert CONTAINER in text
    assert f"counter ({counter.pid}, running)" in text
    assert "never" in text


@needs_cgroup
def test_ps_without_an_agent_says_what_it_does_not_know(stage, told):
    (stage.run_dir / "state").mkdir(parents=True)
    stage.write_state()
    code, doc = told(ps)
    assert code == 0
    assert "does not answer" in doc["problem"]
    assert doc["containers"][0]["gpu_bytes"] is None


@needs_cgroup
def test_ps_on_a_node_without_gpu_containers(stage, told):
    assert told(ps) == (0, {"containers": [], "problem": None})
    assert told(ps, is_json=False)[1] == "No GPU containers run on this node.\n"


@pytest.mark.parametrize(
    ("checkpoint", "text"),
    [
        (None, "never"),
        ({}, "never"),
        ({"time": 1000}, "0 s ago"),
        ({"time": 941}, "59 s ago"),
        ({"time": 400}, "10 min ago"),
        ({"time": -9000}, "2 h ago"),
        ({"time": -200000}, "2 d ago"),
        ({"time": 2000}, "0 s ago"),
    ],
)
def test_the_age_of_a_checkpoint(checkpoint, text):
    assert ps.checkpoint_text(checkpoint, 1000) == text


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"id": "a"}', '{"id": "a", "pid": "x", "cgroup": "/c"}'])
def test_a_damaged_state_file_is_left_out(tmp_path, content):
    (tmp_path / "a.json").write_text(content)
    (tmp_path / "b.json").write_text(json.dumps({"id": "b", "pid": 1, "cgroup": "/b"}))
    assert [container.id for container in known_containers(tmp_path)] == ["b"]


def test_podman_without_a_socket_names_nothing(tmp_path):
    assert container_names._by_podman_api(tmp_path / "podman.sock") == {}


def test_podman_that_does_not_answer_names_nothing(tmp_path):
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.bind(str(tmp_path / "s"))
        deaf.listen()
        deaf.close()
    assert container_names._by_podman_api(tmp_path / "s") == {}


@pytest.mark.parametrize(
    ("script", "names"),
    [
        ("printf '%s\\n' 'aaa trainer' 'bbb web,alias' 'ccc'", {"aaa": "trainer", "bbb": "web"}),
        ("echo 'aaa trainer'; exit 125", {}),
        ("sleep 30", {}),
    ],
)
def test_names_come_from_the_engines_own_command(script, names, tmp_path, monkeypatch):
    (tmp_path / "docker").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(container_names, "ENGINE_COMMANDS", ("docker", "none-such"))
    monkeypatch.setattr(container_names, "_TIMEOUT_S", 0.5)
    assert container_names.container_names() == names
