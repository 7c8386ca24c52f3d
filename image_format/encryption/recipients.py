"""Who can open an encrypted image: X25519 keys, and the image key wrapped to each of them (spec/encryption.md, section 3).

Pure but for loading PEM files. Refuses keys of another kind, points of small order, and a wrap that does not open whole.
`encrypted_record` wraps and unwraps; `vgpu keys new --type x25519` makes an identity.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from image_format.trust import key_files
from vgpu_errors import BadConfiguration, Undecryptable

if TYPE_CHECKING:
    from image_format.fields import Fields
    from image_format.trust.key_files import Passphrase

WRAP_TYPE = "x25519-hkdf-sha256-aes-256-gcm"
WRAP_INFO = b"vgpu-snapshot encryption v1: wrap"
KEY_BYTES = 32
_WRAPPED_BYTES = KEY_BYTES + 16
# A wrapping key encrypts once, because the ephemeral key behind it is used once.
_NONCE = bytes(12)


@dataclass(frozen=True)
class Recipient:
    """A public key that images can be encrypted to."""

    key_id: str
    _key: X25519PublicKey

    @classmethod
    def of(cls, key: X25519PublicKey) -> Recipient:
        """Wrap a loaded key."""
        return cls(base64.b64encode(hashlib.sha256(key_files.public_der(key)).digest()).decode(), key)

    @classmethod
    def load(cls, path: Path | str) -> Recipient:
        """Load a public key."""
        return cls.parse(key_files.read_public(Path(path)), where=path)

    @classmethod
    def parse(cls, data: bytes, *, where: Path | str) -> Recipient:
        """Parse a PEM public key."""
        key = key_files.parse_public(data, where=where)
        if not isinstance(key, X25519PublicKey):
            raise BadConfiguration(path=where, what="is not an X25519 key", remedy=_REMEDY)
        return cls.of(key)

    def to_pem(self) -> bytes:
        """The file form."""
        return key_files.public_pem(self._key)

    def wrap(self, image_key: bytes, *, image_id: bytes) -> WrappedKey:
        """The image key for this recipient alone; each call makes a new ephemeral key."""
        return self.wrap_with(X25519PrivateKey.generate(), image_key, image_id=image_id)

    def wrap_with(self, ephemeral: X25519PrivateKey, image_key: bytes, *, image_id: bytes) -> WrappedKey:
        """The same with a given ephemeral key, which nothing else may ever use; for test vectors."""
        public = ephemeral.public_key().public_bytes_raw()
        try:
            shared = ephemeral.exchange(self._key)
        except ValueError as error:
            remedy = "Nobody's key looks like that; ask the recipient for theirs again."
            what = "is a point of small order"
            raise BadConfiguration(path=f"recipient {self.key_id}", what=what, remedy=remedy) from error
        wrapping = _wrapping_key(shared, public, self._key, image_id)
        return WrappedKey(self.key_id, public, AESGCM(wrapping).encrypt(_NONCE, image_key, image_id))


@dataclass(frozen=True)
class Identity:
    """A private key that opens what was encrypted to its public half."""

    public: Recipient
    _key: X25519PrivateKey

    @classmethod
    def generate(cls) -> Identity:
        """A fresh key."""
        return cls.of(X25519PrivateKey.generate())

    @classmethod
    def of(cls, key: X25519PrivateKey) -> Identity:
        """Wrap a loaded key."""
        return cls(Recipient.of(key.public_key()), key)

    @classmethod
    def load(cls, path: Path | str, passphrase: Passphrase | None = None) -> Identity:
        """Load a private key that nobody else can read."""
        key = key_files.read_private(Path(path), passphrase)
        if not isinstance(key, X25519PrivateKey):
            raise BadConfiguration(path=path, what="is not an X25519 key", remedy=_REMEDY)
        return cls.of(key)

    def to_pem(self, passphrase: bytes | None = None) -> bytes:
        """The file form."""
        return key_files.private_pem(self._key, passphrase)

    def unwrap(self, wrapped: WrappedKey, *, image_id: bytes, where: str) -> bytes:
        """The image key."""
        try:
            shared = self._key.exchange(X25519PublicKey.from_public_bytes(wrapped.ephemeral))
            wrapping = _wrapping_key(shared, wrapped.ephemeral, self._key.public_key(), image_id)
            return AESGCM(wrapping).decrypt(_NONCE, wrapped.sealed, image_id)
        except (InvalidTag, ValueError) as error:
            what = f"the key for recipient {wrapped.key_id} does not open"
            raise Undecryptable(where=where, what=what) from error


@dataclass(frozen=True)
class WrappedKey:
    """The image key as one recipient gets it."""

    key_id: str
    ephemeral: bytes
    sealed: bytes

    @classmethod
    def from_json(cls, fields: Fields) -> WrappedKey:
        """Parse one of `recipients`."""
        return cls(
            base64.b64encode(fields.base64_of("keyId", KEY_BYTES)).decode(),
            fields.base64_of("ephemeral", KEY_BYTES),
            fields.base64_of("wrapped", _WRAPPED_BYTES),
        )

    def to_json(self) -> dict[str, Any]:
        """The form that is written."""
        return {
            "type": WRAP_TYPE,
            "keyId": self.key_id,
            "ephemeral": base64.b64encode(self.ephemeral).decode(),
            "wrapped": base64.b64encode(self.sealed).decode(),
        }


_REMEDY = "'vgpu keys new --type x25519' makes a key for encryption; signing keys are others."


def _wrapping_key(shared: bytes, ephemeral: bytes, recipient: X25519PublicKey, image_id: bytes) -> bytes:
    salt = ephemeral + recipient.public_bytes_raw() + image_id
    return HKDF(algorithm=hashes.SHA256(), length=KEY_BYTES, salt=salt, info=WRAP_INFO).derive(shared)
