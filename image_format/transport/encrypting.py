"""Encrypts what a push sends (spec/encryption.md): every blob, and the manifest that names them, under one image key.

The outer manifest has the public record as its config and encrypted layers of one type: first the plain manifest, then
the blobs in its order. Nothing in it says what is inside but the sizes. Each blob is encrypted twice, once for its
digest and once on its way. `pushing` calls it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO, cast

from image_format import canonical_json
from image_format.encryption import ENCRYPTED_BLOB_TYPE, ENCRYPTED_RECORD_TYPE, EncryptedRecord, seal_stream
from image_format.manifest import ARTIFACT_TYPE, MANIFEST_TYPE, Descriptor
from image_format.transport.blobs import Blob
from image_format.transport.opening import blob_name, sha256_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from image_format.encryption import ImageCipher, Recipient


@dataclass(frozen=True)
class EncryptedImage:
    """The outer manifest, and what it names in the order in which it is sent."""

    manifest: bytes
    blobs: tuple[Blob, ...]


def encrypt(inner: bytes, blobs: Sequence[Blob], recipients: Sequence[Recipient]) -> EncryptedImage:
    """Encrypt the plain manifest and the blobs that it names, in its order, config first."""
    record, image = EncryptedRecord.new(recipients)
    config = Blob.of_bytes(record.to_bytes())
    layers = [_encrypted(image, place, blob) for place, blob in enumerate([Blob.of_bytes(inner), *blobs])]
    doc = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "artifactType": ARTIFACT_TYPE,
        "config": _described(config, ENCRYPTED_RECORD_TYPE),
        "layers": [_described(blob, ENCRYPTED_BLOB_TYPE) for blob in layers],
    }
    return EncryptedImage(canonical_json.write(doc, where="encrypted manifest"), (*layers, config))


def _encrypted(image: ImageCipher, place: int, blob: Blob) -> Blob:
    def open_at(offset: int) -> BinaryIO:
        stream = seal_stream(image, blob_name(place), blob.open_stream(0), blob.size)
        stream.seek(offset)
        return cast("BinaryIO", stream)

    return Blob(open_at, f"sha256:{sha256_of(open_at(0))}", image.sealed_size(blob.size))


def _described(blob: Blob, media_type: str) -> dict[str, object]:
    return Descriptor(media_type, blob.digest.removeprefix("sha256:"), blob.size).to_json()
