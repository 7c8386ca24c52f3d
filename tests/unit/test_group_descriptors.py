"""Descriptors of shared memory that applications hold, or have on the way: a real agent on the software driver, doubles as preloads.

Each rank started with `--hold` keeps a descriptor of its own, and ends when it is not of the memory that the rank has mapped, or is
not close-on-exec as before. What has no preload is a relay: a process of the container that takes a descriptor and keeps it.
"""

import array
import json
import os
import socket
import struct
import sys
import time

import pytest

from gpu_state.kcmp import OpenFiles
from gpu_state.open_descriptors import look_at, placeholders_of, read_token
from gpu_state.processes import ProcessIdentity
from gpu_state.staged_lease import ParkedDescriptor, StagedPart, StagedProcess
from image_format.fields import Fields
from image_format.gpu_objects import DescriptorEntry
from tests.unit.agent_stage import CONTAINER, cgroup2_mount, wait_until
from tests.unit.test_group_flows import Group
from tests.unit.test_staged_flows import drain, freeze, release, resume, stage, suspend
from vgpu_errors import DriverCallFailed, GpuObjectBlocks

__all__ = ["stage"]
needs_cgroup = pytest.mark.skipif(cgroup2_mount() is None, reason="needs root and a writable cgroup2 hierarchy")
pytestmark = pytest.mark.timeout(120)

# Connects to the hub; receives and keeps what comes, or leaves it in the socket until it is told.
RELAY = """
import pathlib, socket, sys, time
hub, receives, go = sys.argv[1:]
end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
end.connect(hub)
kept = socket.recv_fds(end, 4096, 1)[1] if receives == "1" else []
print("ready", *kept, flush=True)
while not pathlib.Path(go).exists(): time.sleep(0.01)
if not kept: kept = socket.recv_fds(end, 4096, 1)[1]
import os
[os.close(fd) for fd in kept]
print("done", flush=True)
time.sleep(600)
"""


class Relay:
    """A process that is no GPU process."""

    def __init__(self, stage, *, receives):
        self.go = stage.folder / "relay-go"
        command = [sys.executable, "-c", RELAY, str(stage.folder / "hub"), str(int(receives)), str(self.go)]
        self.process = stage.spawn(command, cgroup="", stdout=-1, text=True)
        self.numbers = [int(word) for word in self.process.stdout.readline().split()[1:]]
        if not receives:
            wait_until(lambda: self.waiting() == 1, "the descriptor in its socket")

    @property
    def pid(self):
        return self.process.pid

    def waiting(self):
        return sum(one.count for one in look_at([self.pid], OpenFiles({})).waiting)

    def lets_go(self):
        self.go.touch()
        assert self.process.stdout.readline() == "done\n"


def links_of(pid):
    found = []
    for number in os.listdir(f"/proc/{pid}/fd"):
        try:
            found.append(os.readlink(f"/proc/{pid}/fd/{number}"))
        except FileNotFoundError:
            continue
    return found


@needs_cgroup
def test_descriptors_that_applications_hold_are_of_the_same_memory_afterwards(stage):
    group = Group(stage, 3, "--hold")
    for _ in range(2):
        told = suspend(stage)["staged"]["descriptors"]
        assert sorted(map(int, told)) == sorted(group.pids())
        assert {one["of"] for each in told.values() for one in each} == {f"{group.ranks[0].pid}/2"}
        assert len({one["token"] for each in told.values() for one in each}) == 1
        assert [told[str(rank.pid)][0]["closeOnExec"] for rank in group.ranks] == [True, False, True]
        for pid in group.pids():
            links = links_of(pid)
            assert [link for link in links if "placeholder" in link]
            assert not [link for link in links if "software-gpu" in link]
        resume(stage)
        assert group.is_counting()
    assert stage.journal() == []


@needs_cgroup
def test_they_are_when_a_checkpoint_leaves_the_group_running(stage):
    group = Group(stage, 2, "--hold")
    with stage.connect() as client:
        frozen = freeze(stage, client, leave_running=True)
        release(client, frozen)
        assert group.is_counting()
        parked = [
            DescriptorEntry.from_json(Fields(doc, "d"))
            for doc in drain(client)["staged"]["descriptors"][str(group.ranks[1].pid)]
        ]
    assert [entry.of for entry in parked] == [f"{group.ranks[0].pid}/2"]


