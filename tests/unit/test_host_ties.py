"""What processes hold of the host: what is found in /proc, what CRIU's options make of it, and what is refused.

The finding is tested on real processes in a cgroup of their own; the judging with values alone.
"""

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpu_state import doctor, socket_tables
from gpu_state.deadline import Deadline
from gpu_state.host_tie_rules import KINDS, rule_of
from gpu_state.host_ties import CriuSide, Tie, judge, judge_all, refused, summary
from gpu_state.host_ties_found import find_host_ties
from gpu_state.node_facts import RuntimeFacts
from runtime_shim import host_side
from runtime_shim.arguments import parse
from tests.unit.agent_stage import cgroup2_mount
from vgpu_errors import HostTieBlocks

needs_cgroup = pytest.mark.skipif(cgroup2_mount() is None, reason="needs root and a writable cgroup2 hierarchy")
FACTS = SimpleNamespace(criu_version="4.2.1", kernel="6.18.44-1")
OLD = {"version": (4, 1, 1), "kernel": (6, 18)}


def tie(kind, what="thing", size=0, count=1):
    return Tie(kind, 7, 1, "python3", what, size, count)


# ---- judging ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_that_is_refused_has_a_remedy(kind):
    finding = judge(tie(kind, size=64 << 20), CriuSide())
    assert rule_of(kind).what in finding.text
    if finding.outcome == "refused":
        assert finding.remedy
        assert finding.remedy.endswith(".")


@pytest.mark.parametrize(
    ("kind", "option"),
    [
        ("tcp-loopback", "tcp-established"),
        ("tcp-inside", "tcp-established"),
        ("tcp-outside", "tcp-established"),
        ("tcp-waiting", "skip-in-flight"),
        ("unix-outside-datagram", "ext-unix-sk"),
        ("deleted-link", "link-remap"),
        ("file-lock", "file-locks"),
    ],
)
def test_an_option_lets_it_through(kind, option):
    without = judge(tie(kind), CriuSide(options=frozenset(("shell-job",))))
    assert without.outcome == "refused"
    assert option in without.text
    assert option in without.remedy
    assert judge(tie(kind), CriuSide(options=frozenset((option,)))).outcome != "refused"


@pytest.mark.parametrize(
    ("kind", "engine", "told"),
    [
        ("tcp-loopback", "podman", "Give --tcp-established to 'podman container checkpoint' and to 'podman container restore'."),
        ("file-lock", "podman", "Give --file-locks to 'podman container checkpoint' and to 'podman container restore'."),
        ("tcp-loopback", "containerd", "Give --tcp-established to 'vgpu containerd checkpoint'."),
        ("tcp-loopback", "docker", "Write the line 'tcp-established' into /etc/criu/runc.conf."),
        ("deleted-link", "podman", "Write the line 'link-remap' into /etc/criu/runc.conf."),
    ],
)  # fmt: skip
def test_the_remedy_names_where_the_option_goes(kind, engine, told):
    finding = judge(tie(kind), CriuSide(engine=engine))
    assert finding.remedy.startswith(told)
    assert finding.by_engine_option == told.startswith("Give")


@pytest.mark.parametrize(
    ("size", "limit_mib", "outcome", "line"),
    [
        (1 << 20, 1, "restored", ""),
        ((1 << 20) + 4096, 1, "refused", "'ghost-limit 2M'"),
        (9 << 20, 1, "refused", "'ghost-limit 16M'"),
        (9 << 20, 16, "restored", ""),
        (0, 1, "restored", ""),
    ],
)
def test_a_deleted_file_must_not_be_larger_than_the_limit(size, limit_mib, outcome, line):
    finding = judge(tie("deleted-file", "/dev/shm/nccl-AbCd", size), CriuSide(ghost_limit_bytes=limit_mib << 20))
    assert finding.outcome == outcome
    assert line in finding.remedy
    assert ("NCCL_SHM_DISABLE" in finding.remedy) == bool(line)


@pytest.mark.parametrize(
    ("side", "outcome"),
    [
        ({}, "restored"),
        ({"version": (4, 2), "kernel": (6, 18)}, "restored"),
        ({"version": (4, 1, 1), "kernel": (6, 15)}, "restored"),
        (OLD, "refused"),
    ],
)
def test_criu_before_4_2_dumps_no_network_socket_on_a_new_kernel(side, outcome):
    assert judge(tie("inet", ""), CriuSide(**side)).outcome == outcome


