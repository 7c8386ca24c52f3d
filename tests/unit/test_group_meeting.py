"""Containers that come to rest together: the meeting by threads, then two containers with a real agent and doubles as preloads.

The ranks of both containers wait for each other (the board of staged_preload_double.py stands for the work on the devices), and
share no memory, which is refused between containers. So "level" means that all have submitted equally many parts.
"""

import contextlib
import json
import struct
import threading
import time

import pytest

from gpu_state import group_meeting
from gpu_state.deadline import Deadline
from gpu_state.group_company import Ranks
from gpu_state.group_meeting import Meetings
from gpu_state.group_terms import MAX_MEMBERS, GroupTerms, group_json
from gpu_state.phases import Phases
from gpu_state.preload_link import GateState
from tests.unit.agent_stage import CONTAINER, cgroup2_mount, wait_until
from tests.unit.test_group_flows import Rank
from tests.unit.test_staged_flows import StagedCounter, stage
from vgpu_errors import (
    AgentRefused,
    Cancelled,
    DeadlineExceeded,
    DriverCallFailed,
    GroupIncomplete,
    GroupMemberFailed,
    PreloadFailed,
    VgpuError,
)

__all__ = ["stage"]
pytestmark = pytest.mark.timeout(120)
needs_cgroup = pytest.mark.skipif(cgroup2_mount() is None, reason="needs root and a writable cgroup2 hierarchy")
NAMES = ("a", "b", "c")


# ---- the meeting -------------------------------------------------------------------------------------------------


class Party(threading.Thread):
    """One member's request: what it does at the meeting, and how it ended."""

    def __init__(self, meetings, container, work, *, terms=None, verb="freeze", seconds=5.0, why_cancelled=None):
        super().__init__(daemon=True)
        self.meetings, self.container, self.work = meetings, container, work
        self.terms = terms or GroupTerms("train", NAMES[:2], verb)
        self.deadline = Deadline(seconds, why_cancelled=why_cancelled or (lambda: None))
        self.problem = self.told = None
        self.reached = []
        self.start()

    def run(self):
        try:
            with self.meetings.joined(self.container, self.terms) as company:
                self.told = self.work(self, company)
        except Exception as problem:  # noqa: BLE001 - whatever it is, the test looks at it
            self.problem = problem

    def ended(self):
        self.join(15)
        assert not self.is_alive()
        return self.problem


class Link:
    """A process that is idle at once, and remembers whether its gate is closed."""

    def __init__(self, pid):
        self.pid, self.knows_groups, self.is_closed = pid, True, False
        self.passes = 0

    def halt(self, _deadline):
        self.is_closed = True

    def let_pass(self, _calls, _wait_ms, _deadline):
        self.passes += 1
        return GateState(0, 0, 0, is_capturing=False, is_idle=True)

    def rest(self, _deadline):
        self.is_closed = True

    def open(self, _deadline):
        self.is_closed = False


def ranks(*links):
    return Ranks({link.pid: link for link in links}, {link.pid: f"process {link.pid}" for link in links})


def all_stages(party, company, link=None):
    phases = Phases()
    company.gather(party.deadline, phases)
    deadline = company.until(party.deadline)
    party.reached.append("gathered")
    company.copied(deadline, phases)
    party.reached.append("copied")
    if link is None:
        company.sit_out(deadline)
    else:
        company.rest(ranks(link), deadline)
        assert company.agrees(deadline, is_whole=True)
    party.reached.append("rested")
    company.frozen(deadline, phases)
    party.reached.append("frozen")


def test_nobody_gets_further_than_the_slowest():
    meetings, links, go = Meetings(), (Link(1), Link(2)), threading.Event()

    def slow(party, company):
        go.wait(5)
        all_stages(party, company, links[1])

    first = Party(meetings, "a", lambda party, company: all_stages(party, company, links[0]))
    second = Party(meetings, "b", slow)
    time.sleep(0.3)
    assert first.reached == []
    go.set()
    assert (first.ended(), second.ended()) == (None, None)
    assert all(link.is_closed and link.passes for link in links)  # by one rest, that asked both
    assert first.reached == second.reached == ["gathered", "copied", "rested", "frozen"]


