"""Reads the descriptor tables of a container's processes: who holds shared device memory by number, and what is on its way.

Reads /proc and compares; changes nothing and decides nothing (staged_descriptors.py does). The processes go on meanwhile, so a
descriptor that is sent from one to the other during a look may be missed by it: whoever must be sure looks again. What lies
unread in a socket cannot be seen, only that descriptors do (`scm_fds` of fdinfo, Linux 5.6 and later).
Called by staged_descriptors.py and staged_thaw.py; spec/preload-protocol.md, "Descriptors of the application".
"""

from __future__ import annotations

import os
import re
import stat
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vgpu_errors import NodeError

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator

    from gpu_state.kcmp import OpenFiles

MAX_DESCRIPTORS = 1 << 20
PLACEHOLDER = struct.Struct("<8sQ")
PLACEHOLDER_MARK = b"VGPUHELD"
_FLAGS = re.compile(r"^flags:\s*([0-7]+)$", re.MULTILINE)
_SCM_FDS = re.compile(r"^scm_fds:\s*([0-9]+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Place:
    """A number in the table of a process, and the inode that was seen under it."""

    pid: int
    number: int
    device: int
    inode: int


@dataclass(frozen=True, slots=True)
class HeldDescriptor:
    """A descriptor of the shared object `of`."""

    place: Place
    of: str
    closes_on_exec: bool


@dataclass(frozen=True, slots=True)
class WaitingDescriptors:
    """Descriptors that were sent to a socket and not received."""

    pid: int
    number: int
    count: int


@dataclass(frozen=True, slots=True)
class Sight:
    """One look at some processes."""

    held: tuple[HeldDescriptor, ...]
    waiting: tuple[WaitingDescriptors, ...]


def look_at(pids: Iterable[int], files: OpenFiles) -> Sight:
    """What these processes hold of `files`, and their sockets with descriptors that wait to be received."""
    held: list[HeldDescriptor] = []
    waiting: list[WaitingDescriptors] = []
    for place, seen in _places(pids):
        if stat.S_ISSOCK(seen.st_mode):
            if count := _number_in(place, _SCM_FDS, 10):
                waiting.append(WaitingDescriptors(place.pid, place.number, count))
        elif (name := files.name_of(place.pid, place.number, (place.device, place.inode))) is not None:
            held.append(HeldDescriptor(place, name, bool(_number_in(place, _FLAGS, 8) & os.O_CLOEXEC)))
    return Sight(tuple(held), tuple(waiting))


def placeholders_of(pids: Iterable[int], tokens: Container[int]) -> list[tuple[Place, int]]:
    """Where these processes have a placeholder with one of the tokens."""
    found = []
    for place, seen in _places(pids):
        if stat.S_ISREG(seen.st_mode) and seen.st_nlink == 0 and seen.st_size == PLACEHOLDER.size:
            token = _token_in(place)
            if token is not None and token in tokens:
                found.append((place, token))
    return found


def read_token(content: bytes) -> int | None:
    """The token of a placeholder; None for any other file."""
    if len(content) != PLACEHOLDER.size:
        return None
    mark, token = PLACEHOLDER.unpack(content)
    return int(token) if mark == PLACEHOLDER_MARK else None


def _places(pids: Iterable[int]) -> Iterator[tuple[Place, os.stat_result]]:
    count = 0
    for pid in sorted(pids):
        folder = Path(f"/proc/{pid}/fd")
        try:
            names = os.listdir(folder)  # noqa: PTH208 - a process may have a hundred thousand
        except OSError:  # it has ended
            continue
        count += len(names)
        if count > MAX_DESCRIPTORS:
            raise NodeError(what=f"the container's processes have more than {MAX_DESCRIPTORS} descriptors open")
        for name in names:
            with suppress(OSError):  # closed meanwhile
                seen = os.stat(f"{folder}/{name}")  # noqa: PTH116 - as above
                yield Place(pid, int(name), seen.st_dev, seen.st_ino), seen


def _number_in(place: Place, line: re.Pattern[str], base: int) -> int:
    """A number of the descriptor's fdinfo; 0 where the kernel does not tell it."""
    with suppress(OSError):
        found = line.search(Path(f"/proc/{place.pid}/fdinfo/{place.number}").read_text())
        return int(found.group(1), base) if found else 0
    return 0


def _token_in(place: Place) -> int | None:
    with suppress(OSError):
        fd = os.open(f"/proc/{place.pid}/fd/{place.number}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            content = os.pread(fd, PLACEHOLDER.size, 0)
        finally:
            os.close(fd)
        return read_token(content)
    return None
