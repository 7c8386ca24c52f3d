"""The GPU objects of a process in the record (spec/record.md, section 3): what a staged restore makes and maps again.

An object is a piece of physical GPU memory; a mapping puts a part of it at an address that the application knows.
`check_objects` holds the record's objects against the index's VRAM regions: the same objects, nothing twice.
Parses at the edge; refuses mappings outside of their object. The agent writes it, restore reads it. Pure.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

from vgpu_errors import ImageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from image_format.chunk_index import Index, Region
    from image_format.fields import Fields
    from image_format.record import ProcessEntry

STAGED = "staged"
KINDS = ("alloc", "vmm")
MAX_DEVICE = (1 << 16) - 1
MAX_FLAGS = (1 << 32) - 1

_ADDRESS = re.compile(r"0x[1-9a-f][0-9a-f]{0,15}")
_UUID = re.compile(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_ADDRESS_END = 1 << 64


class Access(NamedTuple):
    """What a device may do through a mapping; flags are the driver's CUmemAccess_flags."""

    device: int
    flags: int


@dataclass(frozen=True)
class ObjectMapping:
    """`size` bytes of the object from `offset`, at the address `va`."""

    va: int
    size: int
    offset: int
    access: tuple[Access, ...]
    unknown: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_json(cls, fields: Fields) -> ObjectMapping:
        """Parse one of `mappings`."""
        va = fields.text("va")
        if not _ADDRESS.fullmatch(va):
            raise ImageError(where=fields.path("va"), what="must be an address such as 0x7f0000000000")
        size, offset = fields.integer("size"), fields.integer("offset")
        if size == 0 or int(va, 16) + size > _ADDRESS_END:
            raise ImageError(where=fields.path("size"), what=f"{size} bytes cannot lie at {va}")
        access = tuple(_access(item, f"{fields.path('access')}[{n}]") for n, item in enumerate(fields.items("access")))
        return cls(int(va, 16), size, offset, access, fields.unknown())

    def to_json(self) -> dict[str, Any]:
        """The form that is written."""
        doc = {"va": f"{self.va:#x}", "size": self.size, "offset": self.offset}
        return self.unknown | doc | {"access": [list(entry) for entry in self.access]}


@dataclass(frozen=True)
class ObjectEntry:
    """A physical object; `requested` is what the application asked for, `size` what the driver made of it."""

    id: int
    size: int
    device: int
    uuid: str
    kind: str
    requested: int
    mappings: tuple[ObjectMapping, ...] = ()
    unknown: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_json(cls, fields: Fields) -> ObjectEntry:
        """Parse one of `objects`."""
        size, requested, device, uuid = (*map(fields.integer, ("size", "requested", "device")), fields.text("uuid"))
        if size == 0 or requested > size:
            raise ImageError(where=fields.path("size"), what=f"{size} bytes cannot hold the {requested} requested")
        if device > MAX_DEVICE:
            raise ImageError(where=fields.path("device"), what=f"must not exceed {MAX_DEVICE}")
        if not _UUID.fullmatch(uuid):
            raise ImageError(where=fields.path("uuid"), what="must be GPU- and a uuid in lower-case hex")
        mappings = tuple(map(ObjectMapping.from_json, fields.objects("mappings")))
        for n, mapping in enumerate(mappings):
            if mapping.offset + mapping.size > size:
                raise ImageError(where=f"{fields.path('mappings')}[{n}]", what=f"goes beyond the object's {size} bytes")
        return cls(
            id=fields.integer("id"),
            size=size,
            device=device,
            uuid=uuid,
            kind=fields.one_of("kind", *KINDS),
            requested=requested,
            mappings=mappings,
            unknown=fields.unknown(),
        )

    def to_json(self) -> dict[str, Any]:
        """The form that is written."""
        return self.unknown | {
            "id": self.id,
            "size": self.size,
            "device": self.device,
            "uuid": self.uuid,
            "kind": self.kind,
            "requested": self.requested,
            "mappings": [mapping.to_json() for mapping in self.mappings],
        }


def read_objects(fields: Fields) -> tuple[ObjectEntry, ...]:
    """`objects` of a process: ids differ, addresses do not overlap; absent where the process has none."""
    if not fields.has("objects"):
        return ()
    objects = tuple(map(ObjectEntry.from_json, fields.objects("objects")))
    where = fields.path("objects")
    if len({entry.id for entry in objects}) != len(objects):
        raise ImageError(where=where, what="two objects have the same id")
    mappings = sorted((mapping.va, mapping.size) for entry in objects for mapping in entry.mappings)
    for (va, size), (next_va, _) in itertools.pairwise(mappings):
        if va + size > next_va:
            raise ImageError(where=where, what=f"the mappings at {va:#x} and {next_va:#x} overlap")
    return objects


def check_objects(processes: Iterable[ProcessEntry], index: Index, *, where: str) -> None:
    """Refuse a record whose objects are not the index's VRAM regions."""
    wanted: dict[str, ObjectEntry] = {}
    for process in processes:
        for entry in process.objects:
            name = f"{process.ns_pid}/{entry.id}"
            if name in wanted:
                raise ImageError(where=where, what=f"GPU object {name} appears twice")
            wanted[name] = entry
    regions: Mapping[str, Region] = {region.name: region for region in index.vram}
    for name in sorted(set(wanted) ^ set(regions)):
        place = "the record" if name in wanted else "the index"
        raise ImageError(where=where, what=f"GPU object {name} is in {place} only")
    for name, entry in wanted.items():
        region = regions[name]
        if (entry.size, entry.device, _uuid_bytes(entry.uuid)) != (region.length, region.device, region.uuid):
            raise ImageError(where=where, what=f"GPU object {name} differs from the index in size or device")


def _access(item: Any, at: str) -> Access:
    is_pair = isinstance(item, list) and len(item) == 2 and all(type(number) is int for number in item)
    if not is_pair or not (0 <= item[0] <= MAX_DEVICE and 0 <= item[1] <= MAX_FLAGS):
        raise ImageError(where=at, what="must be a device ordinal and access flags")
    return Access(*item)


def _uuid_bytes(uuid: str) -> bytes:
    return UUID(uuid.removeprefix("GPU-")).bytes
