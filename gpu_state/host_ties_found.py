"""Finds what a container's processes hold of the host: descriptors, mappings, connections, locks, tracers, from /proc.

Changes nothing and stops nothing; needs root. All processes of the cgroup are looked at, because CRIU dumps all of them.
Leaves out what the driver's own checkpoint closes (its device files) and the preload's connection to this very agent, which
ends before the freeze. Bounded: what is beyond the limits is told as kind "unseen", never left out in silence.
Says what there is, not what it means (host_ties.py). Called by the `inventory` verb (service.py).
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from gpu_state.host_connections import add_connections
from gpu_state.host_ties import Tie
from gpu_state.processes import is_gpu_file, ns_pid_of, pids_of, tracer_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from gpu_state.deadline import Deadline

MAX_PROCESSES = 4096
MAX_DESCRIPTORS = 65536
MAX_THREADS = 256
MAX_TIES = 1024
MAPS_BYTES = 64 << 20

# criu/files.c, dump_one_file: what it dumps of the anonymous inode file system. BPF maps of the usual kinds are dumped too.
_KNOWN_ANONYMOUS = (
    "[eventfd]",
    "[eventpoll]",
    "inotify",
    "[fanotify]",
    "[signalfd]",
    "[timerfd]",
    "[pidfd]",
    "bpf-map",
)
_ANONYMOUS = {"[io_uring]": "io-uring", "[perf_event]": "perf-event", "[userfaultfd]": "userfaultfd"}
# Files without a name in any file system of the container, by what their links begin with.
_NAMELESS = {"/memfd:": "memfd", "/secretmem": "secret-memory", "/dmabuf:": "dma-buf", "/anon_hugepage": "hugetlb"}
_SYSV, _ZERO, _AIO = "/SYSV", "/dev/zero", "/[aio]"
_DELETED = " (deleted)"
_BLOCK = 512
# criu/files.c, dump_chrdev, get_misc_dev_ops; criu/tty.c, get_tty_driver
_MEMORY_MAJOR, _MISC_MAJOR, _MISC_MINORS = 1, 10, (200, 235)
_TTY_MAJORS = frozenset((4, 5, 188, *range(128, 144)))
_DEVICES = (
    ("/dev/infiniband/", "rdma"),
    ("/dev/gdrdrv", "gdrcopy"),
    ("/dev/nvidia-caps-imex-channels/", "imex"),
)


class Collected:
    """Ties, those of one kind and process counted together."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, int], Tie] = {}

    def add(self, kind: str, process: Process, what: str, size: int = 0, count: int = 1) -> None:
        """One more, or `count` more."""
        key = (kind, process.pid)
        known = self._found.get(key)
        if known is None and len(self._found) >= MAX_TIES:
            key, known = ("unseen", 0), self._found.get(("unseen", 0))
            kind, what, size = "unseen", f"further things, from process {process.pid} on", 0
        if known is None:
            self._found[key] = Tie(kind, process.pid, process.ns_pid, process.comm, what, size, count)
            return
        if size > known.bytes:
            what_of_largest, largest = what, size
        else:
            what_of_largest, largest = known.what, known.bytes
        self._found[key] = Tie(kind, known.pid, known.ns_pid, known.comm, what_of_largest, largest, known.count + count)

    def all(self) -> list[Tie]:
        """By process, then kind."""
        return sorted(self._found.values(), key=lambda tie: (tie.pid, tie.kind))


