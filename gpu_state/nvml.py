"""Reads from NVML what the driver API does not tell without a context: driver release, free memory, memory per process.

An absent library or call means None, never an error: NVML is an extra witness, no step depends on it.
Through ctypes, because cuda.bindings.nvml imports numpy, which is three times the size of everything else installed here.
Used by the driver worker alone.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

_LIBRARY = "libnvidia-ml.so.1"
_INSUFFICIENT_SIZE = 7
_NOT_AVAILABLE = (1 << 64) - 1
_MAX_PROCESSES = 4096


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Process(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used_bytes", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


@dataclass(frozen=True, slots=True)
class NvmlDevice:
    """One GPU as NVML sees it; `process_bytes` is keyed by host pid."""

    uuid: str
    minor: int | None
    free_bytes: int | None
    process_bytes: dict[int, int]


class Nvml:
    """An initialised NVML."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    @classmethod
    def load(cls) -> Nvml | None:
        """Load and initialise NVML; None where it is absent or refuses."""
        try:
            library = ctypes.CDLL(_LIBRARY)
        except OSError:
            return None
        nvml = cls(library)
        return nvml if nvml.ok("nvmlInit_v2") else None

    def driver_release(self) -> str | None:
        """The release of the loaded driver, as "580.159.04"."""
        text = ctypes.create_string_buffer(96)
        return text.value.decode() if self.ok("nvmlSystemGetDriverVersion", text, len(text)) else None

    def devices(self) -> list[NvmlDevice]:
        """Every GPU that NVML lists."""
        return [self._device(uuid, handle) for uuid, handle in self.handles().items()]

    def handles(self) -> dict[str, ctypes.c_void_p]:
        """Uuid -> handle of every GPU, in NVML's order."""
        count = ctypes.c_uint()
        if not self.ok("nvmlDeviceGetCount_v2", ctypes.byref(count)):
            return {}
        found: dict[str, ctypes.c_void_p] = {}
        for index in range(count.value):
            handle, text = ctypes.c_void_p(), ctypes.create_string_buffer(96)
            if self.ok("nvmlDeviceGetHandleByIndex_v2", index, ctypes.byref(handle)) and self.ok(
                "nvmlDeviceGetUUID", handle, text, len(text)
            ):
                found[text.value.decode()] = handle
        return found

    def has(self, name: str) -> bool:
        """Whether this NVML knows a call."""
        return hasattr(self._library, name)

    def _device(self, uuid: str, handle: ctypes.c_void_p) -> NvmlDevice:
        minor, memory = ctypes.c_uint(), _Memory()
        has_minor = self.ok("nvmlDeviceGetMinorNumber", handle, ctypes.byref(minor))
        has_memory = self.ok("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
        return NvmlDevice(
            uuid=uuid,
            minor=minor.value if has_minor else None,
            free_bytes=memory.free if has_memory else None,
            process_bytes=self._processes(handle),
        )

    def _processes(self, handle: ctypes.c_void_p) -> dict[int, int]:
        count = ctypes.c_uint(64)
        while count.value <= _MAX_PROCESSES:
            table = (_Process * count.value)()
            code = self._code("nvmlDeviceGetComputeRunningProcesses_v3", handle, ctypes.byref(count), table)
            if code == _INSUFFICIENT_SIZE:
                count = ctypes.c_uint(max(count.value, len(table)) * 2)
                continue
            rows = table[: count.value] if code == 0 else []
            return {row.pid: row.used_bytes for row in rows if row.used_bytes != _NOT_AVAILABLE}
        return {}

    def ok(self, name: str, *args: object) -> bool:
        """Whether a call is there and succeeds."""
        return self._code(name, *args) == 0

    def _code(self, name: str, *args: object) -> int | None:
        try:
            return int(getattr(self._library, name)(*args))
        except AttributeError:  # an NVML of another age
            return None


def driver_release_from_proc() -> str | None:
    """The loaded kernel driver's release, as /proc tells it without any library."""
    try:
        words = Path("/proc/driver/nvidia/version").read_text().split()
    except OSError:
        return None
    return next((word for word in words if word.count(".") >= 1 and word.replace(".", "").isdigit()), None)


def minors_from_proc(root: Path = Path("/proc/driver/nvidia/gpus")) -> dict[int, str]:
    """Device file number -> GPU uuid, from the kernel driver."""
    found: dict[int, str] = {}
    for file in root.glob("*/information"):
        try:
            lines = file.read_text().splitlines()
        except OSError:
            continue
        fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
        if fields.get("Device Minor", "").isdigit() and fields.get("GPU UUID", "").startswith("GPU-"):
            found[int(fields["Device Minor"])] = fields["GPU UUID"]
    return found
