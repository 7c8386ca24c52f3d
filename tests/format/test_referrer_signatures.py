"""Signatures of images in a registry: both forms from one key, with and without the referrers API; what is not believed."""

import base64
import hashlib
import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from image_format import canonical_json, seal_documents
from image_format.encryption import ENCRYPTED_RECORD_TYPE, EncryptedRecord, Identity
from image_format.manifest import ARTIFACT_TYPE, INDEX_TYPE, MANIFEST_TYPE, RECORD_TYPE
from image_format.registry import Registry
from image_format.trust import referrer_signatures, remote_documents, simple_signing
from image_format.trust.bundle import BUNDLE_TYPE, Bundle
from image_format.trust.dsse import Envelope, pre_authentication_encoding
from image_format.trust.freshness import time_text
from image_format.trust.image_statement import COSIGN_SIGN, ImageStatement
from image_format.trust.keys import SigningKey
from image_format.trust.policy import ALLOW_UNSIGNED, Policy, TrustedKey
from image_format.trust.referrer_signatures import sign_image, verify_image
from image_format.trust.remote_documents import SEALED_MANIFEST_TYPE
from image_format.trust.simple_signing import Payload, SignatureLayer, signature_tag
from image_format.trust.statement import PAYLOAD_TYPE
from tests.format.make_vectors import TRUSTED, Sealed, base_files
from tests.simulators.registry import RegistrySimulator, Settings
from vgpu_errors import (
    BadSignature,
    Expired,
    ImageError,
    LimitExceeded,
    NotInRegistry,
    RegistryContentWrong,
    UnexpectedEntry,
    Unsigned,
    UntrustedKey,
)

NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)
LATER = "2026-12-29T12:00:00Z"
OURS, OTHER, ED = SigningKey.generate(), SigningKey.generate(), SigningKey.generate("ed25519")
POLICY = Policy(
    keys={key.key_id: TrustedKey(name, Path(name), key.public) for name, key in (("ours", OURS), ("ed", ED))}
)
IMAGE = canonical_json.write({"schemaVersion": 2, "mediaType": MANIFEST_TYPE, "layers": []})
DIGEST = "sha256:" + hashlib.sha256(IMAGE).hexdigest()


@pytest.fixture(params=[True, False], ids=["referrers API", "fallback tag"])
def simulator(tmp_path, request):
    with RegistrySimulator(tmp_path / "registry", Settings(referrers=request.param)) as found:
        yield found


@pytest.fixture
def registry(simulator):
    with Registry(f"{simulator.address}/team/train:1", plain_http=True) as client:
        client.put_manifest(IMAGE, MANIFEST_TYPE)
        yield client


def sign(registry, key=OURS, **options):
    return sign_image(registry, key, reference="r.example/team/train:1", now=NOW, **options)


def verify(registry, policy=POLICY, now=NOW, **options):
    return verify_image(registry, policy, where="x", now=now, **options)


def states(image):
    return sorted((found.form, found.state, found.key_name) for found in image.signatures)


@pytest.mark.parametrize(("key", "name"), [(OURS, "ours"), (ED, "ed")], ids=["ecdsa", "ed25519"])
def test_one_key_signs_in_both_forms_and_both_are_believed(registry, key, name):
    assert sign(registry, key) == (DIGEST,)
    image = verify(registry)
    assert states(image) == [("bundle", "trusted", name), ("simple signing", "trusted", name)]
    assert (image.digest, image.manifest, image.trusted.key_id) == (DIGEST, IMAGE, key.key_id)


