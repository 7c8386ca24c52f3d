"""A verb that passes through reaches the low-level runtime exactly as the engine meant it."""

import fcntl
import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.simulators.shim_install import ShimInstall, cpu_spec
from tests.unit.test_shim_arguments import RECORDED

PASSED = [line for line, verb, *_, is_handled in RECORDED if not (is_handled and verb in ("checkpoint", "restore"))]


@pytest.fixture
def install(tmp_path):
    return ShimInstall(tmp_path)


@pytest.mark.parametrize("line", PASSED)
def test_argv_is_the_engines(install, line):
    done = install.call(*line.split())
    assert done.returncode == 0
    assert [call.argv for call in install.low_level.calls()] == [[install.low_level.path, *line.split()]]


@pytest.mark.parametrize("words", [["kill", "", "a b", "ü", "\udcff", "*"], ["exec", "c", "sh", "-c", "exit 3"], []])
def test_odd_words_arrive(install, words):
    install.call(*words)
    assert install.low_level.calls()[0].argv[1:] == words


@pytest.mark.parametrize("verb", ["kill", "start", "state", "exec", "delete", "create", "run"])
@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"XDG_RUNTIME_DIR": "/run/user/0"},
        {"LC_CTYPE": "C"},
        {"LC_CTYPE": "C.UTF-8"},
        {"LC_CTYPE": "de_DE.UTF-8", "LANG": "C"},
        {"LC_ALL": "C", "PATH": "/bin", "_OCI_SYNCPIPE": "3", "LD_PRELOAD": "", "PYTHONPATH": "/evil"},
        {"LANG": "POSIX", "EMPTY": "", "ODD": "\udcff"},
    ],
)
def test_the_environment_is_the_engines(install, verb, environment):
    bundle = install.bundle(spec=cpu_spec())
    install.call(verb, *(["--bundle", bundle] if verb in ("create", "run") else []), "c1", env=environment)
    wanted = [os.fsencode(f"{name}={value}") for name, value in environment.items()]
    assert sorted(install.low_level.calls()[0].env) == sorted(wanted)


def test_doubled_and_malformed_environment_entries_arrive(install):
    code = (
        "import ctypes\nlibc = ctypes.CDLL(None)\n"
        f"argv = (ctypes.c_char_p * 3)({install.runtime.encode()!r}, b'kill', None)\n"
        "env = (ctypes.c_char_p * 4)(b'A=1', b'A=2', b'NOEQUALS', None)\n"
        f"libc.execve({install.runtime.encode()!r}, argv, env)\n"
    )
    subprocess.run(["/usr/bin/env", "python3", "-c", code], check=True, timeout=60)
    assert install.low_level.calls()[0].env == [b"A=1", b"A=2", b"NOEQUALS"]


def test_cwd_process_group_and_pid_are_the_engines(install, tmp_path):
    (tmp_path / "w").mkdir()
    process = install.start("state", "c1", cwd=tmp_path / "w")
    process.communicate(timeout=60)
    call = install.low_level.calls()[0]
    assert call.cwd == str(tmp_path / "w")
    assert call.pid == process.pid
    assert call.group == os.getpgid(0)
    assert call.parent == os.getpid()


@pytest.mark.parametrize("verb", ["kill", "create"])
def test_inherited_descriptors_arrive_and_no_others(install, tmp_path, verb):
    bundle = install.bundle(spec=cpu_spec())
    with open(tmp_path / "a", "w") as first, open(tmp_path / "b", "w") as second:
        passed = [fcntl.fcntl(file, fcntl.F_DUPFD, 233) for file in (first, second)]
        words = ["--bundle", bundle] if verb == "create" else []
        install.call(verb, *words, "c1", pass_fds=passed, stdin=subprocess.DEVNULL)
        for descriptor in passed:
            os.close(descriptor)
    descriptors = install.low_level.calls()[0].descriptors
    assert set(descriptors) == {0, 1, 2, *passed}
    assert descriptors[passed[0]] == str(tmp_path / "a")


def test_output_and_status_are_the_low_level_runtimes(install):
    install.low_level.behaves(features={"stdout": '{"ociVersionMin":"1.0.0"}', "stderr": "warning\n", "exit": 7})
    done = install.call("features")
    assert (done.returncode, done.stdout, done.stderr) == (7, b'{"ociVersionMin":"1.0.0"}', b"warning\n")


def test_version_is_the_low_level_runtimes(install):
    assert install.call("--version").stdout.startswith(b"runc version 1.3.6\n")


