"""Finds the processes of a container and what they hold of a GPU, from /proc and the cgroup tree alone.

Calls no driver, changes nothing, needs root to see other users' processes. Used by inventory.py, freeze.py, registration.py.

What /proc can tell: which processes hold /dev/nvidia* descriptors or mappings, and which map libcuda. What it cannot:
which memory is managed, exported or imported; in driver mode without the preload nobody can see that from outside.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vgpu_errors import NodeError

if TYPE_CHECKING:
    from collections.abc import Iterator

NVIDIA_MAJOR = 195
ENDING_S = 1.0
_LOOK_S = 0.01
DEVICE_PREFIX = "/dev/nvidia"
DEVICE_PREFIX_VARIABLE = "VGPU_DEVICE_PREFIX"  # the software driver of the tests keeps its device files elsewhere


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process that cannot be mistaken for a later one with the same pid."""

    pid: int
    start_time: int

    def is_alive(self) -> bool:
        """The very same process still runs (a zombie does not)."""
        status = _stat_fields(self.pid)
        return status is not None and status.start_time == self.start_time and status.state not in "ZX"

    def has_ended(self, wait_s: float = ENDING_S) -> bool:
        """It is no more, or is about to end: its connections are closed a little before that can be seen."""
        ends_at = time.monotonic() + wait_s
        while self.is_alive():
            if time.monotonic() >= ends_at:
                return False
            time.sleep(_LOOK_S)
        return True


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """One GPU process as the protocol shows it."""

    pid: int
    ns_pid: int
    comm: str
    state: str
    devices: tuple[str, ...] = ()
    gpu_bytes: int | None = None
    registered: bool = False
    mode: str = "driver"

    @classmethod
    def from_json(cls, doc: dict[str, Any]) -> GpuProcess:
        """Read what the agent sent."""
        return cls(
            pid=int(doc["pid"]),
            ns_pid=int(doc["ns_pid"]),
            comm=str(doc["comm"]),
            state=str(doc["state"]),
            devices=tuple(str(uuid) for uuid in doc["devices"]),
            gpu_bytes=None if doc["gpu_bytes"] is None else int(doc["gpu_bytes"]),
            registered=bool(doc["registered"]),
            mode=str(doc["mode"]),
        )

    def to_json(self) -> dict[str, Any]:
        """The form of `processes` in every result."""
        return {
            "pid": self.pid,
            "ns_pid": self.ns_pid,
            "comm": self.comm,
            "state": self.state,
            "mode": self.mode,
            "devices": list(self.devices),
            "gpu_bytes": self.gpu_bytes,
            "registered": self.registered,
        }


@dataclass(frozen=True, slots=True)
class ProcessHoldings:
    """What one process holds of the GPU, as far as /proc tells."""

    identity: ProcessIdentity
    ns_pid: int
    comm: str
    device_files: tuple[str, ...]
    maps_driver: bool

    @property
    def pid(self) -> int:
        """The pid as this host sees it."""
        return self.identity.pid


@dataclass(frozen=True, slots=True)
class _Stat:
    comm: str
    state: str
    start_time: int


def identity_of(pid: int) -> ProcessIdentity | None:
    """The identity of a running process, None where there is none."""
    status = _stat_fields(pid)
    return None if status is None else ProcessIdentity(pid, status.start_time)


def gpu_holdings(cgroup: str) -> list[ProcessHoldings]:
    """The processes of a cgroup tree that hold GPU files or map the driver library, in pid order."""
    return [
        held
        for pid in sorted(pids_of(cgroup))
        if (held := holdings_of(pid)) and (held.device_files or held.maps_driver)
    ]


def holdings_of(pid: int) -> ProcessHoldings | None:
    """What process `pid` holds; None where it has ended meanwhile."""
    status = _stat_fields(pid)
    if status is None or status.state in "ZX":
        return None
    try:
        mapped_devices, maps_driver = _mappings(pid)
        files = sorted({*_device_descriptors(pid), *mapped_devices})
    except (FileNotFoundError, ProcessLookupError):
        return None
    identity = ProcessIdentity(pid, status.start_time)
    return ProcessHoldings(identity, ns_pid_of(pid) or pid, status.comm, tuple(files), maps_driver)


def pids_of(cgroup: str) -> set[int]:
    """Every process of the container's cgroup and the cgroups below it, in any hierarchy that has it."""
    found: set[int] = set()
    for folder in cgroup_folders(cgroup):
        for below, _, files in os.walk(folder):
            if "cgroup.procs" in files:
                found |= _pids_in(Path(below) / "cgroup.procs")
    if 0 in found:
        raise NodeError(what=f"{cgroup} holds processes outside the agent's pid namespace; run the agent on the host")
    return found


def cgroup_folders(cgroup: str) -> list[Path]:
    """Where the hierarchies of this node keep `cgroup`; refuses the root, which would mean the whole node."""
    wanted = _plain(cgroup)
    if not wanted:
        raise NodeError(what=f"{cgroup!r} is not the cgroup of a container")
    return [folder for mount in _cgroup_mounts() if (folder := mount / wanted).is_dir()]


