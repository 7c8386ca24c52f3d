"""Processes that share device memory, frozen and brought back together: a real agent on the software driver, doubles as preloads.

Each rank has a page in the shared object that it writes at every step, and reads the pages of the others; a page that is nobody's
or older than what was seen before is the end of the process. So "all count on and see each other" means that they still share.
"""

import json
import signal
import struct
import time
from pathlib import Path

import pytest

from image_format.fields import Fields
from image_format.gpu_objects import ImportEntry, ObjectEntry
from image_format.record import Container, LowLevelRuntime, ProcessEntry, Record
from image_format.sealing import seal
from image_format.trust.keys import make_node_key
from image_format.verifying import read_claims
from image_format.vram import read_fragment
from tests.unit.agent_stage import CONTAINER, cgroup2_mount, wait_until
from tests.unit.test_staged_flows import (
    DOUBLE,
    StagedCounter,
    drain,
    freeze,
    release,
    resume,
    stage,
    suspend,
    used_bytes,
)
from vgpu_errors import DeadlineExceeded, GpuObjectBlocks, PreloadFailed

__all__ = ["stage"]
pytestmark = [
    pytest.mark.skipif(cgroup2_mount() is None, reason="needs root and a writable cgroup2 hierarchy"),
    pytest.mark.timeout(120),
]
MIB = 1 << 20


class Group:
    """Ranks in one container; rank 0 makes the shared object unless somebody else does."""

    def __init__(self, stage, size, *options, together=True, objects=1):
        self.stage, self.size = stage, size
        self.board = stage.folder / "board"
        self.board.write_bytes(bytes(8 * size))
        self.hub = str(stage.folder / "hub")
        self.ranks = []
        for rank in range(size):
            shared = ["--give", self.hub] if rank == 0 else ["--take", self.hub]
            place = ["--rank", str(rank), "--ranks", str(size), "--objects", str(objects)]
            board = ["--board", str(self.board)] if together else []
            self.ranks.append(Rank(stage, f"rank{rank}", *place, *shared, *board, *options))
        for rank in self.ranks:
            rank.has_begun()
        wait_until(lambda: stage.registered() >= self.pids(), "the registrations")

    def pids(self):
        return {rank.pid for rank in self.ranks}

    def steps(self):
        """How far each rank has submitted."""
        return struct.unpack(f"<{self.size}Q", self.board.read_bytes())

    def is_counting(self):
        return all(rank.is_counting() for rank in self.ranks) and self.sees_each_other()

    def sees_each_other(self):
        """Every rank sees new pages of every other that lives."""
        living = [number for number, rank in enumerate(self.ranks) if rank.process.poll() is None]
        before = {number: self.ranks[number].seen() for number in living}

        def is_news():
            now = {number: self.ranks[number].seen() for number in living}
            pages = [(who, f"0/{whose}") for who in living for whose in living]
            return all(now[who][page] > before[who][page] for who, page in pages)

        return wait_until(is_news, "news of everybody for everybody")

    def stands_still(self):
        return all(rank.stands_still() for rank in self.ranks)


class Rank(StagedCounter):
    """One of them. Its first step needs the others, so nobody waits for it here."""

    def __init__(self, stage, name, *options):
        self.is_known = False
        super().__init__(stage, name, *options)

    def step(self):
        if not self.is_known:
            self.is_known = True
            return 1
        return super().step()

    def has_begun(self):
        wait_until(lambda: self.step() > 0, f"first step of {self.out.name}")

    def seen(self):
        return json.loads(Path(f"{self.out}.seen").read_text())

    def kill(self):
        self.process.kill()
        self.process.wait()


@pytest.mark.parametrize("size", [2, 4])
def test_a_group_is_suspended_at_one_cut_and_resumed(stage, size):
    group = Group(stage, size, "--calls", "3")
    for _ in range(2):
        done = suspend(stage)
        assert [process["mode"] for process in done["processes"]] == ["staged"] * size
        assert done["staged"]["bytes"] == (size + 1) * 2 * MIB  # the shared object once
        assert len(set(group.steps())) == 1
        assert group.stands_still()
        resume(stage)
        assert group.is_counting()
    assert stage.journal() == []


def test_a_group_is_left_running_three_times_in_a_row(stage):
    group = Group(stage, 3)
    for _ in range(3):
        with stage.connect() as client:
            frozen = freeze(stage, client, leave_running=True)
            assert group.stands_still()
            release(client, frozen)
            assert group.is_counting()
            regions = read_fragment(drain(client)["fragment"]).regions
        assert len([region for region in regions if region.length == 2 * MIB]) == len(regions) == 4
        for path in stage.image.iterdir():
            path.unlink()
    assert stage.journal() == []


