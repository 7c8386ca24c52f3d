"""Which processes of a container are staged, which are left to the driver and why, and which nobody can take.

A process is staged if its preload library answers in protocol 2 and holds nothing that only the driver can take along. One
that neither can take, or that maps memory of the agent's and cannot be staged, ends the freeze before anything is stopped.
Asks and decides only; called by staged_freeze.py.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING

from gpu_state import blockers
from vgpu_errors import GpuObjectBlocks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gpu_state.deadline import Deadline
    from gpu_state.import_marks import ImportMarks
    from gpu_state.inventory import FoundProcess
    from gpu_state.preload_link import PreloadLink
    from gpu_state.preload_objects import Blocker, Holdings
    from gpu_state.staging_seam import Preloads

CONNECT_S = 5.0
_LOOK_S = 0.02
log = logging.getLogger("vgpu-agent")


class StagedChoice:
    """The choice for one freeze; `reasons` says why a process is left to the driver, by host pid."""

    def __init__(
        self,
        container: str,
        preloads: Preloads,
        marks: ImportMarks,
        wants_preload: Callable[[int], bool],
        *,
        has_store: bool,
    ) -> None:
        self._container = container
        self._preloads = preloads
        self._marks = marks
        self._wants_preload = wants_preload
        self._has_store = has_store
        self.reasons: dict[int, str] = {}

    def may_be_staged(self, found: Sequence[FoundProcess]) -> bool:
        """Some process is in staged mode, or should be."""
        links = self._preloads.links(self._container)
        return self._has_store and any(process.pid in links or self._wants_preload(process.pid) for process in found)

    def await_preloads(self, found: Sequence[FoundProcess], deadline: Deadline) -> None:
        """An agent that was just started is found by the helper threads within two seconds."""
        soon = deadline.within(CONNECT_S)
        while soon.remaining() > 0:
            links = self._preloads.links(self._container)
            if all(process.pid in links or not self._wants_preload(process.pid) for process in found):
                return
            deadline.check("waiting for the preload library to connect")
            time.sleep(_LOOK_S)

    def choose(self, found: Sequence[FoundProcess], deadline: Deadline) -> list[tuple[FoundProcess, Holdings]]:
        """The processes to stage, with what they hold; GpuObjectBlocks for one that cannot be taken at all."""
        links = self._preloads.links(self._container)
        marked = self._marks.of(self._container)
        chosen, seen = [], set()
        for process in found:
            link = links.get(process.pid)
            reason, holdings = self._why_not(process, link, deadline)
            if reason is None and link is not None and link.ns_pid in seen:
                reason = f"another process has the same pid {link.ns_pid} in a namespace of its own"
            if reason is None and link is not None and holdings is not None:
                seen.add(link.ns_pid)
                chosen.append((process, holdings))
                continue
            if process.identity in marked:
                raise self._blocks(process, f"it maps memory that the agent gave it, and {reason}")
            self.reasons[process.pid] = reason or ""
            log.info("process %s of %s is left to the driver: %s", process.pid, self._container, reason)
        return chosen

    def refuse_grave(self, process: FoundProcess, found: Sequence[Blocker]) -> None:
        """Raise for what nobody can take along."""
        if grave := blockers.grave(found):
            raise self._blocks(process, "; ".join(map(blockers.sentence, grave)))

    def _why_not(
        self, process: FoundProcess, link: PreloadLink | None, deadline: Deadline
    ) -> tuple[str | None, Holdings | None]:
        """Why the process is left to the driver; raises where nobody can take it."""
        if not self._has_store:
            return "the client names no place for its memory", None
        if link is None:
            wanted = self._wants_preload(process.pid)
            return "its preload library does not answer" if wanted else "it has no preload library in staged mode", None
        if link.phase != "open":
            raise self._blocks(process, f"its gate is not open ({link.phase}); somebody else is at work on it")
        holdings = link.holdings(deadline)
        self.refuse_grave(process, holdings.blockers)
        if left := blockers.for_driver(holdings.blockers):
            return "; ".join(map(blockers.sentence, left)), None
        return None, holdings

    def _blocks(self, process: FoundProcess, what: str) -> GpuObjectBlocks:
        return GpuObjectBlocks(pid=process.pid, comm=process.shown.comm, container=self._container, what=what)


def maps_preload(pid: int) -> bool:
    """The process has our library mapped, whether it has connected or not."""
    try:
        with Path(f"/proc/{pid}/maps").open(errors="replace") as lines:
            return any(line.rstrip("\n").endswith("/libvgpu.so") for line in lines)
    except OSError:
        return False


def wants_preload(mode_file: Path) -> Callable[[int], bool]:
    """Whether a process should connect in staged mode: its container is staged, and our library is in it."""
    try:
        is_staged = mode_file.read_text().strip() == "staged"
    except OSError:
        is_staged = False
    return lambda pid: is_staged and maps_preload(pid)
