"""Which processes of a container are staged, which are left to the driver and why, and which nobody can take.

A process is staged if its preload library answers in protocol 2 and holds nothing that only the driver can take along. One
that neither can take, or that maps memory of the agent's and cannot be staged, ends the freeze before anything is stopped.
Memory that processes share is no hindrance where all of them are staged (shared_objects.py); so who is left to the driver
decides on the others. Asks and decides only; called by staged_freeze.py.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING

from gpu_state import blockers
from vgpu_errors import GpuObjectBlocks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from gpu_state.deadline import Deadline
    from gpu_state.import_marks import ImportMarks
    from gpu_state.inventory import FoundProcess
    from gpu_state.preload_link import PreloadLink
    from gpu_state.preload_objects import Blocker
    from gpu_state.staged_inventory import Look, StagedInventory
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
        inventory: StagedInventory,
        *,
        has_store: bool,
    ) -> None:
        self._container = container
        self._preloads = preloads
        self._marks = marks
        self._wants_preload = wants_preload
        self._inventory = inventory
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

    def choose(self, found: Sequence[FoundProcess], deadline: Deadline) -> Look:
        """The processes to stage, with what they hold; GpuObjectBlocks for one that cannot be taken at all."""
        links = self._preloads.links(self._container)
        seen: set[int] = set()
        reasons = {process.pid: self._why_not(process, links.get(process.pid), seen) for process in found}
        while True:
            staged = [process for process in found if reasons[process.pid] is None]
            others = [process for process in found if reasons[process.pid] is not None]
            look = self._inventory.look(staged, others, deadline)
            asked = (process for process in staged if process.identity in look.held)
            left = {process.pid: why for process in asked if (why := self._why_for_driver(process, look))}
            if not left:
                break
            look.close()
            reasons |= left
        try:
            self._settle(found, look, reasons)
        except BaseException:
            look.close()
            raise
        return look

    def _settle(self, found: Sequence[FoundProcess], look: Look, reasons: Mapping[int, str | None]) -> None:
        marked = self._marks.of(self._container)
        for process in found:
            if process.identity in look.held:
                self.refuse_grave(process, look.held[process.identity].blockers)
                self.reasons.pop(process.pid, None)
            if process.identity in look.held or not process.identity.is_alive():
                continue
            if process.identity in marked:
                raise self._blocks(process, f"it maps memory that the agent gave it, and {reasons[process.pid]}")
            self.reasons[process.pid] = reasons[process.pid] or ""
            log.info("process %s of %s is left to the driver: %s", process.pid, self._container, reasons[process.pid])

    def refuse_grave(self, process: FoundProcess, found: Sequence[Blocker]) -> None:
        """Raise for what nobody can take along."""
        if grave := blockers.grave(found):
            raise self._blocks(process, "; ".join(map(blockers.sentence, grave)))

    def _why_not(self, process: FoundProcess, link: PreloadLink | None, seen: set[int]) -> str | None:
        """Why the process is left to the driver, before anybody asks what it holds."""
        if not self._has_store:
            return "the client names no place for its memory"
        if link is None:
            wanted = self._wants_preload(process.pid)
            return "its preload library does not answer" if wanted else "it has no preload library in staged mode"
        if link.phase != "open":
            raise self._blocks(process, f"its gate is not open ({link.phase}); somebody else is at work on it")
        if link.ns_pid in seen:
            return f"another process has the same pid {link.ns_pid} in a namespace of its own"
        seen.add(link.ns_pid)
        return None

    def _why_for_driver(self, process: FoundProcess, look: Look) -> str | None:
        """The same by what it holds; whatever it shares then stays with a process that the driver would lose or copy."""
        found = look.holdings[process.identity].blockers
        left = blockers.for_driver(found)
        if left:
            self.refuse_grave(process, found)
        return "; ".join(map(blockers.sentence, left)) or None

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
