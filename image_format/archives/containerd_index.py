"""The index of a containerd checkpoint image: which blobs it has, and what they are (docs/containerd.md).

The document that `ctr container checkpoint` writes and `ctr container restore` reads: an OCI index whose entries point
straight at blobs. Written here in that form, so that either side's checkpoints restore with the other's command.
Pure: bytes in, document out, and the other way round. `containerd_archive` reads it, containerd_integration writes it.
"""

from __future__ import annotations

import hashlib
import json
import platform
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from image_format import canonical_json
from image_format.fields import Fields, is_hex_digest
from vgpu_errors import ImageError, LimitExceeded, NoSuchImage

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
MANIFEST_TYPES = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
INDEX_TYPES = (INDEX_TYPE, "application/vnd.docker.distribution.manifest.list.v2+json")
CRIU_TYPE = "application/vnd.containerd.container.criu.checkpoint.criu.tar"
SPEC_TYPE = "application/vnd.containerd.container.checkpoint.config.v1+proto"
OPTIONS_TYPE = "application/vnd.containerd.container.checkpoint.options.v1+proto"
RUNTIME_OPTIONS_TYPE = "application/vnd.containerd.container.checkpoint.runtime.options+proto"
RW_TYPE = "application/vnd.oci.image.layer.v1.tar+gzip"

RUNTIME_KEY = "io.containerd.checkpoint.runtime"
SNAPSHOTTER_KEY = "io.containerd.checkpoint.snapshotter"
IMAGE_KEY = "org.opencontainers.image.ref.name"
# `ctr task checkpoint` names the image so.
OLD_IMAGE_KEY = "image.name"
LABELS_KEY = "snapshot.vgpu.container-labels"
NAME_KEY = "snapshot.vgpu.container-name"

MAX_ENTRIES = 64
MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True)
class Descriptor:
    """A blob by media type, digest (`sha256:...`) and size."""

    media_type: str
    digest: str
    size: int


@dataclass(frozen=True)
class CheckpointIndex:
    """One checkpoint image."""

    entries: tuple[Descriptor, ...]
    annotations: tuple[tuple[str, str], ...]

    def find(self, *media_types: str) -> Descriptor | None:
        """The first entry of one of these types."""
        return next((entry for entry in self.entries if entry.media_type in media_types), None)

    def need(self, media_type: str, *, where: str) -> Descriptor:
        """The entry of this type."""
        found = self.find(media_type)
        if found is None:
            raise NoSuchImage(path=where, what=f"it has no entry of the type {media_type}")
        return found

    def annotation(self, key: str) -> str:
        """An annotation, or nothing."""
        return dict(self.annotations).get(key, "")

    @property
    def image_name(self) -> str:
        """The image that the container was made of."""
        return self.annotation(IMAGE_KEY) or self.annotation(OLD_IMAGE_KEY)

    @property
    def container_labels(self) -> dict[str, str]:
        """The labels of the container; images that ctr made have none."""
        text = self.annotation(LABELS_KEY)
        found = canonical_json.read_object(text.encode(), where=LABELS_KEY) if text else {}
        return {str(key): str(value) for key, value in found.items()}

    def to_bytes(self) -> bytes:
        """The document."""
        here = {"architecture": MACHINES.get(platform.machine(), platform.machine()), "os": "linux"}
        entries = [_entry(entry, here) for entry in self.entries]
        document = {
            "schemaVersion": 2,
            "mediaType": INDEX_TYPE,
            "manifests": entries,
            "annotations": dict(self.annotations),
        }
        return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def _entry(entry: Descriptor, here: Mapping[str, str]) -> dict[str, Any]:
    return {"mediaType": entry.media_type, "digest": entry.digest, "size": entry.size, "platform": dict(here)}


def parse(data: bytes, *, where: str) -> CheckpointIndex:
    """The index out of its document; refuses one that is no checkpoint's."""
    document = canonical_json.read_object(data, where=where)
    entries = Fields(document, where).objects("manifests")
    if len(entries) > MAX_ENTRIES:
        raise LimitExceeded(where=where, what="the number of entries", found=len(entries), limit=MAX_ENTRIES)
    found = CheckpointIndex(tuple(descriptor(entry) for entry in entries), _annotations(document, where))
    found.need(CRIU_TYPE, where=where)
    return found


def descriptor(fields: Fields) -> Descriptor:
    """A descriptor of a document."""
    digest = fields.text("digest")
    algorithm, _, digits = digest.partition(":")
    if algorithm != "sha256" or not is_hex_digest(digits):
        raise ImageError(where=fields.path("digest"), what="must be sha256: and 64 lower-case hex digits")
    return Descriptor(fields.text("mediaType"), digest, fields.integer("size"))


def gc_labels(entries: Iterable[Descriptor]) -> dict[str, str]:
    """What tells containerd's garbage collector that the index holds these blobs."""
    return {f"containerd.io/gc.ref.content.{number}": entry.digest for number, entry in enumerate(entries)}


def described(data: bytes) -> Descriptor:
    """The descriptor of an index document."""
    return Descriptor(INDEX_TYPE, f"sha256:{hashlib.sha256(data).hexdigest()}", len(data))


def _annotations(document: Mapping[str, Any], where: str) -> tuple[tuple[str, str], ...]:
    found = document.get("annotations") or {}
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise ImageError(where=f"{where}.annotations", what="must be an object of texts")
    return tuple(sorted(found.items()))
