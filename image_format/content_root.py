"""The content root (spec/chunk-index.md, section 6): one digest for what a checkpoint holds, however it is packed.

BLAKE3-256 over a domain tag, the chunk size, the region table with names and without pack locations, all chunk ids, and
the lengths of the chunks of pages, which no other number determines.
Pure. The index, the record, the manifest and the signed statement all repeat it.
"""

from __future__ import annotations

import struct
import sys
from array import array
from typing import TYPE_CHECKING, Protocol

from blake3 import blake3

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

DOMAIN_TAG = b"vgpu-content-root-v1\0"

_PREFIX = struct.Struct("<IQ")
_REGION = struct.Struct("<HHIQQQI")


class RegionLike(Protocol):
    """What the root needs of a region."""

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def length(self) -> int: ...  # noqa: D102
    @property
    def chunk_count(self) -> int: ...  # noqa: D102
    @property
    def kind(self) -> int: ...  # noqa: D102
    @property
    def device(self) -> int: ...  # noqa: D102
    @property
    def flags(self) -> int: ...  # noqa: D102
    @property
    def address(self) -> int: ...  # noqa: D102


def content_root(
    chunk_size: int, regions: Sequence[RegionLike], chunk_ids: Iterable[bytes], pages_lengths: Iterable[int] = ()
) -> bytes:
    """The 32 bytes; `pages_lengths` are those of the chunks of all regions of kind pages, in order."""
    hasher = blake3(DOMAIN_TAG)
    hasher.update(_PREFIX.pack(chunk_size, len(regions)))
    for region in regions:
        name = region.name.encode("ascii")
        numbers = (region.kind, region.device, region.flags, region.address, region.length, region.chunk_count)
        hasher.update(_REGION.pack(*numbers, len(name)))
        hasher.update(name)
    hasher.update(b"".join(chunk_ids))
    lengths = array("I", pages_lengths)
    if sys.byteorder == "big":
        lengths.byteswap()
    hasher.update(lengths.tobytes())
    return hasher.digest()
