"""Remembers which processes map device memory that the agent handed to them, across agents and freezes.

Such memory is imported, and the driver's own checkpoint of a process with imports succeeds and loses the process (measured on an H200): a
marked process may be frozen in staged mode only. One file per container in /run/vgpu/staged; touches no process.
Used by staged_freeze.py and staged_thaw.py.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from gpu_state.processes import ProcessIdentity

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


class ImportMarks:
    """The folder of marks."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def add(self, container: str, processes: Iterable[ProcessIdentity]) -> None:
        """Mark processes, before they are handed anything; those that have ended are dropped."""
        marked = {process for process in self.of(container) | set(processes) if process.is_alive()}
        partial = self._folder / f".{container}.partial"
        partial.touch(0o600)
        partial.write_text(json.dumps([[process.pid, process.start_time] for process in sorted(marked, key=_by_pid)]))
        partial.replace(self._path(container))

    def of(self, container: str) -> set[ProcessIdentity]:
        """The marked processes of a container."""
        try:
            return {ProcessIdentity(pid, start) for pid, start in json.loads(self._path(container).read_text())}
        except (OSError, ValueError, TypeError, RecursionError):
            return set()

    def sweep(self) -> None:
        """Forget containers of which no marked process lives."""
        for path in self._folder.glob("*.json"):
            if not any(process.is_alive() for process in self.of(path.stem)):
                path.unlink(missing_ok=True)

    def _path(self, container: str) -> Path:
        return self._folder / f"{container}.json"


def _by_pid(process: ProcessIdentity) -> int:
    return process.pid
