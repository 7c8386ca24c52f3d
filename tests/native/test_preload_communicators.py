"""What libvgpu.so tells of NCCL's communicators and NVSHMEM's teams (spec/preload-protocol.md, COMMUNICATORS).

Real processes on the software driver with stand-ins for the two libraries, reached by lookups and by the linker. The
stand-ins notice when they are handed what another library made and when they are asked too early. No GPU.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time

import pytest

from gpu_state.communicators import Communicators
from tests.native.test_preload_staged import (  # noqa: F401 - the fixtures are used by name
    MUSL_LOADER,
    PROGRAMS,
    bring_back,
    libraries,
    make_stage,
    preload,
    run_folder,
    stage,
    take_away,
    with_sanitizer,
)
from tests.native.test_preload_staged import compiled as compiled_preload
from tests.software_gpu import build as software_gpu

COMMUNICATORS, COMMUNICATORS_ARE = 30, 31
STRESS_IDS = 9  # nccl_stress.c: four threads with a communicator and its child, and one that stays
# ctypes opens libraries RTLD_LOCAL, as Python opens extensions.
HELP = """
import ctypes as c
class Id(c.Structure): _fields_ = [("bytes", c.c_char * 128)]
def opened(path):
    lib = c.CDLL(path)
    if "caller" in path:
        lib.caller_init.restype = c.c_void_p
    else:
        lib.ncclCommInitRank.argtypes = [c.c_void_p, c.c_int, Id, c.c_int]
        lib.ncclCommInitRankConfig.argtypes = [c.c_void_p, c.c_int, Id, c.c_int, c.c_void_p]
    return lib
def init(lib, size=2, rank=0, byte=b"a"):
    comm = c.c_void_p()
    assert lib.ncclCommInitRank(c.byref(comm), size, Id(byte * 127), rank) == 0
    return comm
def split(lib, comm, color, key=0):
    child = c.c_void_p()
    assert lib.ncclCommSplit(comm, color, key, c.byref(child), None) == 0
    return child
def reduce(lib, comm): return lib.ncclAllReduce(None, None, c.c_size_t(0), 0, 0, comm, None)
"""


@pytest.fixture(scope="module")
def stubs(tmp_path_factory):
    """The folder of the stand-ins: two versions of NCCL, one NVSHMEM, and an extension linked against the first."""
    folder = tmp_path_factory.mktemp("stubs")
    (folder / "old").mkdir()
    compiled(folder / "libnccl.so.2", "stub_libnccl.c", "-Wl,-soname,libnccl.so.2")
    compiled(folder / "old/libnccl.so.2", "stub_libnccl.c", "-Wl,-soname,libnccl.so.2", "-DSTUB_NCCL_VERSION=2804")
    compiled(folder / "libcaller.so", "nccl_caller.c", folder / "libnccl.so.2", "-Wl,-rpath,$ORIGIN")
    compiled(folder / "old/libcaller.so", "nccl_caller.c", folder / "old/libnccl.so.2", "-Wl,-rpath,$ORIGIN")
    versions = f"-Wl,--version-script={PROGRAMS / 'stub_libnvshmem.map'}"
    compiled(folder / "libinterposer.so", "nccl_interposer.c", "-ldl")
    compiled(folder / "libnvshmem_host.so.3", "stub_libnvshmem.c", "-Wl,-soname,libnvshmem_host.so.3", versions)
    return folder


def compiled(output, source, *options):
    command = ["gcc", "-O1", "-g0", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", PROGRAMS / source, *options]
    subprocess.run([*command, "-o", output], check=True, timeout=120)


def told(peer):
    """COMMUNICATORS_ARE, which must say what the agent's parser understands."""
    answer = peer.ask_for(COMMUNICATORS_ARE, COMMUNICATORS)
    assert Communicators.from_json(answer).to_json() == answer
    return answer


def places(answer):
    return sorted((entry["rank"], entry["size"], entry["device"]) for entry in answer["communicators"])


