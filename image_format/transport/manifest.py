"""The transport image: one OCI 1.1 artifact manifest for a checkpoint in a registry (spec/transport.md, section 5).

Config is the record; the layers are the packed index, the other sealed documents, the small files and the packs, in this
order. Canonical JSON without any time but the checkpoint's own, so that the same content gives the same bytes.
Refuses a manifest of another kind, another order, or with a layer that it does not know. Pure.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from image_format import canonical_json
from image_format.archives.small_files import MEDIA_TYPE as SMALL_FILES_TYPE
from image_format.fields import Fields
from image_format.file_names import INDEX_NAME, MANIFEST_NAME, RECORD_NAME, SIGNATURE_NAME
from image_format.index_model import MAX_INDEX_BYTES
from image_format.manifest import (
    ARTIFACT_TYPE,
    CREATED_KEY,
    INDEX_TYPE,
    MANIFEST_TYPE,
    MAX_MANIFEST_BYTES,
    RECORD_TYPE,
    ROOT_KEY,
    Descriptor,
    check_kind,
)
from image_format.packs.packed import RAW_PACK_TYPE, ZSTD_PACK_TYPE
from image_format.record import MAX_RECORD_BYTES
from image_format.trust.bundle import BUNDLE_TYPE, MAX_BUNDLE_BYTES
from image_format.trust.remote_documents import SEALED_MANIFEST_TYPE
from vgpu_errors import ContentMismatch, ImageError, LimitExceeded

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from image_format.index_model import Index

PACKED_INDEX_TYPE = "application/vnd.vgpu.checkpoint.packed-index.v1"
ENGINE_FILES_TYPE = "application/vnd.vgpu.checkpoint.engine.v1.tar+zstd"
# What every registry must take (distribution specification), and what of it packs can be: 270 bytes each.
MAX_BYTES = 4 << 20
MAX_PACKS = 14_000
MAX_PACK_BYTES = 128 * (64 << 20)
MAX_SMALL_FILES_BYTES = 8 << 30
MAX_ENGINE_FILES_BYTES = 1 << 40

_FIRST = (PACKED_INDEX_TYPE, INDEX_TYPE, SEALED_MANIFEST_TYPE, BUNDLE_TYPE, SMALL_FILES_TYPE)
_LIMITS = {
    RECORD_TYPE: MAX_RECORD_BYTES,
    PACKED_INDEX_TYPE: MAX_INDEX_BYTES,
    INDEX_TYPE: MAX_INDEX_BYTES,
    SEALED_MANIFEST_TYPE: MAX_MANIFEST_BYTES,
    BUNDLE_TYPE: MAX_BUNDLE_BYTES,
    SMALL_FILES_TYPE: MAX_SMALL_FILES_BYTES,
    ENGINE_FILES_TYPE: MAX_ENGINE_FILES_BYTES,
    RAW_PACK_TYPE: MAX_PACK_BYTES,
    ZSTD_PACK_TYPE: MAX_PACK_BYTES,
}
# The time is shown and not used; what it looks like must not surprise a terminal.
_TIME = re.compile(r"[0-9TZ:.+-]{1,40}")


@dataclass(frozen=True)
class TransportManifest:
    """The parsed manifest."""

    record: Descriptor
    packed_index: Descriptor
    index: Descriptor
    sealed_manifest: Descriptor
    signature: Descriptor
    small_files: Descriptor
    packs: tuple[Descriptor, ...]
    created: str
    content_root: str
    engine_files: Descriptor | None = None

    @classmethod
    def from_bytes(cls, data: bytes, *, where: str) -> TransportManifest:
        """Parse what a registry sent."""
        fields = Fields(canonical_json.read_object(data, where=where, max_bytes=MAX_BYTES), where)
        check_kind(fields)
        layers = _Layers(fields)
        packed_index, index, sealed_manifest, signature, small_files = map(layers.take, _FIRST)
        packs = tuple(layers.take_all(RAW_PACK_TYPE, ZSTD_PACK_TYPE))
        engine_files = layers.take(ENGINE_FILES_TYPE) if layers.has(ENGINE_FILES_TYPE) else None
        layers.expect_end()
        annotations = fields.object("annotations")
        created = annotations.text(CREATED_KEY)
        if not _TIME.fullmatch(created):
            raise ImageError(where=annotations.path(CREATED_KEY), what="is no time")
        return cls(
            record=_limited(fields.object("config"), RECORD_TYPE),
            packed_index=packed_index,
            index=index,
            sealed_manifest=sealed_manifest,
            signature=signature,
            small_files=small_files,
            packs=packs,
            created=created,
            content_root=annotations.hex_digest(ROOT_KEY),
            engine_files=engine_files,
        )

    def to_bytes(self) -> bytes:
        """The canonical bytes that are pushed."""
        doc = {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "artifactType": ARTIFACT_TYPE,
            "config": self.record.to_json(),
            "layers": [layer.to_json() for layer in self.layers()],
            "annotations": {CREATED_KEY: self.created, ROOT_KEY: self.content_root},
        }
        data = canonical_json.write(doc, where="transport manifest")
        if len(data) > MAX_BYTES or len(self.packs) > MAX_PACKS:
            raise LimitExceeded(where="transport manifest", what="its size", found=len(data), limit=MAX_BYTES)
        return data

    def layers(self) -> Iterator[Descriptor]:
        """All of them, in order."""
        yield from (self.packed_index, self.index, self.sealed_manifest, self.signature, self.small_files)
        yield from self.packs
        if self.engine_files is not None:
            yield self.engine_files

    def documents(self) -> Mapping[str, Descriptor]:
        """The four sealed documents by the names that they have in a sealed directory."""
        return {
            RECORD_NAME: self.record,
            INDEX_NAME: self.index,
            MANIFEST_NAME: self.sealed_manifest,
            SIGNATURE_NAME: self.signature,
        }

    def check_packs(self, packed: Index, *, where: str) -> None:
        """The layers are the packs that the packed index names."""
        named = [(pack.sha256.hex(), pack.size) for pack in packed.transport_packs]
        if named != [(pack.sha256, pack.size) for pack in self.packs]:
            raise ContentMismatch(where=where, what="its packs are not those of the packed index")


class _Layers:
    """The layers, taken one after the other."""

    def __init__(self, fields: Fields) -> None:
        self._at = fields.path("layers")
        self._layers = fields.objects("layers")
        if len(self._layers) > MAX_PACKS + len(_FIRST) + 1:
            limit = MAX_PACKS + len(_FIRST) + 1
            raise LimitExceeded(where=self._at, what="its length", found=len(self._layers), limit=limit)
        self._next = 0

    def has(self, *media_types: str) -> bool:
        return self._next < len(self._layers) and self._layers[self._next].text("mediaType") in media_types

    def take(self, media_type: str) -> Descriptor:
        if not self.has(media_type):
            raise ImageError(where=f"{self._at}[{self._next}]", what=f"must be the layer of type {media_type}")
        self._next += 1
        return _limited(self._layers[self._next - 1], media_type)

    def take_all(self, *media_types: str) -> Iterator[Descriptor]:
        while self.has(*media_types):
            yield self.take(self._layers[self._next].text("mediaType"))

    def expect_end(self) -> None:
        if self._next < len(self._layers):
            media_type = ascii(self._layers[self._next].text("mediaType")[:100])
            raise ImageError(
                where=f"{self._at}[{self._next}]", what=f"has the type {media_type}, which has no place here"
            )


def _limited(fields: Fields, media_type: str) -> Descriptor:
    descriptor = Descriptor.from_json(fields, media_type)
    if descriptor.size > _LIMITS[media_type]:
        limit = _LIMITS[media_type]
        raise LimitExceeded(where=fields.path("size"), what="the size of a layer", found=descriptor.size, limit=limit)
    return descriptor
