"""Keeps one staging worker ready, so that no suspend, checkpoint or restore waits for contexts and pinned memory.

Starting a worker takes seconds, and making, touching and pinning a pool some 0.3 s for each GiB (measured on an H200); both are done here,
in the background: at the agent's start, and again when the worker has been away for a while or has died. A worker that comes
back is made ready for the next container after the request's answer. Wanted by `staging_reserve` in runtime.conf.
Knows nothing of containers. Pools that an earlier agent left, and no suspended container's note names, are removed.
Used by staging_session.py; agent.py starts and ends it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import secrets
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_state.deadline import Deadline
from gpu_state.driver_location import configured
from gpu_state.staging.host_memory import available_bytes, pool_folders
from gpu_state.staging.worker_client import remove_pool
from vgpu_errors import VgpuError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gpu_state.staging.worker_client import StagingWorker

POOL_PREFIX = "vgpu-reserve-"
POOL_NOTE = "store.json"
PREPARE_S = 900.0
RESET_S = 60.0
# A worker that is on its way back is worth waiting for: making another takes longer.
RETURN_S = 2.0
# A resume often follows soon and brings the worker back; two pools at a time are more than was asked for.
AWAY_S = 60.0
RETRY_S = 60.0
_LOOK_S = 1.0
log = logging.getLogger("vgpu-agent")


class StagingReserve:
    """One spare worker with a pool of `size` bytes."""

    def __init__(self, size: int, run_dir: Path, start: Callable[[], StagingWorker]) -> None:
        self._size = size
        self._start = start
        self._notes = run_dir / "suspended"
        # Other agents, with other state folders, have theirs on the same memory file system.
        self._prefix = f"{POOL_PREFIX}{hashlib.sha256(str(run_dir).encode()).hexdigest()[:8]}-"
        self._changed = threading.Condition()
        self._ready: StagingWorker | None = None
        self._away: dict[StagingWorker, float] = {}
        self._returning: set[StagingWorker] = set()
        self._problem = ""
        self._not_before = 0.0
        self._is_preparing = False
        self._is_over = False
        self._thread = threading.Thread(target=self._keep_ready, daemon=True, name="staging-reserve")

    def start(self) -> None:
        """Begin to prepare; returns at once."""
        self._thread.start()

    def take(self) -> StagingWorker | None:
        """The spare worker, now the caller's until `give_back`; None where there is none."""
        soon = Deadline(RETURN_S)
        with self._changed:
            while self._ready is None and self._returning and soon.remaining() > 0:
                self._changed.wait(soon.remaining())
            worker, self._ready = self._ready, None
            if worker is None or worker.is_over:
                return None
            if _has_name(worker):
                self._away[worker] = time.monotonic()
                return worker
        worker.kill()
        return None

    def give_back(self, worker: StagingWorker, *, keeps_pool: bool) -> bool:
        """Take a worker back that is of no more use to the caller; False where it is not ours, or must not go on."""
        with self._changed:
            if self._away.pop(worker, None) is None or self._is_over or worker.is_over:
                self._changed.notify_all()
                return False
            self._returning.add(worker)
        if worker.has_uncommitted:  # the caller's next word may be that they are gone
            self._make_ready(worker, keeps_pool=keeps_pool)
        else:
            threading.Thread(
                target=self._make_ready, args=(worker,), kwargs={"keeps_pool": keeps_pool}, daemon=True, name="reset"
            ).start()
        return True

    def to_json(self) -> dict[str, Any]:
        """What `facts` tells."""
        with self._changed:
            return {
                "bytes": self._size,
                "state": self._state(),
                "problem": self._problem,
                "worker_pid": self._ready.process.pid if self._ready is not None else None,
            }

    def close(self) -> None:
        """The agent ends: end the spare worker; those that are away end with the agent's sockets."""
        with self._changed:
            self._is_over = True
            worker, self._ready = self._ready, None
            self._changed.notify_all()
        if worker is not None:
            worker.kill()

    # ---- in the background -----------------------------------------------------------------------------

    def _state(self) -> str:
        if self._ready is not None and not self._ready.is_over:
            return "ready"
        if self._is_preparing:
            return "preparing"
        return "in use" if self._away or self._returning else "missing"

    def _keep_ready(self) -> None:
        self._sweep()
        while True:
            with self._changed:
                while not self._is_over and not self._is_wanted():
                    self._changed.wait(_LOOK_S)
                if self._is_over:
                    return
                self._is_preparing = True
            worker = self._prepared()
            with self._changed:
                self._is_preparing = False
                if self._ready is None and not self._is_over:
                    self._ready, worker = worker, None
                self._changed.notify_all()
            if worker is not None:
                worker.close()

    def _is_wanted(self) -> bool:
        now = time.monotonic()
        self._away = {worker: since for worker, since in self._away.items() if not worker.is_over}
        if self._ready is not None and self._ready.is_over:
            log.warning("the spare staging worker has died")
            self._ready.kill()
            self._ready = None
        if self._ready is not None or self._returning or now < self._not_before:
            return False
        if not self._away:
            return True
        return now - max(self._away.values()) > AWAY_S and available_bytes() > 2 * self._size

    def _prepared(self) -> StagingWorker | None:
        began = time.monotonic()
        within = Deadline(PREPARE_S, why_cancelled=lambda: "the agent must stop" if self._is_over else None)
        worker: StagingWorker | None = None
        try:
            worker = self._start()
            worker.reserve(self._size, self._prefix + secrets.token_hex(4), within)
        except (VgpuError, OSError) as problem:
            if worker is not None:
                worker.close()
            self._sweep()
            if str(problem) != self._problem:
                log.warning("the staging reserve could not be made: %s", problem)
            self._problem, self._not_before = str(problem), time.monotonic() + RETRY_S
            return None
        self._problem = ""
        log.info("a staging reserve of %d bytes is ready after %.1f s", self._size, time.monotonic() - began)
        return worker

    def _make_ready(self, worker: StagingWorker, *, keeps_pool: bool) -> None:
        is_good = False
        try:
            worker.reset(Deadline(RESET_S), keeps_pool=keeps_pool)
            is_good = _has_name(worker)
        except VgpuError as problem:
            log.warning("a staging worker did not get ready again: %s", problem)
        with self._changed:
            self._returning.discard(worker)
            is_kept = is_good and self._ready is None and not self._is_over
            if is_kept:
                self._ready = worker
            self._changed.notify_all()
        if not is_kept:
            worker.close(keeps_pool=keeps_pool)

    def _sweep(self) -> None:
        """Remove pools of ours that nobody works with and no note names."""
        with self._changed:
            workers = [*self._away, *self._returning, *([self._ready] if self._ready is not None else [])]
        kept = {worker.spare_pool for worker in workers} | set(_noted(self._notes))
        for folder in pool_folders():
            for path in folder.glob(f"{self._prefix}????????"):
                if path not in kept:
                    remove_pool(path)


def configured_bytes() -> int:
    """`staging_reserve` of runtime.conf; a bad value is none, and `vgpu doctor` names it."""
    return bytes_of(configured("staging_reserve") or "0") or 0


def bytes_of(value: str) -> int | None:
    """`40G` and the like, as oci_hook/settings.py has it; None where it is no size."""
    scale = "KMGT".find(value[-1:].upper()) + 1 if value else 0
    digits = value[:-1] if scale else value
    return int(digits) << 10 * scale if digits.isascii() and digits.isdecimal() and len(digits) < 20 else None


def _has_name(worker: StagingWorker) -> bool:
    """What lies in a pool whose name somebody has removed could not be found after a crash."""
    return worker.spare_pool is not None and worker.spare_pool.exists()


def _noted(folder: Path) -> Iterator[Path]:
    """The pools of suspended containers."""
    for note in folder.glob(f"*/{POOL_NOTE}"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            yield Path(json.loads(note.read_text())["pool"])