def counts(answer):
    return [tuple(entry["sequence"].values()) for entry in answer["communicators"]]


@pytest.fixture
def child(stage, stubs):  # noqa: F811
    """A staged process with the helpers of this page, and the agent's end of it."""
    process, peer = stage.child(HELP + f"stubs = {str(stubs)!r}; nccl = opened(stubs + '/libnccl.so.2')")
    return process, peer


@pytest.fixture
def linked(stage, stubs):  # noqa: F811
    """The same, reaching NCCL through the extension alone."""
    return stage.child(HELP + f"stubs = {str(stubs)!r}; lib = opened(stubs + '/libcaller.so')")


def fnv1a_128(content):
    value = 0x6C62272E07BB014262B821756295C58D
    for byte in content:
        value = (value ^ byte) * ((1 << 88) + 0x13B) % (1 << 128)
    return value


def id_of(content):
    return f"{fnv1a_128(content):032x}"


def id_of_child(parent, word, what, nth):
    return id_of(bytes.fromhex(parent) + word + what.to_bytes(4, "little") + nth.to_bytes(4, "little"))


# ---- one communicator ----------------------------------------------------------------------------


def test_a_communicator_found_by_lookups_is_told(child):
    process, peer = child
    assert told(peer) == {"communicators": [], "nvshmem": [], "starting": 0, "unlisted": 0}
    process.run("nccl.stub_set_device(1); comm = init(nccl, 8, 5)")
    (entry,) = told(peer)["communicators"]
    assert entry == {
        "library": "nccl",
        "version": "2.28.3",
        "id": id_of(b"a" * 127 + b"\0"),
        "rank": 5,
        "size": 8,
        "device": 1,
        "sequence": {"collectives": 0, "pointToPoint": 0},
    }
    assert process.run("result = [nccl.ncclCommDestroy(comm), nccl.stub_misuses()]") == [0, 0]
    assert told(peer)["communicators"] == []


def test_a_communicator_of_an_extension_is_told(linked):
    process, peer = linked
    process.run("comm = c.c_void_p(lib.caller_init(4, 3, 97)); [lib.caller_all_reduce(comm) for _ in range(3)]")
    answer = told(peer)
    assert (places(answer), counts(answer)) == ([(3, 4, 0)], [(3, 0)])
    assert answer["communicators"][0]["id"] == id_of(b"a" * 128)
    process.run("lib.caller_destroy(comm)")
    assert told(peer)["communicators"] == []


COUNTED = {
    "ncclAllReduce(None, None, z, 0, 0, comm, None)": (1, 0),
    "ncclReduce(None, None, z, 0, 0, 0, comm, None)": (1, 0),
    "ncclReduceScatter(None, None, z, 0, 0, comm, None)": (1, 0),
    "ncclAllGather(None, None, z, 0, comm, None)": (1, 0),
    "ncclBroadcast(None, None, z, 0, 0, comm, None)": (1, 0),
    "ncclBcast(None, z, 0, 0, comm, None)": (1, 0),
    "ncclAlltoAll(None, None, z, 0, comm, None)": (1, 0),
    "ncclGather(None, None, z, 0, 0, comm, None)": (1, 0),
    "ncclScatter(None, None, z, 0, 0, comm, None)": (1, 0),
    "ncclSend(None, z, 0, 1, comm, None)": (0, 1),
    "ncclRecv(None, z, 0, 1, comm, None)": (0, 1),
    "ncclSend(None, z, 0, 9, comm, None)": (0, 0),  # there is no peer 9: NCCL refused
}


def test_calls_are_counted_once_by_the_outermost_and_only_where_nccl_took_them(child):
    process, peer = child
    process.run("z = c.c_size_t(0); comm = init(nccl)")
    total = (0, 0)
    for call, more in COUNTED.items():
        process.run(f"for _ in range(3): nccl.{call}")
        total = (total[0] + 3 * more[0], total[1] + 3 * more[1])
        assert counts(told(peer)) == [total], call


