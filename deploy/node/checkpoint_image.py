"""Makes an image of a kubelet's checkpoint archive: one layer, and the annotation by which containerd's CRI restores it.

    checkpoint_image.py ARCHIVE IMAGE.tar REFERENCE CONTAINER-NAME

The answer is an OCI archive for `ctr -n k8s.io images import`. Standard library only, constant memory.
Refuses an archive without config.dump and checkpoint/, because containerd would take the image for an ordinary one.
Run by deploy/example/fetch-job.yaml. Formats: OCI image layout 1.1; annotation: docs/kubernetes.md.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import sys
import tarfile
from pathlib import Path
from typing import Any

ANNOTATION = "org.criu.checkpoint.container.name"
REFERENCE = "io.containerd.image.name"
LAYER = "application/vnd.oci.image.layer.v1.tar"
CONFIG = "application/vnd.oci.image.config.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
PIECE = 1 << 20


def main(words: list[str]) -> int:
    """The exit status."""
    if len(words) != 4:
        print(__doc__, file=sys.stderr)
        return 2
    archive, image, reference, container = words
    try:
        make(Path(archive), Path(image), reference, container)
    except (OSError, ValueError, tarfile.TarError) as error:
        print(f"checkpoint_image: {error}", file=sys.stderr)
        return 1
    return 0


def make(archive: Path, image: Path, reference: str, container: str) -> None:
    """Write the image beside its final name and rename it: half an image is never taken for a whole one."""
    check(archive)
    layer = {"mediaType": LAYER, "digest": digest_of(archive), "size": archive.stat().st_size}
    config = encoded(config_of(layer["digest"]))
    manifest = encoded(manifest_of(described(CONFIG, config), layer, container))
    index = encoded(index_of(described(MANIFEST, manifest), reference, container))
    partial = image.with_name(image.name + ".partial")
    try:
        with tarfile.open(partial, "w") as out:
            add(out, "oci-layout", encoded({"imageLayoutVersion": "1.0.0"}))
            add(out, "index.json", index)
            for data in (config, manifest):
                add(out, blob(described("", data)["digest"]), data)
            entry = tarfile.TarInfo(blob(layer["digest"]))
            entry.size = layer["size"]
            with archive.open("rb") as content:
                out.addfile(entry, content)
        partial.chmod(0o600)
        partial.rename(image)
    finally:
        partial.unlink(missing_ok=True)


def check(archive: Path) -> None:
    """What containerd's restore looks for is there; links and devices, which it refuses, are not."""
    with tarfile.open(archive, "r:") as tar:
        names = set()
        for entry in tar:
            if not (entry.isreg() or entry.isdir()):
                message = f"{archive}: {entry.name} is no plain file"
                raise ValueError(message)
            names.add(entry.name.removeprefix("./"))
    if "config.dump" not in names or not any(name.startswith("checkpoint/") for name in names):
        message = f"{archive} is no checkpoint of a kubelet: config.dump or checkpoint/ is missing"
        raise ValueError(message)


def config_of(diff_id: str) -> dict[str, Any]:
    """The least that an image configuration needs."""
    machine = platform.machine()
    return {
        "architecture": ARCHITECTURES.get(machine, machine),
        "os": "linux",
        "config": {},
        "rootfs": {"type": "layers", "diff_ids": [diff_id]},
    }


def manifest_of(config: dict[str, Any], layer: dict[str, Any], container: str) -> dict[str, Any]:
    """The image's manifest."""
    return {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": config,
        "layers": [layer],
        "annotations": {ANNOTATION: container},
    }


def index_of(manifest: dict[str, Any], reference: str, container: str) -> dict[str, Any]:
    """The archive's index, with the name that the import gives the image."""
    named = {**manifest, "annotations": {REFERENCE: reference, ANNOTATION: container}}
    return {"schemaVersion": 2, "manifests": [named]}


def described(media_type: str, data: bytes) -> dict[str, Any]:
    """A descriptor."""
    return {"mediaType": media_type, "digest": f"sha256:{hashlib.sha256(data).hexdigest()}", "size": len(data)}


def digest_of(path: Path) -> str:
    """The digest of a file of any size."""
    state = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            state.update(piece)
    return f"sha256:{state.hexdigest()}"


def blob(digest: str) -> str:
    """Where a layout keeps a blob."""
    return f"blobs/sha256/{digest.partition(':')[2]}"


def encoded(document: object) -> bytes:
    """The same document gives the same bytes."""
    return json.dumps(document, separators=(",", ":"), sort_keys=True).encode()


def add(out: tarfile.TarFile, name: str, data: bytes) -> None:
    """One small file."""
    entry = tarfile.TarInfo(name)
    entry.size = len(data)
    out.addfile(entry, io.BytesIO(data))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
