"""What a preload says its process holds of the GPU: objects that move, what it shares, what the driver holds, what blocks.

Pure: JSON of a container in, checked values out. Sizes and ids are claims; a wrong one is noticed when the object is imported
and by the inventory proof (inventory_proof.py). Used by preload_link.py; spec/preload-protocol.md, "INVENTORY_IS", "SHARES".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpu_state.preload_frames import FrameError

if TYPE_CHECKING:
    from collections.abc import Collection

MAX_OBJECTS = 65536
GRANULARITY = 2 << 20
MAX_BYTES = 1 << 48
MAX_PEERS = 16


@dataclass(frozen=True, slots=True)
class Mapping:
    """Where an object is mapped in its process, and who may touch it there."""

    va: int
    size: int
    offset: int
    access: tuple[tuple[int, int], ...]

    def to_json(self) -> dict[str, Any]:
        """The form of the protocol, the journal and the record."""
        return {
            "va": hex(self.va),
            "size": self.size,
            "offset": self.offset,
            "access": [list(pair) for pair in self.access],
        }

    @classmethod
    def from_json(cls, doc: Any) -> Mapping:
        """Parse one of `mappings`."""
        access = _list(doc, "access")
        pairs = [pair for pair in access if isinstance(pair, list) and len(pair) == 2 and all(map(_is_count, pair))]
        if len(pairs) != len(access):
            raise FrameError("access is no list of pairs")
        return cls(_address(doc.get("va")), _count(doc, "size"), _count(doc, "offset"), tuple((a, b) for a, b in pairs))


@dataclass(frozen=True, slots=True)
class Sharing:
    """How an object of a process was given to others."""

    ways: tuple[str, ...]
    peers: tuple[int, ...]
    peer_count: int

    def to_json(self) -> dict[str, Any]:
        """The form of the protocol and the journal."""
        return {"ways": list(self.ways), "peers": list(self.peers), "peer_count": self.peer_count}

    @classmethod
    def from_json(cls, doc: Any) -> Sharing:
        """Parse `shared`."""
        peers = _pids(doc, "peers")
        count = doc.get("peer_count", len(peers))
        ways = tuple(str(way)[:20] for way in _list(doc, "ways")[:4])
        return cls(ways, peers, count if _is_count(count) else len(peers))


@dataclass(frozen=True, slots=True)
class DeviceObject:
    """One physical object of a process."""

    id: int
    size: int
    device: int
    uuid: str
    kind: str
    requested: int
    mappings: tuple[Mapping, ...] = ()
    shared: Sharing | None = None

    def to_json(self) -> dict[str, Any]:
        """The form of the protocol and the journal."""
        shared = {} if self.shared is None else {"shared": self.shared.to_json()}
        return shared | {
            "id": self.id,
            "size": self.size,
            "device": self.device,
            "uuid": self.uuid,
            "kind": self.kind,
            "requested": self.requested,
            "mappings": [mapping.to_json() for mapping in self.mappings],
        }

    @classmethod
    def from_json(cls, doc: Any) -> DeviceObject:
        """Parse one of `objects`."""
        size = _count(doc, "size")
        if not 0 < size < MAX_BYTES:
            raise FrameError(f"an object of {size} bytes")
        mappings = tuple(map(Mapping.from_json, _list(doc, "mappings")))
        requested = doc.get("requested", size)
        return cls(
            id=_count(doc, "id"),
            size=size,
            device=_count(doc, "device"),
            uuid=str(doc.get("uuid", "")),
            kind=str(doc.get("kind", "alloc")),
            requested=requested if _is_count(requested) else size,
            mappings=mappings,
            shared=Sharing.from_json(doc["shared"]) if doc.get("shared") is not None else None,
        )


@dataclass(frozen=True, slots=True)
class Import:
    """Memory of another process that this one has imported or opened; `obstacle` says why it cannot be taken away."""

    id: int
    size: int
    device: int | None
    uuid: str
    kind: str
    requested: int
    mappings: tuple[Mapping, ...]
    exporter_pid: int | None = None
    exporter_object: int | None = None
    obstacle: str = ""

    @classmethod
    def from_json(cls, doc: Any) -> Import:
        """Parse one of `imports`."""
        device, exporter = doc.get("device") if isinstance(doc, dict) else None, _member(doc, "exporter")
        return cls(
            id=_count(doc, "id"),
            size=_count(doc, "size"),
            device=device if _is_count(device) else None,
            uuid=str(doc.get("uuid", "")),
            kind=str(doc.get("kind", "import"))[:40],
            requested=_count(doc, "requested") if "requested" in doc else 0,
            mappings=tuple(map(Mapping.from_json, _list(doc, "mappings"))),
            exporter_pid=None if exporter is None else _count(exporter, "process"),
            exporter_object=None if exporter is None else _count(exporter, "object"),
            obstacle=str(doc.get("obstacle", ""))[:300],
        )


@dataclass(frozen=True, slots=True)
class Share:
    """One party's part in a shared object; what it shares with whom is told by its descriptor (SHARES)."""

    role: str
    of: DeviceObject | Import

    @property
    def id(self) -> int:
        """The party's own id of the object; FDS frames name its descriptor by it."""
        return self.of.id

    @classmethod
    def from_json(cls, doc: Any) -> Share:
        """Parse one of `shares`."""
        role = doc.get("role") if isinstance(doc, dict) else None
        if role == "exporter":
            return cls(role, DeviceObject.from_json(doc))
        if role == "importer":
            return cls(role, Import.from_json(doc))
        raise FrameError("a share with no role")