def test_counts_go_through_rest_release_and_the_way_back(child):
    process, peer = child
    process.run("comm = init(nccl); [reduce(nccl, comm) for _ in range(7)]")
    before = told(peer)
    peer.rest()
    assert told(peer) == before
    fds = take_away(peer)
    assert told(peer) == before
    bring_back(peer, fds)
    process.run("reduce(nccl, comm)")
    assert counts(told(peer)) == [(8, 0)]


# ---- parents and children ------------------------------------------------------------------------


def test_splits_have_the_ids_that_every_rank_computes(child):
    process, peer = child
    process.run("comm = init(nccl); a = split(nccl, comm, 3, 1); none = split(nccl, comm, -1); b = split(nccl, a, 0)")
    entries = {entry["id"]: entry for entry in told(peer)["communicators"]}
    root = id_of(b"a" * 127 + b"\0")
    first = id_of_child(root, b"split", 3, 1)
    assert set(entries) == {root, first, id_of_child(first, b"split", 0, 1)}
    assert (entries[first]["parent"], entries[first]["split"]) == (root, {"color": 3, "key": 1})
    process.run("third = split(nccl, comm, 3)")
    assert id_of_child(root, b"split", 3, 3) in {entry["id"] for entry in told(peer)["communicators"]}


def test_a_shrunk_communicator_names_its_parent(child):
    process, peer = child
    process.run(
        "comm = init(nccl, 8); gone = (c.c_int * 2)(6, 5); less = c.c_void_p()\n"
        "assert nccl.ncclCommShrink(comm, gone, 2, c.byref(less), None, 0) == 0"
    )
    root = id_of(b"a" * 127 + b"\0")
    (entry,) = (entry for entry in told(peer)["communicators"] if entry["size"] == 6)
    assert (entry["id"], entry["parent"]) == (id_of_child(root, b"shrink", 2, 1), root)
    assert "split" not in entry


@pytest.mark.parametrize("path", ["", "old/"])
def test_what_a_group_makes_is_told_when_it_has_ended(path, stage, stubs):  # noqa: F811
    process, peer = stage.child(HELP + f"lib = opened({str(stubs)!r} + '/{path}libcaller.so')")
    found = process.run("comms = (c.c_void_p * 3)(); result = lib.caller_init_group(comms, 3, 98)")
    assert found == 0
    answer = told(peer)
    assert places(answer) == [(0, 3, 0), (1, 3, 0), (2, 3, 0)]
    assert len({entry["id"] for entry in answer["communicators"]}) == 1
    assert process.run("kids = (c.c_void_p * 3)(); result = lib.caller_split_group(comms, kids, 3, 2)") == 0
    assert process.run("result = c.CDLL(None) and lib.stub_misuses()") == 0
    children = [entry for entry in told(peer)["communicators"] if "parent" in entry]
    assert sorted(entry["rank"] for entry in children) == [0, 1, 2]
    assert len({entry["id"] for entry in children}) == 1


def test_all_devices_of_one_process_share_an_id_that_no_other_call_gets(child):
    process, peer = child
    process.run("comms = (c.c_void_p * 2)(); more = (c.c_void_p * 2)()")
    process.run("[nccl.ncclCommInitAll(which, 2, (c.c_int * 2)(1, 0)) for which in (comms, more)]")
    answer = told(peer)
    assert places(answer) == [(0, 2, 1), (0, 2, 1), (1, 2, 0), (1, 2, 0)]
    assert len({entry["id"] for entry in answer["communicators"]}) == 2


def test_an_id_of_several_unique_ids_covers_them_all(child):
    process, peer = child
    process.run("ids = (Id * 2)(Id(b'x' * 127), Id(b'y' * 127)); comm = c.c_void_p()")
    assert process.run("result = nccl.ncclCommInitRankScalable(c.byref(comm), 4, 1, 2, ids, None)") == 0
    assert told(peer)["communicators"][0]["id"] == id_of(b"x" * 127 + b"\0" + b"y" * 127 + b"\0")
    assert process.run("result = nccl.ncclCommInitRankScalable(c.byref(comm), 4, 1, 9, ids, None)") != 0
    assert len(told(peer)["communicators"]) == 1


