"""The `checkpoint` verb: freezes the GPU side, has the low-level runtime dump the CPU side, seals and signs the image.

A container whose processes use no GPU is none of its business: the low-level runtime takes over unseen.
Refuses pre-dump, parent images and lazy pages of GPU containers: CRIU's page tracking knows nothing of GPU memory.

The steps, and what a crash after each leaves behind (the lease is the agent's, gpu_state/leases.py):

1. prepare      key and node looked at                                     the container as it was
2. lift_pause   the engine's own pause lifted                              the container running
3. make_room    processes and space looked at, old seal removed            the same, no image
4. freeze_gpu   lease taken, GPU processes locked and checkpointed         the agent thaws them
                (those of a whole group at one cut, group_side.py)
5. hold         cgroup frozen, so that nothing runs between 6 and 8        the agent unfreezes, then thaws
6. dump         low-level runtime's checkpoint, always leaving it running  the same; images without a signature
7. seal         index, record, manifest, signature                        the same; a whole image
8. end          SIGKILL, delete: the commit                                a whole image

After 8 the checkpoint is kept in the store where the settings want that; a failure there changes nothing (store_side.py).

With --leave-running there is no 5 and 8: after 6 the GPU side is thawed and 7 happens beside the running application.
With --tcp-established CRIU itself must end the processes, or their peers would see the connections close; then a
failing 7 cannot bring the container back, and the error says so (docs/decisions/0003-hold-then-kill.md).
"""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_state.client import AgentClient
from gpu_state.node_facts import NodeFacts, RuntimeFacts
from gpu_state.processes import GpuProcess
from gpu_state.undo import Undo
from image_format import security_config
from image_format.file_names import is_ours
from image_format.record import LowLevelRuntime, Phase
from image_format.sealing import remove_old_seal, seal
from image_format.trust.keys import load_signing_key
from oci_hook.control_directory import forget_container
from runtime_shim import debug_log, freezer, host_side, seen, state_file, store_side
from runtime_shim.group_side import group_args
from runtime_shim.parent_side import ParentCheckpoint, leased_parent
from runtime_shim.phase_log import PhaseLog
from runtime_shim.progress import Progress
from runtime_shim.record_building import build_record, with_groups
from runtime_shim.staged_checkpoint import StagedSide
from runtime_shim.supervise import Shield, run_child
from runtime_shim.target import Target, find_target
from vgpu_errors import (
    AgentUnreachable,
    BadConfiguration,
    CheckpointFailed,
    NotEnoughSpace,
    UnsupportedRequest,
    VgpuError,
)

if TYPE_CHECKING:
    from image_format.record import Record
    from image_format.trust.keys import SigningKey
    from oci_hook.settings import Settings
    from runtime_shim.arguments import Arguments
    from runtime_shim.low_level import LowLevel

REFUSED = {
    "pre-dump": "a pre-dump (podman's --pre-checkpoint) cannot be taken of a GPU container: "
    "CRIU tracks changed pages of host memory only, and the GPU would have to stop for each round",
    "parent-path": "a checkpoint of a GPU container cannot build on a pre-dump (podman's --with-previous)",
    "lazy-pages": "a GPU container cannot be checkpointed with lazy pages: its memory has to be sealed before it ends",
    "page-server": "a GPU container cannot be checkpointed to a page server: its memory has to be sealed on this node",
}
SPARE_BYTES = 64 << 20
AGENT_CALL_S = 15.0
RUNTIME_CALL_S = 30.0
# Time the agent gets beyond a phase's own deadline to undo it and to answer.
ANSWER_S = 30.0


def checkpoint(call: Arguments, settings: Settings, low_level: LowLevel) -> int:
    """Run the verb; returns the status for the engine, raises VgpuError for what the error channel has to carry."""
    target = find_target(call, low_level)
    if target is None:
        return low_level.replace_process(call)
    for option, reason in REFUSED.items():
        if call.has(option):
            raise UnsupportedRequest(what=reason)
    refuse_user_namespace(target)
    with AgentClient.connect(deadline_s=look_s(settings)) as agent:
        return _Checkpoint(call, settings, low_level, target, agent).run()


