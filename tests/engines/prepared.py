"""Brings a test host to where an administrator leaves it: GPUs, vgpu-snapshot installed, `vgpu setup podman`, images.

Called by the fixtures of the engine tests; the demo does the same by hand to show it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import pathlib
import struct
from typing import TYPE_CHECKING

from tests.software_gpu import devices

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.engines.gpu_container import GpuContainer
    from tests.hosts.host import TestHost

SOFTWARE_DRIVER = "/usr/lib/software-gpu"
SOFTWARE_STATE = "/run/software-gpu"
SETTINGS = "/etc/vgpu/runtime.conf"
LOG = "/var/log/vgpu/runtime.log"
LOW_LEVEL = {"trixie": "/usr/bin/crun", "testing": "/usr/sbin/runc"}


def prepare(
    host: TestHost, *, memory: int = 512 << 20, count: int = 2, images: tuple[str, ...] = ("glibc",)
) -> TestHost:
    """One node with software GPUs, ready for podman with our runtime."""
    host.install_software_gpu(count=count, memory=memory)
    host.install_project()
    options = ["--driver-dir", SOFTWARE_DRIVER, "--cdi-mount", f"{SOFTWARE_STATE}:{SOFTWARE_STATE}:rw"]
    host.run(["vgpu", "setup", "podman", *options, "--low-level-runtime", LOW_LEVEL[host.row]], timeout=120)
    host.write(LOG, "")
    configure(host, log=LOG)
    for image in images:
        host.image(image)
    return host


def configure(host: TestHost, **settings: object) -> None:
    """Set keys of runtime.conf; None takes one out."""
    kept = [line for line in host.read(SETTINGS).splitlines() if line.partition("=")[0].strip() not in settings]
    lines = [*kept, *(f"{key} = {value}" for key, value in settings.items() if value is not None)]
    host.write(SETTINGS, "".join(f"{line}\n" for line in lines))


@contextlib.contextmanager
def configured(host: TestHost, **settings: object) -> Iterator[None]:
    """Keys of runtime.conf for a while."""
    before = host.read(SETTINGS)
    configure(host, **settings)
    try:
        yield
    finally:
        host.write(SETTINGS, before)


def trust(host: TestHost, other: TestHost) -> None:
    """`host` trusts what `other` signs."""
    path = f"/var/tmp/{other.name}.pub"
    host.write(path, other.read("/etc/vgpu/node.pub"))
    host.run(["vgpu", "trust", "add", path])


def digest(host: TestHost, path: str) -> str:
    """SHA-256 of a file on a host."""
    return hashlib.sha256(pathlib.Path(host.root, path.lstrip("/")).read_bytes()).hexdigest()


def used_bytes(host: TestHost) -> int:
    """Device memory in use on the host's software GPUs, from their state files: slots of processes that live."""
    state = pathlib.Path(host.root, SOFTWARE_STATE.lstrip("/"))
    used = 0
    for path in sorted(state.glob("gpu[0-9]*")):
        data = path.read_bytes()
        for at in range(devices.HEADER.size, len(data), devices.SLOT_SIZE):
            slot_bytes, _, pid = struct.unpack_from("<QQi", data, at)
            used += slot_bytes if slot_bytes and pid and _is_locked(path, at) else 0
    return used


def _is_locked(path: pathlib.Path, at: int) -> bool:
    """Whether a process owns the slot: it holds an open-file-description lock on its first byte."""
    asked = struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, at, 1, 0)
    with path.open("rb+") as file:
        return struct.unpack("hhqqi4x", fcntl.fcntl(file, fcntl.F_OFD_GETLK, asked))[0] != fcntl.F_UNLCK


def inspect(host: TestHost, name: str) -> dict:
    """`podman inspect` of one container."""
    return json.loads(host.run(["podman", "inspect", name]).stdout)[0]


def image_path(container: GpuContainer) -> str:
    """Where podman has the container's checkpoint, inside the host."""
    identifier = inspect(container.host, container.name)["Id"]
    return f"/var/lib/containers/storage/overlay-containers/{identifier}/userdata/checkpoint"


def bundle_config(host: TestHost, name: str) -> pathlib.Path:
    """The container's config.json on disk, seen from outside."""
    identifier = inspect(host, name)["Id"]
    return pathlib.Path(host.root, f"var/lib/containers/storage/overlay-containers/{identifier}/userdata/config.json")
