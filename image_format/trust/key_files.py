"""Reads and makes key files: PEM, a private one for its owner alone (spec/signature.md, section 1).

Refuses a private key that others can read, a file that is too large for a key, and to replace a file.
`keys` and `recipients` parse what this reads. Never prints what it read.
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization

from vgpu_errors import BadConfiguration, NeedsRoot

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes, PublicKeyTypes

    Passphrase = Callable[[], bytes]

MAX_KEY_BYTES = 16 << 10
REMEDY = "Name another file, or make one: 'vgpu keys new' makes a key, 'vgpu setup' the node's own."
# OpenSSL takes no more.
MAX_PASSPHRASE_BYTES = 1023


def read_private(path: Path, passphrase: Passphrase | None = None) -> PrivateKeyTypes:
    """A PEM private key that nobody else can read; `passphrase` is asked only where the key is encrypted."""
    return parse_private(_read(path, is_private=True), where=path, passphrase=passphrase)


def read_public(path: Path) -> bytes:
    """The bytes of a public key's file."""
    return _read(path, is_private=False)


def parse_private(data: bytes, *, where: Path | str, passphrase: Passphrase | None = None) -> PrivateKeyTypes:
    """Parse a PEM private key."""
    try:
        return serialization.load_pem_private_key(data, password=None)
    except TypeError:  # the key is encrypted
        return _decrypt(data, where, passphrase)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise BadConfiguration(path=where, what="is not a PEM private key (PKCS#8)", remedy=REMEDY) from error


def parse_public(data: bytes, *, where: Path | str) -> PublicKeyTypes:
    """Parse a PEM public key."""
    try:
        return serialization.load_pem_public_key(data)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise BadConfiguration(path=where, what="is not a PEM public key", remedy=REMEDY) from error


def private_pem(key: PrivateKeyTypes, passphrase: bytes | None = None) -> bytes:
    """The file form of a private key: PKCS#8, encrypted where there is a passphrase."""
    check_passphrase(passphrase)
    protection = (
        serialization.NoEncryption() if passphrase is None else serialization.BestAvailableEncryption(passphrase)
    )
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, protection)


def public_der(key: PublicKeyTypes) -> bytes:
    """The bytes whose digest is a key's id."""
    return key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


def public_pem(key: PublicKeyTypes) -> bytes:
    """The file form of a public key."""
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def check_passphrase(passphrase: bytes | None) -> None:
    """Refuse one that protects nothing, and one that no tool would take back."""
    if passphrase is not None and not 1 <= len(passphrase) <= MAX_PASSPHRASE_BYTES:
        raise BadConfiguration(
            path="the passphrase",
            what=f"has {len(passphrase)} bytes, it must have 1 to {MAX_PASSPHRASE_BYTES}",
            remedy="Give another passphrase.",
        )


def write_pair(private: Path, private_data: bytes, public: Path, public_data: bytes) -> None:
    """Write both halves, 0600 and 0644; refuses to replace a file, and leaves none alone."""
    write_new(private, private_data, 0o600)
    try:
        write_new(public, public_data, 0o644)
    except BaseException:
        private.unlink()
        raise


def write_new(path: Path, data: bytes, mode: int) -> None:
    """Write a file that must not be there yet; old checkpoints need old keys."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    except FileExistsError as error:
        remedy = "Choose another path, or move the old key away; what it signed needs its public half."
        raise BadConfiguration(path=path, what="exists already; a key is never replaced", remedy=remedy) from error
    except PermissionError as error:
        raise NeedsRoot(what=f"writing {path}") from error
    except OSError as error:
        remedy = "Give a path in a folder that is there and can be written to."
        raise BadConfiguration(path=path, what=f"cannot be made ({error.strerror})", remedy=remedy) from error
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, mode)
            file.write(data)
            file.flush()
            os.fsync(descriptor)
    except BaseException:  # half a key would stand in the way of a whole one
        path.unlink()
        raise


def _read(path: Path, *, is_private: bool) -> bytes:
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(MAX_KEY_BYTES + 1)
    except PermissionError as error:
        raise NeedsRoot(what=f"reading {path}") from error
    except OSError as error:
        raise BadConfiguration(path=path, what=f"cannot be read ({error.strerror})", remedy=REMEDY) from error
    if is_private and mode & (stat.S_IRWXG | stat.S_IRWXO):
        what = f"has mode {stat.S_IMODE(mode):04o}; a private key must be 0600"
        remedy = f"Run 'chmod 600 {path}'; if others may have read it, make a new key."
        raise BadConfiguration(path=path, what=what, remedy=remedy)
    if len(data) > MAX_KEY_BYTES:
        raise BadConfiguration(path=path, what="is too large for a key", remedy=REMEDY)
    return data


def _decrypt(data: bytes, where: Path | str, passphrase: Passphrase | None) -> PrivateKeyTypes:
    if passphrase is None:
        remedy = "Give its passphrase with --passphrase-file or --passphrase-env, or answer on a terminal."
        raise BadConfiguration(path=where, what="is encrypted, and no passphrase was given", remedy=remedy)
    secret = passphrase()
    check_passphrase(secret)
    try:
        return serialization.load_pem_private_key(data, password=secret)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        remedy = "Give the passphrase that the key was made with."
        raise BadConfiguration(path=where, what="does not open with this passphrase", remedy=remedy) from error
