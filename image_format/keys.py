"""Signing keys: ECDSA P-256 with SHA-256, PEM files (spec/signature.md, section 1).

A key's id is base64 of the SHA-256 of its DER public key, as cosign writes it. Never prints or copies a private key.
`vgpu setup` makes the node's key, sealing signs with it, policy loads the trusted ones.
"""

from __future__ import annotations

import base64
import hashlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from vgpu_errors import BadConfiguration

NODE_KEY = "node.key"
NODE_PUB = "node.pub"
MAX_KEY_BYTES = 16 << 10


@dataclass(frozen=True)
class PublicKey:
    """A key that can verify."""

    key_id: str
    _key: ec.EllipticCurvePublicKey

    @classmethod
    def of(cls, key: ec.EllipticCurvePublicKey) -> PublicKey:
        """Wrap a loaded key."""
        der = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
        return cls(base64.b64encode(hashlib.sha256(der).digest()).decode(), key)

    def holds(self, signature: bytes, data: bytes) -> bool:
        """The signature over the data was made with this key."""
        try:
            self._key.verify(signature, data, ec.ECDSA(hashes.SHA256()))
        except InvalidSignature:
            return False
        return True

    def to_pem(self) -> bytes:
        """The file form."""
        return self._key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


@dataclass(frozen=True)
class SigningKey:
    """A key that can sign."""

    public: PublicKey
    _key: ec.EllipticCurvePrivateKey

    @property
    def key_id(self) -> str:
        """The id of its public half."""
        return self.public.key_id

    def sign(self, data: bytes) -> bytes:
        """A DER signature."""
        return self._key.sign(data, ec.ECDSA(hashes.SHA256()))

    @classmethod
    def generate(cls) -> SigningKey:
        """A fresh key."""
        return cls.of(ec.generate_private_key(ec.SECP256R1()))

    @classmethod
    def of(cls, key: ec.EllipticCurvePrivateKey) -> SigningKey:
        """Wrap a loaded key."""
        return cls(PublicKey.of(key.public_key()), key)

    def to_pem(self) -> bytes:
        """The file form, unencrypted PKCS8."""
        return self._key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )


def key_id(key: PublicKey | SigningKey) -> str:
    """base64(SHA-256(DER SubjectPublicKeyInfo))."""
    return key.key_id


def make_node_key(directory: Path | str = "/etc/vgpu") -> SigningKey:
    """Make node.key (0600) and node.pub (0644); refuses to replace a key, because old checkpoints need it."""
    directory = Path(directory)
    key = SigningKey.generate()
    _write_new(directory / NODE_KEY, key.to_pem(), 0o600)
    try:
        _write_new(directory / NODE_PUB, key.public.to_pem(), 0o644)
    except BaseException:
        (directory / NODE_KEY).unlink()
        raise
    return key


def load_signing_key(path: Path | str = "/etc/vgpu/node.key") -> SigningKey:
    """Load a private key that nobody else can read."""
    path = Path(path)
    data = _read(path, is_private=True)
    try:
        key = serialization.load_pem_private_key(data, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise BadConfiguration(path=path, what="is not an unencrypted PEM private key") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        raise BadConfiguration(path=path, what="is not an ECDSA P-256 key")
    return SigningKey.of(key)


def load_public_key(path: Path | str) -> PublicKey:
    """Load a public key."""
    path = Path(path)
    return parse_public_key(_read(path, is_private=False), where=path)


def parse_public_key(data: bytes, *, where: Path | str) -> PublicKey:
    """Parse a PEM public key."""
    try:
        key = serialization.load_pem_public_key(data)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise BadConfiguration(path=where, what="is not a PEM public key") from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise BadConfiguration(path=where, what="is not an ECDSA P-256 key")
    return PublicKey.of(key)


def _read(path: Path, *, is_private: bool) -> bytes:
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(MAX_KEY_BYTES + 1)
    except OSError as error:
        raise BadConfiguration(path=path, what=f"cannot be read ({error.strerror})") from error
    if is_private and mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise BadConfiguration(path=path, what=f"has mode {stat.S_IMODE(mode):04o}; a private key must be 0600")
    if len(data) > MAX_KEY_BYTES:
        raise BadConfiguration(path=path, what="is too large for a key")
    return data


def _write_new(path: Path, data: bytes, mode: int) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    except FileExistsError as error:
        raise BadConfiguration(path=path, what="exists already; a node keeps its key") from error
    except OSError as error:
        raise BadConfiguration(path=path, what=f"cannot be made ({error.strerror})") from error
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(descriptor, mode)
        file.write(data)
        file.flush()
        os.fsync(descriptor)
