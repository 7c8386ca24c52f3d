"""The data plane on the software driver: what an application holds in GPU memory comes back bit by bit, or is refused by name.

Real processes: an application that owns the memory, a staging worker that copies it, another worker that brings it back, and
a second application that reads it. Nothing here is a GPU result.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpu_state.deadline import Deadline
from gpu_state.staging.fd_lines import FDS_A_LINE, FdLines
from gpu_state.staging.rates import Progress
from gpu_state.staging.round_policy import RoundPolicy, RoundReport
from gpu_state.staging.slots import ZERO, SlotTable, Store
from gpu_state.staging.tracked import Span, Tracked, batches_of, changed_spans, number_groups
from gpu_state.staging.worker_client import StagingWorker, remove_uncommitted
from image_format.vram import read_fragment
from tests.software_gpu.build import build
from tests.software_gpu.devices import make_devices
from tests.stopping import stop
from vgpu_errors import (
    ContentMismatch,
    DeadlineExceeded,
    NotEnoughDeviceMemory,
    NotEnoughSpace,
    StagingWorkerLost,
    Truncated,
    UnexpectedEntry,
    VgpuError,
)

MIB = 1 << 20
CHUNK = 4 * MIB
APPLICATION = Path(__file__).with_name("staging_application.py")
ROOT = Path(__file__).parents[2]


def soon(seconds=30.0):
    return Deadline(seconds)


class App:
    """An application process and what it holds."""

    def __init__(self, environment):
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, str(APPLICATION), str(theirs.fileno())]
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
        ours.settimeout(30)
        self.lines = FdLines(ours)
        self.objects = []

    def do(self, verb, fds=(), **arguments):
        self.lines.send({"do": verb, **arguments}, fds)
        received = self.lines.receive()
        assert received is not None, "the application ended"
        answer, got = received
        assert "failure" not in answer, answer
        return answer["result"], got

    def alloc(self, node, sizes, device=0):
        for start in range(0, len(sizes), FDS_A_LINE):
            part = sizes[start : start + FDS_A_LINE]
            result, fds = self.do("alloc", sizes=part, device=device)
            assert len(result["addresses"]) == len(part)
            for size, fd in zip(part, fds, strict=True):
                name = f"7/{len(self.objects) + 1}"
                # Of our own making: the kernel gives addresses from the top, and the order of packs follows them.
                address = hex(0x7000_0000_0000 + (len(self.objects) << 30))
                doc = {"name": name, "size": size, "uuid": node.uuids[device], "device": device, "address": address}
                self.objects.append((doc, fd))
        return self

    @property
    def docs(self):
        return [doc for doc, _ in self.objects]

    @property
    def fds(self):
        return [fd for _, fd in self.objects]

    def digests(self):
        return self.do("digests")[0]["digests"]

    def free_bytes(self, device=0):
        return self.do("free_bytes", device=device)[0]["free"]

    def close(self):
        self.process.kill()
        self.process.wait(10)
        self.lines.close()
        for _, fd in self.objects:
            with contextlib.suppress(OSError):
                os.close(fd)


class Node:
    """Software GPUs, and the processes that a test starts on them."""

    def __init__(self, libraries, folder, monkeypatch, *, count=1, memory=1 << 30):
        self.uuids = make_devices(folder / "gpus", count, memory, "staging")
        (folder / "nodes").mkdir()
        monkeypatch.setenv("SOFTWARE_GPU_DIR", str(folder / "gpus"))
        monkeypatch.setenv("SOFTWARE_GPU_NODE_DIR", str(folder / "nodes"))
        monkeypatch.setenv("LD_LIBRARY_PATH", str(libraries))
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
        self.closing = contextlib.ExitStack()

    def app(self, sizes=(), device=0):
        made = App(dict(os.environ))
        self.closing.callback(made.close)
        return made.alloc(self, list(sizes), device) if sizes else made

    def worker(self):
        made = StagingWorker()
        self.closing.callback(made.kill)
        return made

    def worker_of(self, app, store, **more):
        worker = self.worker()
        worker.send_objects(app.docs, app.fds, soon())
        worker.request("prepare", {"store": store, **more}, soon())
        worker.expects(store)
        return worker


@pytest.fixture(scope="session")
def libraries():
    return build()


@pytest.fixture
def make_node(libraries, tmp_path, monkeypatch):
    made = []

    def make(**options):
        made.append(Node(libraries, tmp_path, monkeypatch, **options))
        return made[-1]

    yield make
    for node in made:
        node.closing.close()


@pytest.fixture
def node(make_node):
    return make_node()


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "small"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "none", str(folder)], check=False)
    if done.returncode:
        pytest.skip("a full disk needs a mount")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def image(tmp_path):
    (tmp_path / "image").mkdir()
    return tmp_path / "image"


def packs(directory, **more):
    return {"kind": "packs", "directory": str(directory), **more}


def names_in(directory):
    return sorted(path.name for path in directory.iterdir())


def checkpoint(node, app, directory, *, set_aside=True, rounds=1, **more):
    """Rounds, the stop, and the fragment; returns the worker and what final said."""
    worker = node.worker_of(app, packs(directory, **more))
    for _ in range(rounds):
        worker.request("round", {}, soon())
    report = worker.request("final", {"set_aside": set_aside}, soon())
    worker.drain(soon())
    worker.request("fragment", {"path": str(directory / ".vgpu-partial-vram.bin")}, soon())
    return worker, report


def bring_back(node, directory, docs, store=None, fragment=None):
    """A new worker makes, fills and proves the objects; a new application reads them."""
    worker = node.worker()
    worker.request("create", {"objects": docs}, soon())
    fragment = str(fragment or directory / ".vgpu-partial-vram.bin")
    worker.request("fill", {"store": store or packs(directory), "fragment": fragment}, soon())
    worker.request("verify", {}, soon())
    fds = worker.export([doc["name"] for doc in docs], soon())
    worker.close(keeps_pool=True)  # the descriptors alone keep the memory
    app = node.app()
    for doc in docs:
        app.do("take", [fds[doc["name"]]], sizes=[doc["size"]], device=doc["device"])
    for fd in fds.values():
        os.close(fd)
    return app.digests()


# ---- out and in again --------------------------------------------------------------------------------


@pytest.mark.parametrize("set_aside", [True, False])
def test_memory_that_changes_during_the_rounds_comes_back_as_it_was_at_the_stop(node, image, set_aside):
    app = node.app([18 * MIB, 2 * MIB, 64 * MIB])
    app.do("fill", seed="first")
    app.do("churn", number=2, chunks=6)
    worker = node.worker_of(app, packs(image))
    events = []
    first = worker.request("round", {}, soon(), on_event=events.append)
    assert first["total_bytes"] == first["changed_bytes"] == 84 * MIB
    assert worker.request("round", {}, soon())["number"] == 2
    assert app.do("rest")[0]["wrote"] > 0
    at_stop = app.digests()
    report = worker.request("final", {"set_aside": set_aside}, soon())
    assert 0 < report["changed_bytes"] <= 24 * MIB
    assert report["set_aside_bytes"] == (report["changed_bytes"] if set_aside else 0)
    app.do("fill", seed="the application goes on")
    worker.drain(soon())
    worker.request("fragment", {"path": str(image / ".vgpu-partial-vram.bin")}, soon())
    assert events[-1]["done"] == events[-1]["total"] == 84 * MIB
    assert names_in(image) == [".vgpu-partial-vram.bin", "vgpu-pack-00000.bin"]
    assert bring_back(node, image, app.docs) == at_stop


def test_zeros_and_repeats_are_not_stored_and_short_tails_fill_their_slot(node, image):
    app = node.app([18 * MIB, 8 * MIB, 6 * MIB])
    app.do("write", number=0, chunk=1, seed="same")
    app.do("write", number=1, chunk=0, seed="same")
    app.do("write", number=0, chunk=4, seed="tail")
    app.do("write", number=1, chunk=1, seed="after the tail")
    worker, report = checkpoint(node, app, image)
    fragment = read_fragment(image / ".vgpu-partial-vram.bin")
    stored = {(c.pack, c.offset, c.length) for region in fragment.regions for c in region.chunks if c.pack}
    pack = "vgpu-pack-00000.bin"
    assert stored == {(pack, 0, CHUNK), (pack, CHUNK, 2 * MIB), (pack, 2 * CHUNK, CHUNK)}
    status = (image / pack).stat()
    assert (status.st_size, status.st_blocks * 512 >= status.st_size) == (3 * CHUNK, True), "a pack has no holes"
    tally = report["tally"][node.uuids[0]]
    expected = {"total_bytes": 32 * MIB, "moved_bytes": 10 * MIB, "zero_bytes": 18 * MIB, "dedup_bytes": 4 * MIB}
    assert tally == expected
    assert bring_back(node, image, app.docs) == app.digests()
    worker.close()
    assert pack in names_in(image), "what was drained stays"


def test_equal_content_gives_equal_packs(node, tmp_path):
    app = node.app([30 * MIB, 10 * MIB])
    app.do("fill", seed="equal")
    contents = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        checkpoint(node, app, tmp_path / name)
        contents.append({path.name: path.read_bytes() for path in (tmp_path / name).glob("vgpu-pack-*")})
    assert contents[0] == contents[1] != {}


def test_rewritten_chunks_take_their_slots_again(node, image):
    app = node.app([32 * MIB])
    worker = node.worker_of(app, packs(image))
    for seed in ("a", "b", "c"):
        app.do("fill", seed=seed)
        worker.request("round", {"policy": {"shrink": 1.0}}, soon())
    worker.request("final", {"set_aside": False}, soon())
    worker.drain(soon())
    worker.request("fragment", {"path": str(image / "fragment")}, soon())
    assert (image / "vgpu-pack-00000.bin").stat().st_size == 32 * MIB
    assert bring_back(node, image, app.docs, fragment=image / "fragment") == app.digests()


@pytest.mark.parametrize("set_aside", [True, False])
def test_a_stop_that_did_not_hold_may_be_followed_by_another(node, image, set_aside):
    app = node.app([34 * MIB])
    app.do("fill", seed="first")
    worker = node.worker_of(app, packs(image))
    worker.request("final", {"set_aside": True}, soon())
    for chunk in (0, 2, 7, 8):
        app.do("write", number=0, chunk=chunk, seed="second")
    app.do("write", number=0, chunk=5, seed=None)
    worker.request("final", {"set_aside": set_aside}, soon())
    at_stop = app.digests()
    app.do("fill", seed="goes on")
    worker.drain(soon())
    worker.request("fragment", {"path": str(image / "fragment")}, soon())
    assert bring_back(node, image, app.docs, fragment=image / "fragment") == at_stop


def test_objects_come_and_go_between_rounds(node, image):
    app = node.app([8 * MIB, 8 * MIB])
    app.do("fill", seed="old")
    worker = node.worker_of(app, packs(image))
    worker.request("round", {}, soon())
    app.alloc(node, [12 * MIB])
    app.do("fill", seed="new")
    worker.request("forget", {"names": ["7/1"]}, soon())
    worker.send_objects(app.docs[2:], app.fds[2:], soon())
    assert worker.request("final", {"set_aside": True}, soon())["total_bytes"] == 20 * MIB
    worker.drain(soon())
    worker.request("fragment", {"path": str(image / "fragment")}, soon())
    assert bring_back(node, image, app.docs[1:], fragment=image / "fragment") == app.digests()[1:]


def test_two_devices_are_copied_and_filled_at_once(make_node, image):
    node = make_node(count=2)
    app = node.app([20 * MIB, 2 * MIB])
    app.alloc(node, [40 * MIB], device=1)
    app.do("fill", seed="two")
    _, report = checkpoint(node, app, image)
    assert {uuid: tally["moved_bytes"] for uuid, tally in report["tally"].items()} == {
        node.uuids[0]: 22 * MIB,
        node.uuids[1]: 40 * MIB,
    }
    by_pack = {}
    for region in read_fragment(image / ".vgpu-partial-vram.bin").regions:
        by_pack.setdefault(region.uuid, set()).update(chunk.pack for chunk in region.chunks)
    assert by_pack == {node.uuids[0]: {"vgpu-pack-00000.bin"}, node.uuids[1]: {"vgpu-pack-00001.bin"}}
    assert bring_back(node, image, app.docs) == app.digests()


def test_more_objects_than_descriptors_go_with_one_message(node, image, monkeypatch):
    monkeypatch.setattr("gpu_state.staging.worker_client.FDS_A_LINE", 3)
    app = node.app([2 * MIB] * 10)
    app.do("fill", seed="many")
    checkpoint(node, app, image, rounds=0)
    assert bring_back(node, image, app.docs) == app.digests()


def test_a_line_carries_as_many_descriptors_as_it_promises():
    ours, theirs = map(FdLines, socket.socketpair())
    with open("/dev/null", "rb") as null:
        ours.send({"first": "x" * 100_000}, [null.fileno()] * FDS_A_LINE)
        ours.send({"second": 1}, [null.fileno()])
        with pytest.raises(ValueError, match="201"):
            ours.send({}, [null.fileno()] * (FDS_A_LINE + 1))
    got = [theirs.receive() for _ in range(2)]
    assert [(list(doc), len(fds)) for doc, fds in got] == [(["first"], FDS_A_LINE), (["second"], 1)]
    for fd in (fd for _, fds in got for fd in fds):
        os.close(fd)
    ours.close()
    assert theirs.receive() is None
    theirs.close()


# ---- parents -----------------------------------------------------------------------------------------


def seal_index(directory):
    """What the seal makes of a fragment, as far as a later checkpoint reads it."""
    from image_format import chunk_index

    fragment = read_fragment(directory / ".vgpu-partial-vram.bin")
    (directory / "vgpu-index.bin").write_bytes(chunk_index.to_bytes(fragment.to_index()))


def test_content_of_a_parent_does_not_cross_the_link_again(make_node, tmp_path):
    node = make_node(memory=2 << 30)
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    new.mkdir()
    app = node.app([520 * MIB])
    for chunk in range(6):
        app.do("write", number=0, chunk=chunk, seed=f"stays {chunk}")
    for chunk in (128, 129, 120):
        app.do("write", number=0, chunk=chunk, seed=f"changes {chunk}")
    checkpoint(node, app, old, rounds=0)[0].close()
    seal_index(old)
    sizes = {name: (old / name).stat().st_size for name in names_in(old) if "pack" in name}
    assert sizes == {"vgpu-pack-00000.bin": 7 * CHUNK, "vgpu-pack-00001.bin": 2 * CHUNK}, "cut every 128 chunks"
    app.do("write", number=0, chunk=128, seed="other")
    app.do("write", number=0, chunk=3, seed="other too")
    _, report = checkpoint(node, app, new, rounds=0, parents=[str(old)])
    tally = report["tally"][node.uuids[0]]
    assert (tally["moved_bytes"], tally["dedup_bytes"]) == (2 * CHUNK, 7 * CHUNK)
    shutil.rmtree(old)
    assert bring_back(node, new, app.docs) == app.digests()
    live = {c.pack for region in read_fragment(new / ".vgpu-partial-vram.bin").regions for c in region.chunks if c.pack}
    assert live == {name for name in names_in(new) if name.startswith("vgpu-pack")}


def test_an_unchanged_process_takes_its_parents_packs_as_they_are(node, tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    new.mkdir()
    app = node.app([32 * MIB])
    app.do("fill", seed="still")
    checkpoint(node, app, old)[0].close()
    seal_index(old)
    _, report = checkpoint(node, app, new, parents=[str(old)])
    assert report["tally"][node.uuids[0]]["moved_bytes"] == 0
    assert (new / "vgpu-pack-00000.bin").read_bytes() == (old / "vgpu-pack-00000.bin").read_bytes()


def test_one_worker_makes_several_checkpoints(node, tmp_path):
    app = node.app([18 * MIB])
    app.do("fill", seed="a")
    worker = node.worker()
    worker.send_objects(app.docs, app.fds, soon())
    for name in ("one", "two"):
        directory = tmp_path / name
        directory.mkdir()
        worker.prepare(packs(directory), (), 0, soon())
        assert worker.request("round", {}, soon())["copied_bytes"] == 18 * MIB
        worker.request("final", {"set_aside": True}, soon())
        worker.drain(soon())
        worker.request("fragment", {"path": str(directory / ".vgpu-partial-vram.bin")}, soon())
        assert bring_back(node, directory, app.docs) == app.digests()
        app.do("write", number=0, chunk=1, seed="b")


def test_a_mostly_dead_pack_of_a_parent_gives_only_its_live_slots(node, tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    new.mkdir()
    app = node.app([66 * MIB])
    app.do("fill", seed="old")
    checkpoint(node, app, old)[0].close()
    seal_index(old)
    for chunk in range(1, 16):
        app.do("write", number=0, chunk=chunk, seed=None)
    checkpoint(node, app, new, parents=[str(old)])
    assert sum(path.stat().st_size for path in new.glob("vgpu-pack-*")) == 2 * CHUNK
    assert bring_back(node, new, app.docs) == app.digests()


def test_a_parent_that_is_no_checkpoint_is_no_parent(node, image, tmp_path):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "vgpu-index.bin").write_bytes(b"VGPUIDX1 and then nothing")
    app = node.app([8 * MIB])
    app.do("fill", seed="x")
    _, report = checkpoint(node, app, image, parents=[str(tmp_path / "old")])
    assert report["tally"][node.uuids[0]]["moved_bytes"] == 8 * MIB


# ---- memory ------------------------------------------------------------------------------------------


def memory_pool(tmp_path):
    return {"kind": "memory", "name": "vgpu-staging-test.pool", "folder": str(tmp_path)}


def test_suspend_to_memory_and_resume_in_the_same_worker(node, tmp_path):
    app = node.app([18 * MIB, 24 * MIB])
    app.do("fill", seed="m")
    before = app.digests()
    worker = node.worker_of(app, memory_pool(tmp_path))
    assert worker.request("final", {"set_aside": False}, soon())["copied_bytes"] == 42 * MIB
    worker.drain(soon())
    worker.request("fragment", {}, soon())
    worker.request("let_go", {}, soon())
    app.do("drop")
    for fd in app.fds:
        os.close(fd)
    assert app.free_bytes() > (1 << 30) - 64 * MIB, "the device is free while the application is suspended"
    worker.request("create", {"objects": app.docs}, soon())
    assert worker.request("fill", {}, soon())["copied_bytes"] == 42 * MIB
    worker.request("verify", {}, soon())
    fds = worker.export([doc["name"] for doc in app.docs], soon())
    for doc in app.docs:
        app.do("take", [fds[doc["name"]]], sizes=[doc["size"]])
    assert app.digests() == before

    # The same once more: only what has changed since is copied again.
    app.do("write", number=1, chunk=2, seed="changed")
    before = app.digests()
    worker.prepare(memory_pool(tmp_path), (), 0, soon())
    again = worker.request("final", {"set_aside": False}, soon())
    assert (again["copied_bytes"], again["total_bytes"]) == (CHUNK, 42 * MIB)
    worker.drain(soon())
    worker.request("fragment", {"path": str(tmp_path / "fragment")}, soon())
    for fd in fds.values():
        os.close(fd)

    # The worker dies; the pool is still there for another.
    os.kill(worker.process.pid, signal.SIGKILL)
    worker.close(keeps_pool=True)
    pool = tmp_path / "vgpu-staging-test.pool"
    store = {"kind": "memory", "path": str(pool)}
    assert bring_back(node, None, app.docs, store=store, fragment=tmp_path / "fragment") == before
    worker.close(keeps_pool=False)
    assert not pool.exists()


def suspended_to(worker, app, pool):
    """Content into the worker's pool while the application lets go: nobody waits for the copies before `drain`."""
    worker.send_objects(app.docs, app.fds, soon())
    worker.prepare(pool, (), 0, soon())
    report = worker.request("final", {"set_aside": False, "settles": False}, soon())
    app.do("drop")
    for fd in app.fds:
        os.close(fd)
    worker.drain(soon())
    worker.request("let_go", {}, soon())
    return report


