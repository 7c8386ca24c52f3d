"""The staging worker: one process for each container at work, which maps its GPU memory and moves it (docs/staged-mode.md).

Requests come as JSON lines with descriptors over a socketpair (fd_lines.py) and are answered in their order, one at a time;
`cancel` and `facts` are answered at once. Has no deadline of its own: worker_client.py cancels, and kills when that is not heard.
Device memory that it maps is freed by its death; what it has not committed by then is no pack by name. Ends when its socket does.

    prepare  objects  forget   round  rounds  final  drain  fragment  tally   let_go      out
    create   fill     verify   export                                                     in
    facts    cancel   abort    stop
    reserve  reset                                                                        for one container after the other

A worker of the reserve (staging_reserve.py) has made its contexts, kernels and a pinned pool before anybody needs them. The
pool serves a suspend, or as the ring of whatever else it is taken for; `reset` makes it ready for the next container.
"""

from __future__ import annotations

import importlib
import os
import queue
import socket
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_state.staging import cuda_calls
from gpu_state.staging.copy_in import CopyIn, MemorySource, PackSource
from gpu_state.staging.copy_out import IN_FLIGHT, CopyOut
from gpu_state.staging.cuda_calls import DeviceContext
from gpu_state.staging.device_lane import Lane
from gpu_state.staging.device_objects import close_all, create_object, import_object
from gpu_state.staging.fd_lines import FdLines
from gpu_state.staging.pinned_ring import DEFAULT_LIMIT, PinnedRing
from gpu_state.staging.round_policy import RoundPolicy
from gpu_state.staging.slots import CHUNK_BYTES
from gpu_state.staging.targets import MemoryTarget, PackTarget
from gpu_state.staging.tracked import Tracked
from vgpu_errors import Cancelled, VgpuError

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpu_state.staging.device_objects import DeviceObject
    from gpu_state.staging.host_memory import HostMemory
    from image_format.vram import VramFragment

    Args = dict[str, Any]

LEAVE_S = 5.0
DEFAULT_HASHER = "gpu_state.staging.chunk_hasher:ChunkHasher"


