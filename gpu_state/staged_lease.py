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
class StagedProcess:
    """One process in staged mode, and the objects that it gives away; imports are objects of others that it has mapped."""

    identity: ProcessIdentity
    comm: str
    ns_pid: int
    objects: tuple[DeviceObject, ...] = ()
    imports: tuple[ImportedObject, ...] = ()

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

    def to_json(self) -> dict[str, Any]:
        """The journal's form."""
        return {
            "pid": self.identity.pid,
            "start_time": self.identity.start_time,
            "comm": self.comm,
            "ns_pid": self.ns_pid,
            "objects": [held.to_json() for held in self.objects],
            "imports": [held.to_json() for held in self.imports],
        }

    @classmethod
    def from_json(cls, doc: dict[str, Any]) -> StagedProcess:
        """Read the journal's form."""
        return cls(
            ProcessIdentity(doc["pid"], doc["start_time"]),
            doc["comm"],
            doc["ns_pid"],
            tuple(map(DeviceObject.from_json, doc["objects"])),
            # An agent of before this member held none.
            tuple(map(ImportedObject.from_json, doc.get("imports", ()))),
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
