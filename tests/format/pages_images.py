"""Makes CRIU pagemap images and the files of pages that belong to them, for tests and vectors of kind `pages`.

Written from CRIU's images/pagemap.proto and magic.h; nothing here is read by the product.
"""

import struct
from dataclasses import dataclass

from blake3 import blake3

PAGE = 4096
MAGICS = struct.pack("<2I", 0x54564319, 0x56084025)


def varint(value):
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def message(*fields):
    """A protobuf message of numbers: pairs of field and value."""
    return b"".join(varint(number << 3) + varint(value) for number, value in fields)


def entry(data):
    return struct.pack("<I", len(data)) + data


@dataclass(frozen=True)
class Run:
    """Pages of memory at an address; those that are not present lie in no file."""

    address: int
    count: int
    is_present: bool = True


def pagemap(pages_id, runs, *, magics=MAGICS, form="flags"):
    """`form`: `flags` as CRIU 3.x and 4.0, `wide` with the 64-bit count of 4.1, `old` without flags."""
    out = [magics, entry(message((1, pages_id)))]
    for run in runs:
        if form == "old":
            fields = [(1, run.address), (2, run.count)] + ([] if run.is_present else [(3, 1)])
        elif form == "wide":
            fields = [(1, run.address), (2, 0), (4, 4 if run.is_present else 1), (5, run.count)]
        else:
            fields = [(1, run.address), (2, run.count), (4, 4 if run.is_present else 1)]
        out.append(entry(message(*fields)))
    return b"".join(out)


def page_at(address, version=0):
    """What a page holds: the same for the same address and version."""
    return blake3(struct.pack("<QQ", address, version)).digest(PAGE)


def pages(runs, content=page_at, page=PAGE):
    """The file of pages of these runs."""
    present = [run for run in runs if run.is_present]
    return b"".join(content(run.address + n * page) for run in present for n in range(run.count))