def test_connections_need_a_way_to_be_locked():
    options = frozenset(("tcp-established",))
    finding = judge(tie("tcp-loopback"), CriuSide(options=options, can_lock_network=False))
    assert finding.outcome == "refused"
    assert "network-lock nftables" in finding.remedy


@pytest.mark.parametrize(
    ("side", "outcome", "word"),
    [
        ({"engine": "podman"}, "restored", ""),
        ({"engine": "podman", "leaves_running": True}, "note", "goes on"),
        ({"engine": "containerd", "leaves_running": True}, "restored", ""),
        ({"engine": "containerd", "carries_shm": False}, "note", "no copy"),
    ],
)
def test_named_shared_memory_comes_back_where_somebody_carries_it(side, outcome, word):
    finding = judge(tie("shm", "/dev/shm/x", 4096), CriuSide(**side))
    assert finding.outcome == outcome
    assert word in finding.text


def test_an_event_that_processes_share_is_named_where_nobody_carries_its_file():
    finding = judge(tie("shm", "/dev/shm/cuda.shm.0.1f.1", 4096), CriuSide(carries_shm=False))
    assert (finding.outcome, "/dev/shm/cuda.shm.0.1f.1" in finding.text) == ("note", True)
    assert finding.remedy.startswith("Destroy the events that processes share")


def test_a_kind_of_a_newer_agent_is_a_note():
    assert judge(tie("something-new"), CriuSide()).outcome == "note"


def test_the_summary_counts_what_comes_back():
    side = CriuSide(options=frozenset(("tcp-established",)))
    findings = judge_all(
        [tie("memfd", count=2), tie("tcp-loopback", count=3), tie("inet", count=9), tie("traced")], side
    )
    assert (
        summary(findings)
        == "2 x memory of memfd_create, 3 x a TCP connection over loopback between processes of the container"
    )
    assert [finding.tie.kind for finding in refused(findings)] == ["traced"]


def test_the_doctor_warns_of_what_an_option_of_the_engine_lets_through_and_fails_for_the_rest():
    side = CriuSide(engine="podman")
    checks = doctor.host_ties(
        judge_all([tie("tcp-loopback"), tie("io-uring"), tie("tcp-waiting"), tie("memfd"), tie("imex")], side)
    )
    assert [check.status for check in checks] == ["warn", "fail", "warn", "warn", "ok"]
    assert "memfd_create" in checks[-1].what


# ---- CRIU's options ---------------------------------------------------------------------------------------


def side_of(words, folder, *, runtime="runc 1.2.0", config=None, facts=FACTS):
    call = parse(words.split()) if words else None
    return host_side.criu_side(call, RuntimeFacts(*runtime.split()), config or {}, facts, "podman", str(folder))


def test_options_come_from_the_call_and_from_the_files(tmp_path):
    (tmp_path / "default.conf").write_text("# of the node\nshell-job\nghost-limit 8M\n")
    (tmp_path / "runc.conf").write_text("--link-remap\nghost-limit=64M # larger\nnetwork-lock nftables\n")
    side = side_of("rt checkpoint --tcp-established --tcp-skip-in-flight --leave-running c", tmp_path)
    assert side.options >= {"tcp-established", "skip-in-flight", "shell-job", "link-remap"}
    assert side.ghost_limit_bytes == 64 << 20
    assert side.can_lock_network
    assert side.leaves_running
    assert (side.version, side.kernel) == ((4, 2, 1), (6, 18))


@pytest.mark.parametrize(
    ("runtime", "annotation", "files", "read"),
    [
        ("runc 1.3.6", None, ("runc.conf", "crun.conf"), "runc.conf"),
        ("crun 1.28", None, ("runc.conf", "crun.conf"), "crun.conf"),
        ("crun 1.26", None, ("runc.conf",), "runc.conf"),
        ("crun 1.21", None, ("runc.conf", "crun.conf", "default.conf"), "default.conf"),
        ("crun 1.21", "own.conf", ("runc.conf", "own.conf"), None),
        ("runc 1.1.15", "own.conf", ("runc.conf", "own.conf"), "own.conf"),
        ("crun 1.28", "", ("runc.conf", "crun.conf"), None),
    ],
)
def test_the_file_is_the_one_that_the_runtime_names(tmp_path, runtime, annotation, files, read):
    for name in files:
        (tmp_path / name).write_text(f"read-{name}\n")
    wanted = annotation and str(tmp_path / annotation)
    config = {"annotations": {"org.criu.config": wanted if annotation else ""}} if annotation is not None else {}
    options = side_of("rt checkpoint c", tmp_path, runtime=runtime, config=config).options
    assert options == ({f"read-{read}"} if read else set())


