"""Finds the checkpoint inside an OCI image: a layout directory, an oci-archive, or podman's local storage
(spec/archive-layout.md, section 6).

`podman container checkpoint --create-image` makes an image of one layer with the content of an exported archive.
Layouts are read blob by blob and each blob is held against its descriptor; podman's storage is mounted read-only by
podman itself and unmounted again. Pulls nothing, changes no image.
"""  # noqa: D205 - the first sentence needs two lines

from __future__ import annotations

import contextlib
import hashlib
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from image_format import canonical_json
from image_format.archives.archive import FileSource, RewindableSource
from image_format.archives.tar_reader import Kind, TarReader
from image_format.fields import Fields, is_hex_digest
from vgpu_errors import ContentMismatch, EngineFailed, ImageError, LimitExceeded, NoSuchImage, Truncated

if TYPE_CHECKING:
    from collections.abc import Iterator

LAYOUT_NAME = "oci-layout"
INDEX_NAME = "index.json"
MAX_DOCUMENT_BYTES = 4 << 20
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
LAYER_PREFIX = "application/vnd.oci.image.layer.v1.tar"
PODMAN_DEADLINE_S = 120
_DRAIN_BYTES = 1 << 20


@dataclass(frozen=True)
class Blob:
    """A blob by sha256 and size."""

    sha256: str
    size: int

    @classmethod
    def from_json(cls, fields: Fields) -> Blob:
        """Parse a descriptor."""
        algorithm, _, digest = fields.text("digest").partition(":")
        if algorithm != "sha256" or not is_hex_digest(digest):
            raise ImageError(where=fields.path("digest"), what="must be sha256: and 64 lower-case hex digits")
        return cls(digest, fields.integer("size"))


class Layout(Protocol):
    """An OCI layout, wherever its files lie."""

    where: str

    def open(self, name: str) -> FileSource: ...  # noqa: D102


class LayoutDirectory:
    """An OCI layout in a directory."""

    def __init__(self, path: Path) -> None:
        self.where = str(path)
        self._path = path

    def open(self, name: str) -> FileSource:
        """A file of the layout; the caller enters it."""
        return FileSource(self._path / name)


class LayoutArchive:
    """An OCI layout in an uncompressed tar: `podman save --format oci-archive`, `skopeo copy ... oci-archive:`."""

    def __init__(self, path: Path) -> None:
        self.where = str(path)
        self._path = path
        self._places = dict(_tar_places(path))

    @property
    def is_layout(self) -> bool:
        """The tar holds a layout at all."""
        return LAYOUT_NAME in self._places and INDEX_NAME in self._places

    def open(self, name: str) -> FileSource:
        """A file of the layout; the caller enters it."""
        if name not in self._places:
            raise NoSuchImage(path=f"{self.where}:{name}", what="no such member")
        start, size = self._places[name]
        return FileSource(self._path, start=start, size=size)


def is_oci_layout(path: Path) -> bool:
    """A directory that says it is an OCI layout."""
    return (path / LAYOUT_NAME).is_file()


def open_oci_archive(path: Path) -> LayoutArchive | None:
    """The layout in a tar, or None where the file is something else."""
    try:
        layout = LayoutArchive(path)
    except (ImageError, NoSuchImage):
        return None
    return layout if layout.is_layout else None


def checkpoint_layer(layout: Layout) -> Blob:
    """The one layer of the one image in the layout."""
    layers = _manifest(layout).objects("layers")
    if len(layers) != 1 or not layers[0].text("mediaType").startswith(LAYER_PREFIX):
        raise NoSuchImage(path=layout.where, what=f"a checkpoint image has one tar layer, this one has {len(layers)}")
    return Blob.from_json(layers[0])


def image_documents(layout: Layout) -> tuple[dict[str, Any], dict[str, Any]]:
    """Manifest and config of the one image in the layout, as they are."""
    manifest = _manifest(layout)
    config_blob = Blob.from_json(manifest.object("config"))
    return manifest.whole(), _document(layout, _blob_name(config_blob), config_blob).whole()


