"""Blobs of containerd's content store: read, write, keep under a lease.

Every blob that is written carries its digest and containerd checks it; every blob that is read whole is checked here.
A blob that is there already is not written again, and comes under the lease of the connection all the same.
Called by `checkpointing`, `restoring` and `base_image`.
"""

from __future__ import annotations

import contextlib
import hashlib
from typing import TYPE_CHECKING, Any

from containerd_integration.api.connection import is_missing, is_there_already
from containerd_integration.api.wire import message
from image_format.archives.containerd_index import Descriptor
from vgpu_errors import ContentMismatch, EngineFailed, LimitExceeded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from containerd_integration.api.connection import Connection

WRITE, COMMIT = 1, 2
PIECE_BYTES = 1 << 20
MAX_DOCUMENT_BYTES = 16 << 20
TRANSFER_S = 3600.0


class ContentStore:
    """The blobs behind one connection; `lease` is the id under which they are kept."""

    def __init__(self, connection: Connection, lease: str, *, deadline_s: float = TRANSFER_S) -> None:
        self._connection, self._lease, self._deadline_s = connection, lease, deadline_s

    def size_of(self, digest: str) -> int | None:
        """A blob's size, or None where it is not there."""
        try:
            return int(self._connection.call("content", "Info", digest=digest).info.size)
        except EngineFailed as problem:
            if is_missing(problem):
                return None
            raise

    def add_labels(self, digest: str, labels: Mapping[str, str]) -> None:
        """Further labels of a blob that is there; its others stay."""
        info = message("containerd.services.content.v1.Info")(digest=digest, labels=dict(labels))
        mask = message("containerd.services.content.v1.FieldMask")(paths=[f"labels.{key}" for key in labels])
        self._connection.call("content", "Update", info=info, update_mask=mask)

    def stream(self, digest: str) -> Iterator[bytes]:
        """A blob's bytes in pieces, not checked."""
        answers = self._connection.read("content", "Read", digest=digest, deadline_s=self._deadline_s)
        return (bytes(answer.data) for answer in answers)

    def document(self, digest: str, size: int, *, where: str) -> bytes:
        """A small blob, whole and checked."""
        if size > MAX_DOCUMENT_BYTES:
            raise LimitExceeded(where=where, what="its size", found=size, limit=MAX_DOCUMENT_BYTES)
        data = b"".join(self.stream(digest))
        if len(data) != size or f"sha256:{hashlib.sha256(data).hexdigest()}" != digest:
            raise ContentMismatch(where=where, what="sha256")
        return data

    def write_document(self, media_type: str, data: bytes, labels: Mapping[str, str] | None = None) -> Descriptor:
        """A small blob."""
        blob = Descriptor(media_type, f"sha256:{hashlib.sha256(data).hexdigest()}", len(data))
        self.write(blob, [data], labels)
        return blob

    def write(
        self,
        blob: Descriptor,
        pieces: Iterable[bytes],
        labels: Mapping[str, str] | None = None,
        *,
        on_bytes: Callable[[int], object] | None = None,
    ) -> None:
        """A blob of known digest and size; a write that fails leaves nothing behind."""
        if self.size_of(blob.digest) == blob.size:
            self.keep(blob.digest)
            return
        reference = f"vgpu-{self._lease}-{blob.digest}"
        requests = _requests(reference, blob, pieces, labels or {}, on_bytes)
        try:
            for _ in self._connection.write("content", "Write", requests, deadline_s=self._deadline_s):
                pass
        except EngineFailed as problem:
            if not is_there_already(problem):
                self._abort(reference)
                raise
        except BaseException:
            self._abort(reference)
            raise
        self.keep(blob.digest)

    def keep(self, digest: str) -> None:
        """Put a blob under the lease, whoever wrote it."""
        resource = message("containerd.services.leases.v1.Resource")(id=digest, type="content")
        self._connection.call("leases", "AddResource", id=self._lease, resource=resource)

    def _abort(self, reference: str) -> None:
        with contextlib.suppress(EngineFailed):  # nothing had been begun
            self._connection.call("content", "Abort", ref=reference)


def _requests(
    reference: str,
    blob: Descriptor,
    pieces: Iterable[bytes],
    labels: Mapping[str, str],
    on_bytes: Callable[[int], object] | None,
) -> Iterator[Any]:
    request = message("containerd.services.content.v1.WriteContentRequest")
    offset = 0
    for data in pieces:
        yield request(action=WRITE, ref=reference, total=blob.size, expected=blob.digest, offset=offset, data=data)
        offset += len(data)
        if on_bytes is not None:
            on_bytes(len(data))
    yield request(
        action=COMMIT, ref=reference, total=blob.size, expected=blob.digest, offset=offset, labels=dict(labels)
    )
