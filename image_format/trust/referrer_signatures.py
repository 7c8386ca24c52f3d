"""Signs images in a registry and believes, or refuses, the signatures there (spec/signature.md, sections 8 to 10).

Two forms from one key over the same digest, because no tool reads both: a sigstore bundle as referrer (cosign, and this
program), and simple signing under the tag `sha256-<hex>.sig` (podman, skopeo, CRI-O). Of an index every image in it is
signed, too, for that is what podman looks up. Steps of signing, each harmless alone: blobs, the bundle's manifest, the tag.
Nothing of an answer is believed but what a trusted key has signed about this very digest.
`vgpu sign`, `vgpu verify` and `vgpu pull` call it with `registry.Registry`.
"""

from __future__ import annotations

import hashlib
import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from image_format import canonical_json
from image_format.fields import Fields
from image_format.manifest import MANIFEST_TYPE
from image_format.trust import simple_signing
from image_format.trust.bundle import BUNDLE_TYPE, MAX_BUNDLE_BYTES, Bundle
from image_format.trust.dsse import Envelope, pre_authentication_encoding
from image_format.trust.freshness import check_expiry, time_text
from image_format.trust.image_statement import ImageStatement
from image_format.trust.simple_signing import MAX_PAYLOAD_BYTES, Payload, SignatureLayer, signature_tag
from image_format.trust.statement import PAYLOAD_TYPE
from vgpu_errors import (
    BadSignature,
    Expired,
    ImageError,
    LimitExceeded,
    NotInRegistry,
    RegistryContentWrong,
    Unsigned,
    UntrustedKey,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from datetime import datetime
    from typing import BinaryIO

    from image_format.trust.keys import SigningKey
    from image_format.trust.policy import Policy, TrustedKey

INDEX_TYPES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
EMPTY_TYPE = "application/vnd.oci.empty.v1+json"
EMPTY = b"{}"
MAY_BE_BUNDLE = (BUNDLE_TYPE, EMPTY_TYPE)
CONTENT_KEY = "dev.sigstore.bundle.content"
PREDICATE_KEY = "dev.sigstore.bundle.predicateType"
CREATED_KEY = "org.opencontainers.image.created"
MAX_SIGNATURES = 64
MAX_IMAGES_OF_INDEX = 64
MAX_MANIFEST_BYTES = 4 << 20

BUNDLE, SIMPLE = "bundle", "simple signing"
TRUSTED, EXPIRED, UNKNOWN_KEY, INVALID = "trusted", "expired", "unknown key", "invalid"


# What is wrong with one signature alone; a registry that does not answer at all is another matter.
UNREADABLE = (ImageError, NotInRegistry, RegistryContentWrong)


class RegistryCalls(Protocol):
    """What is needed of a registry's client; one repository."""

    def get_manifest(self, target: str | None = None) -> tuple[bytes, str, str]:
        """Bytes, media type and digest."""

    def put_manifest(self, data: bytes, media_type: str, target: str | None = None) -> str:
        """Store a manifest under a tag or digest."""

    def get_blob(self, digest: str, max_bytes: int) -> bytes:
        """A small blob, its digest checked."""

    def head_blob(self, digest: str) -> int | None:
        """The size of a blob that is there."""

    def upload_blob(
        self,
        open_stream: Callable[[int], BinaryIO],
        digest: str,
        size: int,
        on_bytes: Callable[[int], None] | None = None,
    ) -> None:
        """Send a blob."""

    def referrers(self, digest: str, artifact_type: str | None = None) -> list[dict[str, Any]]:
        """Descriptors of what refers to a manifest."""

    def add_referrer(self, subject_descriptor: dict[str, Any], manifest: dict[str, Any]) -> dict[str, Any]:
        """Store a manifest that refers to another one."""


@dataclass(frozen=True)
class FoundSignature:
    """A signature and what it is worth here."""

    form: str
    state: str
    key_id: str | None = None
    key_name: str | None = None
    expires: str | None = None
    what: str = ""


@dataclass(frozen=True)
class VerifiedImage:
    """An image in a registry whose manifest a trusted key has signed; or, by policy, one that nobody has."""

    digest: str
    media_type: str
    manifest: bytes
    signatures: tuple[FoundSignature, ...]

    @property
    def trusted(self) -> FoundSignature | None:
        """The signature that was believed."""
        return next((found for found in self.signatures if found.state == TRUSTED), None)


# ---- sign ----------------------------------------------------------------------------------------


def sign_image(
    registry: RegistryCalls,
    key: SigningKey,
    *,
    reference: str,
    now: datetime,
    target: str | None = None,
    expires: str | None = None,
) -> tuple[str, ...]:
    """Sign what `target` names, in both forms; returns the digests that were signed, that of `target` first.

    `reference` is what the signature says the image is, as podman's policies compare it: `host/repository[:tag]`.
    """
    data, media_type, digest = registry.get_manifest(target)
    wanted = [(data, media_type, digest), *_images_of_index(registry, data, media_type)]
    for manifest, kind, subject in wanted:
        _sign_bundle(registry, key, _descriptor(manifest, kind, subject), now=now, expires=expires)
        _sign_simple(registry, key, Payload(reference, subject, expires, int(now.timestamp())))
    return tuple(subject for _, _, subject in wanted)


def image_bundle(digest: str, key: SigningKey, *, now: datetime, expires: str | None = None) -> bytes:
    """The bundle over a manifest's digest."""
    payload = ImageStatement(digest, time_text(now), expires).to_bytes()
    signature = key.sign(pre_authentication_encoding(PAYLOAD_TYPE, payload))
    return Bundle(key.key_id, Envelope(PAYLOAD_TYPE, payload, signature)).to_bytes()


def _sign_bundle(
    registry: RegistryCalls, key: SigningKey, subject: dict[str, Any], *, now: datetime, expires: str | None
) -> None:
    bundle = image_bundle(subject["digest"], key, now=now, expires=expires)
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "artifactType": BUNDLE_TYPE,
        "config": _upload(registry, EMPTY, EMPTY_TYPE),
        "layers": [_upload(registry, bundle, BUNDLE_TYPE)],
        "annotations": {
            CREATED_KEY: time_text(now),
            CONTENT_KEY: "dsse-envelope",
            PREDICATE_KEY: ImageStatement(subject["digest"]).predicate_type,
        },
    }
    registry.add_referrer(subject, manifest)


