"""The low-level runtime: which one, its version, further calls; and the container's cgroup."""

import json
import os
import subprocess
import time

import pytest

from oci_hook.injection import plan_injection
from oci_hook.settings import Settings
from runtime_shim import freezer, low_level, state_file
from runtime_shim.injection import injected_bundle
from runtime_shim.low_level import LowLevel, choose, parse_version
from tests.simulators import low_level_runtime
from tests.simulators.shim_install import ShimInstall, gpu_spec
from vgpu_errors import DeadlineExceeded, NodeError, RuntimeFailed, ToolMissing


@pytest.fixture
def runtime(tmp_path):
    return low_level_runtime.install(tmp_path / "bin")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("runc version 1.3.6\ncommit: v1.3.6-0-g1\nspec: 1.2.1\ngo: go1.24\nlibseccomp: 2.6.0\n", ("runc", "1.3.6")),
        ("runc version 1.1.15+ds1\ncommit: 1.1.15+ds1-2\n", ("runc", "1.1.15+ds1")),
        (
            "crun version 1.28\ncommit: abc\nrundir: /run/user/0/crun\nspec: 1.0.0\n+SYSTEMD +SELINUX +CRIU\n",
            ("crun", "1.28"),
        ),
        ("youki version: 0.5.0\ncommit: x\n", ("youki", "0.5.0")),
        (
            "NVIDIA Container Runtime version 1.17.4\ncommit: 9\nspec: 1.2.0\n\nrunc version 1.2.5\ncommit: y\n",
            ("runc", "1.2.5"),
        ),
        ("", None),
        ("version\n", None),
    ],
)
def test_versions(text, found):
    assert parse_version(text) == found


def test_name_and_version_are_asked_once(runtime):
    found = LowLevel(runtime.path)
    assert (found.name, found.version(), found.name) == ("runc", "1.3.6", "runc")
    assert len(runtime.calls()) == 1


def test_a_runtime_that_does_not_answer_has_its_files_name(tmp_path):
    assert (LowLevel("/nowhere/crun").name, LowLevel("/nowhere/crun").version()) == ("crun", "unknown")


def test_the_first_installed_runtime_is_taken(runtime, monkeypatch):
    monkeypatch.setattr(low_level, "KNOWN_PATHS", ("/nowhere/runc", runtime.path))
    monkeypatch.setenv("PATH", "/nowhere")
    assert choose(Settings()).path == runtime.path
    monkeypatch.setattr(low_level, "KNOWN_PATHS", ("/nowhere/runc",))
    with pytest.raises(ToolMissing, match="/nowhere/runc"):
        choose(Settings())


def test_a_further_call_does_not_write_into_the_engines_log(runtime, tmp_path):
    words = ["--root", "/r", "--log", str(tmp_path / "l"), "--log-format=json", "--systemd-cgroup"]
    LowLevel(runtime.path).call(words, "pause", "c1", deadline_s=10)
    assert runtime.calls()[0].argv[1:] == ["--root", "/r", "--systemd-cgroup", "pause", "c1"]


def test_a_failed_further_call_gives_its_reason(runtime):
    runtime.behaves(pause={"exit": 1, "stderr": "first\nlast words\n"})
    with pytest.raises(RuntimeFailed, match="last words"):
        LowLevel(runtime.path).call([], "pause", "c1", deadline_s=10)
    assert LowLevel(runtime.path).call([], "pause", "c1", deadline_s=10, check=False).status == 1


def test_a_further_call_has_a_deadline(runtime):
    runtime.behaves(pause={"sleep_s": 60})
    with pytest.raises(DeadlineExceeded, match="pause"):
        LowLevel(runtime.path).call([], "pause", "c1", deadline_s=0.5)


# ---- restore's view of injection ----------------------------------------------------------------


def installed(tmp_path):
    install = ShimInstall(tmp_path)
    settings = Settings()
    settings.run_dir, settings.library_dir = str(install.run_dir), str(install.library_dir)
    return install, settings


