"""The sealed documents of a checkpoint in a registry, without its packs (spec/signature.md, section 10).

Looks only at a manifest whose digest somebody has vouched for, and fetches what is small: record, index, manifest and
signature of the seal. Refuses a checkpoint whose own documents are not all there. `vgpu verify REGISTRY-REF` calls it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from image_format import canonical_json
from image_format.encryption.encrypted_record import ENCRYPTED_RECORD_TYPE, EncryptedRecord
from image_format.fields import Fields
from image_format.file_names import INDEX_NAME, MANIFEST_NAME, RECORD_NAME, SIGNATURE_NAME
from image_format.manifest import ARTIFACT_TYPE, INDEX_TYPE, RECORD_TYPE
from image_format.seal_documents import MAX_SIZES
from image_format.trust.bundle import BUNDLE_TYPE
from vgpu_errors import ContentMismatch, LimitExceeded, UnexpectedEntry

if TYPE_CHECKING:
    from image_format.trust.referrer_signatures import RegistryCalls

SEALED_MANIFEST_TYPE = "application/vnd.vgpu.checkpoint.sealed-manifest.v1+json"
NAMES = {
    RECORD_TYPE: RECORD_NAME,
    INDEX_TYPE: INDEX_NAME,
    SEALED_MANIFEST_TYPE: MANIFEST_NAME,
    BUNDLE_TYPE: SIGNATURE_NAME,
}
MAX_MANIFEST_BYTES = 4 << 20


@dataclass(frozen=True)
class RemoteCheckpoint:
    """A checkpoint of ours in a registry: its documents, or where they are encrypted, for whom."""

    documents: dict[str, bytes]
    encrypted: EncryptedRecord | None = None


def find(registry: RegistryCalls, manifest: bytes, *, where: str) -> bytes | None:
    """The manifest of the checkpoint of ours that this manifest is, or that this index names once; None for others."""
    fields = Fields(canonical_json.read_object(manifest, where=where, max_bytes=MAX_MANIFEST_BYTES), where)
    if not fields.is_there("manifests"):
        return manifest if fields.text_or_none("artifactType") == ARTIFACT_TYPE else None
    named = [
        entry.sha256_digest("digest")
        for entry in fields.objects("manifests")
        if entry.text_or_none("artifactType") == ARTIFACT_TYPE
    ]
    return registry.get_manifest(named[0])[0] if len(named) == 1 else None


def read(registry: RegistryCalls, manifest: bytes, *, where: str) -> RemoteCheckpoint | None:
    """The documents that this manifest names; None where it is no checkpoint artifact of ours."""
    fields = Fields(canonical_json.read_object(manifest, where=where, max_bytes=MAX_MANIFEST_BYTES), where)
    if fields.text_or_none("artifactType") != ARTIFACT_TYPE:
        return None
    config = fields.object("config")
    if config.text("mediaType") == ENCRYPTED_RECORD_TYPE:
        data = _blob(registry, config, 64 << 10, where)
        return RemoteCheckpoint({}, EncryptedRecord.from_bytes(data, where=f"{where}: config"))
    documents: dict[str, bytes] = {}
    for entry in (config, *fields.objects("layers")):
        name = NAMES.get(entry.text("mediaType"))
        if name is None:
            continue
        if name in documents:
            raise UnexpectedEntry(where=where, entry=name, what="is there twice")
        documents[name] = _blob(registry, entry, MAX_SIZES[name], where)
    for name in NAMES.values():
        if name not in documents:
            raise UnexpectedEntry(where=where, entry=name, what="is missing")
    return RemoteCheckpoint(documents)


def _blob(registry: RegistryCalls, descriptor: Fields, limit: int, where: str) -> bytes:
    size = descriptor.integer("size")
    if size > limit:
        raise LimitExceeded(where=where, what=f"the size of {descriptor.text('mediaType')}", found=size, limit=limit)
    data = registry.get_blob(descriptor.sha256_digest("digest"), limit)
    if len(data) != size:
        raise ContentMismatch(where=where, what=f"{len(data)} bytes of {descriptor.text('mediaType')}, not {size}")
    return data
