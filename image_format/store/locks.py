"""Who may do what in a store at the same time (spec/store.md, section 4).

One lock for the whole store: shared by whoever brings something in or takes a lease, exclusive for gc and whatever else
removes. A lease is a file that its holder keeps locked: a holder that dies lets go by dying, and its file is rubbish.
All locks are flock(2). Nothing here waits without end. Called by the store alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import time
from typing import TYPE_CHECKING, NamedTuple

from vgpu_errors import StoreBusy

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_POLL_S = 0.05
_MAX_NOTE_BYTES = 4096


class Lease(NamedTuple):
    """Somebody uses a checkpoint."""

    digest: str
    why: str
    pid: int


class StoreLock:
    """The store's one lock."""

    def __init__(self, path: Path, *, deadline_s: float) -> None:
        self._path = path
        self._deadline_s = deadline_s

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Held beside others that bring something in; nothing is removed meanwhile."""
        with self._held(fcntl.LOCK_SH):
            yield

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Held alone."""
        with self._held(fcntl.LOCK_EX):
            yield

    @contextlib.contextmanager
    def _held(self, how: int) -> Iterator[None]:
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            ends = time.monotonic() + self._deadline_s
            while not try_lock(descriptor, how):
                if time.monotonic() > ends:
                    raise StoreBusy(root=self._path.parent, seconds=self._deadline_s)
                time.sleep(_POLL_S)
            yield
        finally:
            os.close(descriptor)


def try_lock(descriptor: int, how: int = fcntl.LOCK_EX) -> bool:
    """Take a lock if that needs no waiting."""
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class Leases:
    """The folder of leases. They are taken under the shared lock, and swept under the exclusive one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def take(self, digest: str, why: str) -> tuple[Path, int]:
        """A new lease: its file, and the descriptor that holds it."""
        path = self._folder / f"{digest}.{secrets.token_hex(8)}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.write(descriptor, json.dumps({"why": why[:1024], "pid": os.getpid()}).encode())
        return path, descriptor

    def give_back(self, path: Path, descriptor: int) -> None:
        """The holder needs it no longer."""
        path.unlink(missing_ok=True)
        os.close(descriptor)

    def live(self) -> tuple[Lease, ...]:
        """Those that somebody holds."""
        return tuple(lease for path in sorted(self._folder.iterdir()) if (lease := self._look(path)) is not None)

    def sweep(self) -> tuple[Lease, ...]:
        """The same; the files of holders that died are removed."""
        leases = []
        for path in sorted(self._folder.iterdir()):
            lease = self._look(path)
            if lease is None:
                path.unlink(missing_ok=True)
            else:
                leases.append(lease)
        return tuple(leases)

    @staticmethod
    def _look(path: Path) -> Lease | None:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        try:
            if try_lock(descriptor, fcntl.LOCK_SH):
                return None
            why, pid = _note(os.read(descriptor, _MAX_NOTE_BYTES))
            return Lease(path.name.partition(".")[0], why, pid)
        finally:
            os.close(descriptor)


def _note(data: bytes) -> tuple[str, int]:
    try:
        doc = json.loads(data)
        return str(doc["why"]), int(doc["pid"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return "being taken", 0