def resumed_from(worker, app):
    worker.request("create", {"objects": app.docs}, soon())
    done = worker.request("fill", {"proves": True}, soon())
    fds = worker.export([doc["name"] for doc in app.docs], soon())
    for doc in app.docs:
        app.do("take", [fds[doc["name"]]], sizes=[doc["size"]], device=doc["device"])
        os.close(fds[doc["name"]])
    return done


def test_a_reserved_worker_serves_one_application_after_the_other(make_node, tmp_path):
    """Two GPUs; zeros and content that is there twice; copies under way when the application lets go; proof on the way in."""
    node = make_node(count=2)
    worker = node.worker()
    pool = tmp_path / "spare"
    result = worker.request("reserve", {"bytes": 40 * MIB, "name": pool.name, "folder": str(tmp_path)}, soon())
    assert (result["pool"], result["spare_bytes"]) == (str(pool), 40 * MIB)
    assert {device["uuid"] for device in result["devices"]} == set(node.uuids)
    for number in range(3):
        app = node.app([18 * MIB, 10 * MIB]).alloc(node, [12 * MIB], device=1)
        app.do("fill", seed=f"application {number}")
        app.do("write", number=0, chunk=1, seed=None)
        app.do("write", number=0, chunk=2, seed=None)
        app.do("write", number=2, chunk=0, seed="twice")
        app.do("write", number=2, chunk=2, seed="twice")
        before = app.digests()
        report = suspended_to(worker, app, memory_pool(tmp_path))
        assert (report["zero_bytes"], report["dedup_bytes"]) == (8 * MIB, CHUNK)
        assert resumed_from(worker, app) == {"verified_bytes": 40 * MIB}
        assert app.digests() == before
        worker.reset(soon(), keeps_pool=False)
        app.close()
    facts = worker.request("facts", {}, soon())
    assert (facts["objects"], facts["spare_bytes"]) == (0, 40 * MIB)
    assert pool.exists()
    worker.close()
    assert not pool.exists()


