"""Finds the NVIDIA device nodes and driver libraries of this node, for the CDI spec.

Only looks at names and links; loads no library and opens no device.
Takes the first folder that has a library: the configured driver folder, the loader's cache, then the usual folders.
Called by `vgpu setup`.
"""

from __future__ import annotations

import platform
import re
import subprocess
from pathlib import Path

from containerd_integration.cdi import DriverFiles, Mount

# What libcuda.so.1 itself loads, and what programs load beside it; a node has those that its driver brings.
LIBRARIES = (
    "libcuda.so.1",
    "libnvidia-ml.so.1",
    "libnvidia-ptxjitcompiler.so.1",
    "libnvidia-nvvm.so.4",
    "libnvidia-nvvm70.so.4",
    "libnvidia-gpucomp.so",
    "libcudadebugger.so.1",
)
CONTROL_NODES = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset")
PROGRAMS = ("nvidia-smi",)
PROGRAM_FOLDERS = ("/usr/bin", "/usr/local/nvidia/bin")
MULTIARCH = {"x86_64": "x86_64-linux-gnu", "aarch64": "aarch64-linux-gnu"}
LOADER_CACHE_DEADLINE_S = 15


def find_driver_files(*, root: Path = Path("/"), driver_dir: str | None = None) -> DriverFiles:
    """Everything that the CDI spec of this node names; `root` is another tree to look at instead."""
    dev = root / "dev"
    cached = loader_cache() if root == Path("/") else {}
    return DriverFiles(
        gpu_nodes=gpu_nodes(dev),
        control_nodes=tuple(f"/dev/{name}" for name in CONTROL_NODES if (dev / name).exists()),
        mounts=(*library_mounts(root, library_folders(driver_dir), cached), *program_mounts(root)),
    )


def gpu_nodes(dev: Path) -> tuple[tuple[str, str], ...]:
    """Name and node of each GPU, by the number of its node."""
    numbers = sorted(
        int(match[1]) for path in dev.glob("nvidia*") if (match := re.fullmatch(r"nvidia(\d+)", path.name))
    )
    return tuple((str(number), f"/dev/nvidia{number}") for number in numbers)


def library_folders(driver_dir: str | None) -> list[str]:
    """Where to look, first match wins; the configured folder comes before anything found by itself."""
    named = [driver_dir] if driver_dir else []
    return [*named, "/usr/local/nvidia/lib64", f"/usr/lib/{_multiarch()}", "/usr/lib64", "/usr/lib"]


def library_mounts(root: Path, folders: list[str], cached: dict[str, str]) -> list[Mount]:
    """Each library found, mounted under its own name in both library layouts."""
    mounts = []
    for name in LIBRARIES:
        file = find_library(name, root, folders, cached)
        if file is not None:
            # By release alone (libnvidia-gpucomp.so.580.159.04): programs open it under its full name.
            opened_as = file.rsplit("/", 1)[-1] if name.endswith(".so") else name
            mounts += [Mount(file, f"{folder}/{opened_as}") for folder in (f"/usr/lib/{_multiarch()}", "/usr/lib64")]
    return mounts


def find_library(name: str, root: Path, folders: list[str], cached: dict[str, str]) -> str | None:
    """The file behind a library name, as seen from `root`, or None.

    The loader's cache is asked after the first folder, so that a configured driver folder always wins over it.
    """
    if name.endswith(".so"):
        inside = [path for folder in folders for path in sorted(_below(root, folder).glob(f"{name}.[0-9]*"))]
    else:
        inside = [_below(root, folder) / name for folder in folders]
        inside[1:1] = [Path(cached[name])] if name in cached else []
    file = next((path for path in inside if path.is_file()), None)
    return _seen_from(root, file) if file is not None else None


def program_mounts(root: Path) -> list[Mount]:
    """The driver's own programs; mounted where PATH finds them."""
    found = []
    for name in PROGRAMS:
        file = next((path for folder in PROGRAM_FOLDERS if (path := _below(root, folder) / name).is_file()), None)
        if file is not None:
            found.append(Mount(_seen_from(root, file), f"/usr/bin/{name}"))
    return found


def loader_cache() -> dict[str, str]:
    """Library name to path as `ldconfig -p` lists them for this machine's own word size; empty without ldconfig."""
    try:
        answer = subprocess.run(
            ["/sbin/ldconfig", "-p"], capture_output=True, text=True, timeout=LOADER_CACHE_DEADLINE_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    return parse_loader_cache(answer.stdout)


def parse_loader_cache(text: str) -> dict[str, str]:
    """Lines such as 'libcuda.so.1 (libc6,x86-64) => /usr/lib/x86_64-linux-gnu/libcuda.so.1', first one wins."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        entry = re.fullmatch(r"(\S+) \(([^)]*)\) => (\S+)", line.strip())
        if entry and ("x86-64" in entry[2] or "AArch64" in entry[2]):
            found.setdefault(entry[1], entry[3])
    return found


def _below(root: Path, absolute: str) -> Path:
    return root / absolute.lstrip("/")


def _seen_from(root: Path, file: Path) -> str:
    """The real file's path inside the tree; the name itself where a link leads out of it."""
    real, top = file.resolve(), root.resolve()
    inside = real.relative_to(top) if real.is_relative_to(top) else file.relative_to(root)
    return f"/{inside}"


def _multiarch() -> str:
    machine = platform.machine()
    return MULTIARCH.get(machine, f"{machine}-linux-gnu")
