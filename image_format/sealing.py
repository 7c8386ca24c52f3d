"""Seals a checkpoint directory: hashes its files and signs what they are (spec/archive-layout.md, section 3).

Ordered steps, each by temporary name, fsync and rename; the last one is the commit point:
  0. the old signature, then all other old `vgpu-*` files are removed    -> a crash leaves an unsigned directory
  1. every file is hashed, vgpu-index.bin is written                     -> unsigned
  2. vgpu-record.json   3. vgpu-manifest.json                            -> unsigned
  4. vgpu-signature.json                                                 -> sealed
An error before the end removes what was written. Refuses links, sub-directories and unsafe names.

CRIU's large files of memory pages are cut along the addresses of the pages (`pagemap`); the files stay as they are.
With GPU memory (`vram`), the data plane has left packs and a fragment that lists them. Packs are not read here: their
chunks have ids already. The fragment is removed just before the signature and put back by an error, so that whoever
needs the packs can find its way in them for as long as there is no seal.
The runtime shim calls it after the low-level runtime's checkpoint has returned.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from image_format import chunk_index, pagemap
from image_format.file_names import (
    ALLOWED_UNSIGNED,
    FRAGMENT_NAME,
    INDEX_NAME,
    MANIFEST_NAME,
    RECORD_NAME,
    SIGNATURE_NAME,
    check_content_name,
    is_ours,
)
from image_format.gpu_objects import check_objects
from image_format.hashing import (
    Cut,
    FileToHash,
    HashedFile,
    entry_fault,
    hash_files,
    open_plain,
    read_exactly,
    twin,
)
from image_format.index_model import CHUNK_SIZE, Chunk, Codec, Index, Pack, Region, RegionKind, zero_id
from image_format.manifest import INDEX_TYPE, RECORD_TYPE, Descriptor, Manifest
from image_format.record import Record, RegionSummary
from image_format.trust.bundle import Bundle
from image_format.trust.dsse import Envelope, pre_authentication_encoding
from image_format.trust.statement import PAYLOAD_TYPE, Statement
from image_format.vram import VramFragment, merge, read_fragment, write_fragment
from image_format.whole_files import WholeFiles, explained_removal, open_directory
from vgpu_errors import ImageError, NoSuchImage, Truncated, UnexpectedEntry

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping, Sequence

    from image_format.trust.keys import SigningKey


@dataclass(frozen=True)
class Sealed:
    """What was sealed; digests as lower-case hex."""

    content_root: str
    manifest_digest: str
    bytes_hashed: int
    seconds: float


def remove_old_seal(image_path: Path | str) -> None:
    """Remove what an earlier seal left, the signature first; a directory that does not exist has none."""
    try:
        with open_directory(Path(image_path)) as directory_fd:
            _remove_own_files(directory_fd, Path(image_path))
    except NoSuchImage:
        if Path(image_path).exists():
            raise


def seal(
    image_path: Path | str,
    record: Record,
    key: SigningKey,
    *,
    threads: int | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    vram: Path | None = None,
) -> Sealed:
    """Hash, describe and sign the directory. `on_progress(bytes done, bytes in all)` comes from the hashing threads.

    `vram` is the fragment that describes the packs; packs that it does not name are removed.
    """
    started, image_path = time.monotonic(), Path(image_path)
    with open_directory(image_path) as directory_fd:
        _remove_signature(directory_fd, image_path)
        fragment = read_fragment(vram) if vram is not None else None
        kept = _names_of(fragment)
        _remove_own_files(directory_fd, image_path, kept)
        try:
            files = _cut_pages(directory_fd, _files_to_seal(directory_fd, str(image_path), kept), str(image_path))
            hashed = hash_files(directory_fd, files, where=str(image_path), threads=threads, on_progress=on_progress)
            index = build_index(hashed)
            if fragment is not None:
                index = merge(index, fragment, _pack_sizes(directory_fd, fragment, str(image_path)))
            documents = make_documents(index, record, key)
            _write_documents(WholeFiles(directory_fd, image_path), documents)
        except BaseException:
            with contextlib.suppress(ImageError):  # the first error is the one to report
                _remove_own_files(directory_fd, image_path, kept)
                _put_back(image_path / FRAGMENT_NAME, fragment)
            raise
    return Sealed(
        content_root=index.compute_content_root().hex(),
        manifest_digest=hashlib.sha256(documents[MANIFEST_NAME]).hexdigest(),
        bytes_hashed=sum(file.size for file in hashed),
        seconds=time.monotonic() - started,
    )


def build_index(hashed: Sequence[HashedFile], *, chunk_size: int = CHUNK_SIZE) -> Index:
    """One region and one pack for each file, in ascending order of names."""
    regions: list[Region] = []
    chunks: list[Chunk] = []
    for number, file in enumerate(sorted(hashed, key=lambda file: file.name)):
        kind = RegionKind.FILE if file.lengths is None else RegionKind.PAGES
        cuts = FileToHash(file.name, file.size, lengths=file.lengths).cuts(chunk_size)
        first = len(chunks)
        chunks += (_chunk(file, number, cut) for cut in cuts)
        regions.append(Region(file.name, file.size, first, len(chunks) - first, kind))
    packs = tuple(Pack(region.name, region.length) for region in regions)
    return Index(tuple(regions), tuple(chunks), packs, chunk_size)


def _chunk(file: HashedFile, pack: int, cut: Cut) -> Chunk:
    chunk_id = file.id_at(cut.position)
    if chunk_id == zero_id(cut.length):
        return Chunk(chunk_id, pack, Codec.ZERO, 0, 0, cut.length)
    return Chunk(chunk_id, pack, Codec.RAW, cut.offset, cut.length, cut.length)


def make_documents(index: Index, record: Record, key: SigningKey) -> dict[str, bytes]:
    """The four documents in the order in which they are written."""
    check_objects(record.processes, index, where=RECORD_NAME)
    root = index.compute_content_root().hex()
    record = replace(record, content_root=root, regions_summary=_summary(index)).stamped()
    index_bytes, record_bytes = chunk_index.to_bytes(index), record.to_bytes()
    Record.from_bytes(record_bytes)  # what no reader would take, by its size for example, is refused here
    manifest = Manifest(
        record=Descriptor.of(record_bytes, RECORD_TYPE),
        index=Descriptor.of(index_bytes, INDEX_TYPE),
        created=record.created,
        content_root=root,
    )
    manifest_bytes = manifest.to_bytes()
    digest = hashlib.sha256(manifest_bytes).hexdigest()
    statement = Statement(digest, root, record.container.id, record.generation, record.created)
    return {
        INDEX_NAME: index_bytes,
        RECORD_NAME: record_bytes,
        MANIFEST_NAME: manifest_bytes,
        SIGNATURE_NAME: sign(statement.to_bytes(), key),
    }


def _write_documents(writer: WholeFiles, documents: Mapping[str, bytes]) -> None:
    for name, data in documents.items():
        if name == SIGNATURE_NAME:
            writer.remove(FRAGMENT_NAME)
        writer.write(name, data)


def _names_of(fragment: VramFragment | None) -> frozenset[str]:
    """What the data plane made, to be left alone."""
    return frozenset((FRAGMENT_NAME, *(pack.name for pack in fragment.packs))) if fragment else frozenset()


def _put_back(path: Path, fragment: VramFragment | None) -> None:
    if fragment is not None and not path.exists():
        write_fragment(path, fragment)


def _summary(index: Index) -> tuple[RegionSummary, ...]:
    by_kind = ((kind, [region for region in index.regions if region.kind == kind]) for kind in RegionKind)
    return tuple(
        RegionSummary(kind.name.lower(), len(regions), sum(region.length for region in regions))
        for kind, regions in by_kind
        if regions
    )


def sign(payload: bytes, key: SigningKey) -> bytes:
    """The bundle over a statement."""
    signature = key.sign(pre_authentication_encoding(PAYLOAD_TYPE, payload))
    return Bundle(key.key_id, Envelope(PAYLOAD_TYPE, payload, signature)).to_bytes()


def _files_to_seal(directory_fd: int, where: str, kept: Container[str]) -> list[FileToHash]:
    files = []
    with os.scandir(directory_fd) as listing:
        entries = {entry.name: entry.stat(follow_symlinks=False) for entry in listing}
    for name, status in entries.items():
        fault = entry_fault(name, status)
        if fault:
            raise UnexpectedEntry(where=where, entry=ascii(name)[1:-1], what=fault)
        if name not in ALLOWED_UNSIGNED and name not in kept:
            check_content_name(name, where=where)
            files.append(FileToHash(name, status.st_size))
    repeated = twin(entries)
    if repeated:
        raise UnexpectedEntry(where=where, entry=repeated, what="is the same file as another entry")
    if not files:
        raise NoSuchImage(path=where, what="there is no file to seal")
    return sorted(files)


def _cut_pages(directory_fd: int, files: Sequence[FileToHash], where: str) -> list[FileToHash]:
    """The same files, and of those with memory pages how long their chunks are."""
    sizes = {file.name: file.size for file in files}
    if not any(pagemap.is_cut_by_pages(name, size) for name, size in sizes.items()):
        return list(files)
    names = [name for name, size in sizes.items() if pagemap.is_pagemap(name) and size <= pagemap.MAX_PAGEMAP_BYTES]
    pagemaps = {name: pagemap.read(_content(directory_fd, name, where)) for name in names}
    cuts = pagemap.cuts_of(pagemaps, sizes, CHUNK_SIZE)
    return [file._replace(lengths=cuts.get(file.name)) for file in files]


def _content(directory_fd: int, name: str, where: str) -> bytearray:
    descriptor, size = open_plain(directory_fd, name, where=where)
    try:
        data = bytearray(min(size, pagemap.MAX_PAGEMAP_BYTES))
        read_exactly(descriptor, memoryview(data), 0, where=f"{where}: {name}")
    finally:
        os.close(descriptor)
    return data


def _pack_sizes(directory_fd: int, fragment: VramFragment, where: str) -> list[int]:
    sizes = []
    for pack in fragment.packs:
        descriptor, size = open_plain(directory_fd, pack.name, where=where)
        os.close(descriptor)
        if size < pack.size:
            raise Truncated(where=f"{where}: {pack.name}", found=size, needed=pack.size)
        sizes.append(size)
    return sizes


def _remove_signature(directory_fd: int, path: Path) -> None:
    with explained_removal(path), contextlib.suppress(FileNotFoundError):
        os.unlink(SIGNATURE_NAME, dir_fd=directory_fd)
        os.fsync(directory_fd)


def _remove_own_files(directory_fd: int, path: Path, kept: Container[str] = ()) -> None:
    _remove_signature(directory_fd, path)
    with explained_removal(path):
        for name in os.listdir(directory_fd):
            if is_ours(name) and name not in kept:
                os.unlink(name, dir_fd=directory_fd)
