"""create and run of a GPU container: edited for the low-level runtime, as before for everybody else."""

import json
import os
import signal
import time

import pytest

from oci_hook.settings import read_settings
from runtime_shim.arguments import parse
from runtime_shim.create import create
from tests.simulators.shim_install import ShimInstall, cpu_spec, elf, gpu_spec


@pytest.fixture
def install(tmp_path):
    return ShimInstall(tmp_path)


def names(folder):
    return sorted(entry.name for entry in folder.iterdir())


def assert_put_back(bundle, content):
    assert (bundle / "config.json").read_bytes() == content
    assert names(bundle) == ["config.json", "rootfs"]


def wait_until(claim, deadline_s=10.0):
    until = time.monotonic() + deadline_s
    while not claim():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.01)


@pytest.mark.parametrize(
    "words",
    [
        ["create", "--bundle", "BUNDLE", "--pid-file", "PIDFILE", "c1"],
        ["--root", "/r", "--log", "LOG", "--log-format", "json", "create", "-b", "BUNDLE", "c1"],
        ["--systemd-cgroup", "create", "--bundle=BUNDLE", "--console-socket", "/s", "--preserve-fds", "2", "c1"],
    ],
)
def test_the_low_level_runtime_sees_the_edits_and_the_engine_never_does(install, words):
    bundle = install.bundle(spec=gpu_spec(process={"args": ["/bin/sh"], "env": ["LD_PRELOAD=/u.so"]}))
    before, content = (bundle / "config.json").stat(), (bundle / "config.json").read_bytes()
    places = {"BUNDLE": str(bundle), "PIDFILE": str(install.folder / "pid"), "LOG": str(install.folder / "log")}
    words = [_filled(word, places) for word in words]
    done = install.call(*words)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    call = install.low_level.calls()[0]
    assert call.argv[1:] == words
    seen = json.loads(call.config)
    assert seen["process"]["env"] == ["LD_PRELOAD=/run/vgpu-preload/libvgpu.so:/u.so"]
    assert [mount["source"] for mount in seen["mounts"][1:]] == [
        str(install.library_dir / "preload/glibc/ab12/libvgpu.so"),
        str(install.control()),
    ]
    assert_put_back(bundle, content)
    assert (bundle / "config.json").stat().st_ino == before.st_ino
    assert install.control().is_dir()


def _filled(word, places):
    for name, value in places.items():
        word = word.replace(name, value)
    return word


def test_the_bundle_may_be_the_working_directory(install):
    bundle = install.bundle()
    install.call("create", "c1", cwd=bundle)
    assert b"libvgpu" in install.low_level.calls()[0].config


def test_a_musl_image_gets_the_musl_build(install):
    bundle = install.bundle()
    (bundle / "rootfs/bin/sh").write_bytes(elf("/lib/ld-musl-x86_64.so.1"))
    install.call("create", "--bundle", bundle, "c1")
    assert b"preload/musl/cd34/libvgpu.so" in install.low_level.calls()[0].config
    assert install.state()["preload_libc"] == "musl"


def test_an_image_that_no_build_fits_runs_unchanged_but_is_known(install):
    bundle = install.bundle()
    (bundle / "rootfs/bin/sh").write_bytes(elf(None))
    content = (bundle / "config.json").read_bytes()
    install.call("create", "--bundle", bundle, "c1")
    assert install.low_level.calls()[0].config == content
    assert_put_back(bundle, content)
    assert install.state()["preload_build_id"] is None
    assert not install.control().exists()


def test_the_state_file_says_what_is_known(install):
    bundle = install.bundle(podman=True)
    install.call("--root", "/r", "create", "--bundle", bundle, "--pid-file", install.folder / "pid", "c1")
    state = install.state()
    assert state.pop("created") == pytest.approx(time.time(), abs=60)
    assert state.pop("cgroup").startswith("/")
    assert state == {
        "id": "c1",
        "bundle": str(bundle),
        "pid": 1,
        "root": "/r",
        "runtime": install.low_level.path,
        "engine": "podman",
        "group": None,
        "preload_build_id": "ab12",
        "preload_libc": "glibc",
        "last_checkpoint": None,
        "leave_running": None,
    }