@pytest.mark.parametrize(
    ("text", "size"),
    [("", 1 << 20), ("64M", 64 << 20), ("2g", 2 << 30), ("5000", 5000), ("x", 1 << 20), ("M", 1 << 20)],
)
def test_sizes_are_read_as_criu_reads_them(text, size):
    assert host_side.size_of(text) == size


@pytest.mark.parametrize(
    ("mounts", "carries"),
    [
        ([], True),
        ([{"destination": "/dev/shm", "type": "tmpfs", "source": "shm"}], True),
        ([{"destination": "/dev/shm", "type": "bind", "source": "/var/lib/c/overlay-containers/1/userdata/shm"}], True),
        ([{"destination": "/dev/shm", "type": "bind", "source": "/run/containerd/sandboxes/1/shm"}], False),
        ([{"destination": "/dev/shm", "type": "bind", "source": "/dev/shm"}], False),
    ],
)
def test_who_carries_dev_shm(mounts, carries):
    assert host_side.carries_shm({"mounts": mounts}) is carries


# ---- refusing -----------------------------------------------------------------------------------------------


def inventory(*ties):
    return {"processes": [], "host_ties": [one.to_json() for one in ties]}


def test_the_first_is_the_error_and_the_others_are_its_notes():
    with pytest.raises(HostTieBlocks) as caught:
        host_side.refuse_what_criu_refuses(inventory(tie("io-uring"), tie("traced")), dict, CriuSide(), "c0ffee")
    assert "io_uring" in str(caught.value)
    assert "c0ffee" in str(caught.value)
    assert "UV_USE_IO_URING" in caught.value.remedy
    assert "debugger" in caught.value.__notes__[0]


def test_what_passes_by_itself_is_waited_for():
    answers = iter([inventory(tie("tcp-waiting")), inventory(tie("memfd"))])
    findings = host_side.refuse_what_criu_refuses(inventory(tie("tcp-waiting")), lambda: next(answers), CriuSide(), "c")
    assert [finding.tie.kind for finding in findings] == ["memfd"]


def test_it_is_not_waited_for_without_end():
    found = inventory(tie("tcp-waiting"))
    with pytest.raises(HostTieBlocks, match="accepted"):
        host_side.refuse_what_criu_refuses(found, lambda: found, CriuSide(), "c", passes_s=0.3)


def test_an_agent_that_tells_of_nothing_stops_nobody():
    assert host_side.refuse_what_criu_refuses({"processes": []}, dict, CriuSide(), "c") == []


# ---- the kernel's tables ----------------------------------------------------------------------------------


def test_tcp_tables_are_read():
    text = (
        "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
        "   0: 0100007F:1F90 0200000A:0050 01 00000000:00000000 00:00000000 00000000     0        0 4711 1\n"
        "   1: 0000000000000000FFFF00000100007F:1F90 0000000000000000FFFF00000100007F:0051 0A 00000000:00000003 00:0 0 0 0 12\n"
        "   2: broken\n   3: zz:1 0:2 01 0:0 0 0 0 0 1\n"
    )
    first, second = socket_tables.tcp_entries(text)
    assert (first.local, first.remote, first.state, first.inode) == (("127.0.0.1", 8080), ("10.0.0.2", 80), 1, 4711)
    assert not first.is_loopback
    assert str(first) == "127.0.0.1:8080 - 10.0.0.2:80"
    assert second.is_loopback
    assert (second.state, second.waiting, second.local[0]) == (socket_tables.LISTEN, 3, "127.0.0.1")


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("=IHHII", 16, 2, 0, 1, 0),
        struct.pack("=IHHII", 9, 20, 0, 1, 0),
        struct.pack("=IHHII", 99, 20, 0, 1, 0),
    ],
)
def test_an_answer_that_is_none_is_an_error(data):
    with pytest.raises(OSError, match="Unix sockets"):
        socket_tables.add_unix_entries(data, {})


