"""Cuts CRIU's files of memory pages along the addresses that the pages had (spec/chunk-index.md, section 9).

`pagemap-*.img` says which runs of pages a `pages-*.img` holds, in order. A chunk is what lies in it of one aligned piece
of the address space, 4 MiB unless the chunk size differs: so equal memory gives equal chunks wherever it lies in the
file. Reads the few protobuf fields that this takes (CRIU's images/pagemap.proto) and nothing else.
Refuses nothing: an image that is damaged, of another form or does not fit its file gives no cuts, and the file is cut
at fixed positions like any other. A restore never relies on it. Sealing and the reader of archives call it. Pure.
"""

from __future__ import annotations

import itertools
import re
import struct
from array import array
from typing import TYPE_CHECKING, NamedTuple

from image_format.index_model import MAX_CHUNKS, MAX_SMALL_FILE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

# CRIU's magic numbers: every image since version 1.1, and the pagemaps among them.
COMMON_MAGIC, PAGEMAP_MAGIC = 0x54564319, 0x56084025
# 4 million runs at the least; the largest seen had 30 thousand.
MAX_PAGEMAP_BYTES = 32 << 20
MAX_ENTRY_BYTES = 4096
PAGE_SIZES = (4096, 16384, 65536)
PRESENT = 4

_PAGEMAP = re.compile(r"pagemap-(shmem-)?[0-9]+\.img")
_PAGES = re.compile(r"pages-[0-9]+\.img")
_SIZE = struct.Struct("<I")
_ADDRESS_END = 1 << 64
# Field numbers of pagemap_head and pagemap_entry.
_PAGES_ID = 1
_ADDRESS, _COMPAT_COUNT, _IN_PARENT, _FLAGS, _COUNT = 1, 2, 3, 4, 5


class Pagemap(NamedTuple):
    """The runs whose pages are in the file `pages-<pages_id>.img`: addresses and numbers of pages, in order."""

    pages_id: int
    addresses: array[int]
    counts: array[int]

    @property
    def pages_name(self) -> str:
        """The file that holds the pages."""
        return f"pages-{self.pages_id}.img"

    def cuts(self, size: int, chunk_size: int) -> array[int] | None:
        """The lengths of the chunks of a file of that size; None where it is not the file of these runs."""
        page_count = sum(self.counts)
        page_size = next((page for page in PAGE_SIZES if page * page_count == size), None)
        if page_size is None or not 0 < size <= MAX_CHUNKS * chunk_size:  # a tar's header can claim any size
            return None
        pieces = self._pieces(page_size, chunk_size)
        lengths = array("I")
        try:
            lengths.extend(sum(length for _, length in group) for _, group in itertools.groupby(pieces, lambda p: p[0]))
        except (ValueError, OverflowError):  # runs out of order or beyond the address space
            return None
        return lengths

    def _pieces(self, page_size: int, chunk_size: int) -> Iterator[tuple[int, int]]:
        """Number of the aligned piece of the address space, and how many bytes of a run lie in it."""
        previous_end = 0
        for address, count in zip(self.addresses, self.counts, strict=True):
            end = address + count * page_size
            if address < previous_end or end > _ADDRESS_END or address % PAGE_SIZES[0]:
                raise ValueError
            previous_end, start = end, address
            while start < end:
                piece_end = min(end, (start // chunk_size + 1) * chunk_size)
                yield start // chunk_size, piece_end - start
                start = piece_end


def is_pagemap(name: str) -> bool:
    """The name is that of an image that says which pages there are."""
    return _PAGEMAP.fullmatch(name) is not None


def is_cut_by_pages(name: str, size: int) -> bool:
    """A file that is cut by a pagemap where there is a good one; small ones do not gain from it."""
    return size > MAX_SMALL_FILE and _PAGES.fullmatch(name) is not None


def read(data: bytes | bytearray | memoryview) -> Pagemap | None:
    """The runs that an image lists; None for anything but a whole pagemap."""
    view = memoryview(data)
    start = _magic_size(view)
    if not start or len(view) > MAX_PAGEMAP_BYTES:
        return None
    try:
        entries = _entries(view, start)
        head = _fields(next(entries, view[:0]))
        runs = Pagemap(head[_PAGES_ID], array("Q"), array("Q"))
        for entry in entries:
            _add(runs, _fields(entry))
    except (KeyError, ValueError, IndexError, OverflowError):
        return None
    return runs


def cuts_of(pagemaps: Mapping[str, Pagemap | None], sizes: Mapping[str, int], chunk_size: int) -> dict[str, array[int]]:
    """For each file of pages that a pagemap fits, the lengths of its chunks; one that two claim has none."""
    claims: dict[str, list[Pagemap]] = {}
    for pagemap in pagemaps.values():
        if pagemap is not None:
            claims.setdefault(pagemap.pages_name, []).append(pagemap)
    found = {
        name: claimed[0].cuts(sizes[name], chunk_size)
        for name, claimed in claims.items()
        if len(claimed) == 1 and name in sizes and is_cut_by_pages(name, sizes[name])
    }
    return {name: lengths for name, lengths in found.items() if lengths is not None}


# ---- CRIU's image format -------------------------------------------------------------------------


def _magic_size(view: memoryview) -> int:
    """Where the entries begin: behind two magic numbers, or one in images before CRIU 2; 0 for another image."""
    words = struct.unpack_from("<2I", view) if len(view) >= 8 else (0, 0)
    if words == (COMMON_MAGIC, PAGEMAP_MAGIC):
        return 8
    return 4 if words[0] == PAGEMAP_MAGIC else 0


def _entries(view: memoryview, start: int) -> Iterator[memoryview]:
    while start < len(view):
        if len(view) - start < _SIZE.size:
            raise ValueError
        (size,) = _SIZE.unpack_from(view, start)
        start += _SIZE.size
        if size > min(MAX_ENTRY_BYTES, len(view) - start):
            raise ValueError
        yield view[start : start + size]
        start += size


def _add(runs: Pagemap, fields: Mapping[int, int]) -> None:
    flags = fields.get(_FLAGS, 0 if fields.get(_IN_PARENT) else PRESENT)
    count = fields[_COUNT] if _COUNT in fields else fields[_COMPAT_COUNT]
    if flags & PRESENT and count:
        runs.addresses.append(fields[_ADDRESS])
        runs.counts.append(count)


def _fields(entry: memoryview) -> dict[int, int]:
    """The numbers in a protobuf message by field; what is no number is passed over."""
    fields: dict[int, int] = {}
    at = 0
    while at < len(entry):
        tag, at = _varint(entry, at)
        kind = tag & 7
        if kind == 0:
            fields[tag >> 3], at = _varint(entry, at)
        elif kind == 2:
            size, at = _varint(entry, at)
            at += size
        elif kind in (1, 5):
            at += 8 if kind == 1 else 4
        else:
            raise ValueError
    if at != len(entry):
        raise ValueError
    return fields


def _varint(entry: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = entry[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError
