"""The child lives and dies as if the engine had started it: signals, parent death, deadline, status, streams."""

import fcntl
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from runtime_shim.supervise import FORWARDED, Shield, run_child
from tests.simulators import low_level_runtime
from tests.simulators.shim_install import ROOT, ShimInstall
from vgpu_errors import ToolMissing

SH = "/bin/sh"


@pytest.fixture
def install(tmp_path):
    return ShimInstall(tmp_path)


def wait_until(claim, deadline_s=10.0):
    until = time.monotonic() + deadline_s
    while not claim():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.01)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("script", "status"), [("exit 0", 0), ("exit 3", 3), ("exit 255", 255), ("kill -9 $$", 137), ("kill -TERM $$", 143)]
)
def test_status_is_the_shells(script, status):
    done = run_child([SH, "-c", script], deadline_s=20)
    assert (done.status, done.has_timed_out) == (status, False)


def test_a_missing_program_is_an_error_of_its_own():
    with pytest.raises(ToolMissing, match="/nowhere/runc"):
        run_child(["/nowhere/runc", "create"])


def test_streams_are_kept_only_where_asked(capfd):
    done = run_child([SH, "-c", "echo out; echo err >&2"], capture_stderr=True, deadline_s=20)
    assert (done.stdout, done.stderr) == (b"", b"err\n")
    assert capfd.readouterr().out == "out\n"
    done = run_child([SH, "-c", "echo out; echo err >&2"], capture_stdout=True, deadline_s=20)
    assert (done.stdout, done.stderr) == (b"out\n", b"")


def test_a_large_output_does_not_block():
    done = run_child([SH, "-c", "head -c 3000000 /dev/zero"], capture_stdout=True, deadline_s=20)
    assert len(done.stdout) == 3_000_000


def test_no_descriptor_is_left_open_or_handed_on():
    before = set(os.listdir("/proc/self/fd"))
    done = run_child([SH, "-c", "ls /proc/self/fd"], capture_stdout=True, capture_stderr=True, deadline_s=20)
    assert set(os.listdir("/proc/self/fd")) == before
    kept = {number for number in before if number not in "012" and _is_inherited(number)}
    assert {int(number) for number in done.stdout.split()} - {0, 1, 2, 3} <= {int(number) for number in kept}


def _is_inherited(number):
    try:
        return os.get_inheritable(int(number))
    except OSError:
        return False


def test_a_given_environment_replaces_the_own():
    done = run_child(["/usr/bin/env"], env={"A": "1"}, capture_stdout=True, deadline_s=20)
    assert done.stdout == b"A=1\n"


def test_a_deadline_ends_the_child_and_says_so():
    started = time.monotonic()
    done = run_child(["/bin/sleep", "60"], deadline_s=0.3)
    assert (done.status, done.has_timed_out) == (143, True)
    assert time.monotonic() - started < 5


def test_a_child_that_does_not_listen_is_killed(tmp_path):
    runtime = low_level_runtime.install(tmp_path / "bin")
    runtime.behaves(restore={"sleep_s": 60, "ignores_sigterm": True})
    done = run_child([runtime.path, "restore", "c1"], deadline_s=0.8, grace_s=0.3)
    assert (done.status, done.has_timed_out) == (137, True)
    assert runtime.signals() == ["SIGTERM"]


def test_what_the_child_started_is_ended_with_it(tmp_path):
    runtime = low_level_runtime.install(tmp_path / "bin")
    runtime.behaves(restore={"sleep_s": 60, "starts": 61})
    marker = ["/bin/sleep", "sleep", "61"]
    done = run_child([runtime.path, "restore", "c1"], deadline_s=1.0)
    assert done.has_timed_out
    left = [pid for pid in os.listdir("/proc") if pid.isdigit() and _words(pid) == marker[1:] and is_alive(int(pid))]
    assert left == []


def _words(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1]
    except OSError:
        return []


def test_a_child_in_time_is_left_alone():
    done = run_child([SH, "-c", "sleep 0.2; exit 5"], deadline_s=20)
    assert (done.status, done.has_timed_out) == (5, False)


def test_the_tick_is_called_until_it_is_satisfied():
    calls = []

    def tick():
        calls.append(1)
        return len(calls) == 3

    started = time.monotonic()
    assert run_child(["/bin/sleep", "0.5"], on_tick=tick, deadline_s=20).status == 0
    assert len(calls) == 3
    assert time.monotonic() - started < 0.9


def test_a_call_within_a_tick_leaves_the_outer_child_its_end():
    def tick():
        run_child(["/bin/sleep", "0.3"], forwards_signals=False)  # the outer child ends meanwhile
        return True

    started = time.monotonic()
    assert run_child([SH, "-c", "sleep 0.1; exit 4"], on_tick=tick, deadline_s=20).status == 4
    assert time.monotonic() - started < 0.9


def test_an_engine_that_ignores_its_children_gets_the_status_all_the_same():
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert run_child([SH, "-c", "exit 6"], deadline_s=20).status == 6
        assert signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_the_mask_is_as_before_and_the_childs_too():
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with Shield():
        done = run_child(
            [SH, "-c", "while read -r n v; do case $n in SigBlk:) echo $v;; esac; done </proc/self/status"],
            capture_stdout=True,
            deadline_s=20,
        )
        assert set(signal.pthread_sigmask(signal.SIG_BLOCK, ())) >= FORWARDED
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
    assert int(done.stdout, 16) == 0


