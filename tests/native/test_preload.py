"""libvgpu.so in many processes: who is registered, and that nobody else notices it (spec/preload-protocol.md).

Real processes with a stand-in driver and a stand-in agent on a real socket; no GPU, no container.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.native.agent_double import DETACH, DETACHED, PING, PONG, AgentDouble
from tests.native.preload_programs import (
    DEADLINE_S,
    HERE,
    TARGETS,
    Programs,
    helper_thread,
    sockets_of,
    wait_until,
)
from tests.software_gpu import build as software_gpu
from vgpu_errors import BuildFailed
from vgpu_preload import build as preload_build
from vgpu_preload.elf_facts import read_elf_facts

ROOT = Path(__file__).resolve().parents[2]
MUSL_LOADER = Path("/lib/ld-musl-x86_64.so.1")
UUIDS = [
    {"ordinal": 0, "uuid": "GPU-00102030-4050-6070-8090-a0b0c0d0e0f0"},
    {"ordinal": 1, "uuid": "GPU-01112131-4151-6171-8191-a1b1c1d1e1f1"},
]


@pytest.fixture(scope="session")
def socket_path(tmp_path_factory):
    return tmp_path_factory.mktemp("run") / "agent.sock"


@pytest.fixture(scope="session")
def all_programs(tmp_path_factory, socket_path):
    built = {}

    def programs_for(libc):
        if libc == "musl" and not MUSL_LOADER.exists():
            pytest.skip(f"{MUSL_LOADER} is missing; the package is called musl")
        if libc not in built:
            built[libc] = Programs(libc, tmp_path_factory.mktemp(libc) / "root", socket_path)
        return built[libc]

    return programs_for


@pytest.fixture
def glibc(all_programs):
    return all_programs("glibc-new")


@pytest.fixture(params=["glibc-new", "musl"])
def programs(request, all_programs):
    return all_programs(request.param)


@pytest.fixture
def agent(socket_path):
    with AgentDouble(socket_path) as agent:
        yield agent


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    out = tmp_path_factory.mktemp("preload")
    return out, preload_build.build(out)


# ---- who is registered ---------------------------------------------------------------------------

HARNESSES = {
    "directly linked": ("direct", (), {}),
    "another library's constructor": ("early", (), {}),
    "dlopen and dlsym": ("asking", ("dlsym",), {}),
    "dlopen and RTLD_DEFAULT": ("asking", ("default",), {}),
    "dlopen and dlvsym": ("asking", ("dlvsym",), {}),
    "a dlsym found by dlsym": ("asking", ("found_dlsym",), {}),
    "cuGetProcAddress of CUDA 11": ("asking", ("v1",), {}),
    "cuGetProcAddress of CUDA 12": ("asking", ("v2",), {}),
    "a driver that answers with global symbols": ("asking", ("v2",), {"cuda": "global"}),
}


@pytest.mark.parametrize("libc", TARGETS)
@pytest.mark.parametrize("harness", HARNESSES)
def test_a_process_is_registered_however_it_reaches_cuinit(harness, libc, all_programs, agent):
    if (harness, libc) == ("dlopen and dlvsym", "musl"):
        return  # musl has no dlvsym; the golden export list holds it to that
    programs = all_programs(libc)
    name, arguments, variables = HARNESSES[harness]
    programs.need("global/libcuda.so.1")
    with programs.started(name, *arguments, **variables) as process:
        peer = agent.arrival()
        helper = wait_until(lambda: helper_thread(process.pid))
        assert peer.pid == process.pid
        assert peer.hello == {
            "pid": process.pid,
            "ns_tid": int(helper.name),
            "comm": name,
            "build_id": programs.facts.build_id,
            "libc": libc.partition("-")[0],
            "driver_version": 13000,
            "devices": UUIDS,
            "mode": "driver",
        }


def test_python_with_ctypes_is_registered(glibc, agent):
    glibc.need("libcuda.so.1")
    code = "import ctypes, sys; assert ctypes.CDLL('libcuda.so.1').cuInit(0) == 0; sys.stdin.read()"
    process = subprocess.Popen([sys.executable, "-c", code], env=glibc.environment(), stdin=subprocess.PIPE)
    assert agent.arrival().pid == process.pid
    process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0


def test_cuda_bindings_on_the_software_driver_are_registered(glibc, agent, tmp_path):
    driver = software_gpu.build(ROOT / "build/software_gpu")
    code = "import sys; from cuda.bindings import driver; assert driver.cuInit(0)[0] == 0; sys.stdin.read()"
    environment = glibc.environment() | {
        "LD_LIBRARY_PATH": str(driver),
        "SOFTWARE_GPU_DIR": str(tmp_path / "gpu"),
        "SOFTWARE_GPU_NODE_DIR": str(tmp_path / "dev"),
        "SOFTWARE_GPU_COUNT": "2",
    }
    process = subprocess.Popen([sys.executable, "-c", code], env=environment, stdin=subprocess.PIPE)
    hello = agent.arrival(20).hello
    assert hello["pid"] == process.pid
    assert hello["driver_version"] >= 12000
    assert [device["ordinal"] for device in hello["devices"]] == [0, 1]
    assert len({device["uuid"] for device in hello["devices"]}) == 2
    process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0


def test_the_glibc_build_also_works_in_a_musl_process(all_programs, agent):
    old, musl = all_programs("glibc-old"), all_programs("musl")
    with musl.started("asking", "v2", preload=str(old.preload)):
        hello = agent.arrival().hello
    assert (hello["libc"], hello["build_id"]) == ("musl", old.facts.build_id)


def test_two_hundred_threads_make_one_registration(programs, agent):
    with programs.started("behaviours", "threads") as process:
        assert agent.arrival().pid == process.pid
        assert agent.nobody_comes_for(0.2)
        assert len(sockets_of(process.pid)) == 1


def test_a_forked_child_is_registered_by_itself_and_holds_no_socket_of_its_parent(programs, agent):
    with programs.started("behaviours", "forks") as process:
        parent, child = agent.arrival(), agent.arrival()
        assert parent.hello["pid"] == process.pid
        assert child.hello["pid"] == child.pid != process.pid


def test_a_name_with_quotes_and_broken_bytes_arrives_as_json(programs, agent):
    with programs.started("behaviours", "odd_name"):
        # The kernel's /proc/self/comm escapes nothing but ends the line where the name has a newline.
        assert agent.arrival().hello["comm"] == 'q"b\\n'


@pytest.mark.parametrize("way", ["next", "handle"])
@pytest.mark.parametrize("order", ["before us", "behind us"])
@pytest.mark.parametrize(("name", "argument", "times"), [("direct", "twice", 2), ("asking", "default", 1)])
def test_another_preload_that_wraps_cuinit_is_called_each_time_and_does_not_loop(
    name, argument, times, order, way, programs, agent
):
    both = [str(programs.preload), str(programs.need("libinterposer.so"))]
    preload = ":".join(reversed(both) if order == "before us" else both)
    with programs.started(name, argument, ready="interposed", preload=preload, INTERPOSER=way) as process:
        lines = [process.stdout.readline() for _ in range(times)]
        assert lines == [b"interposed\n"] * (times - 1) + [b"ready\n"]
        assert agent.arrival().pid == process.pid


def test_the_written_protocol_is_what_is_spoken(glibc, agent):
    page = (ROOT / "spec/preload-protocol.md").read_text()
    page = page.partition("### HELLO")[2].partition("In version 2")[0]
    written = json.loads(re.search(r"```json\n(.*?)```", page, re.DOTALL)[1])
    members = re.findall(r"^\| `([a-z_\[\].]+)` \|", page, re.MULTILINE)
    with glibc.started("behaviours", "plain"):
        hello = agent.arrival().hello
    shape = {name: type(value) for name, value in hello.items()}
    assert {name: type(value) for name, value in written.items()} == shape
    assert {name: type(value) for name, value in written["devices"][0].items()} == {"ordinal": int, "uuid": str}
    assert members == [
        name for key in hello for name in [key, *(("devices[].ordinal", "devices[].uuid") if key == "devices" else ())]
    ]


# ---- who is left alone ---------------------------------------------------------------------------


def test_lookups_without_a_driver_give_what_they_give_without_us(programs):
    programs.need("libchain_two.so")
    alone, together = programs.output("lookups", preload=""), programs.output("lookups")
    assert together == alone
    assert "default cuInit: absent, error yes" in together
    assert "one, next of main one, of one two, of two nobody" in together
    assert "malloc wrapped yes" in together


def test_a_weak_reference_without_a_driver_finds_no_device(programs):
    assert programs.output("weak") == "100\n"


def test_a_failed_cuinit_starts_nothing(programs, agent):
    with programs.started("behaviours", "fails", STUB_CUINIT="100") as process:
        assert agent.nobody_comes_for(0.3)
        assert len(list(Path(f"/proc/{process.pid}/task").iterdir())) == 1


@pytest.mark.parametrize("name", ["hello", "hello_static"])
def test_a_program_without_cuda_runs_as_before(name, programs, agent):
    assert programs.output(name, "there") == "hello there\n"
    assert agent.arrivals.empty()


@pytest.mark.parametrize(
    ("command", "output"),
    [
        (["/bin/true"], ""),
        (["/bin/sh", "-c", "seq 1000 | sort -n | tail -1 | (read n; echo got $n)"], "got 1000\n"),
        (["/bin/sh", "-c", "for i in 1 2 3; do (echo $i) & done; wait"], None),
        ([sys.executable, "-c", "import ctypes, ssl, sqlite3; print(ctypes.CDLL(None).getpid() > 0)"], "True\n"),
        ([sys.executable, "-c", "import ctypes; print(hasattr(ctypes.CDLL(None), 'cuInit'))"], "False\n"),
    ],
)
def test_ordinary_programs_run_as_before(command, output, glibc, agent):
    done = subprocess.run(command, env=glibc.environment(), capture_output=True, text=True, timeout=20, check=True)
    assert done.stderr == ""
    assert output is None or done.stdout == output
    assert output is not None or sorted(done.stdout.split()) == ["1", "2", "3"]
    assert agent.arrivals.empty()


def test_a_setuid_program_is_not_touched(all_programs, agent):
    if os.geteuid() != 0:
        pytest.skip("only root can make a setuid program of another user")
    programs = all_programs("glibc-new")
    place = Path("/var/tmp") / f"vgpu-setuid-{os.getpid()}"
    try:
        place.write_bytes(programs.need("hello").read_bytes())
        place.chmod(0o4755)
        done = subprocess.run(
            [place, "there"],
            env=programs.environment(LD_DEBUG="files"),  # fills standard error unless the program is really setuid
            user=65534,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=True,
        )
        assert (done.stdout, done.stderr) == ("hello there\n", "")
    finally:
        place.unlink()


def test_loading_costs_less_than_a_millisecond(glibc, built):
    # The library as it is shipped; pairs, because the machine's other work comes and goes.
    library = built[1]["glibc"]["path"]
    differences = []
    for _ in range(200):
        times = [_seconds_of_true(glibc.environment(preload=preload)) for preload in ("", library)]
        differences.append(times[1] - times[0])
    assert statistics.median(differences) < 0.001


def _seconds_of_true(environment):
    begin = time.perf_counter()
    pid = os.posix_spawn("/bin/true", ["true"], environment)
    _, status = os.waitpid(pid, 0)
    assert status == 0
    return time.perf_counter() - begin


# ---- the helper as a guest -----------------------------------------------------------------------


def test_the_helper_takes_a_high_descriptor_and_no_signals(programs, agent):
    with programs.started("behaviours", "plain") as process:
        agent.arrival()
        (descriptor,) = sockets_of(process.pid)
        assert descriptor >= 200
        flags = Path(f"/proc/{process.pid}/fdinfo/{descriptor}").read_text().split("flags:")[1].split()[0]
        assert int(flags, 8) & os.O_CLOEXEC
        status = (helper_thread(process.pid) / "status").read_text()
        blocked = int(status.split("SigBlk:")[1].split()[0], 16)
        named = [number for number in range(1, 32) if number not in (signal.SIGKILL, signal.SIGSTOP)]
        assert all(blocked >> number - 1 & 1 for number in named)


def test_signals_mask_and_errno_of_the_application_are_untouched(programs, agent):
    with programs.started("behaviours", "signals") as process:
        agent.arrival()
        time.sleep(0.05)
        os.kill(process.pid, signal.SIGUSR1)


def test_setuid_of_the_process_reaches_the_helper(programs, agent):
    with programs.started("behaviours", "changes_user"):
        agent.arrival()


def test_the_driver_may_be_unloaded_while_the_helper_runs(programs, agent):
    with programs.started("behaviours", "unloads"):
        agent.arrival()


def test_the_process_ends_when_its_own_threads_have_ended(programs, agent):
    with programs.started("behaviours", "main_ends", ready="exit handlers ran"):
        agent.arrival().wait_end()


def test_the_process_ends_when_its_own_threads_have_ended_and_no_agent_is_there(programs):
    with programs.started("behaviours", "main_ends", ready="exit handlers ran"):
        pass


@pytest.mark.parametrize("how", ["exit", "quick_exit"])
@pytest.mark.parametrize("agent_is", ["absent", "there", "stuck"])
def test_exit_during_registration_is_clean(agent_is, how, programs, socket_path):
    agent = AgentDouble(socket_path)
    if agent_is != "absent":
        agent.start(accepts=agent_is == "there", backlog=64 if agent_is == "there" else 0)
    programs.need("libcuda.so.1")
    try:
        for _ in range(20):
            begin = time.monotonic()
            assert programs.output("behaviours", how) == ""
            assert time.monotonic() - begin < 2
    finally:
        agent.stop()


@pytest.mark.parametrize("reuse", ["file", "socket"])
def test_an_application_that_closes_all_descriptors_is_registered_again_and_keeps_its_own(
    reuse, programs, agent, tmp_path
):
    file = tmp_path / "theirs"
    with programs.started("behaviours", f"closes_{reuse}", str(file)) as process:
        first = agent.arrival()
        process.stdin.write(b"x")
        process.stdin.flush()
        assert process.stdout.readline() == b"closed\n"
        first.wait_end()
        assert agent.arrival().pid == process.pid
    assert reuse == "socket" or file.read_bytes() == b""


# ---- the agent comes and goes --------------------------------------------------------------------


def test_the_agent_may_start_later(programs, socket_path):
    with programs.started("behaviours", "plain") as process:
        time.sleep(0.3)
        with AgentDouble(socket_path) as agent:
            assert agent.arrival().pid == process.pid


def test_an_agent_that_restarts_hears_from_the_process_again(programs, agent):
    with programs.started("behaviours", "plain") as process:
        agent.arrival()
        for _ in range(2):
            agent.stop()
            agent.start()
            assert agent.arrival().pid == process.pid


def test_ping_is_answered_with_its_sequence(programs, agent):
    with programs.started("behaviours", "plain"):
        peer = agent.arrival()
        for sequence in (1, 2, 0xFFFFFFFF):
            peer.send(PING, sequence)
            assert peer.expect(PONG) == (sequence, {})


def test_detach_leaves_no_socket_until_the_agent_listens_again(programs, agent):
    with programs.started("behaviours", "plain") as process:
        for sequence in (7, 8):
            peer = agent.arrival()
            agent.stop_listening()
            peer.send(DETACH, sequence)
            assert peer.expect(DETACHED) == (sequence, {})
            peer.wait_end(1)
            assert sockets_of(process.pid) == {}
            assert agent.nobody_comes_for(0.3)
            assert sockets_of(process.pid) == {}
            agent.start()
            begin = time.monotonic()
            peer = agent.arrival()
            assert time.monotonic() - begin < 0.5
            agent.arrivals.put(peer)


def test_detach_during_use_of_a_socket_file_without_listener(programs, agent, socket_path):
    with programs.started("behaviours", "plain") as process:
        peer = agent.arrival()
        agent.stop_listening()
        socket_path.write_bytes(b"")  # exists, but nobody accepts
        peer.send(DETACH)
        peer.expect(DETACHED)
        time.sleep(0.2)
        assert sockets_of(process.pid) == {}
        socket_path.unlink()
        agent.start()
        agent.arrival(1)


@pytest.mark.parametrize(
    ("fault", "options"),
    [
        ("magic", {"magic": 0x12345678}),
        ("version", {"version": 2}),
        ("length", {"claimed": 65537}),
    ],
)
def test_a_broken_header_ends_the_connection_and_the_process_comes_back(fault, options, programs, agent):
    with programs.started("behaviours", "plain") as process:
        peer = agent.arrival()
        peer.send(PING, 1, **options)
        peer.wait_end(2)
        assert agent.arrival().pid == process.pid


def test_unknown_frames_are_skipped_whatever_they_carry(programs, agent):
    with programs.started("behaviours", "plain"):
        peer = agent.arrival()
        peer.send(99, 1, b"\xff" * 65536)
        peer.send(1000, 2, b"")
        peer.send(PING, 3, b'{"later":"version"}')
        assert peer.expect(PONG) == (3, {})


def test_half_a_frame_is_given_up_at_the_deadline(glibc, agent):
    with glibc.started("behaviours", "plain") as process:
        peer = agent.arrival()
        peer.connection.sendall(b"VGPU")
        peer.wait_end(8)  # spec/preload-protocol.md: 5 s for a frame
        assert agent.arrival().pid == process.pid


def test_a_peer_that_is_never_welcomed_comes_back_ever_more_slowly(glibc, agent):
    agent.welcomes = False
    times = []
    with glibc.started("behaviours", "plain"):
        for _ in range(4):
            peer = agent.arrival()
            times.append(time.monotonic())
            peer.hang_up()
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert gaps[0] < gaps[1] < gaps[2]
    assert gaps[2] > 0.35


# ---- the library itself --------------------------------------------------------------------------


def test_the_library_exports_the_table_of_calls_and_nothing_else(built):
    for libc, entry in built[1].items():
        names = _nm(entry["path"], "--defined-only")
        assert names == preload_build.exported_names(libc)
        assert names == read_elf_facts(Path(entry["path"]).read_bytes(), "it").exported
        assert {"cuInit", "dlsym", "cuGetProcAddress_v2"} <= names
        assert ("dlvsym" in names) == (libc == "glibc")
    table = (preload_build.SOURCES / "calls.def").read_text()
    own = set(re.findall(r"^(?:OWN(?:_NCCL|_NVSHMEM)?\(\w+|CALL\(CUresult, \w+), (\w+),", table, re.MULTILINE))
    own |= {"dlsym", "dlvsym"}
    assert {file.stem for file in (preload_build.SOURCES / "calls").glob("*.c")} == own


def test_the_library_needs_libc_alone_and_nothing_newer_than_glibc_2_17(built):
    text = subprocess.run(["readelf", "-dVW", built[1]["glibc"]["path"]], capture_output=True, text=True, check=True)
    versions = {word.rstrip(",") for word in text.stdout.split() if word.startswith("GLIBC_")}
    assert versions
    assert all(tuple(map(int, version[6:].split("."))) <= (2, 17) for version in versions)
    needed = [line for line in text.stdout.splitlines() if "(NEEDED)" in line]
    assert len(needed) == 1
    assert "[libc.so.6]" in needed[0]
    assert "INIT" not in text.stdout
    assert "TEXTREL" not in text.stdout


def test_all_that_the_glibc_build_uses_exists_in_musl_too(built):
    if not MUSL_LOADER.exists():
        pytest.skip(f"{MUSL_LOADER} is missing; the package is called musl")
    imported = {name.partition("@")[0] for name in _nm(built[1]["glibc"]["path"], "--undefined-only")}
    assert imported
    assert imported <= _nm(str(MUSL_LOADER), "--defined-only")


def _nm(path, which):
    text = subprocess.run(["nm", "-D", which, path], capture_output=True, text=True, check=True).stdout
    return {line.split()[-1] for line in text.splitlines()}


def test_the_layout_is_one_folder_per_build_id_and_a_current_file(built):
    out, entries = built
    for libc, entry in entries.items():
        library = Path(entry["path"])
        assert library == out / libc / entry["build_id"] / "libvgpu.so"
        assert (out / libc / "current").read_text().strip() == entry["build_id"]
        assert library.stat().st_mode & 0o777 == 0o755
        notes = subprocess.run(["readelf", "-nW", library], capture_output=True, text=True, check=True).stdout
        assert f"Build ID: {entry['build_id']}" in notes


def test_a_second_build_changes_nothing_and_a_lost_file_is_made_again(built):
    out, entries = built
    libraries = [Path(entry["path"]) for entry in entries.values()]
    before = [library.stat().st_mtime_ns for library in libraries]
    assert preload_build.build(out) == entries
    assert [library.stat().st_mtime_ns for library in libraries] == before
    content = libraries[0].read_bytes()
    libraries[0].unlink()
    assert preload_build.build(out) == entries
    assert libraries[0].read_bytes() == content


def test_the_build_says_what_it_does(built, capsys, monkeypatch):
    out, entries = built
    for known, said in [(True, "is up to date"), (False, entries["musl"]["path"])]:
        if not known:
            (out / "build.json").unlink()
        monkeypatch.setattr(sys, "argv", ["build", "--out", str(out)])
        assert preload_build.main() == 0
        assert said in capsys.readouterr().out


def test_the_same_sources_elsewhere_give_the_same_file(built, tmp_path, monkeypatch):
    shutil.copytree(preload_build.SOURCES, tmp_path / "elsewhere/vgpu_preload")
    monkeypatch.setattr(preload_build, "SOURCES", tmp_path / "elsewhere/vgpu_preload")
    for libc, entry in built[1].items():
        preload_build.compile_library(tmp_path / "libvgpu.so", libc)
        assert (tmp_path / "libvgpu.so").read_bytes() == Path(entry["path"]).read_bytes()


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        ('__attribute__((visibility("default"))) int stray(void) { return 0; }', "stray"),
        ('__attribute__((constructor)) static void early(void) { __asm__ volatile(""); }', "constructors"),
        (
            '#include <dlfcn.h>\n__attribute__((visibility("default"))) void *vgpu_probe(void) { return dlopen("x", 1); }',
            "not libc alone",
        ),
    ],
    ids=["stray export", "constructor", "second library"],
)
def test_the_build_refuses_an_unsafe_library(code, fault, tmp_path, monkeypatch):
    shutil.copytree(preload_build.SOURCES, tmp_path / "vgpu_preload")
    (tmp_path / "vgpu_preload/added.c").write_text(code + "\n")
    monkeypatch.setattr(preload_build, "SOURCES", tmp_path / "vgpu_preload")
    with pytest.raises(BuildFailed, match=fault):
        preload_build.compile_library(tmp_path / "libvgpu.so", "glibc")


@pytest.mark.parametrize("cut", [0, 3, 20, 64, 4000])
def test_a_damaged_object_is_refused(cut, built):
    content = Path(built[1]["glibc"]["path"]).read_bytes()
    with pytest.raises(BuildFailed, match="it"):
        read_elf_facts(content[:cut], "it")


# ---- sanitizers ----------------------------------------------------------------------------------

# What runs before a sanitizer's runtime is up: it finds its own functions through our dlsym.
BEFORE_THE_RUNTIME = {"elf_symbols.c", "intercept.c", "loaded_objects.c", "lookup.c", "dlsym.c", "dlvsym.c"}
SANITIZERS = {"address": 20, "thread": 0, "undefined": 20}


@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_the_stress_program_is_clean_under_a_sanitizer(sanitizer, glibc, agent, socket_path, tmp_path):
    if shutil.which("gcc") is None:
        pytest.skip("gcc is missing")
    program = _with_sanitizer(sanitizer, socket_path, tmp_path)
    glibc.need("libcuda.so.1")
    # Thread sanitizer needs the address layout of older kernels.
    command = ["setarch", "-R", str(program), str(SANITIZERS[sanitizer])]
    environment = glibc.environment(preload="") | {"TSAN_OPTIONS": "halt_on_error=1", "ASAN_OPTIONS": "detect_leaks=0"}
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    for _ in range(3):
        peer = agent.arrival(20)
        peer.send(PING, 5)
        peer.expect(PONG)
        peer.send(DETACH)
        peer.expect(DETACHED)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err.decode()) == (0, b"ready\n", "")


def _with_sanitizer(sanitizer, socket_path, folder):
    common = ["gcc", "-O2", "-g", "-std=gnu11", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror"]
    common += [f'-DVGPU_SOCKET_PATH="{socket_path}"']
    objects = []
    for source in [*sorted(preload_build.SOURCES.rglob("*.c")), HERE / "stress.c"]:
        watched = [] if source.name in BEFORE_THE_RUNTIME else [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
        if sanitizer == "undefined":
            watched = [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
        objects.append(folder / f"{source.stem}.o")
        subprocess.run([*common, *watched, "-c", source, "-o", objects[-1]], check=True, timeout=60)
    program = folder / "stress"
    link = ["gcc", f"-fsanitize={sanitizer}", "-rdynamic", *objects, "-o", program]
    subprocess.run(link, check=True, timeout=60)
    return program
