"""What refers to a manifest in a registry: the referrers API, or the tag `sha256-<hex>` where there is none.

Debian's registry and GHCR have no API, so the tag is kept whenever asking the API is answered with 404: read, add,
write, and read again, because two writers may do so at once. Refuses to replace a tag that is no index.
Signing pushes bundles with it, `vgpu verify REGISTRY-REF` reads them (docs/registry.md).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from image_format import canonical_json
from image_format.fields import Fields
from image_format.registry import manifests
from image_format.registry.manifests import INDEX_TYPE, MANIFEST_TYPE, MAX_MANIFEST_BYTES, digest_of
from image_format.registry.reference import is_digest
from image_format.registry.tokens import pull_scope
from vgpu_errors import ImageError, LimitExceeded, NotInRegistry, RegistryAnswerInvalid, RegistryGaveUp, RegistryRefused

if TYPE_CHECKING:
    from image_format.registry.session import Answer, Session

Descriptor = dict[str, Any]
MAX_PAGES = 100
ROUNDS = 5


def fallback_tag(digest: str) -> str:
    """The tag that lists what refers to a manifest."""
    return digest.replace(":", "-", 1)


def find(session: Session, repository: str, digest: str, artifact_type: str | None = None) -> list[Descriptor]:
    """Descriptors of what refers to that manifest, from the API or the tag."""
    found = _from_api(session, repository, digest, artifact_type)
    if found is None:
        found = _from_tag(session, repository, digest)
    return [item for item in found if artifact_type is None or item.get("artifactType") == artifact_type]


def add(session: Session, repository: str, subject: Descriptor, manifest: dict[str, Any]) -> Descriptor:
    """Store a manifest that refers to the subject, and make it be found; returns its descriptor."""
    data = canonical_json.write({**manifest, "subject": subject}, where="referrer")
    media_type = manifest.get("mediaType", MANIFEST_TYPE)
    descriptor: Descriptor = {"mediaType": media_type, "digest": digest_of(data), "size": len(data)}
    if "artifactType" in manifest:
        descriptor["artifactType"] = manifest["artifactType"]
    if manifest.get("annotations"):
        descriptor["annotations"] = manifest["annotations"]
    manifests.put(session, repository, descriptor["digest"], data, media_type)
    if _from_api(session, repository, subject["digest"], None) is None:
        _add_to_tag(session, repository, subject["digest"], descriptor)
    return descriptor


def _from_api(session: Session, repository: str, digest: str, artifact_type: str | None) -> list[Descriptor] | None:
    """None where the registry has no such API."""
    query = f"?artifactType={quote(artifact_type, safe='')}" if artifact_type else ""
    path = f"/v2/{repository}/referrers/{digest}{query}"
    found: list[Descriptor] = []
    for _ in range(MAX_PAGES):
        answer = session.call(
            "GET",
            path,
            pull_scope(repository),
            accept=(200, 400, 404, 405, 501),
            max_bytes=MAX_MANIFEST_BYTES,
            headers={"Accept": INDEX_TYPE},
        )
        if answer.status != 200 or not _is_index(answer):
            return None
        found += _descriptors(answer.body, f"{session.host}: referrers of {digest}")
        following = manifests.next_page(session, answer)
        if following is None:
            return found
        path = following
    raise LimitExceeded(where=digest, what="the number of pages of referrers", found="more", limit=MAX_PAGES)


def _is_index(answer: Answer) -> bool:
    # Some hosts answer unknown paths with a web page.
    return (answer.header("Content-Type") or "").partition(";")[0].strip() == INDEX_TYPE


def _from_tag(session: Session, repository: str, digest: str) -> list[Descriptor]:
    try:
        stored = manifests.get(session, repository, fallback_tag(digest))
    except NotInRegistry:
        return []
    if stored.media_type != INDEX_TYPE:
        return []
    return _descriptors(stored.data, f"{session.host}: tag {fallback_tag(digest)}")


def _add_to_tag(session: Session, repository: str, digest: str, descriptor: Descriptor) -> None:
    tag = fallback_tag(digest)
    for _ in range(ROUNDS):
        index = _read_index(session, repository, tag)
        listed = index["manifests"]
        if any(isinstance(item, dict) and item.get("digest") == descriptor["digest"] for item in listed):
            return
        index["manifests"] = [*listed, descriptor]
        data = json.dumps(index, separators=(",", ":"), ensure_ascii=False).encode()
        manifests.put(session, repository, tag, data, INDEX_TYPE)
        # Another writer may have written between our reading and writing: look whether ours is there.
        if any(item.get("digest") == descriptor["digest"] for item in _from_tag(session, repository, digest)):
            return
    raise RegistryGaveUp(where=session.host, attempts=ROUNDS, what=f"others write the tag {tag} all the time")


def _read_index(session: Session, repository: str, tag: str) -> dict[str, Any]:
    try:
        stored = manifests.get(session, repository, tag)
    except NotInRegistry:
        return {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": []}
    doc = _loaded(stored.data)
    if stored.media_type != INDEX_TYPE or not isinstance(doc, dict) or not isinstance(doc.get("manifests"), list):
        raise RegistryRefused(
            where=f"{session.host}/{repository}",
            what=f"the tag {tag} is not an index of referrers",
            remedy="Delete or rename that tag; it stands where the list of signatures has to be.",
        )
    return doc


def _loaded(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _descriptors(data: bytes, where: str) -> list[Descriptor]:
    doc = _loaded(data)
    items = doc.get("manifests") if isinstance(doc, dict) else None
    if not isinstance(items, list):
        raise RegistryAnswerInvalid(where=where, what="it is no index")
    return [item for item in items if _is_descriptor(item, where)]


def _is_descriptor(item: Any, where: str) -> bool:
    try:
        fields = Fields(item, where)
        return is_digest(fields.text("digest")) and bool(fields.text("mediaType")) and fields.integer("size") >= 0
    except ImageError:
        return False
