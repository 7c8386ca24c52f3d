"""Looks at and acts on a container's cgroup: is it frozen, where is it, end everything in it.

Pausing and resuming go through the low-level runtime (LowLevel.call with `pause` and `resume`), which keeps its own
books; ending does not, because no runtime verb ends a frozen container without letting it run on.
Refuses to end a cgroup that this process is in: a container without a cgroup of its own shares the engine's.
Called by checkpoint.py, restore.py, delete.py and resume.py. Kernel: Documentation/admin-guide/cgroup-v2.rst, cgroup-v1/freezer-subsystem.rst.
"""

from __future__ import annotations

import os
import signal
import time

from oci_hook.state import cgroup_of
from vgpu_errors import DeadlineExceeded

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

CGROUP_ROOT = "/sys/fs/cgroup"
KILL_S = 10.0
LOOK_AGAIN_S = 0.01


def is_frozen(cgroup: str) -> bool:
    """Whether the container's processes are held, by their own cgroup or one above it."""
    events = _read(f"{CGROUP_ROOT}{cgroup}/cgroup.events")
    if events is not None:
        return "frozen 1" in events.splitlines()
    state = _read(f"{CGROUP_ROOT}/freezer{cgroup}/freezer.state")
    return state is not None and state.strip() in ("FROZEN", "FREEZING")


def is_running(cgroup: str) -> bool:
    """Whether the cgroup is there, has processes, and is not frozen."""
    folder = _folder(cgroup)
    return folder is not None and bool(_members(folder)) and not is_frozen(cgroup)


def is_held(pid: int) -> bool:
    """Whether any hierarchy's freezer holds the process; on machines with both versions either may."""
    for path in _freezer_files(pid):
        if path.endswith("/cgroup.freeze"):
            if "frozen 1" in (_read(f"{path[: -len('freeze')]}events") or ""):
                return True
        elif (_read(path) or "").strip() in ("FROZEN", "FREEZING"):
            return True
    return False


def folder_of(cgroup: str) -> str | None:
    """The folder that has cgroup.freeze; None on version 1."""
    folder = f"{CGROUP_ROOT}{cgroup}"
    return folder if os.path.exists(f"{folder}/cgroup.freeze") else None  # noqa: PTH110


def thaw(pid: int) -> None:
    """Set a restored container free: CRIU brings back a cgroup that was frozen at the dump as frozen.

    In every hierarchy that has it: on machines with both versions CRIU notes the state of one for the other.
    """
    for path in _freezer_files(pid):
        _write(path, "0" if path.endswith("/cgroup.freeze") else "THAWED")


def kill(cgroup: str, pid: int, *, deadline_s: float = KILL_S) -> None:
    """SIGKILL for every process of the container; returns when they are gone. A frozen process runs no instruction more."""
    folder = _folder(cgroup)
    if folder is None or _holds_this_process(cgroup):
        _kill_namespace(pid, deadline_s)
        return
    until = time.monotonic() + deadline_s
    while True:
        members = [member for path in _tree(folder) for member in _members(path)]
        if not members:
            return
        if time.monotonic() > until:
            raise DeadlineExceeded(phase=f"ending the processes of {cgroup}", seconds=deadline_s)
        if not _write(f"{folder}/cgroup.kill", "1"):
            for member in members:
                _signal(member)
        for member in members:
            thaw(member)  # version 1 delivers SIGKILL only then, and before anything else
        time.sleep(LOOK_AGAIN_S)


def _kill_namespace(pid: int, deadline_s: float) -> None:
    """The end of a pid namespace's first process is the end of all."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return
    try:
        signal.pidfd_send_signal(handle, signal.SIGKILL)
        thaw(pid)
        import select  # noqa: PLC0415

        if not select.select([handle], [], [], deadline_s)[0]:
            raise DeadlineExceeded(phase=f"ending process {pid}", seconds=deadline_s)
    except ProcessLookupError:
        return
    finally:
        os.close(handle)


def _freezer_files(pid: int) -> Iterator[str]:
    mounts = _cgroup_mounts()
    for line in (_read(f"/proc/{pid}/cgroup") or "").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and "" in mounts:
            yield f"{mounts['']}{path}/cgroup.freeze"
        elif "freezer" in controllers.split(",") and "freezer" in mounts:
            yield f"{mounts['freezer']}{path}/freezer.state"


def _cgroup_mounts() -> dict[str, str]:
    """Mount points: of version 2 under "", of version 1's freezer under its name."""
    found: dict[str, str] = {}
    for line in (_read("/proc/self/mountinfo") or "").splitlines():
        fields, _, rest = line.partition(" - ")
        kind, _, options = rest.split(" ", 2)
        if kind == "cgroup2":
            found.setdefault("", fields.split(" ")[4])
        elif kind == "cgroup" and "freezer" in options.split(","):
            found.setdefault("freezer", fields.split(" ")[4])
    return found


def _folder(cgroup: str) -> str | None:
    """Where cgroup.procs of the container is; None for the root cgroup, which is nobody's container."""
    if cgroup.strip("/") == "" or ".." in cgroup.split("/"):
        return None
    for folder in (f"{CGROUP_ROOT}{cgroup}", f"{CGROUP_ROOT}/freezer{cgroup}"):
        if os.path.exists(f"{folder}/cgroup.procs"):  # noqa: PTH110
            return folder
    return None


def _holds_this_process(cgroup: str) -> bool:
    own = cgroup_of(os.getpid())
    return own is None or own == cgroup or own.startswith(cgroup.rstrip("/") + "/")


def _tree(folder: str) -> Iterator[str]:
    for path, _, _ in os.walk(folder):
        yield path


def _members(folder: str) -> list[int]:
    return [int(word) for word in (_read(f"{folder}/cgroup.procs") or "").split()]


def _signal(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _read(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8") as file:  # noqa: PTH123
            return file.read()
    except OSError:
        return None


def _write(path: str, text: str) -> bool:
    """Never creates a file; cgroup.kill is absent before Linux 5.14."""
    try:
        descriptor = os.open(path, os.O_WRONLY)
    except OSError:
        return False
    try:
        os.write(descriptor, text.encode())
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True
