"""The agent's side of a staging worker: starts it, sends requests with descriptors, cancels and kills it at a deadline.

Whatever way the worker ends, what it had not committed is removed here: files of packs, and a pool that nobody needs.
Device memory that it held is freed by its end. Used by staging_session.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import vgpu_errors
from gpu_state.driver_location import worker_environment
from gpu_state.staging.fd_lines import FDS_A_LINE, FdLines
from image_format.file_names import PARTIAL_PREFIX
from vgpu_errors import StagingWorkerLost

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType
    from typing import Self

    from gpu_state.deadline import Deadline

    OnEvent = Callable[[dict[str, Any]], None]

GRACE_S = 2.0
_SLICE_S = 0.05
_START = "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from gpu_state.staging.worker import main; sys.exit(main(int(sys.argv[2]), *sys.argv[3:]))"
_LOST: tuple[dict[str, Any], list[int]] = ({}, [])


class _Pending:
    """One request that waits for its answer."""

    def __init__(self, number: int, on_event: OnEvent | None) -> None:
        self.number = number
        self.on_event = on_event
        self.is_done = threading.Event()
        self.reply, self.fds = _LOST


class StagingWorker:
    """One running worker. Requests may come from several threads; the worker does one after the other."""

    def __init__(self, driver_dir: str | None = None, *, hasher: str | None = None) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-IS", "-c", _START, json.dumps(sys.path), str(theirs.fileno())]
            self.process = subprocess.Popen(
                [*command, hasher] if hasher else command,
                pass_fds=[theirs.fileno()],
                env=worker_environment(driver_dir),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                cwd="/",
            )
        self._lines = FdLines(ours)
        self._connection = ours
        self._guard = threading.Lock()
        self._pending: dict[int, _Pending] = {}
        self._last_id = 0
        self._is_over = False
        self._uncommitted: Path | None = None
        self._pool: Path | None = None
        self.spare_pool: Path | None = None
        self._reader = threading.Thread(target=self._read, daemon=True, name="staging-worker-replies")
        self._reader.start()

    # ---- requests --------------------------------------------------------------------------------

    def request(
        self,
        verb: str,
        args: Mapping[str, Any],
        deadline: Deadline,
        *,
        fds: Sequence[int] = (),
        on_event: OnEvent | None = None,
    ) -> dict[str, Any]:
        """Run one verb. At the deadline it is cancelled, and killed with the worker when it does not hear that."""
        return self._wait(verb, self._send(verb, args, fds, on_event), deadline)[0]

    def prepare(
        self, store: Mapping[str, Any] | None, uuids: Sequence[str], size: int, deadline: Deadline
    ) -> dict[str, Any]:
        """Contexts, ring or pool, ahead of the freeze.

        `store`: {"kind": "packs", "directory", "parents"?} or {"kind": "memory", "name", "folder"?}; a size of 0 means that
        of the objects that were sent.
        """
        args: dict[str, Any] = {"uuids": list(uuids), "bytes": size}
        if store is not None:
            args["store"] = dict(store)
            self.expects(store)
        result = self.request("prepare", args, deadline)
        if result["pool"] is not None:
            self._pool = Path(result["pool"])
        return result

    def reserve(self, size: int, name: str, deadline: Deadline) -> None:
        """Contexts, kernels and a pool of that size, before anybody needs them; a worker for one container after the other."""
        self.spare_pool = Path(self.request("reserve", {"bytes": size, "name": name}, deadline)["pool"])

    def reset(self, deadline: Deadline, *, keeps_pool: bool) -> None:
        """Be ready for another container: what was not committed is removed, and a pool that is not the worker's own."""
        self.request("reset", {"keeps_pool": keeps_pool}, deadline)
        self._remove_uncommitted()
        self._uncommitted = self._pool = None

    @property
    def has_uncommitted(self) -> bool:
        """Files of packs that nobody is to find are there."""
        return self._uncommitted is not None

    def owns(self, pool: Path) -> bool:
        """The pool is the one that the worker was reserved with."""
        return pool == self.spare_pool

    @property
    def serves_own_pool(self) -> bool:
        """The pool that it was reserved with is in use."""
        return self._pool is not None and self._pool == self.spare_pool

    def expects(self, store: Mapping[str, Any]) -> None:
        """What is in this store is to be removed unless it is committed."""
        self._uncommitted = Path(store["directory"]) if store["kind"] == "packs" else None

    def send_objects(self, objects: Sequence[Mapping[str, Any]], fds: Sequence[int], deadline: Deadline) -> None:
        """Objects {"name", "size", "uuid", "device", "address"} with a descriptor each; the descriptors stay the caller's."""
        for start in range(0, len(objects), FDS_A_LINE):
            part = [dict(item) for item in objects[start : start + FDS_A_LINE]]
            self.request("objects", {"objects": part}, deadline, fds=fds[start : start + FDS_A_LINE])

    def export(self, names: Sequence[str], deadline: Deadline) -> dict[str, int]:
        """Descriptors of created objects; the caller's."""
        found: dict[str, int] = {}
        try:
            for start in range(0, len(names), FDS_A_LINE):
                part = list(names[start : start + FDS_A_LINE])
                _, fds = self._wait("export", self._send("export", {"names": part}, (), None), deadline)
                found.update(zip(part, fds, strict=True))
        except BaseException:
            for fd in found.values():
                os.close(fd)
            raise
        return found

    def drain(self, deadline: Deadline, *, on_event: OnEvent | None = None) -> dict[str, Any]:
        """Commit; what was written is not removed any more by `close`."""
        result = self.request("drain", {}, deadline, on_event=on_event)
        self._uncommitted = None
        if result["pool"] is not None:
            self._pool = Path(result["pool"])
        return result

    def post(self, verb: str, args: Mapping[str, Any]) -> None:
        """Have a verb run before the next; nobody waits for it, and a failure shows in those that build on it."""
        with contextlib.suppress(StagingWorkerLost):
            self._send(verb, args, (), None)

    # ---- the end ---------------------------------------------------------------------------------

    def close(self, *, keeps_pool: bool = False, within_s: float = GRACE_S) -> None:
        """End the worker, politely at first."""
        with contextlib.suppress(OSError, StagingWorkerLost):
            pending = self._send("stop", {"keeps_pool": keeps_pool}, (), None)
            pending.is_done.wait(within_s)
        self.kill(keeps_pool=keeps_pool)

    def remove_pools(self) -> None:
        """Take their names away; the memory goes with the worker."""
        for pool in (self._pool, self.spare_pool):
            if pool is not None:
                remove_pool(pool)

    def kill(self, *, keeps_pool: bool = False) -> None:
        """End the worker now and remove what it left."""
        self.process.kill()
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the kernel driver, it dies later
            self.process.wait(GRACE_S)
        self._reader.join(GRACE_S)
        self._clean(keeps_pool=keeps_pool)

    @property
    def is_over(self) -> bool:
        """The worker takes no requests any more."""
        return self._is_over or self.process.poll() is not None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- inside ----------------------------------------------------------------------------------

    def _send(self, verb: str, args: Mapping[str, Any], fds: Sequence[int], on_event: OnEvent | None) -> _Pending:
        with self._guard:
            if self._is_over:
                raise StagingWorkerLost(verb=verb)
            self._last_id += 1
            pending = self._pending[self._last_id] = _Pending(self._last_id, on_event)
        try:
            self._lines.send({"id": pending.number, "verb": verb, "args": dict(args)}, fds)
        except OSError as problem:
            raise StagingWorkerLost(verb=verb) from problem
        return pending

    def _wait(self, verb: str, pending: _Pending, deadline: Deadline) -> tuple[dict[str, Any], list[int]]:
        try:
            while not pending.is_done.wait(min(_SLICE_S, max(deadline.remaining(), 0.001))):
                deadline.check(verb)
        except vgpu_errors.VgpuError:
            self._give_up(pending)
            raise
        if pending.reply is _LOST[0]:
            raise StagingWorkerLost(verb=verb)
        if not pending.reply["ok"]:
            raise vgpu_errors.from_json(pending.reply["error"])
        return pending.reply["result"], pending.fds

    def _give_up(self, pending: _Pending) -> None:
        with contextlib.suppress(OSError):
            args = {"request": pending.number, "why": "nobody waits for it any more"}
            self._lines.send({"id": 0, "verb": "cancel", "args": args})
        if not pending.is_done.wait(GRACE_S):
            self.kill(keeps_pool=True)

    def _read(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            while (received := self._lines.receive()) is not None:
                self._deliver(*received)
        with self._guard:
            self._is_over = True
            left, self._pending = list(self._pending.values()), {}
        for pending in left:
            pending.is_done.set()
        self._lines.close()

    def _deliver(self, doc: dict[str, Any], fds: list[int]) -> None:
        with self._guard:
            pending = self._pending.get(doc["id"])
            if "event" not in doc:
                self._pending.pop(doc["id"], None)
        if pending is None:
            for fd in fds:
                os.close(fd)
        elif "event" in doc:
            if pending.on_event is not None:
                pending.on_event(doc)
        else:
            pending.reply, pending.fds = doc, fds
            pending.is_done.set()

    def _clean(self, *, keeps_pool: bool) -> None:
        self._remove_uncommitted()
        if self._pool is not None and not keeps_pool:
            remove_pool(self._pool)
        if self.spare_pool is not None and not (keeps_pool and self._pool == self.spare_pool):
            remove_pool(self.spare_pool)

    def _remove_uncommitted(self) -> None:
        if self._uncommitted is not None:
            remove_uncommitted(self._uncommitted)


def remove_uncommitted(directory: Path) -> None:
    """Remove the packs of a checkpoint that was not finished, whatever name they had got to."""
    for pattern in (f"{PARTIAL_PREFIX}pack-*.bin", "vgpu-pack-*.bin"):
        for path in directory.glob(pattern):
            path.unlink(missing_ok=True)


def remove_pool(path: Path) -> None:
    """Remove a pool: its file, and those that were added to it."""
    for file in (path, *path.parent.glob(f"{path.name}.*")):
        file.unlink(missing_ok=True)