# ---- communicators that do not block -------------------------------------------------------------


def test_a_communicator_that_does_not_block_is_asked_only_when_it_has_begun(linked):
    process, peer = linked
    begun = process.run("comm = c.c_void_p(); result = lib.caller_init_without_blocking(c.byref(comm), 99)")
    answer = told(peer)
    assert (begun, answer["communicators"], answer["starting"]) == (7, [], 1)
    states = process.run("result = [lib.caller_state(comm) for _ in range(3)]")
    assert states[-1] == 0
    answer = told(peer)
    assert (places(answer), answer["starting"]) == ([(3, 4, 0)], 0)
    assert process.run("result = lib.stub_misuses()") == 0


def test_the_first_call_on_it_is_a_time_to_ask_too(child):
    process, peer = child
    process.run(
        "comm = c.c_void_p(); assert nccl.ncclCommInitRankConfig(c.byref(comm), 2, Id(b'n'), 1, c.byref(c.c_int(0))) == 7"
    )
    process.run("[reduce(nccl, comm) for _ in range(5)]")
    answer = told(peer)
    assert (places(answer), counts(answer)) == ([(1, 2, 0)], [(5, 0)])


def test_a_child_that_comes_late_is_told_when_its_parent_is_done(child):
    process, peer = child
    process.run("blocking = c.c_int(0); comm = c.c_void_p(); late = c.c_void_p(7); state = c.c_int(7)")
    process.run("nccl.ncclCommInitRankConfig(c.byref(comm), 2, Id(b'n'), 1, c.byref(blocking))")
    process.run("while state.value == 7: nccl.ncclCommGetAsyncError(comm, c.byref(state))")
    assert process.run("result = nccl.ncclCommSplit(comm, 4, 0, c.byref(late), None)") == 7
    answer = told(peer)
    assert (len(answer["communicators"]), answer["starting"]) == (1, 1)
    process.run("state.value = 7")
    process.run("while state.value == 7: nccl.ncclCommGetAsyncError(comm, c.byref(state))")
    answer = told(peer)
    assert (len(answer["communicators"]), answer["starting"]) == (2, 0)
    (late,) = (entry for entry in answer["communicators"] if "parent" in entry)
    assert late["split"]["color"] == 4
    assert process.run("reduce(nccl, late); result = nccl.stub_misuses()") == 0
    assert sorted(counts(told(peer))) == [(0, 0), (1, 0)]


def test_a_child_that_never_came_goes_with_its_parent(child):
    process, peer = child
    process.run("blocking = c.c_int(0); comm = c.c_void_p(); late = c.c_void_p(); state = c.c_int(7)")
    process.run("nccl.ncclCommInitRankConfig(c.byref(comm), 2, Id(b'n'), 1, c.byref(blocking))")
    process.run("while state.value == 7: nccl.ncclCommGetAsyncError(comm, c.byref(state))")
    process.run("nccl.ncclCommSplit(comm, 4, 0, c.byref(late), None); nccl.ncclCommAbort(comm)")
    assert told(peer) == {"communicators": [], "nvshmem": [], "starting": 0, "unlisted": 0}


# ---- ends and limits -----------------------------------------------------------------------------


def test_a_communicator_that_nccl_would_not_destroy_stays_with_its_counts(child):
    process, peer = child
    process.run("comm = init(nccl, 13); reduce(nccl, comm)")
    before = told(peer)
    assert process.run("result = nccl.ncclCommDestroy(comm)") != 0
    assert told(peer) == before


def test_a_finalized_communicator_says_so(child):
    process, peer = child
    process.run("comm = init(nccl); nccl.ncclCommFinalize(comm)")
    assert told(peer)["communicators"][0]["finalized"] is True


