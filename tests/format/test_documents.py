"""Canonical JSON, record, manifest, keys, policy: what is written comes back, and what is wrong is named by its path."""

import json
import os
import subprocess
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from image_format import canonical_json
from image_format.record import KNOWN_FEATURES, Phase, Record, lowest_version
from image_format.trust import keys
from image_format.trust.keys import SigningKey, load_public_key, load_signing_key, make_node_key
from image_format.trust.policy import Policy, load_trusted
from vgpu_errors import BadConfiguration, FormatTooNew, ImageError, LimitExceeded, UnknownFeature


@pytest.mark.parametrize(
    ("doc", "expected"),
    [
        ({"b": 1, "a": [True, None, "x"]}, b'{"a":[true,null,"x"],"b":1}'),
        ({"\u20ac": "Euro", "\r": "CR", "1": "One", "\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16"): "Smiley"},
         '{"\\r":"CR","1":"One","\u20ac":"Euro","\U0001f600":"Smiley"}'.encode()),
        # UTF-16 order: U+1F600 is a surrogate pair (D83D) and sorts before U+FB33, although its code point is larger.
        ({"\ufb33": 1, "\U0001f600": 2}, '{"\U0001f600":2,"\ufb33":1}'.encode()),
        ('\x00\x08\t\n\x0c\r\x1f"\\/\x7f\u2028', b'"\\u0000\\b\\t\\n\\f\\r\\u001f\\"\\\\/\x7f\xe2\x80\xa8"'),
        (-(2**53) + 1, b"-9007199254740991"),
    ],
)  # fmt: skip
def test_canonical_form_is_that_of_rfc_8785(doc, expected):
    assert canonical_json.write(doc) == expected
    assert canonical_json.read(expected, where="x") == doc


@pytest.mark.parametrize("doc", [1.0, {"a": float("nan")}, {1: 2}, "\ud800", {"\udfff": 1}, b"x", {"a": {1, 2}}])
def test_what_has_no_canonical_form_is_refused(doc):
    with pytest.raises(ImageError):
        canonical_json.write(doc)


@pytest.mark.parametrize("doc", [2**53, -(2**53)])
def test_integers_beyond_2_53_are_refused_on_write(doc):
    with pytest.raises(LimitExceeded):
        canonical_json.write(doc)


@pytest.mark.parametrize(
    "text",
    ['{"a":1,"a":2}', "1.0", "1e3", "NaN", "Infinity", "-Infinity", '"\\ud800"', "", "{", "[1,]", "\xff", "1" * 5000],
)
def test_loose_json_is_refused(text):
    with pytest.raises(ImageError):
        canonical_json.read(text.encode("latin-1"), where="x")


@pytest.mark.parametrize("text", ["[" * 40 + "]" * 40, "[" * 200_000, '{"a":' * 100_000])
def test_deep_json_is_refused(text):
    with pytest.raises(ImageError):
        canonical_json.read(text.encode(), where="x")


def test_a_large_document_is_refused_before_it_is_parsed():
    with pytest.raises(LimitExceeded):
        canonical_json.read(b"[" + b" " * 100, where="x", max_bytes=50)


# ---- record --------------------------------------------------------------------------------------


def test_record_comes_back_equal(record):
    again = Record.from_bytes(record.to_bytes())
    assert again.to_bytes() == record.to_bytes()
    assert again.container == record.container
    assert again.processes == record.processes


def test_unknown_fields_are_written_back_at_every_level(record):
    doc = record.to_json()
    doc["novelty"] = {"deep": [1, {"x": None}]}
    doc["formatVersion"] = "1.9"
    for part in (
        doc["container"],
        doc["lowLevelRuntime"],
        doc["processes"][0],
        doc["devices"][0],
        doc["requirements"][0],
    ):
        part["later"] = "kept"
    doc["phases"][0]["later"] = "kept"
    assert Record.from_json(doc).to_json() == doc


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (("processes", 0, "nsPid"), "7", "processes[0].nsPid"),
        (("processes", 0, "nsPid"), True, "processes[0].nsPid"),
        (("processes", 0, "devices"), ["a", 1], "processes[0].devices[1]"),
        (("devices", 0, "memoryBytes"), -1, "devices[0].memoryBytes"),
        (("requirements", 2, "level"), "maybe", "requirements[2].level"),
        (("requirements", 0, "value"), {"a": 1}, "requirements[0].value"),
        (("container", "engineAnnotations"), {"k": 1}, "container.engineAnnotations.k"),
        (("phases", 1, "seconds"), "1", "phases[1].seconds"),
        (("created",), "yesterday", "created"),
        (("contentRoot",), "AB" * 32, "contentRoot"),
        (("security",), [], "security"),
    ],
)
def test_a_fault_is_named_by_its_path(record, path, value, named):
    doc = json.loads(record.to_bytes())
    target = doc
    for step in path[:-1]:
        target = target[step]
    target[path[-1]] = value
    with pytest.raises(ImageError) as caught:
        Record.from_json(doc)
    assert caught.value.message.startswith(f"vgpu-record.json.{named}: ")


@pytest.mark.parametrize("version", ["2.0", "10.0"])
def test_a_later_major_version_is_refused_by_number(record, version):
    with pytest.raises(FormatTooNew, match=version):
        Record.from_json(record.to_json() | {"formatVersion": version})


@pytest.mark.parametrize("version", ["1", "1.", "1.00", "01.0", "1.0.0", "v1.0", ""])
def test_what_is_no_version_is_refused(record, version):
    with pytest.raises(ImageError):
        Record.from_json(record.to_json() | {"formatVersion": version})