def test_opened_handles_are_shared_again_as_well(stage):
    group = Group(stage, 2, "--opened")
    imports = suspend(stage)["staged"]["imports"]
    exporter, importer = group.ranks
    assert [(found["of"], found["kind"]) for found in imports[str(importer.pid)]] == [(f"{exporter.pid}/2", "opened")]
    resume(stage)
    assert group.is_counting()


def test_an_importer_that_outlives_its_exporter_holds_the_object(stage):
    group = Group(stage, 3, together=False)
    group.ranks[0].kill()
    for _ in range(2):
        staged = suspend(stage)["staged"]
        holders = {pid: [held["kind"] for held in objects] for pid, objects in staged["objects"].items()}
        first, second = sorted(rank.pid for rank in group.ranks[1:])
        assert holders == {str(first): ["alloc", "import"], str(second): ["alloc"]}
        assert staged["imports"][str(second)][0]["of"] == f"{first}/{staged['objects'][str(first)][1]['id']}"
        resume(stage)
        assert all(rank.is_counting() for rank in group.ranks[1:])
        assert group.sees_each_other()


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_while_the_group_is_suspended_leaves_the_others_their_memory(stage, victim):
    group = Group(stage, 3, together=False)
    suspend(stage)
    group.ranks[victim].kill()
    resume(stage)
    assert all(rank.is_counting() for rank in group.ranks if rank.process.poll() is None)
    assert group.sees_each_other()
    suspend(stage)  # what is left of the group can be taken again
    resume(stage)
    assert group.sees_each_other()


@pytest.mark.parametrize("fault", ["die-in-release", "refuse-rest", "half-release"])
@pytest.mark.parametrize("where", [0, 1])
def test_a_rank_that_fails_in_the_stop_leaves_no_other_closed(stage, where, fault):
    group = Group(stage, 3, together=False)
    group.ranks[where].faults(fault)
    with stage.connect() as client, pytest.raises(PreloadFailed):
        freeze(stage, client)
    left = [rank for rank in group.ranks if fault != "die-in-release" or rank is not group.ranks[where]]
    assert all(rank.is_counting() for rank in left)
    assert group.sees_each_other()
    assert stage.journal() == []
    assert list(stage.image.iterdir()) == []


@pytest.mark.parametrize("fault", ["die-in-pass", "die-in-rest"])
@pytest.mark.parametrize("where", [0, 1])
def test_a_rank_that_ends_while_the_group_comes_to_rest_is_left_out(stage, where, fault):
    group = Group(stage, 3, together=False)
    group.ranks[where].faults(fault)
    done = suspend(stage)
    left = [rank for rank in group.ranks if rank is not group.ranks[where]]
    assert {process["pid"] for process in done["processes"]} == {rank.pid for rank in left}
    assert done["staged"]["bytes"] == 3 * 2 * MIB
    resume(stage)
    assert all(rank.is_counting() for rank in left)
    assert group.sees_each_other()


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_dies_while_memory_is_handed_back_takes_nobody_down(stage, victim):
    group = Group(stage, 3, together=False)
    with stage.connect() as client:
        frozen = freeze(stage, client, leave_running=True)
        group.ranks[victim].faults("die-in-map")
        release(client, frozen)
        group.ranks[victim].process.wait(5)
        assert all(rank.is_counting() for rank in group.ranks if rank.process.poll() is None)
        assert group.sees_each_other()


def test_a_cut_that_cannot_be_reached_opens_all_gates_and_names_each_rank(stage):
    group = Group(stage, 3, "--calls", "2")
    late = group.ranks[1]
    late.faults("stuck!")
    wait_until(lambda: len(set(group.steps())) > 1, "the others to be ahead")
    with stage.connect() as client, pytest.raises(DeadlineExceeded) as caught:
        freeze(stage, client, deadline_s=3)
    text = str(caught.value)
    assert f"process {late.pid}" in text
    assert "is idle, has submitted nothing that the others wait for, and has no thread at its gate" in text
    assert text.count("has work on its device that does not end") == 2
    late.faults()
    assert group.is_counting()
    assert stage.journal() == []


