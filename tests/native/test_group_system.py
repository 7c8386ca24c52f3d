"""Groups of processes in staged mode on the software driver: real libvgpu.so, real agent, programs that share device memory.

The program (tests/software_gpu/programs/ring.c) waits on the device for other ranks and checks every word it gets, so "the group
goes on" means that content, sharing, addresses and graphs are as they were in every process. No result of it is a GPU result.
"""

import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from gpu_state.processes import open_files
from image_format.vram import read_fragment
from tests.native.test_staged_system import System, drain, give_up_journal, kill_the_agent_in_a_suspend, release
from tests.unit.agent_stage import Group, cgroup2_mount, wait_until
from tests.unit.test_staged_flows import pools
from vgpu_errors import (
    DeadlineExceeded,
    DriverCallFailed,
    GpuObjectBlocks,
    GpuProcessUnreadable,
    PreloadFailed,
    VgpuError,
)
from vgpu_preload import build as preload_build

pytestmark = [
    pytest.mark.skipif(cgroup2_mount() is None, reason="needs root and a writable cgroup2 hierarchy"),
    pytest.mark.timeout(120),
]
GPUS = 4
BEAT = ("--beat", "10", "--keep-going", "1")


class GroupSystem(System):
    """One node for all tests of this file; each starts its own groups and ends them."""

    def group(self, name, *options, **more):
        group = Group(self, f"{name}-{secrets.token_hex(2)}", *options, **more)
        self.groups.append(group)
        wait_until(lambda: set(group.pids) <= self.registered(), f"the registration of {name}")
        return group

    def end_groups(self):
        for group in self.groups:
            group.end()
        self.groups = []
        wait_until(lambda: self.inventory() == [], "the end of all programs")
        for path in self.image.iterdir():
            path.unlink()

    def cycle(self, group, **more):
        """Freeze, look, let go on; with what the freeze told."""
        with self.connect() as client:
            frozen = self.staged_freeze(client, **more)
            assert group.stands_still()
            release(client, frozen)
            group.goes_on()
            if more.get("leave_running"):
                drain(client)
        return frozen

    def start_suspend(self, deadline_s=20):
        """In another thread; join it and look at `problem`."""
        return Suspend(self, deadline_s)


class Suspend(threading.Thread):
    """A suspend that may fail."""

    def __init__(self, system, deadline_s):
        super().__init__(daemon=True)
        self.system, self.deadline_s, self.problem = system, deadline_s, None
        self.start()

    def run(self):
        try:
            self.system.ask("suspend", deadline_s=self.deadline_s)
        except VgpuError as problem:
            self.problem = problem


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    link = Path(f"/tmp/vgpu-group-{secrets.token_hex(4)}")
    library = tmp_path_factory.mktemp("preload") / "libvgpu.so"
    places = (f'VGPU_SOCKET_PATH="{link}/agent.sock"', f'VGPU_MODE_PATH="{link}/mode"')
    preload_build.compile_library(library, "glibc", defines=places)
    system = GroupSystem(link, library, gpus=GPUS)
    system.groups = []
    yield system
    if os.environ.get("VGPU_SHOW_LOG"):
        print(system.log())
    system.close()
    link.unlink(missing_ok=True)
    for path in pools(system):
        path.unlink()


@pytest.fixture
def system(node):
    yield node
    node.end_groups()
    assert node.journal() == []


GROUPS = (
    ("ring", "mixed", 8, 2, ("--devices", "4")),
    ("ring", "handle", 2, 1, ("--fork-server", "1")),
    ("graph", "fd", 3, 1, ("--ahead", "3")),
    ("server", "fd", 4, 1, ()),
    ("pipeline", "mixed", 3, 1, ()),
    ("outlive", "fd", 3, 1, ()),
)


def started(system, mode, share, ranks, options=()):
    return system.group(mode, "--share", share, "--devices", "2", *options, mode=mode, ranks=ranks)


