"""What goes out of a store, and what a crash left behind (spec/store.md, section 6).

Never removes what a lease, a reference or a running transfer needs. Works under the exclusive lock, in this order:
1. a checkpoint that goes is renamed into trash/         -> it is no checkpoint any more
2. trash, folders whose maker is dead and partial files are removed
3. content that no checkpoint and no transfer has is removed
A crash after any step leaves what the next run removes. Transfers that nobody waits for may fill, finish or give up their
folders meanwhile, so anything below incoming/ and trash/ may be gone at the next look. Called by `Store.gc` and `Store.remove`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from image_format.store import references
from image_format.store.checkpoints import StoredCheckpoint, list_checkpoints
from image_format.store.entering import ADDING_PREFIX
from image_format.store.incoming import LOCK_NAME
from image_format.store.layout import TRANSFERS, files_below
from image_format.store.locks import try_lock
from image_format.store.placing import PARTIAL
from vgpu_errors import NoSuchCheckpoint, StillNeeded

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence
    from pathlib import Path

    from image_format.store.layout import Layout
    from image_format.store.locks import Leases


@dataclass(frozen=True)
class Wish:
    """What may go: beyond the newest `keep` of a container, older than `older_than_s`, both where both are given."""

    keep: int | None = None
    older_than_s: float | None = None
    partial_older_than_s: float = 86400.0
    references_older_than_s: float | None = None

    @property
    def chooses(self) -> bool:
        """Without either, no checkpoint goes."""
        return self.keep is not None or self.older_than_s is not None


@dataclass(frozen=True)
class Collected:
    """What went, what stayed although it was chosen and why, and what else was swept."""

    removed: tuple[StoredCheckpoint, ...]
    kept: tuple[tuple[StoredCheckpoint, str], ...]
    freed_bytes: int
    swept: tuple[str, ...] = field(default=())
    forgotten: tuple[str, ...] = field(default=())
    is_dry_run: bool = False


def collect(layout: Layout, leases: Leases, wish: Wish, *, dry_run: bool) -> Collected:
    """Remove what may go; the caller holds the exclusive lock."""
    forgotten = tuple(_forget(layout, wish, dry_run=dry_run))
    needed = _needed(layout, leases, frozenset(forgotten))
    chosen = _chosen(list_checkpoints(layout), wish) if wish.chooses else []
    going = [entry for entry in chosen if entry.manifest_digest not in needed]
    kept = tuple((entry, needed[entry.manifest_digest]) for entry in chosen if entry.manifest_digest in needed)
    leftovers = list(_leftovers(layout, wish))
    unused = list(_unused(layout, [*(entry.path for entry in going), *leftovers]))
    freed = sum(size for _, size in unused) + sum(_small_bytes(entry.path) for entry in going)
    swept = tuple(str(path.relative_to(layout.root)) for path in leftovers)
    if not dry_run:
        take_away(layout, [*(entry.path for entry in going), *leftovers])
    return Collected(tuple(going), kept, freed, swept, tuple(map(str, forgotten)), dry_run)


def remove(layout: Layout, leases: Leases, checkpoint: StoredCheckpoint, *, force: bool) -> Collected:
    """Remove one checkpoint, with what refers to it where `force` says so; the caller holds the exclusive lock."""
    digest = checkpoint.manifest_digest
    if not checkpoint.path.exists():
        raise NoSuchCheckpoint(root=layout.root, wanted=digest, what="it is not there any more")
    for lease in leases.sweep():
        if lease.digest == digest:
            raise StillNeeded(digest=digest, what=_leased(lease.why, lease.pid))
    notes = [note for note in references.notes(layout.references) if note.digest == digest]
    if notes and not force:
        raise StillNeeded(digest=digest, what=f"{notes[0].where} refers to it")
    unused = list(_unused(layout, [checkpoint.path]))
    freed = sum(size for _, size in unused) + _small_bytes(checkpoint.path)
    for note in notes:
        note.path.unlink(missing_ok=True)
    take_away(layout, [checkpoint.path])
    return Collected((checkpoint,), (), freed, forgotten=tuple(note.where for note in notes))


def take_away(layout: Layout, paths: Iterable[Path]) -> None:
    """Out of the way in one step each, then gone; then the content that nothing stands for any more."""
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            path.rename(layout.trash / f"{path.name[:128]}.{secrets.token_hex(8)}")
    for path in layout.trash.iterdir():
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    for path, _ in list(_unused(layout, [])):
        path.unlink()


# ---- what may go ---------------------------------------------------------------------------------


def _needed(layout: Layout, leases: Leases, forgotten: Collection[Path]) -> dict[str, str]:
    """Digest -> who needs it."""
    needed = {
        note.digest: f"{note.where} refers to it"
        for note in references.notes(layout.references)
        if note.path not in forgotten
    }
    return needed | {lease.digest: _leased(lease.why, lease.pid) for lease in leases.sweep()}


def _leased(why: str, pid: int) -> str:
    return f"process {pid} uses it: {why}"


def _chosen(checkpoints: Sequence[StoredCheckpoint], wish: Wish) -> list[StoredCheckpoint]:
    by_container: defaultdict[str, list[StoredCheckpoint]] = defaultdict(list)
    for entry in checkpoints:
        if entry.problem is None:  # whose it is nobody knows; `vgpu store rm` takes it by its digest
            by_container[entry.container_id].append(entry)
    newest_first = (entry for entries in by_container.values() for entry in enumerate(reversed(entries)))
    old_s = None if wish.older_than_s is None else time.time() - wish.older_than_s
    chosen = [
        entry
        for place, entry in newest_first
        if (wish.keep is None or place >= wish.keep) and (old_s is None or entry.added_s <= old_s)
    ]
    return sorted(chosen, key=lambda entry: entry.order)


def _forget(layout: Layout, wish: Wish, *, dry_run: bool) -> Iterator[Path]:
    if wish.references_older_than_s is None:
        return
    old_s = time.time() - wish.references_older_than_s
    for note in references.notes(layout.references):
        if note.made_s <= old_s:
            if not dry_run:
                note.path.unlink(missing_ok=True)
            yield note.path


def _leftovers(layout: Layout, wish: Wish) -> Iterator[Path]:
    """What nobody alive works on: folders of an add at once, those of a transfer when nobody has gone on for a while."""
    old_s = time.time() - wish.partial_older_than_s
    for folder in layout.incoming.iterdir():
        with contextlib.suppress(FileNotFoundError):
            is_abandoned = folder.name.startswith(ADDING_PREFIX) or folder.stat().st_mtime <= old_s
            if is_abandoned and not _is_locked(folder / LOCK_NAME):
                yield folder
    yield from layout.trash.iterdir()
    for folder in (layout.root, layout.references, layout.root / TRANSFERS, *layout.contents.iterdir()):
        yield from folder.glob(f"{PARTIAL}*")
    for checkpoint in layout.checkpoints.iterdir():
        yield from checkpoint.glob(f"{PARTIAL}*")


def _is_locked(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        return not try_lock(descriptor)
    finally:
        os.close(descriptor)


def _unused(layout: Layout, going: Collection[Path]) -> Iterator[tuple[Path, int]]:
    """Content files that nothing in the store stands for once these folders are gone, and the bytes that the disk gets.

    Names outside of the store, as those of an image path, keep the bytes and not the content file.
    """
    going = frozenset(going)
    folders = (*layout.checkpoints.iterdir(), *layout.incoming.iterdir())
    used = {inode for folder in folders if folder not in going for inode in _inodes(folder)}
    dropped = Counter(inode for folder in going for inode in _inodes(folder))
    for folder in layout.contents.iterdir():
        for path in folder.iterdir():
            status = path.lstat()
            if not path.name.startswith(PARTIAL) and status.st_ino not in used:
                yield path, status.st_size if status.st_nlink - dropped[status.st_ino] <= 1 else 0


def _inodes(folder: Path) -> Iterator[int]:
    for _, status in files_below(folder):
        yield status.st_ino


def _small_bytes(folder: Path) -> int:
    """What only this folder holds."""
    return sum(status.st_size for path in folder.iterdir() if (status := path.lstat()).st_nlink == 1)
