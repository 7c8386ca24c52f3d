"""What `vgpu push` can push: a sealed directory, an engine's archive, a checkpoint of the store (docs/registry.md).

Gives a directory that is sealed and whole for as long as the block runs. An archive is taken apart into a folder beside
TMPDIR that goes away afterwards, and no file of it is written before the signature holds; a reference is pushed out of
the store. A path always wins over a word that the store knows.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

import zstandard

from image_format import seal_documents
from image_format.archives import archive
from image_format.archives.archive_sources import Decompressed, FileSource
from image_format.archives.tar_editing import TarEditor, TarWriter
from image_format.file_names import ALLOWED_UNSIGNED, REFERENCE_NAME, SEAL_NAMES
from image_format.references import reference
from image_format.references.reference_archive import sealed_name
from image_format.store import Store
from image_format.store.placing import explained
from image_format.verifying import Directory
from vgpu_errors import ContentElsewhere, UnexpectedEntry, Unsigned

if TYPE_CHECKING:
    from collections.abc import Iterator

    from image_format.archives.tar_editing import RawMember
    from image_format.seal_documents import Claims
    from image_format.trust.policy import Policy

INNER_FOLDER = "checkpoint"
ZSTD_LEVEL = 3


@dataclass(frozen=True)
class SealedSource:
    """A sealed directory that its signature vouches for; chunks are compared while they are read."""

    directory: Path
    documents: dict[str, bytes]
    claims: Claims
    engine_files: IO[bytes] | None = None


@contextlib.contextmanager
def open_source(word: str, policy: Policy, store_root: Path | str) -> Iterator[SealedSource]:
    """What the word on the command line means."""
    path = Path(word)
    if path.is_dir():
        with _directory(path, policy, store_root) as source:
            yield source
    elif path.exists():
        with _archive(path, policy, store_root) as source:
            yield source
    else:
        store = Store.open(store_root, create=False)
        with store.lease(store.find(word).manifest_digest, "push") as directory:
            yield believed(directory, policy)


def believed(directory: Path, policy: Policy, engine_files: IO[bytes] | None = None) -> SealedSource:
    """A sealed directory, once its signature holds."""
    with Directory(directory) as opened:
        documents = opened.documents()
    claims = seal_documents.check(documents, policy, where=str(directory))
    if claims is None or set(documents) != set(SEAL_NAMES):
        raise Unsigned(where=directory)
    return SealedSource(directory, documents, claims, engine_files)


@contextlib.contextmanager
def _directory(path: Path, policy: Policy, store_root: Path | str) -> Iterator[SealedSource]:
    has_seal = any((path / name).exists() for name in SEAL_NAMES)
    folder = path if has_seal or not (path / INNER_FOLDER).is_dir() else path / INNER_FOLDER
    if not reference.is_reference(folder):
        yield believed(folder, policy)
        return
    with _in_store(reference.read_note(folder).manifest_digest, store_root, folder) as directory:
        yield believed(directory, policy)


@contextlib.contextmanager
def _in_store(manifest_digest: str, store_root: Path | str, where: Path) -> Iterator[Path]:
    store = Store.open(store_root, create=False)
    if not store.has(manifest_digest):
        raise ContentElsewhere(where=where, count="all", size_bytes="all its", what=f"and {store.root} has not got it")
    with store.lease(manifest_digest, "push") as directory:
        yield directory


@contextlib.contextmanager
def _archive(path: Path, policy: Policy, store_root: Path | str) -> Iterator[SealedSource]:
    found = archive.read_archive_claims(path)
    claims = seal_documents.check(found.documents, policy, where=str(path))
    if claims is None:
        raise Unsigned(where=path)
    sizes = {pack.name: pack.size for pack in claims.index.packs}
    with tempfile.TemporaryDirectory(prefix="vgpu-push-") as folder, tempfile.TemporaryFile() as engine_files:
        with explained(Path(folder), sum(sizes.values())):
            note = _take_apart(path, Path(folder), sizes, engine_files)
        if note is None:
            yield believed(Path(folder), policy, engine_files)
            return
        digest = reference.ReferenceNote.from_bytes(note, where=f"{path}: {REFERENCE_NAME}").manifest_digest
        if digest != claims.manifest_digest:
            raise UnexpectedEntry(where=path, entry=REFERENCE_NAME, what="speaks of another checkpoint")
        with _in_store(digest, store_root, path) as directory:
            yield believed(directory, policy, engine_files)


def _take_apart(path: Path, folder: Path, sizes: dict[str, int], engine_files: IO[bytes]) -> bytes | None:
    """Sealed files into the folder, the engine's own into one tar; the note of a reference comes back."""
    note = None
    compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_checksum=False)
    with FileSource(path) as opened, compressor.stream_writer(engine_files, closefd=False) as out:
        editor = TarEditor(Decompressed(opened, where=str(path), is_seeking=False), where=str(path))
        writer = TarWriter(cast("IO[bytes]", out))
        for raw in editor:
            name = sealed_name(raw.member, str(path))
            if name is None:
                if raw.member.name != INNER_FOLDER:
                    writer.copy(raw, editor.data())
            elif name == REFERENCE_NAME:
                note = b"".join(map(bytes, editor.data()))
            elif name not in ALLOWED_UNSIGNED:
                _extract(raw, name, editor, folder, sizes)
        writer.end()
    engine_files.flush()
    return note


def _extract(raw: RawMember, name: str, editor: TarEditor, folder: Path, sizes: dict[str, int]) -> None:
    if name not in SEAL_NAMES and sizes.get(name) != raw.member.size:
        raise UnexpectedEntry(where=folder, entry=name, what="is not as large as signed")
    descriptor = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb", buffering=0) as file:
        for piece in editor.data():
            view = piece
            while view:
                view = view[file.write(view) :]