class Worker:
    """What is held for one container, and the verbs."""

    def __init__(self, lines: FdLines, hasher: str) -> None:
        self._lines = lines
        module, _, name = hasher.partition(":")
        self._make_hasher = getattr(importlib.import_module(module), name)
        self._guard = threading.Lock()
        self._lanes: dict[str, Lane] = {}
        self._held: dict[str, Tracked] = {}
        self._ring: PinnedRing | None = None
        self._pinned_limit = DEFAULT_LIMIT
        self._target: PackTarget | MemoryTarget | None = None
        self._pool: MemoryTarget | None = None  # a target that holds the only copy until it is let go
        self._spare: MemoryTarget | None = None  # what `reserve` made; it may become target and pool
        self._out: CopyOut | None = None
        self._fragment: VramFragment | None = None
        self._request: dict[str, Any] = {}
        self._sent: list[int] = []
        self.cancelled: dict[int, str] = {}  # by request; 0 stands for all

    # ---- for one container after the other -------------------------------------------------------

    def reserve(self, args: Args, _fds: list[int]) -> dict[str, Any]:
        """Make everything that takes seconds: contexts on all GPUs, kernels, a pool that stays pinned."""
        from image_format import vram  # noqa: F401, PLC0415 - the first suspend would wait for the import

        cuda_calls.start()
        for uuid in args.get("uuids") or cuda_calls.device_uuids():
            self._lane(uuid).warm_up(IN_FLIGHT)
        folder = Path(args["folder"]) if args.get("folder") else None
        self._spare = MemoryTarget.prepare(
            int(args["bytes"]), args["name"], folder=folder, is_lasting=True, check=self.check
        )
        return self.facts(args, []) | {"pool": str(self._spare.path)}

    def reset(self, args: Args, _fds: list[int]) -> dict[str, Any]:
        """Be as `reserve` has left us. A pool of an earlier worker stays where that is wanted; our own must be free to go."""
        if self._spare is None or (args.get("keeps_pool") and self._pool is self._spare):
            raise VgpuError(what="there is nothing to go back to")
        self.abort({}, [])
        self.let_go({}, [])
        self._end_ring()
        pool, self._pool, self._fragment = self._pool, None, None
        for lane in self._lanes.values():
            lane.drop_scratches()
        if pool is not None and pool is not self._spare:
            (pool.let_go if args.get("keeps_pool") else pool.remove)()
        self._spare.recycle()
        return {}

    # ---- out -------------------------------------------------------------------------------------

    def prepare(self, args: Args, _fds: list[int]) -> dict[str, Any]:
        """Contexts, and ring or pool; slow, and therefore before anything stops."""
        self._pinned_limit = int(args.get("pinned_limit") or self._pinned_limit)
        for uuid in args.get("uuids", ()):
            self._lane(uuid)
        if "store" in args:
            self._open_target(args["store"], int(args.get("bytes", 0)))
        elif args.get("bytes"):
            self._make_ring(int(args["bytes"]))
        return self.facts(args, []) | {
            "pool": str(self._target.path) if isinstance(self._target, MemoryTarget) else None
        }

    def objects(self, args: Args, fds: list[int]) -> dict[str, Any]:
        """Map what an application exported; one descriptor for each object, in order."""
        taken = []
        for doc in args["objects"]:
            lane = self._lane(doc["uuid"])
            taken.append(self._keep(doc, import_object(fds.pop(0), int(doc["size"]), lane.context)))
        if self._out is not None:
            self._fragment = None
            self._out.add(taken)
            self._make_room()
        return {"count": len(taken)}

    def forget(self, args: Args, _fds: list[int]) -> dict[str, Any]:
        """The application has freed these."""
        if self._out is not None:
            self._fragment = None
            self._out.forget(args["names"])
        return self.let_go(args, [])

    def round(self, args: Args, _fds: list[int]) -> dict[str, Any]:
        """One round beside the running application."""
        self._fragment = None
        return asdict(self._copy_out().round(RoundPolicy(**args.get("policy", {}))))

    def rounds(self, args: Args, _fds: list[int]) -> dict[str, Any]:
        """Rounds for as long as the policy wants another."""
        self._fragment = None
        return {"rounds": [asdict(done) for done in self._copy_out().rounds(RoundPolicy(**args.get("policy", {})))]}

    def final(self, args: Args, _fds: list[int]) -> dict[str, Any]:
        """The application stands still: take what differs. Where it does not `settle`, copies go on until `drain`."""
        self._fragment = None
        report = self._copy_out().final(set_aside=bool(args["set_aside"]), settles=bool(args.get("settles", True)))
        return asdict(report) | self.tally(args, [])

    def drain(self, _args: Args, _fds: list[int]) -> dict[str, Any]:
        """Bring what was set aside into the target and commit it."""
        self._fragment = self._copy_out().fragment()  # while copies are under way
        result: dict[str, Any] = {"copied_s": self._copy_out().drain(), "pool": None}
        if isinstance(self._target, MemoryTarget):
            self._pool = self._target
            return result | {"pool": str(self._target.path)}
        self._out, self._target = None, None
        return result

    def fragment(self, args: Args, _fds: list[int]) -> dict[str, Any]:
        """Write the VRAM part of the index; the same that a later `fill` without a file takes."""
        from image_format.vram import write_fragment  # noqa: PLC0415 - needed at the end only

        if self._fragment is None and self._out is not None:
            self._fragment = self._out.fragment()
        if self._fragment is None:
            raise VgpuError(what="there is nothing to describe: nothing was copied")
        if args.get("path"):
            write_fragment(args["path"], self._fragment)
        return {
            "regions": len(self._fragment.regions),
            "bytes": self._fragment.length,
            "packs": {pack.name: pack.size for pack in self._fragment.packs},
        }

    def tally(self, _args: Args, _fds: list[int]) -> dict[str, Any]:
        """What became of every byte, by device."""
        return {"tally": {uuid: asdict(tally) for uuid, tally in self._copy_out().tally().items()}}

    def let_go(self, args: Args, _fds: list[int]) -> dict[str, Any]:
        """Unmap and let go of these objects, or of all. With `keep_fds` the memory stays for whoever has no other hold on it."""
        names = list(self._held) if args.get("names") is None else args["names"]
        held = [self._held[name].memory for name in names if name in self._held]
        if args.get("keep_fds"):
            for memory in held:
                memory.let_mapping_go()
        else:
            for name in names:
                self._held.pop(name, None)
            close_all(held)
        return {"count": len(held)}

    # ---- in --------------------------------------------------------------------------------------

    def create(self, args: Args, _fds: list[int]) -> dict[str, Any]:
        """New device memory, to be filled and handed over."""
        for doc in args["objects"]:
            lane = self._lane(doc["uuid"])
            self._keep(doc, create_object(int(doc["size"]), lane.context))
        return {"count": len(args["objects"])}

    def fill(self, args: Args, _fds: list[int]) -> dict[str, Any]:
        """Write the created objects' content: from packs in a directory, from a pool's file, or from our own pool.

        With `proves`, what comes from a pool is verified on the way; the answer has no `verified_bytes` where it was not.
        """
        if args.get("fragment"):
            from image_format.vram import read_fragment  # noqa: PLC0415 - as above

            self._fragment = read_fragment(args["fragment"])
        elif args.get("index"):
            self._fragment = _of_index(Path(args["index"]))
        source = self._source(args.get("store"))
        if args.get("proves") and isinstance(source, MemorySource):
            return {"verified_bytes": self._copy_in().fill_and_verify(source)}
        return {"copied_bytes": self._copy_in().fill(source)}

    def verify(self, _args: Args, _fds: list[int]) -> dict[str, Any]:
        """Hash on the GPU and compare with what was signed."""
        return {"verified_bytes": self._copy_in().verify()}

    def export(self, args: Args, _fds: list[int]) -> dict[str, Any]:
        """Descriptors of created objects, in the order of the names."""
        self._sent = [self._held[name].memory.fd for name in args["names"]]
        return {"count": len(self._sent)}

    # ---- always ----------------------------------------------------------------------------------

    def facts(self, _args: Args, _fds: list[int]) -> dict[str, Any]:
        """What is held at this moment."""
        with self._guard:
            lanes = dict(self._lanes)
        memory = {uuid: lane.context.memory() for uuid, lane in lanes.items()}
        ring, spare = self._ring, self._spare
        target = self._target or spare
        return {
            "pid": os.getpid(),
            "devices": [
                {"uuid": uuid, "free_bytes": free, "memory_bytes": total, "aside_bytes": lanes[uuid].room()}
                for uuid, (free, total) in memory.items()
            ],
            "objects": len(self._held),
            "ring_bytes": ring.size if ring else 0,
            "pool_bytes": target.size if isinstance(target, MemoryTarget) else 0,
            "spare_bytes": spare.size if spare else 0,
            "is_huge": ring.is_huge if ring else isinstance(target, MemoryTarget) and target.is_huge,
        }

    def abort(self, _args: Args, _fds: list[int]) -> dict[str, Any]:
        """Give up what is being written; a pool that holds the only copy is not touched."""
        out, target, self._out, self._target = self._out, self._target, None, None
        if out is not None and target is not self._pool:
            out.abort()
        return {}

    def close(self, *, keeps_pool: bool) -> None:
        """Let everything go; what is on the GPUs first, because unpinning takes seconds."""
        self.abort({}, [])
        self.let_go({}, [])
        self._end_ring()
        if self._spare is not None and self._spare is not self._pool:
            self._spare.remove()
        if self._pool is not None:
            (self._pool.let_go if keeps_pool else self._pool.remove)()

    # ---- the loop --------------------------------------------------------------------------------

    def answer(self, request: dict[str, Any], fds: list[int]) -> None:
        """Run one verb and send its answer; descriptors that it did not take are closed."""
        reply: dict[str, Any] = {"id": request["id"]}
        verb = request["verb"]
        try:
            reply |= {"ok": True, "result": VERBS[verb](self, request["args"], fds)}
        except VgpuError as error:
            reply |= {"ok": False, "error": self._after(verb, error).to_json()}
        except Exception as error:  # noqa: BLE001 - the agent reports it as a bug, with the text
            bug = VgpuError(what=f"the staging worker failed in {verb}: {type(error).__name__}: {error}")
            reply |= {"ok": False, "error": self._after(verb, bug).to_json()}
        finally:
            for fd in fds:
                os.close(fd)
        sent, self._sent = self._sent, []
        self._lines.send(reply, sent)

    def begin(self, request: dict[str, Any]) -> None:
        """The events of now on belong to this request."""
        self._request = request

    def check(self) -> None:
        """Raise when the agent does not want the result any more."""
        why = self.cancelled.get(self._request["id"]) or self.cancelled.get(0)
        if why is not None:
            raise Cancelled(phase=self._request["verb"], what=why)

    def _after(self, verb: str, error: VgpuError) -> VgpuError:
        """A failed copy is worthless: nothing of it may stay."""
        if verb in _BREAKING:
            try:
                self.abort({}, [])
            except Exception as failure:  # noqa: BLE001 - the first error is the one to report
                error.add_note(f"while undoing: {failure}")
        return error

    def _tell(self, event: dict[str, Any]) -> None:
        self._lines.send({"id": self._request.get("id")} | event)

    def _lane(self, uuid: str) -> Lane:
        if uuid not in self._lanes:
            if not self._lanes:
                cuda_calls.start()
            lane = Lane(DeviceContext(cuda_calls.ordinal_of(uuid)), self._make_hasher)
            with self._guard:
                self._lanes[uuid] = lane
        self._lanes[uuid].enter()
        return self._lanes[uuid]

    def _keep(self, doc: dict[str, Any], memory: DeviceObject) -> Tracked:
        before = self._held.pop(doc["name"], None)
        if before is not None:
            before.memory.close()
        address = int(str(doc.get("address") or "0"), 16)
        item = Tracked(doc["name"], memory, device=int(doc.get("device", 0)), uuid=doc["uuid"], address=address)
        self._held[doc["name"]] = item
        return item

    def _open_target(self, store: dict[str, Any], expected_bytes: int) -> None:
        if self._target is not None and self._target is not self._pool:
            raise VgpuError(what="a copy is under way; finish or abort it first")
        if store["kind"] == "memory":
            self._open_pool(store, expected_bytes or self._slot_bytes())
        else:
            ring = self._make_ring(expected_bytes or self._slot_bytes())
            parents = [Path(parent) for parent in store.get("parents", ())]
            self._target = PackTarget(Path(store["directory"]), ring, parents=parents)
            self._begin_copy(self._target)
        self._copy_out().forget(self._copy_out().names - self._held.keys())
        self._copy_out().add(self._held.values())
        self._make_room()

    def _begin_copy(self, target: PackTarget | MemoryTarget) -> None:
        for item in self._held.values():
            item.reset()
        self._out = CopyOut(self._lanes, target, tell=self._tell, check=self.check)

    def _open_pool(self, store: dict[str, Any], size: int) -> None:
        if self._pool is not None and self._out is not None:
            self._target = self._pool  # a second suspend: what has not changed since the first is still there
            return
        if self._pool is not None:
            self._pool.abort()
            self._pool = None
        if self._spare is not None:
            self._end_ring()
            self._spare.recycle()
            self._target = self._spare
            missing = size - self._spare.free_slots * CHUNK_BYTES
            if missing > 0:
                self._spare.extend(missing, self.check)
        else:
            folder = Path(store["folder"]) if store.get("folder") else None
            size += int(store.get("headroom", 0))
            self._target = MemoryTarget.prepare(size, store["name"], folder=folder, check=self.check)
        self._begin_copy(self._target)

    def _make_room(self) -> None:
        """Objects came after the target was made: those of further processes, as a rule."""
        next(iter(self._lanes.values())).enter()
        if isinstance(self._target, MemoryTarget):
            missing = self._copy_out().unplaced_chunks - self._target.free_slots
            if missing > 0:
                self._target.extend(missing * CHUNK_BYTES, self.check)
        elif self._ring is not None:
            self._ring.enlarge(self._slot_bytes(), self.check)

    def _make_ring(self, expected_bytes: int) -> PinnedRing:
        """One that is large enough for what is going to be moved; a smaller one is replaced."""
        wanted = min(expected_bytes, self._pinned_limit)
        if not self._lanes:
            self._lane(cuda_calls.first_uuid())
        if self._ring is not None and self._ring.size < wanted:
            self._ring.close()
            self._ring = None
        if self._ring is None:
            next(iter(self._lanes.values())).enter()
            self._ring = PinnedRing(wanted, limit=self._pinned_limit, lent=self._lent(wanted), check=self.check)
        return self._ring

    def _lent(self, wanted: int) -> HostMemory | None:
        """The reserve's memory, where no suspend needs it."""
        if self._spare is None or self._spare in (self._target, self._pool) or self._spare.size < wanted:
            return None
        return self._spare.first_memory

    def _end_ring(self) -> None:
        ring, self._ring = self._ring, None
        if ring is not None:
            ring.close()

    def _slot_bytes(self) -> int:
        return sum(item.count for item in self._held.values()) * CHUNK_BYTES

    def _copy_out(self) -> CopyOut:
        if self._out is None:
            raise VgpuError(what="no store was prepared")
        return self._out

    def _copy_in(self) -> CopyIn:
        if self._fragment is None:
            raise VgpuError(what="it was not said what the objects hold")
        objects = {name: item.memory for name, item in self._held.items()}
        return CopyIn(self._lanes, objects, self._fragment, tell=self._tell, check=self.check)

    def _source(self, store: dict[str, Any] | None) -> PackSource | MemorySource:
        if store is not None and store["kind"] == "packs":
            return PackSource(Path(store["directory"]), self._make_ring(self._slot_bytes()))
        if store is not None and (self._pool is None or str(self._pool.path) != store["path"]):
            next(iter(self._lanes.values())).enter()
            self._pool = MemoryTarget.reopen(Path(store["path"]), self.check)
        if self._pool is None:
            raise VgpuError(what="there is no pool to fill from")
        return MemorySource(self._pool)


