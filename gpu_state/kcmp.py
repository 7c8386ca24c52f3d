"""Which descriptors of this process are one and the same open file, as kcmp(2) tells.

Compares only; opens, closes and reads nothing. An open file is the one identity of shared device memory that no process can
claim: whoever holds a descriptor of it was given it. Called by staged_inventory.py; spec/preload-protocol.md, "SHARES".
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
    from collections.abc import Sequence

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


def _compare(first: int, second: int) -> int:
    """-1, 0 or 1, in an order that the kernel makes up and keeps."""
    number = _NUMBERS.get(platform.machine())
    if number is None:
        raise NodeError(
            what=f"kcmp has no known number on {platform.machine()}, so shared GPU memory cannot be told apart"
        )
    me = os.getpid()
    answer = _libc.syscall(
        ctypes.c_long(number), ctypes.c_long(me), ctypes.c_long(me), ctypes.c_long(_KCMP_FILE),
        ctypes.c_ulong(first), ctypes.c_ulong(second),
    )  # fmt: skip
    if answer < 0:
        name = errno.errorcode.get(ctypes.get_errno(), "an unknown error")
        raise NodeError(what=f"kcmp fails with {name}, so shared GPU memory cannot be told apart")
    # 3 says "not the same, and not to be ordered", which the kernel never answers for two files.
    return (0, -1, 1, 1)[answer]
