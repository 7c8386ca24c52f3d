"""Events that two processes share by a legacy IPC handle: they stay with the driver, which keeps them, and are no hindrance.

With libvgpu.so in staged mode on the software driver, first with an agent double, then with the real agent. That the real driver
keeps them was measured (tests/gpu/sharing_facts.py, "events"); nothing measured here is a GPU result.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.native.agent_double import DETACH, DETACHED
from tests.native.test_preload_staged import (  # noqa: F401 - the fixtures are used by name
    PROGRAMS,
    PTX,
    bring_back,
    libraries,
    make_stage,
    preload,
    run_folder,
    stage,
    take_away,
)
from tests.native.test_software_driver import (
    EVENT_MAKER,
    EVENT_OPENER,
    event_files,
    stream_waits_for_the_other_process,
)
from tests.native.test_staged_system import System, drain, release
from tests.software_gpu import build as software_gpu
from tests.unit.agent_stage import Stage, cgroup2_mount, children_of, wait_until
from tests.unit.test_staged_flows import pools
from vgpu_preload import build as preload_build

MIB = 1 << 20


@pytest.fixture
def pair(stage):  # noqa: F811
    """A maker, an opener, and the agent's connections to them."""
    maker, maker_peer = stage.child(
        f"m = ok(d.cuMemAlloc({4 * MIB})); write(m, b'of the maker');" + EVENT_MAKER.format(ptx=PTX)
    )
    opener, opener_peer = stage.child("import time; " + EVENT_OPENER.format(maker.run("result = offer_event(e)")))
    yield maker, maker_peer, opener, opener_peer
    for path in event_files(maker):
        path.unlink()


def kinds(peer):
    return [blocker["kind"] for blocker in peer.inventory()["blockers"]]


def test_they_are_told_until_they_are_destroyed(pair):
    maker, maker_peer, opener, opener_peer = pair
    assert [kinds(maker_peer), kinds(opener_peer)] == [["ipc-event"]] * 2
    opener.run("ok(d.cuEventDestroy(f))")
    assert [kinds(maker_peer), kinds(opener_peer)] == [["ipc-event"], []]
    maker.run("ok(d.cuEventDestroy(e))")
    assert kinds(maker_peer) == []


def test_streams_wait_for_each_other_after_the_drivers_checkpoint(pair, stage):  # noqa: F811
    maker, maker_peer, opener, opener_peer = pair
    peers, caller = {maker_peer.pid: maker_peer, opener_peer.pid: opener_peer}, stage.node.caller()
    assert stream_waits_for_the_other_process(maker, opener, 1)
    for value in (2, 3):
        away = {pid: take_away(peer) for pid, peer in peers.items()}
        stage.agent.stop_listening()
        for peer in peers.values():
            peer.send(DETACH, 1)
            peer.expect(DETACHED)
        for order in ("freeze", "thaw"):
            for pid in peers:
                caller.run(f"{order}({pid})")
        stage.agent.start()
        peers = {peer.pid: peer for peer in (stage.again(), stage.again())}
        for pid, peer in peers.items():
            bring_back(peer, away[pid])
        assert stream_waits_for_the_other_process(maker, opener, value)
        assert maker.run("result = read(m, 12).decode()") == "of the maker"


# ---- the real agent --------------------------------------------------------------------------------


class Pair:
    """event_pair.c in the container."""

    def __init__(self, system, program):
        self.out = system.folder / "pair.out"
        self.process = system.spawn([str(program), str(self.out)], cgroup="")
        self.goes_on()
        wait_until(lambda: set(children_of(self.process.pid)) <= system.registered(), "the registration")

    def steps(self):
        text = self.out.read_text() if self.out.exists() else ""
        assert "WRONG" not in text
        return text.count("ok\n")

    def goes_on(self):
        before = self.steps()
        wait_until(lambda: self.steps() > before + 3, f"more than {before + 3} steps")


def has_ended(pid):
    """Gone, or not yet fetched by whoever adopted it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


class EventSystem(System):
    def spawn(self, command, *, cgroup=None, **options):
        self.has_preload = cgroup is not None
        return Stage.spawn(self, command, cgroup=cgroup, **options)


@pytest.fixture
def system(tmp_path, libraries):  # noqa: F811
    link, library = Path(f"/tmp/vgpu-events-{secrets.token_hex(4)}"), tmp_path / "libvgpu.so"
    places = (f'VGPU_SOCKET_PATH="{link}/agent.sock"', f'VGPU_MODE_PATH="{link}/mode"')
    preload_build.compile_library(library, "glibc", defines=places)
    system = EventSystem(link, library)
    yield system
    system.close()
    link.unlink(missing_ok=True)
    for path in pools(system):
        path.unlink()


@pytest.fixture
def program(tmp_path, libraries):  # noqa: F811
    built = tmp_path / "event_pair"
    compiler = [sys.executable, "-m", "ziglang", "cc", "-target", software_gpu.zig_target("glibc")]
    options = ["-O1", "-Wall", "-Wextra", "-Werror"]
    sources = [PROGRAMS / "event_pair.c", libraries / "libcuda.so.1"]
    subprocess.run([*compiler, *options, *sources, "-o", built], check=True, timeout=120)
    return built


@pytest.mark.skipif(cgroup2_mount() is None, reason="needs root and a writable cgroup2 hierarchy")
@pytest.mark.timeout(120)
def test_a_container_whose_processes_share_events_is_suspended_and_snapshot(system, program):
    pair = Pair(system, program)
    children = children_of(pair.process.pid)
    try:
        for _ in range(2):
            done = system.ask("suspend")
            assert [process["mode"] for process in done["processes"]] == ["staged"] * 2
            system.ask("resume")
            pair.goes_on()
        with system.connect() as client:
            release(client, system.staged_freeze(client, leave_running=True))
            pair.goes_on()
            drain(client)
    finally:
        pair.process.send_signal(signal.SIGKILL)
        pair.process.wait(10)
        wait_until(lambda: all(has_ended(pid) for pid in children), "the end of both")
        for pid in children:
            for path in Path("/dev/shm").glob(f"cuda.shm.{os.getuid()}.{pid:x}.*"):
                path.unlink()
