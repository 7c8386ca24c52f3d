"""Signing a sealed directory again: an expiry, another key, the same manifest; nothing that does not verify is signed."""

import json
import os
from dataclasses import replace

import pytest

from image_format import canonical_json
from image_format.file_names import SIGNATURE_NAME
from image_format.sealing import seal, sign
from image_format.trust import resigning
from image_format.trust.bundle import Bundle
from image_format.trust.dsse import Envelope, pre_authentication_encoding
from image_format.trust.keys import SigningKey, load_signing_key
from image_format.trust.policy import ALLOW_UNSIGNED, Policy, TrustedKey
from image_format.trust.resigning import resign
from image_format.trust.statement import PAYLOAD_TYPE, Statement
from image_format.verifying import verify_directory
from vgpu_errors import BadSignature, ContentMismatch, ImageError, NoSuchImage, Unsigned, UntrustedKey

EXPIRES = "2030-01-01T00:00:00Z"


@pytest.fixture
def key(node):
    return load_signing_key(node / "node.key")


@pytest.fixture
def sealed(image, record, key):
    seal(image, record, key)
    return image


def statement_of(image):
    return Statement.from_bytes(Bundle.from_bytes((image / SIGNATURE_NAME).read_bytes()).envelope.payload)


def files_of(image):
    return {path.name: path.read_bytes() for path in image.iterdir()}


def test_a_sealed_directory_gets_an_expiry_and_changes_in_nothing_else(sealed, policy, key):
    before, verified = files_of(sealed), verify_directory(sealed, policy)
    done = resign(sealed, policy, key, expires=EXPIRES)
    assert (done.manifest_digest, done.former_key_id) == (verified.manifest_digest, key.key_id)
    again = verify_directory(sealed, policy)
    assert again.signed.expires == EXPIRES
    assert verified.signed.expires is None
    assert again.manifest_digest == verified.manifest_digest
    after = files_of(sealed)
    assert {name for name in after if after[name] != before[name]} == {SIGNATURE_NAME}
    assert after.keys() == before.keys()
    assert (sealed / SIGNATURE_NAME).stat().st_mode & 0o777 == 0o600
    resign(sealed, policy, key)
    assert verify_directory(sealed, policy).signed.expires is None


def test_another_key_takes_the_place_of_a_trusted_one(sealed, policy):
    other = SigningKey.generate("ed25519")
    resign(sealed, policy, other)
    with pytest.raises(UntrustedKey):
        verify_directory(sealed, policy)
    both = replace(policy, keys={**policy.keys, other.key_id: TrustedKey("other", sealed, other.public)})
    assert verify_directory(sealed, both).key_name == "other"


def test_what_a_later_version_put_into_the_predicate_stays(sealed, policy, key):
    doc = json.loads(statement_of(sealed).to_bytes())
    doc["predicate"]["site"] = {"rack": 7}
    payload = canonical_json.write(doc)
    signature = key.sign(pre_authentication_encoding(PAYLOAD_TYPE, payload))
    (sealed / SIGNATURE_NAME).write_bytes(Bundle(key.key_id, Envelope(PAYLOAD_TYPE, payload, signature)).to_bytes())
    resign(sealed, policy, key, expires=EXPIRES)
    assert statement_of(sealed).unknown == {"site": {"rack": 7}}
    assert statement_of(sealed).expires == EXPIRES


def break_signature(image):
    data = bytearray((image / SIGNATURE_NAME).read_bytes())
    at = data.index(b'"sig":"') + 20
    data[at] ^= 1
    (image / SIGNATURE_NAME).write_bytes(data)


BROKEN = {
    "a changed file": (lambda image: (image / "pages-1.img").write_bytes(b"x" * 12001), ImageError),
    "a file more": (lambda image: (image / "more.img").write_bytes(b"x"), ImageError),
    "a broken signature": (break_signature, BadSignature),
    "no signature": (lambda image: (image / SIGNATURE_NAME).unlink(), Unsigned),
    "a strange key": (
        lambda image: (image / SIGNATURE_NAME).write_bytes(
            sign(statement_of(image).to_bytes(), SigningKey.generate())
        ),
        UntrustedKey,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_what_does_not_verify_is_not_signed_and_stays_as_it_is(sealed, policy, key, case):
    edit, error = BROKEN[case]
    edit(sealed)
    before = files_of(sealed)
    with pytest.raises(error):
        resign(sealed, policy, key)
    assert files_of(sealed) == before


def test_an_unsigned_directory_is_signed_where_the_policy_accepts_it(sealed, policy, key):
    (sealed / SIGNATURE_NAME).unlink()
    lenient = Policy(default=ALLOW_UNSIGNED, keys=policy.keys)
    done = resign(sealed, lenient, key, expires=EXPIRES)
    assert done.former_key_id is None
    assert verify_directory(sealed, policy).signed.expires == EXPIRES


def test_a_directory_without_documents_is_not_signed(image, policy, key):
    lenient = Policy(default=ALLOW_UNSIGNED, keys=policy.keys)
    with pytest.raises(Unsigned, match="no signature"):
        resign(image, lenient, key)
    with pytest.raises(NoSuchImage):
        resign(image / "absent", policy, key)


def test_a_cut_while_signing_leaves_the_old_signature(sealed, policy, key, monkeypatch):
    before = files_of(sealed)

    def cut(*_, **__):
        raise OSError(28, "No space left on device")

    for step in ("fsync", "replace"):
        monkeypatch.setattr(resigning.os, step, cut)
        with pytest.raises(ImageError, match="cannot be written"):
            resign(sealed, policy, key, expires=EXPIRES)
        monkeypatch.undo()
        assert files_of(sealed)[SIGNATURE_NAME] == before[SIGNATURE_NAME]
        for left in sealed.glob(".vgpu-partial-*"):
            left.unlink()
        assert verify_directory(sealed, policy).signed.expires is None


def test_a_signature_that_is_replaced_meanwhile_is_not_carried_over(sealed, policy, key, monkeypatch):
    other = replace(statement_of(sealed), manifest_sha256="00" * 32)
    real = resigning.verify_directory

    def verify(*arguments, **options):
        found = real(*arguments, **options)
        (sealed / SIGNATURE_NAME).write_bytes(sign(other.to_bytes(), key))
        return found

    monkeypatch.setattr(resigning, "verify_directory", verify)
    with pytest.raises(ContentMismatch):
        resign(sealed, policy, key)
    assert os.path.exists(sealed / SIGNATURE_NAME)
