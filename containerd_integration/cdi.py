"""The CDI spec of this node's GPUs (Container Device Interface, kind `vgpu.snapshot/gpu`).

Driver libraries are mounted where the loaders of both library layouts look without being told, so that no
LD_LIBRARY_PATH is needed: podman appends a CDI variable instead of merging it, and the container's own would be lost.
Pure: what was found in, document out. Called by `vgpu setup`; discovery is in `driver_files`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

SPEC_PATH = "/etc/cdi/vgpu.json"
KIND = "vgpu.snapshot/gpu"
# `rprivate` because CRIU may refuse a mount that shares with the host.
READ_ONLY = ("ro", "nosuid", "nodev", "bind", "rprivate")

# The NVIDIA hook of the older toolkit injects a second set of devices unless it reads this.
NO_OTHER_INJECTION = "NVIDIA_VISIBLE_DEVICES=void"


@dataclass(frozen=True)
class Mount:
    """One bind mount of a host path."""

    host_path: str
    container_path: str
    options: tuple[str, ...] = READ_ONLY

    def to_json(self) -> dict[str, Any]:
        """The form of CDI's `containerEdits.mounts`. The type is named, because crun 1.21 crashes at a restore without."""
        options = list(self.options)
        return {"hostPath": self.host_path, "containerPath": self.container_path, "type": "bind", "options": options}


@dataclass(frozen=True)
class DriverFiles:
    """What discovery found on the node."""

    gpu_nodes: tuple[tuple[str, str], ...] = ()
    """Device name ("0") and device node ("/dev/nvidia0")."""
    control_nodes: tuple[str, ...] = ()
    mounts: tuple[Mount, ...] = ()

    @property
    def is_empty(self) -> bool:
        """True where a spec would describe no device at all."""
        return not self.gpu_nodes and not self.mounts


def cdi_spec(found: DriverFiles, extra_mounts: Iterable[Mount] = ()) -> dict[str, Any]:
    """The spec: one device per GPU, `all` for every GPU, the shared nodes and libraries at spec level."""
    devices = [_device(name, [node]) for name, node in found.gpu_nodes]
    devices.append(_device("all", [node for _, node in found.gpu_nodes]))
    shared: dict[str, Any] = {}
    if found.control_nodes:
        shared["deviceNodes"] = [{"path": node} for node in found.control_nodes]
    mounts = [mount.to_json() for mount in (*found.mounts, *extra_mounts)]
    if mounts:
        shared["mounts"] = mounts
    spec: dict[str, Any] = {"cdiVersion": "", "kind": KIND, "devices": devices}
    if shared:
        spec["containerEdits"] = shared
    spec["cdiVersion"] = lowest_version(spec)
    return spec


def lowest_version(spec: dict[str, Any]) -> str:
    """The lowest CDI version that covers what this spec uses: a device name's leading digit needs 0.5.0, a mount's type 0.4.0."""
    if any(device["name"][0].isdigit() for device in spec["devices"]):
        return "0.5.0"
    return "0.4.0" if spec.get("containerEdits", {}).get("mounts") else "0.3.0"


def parse_mount(text: str) -> Mount:
    """`SRC:DST[:opt,opt]` as given on the command line; raises ValueError."""
    source, _, rest = text.partition(":")
    target, _, options = rest.partition(":")
    if not source.startswith("/") or not target.startswith("/"):
        message = f"{text!r} is not SRC:DST[:options] with absolute paths"
        raise ValueError(message)
    if not options:
        return Mount(source, target)
    names = tuple(option for option in options.split(",") if option)
    return Mount(source, target, names if {"bind", "rbind"} & set(names) else (*names, "bind"))


def _device(name: str, nodes: list[str]) -> dict[str, Any]:
    edits: dict[str, Any] = {"env": [NO_OTHER_INJECTION]}
    if nodes:
        edits["deviceNodes"] = [{"path": node} for node in nodes]
    return {"name": name, "containerEdits": edits}