def test_a_shield_holds_a_signal_back_until_its_end():
    arrived = []
    before = signal.signal(signal.SIGUSR1, lambda *_: arrived.append(1))
    try:
        with Shield():
            # To this thread: other tests' threads in this process would take one for the process, and the shim has one thread.
            signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
            assert arrived == []
        assert arrived == [1]
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGWINCH"])
def test_signals_reach_the_low_level_runtime(install, name):
    install.low_level.behaves(create={"sleep_s": 1.5, "ignores_sigterm": True})
    process = install.start("create", "--bundle", install.bundle(), "c1")
    install.low_level.wait_for_call("create")
    process.send_signal(getattr(signal, name))
    wait_until(lambda: install.low_level.signals() == [name])
    assert process.wait(10) == 0
    assert install.low_level.signals() == [name]


def test_a_terminals_interrupt_arrives_once(install):
    """The terminal signals the whole process group; forwarding would double it."""
    install.low_level.behaves(run={"sleep_s": 1.0})
    install.bundle()
    pid, master = pty.fork()
    if pid == 0:
        os.execve(install.runtime, [install.runtime, "run", "--bundle", str(install.folder / "bundles/c1"), "c1"], {})
    try:
        install.low_level.wait_for_call("run")
        os.write(master, b"\x03")
        wait_until(install.low_level.signals)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert install.low_level.signals() == ["SIGINT"]
    finally:
        os.close(master)


@pytest.mark.parametrize("verb", ["create", "run"])
def test_the_childs_life_hangs_on_the_shims(install, verb):
    install.low_level.behaves(**{verb: {"sleep_s": 60}})
    process = install.start(verb, "--bundle", install.bundle(), "c1")
    child = install.low_level.wait_for_call(verb)
    assert (child.parent, child.pdeathsig) == (process.pid, signal.SIGKILL)
    process.kill()
    process.wait(10)
    wait_until(lambda: not is_alive(child.pid))


def test_the_engines_death_ends_shim_and_child(install):
    """As containerd does: the engine sets the parent-death signal for the runtime, then dies."""
    install.low_level.behaves(create={"sleep_s": 60})
    engine_code = (
        "import ctypes, os, sys, time\n"
        "if os.fork() == 0:\n"
        "    ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)\n"
        "    os.execve(sys.argv[1], sys.argv[1:], {})\n"
        "time.sleep(60)\n"
    )
    engine = subprocess.Popen(
        [sys.executable, "-c", engine_code, install.runtime, "create", "--bundle", str(install.bundle()), "c1"]
    )
    child = install.low_level.wait_for_call("create")
    assert is_alive(child.parent)
    engine.kill()
    engine.wait(10)
    wait_until(lambda: not is_alive(child.parent) and not is_alive(child.pid))


def test_a_pass_through_keeps_the_engines_parent_death_signal(install):
    code = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9, 0, 0, 0); os.execve(sys.argv[1], sys.argv[1:], {})"
    subprocess.run([sys.executable, "-c", code, install.runtime, "start", "c1"], check=True, timeout=60)
    assert install.low_level.calls()[0].pdeathsig == signal.SIGKILL


def test_a_child_whose_parent_died_before_it_was_tied_ends():
    """The race between fork and prctl: the parent's pid no longer matches."""
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "import os\n"
        "from runtime_shim import supervise\n"
        "streams = supervise._Streams(False, False)\n"
        "supervise._become(['/bin/echo', 'ran'], None, streams, os.getpid(), ignore_children=False)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (137, b"")


def test_socket_activation_names_the_child(install):
    """LISTEN_PID must be the runtime's own pid, or it ignores the descriptors."""
    code = "import os, sys\nos.execve(sys.argv[1], sys.argv[1:], {'LISTEN_PID': str(os.getpid()), 'LISTEN_FDS': '1'})\n"
    words = ["create", "--bundle", str(install.bundle()), "c1"]
    subprocess.run([sys.executable, "-c", code, install.runtime, *words], check=True, timeout=60)
    call = install.low_level.calls()[0]
    assert f"LISTEN_PID={call.pid}".encode() in call.env


def test_the_childs_context_is_the_engines(install, tmp_path):
    (tmp_path / "w").mkdir()
    with open(tmp_path / "a", "w") as file:
        passed = fcntl.fcntl(file, fcntl.F_DUPFD, 233)
        done = install.call(
            "create",
            "--bundle",
            install.bundle(),
            "c1",
            cwd=tmp_path / "w",
            env={"LANG": "C", "A": "\udcff"},
            pass_fds=(passed,),
            stdin=subprocess.DEVNULL,
        )
        os.close(passed)
    assert done.returncode == 0
    call = install.low_level.calls()[0]
    assert call.cwd == str(tmp_path / "w")
    assert call.group == os.getpgid(0)
    assert sorted(call.env) == [b"A=\xff", b"LANG=C"]
    assert set(call.descriptors) == {0, 1, 2, passed}
