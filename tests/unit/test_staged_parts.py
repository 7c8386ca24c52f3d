"""The parts of staged mode that need no process: frames with descriptors, claims of a preload, blockers, the keeper, the proof."""

import contextlib
import os
import socket
import subprocess
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_state import blockers, doctor
from gpu_state.deadline import Deadline
from gpu_state.fd_keeper import Keeper
from gpu_state.import_marks import ImportMarks
from gpu_state.inventory_proof import DeviceInventory, Tally, Tolerance, prove
from gpu_state.leases import Journal, Lease
from gpu_state.preload_frames import STAGED_VERSION, Frame, FrameError, FrameReader, FrameType, Hello
from gpu_state.preload_link import GateState, PreloadLink
from gpu_state.preload_objects import Blocker, DeviceObject, Holdings
from gpu_state.preload_peer import Peer
from gpu_state.processes import ProcessIdentity, identity_of
from gpu_state.shared_objects import ImportedObject
from gpu_state.staged_lease import StagedPart, StagedProcess
from gpu_state.staged_proof import StagedProof
from oci_hook.injection import mode_of
from oci_hook.settings import parse_settings
from runtime_shim.staged_checkpoint import mode_in
from vgpu_errors import BadConfiguration, DeadlineExceeded, InventoryMismatch, PreloadFailed

UUID = "GPU-aaaaaaaa-aaaa-aaaa-aaaa-aaaaaaaaaaaa"
OBJECT = {"id": 1, "size": 2 << 20, "device": 0, "uuid": UUID, "kind": "alloc", "requested": 100}
OBJECT["mappings"] = [{"va": "0x7f0000000000", "size": 2 << 20, "offset": 0, "access": [[0, 3]]}]
STAGED_HELLO = {"pid": 7, "devices": [], "mode": "staged", "protocol": 2, "phase": "open"}


# ---- one connection ----------------------------------------------------------------------------------------


class Far:
    """The preload's end of a connection; `answer` runs in a thread."""

    def __init__(self, answer=None):
        ours, self.sock = socket.socketpair()
        ours.setblocking(False)
        self.peer = Peer(ours, os.getpid())
        self.peer.hello = Hello.from_json(STAGED_HELLO)
        self.reader = FrameReader()
        self.is_over = False
        threading.Thread(target=self.listen, daemon=True).start()
        if answer is not None:
            threading.Thread(target=self.serve, args=(answer,), daemon=True).start()

    def listen(self):
        """What the thread of registration.py does."""
        while not self.is_over:
            try:
                if self.peer.receive() is None:
                    break
            except BlockingIOError:
                continue
            except (OSError, FrameError):
                break
        self.peer.close()

    def serve(self, answer):
        while data := self.sock.recv(65536):
            for frame in self.reader.feed(data):
                answer(self, frame)

    def send(self, kind, sequence, payload, fds=()):
        data = Frame(kind, sequence, payload, STAGED_VERSION).to_bytes()
        socket.send_fds(self.sock, [data], list(fds))


@pytest.fixture
def far():
    made = []

    def make(answer=None):
        made.append(Far(answer))
        return made[-1]

    yield make
    for one in made:
        one.is_over = True
        one.sock.close()


def test_descriptors_come_by_object_id(far, tmp_path):
    files = {number: (tmp_path / str(number)) for number in (1, 2, 3)}
    for number, path in files.items():
        path.write_text(str(number))

    def answer(far, frame):
        for part in ([1, 2], [3]):
            opened = [os.open(files[number], os.O_RDONLY) for number in part]
            far.send(FrameType.FDS, frame.sequence, {"objects": part}, opened)
            for fd in opened:
                os.close(fd)
        far.send(FrameType.EXPORTED, frame.sequence, {"count": 3})

    fds = PreloadLink(far(answer).peer).export([1, 2, 3], Deadline(5))
    assert {number: os.read(fd, 10) for number, fd in fds.items()} == {1: b"1", 2: b"2", 3: b"3"}
    for fd in fds.values():
        os.close(fd)


