"""`vgpu containerd restore`: a checkpoint image, here or in a registry, or an exported file, as a running container.

The steps, and what a crash after each leaves behind:

1. look      image, registry or file, its index; a container of that name is refused        nothing
2. content   lease, base image under its name and unpacked, CRIU's files          an image that is whole; a folder and a
             in a folder of ours                                                   lease that are swept or expire
3. files     snapshot for the container, with what the container had changed       the same, under the lease
4. container its record: configuration, runtime options, labels                    a container without a task
5. start     the runtime's restore: verifies, restores, loads the GPU side         a running container
6. clear     folder and lease removed                                              swept by the next command

An error or a signal undoes the steps from the last one back; the checkpoint stays as it is. Signature, digests, configuration and
the node's fitness are checked by vgpu-runtime in step 5, before CRIU sees anything. Refuses containers with a terminal.
Called by the verb `containerd`.
"""

from __future__ import annotations

import contextlib
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from google.protobuf.message import DecodeError

from containerd_integration import base_image, cgroup_choice, criu_options, restored_spec, tasks
from containerd_integration.api.connection import is_missing, is_there_already
from containerd_integration.api.content import ContentStore
from containerd_integration.api.wire import message, wire_descriptor
from containerd_integration.checkpointing import CHECKPOINT_OPTIONS, LEASE_HOURS, WORK_DIRECTORY
from containerd_integration.flat_tar import unpack
from containerd_integration.imported_file import ImportedFile
from containerd_integration.interruption import Interruption
from containerd_integration.leases import leased
from containerd_integration.remote_image import RemoteImage, is_local
from containerd_integration.watcher import Silent
from containerd_integration.work_folder import work_folder
from image_format.archives import containerd_index
from vgpu_errors import (
    ContentMismatch,
    EngineFailed,
    ImageError,
    NoSuchImage,
    RestoreFailed,
    UnsupportedRequest,
    VgpuError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from containerd_integration.api.connection import Connection
    from containerd_integration.watcher import Watcher
    from gpu_state.undo import Undo
    from image_format.archives.containerd_index import CheckpointIndex, Descriptor
    from image_format.registry import Registry

START_S = 600.0
MAX_LOG_LINES = 10
FILES_S = 900.0
CONTAINER = "containerd.services.containers.v1.Container"
DEFAULT_SNAPSHOTTER = "overlayfs"


@dataclass(frozen=True)
class Wish:
    """What the command line asked for; either `reference` or `file` is given."""

    name: str
    reference: str = ""
    file: Path | None = None
    open_registry: Callable[[str], Registry] | None = None
    """Where an image is looked for that containerd does not have; None: nowhere."""
    snapshotter: str = ""
    labels: tuple[tuple[str, str], ...] = ()
    log_uri: str = tasks.NO_LOG
    keeps_tcp: bool = False
    keeps_file_locks: bool = False
    work_directory: Path = WORK_DIRECTORY
    deadline_s: float = START_S


@dataclass(frozen=True)
class Restored:
    """What came out of it."""

    pid: int
    image: str
    snapshotter: str


def restore(connection: Connection, wish: Wish, watcher: Watcher | None = None) -> Restored:
    """Bring the container back."""
    return _Restoring(connection, wish, watcher or Silent()).run()


class _Restoring:
    """One restore in progress."""

    def __init__(self, connection: Connection, wish: Wish, watcher: Watcher) -> None:
        self.connection, self.wish, self.watcher = connection, wish, watcher
        self.where = str(wish.file or wish.reference)
        self.source: ImportedFile | RemoteImage | None = None
        """Where the checkpoint is, unless in the content store."""

    def run(self) -> Restored:
        """All steps in their order."""
        self.refuse_taken_name()
        with (
            Interruption() as self.interruption,
            leased(self.connection, "restore", hours=LEASE_HOURS) as lease,
            work_folder(self.wish.work_directory, "restore-") as self.folder,
        ):
            self.store = ContentStore(self.connection, lease)
            with self.interruption.undoing() as undo:
                with contextlib.ExitStack() as connections:
                    self.index = self.read_index(connections)
                    self.fetch_content()
                self.read_documents()
                rootfs = self.prepare_files(undo)
                container = self.create_container(undo)
                undo.push(tasks.remove_task, self.connection, container.id, deadline_s=self.wish.deadline_s)
                pid = self.start(container, rootfs)
                undo.keep()
        return Restored(pid, self.index.image_name, self.snapshotter)

    # ---- steps -----------------------------------------------------------------------------------

    def refuse_taken_name(self) -> None:
        """Before anything is read: the name must be free."""
        with contextlib.suppress(EngineFailed):
            self.connection.call("containers", "Get", id=self.wish.name)
            raise UnsupportedRequest(
                what=f"there is a container {self.wish.name} already",
                remedy=f"Remove it with 'ctr -n {self.connection.namespace} container rm', or give another name.",
            )

    def read_index(self, connections: contextlib.ExitStack) -> CheckpointIndex:
        """The checkpoint's index, out of the file, of the content store or of a registry."""
        if self.wish.file is not None:
            self.source = ImportedFile(self.wish.file)
            return self.source.index
        target = base_image.find_target(self.connection, self.wish.reference)
        if target is None:
            self.source = self.remote_image(connections)
            return self.source.index
        data = self.store.document(target.digest, target.size, where=self.where)
        return containerd_index.parse(data, where=self.where)

    def remote_image(self, connections: contextlib.ExitStack) -> RemoteImage:
        """The image in its registry."""
        if self.wish.open_registry is None or is_local(self.wish.reference):
            raise NoSuchImage(
                path=self.wish.reference,
                what=f"containerd has no such image in the namespace {self.connection.namespace}",
                remedy="'ctr images ls' lists those that are there; a name with a registry's host is pulled.",
            )
        try:
            registry = connections.enter_context(self.wish.open_registry(self.wish.reference))
            return RemoteImage(registry, has_image=self.has_image)
        except VgpuError as problem:
            problem.add_note(f"containerd has no image {self.wish.reference}, so it was asked for in its registry")
            raise

    def has_image(self, name: str) -> bool:
        """The node has an image of this name, which is then the container's."""
        return bool(name) and base_image.find_target(self.connection, name) is not None

    def fetch_content(self) -> None:
        """Everything into the content store, and CRIU's files into the folder."""
        criu = self.index.need(containerd_index.CRIU_TYPE, where=self.where)
        with self.watcher.phase("unpack"):
            if self.source is not None:
                self.source.bring_in(self.store, self.folder.images, on_progress=self.watcher.bytes)
                return
            digest = hashlib.sha256()
            unpack(self._hashed(criu, digest), self.folder.images, where=self.where)
            if f"sha256:{digest.hexdigest()}" != criu.digest:
                raise ContentMismatch(where=self.where, what="sha256 of the CRIU tar")

    def _hashed(self, criu: Descriptor, digest: Any) -> Iterator[bytes]:
        done = 0
        for piece in self.store.stream(criu.digest):
            digest.update(piece)
            done += len(piece)
            self.watcher.bytes(done, criu.size)
            yield piece

    def read_documents(self) -> None:
        """Configuration, runtime options and checkpoint options of the container."""
        self.spec = self.read_any(containerd_index.SPEC_TYPE)
        options = self.read_any(containerd_index.OPTIONS_TYPE)
        made = message(CHECKPOINT_OPTIONS).FromString(options.value if options is not None else b"")
        if self.spec is None:
            raise NoSuchImage(path=self.where, what="it has no configuration of the container")
        if restored_spec.has_terminal(self.spec.value):
            raise UnsupportedRequest(
                what="the container has a terminal, which a restored one would have to get from this command",
                remedy="Restore it with 'ctr container restore --live'.",
            )
        self.spec.value = criu_options.with_options(
            self.own_cgroup(self.spec.value),
            keeps_tcp=made.open_tcp or self.wish.keeps_tcp,
            keeps_file_locks=made.file_locks or self.wish.keeps_file_locks,
        )

    def own_cgroup(self, spec: bytes) -> bytes:
        """The configuration with a cgroup that no other container is in."""
        options = self.read_any(containerd_index.RUNTIME_OPTIONS_TYPE)
        runtime = message(tasks.RUNTIME_OPTIONS).FromString(options.value).binary_name if options is not None else ""
        if cgroup_choice.moves_cgroups(runtime or "runc"):
            return restored_spec.renamed(spec, self.index.annotation(containerd_index.NAME_KEY), self.wish.name)
        path = restored_spec.cgroups_path(spec)
        if cgroup_choice.is_populated(path):
            raise UnsupportedRequest(
                what=f"the cgroup {path} of the checkpoint has processes in it, and this runc cannot use another one",
                remedy="End the container that runs there, or install runc 1.2 or newer.",
            )
        return spec

    def read_any(self, media_type: str) -> Any:
        """The protobuf Any in a small blob, or None where the checkpoint has none."""
        blob = self.index.find(media_type)
        if blob is None:
            return None
        data = self.store.document(blob.digest, blob.size, where=f"{self.where}: {blob.digest}")
        try:
            return message("google.protobuf.Any").FromString(data)
        except DecodeError as problem:
            raise ImageError(where=f"{self.where}: {media_type}", what="is no protobuf message") from problem

    def prepare_files(self, undo: Undo) -> Any:
        """The container's root file system: the image's, and what the container had changed."""
        self.snapshotter = (
            self.wish.snapshotter or self.index.annotation(containerd_index.SNAPSHOTTER_KEY) or DEFAULT_SNAPSHOTTER
        )
        with self.watcher.phase("files"):
            parent = base_image.unpacked(
                self.connection, self.store, self.base_manifest(), self.snapshotter, where=self.index.image_name
            )
            place: dict[str, Any] = {"snapshotter": self.snapshotter, "key": self.wish.name}
            with self.interruption.held():
                mounts = self.connection.call("snapshots", "Prepare", **place, parent=parent).mounts
                undo.push(self.connection.call, "snapshots", "Remove", **place)
            changed = self.index.find(containerd_index.RW_TYPE)
            if changed is not None:
                self.connection.call("diff", "Apply", diff=wire_descriptor(changed), mounts=mounts, deadline_s=FILES_S)
        return mounts

    def base_manifest(self) -> Descriptor:
        """The base image's manifest: the node's own, or the checkpoint's, which then gets its name."""
        name = self.index.image_name
        carried = self.index.find(*containerd_index.MANIFEST_TYPES, *containerd_index.INDEX_TYPES)
        target = base_image.find_target(self.connection, name) if name else None
        if target is not None:
            return base_image.manifest_of(self.store, target, where=name)
        if carried is None:
            raise NoSuchImage(
                path=name or self.where,
                what="the container's image is neither on this node nor in the checkpoint",
                remedy=f"Pull it with 'ctr -n {self.connection.namespace} image pull {name}'.",
            )
        manifest = base_image.manifest_of(self.store, carried, where=self.where)
        if name:
            base_image.make_image(self.connection, name, manifest)
        return manifest

    def create_container(self, undo: Undo) -> Any:
        """The container's record."""
        container = message(CONTAINER)(
            id=self.wish.name,
            labels={**self.index.container_labels, **dict(self.wish.labels)},
            image=self.index.image_name,
            spec=self.spec,
            snapshotter=self.snapshotter,
            snapshot_key=self.wish.name,
        )
        container.runtime.name = self.index.annotation(containerd_index.RUNTIME_KEY) or "io.containerd.runc.v2"
        options = self.read_any(containerd_index.RUNTIME_OPTIONS_TYPE)
        if options is not None:
            container.runtime.options.CopyFrom(options)
        try:
            with self.interruption.held():
                self.connection.call("containers", "Create", container=container)
                undo.push(self.connection.call, "containers", "Delete", id=self.wish.name)
        except EngineFailed as problem:
            if is_there_already(problem):
                raise UnsupportedRequest(what=f"there is a container {self.wish.name} already") from problem
            raise
        return container

    def start(self, container: Any, rootfs: Any) -> int:
        """The runtime's restore; its reason becomes ours."""
        with self.watcher.phase("restore"):
            try:
                return tasks.start_from(
                    self.connection,
                    container,
                    rootfs,
                    self.folder,
                    log_uri=self.wish.log_uri,
                    deadline_s=self.wish.deadline_s,
                )
            except EngineFailed as problem:
                if is_missing(problem):
                    raise
                failed = RestoreFailed(what=f"{self.wish.name} was not restored: {problem.fields.get('what')}")
                for line in criu_errors(self.folder.work / "restore.log"):
                    failed.add_note(line)
                raise failed from problem


def criu_errors(log: Path) -> list[str]:
    """The lines of CRIU's log that say what went wrong; the log itself goes with the folder."""
    try:
        text = log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return [line.strip() for line in text.splitlines() if "Error (" in line][-MAX_LOG_LINES:]