class Process:
    """One process and what of it others need: its sockets, its network namespace."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.ns_pid = ns_pid_of(pid) or pid
        self.comm = _text(f"/proc/{pid}/comm").strip()
        self.network = _link(f"/proc/{pid}/ns/net")
        self.sockets: dict[int, str] = {}  # inode -> protocol name, empty where it is not told


def find_host_ties(cgroup: str, deadline: Deadline) -> list[Tie]:
    """What the processes of the container hold of the host."""
    found = Collected()
    pids = sorted(pids_of(cgroup))
    processes = [process for pid in pids[:MAX_PROCESSES] if (process := Process(pid)).network]
    members = frozenset(pids)
    for process in processes:
        deadline.check("looking at what the processes hold of the host")
        _descriptors(process, members, found)
        _mappings(process, found)
        _tracer(process, found)
    if len(pids) > MAX_PROCESSES and processes:
        found.add("unseen", processes[-1], f"{len(pids) - MAX_PROCESSES} further processes")
    add_connections(processes, found, deadline)
    return found.all()


# ---- descriptors ----------------------------------------------------------------------------------------


def _descriptors(process: Process, members: frozenset[int], found: Collected) -> None:
    filesystems: dict[str, str] = {}
    seen: set[tuple[str, int]] = set()
    for number, entry in enumerate(_entries(f"/proc/{process.pid}/fd")):
        if number >= MAX_DESCRIPTORS:
            found.add("unseen", process, f"descriptors beyond {MAX_DESCRIPTORS}")
            return
        target = _link(entry)
        if target.startswith("socket:["):
            process.sockets[int(target[8:-1])] = _protocol(entry)
        elif target.startswith("anon_inode:"):
            name = target.removeprefix("anon_inode:")
            if name == "inotify" and not filesystems:
                filesystems = _filesystems(process.pid)
            _anonymous(name, process, entry, members, filesystems, found)
        elif target.startswith("pidfd:"):
            _pidfd(process, entry, members, found)
        elif target.startswith("/"):
            _file(process, entry, target, seen, found)


def _anonymous(
    name: str, process: Process, entry: str, members: frozenset[int], filesystems: Mapping[str, str], found: Collected
) -> None:
    if name == "[pidfd]":
        _pidfd(process, entry, members, found)
    elif name == "inotify":
        _inotify(process, entry, filesystems, found)
    elif name not in _KNOWN_ANONYMOUS:
        found.add(_ANONYMOUS.get(name, "kernel-object"), process, name)


def _pidfd(process: Process, entry: str, members: frozenset[int], found: Collected) -> None:
    fields = (line.split() for line in _text(entry.replace("/fd/", "/fdinfo/")).splitlines())
    pid = next((int(words[1]) for words in fields if words[:1] == ["Pid:"]), 0)
    if pid > 0 and pid not in members:
        found.add("pidfd-outside", process, f"process {pid}")


def _inotify(process: Process, entry: str, filesystems: Mapping[str, str], found: Collected) -> None:
    for line in _text(entry.replace("/fd/", "/fdinfo/")).splitlines():
        fields = dict(word.partition(":")[::2] for word in line.split() if ":" in word)
        if line.startswith("inotify ") and "sdev" in fields:
            device = int(fields["sdev"], 16)
            if filesystems.get(f"{device >> 20}:{device & 0xFFFFF}") == "overlay":
                found.add("inotify-overlay", process, f"inode {int(fields.get('ino', '0'), 16)}")


def _file(process: Process, entry: str, target: str, seen: set[tuple[str, int]], found: Collected) -> None:
    if is_gpu_file(target) and not target.startswith("/dev/nvidia-caps-imex"):
        return
    if (kind := _nameless(target)) is not None:
        found.add(kind, process, target.removesuffix(_DELETED))
        return
    try:
        status = os.stat(entry)  # noqa: PTH116 - follows the link to the open file, whatever has become of its name
    except OSError:
        return
    if stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode):
        _device(process, target, status, found)
    elif stat.S_ISREG(status.st_mode):
        if (locks := _locks(entry)) > 0:
            found.add("file-lock", process, target, count=locks)
        if (target, status.st_ino) not in seen:
            seen.add((target, status.st_ino))
            _deleted(process, target, status, found)


def _locks(entry: str) -> int:
    """Locks on an open file. An open-file-description lock may be a driver's, whose checkpoint lets go of it: CRIU decides."""
    lines = _text(entry.replace("/fd/", "/fdinfo/")).splitlines()
    return sum(line.startswith("lock:") and "OFDLCK" not in line for line in lines)


def _nameless(target: str) -> str | None:
    return next((kind for start, kind in _NAMELESS.items() if target.startswith(start)), None)


def _device(process: Process, target: str, status: os.stat_result, found: Collected) -> None:
    major, minor = os.major(status.st_rdev), os.minor(status.st_rdev)
    is_character = stat.S_ISCHR(status.st_mode)
    if is_character and (major == _MEMORY_MAJOR or major in _TTY_MAJORS):
        return
    if is_character and major == _MISC_MAJOR and minor in _MISC_MINORS:
        return
    kind = next((kind for start, kind in _DEVICES if target.startswith(start)), "device")
    found.add(kind, process, f"{target}, {major}:{minor}")


