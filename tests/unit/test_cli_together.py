"""`vgpu suspend` and `vgpu resume` of several containers: what the command line means, and two containers with a real agent."""

import json
import os

import pytest

from gpu_state.client import AgentClient
from gpu_state.known_containers import KnownContainer, known_containers
from runtime_shim.group_side import group_args
from tests.conftest import output_validator
from tests.unit.agent_stage import CONTAINER, Stage, cgroup2_mount, wait_until
from vgpu_cli import container_names, known, main, together
from vgpu_cli.verbs import ps
from vgpu_errors import GroupMemberFailed, NoGroup, UnsupportedRequest, UserError

pytestmark = [
    pytest.mark.skipif(cgroup2_mount() is None, reason="needs root and a writable cgroup2 hierarchy"),
    pytest.mark.timeout(60),
]
OTHER = "decade"


@pytest.fixture
def stage(monkeypatch):
    stage = Stage()
    monkeypatch.setattr(container_names, "PODMAN_SOCKET", stage.folder / "no-podman.sock")
    monkeypatch.setattr(container_names, "ENGINE_COMMANDS", ())
    for module in (ps, known, together):
        monkeypatch.setattr(module, "known_containers", lambda: known_containers(stage.run_dir / "state"))
    stage.start_agent()
    other = stage.cgroup_folder / "other"
    other.mkdir()
    try:
        yield stage
    finally:
        stage.close()


@pytest.fixture
def counters(stage):
    """One in each container; the second one's cgroup lies below the stage's, so that it goes with it."""
    for name in (CONTAINER, OTHER):
        (stage.cgroup_folder / name).mkdir()
    in_group(stage, "train")
    counters = [stage.counter(name, cgroup=name) for name in (CONTAINER, OTHER)]
    for counter, container in zip(counters, (CONTAINER, OTHER), strict=True):
        at = f"{stage.cgroup}/{container}"
        wait_until(lambda at=at: stage.ask("inventory", cgroup=at)["processes"], f"{counter.pid} in the inventory")
    return counters


def in_group(stage, group, **more):
    for name in (CONTAINER, OTHER):
        stage.write_state(name, f"{stage.cgroup}/{name}", group=group, **more)


def vgpu(capsys, stage, *words):
    code = main.main(["--json", *words, "--socket", stage.socket])
    return code, json.loads(capsys.readouterr().out)


def states(stage):
    asked = [stage.ask("inventory", container=name, cgroup=f"{stage.cgroup}/{name}") for name in (CONTAINER, OTHER)]
    return [(found["processes"][0]["state"], found["suspended"]) for found in asked]


@pytest.mark.parametrize("words", [(CONTAINER, OTHER), ("--group", "train")])
def test_two_containers_are_suspended_and_resumed(stage, counters, capsys, words):
    code, doc = vgpu(capsys, stage, "suspend", *words)
    assert code == 0, doc
    output_validator("suspend").validate(doc)
    assert {one["container"] for one in doc["containers"]} == {CONTAINER, OTHER}
    assert {"gather", "wait for the group"} <= {phase["phase"] for phase in doc["containers"][0]["phases"]}
    assert states(stage) == [("checkpointed", True)] * 2
    code, doc = vgpu(capsys, stage, "resume", *words)
    assert code == 0, doc
    output_validator("resume").validate(doc)
    assert {one["container"] for one in doc["containers"]} == {CONTAINER, OTHER}
    assert all(counter.is_counting() for counter in counters)


def test_ps_shows_the_group(stage, counters, capsys):
    assert counters
    code, doc = vgpu(capsys, stage, "ps")
    assert code == 0
    output_validator("ps").validate(doc)
    assert [one["group"] for one in doc["containers"]] == ["train"] * 2


def test_part_of_a_group_is_refused_with_the_remedy_unless_asked_for(stage, counters, capsys):
    code, doc = vgpu(capsys, stage, "suspend", CONTAINER)
    assert (code, doc["error"]["class"]) == (UnsupportedRequest.exit_code, "UnsupportedRequest")
    assert f"belongs to group train with {OTHER}" in doc["error"]["message"]
    assert "--group train" in doc["error"]["remedy"]
    assert "--alone" in doc["error"]["remedy"]
    assert all(counter.is_counting() for counter in counters)
    code, doc = vgpu(capsys, stage, "suspend", CONTAINER, "--alone")
    assert (code, doc["container"]) == (0, CONTAINER)
    assert states(stage) == [("checkpointed", True), ("running", False)]
    code, doc = vgpu(capsys, stage, "resume", "--group", "train")  # what is suspended of it
    assert (code, doc["container"]) == (0, CONTAINER)
    assert all(counter.is_counting() for counter in counters)