def test_a_signal_death_is_seen_by_the_engine(install):
    install.low_level.behaves(kill={"dies_of": int(signal.SIGKILL)})
    assert install.call("kill", "c1").returncode == -signal.SIGKILL


@pytest.mark.parametrize("verb", ["kill", "create"])
def test_signal_dispositions_are_not_pythons(tmp_path, verb):
    """Python ignores SIGPIPE and SIGXFSZ; inherited, that would reach the container's processes."""
    install = ShimInstall(tmp_path)
    shell = tmp_path / "bin" / "shell-runtime"
    shell.write_text(
        f"#!/bin/sh\nwhile read -r name value; do echo $name $value; done < /proc/self/status > {tmp_path}/status\n"
    )
    shell.chmod(0o755)
    install.configure(low_level_runtime=str(shell))
    words = ["--bundle", install.bundle()] if verb == "create" else []  # with a GPU: as a child
    assert install.call(verb, *words, "c1").returncode == 0
    lines = dict(line.split(maxsplit=1) for line in (tmp_path / "status").read_text().splitlines() if " " in line)
    assert int(lines["SigIgn:"], 16) == ignored_signals() & ~IGNORED_BY_PYTHON
    assert int(lines["SigBlk:"], 16) == 0


IGNORED_BY_PYTHON = 1 << signal.SIGPIPE - 1 | 1 << signal.SIGXFSZ - 1


def ignored_signals():
    """What this process ignores, some of it perhaps by whoever started the tests."""
    found = re.search(r"^SigIgn:\s*([0-9a-f]+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found[1], 16)


@pytest.mark.parametrize("verb", ["create", "run"])
@pytest.mark.parametrize("form", ["compact", "indented", "opted_out"])
def test_a_container_without_gpu_is_not_touched(install, verb, form):
    spec = cpu_spec()
    if form == "opted_out":
        spec = cpu_spec(annotations={"vgpu.snapshot/inject": "false"}, linux={"devices": [{"path": "/dev/nvidia0"}]})
    bundle = install.bundle(spec=spec)
    path = bundle / "config.json"
    path.write_text(json.dumps(spec, indent=None if form == "compact" else 3))
    before, content, folder = path.stat(), path.read_bytes(), bundle.stat()
    process = install.start(verb, "--bundle", bundle, "c1")
    process.communicate(timeout=60)
    call = install.low_level.calls()[0]
    assert call.pid == process.pid  # the low-level runtime in the shim's place, not a child of it
    assert call.config == content == path.read_bytes()
    after = path.stat()
    assert (after.st_ino, after.st_mtime_ns, after.st_ctime_ns) == (
        before.st_ino,
        before.st_mtime_ns,
        before.st_ctime_ns,
    )
    assert bundle.stat().st_mtime_ns == folder.st_mtime_ns
    assert not install.run_dir.exists()


@pytest.mark.parametrize("config", [None, b"", b"{", b"[]", b'"nvidia"', b'{"nvidia":' + b"[" * 100_000])
def test_a_bundle_without_a_spec_is_the_low_level_runtimes_business(install, config):
    bundle = install.bundle()
    (bundle / "config.json").unlink()
    if config is not None:
        (bundle / "config.json").write_bytes(config)
    install.low_level.behaves(create={"exit": 1, "stderr": "its own words\n"})
    done = install.call("create", "--bundle", bundle, "c1")
    assert (done.returncode, done.stderr) == (1, b"its own words\n")
    assert install.low_level.calls()[0].config == config


@pytest.mark.parametrize(
    "words", [["kill", "c1", "9"], ["delete", "--force", "c1"], ["start", "c1"], ["exec", "c1", "sh"]]
)
def test_a_broken_configuration_does_not_keep_containers_alive(install, words):
    install.configure(inject="perhaps", deadline_restore_s="soon")
    assert install.call(*words).returncode == 0
    assert install.low_level.calls()[0].argv[1:] == words


def test_a_broken_configuration_stops_a_create(install):
    install.configure(inject="perhaps")
    done = install.call("create", "--bundle", install.bundle(), "c1")
    assert done.returncode == 11
    assert b"runtime.conf" in done.stderr
    assert install.low_level.calls() == []


def test_a_missing_low_level_runtime_is_named(install):
    install.configure(low_level_runtime="/nowhere/runc")
    done = install.call("kill", "c1")
    assert done.returncode == 31
    assert b"/nowhere/runc" in done.stderr
    assert b"no such file" not in done.stderr.lower()


def test_the_shim_is_not_its_own_low_level_runtime(install):
    install.configure(low_level_runtime=install.runtime)
    done = install.call("kill", "c1")
    assert done.returncode == 11
    assert b"itself" in done.stderr
