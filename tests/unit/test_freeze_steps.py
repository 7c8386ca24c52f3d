"""Every step of a freeze is made to fail in turn, and every wait to run out: afterwards all processes run as before."""

import subprocess
import time

import pytest

from gpu_state.deadline import Deadline
from gpu_state.driver import ILLEGAL_STATE, NOT_READY, NOT_SUPPORTED, OUT_OF_MEMORY, Device, ProcessState
from gpu_state.freeze import Freeze, FreezeOrder, Tools
from gpu_state.inventory import Inventory
from gpu_state.leases import Journal, Lease, checked_container
from gpu_state.phases import Phases
from gpu_state.processes import ProcessHoldings, identity_of
from gpu_state.remote_driver import DriverNode
from gpu_state.thaw import Thaw
from gpu_state.undo import Undo
from vgpu_errors import (
    AgentRefused,
    Cancelled,
    DeadlineExceeded,
    DriverCallFailed,
    DriverWorkerLost,
    GpuProcessUnreadable,
    GpuStateLost,
    NotEnoughDeviceMemory,
)

RUNNING, LOCKED, CHECKPOINTED = ProcessState.RUNNING, ProcessState.LOCKED, ProcessState.CHECKPOINTED
UUID = "GPU-aaaaaaaa-aaaa-aaaa-aaaa-aaaaaaaaaaaa"


