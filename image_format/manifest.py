"""The OCI 1.1 artifact manifest `vgpu-manifest.json` (spec/record.md, section 7): its digest is what is signed.

Names the record and the index by sha256 and size, and repeats the content root. Pure.
Refuses a manifest of another kind or with another set of layers.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from image_format import canonical_json
from image_format.fields import Fields, is_hex_digest
from image_format.file_names import MANIFEST_NAME
from vgpu_errors import ContentMismatch, FormatTooNew, ImageError, Truncated

MAX_MANIFEST_BYTES = 1 << 20
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
ARTIFACT_PREFIX = "application/vnd.vgpu.checkpoint.v"
ARTIFACT_TYPE = "application/vnd.vgpu.checkpoint.v1+json"
RECORD_TYPE = "application/vnd.vgpu.checkpoint.record.v1+json"
INDEX_TYPE = "application/vnd.vgpu.checkpoint.index.v1"
CREATED_KEY = "org.opencontainers.image.created"
ROOT_KEY = "vgpu.checkpoint.content-root"


@dataclass(frozen=True)
class Descriptor:
    """A blob by media type, sha256 and size."""

    media_type: str
    sha256: str
    size: int

    @classmethod
    def of(cls, data: bytes, media_type: str) -> Descriptor:
        """Describe these bytes."""
        return cls(media_type, hashlib.sha256(data).hexdigest(), len(data))

    @classmethod
    def from_json(cls, fields: Fields, media_type: str) -> Descriptor:
        """Parse a descriptor that must have this media type."""
        fields.one_of("mediaType", media_type)
        algorithm, _, digest = fields.text("digest").partition(":")
        if algorithm != "sha256" or not is_hex_digest(digest):
            raise ImageError(where=fields.path("digest"), what="must be sha256: and 64 lower-case hex digits")
        return cls(media_type, digest, fields.integer("size"))

    def to_json(self) -> dict[str, object]:
        """The form that is written."""
        return {"mediaType": self.media_type, "digest": f"sha256:{self.sha256}", "size": self.size}

    def check(self, data: bytes, *, where: str) -> None:
        """Refuse bytes that are not the described ones."""
        if len(data) < self.size:
            raise Truncated(where=where, found=len(data), needed=self.size)
        if len(data) != self.size:
            raise ContentMismatch(where=where, what=f"{len(data)} bytes, not {self.size}")
        if hashlib.sha256(data).hexdigest() != self.sha256:
            raise ContentMismatch(where=where, what="sha256")


@dataclass(frozen=True)
class Manifest:
    """The parsed manifest."""

    record: Descriptor
    index: Descriptor
    created: str
    content_root: str

    @classmethod
    def from_bytes(cls, data: bytes, *, where: str = MANIFEST_NAME) -> Manifest:
        """Parse the file's bytes."""
        fields = Fields(canonical_json.read_object(data, where=where, max_bytes=MAX_MANIFEST_BYTES), where)
        check_kind(fields)
        layers = fields.objects("layers")
        if len(layers) != 1:
            raise ImageError(where=fields.path("layers"), what=f"has {len(layers)} entries, not 1")
        annotations = fields.object("annotations")
        return cls(
            record=Descriptor.from_json(fields.object("config"), RECORD_TYPE),
            index=Descriptor.from_json(layers[0], INDEX_TYPE),
            created=annotations.text(CREATED_KEY),
            content_root=annotations.hex_digest(ROOT_KEY),
        )

    def to_bytes(self) -> bytes:
        """The canonical bytes whose digest is signed."""
        doc = {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "artifactType": ARTIFACT_TYPE,
            "config": self.record.to_json(),
            "layers": [self.index.to_json()],
            "annotations": {CREATED_KEY: self.created, ROOT_KEY: self.content_root},
        }
        return canonical_json.write(doc, where=MANIFEST_NAME)


def check_kind(fields: Fields) -> None:
    """Refuse what is no artifact manifest of ours."""
    if fields.integer("schemaVersion") != 2:
        raise ImageError(where=fields.path("schemaVersion"), what="must be 2")
    fields.one_of("mediaType", MANIFEST_TYPE)
    artifact_type = fields.text("artifactType")
    if artifact_type.startswith(ARTIFACT_PREFIX) and artifact_type != ARTIFACT_TYPE:
        raise FormatTooNew(where=fields.path("artifactType"), found=artifact_type, known=ARTIFACT_TYPE)
    if artifact_type != ARTIFACT_TYPE:
        raise ImageError(where=fields.path("artifactType"), what=f"must be {ARTIFACT_TYPE}")
