"""GPU memory in a checkpoint: its regions, and the packs that their chunks lie in (spec/chunk-index.md, sections 3 to 5).

The data plane copies device objects into `vgpu-pack-NNNNN.bin` files, slot by slot, and hands the seal a *fragment*:
the VRAM part of the chunk index, in the same binary form, as `.vgpu-partial-vram.bin` in the image path.
`sealing.seal` merges it; at a restore `VramFragment.from_index` gives the data plane the same regions back.
Touches no pack and no GPU; refuses places that overlap, are not at a slot, or lie in a pack of another name.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from uuid import UUID

from image_format import chunk_index
from image_format.chunk_index import CHUNK_SIZE, MAX_INDEX_BYTES, Chunk, Codec, Index, Pack, Region, RegionKind
from image_format.file_names import FRAGMENT_NAME, object_key, pack_name
from vgpu_errors import ImageError, NoSuchImage

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = [
    "CHUNK_SIZE",
    "FRAGMENT_NAME",
    "ChunkPlace",
    "VramFragment",
    "VramRegion",
    "pack_name",
    "read_fragment",
    "region_name",
    "write_fragment",
]

_UUID_PREFIX = "GPU-"


class ChunkPlace(NamedTuple):
    """A chunk's id and the slot that holds it; no pack means that the chunk is all zero and not stored.

    The offset is a multiple of the chunk size. Only the last chunk of a region may be shorter than that.
    """

    id: bytes
    pack: str | None
    offset: int
    length: int


@dataclass(frozen=True)
class VramRegion:
    """A physical object in GPU memory; `device` is the ordinal in its process, `address` its first mapping or 0."""

    device: int
    uuid: str
    address: int
    length: int
    name: str
    chunks: tuple[ChunkPlace, ...]


@dataclass(frozen=True)
class VramFragment:
    """All VRAM regions of a checkpoint, by pid and object id, and the packs that they need, by name.

    A pack's size is the least that its file must have; the seal writes down the size that it has.
    """

    regions: tuple[VramRegion, ...]
    packs: tuple[Pack, ...]
    chunk_size: int = CHUNK_SIZE

    @classmethod
    def of(cls, regions: Iterable[VramRegion], *, chunk_size: int = CHUNK_SIZE) -> VramFragment:
        """The fragment of these regions in any order; what their packs must hold follows from the places."""
        ordered = tuple(sorted(regions, key=lambda region: object_key(region.name, where="VRAM region")))
        ends: dict[str, int] = {}
        for region in ordered:
            for place in region.chunks:
                if place.pack is not None:
                    ends[place.pack] = max(ends.get(place.pack, 0), place.offset + place.length)
        return cls(ordered, tuple(Pack(name, size) for name, size in sorted(ends.items())), chunk_size)

    @classmethod
    def from_index(cls, index: Index) -> VramFragment:
        """The VRAM part of an index."""
        regions = tuple(_from_index(region, index) for region in index.vram)
        return cls(regions, index.vram_packs, index.chunk_size)

    def to_index(self, *, packs_before: int = 0, chunks_before: int = 0) -> Index:
        """The fragment as an index of its own, or as the tables that follow those of the files."""
        numbers = {pack.name: number for number, pack in enumerate(self.packs, packs_before)}
        regions: list[Region] = []
        chunks: list[Chunk] = []
        for region in self.regions:
            regions.append(_to_index(region, chunks_before + len(chunks)))
            chunks += (_to_chunk(place, numbers, region.name) for place in region.chunks)
        return Index(tuple(regions), tuple(chunks), self.packs, self.chunk_size)

    @property
    def length(self) -> int:
        """Bytes of GPU memory in all regions."""
        return sum(region.length for region in self.regions)


def region_name(ns_pid: int, object_id: int) -> str:
    """The name of the region that holds a process's object."""
    name = f"{ns_pid}/{object_id}"
    object_key(name, where="VRAM region")
    return name


