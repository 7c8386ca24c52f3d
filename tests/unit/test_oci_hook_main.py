"""vgpu-hook as podman and the low-level runtimes run it."""

import json
import subprocess

import pytest

from oci_hook.control_directory import is_safe_id, make_control_directory, remove_control_directory
from oci_hook.main import container_id_of
from oci_hook.state import cgroup_from, engine_of
from tests.simulators.shim_install import ShimInstall, cpu_spec, elf, gpu_spec


@pytest.fixture
def install(tmp_path):
    return ShimInstall(tmp_path)


def run_hook(install, stage, document, cwd):
    content = document if isinstance(document, bytes) else json.dumps(document).encode()
    return subprocess.run(
        [install.hook, stage], input=content, capture_output=True, cwd=cwd, env={}, timeout=60, check=False
    )


def test_precreate_edits_a_gpu_container_and_makes_its_control_directory(install):
    bundle = install.bundle("c7", podman=True)
    done = run_hook(install, "precreate", gpu_spec(), bundle)
    assert (done.returncode, done.stderr) == (0, b"")
    spec = json.loads(done.stdout)
    assert spec["process"]["env"][-1] == "LD_PRELOAD=/run/vgpu-preload/libvgpu.so"
    assert spec["mounts"][-1]["source"] == str(install.control("c7"))
    assert install.control("c7").stat().st_mode & 0o7777 == 0o755
    again = run_hook(install, "precreate", done.stdout, bundle)
    assert again.stdout == done.stdout


@pytest.mark.parametrize(
    "config",
    [
        json.dumps(cpu_spec(), indent=3).encode(),
        b'{"odd":   "spacing \\u00e9", "n": 1e400, "a":1, "a":2}',
        json.dumps(gpu_spec(annotations={"vgpu.snapshot/inject": "false"}), indent=3).encode(),
    ],
)
def test_precreate_answers_byte_for_byte_for_others(install, config):
    done = run_hook(install, "precreate", config, install.bundle("c7", podman=True))
    assert (done.returncode, done.stdout) == (0, config)
    assert not install.control("c7").exists()


def test_precreate_takes_old_edits_out_when_they_no_longer_apply(install):
    bundle = install.bundle("c7", podman=True)
    edited = json.loads(run_hook(install, "precreate", gpu_spec(), bundle).stdout)
    edited["annotations"]["vgpu.snapshot/inject"] = "false"
    spec = json.loads(run_hook(install, "precreate", edited, bundle).stdout)
    assert spec == gpu_spec(annotations={"io.container.manager": "libpod", "vgpu.snapshot/inject": "false"})


def test_precreate_leaves_an_image_without_matching_preload_alone(install):
    bundle = install.bundle("c7", podman=True)
    (bundle / "rootfs/bin/sh").write_bytes(elf(None))
    config = json.dumps(gpu_spec(), indent=1).encode()
    assert run_hook(install, "precreate", config, bundle).stdout == config


def test_create_runtime_writes_state_and_poststop_removes_it(install):
    bundle = install.bundle("c7", podman=True)
    run_hook(install, "precreate", gpu_spec(), bundle)
    state = {
        "ociVersion": "1.2.0",
        "id": "c7",
        "pid": 1,
        "status": "creating",
        "bundle": str(bundle),
        "annotations": {
            "io.container.manager": "libpod",
            "vgpu.snapshot/preload-build-id": "ab12",
            "vgpu.snapshot/preload-libc": "glibc",
        },
    }
    assert run_hook(install, "createRuntime", state, "/").stdout == b""
    found = install.state("c7")
    assert (found["pid"], found["engine"], found["preload_build_id"]) == (1, "podman", "ab12")
    assert found["cgroup"].startswith("/")
    assert (install.run_dir / "state").stat().st_mode & 0o7777 == 0o700
    assert (install.run_dir / "state/c7.json").stat().st_mode & 0o7777 == 0o600
    (install.control("c7") / "agent.sock").touch()
    assert run_hook(install, "poststop", {**state, "pid": 0}, "/").returncode == 0
    assert install.state("c7") is None
    assert not install.control("c7").exists()


