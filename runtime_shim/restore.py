"""The `restore` verb: the gates first, then the low-level runtime's restore, then the GPU side.

The gates, in this order; nothing is touched before all of them have passed (docs/security-model.md):
1. signature against the node's policy, and its freshness   2. digests of every file, after what a reference lacks was
brought back from the store   3. security-relevant configuration   4. fitness
What gates 3 and 4 find is listed all at once. A failed gate leaves the image as it was and the container removable.

Restores a container without a GPU, and without a record of ours beside its images, as if this program were not there.
Never prints: a restore's standard error is the container's. Errors go through error_channel.py.
Called by main.py for podman's, containerd's and CRI-O's restores alike.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_state.client import AgentClient
from gpu_state.deadline import Deadline
from gpu_state.fitness import Finding, device_map, findings, musts
from gpu_state.node_facts import NodeFacts
from image_format import security_config
from image_format.file_names import RECORD_NAME
from image_format.trust.policy import Policy
from image_format.verifying import verify_directory
from oci_hook.bundle_file import BundleFile
from oci_hook.gpu_detection import is_gpu_container
from runtime_shim import debug_log, freezer, seen, state_file, store_side
from runtime_shim.guard import Guard, end_container
from runtime_shim.host_namespaces import host_namespaces_added
from runtime_shim.injection import injected_bundle
from runtime_shim.phase_log import PhaseLog
from runtime_shim.supervise import Finished, run_child
from vgpu_errors import ConfigurationChanged, NodeUnfit, RestoreFailed, VgpuError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from image_format.record import Record
    from oci_hook.injection import Injection
    from oci_hook.settings import Settings
    from runtime_shim.arguments import Arguments
    from runtime_shim.low_level import LowLevel

AGENT_CALL_S = 15.0
RUNTIME_CALL_S = 30.0
ANSWER_S = 5.0


def restore(call: Arguments, settings: Settings, low_level: LowLevel) -> int:
    """Run the verb; returns the status for the engine, raises VgpuError for what the error channel has to carry."""
    bundle = Path(call.get("bundle") or ".").absolute()
    image_path = Path(call.get("image-path") or "checkpoint").absolute()
    BundleFile(str(bundle)).recover()  # or a killed call's edits would be compared with the signed configuration
    config = read_config(bundle / "config.json")
    if not (image_path / RECORD_NAME).exists() and not is_gpu_container(config):
        return low_level.replace_process(call)
    return _Restore(call, settings, low_level, bundle, image_path, config).run()


class _Restore:
    """One restore in progress."""

    def __init__(
        self,
        call: Arguments,
        settings: Settings,
        low_level: LowLevel,
        bundle: Path,
        image_path: Path,
        config: Mapping[str, Any],
    ) -> None:
        self.call = call
        self.settings = settings
        self.low_level = low_level
        self.bundle = bundle
        self.image_path = image_path
        self.config = config
        self.id = call.container_id or ""
        self.deadline = Deadline(settings.deadline_restore_s)
        self.clock = PhaseLog()
        self.record: Record | None = None
        self.injection: Injection | None = None
        self.moves: dict[str, str] = {}
        self.thaw_problem: VgpuError | None = None
        self.has_thawed = False
        self.guard = Guard(call.get("pid-file"))
        self.prefill: dict[str, str] = {}

    def run(self) -> int:
        """Gates, CPU side, GPU side."""
        # None only under the policy allow-unsigned, for images that carry no documents of ours.
        with self.clock("verify"):
            # Packs of GPU memory are proved on the GPU, chunk by chunk, before any process sees them (prefill, thaw).
            self.record = self.verify()
        with AgentClient.connect(deadline_s=self.look_s()) as self.agent:
            if self.record is not None:
                with self.clock("gates"):
                    self.check_gates(self.record)
                self.begin_prefill(self.record)
            with self.guard:
                done = self.bring_back()
        if self.record is not None and self.has_thawed:
            seen.note(self.settings, self.record.container.id, self.record.generation)
        self.clock.write(self.settings, "restore", self.id)
        return done.status

    def verify(self) -> Record | None:
        """Gates 1 and 2."""
        policy = Policy.load()
        store_side.bring_back(self.settings, self.image_path, self.id, policy, self.deadline)
        verified = verify_directory(self.image_path, policy, defer_vram=True)
        seen.check(verified, policy, self.settings, where=str(self.image_path))
        if verified.record is not None:
            store_side.refuse_writing_to_images(self.call)
        return verified.record

    def bring_back(self) -> Finished:
        """The CPU side, then the GPU side."""
        with (
            injected_bundle(
                self.settings,
                self.bundle,
                self.id,
                preload_build=recorded_preload(self.record),
                mode=recorded_mode(self.record),
            ) as self.injection,
            self.clock("restore"),
        ):
            done = self.restore_processes()
        if done.has_timed_out or (done.status != 0 and self.call.has("detach")):
            self.end_what_is_there()
        if done.has_timed_out:
            raise RestoreFailed(what=f"{self.low_level.name} restore of {self.id} took longer than the deadline")
        if done.status == 0 and not self.has_thawed:
            with self.clock("thaw"):
                self.thaw()
        if self.thaw_problem is not None:
            raise self.thaw_problem
        return done

    def end_what_is_there(self) -> None:
        """A low-level runtime that was ended may have restored the processes and not said so; frozen they would stay."""
        pid_file = self.call.get("pid-file")
        if pid_file is not None:
            end_container(pid_file)

    def check_gates(self, record: Record) -> None:
        """Gates 3 and 4; everything they find, in one error of the first gate that failed."""
        facts, free_bytes = self.look_at_node()
        now = security_config.project(dict(self.config), bundle=str(self.bundle), container_id=self.id)
        changed = security_config.differences(dict(record.security), now)
        changed += host_namespaces_added(record.security, self.config)
        found = findings(record, facts, free_bytes)
        for finding in found:
            debug_log.write(self.settings, f"restore {self.id}: {finding}")
        refuse(changed, musts(found))
        self.moves = device_map(record, facts)

    def begin_prefill(self, record: Record) -> None:
        """GPU memory of staged mode is filled beside the low-level runtime's restore; `thaw` fetches it by the handle."""
        if not any(process.mode == "staged" for process in record.processes):
            return
        seconds = self.deadline.remaining()
        args = {
            "container": self.id,
            "image_path": str(self.image_path),
            "content_root": record.content_root,
            "device_map": self.moves,
            "deadline_s": seconds,
        }
        self.prefill = {"prefill": str(self.agent.request("prefill", args, deadline_s=seconds + ANSWER_S)["handle"])}

    def look_at_node(self) -> tuple[NodeFacts, dict[str, int]]:
        """The node's facts with the runtime that this shim calls, and the free memory of each GPU."""
        doc = self.agent.request("facts", deadline_s=self.look_s())
        doc["runtime"] = {"name": self.low_level.name, "version": self.low_level.version()}
        devices = self.agent.request("hello", deadline_s=self.look_s())["devices"]
        free = {str(d["uuid"]): int(d["free_bytes"]) for d in devices if d["free_bytes"] is not None}
        return NodeFacts.from_json(doc), free

    def look_s(self) -> float:
        """Time for a question to the agent that changes nothing."""
        return min(AGENT_CALL_S, self.deadline.remaining())

    def restore_processes(self) -> Finished:
        """The low-level runtime's restore; without --detach it stays, so the GPU side comes back beside it."""
        argv = self.call.argv_with(program=self.low_level.path)
        if self.call.has("detach"):
            return run_child(argv, deadline_s=self.deadline.remaining())
        return run_child(argv, on_tick=self.thaw_once_running)

    def thaw_once_running(self) -> bool:
        """For a restore in the foreground: true once the container runs and its GPU side has been dealt with."""
        if self.pid() is None:
            return False
        try:
            self.thaw()
        except VgpuError as problem:
            self.thaw_problem = problem
        return True

    def thaw(self) -> None:
        """Load the GPU side and let the application go on; where that fails the container is ended."""
        pid = self.pid()
        if pid is None:
            raise RestoreFailed(what=f"{self.low_level.name} restored {self.id}, but names no process of it")
        cgroup = state_file.cgroup_of(pid)
        freezer.thaw(pid)
        try:
            self.thaw_processes(cgroup)
        except BaseException:
            freezer.kill(cgroup, pid)
            raise
        self.guard.stand_down()
        self.has_thawed = True
        state_file.write_running(
            self.settings,
            self.call,
            self.low_level,
            bundle=str(self.bundle),
            pid=pid,
            injection=self.injection,
            generation=None if self.record is None else self.record.generation,
        )

    def thaw_processes(self, cgroup: str) -> None:
        """Ask the agent, and hold its answer against the record: a process that is missing was lost on the way."""
        if not self.agent.is_connected():
            self.start_anew()
        seconds = self.deadline.remaining()
        result = self.agent.request(
            "thaw",
            {"container": self.id, "cgroup": cgroup, "deadline_s": seconds, "device_map": self.moves, **self.prefill},
            deadline_s=seconds + ANSWER_S,
        )
        self.clock.taken += [("thaw " + str(item["phase"]), float(item["seconds"])) for item in result["phases"]]
        if self.record is None:
            return
        back = sorted(int(process["ns_pid"]) for process in result["processes"])
        recorded = sorted(process.ns_pid for process in self.record.processes)
        if back != recorded:
            raise RestoreFailed(
                what=f"the GPU side of {self.id} came back for the processes {back}, the checkpoint has {recorded}"
            )

    def start_anew(self) -> None:
        """An agent that was killed while the CPU side came back: another one, and with it the memory that was filled."""
        self.agent.close()
        self.agent = AgentClient.connect(deadline_s=self.look_s())
        if self.record is not None:
            self.begin_prefill(self.record)

    def pid(self) -> int | None:
        """The container's first process, from the pid file or from the low-level runtime."""
        named = self.call.get("pid-file")
        if named is not None:
            return read_pid(named)
        found = self.low_level.call(self.call.global_words, "state", self.id, deadline_s=RUNTIME_CALL_S, check=False)
        try:
            return int(json.loads(found.stdout)["pid"]) or None
        except (ValueError, KeyError, TypeError):
            return None


