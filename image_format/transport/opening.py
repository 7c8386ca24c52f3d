"""How a pull reads the blobs that a transport manifest names: as they are, or decrypted (spec/encryption.md).

`documents` of either kind come whole and checked against their digests; streams are checked by whoever uses them: packs
chunk by chunk against the signed index, and encrypted ones frame by frame besides. `pulling` and `archives` call it.
"""

from __future__ import annotations

import contextlib
import io
from typing import TYPE_CHECKING, BinaryIO, Protocol, cast

from image_format.encryption import ENCRYPTED_BLOB_TYPE, EncryptedRecord, open_stream
from image_format.manifest import Descriptor
from image_format.transport.manifest import MAX_BYTES, MAX_PACKS
from vgpu_errors import ContentMismatch, ImageError, LimitExceeded, RegistryContentWrong

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from image_format.archives.tar_reader import Readable
    from image_format.encryption import Identity, ImageCipher
    from image_format.fields import Fields
    from image_format.registry import Registry
    from image_format.transport.manifest import TransportManifest

INNER_NAME = "manifest"
MAX_LAYERS = MAX_PACKS + 8


class Blobs(Protocol):
    """The blobs of one checkpoint."""

    def get(self, descriptor: Descriptor) -> bytes:
        """A small one, whole and checked."""

    def open(
        self, descriptor: Descriptor, stretch: tuple[int, int], on_bytes: Callable[[int], None] | None = None
    ) -> contextlib.AbstractContextManager[Readable]:
        """From byte to byte of one, as it comes; `on_bytes` hears what crossed the wire."""


class PlainBlobs:
    """As they lie in the registry."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def get(self, descriptor: Descriptor) -> bytes:
        """A small one, whole and checked."""
        data = self._registry.get_blob(f"sha256:{descriptor.sha256}", descriptor.size)
        descriptor.check(data, where=f"{self._registry.reference.name}: {descriptor.media_type}")
        return data

    def open(
        self, descriptor: Descriptor, stretch: tuple[int, int], on_bytes: Callable[[int], None] | None = None
    ) -> contextlib.AbstractContextManager[Readable]:
        """From byte to byte of one, as it comes."""
        return self._registry.open_blob(f"sha256:{descriptor.sha256}", descriptor.size, stretch, on_bytes)


class EncryptedBlobs:
    """Behind the image key. The manifest that names the plain blobs is the first of the encrypted ones."""

    def __init__(self, registry: Registry, image: ImageCipher, layers: Sequence[Descriptor]) -> None:
        self._registry = registry
        self._image = image
        self._layers = layers
        self._places: dict[Descriptor, int] = {}

    def inner_manifest(self) -> bytes:
        """The plain transport manifest."""
        if self._layers[0].size > 2 * MAX_BYTES:
            found = self._layers[0].size
            raise LimitExceeded(where="encrypted manifest", what="its size", found=found, limit=2 * MAX_BYTES)
        return self._whole(0)

    def bind(self, manifest: TransportManifest) -> None:
        """Layer n+1 holds what the plain manifest names in place n, its config first."""
        plain = [manifest.record, *manifest.layers()]
        if len(plain) != len(self._layers) - 1:
            raise ImageError(where="encrypted image", what=f"has {len(self._layers)} layers for {len(plain)} blobs")
        for place, descriptor in enumerate(plain, 1):
            if self._image.sealed_size(descriptor.size) != self._layers[place].size:
                raise ContentMismatch(where=f"encrypted layer {place}", what="its size")
            self._places.setdefault(descriptor, place)

    def get(self, descriptor: Descriptor) -> bytes:
        """A small one, whole and checked."""
        data = self._whole(self._places[descriptor])
        descriptor.check(data, where=f"{self._registry.reference.name}: {descriptor.media_type}")
        return data

    @contextlib.contextmanager
    def open(
        self, descriptor: Descriptor, stretch: tuple[int, int], on_bytes: Callable[[int], None] | None = None
    ) -> Iterator[Readable]:
        """From byte to byte of one; frames are fetched and proved one at a time."""
        place = self._places[descriptor]
        layer = self._layers[place]
        remote = cast("BinaryIO", _RemoteFile(self._registry, layer, on_bytes))
        with open_stream(self._image, blob_name(place), remote, layer.size) as stream:
            stream.seek(stretch[0])
            yield _Stretch(stream, stretch[1] - stretch[0])

    def _whole(self, place: int) -> bytes:
        layer = self._layers[place]
        data = self._registry.get_blob(f"sha256:{layer.sha256}", layer.size)
        if len(data) != layer.size:
            raise RegistryContentWrong(where=self._registry.reference.name, what=f"layer {place} has another size")
        with open_stream(self._image, blob_name(place), io.BytesIO(data), layer.size) as stream:
            return stream.read()


def blob_name(place: int) -> str:
    """What an encrypted layer is called under the image key; no two have the same name."""
    return INNER_NAME if place == 0 else f"blob-{place:05}"


def open_encrypted(
    registry: Registry, fields: Fields, identities: Sequence[Identity], *, where: str
) -> tuple[EncryptedBlobs, bytes]:
    """The blobs of an encrypted image, and its plain manifest, if one of the keys opens it."""
    config = fields.object("config")
    size = config.integer("size")
    data = registry.get_blob(config.text("digest"), min(size, 64 << 10))
    image = EncryptedRecord.from_bytes(data, where=f"{where}: config").open(identities, where=where)
    layers = fields.objects("layers")
    if not 1 < len(layers) <= MAX_LAYERS:
        raise LimitExceeded(where=fields.path("layers"), what="its length", found=len(layers), limit=MAX_LAYERS)
    blobs = EncryptedBlobs(registry, image, [Descriptor.from_json(layer, ENCRYPTED_BLOB_TYPE) for layer in layers])
    return blobs, blobs.inner_manifest()


class _RemoteFile(io.RawIOBase):
    """A blob in a registry as a file that can seek; every read is one request of exactly that range."""

    def __init__(self, registry: Registry, layer: Descriptor, on_bytes: Callable[[int], None] | None) -> None:
        super().__init__()
        self._registry = registry
        self._layer = layer
        self._on_bytes = on_bytes
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._layer.size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: bytearray | memoryview, /) -> int:  # type: ignore[override]  # any writable buffer
        view = memoryview(buffer).cast("B")[: max(0, self._layer.size - self._position)]
        stretch, done = (self._position, self._position + len(view)), 0
        digest = f"sha256:{self._layer.sha256}"
        with self._registry.open_blob(digest, self._layer.size, stretch, self._on_bytes) as stream:
            while done < len(view) and (count := stream.readinto(view[done:])):
                done += count
        self._position += done
        return done


class _Stretch:
    """The beginning of a stream."""

    def __init__(self, stream: io.RawIOBase, left: int) -> None:
        self._stream = stream
        self._left = left

    def readinto(self, view: memoryview, /) -> int:
        count = self._stream.readinto(view[: self._left]) or 0
        self._left -= count
        return count
