"""libvgpu.so in one of several processes that depend on each other: permits at the closed gate, imports that go and come.

Real processes on the software driver with the real library, and an agent double that halts them, lets counted calls pass
and takes the memory of all of them away (spec/preload-protocol.md, minor version 2). No GPU; nothing measured here is a
GPU result.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.native.agent_double import (
    DETACH,
    DETACHED,
    FAILED,
    FDS,
    HALT,
    HALTED,
    LET_PASS,
    MAP,
    OPEN,
    PING,
    PONG,
    RELEASE,
    RELEASED,
    REST,
)
from tests.native.preload_programs import wait_until
from tests.native.test_preload_staged import (  # noqa: F401 - the fixtures are used by name
    FILL,
    MUSL_LOADER,
    PROGRAMS,
    PTX,
    SANITIZERS,
    SMALL_TABLES,
    close_all,
    compiled,
    descriptors_of,
    device_mappings,
    libraries,
    make_stage,
    maker_of_memory,
    preload,
    run_folder,
    stage,
    with_sanitizer,
)
from tests.native.test_software_driver import MIB
from tests.software_gpu import build as software_gpu

# `begin(source)` runs it again and again in a thread of its own until `over`; `done` counts how often it has returned.
LOOPS = f"""
import time
MIB = {MIB}
f = kernels({PTX!r})
context = ok(d.cuCtxGetCurrent()); p = ok(d.cuMemAlloc(4 * MIB)); s = ok(d.cuStreamCreate(1)); t = ok(d.cuStreamCreate(1))
done, over, threads = [], [], []
SET = "ok(d.cuMemsetD8Async(int(p) + MIB, 1, 16, s))"
def loop(code):
    ok(d.cuCtxSetCurrent(context))
    while not over: exec(code, globals()); done.append(1)
def begin(source):
    threads.append(threading.Thread(target=loop, args=(compile(source, "loop", "exec"),), daemon=True)); threads[-1].start()
def end():
    over.append(1); [thread.join(10) for thread in threads]
    return [thread.is_alive() for thread in threads]
def later(source):
    def once(): ok(d.cuCtxSetCurrent(context)); exec(source, globals()); done.append(1)
    threads.append(threading.Thread(target=once, daemon=True)); threads[-1].start()
