"""Decides what one container gets, in NRI's terms, with the rules of `vgpu-runtime create` (docs/how-it-works.md).

Pure but for what `oci_hook` itself looks at (the installed preload builds, symbolic links of mounts): a container in, the
additions out. Only additions: NRI's answer has our mounts, our annotations and the merged LD_PRELOAD, nothing else.
Called by `plugin`.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from oci_hook.edits import is_own_mount
from oci_hook.injection import current_build_id, decide, parse_spec, plan_injection, to_bytes
from oci_hook.rootfs_libc import find_libc

if TYPE_CHECKING:
    from oci_hook.rootfs_libc import Tree
    from oci_hook.settings import Settings

PREFIX = "vgpu.snapshot/"
LIBC_ANNOTATION = f"{PREFIX}libc"
HANDLER = "vgpu-runtime"
CDI_KINDS = ("nvidia.com/gpu=", "vgpu.snapshot/gpu=")


@dataclass(frozen=True)
class Adjustment:
    """What is added to a container; nothing where `why_not` says why."""

    mounts: tuple[dict[str, Any], ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    annotations: dict[str, str] = field(default_factory=dict)
    reason: str = ""
    why_not: str = ""

    @property
    def is_empty(self) -> bool:
        """Nothing is added."""
        return not (self.mounts or self.environment or self.annotations)


def spec_of(container: Any, pod: Any) -> dict[str, Any]:
    """The part of an OCI spec that the rules look at; the pod's own `vgpu.snapshot/` annotations count for each container."""
    of_pod = {name: value for name, value in pod.annotations.items() if name.startswith(PREFIX)}
    hooks = container.hooks
    return {
        "annotations": {**of_pod, **container.annotations},
        "process": {"args": list(container.args), "env": list(container.env), "cwd": "/"},
        "mounts": [
            {"destination": one.destination, "type": one.type, "source": one.source, "options": list(one.options)}
            for one in container.mounts
        ],
        "linux": {"devices": [{"path": device.path} for device in container.linux.devices]},
        "hooks": {stage.name: [{"path": hook.path} for hook in hooks_of] for stage, hooks_of in hooks.ListFields()},
    }


def reason_for(settings: Settings, spec: dict[str, Any], cdi_devices: list[str]) -> str | None:
    """Why it is a GPU container; None if it is none."""
    reason = decide(settings, spec)
    if reason is not None or settings.inject == "never" or spec["annotations"].get(f"{PREFIX}inject") == "false":
        return reason
    return next((f"CDI device {name}" for name in cdi_devices if name.startswith(CDI_KINDS)), None)


def adjust(settings: Settings, container: Any, pod: Any, tree: Tree | None) -> Adjustment:
    """The additions for one container, or the reason why there are none."""
    if pod.runtime_handler == HANDLER:
        return Adjustment(why_not=f"the runtime handler {HANDLER} injects by itself")
    spec = spec_of(container, pod)
    reason = reason_for(settings, spec, [device.name for device in container.CDI_devices])
    if reason is None:
        return Adjustment()
    libc, words = _libc(spec, tree)
    build_id = current_build_id(settings, libc) if libc else None
    if libc is None or build_id is None:
        return Adjustment(reason=reason, why_not=words if libc is None else f"no {libc} build is installed")
    injection = plan_injection(settings, "/", container.id, to_bytes(spec), pinned=(libc, build_id))
    if injection is None or injection.edited is None:
        return Adjustment(reason=reason, why_not=injection.reason if injection else "an id that names no file")
    return difference(spec, parse_spec(injection.edited) or {}, f"{reason}; {injection.reason}")


def difference(before: dict[str, Any], after: dict[str, Any], reason: str) -> Adjustment:
    """What `after` has more; the annotations that only the pod has are not the container's to get."""
    environment = [entry for entry in after["process"]["env"] if entry not in before["process"]["env"]]
    return Adjustment(
        mounts=tuple(copy.deepcopy(mount) for mount in after["mounts"] if is_own_mount(mount)),
        environment=tuple((name, value) for name, _, value in (entry.partition("=") for entry in environment)),
        annotations={
            name: value for name, value in after["annotations"].items() if before["annotations"].get(name) != value
        },
        reason=reason,
    )


def _libc(spec: dict[str, Any], tree: Tree | None) -> tuple[str | None, str]:
    said = str(spec["annotations"].get(LIBC_ANNOTATION, ""))
    if said in ("glibc", "musl"):
        return said, "its annotation says so"
    if tree is None:
        return None, f"its files cannot be looked at; the annotation {LIBC_ANNOTATION} may say glibc or musl"
    found = find_libc(tree, spec["process"])
    return found.libc, found.reason
