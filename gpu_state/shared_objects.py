"""Which memory of a container's staged processes is one and the same, and under whose name it goes.

Pure: what the preloads tell in, a layout out. Two shares are one object exactly where their descriptors are of one open file
(kcmp.py), so that what a process claims of itself reaches no memory that it was not given; order and names decide nothing.
An object goes by its exporter's name, `<nsPid>/<object id>`. Where no exporter of it lives in the container, the importer with
the lowest process id holds it: an orphan, listed among that process's objects.
What cannot be resolved is a blocker with the reason, and nothing is stopped for it.
Called by staged_inventory.py; spec/preload-protocol.md, "SHARES".
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from gpu_state.preload_objects import Blocker, DeviceObject, Holdings, Import, Mapping, Share

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from collections.abc import Mapping as Map

# What a preload reports of shared memory; with `object` it is one that may be resolved here.
SHARE_KINDS = ("import", "export", "ipc-opened", "ipc-exported")
EXPORTER, IMPORTER = "exporter", "importer"


@dataclass(frozen=True, slots=True)
class ImportedObject:
    """Another process's object in a process; `of` is its name."""

    id: int
    of: str
    kind: str
    size: int
    requested: int
    device: int | None
    uuid: str
    mappings: tuple[Mapping, ...]

    def to_json(self) -> dict[str, Any]:
        """The form of the journal and of the agent's answers; that of the record."""
        device = {} if self.device is None else {"device": self.device}
        return device | {
            "id": self.id,
            "of": self.of,
            "kind": self.kind,
            "size": self.size,
            "requested": self.requested,
            "uuid": self.uuid,
            "mappings": [mapping.to_json() for mapping in self.mappings],
        }

    @classmethod
    def from_json(cls, doc: dict[str, Any]) -> ImportedObject:
        """Read the journal's form."""
        return cls(
            doc["id"], doc["of"], doc["kind"], doc["size"], doc["requested"], doc.get("device"), doc["uuid"],
            tuple(map(Mapping.from_json, doc["mappings"])),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Party:
    """One staged process: what it holds, what it shares, and which open file each share is, by the share's id."""

    pid: int
    ns_pid: int
    comm: str
    devices: tuple[str, ...]
    holdings: Holdings
    shares: tuple[Share, ...] = ()
    files: Map[int, int] = field(default_factory=dict)

    def name_of(self, object_id: int) -> str:
        """The object's name in the image, the keeper and the staging worker."""
        return f"{self.ns_pid}/{object_id}"

    def __str__(self) -> str:
        return f"process {self.pid} ({self.comm})"


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Who else there is: by open file those of other containers, the container's own that are not staged, and who lives."""

    strangers: Map[int, str] = field(default_factory=dict)
    unstaged: tuple[str, ...] = ()
    living: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Held:
    """What one process has, after resolution: objects of its own and orphans, imports, and what nobody can take along."""

    objects: tuple[DeviceObject, ...]
    imports: tuple[ImportedObject, ...]
    blockers: tuple[Blocker, ...]


def resolve(parties: Sequence[Party], around: Surroundings) -> dict[int, Held]:
    """What each process has, by its pid in its own namespace."""
    return _Resolution(parties, around).held()


@dataclass(frozen=True, slots=True)
class _Part:
    """One share of one party."""

    party: Party
    share: Share

    @property
    def name(self) -> str:
        return self.party.name_of(self.share.id)

    @property
    def key(self) -> tuple[int, int]:
        return self.party.ns_pid, self.share.id


class _Resolution:
    """One look at all parties."""

    def __init__(self, parties: Sequence[Party], around: Surroundings) -> None:
        self._parties = parties
        self._around = around
        self._staged = {party.ns_pid for party in parties}
        self._problems: dict[tuple[int, int], str] = {}
        self._imports: dict[int, list[ImportedObject]] = defaultdict(list)
        self._objects: dict[int, dict[int, DeviceObject]] = {
            party.ns_pid: {held.id: held for held in party.holdings.objects} for party in parties
        }

    def held(self) -> dict[int, Held]:
        by_file: dict[int, list[_Part]] = defaultdict(list)
        for party in self._parties:
            for share in party.shares:
                part = _Part(party, share)
                if (why := self._why_alone(part)) is not None:
                    self._problems[part.key] = why
                if share.id in party.files:
                    by_file[party.files[share.id]].append(part)
        for file, parts in by_file.items():
            self._settle(file, sorted(parts, key=lambda part: part.key))
        return {party.ns_pid: self._held_by(party) for party in self._parties}

    # ---- one share -----------------------------------------------------------------------------------------

    def _why_alone(self, part: _Part) -> str | None:
        """Why this share cannot be resolved, whoever the others are."""
        held = part.share.of
        if isinstance(held, Import) and held.obstacle:
            return held.obstacle
        if part.share.id not in part.party.files:
            return "the process has no descriptor of it"
        return None if isinstance(held, Import) else self._why_given_away(held)

    def _why_given_away(self, held: DeviceObject) -> str | None:
        """Why an exported object may be with somebody who is not here."""
        if held.shared is None:
            return None
        for peer in held.shared.peers:
            if peer in self._around.living and peer not in self._staged:
                return f"process {peer} of its namespace fetched it and is not staged in this container"
        if "descriptor" in held.shared.ways and self._around.unstaged:
            return f"it was given away by descriptor, and {self._around.unstaged[0]} is not staged and may have it"
        return None

    # ---- one object ------------------------------------------------------------------------------------------

    def _settle(self, file: int, parts: list[_Part]) -> None:
        """Everything that is this open file is one object: find its name, and lead the importers to it."""
        exporters = [part for part in parts if part.share.role == EXPORTER]
        importers = [part for part in parts if part.share.role == IMPORTER]
        if (why := self._why_not(file, exporters, importers)) is not None:
            for part in parts:
                self._problems.setdefault(part.key, why)
            return
        importers = [part for part in importers if part.key not in self._problems]
        if exporters:
            owner, held = exporters[0], _made(exporters[0])
        else:
            owner, held = importers[0], self._orphan(importers[0], importers)
            importers = importers[1:]
        self._objects[owner.party.ns_pid].setdefault(held.id, held)
        for part in importers:
            self._import(part, owner, held)

    def _import(self, part: _Part, owner: _Part, held: DeviceObject) -> None:
        claim, name = part.share.of, owner.name
        if part.party.ns_pid == owner.party.ns_pid:  # the record has imports of other processes only
            self._problems[part.key] = f"it is object {name} of this very process once more"
            return
        if any(mapping.offset + mapping.size > held.size for mapping in claim.mappings):
            self._problems[part.key] = f"it is mapped beyond the {held.size} bytes of object {name}"
            return
        device = claim.device if claim.device is not None else _ordinal(part.party, held.uuid)
        requested = min(claim.requested, held.size)
        self._imports[part.party.ns_pid].append(
            ImportedObject(claim.id, name, claim.kind, held.size, requested, device, held.uuid, claim.mappings)
        )

    def _why_not(self, file: int, exporters: list[_Part], importers: list[_Part]) -> str | None:
        if (stranger := self._around.strangers.get(file)) is not None:
            return f"{stranger} shares it"
        if len(exporters) > 1:
            return f"{exporters[0].party} and {exporters[1].party} both say that they made it"
        if exporters:
            return self._problems.get(exporters[0].key)
        return self._why_no_orphan([part for part in importers if part.key not in self._problems])

    def _why_no_orphan(self, importers: list[_Part]) -> str | None:
        """Nobody of the container made it: why no importer can hold it, None also where none is left to."""
        if not importers:
            return "none of its processes can give it away"
        for part in importers:
            pid = part.share.of.exporter_pid if isinstance(part.share.of, Import) else None
            if pid is not None and pid in self._around.living and pid not in self._staged:
                return f"its exporter, process {pid} of its namespace, is not staged in this container"
            if pid is None and self._around.unstaged:
                return f"nobody who is staged made it, and {self._around.unstaged[0]} is not staged and may have"
        if not any(part.share.of.size for part in importers):
            return "it is mapped nowhere, so nobody knows its size"
        if _uuid_of(importers) is None:
            return "nobody knows on which device it lies"
        return None

    def _orphan(self, owner: _Part, importers: list[_Part]) -> DeviceObject:
        """The object as its importers know it: as much as any of them has mapped."""
        held, uuid = owner.share.of, _uuid_of(importers) or ""
        size = max(part.share.of.size for part in importers)
        device = held.device if held.device is not None else _ordinal(owner.party, uuid)
        return DeviceObject(held.id, size, device or 0, uuid, held.kind, min(held.requested, size), held.mappings)

    # ---- one process -----------------------------------------------------------------------------------------

    def _held_by(self, party: Party) -> Held:
        imports = sorted(self._imports[party.ns_pid], key=lambda held: held.id)
        return Held(tuple(self._objects[party.ns_pid].values()), tuple(imports), tuple(self._blockers(party)))

    def _blockers(self, party: Party) -> Iterable[Blocker]:
        """What the preload named, without what is resolved; and what it did not name and cannot be."""
        problems = {number: why for (ns_pid, number), why in self._problems.items() if ns_pid == party.ns_pid}
        known = {share.id for share in party.shares}
        for blocker in party.holdings.blockers:
            if blocker.kind not in SHARE_KINDS or blocker.object is None or blocker.object not in known:
                yield blocker
            elif blocker.object in problems:
                yield replace(blocker, what="; ".join(filter(None, (blocker.what, problems.pop(blocker.object)))))
        for share in party.shares:
            if share.id in problems:
                yield _blocker_of(share, problems[share.id])


def _made(part: _Part) -> DeviceObject:
    held = part.share.of
    if isinstance(held, DeviceObject):
        return held
    raise TypeError(part.share.role)  # preload_objects.py reads an exporter's share as an object


def _blocker_of(share: Share, why: str) -> Blocker:
    held = share.of
    kinds = {"opened": "ipc-opened", "import": "import"}
    va = held.mappings[0].va if held.mappings else 0
    return Blocker(kinds.get(held.kind, "export"), va, held.size, why, object=held.id)


def _uuid_of(importers: Sequence[_Part]) -> str | None:
    """The device as one of them knows it; a process with one device has no other."""
    told = [part.share.of.uuid for part in importers if part.share.of.uuid]
    alone = [part.party.devices[0] for part in importers if len(part.party.devices) == 1]
    return next(iter((*told, *alone)), None)


def _ordinal(party: Party, uuid: str) -> int | None:
    return party.devices.index(uuid) if uuid in party.devices else None