def refuse_user_namespace(target: Target) -> None:
    """CRIU dumps such a container and cannot bring it back (tests/engines, CRIU 4.1.1 and 4.2.1): do not end it."""
    namespaces = (target.config().get("linux") or {}).get("namespaces") or ()
    if any(namespace.get("type") == "user" for namespace in namespaces):
        raise UnsupportedRequest(
            what=f"{target.id} has a user namespace of its own, and CRIU cannot restore such a container: from inside "
            "the namespace it may open neither its images nor the engine's mounts",
            remedy="Run the container without --uidmap, --gidmap and --userns.",
        )


def look_s(settings: Settings) -> float:
    """Time for a question to the agent that changes nothing."""
    return min(AGENT_CALL_S, settings.deadline_freeze_s)


class _Checkpoint:
    """One checkpoint in progress."""

    def __init__(
        self, call: Arguments, settings: Settings, low_level: LowLevel, target: Target, agent: AgentClient
    ) -> None:
        self.call = call
        self.settings = settings
        self.low_level = low_level
        self.target = target
        self.agent = agent
        self.image_path = Path(call.get("image-path") or "checkpoint").absolute()
        self.leaves_running = call.has("leave-running")
        self.ends_by_criu = call.has("tcp-established") and not self.leaves_running
        self.progress = Progress(settings)
        self.clock = PhaseLog()
        self.processes: tuple[GpuProcess, ...] = ()
        self.generation = 0
        self.parent: ParentCheckpoint | None = None
        self.group: dict[str, Any] = {}
        self.lease = ""
        self.staged = StagedSide(target, settings, self.image_path, leaves_running=self.leaves_running)

    def run(self) -> int:
        """All steps in their order, undone from the last one back where one fails."""
        key = self.prepare()
        with (
            leased_parent(self.settings, self.target.id, is_wanted=self.staged.is_wanted) as self.parent,
            Undo() as undo,
        ):
            self.lift_pause(undo)
            self.make_room()
            self.freeze_gpu(undo)
            status = self.dump(undo)
            if status != 0:
                undo.run()
                self.say_undo_failures(undo)
                return status
            self.finish(key, undo)
        store_side.keep(self.settings, self.image_path, self.target.id, self.progress, self.clock)
        self.remember()
        return 0

    # ---- steps -----------------------------------------------------------------------------------

    def prepare(self) -> SigningKey:
        """Everything that can be refused is refused here, while nothing has been touched."""
        store_side.refuse_reference_without_store(self.settings)
        self.group = group_args(self.settings, self.target)
        key = load_signing_key()
        self.facts = NodeFacts.from_json(self.agent.request("facts", deadline_s=look_s(self.settings)))
        return key

    def make_room(self) -> None:
        """The last refusals; then what an earlier checkpoint left goes. The driver tells nothing of a paused process."""
        found = self.look()
        self.refuse_host_ties(found)
        gpu_bytes = sum(int(process.get("gpu_bytes") or 0) for process in found["processes"])
        self.image_path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.check_space(gpu_bytes)
        remove_old_seal(self.image_path)
        remove_dump(self.image_path)

    def look(self) -> dict[str, Any]:
        """What the container's processes hold, of the GPU and of the host."""
        args = {"cgroup": self.target.cgroup, "container": self.target.id, "host_ties": True}
        return self.agent.request("inventory", args, deadline_s=look_s(self.settings))

    def refuse_host_ties(self, found: dict[str, Any]) -> None:
        """What CRIU would refuse with the options of this call is refused here, with its remedy."""
        engine = str(self.target.state.get("engine", "unknown"))
        runtime = RuntimeFacts(self.low_level.name, self.low_level.version())
        side = host_side.criu_side(self.call, runtime, self.target.config(), self.facts, engine)
        for finding in host_side.refuse_what_criu_refuses(found, self.look, side, self.target.id):
            if finding.outcome == "note":
                self.progress.note(f"process {finding.tie.pid} holds {finding.text}")

    def check_space(self, gpu_bytes: int) -> None:
        """In driver mode the GPU's memory becomes host memory, and CRIU writes both."""
        needed = gpu_bytes + self.target.resident_bytes() + SPARE_BYTES
        free = shutil.disk_usage(self.image_path).free
        if free < needed:
            raise NotEnoughSpace(path=self.image_path, free_bytes=free, needed_bytes=needed)

    def lift_pause(self, undo: Undo) -> None:
        """containerd and CRI-O pause the container first; a frozen process cannot be locked by the driver."""
        if freezer.is_frozen(self.target.cgroup):
            undo.push(self.runtime_verb, "pause")
            self.runtime_verb("resume")

    def freeze_gpu(self, undo: Undo) -> None:
        """The agent locks and checkpoints all GPU processes, or none."""
        args = {
            "container": self.target.id,
            "cgroup": self.target.cgroup,
            "deadline_s": self.settings.deadline_freeze_s,
            "unfreeze_cgroup": freezer.folder_of(self.target.cgroup),
            **self.staged.freeze_args(self.parent),
            **self.group,
        }
        deadline_s = self.settings.deadline_freeze_s + self.staged.copy_s + ANSWER_S
        if self.group:  # as long again until the others of its group have come
            deadline_s += self.settings.deadline_freeze_s
        with self.progress.phase("freeze GPU processes"):
            result = self.agent.request("freeze", args, deadline_s=deadline_s, on_event=self.progress.event)
        self.lease = str(result["lease"])
        self.processes = tuple(GpuProcess.from_json(item) for item in result["processes"])
        self.clock.taken += [(str(item["phase"]), float(item["seconds"])) for item in result["phases"]]
        undo.push(self.release, keep=False)
        self.staged.note_freeze(result, self.progress)

    def dump(self, undo: Undo) -> int:
        """CRIU writes the CPU side; the status is the low-level runtime's, which has said itself what went wrong."""
        options: dict[str, str | bool | None] = {}
        if not self.leaves_running and not self.ends_by_criu:
            self.hold(undo)
            options["leave-running"] = True
        argv = self.call.argv_with(options, program=self.low_level.path)
        with self.progress.phase("dump"), self.clock("dump"):
            done = run_child(argv, deadline_s=self.settings.deadline_checkpoint_s)
        if done.status != 0 or done.has_timed_out:
            remove_dump(self.image_path)
        if done.has_timed_out:
            raise CheckpointFailed(
                what=f"{self.low_level.name} checkpoint of {self.target.id} took longer than "
                f"{self.settings.deadline_checkpoint_s:g} s and was ended"
            )
        return done.status

    def hold(self, undo: Undo) -> None:
        """Freeze the cgroup: between the dump and the end no instruction of the application may run."""
        undo.push(self.runtime_verb, "resume")
        self.runtime_verb("pause")

    def finish(self, key: SigningKey, undo: Undo) -> None:
        """Seal, then end the container; or thaw it, then seal, where it is to go on."""
        if self.leaves_running:
            with self.progress.phase("thaw GPU processes"), self.clock("thaw"):
                undo.run()  # the same way back that an error would take
            self.say_undo_failures(undo)
            self.seal_or_remove(key)
            return
        self.seal_or_remove(key)
        with Shield():  # from here on the container is ended, come what may
            undo.keep()
            if not self.ends_by_criu:
                self.end_container()
            self.forget_lease()
            forget_container(self.settings.run_dir, self.target.id)  # whether or not the engine calls `delete` now

    def end_container(self) -> None:
        """As CRIU does it: SIGKILL for all, no instruction more; then the low-level runtime forgets the container."""
        freezer.kill(self.target.cgroup, self.target.pid)
        self.runtime_verb("delete", "--force")

    # ---- parts -----------------------------------------------------------------------------------

    def seal_or_remove(self, key: SigningKey) -> None:
        """A seal that fails leaves nothing that a restore would take."""
        with self.progress.phase("seal"), self.clock("seal"):
            try:
                vram = self.staged.collect(self.agent, self.progress, self.clock)
                record = self.with_parent(self.record(), vram)
                seal(self.image_path, record, key, on_progress=self.progress.bytes, vram=vram)
                self.generation = record.generation
            except BaseException as problem:
                remove_old_seal(self.image_path)
                if self.ends_by_criu:
                    problem.add_note(f"CRIU had ended the container already; its images are kept in {self.image_path}")
                raise

    def record(self) -> Record:
        """The record of this checkpoint."""
        name, version = self.low_level.name, self.low_level.version()
        record = build_record(
            container_id=self.target.id,
            bundle=self.target.bundle,
            config=read_config(Path(self.target.bundle, "config.json")),
            state=self.target.state,
            facts=self.facts,
            processes=self.processes,
            runtime=LowLevelRuntime(name, version, self.low_level.path),
            phases=[Phase(phase, seconds) for phase, seconds in self.clock.taken],
        )
        record = self.staged.with_objects(record, self.processes)
        return with_groups(record, self.facts, self.staged.groups, self.progress.note)

    def with_parent(self, record: Record, fragment: Path | None) -> Record:
        """The record names the checkpoint that this one has packs of."""
        if self.parent is None or not self.parent.shares_with(fragment):
            return record
        return replace(record, parents=(self.parent.entry,))

    def release(self, *, keep: bool) -> None:
        """Give the lease back: the processes are gone (keep), or go on.

        An agent that was killed meanwhile is started anew; it knows the lease from its journal, and whose it is.
        """
        try:
            self.ask_release(self.agent, keep=keep)
        except AgentUnreachable:
            with AgentClient.connect(deadline_s=look_s(self.settings)) as anew:
                self.ask_release(anew, keep=keep)

    def ask_release(self, agent: AgentClient, *, keep: bool) -> None:
        """The request itself."""
        agent.request(
            "release",
            {"lease": self.lease, "keep": keep},
            deadline_s=self.settings.deadline_freeze_s + ANSWER_S,
            on_event=self.progress.event,
        )

    def forget_lease(self) -> None:
        """The container has ended, whatever the agent says now; its next start finds the processes gone."""
        try:
            self.release(keep=True)
        except VgpuError as problem:
            debug_log.write(self.settings, f"checkpoint {self.target.id}: {problem}")

    def runtime_verb(self, verb: str, *options: str) -> None:
        """A further call of the low-level runtime about this container."""
        self.low_level.call(self.call.global_words, verb, *options, self.target.id, deadline_s=RUNTIME_CALL_S)

    def say_undo_failures(self, undo: Undo) -> None:
        """A GPU process that does not come back is the one thing a user must hear of."""
        if undo.failures:
            lines = "; ".join(str(failure) for failure in undo.failures)
            raise CheckpointFailed(what=f"the GPU side of {self.target.id} could not be brought back: {lines}")

    def remember(self) -> None:
        """`vgpu ps` shows the last checkpoint; the next one counts on."""
        seen.note(self.settings, self.target.id, self.generation)
        state_file.note_checkpoint(self.target.id, str(self.image_path), seconds=round(self.clock.seconds, 3))
        self.clock.write(self.settings, "checkpoint", self.target.id)


def read_config(path: Path) -> dict[str, Any]:
    """The bundle's config.json, whose security-relevant part is signed."""
    try:
        return security_config.load(path.read_bytes())
    except ValueError as problem:
        raise BadConfiguration(path=path, what=str(problem)) from problem


def remove_dump(image_path: Path) -> None:
    """Take away CRIU's images, so that nothing there passes for a checkpoint; logs stay for the user.

    What has another name in the store goes too: nobody may write over it.
    """
    for entry in os.scandir(image_path):
        is_shared = entry.is_file(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_nlink > 1
        is_image = entry.name.endswith(".img") or is_ours(entry.name)
        if is_shared or (is_image and entry.is_file(follow_symlinks=False)):
            Path(entry.path).unlink()