def test_what_is_written_is_what_other_tools_look_for(registry):
    sign(registry, expires=LATER)
    (descriptor,) = registry.referrers(DIGEST, BUNDLE_TYPE)
    manifest = json.loads(registry.get_manifest(descriptor["digest"]).data)
    assert manifest["artifactType"] == BUNDLE_TYPE == manifest["layers"][0]["mediaType"]
    assert manifest["subject"] == {"mediaType": MANIFEST_TYPE, "digest": DIGEST, "size": len(IMAGE)}
    assert manifest["config"]["mediaType"] == "application/vnd.oci.empty.v1+json"
    assert registry.get_blob(manifest["config"]["digest"], 10) == b"{}"
    assert manifest["annotations"]["dev.sigstore.bundle.content"] == "dsse-envelope"
    assert manifest["annotations"]["dev.sigstore.bundle.predicateType"] == "https://vgpu-snapshot.dev/image/v1"
    legacy = json.loads(registry.get_manifest(signature_tag(DIGEST)).data)
    (layer,) = legacy["layers"]
    payload = registry.get_blob(layer["digest"], 1 << 16)
    assert OURS.public.holds(base64.b64decode(layer["annotations"]["dev.cosignproject.cosign/signature"]), payload)
    assert json.loads(payload)["critical"] == {
        "identity": {"docker-reference": "r.example/team/train:1"},
        "image": {"docker-manifest-digest": DIGEST},
        "type": "cosign container image signature",
    }
    config = json.loads(registry.get_blob(legacy["config"]["digest"], 1 << 16))
    assert config["rootfs"]["diff_ids"] == [layer["digest"]]


def test_signatures_of_several_keys_stand_side_by_side_and_ones_own_is_renewed(registry):
    sign(registry, OTHER)
    sign(registry)
    sign(registry, expires=LATER)
    layers = simple_signing.read_manifest(registry.get_manifest(signature_tag(DIGEST)).data, where="x")
    assert len(layers) == 2
    found = states(verify(registry))
    assert found.count(("simple signing", "trusted", "ours")) == 1
    assert found.count(("simple signing", "unknown key", None)) == 1
    assert found.count(("bundle", "trusted", "ours")) == 2


def test_an_unsigned_image_is_refused_and_accepted_where_the_policy_says_so(registry):
    with pytest.raises(Unsigned):
        verify(registry)
    image = verify(registry, replace(POLICY, default=ALLOW_UNSIGNED))
    assert (image.trusted, image.signatures) == (None, ())


def test_a_strange_signature_is_refused_even_where_unsigned_is_accepted(registry):
    sign(registry, OTHER)
    for default in ("refuse-untrusted", ALLOW_UNSIGNED):
        with pytest.raises(UntrustedKey) as caught:
            verify(registry, replace(POLICY, default=default))
        assert OTHER.key_id in caught.value.message


def test_an_expired_signature_counts_no_longer(registry):
    sign(registry, expires=LATER)
    assert verify(registry).trusted.expires == LATER
    with pytest.raises(Expired, match=LATER):
        verify(registry, now=NOW + timedelta(days=31))
    sign(registry)
    assert verify(registry, now=NOW + timedelta(days=31)).trusted is not None


def test_an_image_that_is_not_there_is_told(registry):
    with pytest.raises(NotInRegistry):
        verify(registry, target="2")
    with pytest.raises(NotInRegistry):
        sign(registry, target="2")


def test_another_image_under_the_same_tag_is_not_signed_by_the_old_signatures(registry):
    sign(registry)
    registry.put_manifest(IMAGE.replace(b'"layers":[]', b'"layers": []'), MANIFEST_TYPE)
    with pytest.raises(Unsigned):
        verify(registry)


def put_bundle(registry, data, *, artifact_type=BUNDLE_TYPE, layer_type=BUNDLE_TYPE):
    layers = [referrer_signatures._upload(registry, data, layer_type)]
    config = referrer_signatures._upload(registry, b"{}", "application/vnd.oci.empty.v1+json")
    manifest = {"schemaVersion": 2, "mediaType": MANIFEST_TYPE, "config": config, "layers": layers}
    subject = {"mediaType": MANIFEST_TYPE, "digest": DIGEST, "size": len(IMAGE)}
    registry.add_referrer(subject, {**manifest, "artifactType": artifact_type})