def test_many_come_and_go_and_what_does_not_fit_works_unlisted(child):
    process, peer = child
    process.run("for _ in range(20000): nccl.ncclCommDestroy(init(nccl))")
    process.run("comms = [init(nccl, 2, 0) for _ in range(1030)]; result = [reduce(nccl, x) for x in comms]")
    answer = told(peer)
    assert (len(answer["communicators"]), answer["unlisted"]) == (1024, 6)
    assert set(counts(answer)) == {(1, 0)}
    assert process.run("result = [sum(reduce(nccl, x) for x in comms), nccl.stub_misuses()]") == [0, 0]
    process.run("[nccl.ncclCommDestroy(x) for x in comms]; comm = init(nccl)")
    assert len(told(peer)["communicators"]) == 1


def test_threads_count_every_call(child):
    process, peer = child
    process.run(
        "import threading\ncomms = [init(nccl) for _ in range(4)]\n"
        "def work(n):\n    for _ in range(5000): reduce(nccl, comms[n % 4])\n"
        "threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]\n"
        "[x.start() for x in threads]; [x.join() for x in threads]"
    )
    assert counts(told(peer)) == [(10000, 0)] * 4


def test_a_forked_child_has_none(child, stage):  # noqa: F811
    process, peer = child
    process.run("comm = init(nccl); reduce(nccl, comm)")
    process.run("import os, time; pid = os.fork()\nif pid == 0:\n    result = reduce(nccl, comm); os._exit(result)")
    assert process.run("result = os.waitpid(pid, 0)[1]") == 0
    assert counts(told(peer)) == [(1, 0)]


# ---- two libraries in one process ----------------------------------------------------------------


@pytest.mark.parametrize("first", ["extension", "lookups"])
def test_each_of_two_nccls_gets_its_own_communicators(first, stage, stubs):  # noqa: F811
    """The extension is linked against one, the program opens the other: as when two wheels bring an NCCL each."""
    process, peer = stage.child(HELP + f"stubs = {str(stubs)!r}; steps = []")
    steps = {
        "extension": "lib = opened(stubs + '/old/libcaller.so'); theirs = c.c_void_p(lib.caller_init(4, 3, 97))",
        "lookups": "nccl = opened(stubs + '/libnccl.so.2'); ours = init(nccl)",
    }
    if first == "lookups":
        # The linker takes a library of this name that is there already, so the extension's is opened before.
        process.run("c.CDLL(stubs + '/old/libcaller.so')")
    for name in sorted(steps, key=lambda name: name != first):
        process.run(steps[name])
    process.run("for _ in range(3): assert lib.caller_all_reduce(theirs) == 0 and reduce(nccl, ours) == 0")
    process.run("child = split(nccl, ours, 1); assert reduce(nccl, child) == 0")
    assert process.run("result = nccl.stub_misuses()") == 0
    assert process.run("result = [lib.stub_misuses(), lib.caller_bcast(theirs)]") == [0, 0]
    entries = {entry["version"]: entry for entry in told(peer)["communicators"] if "parent" not in entry}
    calls = {version: entry["sequence"]["collectives"] for version, entry in entries.items()}
    assert calls == {"2.28.3": 3, "2.8.4": 4}
    assert process.run("result = [lib.caller_destroy(theirs), nccl.ncclCommDestroy(ours)]") == [0, 0]


def test_a_second_library_that_is_looked_up_gets_no_wrapper(child):
    process, peer = child
    process.run("comm = init(nccl); old = opened(stubs + '/old/libnccl.so.2'); other = init(old)")
    process.run("assert reduce(old, other) == reduce(nccl, comm) == 0")
    assert process.run("result = [old.stub_misuses(), nccl.stub_misuses()]") == [0, 0]
    (entry,) = told(peer)["communicators"]
    assert (entry["version"], entry["sequence"]["collectives"]) == ("2.28.3", 1)


# ---- other preloads ------------------------------------------------------------------------------


