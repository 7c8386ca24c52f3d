"""The driver calls as the agent sees them: typed, each with a deadline, run in the driver worker.

Adds no retry and no order of steps. `CheckpointDriver` is the seam that freeze.py and thaw.py are written against; the tests
have a simulator of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from gpu_state.driver import NOT_READY, Device, ProcessState, version_string
from gpu_state.nvml_links import Link
from vgpu_errors import DriverCallFailed, DriverWorkerLost

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpu_state.deadline import Deadline
    from gpu_state.worker_pool import WorkerPool

_LOCK_MARGIN_S = 0.5


@dataclass(frozen=True, slots=True)
class DriverNode:
    """What driver and NVML say about this node at one moment."""

    version: int
    release: str | None
    devices: tuple[Device, ...]
    minors: Mapping[int, str]
    process_bytes: Mapping[int, int]
    # Device uuid -> host pid -> bytes: the same figures, each device by itself.
    device_bytes: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    links: tuple[Link, ...] = ()

    @property
    def cuda_version(self) -> str:
        """The CUDA version that the driver supports, "13.0"."""
        return version_string(self.version)


class CheckpointDriver(Protocol):
    """The calls of one driver, in the words of its documentation."""

    def node(self, deadline: Deadline) -> DriverNode:
        """Versions and GPUs."""
        ...

    def get_state(self, pid: int, deadline: Deadline) -> ProcessState:
        """The checkpoint state of a process."""
        ...

    def lock(self, pid: int, deadline: Deadline) -> None:
        """Block the process's CUDA calls."""
        ...

    def checkpoint(self, pid: int, deadline: Deadline) -> None:
        """Move its device memory into its host memory."""
        ...

    def restore(self, pid: int, device_map: Mapping[str, str], deadline: Deadline) -> None:
        """Bring its device memory back."""
        ...

    def unlock(self, pid: int, deadline: Deadline) -> None:
        """Let it make CUDA calls again."""
        ...


class RemoteDriver:
    """CheckpointDriver over the worker pool."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool

    def node(self, deadline: Deadline) -> DriverNode:
        """Versions, GPUs and memory use, as of now."""
        doc = self._query("node", {}, deadline, "asking the driver about the node")
        return DriverNode(
            version=doc["version"],
            release=doc["release"],
            devices=tuple(Device.from_json(entry) for entry in doc["devices"]),
            minors={int(minor): name for minor, name in doc["minors"].items()},
            process_bytes={int(pid): size_bytes for pid, size_bytes in doc["process_bytes"].items()},
            device_bytes={
                uuid: {int(pid): size_bytes for pid, size_bytes in used.items()}
                for uuid, used in doc["device_bytes"].items()
            },
            links=tuple(Link(**entry) for entry in doc["links"]),
        )

    def get_state(self, pid: int, deadline: Deadline) -> ProcessState:
        """The checkpoint state of a process."""
        return ProcessState(self._query("get_state", {"pid": pid}, deadline, f"reading the state of process {pid}"))

    def lock(self, pid: int, deadline: Deadline) -> None:
        """Lock a process; the driver's own time-out comes before ours, so that it leaves the process running."""
        phase = f"lock of process {pid}"
        left = deadline.remaining()
        timeout_ms = int(max(left - _LOCK_MARGIN_S, left * 0.8) * 1000)
        try:
            self._pool.call("lock", {"pid": pid, "timeout_ms": timeout_ms}, deadline, phase)
        except DriverCallFailed as problem:
            if problem.fields["code"] == NOT_READY:
                raise deadline.exceeded(phase) from problem
            raise

    def checkpoint(self, pid: int, deadline: Deadline) -> None:
        """Checkpoint a locked process."""
        self._pool.call("checkpoint", {"pid": pid}, deadline, f"checkpoint of process {pid}")

    def restore(self, pid: int, device_map: Mapping[str, str], deadline: Deadline) -> None:
        """Restore a checkpointed process."""
        args = {"pid": pid, "device_map": dict(device_map)}
        self._pool.call("restore", args, deadline, f"restore of process {pid}")

    def unlock(self, pid: int, deadline: Deadline) -> None:
        """Unlock a locked process."""
        self._pool.call("unlock", {"pid": pid}, deadline, f"unlock of process {pid}")

    def _query(self, call: str, args: dict[str, int], deadline: Deadline, phase: str) -> Any:
        """A call that changes nothing is asked again when its worker was lost, perhaps for another call's sake."""
        try:
            return self._pool.call(call, args, deadline, phase)
        except DriverWorkerLost:
            return self._pool.call(call, args, deadline, phase)