def test_a_member_without_processes_waits_as_well():
    meetings, link = Meetings(), Link(1)
    parties = [
        Party(meetings, "a", lambda party, company: all_stages(party, company, link)),
        Party(meetings, "b", all_stages),
    ]
    assert [party.ended() for party in parties] == [None, None]
    assert link.is_closed


def test_one_that_cannot_use_the_cut_makes_all_rest_again():
    meetings, answers = Meetings(), {"a": [True, True, True], "b": [False, True, False]}
    terms = GroupTerms("train", NAMES, "freeze")

    def look(party, company):
        company.gather(party.deadline, Phases())
        told = []
        for is_whole in answers[party.container]:
            company.rest(Ranks({}, {}), party.deadline)
            told.append(company.agrees(party.deadline, is_whole=is_whole))
        return told

    def sit_out(party, company):
        company.gather(party.deadline, Phases())
        company.rest(Ranks({}, {}), party.deadline)
        first = company.agrees(party.deadline, is_whole=True)
        company.sit_out(party.deadline)
        company.rest(Ranks({}, {}), party.deadline)
        return [first, True, company.agrees(party.deadline, is_whole=True)]

    parties = [Party(meetings, "a", look, terms=terms), Party(meetings, "b", look, terms=terms)]
    parties.append(Party(meetings, "c", sit_out, terms=terms))
    assert [party.ended() for party in parties] == [None, None, None]
    assert [party.told for party in parties] == [[False, True, False]] * 3


def test_who_does_not_come_is_named_and_the_next_meeting_is_another():
    meetings = Meetings()
    first = Party(meetings, "a", all_stages, seconds=0.2)
    problem = first.ended()
    assert isinstance(problem, GroupIncomplete)
    assert "waited 0.2 s for container b in vain" in str(problem)
    assert "podman container checkpoint A &" in problem.remedy
    again = [Party(meetings, name, all_stages) for name in "ab"]
    assert [party.ended() for party in again] == [None, None]


def fails_at_once(_party, _company):
    raise PreloadFailed(pid=7, request="EXPORT", what="not now")


def test_one_that_comes_after_the_failure_of_its_attempt_is_told_and_does_not_wait(monkeypatch):
    meetings = Meetings()
    terms = [GroupTerms("train", ("a", "b"), "freeze", f"attempt-{number}") for number in range(3)]
    assert isinstance(Party(meetings, "b", fails_at_once, terms=terms[0]).ended(), PreloadFailed)
    assert isinstance(Party(meetings, "a", all_stages, terms=terms[0]).ended(), GroupMemberFailed)
    again = [Party(meetings, name, all_stages, terms=terms[1]) for name in "ab"]
    assert [party.ended() for party in again] == [None, None]
    assert isinstance(Party(meetings, "b", fails_at_once, terms=terms[2]).ended(), PreloadFailed)
    monkeypatch.setattr(group_meeting, "LINGER_S", 0.0)  # much later
    assert isinstance(Party(meetings, "a", all_stages, terms=terms[2], seconds=0.2).ended(), GroupIncomplete)


def test_who_tries_again_is_not_told_of_a_failure_that_it_had_no_part_in():
    meetings = Meetings()
    assert isinstance(Party(meetings, "b", fails_at_once).ended(), PreloadFailed)
    again = [Party(meetings, name, all_stages) for name in "ab"]
    assert [party.ended() for party in again] == [None, None]


def test_two_clients_that_ask_for_the_same_group_do_not_mix():
    meetings = Meetings()
    one, other = (GroupTerms("train", ("a", "b"), "freeze", attempt) for attempt in ("one", "other"))
    first = Party(meetings, "a", all_stages, terms=one)
    time.sleep(0.1)
    assert "a freeze of group train is under way" in str(Party(meetings, "b", all_stages, terms=other).ended())
    assert Party(meetings, "b", all_stages, terms=one).ended() is None
    assert first.ended() is None