@pytest.mark.parametrize("chunk", [0, 2])
def test_what_comes_back_other_than_it_went_is_named(node, tmp_path, chunk):
    worker = node.worker()
    pool = tmp_path / "spare"
    worker.request("reserve", {"bytes": 40 * MIB, "name": pool.name, "folder": str(tmp_path)}, soon())
    app = node.app([18 * MIB])
    app.do("fill", seed="good")
    app.do("write", number=0, chunk=4, seed=None)
    suspended_to(worker, app, memory_pool(tmp_path))
    with pool.open("r+b") as file:
        file.seek(chunk * CHUNK + 77)
        file.write(b"evil")
    worker.request("create", {"objects": app.docs}, soon())
    with pytest.raises(ContentMismatch, match=f"chunk {chunk} from vgpu-pack-00000.bin"):
        worker.request("fill", {"proves": True}, soon())


def test_a_pool_without_room_is_refused_ahead_of_the_freeze(node, tmp_path):
    app = node.app([8 * MIB])
    worker = node.worker()
    worker.send_objects(app.docs, app.fds, soon())
    size = shutil.disk_usage(tmp_path).free * 2
    with pytest.raises(NotEnoughSpace):
        worker.prepare(memory_pool(tmp_path), (), size, soon())
    assert not (tmp_path / "vgpu-staging-test.pool").exists()


