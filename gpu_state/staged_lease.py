"""What the journal says of the staged side of a freeze: which objects were taken, and where their content lies.

Pure. Written before the first gate closes and again when the content is complete; read by the agent that comes after a killed
one. Used by leases.py, staged_freeze.py and staged_thaw.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from gpu_state.preload_objects import DeviceObject
from gpu_state.processes import ProcessIdentity
from gpu_state.shared_objects import ImportedObject


@dataclass(frozen=True, slots=True)
class ParkedDescriptor:
    """A number of the application's that named the object `of`: while the memory is away, a placeholder with this token is there."""

    number: int
    of: str
    closes_on_exec: bool
    token: int

    def to_json(self) -> dict[str, Any]:
        """The form of the journal and of the agent's answers; that of the record."""
        return {
            "number": self.number,
            "of": self.of,
            "closeOnExec": self.closes_on_exec,
            "token": f"{self.token:016x}",
        }

    @classmethod
    def from_json(cls, doc: dict[str, Any]) -> ParkedDescriptor:
        """Read the journal's form."""
        return cls(doc["number"], doc["of"], doc["closeOnExec"], int(doc["token"], 16))


@dataclass(frozen=True, slots=True)
class StagedProcess:
    """One process in staged mode, and the objects that it gives away; imports are objects of others that it has mapped.

    `descriptors` are those of the application itself.
    """

    identity: ProcessIdentity
    comm: str
    ns_pid: int
    objects: tuple[DeviceObject, ...] = ()
    imports: tuple[ImportedObject, ...] = ()
    descriptors: tuple[ParkedDescriptor, ...] = ()

    @property
    def pid(self) -> int:
        """The process as this host sees it."""
        return self.identity.pid

    def name_of(self, object_id: int) -> str:
        """The object's name in the image, the keeper and the staging worker."""
        return f"{self.ns_pid}/{object_id}"

    def names(self) -> dict[str, DeviceObject]:
        """Name -> object."""
        return {self.name_of(held.id): held for held in self.objects}

    def wanted(self) -> dict[int, str]:
        """Id -> name of the object, of everything that the process needs back."""
        return {held.id: self.name_of(held.id) for held in self.objects} | {held.id: held.of for held in self.imports}

    def objects_wanted(self) -> set[str]:
        """The names of all objects that the process needs to hand."""
        return {*self.wanted().values(), *(parked.of for parked in self.descriptors)}

    def to_json(self) -> dict[str, Any]:
        """The journal's form."""
        return {
            "pid": self.identity.pid,
            "start_time": self.identity.start_time,
            "comm": self.comm,
            "ns_pid": self.ns_pid,
            "objects": [held.to_json() for held in self.objects],
            "imports": [held.to_json() for held in self.imports],
            "descriptors": [parked.to_json() for parked in self.descriptors],
        }

    @classmethod
    def from_json(cls, doc: dict[str, Any]) -> StagedProcess:
        """Read the journal's form."""
        return cls(
            ProcessIdentity(doc["pid"], doc["start_time"]),
            doc["comm"],
            doc["ns_pid"],
            tuple(map(DeviceObject.from_json, doc["objects"])),
            # An agent of before these members held none.
            tuple(map(ImportedObject.from_json, doc.get("imports", ()))),
            tuple(map(ParkedDescriptor.from_json, doc.get("descriptors", ()))),
        )


@dataclass(frozen=True, slots=True)
class StagedPart:
    """The staged side of one lease.

    `store` is the folder that holds the content, `is_complete` says that it holds all of it, so that nothing else is needed.
    `is_suspend` says that the store is a suspend's and goes with it; `is_suspended` that nothing else holds the content.
    """

    processes: tuple[StagedProcess, ...]
    store: str | None = None
    is_complete: bool = False
    is_suspend: bool = False
    is_suspended: bool = False

    def sizes(self) -> dict[str, int]:
        """Name -> bytes, of every object; each is there once, however many processes have it mapped."""
        return {name: held.size for process in self.processes for name, held in process.names().items()}

    def tokens(self) -> dict[int, str]:
        """Token -> the object that a placeholder with it stands for, whichever process has it by now."""
        return {parked.token: parked.of for process in self.processes for parked in process.descriptors}

    @property
    def bytes(self) -> int:
        """Device memory of all objects."""
        return sum(held.size for process in self.processes for held in process.objects)

    def completed(self) -> StagedPart:
        """The same, with all content in the store."""
        return replace(self, is_complete=True)

    def to_json(self) -> dict[str, Any]:
        """The journal's form."""
        return {
            "processes": [process.to_json() for process in self.processes],
            "store": self.store,
            "is_complete": self.is_complete,
            "is_suspend": self.is_suspend,
            "is_suspended": self.is_suspended,
        }

    @classmethod
    def from_json(cls, doc: dict[str, Any]) -> StagedPart:
        """Read the journal's form."""
        return cls(
            tuple(map(StagedProcess.from_json, doc["processes"])),
            doc["store"],
            bool(doc["is_complete"]),
            bool(doc["is_suspend"]),
            bool(doc["is_suspended"]),
        )
