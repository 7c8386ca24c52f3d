"""What the agent does for each verb, and who holds which lease (spec/agent-protocol.md).

One verb at a time per container. What staged mode adds is in staged_service.py. Knows no socket: server.py brings requests and says when a client has gone.
"""

from __future__ import annotations

import logging
import os
import select
import threading
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from gpu_state import node_facts
from gpu_state.deadline import Deadline
from gpu_state.freeze import Freeze, FreezeOrder, Frozen, Tools
from gpu_state.inventory import with_modes
from gpu_state.leases import Lease, new_lease_id
from gpu_state.processes import cgroup_folders, thaw_cgroup
from gpu_state.staged_lease import StagedPart
from gpu_state.staged_service import staged_json
from gpu_state.thaw import Thaw
from vgpu_errors import AgentRefused, DeviceContentLost, DriverMissing, GpuStateLost, NotEnoughDeviceMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gpu_state.inventory import FoundProcess
    from gpu_state.phases import Phases
    from gpu_state.processes import ProcessIdentity
    from gpu_state.registration import Registration
    from gpu_state.remote_driver import DriverNode
    from gpu_state.requests import Request
    from gpu_state.staged_freeze import StagedFreeze
    from gpu_state.staged_service import StagedService
    from gpu_state.staging_reserve import StagingReserve

VERSION = "0.1.0"
_LOOK_S = 1.0
_RETRY_S = 2.0
# A freeze that comes right behind one that was cut off waits for the undo of that one.
_BUSY_S = 10.0
# A 140 GiB device takes the driver about 90 s out and 30 s in at the rates measured, and a thaw may have to wait for the one
# before it does the other.
_ABANDON_S = 180.0
log = logging.getLogger("vgpu-agent")


@dataclass(frozen=True, slots=True)
class Caller:
    """The connection that asks: its process, and how to know that it has gone. Compared by identity."""

    process: ProcessIdentity
    why_cancelled: Callable[[], str | None]

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


