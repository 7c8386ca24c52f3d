"""The data plane as staged_freeze.py and staged_restore.py use it: one staging worker process per container at work.

Puts typed calls in front of the worker's verbs (gpu_state/staging/worker.py) and knows where a store lies:
  packs    a folder with `vgpu-pack-NNNNN.bin` and the fragment that says where each chunk is, or a sealed image
  memory   a pool in a memory file system, which `store.json` in the store's folder names, beside the fragment
The worker is started at first use, so that removing a store costs no process; the spare one of the reserve
(staging_reserve.py) comes first. Ending a worker takes seconds, for the kernel unpins its memory, and nobody waits for that.
Decides no order of steps.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_state.inventory_proof import Tally
from gpu_state.staging.round_policy import RoundPolicy, RoundReport
from gpu_state.staging.slots import CHUNK_BYTES
from gpu_state.staging.worker_client import StagingWorker, remove_pool, remove_uncommitted
from gpu_state.staging_reserve import POOL_NOTE
from gpu_state.staging_seam import Round
from image_format.file_names import FRAGMENT_NAME, INDEX_NAME, SIGNATURE_NAME

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from gpu_state.deadline import Deadline
    from gpu_state.preload_objects import DeviceObject
    from gpu_state.staging_reserve import StagingReserve
    from gpu_state.staging_seam import Tell

POOL_PREFIX = "vgpu-suspended-"
# What a pool has beyond the objects that are there when it is made: for those that come before the stop.
SPARE_SHARE = 16
SPARE_BYTES = 64 << 20


class StagingWorkers:
    """Starts staging workers on this node's driver, or takes them from the reserve."""

    def __init__(self, driver_dir: str | None, reserve: StagingReserve | None = None) -> None:
        self._driver_dir = driver_dir
        self._reserve = reserve

    def open(self, store: str, *, kind: str, parents: Sequence[str] = ()) -> StagingSession:
        """A worker for the store in this folder; `kind` "packs" or "memory" makes a new one, "" reads what is there."""
        return StagingSession(Path(store), kind, self, parents)

    def start(self) -> StagingWorker:
        """One at work."""
        spare = self._reserve.take() if self._reserve is not None else None
        return spare or StagingWorker(self._driver_dir)

    def end(self, worker: StagingWorker, *, keeps_pool: bool) -> None:
        """One is of no use any more. What it has not committed is gone afterwards; the rest takes its time."""
        has_the_only_copy = keeps_pool and worker.serves_own_pool
        reserve = None if has_the_only_copy else self._reserve
        if reserve is not None and reserve.give_back(worker, keeps_pool=keeps_pool):
            return
        if worker.has_uncommitted:
            worker.close(keeps_pool=keeps_pool)
            return
        if not keeps_pool:
            worker.remove_pools()
        threading.Thread(
            target=worker.close, kwargs={"keeps_pool": keeps_pool}, daemon=True, name="staging-worker-end"
        ).start()