"""


def looping(stage, *sources):  # noqa: F811
    child, peer = stage.child(LOOPS)
    for source in sources:
        child.run(f"begin({source!r})")
    return child, peer


def settled(peer, threads):
    """What is answered once so many threads wait at the gate and the device has nothing to do."""
    return wait_until(lambda: (found := peer.let_pass(wait_ms=100))["waiting"] == threads and found["idle"] and found)


def halted(stage, *sources):  # noqa: F811
    """A halted process whose loops all wait at the gate, and how many rounds they have made."""
    child, peer = looping(stage)
    peer.halt()
    for source in sources:
        child.run(f"begin({source!r})")
    settled(peer, len(sources))
    return child, peer, child.run("result = len(done)")


def is_live(child):
    """Its loops go on."""
    before = child.run("result = len(done)")
    return wait_until(lambda: child.run("result = len(done)") > before)


def synchronisers(child):
    count = 0
    for task in Path(f"/proc/{child.pid}/task").iterdir():
        with contextlib.suppress(OSError):  # a thread may end meanwhile
            count += (task / "comm").read_text() == "vgpu-sync\n"
    return count


# ---- permits -------------------------------------------------------------------------------------

SET = "ok(d.cuMemsetD8Async(int(p) + MIB, 1, 16, s))"


@pytest.mark.parametrize("threads", [1, 3])
def test_exactly_as_many_calls_pass_as_are_let_through(threads, stage):  # noqa: F811
    child, peer = looping(stage, *[SET] * threads)
    assert is_live(child)
    peer.halt()
    settled(peer, threads)
    before, passed = child.run("result = len(done)"), 0
    for calls in (1, 2, 7, 0, 64):
        peer.let_pass(calls)
        passed += calls
        answer = settled(peer, threads)
        assert answer == {"passed": passed, "waiting": threads, "inside": 0, "capturing": False, "idle": True}
        wait_until(lambda: child.run("result = len(done)") == before + passed)  # noqa: B023 - called at once
    time.sleep(0.05)
    assert child.run("result = len(done)") == before + passed
    peer.open_gate()
    assert is_live(child)


def test_what_is_left_of_permits_is_void_with_the_next(stage):  # noqa: F811
    child, peer, _ = halted(stage)
    begin = time.monotonic()
    assert peer.let_pass(100, wait_ms=100)["passed"] == 0  # nobody is there to use them
    assert time.monotonic() - begin > 0.09
    peer.let_pass(3, wait_ms=0)
    child.run("begin(SET)")
    wait_until(lambda: child.run("result = len(done)") == 3)
    assert settled(peer, 1) == {"passed": 3, "waiting": 1, "inside": 0, "capturing": False, "idle": True}
    peer.let_pass(5)
    assert peer.let_pass(wait_ms=0)["passed"] == 8
    peer.open_gate()
    peer.halt()
    assert peer.let_pass()["passed"] == 0  # counted from HALT
    peer.open_gate()


WAITS = "ok(launch(f['vgpu_wait_word'], t, p, int(p) + 64, 1))"
POSTS = "ok(launch(f['vgpu_post_word'], s, p, int(p) + 64, 1))"


def test_work_that_waits_for_a_later_call_is_not_idle_until_that_has_passed(stage):  # noqa: F811
    child, peer = stage.child(LOOPS + "ok(d.cuMemsetD8(p, 0, 4096)); " + WAITS)
    begin = time.monotonic()
    peer.halt()
    child.run(f"later({POSTS!r})")
    answer = wait_until(lambda: (found := peer.let_pass(wait_ms=100))["waiting"] and found)
    assert answer == {"passed": 0, "waiting": 1, "inside": 0, "capturing": False, "idle": False}
    assert peer.let_pass(1)["passed"] == 1
    assert peer.let_pass() == {"passed": 1, "waiting": 0, "inside": 0, "capturing": False, "idle": True}
    assert time.monotonic() - begin < 3
    peer.rest()
    assert child.run("result = code(d.cuStreamQuery(t))") == 0
    peer.open_gate()


def test_calls_that_passed_and_wait_for_others_are_told_at_once(stage):  # noqa: F811
    child, peer = stage.child(LOOPS + "ok(d.cuMemsetD8(p, 0, 4096))")
    peer.halt()
    child.run(f"later({WAITS!r})")
    wait_until(lambda: peer.let_pass()["waiting"] == 1)
    begin = time.monotonic()
    assert peer.let_pass(1)["idle"] is False
    assert time.monotonic() - begin < 0.5
    begin = time.monotonic()
    assert peer.let_pass(wait_ms=200)["idle"] is False  # without permits it waits for the work
    assert 0.19 < time.monotonic() - begin < 2
    peer.open_gate()
    child.run(POSTS)
    assert peer.rest()
    peer.open_gate()


def test_idle_is_never_said_while_work_of_a_passed_call_goes_on(stage):  # noqa: F811
    child, peer, _ = halted(stage, "ok(launch(f['vgpu_spin_ms'], s, 3))", "ok(launch(f['vgpu_spin_ms'], t, 5))", SET)
    seen = []
    for calls in (1, 3, 0, 2, 5, 0, 8, 1, 0, 4, 0) * 2:
        answer = peer.let_pass(calls, wait_ms=7 if calls else 500)
        if answer["idle"]:
            peer.let_pass(0, wait_ms=0)  # nothing passes while it is looked at
            if peer.let_pass(0, wait_ms=0)["passed"] == answer["passed"]:
                assert child.run("result = [code(d.cuStreamQuery(s)), code(d.cuStreamQuery(t))]") == [0, 0]
        seen.append(answer["idle"])
    assert set(seen) == {True, False}
    peer.open_gate()
    assert is_live(child)


def test_a_call_that_blocks_inside_is_counted_and_does_not_hold_up_the_halt(stage):  # noqa: F811
    child, peer = stage.child(LOOPS + "ok(launch(f['vgpu_spin_ms'], 0, 700)); later('read(p, 16)')")
    time.sleep(0.1)
    begin = time.monotonic()
    peer.halt(100)
    assert time.monotonic() - begin < 0.3
    answer = peer.let_pass(wait_ms=50)
    assert (answer["inside"], answer["idle"]) == (1, False)
    answer = wait_until(lambda: (found := peer.let_pass())["inside"] == 0 and found)
    assert answer["idle"]
    assert child.run("result = len(done)") == 1
    peer.open_gate()


def test_many_launches_that_block_for_room_are_inside(stage):  # noqa: F811
    """As behind a collective of others: the launch queue is full, and the call that launches one more does not return."""
    child, peer = stage.child(LOOPS + "ok(d.cuMemsetD8(p, 0, 4096)); " + WAITS)
    child.run("begin(\"ok(launch(f['vgpu_increment'], t, int(p) + 1024, 1, 1))\")")
    wait_until(
        lambda: (n := child.run("result = len(done)")) > 900 and n == child.run("time.sleep(0.05); result = len(done)")
    )
    peer.halt()
    answer = peer.let_pass(wait_ms=50)
    assert (answer["inside"], answer["idle"]) == (1, False)
    child.run(f"later({POSTS!r})")
    wait_until(lambda: peer.let_pass(wait_ms=10)["waiting"] == 1)
    peer.let_pass(1)
    assert wait_until(lambda: (found := peer.let_pass())["idle"] and found)["passed"] == 1
    peer.rest()
    peer.open_gate()


# ---- captures ------------------------------------------------------------------------------------

CAPTURE = "ok(d.cuStreamBeginCapture(s, d.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL))"


def test_halt_waits_for_the_end_of_a_capture(stage):  # noqa: F811
    child, peer = stage.child(LOOPS + CAPTURE)
    peer.sequence += 1
    peer.send(HALT, peer.sequence, b'{"deadline_ms":5000}')
    with pytest.raises(queue.Empty):
        peer.answer(0.2)
    child.run(SET + "; ok(d.cuStreamEndCapture(s))")
    assert peer.answer() == (HALTED, {})
    peer.open_gate()


def test_a_capture_that_does_not_end_fails_the_halt_and_is_unharmed(stage):  # noqa: F811
    child, peer = stage.child(LOOPS + CAPTURE)
    kind, answer = peer.ask(HALT, {"deadline_ms": 100})
    assert (kind, answer["what"]) == (FAILED, "a stream capture is in progress")
    assert child.run(SET + "; result = code(d.cuStreamEndCapture(s))") == 0
    assert synchronisers(child) == 0


def test_a_capture_may_begin_by_a_permit_and_is_never_spoiled(stage):  # noqa: F811
    child, peer, _ = halted(stage, f"{CAPTURE}; {SET}; g = ok(d.cuStreamEndCapture(s)); ok(d.cuGraphDestroy(g))")
    for n in range(1, 9):
        peer.let_pass(1)
        answer = wait_until(lambda: (found := peer.let_pass(wait_ms=20))["waiting"] == 1 and found)
        is_within = n % 4 in (1, 2)
        assert answer == {"passed": n, "waiting": 1, "inside": 0, "capturing": is_within, "idle": not is_within}
    peer.let_pass(1)
    kind, answer = peer.ask(REST, {"deadline_ms": 500})
    assert (kind, answer["what"]) == (FAILED, "a stream capture is in progress")
    assert is_live(child)
    assert child.run("result = end()") == [False]


def test_no_capture_begins_while_the_device_is_waited_for(stage):  # noqa: F811
    child, peer = stage.child(LOOPS + "ok(d.cuMemsetD8(p, 0, 4096)); " + WAITS)
    peer.halt()
    assert not peer.let_pass(wait_ms=20)["idle"]
    child.run(f"later({CAPTURE!r} + '; ' + SET + '; g = ok(d.cuStreamEndCapture(s))')")
    wait_until(lambda: peer.let_pass(wait_ms=0)["waiting"] == 1)
    assert peer.let_pass(4, wait_ms=100)["passed"] == 0
    child.run(f"later({POSTS.replace(', s,', ', ok(d.cuStreamCreate(1)),')!r})")
    answer = wait_until(lambda: (found := peer.let_pass(5, wait_ms=100))["idle"] and found)
    assert (answer["passed"], answer["capturing"]) == (5, False)  # two of the post, three of the capture
    peer.open_gate()


# ---- from halted to elsewhere --------------------------------------------------------------------


def test_rest_from_halted_voids_the_permits_and_the_memory_can_go(stage):  # noqa: F811
    child, peer, _ = halted(stage, SET)
    peer.let_pass(3)
    child.run("over.append(1)")  # the loop ends at its next call
    peer.let_pass(1)
    peer.let_pass(1000, wait_ms=0)
    peer.rest()
    child.run("over.clear(); before = len(done); begin(SET); time.sleep(0.1)")
    assert child.run("result = len(done) - before") == 0
    assert synchronisers(child) == 0
    fds = peer.export()
    peer.release()
    peer.map(fds)
    close_all(fds)
    peer.open_gate()
    assert is_live(child)


def test_rest_from_halted_waits_for_the_work_that_passed(stage):  # noqa: F811
    child, peer = stage.child(LOOPS)
    peer.halt()
    child.run("later(\"ok(launch(f['vgpu_spin_ms'], s, 300))\")")
    settled(peer, 1)
    assert peer.let_pass(1)["passed"] == 1
    begin = time.monotonic()
    peer.rest()
    assert 0.1 < time.monotonic() - begin < 3
    assert child.run("result = code(d.cuStreamQuery(s))") == 0
    peer.open_gate()


@pytest.mark.parametrize(
    ("source", "what"),
    [
        (WAITS, "work on the device did not end before the deadline"),
        (WAITS + "; later('ok(d.cuStreamSynchronize(t))')", "work on the device did not end before the deadline"),
        (WAITS.replace(", t,", ", 0,") + "; later('read(p, 16)')", "a call did not return before the deadline"),
    ],
    ids=["the device works", "a thread waits outside", "a call is inside"],
)
def test_rest_from_halted_that_fails_opens_the_gate(source, what, stage):  # noqa: F811
    child, peer = stage.child(LOOPS + "q = ok(d.cuMemAlloc(4 * MIB)); ok(d.cuMemsetD8(p, 0, 4096)); " + source)
    time.sleep(0.05)
    peer.halt()
    peer.let_pass(wait_ms=20)
    kind, answer = peer.ask(REST, {"deadline_ms": 200})
    assert (kind, answer["what"]) == (FAILED, what)
    child.run(POSTS)
    assert peer.rest()
    peer.open_gate()


def test_work_that_failed_opens_the_gate_and_is_named(stage):  # noqa: F811
    child, peer = stage.child(LOOPS + "ok(launch(f['vgpu_increment'], s, 1 << 40, 1, 1))")
    peer.halt()
    kind, answer = peer.ask(LET_PASS, {"calls": 0, "wait_ms": 1000})
    assert (kind, answer["what"]) == (FAILED, "cuCtxSynchronize failed")
    assert answer["code"] != 0
    assert child.run("result = code(d.cuMemAlloc(4 * MIB))") != 0  # as the driver says to the application: it went in
    assert synchronisers(child) == 0


def test_requests_in_the_wrong_phase_are_refused_and_change_nothing(stage):  # noqa: F811
    child, peer = looping(stage, SET)
    assert peer.ask(LET_PASS, {"calls": 1})[0] == FAILED
    assert is_live(child)
    peer.halt()
    wait_until(lambda: synchronisers(child) == 1)
    begin = time.monotonic()
    peer.halt()
    assert time.monotonic() - begin < 0.5
    for request in (RELEASE, MAP):
        assert peer.ask(request)[0] == FAILED
    assert len(peer.inventory()["objects"]) == 1
    assert peer.ask(PING)[0] == PONG
    peer.rest()
    assert peer.ask(HALT)[0] == FAILED
    assert peer.ask(LET_PASS, {"calls": 1})[0] == FAILED
    assert peer.rest()
    peer.open_gate()
    assert is_live(child)


@pytest.mark.parametrize("payload", [b"", b"{}", b'{"calls":-1,"wait_ms":"x"}', b'{"calls":', b"[]", b'{"calls":1e3}'])
def test_a_broken_let_pass_lets_nothing_pass(payload, stage):  # noqa: F811
    child, peer, before = halted(stage, SET)
    peer.sequence += 1
    peer.send(LET_PASS, peer.sequence, payload)
    assert peer.answer()[1]["passed"] in (0, 1)
    assert child.run("time.sleep(0.02); result = len(done)") - before <= 1
    peer.open_gate()


@pytest.mark.parametrize("ending", ["opened", "lost", "detached"])
def test_the_gate_opens_when_the_agent_opens_it_or_is_gone(ending, stage):  # noqa: F811
    child, peer, before = halted(stage, SET)
    if ending == "opened":
        peer.open_gate()
    elif ending == "lost":
        peer.hang_up()
        assert stage.again().hello["phase"] in ("open", "halted")
    else:
        peer.send(DETACH, 1)
        peer.expect(DETACHED)
        peer = stage.again()
        assert peer.hello["phase"] == "halted"
        assert child.run("result = len(done)") == before
        assert peer.let_pass(2)["passed"] == 2
        peer.open_gate()
    assert is_live(child)
    wait_until(lambda: synchronisers(child) == 0)


def test_a_lost_agent_leaves_no_gate_closed_while_work_hangs(stage):  # noqa: F811
    child, peer = stage.child(LOOPS + "ok(d.cuMemsetD8(p, 0, 4096)); " + WAITS)
    child.run("begin(SET)")
    peer.halt()
    wait_until(lambda: (found := peer.let_pass(wait_ms=20))["waiting"] == 1 and found["inside"] == 0)
    peer.hang_up()
    assert is_live(child)
    assert synchronisers(child) == 1  # the driver holds it
    child.run("over.append(1); " + POSTS)
    wait_until(lambda: synchronisers(child) == 0)
    peer = stage.again()
    assert peer.hello["phase"] == "open"
    peer.halt()
    assert wait_until(lambda: peer.let_pass()["idle"])
    peer.open_gate()


def test_one_thread_synchronises_for_the_whole_halt(stage):  # noqa: F811
    child, peer, _ = halted(stage, SET)
    tasks = lambda: sorted(os.listdir(f"/proc/{child.pid}/task"))  # noqa: E731
    peer.let_pass(1)  # the driver has its own threads from now on
    settled(peer, 1)
    before = tasks()
    for _ in range(20):
        peer.let_pass(1)
        settled(peer, 1)
    assert tasks() == before
    peer.rest()
    assert synchronisers(child) == 0
    peer.open_gate()


def test_a_forked_child_finds_no_gate(stage):  # noqa: F811
    child, peer, _ = halted(stage, SET)
    forked = "import os; n = os.fork()\nif n == 0: d.cuMemGetInfo(); os._exit(7)\nresult = os.waitstatus_to_exitcode(os.waitpid(n, 0)[1])"
    assert child.run(forked) == 7
    assert peer.let_pass(1)["passed"] == 1
    peer.open_gate()


# ---- imports go and come back --------------------------------------------------------------------

TAKE = "import os; H = d.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR\n"
GETFD = "ctypes.CDLL(None).syscall(438, os.pidfd_open({}), {}, 0)"
EXPORTER = (
    FILL
    + TAKE
    + """