def test_a_restore_gets_the_build_of_the_checkpoint_not_the_current_one(tmp_path):
    install, settings = installed(tmp_path)
    old = install.library_dir / "preload/musl/0ld".replace("0ld", "01d")
    old.mkdir()
    (old / "libvgpu.so").touch()
    bundle = install.bundle()
    content = (bundle / "config.json").read_bytes()
    with injected_bundle(settings, bundle, "c1", preload_build="musl/01d") as injection:
        seen = json.loads((bundle / "config.json").read_bytes())
        assert seen["mounts"][1]["source"] == str(old / "libvgpu.so")
        assert injection.preload.build_id == "01d"
        assert install.control().is_dir()
    assert (bundle / "config.json").read_bytes() == content
    assert install.control().is_dir()


@pytest.mark.parametrize("build", ["glibc/ffff", "glibc/../../x", "dietlibc/ab12", "glibc/", "glibc"])
def test_a_build_that_is_not_here_is_refused_before_anything_is_touched(tmp_path, build):
    install, settings = installed(tmp_path)
    bundle = install.bundle()
    with pytest.raises(ToolMissing, match="preload"):
        injected_bundle(settings, bundle, "c1", preload_build=build)
    assert not install.run_dir.exists()


def test_a_checkpoint_without_preload_is_restored_without(tmp_path):
    install, settings = installed(tmp_path)
    bundle = install.bundle()
    content = (bundle / "config.json").read_bytes()
    with injected_bundle(settings, bundle, "c1", preload_build=None) as injection:
        assert injection is None
        assert (bundle / "config.json").read_bytes() == content


def test_a_failure_inside_takes_the_control_directory_back(tmp_path):
    install, settings = installed(tmp_path)
    bundle = install.bundle()
    content = (bundle / "config.json").read_bytes()
    with pytest.raises(ValueError, match="inside"), injected_bundle(settings, bundle, "c1"):
        raise ValueError("inside")
    assert (bundle / "config.json").read_bytes() == content
    assert not install.control().exists()


def test_planning_says_why(tmp_path):
    install, settings = installed(tmp_path)
    bundle = install.bundle()
    config = json.dumps(gpu_spec()).encode()
    found = plan_injection(settings, str(bundle), "c1", config)
    assert found.reason == "device /dev/nvidia0; glibc build ab12, loader /lib64/ld-linux-x86-64.so.2"
    assert plan_injection(settings, str(bundle), "../c1", config) is None


# ---- state and cgroup ---------------------------------------------------------------------------


def test_a_checkpoint_is_noted_in_the_state(tmp_path):
    install, _ = installed(tmp_path)
    install.call("create", "--bundle", install.bundle(), "c1")
    run_dir = str(install.run_dir)
    state_file.note_checkpoint("c1", "/i", seconds=1.5, run_dir=run_dir)
    found = state_file.read("c1", run_dir=run_dir)
    assert found["last_checkpoint"]["image_path"] == "/i"
    assert found["last_checkpoint"]["seconds"] == 1.5
    assert found["preload_build_id"] == "ab12"
    state_file.note_checkpoint("gone", "/i", seconds=1, run_dir=run_dir)
    assert state_file.read("gone", run_dir=run_dir) is None
    assert state_file.read("../state/c1", run_dir=run_dir) is None


def test_the_cgroup_of_an_ended_process_is_an_error():
    with pytest.raises(NodeError):
        state_file.cgroup_of(2**22 + 1)


@pytest.mark.parametrize(
    ("files", "is_frozen"),
    [
        ({"c/cgroup.events": "populated 1\nfrozen 1\n"}, True),
        ({"c/cgroup.events": "populated 1\nfrozen 0\n"}, False),
        ({"freezer/c/freezer.state": "FROZEN\n"}, True),
        ({"freezer/c/freezer.state": "FREEZING\n"}, True),
        ({"freezer/c/freezer.state": "THAWED\n"}, False),
        ({}, False),
    ],
)
def test_frozen_is_read_from_either_version(tmp_path, monkeypatch, files, is_frozen):
    monkeypatch.setattr(freezer, "CGROUP_ROOT", str(tmp_path))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    assert freezer.is_frozen("/c") is is_frozen
    assert freezer.folder_of("/c") is None


