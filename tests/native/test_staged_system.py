"""Staged mode as a whole on the software driver: real libvgpu.so, real agent, real staging worker, a counting program.

The program (tests/software_gpu/programs/counter.c) checks its device memory at every step and launches a captured graph, so
"it counts on" means that content, addresses and graph are as they were. No result of it is a GPU result.
"""

import json
import os
import secrets
import signal
import sys
import time
from pathlib import Path

import pytest

from image_format.vram import read_fragment
from tests.unit.agent_stage import CONTAINER, Counter, Stage, cgroup2_mount, wait_until
from tests.unit.test_staged_flows import pools
from vgpu_errors import DriverCallFailed, GpuObjectBlocks, NotEnoughDeviceMemory
from vgpu_preload import build as preload_build

pytestmark = [
    pytest.mark.skipif(cgroup2_mount() is None, reason="needs root and a writable cgroup2 hierarchy"),
    pytest.mark.timeout(180),
]
MIB = 1 << 20


@pytest.fixture(scope="module")
def link(tmp_path_factory):
    """The control directory's place that the library is built for; each test leads it to its own stage."""
    return Path(f"/tmp/vgpu-staged-{secrets.token_hex(4)}")


@pytest.fixture(scope="module")
def library(link, tmp_path_factory):
    path = tmp_path_factory.mktemp("preload") / "libvgpu.so"
    places = (f'VGPU_SOCKET_PATH="{link}/agent.sock"', f'VGPU_MODE_PATH="{link}/mode"')
    preload_build.compile_library(path, "glibc", defines=places)
    return path


class System(Stage):
    """A stage whose programs have the library in front of them."""

    def __init__(self, link, library, gpus=1):
        super().__init__(gpus, memory_mib=512)
        self.library = library
        self.image = self.folder / "image"
        self.image.mkdir()
        self.start_agent()
        self.write_state()
        wait_until(self.control_socket().is_socket, "the control socket")
        (self.control_socket().parent / "mode").write_text("staged\n")
        link.unlink(missing_ok=True)
        link.symlink_to(self.control_socket().parent)
        self.has_preload = True

    @property
    def environment(self):
        preload = {"LD_PRELOAD": str(self.library)} if self.has_preload else {}
        return super().environment | preload

    def spawn(self, command, *, cgroup=None, **options):
        is_program = Path(command[0]).name in ("counter", "ring")
        self.has_preload = cgroup is not None and is_program and not options.pop("plain", False)
        return super().spawn(command, cgroup=cgroup, **options)

    def counter(self, name, *options, cgroup="", mib=16):
        counter = Counter(self, name, "--mib", str(mib), *options, cgroup=cgroup)
        wait_until(lambda: counter.pid in self.registered(), f"the registration of {name}")
        return counter

    def ask(self, verb, **args):
        args = {"container": CONTAINER, "cgroup": self.cgroup, "deadline_s": 20} | args
        return super().ask(verb, **args)

    def staged_freeze(self, client, **more):
        return self.freeze(client, image_path=str(self.image), **more)


@pytest.fixture
def system(link, library):
    system = System(link, library)
    yield system
    if os.environ.get("VGPU_SHOW_LOG"):
        print(system.log())
    system.close()
    link.unlink(missing_ok=True)
    for path in pools(system):
        path.unlink()


def release(client, frozen):
    return client.request("release", {"lease": frozen["lease"], "keep": False}, deadline_s=30)


def drain(client):
    return client.request("drain", {"container": CONTAINER, "deadline_s": 30}, deadline_s=40)


@pytest.mark.parametrize("target", ["memory", "disk"])
def test_suspend_and_resume(system, target):
    counter = system.counter("counter")
    for _ in range(3):
        done = system.ask("suspend", **({"to": str(system.image)} if target == "disk" else {}))
        assert [process["mode"] for process in done["processes"]] == ["staged"]
        assert done["staged"]["bytes"] >= 16 * MIB
        assert counter.stands_still()
        system.ask("resume")
        assert counter.is_counting()


def test_leave_running_in_cycles(system):
    counter = system.counter("counter")
    for _ in range(3):
        with system.connect() as client:
            frozen = system.staged_freeze(client, leave_running=True)
            assert counter.stands_still()
            release(client, frozen)
            assert counter.is_counting()
            assert read_fragment(drain(client)["fragment"]).length >= 16 * MIB
        for path in system.image.iterdir():
            path.unlink()


def test_two_processes(system):
    counters = [system.counter("one"), system.counter("two", "--seed", "7", mib=24)]
    with system.connect() as client:
        release(client, system.staged_freeze(client, leave_running=True))
        assert all(counter.is_counting() for counter in counters)
        drain(client)


def test_agent_killed_between_release_and_map(system):
    counter = system.counter("counter")
    with system.connect() as client:
        frozen = system.staged_freeze(client)
        system.agent.kill()
        system.agent.wait(5)
        system.start_agent()
        with system.connect() as again:
            release(again, frozen)
    assert counter.is_counting()


def test_client_gone_while_frozen(system):
    counter = system.counter("counter")
    client = system.connect()
    system.staged_freeze(client)
    client.close()
    assert counter.is_counting()
    wait_until(lambda: list(system.image.iterdir()) == [], "the end of the packs")