h = ok(d.cuMemCreate(8 * MIB, properties(), 0)); p = map_memory(h, 8 * MIB); fd = int(ok(d.cuMemExportToShareableHandle(h, H, 0)))
for n in range(8): write(int(p) + n * MIB, pattern(n))
result = fd
"""
)
IMPORTER = (
    FILL
    + TAKE
    + """
fd = {fd}; i = ok(d.cuMemImportFromShareableHandle(fd, H)); os.close(fd); q = map_memory(i, 8 * MIB)
r = ok(d.cuMemAddressReserve(4 * MIB, 0, 0, 0)); ok(d.cuMemMap(r, 4 * MIB, 4 * MIB, i, 0)); ok(d.cuMemSetAccess(r, 4 * MIB, [access(flags=1)], 1))
right = lambda: all(read(int(q) + n * MIB, MIB) == pattern(n) for n in range(8)) and all(read(int(r) + n * MIB, MIB) == pattern(n + 4) for n in range(4))
"""
)


def importer(stage, owner, number, more=""):  # noqa: F811
    return stage.child(IMPORTER.format(fd=GETFD.format(owner.pid, number)) + more)


def rest_all(peers):
    for peer in peers:
        peer.halt()
    for peer in peers:
        wait_until(lambda peer=peer: peer.let_pass()["idle"])
    for peer in peers:
        peer.rest()


def take_all_away(peers):
    """All at rest and released; gives for each what it is to be given back, by id, and the size of each file."""
    rest_all(peers)
    own = {peer: peer.export() for peer in peers}
    shared = {peer: peer.shares()[1] for peer in peers}
    named = {os.fstat(fd).st_ino: fd for fds in own.values() for fd in fds.values()}
    given = {peer: dict(fds) for peer, fds in own.items()}
    for peer in peers:
        for name, fd in shared[peer].items():
            same = named.setdefault(os.fstat(fd).st_ino, fd)
            given[peer].setdefault(name, same)
            if same is not fd:
                os.close(fd)
        peer.release(imports=True)
    return given


def bring_all_back(given, fresh=None):
    """The same memory, or copies of it made by another process: one for all parties."""
    copies = {
        fd: fresh(os.fstat(fd).st_size, os.pread(fd, 1 << 30, 0)) if fresh else fd
        for fds in given.values()
        for fd in fds.values()
    }
    for peer, fds in given.items():
        peer.map({name: copies[fd] for name, fd in fds.items()})
    for peer in given:
        peer.open_gate()
    for fd in set(copies) | set(copies.values()):
        os.close(fd)


def nothing_is_held(child):
    return device_mappings(child.pid) == [] and not [
        x for _, x in descriptors_of(child.pid) if "memfd:software-gpu" in x
    ]


def test_a_descriptors_import_goes_and_comes_back_as_other_memory_for_all(stage, tmp_path):  # noqa: F811
    owner, owner_peer = stage.child(EXPORTER)
    number = owner.run("result = fd")
    other, peer = importer(
        stage,
        owner,
        number,
        "loose = ok(d.cuMemRetainAllocationHandle(q)); fd = "
        + GETFD.format(owner.pid, number)
        + "; bare = ok(d.cuMemImportFromShareableHandle(fd, H)); os.close(fd)\n",
    )
    owner.run("os.close(fd)")
    peers = (owner_peer, peer)
    before = peer.inventory()
    assert [("obstacle" in i, i["size"] // MIB, len(i["mappings"])) for i in before["imports"]] == [
        (False, 8, 2),
        (False, 0, 0),
    ]
    fresh = maker_of_memory(stage.node, tmp_path / "maker.sock")
    for round_ in range(2):
        given = take_all_away(peers)
        assert nothing_is_held(owner)
        assert nothing_is_held(other)
        assert peer.inventory()["imports"] == before["imports"]
        other.send("result = right()")
        assert not other.is_answering(0.1)
        bring_all_back(given, fresh)
        assert other.receive()
        owner.run(f"write(int(p) + 5 * MIB, pattern(100 + {round_}))")
        assert other.run(f"result = read(int(q) + 5 * MIB, MIB) == read(int(r) + MIB, MIB) == pattern(100 + {round_})")
        other.run("write(int(q) + 5 * MIB, pattern(5))")
        assert owner.run("result = read(int(p) + 5 * MIB, MIB) == pattern(5)")
        assert other.run("result = code(d.cuMemcpyHtoD(r, b'x', 1))") != 0  # read-only, as before
    # tokens and references are as they were: two of the one, one of the other
    assert other.run("b = map_memory(bare, 8 * MIB); result = read(b, MIB) == pattern(0)")
    assert other.run("result = [code(d.cuMemRelease(x)) for x in (i, loose, bare, bare)]")[:3] == [0, 0, 0]
    other.run("ok(d.cuMemUnmap(q, 8 * MIB)); ok(d.cuMemUnmap(r, 4 * MIB)); ok(d.cuMemUnmap(b, 8 * MIB))")
    assert peer.inventory()["imports"] == []
    assert nothing_is_held(other)


def test_who_comes_late_gets_what_the_others_have(stage, tmp_path):  # noqa: F811
    owner, owner_peer = stage.child(EXPORTER + "a = ok(d.cuMemAlloc(4 * MIB)); write(a, pattern(9)); result = fd")
    handle = owner.run("result = offer(a)")
    other, peer = importer(stage, owner, owner.run("result = fd"), f"w = opened({handle!r})\n")
    bring_all_back(take_all_away((owner_peer, peer)), maker_of_memory(stage.node, tmp_path / "maker.sock"))
    number = owner.run("os.close(fd); fd = int(ok(d.cuMemExportToShareableHandle(h, H, 0))); result = fd")
    late, late_peer = importer(stage, owner, number, f"w = opened({handle!r})\n")
    assert late.run("result = right() and read(w, MIB) == pattern(9)")
    late.run("write(w, pattern(10)); write(q, pattern(11))")
    assert other.run("result = read(w, MIB) == pattern(10) and read(q, MIB) == pattern(11)")
    held = [one.shares()[1] for one in (owner_peer, peer, late_peer)]
    inodes = [sorted(os.fstat(fd).st_ino for fd in fds.values()) for fds in held]
    assert inodes[0] == inodes[1] == inodes[2]
    assert len(set(inodes[0])) == 2
    for fds in held:
        close_all(fds)
    bring_all_back(take_all_away((owner_peer, peer, late_peer)))
    assert late.run("result = read(w, MIB) == pattern(10)")


def test_opened_memory_keeps_address_count_and_context(stage, tmp_path):  # noqa: F811
    owner, owner_peer = stage.child(FILL + "p = ok(d.cuMemAlloc(5 * MIB)); write(p, pattern(1))")
    handle = owner.run("result = offer(p)")
    other, peer = stage.child(
        FILL
        + f"q = opened({handle!r}); again = opened({handle!r}); second = ok(d.cuCtxCreate(None, 0, 1)); far = opened({handle!r}); ok(d.cuCtxPopCurrent())"
    )
    before = peer.inventory()["imports"]
    assert [i["mappings"][0]["access"] for i in before] == [[[0, 3]], [[0, 3], [1, 3]]]
    bring_all_back(take_all_away((owner_peer, peer)), maker_of_memory(stage.node, tmp_path / "maker.sock"))
    assert peer.inventory()["imports"] == before
    assert other.run("result = [read(x, MIB) == pattern(1) for x in (q, far)]") == [True] * 2
    other.run("write(far, pattern(2))")
    assert owner.run("result = read(p, MIB) == pattern(2)")
    assert other.run(f"third = opened({handle!r}); result = int(third) == int(q) == int(again)")
    closing = "result = [code(d.cuIpcCloseMemHandle(q)) for _ in range(4)]"
    assert other.run(closing) == [0, 0, 0, 1]
    assert [int(i["mappings"][0]["va"], 16) for i in peer.inventory()["imports"]] == [other.run("result = int(far)")]
    other.run("ok(d.cuCtxDestroy(second))")
    assert peer.inventory()["imports"] == []
    assert nothing_is_held(other)


def test_access_of_peers_comes_back(stage):  # noqa: F811
    owner, owner_peer = stage.child(EXPORTER)
    set_access = "ok(d.cuMemSetAccess(q, 8 * MIB, [access(0, 1), access(1, 3)], 2))\n"
    other, peer = importer(stage, owner, owner.run("result = fd"), set_access)
    flags = "result = [int(ok(d.cuMemGetAccess(access(n).location, x))) for x in (q, r) for n in (0, 1)]"
    assert other.run(flags) == [1, 3, 1, 0]
    bring_all_back(take_all_away((owner_peer, peer)))
    assert other.run(flags) == [1, 3, 1, 0]
    (held,) = peer.inventory()["imports"]
    assert sorted(m["access"] for m in held["mappings"]) == [[[0, 1]], [[0, 1], [1, 3]]]
    assert other.run("result = right()")


def test_an_import_that_was_closed_before_is_not_asked_for(stage):  # noqa: F811
    owner, owner_peer = stage.child(EXPORTER + "a = ok(d.cuMemAlloc(4 * MIB)); result = fd")
    handle = owner.run("result = offer(a)")
    other, peer = importer(stage, owner, owner.run("result = fd"), f"w = opened({handle!r})\n")
    (imported, was_opened) = (i["id"] for i in peer.inventory()["imports"])
    other.run("ok(d.cuIpcCloseMemHandle(w))")
    rest_all((owner_peer, peer))
    _, fds = peer.shares()
    assert list(fds) == [imported]
    peer.release(imports=True)
    kind, answer = peer.ask(MAP, {"objects": [was_opened]})
    assert (kind, answer["what"], answer["object"]) == (FAILED, "no such object", was_opened)
    peer.map(fds)
    peer.open_gate()
    close_all(fds)
    assert other.run("result = right()")


def test_the_gate_stays_closed_until_every_import_is_back(stage):  # noqa: F811
    owner, _ = stage.child(EXPORTER + "a = ok(d.cuMemAlloc(4 * MIB)); result = fd")
    handle = owner.run("result = offer(a)")
    other, peer = importer(stage, owner, owner.run("result = fd"), f"w = opened({handle!r})\n")
    peer.rest()
    _, fds = peer.shares()
    for payload in ({}, {"imports": False}, {"imports": 1}, {"imports": None}):
        kind, answer = peer.ask(RELEASE, payload)
        assert kind == FAILED
        assert f"imported by process {other.pid}" in answer["what"]
    assert device_mappings(other.pid)
    peer.release(imports=True)
    peer.release(imports=True)
    first, second = fds
    for missing in (second, first):
        kind, answer = peer.ask(OPEN)
        assert (kind, answer["what"]) == (FAILED, "the object is not mapped")
        peer.map({fd: fds[fd] for fd in fds if fd != missing}) if missing is second else None
    kind, answer = peer.ask(MAP, {"objects": [second]})
    assert (kind, answer["what"], answer["object"]) == (FAILED, "no descriptor came for it", second)
    assert peer.ask(OPEN)[1]["object"] == second
    peer.map(fds)
    peer.open_gate()
    close_all(fds)
    assert other.run("result = right()")


def test_an_import_whose_descriptor_is_gone_is_named_and_not_released(stage):  # noqa: F811
    owner, _ = stage.child(EXPORTER)
    other, peer = importer(stage, owner, owner.run("result = fd"))
    other.run("os.closerange(200, 4000)")
    peer = stage.again()  # its socket was among them
    (held,) = peer.inventory()["imports"]
    assert held["obstacle"] == "the application closed its descriptor"
    peer.rest()
    kind, answer = peer.ask(RELEASE, {"imports": True})
    assert (kind, answer) == (FAILED, {"what": held["obstacle"], "code": 0, "object": held["id"]})
    peer.open_gate()
    assert other.run("result = right()")


def test_past_the_descriptors_that_are_kept_imports_are_named(make_stage, run_folder):  # noqa: F811
    few = compiled(run_folder, "libvgpu-small.so", *SMALL_TABLES)
    stage = make_stage(few)  # noqa: F811
    owner, _ = stage.child(EXPORTER)
    number = owner.run("result = fd")
    _, peer = importer(
        stage,
        owner,
        number,
        "more = ok(d.cuMemImportFromShareableHandle(" + GETFD.format(owner.pid, number) + ", H))\n",
    )
    assert [i.get("obstacle") for i in peer.inventory()["imports"]] == [None, "no descriptor of it is kept"]


# Calls by their public names, which an interposer can stand in front of.
LINKED = "start(); lib = ctypes.CDLL(None)"
FABRIC = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>
static void *next(const char *name) { return dlsym(RTLD_NEXT, name); }
int cuMemExportToShareableHandle(void *out, unsigned long long handle, int type, unsigned long long flags)
{
    int (*driver)(void *, unsigned long long, int, unsigned long long) = next("cuMemExportToShareableHandle"), fd, rc;
    if (type != 8) return driver(out, handle, type, flags);
    rc = driver(&fd, handle, 1, flags);
    memset(out, 0, 64);
    memcpy(out, &fd, sizeof fd);
    return rc;
}
int cuMemImportFromShareableHandle(unsigned long long *handle, void *in, int type)
{
    int (*driver)(unsigned long long *, void *, int) = next("cuMemImportFromShareableHandle");
    return driver(handle, type == 8 ? (void *)(long)*(int *)in : in, 1);
}
int cuMemCreate(unsigned long long *handle, unsigned long size, int *wanted, unsigned long long flags)
{
    int (*driver)(unsigned long long *, unsigned long, int *, unsigned long long) = next("cuMemCreate"), plain[16];
    memcpy(plain, wanted, sizeof plain);
    plain[1] &= ~8;
    return driver(handle, size, plain, flags);
}
"""


