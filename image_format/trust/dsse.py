"""DSSE envelopes (spec/signature.md, section 2): one payload, one signature over its pre-authentication bytes.

Byte exact; no JSON of ours is signed, only bytes. Refuses several signatures and sloppy base64.
The caller uses the payload only after the signature over exactly these bytes has been verified.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vgpu_errors import ImageError

if TYPE_CHECKING:
    from image_format.fields import Fields

MAX_PAYLOAD_BYTES = 256 << 10
MAX_SIGNATURE_BYTES = 16 << 10


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
            payload=fields.base64("payload", max_bytes=MAX_PAYLOAD_BYTES),
            signature=signatures[0].base64("sig", max_bytes=MAX_SIGNATURE_BYTES),
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