def bundle(payload, *, key=OURS, payload_type=PAYLOAD_TYPE, hint=None):
    signature = key.sign(pre_authentication_encoding(payload_type, payload))
    return Bundle(hint or key.key_id, Envelope(payload_type, payload, signature)).to_bytes()


def statement(digest=DIGEST, **changes):
    doc = json.loads(ImageStatement(digest, time_text(NOW)).to_bytes())
    return canonical_json.write(doc | changes)


OTHER_DIGEST = {"subject": [{"digest": {"sha256": "00" * 32}}]}
BAD_BUNDLES = {
    "of another image": bundle(statement(**OTHER_DIGEST)),
    "of no image": bundle(statement(subject=[])),
    "an attestation of a kind that vouches for nothing": bundle(statement(predicateType="https://slsa.dev/provenance/v1")),
    "a later version of the predicate": bundle(statement(predicateType="https://vgpu-snapshot.dev/image/v2")),
    "a sealed checkpoint's statement": bundle(statement(predicateType="https://vgpu-snapshot.dev/checkpoint/v1")),
    "of another statement type": bundle(statement(_type="https://in-toto.io/Statement/v0.1")),
    "without a time": bundle(statement(predicate={})),
    "with an expiry that cannot be read": bundle(statement(predicate={"signed": "2026-11-29T12:00:00Z", "expires": None})),
    "with another payload type": bundle(statement(), payload_type="text/plain"),
    "signed by another key under our hint": bundle(statement(), key=OTHER, hint=OURS.key_id),
    "no bundle at all": b"not JSON",
    "an empty bundle": b"{}",
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_BUNDLES)
def test_a_bundle_that_does_not_say_so_is_not_believed(registry, case):
    put_bundle(registry, BAD_BUNDLES[case])
    with pytest.raises(BadSignature):
        verify(registry)
    sign(registry)  # it does not stand in the way of one that does
    assert verify(registry).trusted is not None


def test_what_cosign_signs_is_believed(registry):
    put_bundle(registry, bundle(ImageStatement(DIGEST, predicate_type=COSIGN_SIGN).to_bytes()))
    assert states(verify(registry)) == [("bundle", "trusted", "ours")]


def test_referrers_of_other_kinds_are_passed_over(registry):
    put_bundle(registry, b"sbom", artifact_type="application/spdx+json", layer_type="application/spdx+json")
    put_bundle(registry, b"x", artifact_type="application/vnd.oci.empty.v1+json")
    with pytest.raises(Unsigned):
        verify(registry)


def put_simple(registry, payload, signature, tag=None):
    layer = SignatureLayer.of(payload, signature)
    manifest, config = simple_signing.make_manifest([layer])
    for data in (payload, config):
        referrer_signatures._upload(registry, data, "application/octet-stream")
    registry.put_manifest(manifest, MANIFEST_TYPE, tag or signature_tag(DIGEST))


def test_a_simple_signature_of_another_image_is_not_believed(registry):
    payload = Payload("r.example/team/train:1", "sha256:" + "00" * 32).to_bytes()
    put_simple(registry, payload, OURS.sign(payload))
    with pytest.raises(BadSignature):
        verify(registry)
    good = Payload("r.example/team/train:1", DIGEST).to_bytes()
    put_simple(registry, good, OURS.sign(payload))
    with pytest.raises(UntrustedKey):
        verify(registry)


@pytest.mark.parametrize("data", [b"{}", b'{"layers":[1]}', b'{"layers":1}', b'{"layers":[{}]}'])
def test_a_signature_tag_that_holds_something_else_is_told_and_not_overwritten(registry, simulator, data):
    digest = "sha256:" + hashlib.sha256(data).hexdigest()
    simulator.manifests["team/train"][digest] = (data, MANIFEST_TYPE)
    simulator.tags["team/train"][signature_tag(DIGEST)] = digest
    with pytest.raises(BadSignature):
        verify(registry)
    with pytest.raises(ImageError):
        sign(registry)
    assert registry.get_manifest(signature_tag(DIGEST)).data == data


