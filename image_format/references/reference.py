"""Reference mode: a sealed directory without its bulk, which a store has (spec/archive-layout.md, section 7).

`vgpu-reference.json` says which files are missing and where to ask for them. Nobody signs it and nothing rests on it: the
manifest digest is compared, the names must be bulk files of the signed index, and what comes back is verified like all else.

Steps of `refer`, and what a crash after each leaves:
1. a note in the store keeps gc away        -> the directory as it was
2. vgpu-reference.json is written           -> a whole directory with a note that says too much, which `complete` takes
3. the files are removed                    -> a reference
An error takes all three back. The shim, `vgpu pack` and `vgpu unpack` call it.
"""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from image_format import canonical_json, seal_documents
from image_format.fields import Fields
from image_format.file_names import REFERENCE_NAME, check_name
from image_format.hashing import open_plain
from image_format.store.identity import bulk_files
from image_format.store.placing import PARTIAL, sync, write_whole
from image_format.store.store import DEFAULT_ROOT, Store
from image_format.verifying import Directory, read_claims
from vgpu_errors import ContentElsewhere, ContentMismatch, FormatTooNew, ImageError, LimitExceeded, NoSuchImage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from image_format.seal_documents import Claims
    from image_format.store.checkpoints import StoredCheckpoint
    from image_format.store.identity import BulkFile
    from image_format.trust.policy import Policy

MEDIA_TYPE = "application/vnd.vgpu.checkpoint.reference.v1+json"
VERSION = 1
MAX_REFERENCE_BYTES = 8 << 20
MAX_LOCATIONS = 16
# A registry's repository at a digest; a registry with a port, or a path of several parts, are the same to this.
_LOCATION = re.compile(r"[a-z0-9][a-z0-9.:_/-]{0,254}@sha256:[0-9a-f]{64}", re.IGNORECASE)


@dataclass(frozen=True)
class ReferenceNote:
    """The document: which files are missing, and where the checkpoint lies besides."""

    manifest_digest: str
    missing: tuple[str, ...]
    locations: tuple[str, ...] = ()
    unknown: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_bytes(cls, data: bytes, *, where: str = REFERENCE_NAME) -> Self:
        """Parse the file's bytes."""
        fields = Fields(canonical_json.read_object(data, where=where, max_bytes=MAX_REFERENCE_BYTES), where)
        version = fields.integer("version")
        if version != VERSION:
            raise FormatTooNew(where=where, found=version, known=VERSION)
        missing, locations = fields.texts("missing"), fields.texts("locations")
        for name in missing:
            check_name(name, where=fields.path("missing"))
        if len(set(missing)) != len(missing):
            raise ImageError(where=fields.path("missing"), what="names a file twice")
        if len(locations) > MAX_LOCATIONS:
            at = fields.path("locations")
            raise LimitExceeded(where=at, what="its length", found=len(locations), limit=MAX_LOCATIONS)
        return cls(
            manifest_digest=fields.hex_digest("manifestDigest"),
            missing=missing,
            locations=tuple(check_location(text, where=fields.path("locations")) for text in locations),
            unknown=fields.unknown(),
        )

    def to_bytes(self) -> bytes:
        """The canonical bytes."""
        doc = dict(self.unknown) | {
            "version": VERSION,
            "manifestDigest": self.manifest_digest,
            "missing": sorted(self.missing),
            "locations": list(self.locations),
        }
        return canonical_json.write(doc, where=REFERENCE_NAME)


def check_location(text: str, *, where: str) -> str:
    """The text, if it can be handed to `vgpu pull`."""
    if not _LOCATION.fullmatch(text):
        raise ImageError(where=where, what=f"{text[:80]!a} is not registry/repository@sha256:digest")
    return text


def is_reference(directory: Path) -> bool:
    """The directory says of itself that files are missing."""
    return os.path.lexists(directory / REFERENCE_NAME)


def sweep(directory: Path) -> None:
    """Remove what a crash of `refer` or `complete` left beside the sealed files."""
    for path in directory.glob(f"{PARTIAL}*"):
        path.unlink(missing_ok=True)


def read_note(directory: Path) -> ReferenceNote:
    """The directory's note."""
    with Directory(directory) as opened:
        descriptor, size = open_plain(opened.fd, REFERENCE_NAME, where=str(directory))
    with os.fdopen(descriptor, "rb") as file:
        if size > MAX_REFERENCE_BYTES:
            where = directory / REFERENCE_NAME
            raise LimitExceeded(where=where, what="its size", found=size, limit=MAX_REFERENCE_BYTES)
        return ReferenceNote.from_bytes(file.read(), where=str(directory / REFERENCE_NAME))