def test_descriptors_that_nobody_asked_for_end_the_connection(far):
    one = far()
    before = len(os.listdir("/proc/self/fd"))
    with open(os.devnull) as file:
        one.send(FrameType.FDS, 1, {"objects": [1]}, [file.fileno()])
        one.sock.settimeout(5)
        assert one.sock.recv(10) == b""
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize("ids", [[1, 2], "no list", [None]])
def test_ids_that_do_not_match_the_descriptors_end_the_connection(far, ids):
    def answer(far, frame):
        with open(os.devnull) as file:
            far.send(FrameType.FDS, frame.sequence, {"objects": ids}, [file.fileno()])

    with pytest.raises(PreloadFailed, match="its connection ended"):
        PreloadLink(far(answer).peer).export([1, 2], Deadline(5))


def test_an_uninvited_peer_gets_no_more_room_than_in_version_1():
    frame = Frame(FrameType.INVENTORY_IS, 1, {"objects": ["x" * 70000]}, STAGED_VERSION).to_bytes()
    with pytest.raises(FrameError, match="length"):
        list(FrameReader().feed(frame))


def test_a_preload_that_does_not_answer_runs_into_the_deadline(far):
    with pytest.raises(DeadlineExceeded, match="REST of process"):
        PreloadLink(far(lambda *_: None).peer).rest(Deadline(0.3))


def test_a_preload_that_does_not_read_runs_into_the_deadline(far):
    ids = list(range(400000))
    with pytest.raises(DeadlineExceeded, match="MAP"):
        PreloadLink(far().peer)._peer.ask(
            FrameType.MAP, {"objects": ids}, deadline=Deadline(0.3), answer=FrameType.MAPPED
        )


def test_a_failure_is_told_with_its_code_and_object(far):
    def answer(far, frame):
        far.send(FrameType.FAILED, frame.sequence, {"what": "cuMemUnmap", "code": 1, "object": 7})

    with pytest.raises(PreloadFailed, match=r"RELEASE of process \d+: cuMemUnmap, code 1, object 7"):
        PreloadLink(far(answer).peer).release(Deadline(5))


def test_shares_come_with_their_descriptors(far):
    share = OBJECT | {"role": "exporter", "shared": {"ways": ["descriptor"], "peers": [], "peer_count": 0}}

    def answer(far, frame):
        with open(os.devnull) as file:
            far.send(FrameType.FDS, frame.sequence, {"objects": [1]}, [file.fileno()])
        far.send(FrameType.SHARES_ARE, frame.sequence, {"shares": [share]})

    shares, fds = PreloadLink(far(answer).peer).shares(Deadline(5))
    assert [(one.role, one.id) for one in shares] == [("exporter", 1)]
    assert fds.keys() == {1}
    os.close(fds[1])


@pytest.mark.parametrize("shares", [[], [{"role": "thief"} | OBJECT], "x", [OBJECT | {"role": "exporter", "size": 0}]])
def test_damaged_shares_are_refused_and_their_descriptors_closed(far, shares):
    def answer(far, frame):
        with open(os.devnull) as file:
            far.send(FrameType.FDS, frame.sequence, {"objects": [1]}, [file.fileno()])
        far.send(FrameType.SHARES_ARE, frame.sequence, {"shares": shares})

    one = far(answer)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(PreloadFailed, match=r"SHARES of process .* damaged"):
        PreloadLink(one.peer).shares(Deadline(5))
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_halted_process_tells_who_waits_at_its_gate(far):
    asked = []

    def answer(far, frame):
        asked.append((frame.type, frame.payload))
        state = {"passed": 3, "waiting": 1, "inside": 0, "capturing": False, "idle": True}
        far.send(FrameType.HALTED if frame.type == FrameType.HALT else FrameType.PASSED, frame.sequence, state)

    link = PreloadLink(far(answer).peer)
    link.halt(Deadline(5))
    assert link.phase == "halted"
    assert link.let_pass(4, 20, Deadline(5)) == GateState(3, 1, 0, is_capturing=False, is_idle=True)
    assert asked[1] == (FrameType.LET_PASS, {"calls": 4, "wait_ms": 20})