def test_a_blob_that_is_gone_makes_a_signature_invalid_and_no_more(registry, simulator):
    sign(registry)
    (descriptor,) = registry.referrers(DIGEST, BUNDLE_TYPE)
    blob = json.loads(registry.get_manifest(descriptor["digest"]).data)["layers"][0]["digest"]
    simulator.blobs["team/train"].remove(blob)
    assert states(verify(registry)) == [("bundle", "invalid", None), ("simple signing", "trusted", "ours")]


def test_a_damaged_blob_makes_a_signature_invalid_and_no_more(registry, monkeypatch):
    sign(registry)
    (descriptor,) = registry.referrers(DIGEST, BUNDLE_TYPE)
    blob = json.loads(registry.get_manifest(descriptor["digest"]).data)["layers"][0]["digest"]
    whole = registry.get_blob

    def damaged(digest, max_bytes):
        if digest == blob:
            raise RegistryContentWrong(where="r.example", what=digest)
        return whole(digest, max_bytes)

    monkeypatch.setattr(registry, "get_blob", damaged)
    assert states(verify(registry)) == [("bundle", "invalid", None), ("simple signing", "trusted", "ours")]


NO_DIGESTS = ["latest", "../../other/manifests/1", "sha256:" + "AB" * 32, "sha512:" + "ab" * 64]


@pytest.mark.parametrize("digest", NO_DIGESTS)
def test_a_layer_that_is_named_by_no_digest_spoils_its_own_form_alone(registry, digest):
    sign(registry)
    layer = replace(SignatureLayer.of(b"x", OTHER.sign(b"x")), digest=digest)
    manifest, _ = simple_signing.make_manifest([layer])
    registry.put_manifest(manifest, MANIFEST_TYPE, signature_tag(DIGEST))
    assert states(verify(registry)) == [("bundle", "trusted", "ours"), ("simple signing", "invalid", None)]


@pytest.mark.parametrize("digest", NO_DIGESTS)
def test_an_index_that_names_no_digest_is_not_signed(registry, simulator, digest):
    index_type = referrer_signatures.INDEX_TYPES[0]
    entry = {"mediaType": MANIFEST_TYPE, "digest": digest, "size": 1, "artifactType": ARTIFACT_TYPE}
    index = canonical_json.write({"schemaVersion": 2, "mediaType": index_type, "manifests": [entry]})
    own = "sha256:" + hashlib.sha256(index).hexdigest()
    simulator.manifests["team/train"][own] = (index, index_type)
    simulator.tags["team/train"]["index"] = own
    with pytest.raises(ImageError, match="sha256"):
        sign(registry, target="index")
    with pytest.raises(ImageError, match="sha256"):
        remote_documents.find(registry, index, where="x")


def test_more_signatures_than_anyone_needs_are_refused(registry):
    payload = Payload("a/b", DIGEST).to_bytes()
    layers = [SignatureLayer.of(payload, OTHER.sign(payload))] * 65
    manifest, _ = simple_signing.make_manifest(layers)
    with pytest.raises(ImageError, match="65"):
        simple_signing.read_manifest(manifest, where="x")
    manifest, config = simple_signing.make_manifest(layers[:64])
    for data in (payload, config):
        referrer_signatures._upload(registry, data, "application/octet-stream")
    registry.put_manifest(manifest, MANIFEST_TYPE, signature_tag(DIGEST))
    with pytest.raises(LimitExceeded):
        sign(registry)


