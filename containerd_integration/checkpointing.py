"""`vgpu containerd checkpoint`: a running container of containerd's as a checkpoint image, or as one file.

The steps, and what a crash after each leaves behind:

1. look      container, task, base image; all that can be refused is refused     the container as it was
2. room      lease, folder                                                       the same; both are swept or expire
3. pause     as ctr does, so that files and memory belong together               a paused container: `ctr task resume`
4. dump      the runtime's checkpoint into our folder, sealed by vgpu-runtime    the same, or an ended one; the folder whole
5. files     what the container changed of its image, as a layer                 the same
6. go on     (--leave-running) the pause lifted                                  a running container
7. store     blobs into containerd's content store, or into FILE.partial         no image, no file of that name
8. name      image created, or file renamed: the commit                          a whole checkpoint
9. clear     ended task, folder and lease removed                                swept by the next command

An error undoes the steps from the last one back, and so does a signal: a container that had ended is started again from
the sealed folder, so a failed checkpoint leaves it running. A runtime that is at work is not called off, its end is waited
for: only then is it known what has become of the container. Pauses only what runs; what its user paused stays paused.
Called by the verb `containerd`.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from containerd_integration import base_image, tasks
from containerd_integration.api.connection import is_missing
from containerd_integration.api.content import ContentStore
from containerd_integration.api.wire import message, packed, wire_descriptor
from containerd_integration.exported_file import write_file
from containerd_integration.flat_tar import FlatTar
from containerd_integration.interruption import Interruption
from containerd_integration.leases import leased
from containerd_integration.watcher import Silent
from containerd_integration.work_folder import work_folder
from image_format import canonical_json
from image_format.archives import containerd_index
from image_format.archives.containerd_index import CheckpointIndex, Descriptor
from image_format.file_names import SIGNATURE_NAME
from vgpu_errors import CheckpointFailed, EngineFailed, NoSuchContainer, UnsupportedRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from containerd_integration.api.connection import Connection
    from containerd_integration.watcher import Watcher
    from containerd_integration.work_folder import WorkFolder
    from gpu_state.undo import Undo

WORK_DIRECTORY = Path("/var/lib/vgpu/containerd")
LEASE_HOURS = 24.0
DUMP_S = 1800.0
DIFF_S = 900.0
CHECKPOINT_OPTIONS = "containerd.runc.v1.CheckpointOptions"
CHECKPOINT_LABEL = "containerd.io/checkpoint"


@dataclass(frozen=True)
class Wish:
    """What the command line asked for; either `reference` or `export` is given."""

    container: str
    reference: str = ""
    export: Path | None = None
    compression: str = "none"
    leaves_running: bool = False
    keeps_tcp: bool = False
    keeps_file_locks: bool = False
    carries_image: bool = True
    labels: tuple[tuple[str, str], ...] = ()
    work_directory: Path = WORK_DIRECTORY
    deadline_s: float = DUMP_S


@dataclass
class Made:
    """What came out of it."""

    index: Descriptor
    entries: tuple[Descriptor, ...]
    pause_s: float = 0.0
    notes: list[str] = field(default_factory=list)


def checkpoint(connection: Connection, wish: Wish, watcher: Watcher | None = None) -> Made:
    """Make the checkpoint."""
    return _Checkpointing(connection, wish, watcher or Silent()).run()


def recover(connection: Connection, container: Any, folder: WorkFolder, *, deadline_s: float = DUMP_S) -> int:
    """Start a container that had ended again from the folder with its sealed state; its pid."""
    if tasks.settled(connection, container.id) not in (tasks.STOPPED, None):
        raise UnsupportedRequest(
            what=f"{container.id} has not ended",
            remedy=f"It goes on by itself and needs no folder: 'rm -r {folder.path}'.",
        )
    tasks.remove_task(connection, container.id)
    key = {"snapshotter": container.snapshotter, "key": container.snapshot_key}
    rootfs = connection.call("snapshots", "Mounts", **key).mounts
    pid = tasks.start_from(connection, container, rootfs, folder, log_uri=tasks.NO_LOG, deadline_s=deadline_s)
    folder.let_go()
    return pid


class _Checkpointing:
    """One checkpoint in progress."""

    def __init__(self, connection: Connection, wish: Wish, watcher: Watcher) -> None:
        self.connection, self.wish, self.watcher = connection, wish, watcher
        self.notes: list[str] = []
        self.entries: list[Descriptor] = []
        self.paused_at = 0.0
        self.pause_s = 0.0
        self.has_ended = False

    def run(self) -> Made:
        """All steps in their order."""
        self.look()
        with (
            Interruption() as self.interruption,
            leased(self.connection, "checkpoint", hours=LEASE_HOURS) as lease,
            work_folder(self.wish.work_directory, "checkpoint-") as self.folder,
        ):
            self.store = ContentStore(self.connection, lease)
            with self.interruption.undoing() as undo:
                self.pause(undo)
                self.dump(undo)
                self.take_files()
                if self.wish.leaves_running:
                    self.go_on(undo)
                index = self.store_all()
                undo.keep()
            self.remove_ended()
        return Made(index, tuple(self.entries), self.pause_s, self.notes)

    # ---- steps -----------------------------------------------------------------------------------

    def look(self) -> None:
        """Everything that can be refused is refused here, while nothing has been touched."""
        self.container = self.find_container()
        status = tasks.status_of(self.connection, self.container.id)
        if status not in (tasks.RUNNING, tasks.PAUSED):
            raise UnsupportedRequest(what=f"{self.container.id} does not run", remedy="Start its task first.")
        self.was_running = status == tasks.RUNNING
        tasks.with_images(self.container.runtime.options, Path("/"), Path("/"))  # refuses what could not come back
        if self.wish.reference and base_image.find_target(self.connection, self.wish.reference) is not None:
            raise UnsupportedRequest(
                what=f"there is an image {self.wish.reference} already", remedy="Remove it, or give another name."
            )
        if self.wish.export is not None and not self.wish.export.absolute().parent.is_dir():
            raise UnsupportedRequest(
                what=f"{self.wish.export} has no folder to lie in", remedy="Make the folder first."
            )

    def find_container(self) -> Any:
        """The container as containerd has it."""
        try:
            return self.connection.call("containers", "Get", id=self.wish.container).container
        except EngineFailed as problem:
            if is_missing(problem):
                raise NoSuchContainer(
                    container=self.wish.container,
                    remedy=f"'ctr -n {self.connection.namespace} container ls' lists them; --namespace names another namespace.",
                ) from problem
            raise

    def pause(self, undo: Undo) -> None:
        """Files and memory of one moment; the shim lifts the pause while the GPU side is frozen."""
        if self.was_running:
            with self.watcher.phase("pause"), self.interruption.held():
                undo.push(self.resume)
                self.paused_at = time.monotonic()
                self.connection.call("tasks", "Pause", container_id=self.container.id)

    def dump(self, undo: Undo) -> None:
        """The runtime's checkpoint; a container that is to end has ended when this returns, its state sealed."""
        undo.push(self.start_again)
        options = packed(self.checkpoint_options(place=True))
        if not self.wish.leaves_running:
            self.folder.need(self.container.id, self.connection.namespace)
        with self.watcher.phase("checkpoint"):
            try:
                self.connection.call(
                    "tasks",
                    "Checkpoint",
                    container_id=self.container.id,
                    options=options,
                    deadline_s=self.wish.deadline_s,
                )
                if not self.wish.leaves_running:
                    self.has_ended = True
                    tasks.wait_for(self.connection, self.container.id, tasks.STOPPED)
            except BaseException:
                self.interruption.hold()
                self.has_ended = self.has_ended or self.ended_meanwhile()
                if not self.has_ended:
                    self.folder.let_go()
                raise

    def ended_meanwhile(self) -> bool:
        """A call that was given up here goes on in the runtime and may come to its end: sealed, and the container with it.

        Where that is not known at the end of the time either, this raises, and the folder stays needed.
        """
        tasks.settled(self.connection, self.container.id, deadline_s=self.wish.deadline_s)
        if self.wish.leaves_running or not (self.folder.images / SIGNATURE_NAME).exists():
            return False
        return tasks.ends_soon(self.connection, self.container.id)

    def take_files(self) -> None:
        """The container's changes of its image as a layer under the lease."""
        snapshots = {"snapshotter": self.container.snapshotter}
        key = self.container.snapshot_key
        with self.watcher.phase("files"):
            parent = self.connection.call("snapshots", "Stat", **snapshots, key=key).info.parent
            view = f"vgpu-view-{uuid.uuid4().hex}"
            lower = self.connection.call("snapshots", "View", **snapshots, key=view, parent=parent).mounts
            try:
                upper = self.connection.call("snapshots", "Mounts", **snapshots, key=key).mounts
                reference = f"vgpu-files-{uuid.uuid4().hex}"
                layer = self.connection.call(
                    "diff",
                    "Diff",
                    left=lower,
                    right=upper,
                    media_type=containerd_index.RW_TYPE,
                    ref=reference,
                    deadline_s=DIFF_S,
                ).diff
            finally:
                with contextlib.suppress(EngineFailed):  # goes with the lease
                    self.connection.call("snapshots", "Remove", **snapshots, key=view)
        self.files = Descriptor(layer.media_type, layer.digest, layer.size)

    def go_on(self, undo: Undo) -> None:
        """The rest happens beside the running application."""
        with self.interruption.held():
            if self.was_running:
                with self.watcher.phase("resume"):
                    self.resume()
            undo.keep()

    def store_all(self) -> Descriptor:
        """The blobs, then the one write that makes them a checkpoint."""
        self.entries = [*self.documents(), self.files]
        if self.wish.carries_image:
            self.entries += self.image()
        tar = FlatTar(self.folder.images)
        with self.watcher.phase("hash"):
            criu = tar.described(self.counter(tar.size))
        self.entries.append(criu)
        data = CheckpointIndex(tuple(self.entries), self.annotations()).to_bytes()
        if self.wish.export is not None:
            with self.watcher.phase("export"):
                write_file(
                    self.wish.export, data, self.store, self.all_blobs(), tar, criu,
                    compression=self.wish.compression, on_bytes=self.counter(tar.size),
                    on_commit=self.interruption.hold,
                )  # fmt: skip
            return containerd_index.described(data)
        with self.watcher.phase("store"):
            self.store.write(criu, tar.pieces(), on_bytes=self.counter(tar.size))
        labels = containerd_index.gc_labels(self.entries)
        index = self.store.write_document(containerd_index.INDEX_TYPE, data, labels)
        self.name_image(index)
        return index

    def remove_ended(self) -> None:
        """The checkpoint is whole: forget the ended task, and the folder with it."""
        self.folder.let_go()
        if self.wish.leaves_running:
            return
        try:
            self.connection.call("tasks", "Delete", container_id=self.container.id)
        except EngineFailed as problem:
            self.notes.append(f"the ended task could not be removed: {problem}")

    # ---- parts -----------------------------------------------------------------------------------

    def resume(self) -> None:
        """Lift the pause that `pause` made; a container that has ended has none."""
        self.pause_s = time.monotonic() - self.paused_at
        if tasks.status_of(self.connection, self.container.id) in (tasks.STOPPED, None):
            return
        try:
            self.connection.call("tasks", "Resume", container_id=self.container.id)
        except EngineFailed:
            if tasks.status_of(self.connection, self.container.id) != tasks.RUNNING:
                raise

    def start_again(self) -> None:
        """Undo of an ending: the sealed folder is whole, so the container comes back from it."""
        if not self.has_ended:
            return
        try:
            recover(self.connection, self.container, self.folder, deadline_s=self.wish.deadline_s)
        except BaseException as problem:
            raise CheckpointFailed(
                what=f"{self.container.id} had ended and did not come back: {problem}",
                remedy=f"Its whole state is kept: mend the cause and run 'vgpu containerd recover {self.folder.path}'.",
            ) from problem
        self.has_ended = False

    def checkpoint_options(self, *, place: bool) -> Any:
        """What the runtime is told; the place is this node's own affair and does not travel."""
        options = message(CHECKPOINT_OPTIONS)(
            exit=not self.wish.leaves_running, open_tcp=self.wish.keeps_tcp, file_locks=self.wish.keeps_file_locks
        )
        if place:
            options.image_path, options.work_path = str(self.folder.images), str(self.folder.work)
        return options

    def documents(self) -> Iterator[Descriptor]:
        """The small blobs, as ctr writes them."""
        spec = self.container.spec.SerializeToString()
        yield self.store.write_document(containerd_index.SPEC_TYPE, spec)
        options = packed(self.checkpoint_options(place=False)).SerializeToString()
        yield self.store.write_document(containerd_index.OPTIONS_TYPE, options)
        if self.container.runtime.options.value:
            runtime = self.container.runtime.options.SerializeToString()
            yield self.store.write_document(containerd_index.RUNTIME_OPTIONS_TYPE, runtime)

    def image(self) -> list[Descriptor]:
        """The manifest of the base image, where the node holds all of it."""
        name = self.container.image
        target = base_image.find_target(self.connection, name) if name else None
        if target is None:
            self.notes.append(f"the image {name or '(none)'} is not on this node and does not travel along")
            return []
        manifest = base_image.manifest_of(self.store, target, where=name)
        missing = base_image.missing_blobs(self.store, manifest, where=name)
        if missing:
            self.notes.append(
                f"the image {name} does not travel along: {len(missing)} of its blobs are not on this node"
            )
            return []
        return [manifest]

    def all_blobs(self) -> Iterator[Descriptor]:
        """Every blob of an export but the CRIU tar, each once."""
        seen: set[str] = set()
        for entry in self.entries[:-1]:
            is_image = entry.media_type in containerd_index.MANIFEST_TYPES
            inside = base_image.blobs_of(self.store, entry, where=self.container.image) if is_image else [entry]
            for blob in inside:
                if blob.digest not in seen:
                    seen.add(blob.digest)
                    yield blob

    def annotations(self) -> tuple[tuple[str, str], ...]:
        """What `ctr container restore` needs to know, and what ours knows beyond it."""
        labels = canonical_json.write(dict(self.container.labels)).decode()
        found = {
            containerd_index.IMAGE_KEY: self.container.image,
            containerd_index.RUNTIME_KEY: self.container.runtime.name,
            containerd_index.SNAPSHOTTER_KEY: self.container.snapshotter,
            containerd_index.LABELS_KEY: labels,
            containerd_index.NAME_KEY: self.container.id,
        }
        return tuple(sorted(found.items()))

    def name_image(self, index: Descriptor) -> None:
        """The commit: from here on there is a checkpoint of that name."""
        labels = {CHECKPOINT_LABEL: "true", **dict(self.wish.labels)}
        image = message(base_image.IMAGE)(name=self.wish.reference, labels=labels, target=wire_descriptor(index))
        self.interruption.hold()
        self.connection.call("images", "Create", image=image)

    def counter(self, whole: int) -> Callable[[int], object]:
        """Adds pieces up for the watcher."""
        done = 0

        def count(piece: int) -> None:
            nonlocal done
            done += piece
            self.watcher.bytes(done, whole)

        return count
