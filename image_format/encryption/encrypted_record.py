"""The public record of an encrypted image (spec/encryption.md, section 4): its config blob in a registry.

Says only that the image is encrypted, to whom, and by what; the real record is one of the encrypted blobs.
Refuses an unknown required feature or cipher by name, and a record that whoever holds the image key did not write.
`vgpu push --encrypt-to` makes it, `vgpu pull --identity` opens it.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from image_format import canonical_json
from image_format.encryption.frame_cipher import FRAME_SIZE, IMAGE_ID_BYTES, KEY_BYTES, ImageCipher
from image_format.encryption.recipients import WRAP_TYPE, WrappedKey
from image_format.fields import Fields
from image_format.record import check_version
from vgpu_errors import ImageError, LimitExceeded, NotARecipient, Undecryptable, UnknownFeature

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from image_format.encryption.recipients import Identity, Recipient

ENCRYPTED_RECORD_TYPE = "application/vnd.vgpu.checkpoint.encrypted-record.v1+json"
ENCRYPTED_BLOB_TYPE = "application/vnd.vgpu.checkpoint.encrypted-blob.v1"
ENCRYPTED = "encrypted"
FORMAT_VERSION = "1.2"
CIPHER = "aes-256-gcm-synthetic-nonce"
MAX_RECORD_BYTES = 64 << 10
MAX_RECIPIENTS = 64


@dataclass(frozen=True)
class EncryptedRecord:
    """Who can open the image. `recipients` are those whose kind of wrap this version knows; `body` is all but the MAC."""

    image_id: bytes
    recipients: tuple[WrappedKey, ...]
    mac: bytes
    body: Mapping[str, Any]

    @classmethod
    def new(cls, recipients: Sequence[Recipient]) -> tuple[EncryptedRecord, ImageCipher]:
        """A fresh image key, wrapped to each recipient."""
        image = ImageCipher.generate()
        return cls.of(image, [r.wrap(image.wrapped_key(), image_id=image.image_id) for r in recipients]), image

    @classmethod
    def of(cls, image: ImageCipher, wrapped: Sequence[WrappedKey]) -> EncryptedRecord:
        """The record over these wraps, one for each recipient."""
        by_id = {entry.key_id: entry for entry in wrapped}
        if not by_id:
            raise ImageError(where="encrypted record", what="has no recipient, so nobody could open it")
        _check_count(len(by_id), "encrypted record")
        body = {
            "formatVersion": FORMAT_VERSION,
            "features": {"required": [ENCRYPTED], "optional": []},
            "imageId": image.image_id.hex(),
            "cipher": {"name": CIPHER, "frameBytes": FRAME_SIZE},
            "recipients": [entry.to_json() for entry in by_id.values()],
        }
        return cls(image.image_id, tuple(by_id.values()), image.record_mac(_covered(body)), body)

    @classmethod
    def from_bytes(cls, data: bytes, *, where: str = "encrypted record") -> EncryptedRecord:
        """Parse the config blob."""
        fields = Fields(canonical_json.read_object(data, where=where, max_bytes=MAX_RECORD_BYTES), where)
        check_version(fields)
        _check_features(fields.object("features").texts("required"), where)
        _check_cipher(fields.object("cipher"))
        mac = _hex(fields, "mac", KEY_BYTES)
        body = {key: value for key, value in fields.whole().items() if key != "mac"}
        return cls(_hex(fields, "imageId", IMAGE_ID_BYTES), _read_recipients(fields), mac, body)

    def to_json(self) -> dict[str, Any]:
        """The form that is written; unknown fields come back as they were."""
        return {**self.body, "mac": self.mac.hex()}

    def to_bytes(self) -> bytes:
        """The canonical bytes of the config blob."""
        return canonical_json.write(self.to_json(), where="encrypted record")

    def open(self, identities: Sequence[Identity], *, where: str = "the image") -> ImageCipher:
        """The image's cipher, if one of these keys opens it."""
        for identity in identities:
            for wrapped in self.recipients:
                if wrapped.key_id == identity.public.key_id:
                    return self._opened(identity, wrapped, where)
        shown = [entry.key_id for entry in self.recipients[:4]]
        more = len(self.recipients) - len(shown)
        names = (
            ", ".join(shown) + (f" and {more} more" if more else "") or "kinds of keys that this version does not know"
        )
        raise NotARecipient(where=where, recipients=names)

    def _opened(self, identity: Identity, wrapped: WrappedKey, where: str) -> ImageCipher:
        image = ImageCipher(self.image_id, identity.unwrap(wrapped, image_id=self.image_id, where=where))
        if not hmac.compare_digest(image.record_mac(_covered(self.body)), self.mac):
            raise Undecryptable(where=where, what="its encrypted record was changed")
        return image


def _covered(body: Mapping[str, Any]) -> bytes:
    return canonical_json.write(dict(body), where="encrypted record")


def _check_features(required: Sequence[str], where: str) -> None:
    for feature in required:
        if feature != ENCRYPTED:
            raise UnknownFeature(where=where, feature=ascii(feature[:64])[1:-1])
    if ENCRYPTED not in required:
        raise ImageError(where=f"{where}.features.required", what=f"lacks {ENCRYPTED}")


def _check_cipher(fields: Fields) -> None:
    name = fields.text("name")
    if name != CIPHER:
        raise UnknownFeature(where=fields.path("name"), feature=ascii(name[:64])[1:-1])
    if fields.integer("frameBytes") != FRAME_SIZE:
        raise ImageError(where=fields.path("frameBytes"), what=f"must be {FRAME_SIZE}")
    if fields.unknown():
        raise ImageError(where=fields.at, what="has a parameter that this cipher does not have")


def _read_recipients(fields: Fields) -> tuple[WrappedKey, ...]:
    entries = fields.objects("recipients")
    _check_count(len(entries), fields.path("recipients"))
    return tuple(WrappedKey.from_json(entry) for entry in entries if entry.text("type") == WRAP_TYPE)


def _check_count(count: int, where: str) -> None:
    if count > MAX_RECIPIENTS:
        raise LimitExceeded(where=where, what="the number of recipients", found=count, limit=MAX_RECIPIENTS)


def _hex(fields: Fields, key: str, size: int) -> bytes:
    text = fields.text(key)
    if len(text) != 2 * size or any(digit not in "0123456789abcdef" for digit in text):
        raise ImageError(where=fields.path(key), what=f"must be {2 * size} lower-case hex digits")
    return bytes.fromhex(text)