def is_in_cgroup(pid: int, cgroup: str) -> bool:
    """Process `pid` lies in `cgroup` or below it, in any hierarchy."""
    wanted = _plain(cgroup)
    if not wanted:
        return False
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return False
    paths = (line.split(":", 2)[2].lstrip("/") for line in lines if line.count(":") >= 2)
    return any(path == wanted or path.startswith(wanted + "/") for path in paths)


def _plain(cgroup: str) -> str:
    """The path without slashes around it; empty for what would mean the whole node or lead out of it."""
    parts = [part for part in cgroup.strip().split("/") if part not in {"", "."}]
    return "" if ".." in parts else "/".join(parts)


def thaw_cgroup(folder: str) -> None:
    """Let a cgroup's processes run again; the file is written even when it is thawed already."""
    path = Path(folder)
    if (path / "cgroup.freeze").exists():
        (path / "cgroup.freeze").write_text("0")
    elif (path / "freezer.state").exists():
        (path / "freezer.state").write_text("THAWED")


def ns_pid_of(pid: int) -> int | None:
    """The pid that the process itself sees, in its innermost pid namespace."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return None
    line = next((line for line in text.splitlines() if line.startswith("NSpid:")), None)
    return None if line is None else int(line.split()[-1])


def is_gpu_file(path: str) -> bool:
    """A device file of the driver's: its own checkpoint closes it, or names what it cannot close."""
    return _is_device(path)


def device_minors(device_files: tuple[str, ...]) -> tuple[int, ...]:
    """The GPU numbers among held device files: /dev/nvidia0 -> 0; control and UVM files name no GPU."""
    tails = (Path(path).name.removeprefix("nvidia") for path in device_files)
    return tuple(sorted({int(tail) for tail in tails if tail.isdigit()}))


def _device_descriptors(pid: int) -> Iterator[str]:
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(link.readlink())
        except OSError:
            continue
        if _is_device(target) or (target.startswith("/dev/") and _has_nvidia_major(link)):
            yield target


def _has_nvidia_major(link: Path) -> bool:
    try:
        return os.major(link.stat().st_rdev) == NVIDIA_MAJOR
    except OSError:
        return False


def _mappings(pid: int) -> tuple[set[str], bool]:
    devices: set[str] = set()
    maps_driver = False
    with Path(f"/proc/{pid}/maps").open(errors="replace") as lines:
        for line in lines:
            path = line.rstrip("\n").split(maxsplit=5)[5:]
            if not path:
                continue
            if _is_device(path[0]):
                devices.add(path[0])
            maps_driver = maps_driver or path[0].rsplit("/", 1)[-1].startswith("libcuda.so")
    return devices, maps_driver


def _is_device(target: str) -> bool:
    return target.startswith(_device_prefixes())


@cache
def _device_prefixes() -> tuple[str, ...]:
    extra = os.environ.get(DEVICE_PREFIX_VARIABLE)
    return (DEVICE_PREFIX, extra) if extra else (DEVICE_PREFIX,)


def _pids_in(file: Path) -> set[int]:
    try:
        return {int(line) for line in file.read_text().split()}
    except OSError:  # removed meanwhile, or a threaded cgroup, whose processes its parent lists
        return set()


def _cgroup_mounts() -> list[Path]:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    mounts = []
    for line in lines:
        head, _, tail = line.partition(" - ")
        if tail.split(" ", 1)[0] in {"cgroup", "cgroup2"}:
            mounts.append(Path(head.split()[4]))
    return mounts


def _stat_fields(pid: int) -> _Stat | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (OSError, ProcessLookupError):
        return None
    comm, _, rest = text.partition("(")[2].rpartition(")")
    fields = rest.split()
    return _Stat(comm, fields[0], int(fields[19]))


def open_files(pid: int) -> list[str]:
    """What the descriptors of a process point at; empty where it has ended."""
    found = []
    try:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                found.append(str(link.readlink()))
            except OSError:
                continue
    except OSError:
        return []
    return found


def tracer_of(pid: int) -> int:
    """The process that traces `pid`, 0 for none."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return 0
    line = next((line for line in text.splitlines() if line.startswith("TracerPid:")), "TracerPid: 0")
    return int(line.split()[-1])


def why_it_cannot_run(pid: int) -> str | None:
    """Why a process cannot answer the driver now; None where it can. The driver waits for such a process without end."""
    status = _stat_fields(pid)
    if status is not None and status.state in "Tt":
        return "it is stopped, and the driver needs it to run"
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return None
    paths = {line.split(":", 2)[2].strip("/") for line in lines if line.count(":") >= 2} - {""}
    folders = (mount / path for mount in _cgroup_mounts() for path in paths)
    is_frozen = any(
        _says(folder / "cgroup.events", "frozen 1") or _says(folder / "freezer.state", "FROZEN") for folder in folders
    )
    return "its cgroup is frozen, and the driver needs it to run" if is_frozen else None


def _says(file: Path, text: str) -> bool:
    try:
        return text in file.read_text().splitlines()
    except OSError:
        return False