@pytest.mark.parametrize(("mode", "share", "ranks", "cycles", "options"), GROUPS)
def test_suspend_and_resume_in_cycles(system, mode, share, ranks, cycles, options):
    group = started(system, mode, share, ranks, options)
    for _ in range(cycles):
        done = system.ask("suspend")
        assert {process["mode"] for process in done["processes"]} == {"staged"}
        assert group.stands_still()
        system.ask("resume")
        group.goes_on()


def test_a_rank_that_is_ahead_and_finds_no_room_to_launch(system):
    """It hangs inside a launch until the others are level with it; so its gate cannot close before."""
    group = system.group("ahead", "--ahead", "80", "--interval", "2", mode="ring", ranks=2)
    system.ask("suspend")
    assert group.stands_still()
    system.ask("resume")
    group.goes_on(by=1)


@pytest.mark.parametrize(
    ("mode", "share", "ranks"), [("ring", "mixed", 4), ("graph", "handle", 2), ("pipeline", "fd", 3)]
)
def test_leave_running_in_cycles(system, mode, share, ranks):
    group = started(system, mode, share, ranks)
    for _ in range(2):
        system.cycle(group, leave_running=True)
        for path in system.image.iterdir():
            path.unlink()


def test_a_freeze_that_is_given_up_maps_the_same_memory_again(system):
    system.cycle(started(system, "ring", "mixed", 4))


def test_every_shared_object_is_taken_once(system):
    """Four ranks that import from two neighbours each: their own objects, not three times as many."""
    group = started(system, "ring", "mixed", 4, ("--mib", "8"))
    with system.connect() as client:
        release(client, system.staged_freeze(client, leave_running=True))
        group.goes_on()
        taken = read_fragment(drain(client)["fragment"]).length
    own = 4 * (16 + 2 * 8) << 20  # what is shared, and two buffers of 8 MiB
    assert taken == own


def test_guests_that_come_and_go_while_the_group_is_suspended_again_and_again(system):
    """One that comes or ends in the midst of a suspend can spoil it; then all go on, and the next one finds another moment."""
    # By handles, which stay what they are; a descriptor that was sent and not yet imported would be of memory that is gone.
    options = ("--share", "handle", "--devices", "2", "--epoch", "60")
    group = system.group("guests", *options, mode="guests", ranks=3)
    suspended, guests = 0, set()
    for _ in range(25):
        guests |= set(group.pids)
        try:
            system.ask("suspend")
        except (PreloadFailed, GpuProcessUnreadable):
            group.goes_on()
            continue
        assert group.stands_still()
        system.ask("resume")
        group.goes_on(by=30)
        suspended += 1
        if suspended >= 3 and len(guests) >= 4:
            break
    assert suspended >= 3
    assert len(guests) >= 4  # two ranks that stay, and two at least that did not


def test_two_groups_come_to_rest_together(system):
    groups = [started(system, "ring", "fd", 2), started(system, "graph", "handle", 3)]
    system.ask("suspend")
    assert all(group.stands_still() for group in groups)
    system.ask("resume")
    for group in groups:
        group.goes_on()


def test_objects_move_to_other_devices(system):
    """Importers follow the exporter's memory; every device of the group moves, and a preload tells where to."""
    group = started(system, "ring", "mixed", 4)
    for moved in ((0, 2), (1, 3)), ((2, 3), (3, 2)):
        system.ask("suspend")
        system.ask("resume", device_map={system.uuids[old]: system.uuids[new] for old, new in moved})
        group.goes_on()
    assert {held["uuid"] for held in objects(system)} == {system.uuids[2], system.uuids[3]}


def objects(system):
    """What is taken of all processes, as a freeze that is given up tells it."""
    with system.connect() as client:
        frozen = system.staged_freeze(client)
        release(client, frozen)
    return [held for each in frozen["staged"]["objects"].values() for held in each]


# ---- descriptors that the application keeps or has on the way