def test_one_that_fails_leaves_both_running_and_its_own_error_is_told(stage, counters, capsys):
    (stage.folder / "gpus" / "fault-checkpoint").write_text("999")
    code, doc = vgpu(capsys, stage, "suspend", "--group", "train")
    assert code != GroupMemberFailed.exit_code
    assert doc["error"]["class"] == "DriverCallFailed"
    assert any("was given up with its group train" in note for note in doc["error"]["notes"])
    assert all(counter.is_counting() for counter in counters)


def test_a_member_that_is_suspended_already_is_named(stage, counters, capsys):
    assert vgpu(capsys, stage, "suspend", OTHER, "--alone")[0] == 0
    code, doc = vgpu(capsys, stage, "suspend", "--group", "train")
    assert code == 22
    assert f"container {OTHER} is suspended" in doc["error"]["message"]
    assert counters[0].is_counting()
    assert vgpu(capsys, stage, "resume", OTHER)[0] == 0


def test_ctrl_c_hangs_up_and_nothing_is_left_suspended(stage, counters, monkeypatch):
    """A third member is named that never comes, so all wait; then the user gives up."""
    members = [CONTAINER, OTHER, "never"]
    wanted = {
        name: {"container": name, "cgroup": f"{stage.cgroup}/{name}", "deadline_s": 30,
               "group": {"name": "train", "members": members}}
        for name in (CONTAINER, OTHER)
    }  # fmt: skip

    def interrupted(_futures):
        wait_until(lambda: len(connected) == 2, "both requests")
        raise KeyboardInterrupt

    connected = []
    real = AgentClient.request
    monkeypatch.setattr(AgentClient, "request", lambda *args, **more: (connected.append(1), real(*args, **more))[1])
    monkeypatch.setattr(together, "as_completed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        together.ask_all(stage.socket, "suspend", wanted, deadline_s=40)
    monkeypatch.setattr(AgentClient, "request", real)
    wait_until(lambda: states(stage) == [("running", False)] * 2, "everybody running")
    assert all(counter.is_counting() for counter in counters)


@pytest.mark.parametrize(
    ("words", "error", "what"),
    [
        ((), UserError, "takes containers, or '--group'"),
        (("x", "--group", "train"), UserError, "takes containers, or '--group'"),
        (("--group", ""), NoGroup, "a group "),
        (("--group", "nobody"), NoGroup, "a group nobody"),
        ((CONTAINER, "nobody"), None, "No container named nobody"),
    ],
)
def test_a_command_line_that_means_nothing(stage, capsys, words, error, what):
    in_group(stage, "train")
    code, doc = vgpu(capsys, stage, "suspend", *words)
    assert code == (error.exit_code if error else 13)
    assert what in doc["error"]["message"]


@pytest.mark.parametrize("group", ["a b", "", "../x", "-x", "x" * 129])
def test_an_annotation_that_is_no_name_is_refused_where_it_is_used(stage, capsys, group):
    in_group(stage, group)
    code, doc = vgpu(capsys, stage, "suspend", CONTAINER)
    assert code == UnsupportedRequest.exit_code
    assert "which is no name" in doc["error"]["message"]


# ---- the shim ---------------------------------------------------------------------------------------------------------


class Shim:
    """What a checkpoint knows of its container and of the node."""

    def __init__(self, folder, group="together"):
        (folder / "state").mkdir()
        self.folder, self.run_dir, self.group, self.id = folder, str(folder), group, "one"
        self.state = self.add("one")

    def add(self, name, *, group="train", pid=None):
        doc = {"id": name, "engine": "podman", "pid": pid or os.getpid(), "cgroup": "/c", "created": 1, "group": group}
        (self.folder / "state" / f"{name}.json").write_text(json.dumps(doc))
        return doc


def test_a_checkpoint_waits_for_the_running_containers_of_its_group(tmp_path):
    shim = Shim(tmp_path)
    assert group_args(shim, shim) == {}  # the last of its group
    shim.add("two")
    shim.add("three", group="other")
    shim.add("four", group=None)
    shim.add("gone", pid=(1 << 22) + 1)
    assert group_args(shim, shim) == {"group": {"name": "train", "members": ["one", "two"]}}
    shim.group = "alone"
    assert group_args(shim, shim) == {}
    shim.group, shim.state = "together", shim.add("one", group="a b")
    with pytest.raises(UnsupportedRequest, match="which is no name"):
        group_args(shim, shim)


def test_a_group_of_too_many_is_refused(tmp_path):
    shim = Shim(tmp_path)
    for number in range(64):
        shim.add(f"c{number}")
    with pytest.raises(UnsupportedRequest, match="65 containers, more than 64"):
        group_args(shim, shim)


@pytest.mark.parametrize(("pid", "is_running"), [(os.getpid(), True), (0, False), (-1, False), (1 << 80, False)])
def test_who_counts_as_running(pid, is_running):
    doc = {"id": "x", "pid": pid, "cgroup": "/c"}
    assert KnownContainer.from_json(doc).is_running() is is_running
