"""The programs that group_run.py takes through its steps, by part, and how each of them is started.

A program on the software driver is itself where it only needs the driver, else vmm_share.py stands in for it. Decides nothing
of what is done to a program.
"""

from __future__ import annotations

import pathlib
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

from tests.hosts import gpus

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / "tests" / "gpu" / "programs"
RING = ROOT / "tests" / "software_gpu" / "programs" / "ring.c"
DRIVER_HEADERS = ROOT / "tests" / "software_gpu" / "driver"
# Host memory that NCCL makes by cuMemCreate cannot be given back by the driver; without it NCCL takes shared memory.
NCCL = ("env", "NCCL_CUMEM_HOST_ENABLE=0")
# Modes of ring.c: mode, how memory is shared, ranks, ranks that come and go.
RINGS: tuple[tuple[str, str, int, tuple[int, ...]], ...] = (
    ("ring", "fd", 2, ()),
    ("ring", "fd held", 2, ()),
    ("ring", "handle", 2, ()),
    ("graph", "fd", 2, ()),
    ("pipeline", "fd", 2, ()),
    ("ring", "mixed", 4, ()),
    ("server", "mixed", 4, ()),
    ("guests", "fd", 4, (3,)),
    ("outlive", "fd", 4, (0,)),
    ("ring", "fd", 8, ()),
)
QUIET_MODES = ("outlive",)  # in all others the ranks wait for each other in kernels


@dataclass(frozen=True)
class Subject:
    """One program: `@OUT@`, `@GATE@`, `@RING@` and `@GPUS@` in its command are filled in where it is started."""

    name: str
    command: tuple[str, ...]
    ranks: int
    gpus: int = 1
    more: int = 4  # steps of each rank that show that it goes on
    is_text: bool = False  # the lines of ring.c
    guests: tuple[int, ...] = ()  # ranks that may be absent
    exporter_leaves: bool = False
    swaps: bool = False
    spins: bool = False  # ranks wait for each other in kernels (docs/multi-gpu.md): each needs a GPU
    is_stand_in: bool = False


def python(name: str, *options: str) -> tuple[str, ...]:
    return sys.executable, str(PROGRAMS / name), "--out", "@OUT@", "--gate", "@GATE@", *options


def real_or_stand_in(subject: Subject, *, is_real: bool) -> list[Subject]:
    if is_real:
        return [subject]
    command = python("vmm_share.py", "--ranks", str(subject.ranks), "--mib", "8", "--devices", str(subject.gpus))
    return [replace(subject, command=command, is_stand_in=True)]


def rings(*, is_real: bool) -> list[Subject]:
    """ring.c in its modes, built against the driver at hand; the smallest groups first."""
    # The program opens libcuda.so.1 by name, and the machine's loader may not know its folder.
    library = ("env", f"LD_LIBRARY_PATH={driver_library()}") if is_real else ()
    sizes = ("--mib", "8" if is_real else "1", "--interval", "20", "--epoch", "100", "--devices", "@GPUS@")
    return [
        Subject(
            f"{mode} {share} {ranks}",
            (*library, "@RING@", "--out", "@OUT@", "--mode", mode, *ways(share), "--ranks", str(ranks), *sizes),
            ranks,
            is_text=True,
            guests=guests,
            spins=is_real and mode not in QUIET_MODES,
        )
        for mode, share, ranks, guests in RINGS
    ]


def ways(share: str) -> tuple[str, ...]:
    """How memory is given to others, and whether its descriptors are kept."""
    way, _, held = share.partition(" ")
    return "--share", way, "--hold", str(int(bool(held)))


def vmm(*, is_real: bool) -> list[Subject]:
    size = "64" if is_real else "8"
    one = Subject("vmm", python("vmm_share.py", "--mib", size), 3, exporter_leaves=True, swaps=True)
    peers = Subject(
        "vmm-peers", python("vmm_share.py", "--mib", size, "--devices", "2"), 3, gpus=2, exporter_leaves=True
    )
    kept = Subject("vmm-kept", python("vmm_share.py", "--mib", size, "--keep"), 3, exporter_leaves=True, swaps=True)
    return [one, kept, peers]


def cupy(*, is_real: bool) -> list[Subject]:
    return real_or_stand_in(Subject("cupy", python("cupy_share.py"), 3, swaps=True), is_real=is_real)


def torch_ipc(*, is_real: bool) -> list[Subject]:
    return real_or_stand_in(Subject("torch-ipc", python("torch_ipc_counter.py"), 2, swaps=True), is_real=is_real)


def ddp(*, is_real: bool) -> list[Subject]:
    options = ("--gib", "2", "--steps", "30")
    by_file = Subject("ddp", NCCL + python("torch_ddp.py", *options), 2, gpus=2)
    by_tcp = Subject("ddp-tcp", NCCL + python("torch_ddp.py", *options, "--store", "tcp"), 2, gpus=2)
    return [one for subject in (by_file, by_tcp) for one in real_or_stand_in(subject, is_real=is_real)]


def tensor_parallel(*, is_real: bool) -> list[Subject]:
    options = ("--gib", "4", "--tokens", "600", "--layers", "8")
    subject = Subject("tensor-parallel", NCCL + python("torch_tensor_parallel.py", *options), 2, gpus=2, more=20)
    return real_or_stand_in(subject, is_real=is_real)


def nvshmem(*, is_real: bool) -> list[Subject]:
    return real_or_stand_in(Subject("nvshmem", NCCL + python("torch_nvshmem.py"), 2, gpus=2), is_real=is_real)


PARTS: dict[str, Callable[..., list[Subject]]] = {
    "ring": rings,
    "vmm": vmm,
    "torch-ipc": torch_ipc,
    "cupy": cupy,
    "ddp": ddp,
    "tensor-parallel": tensor_parallel,
    "nvshmem": nvshmem,
}


def ring_program(folder: pathlib.Path) -> pathlib.Path:
    """ring.c, built now; it opens the driver by name when it starts."""
    built = folder / "ring"
    command = ["gcc", "-O2", "-pthread", f"-I{DRIVER_HEADERS}", str(RING), "-ldl", "-o", str(built)]
    subprocess.run(command, check=True, timeout=60)
    return built


def driver_library() -> str:
    """The folder of libcuda.so.1."""
    return gpus.setup_options()[1]
