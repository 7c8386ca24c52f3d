"""The newest generation of each container that this node has restored or made (spec/signature.md, section 7).

One small file under /var/lib/vgpu, replaced as a whole under a lock; containers not heard of for longest leave first.
Refuses nothing of a checkpoint: a file that cannot be read counts as empty, because a node that lost it must still restore.
`vgpu verify` calls `refuse_stale`; the runtime shim asks before a restore and notes what was restored or made.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from image_format import canonical_json
from image_format.fields import Fields
from image_format.trust.freshness import check
from vgpu_errors import DeadlineExceeded, ImageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from image_format.trust.freshness import SignedTimes, Warning  # noqa: A004 - the word for it
    from image_format.trust.policy import Policy

FOLDER = "/var/lib/vgpu"
FILE_NAME = "generations.json"
VERSION = 1
MAX_CONTAINERS = 4096
MAX_BYTES = 4 << 20
MAX_ID = 256
LOCK_S = 5.0


def refuse_stale(
    signed: SignedTimes | None, policy: Policy, *, where: str, folder: Path = Path(FOLDER), now: datetime | None = None
) -> tuple[Warning, ...]:
    """Hold a verified checkpoint against the clock and this node's memory; what nobody signed says nothing of time."""
    if signed is None:
        return ()
    newest = SeenGenerations(folder).newest(signed.container_id)
    return check(signed, now=now or datetime.now(UTC), last_generation=newest, policy=policy, where=where)


@dataclass(frozen=True)
class SeenGenerations:
    """The memory of one node."""

    folder: Path = Path(FOLDER)

    def newest(self, container_id: str) -> int | None:
        """The newest known generation; None for a container that the node knows nothing of."""
        return self._read().get(container_id[:MAX_ID])

    def note(self, container_id: str, generation: int) -> None:
        """Remember a generation, unless a newer one is known."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._locked():
            known = self._read()
            newest = max(generation, known.pop(container_id[:MAX_ID], 0))
            known[container_id[:MAX_ID]] = newest  # at the end: heard of last
            self._write(dict(list(known.items())[-MAX_CONTAINERS:]))

    def _read(self) -> dict[str, int]:
        try:
            return parse((self.folder / FILE_NAME).read_bytes())
        except (OSError, ImageError):
            return {}

    def _write(self, known: dict[str, int]) -> None:
        partial = self.folder / f".{FILE_NAME}.partial"
        with contextlib.suppress(FileNotFoundError):
            partial.unlink()
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(encode(known))
            file.flush()
            os.fsync(descriptor)
        partial.replace(self.folder / FILE_NAME)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        descriptor = os.open(
            self.folder / f".{FILE_NAME}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
        )
        try:
            _lock(descriptor)
            yield
        finally:
            os.close(descriptor)


def _lock(descriptor: int) -> None:
    """Others hold the lock for milliseconds; one who is stopped while holding it must not stop a restore."""
    ends = time.monotonic() + LOCK_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= ends:
                raise DeadlineExceeded(phase=f"waiting for the lock of {FILE_NAME}", seconds=LOCK_S) from None
            time.sleep(0.01)
        else:
            return


def encode(known: dict[str, int]) -> bytes:
    """The file's bytes; the order of the list is the order in which containers were last heard of."""
    entries = [{"container": container, "generation": generation} for container, generation in known.items()]
    return canonical_json.write({"version": VERSION, "newest": entries}, where=FILE_NAME)


def parse(data: bytes) -> dict[str, int]:
    """Parse the file."""
    fields = Fields(canonical_json.read_object(data, where=FILE_NAME, max_bytes=MAX_BYTES), FILE_NAME)
    if fields.integer("version") != VERSION:
        raise ImageError(where=fields.path("version"), what=f"must be {VERSION}")
    return {entry.text("container"): entry.integer("generation") for entry in fields.objects("newest")}