def test_everybody_that_waited_hears_who_did_not_come():
    meetings, terms = Meetings(), GroupTerms("train", NAMES, "suspend")
    early = Party(meetings, "a", all_stages, terms=terms, seconds=0.3)
    late = Party(meetings, "b", all_stages, terms=terms)
    for party in (early, late):
        assert isinstance(party.ended(), GroupIncomplete)
        assert "container c in vain" in str(party.problem)
        assert "--group" in party.problem.remedy


@pytest.mark.parametrize("stage", ["gathered", "copied", "rested"])
def test_what_fails_one_is_told_to_all_with_its_name(stage):
    meetings, link = Meetings(), Link(1)

    def fails(party, company):
        phases = Phases()
        company.gather(party.deadline, phases)
        if stage != "gathered":
            company.copied(party.deadline, phases)
        if stage == "rested":
            company.sit_out(party.deadline)
        time.sleep(0.2)
        raise PreloadFailed(pid=7, request="EXPORT", what="it is out of patience")

    good = Party(meetings, "a", lambda party, company: all_stages(party, company, link))
    bad = Party(meetings, "b", fails)
    assert isinstance(bad.ended(), PreloadFailed)
    assert isinstance(good.ended(), GroupMemberFailed)
    assert "container a was given up with its group train, because that of container b failed" in str(good.problem)
    assert "out of patience" in str(good.problem)
    assert "frozen" not in good.reached


def test_a_member_in_the_midst_of_something_is_told_at_its_next_look():
    meetings, has_failed = Meetings(), threading.Event()

    def busy(party, company):
        company.gather(party.deadline, Phases())
        deadline = company.until(party.deadline)
        has_failed.wait(5)
        wait_until(deadline.why_cancelled, "the news")
        deadline.check("copying")

    def fails(party, company):
        company.gather(party.deadline, Phases())
        raise DriverCallFailed(call="cuCheckpointProcessLock", pid=7, code=999, name="X")

    good, bad = Party(meetings, "a", busy), Party(meetings, "b", fails)
    assert isinstance(bad.ended(), DriverCallFailed)
    has_failed.set()
    assert isinstance(good.ended(), GroupMemberFailed)


def test_whose_client_goes_away_is_named():
    meetings, gone = Meetings(), []

    def why():
        return "the client went away" if gone else None

    first = Party(meetings, "a", all_stages, terms=GroupTerms("train", NAMES, "freeze"), why_cancelled=why)
    second = Party(meetings, "b", all_stages, terms=GroupTerms("train", NAMES, "freeze"))
    time.sleep(0.1)
    gone.append(True)
    assert isinstance(first.ended(), Cancelled)
    assert isinstance(second.ended(), GroupMemberFailed)
    assert "container a failed" in str(second.problem)


def test_a_client_that_goes_away_while_all_come_to_rest_opens_all_gates():
    meetings, gone = Meetings(), []

    class Busy(Link):
        def let_pass(self, _calls, _wait_ms, _deadline):
            gone.append(True)
            return GateState(0, 0, 0, is_capturing=False, is_idle=False)

    links = (Link(1), Busy(2))

    def why():
        return "the client went away" if gone else None

    parties = [
        Party(meetings, "a", lambda party, company: all_stages(party, company, links[0]), why_cancelled=why),
        Party(meetings, "b", lambda party, company: all_stages(party, company, links[1])),
    ]
    for party in parties:
        assert isinstance(party.ended(), Cancelled)
        assert "container a: the client went away" in str(party.problem)
    assert not any(link.is_closed for link in links)


def test_a_cut_that_cannot_be_reached_is_everybodys_error():
    meetings = Meetings()

    class Busy(Link):
        def let_pass(self, _calls, _wait_ms, _deadline):
            return GateState(0, 1, 0, is_capturing=False, is_idle=False)

    links = (Link(1), Busy(2))

    def work(number):
        return lambda party, company: all_stages(party, company, links[number])

    parties = [Party(meetings, name, work(number), seconds=1.0) for number, name in enumerate("ab")]
    for party in parties:
        assert isinstance(party.ended(), DeadlineExceeded)
        assert "process 1 of container a is idle" in str(party.problem)
        assert "process 2 of container b has work on its device" in str(party.problem)
    assert not any(link.is_closed for link in links)


