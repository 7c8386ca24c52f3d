"""Brings a checkpoint image out of a registry into a node: image layers into the content store, CRIU's files out.

As `imported_file` does with a file: the CRIU tar goes straight into the folder that the restore reads, and no image of the
checkpoint's name stays. The base image is fetched only where the node has none of its name. Every blob is held against
its digest. Credentials, plain http and retries are the registry client's (docs/registry.md). Called by `restoring`.
"""

from __future__ import annotations

import contextlib
import io
import re
from typing import TYPE_CHECKING

from containerd_integration import base_image
from containerd_integration.checked_pieces import CheckedPieces
from containerd_integration.flat_tar import PIECE_BYTES, unpack
from image_format import canonical_json
from image_format.archives import containerd_index
from image_format.archives.containerd_index import descriptor
from image_format.fields import Fields
from vgpu_errors import NoSuchImage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from containerd_integration.api.content import ContentStore
    from image_format.archives.containerd_index import Descriptor
    from image_format.registry import Registry

# A first part with a dot or a port is a host; names below localhost are those of images that were made on the node.
_HOST = re.compile(r"[^/]*[.:][^/]*/[^/].*")


def is_local(reference: str) -> bool:
    """A name that no registry can be meant by."""
    return _HOST.fullmatch(reference) is None


class RemoteImage:
    """One checkpoint image behind an open client."""

    def __init__(self, registry: Registry, *, has_image: Callable[[str], bool]) -> None:
        self._registry, self.where = registry, str(registry.reference)
        found = registry.get_manifest()
        if found.media_type != containerd_index.INDEX_TYPE:
            raise NoSuchImage(
                path=self.where,
                what=f"its type {found.media_type} is not that of a checkpoint of containerd",
                remedy="What 'vgpu push' made is fetched with 'vgpu pull'; an ordinary image is started with 'ctr run'.",
            )
        self.index = containerd_index.parse(found.data, where=self.where)
        self._carries_image = not has_image(self.index.image_name)

    def bring_in(
        self, store: ContentStore, images: Path, *, on_progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Every blob is in its place when this returns."""
        criu = self.index.need(containerd_index.CRIU_TYPE, where=self.where)
        blobs = list(self._blobs(store))
        whole, done = criu.size + sum(blob.size for blob in blobs), 0

        def count(piece: int) -> None:
            nonlocal done
            done += piece
            if on_progress is not None:
                on_progress(done, whole)

        for blob in blobs:
            with self._opened(blob, count) as pieces:
                store.write(blob, pieces)
        with self._opened(criu, count) as pieces:
            unpack(pieces, images, where=self.where)
            pieces.drain()

    def _blobs(self, store: ContentStore) -> Iterator[Descriptor]:
        """All that goes into the content store and is not there yet, each once."""
        seen: set[str] = set()
        for entry in self.index.entries:
            if entry.media_type == containerd_index.CRIU_TYPE:
                continue
            for blob in self._with_content(entry):
                if blob.digest not in seen and store.size_of(blob.digest) != blob.size:
                    yield blob
                seen.add(blob.digest)

    def _with_content(self, entry: Descriptor) -> Iterator[Descriptor]:
        """A blob, and of the base image what it leads to on this machine."""
        if entry.media_type not in (*containerd_index.MANIFEST_TYPES, *containerd_index.INDEX_TYPES):
            yield entry
            return
        if not self._carries_image:
            return
        yield entry
        document = Fields(canonical_json.read_object(self._manifest(entry), where=self.where), self.where)
        if entry.media_type in containerd_index.INDEX_TYPES:
            for inner in document.objects("manifests"):
                if inner.object("platform").text("architecture") == base_image.this_machine():
                    yield from self._with_content(descriptor(inner))
            return
        yield descriptor(document.object("config"))
        yield from (descriptor(layer) for layer in document.objects("layers"))

    def _manifest(self, entry: Descriptor) -> bytes:
        return self._registry.get_manifest(entry.digest).data

    @contextlib.contextmanager
    def _opened(self, blob: Descriptor, on_bytes: Callable[[int], None]) -> Iterator[CheckedPieces]:
        where = f"{self.where}: {blob.digest}"
        if blob.media_type in (*containerd_index.MANIFEST_TYPES, *containerd_index.INDEX_TYPES):
            yield CheckedPieces(io.BytesIO(self._manifest(blob)).read, blob, where)
            return
        buffer = bytearray(PIECE_BYTES)
        with self._registry.open_blob(blob.digest, blob.size, on_bytes=on_bytes) as stream:

            def read(size: int) -> bytes:
                view = memoryview(buffer)[:size]
                return bytes(view[: stream.readinto(view)])

            yield CheckedPieces(read, blob, where)