def _manifest(layout: Layout) -> Fields:
    """The manifest of the one image in the layout."""
    manifests = _document(layout, INDEX_NAME, None).objects("manifests")
    images = [entry for entry in manifests if entry.text("mediaType") == MANIFEST_TYPE]
    if len(images) != 1:
        raise NoSuchImage(path=layout.where, what=f"it holds {len(images)} images; name a layout with one")
    blob = Blob.from_json(images[0])
    return _document(layout, _blob_name(blob), blob)


@contextlib.contextmanager
def open_layer(layout: Layout) -> Iterator[LayerSource]:
    """The checkpoint layer's bytes, held against their descriptor by `expect_whole`."""
    blob = checkpoint_layer(layout)
    with layout.open(_blob_name(blob)) as source:
        yield LayerSource(source, blob, where=layout.where)


class LayerSource(RewindableSource):
    """A layer blob that is hashed while it is read."""

    def __init__(self, source: FileSource, blob: Blob, *, where: str) -> None:
        self._source, self._blob, self._where = source, blob, where
        self._hash = hashlib.sha256()

    def readinto(self, view: memoryview, /) -> int:
        """Fill some of the buffer; 0 at the end."""
        count = self._source.readinto(view)
        self._hash.update(view[:count])
        return count

    def rewind(self) -> None:
        """Begin again."""
        self._source.rewind()
        self._hash = hashlib.sha256()

    def expect_whole(self) -> None:
        """Read what is left and refuse a blob that is not the described one."""
        buffer = memoryview(bytearray(_DRAIN_BYTES))
        while self.readinto(buffer):
            pass
        _check_blob(self._source.size, self._hash.hexdigest(), self._blob, self._where)


def _check_blob(size: int, sha256: str, blob: Blob, where: str) -> None:
    at = f"{where}: {_blob_name(blob)}"
    if size < blob.size:
        raise Truncated(where=at, found=size, needed=blob.size)
    if size != blob.size or sha256 != blob.sha256:
        raise ContentMismatch(where=at, what="sha256")


def _document(layout: Layout, name: str, blob: Blob | None) -> Fields:
    where = f"{layout.where}: {name}"
    with layout.open(name) as source:
        if source.size > MAX_DOCUMENT_BYTES:
            raise LimitExceeded(where=where, what="its size", found=source.size, limit=MAX_DOCUMENT_BYTES)
        data = b"".join(iter(source.read, b""))
    if blob is not None:
        _check_blob(len(data), hashlib.sha256(data).hexdigest(), blob, layout.where)
    return Fields(canonical_json.read_object(data, where=where), where)


def _blob_name(blob: Blob) -> str:
    return f"blobs/sha256/{blob.sha256}"


def _tar_places(path: Path) -> Iterator[tuple[str, tuple[int, int]]]:
    with FileSource(path) as source:
        seekable = _Seekable(source)
        for member in TarReader(seekable, where=str(path)):
            if member.kind is Kind.FILE:
                yield member.name, (member.offset, member.size)


class _Seekable:
    """A file whose members are jumped over."""

    def __init__(self, source: FileSource) -> None:
        self.readinto = source.readinto
        self.skip = source.seek_forward


# ---- podman's local storage ----------------------------------------------------------------------


@contextlib.contextmanager
def mounted_image(name: str) -> Iterator[Path]:
    """An image of podman's storage as a read-only directory, for as long as the block runs."""
    podman = shutil.which("podman")
    if podman is None or name.startswith("-"):
        raise NoSuchImage(path=name, what="there is no such file, and no podman whose images could be searched")
    if _podman(podman, "image", "exists", name).returncode != 0:
        raise NoSuchImage(path=name, what="there is no such file, and no such image in podman's storage")
    mounted = _podman(podman, "image", "mount", name)
    if mounted.returncode != 0:
        raise EngineFailed(engine="podman image mount", what=mounted.stderr.strip()[-400:])
    try:
        yield Path(mounted.stdout.strip())
    finally:
        _podman(podman, "image", "unmount", name)


def _podman(podman: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            [podman, *arguments], capture_output=True, text=True, check=False, timeout=PODMAN_DEADLINE_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EngineFailed(engine=f"podman {' '.join(arguments)}", what=str(error)) from error
