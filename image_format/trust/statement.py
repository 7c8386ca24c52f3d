"""The in-toto statement that is signed (spec/signature.md, section 3).

Its subject is the manifest by sha256; its predicate repeats what a restore compares without parsing the record first.
Pure. `sealing` makes it, `verifying` reads it out of the verified payload; `image_statement` is its sibling in registries.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from image_format import canonical_json
from image_format.fields import Fields
from image_format.file_names import MANIFEST_NAME
from image_format.trust.freshness import SignedTimes, parse_time
from vgpu_errors import FormatTooNew, ImageError

PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_BASE = "https://vgpu-snapshot.dev/checkpoint/"
PREDICATE_TYPE = PREDICATE_BASE + "v1"
MAX_STATEMENT_BYTES = 256 << 10


@dataclass(frozen=True)
class Statement:
    """The claim: this manifest is the checkpoint of that container, and until when the signer stands by it."""

    manifest_sha256: str
    content_root: str
    container_id: str
    generation: int
    created: str
    expires: str | None = None
    unknown: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_bytes(cls, data: bytes, *, where: str = "the signed statement") -> Statement:
        """Parse a payload whose signature has been verified."""
        fields = Fields(canonical_json.read_object(data, where=where, max_bytes=MAX_STATEMENT_BYTES), where)
        fields.one_of("_type", STATEMENT_TYPE)
        _check_predicate_type(fields)
        subjects = fields.objects("subject")
        if len(subjects) != 1:
            raise ImageError(where=fields.path("subject"), what=f"has {len(subjects)} entries, not 1")
        subjects[0].one_of("name", MANIFEST_NAME)
        predicate = fields.object("predicate")
        return cls(
            manifest_sha256=subjects[0].object("digest").hex_digest("sha256"),
            content_root=predicate.hex_digest("contentRoot"),
            container_id=predicate.text("containerId"),
            generation=predicate.integer("generation"),
            created=predicate.text("created"),
            expires=read_expires(predicate),
            unknown=predicate.unknown(),
        )

    def to_bytes(self) -> bytes:
        """The canonical bytes that become the payload."""
        predicate = self.unknown | {
            "contentRoot": self.content_root,
            "containerId": self.container_id,
            "generation": self.generation,
            "created": self.created,
        }
        doc = {
            "_type": STATEMENT_TYPE,
            "subject": [{"name": MANIFEST_NAME, "digest": {"sha256": self.manifest_sha256}}],
            "predicateType": PREDICATE_TYPE,
            "predicate": predicate | ({"expires": self.expires} if self.expires is not None else {}),
        }
        return canonical_json.write(doc, where="statement")

    @property
    def times(self) -> SignedTimes:
        """What `freshness` looks at."""
        return SignedTimes(self.container_id, self.generation, self.created, self.expires)


def read_expires(predicate: Fields) -> str | None:
    """`expires`, whose form is checked here: a time that cannot be read must not count as none."""
    if not predicate.is_there("expires"):
        return None
    expires = predicate.text("expires")
    parse_time(expires, where=predicate.path("expires"))
    return expires


def _check_predicate_type(fields: Fields) -> None:
    found = fields.text("predicateType")
    if found.startswith(PREDICATE_BASE) and found != PREDICATE_TYPE:
        raise FormatTooNew(where=fields.path("predicateType"), found=found, known=PREDICATE_TYPE)
    if found != PREDICATE_TYPE:
        raise ImageError(where=fields.path("predicateType"), what=f"must be {PREDICATE_TYPE}")