def test_a_pool_grows_for_the_objects_of_further_processes(node, tmp_path):
    first, second = node.app([18 * MIB]), node.app([6 * MIB, 40 * MIB])
    docs = first.docs + [doc | {"name": f"8/{n}"} for n, doc in enumerate(second.docs)]
    first.do("fill", seed="first")
    second.do("fill", seed="second")
    expected = first.digests() + second.digests()
    worker = node.worker_of(first, memory_pool(tmp_path))
    worker.send_objects(docs[1:], second.fds, soon())
    assert worker.request("final", {"set_aside": False}, soon())["copied_bytes"] == 64 * MIB
    worker.drain(soon())
    worker.request("fragment", {"path": str(tmp_path / "fragment")}, soon())
    worker.close(keeps_pool=True)
    pool = tmp_path / "vgpu-staging-test.pool"
    assert [path.stat().st_size for path in sorted(tmp_path.glob(f"{pool.name}*"))] == [20 * MIB, 48 * MIB]
    store = {"kind": "memory", "path": str(pool)}
    assert bring_back(node, None, docs, store=store, fragment=tmp_path / "fragment") == expected
    worker.close(keeps_pool=False)
    assert list(tmp_path.glob(f"{pool.name}*")) == []


def test_a_pool_that_cannot_grow_is_refused_and_goes(node, small_disk):
    app = node.app([16 * MIB, 16 * MIB])
    worker = node.worker()
    worker.send_objects(app.docs[:1], app.fds[:1], soon())
    worker.prepare(memory_pool(small_disk), (), 0, soon())
    with pytest.raises(NotEnoughSpace):
        worker.send_objects(app.docs[1:], app.fds[1:], soon())
    assert names_in(small_disk) == ["vgpu-staging-test.pool"]
    worker.close()
    assert names_in(small_disk) == []


