"""Gives a test host software GPUs: device nodes, their state directory, and the driver's two libraries.

The nodes are /dev/fuse's number under NVIDIA's names: opening one works, and CRIU refuses a process that holds one,
as it refuses the real device. No result from a software GPU is ever a GPU result.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from tests.software_gpu import build, devices

if TYPE_CHECKING:
    from tests.hosts.host import TestHost

DEVICE_DIRECTORY = "/run/software-gpu"
# NVIDIA has no driver for musl; the second folder serves the tests of the preload's musl build alone.
DRIVER_FOLDERS = {"glibc": "/usr/lib/software-gpu", "musl": "/usr/lib/software-gpu-musl"}
NODE_NUMBER = os.makedev(10, 229)
LIBRARIES = ("libcuda.so.1", "libnvidia-ml.so.1")


def install(host: TestHost, count: int, memory: int) -> list[str]:
    """Make the nodes, the driver folders, and devices whose UUIDs differ between hosts; returns the UUIDs."""
    for name in ("nvidiactl", "nvidia-uvm", *(f"nvidia{number}" for number in range(count))):
        node = host.root / "dev" / name
        if not node.exists():
            os.mknod(node, stat.S_IFCHR | 0o666, NODE_NUMBER)
        node.chmod(0o666)
    for libc, target in DRIVER_FOLDERS.items():
        for name in LIBRARIES:
            host.copy_in(built(libc) / name, f"{target}/{name}")
    return devices.make_devices(host.root / DEVICE_DIRECTORY.lstrip("/"), count, memory, salt=host.name)


def programs(libc: str) -> dict[str, Path]:
    """Name -> file of the test programs for one C library."""
    folder = built(libc)
    return {path.stem: folder / path.stem for path in sorted(build.PROGRAMS.glob("*.c"))}


def built(libc: str) -> Path:
    """The folder with the libraries and programs for one C library, built now if they are not current.

    VGPU_SOFTWARE_GPU names a folder that was built elsewhere and carried here.
    """
    carried = os.environ.get("VGPU_SOFTWARE_GPU")
    folder = Path(carried) if carried else build.build()
    return folder if libc == "glibc" else folder / libc
