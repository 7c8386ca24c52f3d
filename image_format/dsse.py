"""DSSE envelopes (spec/signature.md, section 2): one payload, one signature over its pre-authentication bytes.

Byte exact; no JSON of ours is signed, only bytes. Refuses several signatures and sloppy base64.
The caller uses the payload only after the signature over exactly these bytes has been verified.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vgpu_errors import ImageError

if TYPE_CHECKING:
    from image_format.fields import Fields

MAX_PAYLOAD_BYTES = 256 << 10


def pre_authentication_encoding(payload_type: str, payload: bytes) -> bytes:
    """The bytes that are signed: "DSSEv1" SP length SP type SP length SP payload."""
    kind = payload_type.encode()
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)


@dataclass(frozen=True)
class Envelope:
    """A payload and its signature."""

    payload_type: str
    payload: bytes
    signature: bytes

    @classmethod
    def from_json(cls, fields: Fields) -> Envelope:
        """Parse an envelope with exactly one signature."""
        signatures = fields.objects("signatures")
        if len(signatures) != 1:
            raise ImageError(where=fields.path("signatures"), what=f"has {len(signatures)} entries, not 1")
        return cls(
            payload_type=fields.text("payloadType"),
            payload=_decode(fields, "payload"),
            signature=_decode(signatures[0], "sig"),
        )

    def to_json(self) -> dict[str, Any]:
        """The form that is written."""
        return {
            "payload": base64.b64encode(self.payload).decode(),
            "payloadType": self.payload_type,
            "signatures": [{"sig": base64.b64encode(self.signature).decode()}],
        }

    def signed_bytes(self) -> bytes:
        """What the signature must hold over."""
        return pre_authentication_encoding(self.payload_type, self.payload)


def _decode(fields: Fields, key: str) -> bytes:
    text = fields.any(key)
    if not isinstance(text, str) or len(text) > MAX_PAYLOAD_BYTES * 4 // 3 + 4:
        raise ImageError(where=fields.path(key), what=f"must be base64 of at most {MAX_PAYLOAD_BYTES} bytes")
    try:
        data = base64.b64decode(text.encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise ImageError(where=fields.path(key), what="is not base64") from error
    if base64.b64encode(data).decode() != text:
        raise ImageError(where=fields.path(key), what="is not base64 in its one canonical form")
    return data