# ---- limits ------------------------------------------------------------------------------------------


def test_pinned_memory_is_never_more_than_what_is_moved(node, image):
    app = node.app([6 * MIB])
    app.do("fill", seed="x")
    worker = node.worker_of(app, packs(image))
    assert worker.request("facts", {}, soon())["ring_bytes"] == 8 * MIB
    assert worker.prepare(None, (), 100 << 20, soon())["ring_bytes"] == 96 * MIB
    assert worker.request("prepare", {"bytes": 100 << 20, "pinned_limit": 64 * MIB}, soon())["ring_bytes"] == 96 * MIB


def test_the_ring_grows_for_the_objects_of_further_processes(node, image):
    app = node.app([6 * MIB, 64 * MIB])
    worker = node.worker()
    worker.send_objects(app.docs[:1], app.fds[:1], soon())
    worker.prepare(packs(image), (), 0, soon())
    worker.send_objects(app.docs[1:], app.fds[1:], soon())
    assert worker.request("facts", {}, soon())["ring_bytes"] == 64 * MIB


def test_a_small_ring_carries_any_amount(node, image):
    app = node.app([18 * MIB, 64 * MIB])
    app.do("fill", seed="x")
    worker = node.worker_of(app, packs(image), pinned_limit=CHUNK)
    worker.request("round", {}, soon())
    worker.request("final", {"set_aside": False}, soon())
    worker.drain(soon())
    worker.request("fragment", {"path": str(image / "fragment")}, soon())
    assert worker.request("facts", {}, soon())["ring_bytes"] == CHUNK
    worker.request("let_go", {}, soon())
    worker.request("create", {"objects": app.docs}, soon())
    worker.request("fill", {"store": packs(image)}, soon())
    worker.request("verify", {}, soon())