def test_an_unknown_required_feature_is_refused_by_name(record):
    doc = record.to_json() | {"features": {"required": ["teleport"], "optional": ["glitter"]}}
    with pytest.raises(UnknownFeature, match="teleport"):
        Record.from_json(doc)
    doc["features"]["required"] = []
    assert Record.from_json(doc).optional_features == ("glitter",)
    assert {"staged", "shared"} == KNOWN_FEATURES


def test_a_writer_stamps_the_lowest_version(record):
    assert lowest_version(record) == "1.0"
    assert replace(record, format_version="1.9").stamped().format_version == "1.0"


@pytest.mark.parametrize(
    ("seconds", "written"), [(0, "0.000"), (0.0004, "0.000"), (12.3456, "12.346"), (1e6, "1000000.000")]
)
def test_durations_are_text_with_three_decimals(seconds, written):
    assert Phase("x", seconds).to_json()["seconds"] == written


# ---- keys and policy -----------------------------------------------------------------------------


def test_node_key_is_private_and_stays(tmp_path):
    key = make_node_key(tmp_path)
    assert (tmp_path / "node.key").stat().st_mode & 0o777 == 0o600
    assert load_signing_key(tmp_path / "node.key").key_id == key.key_id
    assert load_public_key(tmp_path / "node.pub").key_id == keys.key_id(key)
    with pytest.raises(BadConfiguration):
        make_node_key(tmp_path)
    assert load_signing_key(tmp_path / "node.key").key_id == key.key_id


def test_key_id_is_what_openssl_computes(tmp_path):
    key = make_node_key(tmp_path)
    script = f"openssl pkey -pubin -in {tmp_path}/node.pub -outform DER | openssl dgst -sha256 -binary | base64"
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=False)
    if done.returncode != 0 or not done.stdout.strip():
        pytest.skip("no openssl")
    assert done.stdout.strip() == key.key_id


def test_a_private_key_that_others_can_read_is_refused(tmp_path):
    make_node_key(tmp_path)
    (tmp_path / "node.key").chmod(0o640)
    with pytest.raises(BadConfiguration, match="0640"):
        load_signing_key(tmp_path / "node.key")


def pem_of(key):
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"hello",
        b"x" * 20_000,
        pem_of(ec.generate_private_key(ec.SECP384R1())),
        pem_of(rsa.generate_private_key(65537, 2048)),
    ],
    ids=["empty", "text", "huge", "p384", "rsa"],
)
def test_another_kind_of_key_is_refused(tmp_path, data):
    path = tmp_path / "node.key"
    path.write_bytes(data)
    path.chmod(0o600)
    with pytest.raises(BadConfiguration):
        load_signing_key(path)
    with pytest.raises(BadConfiguration):
        load_public_key(path)


def add_key(etc, name):
    (etc / "trusted").mkdir(exist_ok=True)
    key = SigningKey.generate()
    (etc / "trusted" / f"{name}.pub").write_bytes(key.public.to_pem())
    return key


def test_policy_trusts_the_node_and_what_was_added(tmp_path):
    own, other = make_node_key(tmp_path), add_key(tmp_path, "elsewhere")
    (tmp_path / "trusted" / "notes.txt").write_text("not a key")
    policy = Policy.load(tmp_path)
    assert {entry.name for entry in policy.keys.values()} == {"this node", "elsewhere"}
    assert policy.find(own.key_id).name == "this node"
    assert policy.find(other.key_id).name == "elsewhere"
    assert policy.find(SigningKey.generate().key_id) is None
    assert not policy.allows_unsigned


def test_a_missing_folder_trusts_nobody(tmp_path):
    policy = Policy.load(tmp_path / "absent")
    assert (dict(policy.keys), policy.allows_unsigned) == ({}, False)


@pytest.mark.parametrize(
    ("text", "is_lenient"),
    [('{"version":1,"default":"allow-unsigned"}', True), ('{"version":1,"default":"refuse-untrusted"}', False)],
)
def test_policy_file_says_what_happens_without_signature(tmp_path, text, is_lenient):
    (tmp_path / "policy.json").write_text(text)
    assert Policy.load(tmp_path).allows_unsigned == is_lenient


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        '{"version":3,"default":"allow-unsigned"}',
        '{"version":1,"default":"allow"}',
        '{"version":1,"default":"refuse-untrusted","defaul":"allow-unsigned"}',
        '{"version":1,"default":"refuse-untrusted","default":"allow-unsigned"}',
        '{"version":1,"default":["allow-unsigned"]}',
    ],
)
def test_a_policy_with_a_mistake_is_refused_by_name(tmp_path, text):
    (tmp_path / "policy.json").write_text(text)
    with pytest.raises(BadConfiguration, match=r"policy\.json"):
        Policy.load(tmp_path)


@pytest.mark.parametrize("name", ["policy.json", "node.pub", "trusted", "trusted/a.pub"])
def test_a_policy_that_others_can_change_is_refused(tmp_path, name):
    make_node_key(tmp_path)
    add_key(tmp_path, "a")
    (tmp_path / "policy.json").write_text('{"version":1,"default":"refuse-untrusted"}')
    Policy.load(tmp_path)
    path = tmp_path / name
    path.chmod(path.stat().st_mode | 0o022)
    with pytest.raises(BadConfiguration, match="others"):
        Policy.load(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a file away")
def test_a_key_of_another_user_is_refused(tmp_path):
    add_key(tmp_path, "a")
    os.chown(tmp_path / "trusted" / "a.pub", 12345, 12345)
    with pytest.raises(BadConfiguration, match="12345"):
        load_trusted(tmp_path)
