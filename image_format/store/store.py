"""The store as the rest of the program sees it; each method is a few lines over the module that does the work."""

from __future__ import annotations

import contextlib
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from image_format.file_names import INDEX_NAME
from image_format.store import checkpoints, collecting, entering, references, usage
from image_format.store.collecting import Collected, Wish
from image_format.store.identity import bulk_files, is_bulk
from image_format.store.incoming import Incoming
from image_format.store.layout import Layout, open_layout
from image_format.store.locks import Lease, Leases, StoreLock
from image_format.store.placing import place
from image_format.store.proof import Proof, Prover
from image_format.verifying import read_claims
from vgpu_errors import ContentElsewhere, NoSuchCheckpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from image_format.chunk_index import Index
    from image_format.store.checkpoints import StoredCheckpoint
    from image_format.store.usage import StoreUsage
    from image_format.trust.policy import Policy

DEFAULT_ROOT = "/var/lib/vgpu/store"
RECEIVING_PREFIX = "receiving-"
LOCK_DEADLINE_S = 60.0


class Store:
    """A store that is there. Opening it changes nothing, unless it is to be made."""

    def __init__(self, layout: Layout, *, deadline_s: float = LOCK_DEADLINE_S) -> None:
        self.layout = layout
        self._lock = StoreLock(layout.lock, deadline_s=deadline_s)
        self._leases = Leases(layout.leases)

    @classmethod
    def open(
        cls, root: Path | str = DEFAULT_ROOT, *, create: bool = True, deadline_s: float = LOCK_DEADLINE_S
    ) -> Store:
        """The store below `root`; NoSuchImage where there is none and it is not to be made."""
        return cls(open_layout(Path(root), create=create), deadline_s=deadline_s)

    @property
    def root(self) -> Path:
        """Its folder."""
        return self.layout.root

    # ---- in --------------------------------------------------------------------------------------

    def add(self, directory: Path | str, *, links: bool = True) -> StoredCheckpoint:
        """Take in a sealed directory that the caller has made or verified; it stays as it is."""
        return checkpoints.read_checkpoint(entering.add(self.layout, self._lock, Path(directory), links=links))

    @contextlib.contextmanager
    def receive(self, manifest_digest: str) -> Iterator[Incoming]:
        """A place where somebody assembles a checkpoint; what is not committed stays for the next try."""
        folder = self.layout.incoming / f"{RECEIVING_PREFIX}{manifest_digest}"
        incoming = Incoming(self.layout, self._lock, manifest_digest, folder)
        incoming.open()
        try:
            yield incoming
        finally:
            incoming.close()

    # ---- what is there ---------------------------------------------------------------------------

    def checkpoints(self) -> tuple[StoredCheckpoint, ...]:
        """All checkpoints, oldest first."""
        return checkpoints.list_checkpoints(self.layout)

    def find(self, text: str) -> StoredCheckpoint:
        """By digest or its beginning, or the newest of a container by name, id or its beginning; `:N` is a generation."""
        return checkpoints.find(self.checkpoints(), text, root=self.root)

    def has(self, manifest_digest: str) -> bool:
        """The checkpoint is there."""
        return self.layout.checkpoint(manifest_digest).exists()

    def latest_of(self, container_id: str) -> StoredCheckpoint | None:
        """The newest checkpoint of a container: the parent of its next one."""
        found = [entry for entry in self.checkpoints() if entry.container_id == container_id and entry.problem is None]
        return found[-1] if found else None

    def directory_of(self, checkpoint: StoredCheckpoint | str) -> Path:
        """The sealed directory. It may go at any time, unless a lease is held."""
        digest = checkpoint if isinstance(checkpoint, str) else checkpoint.manifest_digest
        path = self.layout.checkpoint(digest)
        if not path.exists():
            raise NoSuchCheckpoint(root=self.root, wanted=digest, what="it is not there, or not any more")
        return path

    def usage(self) -> StoreUsage:
        """What takes room."""
        return usage.usage(self.layout)

    def leases(self) -> tuple[Lease, ...]:
        """Who uses what now."""
        return self._leases.live()

    def references(self) -> tuple[references.Reference, ...]:
        """Which archives need what."""
        return tuple(references.notes(self.layout.references))

    def verify(
        self,
        policy: Policy,
        wanted: Sequence[StoredCheckpoint] | None = None,
        *,
        threads: int | None = None,
        on_bytes: Callable[[int], None] | None = None,
    ) -> Iterator[Proof]:
        """Prove these checkpoints, or all; content that several share is read once."""
        prover = Prover(policy, threads=threads, on_bytes=on_bytes)
        for checkpoint in self.checkpoints() if wanted is None else wanted:
            with contextlib.suppress(NoSuchCheckpoint), self.lease(checkpoint.manifest_digest, "verify"):
                yield prover.prove(checkpoint)

    # ---- use -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def lease(self, manifest_digest: str, why: str) -> Iterator[Path]:
        """The sealed directory, which gc leaves alone until the end of the block or of this process."""
        with self._lock.shared():
            directory = self.directory_of(manifest_digest)
            path, descriptor = self._leases.take(manifest_digest, why)
        try:
            yield directory
        finally:
            self._leases.give_back(path, descriptor)

    def refer(self, manifest_digest: str, where: str) -> Path:
        """Note that an archive needs the checkpoint; until `gc` is told to forget it, or `remove` is forced."""
        with self._lock.shared():
            self.directory_of(manifest_digest)
            return references.note(self.layout.references, manifest_digest, where)

    def bring_back(
        self,
        manifest_digest: str,
        names: Sequence[str],
        into: Path,
        *,
        index: Index | None = None,
        links: bool = True,
        lasting: bool = False,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Put bulk files of a checkpoint into a directory: all of them, or none and ContentElsewhere.

        `index` is the checkpoint's, which the caller trusts; with it content of other checkpoints serves as well.
        `check` raises where there is no time left: a copy to another file system may take long.
        """
        with self._lock.shared():
            sources = self._sources(manifest_digest, names, into, index)
            placed: list[Path] = []
            try:
                for name, (source, size) in sources.items():
                    place(source, into / name, size, links=links, lasting=lasting, check=check)
                    placed.append(into / name)
            except BaseException:
                for path in placed:
                    path.unlink(missing_ok=True)
                raise

    @contextlib.contextmanager
    def borrow(self, manifest_digest: str, names: Sequence[str], *, index: Index) -> Iterator[Path]:
        """A folder with bulk files of a checkpoint to be read from, whatever gc does until the end of the block."""
        folder = self.layout.incoming / f"{entering.ADDING_PREFIX}{manifest_digest}.{secrets.token_hex(8)}"
        incoming = Incoming(self.layout, self._lock, manifest_digest, folder)
        incoming.open()
        try:
            self.bring_back(manifest_digest, names, incoming.image, index=index)
            yield incoming.image
        finally:
            incoming.abandon()

    def _sources(
        self, manifest_digest: str, names: Sequence[str], into: Path, index: Index | None
    ) -> dict[str, tuple[Path, int]]:
        directory = self.layout.checkpoint(manifest_digest)
        if index is None and (directory / INDEX_NAME).exists():
            _, index = read_claims(directory)
        known = {file.name: file for file in bulk_files(index)} if index is not None else {}
        found: dict[str, tuple[Path, int]] = {}
        for name in names:
            if name in known and is_bulk(name, known[name].size):
                places = (directory / name, self.layout.content(known[name].content))
                path = next(filter(Path.exists, places), None)
                found |= {name: (path, known[name].size)} if path is not None else {}
        lacking = [name for name in names if name not in found]
        if lacking:
            size_bytes = sum(known[name].size for name in lacking if name in known)
            what = f"and {self.root} has not got them"
            raise ContentElsewhere(where=into, count=len(lacking), size_bytes=size_bytes, what=what)
        return found

    # ---- out -------------------------------------------------------------------------------------

    def gc(
        self,
        *,
        keep: int | None = None,
        older_than_s: float | None = None,
        references_older_than_s: float | None = None,
        partial_older_than_s: float = Wish.partial_older_than_s,
        dry_run: bool = False,
    ) -> Collected:
        """Remove checkpoints beyond the newest `keep` of each container, and what crashes and removals left."""
        wish = Wish(keep, older_than_s, partial_older_than_s, references_older_than_s)
        with self._lock.exclusive():
            return collecting.collect(self.layout, self._leases, wish, dry_run=dry_run)

    def remove(self, checkpoint: StoredCheckpoint, *, force: bool = False) -> Collected:
        """Remove one checkpoint; never one that is in use, and one that an archive refers to only by `force`."""
        with self._lock.exclusive():
            return collecting.remove(self.layout, self._leases, checkpoint, force=force)
