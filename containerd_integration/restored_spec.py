"""What changes in a container's configuration when it comes back: its cgroup's name, and CRIU's options.

Nothing else does: the rest is signed and vgpu-runtime refuses a difference. Pure. Called by `restoring`.
"""

from __future__ import annotations

import json
import re


def renamed(spec: bytes, old: str, new: str) -> bytes:
    """The configuration with the cgroup of the new name, so that the old container may still run beside it.

    Both spellings end with the container's id: `/default/ID` and systemd's `slice:prefix:ID`.
    """
    document = json.loads(spec)
    linux = document.get("linux") or {}
    path = linux.get("cgroupsPath") or ""
    if not old or old == new or not re.search(rf"[/:]{re.escape(old)}$", path):
        return spec
    linux["cgroupsPath"] = path[: -len(old)] + new
    return json.dumps(document).encode()


def cgroups_path(spec: bytes) -> str:
    """Where the engine wants the container's cgroup."""
    return str((json.loads(spec).get("linux") or {}).get("cgroupsPath") or "")


def has_terminal(spec: bytes) -> bool:
    """Whether its process has a terminal."""
    return bool((json.loads(spec).get("process") or {}).get("terminal"))