@pytest.mark.skipif(os.geteuid() != 0, reason="enters a network namespace")
def test_peers_of_unix_sockets_are_told():
    with contextlib.ExitStack() as stack:
        one, other = (stack.enter_context(end) for end in socket.socketpair())
        named = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        named.bind("\0vgpu-test-peer")
        inodes = [os.fstat(end.fileno()).st_ino for end in (one, other, named)]
        before = threading.get_native_id(), os.readlink("/proc/thread-self/ns/net")
        found = socket_tables.unix_sockets(os.getpid())
        assert before == (threading.get_native_id(), os.readlink("/proc/thread-self/ns/net"))
    assert (found[inodes[0]].peer, found[inodes[1]].peer) == (inodes[1], inodes[0])
    assert found[inodes[2]].name == "@vgpu-test-peer"


# ---- finding ----------------------------------------------------------------------------------------------

HOLDER = """
import ctypes, fcntl, mmap, os, signal, socket, sys, time
outside, folder = sys.argv[1:]
libc, keep = ctypes.CDLL(None, use_errno=True), []
listener = socket.create_server(("127.0.0.1", 0))
keep += [listener, socket.create_connection(listener.getsockname()), listener.accept()]
keep += [socket.create_connection(listener.getsockname())]
def connected(kind, name):
    end = socket.socket(socket.AF_UNIX, kind)
    end.connect(name)
    keep.append(end)
connected(socket.SOCK_STREAM, outside + "/stream")
connected(socket.SOCK_DGRAM, outside + "/datagram")
keep += socket.socketpair()
if "MPTCP" in open("/proc/net/protocols").read():
    keep.append(socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262))
def mapped(fd, size):
    os.posix_fallocate(fd, 0, size)
    keep.append(mmap.mmap(fd, size))
mapped(os.memfd_create("memory"), 8192)
def shared(name, size, unlinks):
    path = f"/dev/shm/{name}-{os.getpid()}"
    fd = os.open(path, os.O_CREAT | os.O_RDWR)
    mapped(fd, size)
    os.close(fd)
    if unlinks:
        os.unlink(path)
    return path
path = shared("vgpu-kept", 4096, False)
shared("vgpu-gone", 2 << 20, True)
lock = open(folder + "/lock", "w")
fcntl.flock(lock, fcntl.LOCK_EX)
moved = open(folder + "/first", "w")
os.link(folder + "/first", folder + "/second")
os.unlink(folder + "/first")
libc.shmat.restype = ctypes.c_void_p
segment = libc.shmget(0, 4096, 0o1600)
libc.shmat(segment, None, 0)
libc.shmctl(segment, 0, None)
keep.append(os.open("/dev/null", os.O_RDWR))
keep.append(os.pidfd_open(os.getppid()))
keep.append(os.pidfd_open(os.getpid()))
has_ring = libc.syscall(425, 4, ctypes.create_string_buffer(256)) >= 0
print("ready", has_ring, "MPTCP" in open("/proc/net/protocols").read(), flush=True)
sys.stdin.read()
os.unlink(path)
"""


@pytest.fixture
def cgroup():
    mount = cgroup2_mount()
    folder = mount / f"vgpu-ties-{os.getpid()}"
    folder.mkdir()
    yield folder
    for _ in range(100):
        if not (folder / "cgroup.procs").read_text().split():
            break
        time.sleep(0.02)
    folder.rmdir()


@contextlib.contextmanager
def started(command, **options):
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )
    try:
        yield process
    finally:
        process.communicate(timeout=10)


SERVER = """
import os, socket, sys
stream, datagram = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
stream.bind(sys.argv[1] + "/stream"), stream.listen(), datagram.bind(sys.argv[1] + "/datagram")
print("ready", flush=True)
keep = stream.accept()
sys.stdin.read()
"""


