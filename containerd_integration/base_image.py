"""The image that a container was made of: what of it goes into a checkpoint, and how it comes back on another node.

A checkpoint carries the one manifest that the container uses, so the index of a multi-platform image does not drag in
what the node never had. On restore the image is looked for under its name; where it is missing, it is made out of the
checkpoint's own blobs, and unpacked. Refuses an image whose layers the node does not hold.
Called by `checkpointing` and `restoring`.
"""

from __future__ import annotations

import contextlib
import hashlib
import platform
import uuid
from typing import TYPE_CHECKING

from containerd_integration.api.connection import is_missing, is_there_already
from containerd_integration.api.wire import message, wire_descriptor
from image_format import canonical_json
from image_format.archives.containerd_index import INDEX_TYPES, MACHINES, MANIFEST_TYPES, Descriptor, descriptor
from image_format.fields import Fields
from vgpu_errors import EngineFailed, NoSuchImage

if TYPE_CHECKING:
    from collections.abc import Iterator

    from containerd_integration.api.connection import Connection
    from containerd_integration.api.content import ContentStore

APPLY_S = 900.0
IMAGE = "containerd.services.images.v1.Image"


def find_target(connection: Connection, name: str) -> Descriptor | None:
    """What an image's name points at, or None where there is no such image."""
    try:
        target = connection.call("images", "Get", name=name).image.target
    except EngineFailed as problem:
        if is_missing(problem):
            return None
        raise
    return Descriptor(target.media_type, target.digest, target.size)


def manifest_of(store: ContentStore, target: Descriptor, *, where: str) -> Descriptor:
    """The manifest of this machine's platform, for an image of one or of several."""
    if target.media_type in MANIFEST_TYPES:
        return target
    if target.media_type not in INDEX_TYPES:
        raise NoSuchImage(path=where, what=f"its type {target.media_type} is no image's")
    here = this_machine()
    for entry in _document(store, target, where).objects("manifests"):
        found = descriptor(entry)
        named = entry.object("platform").text("architecture") if entry.has("platform") else here
        if found.media_type in MANIFEST_TYPES and named == here and store.size_of(found.digest) == found.size:
            return found
    raise NoSuchImage(path=where, what=f"containerd holds no manifest of it for {here}")


def this_machine() -> str:
    """This machine's name in images."""
    return MACHINES.get(platform.machine(), platform.machine())


def blobs_of(store: ContentStore, manifest: Descriptor, *, where: str) -> Iterator[Descriptor]:
    """The manifest and all that it names: configuration and layers."""
    yield manifest
    document = _document(store, manifest, where)
    yield descriptor(document.object("config"))
    yield from (descriptor(entry) for entry in document.objects("layers"))


def missing_blobs(store: ContentStore, manifest: Descriptor, *, where: str) -> list[str]:
    """Digests that the image names and the node does not hold: containerd can throw layers away after unpacking."""
    return [blob.digest for blob in blobs_of(store, manifest, where=where) if store.size_of(blob.digest) is None]


def make_image(connection: Connection, name: str, manifest: Descriptor) -> bool:
    """Give blobs that are there their name; False where another process was faster."""
    try:
        connection.call("images", "Create", image=message(IMAGE)(name=name, target=wire_descriptor(manifest)))
    except EngineFailed as problem:
        if not is_there_already(problem):
            raise
        return False
    return True


def unpacked(connection: Connection, store: ContentStore, manifest: Descriptor, snapshotter: str, *, where: str) -> str:
    """The chain id of the image's top snapshot, which is there when this returns."""
    document = _document(store, manifest, where)
    layers = [descriptor(entry) for entry in document.objects("layers")]
    config = descriptor(document.object("config"))
    diff_ids = _document(store, config, where).object("rootfs").texts("diff_ids")
    if len(diff_ids) != len(layers):
        raise NoSuchImage(path=where, what=f"{len(layers)} layers and {len(diff_ids)} diff ids do not fit together")
    chain = ""
    for layer, diff_id in zip(layers, diff_ids, strict=True):
        parent, chain = chain, _next_chain(chain, diff_id)
        if not _has_snapshot(connection, snapshotter, chain):
            _unpack_layer(connection, layer, snapshotter, parent, chain)
    _hold(store, manifest, config, layers, {f"containerd.io/gc.ref.snapshot.{snapshotter}": chain})
    return chain


def _hold(
    store: ContentStore, manifest: Descriptor, config: Descriptor, layers: list[Descriptor], snapshot: dict[str, str]
) -> None:
    """What a pull writes too: the image's name holds its manifest, the manifest its blobs, the configuration the snapshot."""
    blobs = {f"containerd.io/gc.ref.content.l.{number}": layer.digest for number, layer in enumerate(layers)}
    store.add_labels(manifest.digest, {"containerd.io/gc.ref.content.config": config.digest, **blobs})
    store.add_labels(config.digest, snapshot)


def _unpack_layer(connection: Connection, layer: Descriptor, snapshotter: str, parent: str, chain: str) -> None:
    key = f"vgpu-extract-{uuid.uuid4().hex} {chain}"
    mounts = connection.call("snapshots", "Prepare", snapshotter=snapshotter, key=key, parent=parent).mounts
    try:
        connection.call("diff", "Apply", diff=wire_descriptor(layer), mounts=mounts, deadline_s=APPLY_S)
        connection.call("snapshots", "Commit", snapshotter=snapshotter, name=chain, key=key)
    except BaseException as problem:
        with contextlib.suppress(EngineFailed):
            connection.call("snapshots", "Remove", snapshotter=snapshotter, key=key)
        if isinstance(problem, EngineFailed) and is_there_already(problem):
            return  # unpacked by somebody else meanwhile
        raise


def _has_snapshot(connection: Connection, snapshotter: str, name: str) -> bool:
    try:
        connection.call("snapshots", "Stat", snapshotter=snapshotter, key=name)
    except EngineFailed as problem:
        if is_missing(problem):
            return False
        raise
    return True


def _next_chain(chain: str, diff_id: str) -> str:
    """The chain id of a layer on top of another (OCI image spec, layer ChainID)."""
    return f"sha256:{hashlib.sha256(f'{chain} {diff_id}'.encode()).hexdigest()}" if chain else diff_id


def _document(store: ContentStore, blob: Descriptor, where: str) -> Fields:
    data = store.document(blob.digest, blob.size, where=f"{where}: {blob.digest}")
    return Fields(canonical_json.read_object(data, where=where), where)
