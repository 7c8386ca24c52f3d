"""The sigstore bundle v0.3 `vgpu-signature.json` that carries the envelope (spec/signature.md, section 4).

Own keys only: the verification material is a hint at a public key, never a key itself.
Nothing in a bundle is believed; the hint merely says which trusted key to try.
"""

from __future__ import annotations

from dataclasses import dataclass

from image_format import canonical_json
from image_format.fields import Fields
from image_format.file_names import SIGNATURE_NAME
from image_format.trust.dsse import Envelope
from vgpu_errors import FormatTooNew, ImageError

BUNDLE_BASE = "application/vnd.dev.sigstore.bundle.v"
BUNDLE_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
MAX_BUNDLE_BYTES = 1 << 20


@dataclass(frozen=True)
class Bundle:
    """An envelope and the hint at its key."""

    key_hint: str
    envelope: Envelope

    @classmethod
    def from_bytes(cls, data: bytes, *, where: str = SIGNATURE_NAME) -> Bundle:
        """Parse the file's bytes."""
        fields = Fields(canonical_json.read_object(data, where=where, max_bytes=MAX_BUNDLE_BYTES), where)
        media_type = fields.text("mediaType")
        if media_type.startswith(BUNDLE_BASE) and media_type != BUNDLE_TYPE:
            raise FormatTooNew(where=fields.path("mediaType"), found=media_type, known=BUNDLE_TYPE)
        if media_type != BUNDLE_TYPE:
            raise ImageError(where=fields.path("mediaType"), what=f"must be {BUNDLE_TYPE}")
        hint = fields.object("verificationMaterial").object("publicKey").text("hint")
        return cls(hint, Envelope.from_json(fields.object("dsseEnvelope")))

    def to_bytes(self) -> bytes:
        """The canonical bytes that are written."""
        doc = {
            "mediaType": BUNDLE_TYPE,
            "verificationMaterial": {"publicKey": {"hint": self.key_hint}},
            "dsseEnvelope": self.envelope.to_json(),
        }
        return canonical_json.write(doc, where=SIGNATURE_NAME)
