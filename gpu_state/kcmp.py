"""Which descriptors are one and the same open file, of this process and of others, as kcmp(2) tells.

Compares only; opens, closes and reads nothing. An open file is the one identity of shared device memory that no process can
claim: whoever holds a descriptor of it was given it. Called by staged_inventory.py and staged_taking.py, by open_descriptors.py for
the tables of other processes; spec/preload-protocol.md, "SHARES".
"""

from __future__ import annotations

import ctypes
import errno
import functools
import itertools
import os
import platform
from typing import TYPE_CHECKING

from vgpu_errors import NodeError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_KCMP_FILE = 0
_NUMBERS = {"x86_64": 312, "aarch64": 272, "riscv64": 272, "ppc64le": 354, "s390x": 343}
_libc = ctypes.CDLL(None, use_errno=True)


def same_files(fds: Sequence[int]) -> list[int]:
    """A number for each descriptor; two are of one open file exactly where their numbers are equal."""

    def order(one: int, other: int) -> int:
        return _compare(fds[one], fds[other])

    by_file = sorted(range(len(fds)), key=functools.cmp_to_key(order))
    numbers = [0] * len(fds)
    for before, after in itertools.pairwise(by_file):
        numbers[after] = numbers[before] + (order(before, after) != 0)
    return numbers


class OpenFiles:
    """Named open files of this process, to find which of them a descriptor of another process is.

    The caller keeps the descriptors open. Files of other inodes are told apart without a call; the many that the driver makes of
    one device file lie in the kernel's order, so that each question costs a few comparisons.
    """

    def __init__(self, fds: Mapping[str, int]) -> None:
        by_inode: dict[tuple[int, int], list[tuple[str, int]]] = {}
        for name, fd in fds.items():
            seen = os.fstat(fd)
            by_inode.setdefault((seen.st_dev, seen.st_ino), []).append((name, fd))

        def order(one: tuple[str, int], other: tuple[str, int]) -> int:
            return _compare(one[1], other[1])

        self._by_inode = {inode: sorted(named, key=functools.cmp_to_key(order)) for inode, named in by_inode.items()}

    def __bool__(self) -> bool:
        return bool(self._by_inode)

    def name_of(self, pid: int, number: int, inode: tuple[int, int]) -> str | None:
        """The file that is number `number` of process `pid`, a file of this inode; None for another, and for one just closed."""
        named = self._by_inode.get(inode, ())
        low, high = 0, len(named)
        while low < high:
            middle = (low + high) // 2
            name, fd = named[middle]
            answer = _compare_with(fd, pid, number)
            if answer is None:
                return None
            if answer == 0:
                return name
            low, high = (middle + 1, high) if answer < 0 else (low, middle)
        return None


def _compare(first: int, second: int) -> int:
    """-1, 0 or 1, in an order that the kernel makes up and keeps."""
    answer = _ask(first, os.getpid(), second)
    if answer < 0:
        raise _failure()
    return _order(answer)


def _compare_with(fd: int, pid: int, number: int) -> int | None:
    """The same with a descriptor of another process; None where it or the process is gone."""
    answer = _ask(fd, pid, number)
    if answer >= 0:
        return _order(answer)
    if ctypes.get_errno() in (errno.EBADF, errno.ESRCH):
        return None
    raise _failure()


def _ask(fd: int, pid: int, number: int) -> int:
    call = _NUMBERS.get(platform.machine())
    if call is None:
        raise NodeError(
            what=f"kcmp has no known number on {platform.machine()}, so shared GPU memory cannot be told apart"
        )
    pids = ctypes.c_long(os.getpid()), ctypes.c_long(pid)
    numbers = ctypes.c_ulong(fd), ctypes.c_ulong(number)
    return int(_libc.syscall(ctypes.c_long(call), *pids, ctypes.c_long(_KCMP_FILE), *numbers))


def _failure() -> NodeError:
    name = errno.errorcode.get(ctypes.get_errno(), "an unknown error")
    return NodeError(what=f"kcmp fails with {name}, so shared GPU memory cannot be told apart")


def _order(answer: int) -> int:
    # 3 says "not the same, and not to be ordered", which the kernel never answers for two files.
    return (0, -1, 1, 1)[answer]