def test_another_threads_request_is_waited_for_no_longer_than_the_deadline(far):
    link = PreloadLink(far(lambda *_: None).peer)

    def rest():
        with contextlib.suppress(DeadlineExceeded):
            link.rest(Deadline(1.5))

    first = threading.Thread(target=rest)
    first.start()
    while not link._peer._asking.locked():
        pass
    with pytest.raises(DeadlineExceeded, match="INVENTORY of process"):
        link.holdings(Deadline(0.2))
    first.join()


# ---- claims ------------------------------------------------------------------------------------------------


def test_holdings_survive_the_journal():
    held = Holdings.from_json({"objects": [OBJECT], "driver_held": [{"kind": "small", "bytes": 5}]})
    assert held.object_bytes == 2 << 20
    assert held.driver_bytes == 5
    assert DeviceObject.from_json(held.objects[0].to_json()) == held.objects[0]


@pytest.mark.parametrize(
    "damage",
    [
        {"objects": {}},
        {"objects": [OBJECT, OBJECT]},
        {"objects": [OBJECT], "imports": [OBJECT | {"kind": "import"}]},
        {"imports": "x"},
        {"objects": [OBJECT | {"size": -1}]},
        {"objects": [OBJECT | {"size": 1 << 60}]},
        {"objects": [OBJECT | {"id": "1"}]},
        {"objects": [OBJECT | {"mappings": [{"va": 5}]}]},
        {"objects": [OBJECT | {"mappings": [OBJECT["mappings"][0] | {"access": [[0]]}]}]},
        {"objects": [None]},
        {"driver_held": [{"kind": "small"}]},
        {"blockers": ["x"]},
        {"blockers": [{"kind": "import", "va": "zz"}]},
    ],
)
def test_damaged_claims_are_refused(damage):
    with pytest.raises(FrameError):
        Holdings.from_json({"objects": [], "driver_held": [], "blockers": []} | damage)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*OBJECT, "objects", "blockers"]), inner)
    ),
)


@given(st.dictionaries(st.sampled_from(["objects", "driver_held", "blockers"]), JSON))
def test_no_claim_breaks_the_parser(doc):
    try:
        Holdings.from_json(doc)
    except FrameError:
        return


# ---- blockers ----------------------------------------------------------------------------------------------


def blocker(kind):
    return Blocker(kind, 0x1000, 4096, "")


def test_only_what_the_driver_takes_along_is_left_to_it():
    assert blockers.for_driver([blocker("vmm"), blocker("import")]) == [blocker("vmm")]
    assert blockers.grave([blocker("vmm"), blocker("import"), blocker("capture")]) == [blocker("import")]
    assert blockers.grave([blocker("from-the-future")])


def test_events_that_the_driver_keeps_hinder_nobody():
    assert blockers.grave([blocker("ipc-event")]) == blockers.for_driver([blocker("ipc-event")]) == []
    held = {"objects": 1, "object_bytes": 2 << 20, "driver_bytes": 0, "blockers": [blocker("ipc-event").to_json()]}
    assert [check.status for check in doctor.holdings(7, "python3", held)] == ["ok", "ok"]


@pytest.mark.parametrize(
    ("kind", "variable"), [("host-vmm", "NCCL_CUMEM_HOST_ENABLE=0"), ("fabric", "NCCL_MNNVL_ENABLE=0")]
)
def test_what_loses_the_process_in_the_drivers_hands_is_refused_with_the_variable_that_avoids_it(kind, variable):
    assert blockers.grave([blocker(kind)]) == [blocker(kind)]
    assert blockers.for_driver([blocker(kind)]) == []
    assert variable in blockers.rule_of(kind).remedy


