"""Turns an engine's archive into a reference and back (spec/archive-layout.md, section 7): `vgpu pack`, `vgpu unpack`.

pack: 1. the documents are read and the signature must hold, 2. the sealed files go into a transfer of the store, each no
longer than signed, the rest into the new archive, 3. every byte of the transfer is verified, and of the checkpoint where
the store has it already, 4. it becomes a checkpoint of the store, with a note that keeps gc away, 5. the new archive gets
its name.
unpack: 1. as above, 2. the missing files are put between the others, 3. the new archive is verified from its first byte
to its last, 4. it gets its name.
A crash or an error before the last step leaves no archive; what pack brought into the store stays there, unless nothing
of it was verified. Memory is bounded; nothing is unpacked before the signature holds.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING

from image_format import seal_documents
from image_format.archives.archive import verify_archive
from image_format.archives.archive_scan import PREFIX
from image_format.archives.archive_sources import Decompressed, FileSource
from image_format.archives.tar_editing import TarEditor, TarWriter, new_file, refuse_existing
from image_format.archives.tar_reader import Kind, TarReader
from image_format.file_names import ALLOWED_UNSIGNED, INDEX_NAME, REFERENCE_NAME, SEAL_NAMES, check_name
from image_format.references import reference
from image_format.references.reference import MAX_REFERENCE_BYTES, ReferenceNote
from image_format.seal_documents import MAX_SIZES
from image_format.store.identity import bulk_files
from image_format.store.placing import open_sized
from image_format.verifying import check_sizes, verify_directory
from vgpu_errors import LimitExceeded, UnexpectedEntry, Unsigned, UnsupportedRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from image_format.archives.tar_editing import RawMember
    from image_format.archives.tar_reader import Member
    from image_format.seal_documents import Claims
    from image_format.store.identity import BulkFile
    from image_format.store.incoming import Incoming
    from image_format.store.store import Store
    from image_format.trust.policy import Policy

_PIECE_BYTES = 4 << 20


@dataclass(frozen=True)
class Repacked:
    """What was made: the checkpoint, the files that moved and their bytes."""

    manifest_digest: str
    names: tuple[str, ...]
    moved_bytes: int


def pack(
    source: Path,
    target: Path,
    policy: Policy,
    store: Store,
    *,
    compression: str | None = None,
    locations: Sequence[str] = (),
    threads: int | None = None,
) -> Repacked:
    """An archive that holds everything becomes one that refers to the store."""
    refuse_existing(target)
    look = Look.at(source)
    claims = look.believed(policy)
    if look.note is not None:
        raise UnsupportedRequest(what=f"{source} is a reference already", remedy="There is nothing to do.")
    check_sizes(look.sizes, claims.index, where=str(source))
    bulk = bulk_files(claims.index)
    note = ReferenceNote(claims.manifest_digest, tuple(file.name for file in bulk), tuple(locations))
    pin: Path | None = None
    try:
        with new_file(target, compression or look.compression) as out, store.receive(note.manifest_digest) as incoming:
            _take_apart(source, out, claims, incoming, note)
            was_there = store.has(note.manifest_digest)
            _keep(incoming, policy, threads)
            if was_there:
                reference.expect_whole(store, note.manifest_digest, policy, threads=threads)
            pin = store.refer(note.manifest_digest, str(target.absolute()))
    except BaseException:
        if pin is not None:
            pin.unlink(missing_ok=True)
        raise
    return Repacked(note.manifest_digest, note.missing, sum(file.size for file in bulk))


def unpack(
    source: Path,
    target: Path,
    policy: Policy,
    store_root: Path | str,
    *,
    compression: str | None = None,
    threads: int | None = None,
) -> Repacked:
    """An archive that refers to a store becomes one that holds everything."""
    refuse_existing(target)
    look = Look.at(source)
    claims = look.believed(policy)
    if look.note is None:
        raise UnsupportedRequest(what=f"{source} is no reference: it is whole", remedy="There is nothing to do.")
    wanted = reference.lacking(look.note, claims, look.sizes, where=str(source))
    sizes = look.sizes | {file.name: file.size for file in wanted}
    check_sizes(sizes, claims.index, where=str(source))
    store = reference.open_store(store_root, look.note, wanted, where=str(source))
    names = tuple(file.name for file in wanted)

    def check(partial: Path) -> None:
        verify_archive(partial, policy, threads=threads)

    with (
        reference.told(look.note),
        store.borrow(claims.manifest_digest, names, index=claims.index) as folder,
        new_file(target, compression or look.compression, check) as out,
    ):
        _put_together(source, out, folder, wanted)
    return Repacked(claims.manifest_digest, names, sum(file.size for file in wanted))


# ---- before anything is believed -------------------------------------------------------------------


@dataclass
class Look:
    """The documents, the note and the sizes of what lies below checkpoint/; nothing of it is trusted yet."""

    where: str
    compression: str = "none"
    documents: dict[str, bytes] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    note: ReferenceNote | None = None

    @classmethod
    def at(cls, path: Path) -> Look:
        """Go through an archive once; of a plain one only headers and documents are read."""
        look = cls(str(path))
        with FileSource(path) as source:
            stream = Decompressed(source, where=look.where, is_seeking=True)
            look.compression = stream.compression
            tar = TarReader(stream, where=look.where)
            for member in tar:
                name = sealed_name(member, look.where)
                if name is not None:
                    look._take(name, member, tar)
        return look

    def believed(self, policy: Policy) -> Claims:
        """What the documents say, once the signature holds."""
        claims = seal_documents.check(self.documents, policy, where=self.where)
        if claims is None:
            raise Unsigned(where=self.where)
        return claims

    def _take(self, name: str, member: Member, tar: TarReader) -> None:
        if name in self.sizes:
            raise UnexpectedEntry(where=self.where, entry=name, what="appears twice")
        self.sizes[name] = member.size
        limit = MAX_SIZES.get(name, MAX_REFERENCE_BYTES)
        if name in SEAL_NAMES or name == REFERENCE_NAME:
            if member.size > limit:
                where = f"{self.where}: {name}"
                raise LimitExceeded(where=where, what="its size", found=member.size, limit=limit)
            data = tar.read(member.size)
            if name == REFERENCE_NAME:
                self.note = ReferenceNote.from_bytes(data, where=f"{self.where}: {name}")
            else:
                self.documents[name] = data


def sealed_name(member: Member, where: str) -> str | None:
    """The name of a checkpoint's file; None for what lies beside the checkpoint and for its folder."""
    folder = PREFIX.rstrip("/")
    if member.name == folder and member.kind is not Kind.DIRECTORY:
        raise UnexpectedEntry(where=where, entry=member.name, what=f"is a {member.kind}, not a directory")
    if not member.name.startswith(PREFIX):
        return None
    name = check_name(member.name.removeprefix(PREFIX), where=where)
    if member.kind is not Kind.FILE:
        raise UnexpectedEntry(where=where, entry=name, what=f"is a {member.kind}")
    return name


