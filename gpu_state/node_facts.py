"""What this node is: driver, GPUs and their links, CRIU, low-level runtime, kernel, cgroup, CPU, preload builds (spec/agent-protocol.md, `facts`).

`NodeFacts` is plain data; `gather` is the only function that looks at the node. Judges nothing: that is fitness.py.
Called by the agent's `facts` verb; the runtime shim reads the result with `NodeFacts.from_json`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_state.nvml_links import Link

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gpu_state.driver import Device

PRELOAD_ROOT = Path("/usr/lib/vgpu-snapshot/preload")
NCCL_NAME = "libnccl.so.2"
NCCL_FOLDERS = tuple(
    Path(folder)
    for folder in (
        "/usr/lib/x86_64-linux-gnu",
        "/usr/lib/aarch64-linux-gnu",
        "/usr/lib64",
        "/usr/lib",
        "/usr/local/lib",
        "/usr/local/nvidia/lib64",
        "/usr/local/cuda/lib64",
    )
)
RUNTIMES = ("/usr/bin/runc", "/usr/sbin/runc", "/usr/bin/crun")
_TOOL_TIMEOUT_S = 5.0


class NodeFactsError(ValueError):
    """A facts document that is not one; the message names the path of the fault."""


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """One GPU as the driver enumerates it."""

    ordinal: int
    uuid: str
    name: str
    memory_bytes: int

    @classmethod
    def from_json(cls, doc: object, at: str) -> DeviceFacts:
        """Read one entry of `devices`."""
        entry = _object(doc, at)
        return cls(
            ordinal=_integer(entry, "ordinal", at),
            uuid=_string(entry, "uuid", at),
            name=_string(entry, "name", at),
            memory_bytes=_integer(entry, "memory_bytes", at),
        )

    def to_json(self) -> dict[str, Any]:
        """The entry of `devices`."""
        return {"ordinal": self.ordinal, "uuid": self.uuid, "name": self.name, "memory_bytes": self.memory_bytes}


@dataclass(frozen=True, slots=True)
class RuntimeFacts:
    """The low-level runtime that the shim would call."""

    name: str
    version: str

    @classmethod
    def from_json(cls, doc: object, at: str) -> RuntimeFacts:
        """Read `runtime`."""
        entry = _object(doc, at)
        return cls(name=_string(entry, "name", at), version=_string(entry, "version", at))

    def to_json(self) -> dict[str, Any]:
        """The value of `runtime`."""
        return {"name": self.name, "version": self.version}


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """Everything a checkpoint's requirements are compared with."""

    driver_release: str | None
    cuda_version: str | None
    devices: tuple[DeviceFacts, ...]
    criu_version: str | None
    runtime: RuntimeFacts | None
    kernel: str
    cgroup_version: int
    machine: str
    cpu_flags: tuple[str, ...]
    preload: Mapping[str, str | None]
    preload_builds: tuple[str, ...] = ()
    engine_seen: str | None = None
    links: tuple[Link, ...] = ()
    nccl_version: str | None = None

    @classmethod
    def from_json(cls, doc: object) -> NodeFacts:
        """Read the agent's answer to `facts`."""
        facts = _object(doc, "facts")
        devices, flags = _list(facts, "devices"), _list(facts, "cpu_flags")
        links = _list({"links": [], **facts}, "links")
        runtime, preload = facts.get("runtime"), _object(facts.get("preload", {}), "facts.preload")
        return cls(
            driver_release=_text_or_none(facts, "driver_release"),
            cuda_version=_text_or_none(facts, "cuda_version"),
            devices=tuple(DeviceFacts.from_json(item, f"facts.devices[{n}]") for n, item in enumerate(devices)),
            criu_version=_text_or_none(facts, "criu_version"),
            runtime=None if runtime is None else RuntimeFacts.from_json(runtime, "facts.runtime"),
            kernel=_string(facts, "kernel", "facts"),
            cgroup_version=_integer(facts, "cgroup_version", "facts"),
            machine=_string(facts, "machine", "facts"),
            cpu_flags=tuple(str(flag) for flag in flags),
            preload={libc: _text_or_none(preload, libc) for libc in preload},
            preload_builds=tuple(str(build) for build in _list({"preload_builds": [], **facts}, "preload_builds")),
            engine_seen=_text_or_none(facts, "engine_seen"),
            links=tuple(_link(item, f"facts.links[{n}]") for n, item in enumerate(links)),
            nccl_version=_text_or_none(facts, "nccl_version"),
        )

    def to_json(self) -> dict[str, Any]:
        """The result of `facts`."""
        return {
            "driver_release": self.driver_release,
            "cuda_version": self.cuda_version,
            "devices": [device.to_json() for device in self.devices],
            "criu_version": self.criu_version,
            "runtime": None if self.runtime is None else self.runtime.to_json(),
            "kernel": self.kernel,
            "cgroup_version": self.cgroup_version,
            "machine": self.machine,
            "cpu_flags": list(self.cpu_flags),
            "preload": dict(self.preload),
            "preload_builds": list(self.preload_builds),
            "engine_seen": self.engine_seen,
            "links": [link.to_json() for link in self.links],
            "nccl_version": self.nccl_version,
        }


