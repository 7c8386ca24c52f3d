"""Finds and verifies the checkpoint in a containerd checkpoint image: an OCI layout whose index points at bare blobs.

`vgpu containerd checkpoint --export` and `ctr image export --skip-manifest-json` write such archives, plain or
compressed. The CRIU tar inside is the sealed directory, flat. It is held against its digest while it is verified, and
the container's configuration is compared with the signed security settings. Unpacks nothing.
Called by `source`; `exported_file` of containerd_integration reads members through it.
"""

from __future__ import annotations

import contextlib
import hashlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from image_format import canonical_json
from image_format.archives import archive, containerd_index
from image_format.archives.archive import (
    ArchiveClaims,
    FileSource,
    Outside,
    RewindableSource,
    VerifiedArchive,
)
from image_format.archives.archive_sources import Decompressed
from image_format.archives.containerd_index import CRIU_TYPE, INDEX_TYPES, SPEC_TYPE, CheckpointIndex, Descriptor
from image_format.archives.ocistore import INDEX_NAME, LAYOUT_NAME, MAX_DOCUMENT_BYTES
from image_format.archives.tar_reader import Kind, TarReader
from image_format.fields import Fields
from vgpu_errors import ContentMismatch, ImageError, LimitExceeded, NoSuchImage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from image_format.trust.policy import Policy

LAYOUT_TEXT = b'{"imageLayoutVersion":"1.0.0"}'
_DRAIN_BYTES = 1 << 20
# Members that are read while the index is looked for: an index comes early, or is one of few small blobs.
_MAX_KEPT_BYTES = 64 << 20


def blob_name(digest: str) -> str:
    """Where a layout keeps a blob."""
    return f"blobs/{digest.replace(':', '/')}"


def find_index(path: Path | str) -> CheckpointIndex | None:
    """The checkpoint's index, or None where the file is no archive of this kind."""
    if not Path(path).is_file():
        return None
    try:
        return read_index(path)
    except (ImageError, NoSuchImage):
        return None


def read_index(path: Path | str) -> CheckpointIndex:
    """The checkpoint's index; refuses a file that has none, or several."""
    where = str(path)
    kept: dict[str, bytes] = {}
    kept_bytes, top = 0, None
    with Members(path) as members:
        for name, size, data in members.small():
            if not kept and not name.startswith(("blobs/", INDEX_NAME, LAYOUT_NAME, "manifest.json")):
                break  # no layout: another engine's archive, which nobody wants to be read to its end here
            kept[name] = data
            kept_bytes += size
            if kept_bytes > _MAX_KEPT_BYTES:
                raise LimitExceeded(where=where, what="the size of small blobs", found=size, limit=_MAX_KEPT_BYTES)
            if name == INDEX_NAME:
                top = _one_image(data, where)
            if top is not None and blob_name(top.digest) in kept:
                return _image_index(kept[blob_name(top.digest)], top, where)
    raise NoSuchImage(path=where, what="it holds no index of a containerd checkpoint")


def _one_image(data: bytes, where: str) -> Descriptor:
    """The one image index that the layout's index names."""
    fields = Fields(canonical_json.read_object(data, where=f"{where}: {INDEX_NAME}"), INDEX_NAME)
    entries = [containerd_index.descriptor(entry) for entry in fields.objects("manifests")]
    if len(entries) != 1 or entries[0].media_type not in INDEX_TYPES:
        raise NoSuchImage(path=where, what=f"it holds {len(entries)} images, and not one index")
    return entries[0]


def _image_index(data: bytes, described: Descriptor, where: str) -> CheckpointIndex:
    if f"sha256:{hashlib.sha256(data).hexdigest()}" != described.digest:
        raise ContentMismatch(where=f"{where}: {blob_name(described.digest)}", what="sha256")
    return containerd_index.parse(data, where=where)