@pytest.mark.parametrize(("mode", "ranks"), [("ring", 3), ("graph", 2), ("server", 3)])
def test_descriptors_that_are_kept_are_of_the_same_memory_after_each_suspend(system, mode, ranks):
    """Importers map what they kept again and again, and write through it."""
    group = started(system, mode, "fd", ranks, ("--hold", "1"))
    for _ in range(2):
        done = system.ask("suspend")
        held = done["staged"]["descriptors"]
        assert len(held) == ranks
        assert group.stands_still()
        assert not [link for pid in group.pids for link in open_files(pid) if "software-gpu" in link]
        system.ask("resume")
        group.goes_on(by=9)
    system.cycle(group, leave_running=True)
    group.goes_on(by=9)


def test_descriptors_that_are_sent_while_the_memory_is_away_are_of_the_new_memory(system):
    """A placeholder goes in their stead, and is exchanged where it has come to: at the number of who waits at its gate with it."""
    options = ("--share", "fd", "--devices", "2", "--send-late", "1500")
    group = system.group("late", *options, mode="ring", ranks=2, begun=False)
    wait_until(lambda: len(group.late()) == 2, "both to have exported")
    system.ask("suspend")
    assert group.steps() == {}
    time.sleep(2)
    assert [link for pid in group.pids for link in open_files(pid) if "placeholder" in link]
    system.ask("resume")
    group.goes_on()


def test_descriptors_on_the_way_are_waited_for(system):
    """Two ranks that take their time to receive: a suspend in between comes off when they have."""
    options = ("--share", "fd", "--devices", "2", "--take-late", "600")
    group = system.group("late", *options, mode="ring", ranks=2, begun=False)
    wait_until(lambda: len(group.late()) == 2, "both to have sent")
    system.ask("suspend")
    system.ask("resume")
    group.goes_on()


def test_descriptors_that_nobody_comes_for_are_refused_and_all_go_on(system):
    options = ("--share", "fd", "--devices", "2", "--take-late", "4000")
    group = system.group("late", *options, mode="ring", ranks=2, begun=False)
    wait_until(lambda: len(group.late()) == 2, "both to have sent")
    with pytest.raises(GpuObjectBlocks, match="descriptors lie unread in its socket") as told:
        system.ask("suspend")
    assert any(f"Process {pid} (ring)" in str(told.value) for pid in group.pids)
    group.goes_on()
    system.ask("suspend")
    system.ask("resume")
    group.goes_on()


RELAY = """
import os, sys
kept = [os.pidfd_open(int(sys.argv[1]))]
for number in sys.argv[2:]: kept.append(__import__("ctypes").CDLL(None).syscall(438, kept[0], int(number), 0))
print(kept[-1], flush=True)
sys.stdin.read()
"""