def test_memory_shared_by_fabric_handle_is_named_on_both_sides(stage, tmp_path):  # noqa: F811
    """A driver that has fabric handles, which the software driver has not, in front of it."""
    source, library = tmp_path / "fabric.c", tmp_path / "fabric.so"
    source.write_text(FABRIC)
    subprocess.run(["gcc", "-shared", "-fPIC", source, "-o", library, "-ldl"], check=True, timeout=60)
    stage.set_mode("staged")
    child = stage.node.child(LINKED, LD_PRELOAD=f"{stage.library}:{library}:{stage.node.libraries}/libcuda.so.1")
    peer = stage.again()
    child.run(
        "raw = (ctypes.c_char * 64)(); h, i = ctypes.c_uint64(), ctypes.c_uint64()\n"
        "wanted = properties(); wanted.requestedHandleTypes = d.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC\n"
        "assert lib.cuMemCreate(ctypes.byref(h), ctypes.c_size_t(2 << 20), ctypes.c_void_p(wanted.getPtr()), ctypes.c_uint64(0)) == 0\n"
        "assert lib.cuMemExportToShareableHandle(raw, h, 8, ctypes.c_uint64(0)) == 0\n"
        "assert lib.cuMemImportFromShareableHandle(ctypes.byref(i), raw, 8) == 0"
    )
    holdings = peer.inventory()
    assert next((b["kind"], b["what"]) for b in holdings["blockers"]) == ("fabric", "given away by a fabric handle")
    assert [(b["kind"], b["what"]) for b in holdings["blockers"]][1:] == [("fabric", "imported by a fabric handle")]
    assert holdings["objects"][0]["shared"]["ways"] == ["fabric"]
    (imported,) = holdings["imports"]
    assert imported["obstacle"] == "not imported by a POSIX file descriptor"
    peer.rest()
    assert peer.ask(RELEASE, {"imports": True})[1]["what"] == "given away by a fabric handle"
    peer.open_gate()