@needs_cgroup
def test_they_are_when_the_agent_is_killed_meanwhile(stage):
    group = Group(stage, 2, "--hold")
    with stage.connect() as client:
        frozen = freeze(stage, client)
        stage.agent.kill()
        stage.agent.wait(5)
        stage.start_agent()
        with stage.connect() as again:
            release(again, frozen)
    assert group.is_counting()


@needs_cgroup
def test_they_are_when_another_agent_resumes_the_group(stage):
    group = Group(stage, 2, "--hold")
    suspend(stage)
    stage.agent.kill()
    stage.agent.wait(5)
    stage.start_agent()
    resume(stage)
    assert group.is_counting()


@needs_cgroup
@pytest.mark.parametrize("fault", ["refuse-map", "slow-map"])
def test_they_are_when_the_stop_is_undone(stage, fault):
    group = Group(stage, 2, "--hold", together=False)
    (stage.folder / "gpus" / "fault-checkpoint").write_text("999")
    group.ranks[1].faults(fault)
    with stage.connect() as client, pytest.raises(DriverCallFailed, match="999"):
        freeze(stage, client)
    assert group.is_counting()
    suspend(stage)
    resume(stage)
    assert group.is_counting()


@needs_cgroup
def test_a_rank_that_has_ended_takes_no_descriptor_along(stage):
    group = Group(stage, 3, "--hold", together=False)
    suspend(stage)
    group.ranks[0].kill()
    resume(stage)
    assert all(rank.is_counting() for rank in group.ranks[1:])
    assert group.sees_each_other()


# ---- who cannot be helped is refused before anything stops


@needs_cgroup
def test_a_relay_that_keeps_a_descriptor_is_named(stage):
    group = Group(stage, 2, together=False)
    relay = Relay(stage, receives=True)
    with stage.connect() as client, pytest.raises(GpuObjectBlocks) as told:
        freeze(stage, client)
    assert f"Process {relay.pid} (" in str(told.value)
    owner = group.ranks[0].pid
    assert f"its descriptor {relay.numbers[0]} is GPU memory, object 2 of process {owner}" in str(told.value)
    assert "close the descriptor once it has been sent" in str(told.value)
    held = stage.ask("inventory", container=CONTAINER, cgroup=stage.cgroup, blockers=True)["holdings"]
    (blocker,) = held[str(owner)]["blockers"]
    assert blocker["kind"] == "descriptor"
    assert f"process {relay.pid} (" in blocker["what"]
    assert held[str(group.ranks[1].pid)]["blockers"] == []
    assert group.is_counting()
    relay.lets_go()
    suspend(stage)
    resume(stage)
    assert group.is_counting()
    assert stage.journal() == []


@needs_cgroup
def test_a_descriptor_that_nobody_receives_is_named(stage):
    group = Group(stage, 2, together=False)
    relay = Relay(stage, receives=False)
    with (
        stage.connect() as client,
        pytest.raises(GpuObjectBlocks, match="descriptors lie unread in its socket") as told,
    ):
        freeze(stage, client)
    assert f"Process {relay.pid} (" in str(told.value)
    assert group.is_counting()
    relay.lets_go()
    suspend(stage)
    resume(stage)
    assert group.is_counting()


class Freezing:
    """A freeze that is under way."""

    def __init__(self, stage, client):
        self.client = client
        args = {"container": CONTAINER, "cgroup": stage.cgroup, "deadline_s": 15, "image_path": str(stage.image)}
        client._send({"id": 1, "verb": "freeze", "args": args}, time.monotonic() + 5, "freeze", 5)

    def reply(self):
        reply = {}
        while "ok" not in reply:
            reply = json.loads(self.client._read_line(time.monotonic() + 20, "freeze", 20))
        return reply


@needs_cgroup
def test_a_descriptor_that_is_received_soon_is_waited_for(stage):
    group = Group(stage, 2, together=False)
    relay = Relay(stage, receives=False)
    with stage.connect() as client:
        freezing = Freezing(stage, client)
        time.sleep(0.3)
        relay.lets_go()
        reply = freezing.reply()
        assert reply["ok"], reply
        release(client, reply["result"])
    assert group.is_counting()


