"""The GPU objects of a process in the record (spec/record.md, sections 3 and 4): what a staged restore makes and maps again.

An object is a piece of physical GPU memory; a mapping puts a part of it at an address that the application knows.
An import is another process's object in this one: it has mappings of its own and no content.
A descriptor is a number of the application's own that names an object, with a placeholder under it in the CPU side's files.
`check_objects` holds the record's objects against the index's VRAM regions: the same objects, nothing twice.
Parses at the edge; refuses mappings outside of their object. The agent writes it, restore reads it. Pure.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

from image_format.file_names import object_key
from vgpu_errors import ImageError, UnsafeName

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from image_format.chunk_index import Index, Region
    from image_format.fields import Fields
    from image_format.gpu_processes import ProcessEntry

STAGED = "staged"
SHARED = "shared"
IMPORT_KINDS = ("import", "opened")
# An object whose exporter is gone is held by one of its importers, and keeps the kind of an import.
KINDS = ("alloc", "vmm", *IMPORT_KINDS)
MAX_DEVICE = (1 << 16) - 1
MAX_FLAGS = (1 << 32) - 1
MAX_NUMBER = (1 << 31) - 1

_ADDRESS = re.compile(r"0x[1-9a-f][0-9a-f]{0,15}")
_UUID = re.compile(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_TOKEN = re.compile(r"[0-9a-f]{16}")
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
class Sharing:
    """How an object was given to others, as far as its process saw it."""

    ways: tuple[str, ...]
    peers: tuple[int, ...] = ()
    peer_count: int | None = None
    unknown: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_json(cls, fields: Fields) -> Sharing:
        """Parse `shared` of an object."""
        peers = fields.items("peers")
        for n, peer in enumerate(peers):
            if type(peer) is not int or peer < 0:
                raise ImageError(where=f"{fields.path('peers')}[{n}]", what="must be a process id")
        return cls(fields.texts("ways"), tuple(peers), fields.integer_or_none("peerCount"), fields.unknown())

    def to_json(self) -> dict[str, Any]:
        """The form that is written."""
        count = {} if self.peer_count is None else {"peerCount": self.peer_count}
        return self.unknown | {"ways": list(self.ways), "peers": list(self.peers)} | count


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
    shared: Sharing | None = None
    unknown: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_json(cls, fields: Fields) -> ObjectEntry:
        """Parse one of `objects`."""
        size = fields.integer("size")
        if size == 0:
            raise ImageError(where=fields.path("size"), what="an object of 0 bytes is none")
        return cls(
            id=fields.integer("id"),
            size=size,
            device=read_device(fields),
            uuid=read_uuid(fields),
            kind=fields.one_of("kind", *KINDS),
            requested=_read_requested(fields, size),
            mappings=_read_mappings(fields, size),
            shared=Sharing.from_json(fields.object("shared")) if fields.has("shared") else None,
            unknown=fields.unknown(),
        )

    def to_json(self) -> dict[str, Any]:
        """The form that is written."""
        shared = {} if self.shared is None else {"shared": self.shared.to_json()}
        return self.unknown | {
            "id": self.id,
            "size": self.size,
            "device": self.device,
            "uuid": self.uuid,
            "kind": self.kind,
            "requested": self.requested,
            "mappings": [mapping.to_json() for mapping in self.mappings],
            **shared,
        }

    @property
    def is_orphan(self) -> bool:
        """Its exporter is gone, so that an importer holds it."""
        return self.kind in IMPORT_KINDS


@dataclass(frozen=True)
class ImportEntry:
    """Another process's object in this process; `of` is its name `<nsPid>/<object id>`.

    `size` is what this process knows of it, at most the object's. `device` is None where this process has no number for it.
    """

    id: int
    of: str
    kind: str
    size: int
    requested: int
    device: int | None
    uuid: str
    mappings: tuple[ObjectMapping, ...] = ()
    unknown: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_json(cls, fields: Fields) -> ImportEntry:
        """Parse one of `imports`; whether the object is there is told by `gpu_processes.check_shared`."""
        size = fields.integer("size")
        return cls(
            id=fields.integer("id"),
            of=read_object_name(fields.text("of"), fields.path("of")),
            kind=fields.one_of("kind", *IMPORT_KINDS),
            size=size,
            requested=_read_requested(fields, size),
            device=read_device(fields) if fields.has("device") else None,
            uuid=read_uuid(fields),
            mappings=_read_mappings(fields, size),
            unknown=fields.unknown(),
        )

    def to_json(self) -> dict[str, Any]:
        """The form that is written."""
        device = {} if self.device is None else {"device": self.device}
        return self.unknown | {
            "id": self.id,
            "of": self.of,
            "kind": self.kind,
            "size": self.size,
            "requested": self.requested,
            "uuid": self.uuid,
            "mappings": [mapping.to_json() for mapping in self.mappings],
            **device,
        }


@dataclass(frozen=True)
class DescriptorEntry:
    """A number of the process that named the object `of`; the placeholder that CRIU brings back under it has the token."""

    number: int
    of: str
    closes_on_exec: bool
    token: int
    unknown: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_json(cls, fields: Fields) -> DescriptorEntry:
        """Parse one of `descriptors`; whether the object is there is told by `gpu_processes.check_shared`."""
        number, token = fields.integer("number"), fields.text("token")
        if number > MAX_NUMBER:
            raise ImageError(where=fields.path("number"), what=f"must not exceed {MAX_NUMBER}")
        if not _TOKEN.fullmatch(token):
            raise ImageError(where=fields.path("token"), what="must be 16 digits of lower-case hex")
        of = read_object_name(fields.text("of"), fields.path("of"))
        return cls(number, of, _read_claim(fields, "closeOnExec"), int(token, 16), fields.unknown())

    def to_json(self) -> dict[str, Any]:
        """The form that is written."""
        doc = {"number": self.number, "of": self.of, "closeOnExec": self.closes_on_exec}
        return self.unknown | doc | {"token": f"{self.token:016x}"}


def read_descriptors(fields: Fields) -> tuple[DescriptorEntry, ...]:
    """`descriptors` of a process: each number once; absent where there are none."""
    entries = tuple(map(DescriptorEntry.from_json, fields.objects("descriptors"))) if fields.has("descriptors") else ()
    if len({entry.number for entry in entries}) != len(entries):
        raise ImageError(where=fields.path("descriptors"), what="two of them have the same number")
    return entries


def read_objects(fields: Fields) -> tuple[tuple[ObjectEntry, ...], tuple[ImportEntry, ...]]:
    """`objects` and `imports` of a process: ids differ, addresses do not overlap; either is absent where there are none."""
    objects = tuple(map(ObjectEntry.from_json, fields.objects("objects"))) if fields.has("objects") else ()
    imports = tuple(map(ImportEntry.from_json, fields.objects("imports"))) if fields.has("imports") else ()
    where = fields.path("imports" if imports else "objects")
    entries: tuple[ObjectEntry | ImportEntry, ...] = (*objects, *imports)
    if len({entry.id for entry in entries}) != len(entries):
        raise ImageError(where=where, what="two objects or imports have the same id")
    places = sorted((place.va, place.size) for entry in entries for place in entry.mappings)
    for (va, size), (next_va, _) in itertools.pairwise(places):
        if va + size > next_va:
            raise ImageError(where=where, what=f"the mappings at {va:#x} and {next_va:#x} overlap")
    return objects, imports


def object_name(ns_pid: int, object_id: int) -> str:
    """The name of an object or import in references, and of an object in the index."""
    return f"{ns_pid}/{object_id}"


def read_object_name(text: str, at: str) -> str:
    """A name `<nsPid>/<object id>` in its one spelling."""
    try:
        object_key(text, where=at)
    except UnsafeName as error:
        raise ImageError(where=at, what="must name an object, such as 7/12") from error
    return text


def read_device(fields: Fields) -> int:
    """`device`: its ordinal in the process."""
    device = fields.integer("device")
    if device > MAX_DEVICE:
        raise ImageError(where=fields.path("device"), what=f"must not exceed {MAX_DEVICE}")
    return device


def read_uuid(fields: Fields) -> str:
    """`uuid` of a device."""
    uuid = fields.text("uuid")
    if not _UUID.fullmatch(uuid):
        raise ImageError(where=fields.path("uuid"), what="must be GPU- and a uuid in lower-case hex")
    return uuid


def check_objects(processes: Iterable[ProcessEntry], index: Index, *, where: str) -> None:
    """Refuse a record whose objects are not the index's VRAM regions."""
    wanted: dict[str, ObjectEntry] = {}
    for process in processes:
        for entry in process.objects:
            name = object_name(process.ns_pid, entry.id)
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