def test_memory_whose_exporter_has_ended_lives_with_its_importer(stage, tmp_path):  # noqa: F811
    owner, owner_peer = stage.child(EXPORTER + "a = ok(d.cuMemAlloc(4 * MIB)); write(a, pattern(7)); result = fd")
    handle = owner.run("result = offer(a)")
    other, peer = importer(stage, owner, owner.run("result = fd"), f"w = opened({handle!r})\n")
    owner.kill()
    owner_peer.wait_end()
    given = take_all_away((peer,))
    assert sorted(os.fstat(fd).st_size // MIB for fd in given[peer].values()) == [4, 8]
    assert nothing_is_held(other)
    bring_all_back(given, maker_of_memory(stage.node, tmp_path / "maker.sock"))
    assert other.run("result = right() and read(w, MIB) == pattern(7)")


def test_the_driver_checkpoints_an_importer_whose_imports_are_away(stage):  # noqa: F811
    owner, owner_peer = stage.child(EXPORTER)
    other, peer = importer(
        stage, owner, owner.run("result = fd"), "small = ok(d.cuMemAlloc(1000)); write(small, b'small')\n"
    )
    caller = stage.node.caller()
    given = take_all_away((owner_peer, peer))
    stage.agent.stop_listening()
    for one in (owner_peer, peer):
        one.send(DETACH, 1)
        one.expect(DETACHED)
    for child in (owner, other):
        caller.run(f"freeze({child.pid})")
    for child in (owner, other):
        caller.run(f"thaw({child.pid})")
    stage.agent.start()
    back = {one.pid: one for one in (stage.again(), stage.again())}
    bring_all_back({back[peer.pid]: fds for peer, fds in given.items()})
    assert other.run("result = right() and read(small, 5) == b'small'")
    other.run("write(q, pattern(77))")
    assert owner.run("result = read(p, MIB) == pattern(77)")


# ---- descriptors of the application's own ----------------------------------------------------------


def seen(child, number):
    """What the agent sees under a number."""
    return os.stat(f"/proc/{child.pid}/fd/{number}")


def flags_of(child, number):
    text = Path(f"/proc/{child.pid}/fdinfo/{number}").read_text()
    return int(text.split("flags:")[1].split()[0], 8) & os.O_CLOEXEC


def content_of(child, number):
    with open(f"/proc/{child.pid}/fd/{number}", "rb") as file:
        return file.read(100)


def placeholder(token):
    return b"VGPUHELD" + token.to_bytes(8, "little")


TWO_NUMBERS = "kept, left = os.dup(fd), fd; os.set_inheritable(kept, True); result = kept"


def test_an_applications_own_descriptors_get_placeholders_and_then_the_new_memory(stage, tmp_path):  # noqa: F811
    owner, owner_peer = stage.child(EXPORTER)
    left = owner.run("result = fd")
    other, peer = importer(stage, owner, left)
    kept = owner.run(TWO_NUMBERS)
    waiting = other.run(f"waiting = {GETFD.format(owner.pid, left)}; result = waiting")
    flags = [flags_of(owner, kept), flags_of(owner, left), flags_of(other, waiting)]
    given = take_all_away((owner_peer, peer))
    memory = seen(owner, kept)
    owner_peer.park({kept: (memory, 7), left: (memory, 7)})
    peer.park({waiting: (memory, 9)})
    assert [content_of(owner, kept), content_of(owner, left)] == [placeholder(7)] * 2
    assert content_of(other, waiting) == placeholder(9)
    assert seen(owner, kept).st_ino == seen(owner, left).st_ino != seen(other, waiting).st_ino
    assert nothing_is_held(owner)
    assert nothing_is_held(other)
    maker = maker_of_memory(stage.node, tmp_path / "maker.sock")
    fd = next(iter(given[owner_peer].values()))
    fresh = maker(os.fstat(fd).st_size, os.pread(fd, 1 << 30, 0))
    for one, fds in given.items():
        one.map(dict.fromkeys(fds, fresh))
    owner_peer.give_numbers({number: (seen(owner, number), fresh) for number in (kept, left)})
    peer.give_numbers({waiting: (seen(other, waiting), fresh)})
    for one, child in ((owner_peer, owner), (peer, other)):
        one.map({})
        assert not [link for _, link in descriptors_of(child.pid) if "placeholder" in link]
        one.open_gate()
    assert [flags_of(owner, kept), flags_of(owner, left), flags_of(other, waiting)] == flags
    assert flags[0] != flags[1]
    other.run("late = ok(d.cuMemImportFromShareableHandle(waiting, H)); z = map_memory(late, 8 * MIB)")
    owner.run("write(p, pattern(40))")
    assert other.run("result = read(z, MIB) == read(q, MIB) == pattern(40)")
    owner.run("sent = os.fstat(kept).st_ino == os.fstat(left).st_ino; os.close(kept); os.close(left)")
    os.close(fd)
    os.close(fresh)


def test_a_number_that_the_application_has_used_again_is_left_alone(stage, tmp_path):  # noqa: F811
    owner, peer = stage.child(EXPORTER)
    number = owner.run("result = fd")
    own = tmp_path / "own"
    own.write_bytes(b"its own")
    again = f"os.close(fd); n = os.open({str(own)!r}, 0); n == fd or (os.dup2(n, fd), os.close(n))"
    given = take_all_away((peer,))
    memory = seen(owner, number)
    owner.run(again)  # a thread that does not come to the gate
    peer.park({number: (memory, 7), 999: (memory, 7)})
    assert content_of(owner, number) == b"its own"
    owner.run(f"fd = os.open({str(own)!r}, 0); taken = fd; result = fd")
    number = owner.run("result = taken")
    peer.park({number: (seen(owner, number), 8)})
    parked = seen(owner, number)
    owner.run(again)
    fds = given[peer]
    peer.map(fds)
    peer.give_numbers({number: (parked, next(iter(fds.values())))})
    peer.map({})
    assert content_of(owner, number) == b"its own"
    peer.open_gate()
    close_all(fds)
    assert owner.run("result = read(p, MIB) == pattern(0)")


@pytest.mark.parametrize(
    "names",
    [
        {"numbers": [3], "devices": [1], "inodes": []},
        {"numbers": [1 << 40], "devices": [1], "inodes": [1]},
        {"numbers": "3", "devices": [1], "inodes": [1]},
        {"numbers": [-1], "devices": [0], "inodes": [0]},
        {"numbers": [3, 3], "devices": [1 << 70], "inodes": [1]},
    ],
)
def test_broken_lists_of_numbers_change_nothing_and_leak_nothing(names, stage):  # noqa: F811
    owner, peer = stage.child(EXPORTER)
    given = take_all_away((peer,))
    before = descriptors_of(owner.pid)
    assert peer.ask(RELEASE, {"imports": True, "tokens": [1, 2], **names})[0] == RELEASED
    with open("/dev/null", "rb") as null:
        peer.send(FDS, 1, json.dumps(names).encode(), fds=[null.fileno()] * 3)
        assert peer.ask(PING)[0] == PONG
    assert descriptors_of(owner.pid) == before
    bring_all_back(given)
    with open("/dev/null", "rb") as null:  # not while the memory is there
        number = owner.run("result = fd")
        peer.give_numbers({number: (seen(owner, number), null.fileno())})
        assert peer.ask(PING)[0] == PONG
    assert "memfd" in os.readlink(f"/proc/{owner.pid}/fd/{number}")


# ---- many threads of many processes at once ------------------------------------------------------


def cycle_of_group(stage, command, environment, seconds):  # noqa: F811
    """Moves the memory of all three processes as often as it goes; how many times."""
    process = stage.program(command, environment)
    try:
        peers = [stage.agent.arrival(20) for _ in range(3)]
        assert process.stdout.readline() == b"ready\n", process.stderr.read()
        end, cycles = time.monotonic() + seconds, 0
        while time.monotonic() < end and process.poll() is None:
            for peer in peers:
                peer.halt()
            for calls in (1, 5, 3):
                for peer in peers:
                    peer.let_pass(calls, wait_ms=5)
            bring_all_back(take_all_away(peers))
            cycles += 1
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out, err.decode()) == (0, b"", "")
    finally:
        process.kill()
        process.wait()
    return cycles