@needs_cgroup
@pytest.mark.parametrize("comes", [True, False])
def test_at_rest_all_go_on_until_a_descriptor_is_received(stage, comes):
    group = Group(stage, 2, together=False)
    slow = group.ranks[0]
    slow.faults("slow-rest")
    with stage.connect() as client:
        freezing = Freezing(stage, client)
        wait_until(lambda: slow.fault_file.read_text() == "", "the gates to close")
        relay = Relay(stage, receives=False)
        assert group.is_counting()  # again, while the freeze goes on
        if comes:
            relay.lets_go()
        reply = freezing.reply()
        assert reply["ok"] == comes, reply
        if comes:
            assert group.stands_still()
            release(client, reply["result"])
        else:
            assert "descriptors lie unread in its socket" in reply["error"]["message"]
    assert group.is_counting()
    assert stage.journal() == []


@needs_cgroup
def test_what_lies_in_sockets_hinders_nobody_who_shares_no_descriptor(stage):
    ends = socket.socketpair()
    script = "import time; print(1, flush=True); time.sleep(600)"
    with open(os.devnull) as null:
        socket.send_fds(ends[0], [b"x"], [null.fileno()])
    idle = stage.spawn([sys.executable, "-c", script], cgroup="", stdout=-1, pass_fds=[ends[1].fileno()])
    idle.stdout.readline()
    assert look_at([idle.pid], OpenFiles({})).waiting
    group = Group(stage, 2, "--opened")
    suspend(stage)
    resume(stage)
    assert group.is_counting()
    for end in ends:
        end.close()


# ---- the tables


def test_an_open_file_is_found_among_many_of_one_inode():
    named = {f"1/{n}": os.open(os.devnull, os.O_RDONLY) for n in range(40)}
    others = [os.open(os.devnull, os.O_RDONLY) for _ in range(20)]
    doubles = {name: os.dup(fd) for name, fd in named.items()}
    os.set_inheritable(doubles["1/7"], True)
    try:
        held = look_at([os.getpid()], OpenFiles(named)).held
        by_number = {one.place.number: one for one in held}
        assert by_number.keys() == {*named.values(), *doubles.values()}
        assert all(by_number[fd].of == name for name, fd in (*named.items(), *doubles.items()))
        assert not by_number[doubles["1/7"]].closes_on_exec
        assert by_number[doubles["1/8"]].closes_on_exec
    finally:
        for fd in (*named.values(), *doubles.values(), *others):
            os.close(fd)


def test_a_descriptor_or_process_that_is_gone_is_nobodys():
    files = OpenFiles({"1/1": 0})
    seen = os.fstat(0)
    assert files.name_of(os.getpid(), 0, (seen.st_dev, seen.st_ino)) == "1/1"
    assert files.name_of(os.getpid(), 1 << 20, (seen.st_dev, seen.st_ino)) is None
    assert files.name_of((1 << 22) - 1, 0, (seen.st_dev, seen.st_ino)) is None
    assert look_at([(1 << 22) - 1], files).held == ()


def test_descriptors_that_wait_in_a_socket_are_counted():
    ends = socket.socketpair()
    with ends[0], ends[1]:
        numbers = array.array("i", [0, 1, 2])
        ends[0].sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, numbers)])
        waiting = look_at([os.getpid()], OpenFiles({})).waiting
        assert [(one.number, one.count) for one in waiting] == [(ends[1].fileno(), 3)]


def test_the_journal_gives_a_process_back_as_it_was_written():
    parked = ParkedDescriptor(41, "7/1", True, 0xFFFF_0000_0000_0001)
    staged = StagedProcess(ProcessIdentity(5, 6), "x", 7, descriptors=(parked,))
    assert StagedProcess.from_json(json.loads(json.dumps(staged.to_json()))) == staged
    assert StagedPart((staged,)).tokens() == {parked.token: "7/1"}
    assert staged.objects_wanted() == {"7/1"}


def test_placeholders_are_found_by_their_token_and_nothing_else_is_taken_for_one(tmp_path):
    content = b"VGPUHELD" + struct.pack("<Q", 77)
    real, other, short = (os.memfd_create("x") for _ in range(3))
    os.write(real, content)
    os.write(other, content[:-1] + b"\xff")
    os.write(short, content[:-1])
    (tmp_path / "file").write_bytes(content)
    named = os.open(tmp_path / "file", os.O_RDONLY)
    try:
        found = placeholders_of([os.getpid()], {77: "1/1"})
        assert [(place.number, place.inode, token) for place, token in found] == [(real, os.fstat(real).st_ino, 77)]
        assert placeholders_of([os.getpid()], {}) == []
    finally:
        for fd in (real, other, short, named):
            os.close(fd)
    assert [read_token(content), read_token(b""), read_token(content + b"x"), read_token(bytes(16))] == [
        77,
        None,
        None,
        None,
    ]
