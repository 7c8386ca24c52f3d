"""Finds the namespaces that a config.json joins by path and that are the host's own: joining those is making none.

The signed projection leaves paths out, because engines make namespaces per container and name them anew each time; so a path
to the host's own one would pass for that. A record therefore lists these types, and a restore refuses one that is not listed
(spec/security-config.md, `hostNamespaces`). Compares inodes only; a path that is not there is left to the runtime.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from image_format.security_config import HOST_NAMESPACES

if TYPE_CHECKING:
    from collections.abc import Mapping

HOST_FOLDER = "/proc/1/ns"
_FILE_OF = {"network": "net", "mount": "mnt"}  # the others are called alike in config.json and in /proc


def joined_host_namespaces(config: Mapping[str, object], *, host_folder: str = HOST_FOLDER) -> list[str]:
    """The types, sorted."""
    linux = config.get("linux")
    listed = linux.get("namespaces") if isinstance(linux, dict) else None
    found = {_type_of_the_hosts(item, host_folder) for item in (listed if isinstance(listed, list) else ())}
    return sorted(kind for kind in found if kind)


def host_namespaces_added(security: Mapping[str, object], config: Mapping[str, object]) -> list[str]:
    """One line for each namespace of the host that the config joins and the signed settings do not list."""
    signed = security.get(HOST_NAMESPACES)
    known = signed if isinstance(signed, list | tuple) else ()
    return [f"namespaces: {kind} joins the host's own" for kind in joined_host_namespaces(config) if kind not in known]


def _type_of_the_hosts(item: object, host_folder: str) -> str | None:
    if not isinstance(item, dict):
        return None
    kind, path = item.get("type"), item.get("path")
    if not isinstance(kind, str) or not isinstance(path, str) or not path:
        return None
    try:
        is_the_hosts = Path(path).samefile(f"{host_folder}/{_FILE_OF.get(kind, kind)}")
    except (OSError, ValueError):
        return None
    return kind if is_the_hosts else None
