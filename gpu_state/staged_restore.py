"""Fills device memory from a checkpoint image while the low-level runtime is still restoring the CPU side.

The caller, the runtime shim, has verified signature and documents of the image; the agent reads record and index again and
holds them against the content root that the shim verified, so that a file exchanged in between is noticed. Chunks are proved
on the GPU against the signed ids (Staging.fill) before any process maps them.
Nothing of a process is touched here. A prefill that nobody fetches is let go with its connection. Called by staged_service.py.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gpu_state.deadline import Deadline
from gpu_state.preload_link import close_all
from gpu_state.preload_objects import DeviceObject, Mapping
from gpu_state.shared_objects import ImportedObject
from gpu_state.staged_lease import ParkedDescriptor, StagedPart, StagedProcess
from image_format.verifying import read_claims
from vgpu_errors import Cancelled, ContentMismatch, RestoreFailed, VgpuError

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Mapping as Map

    from gpu_state.inventory import FoundProcess
    from gpu_state.phases import Phases
    from gpu_state.staging_seam import Staging
    from image_format.gpu_objects import DescriptorEntry, ImportEntry, ObjectEntry
    from image_format.record import Record

# The worker hears that nobody waits within a slice, or is killed (worker_client.py).
GIVE_UP_S = 5.0
_SLICE_S = 0.05
log = logging.getLogger("vgpu-agent")


@dataclass(frozen=True, slots=True)
class WantedProcess:
    """One staged process of the record."""

    ns_pid: int
    comm: str
    objects: tuple[DeviceObject, ...]
    imports: tuple[ImportedObject, ...] = ()
    descriptors: tuple[ParkedDescriptor, ...] = ()


class Prefill:
    """One store being brought onto the GPUs."""

    def __init__(
        self,
        wanted: tuple[WantedProcess, ...],
        open_store: Callable[[], Staging],
        put_away: Callable[[Staging], None] | None = None,
        *,
        store: str,
        device_map: Map[str, str],
    ) -> None:
        self.handle = secrets.token_hex(16)
        self.seconds: float | None = None
        self._open_store = open_store
        self._put_away = put_away or (lambda staging: staging.close(keeps_store=True))
        self._wanted = wanted
        self._store = store
        self._device_map = device_map
        self._fds: dict[str, int] = {}
        self._problem: BaseException | None = None
        self._is_done = threading.Event()
        self._is_given_up = threading.Event()
        self._progress = (0, self.bytes)
        self._staging: Staging | None = None

    @property
    def count(self) -> int:
        """Objects to fill."""
        return sum(len(process.objects) for process in self._wanted)

    @property
    def bytes(self) -> int:
        """Bytes to fill."""
        return sum(held.size for process in self._wanted for held in process.objects)

    def start(self, deadline: Deadline) -> None:
        """Begin; the filling goes on by itself. Lasts as long as the restore may, whoever asks meanwhile."""
        if not self.count:
            self._is_done.set()
            return
        within = Deadline(deadline.remaining(), why_cancelled=self._why_cancelled)
        self._staging = self._open_store()
        threading.Thread(target=self._fill, args=(self._staging, within), daemon=True, name="prefill").start()

    def descriptors(self, deadline: Deadline, phases: Phases) -> dict[str, int]:
        """Wait until everything is filled and proved; the caller owns what it gets."""
        while not self._is_done.wait(_SLICE_S):
            deadline.check("filling GPU memory")
            phases.bytes("fill", *self._progress)
        if self._problem is not None:
            raise self._problem
        fds, self._fds = self._fds, {}
        return fds

    def part_for(self, found: list[FoundProcess]) -> StagedPart:
        """The restored processes by what the record calls them: the pid in their own namespace."""
        by_ns_pid = {process.shown.ns_pid: process for process in found}
        processes = []
        for wanted in self._wanted:
            process = by_ns_pid.get(wanted.ns_pid)
            if process is None:
                raise RestoreFailed(what=f"process {wanted.ns_pid} ({wanted.comm}) of the checkpoint has not come back")
            found_as = process.identity, wanted.comm, wanted.ns_pid
            processes.append(StagedProcess(*found_as, wanted.objects, wanted.imports, wanted.descriptors))
        return StagedPart(tuple(processes), self._store, is_complete=True)

    def close(self) -> None:
        """Let everything go that was not fetched; stops filling."""
        self._is_given_up.set()
        if self._staging is not None:
            self._is_done.wait(GIVE_UP_S)
            self._put_away(self._staging)
        close_all(self._fds)
        self._fds = {}

    def _fill(self, staging: Staging, deadline: Deadline) -> None:
        objects = {f"{process.ns_pid}/{held.id}": held for process in self._wanted for held in process.objects}
        began = time.monotonic()
        try:
            fds = staging.fill(moved(objects, self._device_map), deadline, self._tell)
            if self._is_given_up.is_set():
                close_all(fds)
            else:
                self._fds = fds
            self.seconds = time.monotonic() - began
        except VgpuError as problem:
            log.warning("prefill: %s", problem)
            self._problem = problem
        except Exception as problem:
            log.exception("prefill failed in a way that nobody foresaw")
            self._problem = VgpuError(what=f"prefill: {type(problem).__name__}: {problem}")
        finally:
            self._is_done.set()

    def _tell(self, _phase: str, done: int, total: int) -> None:
        if self._is_given_up.is_set():
            raise Cancelled(phase="filling GPU memory", what="nobody waits for it any more")
        self._progress = (done, total)

    def _why_cancelled(self) -> str | None:
        return "nobody waits for it any more" if self._is_given_up.is_set() else None


def checked_record(image_path: str, content_root: str) -> Record:
    """The image's record, where it and the index are the ones that were verified."""
    record, index = read_claims(Path(image_path))
    root = index.compute_content_root().hex()
    if content_root not in (record.content_root, root) or record.content_root != root:
        raise ContentMismatch(where=image_path, what=f"its content root is {root}, the verified one {content_root}")
    return record


def wanted_processes(record: Record) -> tuple[WantedProcess, ...]:
    """The record's staged processes."""
    return tuple(
        WantedProcess(
            process.ns_pid,
            process.comm,
            tuple(map(_object, process.objects)),
            tuple(map(_import, process.imports)),
            tuple(map(_parked, process.descriptors)),
        )
        for process in record.processes
        if process.mode == "staged"
    )


def moved(objects: Map[str, DeviceObject], device_map: Map[str, str]) -> dict[str, DeviceObject]:
    """The same objects on the devices that take the place of the old ones."""
    return {name: replace(held, uuid=device_map.get(held.uuid, held.uuid)) for name, held in objects.items()}


def _object(entry: ObjectEntry) -> DeviceObject:
    mappings = _mappings(entry)
    return DeviceObject(entry.id, entry.size, entry.device, entry.uuid, entry.kind, entry.requested, mappings)


def _import(entry: ImportEntry) -> ImportedObject:
    told = entry.id, entry.of, entry.kind, entry.size, entry.requested, entry.device, entry.uuid
    return ImportedObject(*told, _mappings(entry))


def _parked(entry: DescriptorEntry) -> ParkedDescriptor:
    return ParkedDescriptor(entry.number, entry.of, entry.closes_on_exec, entry.token)


def _mappings(entry: ObjectEntry | ImportEntry) -> tuple[Mapping, ...]:
    return tuple(
        Mapping(place.va, place.size, place.offset, tuple((pair[0], pair[1]) for pair in place.access))
        for place in entry.mappings
    )
