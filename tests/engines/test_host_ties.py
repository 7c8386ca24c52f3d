"""What processes hold of the host, held against real CRIU: what is said to come back comes back with its content, and what is
refused before the freeze is what CRIU itself refuses.

The holder is a Python script beside a GPU process of the container; `check` compares every byte and every connection at each step.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.engines.gpu_container import GpuContainer, restore

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]

ARCHIVE = "/var/tmp/ties.tar"
HOLDER = Path(__file__).with_name("host_tie_holder.py")
PYTHON = "/hostusr/bin/python3 -S /ties/holder.py"
OPTIONS = [
    "-v", "/usr:/hostusr:ro", "-v", "/var/tmp/ties:/ties", "--security-opt", "seccomp=unconfined", "--cap-add", "all",
    "--device", "/dev/fuse",
]  # fmt: skip
ENOUGH = ["tcp-established", "file-locks"]
# Debian 13's CRIU 4.1.1 cannot dump a network socket on Linux 6.16 or newer, whatever it is told.
HAS_OLD_CRIU = ("trixie",)
CRIU_LINES = "network-lock nftables\nghost-limit 16M\nskip-in-flight\n"
REFUSED = {
    "lock": ("a file lock (/tmp/lock)", "--file-locks"),
    "deleted": ("a deleted file that is still in use", "ghost-limit 2M"),
    "semaphore": ("another name", "link-remap"),
    "io_uring": ("io_uring", "UV_USE_IO_URING"),
    "perf": ("performance counter", "profiler"),
    "userfaultfd": ("userfaultfd", "page faults"),
    "fuse": ("/dev/fuse", "Close it"),
    "unix": ("/ties/outside", "Close it"),
    "secret": ("memfd_secret", "ordinary memory"),
    "tcp": ("TCP connection over loopback", "--tcp-established"),
}
# Starts the holder as a session of its own, has CRIU dump it, prints CRIU's status and log, and ends it.
DUMP = """
rm -rf /tmp/held /tmp/dump; mkdir /tmp/dump
setsid python3 -S /ties/holder.py "$1" </dev/null >/tmp/holder.log 2>&1 & pid=$!
for _ in $(seq 100); do [ -e /tmp/held ] && break; sleep 0.05; done
criu dump -t $pid -D /tmp/dump --leave-running -v1 -o log; echo "status $?"; cat /tmp/dump/log /tmp/holder.log
kill -9 -$pid
"""
REFUSED_BY_CRIU = {
    "tcp": "Connected TCP socket",
    "waiting": "In-flight connection",
    "deleted": "Can't dump ghost file",
    "semaphore": "Can't create link remap",
    "lock": "file locks are hold",
    "io_uring": "Dumping FAILED",
    "perf": "perf_event",
    "userfaultfd": "userfaultfd",
    "fuse": "Can't dump file",
    "unix": "External socket is used",
    "secret": "secretmem",
}


@pytest.fixture(scope="module")
def holder_host(node):
    """The node with the holder script and a Unix socket of the host's."""
    node.write("/var/tmp/ties/holder.py", HOLDER.read_text(encoding="utf-8"))
    server = "import socket; s = socket.socket(socket.AF_UNIX); s.bind('/var/tmp/ties/outside'); s.listen(); k = []\n"
    node.run(["rm", "-f", "/var/tmp/ties/outside"])
    daemon = node.daemon(["python3", "-c", server + "while True: k.append(s.accept())"], log="/var/log/ties.log")
    node.wait_for(["test", "-S", "/var/tmp/ties/outside"])
    yield node
    daemon.kill()
    daemon.wait(timeout=10)


@pytest.fixture
def criu_conf(row, holder_host):
    """Writes lines into the file that the row's runtime lets CRIU read: crun 1.21 has CRIU's own alone."""
    path = {"trixie": "/etc/criu/default.conf", "testing": "/etc/criu/runc.conf"}[row]
    before = holder_host.run(["cat", path], check=False)
    yield lambda lines: holder_host.write(path, before.stdout + lines)
    if before.returncode == 0:
        holder_host.write(path, before.stdout)
    else:
        holder_host.run(["rm", "-f", path])


