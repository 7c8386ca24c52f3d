"""Lists the GPU containers of this node from the state files that the runtime shim writes in /run/vgpu/state.

Reads files, asks no engine and no driver. A file that does not parse is left out; its container cannot be addressed anyway.
Refuses with UnsupportedRequest a group that is none. Used by the commands that take a container, and by the shim for its group.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_state.group_terms import MAX_MEMBERS, NAME, NAME_IN_WORDS
from vgpu_errors import UnsupportedRequest

if TYPE_CHECKING:
    from collections.abc import Iterable

GROUP_ANNOTATION = "vgpu.snapshot/group"
STATE_DIR = Path("/run/vgpu/state")


@dataclass(frozen=True, slots=True)
class KnownContainer:
    """One GPU container."""

    id: str
    engine: str
    pid: int
    cgroup: str
    created: int | None
    preload_build_id: str | None
    last_checkpoint: dict[str, Any] | None
    group: str | None = None

    @classmethod
    def from_json(cls, doc: dict[str, Any]) -> KnownContainer:
        """Read a state file's content."""
        checkpoint = doc.get("last_checkpoint")
        return cls(
            id=str(doc["id"]),
            engine=str(doc.get("engine", "unknown")),
            pid=int(doc["pid"]),
            cgroup=str(doc["cgroup"]),
            created=created if isinstance(created := doc.get("created"), int) else None,
            preload_build_id=doc.get("preload_build_id"),
            last_checkpoint=checkpoint if isinstance(checkpoint, dict) else None,
            group=group if isinstance(group := doc.get("group"), str) else None,
        )

    def is_running(self) -> bool:
        """Its first process lives; an engine may come late with the `delete` that takes the state file away."""
        return self.pid > 0 and Path(f"/proc/{self.pid}").exists()


def known_containers(state_dir: Path = STATE_DIR) -> list[KnownContainer]:
    """Every container with a readable state file, oldest first."""
    found = []
    for path in sorted(state_dir.glob("*.json")):
        try:
            found.append(KnownContainer.from_json(json.loads(path.read_text())))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            continue
    return sorted(found, key=lambda container: (container.created or 0, container.id))


def members_of(group: str, known: Iterable[KnownContainer]) -> list[KnownContainer]:
    """The running containers of a group."""
    found = [container for container in known if container.group == group and container.is_running()]
    if len(found) > MAX_MEMBERS:
        raise UnsupportedRequest(what=f"group {group} has {len(found)} containers, more than {MAX_MEMBERS}")
    return found


def checked_group(group: object, container: str) -> str | None:
    """The group that a state file names, where that is a name."""
    if group is None or (isinstance(group, str) and NAME.fullmatch(group)):
        return group
    raise UnsupportedRequest(
        what=f"{container[:12]} has the annotation {GROUP_ANNOTATION}={group!r}, which is no name: {NAME_IN_WORDS}",
        remedy="Create the container anew with a name that is one.",
    )