def test_a_relay_without_cuda_is_refused_by_name_until_it_lets_go(system):
    group = started(system, "ring", "fd", 2, ("--hold", "1"))
    owner = group.pids[0]
    number = next(
        n for n in os.listdir(f"/proc/{owner}/fd") if int(n) < 200 and "memfd:software-gpu" in link_of(owner, n)
    )
    command = [sys.executable, "-c", RELAY, str(owner), number]
    relay = system.spawn(command, cgroup="", stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    kept = int(relay.stdout.readline())
    with pytest.raises(GpuObjectBlocks, match=f"Process {relay.pid} .*: its descriptor {kept} is GPU memory, object"):
        system.ask("suspend")
    group.goes_on()
    relay.communicate(timeout=10)
    system.ask("suspend")
    assert group.stands_still()
    system.ask("resume")
    group.goes_on()


def link_of(pid, number):
    try:
        return os.readlink(f"/proc/{pid}/fd/{number}")
    except FileNotFoundError:
        return ""


# ---- ranks that do not come, end, or never become level


def test_a_rank_that_never_comes_is_named_and_nobody_is_left_closed(system):
    group = system.group("stall", "--stall-rank", "2", "--stall-step", "3", *BEAT, mode="ring", ranks=3)
    wait_until(lambda: set(group.steps().values()) == {2}, "the step before the stall")
    pids = group.pids
    with pytest.raises(DeadlineExceeded) as told:
        system.ask("suspend", deadline_s=2.5)
    for pid in pids:
        assert f"process {pid} " in str(told.value)
    assert f"process {pids[2]} (ring) is idle" in str(told.value)
    assert f"process {pids[0]} (ring) has work on its device that does not end" in str(told.value)
    group.goes_on(of="beat")
    group.let_stalled_come()
    group.goes_on()
    system.ask("suspend")
    assert group.stands_still()
    system.ask("resume")
    group.goes_on()


def test_a_rank_killed_while_the_group_comes_to_rest(system):
    """The others wait for it for ever, as they would without us; their gates are open, and the error says what is wrong."""
    group = system.group("killed", "--stall-rank", "1", "--stall-step", "3", *BEAT, mode="ring", ranks=3)
    wait_until(lambda: set(group.steps().values()) == {2}, "the step before the stall")
    suspend = system.start_suspend(deadline_s=8)
    time.sleep(0.7)
    victim = group.pids[1]
    os.kill(victim, signal.SIGKILL)
    suspend.join(30)
    assert suspend.problem is not None
    assert str(victim) in str(suspend.problem) or "has work on its device" in str(suspend.problem)
    group.goes_on(of="beat", members={0, 2})


@pytest.mark.parametrize("moment_s", [0.05, 0.2, 0.35])
def test_an_importer_killed_during_a_suspend_leaves_the_others_whole(system, moment_s):
    """Whether the suspend came off or not, the other importers of the same memory go on with it."""
    group = system.group("importers", "--keep-going", "1", "--devices", "2", mode="outlive", ranks=4)
    suspend = system.start_suspend()
    time.sleep(moment_s)
    os.kill(group.pids[0], signal.SIGKILL)
    suspend.join(40)
    if suspend.problem is None:
        system.ask("resume")
    group.goes_on(members={2, 3})


def test_a_rank_killed_while_the_group_is_suspended(system):
    group = system.group("importers", "--keep-going", "1", "--devices", "2", mode="outlive", ranks=4)
    system.ask("suspend")
    os.kill(group.pids[0], signal.SIGKILL)
    system.ask("resume")
    group.goes_on(members={2, 3})
    system.ask("suspend")
    system.ask("resume")
    group.goes_on(members={2, 3})


# ---- agent and driver fail


@pytest.mark.parametrize("call", ["lock", "checkpoint"])
def test_a_driver_call_that_fails_for_one_rank_is_undone_for_all(system, call):
    group = started(system, "ring", "mixed", 3)
    (system.folder / "gpus" / f"fault-{call}").write_text("999")
    with system.connect() as client, pytest.raises(DriverCallFailed, match="999"):
        system.staged_freeze(client)
    group.goes_on()
    assert list(system.image.iterdir()) == []


def test_an_agent_killed_while_the_group_is_frozen(system):
    group = started(system, "ring", "mixed", 3)
    with system.connect() as client:
        frozen = system.staged_freeze(client)
        restart_agent(system)
        with system.connect() as again:
            release(again, frozen)
    group.goes_on()
    wait_until(lambda: set(group.pids) <= system.registered(), "the registration")


def restart_agent(system):
    system.agent.kill()
    system.agent.wait(5)
    system.start_agent()


def test_an_agent_killed_while_the_group_comes_to_rest(system):
    """Some gates are closed, some calls let through: all open when the connections end."""
    group = system.group("stall", "--stall-rank", "1", "--stall-step", "3", *BEAT, mode="ring", ranks=3)
    wait_until(lambda: set(group.steps().values()) == {2}, "the step before the stall")
    suspend = system.start_suspend()
    time.sleep(1.0)
    restart_agent(system)
    suspend.join(30)
    assert suspend.problem is not None
    group.goes_on(of="beat")
    give_up_journal(system)
    group.let_stalled_come()
    group.goes_on()
    wait_until(lambda: set(group.pids) <= system.registered(), "the registration")


def test_an_agent_killed_at_any_moment_of_a_suspend(system):
    group = started(system, "ring", "mixed", 3)
    for moment_s in (0.25, 0.4):
        kill_the_agent_in_a_suspend(system, moment_s)
        give_up_journal(system)
        group.goes_on()
        wait_until(lambda: set(group.pids) <= system.registered(), "the registration")
