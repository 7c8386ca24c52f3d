"""What the agent does for each verb (spec/agent-protocol.md).

One verb at a time per container. Who holds what is in lease_table.py, the way back to running in way_back.py, suspend and
resume in suspension.py, what staged mode adds in staged_service.py. Knows no socket: server.py brings requests and says when
a client has gone.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

from gpu_state import node_facts
from gpu_state.deadline import Deadline
from gpu_state.freeze import Freeze, FreezeOrder, Frozen, Tools
from gpu_state.group_meeting import Meetings
from gpu_state.host_ties_found import find_host_ties
from gpu_state.inventory import with_modes
from gpu_state.lease_table import Caller, LeaseTable
from gpu_state.leases import Lease, new_lease_id
from gpu_state.processes import cgroup_folders
from gpu_state.staged_service import staged_json
from gpu_state.suspension import Suspension
from gpu_state.way_back import ABANDON_S, WayBack
from vgpu_errors import AgentRefused, DeviceContentLost, DriverMissing, GpuStateLost, NotEnoughDeviceMemory

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpu_state.group_company import Company
    from gpu_state.inventory import FoundProcess
    from gpu_state.phases import Phases
    from gpu_state.registration import Registration
    from gpu_state.remote_driver import DriverNode
    from gpu_state.requests import Request
    from gpu_state.staged_freeze import StagedFreeze
    from gpu_state.staged_service import StagedService
    from gpu_state.staging_reserve import StagingReserve

VERSION = "0.1.0"
# A freeze that comes right behind one that was cut off waits for the undo of that one.
_BUSY_S = 10.0
log = logging.getLogger("vgpu-agent")


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
        self._table = LeaseTable()
        self._meetings = Meetings()
        self._way_back = WayBack(tools, staged, self._table)
        self._suspension = Suspension(tools.journal, staged, self._table, self._way_back)

    def perform(self, request: Request, caller: Caller, phases: Phases) -> dict[str, Any]:
        """Do one verb."""
        verb = _VERBS.get(request.verb)
        if verb is None:
            raise AgentRefused(verb=repr(request.verb), what="there is no such verb")
        return verb(self, request, caller, phases)

    def has_work(self) -> bool:
        """A lease is in force or a verb is under way."""
        return self._table.is_at_work()

    def has_suspended(self) -> bool:
        """Containers are suspended, whose end somebody must notice."""
        return bool(self._table.suspended())

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
            links=node.links if node else (),
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
            result["holdings"] = {
                str(pid): held for pid, held in self._staged.blockers(container, cgroup, found, deadline).items()
            }
        if request.args.flag_or("host_ties", default=False):
            result["host_ties"] = [tie.to_json() for tie in find_host_ties(cgroup, deadline)]
        return result

    def freeze(self, request: Request, caller: Caller, phases: Phases) -> dict[str, Any]:
        """Freeze a container's GPU processes for this connection."""
        args = request.args
        order = FreezeOrder(args.container(), _cgroup_of(request), caller.process, args.text_or_none("unfreeze_cgroup"))
        image_path = args.text_or_none("image_path")
        with (
            self._meetings.joined(order.container, args.group()) as company,
            self._table.alone(order.container, "freeze", wait_s=_BUSY_S),
        ):
            self._table.refuse_if_leased(order.container, "freeze")
            leaves_running = args.flag_or("leave_running", default=False)
            if image_path is not None:
                staged = self._staged.freeze_to(
                    order.container,
                    image_path,
                    leaves_running=leaves_running,
                    parents=args.folders("parents"),
                    company=company,
                )
            else:
                staged = self._staged.freeze_marked_only(order.container, company)
            frozen = self._freeze(order, staged, company, request, caller, phases)
            self._table.put(frozen.lease, caller)
            if not staged.is_empty:
                self._table.serve(order.container, caller)
                self._staged.keep(order.container, staged)
        return {
            "lease": frozen.lease.id,
            "processes": [process.to_json() for process in frozen.processes],
            "phases": phases.to_json(),
            "driver_reasons": {str(pid): reason for pid, reason in staged.figures.reasons.items()},
            "staged": None if staged.is_empty else staged_json(staged),
        }

    def _freeze(
        self,
        order: FreezeOrder,
        staged: StagedFreeze,
        company: Company,
        request: Request,
        caller: Caller,
        phases: Phases,
    ) -> Frozen:
        copy_s = request.args.seconds_or("copy_deadline_s", request.args.deadline_s())
        company.gather(self._deadline(request, caller), phases)
        copying = company.until(Deadline(copy_s, why_cancelled=caller.why_cancelled))
        deadline = company.until(self._deadline(request, caller))
        try:
            return Freeze(order, self._tools, staged=staged, company=company).run(deadline, phases, copying)
        except Exception:
            self._way_back.go_on_undoing(order.container)
            raise

    def drain(self, request: Request, caller: Caller, phases: Phases) -> dict[str, Any]:
        """Have the content of a staged checkpoint in its store, whether the application goes on already or not."""
        container = request.args.container()
        with self._table.alone(container, "drain"):
            self._table.refuse_others(container, caller, "drain")
            result = self._staged.drain(container, self._deadline(request, caller), phases)
            if self._tools.journal.of(container) is None:  # the application runs: nothing is needed any more
                self._staged.end(container, keeps_store=True)
                self._table.has_served(container)
        return {**result, "phases": phases.to_json()}

    def prefill(self, request: Request, caller: Caller, _phases: Phases) -> dict[str, Any]:
        """Begin to fill GPU memory from an image for a restore that is under way."""
        args = request.args
        container = args.container()
        with self._table.alone(container, "prefill"):
            self._table.refuse_if_leased(container, "prefill")
            deadline = Deadline(args.deadline_s(), why_cancelled=caller.why_cancelled)
            root = args.text("content_root")
            found = self._staged.prefill(container, args.text("image_path"), root, args.device_map(), deadline)
            self._table.serve(container, caller)
        return found

    def suspend(self, request: Request, caller: Caller, phases: Phases) -> dict[str, Any]:
        """Take a container's GPU memory away until `resume`: the processes stay, frozen."""
        args = request.args
        order = FreezeOrder(args.container(), _cgroup_of(request), caller.process)
        with (
            self._meetings.joined(order.container, args.group()) as company,
            self._table.alone(order.container, "suspend"),
        ):
            self._table.refuse_if_leased(order.container, "suspend")
            staged, frozen, store = self._suspension.suspend(
                order.container,
                args.text_or_none("to"),
                lambda staged: self._freeze(order, staged, company, request, caller, phases),
                company.until(self._deadline(request, caller)),
                phases,
                company,
            )
        return {
            "processes": [process.to_json() for process in frozen.processes],
            "phases": phases.to_json(),
            "driver_reasons": {str(pid): reason for pid, reason in staged.figures.reasons.items()},
            "staged": None if staged.is_empty else staged_json(staged),
            "store": store,
        }

    def resume(self, request: Request, _caller: Caller, phases: Phases) -> dict[str, Any]:
        """Give a suspended container its GPU memory back."""
        container, deadline = request.args.container(), Deadline(request.args.deadline_s(ABANDON_S))
        with self._table.alone(container, "resume"):
            lease, fill = self._suspension.resume(container, request.args.device_map(), deadline, phases)
            found = self._find(container, lease.cgroup, deadline)
        return {
            "processes": [process.to_json() for process in found],
            "phases": phases.to_json(),
            "fill": fill,
        }

    def release(self, request: Request, caller: Caller, phases: Phases) -> dict[str, Any]:
        """End a lease: leave the processes as they are, or thaw them."""
        lease, keep = self._table.of(request.args.text("lease"), caller), request.args.flag("keep")
        with self._table.alone(lease.container, "release"):
            self._table.take(lease)
            if keep:
                self._tools.journal.remove(lease.container)
                self._staged.end(lease.container, keeps_store=True)
                self._table.has_served(lease.container)
                return {"processes": [], "phases": []}
            deadline = Deadline(request.args.deadline_s(ABANDON_S))
            try:
                self._way_back.thaw(lease, deadline, phases)
            except (DeviceContentLost, GpuStateLost, NotEnoughDeviceMemory):
                raise  # trying again changes nothing until somebody acts
            except Exception:
                self._way_back.go_on_undoing(lease.container)
                raise
            found = self._find(lease.container, lease.cgroup, deadline)
        return {"processes": [process.to_json() for process in found], "phases": phases.to_json()}

    def thaw(self, request: Request, caller: Caller, phases: Phases) -> dict[str, Any]:
        """Bring the GPU processes of a container back that CRIU has just restored."""
        args = request.args
        container, cgroup = args.container(), _cgroup_of(request)
        # A client that leaves does not stop a thaw: half a thaw is what nobody wants.
        deadline = Deadline(args.deadline_s())
        with self._table.alone(container, "thaw"):
            self._table.refuse_if_leased(container, "thaw")
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
            self._way_back.thaw(lease, deadline, phases)
            self._table.has_served(container)
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
        held, served = self._table.held_by(caller), self._table.desert(caller)
        for lease in held:
            log.warning("the client of container %s went away while it was frozen: thawing", lease.container)
            self._way_back.abandon(lease)
        for container in served:
            self._staged.end_prefill(container)
            if self._tools.journal.of(container) is None:
                self._staged.end(container, keeps_store=False)

    def sweep(self) -> None:
        """Forget suspended containers that have ended."""
        self._suspension.sweep()

    def take_over(self) -> Callable[[], None]:
        """Put the leases in force that an agent left that was killed; what then is to be done about them takes its time."""
        leases = self._way_back.take_over()
        return lambda: self._way_back.recover(leases)

    def abandon_all(self) -> None:
        """Thaw everything; the agent must go."""
        self._way_back.abandon_all()

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
