"""DSSE: the pre-authentication encoding byte for byte, and envelopes that are refused."""

import base64
import json
from pathlib import Path

import pytest

from image_format.fields import Fields
from image_format.trust.dsse import MAX_PAYLOAD_BYTES, Envelope, pre_authentication_encoding
from image_format.trust.keys import parse_public_key
from vgpu_errors import ImageError

VECTORS = Path(__file__).parents[2] / "spec" / "vectors" / "dsse"
CASES = json.loads((VECTORS / "pae.json").read_text())


@pytest.mark.parametrize("case", CASES["encodings"], ids=lambda case: case["what"])
def test_the_encoding_is_byte_exact(case):
    payload = bytes.fromhex(case["payload"])
    assert pre_authentication_encoding(case["payloadType"], payload).hex() == case["encoding"]


@pytest.mark.parametrize("case", CASES["envelopes"], ids=lambda case: case["what"])
def test_an_envelope_of_the_vectors_holds_or_does_not(case):
    key = parse_public_key(case["publicKey"].encode(), where="vector")
    envelope = Envelope.from_json(Fields(case["envelope"], "vector"))
    assert key.holds(envelope.signature, envelope.signed_bytes()) == case["holds"]


GOOD = {"payload": "eA==", "payloadType": "t", "signatures": [{"sig": "eA=="}]}
BAD = {
    "no signature": GOOD | {"signatures": []},
    "two signatures": GOOD | {"signatures": [{"sig": "eA=="}] * 2},
    "signatures that are no list": GOOD | {"signatures": {"sig": "eA=="}},
    "no payload": {"payloadType": "t", "signatures": [{"sig": "eA=="}]},
    "a payload that is no text": GOOD | {"payload": 1},
    "base64 without padding": GOOD | {"payload": "eA"},
    "base64 with bits to spare": GOOD | {"payload": "eB=="},
    "base64 of web addresses": GOOD | {"payload": "_-8="},
    "base64 with a line end": GOOD | {"payload": "eA==\n"},
    "base64 with letters beyond ASCII": GOOD | {"payload": "eÄ=="},
    "a payload type that is no text": GOOD | {"payloadType": None},
    "an endless payload": GOOD | {"payload": base64.b64encode(bytes(MAX_PAYLOAD_BYTES + 1)).decode()},
    "an endless signature": GOOD | {"signatures": [{"sig": "A" * (64 << 10)}]},
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_envelope_is_refused_by_name(case):
    Envelope.from_json(Fields(GOOD, "x"))
    with pytest.raises(ImageError, match=r"^x"):
        Envelope.from_json(Fields(BAD[case], "x"))


def test_the_largest_payload_is_taken():
    data = bytes(MAX_PAYLOAD_BYTES)
    assert Envelope.from_json(Fields(GOOD | {"payload": base64.b64encode(data).decode()}, "x")).payload == data


def test_vectors_are_what_their_generator_makes():
    from tests.format.make_dsse_vectors import make

    assert (VECTORS / "pae.json").read_bytes() == make()