def test_the_state_file_has_the_group_of_the_annotation(install):
    bundle = install.bundle()
    config = json.loads((bundle / "config.json").read_text())
    config.setdefault("annotations", {})["vgpu.snapshot/group"] = "train"
    (bundle / "config.json").write_text(json.dumps(config))
    install.call("create", "--bundle", bundle, "c1")
    assert install.state()["group"] == "train"


def test_without_a_pid_file_the_low_level_runtime_is_asked(install):
    install.call("--log", install.folder / "log", "create", "--bundle", install.bundle(), "c1")
    assert [call.argv[1:] for call in install.low_level.calls()][1:] == [["state", "c1"]]
    assert install.state()["pid"] == 1


def test_a_failed_create_leaves_nothing(install):
    bundle = install.bundle()
    content = (bundle / "config.json").read_bytes()
    install.low_level.behaves(create={"exit": 3, "stderr": "cgroup trouble\n", "log": "cgroup trouble"})
    log = install.folder / "oci-log"
    done = install.call("--log", log, "--log-format=json", "create", "--bundle", bundle, "c1")
    assert (done.returncode, done.stdout, done.stderr) == (3, b"", b"cgroup trouble\n")
    assert log.read_text() == '{"level": "error", "msg": "cgroup trouble"}\n'
    assert_put_back(bundle, content)
    assert not install.control().exists()
    assert install.state() is None


def test_a_second_create_of_the_same_id_leaves_the_first_ones_directory(install):
    install.call("create", "--bundle", install.bundle(), "c1")
    install.low_level.behaves(create={"exit": 1})
    install.call("create", "--bundle", install.bundle("other"), "c1")
    assert install.control().is_dir()
    assert install.state() is not None


def test_output_is_the_low_level_runtimes_alone(install):
    install.low_level.behaves(create={"stdout": "out", "stderr": "err"})
    done = install.call("create", "--bundle", install.bundle(), "c1")
    assert (done.stdout, done.stderr) == (b"out", b"err")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGSEGV])
def test_config_is_put_back_when_the_child_is_killed(install, number):
    bundle = install.bundle()
    content = (bundle / "config.json").read_bytes()
    install.low_level.behaves(create={"dies_of": int(number)})
    assert install.call("create", "--bundle", bundle, "c1").returncode == 128 + number
    assert_put_back(bundle, content)
    assert not install.control().exists()


def test_config_is_put_back_when_the_shim_is_asked_to_end(install):
    bundle = install.bundle()
    content = (bundle / "config.json").read_bytes()
    install.low_level.behaves(create={"sleep_s": 30})
    process = install.start("create", "--bundle", bundle, "c1")
    install.low_level.wait_for_call("create")
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 143
    assert install.low_level.signals() == ["SIGTERM"]
    assert_put_back(bundle, content)


def test_the_next_call_repairs_what_a_killed_shim_left(install):
    bundle = install.bundle()
    content = (bundle / "config.json").read_bytes()
    install.low_level.behaves(create={"sleep_s": 30})
    process = install.start("create", "--bundle", bundle, "c1")
    child = install.low_level.wait_for_call("create")
    process.kill()
    process.wait(10)
    wait_until(lambda: not _is_alive(child.pid))
    assert (bundle / "config.json").read_bytes() != content
    install.low_level.behaves()
    assert install.call("create", "--bundle", bundle, "c1").returncode == 0
    assert install.low_level.calls()[-2].config == install.low_level.calls()[0].config  # edited once, not twice
    assert_put_back(bundle, content)


def test_a_killed_shim_is_repaired_for_a_container_that_opted_out_since(install):
    bundle = install.bundle()
    content = (bundle / "config.json").read_bytes()
    install.low_level.behaves(create={"sleep_s": 30})
    process = install.start("create", "--bundle", bundle, "c1")
    install.low_level.wait_for_call("create")
    process.kill()
    process.wait(10)
    install.low_level.behaves()
    install.configure(inject="never")
    install.call("create", "--bundle", bundle, "c1")
    assert install.low_level.calls()[-1].config == content


def _is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_run_in_the_foreground_puts_config_back_while_it_runs(install):
    bundle = install.bundle()
    content = (bundle / "config.json").read_bytes()
    install.low_level.behaves(run={"read_after_s": 0.2, "sleep_s": 30})
    process = install.start("run", "--bundle", bundle, "c1")
    wait_until(lambda: install.state() is not None)
    assert b"libvgpu" in install.low_level.wait_for_call("run").config
    assert_put_back(bundle, content)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 143
    assert install.state() is None
    assert not install.control().exists()


