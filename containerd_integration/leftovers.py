"""Folders that nobody will clear away: containerd's /tmp/ctrd-checkpoint*, and those of our own killed commands.

`ctr container restore --live` unpacks the checkpoint into a temporary folder of containerd's and leaves it there. Only
what is ours is looked at: folders that hold a record of vgpu-runtime. Only what nobody uses goes: no process has it open
or names it, and it is older than a start can take, because a task that was created and not started still needs it.
Called by `vgpu containerd clean`, `vgpu containerd watch`, and before each command for our own folders.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import time
from dataclasses import dataclass
from pathlib import Path

from containerd_integration.checkpointing import WORK_DIRECTORY
from containerd_integration.work_folder import PREFIXES, locked, whose
from image_format.file_names import MANIFEST_NAME

TEMPORARY = Path("/tmp")  # noqa: S108 - containerd's choice; nothing is created there
PATTERN = "ctrd-checkpoint*"
MIN_AGE_S = 900.0


@dataclass(frozen=True)
class Leftover:
    """One folder; `reason` says why it stays, None that it may go."""

    path: Path
    size: int
    reason: str | None


def find_leftovers(
    *, temporary: Path = TEMPORARY, own: Path = WORK_DIRECTORY, min_age_s: float = MIN_AGE_S, proc: Path = Path("/proc")
) -> list[Leftover]:
    """All of both kinds."""
    used = used_paths(proc)
    found = [path for path in sorted(temporary.glob(PATTERN)) if is_ours(path)]
    return [Leftover(path, _size(path), _reason(path, used, min_age_s)) for path in found] + find_own(own)


def find_own(base: Path) -> list[Leftover]:
    """What killed commands of ours left; a command that runs holds its folder's lock."""
    if not base.is_dir():
        return []
    found = sorted(path for path in base.iterdir() if path.name.startswith(PREFIXES) and path.is_dir())
    return [Leftover(path, _size(path), _own_reason(path)) for path in found]


def remove(leftover: Leftover) -> None:
    """Remove a folder that may go; one that has changed its owner meanwhile stays."""
    if leftover.reason is not None or not _is_real_folder(leftover.path):
        return
    with contextlib.suppress(OSError), locked(leftover.path):  # a command that began meanwhile holds the lock
        shutil.rmtree(leftover.path, ignore_errors=True)


def is_ours(path: Path) -> bool:
    """A real folder of root's with a manifest of vgpu-runtime in it: nobody else's is touched."""
    return _is_real_folder(path) and (path / MANIFEST_NAME).is_file()


def used_paths(proc: Path) -> set[str]:
    """Every path that a process has open, works in, or names on its command line."""
    used: set[str] = set()
    for process in proc.glob("[0-9]*"):
        try:
            used |= set((process / "cmdline").read_bytes().decode(errors="replace").split("\0"))
            used.add(str((process / "cwd").readlink()))
            used |= {_target(link) for link in (process / "fd").iterdir()}
        except OSError:
            continue  # it has ended
    return used


def _reason(path: Path, used: set[str], min_age_s: float) -> str | None:
    if any(one == str(path) or one.startswith(f"{path}/") for one in used):
        return "in use"
    newest = time.time()
    with contextlib.suppress(OSError):  # gone meanwhile: young
        found = [entry.lstat() for entry in [path, *path.iterdir()]]
        # Unpacking keeps the files' own times, so the folder's change time counts as well.
        newest = max(found[0].st_ctime, *(entry.st_mtime for entry in found))
    return f"younger than {min_age_s:g} s" if time.time() - newest < min_age_s else None


def _own_reason(path: Path) -> str | None:
    owner = whose(path)
    if owner is not None:
        return "in use" if _is_locked(path) else f"holds the state of {owner.container}, which had ended"
    return "in use" if _is_locked(path) else None


def _is_locked(path: Path) -> bool:
    try:
        with locked(path):
            return False
    except OSError:
        return True


def _is_real_folder(path: Path) -> bool:
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def _size(path: Path) -> int:
    """Its owner may be removing it just now: what is gone counts nothing."""
    size = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):
                size += Path(folder, name).lstat().st_size
    return size


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:
        return ""