def test_what_does_not_fit_beside_the_application_is_copied_during_the_stop(make_node, image):
    node = make_node(memory=160 * MIB)
    app = node.app([100 * MIB])
    app.do("fill", seed="x")
    worker = node.worker_of(app, packs(image))
    report = worker.request("final", {"set_aside": True}, soon())
    assert 0 < report["set_aside_bytes"] < 60 * MIB
    assert report["set_aside_bytes"] + report["copied_bytes"] == 100 * MIB
    at_stop = app.digests()
    app.do("fill", seed="goes on")
    worker.drain(soon())
    worker.request("fragment", {"path": str(image / "fragment")}, soon())
    worker.close()
    app.do("drop")
    for fd in app.fds:
        os.close(fd)
    assert bring_back(node, image, app.docs, fragment=image / "fragment") == at_stop


def test_no_room_for_scratch_is_said_by_name(make_node, image):
    node = make_node(memory=128 * MIB)
    app = node.app([100 * MIB])
    worker = node.worker_of(app, packs(image))
    with pytest.raises(NotEnoughDeviceMemory):
        worker.request("round", {}, soon())


# ---- failures ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["round", "final", "drain"])
def test_a_full_disk_is_an_error_that_leaves_nothing(node, small_disk, when):
    app = node.app([64 * MIB])
    worker = node.worker_of(app, packs(small_disk))
    if when != "round":
        worker.request("round", {}, soon())
    app.do("fill", seed="too much")
    if when == "drain":
        worker.request("final", {"set_aside": True}, soon())

    def fail():
        worker.request(when, {"set_aside": False} if when == "final" else {}, soon())
        worker.drain(soon())  # the stop need not wait for the disk

    with pytest.raises(NotEnoughSpace) as caught:
        fail()
    assert str(small_disk) in str(caught.value)
    assert names_in(small_disk) == []
    assert app.free_bytes() > (1 << 30) - 64 * MIB - 300 * MIB
    assert worker.request("facts", {}, soon())["objects"] == 1, "the worker lives and can be asked again"