def test_a_run_that_ends_gives_its_status_soon(install):
    install.low_level.behaves(run={"sleep_s": 0.4, "exit": 0, "stdout": "hello"})
    started = time.monotonic()
    done = install.call("run", "--bundle", install.bundle(), "c1")
    assert (done.returncode, done.stdout) == (0, b"hello")
    assert time.monotonic() - started < 3
    assert install.state() is None


def test_a_detached_run_is_like_create(install):
    install.call("run", "--detach", "--bundle", install.bundle(), "c1")
    assert install.state()["pid"] == 1
    assert install.control().is_dir()


def test_a_kept_run_stays_known(install):
    install.low_level.behaves(run={"sleep_s": 0.4})
    install.call("run", "--keep", "--bundle", install.bundle(), "c1")
    assert install.state() is not None


def test_precreate_and_the_shim_do_not_add_up(install):
    bundle = install.bundle()
    install.call("create", "--bundle", bundle, "c1")
    once = install.low_level.calls()[0].config
    (bundle / "config.json").write_bytes(once)  # as if precreate had made it
    install.call("create", "--bundle", bundle, "c1")
    assert json.loads(install.low_level.calls()[-2].config) == json.loads(once)
    assert (bundle / "config.json").read_bytes() == once


@pytest.mark.parametrize("identifier", ["../x", "a/b", "."])
def test_an_odd_id_is_left_to_the_low_level_runtime(install, identifier):
    bundle = install.bundle()
    content = (bundle / "config.json").read_bytes()
    install.call("create", "--bundle", bundle, identifier)
    assert install.low_level.calls()[0].config == content
    assert not install.run_dir.exists()


def test_inject_always_covers_containers_without_gpu(install):
    install.configure(inject="always")
    install.call("create", "--bundle", install.bundle(spec=cpu_spec()), "c1")
    assert b"libvgpu" in install.low_level.calls()[0].config


def test_crun_config_option_passes_through(install):
    bundle = install.bundle()
    install.call("create", "--bundle", bundle, "--config", "/other.json", "c1")
    assert b"libvgpu" not in install.low_level.calls()[0].config


def test_a_control_directory_that_cannot_be_made_fails_the_create_and_undoes(install):
    bundle = install.bundle()
    content = (bundle / "config.json").read_bytes()
    install.run_dir.write_text("a file in the way")
    done = install.call("create", "--bundle", bundle, "c1")
    assert done.returncode == 1
    assert done.stdout == b""
    assert done.stderr.count(b"\n") == 1
    assert install.low_level.calls() == []
    assert_put_back(bundle, content)


def test_a_state_file_that_cannot_be_written_does_not_undo_a_created_container(install):
    install.run_dir.mkdir()
    (install.run_dir / "state").write_text("a file in the way")
    done = install.call("create", "--bundle", install.bundle(), "c1")
    assert (done.returncode, done.stderr) == (0, b"")


def test_the_debug_log_is_written_only_when_configured(install):
    install.call("create", "--bundle", install.bundle(), "c1")
    install.configure(log=str(install.folder / "runtime.log"))
    install.call("create", "--bundle", install.bundle("c2"), "c2")
    lines = (install.folder / "runtime.log").read_text().splitlines()
    assert len(lines) == 1
    assert "create c2: device /dev/nvidia0; glibc build ab12" in lines[0]
    assert os.stat(install.folder / "runtime.log").st_mode & 0o777 == 0o600


def test_a_rootless_engine_that_may_not_write_gets_its_container_unchanged(install, monkeypatch):
    bundle = install.bundle()
    content = (bundle / "config.json").read_bytes()
    monkeypatch.setattr("runtime_shim.create._is_in_user_namespace", lambda: True)
    monkeypatch.setattr("os.access", lambda *_: False)
    passed = _Passed()
    with pytest.raises(_Passed):
        create(
            parse(["rt", "create", "--bundle", str(bundle), "c1"]),
            read_settings(str(install.folder / "runtime.conf")),
            passed,
        )
    assert passed.config == content
    assert not install.run_dir.exists()


class _Passed(Exception):
    """A low-level runtime that notes what it would have seen."""

    def replace_process(self, call):
        with open(os.path.join(call.get("bundle"), "config.json"), "rb") as file:
            self.config = file.read()
        raise self
