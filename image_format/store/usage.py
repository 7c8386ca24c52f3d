"""What takes room in a store: bytes of each checkpoint, how many of them others share, and what nobody needs.

Sizes are lengths of files; a file counts once, however many names it has. Changes nothing. Called by `Store.usage`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from image_format.store.checkpoints import StoredCheckpoint, list_checkpoints
from image_format.store.layout import files_below

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from image_format.store.layout import Layout


@dataclass(frozen=True)
class CheckpointUsage:
    """One checkpoint: all its bytes, and those that no other checkpoint of the store has."""

    checkpoint: StoredCheckpoint
    total_bytes: int
    unique_bytes: int

    @property
    def shared_bytes(self) -> int:
        """What other checkpoints have too."""
        return self.total_bytes - self.unique_bytes


@dataclass(frozen=True)
class StoreUsage:
    """The whole store: what all files take, of it what is being brought in, and content that no checkpoint has."""

    checkpoints: tuple[CheckpointUsage, ...]
    total_bytes: int
    incoming_bytes: int
    unused_bytes: int


def usage(layout: Layout) -> StoreUsage:
    """Measure it; what comes or goes meanwhile may be counted or not."""
    entries = list_checkpoints(layout)
    files = {entry.manifest_digest: dict(_files(entry.path)) for entry in entries}
    holders = Counter(inode for inodes in files.values() for inode in inodes)
    checkpoints = tuple(_usage(entry, files[entry.manifest_digest], holders) for entry in entries)
    held = {inode: size for inodes in files.values() for inode, size in inodes.items()}
    coming = {inode: size for inode, size in _files(layout.incoming) if inode not in held}
    content = dict(_files(layout.contents))
    unused = sum(size for inode, size in content.items() if inode not in held and inode not in coming)
    return StoreUsage(checkpoints, sum((content | held | coming).values()), sum(coming.values()), unused)


def _usage(entry: StoredCheckpoint, files: dict[int, int], holders: Counter[int]) -> CheckpointUsage:
    unique = sum(size for inode, size in files.items() if holders[inode] == 1)
    return CheckpointUsage(entry, sum(files.values()), unique)


def _files(folder: Path) -> Iterator[tuple[int, int]]:
    for _, status in files_below(folder):
        yield status.st_ino, status.st_size
