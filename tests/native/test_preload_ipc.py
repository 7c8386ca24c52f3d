"""Memory shared by legacy IPC handles, with libvgpu.so in staged mode on the software driver (spec/preload-protocol.md).

The same programs run with the plain driver and with the preload and must say the same; an agent double then looks at who
shares what, and takes memory away in between. No GPU; tests/gpu/ipc_run.py runs the programs on a real one.
"""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import socket
import struct
import subprocess
import sys

import pytest

from gpu_state.preload_objects import Holdings, shares_from_json
from tests.gpu import ipc_run
from tests.native.agent_double import DETACH, DETACHED, FAILED, RELEASE
from tests.native.preload_programs import wait_until
from tests.native.test_preload_staged import (  # noqa: F401 - the fixtures are used by name
    FILL,
    MUSL_LOADER,
    PROGRAMS,
    SANITIZERS,
    bring_back,
    close_all,
    compiled,
    descriptors_of,
    libraries,
    make_stage,
    preload,
    run_folder,
    stage,
    take_away,
    with_sanitizer,
)
from tests.native.test_software_driver import MIB
from tests.software_gpu import build as software_gpu

SCENARIOS = (
    *("share", "two-importers", "faults", "facts", "queue", "contexts", "threads"),
    *("exporter-ends", "exporter-is-killed", "exporter-is-replaced", "exporter-forks", "exporter-is-stopped"),
)
OWNED = f"MIB = {MIB}; p = ok(d.cuMemAlloc(4 * MIB)); write(p, b'of the exporter')"
KCMP, KCMP_FILE = 312, 0


@pytest.fixture(scope="session")
def program(tmp_path_factory, libraries):  # noqa: F811
    """A function (libc) -> the scenarios, compiled for it."""
    made = {}

    def make(libc):
        if libc not in made:
            path = tmp_path_factory.mktemp(libc) / "ipc_share"
            driver = libraries if libc == "glibc" else libraries / "musl"
            zig = [sys.executable, "-m", "ziglang", "cc", "-target", software_gpu.zig_target(libc)]
            options = ["-O1", "-pthread", "-Wall", "-Wextra", "-Werror", *(["-dynamic"] if libc == "musl" else [])]
            sources = [PROGRAMS / "ipc_share.c", driver / "libcuda.so.1"]
            subprocess.run([*zig, *options, *sources, "-o", path], check=True, timeout=120)
            made[libc] = path
        return made[libc]

    return make


def says(command, environment, deadline_s=60):
    """What a program prints; it must end well and in silence."""
    raised = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))  # noqa: E731
    done = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        timeout=deadline_s,
        check=False,
        preexec_fn=raised,  # the software driver holds a descriptor for each object, as the real one does not
    )
    assert (done.returncode, done.stderr) == (0, ""), done
    return done.stdout.splitlines()


def in_mode(stage, mode, **more):  # noqa: F811
    """The environment of a program."""
    stage.set_mode(mode)
    front = {} if mode == "plain" else {"LD_PRELOAD": str(stage.library)}
    return {**stage.node.environment, **front, **more}


# ---- the same programs with and without ----------------------------------------------------------