def test_a_process_that_fails_at_the_rest_is_its_containers():
    meetings = Meetings()

    class Refusing(Link):
        def rest(self, _deadline):
            raise PreloadFailed(pid=self.pid, request="REST", what="capture in progress")

    links = (Link(1), Refusing(2))

    def work(number):
        return lambda party, company: all_stages(party, company, links[number])

    good, bad = [Party(meetings, name, work(number)) for number, name in enumerate("ab")]
    assert isinstance(bad.ended(), PreloadFailed)
    assert isinstance(good.ended(), GroupMemberFailed)
    assert "container b failed" in str(good.problem)


def test_a_bug_in_one_leaves_nobody_waiting():
    meetings = Meetings()

    def breaks(party, company):
        company.gather(party.deadline, Phases())
        raise ZeroDivisionError

    bad, good = Party(meetings, "a", breaks), Party(meetings, "b", all_stages)
    assert isinstance(bad.ended(), ZeroDivisionError)
    assert isinstance(good.ended(), GroupMemberFailed)


def test_what_fails_after_the_last_stage_is_ones_own_business():
    meetings, has_failed = Meetings(), threading.Event()

    def fails(party, company):
        all_stages(party, company)
        raise PreloadFailed(pid=7, request="MAP", what="not now")

    def goes_on(party, company):
        all_stages(party, company)
        has_failed.wait(5)
        return company.until(party.deadline).why_cancelled()

    bad, good = Party(meetings, "a", fails), Party(meetings, "b", goes_on)
    assert isinstance(bad.ended(), PreloadFailed)
    has_failed.set()
    assert (good.ended(), good.told) == (None, None)


@pytest.mark.parametrize(
    ("terms", "what", "ends_it"),
    [
        (GroupTerms("train", ("a", "b", "c"), "freeze"), "do not agree whether container c", True),
        (GroupTerms("train", ("a", "b"), "suspend"), "a freeze of group train is under way", False),
        (GroupTerms("train", ("a", "c"), "freeze"), "container b is not among the members", False),
    ],
)
def test_members_must_say_the_same(terms, what, ends_it):
    meetings = Meetings()
    first = Party(meetings, "a", all_stages, seconds=1.0)
    time.sleep(0.1)
    odd = Party(meetings, "b", all_stages, terms=terms)
    assert isinstance(odd.ended(), AgentRefused)
    assert what in str(odd.problem)
    if ends_it:
        assert what in str(first.ended())
    else:
        assert Party(meetings, "b", all_stages).ended() is None
        assert first.ended() is None


def test_one_container_comes_once():
    meetings = Meetings()
    first = Party(meetings, "a", all_stages)
    time.sleep(0.1)
    assert "waits for its group already" in str(Party(meetings, "a", all_stages).ended())
    assert Party(meetings, "b", all_stages).ended() is None
    assert first.ended() is None


@pytest.mark.parametrize(
    "doc",
    [
        7,
        {},
        {"name": "", "members": ["a"]},
        {"name": "../x", "members": ["a"]},
        {"name": "x", "members": []},
        {"name": "x", "members": "ab"},
        {"name": "x", "members": ["../a"]},
        {"name": "x", "members": [7]},
        {"name": "x", "members": ["a"], "attempt": ""},
        {"name": "x", "members": ["a"], "attempt": 7},
        {"name": "x", "members": [f"c{n}" for n in range(MAX_MEMBERS + 1)]},
    ],
)
def test_what_names_no_group_is_refused(doc):
    with pytest.raises(AgentRefused):
        GroupTerms.from_json(doc, "freeze")


def test_terms_are_the_same_whatever_the_order():
    one = GroupTerms.from_json(group_json("train", ["b", "a"]), "suspend")
    assert one == GroupTerms.from_json({"name": "train", "members": ["a", "b", "a"]}, "suspend")


