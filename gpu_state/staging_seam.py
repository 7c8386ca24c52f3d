"""What a staged freeze, thaw or restore needs of others: the data plane that moves the bytes, and the preloads' connections.

Types only. staging_session.py is the one that works on GPUs, through the staging worker (gpu_state/staging/); the unit tests
have one over plain memory. Every call has a deadline, and a call that fails leaves the application's memory as it was.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from gpu_state.deadline import Deadline
    from gpu_state.inventory_proof import Tally
    from gpu_state.preload_link import PreloadLink
    from gpu_state.preload_objects import DeviceObject

    # phase, bytes done, bytes in all
    Tell = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Round:
    """One round of copying beside the running application."""

    changed_bytes: int
    copied_bytes: int
    seconds: float = 0.0


class Staging(Protocol):
    """One container's staging worker. Objects are known by their names, `<nsPid>/<object id>`."""

    def add(self, objects: Mapping[str, DeviceObject], fds: Mapping[str, int], deadline: Deadline) -> None:
        """Map the application's objects; the descriptors stay the caller's."""
        ...

    def forget(self, names: Sequence[str], deadline: Deadline) -> None:
        """Let objects go that the application has freed."""
        ...

    def round(self, deadline: Deadline, tell: Tell) -> Round:
        """Copy what has changed, beside the running application."""
        ...

    def wants_another(self, deadline: Deadline) -> bool:
        """One more round would make the stop shorter."""
        ...

    def final(self, deadline: Deadline, *, set_aside: bool, settles: bool = True) -> Mapping[str, Tally]:
        """Take what has changed since, all processes being at rest; set aside on the GPU what need not be waited for.

        What became of every byte, by device. Where it does not `settle`, copies from the objects go on until `drain`; the
        processes must not run before that, but may have let go of the objects.
        """
        ...

    def drain(self, deadline: Deadline, tell: Tell) -> None:
        """Bring what was set aside, and all that is under way, into the store."""
        ...

    def write_fragment(self, deadline: Deadline) -> Path | None:
        """Write down where each chunk lies; the store is complete and durable with it. None where nothing was stored."""
        ...

    @property
    def copied_s(self) -> float:
        """Seconds from the beginning of `final` until the last copy had arrived; known after `drain`."""
        ...

    def let_objects_go(self, deadline: Deadline) -> None:
        """Hold no device memory any more."""
        ...

    def let_objects_go_soon(self) -> None:
        """The same, without waiting: whatever is asked next comes after it."""
        ...

    def fill(self, objects: Mapping[str, DeviceObject], deadline: Deadline, tell: Tell) -> dict[str, int]:
        """Make these objects anew from the store and prove their content on the GPU; descriptors for them, the caller's."""
        ...

    @property
    def is_usable(self) -> bool:
        """The worker still answers."""
        ...

    def close(self, *, keeps_store: bool) -> None:
        """End the work. What was written is removed, unless the store is kept; the worker itself may end later."""
        ...


class Preloads(Protocol):
    """The preload libraries of containers, as registration.py has them."""

    def links(self, container: str) -> dict[int, PreloadLink]:
        """Host pid -> the staged preload of that process."""
        ...

    def others(self, container: str) -> dict[str, dict[int, PreloadLink]]:
        """The same of every other container that has staged processes."""
        ...

    def resume(self, container: str) -> None:
        """Listen again."""
        ...


class StagingFactory(Protocol):
    """Starts staging workers."""

    def open(self, store: str, *, kind: str, parents: Sequence[str] = ()) -> Staging:
        """A worker for the store in this folder; `kind` "packs" or "memory" makes a new one, "" reads what is there.

        `parents` are folders of verified checkpoints: new packs leave out what lies in the packs there.
        """
        ...
