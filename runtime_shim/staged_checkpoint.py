"""What a checkpoint does more for a container in staged mode: where its GPU memory goes, and how the record tells of it.

For a container in driver mode every part of it is empty, and the agent is asked exactly what it is asked without.
The agent writes the packs into the image path; they are worth nothing before the seal. Called by checkpoint.py, in this order:
freeze_args, note_freeze, (dump), collect, with_objects, (seal).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from image_format.fields import Fields
from image_format.gpu_objects import DescriptorEntry, ImportEntry, ObjectEntry
from oci_hook.control_directory import MODE_NAME, control_path
from runtime_shim import debug_log

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gpu_state.client import AgentClient
    from gpu_state.processes import GpuProcess
    from image_format.record import ProcessEntry, Record
    from oci_hook.settings import Settings
    from runtime_shim.parent_side import ParentCheckpoint
    from runtime_shim.phase_log import PhaseLog
    from runtime_shim.progress import Progress
    from runtime_shim.target import Target

ANSWER_S = 30.0


class StagedSide:
    """The staged side of one checkpoint."""

    def __init__(self, target: Target, settings: Settings, image_path: Path, *, leaves_running: bool) -> None:
        self._target = target
        self._settings = settings
        self._image_path = image_path
        self._leaves_running = leaves_running
        self.is_wanted = mode_in(settings.run_dir, target.id) == "staged"
        self._has_staged = False
        self._objects: Mapping[str, Any] = {}
        self._imports: Mapping[str, Any] = {}
        self._descriptors: Mapping[str, Any] = {}
        # What the processes told of their communication libraries: lists `communicators` and `nvshmem`, as in the record.
        self.groups: Mapping[str, Any] = {}
        self._reasons: dict[int, str] = {}

    @property
    def copy_s(self) -> float:
        """What copying beside the running application may take, before anything stops."""
        return self._settings.deadline_checkpoint_s if self.is_wanted else 0.0

    def freeze_args(self, parent: ParentCheckpoint | None) -> dict[str, Any]:
        """More arguments of `freeze`."""
        if not self.is_wanted:
            return {}
        parents = {"parents": [str(parent.directory)]} if parent is not None else {}
        return parents | {
            "image_path": str(self._image_path),
            "leave_running": self._leaves_running,
            "copy_deadline_s": self.copy_s,
        }

    def note_freeze(self, result: Mapping[str, Any], progress: Progress) -> None:
        """Remember what was staged, and say why a process was not."""
        self._has_staged = result.get("staged") is not None
        self._reasons = {int(pid): str(reason) for pid, reason in (result.get("driver_reasons") or {}).items()}
        if not self.is_wanted:
            return
        for pid, reason in self._reasons.items():
            debug_log.write(self._settings, f"checkpoint {self._target.id}: process {pid} in driver mode, {reason}")
            progress.note(f"process {pid} goes the driver's way, which is slower: {reason}")

    def collect(self, agent: AgentClient, progress: Progress, clock: PhaseLog) -> Path | None:
        """Wait until all GPU memory is in the image path; where each chunk lies."""
        if not self._has_staged:
            return None
        deadline_s = self._settings.deadline_checkpoint_s
        args = {"container": self._target.id, "deadline_s": deadline_s}
        with clock("drain"):
            done = agent.request("drain", args, deadline_s=deadline_s + ANSWER_S, on_event=progress.event)
        self._objects = done["staged"]["objects"]
        self._imports = done["staged"].get("imports") or {}
        self._descriptors = done["staged"].get("descriptors") or {}
        self.groups = done["staged"].get("groups") or {}
        return Path(done["fragment"]) if done["fragment"] else None

    def with_objects(self, record: Record, processes: Sequence[GpuProcess]) -> Record:
        """The record with the objects of each staged process, and the reason where one is not staged."""
        if not self.is_wanted:
            return record
        by_ns_pid = {process.ns_pid: process.pid for process in processes}
        entries = tuple(self._entry(entry, by_ns_pid.get(entry.ns_pid)) for entry in record.processes)
        return replace(record, processes=entries, mode="staged" if self._has_staged else record.mode)

    def _entry(self, entry: ProcessEntry, pid: int | None) -> ProcessEntry:
        if entry.mode != "staged":
            reason = self._reasons.get(pid or 0)
            return replace(entry, unknown=entry.unknown | {"modeReason": reason}) if reason else entry
        where, key = f"process {entry.ns_pid}", str(entry.ns_pid)
        objects = (ObjectEntry.from_json(Fields(doc, f"objects of {where}")) for doc in self._objects.get(key, []))
        imports = (ImportEntry.from_json(Fields(doc, f"imports of {where}")) for doc in self._imports.get(key, []))
        parked = (
            DescriptorEntry.from_json(Fields(doc, f"descriptors of {where}")) for doc in self._descriptors.get(key, [])
        )
        return replace(entry, objects=tuple(objects), imports=tuple(imports), descriptors=tuple(parked))


def mode_in(run_dir: str, container_id: str) -> str:
    """The mode that the container was created with."""
    try:
        return Path(control_path(run_dir, container_id), MODE_NAME).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return "driver"