@pytest.fixture
def holding(holder_host):
    """Starts a container in which the counter uses the GPU and the holder holds the named things."""

    def start(*what, options=(), runtime="vgpu-runtime"):
        script = f"PYTHONHOME=/hostusr LD_LIBRARY_PATH=/hostusr/lib/x86_64-linux-gnu exec {PYTHON} {' '.join(what)}"
        if runtime == "vgpu-runtime":
            script = f"counter --out /tmp/steps --mib 4 --interval 50 & {script}"
        container = GpuContainer(holder_host, "ties", out="/tmp/held")
        container.start(
            holder_host.image("glibc"), options=[*OPTIONS, *options], program=["sh", "-c", script], runtime=runtime
        )
        container.wait_for_step(3)
        return container

    yield start
    holder_host.run(["podman", "rm", "-a", "-f", "-t", "0"])
    holder_host.run(["rm", "-f", ARCHIVE])


def options_for(words):
    return [f"--{word}" for word in words]


def doctor(host, name="ties"):
    identifier = host.run(["podman", "inspect", "--format", "{{.Id}}", name]).stdout.strip()
    return json.loads(host.run(["vgpu", "doctor", identifier, "--json"], check=False).stdout)["checks"]


def test_what_is_said_to_come_back_comes_back(row, holding, criu_conf):
    """Connections between processes, segments with and without a name, memfd, System V, locks, and what watches them."""
    criu_conf(CRIU_LINES)
    network = [] if row in HAS_OLD_CRIU else ["tcp", "waiting"]
    container = holding("unix_inside", "memfd", "shm", "deleted", "sysv", "lock", "pidfd", "watch", *network)
    checks = doctor(container.host)
    assert not [check for check in checks if check["status"] == "fail"], checks
    text = next(check["what"] for check in checks if check["key"] == "host side")
    for word in ("memfd_create", "/dev/shm", "System V", "deleted file"):
        assert word in text
    step = container.step()
    container.export(ARCHIVE, *options_for(ENOUGH))
    container.remove()
    restored = restore(container.host, ARCHIVE, *options_for(ENOUGH), name="ties")
    restored.out = container.out
    restored.goes_on(step)
    counter = GpuContainer(container.host, "ties")
    counter.goes_on(counter.step())


def test_what_criu_refuses_is_refused_before_the_freeze(row, holding):
    """Each by name and with its remedy, the first as the error and the others beside it; the container goes on."""
    named = REFUSED | ({"tcp": ("network socket", "CRIU 4.2")} if row in HAS_OLD_CRIU else {})
    container = holding(*named)
    checks = doctor(container.host)
    step = container.step()
    refused = container.export(ARCHIVE, check=False)
    assert refused.returncode != 0
    for what, (word, remedy) in named.items():
        found = [check for check in checks if word in check["what"] and remedy in check["remedy"]]
        assert {check["status"] for check in found} <= {"warn", "fail"}, what
        assert found, f"{what}: {checks}"
        assert word in refused.stderr
        assert remedy in refused.stderr
    log = container.host.run(
        ["sh", "-c", "cat /var/lib/containers/storage/overlay-containers/*/userdata/dump.log"], check=False
    )
    assert log.stdout == "", "CRIU was asked"  # podman makes the file before it calls the runtime
    container.goes_on(step)


def test_criu_refuses_each_of_them_too(row, holder_host):
    """CRIU alone, on a process of the host: nothing is refused that it would have taken along."""
    holder_host.run(["ln", "-sfn", "/var/tmp/ties", "/ties"])
    by_old_criu = {"tcp": "Can't get 1:16 opt"} if row in HAS_OLD_CRIU else {}
    for what, words in (REFUSED_BY_CRIU | by_old_criu).items():
        done = holder_host.run(["sh", "-c", DUMP, "dump", what], check=False)
        assert "status 0" not in done.stdout, f"CRIU takes {what} along"
        assert words in done.stdout, f"{what}: {done.stdout[-2000:]}{done.stderr}"
