"""The in-toto statement about an image in a registry (spec/signature.md, section 8).

Its subject is a manifest by digest: a transport image, an image that podman made, or an index. Pure.
Of other makers' statements only cosign's plain signature counts: an attestation says something about an image, not that
its signer stands by it. `referrer_signatures` makes and reads these.
"""

from __future__ import annotations

from dataclasses import dataclass

from image_format import canonical_json
from image_format.fields import Fields
from image_format.trust.freshness import parse_time
from image_format.trust.statement import MAX_STATEMENT_BYTES, STATEMENT_TYPE, read_expires
from vgpu_errors import FormatTooNew, ImageError

PREDICATE_BASE = "https://vgpu-snapshot.dev/image/"
PREDICATE_TYPE = PREDICATE_BASE + "v1"
COSIGN_SIGN = "https://sigstore.dev/cosign/sign/v1"
MAX_SUBJECTS = 64


@dataclass(frozen=True)
class ImageStatement:
    """The claim: I stand by the image of this digest."""

    digest: str
    signed: str | None = None
    expires: str | None = None
    predicate_type: str = PREDICATE_TYPE

    @classmethod
    def from_bytes(cls, data: bytes, *, digest: str, where: str = "the signed statement") -> ImageStatement:
        """Parse a payload whose signature has been verified; it must speak of the manifest of this digest."""
        fields = Fields(canonical_json.read_object(data, where=where, max_bytes=MAX_STATEMENT_BYTES), where)
        fields.one_of("_type", STATEMENT_TYPE)
        predicate_type = _predicate_type(fields)
        _check_subject(fields, digest)
        if predicate_type == COSIGN_SIGN:
            return cls(digest, predicate_type=predicate_type)
        predicate = fields.object("predicate")
        signed = predicate.text("signed")
        parse_time(signed, where=predicate.path("signed"))
        return cls(digest, signed, read_expires(predicate))

    def to_bytes(self) -> bytes:
        """The canonical bytes that become the payload."""
        times = {"signed": self.signed, "expires": self.expires}
        doc = {
            "_type": STATEMENT_TYPE,
            "subject": [{"digest": {"sha256": self.digest.removeprefix("sha256:")}}],
            "predicateType": self.predicate_type,
            "predicate": {key: value for key, value in times.items() if value is not None},
        }
        return canonical_json.write(doc, where="statement")


def _check_subject(fields: Fields, digest: str) -> None:
    subjects = fields.objects("subject")
    if not 1 <= len(subjects) <= MAX_SUBJECTS:
        raise ImageError(where=fields.path("subject"), what=f"has {len(subjects)} entries, not 1 to {MAX_SUBJECTS}")
    if digest.removeprefix("sha256:") not in [subject.object("digest").text("sha256") for subject in subjects]:
        raise ImageError(where=fields.path("subject"), what="is another image")


def _predicate_type(fields: Fields) -> str:
    found = fields.text("predicateType")
    if found.startswith(PREDICATE_BASE) and found != PREDICATE_TYPE:
        raise FormatTooNew(where=fields.path("predicateType"), found=found, known=PREDICATE_TYPE)
    return fields.one_of("predicateType", PREDICATE_TYPE, COSIGN_SIGN)
