"""Host memory that the GPU can reach at link rate: mapped, touched by threads, registered once with the driver.

Everything here is slow (17 GB/s to touch, 30-36 GB/s to register, measured on an H200) and therefore done before any freeze.
cuMemHostAlloc is never used: 2.2 GB/s. Used by pinned_ring.py and targets.py.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from gpu_state.staging.cuda_calls import call
from gpu_state.undo import Undo
from vgpu_errors import NotEnoughSpace

if TYPE_CHECKING:
    from collections.abc import Callable

HUGE_PAGE = 2 << 20
TOUCH_THREADS = min(16, os.cpu_count() or 1)  # 17 GB/s of hugetlb pages with 8 threads (measured on an H200)
TOUCH_BYTES = 64 << 20  # at a time and thread: short enough to be cancelled
_MAP_HUGETLB = 0x40000
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23  # since Linux 5.14; the mmap module has no name for it
_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE: pinned for the contexts of all devices
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class HostMemory:
    """A mapping, by address for the driver and by `view` for reads and writes."""

    def __init__(self, mapping: mmap.mmap, size: int, *, name: str, is_huge: bool) -> None:
        self.size = size
        self.name = name
        self.is_huge = is_huge
        self.view = memoryview(mapping)
        self._mapping = mapping
        self._anchor: ctypes.c_char | None = ctypes.c_char.from_buffer(mapping)
        self.address = ctypes.addressof(self._anchor)
        self._is_registered = False

    def touch(self, threads: int = TOUCH_THREADS, check: Callable[[], None] = lambda: None) -> None:
        """Have the kernel find a page for every address now; NotEnoughSpace instead of a signal where there is none."""

        def populate(start: int) -> None:
            check()
            self._populate(self.address + start, min(TOUCH_BYTES, self.size - start))

        with ThreadPoolExecutor(threads, "vgpu-touch") as pool:
            for _ in pool.map(populate, range(0, self.size, TOUCH_BYTES)):
                pass

    def register(self) -> None:
        """Pin it for all devices; a context must be current."""
        call("cuMemHostRegister", self.address, self.size, _PORTABLE)
        self._is_registered = True

    def close(self) -> None:
        """Unpin and unmap."""
        if self._anchor is None:
            return
        if self._is_registered:
            self._is_registered = False
            call("cuMemHostUnregister", self.address)
        self._anchor = None
        self.view.release()
        self._mapping.close()

    def _populate(self, address: int, size: int) -> None:
        if not _can_populate():
            for page in range(address, address + size, mmap.PAGESIZE):
                ctypes.memmove(page, page, 1)
        elif _libc.madvise(address, size, _MADV_POPULATE_WRITE) != 0:
            code = ctypes.get_errno()
            if code in (errno.EFAULT, errno.ENOMEM):
                raise NotEnoughSpace(path=self.name, free_bytes=available_bytes(), needed_bytes=self.size)
            raise OSError(code, os.strerror(code))


def anonymous(size: int) -> HostMemory:
    """Private memory: of huge pages where the node has enough free, else with a wish for transparent ones."""
    size = round_up(size, HUGE_PAGE)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        return HostMemory(mmap.mmap(-1, size, flags=flags | _MAP_HUGETLB), size, name="anonymous memory", is_huge=True)
    except OSError as problem:  # the kernel reserves the pages here or refuses
        if problem.errno not in (errno.ENOMEM, errno.EINVAL):
            raise
    memory = HostMemory(mmap.mmap(-1, size, flags=flags), size, name="anonymous memory", is_huge=False)
    _libc.madvise(memory.address, memory.size, _MADV_HUGEPAGE)  # a wish: refused, it costs a little time
    return memory


def of_file(descriptor: int, path: Path, size: int) -> HostMemory:
    """A file of a memory file system, shared."""
    is_huge = os.fstatvfs(descriptor).f_bsize == HUGE_PAGE
    mapping = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED)
    return HostMemory(mapping, size, name=str(path), is_huge=is_huge)


def make_file(path: Path, size: int, check: Callable[[], None] = lambda: None) -> HostMemory:
    """A new file with all its pages taken, mapped; nothing is left of it when they are not there."""
    with Undo() as undo:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        undo.push(path.unlink)
        try:
            _make_room(descriptor, path, size)
            memory = of_file(descriptor, path, size)
        finally:
            os.close(descriptor)
        undo.push(memory.close)
        # A wish: the kernel follows it where shmem_enabled lets it, and a touch of 2 MiB is one fault instead of 512.
        _libc.madvise(memory.address, memory.size, _MADV_HUGEPAGE)
        memory.touch(check=check)
        return memory


def open_file(path: Path, check: Callable[[], None] = lambda: None) -> HostMemory:
    """A file that an earlier worker made."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        memory = of_file(descriptor, path, os.fstat(descriptor).st_size)
    finally:
        os.close(descriptor)
    try:
        memory.touch(check=check)  # by many threads; else the driver does it with one, page by page
    except BaseException:
        memory.close()
        raise
    return memory


def _make_room(descriptor: int, path: Path, size: int) -> None:
    status = os.fstatvfs(descriptor)
    free_bytes = status.f_bavail * status.f_bsize
    no_space = NotEnoughSpace(path=path.parent, free_bytes=free_bytes, needed_bytes=size)
    if free_bytes < size:
        raise no_space
    try:
        os.ftruncate(descriptor, size)
        if not _can_populate():
            # Slow, but a page that cannot be had must be an error here, not a SIGBUS at the first touch.
            os.posix_fallocate(descriptor, 0, size)
    except OSError as problem:
        if problem.errno in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
            raise no_space from problem
        raise


def pool_folder(size: int, mounts: Path = Path("/proc/self/mounts")) -> Path:
    """Where a pool of that size goes: a hugetlbfs with enough free pages, else /dev/shm."""
    for line in mounts.read_text().splitlines():
        words = line.split()
        if len(words) > 2 and words[2] == "hugetlbfs" and _free_huge_bytes(Path(words[1])) >= size:
            return Path(words[1])
    return Path("/dev/shm")  # noqa: S108 - the node's memory file system, not a temporary folder


def pool_folders(mounts: Path = Path("/proc/self/mounts")) -> list[Path]:
    """Everywhere a pool may have been made."""
    lines = [line.split() for line in mounts.read_text().splitlines()]
    huge = [Path(words[1]) for words in lines if len(words) > 2 and words[2] == "hugetlbfs"]
    return [*huge, Path("/dev/shm")]  # noqa: S108 - as above


def round_up(size: int, unit: int) -> int:
    """The next multiple of `unit`."""
    return -(-size // unit) * unit


def _free_huge_bytes(folder: Path) -> int:
    try:
        status = os.statvfs(folder)
    except OSError:
        return 0
    return status.f_bavail * status.f_bsize if status.f_bsize == HUGE_PAGE else 0


@cache
def _can_populate() -> bool:
    return bool(_libc.madvise(0, 0, _MADV_POPULATE_WRITE) == 0)  # nothing to do, but an unknown wish is refused


def available_bytes() -> int:
    """Memory that the kernel could still give out."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), 0)
