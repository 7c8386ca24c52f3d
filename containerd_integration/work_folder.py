"""The folder in which one command works: CRIU's images and the runtime's work files, locked for as long as it runs.

A folder without a lock was left by a killed command and may go (leftovers.py), unless it says that the only state of an
ended container lies in it. Called by `checkpointing` and `restoring`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NEEDED_NAME = "needed.json"
PREFIXES = ("checkpoint-", "restore-")


@dataclass(frozen=True)
class WorkFolder:
    """Where the runtime reads or writes."""

    path: Path

    @property
    def images(self) -> Path:
        """CRIU's images, and what vgpu-runtime adds."""
        return self.path / "images"

    @property
    def work(self) -> Path:
        """The runtime's logs."""
        return self.path / "work"

    def need(self, container: str, namespace: str) -> None:
        """From now on this may be the only state of that container."""
        text = json.dumps({"container": container, "namespace": namespace})
        (self.path / NEEDED_NAME).write_text(text, encoding="utf-8")

    def let_go(self) -> None:
        """It is no longer."""
        (self.path / NEEDED_NAME).unlink(missing_ok=True)

    @property
    def is_needed(self) -> bool:
        """Whether a container's only state may lie here."""
        return (self.path / NEEDED_NAME).exists()


@contextlib.contextmanager
def work_folder(base: Path, prefix: str) -> Iterator[WorkFolder]:
    """A new folder, removed at the end of the block unless it is needed."""
    folder = WorkFolder(base / f"{prefix}{uuid.uuid4().hex[:12]}")
    # Locked before it has the name by which another command's sweep would find it.
    unlocked = base / f".{folder.path.name}"
    unlocked.mkdir(mode=0o700, parents=True)
    with locked(unlocked):
        try:
            unlocked.rename(folder.path)
            folder.images.mkdir(mode=0o700)
            folder.work.mkdir(mode=0o700)
            yield folder
        finally:
            if not folder.is_needed:
                shutil.rmtree(unlocked, ignore_errors=True)
                shutil.rmtree(folder.path, ignore_errors=True)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the folder's lock; raises BlockingIOError where another process does."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class Owner:
    """The container whose state lies in a folder."""

    container: str
    namespace: str


def whose(path: Path) -> Owner | None:
    """The container whose only state may lie here, where the folder says so."""
    try:
        found = json.loads((path / NEEDED_NAME).read_text(encoding="utf-8"))
        return Owner(str(found["container"]), str(found["namespace"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
