"""Sees through namespaces that a config.json joins by path and that are the host's own: joining those is making none.

The signed projection leaves paths out, because engines make a network namespace per container and name it anew each time.
So a path to the host's own one would pass for that. Applied before every projection, when a checkpoint is signed and when
its restore compares (spec/security-config.md). Compares inodes only; a path that is not there is left to the runtime.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

HOST_FOLDER = "/proc/1/ns"
_FILE_OF = {"network": "net", "mount": "mnt"}  # the others are called alike in config.json and in /proc


def without_host_namespaces(config: Mapping[str, Any], *, host_folder: str = HOST_FOLDER) -> dict[str, Any]:
    """The config without those namespaces whose path leads to the host's own; what is no config is left as it is."""
    linux = config.get("linux")
    listed = linux.get("namespaces") if isinstance(linux, dict) else None
    if not isinstance(linux, dict) or not isinstance(listed, list):
        return dict(config)
    kept = [item for item in listed if not _is_the_hosts(item, host_folder)]
    return {**config, "linux": {**linux, "namespaces": kept}}


def _is_the_hosts(item: object, host_folder: str) -> bool:
    if not isinstance(item, dict):
        return False
    kind, path = item.get("type"), item.get("path")
    if not isinstance(kind, str) or not isinstance(path, str) or not path:
        return False
    try:
        return Path(path).samefile(f"{host_folder}/{_FILE_OF.get(kind, kind)}")
    except (OSError, ValueError):
        return False