def refer(
    directory: Path, store: Store, kept: StoredCheckpoint, *, names_it: str, locations: Sequence[str] = ()
) -> ReferenceNote:
    """Take out of a sealed directory what the store has. An error leaves the directory whole; `names_it` is for people."""
    _, index = read_claims(directory)
    names = tuple(file.name for file in bulk_files(index))
    note = ReferenceNote(kept.manifest_digest, names, tuple(locations))
    with store.lease(kept.manifest_digest, "making a reference"):
        pin = store.refer(kept.manifest_digest, names_it)
        try:
            write_whole(directory / REFERENCE_NAME, note.to_bytes())
            for name in names:
                (directory / name).unlink()
            sync(directory)
        except BaseException:
            lost = [name for name in names if not (directory / name).exists()]
            store.bring_back(kept.manifest_digest, lost, directory)
            (directory / REFERENCE_NAME).unlink(missing_ok=True)
            pin.unlink(missing_ok=True)
            raise
    return note


def complete(
    directory: Path,
    policy: Policy,
    store_root: Path | str = DEFAULT_ROOT,
    *,
    links: bool = True,
    lasting: bool = False,
    check: Callable[[], None] = lambda: None,
) -> tuple[str, ...]:
    """Bring back what is missing, once the signature holds; the names. The caller verifies the whole directory then.

    Copies are only brought to disk where they are to last; `check` raises where there is no time left for them.
    """
    note = read_note(directory)
    with Directory(directory) as opened:
        claims = seal_documents.check(opened.documents(), policy, where=str(directory))
        there = set(opened.entries())
    wanted = lacking(note, claims, there, where=str(directory))
    if wanted:
        store = open_store(store_root, note, wanted, where=str(directory))
        with told(note):
            store.bring_back(
                note.manifest_digest,
                [file.name for file in wanted],
                directory,
                index=claims.index if claims is not None else None,
                links=links,
                lasting=lasting,
                check=check,
            )
        sync(directory)
    (directory / REFERENCE_NAME).unlink()
    return tuple(file.name for file in wanted)


def lacking(note: ReferenceNote, claims: Claims | None, there: Iterable[str], *, where: str) -> tuple[BulkFile, ...]:
    """The bulk files that have to come from elsewhere; refuses a note about another checkpoint or other files."""
    if claims is None:
        raise ImageError(where=where, what=f"{REFERENCE_NAME} stands beside no documents of a checkpoint")
    if note.manifest_digest != claims.manifest_digest:
        raise ContentMismatch(where=f"{where}: {REFERENCE_NAME}", what="it speaks of another manifest")
    bulk = {file.name: file for file in bulk_files(claims.index)}
    for name in note.missing:
        if name not in bulk:
            raise ImageError(where=f"{where}: {REFERENCE_NAME}", what=f"{name} is no file that can lie elsewhere")
    present = set(there)
    return tuple(bulk[name] for name in sorted(note.missing) if name not in present)


def open_store(root: Path | str, note: ReferenceNote, wanted: Sequence[BulkFile], *, where: str) -> Store:
    """The store that the files come from; without one the error says where else they are."""
    try:
        return Store.open(root, create=False)
    except NoSuchImage as error:
        size_bytes = sum(file.size for file in wanted)
        what = f"and this node has no store in {root}"
        raise elsewhere(note, where=where, count=len(wanted), size_bytes=size_bytes, what=what) from error


@contextlib.contextmanager
def told(note: ReferenceNote) -> Iterator[None]:
    """Adds to the error that files are not here where the note says that they are."""
    try:
        yield
    except ContentElsewhere as problem:
        raise elsewhere(note, **problem.fields) from problem


def expect_whole(store: Store, manifest_digest: str, policy: Policy, *, threads: int | None = None) -> None:
    """Prove what the store had before: an archive must not lose its content in favour of something damaged."""
    for proof in store.verify(policy, [store.find(manifest_digest)], threads=threads):
        if proof.problem is not None:
            remedy = f"Run 'vgpu store rm {manifest_digest[:12]}', and pack it again out of this archive."
            raise type(proof.problem)(**{**proof.problem.fields, "remedy": remedy})


def elsewhere(note: ReferenceNote, **fields: Any) -> ContentElsewhere:
    """The error, with the command that brings the files here where one is known."""
    if note.locations:
        fields["remedy"] = f"Run 'vgpu pull {note.locations[0]}' on this node, then restore again."
    return ContentElsewhere(**fields)
