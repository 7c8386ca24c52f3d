"""The registry client: one repository of one registry, for any number of threads (docs/registry.md)."""

from __future__ import annotations

import copy
import os
from typing import TYPE_CHECKING, Any, Self

from image_format.registry import credentials as known_credentials
from image_format.registry import manifests, referrers
from image_format.registry.downloads import Blob, BlobStream, download, fetch_small
from image_format.registry.insecure import is_insecure
from image_format.registry.network import Network
from image_format.registry.patience import Retries
from image_format.registry.reference import Reference, is_digest
from image_format.registry.session import MAX_ERROR_BYTES, Session
from image_format.registry.tokens import pull_scope, push_scope
from image_format.registry.uploads import BlobToSend, HostHabits, Upload
from vgpu_errors import BadReference, RegistryDenied, RegistryError

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Mapping
    from pathlib import Path
    from typing import BinaryIO

    from image_format.registry.credentials import Credentials
    from image_format.registry.manifests import StoredManifest


class Registry:
    """A repository. Everything that is answered is checked; everything that fails is an error of `vgpu_errors`.

    `credentials` None means: look for them. `plain_http` None means: where the registry is this machine or podman's
    registries.conf calls it insecure, http is used if it speaks no TLS. `progress` is told in words about waits.
    """

    def __init__(
        self,
        reference: Reference | str,
        *,
        credentials: Credentials | None = None,
        plain_http: bool | None = None,
        ca_file: Path | str | None = None,
        auth_file: Path | str | None = None,
        progress: Callable[[str], None] | None = None,
        retries: Retries | None = None,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self.reference = Reference.parse(reference) if isinstance(reference, str) else reference
        self.repository = self.reference.repository
        found = credentials or known_credentials.find(self.reference, auth_file=auth_file, environ=environ)
        host, retries = self.reference.server, retries or Retries()
        timeouts = (retries.connect_timeout_s, retries.read_timeout_s)
        self._session = Session(
            host,
            Network(host, ca_file=ca_file, timeouts=timeouts, environ=environ),
            found,
            plain_http=plain_http,
            is_insecure=is_insecure(self.reference, environ=environ),
            retries=retries,
            on_notice=progress,
        )
        self._habits = HostHabits()

    def beside(self, repository: str) -> Registry:
        """Another repository of the same registry, through the same connections and credentials."""
        other = copy.copy(self)
        other.reference = Reference(self.reference.host, repository)
        other.repository = repository
        return other

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of all connections."""
        self._session.close()

    @property
    def stop(self) -> threading.Event:
        """Set it to end every transfer of this client soon."""
        return self._session.stop

    # ---- blobs -------------------------------------------------------------------------------------

    def head_blob(self, digest: str) -> int | None:
        """The size of a blob that is there, or None."""
        answer = self._session.call(
            "HEAD",
            self._blob_path(digest),
            pull_scope(self.repository),
            accept=(200, 404),
            max_bytes=MAX_ERROR_BYTES,
        )
        if answer.status == 404:
            return None
        size = answer.header("Content-Length") or ""
        return int(size) if size.isdigit() and len(size) < 20 else 0

    def mount_blob(self, digest: str, from_repository: str) -> bool:
        """Take a blob over from another repository of the registry without sending it; False where it will not."""
        path = f"/v2/{self.repository}/blobs/uploads/?mount={_checked(digest)}&from={from_repository}"
        scopes = push_scope(self.repository) + pull_scope(from_repository)
        try:
            answer = self._session.call(
                "POST",
                path,
                scopes,
                accept=(200, 201, 202, 400, 404, 405),
                max_bytes=MAX_ERROR_BYTES,
                headers={"Content-Length": "0"},
            )
        except RegistryDenied:
            return False  # it may not be ours to read; the upload says whether we may write here
        location = answer.header("Location")
        if answer.status == 202 and location:
            self._give_up_upload(self._session.follow(answer.url, location))
        return answer.status == 201

    def upload_blob(
        self,
        open_stream: Callable[[int], BinaryIO],
        digest: str,
        size: int,
        on_bytes: Callable[[int], None] | None = None,
    ) -> None:
        """Send a blob. `open_stream(offset)` gives its bytes from there on; progress may be negative after a fault."""
        blob = BlobToSend(open_stream, _checked(digest), size)
        Upload(self._session, self.repository, blob, self._habits, on_bytes).run()

    def upload_stream(
        self, open_stream: Callable[[int], BinaryIO], size: int, on_bytes: Callable[[int], None] | None = None
    ) -> str:
        """The same for a blob whose digest is learnt while it is sent; the digest."""
        blob = BlobToSend(open_stream, None, size)
        return Upload(self._session, self.repository, blob, self._habits, on_bytes).run()

    def download_blob(
        self,
        digest: str,
        size: int,
        into_fd: int,
        *,
        start: int = 0,
        on_bytes: Callable[[int], None] | None = None,
    ) -> None:
        """Fetch a blob into a file that has its first `start` bytes already; on return the digest holds."""
        blob = Blob(_checked(digest), size)
        download(self._session, self.repository, blob, into_fd, start=start, on_bytes=on_bytes)

    def open_blob(
        self,
        digest: str,
        size: int,
        stretch: tuple[int, int] | None = None,
        on_bytes: Callable[[int], None] | None = None,
    ) -> BlobStream:
        """A blob, or the stretch from byte to byte of it, as it comes; nothing of it is checked but its size."""
        return BlobStream(self._session, self.repository, Blob(_checked(digest), size), stretch, on_bytes)

    def get_blob(self, digest: str, max_bytes: int) -> bytes:
        """A small blob."""
        return fetch_small(self._session, self.repository, _checked(digest), max_bytes)

    # ---- manifests ---------------------------------------------------------------------------------

    def get_manifest(self, target: str | None = None) -> StoredManifest:
        """Bytes, media type and digest of a manifest: the reference's own, or another one of the repository."""
        return manifests.get(self._session, self.repository, target or self.reference.target)

    def head_manifest(self, target: str | None = None) -> str | None:
        """The digest of a manifest that is there, or None."""
        return manifests.head(self._session, self.repository, target or self.reference.target)

    def put_manifest(self, data: bytes, media_type: str, target: str | None = None) -> str:
        """Store a manifest under a tag or digest; returns its digest."""
        manifests.put(self._session, self.repository, target or self.reference.target, data, media_type)
        return manifests.digest_of(data)

    def delete_manifest(self, digest: str) -> None:
        """Delete a manifest."""
        manifests.delete(self._session, self.repository, _checked(digest))

    def tags(self) -> list[str]:
        """All tags."""
        return manifests.tags(self._session, self.repository)

    # ---- referrers ---------------------------------------------------------------------------------

    def referrers(self, digest: str, artifact_type: str | None = None) -> list[dict[str, Any]]:
        """Descriptors of the manifests that refer to this one."""
        return referrers.find(self._session, self.repository, _checked(digest), artifact_type)

    def add_referrer(self, subject_descriptor: dict[str, Any], manifest: dict[str, Any]) -> dict[str, Any]:
        """Store a manifest that refers to another one, findable; returns its descriptor."""
        return referrers.add(self._session, self.repository, subject_descriptor, manifest)

    # ---- inside ------------------------------------------------------------------------------------

    def _blob_path(self, digest: str) -> str:
        return f"/v2/{self.repository}/blobs/{_checked(digest)}"

    def _give_up_upload(self, location: str) -> None:
        """A refused mount has begun an upload that nobody will finish."""
        try:
            self._session.call(
                "DELETE",
                location,
                push_scope(self.repository),
                accept=range(200, 500),
                max_bytes=MAX_ERROR_BYTES,
            )
        except RegistryError:
            return  # the registry forgets it by itself after a while


def _checked(digest: str) -> str:
    if not is_digest(digest):
        raise BadReference(text=ascii(digest[:80])[1:-1], what="the digest is not sha256: and 64 lower-case hex digits")
    return digest