# ---- two containers ------------------------------------------------------------------------------------------------


class Place:
    """A container of the node, beside the one that a stage has."""

    def __init__(self, stage, container):
        self.container, self.cgroup = container, f"{stage.cgroup}-{container}"
        self.folder = stage.cgroup_folder.parent / f"{stage.cgroup_folder.name}-{container}"
        self.folder.mkdir()
        control = stage.run_dir / "containers" / container
        control.mkdir()
        (control / "mode").write_text("staged")
        stage.write_state(container, self.cgroup)
        self.socket = control / "agent.sock"
        wait_until(self.socket.is_socket, "its control socket")
        self.image = stage.folder / f"image-{container}"
        self.image.mkdir()

    def close(self):
        (self.folder / "cgroup.kill").write_text("1")
        wait_until(self.is_gone, "its end")

    def is_gone(self):
        with contextlib.suppress(OSError):  # a process that has ended may hold it for a moment
            self.folder.rmdir()
        return not self.folder.exists()


class There(Rank):
    """A rank in another container than the stage's own."""

    def __init__(self, stage, place, name, *options):
        self.place = place
        super().__init__(_Elsewhere(stage, place), name, *options)


class _Elsewhere:
    """A stage whose container is another one."""

    def __init__(self, stage, place):
        self.folder, self.python = stage.folder, stage.python
        self._stage, self._place = stage, place

    def control_socket(self):
        return self._place.socket

    def spawn(self, command, **_options):
        entry = f'echo 0 > "{self._place.folder}/cgroup.procs" && exec "$@"'
        return self._stage.spawn(["sh", "-c", entry, "sh", *command])


class Pair:
    """Two containers with a rank each (or none), which count together."""

    size = 2

    def __init__(self, stage, *options):
        self.stage = stage
        self.place = Place(stage, "other")
        self.board = stage.folder / "board"
        self.board.write_bytes(bytes(8 * self.size))
        shared = ["--ranks", str(self.size), "--board", str(self.board), *options]
        self.ranks = [
            Rank(stage, "rank0", "--rank", "0", *shared),
            There(stage, self.place, "rank1", "--rank", "1", *shared),
        ]
        for rank in self.ranks:
            rank.has_begun()
        self.await_registered()

    @property
    def containers(self):
        return {
            CONTAINER: {"cgroup": self.stage.cgroup, "image_path": str(self.stage.image)},
            self.place.container: {"cgroup": self.place.cgroup, "image_path": str(self.place.image)},
        }

    def await_registered(self):
        def are_there():
            asked = [
                self.stage.ask("inventory", container=name, cgroup=at["cgroup"]) for name, at in self.containers.items()
            ]
            return {p["pid"] for one in asked for p in one["processes"] if p["registered"]} == {
                r.pid for r in self.ranks
            }

        wait_until(are_there, "the registrations")

    def steps(self):
        return struct.unpack(f"<{self.size}Q", self.board.read_bytes())

    def is_counting(self):
        return all(rank.is_counting() for rank in self.ranks)

    def stands_still(self):
        return all(rank.stands_still() for rank in self.ranks)

    def ask(self, verb, *containers, **more):
        """The requests of all at a time, in their order; each with its connection."""
        names = containers or tuple(self.containers)
        return [Asked(self, name, verb, **more) for name in names]

    def states(self):
        asked = [
            self.stage.ask("inventory", container=name, cgroup=at["cgroup"]) for name, at in self.containers.items()
        ]
        return [p["state"] for one in asked for p in one["processes"]]


class Asked(threading.Thread):
    """One request under way."""

    def __init__(self, pair, container, verb, *, deadline_s=15, group=True, attempt=None, **more):
        super().__init__(daemon=True)
        self.client, self.verb = pair.stage.connect(), verb
        at = dict(pair.containers[container])
        if verb != "freeze":
            at.pop("image_path")
        self.args = {"container": container, "deadline_s": deadline_s, **at, **more}
        if group:
            self.args["group"] = group_json("train", pair.containers, attempt)
        self.result = self.problem = None
        self.start()

    def run(self):
        try:
            self.result = self.client.request(self.verb, self.args, deadline_s=40.0)
        except VgpuError as problem:
            self.problem = problem

    def ended(self):
        self.join(45)
        assert not self.is_alive()
        return self.problem

    def release(self, *, keep=False):
        return self.client.request("release", {"lease": self.result["lease"], "keep": keep}, deadline_s=30)