@pytest.mark.parametrize("mib", [4, 1], ids=["backed by us", "the driver's own"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_programs_share_memory_as_with_the_plain_driver(scenario, mib, stage, program):  # noqa: F811
    command = [program("glibc"), scenario, str(mib)]
    plain = says(command, in_mode(stage, "plain"))
    assert plain
    assert says(command, in_mode(stage, "staged")) == plain
    assert says(command, in_mode(stage, "driver")) == plain


@pytest.mark.parametrize("scenario", ["share", "faults", "threads", "exporter-is-replaced"])
def test_the_same_without_an_agent(scenario, stage, program):  # noqa: F811
    command = [program("glibc"), scenario]
    plain = says(command, in_mode(stage, "plain"))
    stage.agent.stop()
    assert says(command, in_mode(stage, "staged")) == plain


@pytest.mark.parametrize("scenario", ["share", "faults", "queue", "threads"])
def test_the_same_with_musl(scenario, stage, program, libraries, run_folder):  # noqa: F811
    if not MUSL_LOADER.exists():
        pytest.skip(f"{MUSL_LOADER} is missing; the package is called musl")
    stage.library = compiled(run_folder, "libvgpu-musl.so", libc="musl")
    driver = {"LD_LIBRARY_PATH": str(libraries / "musl")}
    command = [program("musl"), scenario]
    assert says(command, in_mode(stage, "staged", **driver)) == says(command, in_mode(stage, "plain", **driver))


def test_a_thousand_handles_are_open_at_once(make_stage, preload, program):  # noqa: F811
    stage = make_stage(preload, memory=2560 * MIB)  # noqa: F811
    command = [program("glibc"), "many", "2"]
    assert says(command, in_mode(stage, "plain"), 120) == ["1000 handles"]
    assert says(command, in_mode(stage, "staged"), 120) == ["1000 handles"]


def test_freed_memory_lives_until_it_is_closed(stage, program):  # noqa: F811
    """Undefined with the plain driver."""
    assert says([program("glibc"), "freed"], in_mode(stage, "staged")) == ["open what was freed: 1"]


@pytest.mark.parametrize("name", SANITIZERS)
def test_it_is_clean_under_a_sanitizer(name, stage, libraries, tmp_path):  # noqa: F811
    if shutil.which("gcc") is None:
        pytest.skip("gcc is missing")
    watched = with_sanitizer(SANITIZERS[name], stage.run_folder, libraries, tmp_path, "ipc_share.c")
    options = {"TSAN_OPTIONS": "halt_on_error=1", "ASAN_OPTIONS": "detect_leaks=0"}
    stage.set_mode("staged")
    for scenario in ("threads", "faults", "queue", "exporter-forks"):
        assert says(["setarch", "-R", watched, scenario], {**stage.node.environment, **options}, 120)


@pytest.mark.parametrize(
    ("scenario", "plain", "ours", "known", "others"),
    [
        ("share", "a: 1\nb: 2\n", "a: 1\nb: 2\n", 0, 0),
        ("share", "a: 1\nb: 2\n", "a: 1\nb: 3\n", 0, 1),
        ("share", "a: 1\nb: 2\n", "a: 1\n", 0, 1),
        ("faults", "open a damaged handle: 208\na: 1\n", "open a damaged handle: 1\na: 1\n", 0, 0),
        ("exporter-forks", "open without the exporter: 0\n", "open without the exporter: 400\n", 1, 0),
        ("exporter-forks", "open without the exporter: 0\n", "open without the exporter: 1\n", 0, 1),
        ("exporter-ends", "open without the exporter: 0\n", "open without the exporter: 400\n", 0, 1),
    ],
)
def test_the_run_on_a_gpu_tells_known_differences_from_others(scenario, plain, ours, known, others):
    assert [len(found) for found in ipc_run.differences(scenario, plain, ours)] == [known, others]


# ---- two processes and an agent ------------------------------------------------------------------


def pair(stage, source="", device=0):  # noqa: F811
    """An exporter that owns `p`, an importer that has opened it as `q`, and their agent's connections."""
    owner, owner_peer = stage.child(f"{OWNED}; {source}")
    other, other_peer = stage.child(f"start({device}); q = opened({owner.run('result = offer(p)')!r})")
    return owner, owner_peer, other, other_peer


def is_same_open_file(one, other):
    libc, pid = ctypes.CDLL(None, use_errno=True), os.getpid()
    answer = libc.syscall(KCMP, pid, pid, KCMP_FILE, one, other)
    assert answer >= 0, os.strerror(ctypes.get_errno())
    return answer == 0


def test_shares_tell_who_shares_what_by_one_open_file(stage):  # noqa: F811
    owner, owner_peer, other, other_peer = pair(stage, "x = ok(d.cuMemAlloc(2 * MIB)); y = ok(d.cuMemAlloc(2 * MIB))")
    third, third_peer = stage.child(f"q = opened({owner.run('result = offer(p)')!r})")
    third.run(f"w = opened({owner.run('result = offer(x)')!r})")
    told, descriptors = {}, {}
    for peer in (owner_peer, other_peer, third_peer):
        answer, fds = peer.shares()
        told[peer], descriptors[peer] = shares_from_json(answer), list(fds.values())
        assert [share.id for share in told[peer]] == list(fds)
    assert [[share.role for share in told[peer]] for peer in told] == [["exporter"] * 2, ["importer"], ["importer"] * 2]
    both, of_x = told[owner_peer]
    assert (both.of.shared.ways, both.of.shared.peers, both.of.shared.peer_count) == (
        ("handle",),
        (other.pid, third.pid),
        2,
    )
    assert of_x.of.shared.peers == (third.pid,)
    (seen,) = told[other_peer]
    assert (seen.of.kind, seen.of.size, seen.of.requested) == ("opened", 4 * MIB, 4 * MIB)
    assert (seen.of.exporter_pid, seen.of.exporter_object) == (owner.pid, both.id)
    assert (seen.of.device, seen.of.uuid) == (0, both.of.uuid)
    (mapping,) = seen.of.mappings
    assert (mapping.va, mapping.size, mapping.offset, mapping.access) == (
        other.run("result = int(q)"),
        4 * MIB,
        0,
        ((0, 3),),
    )
    whole, part = descriptors[owner_peer]
    same = [
        [is_same_open_file(one, fd) for fd in descriptors[peer]]
        for one in (whole, part)
        for peer in (other_peer, third_peer)
    ]
    assert same == [[True], [True, False], [False], [False, True]]
    for fds in descriptors.values():
        close_all(dict(enumerate(fds)))
    other.run("ok(d.cuIpcCloseMemHandle(q))")
    owner.run("ok(d.cuMemFree(x))")
    assert other_peer.shares() == ({"shares": []}, {})
    answer, fds = owner_peer.shares()
    assert [share["id"] for share in answer["shares"]] == [both.id]
    close_all(fds)


def test_shares_by_descriptor_are_told_by_one_open_file_too(stage):  # noqa: F811
    prelude = "import os; H = d.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR; "
    give = "h = ok(d.cuMemCreate(4 << 20, properties(), 0)); p = map_memory(h, 4 << 20); fds = [int(ok(d.cuMemExportToShareableHandle(h, H, 0))) for _ in range(2)]; result = fds"
    owner, owner_peer = stage.child(prelude)
    numbers = owner.run(give)
    take = "fd = ctypes.CDLL(None).syscall(438, os.pidfd_open({}), {}, 0); i = ok(d.cuMemImportFromShareableHandle(fd, H)); os.close(fd); q = map_memory(i, 4 << 20)"
    others = [stage.child(prelude + take.format(owner.pid, number)) for number in numbers]
    owner.run("[os.close(fd) for fd in fds]; write(p, b'abcd')")
    answer, fds = owner_peer.shares()
    (share,) = shares_from_json(answer)
    assert (share.role, share.of.kind, share.of.shared.ways) == ("exporter", "vmm", ("descriptor",))
    for child, peer in others:
        assert child.run("result = read(q, 4).decode()") == "abcd"
        answer, taken = peer.shares()
        (seen,) = shares_from_json(answer)
        assert (seen.role, seen.of.kind, seen.of.size, seen.of.device) == ("importer", "import", 4 << 20, 0)
        assert is_same_open_file(fds[share.id], taken[seen.id])
        close_all(taken)
        before = len(descriptors_of(child.pid))
        child.run("ok(d.cuMemUnmap(q, 4 << 20)); ok(d.cuMemRelease(i))")
        assert len(descriptors_of(child.pid)) <= before - 1
        assert peer.shares()[0] == {"shares": []}
    close_all(fds)
    assert owner.run(give + "; result = len(set(fds))") == 2


def test_the_inventory_names_imports_and_who_shares_an_object(stage):  # noqa: F811
    owner, owner_peer, other, other_peer = pair(stage)
    (owned,) = Holdings.from_json(owner_peer.inventory()).objects
    assert owned.shared.peers == (other.pid,)
    holdings = Holdings.from_json(other_peer.inventory())
    (taken,) = holdings.imports
    assert (holdings.objects, taken.kind, taken.exporter_object) == ((), "opened", owned.id)
    (blocker,) = Holdings.from_json(owner_peer.inventory()).blockers
    assert (blocker.kind, blocker.bytes, blocker.va, blocker.object) == (
        "ipc-exported",
        4 * MIB,
        owner.run("result = int(p)"),
        owned.id,
    )
    assert blocker.peers == (other.pid,)
    assert (
        blocker.what
        == f"memory of process {owner.pid}, offered with cuIpcGetMemHandle and fetched by process {other.pid}"
    )
    (blocker,) = holdings.blockers
    assert (blocker.kind, blocker.bytes, blocker.va) == ("ipc-opened", 4 * MIB, other.run("result = int(q)"))
    assert (
        blocker.what
        == f"memory of process {owner.pid} (its object {owned.id}), opened by process {other.pid} with cuIpcOpenMemHandle"
    )
    other.run("ok(d.cuIpcCloseMemHandle(q))")
    assert other_peer.inventory()["blockers"] == []


def test_what_is_opened_is_never_released(stage):  # noqa: F811
    owner, _, other, peer = pair(stage)
    peer.rest()
    kind, answer = peer.ask(RELEASE)
    assert kind == FAILED
    assert f"memory of process {owner.pid}" in answer["what"]
    peer.open_gate()
    assert other.run("result = read(q, 15).decode()") == "of the exporter"


def test_a_context_of_another_device_gets_access(stage):  # noqa: F811
    _, _, other, peer = pair(stage, device=1)
    (taken,) = Holdings.from_json(peer.inventory()).imports
    assert (taken.device, taken.mappings[0].access) == (0, ((0, 3), (1, 3)))
    assert other.run("result = read(q, 15).decode()") == "of the exporter"


def test_peers_get_access_to_what_is_opened(stage):  # noqa: F811
    _, _, other, peer = pair(stage)
    other.run(
        "own = ok(d.cuCtxGetCurrent()); two = ok(d.cuDevicePrimaryCtxRetain(1)); ok(d.cuCtxSetCurrent(two)); ok(d.cuCtxEnablePeerAccess(own, 0))"
    )
    (taken,) = Holdings.from_json(peer.inventory()).imports
    assert taken.mappings[0].access == ((0, 3), (1, 3))


# ---- memory goes and comes in between ------------------------------------------------------------


def sockets_of(pid):
    return [link for _, link in descriptors_of(pid) if link.startswith("socket:")]


def test_while_detached_there_is_no_socket_and_afterwards_the_old_handle_is_good(stage):  # noqa: F811
    owner, peer = stage.child(OWNED)
    handle = owner.run("result = offer(p)")
    wait_until(lambda: len(sockets_of(owner.pid)) == 2)
    other, _ = stage.child()
    stage.agent.stop_listening()
    peer.send(DETACH, 7)
    assert peer.expect(DETACHED) == (7, {})
    wait_until(lambda: sockets_of(owner.pid) == [])  # its own it closes once it has answered
    other.send(f"q = opened({handle!r}); result = read(q, 15).decode()")
    assert not other.is_answering(0.4)
    assert owner.run("result = offer(p)") == handle  # its gate is open
    stage.agent.start()
    assert stage.again().pid == owner.pid
    assert other.receive() == "of the exporter"


def test_a_first_offer_while_detached_opens_nothing_until_the_agent_is_back(stage):  # noqa: F811
    owner, peer = stage.child(OWNED)
    other, _ = stage.child()
    stage.agent.stop_listening()
    peer.send(DETACH, 7)
    peer.expect(DETACHED)
    handle = owner.run("result = offer(p)")
    other.send(f"q = opened({handle!r}); result = read(q, 15).decode()")
    assert not other.is_answering(0.3)
    assert sockets_of(owner.pid) == []
    stage.agent.start()
    assert other.receive() == "of the exporter"


def test_while_the_exporters_memory_is_away_openers_wait_and_it_holds_no_descriptor(stage):  # noqa: F811
    owner, peer = stage.child(OWNED)
    handle = owner.run("result = offer(p)")
    other, _ = stage.child()
    for round_ in range(2):
        fds = take_away(peer)
        assert [link for _, link in descriptors_of(owner.pid) if "memfd:software-gpu" in link] == []
        answer, none = peer.shares()
        assert ([share["role"] for share in answer["shares"]], none) == (["exporter"], {})
        other.send(f"q = opened({handle!r}); result = read(q, 15).decode()")
        assert not other.is_answering(0.3)
        bring_back(peer, fds)
        assert other.receive() == "of the exporter"
        other.run(f"write(q, b'written in {round_}'); ok(d.cuIpcCloseMemHandle(q))")
        assert owner.run("result = read(p, 12).decode()") == f"written in {round_}"
        owner.run("write(p, b'of the exporter')")
    answer, fds = peer.shares()
    assert len(fds) == 1
    close_all(fds)


def test_an_opener_whose_own_gate_is_closed_does_not_hold_up_its_rest(stage):  # noqa: F811
    owner, peer = stage.child(OWNED)
    handle = owner.run("result = offer(p)")
    other, other_peer = stage.child()
    fds = take_away(peer)
    other.send(f"q = opened({handle!r}); result = read(q, 15).decode()")
    assert not other.is_answering(0.1)
    assert other_peer.rest()["waited_ms"] < 1500
    bring_back(peer, fds)
    assert not other.is_answering(0.2)
    other_peer.open_gate()
    assert other.receive() == "of the exporter"


def test_openers_go_on_while_the_exporters_memory_goes_and_comes(stage):  # noqa: F811
    owner, peer = stage.child(OWNED)
    handle = owner.run("result = offer(p)")
    other, _ = stage.child("context = ok(d.cuCtxGetCurrent()); rounds = [0, 0, 0]; over = []")
    other.run(
        "def work(n):\n"
        "    ok(d.cuCtxSetCurrent(context))\n"
        "    while not over:\n"
        f"        q = opened({handle!r}); assert read(q, 15) == b'of the exporter'; ok(d.cuIpcCloseMemHandle(q)); rounds[n] += 1\n"
        "threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(3)]\n"
        "[t.start() for t in threads]"
    )
    for _ in range(8):
        bring_back(peer, take_away(peer))
        other.run("goal = max(rounds) + 2")
        wait_until(lambda: other.run("result = min(rounds) >= goal"), 20)
    assert (
        other.run("over.append(1); [t.join() for t in threads]; result = [t.is_alive() for t in threads]")
        == [False] * 3
    )


def test_memory_that_came_back_and_is_freed_leaves_no_descriptor(stage):  # noqa: F811
    owner, peer = stage.child(FILL + "ps = [ok(d.cuMemAlloc(n * MIB)) for n in (2, 4, 6)]; hs = [offer(p) for p in ps]")
    bring_back(peer, take_away(peer))
    owner.run("[ok(d.cuMemFree(p)) for p in ps]")
    assert [link for _, link in descriptors_of(owner.pid) if "memfd:software-gpu" in link] == []


# ---- a guest in the process ----------------------------------------------------------------------


def test_no_descriptor_is_left_behind(stage):  # noqa: F811
    owner, _ = stage.child(OWNED + "; h = offer(p); ok(d.cuMemFree(p))")
    other, _ = stage.child()
    counts = lambda: [len(descriptors_of(child.pid)) for child in (owner, other)]  # noqa: E731
    wait_until(lambda: len(sockets_of(owner.pid)) == 2)
    before = counts()
    for _ in range(30):
        handle = owner.run("p = ok(d.cuMemAlloc(4 * MIB)); result = offer(p)")
        other.run(
            f"q = opened({handle!r}); r = opened({handle!r}); ok(d.cuIpcCloseMemHandle(q)); ok(d.cuIpcCloseMemHandle(r))"
        )
        owner.run("ok(d.cuMemFree(p))")
    wait_until(lambda: counts() == before)


def test_handles_work_past_the_limit_of_open_files(stage):  # noqa: F811
    many = "ps = [ok(d.cuMemAlloc(2 << 20)) for _ in range(40)]; [write(p, bytes([n]) * 4) for n, p in enumerate(ps)]\n"
    low = "import os, resource; limit = max(map(int, os.listdir('/proc/self/fd'))) + 2; resource.setrlimit(resource.RLIMIT_NOFILE, (limit, 4096))"
    owner, _ = stage.child(many + low)
    handles = owner.run("result = [offer(p) for p in ps]")
    other, _ = stage.child(low.replace("+ 2", "+ 60"))
    other.run(f"qs = [opened(h) for h in {handles!r}]")
    assert other.run("result = [read(q, 1)[0] for q in qs] == list(range(40))")
    assert owner.run("result = resource.getrlimit(resource.RLIMIT_NOFILE)[0] == limit")


def test_an_application_that_closes_our_sockets_can_go_on_sharing(stage):  # noqa: F811
    owner, _ = stage.child(OWNED)
    handle = owner.run("result = offer(p)")
    wait_until(lambda: len(sockets_of(owner.pid)) == 2)
    owner.run(
        "import os; os.closerange(200, 4000); f = os.open('/dev/null', 0); [os.dup2(f, n) for n in range(990, 1010)]"
    )
    assert owner.run("result = offer(p)") == handle
    other, _ = stage.child()
    assert other.run(f"q = opened({handle!r}); result = read(q, 15).decode()") == "of the exporter"
    assert owner.run("result = [os.readlink(f'/proc/self/fd/{n}') for n in range(990, 1010)] == ['/dev/null'] * 20")


def test_a_forked_child_keeps_no_socket_and_no_memory_of_its_parent(stage):  # noqa: F811
    owner, _ = stage.child(OWNED)
    handle = owner.run("result = offer(p)")
    wait_until(lambda: len(sockets_of(owner.pid)) == 2)
    forked = "import os; out, into = os.pipe()\nif os.fork() == 0: os.write(into, json.dumps([os.readlink('/proc/self/fd/' + n) for n in os.listdir('/proc/self/fd') if int(n) >= 200]).encode()); os._exit(0)\nresult = json.loads(os.read(out, 10000)); os.wait()"
    left = owner.run(forked)
    assert [link for link in left if link.startswith("socket:")] == []
    other, _ = stage.child(f"q = opened({handle!r})")
    assert other.run("result = read(q, 15).decode()") == "of the exporter"


def test_many_forks_while_others_open_leave_nothing_in_the_children(stage):  # noqa: F811
    owner, _ = stage.child(OWNED)
    handle = owner.run("result = offer(p)")
    other, _ = stage.child("import os; context = ok(d.cuCtxGetCurrent()); over = []")
    other.run(
        "def work():\n    ok(d.cuCtxSetCurrent(context))\n"
        f"    while not over: ok(d.cuIpcCloseMemHandle(opened({handle!r})))\n"
        "thread = threading.Thread(target=work, daemon=True); thread.start()"
    )
    links = other.run(
        "found = []\n"
        "for _ in range(60):\n"
        "    out, into = os.pipe()\n"
        "    if os.fork() == 0:\n"
        "        links = [os.readlink('/proc/self/fd/' + n) for n in os.listdir('/proc/self/fd') if os.path.lexists('/proc/self/fd/' + n)]\n"
        "        os.write(into, json.dumps([link for link in links if link.startswith('socket')]).encode()); os._exit(0)\n"
        "    os.close(into); found += json.loads(os.read(out, 10000)); os.close(out); os.wait()\n"
        "over.append(1); thread.join(); result = found",
        within_s=60,
    )
    assert links == []


def ask_service(handle, secret=None, uid=None):
    """The status that the service of a handle gives to this process, or to one of another user."""
    raw = bytes.fromhex(handle)
    request = b"VGPUASK1" + raw[24:32] + (raw[32:48] if secret is None else secret)
    source = (
        "import os, socket, sys\n"
        f"{'' if uid is None else f'os.setuid({uid})'}\n"
        "s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.settimeout(5)\n"
        f"s.connect('\\0vgpu-share-{raw[8:24].hex()}'); s.send({request!r})\n"
        "reply, fds, _, _ = socket.recv_fds(s, 64, 4); sys.stdout.write(f'{reply.hex()} {len(fds)}')"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=20, check=True)
    reply, count = done.stdout.split()
    magic, status, _, size, requested = struct.unpack("<8sIIQQ", bytes.fromhex(reply))
    assert magic == b"VGPUGIV1"
    return status, size, requested, int(count)


def test_the_service_speaks_what_is_written_and_gives_only_to_who_may_have_it(stage):  # noqa: F811
    owner, _ = stage.child(f"p = ok(d.cuMemAlloc(4 * {MIB} + 5))")
    handle = owner.run("result = offer(p)")
    assert ask_service(handle) == (0, 6 * MIB, 4 * MIB + 5, 1)
    assert ask_service(handle, secret=bytes(16)) == (1, 0, 0, 0)
    if os.getuid() == 0:
        assert ask_service(handle, uid=65534) == (2, 0, 0, 0)
    owner.run("ok(d.cuMemFree(p))")
    assert ask_service(handle) == (1, 0, 0, 0)


def test_callers_that_say_nothing_do_not_hold_others_up(stage):  # noqa: F811
    owner, _ = stage.child(OWNED)
    handle = owner.run("result = offer(p)")
    address = f"\0vgpu-share-{bytes.fromhex(handle)[8:24].hex()}"
    silent = []
    for _ in range(20):
        silent.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        silent[-1].connect(address)
    silent[0].send(b"nonsense")
    other, _ = stage.child()
    assert other.run(f"q = opened({handle!r}); result = read(q, 15).decode()") == "of the exporter"
    for one in silent:
        one.close()


def test_a_service_of_another_user_is_not_believed(stage):  # noqa: F811
    """Somebody listens under the name of an exporter that is gone."""
    if os.getuid() != 0:
        pytest.skip("another user is needed")
    owner, _ = stage.child(OWNED)
    handle = owner.run("result = offer(p)")
    owner.kill()
    name = bytes.fromhex(handle)[8:24].hex()
    listen = f"s.bind('\\0vgpu-share-{name}'); s.listen(); print(flush=True); s.accept()[0].recv(100)"
    source = f"import os, socket; os.setuid(65534); s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); {listen}"
    squatter = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE)
    try:
        squatter.stdout.readline()
        other, _ = stage.child()
        assert other.run(f"result = code(d.cuIpcOpenMemHandle(handle_from({handle!r}), 1))") == 400
    finally:
        squatter.kill()
        squatter.communicate()