VERBS: dict[str, Callable[[Worker, Args, list[int]], dict[str, Any]]] = {
    verb.__name__: verb
    for verb in (
        Worker.prepare, Worker.objects, Worker.forget, Worker.round, Worker.rounds, Worker.final, Worker.drain,
        Worker.fragment, Worker.tally, Worker.let_go, Worker.create, Worker.fill, Worker.verify, Worker.export,
        Worker.facts, Worker.abort, Worker.reserve, Worker.reset,
    )
}  # fmt: skip
_BREAKING = frozenset({"round", "rounds", "final", "drain"})


class _Reader:
    """Takes requests off the socket, so that a verb at work can be cancelled."""

    def __init__(self, lines: FdLines, worker: Worker) -> None:
        self._lines = lines
        self._worker = worker
        self.requests: queue.SimpleQueue[tuple[dict[str, Any], list[int]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True, name="vgpu-requests").start()

    def _read(self) -> None:
        try:
            while (received := self._lines.receive()) is not None:
                request, _ = received
                if request["verb"] == "facts":
                    self._worker.answer(*received)
                elif request["verb"] == "cancel":
                    self._worker.cancelled[request["args"]["request"]] = request["args"]["why"]
                else:
                    self.requests.put(received)
        except OSError:
            pass
        self._worker.cancelled[0] = "the agent has gone"
        self.requests.put(None)
        threading.Event().wait(LEAVE_S)
        os._exit(1)  # a call hangs in the driver


def serve(lines: FdLines, hasher: str) -> None:
    """Answer until the socket closes or `stop` comes."""
    worker = Worker(lines, hasher)
    reader = _Reader(lines, worker)
    keeps_pool = True  # the agent has died: the pool may be the only copy of a suspended application's memory
    while (received := reader.requests.get()) is not None:
        request, fds = received
        if request["verb"] == "stop":
            keeps_pool = bool(request["args"].get("keeps_pool"))
            worker.close(keeps_pool=keeps_pool)
            lines.send({"id": request["id"], "ok": True, "result": {}})
            return
        worker.begin(request)
        worker.answer(request, fds)
    worker.close(keeps_pool=keeps_pool)


def main(fd: int, hasher: str = DEFAULT_HASHER) -> int:
    """Serve on the inherited socket `fd`."""
    try:
        serve(FdLines(socket.socket(fileno=fd)), hasher)
    except (OSError, VgpuError) as problem:
        print(f"staging worker: {problem}", file=sys.stderr)
        return 1
    return 0


def _of_index(path: Path) -> VramFragment:
    from image_format import chunk_index  # noqa: PLC0415 - as above
    from image_format.vram import VramFragment  # noqa: PLC0415

    return VramFragment.from_index(chunk_index.from_bytes(path.read_bytes(), where=str(path)))
