"""Where things lie in a store (spec/store.md, section 1), and how its folders come to be.

Refuses a store of another layout, and one whose root others may write to. Called by the store alone.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING

from image_format.fields import is_hex_digest
from image_format.store.placing import write_whole
from vgpu_errors import FormatTooNew, ImageError, NoSuchImage

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LAYOUT = "vgpu-store-1"
# Notes of `image_format.transport`, which only ever save bytes: a store may be without them.
TRANSFERS = "transfers"
_FOLDERS = ("content", "checkpoints", "incoming", "leases", "references", "trash")


@dataclass(frozen=True)
class Layout:
    """The paths of one store."""

    root: Path

    @property
    def lock(self) -> Path:
        """The file that the store's lock is on."""
        return self.root / "lock"

    @property
    def contents(self) -> Path:
        """Bulk files by identity."""
        return self.root / "content"

    @property
    def checkpoints(self) -> Path:
        """Sealed directories by manifest digest."""
        return self.root / "checkpoints"

    @property
    def incoming(self) -> Path:
        """What is being assembled."""
        return self.root / "incoming"

    @property
    def leases(self) -> Path:
        """Who uses what."""
        return self.root / "leases"

    @property
    def references(self) -> Path:
        """Which archives need what."""
        return self.root / "references"

    @property
    def trash(self) -> Path:
        """What is being removed."""
        return self.root / "trash"

    def content(self, identity: str) -> Path:
        """The content file of an identity."""
        if not is_hex_digest(identity):
            raise ImageError(where=self.contents, what=f"{identity!a} is no identity")
        return self.contents / identity[:2] / identity

    def checkpoint(self, digest: str) -> Path:
        """The sealed directory of a manifest."""
        if not is_hex_digest(digest):
            raise ImageError(where=self.checkpoints, what=f"{digest[:80]!a} is no sha256 digest")
        return self.checkpoints / digest


def files_below(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """All plain files; what others rename or remove meanwhile may be there or not, and is no error."""
    for parent, _, names in os.walk(folder):  # which passes over folders that are gone
        for name in names:
            path = folder.joinpath(parent, name)
            try:
                status = path.lstat()
            except FileNotFoundError:
                continue
            if stat.S_ISREG(status.st_mode):
                yield path, status


def open_layout(root: Path, *, create: bool) -> Layout:
    """The layout of a store that is there, or is made now."""
    layout, mark = Layout(root), root / "layout"
    if create and not mark.exists():
        _make(layout)
    try:
        found, status = mark.read_text(encoding="ascii", errors="replace").strip(), root.stat()
    except OSError as error:
        raise NoSuchImage(path=root, what=f"there is no store ({error.strerror})") from error
    if found != LAYOUT:
        raise FormatTooNew(where=root, found=ascii(found[:40])[1:-1], known=LAYOUT)
    if status.st_uid not in (0, os.geteuid()) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ImageError(where=root, what="others may write to it", remedy=f"Give it to root: chmod 700 {root}")
    return layout


def _make(layout: Layout) -> None:
    """Any number of processes may do this at once; the mark comes last."""
    try:
        layout.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        for folder in _FOLDERS:
            (layout.root / folder).mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ImageError(where=layout.root, what=f"cannot be made ({error.strerror})") from error
    write_whole(layout.root / "layout", f"{LAYOUT}\n".encode())
