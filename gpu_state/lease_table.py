"""Who holds which lease, which container somebody is at work on, and for whom content waits in a store.

Facts and their lock only: thaws nothing, writes no journal. Refuses with AgentRefused what the table does not allow.
Used by service.py, suspension.py and way_back.py.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpu_state.deadline import Deadline
from vgpu_errors import AgentRefused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gpu_state.leases import Lease
    from gpu_state.processes import ProcessIdentity

_LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class Caller:
    """The connection that asks: its process, and how to know that it has gone. Compared by identity."""

    process: ProcessIdentity
    why_cancelled: Callable[[], str | None]

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


class LeaseTable:
    """The leases in force and their holders, safe for all threads."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._busy: set[str] = set()
        # Lease -> the connection that holds it; None after a restart of the agent, until its owner comes back.
        self._leases: dict[str, tuple[Lease, Caller | None]] = {}
        # Container -> the connection for which it is drained or prefilled; what is not fetched goes with it.
        self._patrons: dict[str, Caller] = {}

    # ---- leases ------------------------------------------------------------------------------------------

    def put(self, lease: Lease, holder: Caller | None) -> None:
        """A lease is in force."""
        with self._guard:
            self._leases[lease.id] = lease, holder

    def take(self, lease: Lease) -> None:
        """It is no longer."""
        with self._guard:
            self._leases.pop(lease.id, None)

    def of(self, name: str, caller: Caller) -> Lease:
        """The lease that this connection may release."""
        with self._guard:
            lease, holder = self._leases.get(name, (None, None))
        if lease is not None and (holder is caller or (holder is None and lease.owner == caller.process)):
            return lease
        raise AgentRefused(verb="release", what="this connection holds no such lease")

    def held_by(self, caller: Caller) -> list[Lease]:
        """The leases of one connection."""
        with self._guard:
            return [lease for lease, holder in self._leases.values() if holder is caller]

    def frozen(self) -> list[Lease]:
        """Leases of containers that somebody waits for."""
        with self._guard:
            return [lease for lease, _ in self._leases.values() if not lease.is_suspended]

    def suspended(self) -> list[Lease]:
        """Leases of containers that are to stay as they are."""
        with self._guard:
            return [lease for lease, _ in self._leases.values() if lease.is_suspended]

    def is_known(self, lease: Lease) -> bool:
        """The lease is in force."""
        with self._guard:
            return lease.id in self._leases

    def is_orphan(self, lease: Lease) -> bool:
        """The lease is in force, and no connection holds it."""
        with self._guard:
            return self._leases.get(lease.id, (None, lease))[1] is None

    def refuse_if_leased(self, container: str, verb: str) -> None:
        """One lease a container."""
        with self._guard:
            held = [lease for lease, _ in self._leases.values() if lease.container == container]
        if any(lease.is_suspended for lease in held):
            raise AgentRefused(verb=verb, what=f"container {container} is suspended; resume it first")
        if held:
            raise AgentRefused(verb=verb, what=f"container {container} is frozen under a lease; release that first")

    # ---- patrons -----------------------------------------------------------------------------------------

    def serve(self, container: str, caller: Caller) -> None:
        """Content of this container waits for that connection."""
        with self._guard:
            self._patrons[container] = caller

    def has_served(self, container: str) -> None:
        """The connection has what it wanted."""
        with self._guard:
            self._patrons.pop(container, None)

    def desert(self, caller: Caller) -> list[str]:
        """The connection is gone; the containers whose content waited for it."""
        with self._guard:
            served = [container for container, patron in self._patrons.items() if patron is caller]
            for container in served:
                del self._patrons[container]
        return served

    def refuse_others(self, container: str, caller: Caller, verb: str) -> None:
        """Only the connection that began may go on."""
        with self._guard:
            if self._patrons.get(container) is not caller:
                raise AgentRefused(verb=verb, what=f"this connection has no staged checkpoint of container {container}")

    # ---- one at a time -----------------------------------------------------------------------------------

    @contextmanager
    def alone(self, container: str, verb: str, wait_s: float = 0.0) -> Iterator[None]:
        """One request at a time works on a container."""
        waited = Deadline(wait_s)
        while not self._enter(container):
            if waited.remaining() <= 0:
                raise AgentRefused(verb=verb, what=f"another request is at work on container {container}")
            threading.Event().wait(_LOOK_S)
        try:
            yield
        finally:
            with self._guard:
                self._busy.discard(container)

    def is_at_work(self) -> bool:
        """A request is under way, a container is frozen, or content waits for somebody."""
        with self._guard:
            frozen = any(not lease.is_suspended for lease, _ in self._leases.values())
            return bool(self._busy or frozen or self._patrons)

    def _enter(self, container: str) -> bool:
        with self._guard:
            if container in self._busy:
                return False
            self._busy.add(container)
            return True