class Service:
    """The agent without its sockets."""

    def __init__(
        self,
        tools: Tools,
        registration: Registration,
        staged: StagedService,
        stop: Callable[[], None],
        reserve: StagingReserve | None = None,
    ) -> None:
        self._tools = tools
        self._reserve = reserve
        self._staged = staged
        self._registration = registration
        self._stop = stop
        self._guard = threading.Lock()
        self._busy: set[str] = set()
        # Lease -> the connection that holds it; None after a restart of the agent, until its owner comes back.
        self._leases: dict[str, tuple[Lease, Caller | None]] = {}
        # Container -> the connection for which it is drained or prefilled; what is not fetched goes with it.
        self._patrons: dict[str, Caller] = {}

    def perform(self, request: Request, caller: Caller, phases: Phases) -> dict[str, Any]:
        """Do one verb."""
        verb = _VERBS.get(request.verb)
        if verb is None:
            raise AgentRefused(verb=repr(request.verb), what="there is no such verb")
        return verb(self, request, caller, phases)

    def has_work(self) -> bool:
        """A lease is in force or a verb is under way."""
        with self._guard:
            frozen = [lease for lease, _ in self._leases.values() if not lease.is_suspended]
            return bool(self._busy or frozen or self._patrons)

    def has_suspended(self) -> bool:
        """Containers are suspended, whose end somebody must notice."""
        with self._guard:
            return any(lease.is_suspended for lease, _ in self._leases.values())

    # ---- verbs ---------------------------------------------------------------------------------------

    def hello(self, request: Request, caller: Caller, _phases: Phases) -> dict[str, Any]:
        """Who the agent is and what the driver offers."""
        node = self._node(self._deadline(request, caller))
        return {
            "version": VERSION,
            "pid": os.getpid(),
            "driver_version": node.cuda_version if node else None,
            "driver_release": node.release if node else None,
            "devices": [device.to_json() for device in node.devices] if node else [],
        }

    def facts(self, request: Request, caller: Caller, _phases: Phases) -> dict[str, Any]:
        """What this node is, and how far the reserve is."""
        node = self._node(self._deadline(request, caller))
        facts = node_facts.gather(
            driver_release=node.release if node else None,
            cuda_version=node.cuda_version if node else None,
            devices=node.devices if node else (),
            runtime_path=request.args.text_or_none("runtime"),
        )
        return facts.to_json() | {"staging_reserve": self._reserve.to_json() if self._reserve is not None else None}

    def inventory(self, request: Request, caller: Caller, _phases: Phases) -> dict[str, Any]:
        """The GPU processes of a cgroup."""
        cgroup = _cgroup_of(request)
        container = request.args.text_or_none("container") or cgroup
        deadline = self._deadline(request, caller)
        found = self._find(container, cgroup, deadline)
        lease = self._tools.journal.of(container)
        result: dict[str, Any] = {
            "processes": [process.to_json() for process in found],
            "suspended": lease is not None and lease.is_suspended,
        }
        if request.args.flag_or("blockers", default=False):
            result["holdings"] = {str(pid): held for pid, held in self._staged.blockers(container, deadline).items()}
        return result

    def freeze(self, request: Request, caller: Caller, phases: Phases) -> dict[str, Any]:
        """Freeze a container's GPU processes for this connection."""
        args = request.args
        order = FreezeOrder(args.container(), _cgroup_of(request), caller.process, args.text_or_none("unfreeze_cgroup"))
        image_path = args.text_or_none("image_path")
        with self._alone(order.container, "freeze", wait_s=_BUSY_S):
            self._refuse_if_leased(order.container, "freeze")
            leaves_running = args.flag_or("leave_running", default=False)
            if image_path is not None:
                staged = self._staged.freeze_to(
                    order.container, image_path, leaves_running=leaves_running, parents=args.folders("parents")
                )
            else:
                staged = self._staged.freeze_marked_only(order.container)
            frozen = self._freeze(order, staged, request, caller, phases)
            with self._guard:
                self._leases[frozen.lease.id] = frozen.lease, caller
                if not staged.is_empty:
                    self._patrons[order.container] = caller
            if not staged.is_empty:
                self._staged.keep(order.container, staged)
        return {
            "lease": frozen.lease.id,
            "processes": [process.to_json() for process in frozen.processes],
            "phases": phases.to_json(),
            "driver_reasons": {str(pid): reason for pid, reason in staged.figures.reasons.items()},
            "staged": None if staged.is_empty else staged_json(staged),
        }

    def _freeze(
        self, order: FreezeOrder, staged: StagedFreeze, request: Request, caller: Caller, phases: Phases
    ) -> Frozen:
        copy_s = request.args.seconds_or("copy_deadline_s", request.args.deadline_s())
        copying = Deadline(copy_s, why_cancelled=caller.why_cancelled)
        try:
            return Freeze(order, self._tools, staged=staged).run(self._deadline(request, caller), phases, copying)
        except Exception:
            self._go_on_undoing(order.container)
            raise

    def drain(self, request: Request, caller: Caller, phases: Phases) -> dict[str, Any]:
        """Have the content of a staged checkpoint in its store, whether the application goes on already or not."""
        container = request.args.container()
        with self._alone(container, "drain"):
            self._refuse_others(container, caller, "drain")
            result = self._staged.drain(container, self._deadline(request, caller), phases)
            if self._tools.journal.of(container) is None:  # the application runs: nothing is needed any more
                self._staged.end(container, keeps_store=True)
                self._leave_patron(container)
        return {**result, "phases": phases.to_json()}

    def prefill(self, request: Request, caller: Caller, _phases: Phases) -> dict[str, Any]:
        """Begin to fill GPU memory from an image for a restore that is under way."""
        args = request.args
        container = args.container()
        with self._alone(container, "prefill"):
            self._refuse_if_leased(container, "prefill")
            deadline = Deadline(args.deadline_s(), why_cancelled=caller.why_cancelled)
            root = args.text("content_root")
            found = self._staged.prefill(container, args.text("image_path"), root, args.device_map(), deadline)
            with self._guard:
                self._patrons[container] = caller
        return found

    def suspend(self, request: Request, caller: Caller, phases: Phases) -> dict[str, Any]:
        """Take a container's GPU memory away until `resume`: the processes stay, frozen."""
        args = request.args
        order = FreezeOrder(args.container(), _cgroup_of(request), caller.process)
        with self._alone(order.container, "suspend"):
            self._refuse_if_leased(order.container, "suspend")
            staged = self._staged.suspend_to(order.container, args.text_or_none("to"))
            try:
                frozen = self._freeze(order, staged, request, caller, phases)
            except Exception:
                self._staged.forget_store(order.container, StagedPart((), staged.store, is_suspend=True))
                raise
            try:
                lease = self._put_away(frozen.lease, staged, self._deadline(request, caller), phases)
            except Exception:
                self._staged.keep(order.container, staged)
                self._back_from_suspend(frozen.lease)
                raise
            with self._guard:
                self._leases[lease.id] = lease, None
        return {
            "processes": [process.to_json() for process in frozen.processes],
            "phases": phases.to_json(),
            "driver_reasons": {str(pid): reason for pid, reason in staged.figures.reasons.items()},
            "staged": None if staged.is_empty else staged_json(staged),
            "store": lease.staged.store if lease.staged else None,
        }

    def _put_away(self, lease: Lease, staged: StagedFreeze, deadline: Deadline, phases: Phases) -> Lease:
        """Everything into the store, then the device memory goes. The journal says `suspended` only from here on."""
        staged.drain(deadline, phases)
        part = lease.staged or StagedPart((), staged.store)
        lease = replace(lease, staged=replace(part, is_complete=True, is_suspend=True, is_suspended=True))
        self._tools.journal.write(lease)
        with phases("let memory go"):
            staged.let_memory_go(deadline)
        self._staged.keep_warm(lease.container, staged)
        return lease

    def _back_from_suspend(self, lease: Lease) -> None:
        try:
            self._thaw(lease, Deadline(_ABANDON_S), None)
            self._staged.end(lease.container, keeps_store=False)
        except Exception:
            self._go_on_undoing(lease.container)
            raise

    def resume(self, request: Request, _caller: Caller, phases: Phases) -> dict[str, Any]:
        """Give a suspended container its GPU memory back."""
        container, deadline = request.args.container(), Deadline(request.args.deadline_s(_ABANDON_S))
        with self._alone(container, "resume"):
            lease = self._tools.journal.of(container)
            if lease is None or lease.staged is None or not lease.is_suspended:
                raise AgentRefused(verb="resume", what=f"container {container} is not suspended")
            lease = replace(lease, device_map=request.args.device_map() or lease.device_map)
            # What fails leaves the container suspended: the journal entry goes last.
            fill = self._staged.begin_resume(lease, deadline)
            try:
                self._thaw(lease, deadline, phases)
            finally:
                self._staged.end_prefill(container)
            self._take(lease.id)
            found = self._find(container, lease.cgroup, deadline)
        return {
            "processes": [process.to_json() for process in found],
            "phases": phases.to_json(),
            "fill": None if fill is None else {"bytes": fill.bytes, "seconds": fill.seconds},
        }

    def release(self, request: Request, caller: Caller, phases: Phases) -> dict[str, Any]:
        """End a lease: leave the processes as they are, or thaw them."""
        lease, keep = self._lease_of(request.args.text("lease"), caller), request.args.flag("keep")
        with self._alone(lease.container, "release"):
            self._take(lease.id)
            if keep:
                self._tools.journal.remove(lease.container)
                self._staged.end(lease.container, keeps_store=True)
                self._leave_patron(lease.container)
                return {"processes": [], "phases": []}
            deadline = Deadline(request.args.deadline_s(_ABANDON_S))
            try:
                self._thaw(lease, deadline, phases)
            except (DeviceContentLost, GpuStateLost, NotEnoughDeviceMemory):
                raise  # trying again changes nothing until somebody acts
            except Exception:
                self._go_on_undoing(lease.container)
                raise
            found = self._find(lease.container, lease.cgroup, deadline)
        return {"processes": [process.to_json() for process in found], "phases": phases.to_json()}

    def thaw(self, request: Request, caller: Caller, phases: Phases) -> dict[str, Any]:
        """Bring the GPU processes of a container back that CRIU has just restored."""
        args = request.args
        container, cgroup = args.container(), _cgroup_of(request)
        # A client that leaves does not stop a thaw: half a thaw is what nobody wants.
        deadline = Deadline(args.deadline_s())
        with self._alone(container, "thaw"):
            self._refuse_if_leased(container, "thaw")
            handle = args.text_or_none("prefill")
            if handle is not None:
                self._staged.hold_socket(container, cgroup, deadline)
            with phases("find"):
                found = self._tools.inventory.find(container, cgroup, deadline, waits_until_runnable=True)
            lease = Lease(
                new_lease_id(),
                container,
                cgroup,
                caller.process,
                tuple((process.identity, process.shown.comm) for process in found),
                device_map=args.device_map(),
                # An agent that takes over makes the memory anew from the image.
                staged=self._staged.restored_part(container, found, handle) if handle is not None else None,
            )
            self._tools.journal.write(lease)
            self._thaw(lease, deadline, phases)
            self._leave_patron(container)
            found = self._find(container, cgroup, deadline)
        return {"processes": [process.to_json() for process in found], "phases": phases.to_json()}

    def watch(self, request: Request, caller: Caller, _phases: Phases) -> dict[str, Any]:
        """Make the container's control socket."""
        self._registration.watch(request.args.container(), self._deadline(request, caller))
        return {}

    def shutdown(self, _request: Request, _caller: Caller, _phases: Phases) -> dict[str, Any]:
        """End the agent as SIGTERM does."""
        self._stop()
        return {}

    # ---- leases without a client -----------------------------------------------------------------------

    def client_gone(self, caller: Caller) -> None:
        """Thaw what this connection still held."""
        with self._guard:
            held = [lease for lease, holder in self._leases.values() if holder is caller]
            served = [container for container, patron in self._patrons.items() if patron is caller]
            for container in served:
                del self._patrons[container]
        for lease in held:
            log.warning("the client of container %s went away while it was frozen: thawing", lease.container)
            self._abandon(lease)
        for container in served:
            self._staged.end_prefill(container)
            if self._tools.journal.of(container) is None:
                self._staged.end(container, keeps_store=False)

    def sweep(self) -> None:
        """Forget suspended containers whose processes have all ended, with their content."""
        self._staged.sweep()
        with self._guard:
            suspended = [lease for lease, _ in self._leases.values() if lease.is_suspended]
        for lease in suspended:
            if not any(process.is_alive() for process, _ in lease.processes):
                log.info("suspended container %s is gone", lease.container)
                with self._alone(lease.container, "sweep", wait_s=_ABANDON_S):
                    self._take(lease.id)
                    self._tools.journal.remove(lease.container)
                    if lease.staged is not None:
                        self._staged.forget_store(lease.container, lease.staged)

    def recover(self) -> None:
        """Take over what an agent left that was killed: thaw, or wait for an owner that is still there."""
        for lease in list(self._tools.journal.entries()):
            with self._guard:
                self._leases[lease.id] = lease, None
            if lease.is_suspended:
                self._staged.settle(lease.container)
                continue
            if lease.owner.is_alive():
                threading.Thread(target=self._await_owner, args=(lease,), daemon=True).start()
            else:
                log.warning("container %s was left frozen by an agent that was killed: thawing", lease.container)
                self._abandon(lease)

    def abandon_all(self) -> None:
        """Thaw everything; the agent must go."""
        with self._guard:
            held = [lease for lease, _ in self._leases.values() if not lease.is_suspended]
        for lease in held:
            self._abandon(lease)

    def _await_owner(self, lease: Lease) -> None:
        try:
            fd = os.pidfd_open(lease.owner.pid)
        except OSError:
            self._abandon(lease)
            return
        try:
            waiting = select.poll()
            waiting.register(fd, select.POLLIN)
            while self._is_orphan(lease):
                if waiting.poll(_LOOK_S * 1000) or not lease.owner.is_alive():
                    self._abandon(lease)
                    return
        finally:
            os.close(fd)

    def _go_on_undoing(self, container: str) -> None:
        """An undo that failed has left its journal entry: go on with it when the client has its answer."""
        for lease in self._tools.journal.entries():
            if lease.container == container:
                with self._guard:
                    self._leases[lease.id] = lease, None
                threading.Thread(target=self._keep_trying, args=(lease,), daemon=True).start()

    def _keep_trying(self, lease: Lease) -> None:
        while self._is_orphan(lease):
            threading.Event().wait(_RETRY_S)
            self._abandon(lease, is_final=False)

    def _abandon(self, lease: Lease, *, is_final: bool = True) -> None:
        """Thaw without a client. Where it is not the final attempt, the lease stays in force after a failure."""
        with self._alone(lease.container, "thaw", wait_s=_ABANDON_S):
            if not self._is_known(lease):
                return
            try:
                self._thaw(lease, Deadline(_ABANDON_S), None, is_patient=True)
            except Exception as problem:
                log.exception("container %s could not be thawed", lease.container)
                if not is_final and not isinstance(problem, (GpuStateLost, DeviceContentLost)):
                    return
            self._take(lease.id)
            self._staged.end(lease.container, keeps_store=False)

    def _thaw(self, lease: Lease, deadline: Deadline, phases: Phases | None, *, is_patient: bool = False) -> None:
        """The one way back: cgroup first, so that the processes can work at their own restore; journal last."""
        if lease.unfreeze_cgroup is not None and is_patient:
            thaw_cgroup(lease.unfreeze_cgroup)
        thaw = Thaw(
            self._tools.driver,
            lease.container,
            deadline,
            device_map=lease.device_map,
            unanswered=[process.pid for process, _ in lease.processes] if is_patient else None,
        )
        failures: list[Exception] = []
        try:
            thaw.run(lease.processes, phases)
        except Exception as problem:  # noqa: BLE001 - the other processes get their memory all the same; raised below
            failures.append(problem)
        finally:
            self._tools.sockets.resume(lease.container)
        if lease.staged is not None and lease.staged.processes:
            try:
                self._staged.bring_back(lease, deadline, phases)
            except Exception as problem:  # noqa: BLE001 - as above
                failures.append(problem)
        if failures:
            for other in failures[1:]:
                failures[0].add_note(f"also: {other}")
            raise failures[0]
        # After a failure the entry stays: the next start of the agent tries again with whatever is still alive.
        self._tools.journal.remove(lease.container)
        if lease.staged is not None:
            self._staged.forget_store(lease.container, lease.staged)

    # ---- small things ------------------------------------------------------------------------------------

    def _find(self, container: str, cgroup: str, deadline: Deadline) -> list[FoundProcess]:
        """The container's GPU processes, those of staged mode by what their preload or the journal says."""
        found = self._tools.inventory.find(container, cgroup, deadline)
        modes = self._staged.modes(container)
        lease = self._tools.journal.of(container)
        if lease is not None and lease.staged is not None:
            modes |= dict.fromkeys((process.pid for process in lease.staged.processes), "staged")
        return with_modes(found, modes)

    def _deadline(self, request: Request, caller: Caller) -> Deadline:
        return Deadline(request.args.deadline_s(), why_cancelled=caller.why_cancelled)

    def _node(self, deadline: Deadline) -> DriverNode | None:
        try:
            return self._tools.driver.node(deadline)
        except DriverMissing:
            return None

    @contextmanager
    def _alone(self, container: str, verb: str, wait_s: float = 0.0) -> Iterator[None]:
        waited = Deadline(wait_s)
        while not self._enter(container):
            if waited.remaining() <= 0:
                raise AgentRefused(verb=verb, what=f"another request is at work on container {container}")
            threading.Event().wait(0.05)
        try:
            yield
        finally:
            with self._guard:
                self._busy.discard(container)

    def _enter(self, container: str) -> bool:
        with self._guard:
            if container in self._busy:
                return False
            self._busy.add(container)
            return True

    def _refuse_if_leased(self, container: str, verb: str) -> None:
        with self._guard:
            held = [lease for lease, _ in self._leases.values() if lease.container == container]
            if any(lease.is_suspended for lease in held):
                raise AgentRefused(verb=verb, what=f"container {container} is suspended; resume it first")
            if held:
                raise AgentRefused(verb=verb, what=f"container {container} is frozen under a lease; release that first")

    def _refuse_others(self, container: str, caller: Caller, verb: str) -> None:
        with self._guard:
            if self._patrons.get(container) is not caller:
                raise AgentRefused(verb=verb, what=f"this connection has no staged checkpoint of container {container}")

    def _lease_of(self, name: str, caller: Caller) -> Lease:
        with self._guard:
            lease, holder = self._leases.get(name, (None, None))
        if lease is not None and (holder is caller or (holder is None and lease.owner == caller.process)):
            return lease
        raise AgentRefused(verb="release", what="this connection holds no such lease")

    def _take(self, name: str) -> None:
        with self._guard:
            self._leases.pop(name, None)

    def _leave_patron(self, container: str) -> None:
        with self._guard:
            self._patrons.pop(container, None)

    def _is_known(self, lease: Lease) -> bool:
        with self._guard:
            return lease.id in self._leases

    def _is_orphan(self, lease: Lease) -> bool:
        with self._guard:
            return self._leases.get(lease.id, (None, lease))[1] is None


def _cgroup_of(request: Request) -> str:
    """The cgroup that the client names, which must exist: no processes in a wrong place would look like success."""
    cgroup = request.args.text("cgroup")
    if not cgroup_folders(cgroup):
        raise AgentRefused(verb=request.verb, what=f"there is no cgroup {cgroup}")
    return cgroup


_VERBS: dict[str, Callable[[Service, Request, Caller, Phases], dict[str, Any]]] = {
    "hello": Service.hello,
    "facts": Service.facts,
    "inventory": Service.inventory,
    "freeze": Service.freeze,
    "release": Service.release,
    "thaw": Service.thaw,
    "drain": Service.drain,
    "prefill": Service.prefill,
    "suspend": Service.suspend,
    "resume": Service.resume,
    "watch": Service.watch,
    "shutdown": Service.shutdown,
}