@pytest.mark.parametrize(("order", "way"), [("before us", "next"), ("before us", "handle"), ("behind us", "handle")])
def test_another_preload_is_called_once_each_time_and_the_call_counted_once(order, way, stage, stubs):  # noqa: F811
    stage.set_mode("staged")
    both = [str(stage.library), str(stubs / "libinterposer.so")]
    process = stage.node.child(
        HELP + f"start(); lib = opened({str(stubs)!r} + '/libcaller.so'); comm = c.c_void_p(lib.caller_init(2, 1, 97))",
        LD_PRELOAD=":".join(both if order == "behind us" else reversed(both)),
        **({"INTERPOSER": str(stubs / "libnccl.so.2")} if way == "handle" else {}),
    )
    peer = stage.agent.arrival(20)
    assert process.run("result = [lib.caller_all_reduce(comm) for _ in range(3)]") == [0, 0, 0]
    assert process.run("result = [c.CDLL(None).interposed_calls(), lib.stub_misuses()]") == [3, 0]
    # A wrapper before us that has a handle asks us for the function it wraps, and we count what comes of it.
    assert counts(told(peer)) == [(3, 0)]


def told_under_stress(stage, command, **environment):  # noqa: F811
    """The ids that the agent saw while threads made, used and ended communicators; the program must end well."""
    process = stage.program(command, environment)
    try:
        peer = stage.agent.arrival(20)
        end, seen = time.monotonic() + 2, set()
        while time.monotonic() < end:
            answer = told(peer)
            seen |= {entry["id"] for entry in answer["communicators"]}
            assert len(answer["communicators"]) <= STRESS_IDS
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out, err.decode()) == (0, b"ready\n", "")
    finally:
        process.kill()
        process.wait()
    return seen


def test_threads_may_do_what_they_like_while_the_agent_asks(stage, stubs, libraries, tmp_path):  # noqa: F811
    if shutil.which("setarch") is None:
        pytest.skip("setarch is missing; thread sanitizer needs it")
    program = with_sanitizer("thread", stage.run_folder, libraries, tmp_path, source="nccl_stress.c")
    command = ["setarch", "-R", program, stubs / "libnccl.so.2"]
    path = os.environ["PATH"]
    assert len(told_under_stress(stage, command, TSAN_OPTIONS="halt_on_error=1", PATH=path)) == STRESS_IDS


def test_the_same_with_musl(stage, libraries, run_folder, tmp_path):  # noqa: F811
    if not MUSL_LOADER.exists():
        pytest.skip(f"{MUSL_LOADER} is missing; the package is called musl")
    library = compiled_preload(run_folder, "libvgpu-musl.so", libc="musl")
    zig = [sys.executable, "-m", "ziglang", "cc", "-target", software_gpu.zig_target("musl"), "-O1", "-dynamic"]
    driver = libraries / "musl"
    nccl, program = tmp_path / "libnccl.so.2", tmp_path / "stress"
    subprocess.run([*zig, "-shared", "-fPIC", PROGRAMS / "stub_libnccl.c", "-o", nccl], check=True, timeout=120)
    sources = [PROGRAMS / "nccl_stress.c", driver / "libcuda.so.1"]
    subprocess.run([*zig, "-pthread", *sources, "-o", program], check=True, timeout=120)
    seen = told_under_stress(stage, [program, nccl], LD_PRELOAD=str(library), LD_LIBRARY_PATH=str(driver))
    assert len(seen) == STRESS_IDS


# ---- processes without them ----------------------------------------------------------------------


def test_nobody_claims_a_library_that_is_not_there(stage, stubs):  # noqa: F811
    process, peer = stage.child(
        "import ctypes as c; all = c.CDLL(None); names = ['ncclAllReduce', 'ncclCommInitRank', 'nvshmem_team_destroy']\n"
        "all.dlsym.restype = c.c_void_p; all.dlsym.argtypes = [c.c_void_p, c.c_char_p]\n"
        "all.dlvsym.restype = c.c_void_p; all.dlvsym.argtypes = [c.c_void_p, c.c_char_p, c.c_char_p]"
    )
    absent = process.run("result = [hasattr(all, n) or bool(all.dlsym(None, n.encode())) for n in names]")
    versioned = process.run("result = [bool(all.dlvsym(None, n.encode(), b'NVSHMEM')) for n in names]")
    assert absent == versioned == [False] * 3
    # One version has no ncclAlltoAll, so nobody has it.
    process.run(f"c.CDLL({str(stubs / 'old/libnccl.so.2')!r})")
    assert process.run("result = [bool(all.dlsym(None, b'ncclAlltoAll')), bool(all.dlsym(None, b'ncclSend'))]") == [
        *(False, True)
    ]
    assert told(peer)["communicators"] == []