def test_every_kind_that_the_library_names_has_a_rule():
    names = set()
    for source in ("held.c", "inventory.c"):
        text = (Path(__file__).resolve().parents[2] / "vgpu_preload" / source).read_text()
        names |= {line.split('"')[1] for line in text.splitlines() if "[BLOCKER_" in line and '{"' in line}
        names |= {line.split('"')[1] for line in text.splitlines() if "blocker->kind = " in line}
    assert {"import", "export", "managed"} <= names
    assert {name for name in names if blockers.rule_of(name) is blockers.rule_of("no such kind")} == set()


def test_doctor_names_each_blocker_with_its_remedy():
    held = {"objects": 1, "object_bytes": 2 << 20, "driver_bytes": 0, "blockers": [blocker("managed").to_json()]}
    checks = doctor.holdings(7, "python3", held)
    assert [check.status for check in checks] == ["fail", "ok"]
    assert "python3 holds managed memory of 4096 bytes at 0x1000" in checks[0].what
    assert "cudaMalloc" in checks[0].remedy
    assert doctor.holdings(7, "x", {"problem": "busy"})[0].status == "warn"


# ---- the proof ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("allocated", "tally", "used", "is_proved"),
    [
        (100, (100, 60, 30, 10), None, True),
        (100, (100, 60, 30, 9), None, False),
        (100, (90, 60, 30, 0), None, False),
        (100, (100, 100, 0, 0), 100 + (1 << 30), True),
        (100, (100, 100, 0, 0), 100 + (4 << 30), False),
        (1 << 30, (1 << 30, 1 << 30, 0, 0), 1 << 29, False),
    ],
)
def test_the_proof_holds_or_names_the_device(allocated, tally, used, is_proved):
    inventory = DeviceInventory(UUID, allocated, 0, 1, used)
    if is_proved:
        assert prove(inventory, Tally(*tally), Tolerance()).tally.total_bytes == allocated
        return
    with pytest.raises(InventoryMismatch, match=UUID):
        prove(inventory, Tally(*tally), Tolerance())


def staged(ns_pid, *, mine=(), imports=()):
    objects = (
        DeviceObject.from_json(OBJECT | {"id": n, "size": size, "kind": kind}) for n, (kind, size) in enumerate(mine)
    )
    taken = (ImportedObject(99 + n, "1/0", "import", size, 0, 0, UUID, ()) for n, size in enumerate(imports))
    return StagedProcess(ProcessIdentity(ns_pid, 1), "x", ns_pid, tuple(objects), tuple(taken))


GIB = 1 << 30


@pytest.mark.parametrize(
    ("used", "is_listed"),
    [
        ((8 * GIB, 0), True),  # the driver counts it for the exporter
        ((8 * GIB, 8 * GIB), True),  # and for each importer
        ((8 * GIB, 12 * GIB), False),  # what is beyond, nobody has listed
        ((4 * GIB, 0), False),
    ],
)
def test_what_is_imported_may_be_counted_once_more_and_no_oftener(used, is_listed):
    processes = [staged(1, mine=[("vmm", 8 * GIB)]), staged(2, imports=[8 * GIB])]
    proof = StagedProof(processes, 0, used, Tolerance(), is_marked=False)
    if is_listed:
        proof.check_listed()
        (told,) = proof.check_taken({UUID: Tally(8 * GIB, 8 * GIB, 0, 0)})
        assert told.to_json()["may_repeat_bytes"] == 8 * GIB
        return
    with pytest.raises(InventoryMismatch):
        proof.check_listed()


@pytest.mark.parametrize(("kind", "is_marked", "is_listed"), [("opened", 0, True), ("vmm", 1, True), ("vmm", 0, False)])
def test_orphans_and_what_the_agent_gave_may_be_counted_for_nobody(kind, is_marked, is_listed):
    proof = StagedProof([staged(1, mine=[(kind, 8 * GIB)])], 0, [GIB], Tolerance(), is_marked=bool(is_marked))
    if is_listed:
        proof.check_listed()
        return
    with pytest.raises(InventoryMismatch):
        proof.check_listed()