def test_create_runtime_notes_nothing_of_other_containers(install):
    run_hook(install, "createRuntime", {"id": "c8", "pid": 1, "bundle": "/b"}, "/")
    assert install.state("c8") is None


@pytest.mark.parametrize("identifier", ["../../etc", "a/b", "", ".", "..", "x" * 256, "a\nb", "é"])
def test_ids_that_are_no_file_names_are_refused(install, identifier):
    assert not is_safe_id(identifier)
    assert run_hook(install, "poststop", {"id": identifier}, "/").returncode == 0


@pytest.mark.parametrize("words", [[], ["prestart"], ["precreate", "x"]])
def test_an_unknown_stage_is_an_error(install, words):
    done = subprocess.run([install.hook, *words], input=b"{}", capture_output=True, timeout=60, check=False)
    assert done.returncode == 10
    assert done.stdout == b""


def test_a_broken_configuration_fails_the_hook_with_one_line(install):
    install.configure(inject="perhaps")
    done = run_hook(install, "precreate", gpu_spec(), install.bundle("c7", podman=True))
    assert done.returncode == 11
    assert done.stdout == b""
    assert done.stderr.count(b"\n") == 1


@pytest.mark.parametrize(
    ("bundle", "container_id"),
    [
        ("/var/lib/containers/storage/overlay-containers/abc/userdata", "abc"),
        ("/run/containerd/io.containerd.runtime.v2.task/default/web/", "web"),
    ],
)
def test_the_id_comes_from_the_bundle(bundle, container_id):
    assert container_id_of(bundle) == container_id


TASK = "/run/containerd/io.containerd.runtime.v2.task"


@pytest.mark.parametrize(
    ("bundle", "root", "annotations", "engine"),
    [
        ("/var/lib/containers/storage/overlay-containers/x/userdata", None, {}, "podman"),
        ("/b", None, {"io.container.manager": "libpod"}, "podman"),
        (f"{TASK}/default/x", "/run/containerd/runc/default", {}, "containerd"),
        (f"{TASK}/k8s.io/x", "/run/containerd/runc/k8s.io", {}, "containerd"),
        (f"{TASK}/moby/x", "/var/run/docker/runtime-runc/moby", {}, "docker"),
        ("/b", "/run/docker/runtime-runc/moby", {}, "docker"),
        ("/run/containers/storage/overlay-containers/x/userdata", None, {"io.container.manager": "cri-o"}, "cri-o"),
        ("/b/overlay-containers/x/userdata", None, {"io.kubernetes.cri-o.Name": "n"}, "cri-o"),
        ("/b", None, {}, "unknown"),
    ],
)
def test_engines_are_told_apart(bundle, root, annotations, engine):
    assert engine_of(bundle, root, annotations) == engine


@pytest.mark.parametrize(
    ("text", "is_v2", "cgroup"),
    [
        ("0::/machine.slice/libpod-x.scope\n", True, "/machine.slice/libpod-x.scope"),
        ("12:freezer:/libpod/x\n3:cpu,cpuacct:/y\n0::/\n", False, "/libpod/x"),
        ("12:freezer:/\n0::/libpod_parent/x\n", True, "/libpod_parent/x"),
        ("3:cpu:/y\n1:name=systemd:/s\n", False, "/y"),
        ("4:freezer:/a:b\n", False, "/a:b"),
        ("", True, None),
    ],
)
def test_the_cgroup_is_the_mounted_versions(text, is_v2, cgroup):
    assert cgroup_from(text, is_v2=is_v2) == cgroup


def test_the_control_directory_is_made_once_and_removed_with_its_content(tmp_path):
    run = str(tmp_path / "run")
    assert make_control_directory(run, "c1")
    assert not make_control_directory(run, "c1")
    assert (tmp_path / "run/containers").stat().st_mode & 0o7777 == 0o711
    (tmp_path / "run/containers/c1/agent.sock").touch()
    remove_control_directory(run, "c1")
    remove_control_directory(run, "c1")
    assert not (tmp_path / "run/containers/c1").exists()
