"""A thin typed wrapper over the checkpoint calls of `cuda.bindings.driver`.

Only the driver worker (driver_worker.py) imports this, because cuInit attaches a process to every GPU for good and a
call can hang. Decides nothing, retries nothing; every failed call becomes DriverCallFailed with its numeric code.
"""

from __future__ import annotations

import ctypes
import uuid
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from vgpu_errors import DriverCallFailed, DriverMissing

OUT_OF_MEMORY = 2
INVALID_VALUE = 1
NOT_INITIALIZED = 3
ILLEGAL_STATE = 401
NOT_READY = 600
NOT_SUPPORTED = 801
FIRST_VERSION_WITH_CHECKPOINT = 12080  # CUDA 12.8, driver 570


class ProcessState(StrEnum):
    """The driver's own states, in the protocol's words."""

    RUNNING = "running"
    LOCKED = "locked"
    CHECKPOINTED = "checkpointed"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU. `free_bytes` is None where NVML is absent: asking the driver would cost a context on that GPU."""

    ordinal: int
    uuid: str
    name: str
    memory_bytes: int
    free_bytes: int | None = None

    def to_json(self) -> dict[str, Any]:
        """The entry of `devices` in `hello`."""
        return {
            "ordinal": self.ordinal,
            "uuid": self.uuid,
            "name": self.name,
            "memory_bytes": self.memory_bytes,
            "free_bytes": self.free_bytes,
        }

    @classmethod
    def from_json(cls, doc: dict[str, Any]) -> Device:
        """Read what the worker sent."""
        return cls(**{key: doc[key] for key in ("ordinal", "uuid", "name", "memory_bytes", "free_bytes")})


class Driver:
    """The driver of this node, initialised once."""

    def __init__(self) -> None:
        try:
            from cuda.bindings import driver as cuda  # noqa: PLC0415 - loads the driver's world, worker only
        except ImportError as problem:
            raise DriverMissing(what=f"the cuda-bindings package is missing ({problem})") from problem
        self._cuda = cuda
        try:
            self._call("cuInit", 0, 0)
        except DriverCallFailed as problem:
            raise DriverMissing(what=problem.message) from problem
        except Exception as problem:
            # cuda-bindings raises RuntimeError or its pathfinder's own class, by version, when libcuda.so.1 is not there.
            raise DriverMissing(what=str(problem)) from problem

    def version(self) -> int:
        """The CUDA version that the driver supports, 13000 for 13.0."""
        return int(self._call("cuDriverGetVersion", 0))

    def devices(self) -> list[Device]:
        """All GPUs in the driver's order."""
        return [self._device(ordinal) for ordinal in range(int(self._call("cuDeviceGetCount", 0)))]

    def get_state(self, pid: int) -> ProcessState:
        """The checkpoint state of a process."""
        state = self._call("cuCheckpointProcessGetState", pid, pid)
        name = str(getattr(state, "name", state)).removeprefix("CU_PROCESS_STATE_").lower()
        # CHECKPOINTING and RESTORING exist with custom storage only, which is never asked for here.
        return ProcessState(name) if name in set(ProcessState) else ProcessState.FAILED

    def lock(self, pid: int, timeout_ms: int) -> None:
        """Block the process's CUDA calls; at the time-out the driver leaves it running (NOT_READY)."""
        args = self._cuda.CUcheckpointLockArgs()
        args.timeoutMs = max(timeout_ms, 1)  # 0 would mean: wait for ever
        self._call("cuCheckpointProcessLock", pid, pid, args)

    def checkpoint(self, pid: int) -> None:
        """Move the process's device memory into its host memory and let every device go."""
        self._call("cuCheckpointProcessCheckpoint", pid, pid, self._cuda.CUcheckpointCheckpointArgs())

    def restore(self, pid: int, device_map: dict[str, str]) -> None:
        """Bring the device memory back, onto other GPUs where `device_map` (old uuid -> new uuid) says so."""
        args = self._cuda.CUcheckpointRestoreArgs()
        if device_map:
            args.gpuPairs = [self._pair(old, new) for old, new in device_map.items()]
            args.gpuPairsCount = len(device_map)  # the bindings do not set it with the list
        self._call("cuCheckpointProcessRestore", pid, pid, args)

    def unlock(self, pid: int) -> None:
        """Let the process make CUDA calls again."""
        self._call("cuCheckpointProcessUnlock", pid, pid, self._cuda.CUcheckpointUnlockArgs())

    def _device(self, ordinal: int) -> Device:
        handle = self._call("cuDeviceGet", 0, ordinal)
        name = self._call("cuDeviceGetName", 0, 256, handle)
        return Device(
            ordinal=ordinal,
            uuid=uuid_string(self._call("cuDeviceGetUuid", 0, handle).bytes),
            name=bytes(name).split(b"\0", 1)[0].decode(errors="replace"),
            memory_bytes=int(self._call("cuDeviceTotalMem", 0, handle)),
        )

    def _pair(self, old: str, new: str) -> Any:
        pair = self._cuda.CUcheckpointGpuPair()
        pair.oldUuid, pair.newUuid = self._uuid(old), self._uuid(new)
        return pair

    def _uuid(self, text: str) -> Any:
        value = self._cuda.CUuuid()
        ctypes.memmove(int(value.getPtr()), uuid_bytes(text), 16)  # .bytes is read-only in the bindings
        return value

    def _call(self, name: str, pid: int, *args: object) -> Any:
        code, *values = getattr(self._cuda, name)(*args)
        if int(code) != 0:
            raise DriverCallFailed(call=name, pid=pid, code=int(code), name=str(getattr(code, "name", code)))
        return values[0] if values else None


def uuid_string(raw: bytes) -> str:
    """The form that nvidia-smi shows: GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx."""
    return f"GPU-{uuid.UUID(bytes=raw)}"


def uuid_bytes(text: str) -> bytes:
    """The sixteen bytes of a device uuid string."""
    return uuid.UUID(text.removeprefix("GPU-")).bytes


def version_string(version: int) -> str:
    """13000 -> "13.0"."""
    return f"{version // 1000}.{version % 1000 // 10}"
