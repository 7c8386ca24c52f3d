"""GPU processes and devices in the record, and what processes share (spec/record.md, sections 2 to 4).

`check_shared` follows every reference: an import names an object of another process of the same checkpoint, never an import.
Parses at the edge, keeps unknown fields; a broken reference is named by its path. The record is made of these. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from image_format.gpu_objects import (
    STAGED,
    DescriptorEntry,
    ImportEntry,
    ObjectEntry,
    object_name,
    read_descriptors,
    read_objects,
)
from vgpu_errors import ImageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from image_format.fields import Fields


@dataclass(frozen=True)
class ProcessEntry:
    """A GPU process; the pid is the one that its own pid namespace shows. Objects and imports are those of staged mode."""

    ns_pid: int
    comm: str
    mode: str
    devices: tuple[str, ...] = ()
    gpu_bytes: int | None = None
    objects: tuple[ObjectEntry, ...] = ()
    unknown: dict[str, Any] = field(default_factory=dict)
    imports: tuple[ImportEntry, ...] = ()
    descriptors: tuple[DescriptorEntry, ...] = ()

    @classmethod
    def from_json(cls, fields: Fields) -> ProcessEntry:
        """Parse one of `processes`."""
        objects, imports = read_objects(fields)
        return cls(
            ns_pid=fields.integer("nsPid"),
            comm=fields.text("comm"),
            mode=fields.text("mode"),
            devices=fields.texts("devices"),
            gpu_bytes=fields.integer_or_none("gpuBytes"),
            objects=objects,
            imports=imports,
            descriptors=read_descriptors(fields),
            unknown=fields.unknown(),
        )

    def to_json(self) -> dict[str, Any]:
        """The form that is written."""
        doc = {"nsPid": self.ns_pid, "comm": self.comm, "mode": self.mode, "devices": list(self.devices)}
        more = {
            "gpuBytes": self.gpu_bytes,
            "objects": [entry.to_json() for entry in self.objects] or None,
            "imports": [entry.to_json() for entry in self.imports] or None,
            "descriptors": [entry.to_json() for entry in self.descriptors] or None,
        }
        return self.unknown | doc | {key: value for key, value in more.items() if value is not None}

    @property
    def is_staged(self) -> bool:
        """Its memory lies in packs, and a gate keeps it still until that is back."""
        return self.mode == STAGED or bool(self.objects or self.imports or self.descriptors)

    @property
    def is_sharing(self) -> bool:
        """It has memory of another process, or names some by descriptor, which only a reader that knows `shared` gives back."""
        return bool(self.imports or self.descriptors) or any(entry.is_orphan for entry in self.objects)

    def names(self) -> set[str]:
        """What it has: its objects and imports, as references name them."""
        ids = (*(entry.id for entry in self.objects), *(entry.id for entry in self.imports))
        return {object_name(self.ns_pid, number) for number in ids}


@dataclass(frozen=True)
class DeviceEntry:
    """A GPU that the container's processes used."""

    uuid: str
    name: str
    memory_bytes: int
    unknown: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_json(cls, fields: Fields) -> DeviceEntry:
        """Parse one of `devices`."""
        uuid, name, memory_bytes = fields.text("uuid"), fields.text("name"), fields.integer("memoryBytes")
        return cls(uuid, name, memory_bytes, fields.unknown())

    def to_json(self) -> dict[str, Any]:
        """The form that is written."""
        return self.unknown | {"uuid": self.uuid, "name": self.name, "memoryBytes": self.memory_bytes}


def objects_by_name(processes: Sequence[ProcessEntry]) -> dict[str, ObjectEntry]:
    """Every object by the name that references use."""
    return {object_name(process.ns_pid, entry.id): entry for process in processes for entry in process.objects}


def check_shared(processes: Sequence[ProcessEntry], at: str) -> None:
    """Refuse an import whose object is not there, is the process's own, or is not what the import says it is.

    And a descriptor of an object that is not there.
    """
    if not any(process.imports or process.descriptors for process in processes):
        return
    objects = objects_by_name(processes)
    imports = {object_name(process.ns_pid, entry.id) for process in processes for entry in process.imports}
    for n, process in enumerate(processes):
        for m, entry in enumerate(process.imports):
            fault = _reference_fault(process, entry, objects, imports)
            if fault is not None:
                raise ImageError(where=f"{at}[{n}].imports[{m}].{fault[0]}", what=fault[1])
        for m, named in enumerate(process.descriptors):
            if named.of not in objects:
                where = f"{at}[{n}].descriptors[{m}].of"
                raise ImageError(where=where, what=f"{named.of} is no object of this checkpoint")


def _reference_fault(
    process: ProcessEntry, entry: ImportEntry, objects: Mapping[str, ObjectEntry], imports: set[str]
) -> tuple[str, str] | None:
    """The field that is wrong, and how."""
    if entry.of.startswith(f"{process.ns_pid}/"):
        return "of", f"{entry.of} is of the process itself"
    if entry.of not in objects:
        what = "is an import, not an object" if entry.of in imports else "is no object of this checkpoint"
        return "of", f"{entry.of} {what}"
    held = objects[entry.of]
    if entry.uuid != held.uuid:
        return "uuid", f"{entry.of} lies on {held.uuid}"
    if entry.size > held.size:
        return "size", f"{entry.of} has {held.size} bytes only"
    return None
