"""Believes the four sealed documents, or refuses them, in one fixed order (spec/signature.md, section 5).

The rules, each before the next:
  1. there is a signature, and it is a bundle with one envelope;
  2. the key it hints at is trusted by the policy, and the signature holds over the envelope's bytes;
  3. the statement in the envelope names the manifest by sha256;
  4. the manifest names record and index by sha256 and size;
  5. record and index parse, their versions and features are known, and they speak of the same GPU objects;
  6. the content root is the same in statement, manifest, record and index, and the index computes to it.
All decisions, no input or output: `verifying` and `archive` bring the bytes.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from image_format import chunk_index
from image_format.file_names import INDEX_NAME, MANIFEST_NAME, RECORD_NAME, SEAL_NAMES, SIGNATURE_NAME
from image_format.gpu_objects import check_objects
from image_format.manifest import MAX_MANIFEST_BYTES, Manifest
from image_format.record import MAX_RECORD_BYTES, Record
from image_format.trust.bundle import MAX_BUNDLE_BYTES, Bundle
from image_format.trust.statement import PAYLOAD_TYPE, Statement
from vgpu_errors import (
    BadSignature,
    ContentMismatch,
    FormatTooNew,
    ImageError,
    UnexpectedEntry,
    Unsigned,
    UntrustedKey,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from image_format.chunk_index import Index
    from image_format.trust.freshness import SignedTimes
    from image_format.trust.policy import Policy, TrustedKey

MAX_SIZES = {
    INDEX_NAME: chunk_index.MAX_INDEX_BYTES,
    RECORD_NAME: MAX_RECORD_BYTES,
    MANIFEST_NAME: MAX_MANIFEST_BYTES,
    SIGNATURE_NAME: MAX_BUNDLE_BYTES,
}


@dataclass(frozen=True)
class Claims:
    """What the documents say. `key` and `signed` are None where nobody vouches for it."""

    record: Record
    index: Index
    manifest_digest: str
    key: TrustedKey | None = None
    signed: SignedTimes | None = None


@dataclass(frozen=True)
class Claimed:
    """Record and index without any trust, for `vgpu inspect`."""

    record: Record
    index: Index


def check(documents: Mapping[str, bytes], policy: Policy, *, where: str) -> Claims | None:
    """Believe the documents by the policy; None where there are none and the policy allows that."""
    if SIGNATURE_NAME not in documents:
        return _without_signature(documents, policy, where)
    statement, key = verify_signature(documents[SIGNATURE_NAME], policy, where=where)
    manifest_bytes = _document(documents, MANIFEST_NAME, where)
    digest = hashlib.sha256(manifest_bytes).hexdigest()
    if digest != statement.manifest_sha256:
        raise ContentMismatch(where=f"{where}: {MANIFEST_NAME}", what="sha256")
    claims = _read(documents, where, digest, key)
    _compare(statement, claims, where)
    return replace(claims, signed=statement.times)


def verify_signature(data: bytes, policy: Policy, *, where: str) -> tuple[Statement, TrustedKey]:
    """Rules 1 and 2; only the bytes that the signature covers come back, parsed."""
    at = f"{where}: {SIGNATURE_NAME}"
    bundle = _read_bundle(data, at)
    key = policy.find(bundle.key_hint)
    if key is None:
        raise UntrustedKey(where=where, key=ascii(bundle.key_hint[:64])[1:-1])
    if bundle.envelope.payload_type != PAYLOAD_TYPE:
        raise BadSignature(where=at, what=f"the payload type is not {PAYLOAD_TYPE}")
    if not key.key.holds(bundle.envelope.signature, bundle.envelope.signed_bytes()):
        raise BadSignature(where=at, what="it does not match the signed bytes")
    return Statement.from_bytes(bundle.envelope.payload, where=f"{at}: statement"), key


def signer_hint(documents: Mapping[str, bytes], *, where: str) -> str | None:
    """The key id that the signature hints at, unverified; None where there is no signature."""
    if SIGNATURE_NAME not in documents:
        return None
    return _read_bundle(documents[SIGNATURE_NAME], f"{where}: {SIGNATURE_NAME}").key_hint


def read_claimed(documents: Mapping[str, bytes], *, where: str) -> Claimed:
    """Parse record and index without trust."""
    record = Record.from_bytes(_document(documents, RECORD_NAME, where), where=f"{where}: {RECORD_NAME}")
    index = chunk_index.from_bytes(_document(documents, INDEX_NAME, where), where=f"{where}: {INDEX_NAME}")
    if index.is_packed:
        raise ImageError(where=f"{where}: {INDEX_NAME}", what="is a packed index, which describes no directory")
    check_objects(record.processes, index, where=f"{where}: {RECORD_NAME}")
    return Claimed(record, index)


def _read_bundle(data: bytes, at: str) -> Bundle:
    try:
        return Bundle.from_bytes(data, where=at)
    except FormatTooNew:
        raise
    except ImageError as error:
        raise BadSignature(where=at, what=error.message.removeprefix(f"{at}: ")) from error


def _without_signature(documents: Mapping[str, bytes], policy: Policy, where: str) -> Claims | None:
    if not policy.allows_unsigned:
        raise Unsigned(where=where)
    if not documents:
        return None
    if set(documents) != set(SEAL_NAMES) - {SIGNATURE_NAME}:  # a seal that was never finished vouches for nothing
        raise Unsigned(where=where)
    return _read(documents, where, hashlib.sha256(documents[MANIFEST_NAME]).hexdigest(), None)


def _read(documents: Mapping[str, bytes], where: str, digest: str, key: TrustedKey | None) -> Claims:
    manifest = Manifest.from_bytes(documents[MANIFEST_NAME], where=f"{where}: {MANIFEST_NAME}")
    manifest.record.check(_document(documents, RECORD_NAME, where), where=f"{where}: {RECORD_NAME}")
    manifest.index.check(_document(documents, INDEX_NAME, where), where=f"{where}: {INDEX_NAME}")
    claimed = read_claimed(documents, where=where)
    record, index = claimed.record, claimed.index
    for name, root in ((RECORD_NAME, record.content_root), (INDEX_NAME, index.content_root.hex())):
        if root != manifest.content_root:
            raise ContentMismatch(where=f"{where}: {name}", what="content root")
    if record.created != manifest.created:
        raise ContentMismatch(where=f"{where}: {RECORD_NAME}", what="created")
    return Claims(record, index, digest, key)


def _compare(statement: Statement, claims: Claims, where: str) -> None:
    record = claims.record
    pairs = (
        ("content root", statement.content_root, record.content_root),
        ("container id", statement.container_id, record.container.id),
        ("generation", statement.generation, record.generation),
        ("created", statement.created, record.created),
    )
    for what, signed, found in pairs:
        if signed != found:
            raise ContentMismatch(where=f"{where}: {RECORD_NAME}", what=what)


def _document(documents: Mapping[str, bytes], name: str, where: str) -> bytes:
    if name not in documents:
        raise UnexpectedEntry(where=where, entry=name, what="is missing")
    return documents[name]
