"""The task of a container: what state it is in, pausing and going on, ending it, starting it from CRIU's images.

Thin over containerd's task service. A restored task is started from a folder of ours (`criu_image_path`), not from the
content store: containerd would unpack into a temporary folder that it never removes.
Called by `checkpointing` and `restoring`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import TYPE_CHECKING, Any

from containerd_integration.api.connection import is_missing
from containerd_integration.api.wire import message, packed
from vgpu_errors import DeadlineExceeded, EngineFailed, UnsupportedRequest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from containerd_integration.api.connection import Connection
    from containerd_integration.work_folder import WorkFolder

UNKNOWN, CREATED, RUNNING, STOPPED, PAUSED, PAUSING = 0, 1, 2, 3, 4, 5
END_S = 30.0
SOON_S = 5.0
POLL_S = 0.02
# Pipes whose other end containerd's shim empties: see _empty_input.
NO_LOG = "file:///dev/null"
RUNTIME_OPTIONS = "containerd.runc.v1.Options"


def status_of(connection: Connection, container: str) -> int | None:
    """The task's status, or None where the container has no task."""
    try:
        return int(connection.call("tasks", "Get", container_id=container).process.status)
    except EngineFailed as problem:
        if is_missing(problem):
            return None
        raise


def wait_for(connection: Connection, container: str, status: int, *, deadline_s: float = END_S) -> None:
    """Wait until the task has this status."""
    ends = time.monotonic() + deadline_s
    while status_of(connection, container) != status:
        if time.monotonic() > ends:
            raise DeadlineExceeded(phase=f"the wait for the task {container}", seconds=f"{deadline_s:g}")
        time.sleep(POLL_S)


def settled(connection: Connection, container: str, *, deadline_s: float = END_S) -> int | None:
    """The task's status once its runtime is at rest, or None where there is no task.

    While the runtime checkpoints or restores, the shim answers nothing and containerd gives up asking it after 2 s.
    """
    ends = time.monotonic() + deadline_s
    while (status := status_of(connection, container)) == UNKNOWN:
        if time.monotonic() > ends:
            raise DeadlineExceeded(phase=f"the wait for the runtime of {container}", seconds=f"{deadline_s:g}")
        time.sleep(POLL_S)
    return status


def ends_soon(connection: Connection, container: str) -> bool:
    """Whether a task ends that its runtime has just ended, as it seems: containerd hears of an end a moment later."""
    ends = time.monotonic() + SOON_S
    while status_of(connection, container) not in (STOPPED, None):
        if time.monotonic() > ends:
            return False
        time.sleep(POLL_S)
    return True


def remove_task(connection: Connection, container: str, *, deadline_s: float = END_S) -> None:
    """End what is left of a task and forget it; a container without a task is left alone."""
    if settled(connection, container, deadline_s=deadline_s) is None:
        return
    with contextlib.suppress(EngineFailed):  # ended already
        connection.call("tasks", "Kill", container_id=container, signal=signal.SIGKILL, all=True)
    if status_of(connection, container) not in (CREATED, None):  # one that never ran ends with Delete alone
        wait_for(connection, container, STOPPED)
    connection.call("tasks", "Delete", container_id=container)


def start_from(
    connection: Connection,
    container: Any,
    rootfs: Sequence[Any],
    folder: WorkFolder,
    *,
    log_uri: str,
    deadline_s: float,
) -> int:
    """Create and start the task from the folder's images; its pid. The runtime's restore happens in Start."""
    options = with_images(container.runtime.options, folder.images, folder.work)
    created = {"container_id": container.id, "rootfs": rootfs, "options": options}
    with _empty_input(folder.path / "stdin") as stdin:
        streams = {"stdin": stdin, "stdout": log_uri, "stderr": log_uri}
        connection.call("tasks", "Create", **created, **streams, deadline_s=deadline_s)
        try:
            return int(connection.call("tasks", "Start", container_id=container.id, deadline_s=deadline_s).pid)
        except BaseException as problem:
            try:
                remove_task(connection, container.id, deadline_s=deadline_s)
            except (EngineFailed, DeadlineExceeded) as failure:
                problem.add_note(f"while removing the task: {failure}")
            raise


@contextlib.contextmanager
def _empty_input(path: Path) -> Iterator[str]:
    """A pipe that ends when the task runs.

    Without one the shim would give the task the host's /dev/null, and CRIU cannot dump a file from outside of the
    container when it is checkpointed again.
    """
    os.mkfifo(path, 0o600)
    descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        yield str(path)
    finally:
        os.close(descriptor)


def with_images(runtime_options: Any, images: Path, work: Path) -> Any:
    """The container's runtime options for this one start, with the place of the images in them."""
    if runtime_options.type_url not in ("", RUNTIME_OPTIONS):
        raise UnsupportedRequest(
            what=f"the container's runtime takes options of the type {runtime_options.type_url}, not runc's",
            remedy="Use a container of the runtime io.containerd.runc.v2.",
        )
    options = message(RUNTIME_OPTIONS).FromString(runtime_options.value)
    options.criu_image_path, options.criu_work_path = str(images), str(work)
    return packed(options)