def test_a_rank_killed_while_the_group_comes_to_rest(stage):
    """The others wait for it on their devices for ever, as they would without us; but their gates are open."""
    group = Group(stage, 3)
    late = group.ranks[1]
    late.faults("stuck!")
    wait_until(lambda: len(set(group.steps())) > 1, "the others to be ahead")
    client = stage.connect()
    args = {"container": CONTAINER, "cgroup": stage.cgroup, "deadline_s": 15, "image_path": str(stage.image)}
    client._send({"id": 1, "verb": "freeze", "args": args}, time.monotonic() + 5, "freeze", 5)
    time.sleep(1.0)
    late.kill()
    reply = json.loads(client._read_line(time.monotonic() + 20, "freeze", 20))
    while "ok" not in reply:
        reply = json.loads(client._read_line(time.monotonic() + 20, "freeze", 20))
    assert reply["error"]["class"] == "PreloadFailed"
    with group.board.open("r+b") as board:  # somebody submits the dead rank's part after all
        board.seek(8)
        board.write(struct.pack("<Q", 1 << 40))
    assert all(rank.is_counting() for rank in (group.ranks[0], group.ranks[2]))


# ---- refused by name before anything stops ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        ("obstacle", "it came by a fabric handle"),
        ("lone", "the process has no descriptor of it"),
        ("beyond", "it is mapped beyond the 2097152 bytes of object"),
    ],
)
def test_an_import_that_cannot_be_given_back_is_named(stage, fault, what):
    group = Group(stage, 2)
    group.ranks[1].faults(f"{fault}!")
    with stage.connect() as client, pytest.raises(GpuObjectBlocks, match=what):
        freeze(stage, client)
    group.ranks[1].faults()
    assert group.is_counting()
    suspend(stage)
    resume(stage)
    assert group.is_counting()


def test_an_exporter_that_is_not_staged_is_named(stage):
    group = Group(stage, 2)
    group.ranks[0].faults("block:vmm!")
    with stage.connect() as client, pytest.raises(GpuObjectBlocks, match="exported to another process"):
        freeze(stage, client)
    assert group.is_counting()


def test_a_preload_that_knows_no_groups_is_refused_as_before(stage):
    group = Group(stage, 2, "--minor", "1")
    with stage.connect() as client, pytest.raises(GpuObjectBlocks, match=r"imported from|exported to"):
        freeze(stage, client)
    assert group.is_counting()


def test_a_gpu_process_that_is_not_staged_may_have_what_was_given_away(stage):
    group = Group(stage, 2)
    plain = stage.counter("plain")
    with (
        stage.connect() as client,
        pytest.raises(GpuObjectBlocks, match=f"process {plain.pid} .* is not staged and may"),
    ):
        freeze(stage, client)
    assert group.is_counting()
    plain.process.kill()
    plain.process.wait()
    suspend(stage)
    resume(stage)
    assert group.is_counting()


def test_a_process_of_another_container_that_shares_is_named(stage):
    group = Group(stage, 2, together=False)
    others = Stranger(stage)
    with stage.connect() as client, pytest.raises(GpuObjectBlocks, match=f"process {others.pid} of container other"):
        freeze(stage, client)
    assert group.is_counting()
    others.close()
    suspend(stage)
    resume(stage)
    assert group.is_counting()


class Stranger:
    """A rank of the first container's group that lives in a container of its own."""

    def __init__(self, stage):
        (stage.run_dir / "containers" / "other").mkdir()
        (stage.run_dir / "containers" / "other" / "mode").write_text("staged")
        (stage.cgroup_folder.parent / f"{stage.cgroup_folder.name}-other").mkdir()
        self.folder = stage.cgroup_folder.parent / f"{stage.cgroup_folder.name}-other"
        stage.write_state("other", f"{stage.cgroup}-other")
        socket_path = stage.run_dir / "containers" / "other" / "agent.sock"
        wait_until(socket_path.is_socket, "the other control socket")
        out = stage.folder / "stranger.out"
        command = [stage.python, DOUBLE, str(socket_path), str(out), "--take", str(stage.folder / "hub"), "--rank", "5"]
        entry = f'echo 0 > "{self.folder}/cgroup.procs" && exec "$@"'
        self.process = stage.spawn(["sh", "-c", entry, "sh", *command, "--ranks", "6"])
        wait_until(out.exists, "its first step")
        args = {"container": "other", "cgroup": f"{stage.cgroup}-other"}
        wait_until(
            lambda: any(p["registered"] for p in stage.ask("inventory", **args)["processes"]), "its registration"
        )

    @property
    def pid(self):
        return self.process.pid

    def close(self):
        self.process.kill()
        self.process.wait()
        wait_until(lambda: not (self.folder / "cgroup.procs").read_text(), "its end")
        self.folder.rmdir()


