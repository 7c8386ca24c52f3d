"""exec gives its process the preload, delete takes our traces away; both only for injected containers."""

import json

import pytest

from oci_hook.exec_process import edited_process
from tests.simulators.shim_install import ShimInstall

PROCESS = {"terminal": False, "args": ["sh"], "env": ["PATH=/bin", "LD_PRELOAD=/u.so"], "cwd": "/"}


@pytest.fixture
def install(tmp_path):
    return ShimInstall(tmp_path)


@pytest.fixture
def process_file(tmp_path):
    path = tmp_path / "exec-process-1"
    path.write_text(json.dumps(PROCESS, indent=2))
    path.chmod(0o644)
    return path


@pytest.mark.parametrize("form", [["--process", "FILE"], ["--process=FILE"], ["-p", "FILE"]])
def test_exec_into_an_injected_container_gets_the_preload(install, process_file, form):
    install.call("create", "--bundle", install.bundle(), "c1")
    words = ["exec", "--detach", *[word.replace("FILE", str(process_file)) for word in form], "c1"]
    process = install.start(*words)
    process.communicate(timeout=60)
    call = install.low_level.calls()[-1]
    assert call.argv[1:] == words
    assert call.pid == process.pid  # the low-level runtime in the shim's place
    seen = json.loads(call.process)
    assert seen == {**PROCESS, "env": ["PATH=/bin", "LD_PRELOAD=/run/vgpu-preload/libvgpu.so:/u.so"]}
    assert process_file.stat().st_mode & 0o7777 == 0o644
    assert sorted(entry.name for entry in process_file.parent.glob("exec-process*")) == ["exec-process-1"]


def test_exec_into_another_container_is_not_touched(install, process_file):
    before = process_file.stat(), process_file.read_bytes()
    install.call("exec", "--process", process_file, "other")
    assert (process_file.stat().st_mtime_ns, process_file.read_bytes()) == (before[0].st_mtime_ns, before[1])
    assert install.low_level.calls()[0].process == before[1]


@pytest.mark.parametrize("content", [None, b"", b"[]", b"{"])
def test_an_odd_process_file_is_the_low_level_runtimes_business(install, tmp_path, content):
    install.call("create", "--bundle", install.bundle(), "c1")
    path = tmp_path / "p"
    if content is not None:
        path.write_bytes(content)
    assert install.call("exec", "--process", path, "c1").returncode == 0
    assert install.low_level.calls()[-1].process == content


def test_the_process_edit_is_idempotent():
    once = edited_process(json.dumps(PROCESS).encode())
    assert edited_process(once) == once
    assert edited_process(b"{}") == b'{"env":["LD_PRELOAD=/run/vgpu-preload/libvgpu.so"]}'


def test_delete_takes_the_traces_away(install):
    install.call("create", "--bundle", install.bundle(), "c1")
    (install.control() / "agent.sock").touch()
    assert install.call("delete", "--force", "c1").returncode == 0
    assert install.low_level.calls()[-1].argv[1:] == ["delete", "--force", "c1"]
    assert not install.control().exists()
    assert install.state() is None


def test_a_failed_delete_keeps_them(install):
    install.call("create", "--bundle", install.bundle(), "c1")
    install.low_level.behaves(delete={"exit": 1, "stderr": "still running\n"})
    done = install.call("delete", "c1")
    assert (done.returncode, done.stderr) == (1, b"still running\n")
    assert install.control().is_dir()
    assert install.state() is not None


def test_delete_of_another_container_passes_through(install):
    process = install.start("delete", "other")
    process.communicate(timeout=60)
    assert install.low_level.calls()[0].pid == process.pid


def test_delete_leaves_other_containers_alone(install):
    install.call("create", "--bundle", install.bundle("c1"), "c1")
    install.call("create", "--bundle", install.bundle("c2"), "c2")
    install.call("delete", "c1")
    assert install.control("c2").is_dir()
    assert install.state("c2") is not None


@pytest.mark.parametrize("container", ["c1", "other"])
def test_resume_of_a_container_that_may_be_paused_is_the_low_level_runtimes(install, container):
    install.call("create", "--bundle", install.bundle("c1"), "c1")
    process = install.start("resume", container)
    process.communicate(timeout=60)
    last = install.low_level.calls()[-1]
    assert (last.argv[1:], last.pid) == (["resume", container], process.pid)