@needs_cgroup
def test_what_a_process_holds_is_found(cgroup, tmp_path):
    def joins():
        (cgroup / "cgroup.procs").write_text("0")

    with started([sys.executable, "-c", SERVER, str(tmp_path)]) as server:
        assert server.stdout.readline() == "ready\n"
        with started([sys.executable, "-c", HOLDER, str(tmp_path), str(tmp_path)], preexec_fn=joins) as holder:
            _, has_ring, has_mptcp = holder.stdout.readline().split()
            ties = {one.kind: one for one in find_host_ties(f"/{cgroup.name}", Deadline(30))}
    assert all(one.pid == holder.pid for one in ties.values())
    expected = {
        "tcp-loopback", "tcp-waiting", "tcp-outside", "inet", "unix-outside", "unix-outside-datagram", "memfd", "shm-host",
        "deleted-file", "deleted-link", "sysv-host", "file-lock", "pidfd-outside",
    }  # fmt: skip
    expected |= {"io-uring"} if has_ring == "True" else set()
    expected |= {"mptcp"} if has_mptcp == "True" else set()
    # The peer of a connection that nobody has accepted is nobody's yet; it may count as outside.
    assert set(ties) | {"tcp-outside"} == expected
    assert ties["tcp-loopback"].count == 2
    assert ties["deleted-file"].bytes >= 2 << 20
    assert ties["deleted-file"].what.startswith("/dev/shm/vgpu-gone")
    assert ties["deleted-link"].what == f"{tmp_path}/first"
    assert ties["unix-outside"].what == f"{tmp_path}/stream"
    assert ties["file-lock"].what == f"{tmp_path}/lock"


EVENT_HOLDER = """
import mmap, os, sys
path = f"/dev/shm/cuda.shm.{os.getuid()}.{os.getpid():x}.1"
file = os.open(path, os.O_CREAT | os.O_RDWR)
os.ftruncate(file, 4096)
memory = mmap.mmap(file, 4096)
os.close(file)
print(path, flush=True); sys.stdin.read(); os.unlink(path)
"""


@needs_cgroup
def test_the_file_of_an_event_in_the_hosts_dev_shm_is_found_and_named(cgroup):
    def joins():
        (cgroup / "cgroup.procs").write_text("0")

    with started([sys.executable, "-c", EVENT_HOLDER], preexec_fn=joins) as holder:
        path = holder.stdout.readline().strip()
        (found,) = (one for one in find_host_ties(f"/{cgroup.name}", Deadline(30)) if one.what.startswith("/dev/shm"))
    assert (found.kind, found.what) == ("shm-host", path)
    finding = judge(found, CriuSide())
    assert (finding.outcome, path in finding.text, "--ipc host" in finding.remedy) == ("note", True, True)


@needs_cgroup
def test_a_debugger_is_found_and_the_agents_own_connection_is_not(cgroup, tmp_path):
    program = (
        "import ctypes, socket, sys\n"
        "end = socket.socket(socket.AF_UNIX); end.connect(sys.argv[1])\n"
        "print('ready', flush=True); sys.stdin.read()"
    )
    path = str(tmp_path / "agent")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()

        def joins():
            (cgroup / "cgroup.procs").write_text("0")

        with started([sys.executable, "-c", program, path], preexec_fn=joins) as holder:
            accepted, _ = listener.accept()
            with accepted:
                assert holder.stdout.readline() == "ready\n"
                assert find_host_ties(f"/{cgroup.name}", Deadline(30)) == []
                with traced(holder.pid):
                    found = find_host_ties(f"/{cgroup.name}", Deadline(30))
    assert [(one.kind, one.pid) for one in found] == [("traced", holder.pid)]


@contextlib.contextmanager
def traced(pid):
    """A process of its own that traces `pid`, seized so that it is never stopped."""
    program = "import ctypes, sys; print(ctypes.CDLL(None).ptrace(0x4206, int(sys.argv[1]), 0, 0), flush=True); sys.stdin.read()"
    with started([sys.executable, "-c", program, str(pid)]) as tracer:
        assert tracer.stdout.readline() == "0\n"
        yield tracer


@needs_cgroup
def test_a_process_that_ends_meanwhile_is_no_error(cgroup):
    def joins():
        (cgroup / "cgroup.procs").write_text("0")

    with started([sys.executable, "-c", "print('x', flush=True); input()"], preexec_fn=joins) as ended:
        ended.stdout.readline()
        os.kill(ended.pid, signal.SIGKILL)
        assert find_host_ties(f"/{cgroup.name}", Deadline(30)) == []
    assert not Path(f"/proc/{ended.pid}/fd").exists()