def test_driver_mode_answers_nothing_and_nccl_works(stage, stubs):  # noqa: F811
    process, peer = stage.child(HELP + f"nccl = opened({str(stubs / 'libnccl.so.2')!r})", mode="driver")
    assert process.run("comm = init(nccl); result = [reduce(nccl, comm), nccl.ncclCommDestroy(comm)]") == [0, 0]
    assert peer.version == 1


# ---- NVSHMEM -------------------------------------------------------------------------------------


@pytest.fixture
def element(stage, stubs):  # noqa: F811
    return stage.child(
        HELP + f"shmem = c.CDLL({str(stubs / 'libnvshmem_host.so.3')!r}); team, other = c.c_int32(), c.c_int32()",
        STUB_PE="2",
        STUB_PES="4",
    )


def test_an_element_and_its_teams_are_told_until_it_is_finalised(element):
    process, peer = element
    assert told(peer)["nvshmem"] == []
    assert process.run("result = shmem.nvshmemx_hostlib_init_attr(8, None)") == 0
    entry = {"library": "nvshmem", "version": "3.4.5", "pe": 2, "size": 4, "device": 0, "teams": []}
    assert told(peer)["nvshmem"] == [entry]
    assert process.run("result = shmem.nvshmem_team_split_strided(0, 0, 1, 4, None, c.c_long(0), c.byref(team))") == 0
    six = {"name": "6", "pe": 0, "size": 6, "parent": "world"}
    assert told(peer)["nvshmem"] == [entry | {"teams": [six]}]
    process.run(
        "no = c.c_long(0); shmem.nvshmem_team_split_2d(6, 2, None, no, c.byref(team), None, no, c.byref(other))"
    )
    pair = [{"name": str(n), "pe": n - 6, "size": n, "parent": "6"} for n in (7, 8)]
    assert told(peer)["nvshmem"] == [entry | {"teams": [six, *pair]}]
    process.run("shmem.nvshmem_team_split_strided(0, 3, 1, 1, None, c.c_long(0), c.byref(team))")  # not in it
    process.run("shmem.nvshmem_team_destroy(6)")
    assert sorted(team["name"] for team in told(peer)["nvshmem"][0]["teams"]) == ["7", "8"]
    assert process.run("result = [team.value, shmem.stub_teams_gone()]") == [-1, 1]
    process.run("shmem.nvshmemx_hostlib_finalize()")
    assert told(peer)["nvshmem"] == []


def test_the_device_librarys_way_in_passes_all_its_arguments_and_ends_with_the_last(element):
    process, peer = element
    process.run("class V(c.Structure): _fields_ = [(n, c.c_int) for n in 'abc']\n")
    process.run(
        "start = shmem.nvshmemid_hostlib_init_attr; provided = c.c_int()\n"
        "start.argtypes = [c.c_int, c.c_void_p, c.c_uint, c.c_void_p, V, c.c_void_p]"
    )
    assert process.run("result = [start(1, c.byref(provided), 8, None, V(3, 4, 5), None) for _ in range(2)]") == [0, 0]
    assert process.run("result = start(1, c.byref(provided), 8, None, V(3, 4, 6), None)") == 1
    process.run("shmem.nvshmemid_hostlib_finalize(None, None)")
    assert len(told(peer)["nvshmem"]) == 1
    process.run("shmem.nvshmemid_hostlib_finalize(None, None)")
    assert told(peer)["nvshmem"] == []
