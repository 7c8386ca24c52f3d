"""A test host: a root entered in namespaces of its own, in which commands run as on another machine.

Refuses to leave anything behind: the host's processes live in one pid namespace that dies with this process,
its files in a tmpfs of its mount namespace, its cgroups are removed at exit (or by the next host after a kill).
Enter hosts from the main thread: the kernel ends a host when the thread that entered it ends.
Called by the fixtures of tests/engines, the demo and `python -m tests.hosts enter`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import selectors
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

from tests.hosts import images, project, software_gpu
from tests.hosts.base_config import write_base_config
from tests.hosts.roots import HostUnavailable, cache_folder, root_for

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

SETUP = Path(__file__).with_name("setup.sh")
READY_DEADLINE_S = 60
COMMAND_DEADLINE_S = 60
QUICK_END_S = 3
NETWORK = ("10.0.0.1", "10.0.0.2")
REGISTRY_CONFIG = """\
version: 0.1
storage:
  filesystem:
    rootdirectory: /run/registry
  delete:
    enabled: true
http:
  addr: 0.0.0.0:5000
"""
HOST_ENV = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LANG": "C.UTF-8", "TERM": "dumb"}
# Enters the host's cgroups from outside, v2 first; "run/machine-cgroups" holds v1's on hybrid machines (setup.sh).
JOIN = (
    'for procs in "$1"/sys/fs/cgroup/init.scope/cgroup.procs "$1"/run/machine-cgroups/*/init.scope/cgroup.procs; do '
    '[ ! -e "$procs" ] || echo 0 >"$procs" || exit 125; done; shift; exec "$@"'
)
_numbers = itertools.count(1)


class TestHost:
    """One machine of the row's Debian; use as a context manager."""

    __test__ = False  # the name is the project's word for it, not a test class

    def __init__(
        self,
        row: str = "trixie",
        name: str = "node-a",
        *,
        archive: str | None = None,
        binds: Sequence[tuple[str, str]] = (),
    ) -> None:
        self.row = row
        self.name = name
        self.root_image = root_for(row, archive)
        self._binds = tuple(binds)
        self._cgroup = f"vgpu-host-{os.getpid()}-{next(_numbers)}"
        self._process: subprocess.Popen[bytes] | None = None
        self._init_pid = 0

    # ---- life ------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        try:
            self._start()
            write_base_config(self.root)
            self.write("/etc/hostname", f"{self.name}\n")
            self.write("/etc/hosts", f"127.0.0.1 localhost\n127.0.1.1 {self.name}\n")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        mount_point = cache_folder() / "mount-point"
        mount_point.mkdir(exist_ok=True)
        stage = ["first", str(self.root_image), str(mount_point), self._cgroup, self.name]
        binds = [part for bind in self._binds for part in bind]
        namespaces = ["--mount", "--pid", "--uts", "--ipc", "--net", "--fork", "--kill-child=KILL"]
        self._process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "unshare", *namespaces, "sh", str(SETUP), *stage, *binds],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._await_ready()
        self._init_pid = _only_child(self._process.pid)

    def _await_ready(self) -> None:
        assert self._process
        assert self._process.stdout
        assert self._process.stderr
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            answered = selector.select(READY_DEADLINE_S)
        if answered and self._process.stdout.readline().strip() == b"ready":
            return
        self._process.kill()
        what = self._process.stderr.read().decode(errors="replace").strip() or f"not ready in {READY_DEADLINE_S} s"
        message = f"the test host {self.name} could not be entered: {what}"
        raise HostUnavailable(message)

    def close(self) -> None:
        """End every process of the host and forget its files."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._init_pid or self._process.pid, signal.SIGKILL)
        try:
            self._process.wait(timeout=QUICK_END_S)
        except subprocess.TimeoutExpired:
            _at_cgroup("thaw", self._cgroup)  # the kernel does not end a process in a frozen v1 cgroup
            self._process.wait(timeout=30)
        for stream in (self._process.stdout, self._process.stderr):
            if stream:
                stream.close()
        self._process, self._init_pid = None, 0
        _at_cgroup("clean", self._cgroup)

    # ---- commands and files ----------------------------------------------------------------------

    @property
    def init_pid(self) -> int:
        """The pid, outside, of the host's process 1."""
        if not self._init_pid:
            message = f"the test host {self.name} is not running"
            raise HostUnavailable(message)
        return self._init_pid

    @property
    def root(self) -> Path:
        """The host's file system as seen from outside."""
        return Path(f"/proc/{self.init_pid}/root")

    def popen(
        self, command: Sequence[str], *, env: Mapping[str, str] | None = None, network: bool = True, **options
    ) -> subprocess.Popen:
        """Start a command inside, in the host's cgroup, and leave it running; without `network`, in the machine's."""
        enter = ["nsenter", "-t", str(self.init_pid), "-m", "-u", "-i", *(["-n"] if network else []), "-p", "-C"]
        join = ["/bin/sh", "-c", JOIN, "sh", str(self.root)]
        options.setdefault("start_new_session", True)
        return subprocess.Popen([*join, *enter, *command], env={**HOST_ENV, **(env or {})}, **options)

    def run(
        self,
        command: Sequence[str],
        *,
        timeout: float = COMMAND_DEADLINE_S,
        check: bool = True,
        input: str | bytes | None = None,  # noqa: A002 - as subprocess.run calls it
        env: Mapping[str, str] | None = None,
        text: bool = True,
    ) -> subprocess.CompletedProcess:
        """Run a command inside to its end; past the deadline its whole process group is killed."""
        if isinstance(input, bytes):
            text = False
        stdin = subprocess.DEVNULL if input is None else subprocess.PIPE
        streams = {"stdin": stdin, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": text}
        process = self.popen(command, env=env, **streams)
        try:
            out, err = process.communicate(input, timeout=timeout)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=10)
            raise
        done = subprocess.CompletedProcess(list(command), process.returncode, out, err)
        if check and done.returncode:
            raise CommandFailed(self.name, done)
        return done

    def write(self, path: str, data: str | bytes, mode: int = 0o644) -> None:
        """Write a file inside, making its folder."""
        target = self.root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data.encode() if isinstance(data, str) else data)
        target.chmod(mode)

    def read(self, path: str) -> str:
        """The text of a file inside."""
        return (self.root / path.lstrip("/")).read_text(encoding="utf-8", errors="replace")

    def copy_in(self, source: Path, path: str) -> None:
        """Copy a file from outside to `path` inside."""
        target = self.root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)

    def copy_to(self, other: TestHost, path: str) -> None:
        """Carry one file to the same path on another host, as a person with a disk would."""
        other.copy_in(self.root / path.lstrip("/"), path)

    def daemon(self, command: Sequence[str], *, log: str, env: Mapping[str, str] | None = None) -> subprocess.Popen:
        """Start a service inside; its output goes to `log` inside, and it ends with the host."""
        self.write(log, "")
        with (self.root / log.lstrip("/")).open("ab") as out:
            return self.popen(command, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out)

    def wait_for(self, command: Sequence[str], *, timeout: float = 20, interval: float = 0.1) -> None:
        """Repeat a command until it succeeds; the last failure is raised at the deadline."""
        deadline = time.monotonic() + timeout
        while True:
            done = self.run(command, check=False, timeout=timeout)
            if done.returncode == 0:
                return
            if time.monotonic() > deadline:
                raise CommandFailed(self.name, done)
            time.sleep(interval)

    # ---- what is put into a host -----------------------------------------------------------------

    def install_project(self) -> None:
        """Install the working tree as a package would: programs, libraries, preload builds (packaging/install.py)."""
        project.install(self)

    def install_software_gpu(self, count: int = 2, memory: int = 512 << 20) -> list[str]:
        """Give the host `count` software GPUs of `memory` bytes each; returns their UUIDs."""
        return software_gpu.install(self, count, memory)

    def image(self, name: str) -> str:
        """Load a test image (`glibc` or `musl`) and return its reference; the image ID is the same on every host."""
        return images.load(self, name)

    def image_archive(self, name: str) -> str:
        """Put a test image as a docker archive into the host, for engines other than podman; returns its path inside."""
        archive = images.archive_for(name, self.root_image)
        self.copy_in(archive, f"/var/tmp/{archive.name}")
        return f"/var/tmp/{archive.name}"

    def start_registry(self) -> str:
        """Run Debian's docker-registry on port 5000, with its store in /run, and return its address on the cable."""
        self.write("/etc/vgpu-test-registry.yml", REGISTRY_CONFIG)
        config = ["docker-registry", "serve", "/etc/vgpu-test-registry.yml"]
        self.daemon(config, log="/var/log/registry.log")
        self.wait_for(["sh", "-c", "ss -ltn | grep -q :5000"])
        return f"{NETWORK[0]}:5000"

    def start_containerd(self) -> None:
        """Run containerd as Debian configures it; one that runs already is left alone."""
        if self.run(["ctr", "version"], check=False).returncode == 0:
            return
        self.daemon(["containerd"], log="/var/log/containerd.log")
        self.wait_for(["ctr", "version"])

    def python_version(self) -> str:
        """`3.13` and the like, of the host's own /usr/bin/python3."""
        return project.python_version(self.root_image)