def test_tallies_of_devices_add_up():
    assert Tally.sum([Tally(3, 1, 1, 1), Tally(5, 5, 0, 0)]) == Tally(8, 6, 1, 1)


# ---- keeper, marks, journal ----------------------------------------------------------------------------------


@pytest.fixture
def process():
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def test_the_keeper_gives_back_what_it_was_given(tmp_path, process):
    files = {f"1/{number}": os.memfd_create(str(number)) for number in range(450)}
    for name, fd in files.items():
        os.write(fd, name.encode())
    keeper = Keeper(tmp_path / ("long" * 20) / "keep", "c" * 64)
    keeper.start([process.pid])
    keeper.put(files, Deadline(10))
    for fd in files.values():
        os.close(fd)
    found = Keeper(tmp_path / ("long" * 20) / "keep", "c" * 64).take(Deadline(10))
    assert {name: os.pread(fd, 20, 0).decode() for name, fd in found.items()} == {name: name for name in files}
    for fd in found.values():
        os.close(fd)
    keeper.drop()
    assert keeper.take(Deadline(1)) == {}


def test_the_keeper_ends_with_the_processes_whose_memory_it_is(tmp_path, process):
    keeper = Keeper(tmp_path, "c1")
    keeper.start([process.pid])
    with open(os.devnull) as file:
        keeper.put({"1/1": file.fileno()}, Deadline(5))
    process.kill()
    process.wait()
    ends = Deadline(10)
    while found := keeper.take(Deadline(1)):
        for fd in found.values():
            os.close(fd)
        ends.check("the end of the keeper")


def test_marks_outlive_the_agent_and_not_the_process(tmp_path, process):
    identity = identity_of(process.pid)
    ImportMarks(tmp_path).add("c1", [identity, ProcessIdentity(process.pid, 1)])
    assert ImportMarks(tmp_path).of("c1") == {identity}
    process.kill()
    process.wait()
    ImportMarks(tmp_path).sweep()
    assert ImportMarks(tmp_path).of("c1") == set()


def test_a_staged_lease_survives_the_journal(tmp_path):
    taken = ImportedObject(3, "2/4", "opened", 2 << 20, 5, None, UUID, DeviceObject.from_json(OBJECT).mappings)
    staged = StagedProcess(ProcessIdentity(5, 6), "x", 1, (DeviceObject.from_json(OBJECT),), (taken,))
    part = StagedPart((staged,), "/image", is_complete=True, is_suspend=True, is_suspended=True)
    lease = Lease("id", "c1", "/c1", ProcessIdentity(1, 2), ((ProcessIdentity(5, 6), "x"),), staged=part)
    Journal(tmp_path).write(lease)
    assert Journal(tmp_path).of("c1") == lease
    assert lease.is_suspended
    assert staged.names() == {"1/1": staged.objects[0]}
    assert staged.wanted() == {1: "1/1", 3: "2/4"}
    older = staged.to_json()
    del older["imports"]  # of an agent that knew none
    assert StagedProcess.from_json(older).imports == ()


# ---- the mode of a container -----------------------------------------------------------------------------------


def test_the_annotation_wins_over_the_setting():
    settings = parse_settings("mode = staged", "runtime.conf")
    assert mode_of(settings, {}) == "staged"
    assert mode_of(settings, {"annotations": {"vgpu.snapshot/mode": "driver"}}) == "driver"
    assert mode_of(settings, {"annotations": {"vgpu.snapshot/mode": "nonsense"}}) == "staged"
    assert mode_of(parse_settings("", "runtime.conf"), {}) == "driver"
    with pytest.raises(BadConfiguration, match="must be one of driver, staged"):
        parse_settings("mode = fast", "runtime.conf")


def test_the_mode_file_is_what_the_shim_goes_by(tmp_path):
    assert mode_in(str(tmp_path), "c1") == "driver"
    (tmp_path / "containers" / "c1").mkdir(parents=True)
    (tmp_path / "containers" / "c1" / "mode").write_text("staged\n")
    assert mode_in(str(tmp_path), "c1") == "staged"
