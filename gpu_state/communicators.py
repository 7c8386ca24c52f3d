"""The communicators of NCCL and the NVSHMEM element that a preload tells of: who talks to whom, and how far they were.

Pure: JSON of a container in, checked values out. All of it is claims of the process; nothing is released or mapped because
of it. Refuses a rank beyond its group, an id that is no hash, and lists beyond their limits. Used by preload_link.py and by
whoever writes the record; spec/preload-protocol.md, "COMMUNICATORS".
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from gpu_state.preload_frames import FrameError

MAX_COMMUNICATORS = 1024
MAX_ELEMENTS = 1
MAX_TEAMS = 256
MAX_INTEGER = 1 << 53

_ID = re.compile(r"[0-9a-f]{32}")
_WORD = re.compile(r"[a-z0-9.-]{1,40}")


@dataclass(frozen=True, slots=True)
class Communicator:
    """One rank of one communicator of NCCL; ranks with the same `id` belong together, in whatever process they are."""

    library: str
    version: str
    id: str
    rank: int
    size: int
    device: int
    collectives: int
    point_to_point: int
    parent: str | None = None
    color: int | None = None
    key: int | None = None
    is_finalized: bool = False

    @classmethod
    def from_json(cls, doc: Any) -> Communicator:
        """Parse one of `communicators`."""
        fields = _object(doc, "a communicator")
        rank, size = _place(fields, "rank")
        sequence = _object(fields.get("sequence"), "sequence")
        split = _object(fields["split"], "split") if "split" in fields else None
        return cls(
            library=_word(fields, "library"),
            version=_word(fields, "version"),
            id=_id(fields, "id"),
            rank=rank,
            size=size,
            device=_count(fields, "device"),
            collectives=_count(sequence, "collectives"),
            point_to_point=_count(sequence, "pointToPoint"),
            parent=_id(fields, "parent") if "parent" in fields else None,
            color=None if split is None else _count(split, "color"),
            key=None if split is None else _integer(split, "key"),
            is_finalized=fields.get("finalized") is True,
        )

    def to_json(self) -> dict[str, Any]:
        """The form of the protocol; the record adds the process and the uuid of the device."""
        doc: dict[str, Any] = {
            "library": self.library,
            "version": self.version,
            "id": self.id,
            "rank": self.rank,
            "size": self.size,
            "device": self.device,
            "sequence": {"collectives": self.collectives, "pointToPoint": self.point_to_point},
        }
        if self.parent is not None:
            doc["parent"] = self.parent
        if self.color is not None:
            doc["split"] = {"color": self.color, "key": self.key}
        return doc | ({"finalized": True} if self.is_finalized else {})


@dataclass(frozen=True, slots=True)
class NvshmemTeam:
    """A team of NVSHMEM as one element sees it."""

    name: str
    pe: int
    size: int
    parent: str

    @classmethod
    def from_json(cls, doc: Any) -> NvshmemTeam:
        """Parse one of `teams`."""
        fields = _object(doc, "a team")
        pe, size = _place(fields, "pe")
        return cls(_word(fields, "name"), pe, size, _word(fields, "parent"))

    def to_json(self) -> dict[str, Any]:
        """The form of the protocol and the record."""
        return {"name": self.name, "pe": self.pe, "size": self.size, "parent": self.parent}


@dataclass(frozen=True, slots=True)
class NvshmemPe:
    """The processing element that a process is; `device` is None where none was current."""

    library: str
    version: str
    pe: int
    size: int
    device: int | None
    teams: tuple[NvshmemTeam, ...] = ()

    @classmethod
    def from_json(cls, doc: Any) -> NvshmemPe:
        """Parse one of `nvshmem`."""
        fields = _object(doc, "an element of NVSHMEM")
        pe, size = _place(fields, "pe")
        return cls(
            library=_word(fields, "library"),
            version=_word(fields, "version"),
            pe=pe,
            size=size,
            device=_count(fields, "device") if "device" in fields else None,
            teams=tuple(map(NvshmemTeam.from_json, _list(fields, "teams", MAX_TEAMS))),
        )

    def to_json(self) -> dict[str, Any]:
        """The form of the protocol; the record adds the process and the uuid of the device."""
        device = {} if self.device is None else {"device": self.device}
        doc = {"library": self.library, "version": self.version, "pe": self.pe, "size": self.size}
        return doc | device | {"teams": [team.to_json() for team in self.teams]}


@dataclass(frozen=True, slots=True)
class Communicators:
    """One process's whole answer. `starting` ones are not complete yet; `unlisted` ones work and are not followed."""

    communicators: tuple[Communicator, ...] = ()
    nvshmem: tuple[NvshmemPe, ...] = ()
    starting: int = 0
    unlisted: int = 0

    @classmethod
    def from_json(cls, doc: Any) -> Communicators:
        """Parse the payload of COMMUNICATORS_ARE."""
        fields = _object(doc, "COMMUNICATORS_ARE")
        return cls(
            communicators=tuple(map(Communicator.from_json, _list(fields, "communicators", MAX_COMMUNICATORS))),
            nvshmem=tuple(map(NvshmemPe.from_json, _list(fields, "nvshmem", MAX_ELEMENTS))),
            starting=_count(fields, "starting") if "starting" in fields else 0,
            unlisted=_count(fields, "unlisted") if "unlisted" in fields else 0,
        )

    def to_json(self) -> dict[str, Any]:
        """The form of the protocol and the journal."""
        return {
            "communicators": [entry.to_json() for entry in self.communicators],
            "nvshmem": [element.to_json() for element in self.nvshmem],
            "starting": self.starting,
            "unlisted": self.unlisted,
        }


def _object(found: Any, what: str) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise FrameError(f"{what} is no object")
    return found


def _list(fields: dict[str, Any], key: str, limit: int) -> list[Any]:
    found = fields.get(key, [])
    if not isinstance(found, list):
        raise FrameError(f"{key} is no list")
    if len(found) > limit:
        raise FrameError(f"{len(found)} {key}, the limit is {limit}")
    return found


def _place(fields: dict[str, Any], key: str) -> tuple[int, int]:
    place, size = _count(fields, key), _count(fields, "size")
    if place >= size:
        raise FrameError(f"there is no {key} {place} among {size}")
    return place, size


def _integer(fields: dict[str, Any], key: str) -> int:
    found = fields.get(key)
    if not isinstance(found, int) or isinstance(found, bool) or abs(found) > MAX_INTEGER:
        raise FrameError(f"{key} is no integer")
    return found


def _count(fields: dict[str, Any], key: str) -> int:
    found = _integer(fields, key)
    if found < 0:
        raise FrameError(f"{key} is no count")
    return found


def _id(fields: dict[str, Any], key: str) -> str:
    found = fields.get(key)
    if not isinstance(found, str) or not _ID.fullmatch(found):
        raise FrameError(f"{key} is no 32 lower-case hex digits")
    return found


def _word(fields: dict[str, Any], key: str) -> str:
    found = fields.get(key)
    if not isinstance(found, str) or not _WORD.fullmatch(found):
        raise FrameError(f"{key} is no word")
    return found