def gather(
    *,
    driver_release: str | None,
    cuda_version: str | None,
    devices: Sequence[Device],
    links: Sequence[Link] = (),
    runtime_path: str | None = None,
    preload_root: Path = PRELOAD_ROOT,
) -> NodeFacts:
    """Look at this node; what the driver says is brought by the caller, who owns the driver worker."""
    return NodeFacts(
        driver_release=driver_release,
        cuda_version=cuda_version,
        devices=tuple(DeviceFacts(d.ordinal, d.uuid, d.name, d.memory_bytes) for d in devices),
        criu_version=criu_version(),
        runtime=runtime_facts(runtime_path or first_runtime()),
        kernel=os.uname().release,
        cgroup_version=cgroup_version(),
        machine=os.uname().machine,
        cpu_flags=cpu_flags(),
        preload={libc: current_preload(preload_root, libc) for libc in ("glibc", "musl")},
        preload_builds=preload_builds(preload_root),
        links=tuple(links),
        nccl_version=nccl_version(),
    )


def criu_version() -> str | None:
    """CRIU's version, None where there is no CRIU."""
    return _version_of(shutil.which("criu") or "/usr/sbin/criu", r"Version:\s*(\d+(?:\.\d+)*)")


def runtime_facts(path: str | None) -> RuntimeFacts | None:
    """Name and version of the low-level runtime at `path`."""
    version = None if path is None else _version_of(path, r"version\s+(\d+(?:\.\d+)*)")
    return None if path is None or version is None else RuntimeFacts(name=Path(path).name, version=version)


def first_runtime() -> str | None:
    """The low-level runtime the shim takes when runtime.conf names none."""
    return next((path for path in RUNTIMES if os.access(path, os.X_OK)), None)


def cgroup_version() -> int:
    """2 on a unified hierarchy, 1 on a legacy or hybrid one."""
    return 2 if Path("/sys/fs/cgroup/cgroup.controllers").exists() else 1


def cpu_flags() -> tuple[str, ...]:
    """The CPU's feature flags, sorted."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() in {"flags", "Features"}:
            return tuple(sorted(set(value.split())))
    return ()


def current_preload(root: Path, libc: str) -> str | None:
    """Build id of the preload that new containers get."""
    try:
        return (root / libc / "current").read_text().strip() or None
    except OSError:
        return None


def preload_builds(root: Path) -> tuple[str, ...]:
    """Every preload build that a restored container could ask for, as `<libc>/<build-id>`."""
    found = root.glob("*/*/libvgpu.so")
    return tuple(sorted(f"{library.parent.parent.name}/{library.parent.name}" for library in found))


def nccl_version(folders: Sequence[Path] = NCCL_FOLDERS) -> str | None:
    """Version of the NCCL that this node has for itself, and that a container may be given; None where there is none."""
    for folder in folders:
        match = re.search(r"\.so\.(\d+\.\d+\.\d+)$", os.path.realpath(folder / NCCL_NAME))
        if match and (folder / NCCL_NAME).exists():
            return match.group(1)
    return None


def _version_of(program: str, pattern: str) -> str | None:
    try:
        done = subprocess.run(
            [program, "--version"], capture_output=True, text=True, timeout=_TOOL_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(pattern, done.stdout)
    return match.group(1) if match else None


def _link(doc: object, at: str) -> Link:
    entry = _object(doc, at)
    return Link(
        a=_string(entry, "a", at),
        b=_string(entry, "b", at),
        reads=_flag_or_none(entry, "reads", at),
        writes=_flag_or_none(entry, "writes", at),
        nvlinks=None if entry.get("nvlinks") is None else _integer(entry, "nvlinks", at),
        way=_text_or_none(entry, "way"),
    )


def _object(doc: object, at: str) -> dict[str, Any]:
    if not isinstance(doc, dict):
        raise NodeFactsError(f"{at} is no object")
    return doc


def _list(doc: dict[str, Any], key: str) -> list[Any]:
    value = doc.get(key)
    if not isinstance(value, list):
        raise NodeFactsError(f"facts.{key} is no list")
    return value


def _string(doc: dict[str, Any], key: str, at: str) -> str:
    value = doc.get(key)
    if not isinstance(value, str):
        raise NodeFactsError(f"{at}.{key} is no string")
    return value


def _text_or_none(doc: dict[str, Any], key: str) -> str | None:
    value = doc.get(key)
    return value if isinstance(value, str) else None


def _flag_or_none(doc: dict[str, Any], key: str, at: str) -> bool | None:
    value = doc.get(key)
    if value is not None and not isinstance(value, bool):
        raise NodeFactsError(f"{at}.{key} is no flag")
    return value


def _integer(doc: dict[str, Any], key: str, at: str) -> int:
    value = doc.get(key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise NodeFactsError(f"{at}.{key} is no integer")
    return value
