"""Which GPUs the test hosts get: the machine's own where it has NVIDIA ones, else software GPUs.

Answers for the demo and the real-GPU tests; the engine tests always take software GPUs, so that they say the same
everywhere. Never hides which it was: `describe` goes into every output.
"""

from __future__ import annotations

import glob
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.hosts.host import TestHost

DRIVER_FOLDERS = ("/usr/local/nvidia", "/usr/lib/x86_64-linux-gnu/nvidia/current", "/usr/lib64/nvidia")
SOFTWARE_DRIVER = "/usr/lib/software-gpu"
SOFTWARE_STATE = "/run/software-gpu"


def is_real() -> bool:
    """Whether this machine has an NVIDIA GPU with its driver."""
    return Path("/dev/nvidiactl").exists() and driver_folder() is not None


def driver_folder() -> str | None:
    """The folder with libcuda.so.1 below it, to be bound into hosts at the same place."""
    for folder in DRIVER_FOLDERS:
        if glob.glob(f"{folder}/**/libcuda.so.1", recursive=True):
            return folder
    return None


def describe() -> str:
    """What the output has to say about the GPUs."""
    if is_real():
        return "the GPUs are this machine's own"
    return "this machine has no NVIDIA GPU, so a software driver stands in (a test double, no GPU result)"


def binds() -> tuple[tuple[str, str], ...]:
    """What a host needs of the machine it runs on."""
    if not is_real():
        return ()
    nodes = sorted(path for path in glob.glob("/dev/nvidia*") if Path(path).is_char_device())
    return tuple((path, path) for path in [*nodes, driver_folder() or ""])


def install(host: TestHost, *, count: int = 2) -> None:
    """Software GPUs where there are no real ones."""
    if not is_real():
        host.install_software_gpu(count=count)


def setup_options() -> tuple[str, ...]:
    """What `vgpu setup podman` has to be told about them."""
    if is_real():
        library = next(iter(glob.glob(f"{driver_folder()}/**/libcuda.so.1", recursive=True)))
        return ("--driver-dir", str(Path(library).parent))
    return ("--driver-dir", SOFTWARE_DRIVER, "--cdi-mount", f"{SOFTWARE_STATE}:{SOFTWARE_STATE}:rw")
