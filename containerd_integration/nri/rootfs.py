"""The files of a container that is about to be created: the layers of its snapshot, asked of containerd.

NRI does not say where a container's root is. containerd has prepared the snapshot by then, under the container's id.
Looks at the layers where they lie and mounts nothing; a snapshotter whose layers are no folders gives None.
Called by `plugin`.
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from containerd_integration.api.connection import Connection
from oci_hook.rootfs_libc import Tree
from vgpu_errors import VgpuError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

NAMESPACE = "k8s.io"
DEADLINE_S = 0.8
"""containerd waits 2 s for a plugin's whole answer."""


class LayeredTree(Tree):
    """Overlay layers, topmost first, seen as one tree."""

    def __init__(self, layers: Sequence[str]) -> None:
        super().__init__("", [])
        self._layers = tuple(layers)

    def names(self, path: str) -> list[str]:
        """The names in a folder, of all layers."""
        top = self.resolve(path)
        if top is None:
            return []
        inside = next((top[len(layer) :] for layer in self._layers if top.startswith(layer)), path)
        return sorted({name for layer in self._layers for name in _listed(layer + inside)})

    def _host_path(self, parts: list[str]) -> str | None:
        path = "".join(f"/{part}" for part in parts)
        for layer in self._layers:
            try:
                found = os.lstat(layer + path)
            except OSError:
                continue
            is_whiteout = stat.S_ISCHR(found.st_mode) and found.st_rdev == 0
            return None if is_whiteout else layer + path
        return None


def layers_of(address: str, container_id: str, snapshotter: str) -> tuple[str, ...] | None:
    """Folders of the container's snapshot, topmost first; None where containerd does not say."""
    try:
        with Connection(address, NAMESPACE, connect_s=DEADLINE_S / 2) as containerd:
            found = containerd.call(
                "snapshots", "Mounts", deadline_s=DEADLINE_S / 2, snapshotter=snapshotter, key=container_id
            )
    except VgpuError:
        return None
    return layers_in(found.mounts)


def layers_in(mounts: Sequence[Any]) -> tuple[str, ...] | None:
    """The folders that a snapshot's mounts name."""
    if len(mounts) != 1:
        return None
    mount = mounts[0]
    if mount.type == "bind":
        return (mount.source,)
    if mount.type != "overlay":
        return None
    options = dict(option.partition("=")[::2] for option in mount.options)
    lower = [folder for folder in options.get("lowerdir", "").split(":") if folder]
    upper = [options["upperdir"]] if "upperdir" in options else []
    return (*upper, *lower) or None


def _listed(path: str) -> list[str]:
    try:
        return os.listdir(path)  # noqa: PTH208 - as oci_hook, whose class this extends
    except OSError:
        return []