@pytest.mark.parametrize("libc", ["glibc", "musl"])
def test_a_group_shares_while_all_its_memory_goes_and_comes(libc, stage, libraries, run_folder, tmp_path):  # noqa: F811
    if libc == "musl" and not MUSL_LOADER.exists():
        pytest.skip(f"{MUSL_LOADER} is missing; the package is called musl")
    program, library, driver = tmp_path / "group_share", stage.library, libraries
    options = ["-O1", "-pthread", "-Wall", "-Wextra", "-Werror"]
    if libc == "musl":
        library, driver = compiled(run_folder, "libvgpu-musl.so", libc="musl"), libraries / "musl"
        options.append("-dynamic")
    zig = [sys.executable, "-m", "ziglang", "cc", "-target", software_gpu.zig_target(libc), *options]
    subprocess.run([*zig, PROGRAMS / "group_share.c", driver / "libcuda.so.1", "-o", program], check=True, timeout=120)
    environment = {"LD_PRELOAD": str(library), "LD_LIBRARY_PATH": str(driver)}
    assert cycle_of_group(stage, [program], environment, seconds=2) >= 3


@pytest.mark.parametrize("name", SANITIZERS)
def test_the_same_is_clean_under_a_sanitizer(name, stage, libraries, tmp_path):  # noqa: F811
    if shutil.which("gcc") is None:
        pytest.skip("gcc is missing")
    program = with_sanitizer(SANITIZERS[name], stage.run_folder, libraries, tmp_path, "group_share.c")
    options = {"TSAN_OPTIONS": "halt_on_error=1", "ASAN_OPTIONS": "detect_leaks=0"}
    assert cycle_of_group(stage, ["setarch", "-R", program], options, seconds=2) >= 2
