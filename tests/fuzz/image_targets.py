"""Fuzz targets: the documents, indexes and archives of a checkpoint."""

import hashlib
from pathlib import Path

from image_format import canonical_json, chunk_index, security_config, vram
from image_format.archives import ocistore
from image_format.archives.tar_reader import TarReader
from image_format.manifest import Manifest
from image_format.record import Record
from image_format.trust.bundle import Bundle
from image_format.trust.keys import parse_public_key
from image_format.trust.policy import parse_default
from image_format.trust.statement import Statement
from image_format.vram import VramFragment
from runtime_shim import restore
from tests.format.make_shared_vectors import Shared
from tests.format.make_staged_vectors import small
from tests.format.make_vectors import (
    CONFIG,
    SMALL_CHUNK,
    TRUSTED,
    Sealed,
    base_files,
    inside,
    make_tar,
    oci_files,
    outside,
)
from tests.fuzz.target import SCRATCH, Target, as_bytes, in_file, written
from vgpu_errors import VgpuError

# ---- the image -----------------------------------------------------------------------------------

SEALED = Sealed(base_files(), chunk_size=SMALL_CHUNK)
DOCUMENTS = SEALED.documents
BUNDLE = DOCUMENTS["vgpu-signature.json"]
STAGED = small()
STAGED_DOCUMENTS = STAGED.seal().all(STAGED.files)
SHARED_RECORD = Shared().seal().documents["vgpu-record.json"]
FRAGMENT = vram.to_bytes(VramFragment.of(STAGED.regions, chunk_size=SMALL_CHUNK))
TAR = make_tar(inside(SEALED.all(base_files())) + outside())
POLICY_FILE = b'{"version":1,"default":"refuse-untrusted"}'
OCI_FILES = oci_files(TAR)
OCI_MANIFEST = next(data for name, data in OCI_FILES.items() if data.startswith(b"{") and b'"layers"' in data)


class BytesSource:
    """A tar in memory."""

    def __init__(self, data):
        self._data = memoryview(data)

    def readinto(self, view):
        piece, self._data = self._data[: len(view)], self._data[len(view) :]
        view[: len(piece)] = piece
        return len(piece)


def read_tar(data):
    return [(member.name, member.kind, member.size) for member in TarReader(BytesSource(data), where="x")]


def layer_of(index, manifest=None):
    """The checkpoint layer that a layout with this index names; with a manifest, the index names that."""
    folder = SCRATCH / "layout"
    for name, data in OCI_FILES.items():
        written(f"layout/{name}", data)
    if manifest is not None:
        digest = hashlib.sha256(manifest).hexdigest()
        entry = {"mediaType": ocistore.MANIFEST_TYPE, "digest": f"sha256:{digest}", "size": len(manifest)}
        index = as_bytes({"schemaVersion": 2, "manifests": [entry]})
        written(f"layout/blobs/sha256/{digest}", manifest)
    written("layout/index.json", index)
    return ocistore.checkpoint_layer(ocistore.LayoutDirectory(folder))


def projected(data):
    found = security_config.project(security_config.load(data), bundle="/b", container_id="c")
    return security_config.differences(found, found)


IMAGE = {
    "chunk index": Target(chunk_index.from_bytes, DOCUMENTS["vgpu-index.bin"]),
    "chunk index with GPU memory": Target(chunk_index.from_bytes, STAGED_DOCUMENTS["vgpu-index.bin"]),
    "record": Target(Record.from_bytes, DOCUMENTS["vgpu-record.json"], "json bytes"),
    "record with GPU objects": Target(Record.from_bytes, STAGED_DOCUMENTS["vgpu-record.json"], "json bytes"),
    "record with shared memory": Target(Record.from_bytes, SHARED_RECORD, "json bytes"),
    "fragment": Target(vram.from_bytes, FRAGMENT),
    "fragment file": Target(in_file(vram.read_fragment), FRAGMENT),
    "manifest": Target(Manifest.from_bytes, DOCUMENTS["vgpu-manifest.json"], "json bytes"),
    "bundle": Target(Bundle.from_bytes, BUNDLE, "json bytes"),
    "statement": Target(Statement.from_bytes, Bundle.from_bytes(BUNDLE).envelope.payload, "json bytes"),
    "policy": Target(lambda data: parse_default(data, Path("policy.json")), POLICY_FILE, "json bytes"),
    "public key": Target(lambda data: parse_public_key(data, where="x"), TRUSTED.public.to_pem()),
    "canonical JSON": Target(
        lambda data: canonical_json.read(data, where="x"), DOCUMENTS["vgpu-record.json"], "json bytes"
    ),
    "tar": Target(read_tar, TAR),
    "OCI layout": Target(layer_of, OCI_FILES["index.json"], "json bytes"),
    "OCI manifest": Target(lambda data: layer_of(None, data), OCI_MANIFEST, "json bytes"),
    "spec.dump": Target(projected, as_bytes(CONFIG), "json bytes", (VgpuError, ValueError, RecursionError)),
    "spec.dump of an archive": Target(
        lambda data: restore.read_config(written("config.json", data)), as_bytes(CONFIG), "json bytes"
    ),
}