def nothing_is_left(pair):
    stage = pair.stage
    assert pair.is_counting()
    assert stage.journal() == []
    assert list(stage.image.iterdir()) == []
    assert list(pair.place.image.iterdir()) == []


@pytest.fixture
def pair(stage):
    pair = Pair(stage, "--calls", "3")
    yield pair
    pair.place.close()


@needs_cgroup
def test_two_containers_are_frozen_at_one_cut_and_left_running(pair):
    for _ in range(2):
        asked = pair.ask("freeze", leave_running=True)
        assert [one.ended() for one in asked] == [None, None]
        assert len(set(pair.steps())) == 1
        assert pair.stands_still()
        for one in asked:
            assert {"gather", "rest", "wait for the group"} <= {phase["phase"] for phase in one.result["phases"]}
            one.release()
        assert pair.is_counting()
        for one in asked:
            one.client.request("drain", {"container": one.args["container"], "deadline_s": 20}, deadline_s=30)
            one.client.close()
        for folder in (pair.stage.image, pair.place.image):
            for path in folder.iterdir():
                path.unlink()


@needs_cgroup
def test_two_containers_are_suspended_and_resumed(pair):
    for _ in range(2):
        asked = pair.ask("suspend")
        assert [one.ended() for one in asked] == [None, None]
        assert len(set(pair.steps())) == 1
        assert pair.states() == ["checkpointed"] * 2
        assert [one.ended() for one in pair.ask("resume", group=False)] == [None, None]
        assert pair.is_counting()
    assert pair.stage.journal() == []


@needs_cgroup
@pytest.mark.parametrize("verb", ["freeze", "suspend"])
@pytest.mark.parametrize("fault", ["refuse-rest", "half-release", "block:multicast!"])
def test_one_that_fails_is_named_and_both_go_on(pair, verb, fault):
    pair.ranks[1].faults(fault)
    mine, theirs = pair.ask(verb)
    assert isinstance(mine.ended(), GroupMemberFailed)
    assert "because that of container other failed" in str(mine.problem)
    assert isinstance(theirs.ended(), VgpuError)
    assert not isinstance(theirs.problem, GroupMemberFailed)
    pair.ranks[1].faults()
    nothing_is_left(pair)
    asked = pair.ask("suspend")
    assert [one.ended() for one in asked] == [None, None]
    assert [one.ended() for one in pair.ask("resume", group=False)] == [None, None]
    assert pair.is_counting()


@needs_cgroup
@pytest.mark.parametrize("call", ["lock", "checkpoint"])
def test_a_driver_call_that_fails_for_one_is_undone_for_both(pair, call):
    (pair.stage.folder / "gpus" / f"fault-{call}").write_text("999")
    asked = pair.ask("freeze")
    problems = sorted(type(one.ended()).__name__ for one in asked)
    assert problems == ["DriverCallFailed", "GroupMemberFailed"]
    assert all("999" in str(one.problem) for one in asked)
    nothing_is_left(pair)


@needs_cgroup
def test_a_suspend_that_cannot_be_stored_is_undone_for_both(pair):
    (mine,) = pair.ask("suspend", CONTAINER, to=str(pair.stage.image), attempt="first")
    (theirs,) = pair.ask("suspend", "other", to="/nowhere", attempt="first")
    assert "no folder" in str(theirs.ended())
    assert isinstance(mine.ended(), GroupMemberFailed)
    nothing_is_left(pair)


@needs_cgroup
def test_one_that_never_comes_is_named_and_the_other_has_never_stopped(pair):
    (mine,) = pair.ask("freeze", CONTAINER, deadline_s=1)
    assert isinstance(mine.ended(), GroupIncomplete)
    assert "container other" in str(mine.problem)
    nothing_is_left(pair)


