"""How a checkpoint comes into the store: assembled apart, then in place with one rename (spec/store.md, section 3).

1. a folder below incoming/ is made and locked         -> gc leaves it alone while its maker lives, sweeps it later
2. files are put into its `image`, those the store has already as links
3. its bulk files get a name in content/, or become links to what is there   -> content that gc sweeps again
4. rename of `image` to checkpoints/<manifest sha256>   -> the checkpoint is there
Whoever fills it has checked signature and content; `commit` holds names and sizes against the index, no more.
`entering.add` and whoever pulls or unpacks a checkpoint use it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import shutil
import stat
from typing import TYPE_CHECKING

from image_format import chunk_index
from image_format.file_names import ALLOWED_UNSIGNED, INDEX_NAME, MANIFEST_NAME, REFERENCE_NAME, SIGNATURE_NAME
from image_format.manifest import Manifest
from image_format.store.identity import BulkFile, bulk_files
from image_format.store.locks import try_lock
from image_format.store.placing import PARTIAL, explained, open_sized, place, swap_for_link, sync
from image_format.store.proof import holds
from image_format.verifying import Directory, check_sizes
from vgpu_errors import ContentMismatch, StoreBusy, UnexpectedEntry, Unsigned

if TYPE_CHECKING:
    from pathlib import Path

    from image_format.chunk_index import Index
    from image_format.store.layout import Layout
    from image_format.store.locks import StoreLock

_DOCUMENT_NAMES = (INDEX_NAME, MANIFEST_NAME, SIGNATURE_NAME)
LOCK_NAME = "lock"


class Incoming:
    """A checkpoint that is being assembled. Not before `commit` does anything take it for one."""

    def __init__(self, layout: Layout, lock: StoreLock, digest: str, folder: Path) -> None:
        layout.checkpoint(digest)  # refuses what is no digest
        self.digest = digest
        self.folder = folder
        self._layout = layout
        self._lock = lock
        self._descriptor = -1

    @property
    def image(self) -> Path:
        """Where the sealed files go."""
        return self.folder / "image"

    @property
    def scratch(self) -> Path:
        """Room for downloads that are not whole yet; kept for the next try, thrown away by the commit."""
        return self.folder / "scratch"

    def open(self) -> None:
        """Make the folder, or go on with what an earlier try left in it; one at a time."""
        with self._lock.shared(), explained(self.folder, 0):
            for path in (self.folder, self.image, self.scratch):
                path.mkdir(mode=0o700, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._descriptor = os.open(self.folder / LOCK_NAME, flags, 0o600)
            if not try_lock(self._descriptor, fcntl.LOCK_EX):
                self.close()
                raise StoreBusy(
                    root=self.folder, seconds=0, remedy="Another process brings the same checkpoint in: wait for it."
                )
            os.utime(self.folder)

    def close(self) -> None:
        """Let go; what is there stays for the next try, and for as long as if it had only begun now."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                os.utime(self.folder)
            os.close(self._descriptor)
            self._descriptor = -1

    def abandon(self) -> None:
        """Remove all of it: out of the way in one step first, so that nobody goes on in a folder that is being removed."""
        trash = self._layout.trash / f"{self.folder.name}.{secrets.token_hex(8)}"
        with contextlib.suppress(OSError):
            self.folder.rename(trash)
            shutil.rmtree(trash, ignore_errors=True)
        self.close()

    def reuse(self, index: Index) -> tuple[str, ...]:
        """Put in place every bulk file that the store has already; returns their names.

        A file that an earlier try left is among them only if it is the store's own, and whole. What it has of others
        stays to be gone on with; it shares nothing with the store, so that it may be written to.
        """
        taken = []
        for file in bulk_files(index):
            path = self.image / file.name
            if os.path.lexists(path) and path.lstat().st_nlink > 1:
                path.unlink()
            if not path.exists() and self.take(file):
                taken.append(file.name)
        return tuple(taken)

    def take(self, file: BulkFile, source: Path | None = None) -> bool:
        """The same for one file.

        Content that is not the very file `source` is read, too: nobody shares what a failing disk has changed. That
        happens without the lock, so that gc need not wait: our own name keeps the file.
        """
        content, name = self._layout.content(file.content), self.image / file.name
        with self._lock.shared():
            if not content.exists() or content.stat().st_size != file.size:
                return False
            is_known = source is not None and source.samefile(content)
            place(content, name, file.size, links=True)
        if is_known or holds(name, file.size, file.covered):
            return True
        name.unlink()
        return False

    def commit(self) -> Path:
        """Make it a checkpoint of the store; the directory. One that was there already is kept, and this one removed."""
        target = self._layout.checkpoint(self.digest)
        with self._lock.shared():
            if not target.exists():
                index = self._checked_index()
                with explained(self.image, 0):
                    self._share(index)
                    self._sync_files(index)
                    self._rename(target)
        self.abandon()
        return target

    # ---- parts -----------------------------------------------------------------------------------

    def _checked_index(self) -> Index:
        with Directory(self.image) as directory:
            documents = directory.documents()
            sizes = {name: status.st_size for name, status in directory.entries().items()}
        for name in _DOCUMENT_NAMES:
            if name not in documents:
                raise Unsigned(where=self.image)
        if hashlib.sha256(documents[MANIFEST_NAME]).hexdigest() != self.digest:
            raise ContentMismatch(where=self.image / MANIFEST_NAME, what="sha256")
        manifest = Manifest.from_bytes(documents[MANIFEST_NAME], where=str(self.image / MANIFEST_NAME))
        manifest.index.check(documents[INDEX_NAME], where=str(self.image / INDEX_NAME))
        index = chunk_index.from_bytes(documents[INDEX_NAME], where=str(self.image / INDEX_NAME))
        extra = sorted((ALLOWED_UNSIGNED | {REFERENCE_NAME}) & set(sizes))
        if extra:
            raise UnexpectedEntry(where=self.image, entry=extra[0], what="has no place in the store")
        check_sizes(sizes, index, where=str(self.image))
        return index

    def _share(self, index: Index) -> None:
        for file in bulk_files(index):
            name, content = self.image / file.name, self._layout.content(file.content)
            if not content.exists():
                self._add_content(name, content, file.size)
            elif not name.samefile(content):
                self._settle(file, name, content)

    def _settle(self, file: BulkFile, name: Path, content: Path) -> None:
        """Two files for one identity: the older one stays if it holds, else ours takes its place for those to come."""
        if holds(content, file.size, file.covered):
            swap_for_link(content, name)
            return
        fresh = content.with_name(f"{PARTIAL}{secrets.token_hex(8)}")
        place(name, fresh, file.size, links=True)
        fresh.replace(content)  # in one step: others may be taking it
        sync(content.parent)

    def _add_content(self, name: Path, content: Path, size: int) -> None:
        content.parent.mkdir(mode=0o700, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            place(name, content, size, links=True)
        if not name.samefile(content):
            swap_for_link(content, name)
        sync(content.parent)

    def _sync_files(self, index: Index) -> None:
        """All of them: where the file system has no links, a bulk file here is not the one in content/."""
        bulk = {file.name for file in bulk_files(index)}
        for entry in os.scandir(self.image):
            descriptor = open_sized(self.image / entry.name, entry.stat(follow_symlinks=False).st_size)
            try:
                if entry.name not in bulk:
                    os.fchmod(descriptor, stat.S_IRUSR | stat.S_IWUSR)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        sync(self.image)

    def _rename(self, target: Path) -> None:
        try:
            self.image.rename(target)
        except OSError:
            if not target.exists():  # else somebody else was first, with the same content
                raise
        sync(target.parent)
