"""Lists the GPU containers of this node from the state files that the runtime shim writes in /run/vgpu/state.

Reads files, asks no engine and no driver. A file that does not parse is left out; its container cannot be addressed anyway.
Used by `vgpu ps` and `vgpu doctor CONTAINER`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
        )


def known_containers(state_dir: Path = STATE_DIR) -> list[KnownContainer]:
    """Every container with a readable state file, oldest first."""
    found = []
    for path in sorted(state_dir.glob("*.json")):
        try:
            found.append(KnownContainer.from_json(json.loads(path.read_text())))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            continue
    return sorted(found, key=lambda container: (container.created or 0, container.id))