class Clock:
    """A clock that only moves when told."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


NEEDS = {"lock": RUNNING, "checkpoint": LOCKED, "restore": CHECKPOINTED, "unlock": LOCKED}
LEADS_TO = {"lock": LOCKED, "checkpoint": CHECKPOINTED, "restore": LOCKED, "unlock": RUNNING}


class SimulatedDriver:
    """The checkpoint state machine of the driver over plain process ids, with faults on order."""

    def __init__(self, pids, clock):
        self.states = dict.fromkeys(pids, RUNNING)
        self.clock = clock
        self.faults = {}  # (call, pid) -> [action, ...], one used up per call
        self.calls = []
        self.maps = {}
        self.in_flight = {}  # pid -> (call, number of looks at its state until it takes effect)

    def node(self, _deadline):
        device = Device(0, UUID, "Simulated", 1 << 30, 1 << 20)
        return DriverNode(13000, "580.0", (device,), {0: UUID}, dict.fromkeys(self.states, 4096))

    def get_state(self, pid, deadline):
        self._do("get_state", pid, deadline)
        return self.states[pid]

    def lock(self, pid, deadline):
        self._do("lock", pid, deadline)

    def checkpoint(self, pid, deadline):
        self._do("checkpoint", pid, deadline)

    def restore(self, pid, device_map, deadline):
        self.maps[pid] = dict(device_map)
        self._do("restore", pid, deadline)

    def unlock(self, pid, deadline):
        self._do("unlock", pid, deadline)

    def _do(self, call, pid, deadline):
        deadline.check(f"{call} of process {pid}")
        self.calls.append((call, pid))
        self._go_on_with_call_in_flight(call, pid)
        waiting = self.faults.get((call, pid))
        fault = waiting.pop(0) if waiting else None
        if isinstance(fault, int):
            raise DriverCallFailed(call=FULL_NAME[call], pid=pid, code=fault, name="SIMULATED")
        if fault == "times out before":
            self._pass_time(call, pid, deadline)
        if fault == "takes effect later":
            self.in_flight[pid] = (call, 3)
            self._pass_time(call, pid, deadline)
        if call in NEEDS:
            if self.states[pid] is not NEEDS[call]:
                raise DriverCallFailed(call=FULL_NAME[call], pid=pid, code=ILLEGAL_STATE, name="ILLEGAL_STATE")
            self.states[pid] = LEADS_TO[call]
        if fault == "times out after":
            self._pass_time(call, pid, deadline)
        if fault == "worker dies":
            raise DriverWorkerLost(call=call, pid=pid)

    def _go_on_with_call_in_flight(self, call, pid):
        """The driver serves one call at a time per process, also one whose caller was killed."""
        pending, looks = self.in_flight.pop(pid, (None, 0))
        if pending and call == "get_state" and looks > 0:
            self.in_flight[pid] = (pending, looks - 1)
        elif pending and self.states[pid] is NEEDS[pending]:
            self.states[pid] = LEADS_TO[pending]

    def _pass_time(self, call, pid, deadline):
        self.clock.now += 1000
        deadline.check(f"{call} of process {pid}")


FULL_NAME = {
    "get_state": "cuCheckpointProcessGetState",
    "lock": "cuCheckpointProcessLock",
    "checkpoint": "cuCheckpointProcessCheckpoint",
    "restore": "cuCheckpointProcessRestore",
    "unlock": "cuCheckpointProcessUnlock",
}


class SimulatedSockets:
    """Control sockets that note what is asked of them."""

    def __init__(self, clock):
        self.clock = clock
        self.is_listening = True
        self.fault = None

    def pause(self, _container, deadline):
        self.is_listening = False
        if self.fault == "times out":
            self.clock.now += 1000
            deadline.check("detach")

    def resume(self, _container):
        self.is_listening = True


class Stage:
    """Three real processes under a simulated driver."""

    def __init__(self, folder):
        self.children = [subprocess.Popen(["sleep", "60"]) for _ in range(3)]
        self.pids = sorted(child.pid for child in self.children)
        self.clock = Clock()
        self.driver = SimulatedDriver(self.pids, self.clock)
        self.sockets = SimulatedSockets(self.clock)
        self.journal = Journal(folder / "journal")
        self.latecomer = None
        self.tools = Tools(self.driver, Inventory(self.driver, lambda _: {}, self.holdings), self.sockets, self.journal)
        self.order = FreezeOrder("c1", "/c1", identity_of(self.children[0].pid))

    def holdings(self, _cgroup):
        held = [self._held(pid, self.driver.states[pid]) for pid in self.pids]
        return held + ([self._held(self.latecomer, RUNNING)] if self.latecomer else [])

    def _held(self, pid, state):
        files = () if state is CHECKPOINTED else ("/dev/nvidia0", "/dev/nvidiactl")
        return ProcessHoldings(identity_of(pid), pid, "sleep", files, maps_driver=True)

    def deadline(self, **options):
        return Deadline(60, clock=self.clock, **options)

    def freeze(self, deadline=None, undo_s=2.0):
        return Freeze(self.order, self.tools, undo_s=undo_s).run(deadline or self.deadline(), Phases())

    def assert_untouched(self):
        assert set(self.driver.states.values()) == {RUNNING}
        assert list(self.journal.entries()) == []
        assert self.sockets.is_listening


@pytest.fixture
def stage(tmp_path):
    stage = Stage(tmp_path)
    yield stage
    for child in stage.children:
        child.kill()
        child.wait(5)


def test_a_freeze_checkpoints_all_and_leaves_a_lease(stage):
    events = []
    frozen = Freeze(stage.order, stage.tools).run(stage.deadline(), Phases(events.append))
    assert set(stage.driver.states.values()) == {CHECKPOINTED}
    assert [process.shown.state for process in frozen.processes] == ["checkpointed"] * 3
    assert [process.shown.devices for process in frozen.processes] == [(UUID,)] * 3
    assert list(stage.journal.entries()) == [frozen.lease]
    assert not stage.sockets.is_listening
    ended = [event["phase"] for event in events if event["state"] == "end"]
    assert ended == ["find", "detach", "lock", "checkpoint", "verify"]


def test_all_are_locked_before_any_is_checkpointed(stage):
    stage.freeze()
    order = [call for call, _ in stage.driver.calls if call in {"lock", "checkpoint"}]
    assert order == ["lock"] * 3 + ["checkpoint"] * 3


def test_the_journal_is_written_before_the_first_lock(stage):
    seen = []
    stage.driver.lock = lambda *_: seen.append(len(list(stage.journal.entries())))
    with pytest.raises(DriverCallFailed):
        stage.freeze()
    assert seen == [1, 1, 1]


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("call", ["lock", "checkpoint"])
@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (OUT_OF_MEMORY, DriverCallFailed),
        (999, DriverCallFailed),
        ("times out before", DeadlineExceeded),
        ("times out after", DeadlineExceeded),
        ("takes effect later", DeadlineExceeded),
        ("worker dies", DriverWorkerLost),
    ],
)
def test_a_step_that_fails_is_undone(stage, call, which, fault, error):
    stage.driver.faults[call, stage.pids[which]] = [fault]
    with pytest.raises(error) as raised:
        stage.freeze()
    stage.assert_untouched()
    assert not stage.driver.in_flight
    assert not any("undoing" in note for note in getattr(raised.value, "__notes__", []))


def test_the_error_names_process_call_and_code(stage):
    stage.driver.faults["checkpoint", stage.pids[1]] = [999]
    with pytest.raises(
        DriverCallFailed, match=rf"cuCheckpointProcessCheckpoint failed on process {stage.pids[1]}: 999"
    ):
        stage.freeze()


@pytest.mark.parametrize("faults", [["times out before"], [None, "times out before"]], ids=["find", "verify"])
def test_a_state_that_cannot_be_read_in_time_is_undone(stage, faults):
    stage.driver.faults["get_state", stage.pids[1]] = faults
    with pytest.raises(DeadlineExceeded):
        stage.freeze()
    assert not stage.driver.faults["get_state", stage.pids[1]]
    stage.assert_untouched()


def test_preloads_that_do_not_let_go_stop_the_freeze(stage):
    stage.sockets.fault = "times out"
    with pytest.raises(DeadlineExceeded):
        stage.freeze()
    stage.assert_untouched()
    assert not [call for call, _ in stage.driver.calls if call == "lock"]


def test_a_journal_that_cannot_be_written_stops_the_freeze(stage, monkeypatch):
    def full_disk(_lease):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(stage.journal, "write", full_disk)
    with pytest.raises(OSError, match="No space"):
        stage.freeze()
    stage.assert_untouched()


def test_a_client_that_leaves_cancels_the_freeze(stage):
    deadline = stage.deadline(
        why_cancelled=lambda: "the client went away" if ("lock", stage.pids[2]) in stage.driver.calls else None
    )
    with pytest.raises(Cancelled, match="the client went away"):
        stage.freeze(deadline)
    stage.assert_untouched()


def test_a_process_that_the_driver_cannot_read_is_never_left_out(stage):
    stage.driver.faults["get_state", stage.pids[1]] = [3]
    with pytest.raises(GpuProcessUnreadable, match=f"Process {stage.pids[1]} .*holds /dev/nvidia0"):
        stage.freeze()
    stage.assert_untouched()


def test_a_process_without_a_device_that_the_driver_does_not_know_is_no_gpu_process(stage):
    stage.driver.faults["get_state", stage.pids[1]] = [3]
    stage.driver.states[stage.pids[1]] = CHECKPOINTED  # holds no device file in this simulation
    found = stage.tools.inventory.find("c1", "/c1", stage.deadline())
    assert [process.pid for process in found] == [stage.pids[0], stage.pids[2]]


@pytest.mark.parametrize("state", [LOCKED, CHECKPOINTED, ProcessState.FAILED])
def test_a_process_that_somebody_else_froze_is_refused(stage, state):
    stage.driver.states[stage.pids[1]] = state
    with pytest.raises(GpuProcessUnreadable, match="somebody else"):
        stage.freeze()
    assert stage.driver.states[stage.pids[1]] is state
    assert stage.sockets.is_listening


def test_a_gpu_process_that_appears_meanwhile_is_noticed(stage):
    checkpoint = stage.driver.checkpoint

    def and_one_more(pid, deadline):
        stage.latecomer = stage.children[0].pid
        checkpoint(pid, deadline)

    stage.driver.checkpoint = and_one_more
    with pytest.raises(GpuProcessUnreadable, match="still holds that file"):
        stage.freeze()
    stage.latecomer = None
    stage.assert_untouched()


def test_an_undo_waits_for_a_driver_call_that_is_still_at_work(stage):
    pid = stage.pids[0]
    stage.driver.faults["checkpoint", pid] = ["times out before"]
    stage.driver.faults["unlock", pid] = [ILLEGAL_STATE, ILLEGAL_STATE]
    stage.driver.faults["get_state", pid] = [None, None, "worker dies"]
    with pytest.raises(DeadlineExceeded):
        stage.freeze()
    stage.assert_untouched()


def test_an_undo_that_fails_is_told_and_stays_in_the_journal(stage):
    stage.driver.faults["checkpoint", stage.pids[0]] = [999]
    stage.driver.faults["unlock", stage.pids[0]] = [999]
    with pytest.raises(DriverCallFailed) as raised:
        stage.freeze()
    assert any("while undoing" in note and "Unlock" in note for note in raised.value.__notes__)
    assert "while undoing" in str(raised.value.to_json()["notes"])
    assert [stage.driver.states[pid] for pid in stage.pids] == [LOCKED, RUNNING, RUNNING]
    assert [lease.container for lease in stage.journal.entries()] == ["c1"]
    assert stage.sockets.is_listening


def test_a_process_that_dies_during_the_freeze_does_not_keep_the_others(stage):
    victim = next(child for child in stage.children if child.pid == stage.pids[1])
    lock = stage.driver.lock

    def dies(pid, deadline):
        if pid == victim.pid:
            victim.kill()
            victim.wait(5)
            raise DriverCallFailed(call="cuCheckpointProcessLock", pid=pid, code=1, name="INVALID_VALUE")
        lock(pid, deadline)

    stage.driver.lock = dies
    with pytest.raises(DriverCallFailed):
        stage.freeze()
    assert [stage.driver.states[pid] for pid in (stage.pids[0], stage.pids[2])] == [RUNNING, RUNNING]
    assert list(stage.journal.entries()) == []


# ---- thaw -----------------------------------------------------------------------------------------


def thaw(stage, lease, **options):
    Thaw(stage.driver, "c1", stage.deadline(), **options).run(lease.processes)


def test_a_thaw_restores_all_before_it_unlocks_any(stage):
    lease = stage.freeze().lease
    stage.driver.calls.clear()
    thaw(stage, lease, device_map={UUID: UUID})
    order = [call for call, _ in stage.driver.calls if call in {"restore", "unlock"}]
    assert order == ["restore"] * 3 + ["unlock"] * 3
    assert stage.driver.maps == {pid: {UUID: UUID} for pid in stage.pids}
    assert set(stage.driver.states.values()) == {RUNNING}


@pytest.mark.parametrize(
    ("code", "error", "said"),
    [
        (NOT_SUPPORTED, GpuStateLost, "imported"),
        (OUT_OF_MEMORY, NotEnoughDeviceMemory, "1048576 bytes free"),
        (999, DriverCallFailed, "999"),
    ],
)
def test_a_restore_that_fails_is_named_and_the_others_run(stage, code, error, said):
    lease = stage.freeze().lease
    stage.driver.faults["restore", stage.pids[1]] = [code]
    with pytest.raises(error, match=said) as raised:
        thaw(stage, lease)
    assert str(stage.pids[1]) in str(raised.value)
    assert [stage.driver.states[pid] for pid in stage.pids] == [RUNNING, CHECKPOINTED, RUNNING]


def test_a_thaw_does_not_wait_for_a_state_that_will_not_come(stage):
    lease = stage.freeze().lease
    stage.driver.faults["restore", stage.pids[0]] = [NOT_READY] * 1000
    began = time.monotonic()
    with pytest.raises(DriverCallFailed):
        thaw(stage, lease)
    assert time.monotonic() - began < 1


def test_a_process_that_the_driver_gave_up_is_lost(stage):
    lease = stage.freeze().lease
    stage.driver.states[stage.pids[2]] = ProcessState.FAILED
    with pytest.raises(GpuStateLost, match=r"GetState.*given it up"):
        thaw(stage, lease)


def test_a_later_process_with_the_same_pid_is_left_alone(stage):
    lease = stage.freeze().lease
    as_doc = lease.to_json()
    as_doc["processes"][0]["start_time"] -= 1
    thaw(stage, Lease.from_json(as_doc))
    assert stage.driver.states[as_doc["processes"][0]["pid"]] is CHECKPOINTED


# ---- the pieces -----------------------------------------------------------------------------------


def test_a_lease_survives_the_journal(stage):
    lease = stage.freeze().lease
    assert list(stage.journal.entries()) == [lease]


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"lease": 1}', "null"])
def test_a_damaged_journal_entry_is_passed_over(tmp_path, content):
    journal = Journal(tmp_path)
    (tmp_path / "c1.json").write_text(content)
    assert list(journal.entries()) == []


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "-x", "a\0b", "x" * 129, None, 7])
def test_a_container_id_that_is_no_file_name_is_refused(name):
    with pytest.raises(AgentRefused):
        checked_container(name, "freeze")


def test_undo_runs_backwards_once_and_reports_its_failures():
    done = []

    def fails():
        raise ValueError("cannot")

    with pytest.raises(KeyError) as raised, Undo() as undo:  # noqa: PT012
        undo.push(done.append, 1)
        undo.push(fails)
        undo.push(done.append, 2)
        raise KeyError("first")
    assert done == [2, 1]
    assert raised.value.__notes__ == ["while undoing: cannot"]


def test_undo_does_nothing_after_keep():
    done = []
    with pytest.raises(KeyError), Undo() as undo:  # noqa: PT012
        undo.push(done.append, 1)
        undo.keep()
        raise KeyError("later")
    assert done == []


def test_a_part_never_outlives_the_whole_deadline():
    clock = Clock()
    whole = Deadline(10, clock=clock)
    assert whole.within(3).remaining() == 3
    clock.now = 9
    assert whole.within(3).remaining() == 1
    clock.now = 11
    assert whole.remaining() == 0
    with pytest.raises(DeadlineExceeded, match="lock took longer than 10 s"):
        whole.check("lock")
