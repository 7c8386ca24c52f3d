"""Encrypts what a push sends (spec/encryption.md): every blob, and the manifest that names them, under one image key.

The outer manifest has the public record as its config and encrypted layers of one type: first the plain manifest, then
the blobs in its order. Nothing in it says what is inside but the sizes. Each blob is encrypted while it is sent, and its
digest is learnt then; an upload that goes on in the middle encrypts the rest again. `pushing` calls it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO, cast

from image_format import canonical_json
from image_format.encryption import ENCRYPTED_BLOB_TYPE, ENCRYPTED_RECORD_TYPE, EncryptedRecord, seal_stream
from image_format.manifest import ARTIFACT_TYPE, MANIFEST_TYPE, Descriptor
from image_format.transport.blobs import Blob, Stream
from image_format.transport.opening import blob_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from image_format.encryption import ImageCipher, Recipient


@dataclass(frozen=True)
class EncryptedImage:
    """The public record, and the streams to send in the order in which the manifest names them."""

    config: Blob
    streams: tuple[Stream, ...]

    @classmethod
    def of(cls, inner: bytes, blobs: Sequence[Blob], recipients: Sequence[Recipient]) -> EncryptedImage:
        """The plain manifest and the blobs that it names, in its order, config first, under a fresh key."""
        record, image = EncryptedRecord.new(recipients)
        streams = (_encrypted(image, place, blob) for place, blob in enumerate([Blob.of_bytes(inner), *blobs]))
        return cls(Blob.of_bytes(record.to_bytes()), tuple(streams))

    def manifest(self, digests: Sequence[str]) -> bytes:
        """The outer manifest, once the streams have their digests."""
        doc = {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "artifactType": ARTIFACT_TYPE,
            "config": _described(self.config.digest, self.config.size, ENCRYPTED_RECORD_TYPE),
            "layers": [
                _described(digest, stream.size, ENCRYPTED_BLOB_TYPE)
                for digest, stream in zip(digests, self.streams, strict=True)
            ],
        }
        return canonical_json.write(doc, where="encrypted manifest")


def _encrypted(image: ImageCipher, place: int, blob: Blob) -> Stream:
    def open_at(offset: int) -> BinaryIO:
        stream = seal_stream(image, blob_name(place), blob.open_stream(0), blob.size)
        stream.seek(offset)
        return cast("BinaryIO", stream)

    return Stream(open_at, image.sealed_size(blob.size))


def _described(digest: str, size: int, media_type: str) -> dict[str, object]:
    return Descriptor(media_type, digest.removeprefix("sha256:"), size).to_json()