def _deleted(process: Process, target: str, status: os.stat_result, found: Collected) -> None:
    """A file that has no name any more, or not the one that it was opened by."""
    if not target.endswith(_DELETED) or os.path.lexists(f"/proc/{process.pid}/root{target}"):
        return
    path = target.removesuffix(_DELETED)
    if status.st_nlink:
        found.add("deleted-link", process, path)
    else:
        found.add("deleted-file", process, path, status.st_blocks * _BLOCK)


# ---- mappings -------------------------------------------------------------------------------------------


def _mappings(process: Process, found: Collected) -> None:
    seen: set[tuple[str, str]] = set()
    try:
        with Path(f"/proc/{process.pid}/maps").open(errors="replace") as lines:
            for line in lines:
                words = line.rstrip("\n").split(maxsplit=5)
                if len(words) == 6 and (words[5], words[4]) not in seen:
                    seen.add((words[5], words[4]))
                    _mapping(process, words[0], is_shared=words[1].endswith("s"), path=words[5], found=found)
    except OSError:
        return  # it has ended


def _mapping(process: Process, place: str, *, is_shared: bool, path: str, found: Collected) -> None:
    if path.startswith("anon_inode:"):
        name = path.removeprefix("anon_inode:")
        if name not in _KNOWN_ANONYMOUS:
            found.add(_ANONYMOUS.get(name, "kernel-object"), process, name)
    elif path.startswith(_SYSV):
        found.add(_sysv_kind(process), process, path.removesuffix(_DELETED), _length(place))
    elif path.startswith((_ZERO, _AIO)) or is_gpu_file(path):
        return  # ordinary shared memory, an AIO ring (both dumped); the driver's
    elif (kind := _nameless(path)) is not None:
        found.add(kind, process, path.removesuffix(_DELETED), _length(place))
    elif path.endswith(_DELETED) or path.startswith("/dev/"):
        _mapped_file(process, place, path, is_shared=is_shared, found=found)


def _mapped_file(process: Process, place: str, path: str, *, is_shared: bool, found: Collected) -> None:
    try:
        status = os.stat(f"/proc/{process.pid}/map_files/{place}")  # noqa: PTH116
    except OSError:
        return
    if stat.S_ISCHR(status.st_mode):
        _device(process, path, status, found)
    elif path.endswith(_DELETED):
        _deleted(process, path, status, found)
    elif is_shared and path.startswith("/dev/shm/"):  # noqa: S108 - looked at, not written to
        kind = "shm-host" if _has_host_shm(process.pid) else "shm"
        found.add(kind, process, path, status.st_size)


def _sysv_kind(process: Process) -> str:
    # CRIU runs where the agent does: in the host's namespace.
    return "sysv-host" if _link(f"/proc/{process.pid}/ns/ipc") == _link("/proc/self/ns/ipc") else "sysv"


def _has_host_shm(pid: int) -> bool:
    try:
        return os.stat(f"/proc/{pid}/root/dev/shm").st_dev == os.stat("/dev/shm").st_dev  # noqa: PTH116, S108
    except OSError:
        return False


def _length(place: str) -> int:
    start, _, end = place.partition("-")
    return int(end, 16) - int(start, 16)


# ---- the rest -------------------------------------------------------------------------------------------


def _tracer(process: Process, found: Collected) -> None:
    threads = (os.path.basename(path) for path in _entries(f"/proc/{process.pid}/task"))  # noqa: PTH119
    for _, thread in zip(range(MAX_THREADS), threads, strict=False):
        if tracer := tracer_of(int(thread)):
            found.add("traced", process, f"process {tracer}")
            return


def _filesystems(pid: int) -> dict[str, str]:
    """Device number as mountinfo writes it -> type of the file system."""
    found = {}
    for line in _text(f"/proc/{pid}/mountinfo").splitlines():
        head, _, tail = line.partition(" - ")
        if len(words := head.split()) > 2 and tail:
            found[words[2]] = tail.split(" ", 1)[0]
    return found


def _protocol(entry: str) -> str:
    try:
        return os.getxattr(entry, "system.sockprotoname").rstrip(b"\0").decode("ascii", "replace")
    except OSError:
        return ""


def _entries(folder: str) -> Iterator[str]:
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                yield entry.path
    except OSError:
        return


def _link(path: str) -> str:
    try:
        return os.readlink(path)  # noqa: PTH115 - thousands of them
    except OSError:
        return ""


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:  # noqa: PTH123
            return file.read(MAPS_BYTES)
    except OSError:
        return ""