def test_agent_killed_while_the_copy_runs(system):
    """The application does not notice; the next agent finds nothing to undo."""
    counter = system.counter("counter", mib=128)
    client = system.connect()
    args = {"container": CONTAINER, "cgroup": system.cgroup, "deadline_s": 20, "image_path": str(system.image)}
    client._send({"id": 1, "verb": "freeze", "args": args}, time.monotonic() + 5, "freeze", 5)
    wait_until(lambda: list(system.image.iterdir()), "the first pack")
    system.agent.kill()
    system.agent.wait(5)
    assert counter.is_counting()
    system.start_agent()
    assert system.journal() == []
    wait_until(lambda: system.registered() == {counter.pid}, "the registration")
    with system.connect() as client:
        release(client, system.staged_freeze(client))
    assert counter.is_counting()


def test_application_killed_while_frozen(system):
    counter = system.counter("counter")
    with system.connect() as client:
        frozen = system.staged_freeze(client)
        counter.process.send_signal(signal.SIGKILL)
        counter.process.wait(5)
        release(client, frozen)
    assert system.journal() == []
    assert system.inventory() == []


def test_a_plain_process_beside_a_staged_one(system):
    staged = system.counter("staged")
    system.library = ""
    plain = Counter(system, "plain", cgroup="")
    with system.connect() as client:
        frozen = system.staged_freeze(client, leave_running=True)
        assert {process["pid"]: process["mode"] for process in frozen["processes"]} == {
            staged.pid: "staged",
            plain.pid: "driver",
        }
        release(client, frozen)
        assert staged.is_counting()
        assert plain.is_counting()


@pytest.mark.parametrize("call", ["lock", "checkpoint"])
def test_a_driver_call_that_fails_after_release_is_undone(system, call):
    counter = system.counter("counter")
    (system.folder / "gpus" / f"fault-{call}").write_text("999")
    with system.connect() as client, pytest.raises(DriverCallFailed, match="999"):
        system.staged_freeze(client)
    assert counter.is_counting()
    assert system.journal() == []
    assert list(system.image.iterdir()) == []


def test_a_driver_restore_that_fails_once_leaves_the_container_suspended(system):
    counter = system.counter("counter")
    system.ask("suspend")
    (system.folder / "gpus" / "fault-restore").write_text("2")
    with pytest.raises(NotEnoughDeviceMemory):
        system.ask("resume")
    assert counter.stands_still()
    system.ask("resume")
    assert counter.is_counting()


def test_a_container_in_driver_mode_is_suspended_by_the_driver(system):
    system.library = ""
    plain = Counter(system, "plain", cgroup="")
    for _ in range(2):
        done = system.ask("suspend")
        assert done["staged"] is None
        assert done["driver_reasons"] == {str(plain.pid): "it has no preload library in staged mode"}
        assert plain.stands_still()
        system.ask("resume")
        assert plain.is_counting()
    assert list((system.run_dir / "suspended").iterdir()) == []


def kill_the_agent_in_a_suspend(system, moment_s):
    """Ask for a suspend, kill the agent so long after, and start another one."""
    client = system.connect()
    args = {"container": CONTAINER, "cgroup": system.cgroup, "deadline_s": 20}
    client._send({"id": 1, "verb": "suspend", "args": args}, time.monotonic() + 5, "suspend", 5)
    time.sleep(moment_s)
    system.agent.kill()
    system.agent.wait(5)
    client.close()
    system.start_agent()


def give_up_journal(system):
    """The entry names this process as the owner of what is not suspended yet; it lives, so it gives it up."""
    for name in system.journal():
        entry = json.loads((system.run_dir / "journal" / name).read_text())
        if entry["staged"] and entry["staged"]["is_suspended"]:
            system.ask("resume")
        else:
            with system.connect() as owner:
                owner.request("release", {"lease": entry["lease"], "keep": False}, deadline_s=30)


def test_an_agent_killed_in_the_middle_of_a_suspend(system):
    """Wherever the kill falls, the container either runs on or is suspended whole, and a resume brings it back."""
    counter = system.counter("counter", mib=64)
    for moment_s in (0.6, 1.2, 1.5, 1.6, 1.7, 1.8, 1.9, 2.0):
        kill_the_agent_in_a_suspend(system, moment_s)
        give_up_journal(system)
        assert counter.is_counting()
        wait_until(lambda: counter.pid in system.registered(), "the registration")
    assert not pools(system)


def test_managed_memory_is_named_and_nothing_stops(system):
    counter = system.counter("counter")
    program = (
        "import ctypes, time; cuda = ctypes.CDLL('libcuda.so.1'); context = ctypes.c_void_p(); cuda.cuInit(0); "
        "cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0); cuda.cuCtxSetCurrent(context); "
        "p = ctypes.c_uint64(); cuda.cuMemAllocManaged(ctypes.byref(p), ctypes.c_size_t(4 << 20), 1); time.sleep(100)"
    )
    system.has_preload = True
    other = Stage.spawn(system, [sys.executable, "-c", program], cgroup="")
    wait_until(lambda: other.pid in system.registered(), "the registration")
    with system.connect() as client, pytest.raises(GpuObjectBlocks, match="managed memory"):
        system.staged_freeze(client)
    assert counter.is_counting()
