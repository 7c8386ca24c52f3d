"""Simple signing, the form in which podman, skopeo and CRI-O look for signatures (spec/signature.md, section 9).

A signed JSON payload is a layer of the manifest under the tag `sha256-<hex>.sig`; the signature is its annotation.
Pure: bytes in, bytes out. Keeps the layers of other signers. Refuses a payload that speaks of another manifest.
`referrer_signatures` brings the bytes.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from image_format import canonical_json
from image_format.fields import Fields
from image_format.manifest import MANIFEST_TYPE
from image_format.trust.freshness import parse_time
from vgpu_errors import ImageError

if TYPE_CHECKING:
    from collections.abc import Sequence

PAYLOAD_TYPE = "application/vnd.dev.cosign.simplesigning.v1+json"
CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
SIGNATURE_KEY = "dev.cosignproject.cosign/signature"
CRITICAL_TYPE = "cosign container image signature"
CREATOR = "vgpu-snapshot"
MAX_PAYLOAD_BYTES = 64 << 10
MAX_LAYERS = 64
MAX_MANIFEST_BYTES = 1 << 20


@dataclass(frozen=True)
class Payload:
    """The claim: this manifest is what `reference` means."""

    reference: str
    digest: str
    expires: str | None = None
    timestamp: int | None = None

    @classmethod
    def from_bytes(cls, data: bytes, *, digest: str, where: str) -> Payload:
        """Parse a payload whose signature has been verified; it must speak of the manifest of this digest."""
        fields = Fields(canonical_json.read_object(data, where=where, max_bytes=MAX_PAYLOAD_BYTES), where)
        critical = fields.object("critical")
        critical.one_of("type", CRITICAL_TYPE)
        if critical.object("image").text("docker-manifest-digest") != digest:
            raise ImageError(where=where, what="it signs another image")
        optional = fields.object("optional") if fields.has("optional") else Fields({}, f"{where}.optional")
        expires = optional.text("expires") if optional.is_there("expires") else None
        if expires is not None:
            parse_time(expires, where=optional.path("expires"))
        return cls(critical.object("identity").text("docker-reference"), digest, expires)

    def to_bytes(self) -> bytes:
        """The bytes that are signed."""
        optional = {"creator": CREATOR, "expires": self.expires, "timestamp": self.timestamp}
        doc = {
            "critical": {
                "identity": {"docker-reference": self.reference},
                "image": {"docker-manifest-digest": self.digest},
                "type": CRITICAL_TYPE,
            },
            "optional": {key: value for key, value in optional.items() if value is not None},
        }
        return canonical_json.write(doc, where="simple signing payload")


@dataclass(frozen=True)
class SignatureLayer:
    """One signature of the manifest: where its payload lies, and the signature over it."""

    digest: str
    size: int
    signature: bytes
    annotations: dict[str, str]

    @classmethod
    def of(cls, payload: bytes, signature: bytes) -> SignatureLayer:
        """Describe a payload of ours."""
        text = base64.b64encode(signature).decode()
        return cls("sha256:" + hashlib.sha256(payload).hexdigest(), len(payload), signature, {SIGNATURE_KEY: text})

    def to_json(self) -> dict[str, Any]:
        """The layer's descriptor."""
        return {
            "mediaType": PAYLOAD_TYPE,
            "digest": self.digest,
            "size": self.size,
            "annotations": self.annotations,
        }


def signature_tag(digest: str) -> str:
    """The tag under which the signatures of a manifest lie."""
    return f"{digest.replace(':', '-', 1)}.sig"


def read_manifest(data: bytes, *, where: str) -> tuple[SignatureLayer, ...]:
    """The signatures in such a manifest; layers that are none are passed over."""
    fields = Fields(canonical_json.read_object(data, where=where, max_bytes=MAX_MANIFEST_BYTES), where)
    layers = fields.objects("layers")
    if len(layers) > MAX_LAYERS:
        raise ImageError(where=fields.path("layers"), what=f"has {len(layers)} entries, more than {MAX_LAYERS}")
    found = (_read_layer(layer) for layer in layers if layer.text("mediaType") == PAYLOAD_TYPE)
    return tuple(layer for layer in found if layer is not None)


def make_manifest(layers: Sequence[SignatureLayer]) -> tuple[bytes, bytes]:
    """Manifest and config over these signatures, as cosign lays them out."""
    config = canonical_json.write(
        {
            "architecture": "",
            "config": {},
            "created": "0001-01-01T00:00:00Z",
            "history": [{"created": "0001-01-01T00:00:00Z"} for _ in layers],
            "os": "",
            "rootfs": {"type": "layers", "diff_ids": [layer.digest for layer in layers]},
        }
    )
    digest = "sha256:" + hashlib.sha256(config).hexdigest()
    doc = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "config": {"mediaType": CONFIG_TYPE, "digest": digest, "size": len(config)},
        "layers": [layer.to_json() for layer in layers],
    }
    return canonical_json.write(doc), config


def _read_layer(fields: Fields) -> SignatureLayer | None:
    annotations = fields.object("annotations") if fields.has("annotations") else Fields({}, fields.at)
    text = annotations.text_or_none(SIGNATURE_KEY)
    if text is None:
        return None
    try:
        signature = base64.b64decode(text.encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError):
        return None
    texts = {key: annotations.text(key) for key in annotations.whole()}
    return SignatureLayer(fields.sha256_digest("digest"), fields.integer("size"), signature, texts)