class StagingSession:
    """One worker and its store."""

    def __init__(self, folder: Path, kind: str, workers: StagingWorkers, parents: Sequence[str] = ()) -> None:
        self._folder = folder
        self._parents = tuple(parents)
        self._kind = kind
        self._workers = workers
        self._started: StagingWorker | None = None
        self._copied_s = 0.0
        self._is_prepared = False
        self._has_pool = False
        self._reports: list[RoundReport] = []

    # ---- out ---------------------------------------------------------------------------------------------

    def add(self, objects: Mapping[str, DeviceObject], fds: Mapping[str, int], deadline: Deadline) -> None:
        """Map the application's objects; the descriptors stay the caller's."""
        if not objects:
            return
        self._prepare(objects, deadline)
        docs = [_described(name, held) for name, held in objects.items()]
        self._worker().send_objects(docs, [fds[name] for name in objects], deadline)

    def forget(self, names: Sequence[str], deadline: Deadline) -> None:
        """Let objects go that the application has freed."""
        if names:
            self._worker().request("forget", {"names": list(names)}, deadline)

    def wants_another(self, deadline: Deadline) -> bool:
        """One more round would make the stop shorter."""
        if not self._is_prepared:
            return False
        facts = self._worker().request("facts", {}, deadline)
        devices = facts["devices"]
        room = min((int(device["aside_bytes"]) for device in devices), default=0) * len(devices)
        return RoundPolicy().wants_another(self._reports, room)

    def round(self, deadline: Deadline, tell: Tell) -> Round:
        """Copy what has changed, beside the running application."""
        doc = self._worker().request("round", {}, deadline, on_event=_teller(tell))
        self._reports.append(RoundReport(**doc))
        return Round(doc["changed_bytes"], doc["copied_bytes"], doc["seconds"])

    def final(self, deadline: Deadline, *, set_aside: bool, settles: bool = True) -> Mapping[str, Tally]:
        """Take what has changed since, all processes being at rest."""
        if not self._is_prepared:
            return {}
        doc = self._worker().request("final", {"set_aside": set_aside, "settles": settles}, deadline)
        return {uuid: Tally.from_json(tally) for uuid, tally in doc["tally"].items()}

    def drain(self, deadline: Deadline, tell: Tell) -> None:
        """Bring everything into the store and commit it."""
        if not self._is_prepared:
            return
        result = self._worker().drain(deadline, on_event=_teller(tell))
        self._copied_s = float(result["copied_s"])
        if result["pool"] is not None:
            self._has_pool = True
            _write(self._folder / POOL_NOTE, json.dumps({"pool": result["pool"]}))

    @property
    def copied_s(self) -> float:
        """Seconds from the beginning of `final` until the last copy had arrived."""
        return self._copied_s

    def write_fragment(self, deadline: Deadline) -> Path | None:
        """Write down where each chunk lies; None where there was nothing to store."""
        if not self._is_prepared:
            return None
        path = self._folder / FRAGMENT_NAME
        self._worker().request("fragment", {"path": str(path)}, deadline)
        return path

    def let_objects_go(self, deadline: Deadline) -> None:
        """Hold no device memory any more."""
        if self._started is not None:
            self._worker().request("let_go", {}, deadline)

    def let_objects_go_soon(self) -> None:
        """The same, without waiting: whatever is asked of the worker next comes after it."""
        if self._started is not None:
            self._started.post("let_go", {})

    # ---- in ------------------------------------------------------------------------------------------------

    def fill(self, objects: Mapping[str, DeviceObject], deadline: Deadline, tell: Tell) -> dict[str, int]:
        """Make these objects anew from the store and prove their content on the GPU; descriptors for them, the caller's."""
        worker = self._worker()
        uuids = sorted({held.uuid for held in objects.values()})
        needs_ring = not self._has_pool and _pool_of(self._folder) is None
        worker.prepare(None, uuids, _slot_bytes(objects) if needs_ring else 0, deadline)
        docs = [_described(name, held) for name, held in objects.items()]
        worker.request("create", {"objects": docs}, deadline)
        done = worker.request("fill", self._source() | {"proves": True}, deadline, on_event=_teller(tell))
        if "verified_bytes" not in done:
            worker.request("verify", {}, deadline, on_event=_teller(tell))
        return worker.export(list(objects), deadline)

    def _source(self) -> dict[str, Any]:
        if self._has_pool:  # this very worker filled it
            return {}
        note = _pool_of(self._folder)
        store = {"kind": "memory", "path": note} if note else {"kind": "packs", "directory": str(self._folder)}
        if (self._folder / SIGNATURE_NAME).exists() or not (self._folder / FRAGMENT_NAME).exists():
            return {"store": store, "index": str(self._folder / INDEX_NAME)}
        return {"store": store, "fragment": str(self._folder / FRAGMENT_NAME)}

    # ---- always ----------------------------------------------------------------------------------------------

    @property
    def is_usable(self) -> bool:
        """The worker still answers."""
        return self._started is not None and not self._started.is_over

    def close(self, *, keeps_store: bool) -> None:
        """End the worker. What it has written is removed, unless the store is kept."""
        worker, self._started = self._started, None
        pool = _pool_of(self._folder)
        if pool is not None and not keeps_store:
            (self._folder / POOL_NOTE).unlink(missing_ok=True)
            if worker is None or not worker.owns(Path(pool)):
                remove_pool(Path(pool))
        if worker is not None:
            self._workers.end(worker, keeps_pool=keeps_store)
        if keeps_store:
            return
        if not (self._folder / SIGNATURE_NAME).exists():
            remove_uncommitted(self._folder)
            (self._folder / FRAGMENT_NAME).unlink(missing_ok=True)

    def _worker(self) -> StagingWorker:
        if self._started is None:
            self._started = self._workers.start()
        return self._started

    def _prepare(self, objects: Mapping[str, DeviceObject], deadline: Deadline) -> None:
        if self._is_prepared:
            return
        size = _slot_bytes(objects)
        if self._kind == "memory":
            prefix = pool_prefix(self._folder)
            _remove_stale_pools(prefix)
            name = f"{prefix}{secrets.token_hex(4)}"
            # Not of a pool of the reserve, which is there already.
            headroom = size // SPARE_SHARE + SPARE_BYTES
            store: dict[str, Any] = {"kind": "memory", "name": name, "headroom": headroom}
        else:
            store = {"kind": "packs", "directory": str(self._folder), "parents": self._parents}
        uuids = sorted({held.uuid for held in objects.values()})
        self._worker().prepare(store, uuids, size, deadline)
        self._is_prepared = True


def pool_prefix(folder: Path) -> str:
    """How the pools of a store are called: by the container, and by the agent's own folder."""
    return f"{POOL_PREFIX}{folder.name}-{hashlib.sha256(bytes(folder)).hexdigest()[:8]}-"


def _remove_stale_pools(prefix: str) -> None:
    """Pools of a suspend of this container that nobody finished, agent and worker having been killed together."""
    for line in Path("/proc/mounts").read_text().splitlines():
        _, folder, kind = line.split(" ")[:3]
        if kind == "hugetlbfs" or folder == "/dev/shm":  # noqa: S108 - where host_memory.py makes them
            for path in Path(folder).glob(f"{prefix}*"):
                path.unlink(missing_ok=True)


def _described(name: str, held: DeviceObject) -> dict[str, Any]:
    address = held.mappings[0].va if held.mappings else 0
    return {"name": name, "size": held.size, "uuid": held.uuid, "device": held.device, "address": hex(address)}


def _slot_bytes(objects: Mapping[str, DeviceObject]) -> int:
    return sum(-(-held.size // CHUNK_BYTES) * CHUNK_BYTES for held in objects.values())


def _teller(tell: Tell) -> Callable[[dict[str, Any]], None]:
    def hear(event: dict[str, Any]) -> None:
        # The client that would be told may be gone; its deadline ends the work, not this thread.
        with contextlib.suppress(OSError):
            tell(str(event.get("phase")), int(event.get("done") or 0), int(event.get("total") or 0))

    return hear


def _pool_of(folder: Path) -> str | None:
    try:
        pool = json.loads((folder / POOL_NOTE).read_text())["pool"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return pool if isinstance(pool, str) else None


def _write(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.touch(0o600)
    partial.write_text(text)
    partial.replace(path)
