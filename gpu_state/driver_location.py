"""Says where libcuda.so.1 of this node lies when the dynamic loader does not know it by itself.

Reads `driver_dir` of /etc/vgpu/runtime.conf; the hook's settings reader is not imported, because neither side may depend on
the other. Used by the agent and by `vgpu doctor` to start the driver worker, and by staging_reserve.py for its own key.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path

RUNTIME_CONF = Path("/etc/vgpu/runtime.conf")
LIBRARY = "libcuda.so.1"
_USUAL = ("/usr/lib64", f"/usr/lib/{platform.machine()}-linux-gnu", "/usr/lib", "/lib64")
_UNUSUAL = (
    "/usr/local/nvidia/lib64",
    "/run/nvidia/driver/usr/lib/x86_64-linux-gnu",
    "/home/kubernetes/bin/nvidia/lib64",
    "/opt/nvidia/lib64",
)


def driver_folder(config: Path = RUNTIME_CONF) -> str | None:
    """The folder to put in front of LD_LIBRARY_PATH; None where the loader finds the driver alone."""
    named = configured("driver_dir", config)
    if named is not None:
        return named
    if any((Path(folder) / LIBRARY).exists() for folder in _USUAL):
        return None
    return next((folder for folder in _UNUSUAL if (Path(folder) / LIBRARY).exists()), None)


def worker_environment(folder: str | None) -> dict[str, str]:
    """The environment in which the driver worker finds libcuda.so.1 and NVML."""
    environment = dict(os.environ)
    # The agent itself must never be a GPU process of a container.
    environment.pop("LD_PRELOAD", None)
    if folder is not None:
        before = environment.get("LD_LIBRARY_PATH")
        environment["LD_LIBRARY_PATH"] = folder if not before else f"{folder}:{before}"
    return environment


def configured(wanted: str, config: Path = RUNTIME_CONF) -> str | None:
    """The value of one key; None where it is not set."""
    try:
        lines = config.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        key, _, value = line.partition("=")
        if key.strip() == wanted and value.strip():
            return value.strip()
    return None