def test_the_doctor_names_what_is_shared_with_nobody_who_is_staged_and_nothing_else(stage):
    group = Group(stage, 2)
    asked = {"container": CONTAINER, "cgroup": stage.cgroup, "blockers": True}
    held = stage.ask("inventory", **asked)["holdings"]
    assert [held[str(rank.pid)]["blockers"] for rank in group.ranks] == [[], []]
    assert [held[str(rank.pid)]["imports"] for rank in group.ranks] == [0, 1]
    plain = stage.counter("plain")
    held = stage.ask("inventory", **asked)["holdings"]
    assert "is not staged and may have it" in held[str(group.ranks[0].pid)]["blockers"][0]["what"]
    plain.process.kill()
    plain.process.wait()


# ---- restore -----------------------------------------------------------------------------------------------------


def test_a_restore_gives_exporter_and_importers_the_same_new_memory(stage, tmp_path):
    group = Group(stage, 3)
    key = make_node_key(tmp_path)
    with stage.connect() as client:
        frozen = freeze(stage, client)
        done = drain(client)
        (stage.image / "core-1.img").write_bytes(b"as CRIU leaves it")
        seal(stage.image, record_of(done, group, stage), key, vram=Path(done["fragment"]))
        release(client, frozen, keep=True)
        record = read_claims(stage.image)[0]
        assert "shared" in record.required_features
        wait_until(lambda: used_bytes(stage) == 0, "the end of the worker")
        args = {"container": CONTAINER, "cgroup": stage.cgroup, "deadline_s": 20, "image_path": str(stage.image)}
        filling = client.request("prefill", args | {"content_root": record.content_root}, deadline_s=30)
        assert filling["objects"] == 4
        client.request("thaw", args | {"prefill": filling["handle"]}, deadline_s=30)
        assert group.is_counting()
    suspend(stage)  # and it is one object to the next freeze as well
    resume(stage)
    assert group.is_counting()


def record_of(done, group, stage):
    staged = done["staged"]
    processes = tuple(
        ProcessEntry(
            rank.pid,
            "python",
            "staged",
            (stage.uuids[0],),
            objects=tuple(ObjectEntry.from_json(Fields(doc, "o")) for doc in staged["objects"][str(rank.pid)]),
            imports=tuple(ImportEntry.from_json(Fields(doc, "i")) for doc in staged["imports"].get(str(rank.pid), [])),
        )
        for rank in group.ranks
    )
    return Record(
        created="2026-01-01T00:00:00Z",
        container=Container(CONTAINER, "podman"),
        low_level_runtime=LowLevelRuntime("runc", "1", "/usr/bin/runc"),
        processes=processes,
        mode="staged",
    )


# ---- another agent ------------------------------------------------------------------------------------------------


def test_the_next_agent_gives_everybody_the_same_memory(stage):
    group = Group(stage, 3)
    with stage.connect() as client:
        frozen = freeze(stage, client)
        stage.agent.kill()
        stage.agent.wait(5)
        assert group.stands_still()
        stage.start_agent()
        with stage.connect() as again:
            release(again, frozen)
    assert group.is_counting()
    suspend(stage)  # and it still is one object
    resume(stage)
    assert group.is_counting()


def test_an_agent_killed_while_the_group_comes_to_rest_leaves_no_gate_closed(stage):
    group = Group(stage, 3)
    group.ranks[1].faults("stuck!")
    wait_until(lambda: len(set(group.steps())) > 1, "the others to be ahead")
    client = stage.connect()
    args = {"container": CONTAINER, "cgroup": stage.cgroup, "deadline_s": 15, "image_path": str(stage.image)}
    client._send({"id": 1, "verb": "freeze", "args": args}, time.monotonic() + 5, "freeze", 5)
    time.sleep(1.0)
    stage.agent.send_signal(signal.SIGKILL)
    stage.agent.wait(5)
    group.ranks[1].faults()
    assert group.is_counting()
    client.close()
    stage.start_agent()
    entry = json.loads((stage.run_dir / "journal" / stage.journal()[0]).read_text())
    with stage.connect() as owner:  # which we are, and we live
        owner.request("release", {"lease": entry["lease"], "keep": False}, deadline_s=30)
    assert group.is_counting()
    assert stage.journal() == []