@pytest.mark.parametrize("moment", ["round", "aside", "drain"])
def test_killing_the_worker_leaves_no_pack_and_frees_the_device(node, image, moment):
    app = node.app([128 * MIB])
    app.do("fill", seed="x")
    free = app.free_bytes()
    worker = node.worker_of(app, packs(image))
    if moment == "round":
        pending = worker._send("round", {"policy": {"pace_bytes_s": 1e6}}, (), None)
        wait_until(lambda: names_in(image))
    elif moment == "aside":
        worker.request("final", {"set_aside": True}, soon())
        assert app.free_bytes() < free - 100 * MIB
    else:
        worker.request("final", {"set_aside": True}, soon())
        pending = worker._send("drain", {}, (), None)
        wait_until(lambda: names_in(image))
    os.kill(worker.process.pid, signal.SIGKILL)
    if moment != "aside":
        with pytest.raises(StagingWorkerLost):
            worker._wait(moment, pending, soon())
    if moment == "round":
        assert all(name.startswith(".vgpu-partial-") for name in names_in(image))
    worker.kill()
    assert names_in(image) == []
    wait_until(lambda: app.free_bytes() == free)


def wait_until(is_true, within_s=10.0):
    until = time.monotonic() + within_s
    while not is_true():
        assert time.monotonic() < until
        time.sleep(0.002)


def test_a_deadline_ends_a_round_and_leaves_nothing(node, image):
    app = node.app([96 * MIB])
    app.do("fill", seed="x")
    worker = node.worker_of(app, packs(image))
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        worker.request("round", {"policy": {"pace_bytes_s": 1e6}}, Deadline(0.5))
    assert time.monotonic() - began < 3.0
    assert names_in(image) == []
    assert not worker.is_over, "a worker that hears the cancel is not killed"
    assert worker.request("facts", {}, soon())["objects"] == 1


def test_a_worker_that_hangs_is_killed_at_the_deadline(node, image):
    app = node.app([8 * MIB])
    worker = node.worker_of(app, packs(image))
    stop(worker.process.pid)
    with pytest.raises(DeadlineExceeded):
        worker.request("round", {}, Deadline(0.2))
    assert worker.process.wait(5) == -signal.SIGKILL
    with pytest.raises(StagingWorkerLost):
        worker.request("facts", {}, soon())


def test_the_worker_ends_with_the_agent_and_takes_its_files_along(node, image):
    app = node.app([64 * MIB])
    app.do("fill", seed="x")
    worker = node.worker_of(app, packs(image))
    worker.request("round", {}, soon())
    assert names_in(image) != []
    worker._connection.shutdown(socket.SHUT_RDWR)
    assert worker.process.wait(10) == 0
    assert names_in(image) == []


@pytest.mark.parametrize("damage", ["flip", "short", "gone", "swap"])
def test_a_damaged_pack_is_noticed_before_anything_is_declared_good(node, image, damage):
    app = node.app([18 * MIB, 8 * MIB])
    app.do("fill", seed="x")
    checkpoint(node, app, image)[0].close()
    pack = image / "vgpu-pack-00000.bin"
    data = bytearray(pack.read_bytes())
    if damage == "flip":
        data[2 * CHUNK + 12345] ^= 1
        pack.write_bytes(data)
    elif damage == "swap":
        pack.write_bytes(data[CHUNK : 2 * CHUNK] + data[:CHUNK] + data[2 * CHUNK :])
    elif damage == "short":
        pack.write_bytes(data[: 3 * CHUNK])
    else:
        pack.unlink()
    expected = {"short": Truncated, "gone": UnexpectedEntry}.get(damage, ContentMismatch)
    with pytest.raises(expected) as caught:
        bring_back(node, image, app.docs)
    assert {"flip": "7/1", "swap": "7/1"}.get(damage, "vgpu-pack-00000.bin") in str(caught.value)
    if damage == "flip":
        assert "chunk 2" in str(caught.value)


def test_objects_that_do_not_fit_the_index_are_refused(node, image):
    app = node.app([18 * MIB])
    checkpoint(node, app, image)[0].close()
    with pytest.raises(VgpuError, match="7/1"):
        bring_back(node, image, [app.docs[0] | {"size": 20 * MIB}])


def test_a_descriptor_of_something_else_is_refused(node, image, tmp_path):
    worker = node.worker()
    (tmp_path / "plain").write_bytes(bytes(2 * MIB))
    doc = {"name": "7/1", "size": 2 * MIB, "uuid": node.uuids[0], "address": "0x0"}
    with (tmp_path / "plain").open("rb") as file, pytest.raises(VgpuError, match="cuMemImportFromShareableHandle"):
        worker.send_objects([doc], [file.fileno()], soon())