def test_every_image_of_an_index_is_signed(registry):
    second = IMAGE.replace(b'"layers":[]', b'"layers": []')
    registry.put_manifest(second, MANIFEST_TYPE, "second")
    entries = [
        {"mediaType": MANIFEST_TYPE, "digest": "sha256:" + hashlib.sha256(data).hexdigest(), "size": len(data)}
        for data in (IMAGE, second)
    ]
    index_type = "application/vnd.oci.image.index.v1+json"
    index = canonical_json.write({"schemaVersion": 2, "mediaType": index_type, "manifests": entries})
    registry.put_manifest(index, index_type, "both")
    digests = sign(registry, target="both")
    assert digests == ("sha256:" + hashlib.sha256(index).hexdigest(), *(entry["digest"] for entry in entries))
    for target in ("both", "1", "second"):
        assert verify(registry, target=target).trusted is not None


# ---- checkpoints of ours -------------------------------------------------------------------------

SEALED = Sealed(base_files())
TYPES = {"vgpu-index.bin": INDEX_TYPE, "vgpu-manifest.json": SEALED_MANIFEST_TYPE, "vgpu-signature.json": BUNDLE_TYPE}
SEAL_POLICY = Policy(keys={TRUSTED.key_id: TrustedKey("seal", Path("seal.pub"), TRUSTED.public)})


def put_checkpoint(registry, *, left_out=(), doubled=()):
    config = referrer_signatures._upload(registry, SEALED.documents["vgpu-record.json"], RECORD_TYPE)
    layers = [
        referrer_signatures._upload(registry, SEALED.documents[name], TYPES[name])
        for name in (*TYPES, *doubled)
        if name not in left_out
    ]
    doc = {"schemaVersion": 2, "mediaType": MANIFEST_TYPE, "artifactType": ARTIFACT_TYPE, "config": config}
    manifest = canonical_json.write({**doc, "layers": layers})
    registry.put_manifest(manifest, MANIFEST_TYPE)
    return manifest


def test_the_documents_of_a_checkpoint_are_read_without_its_packs(registry):
    found = remote_documents.read(registry, put_checkpoint(registry), where="x")
    assert found.documents == SEALED.documents
    claims = seal_documents.check(found.documents, SEAL_POLICY, where="x")
    assert claims.signed.generation == claims.record.generation
    assert remote_documents.read(registry, IMAGE, where="x") is None


def test_the_one_checkpoint_of_an_index_is_found(registry):
    manifest = put_checkpoint(registry)
    entry = {
        "mediaType": MANIFEST_TYPE,
        "digest": "sha256:" + hashlib.sha256(manifest).hexdigest(),
        "size": len(manifest),
    }
    ours, other = entry | {"artifactType": ARTIFACT_TYPE}, entry | {"digest": DIGEST, "size": len(IMAGE)}
    for entries, expected in (([other, ours], manifest), ([other], None), ([ours, ours], None), ([], None)):
        index = canonical_json.write({"schemaVersion": 2, "manifests": entries})
        assert remote_documents.find(registry, index, where="x") == expected
    assert remote_documents.find(registry, manifest, where="x") == manifest
    assert remote_documents.find(registry, IMAGE, where="x") is None


@pytest.mark.parametrize("name", TYPES)
def test_a_checkpoint_without_one_of_its_documents_or_with_two_is_refused(registry, name):
    for options in ({"left_out": [name]}, {"doubled": [name]}):
        with pytest.raises(UnexpectedEntry):
            remote_documents.read(registry, put_checkpoint(registry, **options), where="x")


def test_an_encrypted_checkpoint_shows_its_recipients_alone(registry):
    lab = Identity.generate()
    record, _ = EncryptedRecord.new([lab.public])
    config = referrer_signatures._upload(registry, record.to_bytes(), ENCRYPTED_RECORD_TYPE)
    doc = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "artifactType": ARTIFACT_TYPE,
        "config": config,
        "layers": [],
    }
    found = remote_documents.read(registry, canonical_json.write(doc), where="x")
    assert found.documents == {}
    assert [entry.key_id for entry in found.encrypted.recipients] == [lab.public.key_id]