# ---- pack ------------------------------------------------------------------------------------------


def _take_apart(source: Path, out: IO[bytes], claims: Claims, incoming: Incoming, note: ReferenceNote) -> None:
    """Bulk goes into the transfer, the rest into the new archive, and small sealed files into both."""
    signed = {pack.name: pack.size for pack in claims.index.packs}
    there = frozenset(incoming.reuse(claims.index))
    writer, bulk, data = TarWriter(out), frozenset(note.missing), note.to_bytes()
    for raw, name, editor in members_of(source):
        _refuse_other_size(name, raw, signed, str(source))
        if name == INDEX_NAME:
            writer.add(PREFIX + REFERENCE_NAME, len(data), iter([memoryview(data)]), when_s=int(time.time()))
        if name is None or name in ALLOWED_UNSIGNED:
            writer.copy(raw, editor.data())
        elif name in bulk:
            if name not in there:
                with _Extract(incoming, name) as extract:
                    for piece in editor.data():
                        extract(piece)
        else:
            with _Extract(incoming, name) as extract:
                writer.copy(raw, editor.data(), extract)
    writer.end()


def members_of(source: Path) -> Iterator[tuple[RawMember, str | None, TarEditor]]:
    """All members, with the name of those that are the checkpoint's, and the editor that has their data."""
    with FileSource(source) as opened:
        editor = TarEditor(Decompressed(opened, where=str(source), is_seeking=False), where=str(source))
        for raw in editor:
            yield raw, sealed_name(raw.member, str(source)), editor


def _refuse_other_size(name: str | None, raw: RawMember, signed: dict[str, int], where: str) -> None:
    """The file may have been exchanged between the two looks at it."""
    if name is None or name in ALLOWED_UNSIGNED or name in SEAL_NAMES:
        return
    if signed.get(name) != raw.member.size:
        raise UnexpectedEntry(where=where, entry=name, what="is not as large as signed")


class _Extract:
    """A file of a transfer that gets its name when it is whole."""

    def __init__(self, incoming: Incoming, name: str) -> None:
        self._partial, self._path = incoming.scratch / name, incoming.image / name
        self._partial.unlink(missing_ok=True)

    def __enter__(self) -> Callable[[memoryview], object]:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = os.fdopen(os.open(self._partial, flags, 0o600), "wb", buffering=0)
        return self._write

    def __exit__(self, kind: object, problem: object, trace: object) -> None:
        self._file.close()
        if kind is None:
            self._partial.replace(self._path)

    def _write(self, piece: memoryview) -> None:
        while piece:
            piece = piece[self._file.write(piece) :]


def _keep(incoming: Incoming, policy: Policy, threads: int | None) -> None:
    """What holds becomes a checkpoint of the store; what does not is thrown away as a whole."""
    try:
        verify_directory(incoming.image, policy, threads=threads)
    except BaseException:
        incoming.abandon()
        raise
    incoming.commit()


# ---- unpack ----------------------------------------------------------------------------------------


def _put_together(source: Path, out: IO[bytes], folder: Path, wanted: Sequence[BulkFile]) -> None:
    """All members as they are, and the missing files where the note stands."""
    writer = TarWriter(out)
    for raw, name, editor in members_of(source):
        if name != REFERENCE_NAME:
            writer.copy(raw, editor.data())
            continue
        for file in wanted:
            writer.add(PREFIX + file.name, file.size, _read(folder / file.name, file.size), when_s=int(time.time()))
    writer.end()


def _read(path: Path, size: int) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(min(size, _PIECE_BYTES) or 1))
    descriptor = open_sized(path, size)
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            yield buffer[:count]