def read_config(path: Path) -> dict[str, Any]:
    """The bundle's config.json; refused where two readers could understand it differently."""
    try:
        return security_config.load(path.read_bytes())
    except ValueError as problem:
        raise ConfigurationChanged(what=f"{path} cannot be read: {problem}") from problem


def refuse(changed: list[str], unfit: list[Finding]) -> None:
    """Raise where gate 3 or 4 found something; the text names all of it."""
    listed = [*changed, *map(str, unfit)]
    if changed:
        raise ConfigurationChanged(what="; ".join(listed))
    if unfit:
        raise NodeUnfit(what="; ".join(listed))


def recorded_preload(record: Record | None) -> str | None:
    """`<libc>/<build-id>` that the processes have mapped: CRIU wants the very same file back."""
    if record is None:
        return None
    found = [requirement.value for requirement in record.requirements if requirement.key == "preload.build"]
    return str(found[0]) if found else None


def recorded_mode(record: Record | None) -> str | None:
    """What the container's preload libraries are told: as at the checkpoint, where one of its processes was staged."""
    if record is None:
        return None
    return "staged" if any(process.mode == "staged" for process in record.processes) else "driver"


def read_pid(path: str) -> int | None:
    """The pid in a pid file, None while it is not there or not yet whole."""
    try:
        with open(path, encoding="ascii") as file:  # noqa: PTH123 - one read
            return int(file.read())
    except (OSError, ValueError):
        return None
