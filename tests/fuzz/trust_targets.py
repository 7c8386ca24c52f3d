"""Fuzz targets: what signatures and encrypted blobs in a registry are made of."""

import base64
from datetime import UTC, datetime
from pathlib import Path

from image_format import canonical_json
from image_format.encryption import DecryptingWriter, ImageCipher
from image_format.encryption.frame_cipher import plain_size_of
from image_format.encryption.recipients import Identity, WrappedKey
from image_format.fields import Fields
from image_format.manifest import ARTIFACT_TYPE, INDEX_TYPE, MANIFEST_TYPE, RECORD_TYPE
from image_format.trust import referrer_signatures, remote_documents
from image_format.trust.dsse import Envelope
from image_format.trust.image_statement import ImageStatement
from image_format.trust.policy import Policy, TrustedKey
from image_format.trust.simple_signing import Payload
from tests.format.make_vectors import TRUSTED
from tests.fuzz.target import Target, as_bytes
from vgpu_errors import VgpuError

DIGEST = "sha256:" + "ab" * 32
NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)
POLICY = Policy(keys={TRUSTED.key_id: TrustedKey("fuzz", Path("fuzz.pub"), TRUSTED.public)})
STATEMENT = ImageStatement(DIGEST, "2026-11-29T12:00:00Z", "2027-11-29T12:00:00Z").to_bytes()
BUNDLE = referrer_signatures.image_bundle(DIGEST, TRUSTED, now=NOW)
PAYLOAD = Payload("r.example/a:1", DIGEST, "2027-11-29T12:00:00Z", 1).to_bytes()
IMAGE = ImageCipher(bytes(16), bytes(range(32)))
NAME = "vgpu-record.json"
BLOB = IMAGE.blob(NAME).header + IMAGE.blob(NAME).seal(b"a small record", 0, is_last=True)
IDENTITY = Identity.generate()
WRAPPED = IDENTITY.public.wrap(bytes(32), image_id=bytes(16))
CHECKPOINT = as_bytes(
    {
        "schemaVersion": 2, "mediaType": MANIFEST_TYPE, "artifactType": ARTIFACT_TYPE,
        "config": {"mediaType": RECORD_TYPE, "digest": DIGEST, "size": 2},
        "layers": [{"mediaType": kind, "digest": DIGEST, "size": 2}
                   for kind in (INDEX_TYPE, *list(remote_documents.NAMES)[2:], "other/type")],
    }
)  # fmt: skip


class Blobs:
    """A registry that has one small blob."""

    def get_blob(self, digest, max_bytes):
        return b"{}"


def judged_bundle(data):
    """Whatever a bundle says, it is believed only where it speaks of this digest and the signature holds."""
    found = referrer_signatures.judge_bundle(data, DIGEST, POLICY, where="x", now=NOW)
    if found.state == referrer_signatures.TRUSTED:
        doc = canonical_json.read_object(data, where="x")
        envelope = Envelope.from_json(Fields(doc["dsseEnvelope"], "x"))
        signed = canonical_json.read_object(envelope.payload, where="x")
        assert TRUSTED.public.holds(envelope.signature, envelope.signed_bytes())
        assert signed["subject"] == [{"digest": {"sha256": "ab" * 32}}]
    return found


def judged_payload(data):
    found = referrer_signatures.judge_payload(data, SIGNATURE, DIGEST, POLICY, where="x", now=NOW)
    assert (found.state == referrer_signatures.TRUSTED) == (data == PAYLOAD)
    return found


def decrypted(data):
    """A blob that was changed gives an error, or nothing was changed."""
    plain = bytearray()
    writer = DecryptingWriter(IMAGE.blob(NAME), plain.extend, len(data))
    for at in range(0, len(data), 7):
        writer.write(data[at : at + 7])
    writer.close()
    assert (data, bytes(plain)) == (BLOB, b"a small record")


def unwrapped(doc):
    wrapped = WrappedKey.from_json(Fields(doc, "x"))
    return IDENTITY.unwrap(wrapped, image_id=bytes(16), where="x")


SIGNATURE = TRUSTED.sign(PAYLOAD)
ENVELOPE = {"payload": base64.b64encode(STATEMENT).decode(), "payloadType": "t", "signatures": [{"sig": "eA=="}]}
TRUST = {
    "bundle of an image": Target(judged_bundle, BUNDLE, "json bytes", ()),
    "simple signing payload": Target(judged_payload, PAYLOAD, "json bytes", ()),
    "checkpoint in a registry": Target(lambda data: remote_documents.read(Blobs(), data, where="x"), CHECKPOINT, "json bytes"),
    "DSSE envelope": Target(lambda doc: Envelope.from_json(Fields(doc, "x")), ENVELOPE, "object"),
    "encrypted blob": Target(decrypted, BLOB),
    "size of an encrypted blob": Target(
        lambda text: plain_size_of(int(text), where="x"), str(len(BLOB)), "text", (VgpuError, ValueError)
    ),
    "wrapped key": Target(unwrapped, WRAPPED.to_json(), "object"),
}  # fmt: skip
