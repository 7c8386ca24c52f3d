"""Tells from a container's config.json whether it uses a GPU.

Pure: a parsed spec in, a reason out. Looks at the spec alone, never at the node, so that a container that was
checkpointed here is judged the same way elsewhere. Called by injection.py. Rules: docs/how-it-works, "Which containers".
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any

INJECT_ANNOTATION = "vgpu.snapshot/inject"
MODE_ANNOTATION = "vgpu.snapshot/mode"
GROUP_ANNOTATION = "vgpu.snapshot/group"
CONTROL_DEVICES = ("/dev/nvidiactl", "/dev/nvidia-uvm")
NO_DEVICES = ("", "void", "none")

_TELLTALES = (b"nvidia", b"libcuda.so", b"vgpu.snapshot/", b"\\u")


def may_use_gpu(config: bytes) -> bool:
    """False only if `gpu_reason` could not find anything: spares most containers the JSON parser (8 ms).

    An escape could spell any word, so it counts as a trace.
    """
    return any(word in config for word in _TELLTALES)


def user_switch(spec: Mapping[str, Any]) -> bool | None:
    """What the container's annotation asks for; None where it does not say."""
    value = str(_dict(spec.get("annotations")).get(INJECT_ANNOTATION, "")).strip().lower()
    return {"true": True, "false": False}.get(value)


def wanted_mode(spec: Mapping[str, Any]) -> str | None:
    """How the container's GPU memory is to be moved, where its annotation says so: "staged" or "driver"."""
    value = str(_dict(spec.get("annotations")).get(MODE_ANNOTATION, "")).strip().lower()
    return value if value in ("staged", "driver") else None


def is_gpu_container(spec: Mapping[str, Any]) -> bool:
    """Whether the container counts as one with a GPU, its own annotation asked first."""
    wanted = user_switch(spec)
    return wanted if wanted is not None else gpu_reason(spec) is not None


def gpu_reason(spec: Mapping[str, Any], *, runtime_adds_devices: bool = False) -> str | None:
    """What shows that the container uses a GPU, in words; None if nothing does.

    `runtime_adds_devices`: the low-level runtime is NVIDIA's, which adds its hook after this look at the spec.
    """
    for path in _device_paths(spec):
        if path in CONTROL_DEVICES or is_gpu_device(path):
            return f"device {path}"
    for destination in _mount_destinations(spec):
        if _basename(destination).startswith("libcuda.so"):
            return f"mount {destination}"
    visible = _visible_devices(spec)
    if visible in NO_DEVICES:
        return None
    if runtime_adds_devices:
        return f"NVIDIA_VISIBLE_DEVICES={visible}"
    for hook in _hook_paths(spec):
        if "nvidia" in _basename(hook):
            return f"NVIDIA_VISIBLE_DEVICES={visible} and hook {hook}"
    return None


def is_gpu_device(path: str) -> bool:
    """Whether the path is one GPU's device node, such as /dev/nvidia0."""
    prefix, number = path[: len("/dev/nvidia")], path[len("/dev/nvidia") :]
    return prefix == "/dev/nvidia" and number.isascii() and number.isdigit()


def _device_paths(spec: Mapping[str, Any]) -> Iterator[str]:
    for device in _list(_dict(spec.get("linux")).get("devices")):
        yield str(_dict(device).get("path", ""))


def _mount_destinations(spec: Mapping[str, Any]) -> Iterator[str]:
    for mount in _list(spec.get("mounts")):
        yield str(_dict(mount).get("destination", ""))


def _visible_devices(spec: Mapping[str, Any]) -> str:
    """The last entry wins, as both runtimes have it."""
    value = ""
    for entry in _list(_dict(spec.get("process")).get("env")):
        name, equals, found = str(entry).partition("=")
        if equals and name == "NVIDIA_VISIBLE_DEVICES":
            value = found
    return value.strip()


def _hook_paths(spec: Mapping[str, Any]) -> Iterator[str]:
    for hooks in _dict(spec.get("hooks")).values():
        for hook in _list(hooks):
            yield str(_dict(hook).get("path", ""))


def _basename(path: str) -> str:
    return path.rpartition("/")[2]


def _dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
