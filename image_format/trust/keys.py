"""Signing keys: ECDSA P-256 with SHA-256, and Ed25519; PEM files, with a passphrase or without (spec/signature.md, section 1).

A key's id is base64 of the SHA-256 of its DER public key, as cosign writes it. Never prints or copies a private key.
`vgpu setup` and `vgpu keys` make keys, sealing and `vgpu sign` sign with them, policy loads the trusted ones.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from image_format.trust import key_files
from vgpu_errors import BadConfiguration

if TYPE_CHECKING:
    from image_format.trust.key_files import Passphrase

NODE_KEY = "node.key"
NODE_PUB = "node.pub"
ECDSA_P256 = "ecdsa-p256"
ED25519 = "ed25519"
KEY_TYPES = (ECDSA_P256, ED25519)


@dataclass(frozen=True)
class PublicKey:
    """A key that can verify."""

    key_id: str
    _key: ec.EllipticCurvePublicKey | Ed25519PublicKey

    @classmethod
    def of(cls, key: ec.EllipticCurvePublicKey | Ed25519PublicKey) -> PublicKey:
        """Wrap a loaded key."""
        return cls(base64.b64encode(hashlib.sha256(key_files.public_der(key)).digest()).decode(), key)

    @property
    def type(self) -> str:
        """One of `KEY_TYPES`."""
        return ED25519 if isinstance(self._key, Ed25519PublicKey) else ECDSA_P256

    @property
    def fingerprint(self) -> str:
        """The key's id in hex, as `openssl pkey -pubin -outform DER | sha256sum` prints it."""
        return base64.b64decode(self.key_id).hex()

    def holds(self, signature: bytes, data: bytes) -> bool:
        """The signature over the data was made with this key."""
        try:
            if isinstance(self._key, Ed25519PublicKey):
                self._key.verify(signature, data)
            else:
                self._key.verify(signature, data, ec.ECDSA(hashes.SHA256()))
        except InvalidSignature:
            return False
        return True

    def to_pem(self) -> bytes:
        """The file form."""
        return key_files.public_pem(self._key)


@dataclass(frozen=True)
class SigningKey:
    """A key that can sign."""

    public: PublicKey
    _key: ec.EllipticCurvePrivateKey | Ed25519PrivateKey

    @property
    def key_id(self) -> str:
        """The id of its public half."""
        return self.public.key_id

    def sign(self, data: bytes) -> bytes:
        """A signature: DER for ECDSA, 64 bytes for Ed25519."""
        if isinstance(self._key, Ed25519PrivateKey):
            return self._key.sign(data)
        return self._key.sign(data, ec.ECDSA(hashes.SHA256()))

    @classmethod
    def generate(cls, key_type: str = ECDSA_P256) -> SigningKey:
        """A fresh key."""
        if key_type == ED25519:
            return cls.of(Ed25519PrivateKey.generate())
        return cls.of(ec.generate_private_key(ec.SECP256R1()))

    @classmethod
    def of(cls, key: ec.EllipticCurvePrivateKey | Ed25519PrivateKey) -> SigningKey:
        """Wrap a loaded key."""
        return cls(PublicKey.of(key.public_key()), key)

    def to_pem(self, passphrase: bytes | None = None) -> bytes:
        """The file form, PKCS#8, encrypted where there is a passphrase."""
        return key_files.private_pem(self._key, passphrase)


def key_id(key: PublicKey | SigningKey) -> str:
    """base64(SHA-256(DER SubjectPublicKeyInfo))."""
    return key.key_id


def make_node_key(directory: Path | str = "/etc/vgpu") -> SigningKey:
    """Make node.key and node.pub; without a passphrase, because nobody is there to type it when a container freezes."""
    directory = Path(directory)
    key = SigningKey.generate()
    key_files.write_pair(directory / NODE_KEY, key.to_pem(), directory / NODE_PUB, key.public.to_pem())
    return key


def load_signing_key(path: Path | str = "/etc/vgpu/node.key", passphrase: Passphrase | None = None) -> SigningKey:
    """Load a private key that nobody else can read; `passphrase` is asked only where the key is encrypted."""
    key = key_files.read_private(Path(path), passphrase)
    if isinstance(key, Ed25519PrivateKey) or (
        isinstance(key, ec.EllipticCurvePrivateKey) and isinstance(key.curve, ec.SECP256R1)
    ):
        return SigningKey.of(key)
    raise BadConfiguration(path=path, what="is not an ECDSA P-256 or Ed25519 key", remedy=key_files.REMEDY)


def load_public_key(path: Path | str) -> PublicKey:
    """Load a public key."""
    return parse_public_key(key_files.read_public(Path(path)), where=path)


def parse_public_key(data: bytes, *, where: Path | str) -> PublicKey:
    """Parse a PEM public key."""
    key = key_files.parse_public(data, where=where)
    if isinstance(key, Ed25519PublicKey) or (
        isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP256R1)
    ):
        return PublicKey.of(key)
    raise BadConfiguration(path=where, what="is not an ECDSA P-256 or Ed25519 key", remedy=key_files.REMEDY)