@needs_cgroup
def test_a_cut_that_cannot_be_reached_names_the_ranks_of_both(pair):
    late = pair.ranks[1]
    late.faults("stuck!")
    wait_until(lambda: len(set(pair.steps())) > 1, "the other to be ahead")
    for one in pair.ask("freeze", deadline_s=3):
        assert isinstance(one.ended(), DeadlineExceeded)
        assert f"process {late.pid} (" in str(one.problem)
        assert "of container other is idle, has submitted nothing" in str(one.problem)
        assert f"of container {CONTAINER} has work on its device" in str(one.problem)
    late.faults()
    nothing_is_left(pair)


@needs_cgroup
@pytest.mark.parametrize("moment", ["gather", "rest"])
def test_a_client_that_goes_away_undoes_both(pair, moment):
    late = pair.ranks[1]
    if moment == "rest":
        late.faults("stuck!")
        wait_until(lambda: len(set(pair.steps())) > 1, "the other to be ahead")
        mine, theirs = pair.ask("freeze", deadline_s=8)
        time.sleep(1.5)
    else:
        (mine,) = pair.ask("freeze", CONTAINER, attempt="first")
        time.sleep(0.3)
    hang_up(mine.client)
    if moment == "rest":
        assert isinstance(theirs.ended(), Cancelled)
        assert f"container {CONTAINER}: the client went away" in str(theirs.problem)
        late.faults()
    else:
        time.sleep(0.3)
        (theirs,) = pair.ask("freeze", "other", attempt="first")
        assert isinstance(theirs.ended(), GroupMemberFailed)
        assert f"container {CONTAINER} failed" in str(theirs.problem)
    nothing_is_left(pair)


def hang_up(client):
    with contextlib.suppress(OSError):
        client._connection.shutdown(2)


@needs_cgroup
def test_a_killed_agent_leaves_neither_container_closed(pair):
    """What the journal says of each container is enough; the next agent knows no group."""
    late = pair.ranks[1]
    late.faults("stuck!")
    wait_until(lambda: len(set(pair.steps())) > 1, "the other to be ahead")
    asked = pair.ask("freeze")
    time.sleep(1.5)
    restart(pair.stage)
    for one in asked:
        assert one.ended() is not None
    late.faults()
    give_up(pair.stage)
    nothing_is_left(pair)


@needs_cgroup
def test_a_killed_agent_gives_both_containers_their_memory_back(pair):
    asked = pair.ask("freeze", leave_running=True)
    assert [one.ended() for one in asked] == [None, None]
    restart(pair.stage)
    give_up(pair.stage)
    assert pair.is_counting()
    pair.await_registered()
    for folder in (pair.stage.image, pair.place.image):
        for path in folder.iterdir():
            path.unlink()
    assert [one.ended() for one in pair.ask("suspend")] == [None, None]
    assert [one.ended() for one in pair.ask("resume", group=False)] == [None, None]
    assert pair.is_counting()


def restart(stage):
    stage.agent.kill()
    stage.agent.wait(5)
    stage.start_agent()


def give_up(stage):
    """The entries name this process as the owner, which lives."""
    for name in stage.journal():
        entry = json.loads((stage.run_dir / "journal" / name).read_text())
        with stage.connect() as owner:
            owner.request("release", {"lease": entry["lease"], "keep": False}, deadline_s=30)


@needs_cgroup
def test_a_container_without_gpu_processes_takes_part(stage):
    counter = StagedCounter(stage)
    wait_until(lambda: stage.registered() == {counter.pid}, "the registration")
    place = Place(stage, "other")

    class Half(Pair):
        def __init__(self):
            self.stage, self.place, self.ranks = stage, place, [counter]

    half = Half()
    try:
        asked = half.ask("freeze")
        assert [one.ended() for one in asked] == [None, None]
        assert [len(one.result["processes"]) for one in asked] == [1, 0]
        for one in asked:
            one.release()
        assert counter.is_counting()
    finally:
        place.close()
