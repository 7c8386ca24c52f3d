"""When two bulk files of checkpoints are the same: an identity computed from chunk ids (spec/store.md, section 2).

Pure. Nothing is read again for it: the index that the signature covers has the ids already. Bytes of a pack that no id
covers make no difference. Two files of one checkpoint never have one identity: a directory must not hold a file twice.
Everything in the store asks here what a file's content is called.
"""

from __future__ import annotations

import struct
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from blake3 import blake3

from image_format.file_names import is_pack
from image_format.index_model import MAX_SMALL_FILE, Codec, RegionKind

if TYPE_CHECKING:
    from collections.abc import Iterable

    from image_format.index_model import Index

_DOMAIN = b"vgpu-store-content-v1\0"
_HEAD = struct.Struct("<QQ")
_EXTENT = struct.Struct("<QQ32s")
_AGAIN = struct.Struct("<Q")


class Extent(NamedTuple):
    """A stretch of a file that has an id."""

    offset: int
    length: int
    id: bytes


class BulkFile(NamedTuple):
    """A sealed file that the store shares: a pack, or a file of more than 1 MiB."""

    name: str
    size: int
    content: str
    covered: tuple[Extent, ...] = ()


def bulk_files(index: Index) -> tuple[BulkFile, ...]:
    """The files of a checkpoint that lie in the store's content folder, with their identities."""
    covered, found = extents(index), []
    seen: Counter[str] = Counter()
    for pack in index.packs:
        if is_bulk(pack.name, pack.size):
            ids = tuple(covered[pack.name])
            content = content_id(pack.size, ids)
            seen[content] += 1
            if seen[content] > 1:
                content = content_id(pack.size, ids, earlier=seen[content] - 1)
            found.append(BulkFile(pack.name, pack.size, content, ids))
    return tuple(found)


def is_bulk(name: str, size: int) -> bool:
    """Whether a file is worth sharing; small ones are copied."""
    return is_pack(name) or size > MAX_SMALL_FILE


def content_id(size: int, covered: Iterable[Extent], *, earlier: int = 0) -> str:
    """The identity as 64 hex digits; `earlier` files of the same checkpoint have the same content."""
    ordered = sorted(covered)
    digest = blake3(_DOMAIN)
    digest.update(_HEAD.pack(size, len(ordered)))
    for extent in ordered:
        digest.update(_EXTENT.pack(*extent))
    if earlier:
        digest.update(_AGAIN.pack(earlier))
    return digest.hexdigest()


def extents(index: Index) -> dict[str, list[Extent]]:
    """For each file the stretches that ids cover, in ascending order."""
    files = {region.name: region for region in index.regions if region.kind != RegionKind.VRAM}
    found: dict[str, list[Extent]] = {}
    slots: dict[int, set[Extent]] = {}
    for number, pack in enumerate(index.packs):
        if pack.name not in files:
            slots[number] = set()
            continue
        offset, found[pack.name] = 0, []
        for chunk in index.chunks_of(files[pack.name]):
            found[pack.name].append(Extent(offset, chunk.length, chunk.id))
            offset += chunk.length
    for region in index.vram:
        for chunk in index.chunks_of(region):
            if chunk.codec != Codec.ZERO:
                slots[chunk.pack].add(Extent(chunk.offset, chunk.length, chunk.id))
    return found | {index.packs[number].name: sorted(used) for number, used in slots.items()}
