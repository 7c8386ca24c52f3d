"""Signing keys: both kinds, with passphrases and without; what is no key for us is refused by name."""

import errno
import os

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed448, rsa, x25519

from image_format.trust import key_files
from image_format.trust.keys import (
    KEY_TYPES,
    SigningKey,
    load_public_key,
    load_signing_key,
    make_node_key,
    parse_public_key,
)
from vgpu_errors import BadConfiguration

every_type = pytest.mark.parametrize("kind", KEY_TYPES)


@every_type
def test_a_signature_holds_over_its_bytes_with_its_key_alone(kind):
    key, other = SigningKey.generate(kind), SigningKey.generate(kind)
    signature = key.sign(b"data")
    assert key.public.holds(signature, b"data")
    assert not key.public.holds(signature, b"Data")
    assert not other.public.holds(signature, b"data")
    assert not key.public.holds(signature[:-1], b"data")
    assert not key.public.holds(b"", b"data")
    assert key.public.type == kind


@pytest.mark.parametrize("pair", [KEY_TYPES, KEY_TYPES[::-1]])
def test_a_signature_of_the_other_kind_does_not_hold(pair):
    first, second = map(SigningKey.generate, pair)
    assert not second.public.holds(first.sign(b"data"), b"data")


@every_type
@pytest.mark.parametrize("passphrase", [None, b"secret", "pässwörd".encode(), b"x" * 1023])
def test_a_key_comes_back_from_its_file(tmp_path, kind, passphrase):
    key = SigningKey.generate(kind)
    key_files.write_pair(tmp_path / "a.key", key.to_pem(passphrase), tmp_path / "a.pub", key.public.to_pem())
    assert (tmp_path / "a.key").stat().st_mode & 0o777 == 0o600
    again = load_signing_key(tmp_path / "a.key", lambda: passphrase)
    assert load_public_key(tmp_path / "a.pub").holds(again.sign(b"x"), b"x")
    assert again.key_id == key.key_id == load_public_key(tmp_path / "a.pub").key_id


def test_the_fingerprint_is_what_openssl_says(tmp_path):
    import subprocess

    key = SigningKey.generate()
    der = subprocess.run(
        ["openssl", "pkey", "-pubin", "-outform", "DER"], input=key.public.to_pem(), capture_output=True, check=True
    ).stdout
    import hashlib

    assert key.public.fingerprint == hashlib.sha256(der).hexdigest()


def test_a_passphrase_is_asked_only_where_one_is_needed(tmp_path):
    key_files.write_new(tmp_path / "k", SigningKey.generate().to_pem(), 0o600)
    load_signing_key(tmp_path / "k", lambda: pytest.fail("asked"))


def test_an_encrypted_key_without_its_passphrase_is_refused(tmp_path):
    key_files.write_new(tmp_path / "k", SigningKey.generate().to_pem(b"secret"), 0o600)
    with pytest.raises(BadConfiguration, match="no passphrase was given"):
        load_signing_key(tmp_path / "k")
    with pytest.raises(BadConfiguration, match="does not open"):
        load_signing_key(tmp_path / "k", lambda: b"wrong")
    with pytest.raises(BadConfiguration, match="0 bytes"):
        load_signing_key(tmp_path / "k", lambda: b"")


@pytest.mark.parametrize("passphrase", [b"", b"x" * 1024])
def test_a_passphrase_that_protects_nothing_or_is_endless_is_refused(passphrase):
    with pytest.raises(BadConfiguration):
        SigningKey.generate().to_pem(passphrase)


OTHER_KEYS = {
    "RSA": lambda: rsa.generate_private_key(65537, 2048),
    "P-384": lambda: ec.generate_private_key(ec.SECP384R1()),
    "Ed448": ed448.Ed448PrivateKey.generate,
    "X25519": x25519.X25519PrivateKey.generate,
}


@pytest.mark.parametrize("kind", OTHER_KEYS)
def test_another_kind_of_key_is_refused(tmp_path, kind):
    key = OTHER_KEYS[kind]()
    key_files.write_new(tmp_path / "k", key_files.private_pem(key), 0o600)
    with pytest.raises(BadConfiguration, match="Ed25519"):
        load_signing_key(tmp_path / "k")
    with pytest.raises(BadConfiguration, match="Ed25519"):
        parse_public_key(key_files.public_pem(key.public_key()), where="k.pub")


def test_a_key_that_could_not_be_written_whole_leaves_nothing(tmp_path, monkeypatch):
    def no_space(_descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="No space"):
        key_files.write_pair(tmp_path / "k", SigningKey.generate().to_pem(), tmp_path / "k.pub", b"x")
    assert list(tmp_path.iterdir()) == []


def test_no_remedy_for_a_key_file_tells_to_remove_it(tmp_path):
    (tmp_path / "k").write_bytes(b"x")
    for path in (tmp_path / "k", tmp_path / "none"):
        for load in (load_signing_key, load_public_key):
            with pytest.raises(BadConfiguration) as found:
                load(path)
            assert "remove" not in found.value.remedy


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_a_private_key_that_others_can_read_is_refused(tmp_path, mode):
    path = tmp_path / "k"
    key_files.write_new(path, SigningKey.generate().to_pem(), 0o600)
    path.chmod(mode)
    with pytest.raises(BadConfiguration, match=f"{mode:04o}"):
        load_signing_key(path)


@pytest.mark.parametrize(
    "data", [b"", b"x", b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n", b"\xff" * 99]
)
def test_what_is_no_key_is_refused(tmp_path, data):
    (tmp_path / "k").write_bytes(data)
    (tmp_path / "k").chmod(0o600)
    for load in (load_signing_key, load_public_key):
        with pytest.raises(BadConfiguration):
            load(tmp_path / "k")


def test_a_key_is_never_replaced_and_no_half_is_left_alone(tmp_path):
    make_node_key(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(BadConfiguration, match="exists already"):
        make_node_key(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    (tmp_path / "node.key").unlink()
    with pytest.raises(BadConfiguration, match=r"node\.pub"):
        make_node_key(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["node.pub"]


def test_a_key_is_not_written_through_a_link(tmp_path):
    (tmp_path / "target").write_text("x")
    (tmp_path / "node.key").symlink_to(tmp_path / "target")
    with pytest.raises(BadConfiguration):
        make_node_key(tmp_path)
    assert (tmp_path / "target").read_text() == "x"
    assert os.listdir(tmp_path) in (["target", "node.key"], ["node.key", "target"])