class CommandFailed(AssertionError):
    """A command in a test host ended with a status that the test did not expect."""

    def __init__(self, host: str, done: subprocess.CompletedProcess) -> None:
        self.done = done
        out, err = (_text(part) for part in (done.stdout, done.stderr))
        super().__init__(f"on {host}: {' '.join(done.args)}\nstatus {done.returncode}\nstdout: {out}\nstderr: {err}")


def _text(data: str | bytes | None) -> str:
    return data.decode(errors="replace") if isinstance(data, bytes) else (data or "")


@contextlib.contextmanager
def two_hosts(
    row: str = "trixie", names: tuple[str, str] = ("node-a", "node-b"), **options
) -> Iterator[tuple[TestHost, TestHost]]:
    """Two machines with one cable between them; each knows the other by name."""
    with TestHost(row, names[0], **options) as first, TestHost(row, names[1], **options) as second:
        join(first, second)
        yield first, second


def join(first: TestHost, second: TestHost) -> None:
    """Lay a veth pair between two hosts, 10.0.0.1 and 10.0.0.2, and enter both into both /etc/hosts."""
    # The root's ip with the /proc of outside: there both pids mean something, and the machine may have no ip of its own.
    script = 'mount --rbind /proc "$0/proc" && exec chroot "$0" /usr/sbin/ip "$@"'
    ip = ["unshare", "--mount", "sh", "-c", script, str(first.root_image)]
    peer = ["peer", "name", "cable0", "netns", str(second.init_pid)]
    command = [*ip, "link", "add", "name", "cable0", "netns", str(first.init_pid), "type", "veth", *peer]
    subprocess.run(command, check=True, timeout=10, capture_output=True)
    for host, address in zip((first, second), NETWORK, strict=True):
        host.run(["ip", "addr", "add", f"{address}/24", "dev", "cable0"])
        host.run(["ip", "link", "set", "cable0", "up"])
        lines = [f"{where} {other.name}\n" for other, where in zip((first, second), NETWORK, strict=True)]
        host.write("/etc/hosts", "127.0.0.1 localhost\n" + "".join(lines))


def _only_child(pid: int) -> int:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    if len(children) != 1:
        message = f"expected one child of {pid}, found {children}"
        raise HostUnavailable(message)
    return int(children[0])


def _at_cgroup(stage: str, name: str) -> None:
    """Thaw or clean a host's cgroups, through mounts of the hierarchies that only this one command sees."""
    mount_point = cache_folder() / "mount-point"
    command = ["unshare", "--mount", "sh", str(SETUP), stage, "-", str(mount_point), name, "-"]
    subprocess.run(command, timeout=30, check=False, capture_output=True)
