"""Brings a test host to where an administrator leaves it: GPUs, vgpu-snapshot installed, `vgpu setup podman`, images.

Called by the fixtures of the engine tests; the demo does the same by hand to show it.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.hosts.host import TestHost

SOFTWARE_DRIVER = "/usr/lib/software-gpu"
SOFTWARE_STATE = "/run/software-gpu"
LOW_LEVEL = {"trixie": "/usr/bin/crun", "testing": "/usr/sbin/runc"}


def prepare(
    host: TestHost, *, memory: int = 512 << 20, count: int = 2, images: tuple[str, ...] = ("glibc",)
) -> TestHost:
    """One node with software GPUs, ready for podman with our runtime."""
    host.install_software_gpu(count=count, memory=memory)
    host.install_project()
    options = ["--driver-dir", SOFTWARE_DRIVER, "--cdi-mount", f"{SOFTWARE_STATE}:{SOFTWARE_STATE}:rw"]
    host.run(["vgpu", "setup", "podman", *options, "--low-level-runtime", LOW_LEVEL[host.row]], timeout=120)
    for image in images:
        host.image(image)
    return host


def trust(host: TestHost, other: TestHost) -> None:
    """`host` trusts what `other` signs."""
    path = f"/var/tmp/{other.name}.pub"
    host.write(path, other.read("/etc/vgpu/node.pub"))
    host.run(["vgpu", "trust", "add", path])


def digest(host: TestHost, path: str) -> str:
    """SHA-256 of a file on a host."""
    return hashlib.sha256(pathlib.Path(host.root, path.lstrip("/")).read_bytes()).hexdigest()


def inspect(host: TestHost, name: str) -> dict:
    """`podman inspect` of one container."""
    return json.loads(host.run(["podman", "inspect", name]).stdout)[0]


def bundle_config(host: TestHost, name: str) -> pathlib.Path:
    """The container's config.json on disk, seen from outside."""
    identifier = inspect(host, name)["Id"]
    return pathlib.Path(host.root, f"var/lib/containers/storage/overlay-containers/{identifier}/userdata/config.json")