def test_only_partial_and_pack_files_are_cleaned(image):
    for name in (".vgpu-partial-pack-00001.bin", "vgpu-pack-00001.bin", "pages-1.img", "vgpu-index.bin"):
        (image / name).write_bytes(b"x")
    remove_uncommitted(image)
    assert names_in(image) == ["pages-1.img", "vgpu-index.bin"]


# ---- the pure parts ----------------------------------------------------------------------------------


class Memory:
    def __init__(self, size):
        self.size = size

    def address(self):
        return 0x1000000


def tracked(name, size, device=0, address=0):
    return Tracked(name, Memory(size), device=device, uuid=f"GPU-{device}", address=address)


def test_groups_follow_device_and_address_and_never_cross_devices():
    items = [tracked("b", 508 * MIB, 0, 0x2000), tracked("a", 8 * MIB, 0, 0x1000), tracked("c", CHUNK, 1, 0)]
    count = []
    number_groups(items, lambda n: sum(count) if not count.append(n) else 0)
    assert [items[1].group_of(0), items[1].group_of(1)] == [items[0].group_of(0)] * 2
    assert items[0].group_of(125) == items[0].group_of(0)
    assert items[0].group_of(126) == items[0].group_of(0) + 1
    assert count == [2, 1]


def test_batches_hold_every_chunk_once_in_order():
    items = [tracked("a", 18 * MIB), tracked("b", 2 * MIB), tracked("c", 40 * MIB)]
    batches = list(batches_of([item.whole() for item in items], 4))
    assert [sum(span.chunks for span in batch) for batch in batches] == [4, 4, 4, 4]
    flat = [
        (span.item.name, n) for batch in batches for span in batch for n in range(span.first, span.first + span.chunks)
    ]
    assert flat == [(item.name, n) for item in items for n in range(item.count)]
    assert sum(span.size for batch in batches for span in batch) == 60 * MIB


def test_changed_chunks_are_joined_where_they_are_neighbours():
    item = tracked("a", 40 * MIB)
    item.ids[:] = bytes(range(10)) * 32
    ids = bytearray(item.ids)
    for number in (0, 3, 4, 9):
        ids[number * 32] ^= 0xFF
    spans = list(changed_spans([item.whole()], bytes(ids)))
    assert [(span.first, span.chunks) for span in spans] == [(0, 1), (3, 2), (9, 1)]
    assert list(changed_spans([Span(item, 5, 4)], bytes(ids[160:288]))) == []


def test_a_slot_is_free_only_when_nobody_refers_to_it():
    table, store = SlotTable(), Store(0, 2)
    place = table.add(b"a" * 32, store, CHUNK)
    assert table.known(b"a" * 32) is place
    table.drop(place)
    assert table.add(b"b" * 32, store, CHUNK).offset == CHUNK
    assert store.is_full
    table.drop(place)
    assert table.known(b"a" * 32) is None
    assert table.add(b"c" * 32, store, CHUNK).offset == 0
    table.drop(ZERO)
    table.drop(None)


def report(number, changed, copied=None, *, is_skipped=False):
    return RoundReport(number, 100 << 30, changed, changed if copied is None else copied, 0, 0, is_skipped, 1.0)


@pytest.mark.parametrize(
    ("reports", "room", "wants"),
    [
        ([], 0, True),
        ([report(1, 100 << 30)], 20 << 30, True),
        ([report(1, 64 << 20)], 0, False),
        ([report(1, 100 << 30), report(2, 1 << 30)], 0, False),
        ([report(1, 100 << 30), report(2, 30 << 30)], 20 << 30, True),
        ([report(1, 100 << 30), report(2, 30 << 30)], 40 << 30, False),
        ([report(1, 100 << 30), report(2, 90 << 30, is_skipped=True)], 0, False),
        ([report(n, 50 << 30) for n in range(5)], 0, False),
    ],
)
def test_rounds_go_on_while_they_get_ahead(reports, room, wants):
    assert RoundPolicy().wants_another(reports, room) is wants


def test_a_round_that_would_not_get_ahead_is_skipped(node, image):
    app = node.app([64 * MIB])
    app.do("fill", seed="a")
    worker = node.worker_of(app, packs(image))
    worker.request("round", {}, soon())
    app.do("fill", seed="b")
    skipped = worker.request("round", {}, soon())
    assert (skipped["is_skipped"], skipped["changed_bytes"], skipped["copied_bytes"]) == (True, 64 * MIB, 0)


def test_progress_tells_rate_and_time_left():
    now = [0.0]
    events = []
    progress = Progress("round 1", 100, events.append, clock=lambda: now[0])
    progress.add(10)
    now[0] = 1.0
    progress.add(10)
    assert [(e["done"], e["total"], e["rate"], e["eta_s"]) for e in events] == [(20, 100, 20, 4.0)]
