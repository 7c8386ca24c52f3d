"""Makes the DSSE vectors under spec/vectors/dsse: encodings byte for byte, and envelopes that hold or do not.

The encodings are put together here by hand, not by the code they test; keys and signatures are fixed (RFC 6979, Ed25519).
Run as `python -m tests.format.make_dsse_vectors`. These keys sign test vectors and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from image_format.trust.keys import SigningKey
from tests.format.make_vectors import TRUSTED

VECTORS = Path(__file__).parents[2] / "spec" / "vectors" / "dsse"
ED25519 = SigningKey.of(Ed25519PrivateKey.from_private_bytes(hashlib.sha256(b"vgpu-snapshot test vectors").digest()))
TYPE = "application/vnd.in-toto+json"

ENCODINGS = [
    (
        "the specification's own example",
        "http://example.com/HelloWorld",
        b"hello world",
        b"DSSEv1 29 http://example.com/HelloWorld 11 hello world",
    ),
    ("nothing at all", "", b"", b"DSSEv1 0  0 "),
    ("letters of two bytes count twice", "t", "é".encode(), b"DSSEv1 1 t 2 \xc3\xa9"),
    ("the type, too, is counted in bytes", "té", b"", b"DSSEv1 3 t\xc3\xa9 0 "),
    ("bytes that are no text", "b", bytes(range(16)), b"DSSEv1 1 b 16 " + bytes(range(16))),
    ("a payload that looks like an encoding", "a", b"DSSEv1 1 a 0 ", b"DSSEv1 1 a 13 DSSEv1 1 a 0 "),
    ("spaces and line ends stay", "a b", b" \n\0", b"DSSEv1 3 a b 3  \n\0"),
    ("a hundred bytes", "h", b"x" * 100, b"DSSEv1 1 h 100 " + b"x" * 100),
    ("a statement", TYPE, b'{"a":1}', b'DSSEv1 28 application/vnd.in-toto+json 7 {"a":1}'),
]


def make() -> bytes:
    encodings = [
        {"what": what, "payloadType": kind, "payload": payload.hex(), "encoding": encoding.hex()}
        for what, kind, payload, encoding in ENCODINGS
    ]
    return (json.dumps({"encodings": encodings, "envelopes": list(_envelopes())}, indent=1) + "\n").encode()


def _envelopes():
    payload = b'{"a":1}'
    signed = b'DSSEv1 28 application/vnd.in-toto+json 7 {"a":1}'
    for name, key, other in (("ECDSA P-256", TRUSTED, ED25519), ("Ed25519", ED25519, TRUSTED)):
        good = key.sign(signed)
        yield _case(f"{name}", key, payload, TYPE, good, holds=True)
        yield _case(f"{name}: the payload signed without encoding", key, payload, TYPE, key.sign(payload), holds=False)
        yield _case(f"{name}: another payload", key, b'{"a":2}', TYPE, good, holds=False)
        yield _case(f"{name}: another payload type", key, payload, "text/plain", good, holds=False)
        yield _case(f"{name}: another kind of key", other, payload, TYPE, good, holds=False)
        yield _case(f"{name}: an empty signature", key, payload, TYPE, b"", holds=False)
        yield _case(f"{name}: a flipped bit", key, payload, TYPE, good[:-1] + bytes([good[-1] ^ 1]), holds=False)


def _case(what: str, key: SigningKey, payload: bytes, kind: str, signature: bytes, *, holds: bool):
    envelope = {
        "payload": base64.b64encode(payload).decode(),
        "payloadType": kind,
        "signatures": [{"sig": base64.b64encode(signature).decode()}],
    }
    return {"what": what, "publicKey": key.public.to_pem().decode(), "envelope": envelope, "holds": holds}


def main() -> None:
    VECTORS.mkdir(parents=True, exist_ok=True)
    (VECTORS / "pae.json").write_bytes(make())


if __name__ == "__main__":
    main()
