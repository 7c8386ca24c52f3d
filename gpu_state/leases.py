"""Remembers which containers are frozen and for whom, also across a killed agent.

A journal entry is written before the first lock and removed when the processes run again or are none of our business any
more. Decides nothing about when to thaw; touches no driver. Used by freeze.py and service.py.

The journal lies in /run, so that it is gone after a reboot, as the processes are.
"""

from __future__ import annotations

import json
import re
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gpu_state.processes import ProcessIdentity
from gpu_state.staged_lease import StagedPart
from vgpu_errors import AgentRefused

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

_CONTAINER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,127}")


@dataclass(frozen=True, slots=True)
class Lease:
    """A freeze in force: what is frozen, for whom, and what must be set free with it."""

    id: str
    container: str
    cgroup: str
    owner: ProcessIdentity
    processes: tuple[tuple[ProcessIdentity, str], ...]
    unfreeze_cgroup: str | None = None
    device_map: Mapping[str, str] = field(default_factory=dict)
    staged: StagedPart | None = None

    @property
    def is_suspended(self) -> bool:
        """Frozen on purpose, until somebody says `resume`."""
        return self.staged is not None and self.staged.is_suspended

    def to_json(self) -> dict[str, Any]:
        """The journal entry."""
        return {
            "lease": self.id,
            "container": self.container,
            "cgroup": self.cgroup,
            "owner": {"pid": self.owner.pid, "start_time": self.owner.start_time},
            "processes": [{"pid": p.pid, "start_time": p.start_time, "comm": comm} for p, comm in self.processes],
            "unfreeze_cgroup": self.unfreeze_cgroup,
            "device_map": dict(self.device_map),
            "staged": None if self.staged is None else self.staged.to_json(),
        }

    @classmethod
    def from_json(cls, doc: dict[str, Any]) -> Lease:
        """Read a journal entry that an earlier agent wrote."""
        owner = doc["owner"]
        return cls(
            id=doc["lease"],
            container=doc["container"],
            cgroup=doc["cgroup"],
            owner=ProcessIdentity(owner["pid"], owner["start_time"]),
            processes=tuple((ProcessIdentity(p["pid"], p["start_time"]), p["comm"]) for p in doc["processes"]),
            unfreeze_cgroup=doc["unfreeze_cgroup"],
            device_map=doc["device_map"],
            staged=StagedPart.from_json(staged) if (staged := doc.get("staged")) else None,
        )


def new_lease_id() -> str:
    """A name that nobody can guess."""
    return secrets.token_hex(16)


def checked_container(container: object, verb: str) -> str:
    """A container id that is safe as a file name."""
    if isinstance(container, str) and _CONTAINER.fullmatch(container):
        return container
    raise AgentRefused(verb=verb, what=f"{container!r} is no container id")


class Journal:
    """The folder of journal entries, one file per container."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def write(self, lease: Lease) -> None:
        """Put the entry down, durable against the agent's death before the first lock is taken."""
        partial = self._folder / f".{lease.container}.partial"
        partial.touch(0o600)
        partial.write_text(json.dumps(lease.to_json()))
        partial.replace(self._path(lease.container))

    def remove(self, container: str) -> None:
        """Forget the entry."""
        self._path(container).unlink(missing_ok=True)

    def entries(self) -> Iterator[Lease]:
        """What earlier agents left; a file that is no entry is passed over, it names no process."""
        for path in sorted(self._folder.glob("*.json")):
            try:
                yield Lease.from_json(json.loads(path.read_text()))
            except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
                continue

    def of(self, container: str) -> Lease | None:
        """The entry of one container."""
        return next((lease for lease in self.entries() if lease.container == container), None)

    def _path(self, container: str) -> Path:
        return self._folder / f"{container}.json"