@pytest.mark.parametrize(
    ("events", "procs", "is_running"),
    [("frozen 0\n", "7\n", True), ("frozen 1\n", "7\n", False), ("frozen 0\n", "", False)],
)
def test_a_container_runs_that_has_processes_and_is_not_frozen(tmp_path, monkeypatch, events, procs, is_running):
    monkeypatch.setattr(freezer, "CGROUP_ROOT", str(tmp_path))
    assert not freezer.is_running("/c")
    (tmp_path / "c").mkdir()
    (tmp_path / "c/cgroup.events").write_text(events)
    (tmp_path / "c/cgroup.procs").write_text(procs)
    assert freezer.is_running("/c") is is_running


def test_the_folder_is_version_2s_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(freezer, "CGROUP_ROOT", str(tmp_path))
    (tmp_path / "c").mkdir()
    (tmp_path / "c/cgroup.freeze").write_text("0")
    assert freezer.folder_of("/c") == str(tmp_path / "c")


@pytest.mark.parametrize("cgroup", ["/", "", "/../x"])
def test_without_a_cgroup_of_its_own_only_the_container_process_is_ended(cgroup):
    process = subprocess.Popen(["/bin/sleep", "60"])
    bystander = subprocess.Popen(["/bin/sleep", "60"])
    try:
        freezer.kill(cgroup, process.pid)
        assert process.wait(5) == -9
        assert bystander.poll() is None
    finally:
        for each in (process, bystander):
            each.kill()
            each.wait(5)


def test_the_engines_own_cgroup_is_never_ended(monkeypatch, tmp_path):
    monkeypatch.setattr(freezer, "CGROUP_ROOT", str(tmp_path))
    monkeypatch.setattr(freezer, "cgroup_of", lambda _pid: "/engine/shared")
    (tmp_path / "engine/shared").mkdir(parents=True)
    bystander = subprocess.Popen(["/bin/sleep", "60"])
    process = subprocess.Popen(["/bin/sleep", "60"])
    (tmp_path / "engine/shared/cgroup.procs").write_text(f"{bystander.pid}\n")
    try:
        for cgroup in ("/engine/shared", "/engine"):
            freezer.kill(cgroup, process.pid)
        assert bystander.poll() is None
    finally:
        for each in (process, bystander):
            each.kill()
            each.wait(5)


FREEZER_V1 = "/sys/fs/cgroup/freezer"


@pytest.mark.skipif(
    os.geteuid() != 0 or not os.access(f"{FREEZER_V1}/cgroup.procs", os.W_OK), reason="needs root and the v1 freezer"
)
def test_a_frozen_v1_container_ends_without_running_on(tmp_path):
    name = f"/vgpu-test-{os.getpid()}"
    folder = FREEZER_V1 + name
    os.mkdir(folder)
    marker = tmp_path / "ran-on"
    process = subprocess.Popen(["/bin/sh", "-c", f"sleep 0.5; echo > {marker}"], start_new_session=True)
    try:
        _write(f"{folder}/cgroup.procs", str(process.pid))
        _write(f"{folder}/freezer.state", "FROZEN")
        until = time.monotonic() + 5
        while not freezer.is_frozen(name) and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(0.6)
        freezer.kill(name, process.pid)
        assert process.wait(5) == -9
        assert not marker.exists()
    finally:
        process.kill()
        process.wait(5)
        _write(f"{folder}/freezer.state", "THAWED")
        os.rmdir(folder)


def _write(path, text):
    with open(path, "w") as file:
        file.write(text)
