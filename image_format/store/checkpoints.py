"""What checkpoints a store has, and which one a word on the command line means.

Reads records without trust: names and numbers are for choosing, nothing is used before its signature was checked.
A directory whose record cannot be read is listed with its digest and the problem. Called by the store.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from image_format.fields import is_hex_digest
from image_format.file_names import RECORD_NAME
from image_format.record import MAX_RECORD_BYTES, Record
from vgpu_errors import NoSuchCheckpoint, VgpuError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from image_format.store.layout import Layout

_SHORTEST_PREFIX = 4


@dataclass(frozen=True)
class StoredCheckpoint:
    """A sealed directory in the store. `problem` says why its record cannot be read; the other fields are empty then."""

    manifest_digest: str
    path: Path
    container_id: str = ""
    container_name: str | None = None
    generation: int = 0
    created: str = ""
    mode: str = ""
    content_root: str = ""
    added_s: float = 0.0
    problem: str | None = None

    @property
    def order(self) -> tuple[str, int, float]:
        """Later checkpoints come later."""
        return self.created, self.generation, self.added_s


def read_checkpoint(path: Path) -> StoredCheckpoint:
    """One directory of the store."""
    added_s = path.stat().st_mtime
    try:
        with (path / RECORD_NAME).open("rb") as file:
            record = Record.from_bytes(file.read(MAX_RECORD_BYTES + 1), where=str(path / RECORD_NAME))
    except (VgpuError, OSError) as problem:
        return StoredCheckpoint(path.name, path, added_s=added_s, problem=str(problem))
    return StoredCheckpoint(
        manifest_digest=path.name,
        path=path,
        container_id=record.container.id,
        container_name=record.container.name,
        generation=record.generation,
        created=record.created,
        mode=record.mode,
        content_root=record.content_root,
        added_s=added_s,
    )


def list_checkpoints(layout: Layout) -> tuple[StoredCheckpoint, ...]:
    """All of them, oldest first."""
    found = []
    for path in layout.checkpoints.iterdir():
        if is_hex_digest(path.name):
            try:
                found.append(read_checkpoint(path))
            except FileNotFoundError:
                continue  # gc took it between the two looks
    return tuple(sorted(found, key=lambda checkpoint: checkpoint.order))


def find(checkpoints: Sequence[StoredCheckpoint], wanted: str, *, root: Path) -> StoredCheckpoint:
    """The one that is meant: a digest or the beginning of one, or the newest of a container, or its `:generation`."""
    word = wanted.removeprefix("sha256:")
    by_digest = [entry for entry in checkpoints if len(word) >= _SHORTEST_PREFIX and _digest_fits(entry, word)]
    if len(by_digest) == 1:
        return by_digest[0]
    name, colon, number = word.rpartition(":")
    name = name if colon and number.isdecimal() and len(number) < 20 else word
    of_container = [entry for entry in checkpoints if name in (entry.container_id, entry.container_name)]
    if not of_container and len(name) >= _SHORTEST_PREFIX:
        of_container = [entry for entry in checkpoints if entry.container_id.startswith(name)]
    if name != word:
        of_container = [entry for entry in of_container if entry.generation == int(number)]
    if len(by_digest) > 1 or len({entry.container_id for entry in of_container}) > 1:
        raise NoSuchCheckpoint(root=root, wanted=ascii(wanted)[1:-1], what="several fit, give more of the digest")
    if not of_container:
        raise NoSuchCheckpoint(root=root, wanted=ascii(wanted)[1:-1], what="nothing there has that digest or container")
    return of_container[-1]


def _digest_fits(entry: StoredCheckpoint, word: str) -> bool:
    return entry.manifest_digest.startswith(word)
