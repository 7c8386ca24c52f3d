"""Says of a record which objects processes share: each with all its parties, their addresses and access (spec/record.md, section 4).

Pure: processes in, layout out, in the order of the record. An object that nobody imports and that was never given away is not in it.
`vgpu inspect` shows it; the record itself has the same facts by process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from image_format.gpu_objects import object_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from image_format.gpu_objects import ImportEntry, ObjectEntry, ObjectMapping
    from image_format.gpu_processes import ProcessEntry


@dataclass(frozen=True)
class Party:
    """One process's part in an object: `exporter`, or `import` and `opened` of others; `holds` says whose content it is."""

    name: str
    ns_pid: int
    comm: str
    role: str
    holds: bool
    mappings: tuple[ObjectMapping, ...]

    def to_json(self) -> dict[str, Any]:
        """The entry of `parties` in `--json` output."""
        return {
            "name": self.name,
            "nsPid": self.ns_pid,
            "comm": self.comm,
            "role": self.role,
            "holds": self.holds,
            "mappings": [mapping.to_json() for mapping in self.mappings],
        }


@dataclass(frozen=True)
class SharedObject:
    """One object with everybody who has it, the one that holds it first."""

    name: str
    size: int
    uuid: str
    ways: tuple[str, ...]
    parties: tuple[Party, ...]

    def to_json(self) -> dict[str, Any]:
        """The entry of `sharing` in `--json` output."""
        return {
            "object": self.name,
            "bytes": self.size,
            "uuid": self.uuid,
            "ways": list(self.ways),
            "parties": [party.to_json() for party in self.parties],
        }


def sharing_layout(processes: Sequence[ProcessEntry]) -> list[SharedObject]:
    """Every shared object."""
    importers: dict[str, list[Party]] = {}
    for process in processes:
        for entry in process.imports:
            importers.setdefault(entry.of, []).append(_party(process, entry, entry.kind))
    return list(_shared(processes, importers))


def _shared(processes: Sequence[ProcessEntry], importers: dict[str, list[Party]]) -> Iterable[SharedObject]:
    for process in processes:
        for entry in process.objects:
            name = object_name(process.ns_pid, entry.id)
            others = importers.get(name, [])
            if others or entry.is_orphan or entry.shared:
                holder = _party(process, entry, entry.kind if entry.is_orphan else "exporter", holds=True)
                ways = entry.shared.ways if entry.shared else ()
                yield SharedObject(name, entry.size, entry.uuid, ways, (holder, *others))


def _party(process: ProcessEntry, entry: ObjectEntry | ImportEntry, role: str, *, holds: bool = False) -> Party:
    name = object_name(process.ns_pid, entry.id)
    return Party(name, process.ns_pid, process.comm, role, holds, entry.mappings)
