"""Reads and writes manifests, tags and indexes by name or digest (docs/registry.md).

Manifest bytes are never re-encoded: what is hashed is what goes over the wire.
Refuses a manifest whose digest is not the one asked for, larger ones than 4 MiB, and endless lists of tags.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote

from image_format.registry.reference import is_digest
from image_format.registry.session import MAX_ERROR_BYTES
from image_format.registry.tokens import delete_scope, pull_scope, push_scope
from vgpu_errors import LimitExceeded, NotInRegistry, RegistryAnswerInvalid, RegistryContentWrong

if TYPE_CHECKING:
    from image_format.registry.session import Answer, Session

# The distribution specification's limit that every registry must take.
MAX_MANIFEST_BYTES = 4 << 20
MAX_PAGES = 1000
MAX_TAGS = 100_000
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
DOCKER_MANIFEST_TYPE = "application/vnd.docker.distribution.manifest.v2+json"
DOCKER_LIST_TYPE = "application/vnd.docker.distribution.manifest.list.v2+json"
ACCEPTED = f"{MANIFEST_TYPE}, {INDEX_TYPE}, {DOCKER_MANIFEST_TYPE}, {DOCKER_LIST_TYPE}"
_NEXT = re.compile(r"<([^>]{1,2048})>\s*;\s*rel=\"?next\"?")


class StoredManifest(NamedTuple):
    """A manifest as the registry has it."""

    data: bytes
    media_type: str
    digest: str


def digest_of(data: bytes) -> str:
    """`sha256:` and the hex digest."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def get(session: Session, repository: str, target: str) -> StoredManifest:
    """A manifest by tag or digest."""
    answer = _ask(session, "GET", repository, target)
    if answer.status == 404:
        raise NotInRegistry(where=f"{session.host}/{repository}", what=f"manifest {target}")
    found = StoredManifest(answer.body, _media_type(answer), digest_of(answer.body))
    stated = answer.header("Docker-Content-Digest")
    for wanted in (target if is_digest(target) else None, stated if stated and is_digest(stated) else None):
        if wanted is not None and wanted != found.digest:
            raise RegistryContentWrong(where=session.host, what=f"manifest {target} has the digest {found.digest}")
    return found


def head(session: Session, repository: str, target: str) -> str | None:
    """The digest of a manifest that is there, or None."""
    answer = _ask(session, "HEAD", repository, target)
    if answer.status == 404:
        return None
    return answer.header("Docker-Content-Digest") or get(session, repository, target).digest


def _ask(session: Session, method: str, repository: str, target: str) -> Answer:
    return session.call(
        method,
        _path(repository, target),
        pull_scope(repository),
        accept=(200, 404),
        max_bytes=MAX_MANIFEST_BYTES,
        headers={"Accept": ACCEPTED},
    )


def put(session: Session, repository: str, target: str, data: bytes, media_type: str) -> Answer:
    """Store a manifest under a tag or its digest; the commit point of a push."""
    if len(data) > MAX_MANIFEST_BYTES:
        raise LimitExceeded(where="manifest", what="its size", found=len(data), limit=MAX_MANIFEST_BYTES)
    answer = session.call(
        "PUT",
        _path(repository, target),
        push_scope(repository),
        accept=(200, 201),
        max_bytes=MAX_ERROR_BYTES,
        headers={"Content-Type": media_type, "Content-Length": str(len(data))},
        body=data,
    )
    stored = answer.header("Docker-Content-Digest")
    if stored and stored != digest_of(data):
        raise RegistryContentWrong(where=session.host, what=f"it stored manifest {digest_of(data)} as {stored}")
    return answer


def delete(session: Session, repository: str, digest: str) -> None:
    """Delete a manifest by digest; one that is not there is no error."""
    session.call(
        "DELETE", _path(repository, digest), delete_scope(repository), accept=(200, 202, 404), max_bytes=MAX_ERROR_BYTES
    )


def tags(session: Session, repository: str) -> list[str]:
    """All tags of the repository."""
    path = f"/v2/{repository}/tags/list?n=1000"
    found: list[str] = []
    for _ in range(MAX_PAGES):
        answer = session.call("GET", path, pull_scope(repository), accept=(200, 404), max_bytes=MAX_MANIFEST_BYTES)
        if answer.status == 404:
            raise NotInRegistry(where=session.host, what=f"repository {repository}")
        names = read_doc(session, answer).get("tags")
        found += [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
        following = next_page(session, answer)
        if len(found) > MAX_TAGS:
            raise LimitExceeded(where=repository, what="the number of tags", found=len(found), limit=MAX_TAGS)
        if following is None:
            return found
        path = following
    raise LimitExceeded(where=repository, what="the number of pages of tags", found="more", limit=MAX_PAGES)


def next_page(session: Session, answer: Answer) -> str | None:
    """The address of the next page, which must be the registry's own."""
    match = _NEXT.search(answer.header("Link") or "")
    if match is None:
        return None
    address = session.follow(answer.url, match[1])
    if not address.startswith(session.url("/")):
        raise RegistryAnswerInvalid(where=session.host, what="its list goes on at another host")
    return address


def read_doc(session: Session, answer: Answer) -> dict[str, object]:
    """An answer that must be a JSON object."""
    try:
        doc = json.loads(answer.body)
    except (ValueError, RecursionError):
        doc = None
    if not isinstance(doc, dict):
        raise RegistryAnswerInvalid(where=session.host, what="its answer is no JSON object")
    return doc


def _media_type(answer: Answer) -> str:
    return (answer.header("Content-Type") or MANIFEST_TYPE).partition(";")[0].strip()


def _path(repository: str, target: str) -> str:
    return f"/v2/{repository}/manifests/{quote(target, safe=':')}"