def _sign_simple(registry: RegistryCalls, key: SigningKey, payload: Payload) -> None:
    """Add a signature to those there; an older one of this key for the same reference gives way."""
    data = payload.to_bytes()
    tag = signature_tag(payload.digest)
    kept = [layer for layer in _layers(registry, tag) if not _is_ours(registry, layer, key, payload)]
    if len(kept) >= simple_signing.MAX_LAYERS:
        limit = simple_signing.MAX_LAYERS
        raise LimitExceeded(where=tag, what="the number of signatures", found=len(kept) + 1, limit=limit)
    manifest, config = simple_signing.make_manifest([*kept, SignatureLayer.of(data, key.sign(data))])
    _upload(registry, data, simple_signing.PAYLOAD_TYPE)
    _upload(registry, config, simple_signing.CONFIG_TYPE)
    registry.put_manifest(manifest, MANIFEST_TYPE, tag)


def _is_ours(registry: RegistryCalls, layer: SignatureLayer, key: SigningKey, payload: Payload) -> bool:
    try:
        data = registry.get_blob(layer.digest, MAX_PAYLOAD_BYTES)
        if not key.public.holds(layer.signature, data):
            return False
        return Payload.from_bytes(data, digest=payload.digest, where="payload").reference == payload.reference
    except UNREADABLE:
        return False


def _images_of_index(registry: RegistryCalls, data: bytes, media_type: str) -> list[tuple[bytes, str, str]]:
    if media_type not in INDEX_TYPES:
        return []
    fields = Fields(canonical_json.read_object(data, where="index", max_bytes=MAX_MANIFEST_BYTES), "index")
    digests = [entry.sha256_digest("digest") for entry in fields.objects("manifests")]
    if len(digests) > MAX_IMAGES_OF_INDEX:
        limit = MAX_IMAGES_OF_INDEX
        raise LimitExceeded(where="index", what="the number of its images", found=len(digests), limit=limit)
    return [registry.get_manifest(digest) for digest in digests]


def _upload(registry: RegistryCalls, data: bytes, media_type: str) -> dict[str, Any]:
    descriptor = _descriptor(data, media_type, "sha256:" + hashlib.sha256(data).hexdigest())
    if registry.head_blob(descriptor["digest"]) is None:
        registry.upload_blob(lambda offset: io.BytesIO(data[offset:]), descriptor["digest"], len(data))
    return descriptor


def _descriptor(data: bytes, media_type: str, digest: str) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": digest, "size": len(data)}


# ---- verify --------------------------------------------------------------------------------------


def verify_image(
    registry: RegistryCalls, policy: Policy, *, where: str, now: datetime, target: str | None = None
) -> VerifiedImage:
    """Believe the image by one signature of a trusted key, in either form; otherwise say what is wrong with those there."""
    data, media_type, digest = registry.get_manifest(target)
    if digest != "sha256:" + hashlib.sha256(data).hexdigest():
        raise RegistryContentWrong(where=where, what=f"the manifest {digest} has another digest")
    found = (
        *_judge_bundles(registry, digest, policy, where=where, now=now),
        *_judge_layers(registry, digest, policy, where=where, now=now),
    )
    image = VerifiedImage(digest, media_type, data, found)
    if image.trusted is None and not (policy.allows_unsigned and not found):
        raise _refusal(found, where)
    return image