def verify_file(
    path: Path | str,
    policy: Policy,
    *,
    threads: int | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> VerifiedArchive:
    """Verify the checkpoint in the archive, its digest and the container's configuration beside it."""
    index = read_index(path)
    where = str(path)
    blob = index.need(CRIU_TYPE, where=where)
    with MemberSource(path, blob, on_progress) as source:
        result = archive.verify_stream(source, policy, where=where, threads=threads, prefix="")
        source.expect_whole()
    record = result.verified.record
    spec = _spec(path, index)
    differences = archive.config_differences(record, spec) if record is not None else None
    return replace(result, outside=result.outside + _beside(index), config_differences=differences)


def read_file_claims(path: Path | str) -> ArchiveClaims:
    """Record and index of the checkpoint without trust, to be shown and not to be used."""
    index = read_index(path)
    with MemberSource(path, index.need(CRIU_TYPE, where=str(path))) as source:
        claims = archive.read_stream_claims(source, where=str(path), prefix="")
    return replace(claims, outside=claims.outside + _beside(index))


def read_blob(path: Path | str, blob: Descriptor) -> bytes:
    """A small blob of the archive, checked."""
    where = f"{path}: {blob_name(blob.digest)}"
    if blob.size > MAX_DOCUMENT_BYTES:
        raise LimitExceeded(where=where, what="its size", found=blob.size, limit=MAX_DOCUMENT_BYTES)
    with MemberSource(path, blob) as source:
        data = b"".join(iter(source.read, b""))
        source.expect_whole()
    return data


class Members:
    """The members of an archive in their order, whatever its compression."""

    def __init__(self, path: Path | str, on_progress: Callable[[int, int], None] | None = None) -> None:
        self.where = str(path)
        self._source = FileSource(path, on_progress)

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._source)
            self.tar = TarReader(Decompressed(self._source, where=self.where, is_seeking=True), where=self.where)
            stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._source.close()

    def files(self) -> Iterator[tuple[str, int]]:
        """Name and size of each file; its bytes are read from `tar` before the next one is asked for."""
        for member in self.tar:
            if member.kind is Kind.FILE:
                yield member.name, member.size

    def small(self) -> Iterator[tuple[str, int, bytes]]:
        """The files that can be documents, with their bytes."""
        for name, size in self.files():
            if size <= MAX_DOCUMENT_BYTES:
                yield name, size, self.tar.read(size)


class MemberSource(RewindableSource):
    """One blob of an archive, hashed while it is read; begins again by opening the archive again."""

    def __init__(
        self, path: Path | str, blob: Descriptor, on_progress: Callable[[int, int], None] | None = None
    ) -> None:
        self._path, self._blob, self._on_progress = path, blob, on_progress
        self._members: Members | None = None

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.push(self)
            self.rewind()
            stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        if self._members is not None:
            self._members.__exit__()
            self._members = None

    def rewind(self) -> None:
        """Begin again."""
        self.__exit__()
        self._members = Members(self._path, self._on_progress).__enter__()
        self._hash, self._left = hashlib.sha256(), self._blob.size
        wanted = blob_name(self._blob.digest)
        for name, size in self._members.files():
            if name == wanted:
                if size != self._blob.size:
                    raise ContentMismatch(where=f"{self._path}: {wanted}", what="size")
                return
        raise NoSuchImage(path=f"{self._path}: {wanted}", what="the archive's index names it, and it is not there")

    def readinto(self, view: memoryview, /) -> int:
        """Fill some of the buffer; 0 at the end."""
        assert self._members is not None
        part = view[: min(len(view), self._left)]
        self._members.tar.read_into(part)
        self._left -= len(part)
        self._hash.update(part)
        return len(part)

    def expect_whole(self) -> None:
        """Read what is left and refuse a blob that is not the described one."""
        buffer = memoryview(bytearray(_DRAIN_BYTES))
        while self.readinto(buffer):
            pass
        if f"sha256:{self._hash.hexdigest()}" != self._blob.digest:
            raise ContentMismatch(where=f"{self._path}: {blob_name(self._blob.digest)}", what="sha256")


def _spec(path: Path | str, index: CheckpointIndex) -> bytes | None:
    """The OCI configuration inside the archive's spec blob, which is a protobuf Any."""
    blob = index.find(SPEC_TYPE)
    if blob is None:
        return None
    from google.protobuf.any_pb2 import Any  # noqa: PLC0415 - only archives of this kind need it
    from google.protobuf.message import DecodeError  # noqa: PLC0415

    try:
        return bytes(Any.FromString(read_blob(path, blob)).value)
    except DecodeError as problem:
        raise ImageError(where=f"{path}: {blob_name(blob.digest)}", what="is no protobuf message") from problem


def _beside(index: CheckpointIndex) -> tuple[Outside, ...]:
    """What lies beside the sealed directory and is covered by digests, not by the signature."""
    return tuple(Outside(entry.media_type, entry.size) for entry in index.entries if entry.media_type != CRIU_TYPE)