def shares_from_json(doc: dict[str, Any], described: Collection[int] = ()) -> tuple[Share, ...]:
    """Parse the payload of SHARES_ARE; `described` are the ids that came with a descriptor."""
    shares = _list(doc, "shares")
    if len(shares) > MAX_OBJECTS:
        raise FrameError(f"{len(shares)} shares")
    parsed = tuple(map(Share.from_json, shares))
    if len({share.id for share in parsed}) != len(parsed):
        raise FrameError("two shares with one id")
    if not set(described) <= {share.id for share in parsed}:
        raise FrameError("a descriptor of nothing that is shared")
    return parsed


@dataclass(frozen=True, slots=True)
class Held:
    """Memory that stays with the driver, by kind."""

    kind: str
    count: int
    bytes: int

    @classmethod
    def from_json(cls, doc: Any) -> Held:
        """Parse one of `driver_held`."""
        if not isinstance(doc, dict):
            raise FrameError("an entry of driver_held is no object")
        count = doc.get("count", 0)
        return cls(str(doc.get("kind", "")), count if _is_count(count) else 0, _count(doc, "bytes"))


@dataclass(frozen=True, slots=True)
class Blocker:
    """Something that cannot be moved."""

    kind: str
    va: int
    bytes: int
    what: str
    object: int | None = None
    peers: tuple[int, ...] = ()

    @classmethod
    def from_json(cls, doc: Any) -> Blocker:
        """Parse one of `blockers`."""
        if not isinstance(doc, dict):
            raise FrameError("a blocker is no object")
        size = doc.get("bytes", 0)
        return cls(
            kind=str(doc.get("kind", "unknown"))[:40],
            va=_address(doc["va"]) if doc.get("va") else 0,
            bytes=size if _is_count(size) else 0,
            what=str(doc.get("what", ""))[:300],
            object=_count(doc, "object") if "object" in doc else None,
            peers=_pids(doc, "peers"),
        )

    def to_json(self) -> dict[str, Any]:
        """The entry of `blockers` in the agent's answers."""
        return {"kind": self.kind, "va": hex(self.va), "bytes": self.bytes, "what": self.what}


@dataclass(frozen=True, slots=True)
class Holdings:
    """One process's whole answer."""

    objects: tuple[DeviceObject, ...]
    driver_held: tuple[Held, ...]
    blockers: tuple[Blocker, ...]
    imports: tuple[Import, ...] = ()

    @property
    def object_bytes(self) -> int:
        """Bytes that move."""
        return sum(held.size for held in self.objects)

    @property
    def driver_bytes(self) -> int:
        """Bytes that stay with the driver, as far as the preload saw them."""
        return sum(held.bytes for held in self.driver_held)

    @classmethod
    def from_json(cls, doc: dict[str, Any]) -> Holdings:
        """Parse the payload of INVENTORY_IS."""
        objects = _list(doc, "objects")
        if len(objects) > MAX_OBJECTS:
            raise FrameError(f"{len(objects)} objects")
        parsed = tuple(map(DeviceObject.from_json, objects))
        imports = tuple(map(Import.from_json, _imports(doc)))
        ids = [*(held.id for held in parsed), *(held.id for held in imports)]
        if len(set(ids)) != len(ids):
            raise FrameError("two objects with one id")
        return cls(
            objects=parsed,
            driver_held=tuple(map(Held.from_json, _list(doc, "driver_held"))),
            blockers=tuple(map(Blocker.from_json, _list(doc, "blockers"))),
            imports=imports,
        )


def _imports(doc: dict[str, Any]) -> list[Any]:
    imports = _list(doc, "imports")
    if len(imports) > MAX_OBJECTS:
        raise FrameError(f"{len(imports)} imports")
    return imports


def _list(doc: Any, key: str) -> list[Any]:
    if not isinstance(doc, dict):
        raise FrameError(f"what should hold {key} is no object")
    found = doc.get(key, [])
    if not isinstance(found, list):
        raise FrameError(f"{key} is no list")
    return found


def _member(doc: Any, key: str) -> dict[str, Any] | None:
    found = doc.get(key) if isinstance(doc, dict) else None
    if found is not None and not isinstance(found, dict):
        raise FrameError(f"{key} is no object")
    return found


def _pids(doc: Any, key: str) -> tuple[int, ...]:
    return tuple(pid for pid in _list(doc, key)[:MAX_PEERS] if _is_count(pid))


def _count(doc: Any, key: str) -> int:
    found = doc.get(key) if isinstance(doc, dict) else None
    if not isinstance(found, int) or not _is_count(found):
        raise FrameError(f"{key} is no count")
    return found


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _address(value: object) -> int:
    try:
        found = int(value, 16) if isinstance(value, str) else -1
    except ValueError:
        found = -1
    if not 0 <= found < 1 << 64:
        raise FrameError("an address is no hex string")
    return found
