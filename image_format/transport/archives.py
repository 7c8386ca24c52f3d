"""Writes an engine's archive out of a pulled checkpoint (spec/archive-layout.md, section 4).

The engine's own files come from the layer that the push of an archive made, the checkpoint from a sealed directory.
The archive is verified from its first byte to its last before it gets its name. Refuses an image that carries no engine
files, because no engine could import the archive. `vgpu pull --output ARCHIVE` calls it.
"""

from __future__ import annotations

import hashlib
import os
import tarfile
import tempfile
from typing import IO, TYPE_CHECKING

from image_format.archives.archive import verify_archive
from image_format.archives.archive_scan import PREFIX
from image_format.archives.archive_sources import Decompressed, FileSource
from image_format.archives.tar_editing import RawMember, TarEditor, TarWriter, new_file
from image_format.archives.tar_reader import Kind, Member
from image_format.file_names import ALLOWED_UNSIGNED
from image_format.store.placing import open_sized
from vgpu_errors import RegistryContentWrong, UnexpectedEntry, UnsupportedRequest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from image_format.manifest import Descriptor
    from image_format.transport.pulling import Remote
    from image_format.trust.policy import Policy

COMPRESSIONS = {".tar": "none", ".gz": "gzip", ".tgz": "gzip", ".zst": "zstd"}
_PIECE_BYTES = 4 << 20


def compression_of(target: Path) -> str | None:
    """How an archive of that name is compressed; None where the name is not that of an archive."""
    return COMPRESSIONS.get(target.suffix)


def require_engine_files(remote: Remote) -> Descriptor:
    """The layer of engine files, which not every image has."""
    if remote.manifest.engine_files is None:
        raise UnsupportedRequest(
            what=f"{remote.reference} carries no files of an engine, so no engine could import an archive of it",
            remedy="Pull it into the store, or into a directory; push an archive to have one come out again.",
        )
    return remote.manifest.engine_files


def write_archive(remote: Remote, directory: Path, target: Path, policy: Policy) -> None:
    """Make the archive of a sealed directory and the image's engine files."""
    compression = compression_of(target) or "none"
    engine_files = require_engine_files(remote)

    def check(partial: Path) -> None:
        verify_archive(partial, policy)

    with tempfile.TemporaryFile(dir=target.parent) as spool, new_file(target, compression, check) as out:
        _fetch(remote, engine_files, spool)
        writer = TarWriter(out)
        _copy_engine_files(spool, writer, str(remote.reference))
        writer.copy(_folder(), iter(()))
        for name in sorted({path.name for path in directory.iterdir()} - ALLOWED_UNSIGNED):
            size = (directory / name).stat().st_size
            writer.add(PREFIX + name, size, _read(directory / name, size), when_s=0)
        writer.end()


def _fetch(remote: Remote, descriptor: Descriptor, spool: IO[bytes]) -> None:
    digest, buffer = hashlib.sha256(), memoryview(bytearray(1 << 20))
    with remote.blobs.open(descriptor, (0, descriptor.size)) as stream:
        while count := stream.readinto(buffer):
            digest.update(buffer[:count])
            spool.write(buffer[:count])
    spool.flush()
    if digest.hexdigest() != descriptor.sha256:
        raise RegistryContentWrong(where=str(remote.reference), what="the engine's files have another digest")


def _copy_engine_files(spool: IO[bytes], writer: TarWriter, where: str) -> None:
    with FileSource(f"/proc/self/fd/{spool.fileno()}") as source:
        editor = TarEditor(Decompressed(source, where=where, is_seeking=False), where=where)
        for raw in editor:
            if f"{raw.member.name}/".startswith(PREFIX):
                raise UnexpectedEntry(where=where, entry=raw.member.name, what="is not a file of the engine")
            writer.copy(raw, editor.data())


def _folder() -> RawMember:
    entry = tarfile.TarInfo(PREFIX.rstrip("/"))
    entry.type, entry.mode = tarfile.DIRTYPE, 0o700
    return RawMember(Member(entry.name, Kind.DIRECTORY, 0, 0), entry.tobuf(tarfile.PAX_FORMAT))


def _read(path: Path, size: int) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(min(size, _PIECE_BYTES) or 1))
    with os.fdopen(open_sized(path, size), "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            yield buffer[:count]
