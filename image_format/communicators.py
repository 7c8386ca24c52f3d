"""Communicators of NCCL and NVSHMEM's processing elements in the record (spec/record.md, section 5).

Says which ranks of the checkpoint talk to each other and how far they were; nothing of it is needed to restore memory.
Parses at the edge, keeps unknown fields; a rank beyond its group and a name that nobody has are refused by their path.
The runtime shim writes what the preload libraries told the agent; `vgpu inspect`, `diff` and the fitness check read it. Pure.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from image_format.canonical_json import MAX_INTEGER
from image_format.gpu_objects import read_device, read_object_name, read_uuid
from vgpu_errors import ImageError, LimitExceeded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from image_format.fields import Fields
    from image_format.gpu_processes import ProcessEntry

MAX_COMMUNICATORS = 8192
MAX_ELEMENTS = 1024
MAX_TEAMS = 4096

_ID = re.compile(r"[0-9a-f]{1,256}")


@dataclass(frozen=True)
class Split:
    """How a communicator was made of its parent; the key may be negative."""

    color: int
    key: int
    unknown: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_json(cls, fields: Fields) -> Split:
        """Parse `split`."""
        return cls(_count(fields, "color"), _signed(fields, "key"), fields.unknown())

    def to_json(self) -> dict[str, Any]:
        """The form that is written."""
        return self.unknown | {"color": self.color, "key": self.key}


@dataclass(frozen=True)
class CallCount:
    """How many calls a rank had made on a communicator; ranks at one cut have the same number of collectives."""

    collectives: int
    point_to_point: int
    unknown: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_json(cls, fields: Fields) -> CallCount:
        """Parse `sequence`."""
        return cls(_count(fields, "collectives"), _count(fields, "pointToPoint"), fields.unknown())

    def to_json(self) -> dict[str, Any]:
        """The form that is written."""
        return self.unknown | {"collectives": self.collectives, "pointToPoint": self.point_to_point}


@dataclass(frozen=True)
class Communicator:
    """One rank of one communicator; entries with the same `id` are ranks of the same."""

    library: str
    version: str
    id: str
    ns_pid: int
    rank: int
    size: int
    device: int
    uuid: str
    sequence: CallCount
    parent: str | None = None
    split: Split | None = None
    name: str | None = None
    is_finalized: bool = False
    unknown: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_json(cls, fields: Fields) -> Communicator:
        """Parse one of `communicators`."""
        rank, size = _read_place(fields, "rank")
        return cls(
            library=fields.text("library"),
            version=fields.text("version"),
            id=_read_id(fields, "id"),
            ns_pid=_count(fields, "nsPid"),
            rank=rank,
            size=size,
            device=read_device(fields),
            uuid=read_uuid(fields),
            sequence=CallCount.from_json(fields.object("sequence")),
            parent=_read_id(fields, "parent") if fields.has("parent") else None,
            split=Split.from_json(fields.object("split")) if fields.has("split") else None,
            name=fields.text_or_none("name"),
            is_finalized=_read_finalized(fields),
            unknown=fields.unknown(),
        )

    def to_json(self) -> dict[str, Any]:
        """The form that is written."""
        doc = {
            "library": self.library,
            "version": self.version,
            "id": self.id,
            "nsPid": self.ns_pid,
            "rank": self.rank,
            "size": self.size,
            "device": self.device,
            "uuid": self.uuid,
            "sequence": self.sequence.to_json(),
        }
        split = None if self.split is None else self.split.to_json()
        finalized = True if self.is_finalized else None
        return self.unknown | doc | _present(parent=self.parent, split=split, name=self.name, finalized=finalized)


@dataclass(frozen=True)
class Team:
    """A team of NVSHMEM as one element sees it: its own number in it, and what it was split from."""

    name: str
    pe: int
    size: int
    parent: str | None = None
    unknown: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_json(cls, fields: Fields) -> Team:
        """Parse one of `teams`."""
        pe, size = _read_place(fields, "pe")
        return cls(fields.text("name"), pe, size, fields.text_or_none("parent"), fields.unknown())

    def to_json(self) -> dict[str, Any]:
        """The form that is written."""
        return self.unknown | {"name": self.name, "pe": self.pe, "size": self.size} | _present(parent=self.parent)


@dataclass(frozen=True)
class ShmemElement:
    """One processing element of NVSHMEM; `heap` names objects and imports of its process, None where nobody knows them.

    Device and uuid are None where the process had no device when it joined.
    """

    library: str
    version: str
    ns_pid: int
    pe: int
    size: int
    device: int | None = None
    uuid: str | None = None
    teams: tuple[Team, ...] = ()
    heap: tuple[str, ...] | None = None
    unknown: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_json(cls, fields: Fields) -> ShmemElement:
        """Parse one of `nvshmem`."""
        pe, size = _read_place(fields, "pe")
        has_device = fields.has("device") or fields.has("uuid")
        return cls(
            library=fields.text("library"),
            version=fields.text("version"),
            ns_pid=_count(fields, "nsPid"),
            pe=pe,
            size=size,
            device=read_device(fields) if has_device else None,
            uuid=read_uuid(fields) if has_device else None,
            heap=_read_heap(fields) if fields.has("heap") else None,
            teams=tuple(map(Team.from_json, _limited(fields, "teams", MAX_TEAMS))),
            unknown=fields.unknown(),
        )

    def to_json(self) -> dict[str, Any]:
        """The form that is written."""
        doc = {
            "library": self.library,
            "version": self.version,
            "nsPid": self.ns_pid,
            "pe": self.pe,
            "size": self.size,
            "teams": [team.to_json() for team in self.teams],
        }
        heap = None if self.heap is None else list(self.heap)
        return self.unknown | doc | _present(device=self.device, uuid=self.uuid, heap=heap)


def read_communicators(fields: Fields) -> tuple[Communicator, ...]:
    """`communicators` of the record; absent where no process told of one."""
    if not fields.has("communicators"):
        return ()
    return tuple(map(Communicator.from_json, _limited(fields, "communicators", MAX_COMMUNICATORS)))


def read_nvshmem(fields: Fields) -> tuple[ShmemElement, ...]:
    """`nvshmem` of the record; absent where no process told of it."""
    if not fields.has("nvshmem"):
        return ()
    return tuple(map(ShmemElement.from_json, _limited(fields, "nvshmem", MAX_ELEMENTS)))


def check_members(
    processes: Sequence[ProcessEntry],
    communicators: Sequence[Communicator],
    elements: Sequence[ShmemElement],
    at: str,
) -> None:
    """Refuse an entry of a process that the record does not list, and a heap of memory that this process does not have."""
    names = {process.ns_pid: process for process in processes}
    members = [(f"communicators[{n}]", entry.ns_pid) for n, entry in enumerate(communicators)]
    members += [(f"nvshmem[{n}]", element.ns_pid) for n, element in enumerate(elements)]
    for path, ns_pid in members:
        if ns_pid not in names:
            what = f"there is no GPU process {ns_pid} in this checkpoint"
            raise ImageError(where=f"{at}.{path}.nsPid", what=what)
    for n, element in enumerate(elements):
        held = names[element.ns_pid].names() if element.heap else set()
        for m, name in enumerate(element.heap or ()):
            if name not in held:
                where = f"{at}.nvshmem[{n}].heap[{m}]"
                raise ImageError(where=where, what=f"{name} is neither object nor import of process {element.ns_pid}")


def _limited(fields: Fields, key: str, limit: int) -> list[Fields]:
    found = len(fields.items(key))
    if found > limit:
        raise LimitExceeded(where=fields.path(key), what="its length", found=found, limit=limit)
    return fields.objects(key)


def _read_place(fields: Fields, key: str) -> tuple[int, int]:
    """Number and size of a group."""
    place, size = _count(fields, key), _count(fields, "size")
    if place >= size:
        raise ImageError(where=fields.path(key), what=f"there is no {key} {place} among {size}")
    return place, size


def _read_finalized(fields: Fields) -> bool:
    if not fields.has("finalized"):
        return False
    if fields.any("finalized") is not True:
        raise ImageError(where=fields.path("finalized"), what="must be true or absent")
    return True


def _read_heap(fields: Fields) -> tuple[str, ...]:
    names = enumerate(fields.texts("heap"))
    return tuple(read_object_name(text, f"{fields.path('heap')}[{n}]") for n, text in names)


def _read_id(fields: Fields, key: str) -> str:
    text = fields.text(key)
    if not _ID.fullmatch(text):
        raise ImageError(where=fields.path(key), what="must be 1 to 256 lower-case hex digits")
    return text


def _count(fields: Fields, key: str) -> int:
    value = fields.integer(key)
    if value > MAX_INTEGER:
        raise LimitExceeded(where=fields.path(key), what="an integer", found=value, limit=MAX_INTEGER)
    return value


def _signed(fields: Fields, key: str) -> int:
    value = fields.any(key)
    if type(value) is not int or abs(value) > MAX_INTEGER:
        raise ImageError(where=fields.path(key), what="must be an integer within 2^53")
    return value


def _present(**fields: object) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if value is not None}