def _read_claim(fields: Fields, key: str) -> bool:
    value = fields.any(key)
    if not isinstance(value, bool):
        raise ImageError(where=fields.path(key), what="must be true or false")
    return value


def _read_requested(fields: Fields, size: int) -> int:
    requested = fields.integer("requested")
    if requested > size:
        raise ImageError(where=fields.path("size"), what=f"{size} bytes cannot hold the {requested} requested")
    return requested


def _read_mappings(fields: Fields, size: int) -> tuple[ObjectMapping, ...]:
    mappings = tuple(map(ObjectMapping.from_json, fields.objects("mappings")))
    for n, mapping in enumerate(mappings):
        if mapping.offset + mapping.size > size:
            raise ImageError(where=f"{fields.path('mappings')}[{n}]", what=f"goes beyond the object's {size} bytes")
    return mappings


def _access(item: Any, at: str) -> Access:
    is_pair = isinstance(item, list) and len(item) == 2 and all(type(number) is int for number in item)
    if not is_pair or not (0 <= item[0] <= MAX_DEVICE and 0 <= item[1] <= MAX_FLAGS):
        raise ImageError(where=at, what="must be a device ordinal and access flags")
    return Access(*item)


def _uuid_bytes(uuid: str) -> bytes:
    return UUID(uuid.removeprefix("GPU-")).bytes
