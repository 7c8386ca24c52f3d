"""Brings an exported checkpoint file into a node: small blobs and image layers into the content store, CRIU's files out.

The CRIU tar goes straight into the folder that the restore reads and never into the content store. Every blob is held
against its digest; blobs that the index does not lead to are passed over. Called by `restoring`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from containerd_integration.checked_pieces import CheckedPieces
from containerd_integration.flat_tar import unpack
from image_format import canonical_json
from image_format.archives import containerd_archive, containerd_index
from image_format.archives.containerd_archive import Members, blob_name
from image_format.archives.containerd_index import Descriptor, descriptor
from image_format.fields import Fields
from vgpu_errors import ContentMismatch, NoSuchImage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from containerd_integration.api.content import ContentStore


class ImportedFile:
    """One exported file."""

    def __init__(self, path: Path) -> None:
        self.path, self.where = path, str(path)
        self.index = containerd_archive.read_index(path)
        self._wanted = {blob_name(blob.digest): blob for blob in self._blobs()}

    def bring_in(
        self, store: ContentStore, images: Path, *, on_progress: Callable[[int, int], None] | None = None
    ) -> None:
        """One pass over the file; every blob is in its place when this returns."""
        criu = self.index.need(containerd_index.CRIU_TYPE, where=self.where)
        seen = set()
        with Members(self.path, on_progress) as members:
            for name, size in members.files():
                blob = self._wanted.get(name)
                if blob is None:
                    continue
                if blob.size != size:
                    raise ContentMismatch(where=f"{self.where}: {name}", what="size")
                pieces = CheckedPieces(members.tar.read, blob, f"{self.where}: {name}")
                if blob == criu:
                    unpack(pieces, images, where=f"{self.where}: {name}")
                    pieces.drain()
                else:
                    store.write(blob, pieces)
                seen.add(name)
        missing = sorted(set(self._wanted) - seen)
        if missing:
            raise NoSuchImage(path=self.where, what=f"its index names {missing[0]}, and it is not there")

    def _blobs(self) -> Iterator[Descriptor]:
        """All that the index leads to."""
        for entry in self.index.entries:
            yield entry
            if entry.media_type in containerd_index.MANIFEST_TYPES:
                data = containerd_archive.read_blob(self.path, entry)
                document = Fields(canonical_json.read_object(data, where=self.where), self.where)
                yield descriptor(document.object("config"))
                yield from (descriptor(layer) for layer in document.objects("layers"))