def judge_bundle(data: bytes, digest: str, policy: Policy, *, where: str, now: datetime) -> FoundSignature:
    """What a bundle is worth for the manifest of this digest."""
    try:
        bundle = Bundle.from_bytes(data, where=f"{where}: bundle")
    except ImageError as error:
        return FoundSignature(BUNDLE, INVALID, what=error.message)
    key = policy.find(bundle.key_hint)
    if key is None:
        return FoundSignature(BUNDLE, UNKNOWN_KEY, key_id=ascii(bundle.key_hint[:64])[1:-1])
    envelope = bundle.envelope
    if envelope.payload_type != PAYLOAD_TYPE or not key.key.holds(envelope.signature, envelope.signed_bytes()):
        return _found(BUNDLE, INVALID, key, what="the signature does not match the signed bytes")
    try:
        statement = ImageStatement.from_bytes(envelope.payload, digest=digest, where=f"{where}: statement")
    except ImageError as error:
        return _found(BUNDLE, INVALID, key, what=error.message)
    return _aged(_found(BUNDLE, TRUSTED, key, expires=statement.expires), where, now)


def judge_payload(
    data: bytes, signature: bytes, digest: str, policy: Policy, *, where: str, now: datetime
) -> FoundSignature:
    """What a simple signature is worth; it names no key, so all trusted ones are tried."""
    key = next((key for key in policy.keys.values() if key.key.holds(signature, data)), None)
    if key is None:
        return FoundSignature(SIMPLE, UNKNOWN_KEY)
    try:
        payload = Payload.from_bytes(data, digest=digest, where=f"{where}: payload")
    except ImageError as error:
        return _found(SIMPLE, INVALID, key, what=error.message)
    return _aged(_found(SIMPLE, TRUSTED, key, expires=payload.expires), where, now)


def _judge_bundles(
    registry: RegistryCalls, digest: str, policy: Policy, *, where: str, now: datetime
) -> Iterator[FoundSignature]:
    # cosign lists its bundles with the media type of their empty config in place of their own type.
    candidates = [
        found for found in registry.referrers(digest) if found.get("artifactType", EMPTY_TYPE) in MAY_BE_BUNDLE
    ]
    for descriptor in candidates[:MAX_SIGNATURES]:
        try:
            blob = _bundle_of(registry.get_manifest(str(descriptor["digest"]))[0], where)
            data = registry.get_blob(blob, MAX_BUNDLE_BYTES) if blob else None
        except UNREADABLE as error:
            yield FoundSignature(BUNDLE, INVALID, what=error.message)
        else:
            if data is not None:
                yield judge_bundle(data, digest, policy, where=where, now=now)


def _bundle_of(manifest: bytes, where: str) -> str | None:
    """The digest of the bundle that a referrer holds; None for a referrer of another kind."""
    at = f"{where}: bundle's manifest"
    fields = Fields(canonical_json.read_object(manifest, where=at, max_bytes=MAX_MANIFEST_BYTES), at)
    if fields.text_or_none("artifactType") != BUNDLE_TYPE:
        return None
    layers = fields.objects("layers")
    if len(layers) != 1:
        raise ImageError(where=fields.path("layers"), what=f"has {len(layers)} entries, not 1")
    layers[0].one_of("mediaType", BUNDLE_TYPE)
    return layers[0].sha256_digest("digest")


def _judge_layers(
    registry: RegistryCalls, digest: str, policy: Policy, *, where: str, now: datetime
) -> Iterator[FoundSignature]:
    try:
        layers: Sequence[SignatureLayer] = _layers(registry, signature_tag(digest))
    except ImageError as error:
        yield FoundSignature(SIMPLE, INVALID, what=error.message)
        return
    for layer in layers:
        try:
            data = registry.get_blob(layer.digest, MAX_PAYLOAD_BYTES)
        except UNREADABLE as error:
            yield FoundSignature(SIMPLE, INVALID, what=error.message)
        else:
            yield judge_payload(data, layer.signature, digest, policy, where=where, now=now)


def _layers(registry: RegistryCalls, tag: str) -> tuple[SignatureLayer, ...]:
    try:
        data, _, _ = registry.get_manifest(tag)
    except NotInRegistry:
        return ()
    return simple_signing.read_manifest(data, where=tag)


def _found(form: str, state: str, key: TrustedKey, *, expires: str | None = None, what: str = "") -> FoundSignature:
    return FoundSignature(form, state, key.key.key_id, key.name, expires, what)


def _aged(found: FoundSignature, where: str, now: datetime) -> FoundSignature:
    try:
        check_expiry(found.expires, now=now, where=where)
    except Expired as error:
        return FoundSignature(found.form, EXPIRED, found.key_id, found.key_name, found.expires, error.message)
    return found


def _refusal(found: Sequence[FoundSignature], where: str) -> ImageError:
    """The error for an image that no signature speaks for; the nearest miss is the most useful to hear of."""
    for signature in found:
        if signature.state == EXPIRED:
            return Expired(where=where, expires=signature.expires)
    for signature in found:
        if signature.state == INVALID:
            return BadSignature(where=where, what=signature.what)
    keys = [signature.key_id for signature in found if signature.key_id]
    if found:
        return UntrustedKey(where=where, key=keys[0] if keys else "that made its simple signature")
    return Unsigned(where=where)