def write_fragment(path: Path | str, fragment: VramFragment) -> None:
    """Write the fragment to this file, `IMAGE_PATH/.vgpu-partial-vram.bin`, as a whole or not at all."""
    path = Path(path)
    data = to_bytes(fragment)
    new = path.with_name(f"{path.name}.new")
    try:
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        new.replace(path)
    except OSError as error:
        new.unlink(missing_ok=True)
        raise ImageError(where=path, what=f"cannot be written ({error.strerror})") from error


def read_fragment(path: Path | str) -> VramFragment:
    """Read and check a fragment."""
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            data = file.read(MAX_INDEX_BYTES + 1)
    except OSError as error:
        raise NoSuchImage(path=path, what=str(error.strerror)) from error
    return from_bytes(data, where=str(path))


def to_bytes(fragment: VramFragment) -> bytes:
    """The fragment's file; what a reader would refuse is not written."""
    data = chunk_index.to_bytes(fragment.to_index())
    chunk_index.from_bytes(data, where=FRAGMENT_NAME)
    return data


def from_bytes(data: bytes, *, where: str = FRAGMENT_NAME) -> VramFragment:
    """Parse and check a fragment's bytes: an index without files."""
    index = chunk_index.from_bytes(data, where=where)
    if index.files or index.is_packed:
        raise ImageError(where=where, what="a fragment holds no files")
    return VramFragment.from_index(index)


def merge(files: Index, fragment: VramFragment, sizes: Sequence[int]) -> Index:
    """The files' index followed by the fragment, with the sizes that the packs' files have."""
    if files.chunk_size != fragment.chunk_size:
        raise ImageError(
            where=FRAGMENT_NAME, what=f"its chunks have {fragment.chunk_size} bytes, not {files.chunk_size}"
        )
    vram = fragment.to_index(packs_before=len(files.packs), chunks_before=len(files.chunks))
    packs = tuple(pack._replace(size=size) for pack, size in zip(vram.packs, sizes, strict=True))
    return Index(files.regions + vram.regions, files.chunks + vram.chunks, files.packs + packs, files.chunk_size)


def _to_index(region: VramRegion, first_chunk: int) -> Region:
    uuid = _uuid_bytes(region)
    numbers = (first_chunk, len(region.chunks), RegionKind.VRAM, region.device, 0, region.address)
    return Region(region.name, region.length, *numbers, uuid)


def _to_chunk(place: ChunkPlace, numbers: dict[str, int], name: str) -> Chunk:
    if len(place.id) != 32:
        raise ImageError(where=name, what=f"a chunk id has {len(place.id)} bytes, not 32")
    if place.pack is None:
        return Chunk(place.id, 0, Codec.ZERO, 0, 0, place.length)
    if place.pack not in numbers:
        raise ImageError(where=name, what=f"the pack {place.pack} is not among the fragment's")
    return Chunk(bytes(place.id), numbers[place.pack], Codec.RAW, place.offset, place.length, place.length)


def _from_index(region: Region, index: Index) -> VramRegion:
    places = tuple(
        ChunkPlace(chunk.id, index.packs[chunk.pack].name if chunk.codec else None, chunk.offset, chunk.length)
        for chunk in index.chunks_of(region)
    )
    uuid = f"{_UUID_PREFIX}{UUID(bytes=region.uuid)}"
    return VramRegion(region.device, uuid, region.address, region.length, region.name, places)


def _uuid_bytes(region: VramRegion) -> bytes:
    try:
        value = UUID(region.uuid.removeprefix(_UUID_PREFIX))
    except ValueError as error:
        raise ImageError(where=region.name, what=f"{region.uuid!a} is not a device's uuid") from error
    if f"{_UUID_PREFIX}{value}" != region.uuid:
        raise ImageError(where=region.name, what=f"{region.uuid!a} is not a device's uuid")
    return value.bytes
