"""Ties podman's checkpoint image and our artifact into one index (spec/transport.md, section 8; docs/registry.md).

`podman container checkpoint --create-image` makes an image of one layer. In reference mode that layer is small and says
in `checkpoint/vgpu-reference.json` what it lacks; here it learns where the rest lies, by digest, so that
`podman pull` and `podman container restore` on another node find it. Everything else of the image stays as it was.

1. our artifact is in the registry already, by digest    2. the image's layer, config and manifest are pushed
3. the index over both is put under the tag: the commit point
Refuses an image whose checkpoint is another one than the artifact's, or that has no checkpoint at all.
"""

from __future__ import annotations

import gzip
import hashlib
import tempfile
import time
from dataclasses import dataclass, replace
from typing import IO, TYPE_CHECKING, Any, cast

from image_format import canonical_json
from image_format.archives import ocistore
from image_format.archives.archive_scan import PREFIX
from image_format.archives.archive_sources import Decompressed
from image_format.archives.tar_editing import TarEditor, TarWriter
from image_format.file_names import MANIFEST_NAME, REFERENCE_NAME
from image_format.manifest import ARTIFACT_TYPE, MANIFEST_TYPE, MAX_MANIFEST_BYTES
from image_format.references.reference import MAX_LOCATIONS, MAX_REFERENCE_BYTES, ReferenceNote
from image_format.registry.manifests import INDEX_TYPE, digest_of
from image_format.transport.blobs import Blob, Sender
from vgpu_errors import ContentMismatch, LimitExceeded, NoSuchImage

if TYPE_CHECKING:
    from image_format.archives.ocistore import Layout
    from image_format.archives.tar_editing import RawMember
    from image_format.registry import Registry
    from image_format.transport.pushing import Pushed
    from image_format.transport.watching import Counts, Watcher

LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar+gzip"
CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
GZIP_LEVEL = 1


@dataclass(frozen=True)
class Tied:
    """The index, and podman's image in it. `is_reference` says that the image needs the artifact."""

    digest: str
    image_digest: str
    is_reference: bool


def tie(
    layout: Layout, pushed: Pushed, registry: Registry, counts: Counts, watcher: Watcher, *, target: str | None = None
) -> Tied:
    """Push the image of the layout and put it under the tag together with the artifact that was pushed before."""
    image, config = ocistore.image_documents(layout)
    with tempfile.TemporaryFile() as layer:
        edited = _edit_layer(layout, layer, pushed)
        blob = Blob.of_file(layer)
        config["rootfs"] = {"type": "layers", "diff_ids": [edited.diff_id]}
        config_blob = Blob.of_bytes(_json(config))
        watcher.phase("image", 0)
        sender = Sender(registry, {}, (), counts, watcher, phase="image")
        for entry in (blob, config_blob):
            sender.bring(entry)
    manifest = _json(
        {
            **image,
            "mediaType": MANIFEST_TYPE,
            "config": _described(config_blob, CONFIG_TYPE),
            "layers": [_described(blob, LAYER_TYPE)],
        }
    )
    image_digest = registry.put_manifest(manifest, MANIFEST_TYPE, digest_of(manifest))
    index = _json(_index(manifest, config, pushed))
    return Tied(registry.put_manifest(index, INDEX_TYPE, target), image_digest, edited.is_reference)


def _index(manifest: bytes, config: dict[str, Any], pushed: Pushed) -> dict[str, Any]:
    """podman's image first; the artifact on a platform that no engine runs, as others do with their attestations."""
    platform = {"architecture": str(config.get("architecture", "amd64")), "os": str(config.get("os", "linux"))}
    image = {"mediaType": MANIFEST_TYPE, "digest": digest_of(manifest), "size": len(manifest), "platform": platform}
    artifact = {
        "mediaType": MANIFEST_TYPE,
        "artifactType": ARTIFACT_TYPE,
        "digest": pushed.digest,
        "size": pushed.size,
        "platform": {"architecture": "unknown", "os": "unknown"},
    }
    return {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": [image, artifact]}


@dataclass(frozen=True)
class _Edited:
    diff_id: str = ""
    is_reference: bool = False


def _edit_layer(layout: Layout, out: IO[bytes], pushed: Pushed) -> _Edited:
    """The layer with the locations in its note, compressed into the file."""
    edited = _Edited()
    with ocistore.open_layer(layout) as layer, gzip.GzipFile("", "wb", GZIP_LEVEL, out, mtime=0) as compressed:
        hashed = _Hashed(cast("IO[bytes]", compressed))
        writer, manifest = TarWriter(cast("IO[bytes]", hashed)), ""
        editor = TarEditor(Decompressed(layer, where=layout.where, is_seeking=False), where=layout.where)
        for raw in editor:
            name = raw.member.name
            if name == PREFIX + REFERENCE_NAME:
                data = _located(_whole(raw, editor, MAX_REFERENCE_BYTES, layout.where), pushed)
                writer.add(name, len(data), iter([memoryview(data)]), when_s=int(time.time()))
                edited = replace(edited, is_reference=True)
            elif name == PREFIX + MANIFEST_NAME:
                data = _whole(raw, editor, MAX_MANIFEST_BYTES, layout.where)
                manifest = hashlib.sha256(data).hexdigest()
                writer.copy(raw, iter([memoryview(data)]))
            else:
                writer.copy(raw, editor.data())
        writer.end()
        layer.expect_whole()
    _check_same(manifest, pushed, layout.where)
    out.flush()
    return replace(edited, diff_id=f"sha256:{hashed.digest.hexdigest()}")


def _check_same(manifest: str, pushed: Pushed, where: str) -> None:
    if not manifest:
        raise NoSuchImage(path=where, what="the image holds no checkpoint of ours")
    if manifest != pushed.manifest_digest:
        raise ContentMismatch(where=where, what="the image's checkpoint is another one than the one that is pushed")


def _whole(raw: RawMember, editor: TarEditor, limit: int, where: str) -> bytes:
    if raw.member.size > limit:
        at = f"{where}: {raw.member.name}"
        raise LimitExceeded(where=at, what="its size", found=raw.member.size, limit=limit)
    return b"".join(bytes(piece) for piece in editor.data())


def _located(data: bytes, pushed: Pushed) -> bytes:
    note = ReferenceNote.from_bytes(data)
    locations = tuple(dict.fromkeys((str(pushed.reference), *note.locations)))[:MAX_LOCATIONS]
    return replace(note, locations=locations).to_bytes()


class _Hashed:
    """Passes bytes on and hashes them."""

    def __init__(self, out: IO[bytes]) -> None:
        self._out = out
        self.digest = hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        return self._out.write(data)


def _json(doc: dict[str, Any]) -> bytes:
    return canonical_json.write(doc, where="image")


def _described(blob: Blob, media_type: str) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": blob.digest, "size": blob.size}
