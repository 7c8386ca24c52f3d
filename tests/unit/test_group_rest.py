"""How processes come to rest together: the policy by table, and on simulated ranks with rings, pipelines, servers and captures.

A simulated rank has lanes: a host thread that submits calls through the gate, and a stream that works them off in order. What a
stream has done is seen by all ranks, so that one can wait for another on the device, and a host thread for either.
"""

import dataclasses
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_state import group_rest
from gpu_state.deadline import Deadline
from gpu_state.group_rest import MOST_PERMITS, GroupRest, Memory, decide
from gpu_state.preload_link import GateState
from vgpu_errors import DeadlineExceeded, PreloadFailed

IDLE = GateState(0, 1, 0, is_capturing=False, is_idle=True)
BUSY = GateState(0, 1, 0, is_capturing=False, is_idle=False)
ASLEEP = GateState(0, 0, 0, is_capturing=False, is_idle=True)
LONG_S = 30.0


def passed(state, calls):
    return dataclasses.replace(state, passed=calls)


# ---- the policy ----------------------------------------------------------------------------------------------


def test_all_idle_and_nothing_given_is_level_at_once():
    assert decide({1: IDLE, 2: ASLEEP}, Memory(), 0.0).is_level


def test_permits_that_are_left_are_taken_back_before_anybody_is_level():
    first = decide({1: IDLE, 2: BUSY}, Memory(), 0.0)
    second = decide({1: IDLE, 2: IDLE}, first.memory, 0.1)
    assert not second.is_level
    assert second.permits == {1: 0, 2: 0}
    assert decide({1: IDLE, 2: IDLE}, second.memory, 0.2).is_level


def test_idle_ranks_get_more_and_more_and_the_others_nothing():
    memory, calls, given_to_idle = Memory(), 0, []
    for round_ in range(10):
        decision = decide({1: passed(IDLE, calls), 2: BUSY}, memory, round_ * 0.01)
        assert decision.permits[2] == 0
        given_to_idle.append(decision.permits[1])
        memory, calls = decision.memory, calls + decision.permits[1]
    assert given_to_idle == [1, 1, 2, 4, 8, 16, 32, 64, 64, 64]


def test_who_does_not_use_permits_gets_no_more_of_them():
    memory = Memory()
    for round_ in range(5):
        decision = decide({1: ASLEEP, 2: BUSY}, memory, round_ * 0.01)
        assert decision.permits[1] == 1
        memory = decision.memory


def test_after_a_change_of_roles_everybody_begins_at_one():
    memory, calls = Memory(), 0
    for round_ in range(6):
        decision = decide({1: passed(IDLE, calls), 2: BUSY}, memory, round_ * 0.01)
        memory, calls = decision.memory, calls + decision.permits[1]
    assert decision.permits[1] == 16
    swapped = decide({1: passed(BUSY, calls), 2: IDLE}, memory, 0.1)
    assert swapped.permits == {1: 0, 2: 1}
    back = decide({1: passed(IDLE, calls), 2: passed(BUSY, 1)}, swapped.memory, 0.2)
    assert back.permits == {1: 1, 2: 0}


def test_work_of_its_own_does_not_make_a_rank_that_is_behind_begin_anew():
    memory, calls, given_to_it = Memory(), 0, []
    for round_ in range(12):
        state = IDLE if round_ % 2 == 0 else BUSY
        decision = decide({1: passed(state, calls), 2: BUSY}, memory, round_ * 0.01)
        given_to_it.append(decision.permits[1])
        memory, calls = decision.memory, calls + decision.permits[1]
    assert given_to_it[::2] == [1, 1, 2, 4, 8, 16]


def test_roles_that_change_again_and_again_end_in_a_pause():
    memory, calls, pauses = Memory(), [0, 0], 0
    for round_ in range(40):
        states = {number: passed(IDLE if round_ % 2 == number else BUSY, calls[number]) for number in (0, 1)}
        decision = decide(states, memory, round_ * 0.01)
        memory, calls = decision.memory, [calls[number] + decision.permits[number] for number in (0, 1)]
        pauses += not any(decision.permits.values())
    assert pauses > 15


def test_where_nothing_changes_ranks_at_work_are_let_go_on_ever_more_rarely():
    memory, calls, begins = Memory(), 0, []
    for tick in range(4000):
        decision = decide({1: ASLEEP, 2: passed(BUSY, calls)}, memory, tick / 100)
        was_ahead = not memory.ranks or memory.ranks[2].is_ahead
        begins += [tick / 100] if was_ahead and not decision.memory.ranks[2].is_ahead else []
        memory, calls = decision.memory, calls + decision.permits[2]
    assert begins[0] == pytest.approx(0.2, abs=0.02)
    assert len(begins) < 20
    assert calls < 20 * 2 * MOST_PERMITS


def test_a_rank_that_captures_is_let_through_to_the_end_of_it():
    capturing = dataclasses.replace(BUSY, is_capturing=True)
    assert decide({1: capturing, 2: IDLE}, Memory(), 0.0).permits[1] == 1


# ---- simulated ranks -------------------------------------------------------------------------------------------

# What the host does by itself, without the gate: "hear" what a stream or a host has posted, "tell", "drain" its stream.
HOST = ("hear", "tell", "drain")
CALL, DRAIN = ("call", None), ("drain", None)


class Lane:
    """A thread and its stream. Calls are "call", "work" for seconds, "post" a word, "await" one, and "all": both, with members."""

    def __init__(self, program):
        self.program, self.place, self.queue, self.until = program, 0, [], None

    @property
    def next_kind(self):
        return self.program[self.place][0] if self.place < len(self.program) else None


class World:
    """All ranks, with a clock and what has been posted."""

    def __init__(self, ranks):
        self.now, self.posted = 0.0, set()
        self.ranks = [SimulatedRank(self, number, lanes) for number, lanes in enumerate(ranks)]

    def advance(self, seconds):
        ends_at = self.now + seconds
        while self.now < ends_at:
            self.now = min(self.now + 0.002, ends_at)
            while any([rank.run() for rank in self.ranks]):  # noqa: C419 - every one has its turn
                pass


class SimulatedRank:
    def __init__(self, world, number, lanes):
        self.world, self.number = world, number
        self.lanes = [Lane(program) for program in lanes]
        self.permits = self.passed = self.turns = 0

    def run(self):
        """One step of each lane, each time another one first; whether anything moved."""
        self.turns += 1
        lanes = [self.lanes[(self.turns + n) % len(self.lanes)] for n in range(len(self.lanes))]
        return any([self.work_off(lane) | self.submit(lane) | self.work_off(lane) for lane in lanes])  # noqa: C419 - as above

    def submit(self, lane):
        kind, what = lane.program[lane.place] if lane.next_kind else (None, None)
        if kind in HOST:
            moves = {"hear": what in self.world.posted, "drain": not lane.queue, "tell": True}[kind]
            self.world.posted |= {what} if kind == "tell" else set()
        else:
            moves = kind is not None and self.permits > 0
            self.permits, self.passed = self.permits - moves, self.passed + moves
            lane.queue += [(kind, what)] if moves else []
        lane.place += moves
        return moves

    def work_off(self, lane):
        moved = False
        while lane.queue and self.is_done(lane, *lane.queue[0]):
            lane.queue.pop(0)
            moved = True
        return moved

    def is_done(self, lane, kind, what):
        if kind == "work":
            lane.until = lane.until or self.world.now + what
            if lane.until > self.world.now:
                return False
            lane.until = None
        elif kind == "all":
            name, members = what
            self.world.posted.add((name, self.number))
            return all((name, member) in self.world.posted for member in members)
        elif kind == "post":
            self.world.posted.add(what)
        return kind != "await" or what in self.world.posted

    def state(self):
        waiting = sum(lane.next_kind not in (*HOST, None) for lane in self.lanes)
        return GateState(
            self.passed, waiting, 0, is_capturing=False, is_idle=not any(lane.queue for lane in self.lanes)
        )


def stopped(ranks, *permits):
    """A world whose ranks had submitted so many calls when their gates closed."""
    world = World(ranks)
    for rank, calls in zip(world.ranks, permits, strict=True):
        rank.permits = calls
    world.advance(0.05)
    for rank in world.ranks:
        rank.permits = rank.passed = 0
    return world


def come_level(world, within_s=LONG_S):
    """What GroupRest does with the links; how long it took, None for the deadline."""
    memory, permits, began = Memory(), dict.fromkeys(range(len(world.ranks)), 0), world.now
    wait_ms, ends_at = 20, world.now + within_s
    while world.now < ends_at:
        for number, rank in enumerate(world.ranks):
            rank.permits = permits[number]
        is_quick = all(rank.state().is_idle or rank.permits for rank in world.ranks)
        world.advance(0.004 if is_quick else wait_ms / 1000)
        decision = decide({number: rank.state() for number, rank in enumerate(world.ranks)}, memory, world.now)
        if decision.is_level:
            assert not any(rank.permits or not rank.state().is_idle for rank in world.ranks)
            return world.now - began
        memory, permits, wait_ms = decision.memory, decision.permits, decision.wait_ms
        assert max(permits.values()) <= MOST_PERMITS
    return None


def ring(ranks, steps):
    """A sum around a ring, as collective libraries do it: by words in each other's memory."""
    return [[_ring_lane(rank, ranks, steps)] for rank in range(ranks)]


def _ring_lane(rank, ranks, steps):
    left, right, lane = (rank - 1) % ranks, (rank + 1) % ranks, []
    for step in range(steps):
        lane += [CALL, CALL, ("await", ("ack", rank, step - 1)) if step else CALL]
        for hop in range(2 * (ranks - 1)):
            lane += [CALL, ("post", (hop, right, step)), ("await", (hop, rank, step)), CALL]
        lane += [("post", ("ack", left, step)), CALL, DRAIN]
    return lane


def pipeline(stages, steps, depth=2):
    """Each stage sends forward in one lane and backward in another, which waits on its host for the first."""
    return [[_forward(stage, stages, steps, depth), _backward(stage, stages, steps)] for stage in range(stages)]


def _forward(stage, stages, steps, depth):
    lane = []
    for step in range(steps):
        lane += [("hear", ("finished", stage, step - depth))] if step >= depth else []
        lane += [CALL, CALL]
        lane += [("await", ("f", stage, step)), CALL, ("post", ("fa", stage - 1, step))] if stage else [CALL]
        lane += [CALL, CALL]
        if stage < stages - 1:
            lane += [("await", ("fa", stage, step - 1))] if step else []
            lane += [CALL, ("post", ("f", stage + 1, step))]
        lane.append(("post", ("forward", stage, step)))
    return lane


def _backward(stage, stages, steps):
    lane = []
    for step in range(steps):
        lane += [("hear", ("forward", stage, step)), CALL]
        if stage < stages - 1:
            lane += [("await", ("b", stage, step)), CALL, ("post", ("ba", stage + 1, step))]
        lane += [CALL, CALL]
        if stage:
            lane += [("await", ("ba", stage, step - 1))] if step else []
            lane += [CALL, ("post", ("b", stage - 1, step))]
        lane += [DRAIN, ("tell", ("finished", stage, step))]
    return lane


def collectives(ranks, steps, calls):
    members = range(ranks)
    return [[[c for step in range(steps) for c in [CALL] * calls + [("all", (step, members))]]] for _ in members]


@pytest.mark.parametrize(
    ("places", "calls"), [((3, 0), 2), ((0, 400), 1), ((1, 900, 1000), 7), ((1000, 0, 0, 0), 0), ((5, 6, 7, 8, 9), 3)]
)
def test_ranks_that_are_behind_run_on_until_all_are_level(places, calls):
    world = stopped(collectives(len(places), 2000, calls), *places)
    assert come_level(world) is not None
    assert len({sum(rank.number == who for _, who in world.posted) for rank in world.ranks}) == 1


@pytest.mark.parametrize("make", [ring, pipeline])
@pytest.mark.parametrize(("size", "most_s"), [(2, 1.0), (3, 3.0), (5, 8.0)])
def test_rings_and_pipelines_come_level_wherever_they_are_stopped(make, size, most_s):
    for seed in range(4):
        chance = random.Random(seed)
        world = stopped(make(size, 100), *(60 + chance.randint(0, 200) for _ in range(size)))
        assert (come_level(world) or LONG_S) < most_s, seed


@pytest.mark.parametrize("calls", [2, 10, 40])
def test_a_host_that_waits_for_another_host_which_stands_at_its_gate(calls):
    """Rank 1 needs a word of rank 0 before it submits its part; rank 0 must pass its gate first before it says it."""
    both = (0, (0, 1))
    ranks = [[[("all", both), *[CALL] * calls, ("tell", "go"), DRAIN]], [[("hear", "go"), ("all", both), DRAIN]]]
    assert come_level(stopped(ranks, 1, 0)) < 2.0


def test_a_rank_that_never_comes_ends_at_the_deadline_and_feeds_nobody_for_ever():
    ranks = collectives(2, 10000, 2)
    ranks[1][0].insert(1, ("hear", "never"))
    world = stopped(ranks, 6, 1)
    assert come_level(world) is None
    assert world.ranks[0].passed < 20 * MOST_PERMITS


@pytest.mark.parametrize(("length_s", "at_once"), [(0.005, 40), (0.02, 16), (0.1, 4), (0.3, 1)])
def test_busy_ranks_that_need_nobody_become_idle_in_a_pause(length_s, at_once):
    """They wait for their device now and then, as programs do."""
    lengths = (length_s, length_s * 1.7, length_s * 1.3)
    world = stopped([[([("work", length)] * at_once + [DRAIN]) * 1000] for length in lengths], 3, 3, 3)
    assert come_level(world) is not None


def test_a_server_beside_a_long_kernel_goes_on_until_that_is_done():
    world = stopped([[[("work", 3.0), CALL, DRAIN]], [[CALL, ("work", 0.001), DRAIN] * 20000]], 1, 0)
    assert come_level(world) is not None
    assert world.ranks[1].passed > 100


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 6), st.integers(0, 1 << 30), st.integers(1, 60))
def test_always_level_where_the_programs_can_end(size, seed, length):
    """Random programs of collectives of all or some, pairs of sends, and waits; random places to be stopped at."""
    chance, programs = random.Random(seed), [[] for _ in range(size)]
    for number in range(length):
        for program in programs:
            program.extend([CALL] * chance.choice((0, 0, 1, 2, 9)))
        members = tuple(chance.sample(range(size), chance.choice((2, size, chance.randint(2, size)))))
        for member in members:
            programs[member].append(("all", (number, members)))
        for program in programs:
            program.extend([DRAIN] * (chance.random() < 0.3))
    world = stopped([[program] for program in programs], *(chance.randint(0, len(program)) for program in programs))
    assert come_level(world) is not None


# ---- the runner ------------------------------------------------------------------------------------------------


class Link:
    """One preload for the runner: what LET_PASS answers, and what was asked."""

    def __init__(self, *states, knows_groups=True, dies_at=None):
        self.states, self.knows_groups, self.dies_at = list(states), knows_groups, dies_at
        self.asked, self.phase = [], "open"

    def _ask(self, what, phase):
        self.asked.append(what)
        if self.dies_at == what:
            raise PreloadFailed(pid=1, request=what, what="its connection ended")
        self.phase = phase

    def halt(self, _deadline):
        self._ask("halt", "halted")

    def let_pass(self, _calls, _wait_ms, _deadline):
        self._ask("let_pass", "halted")
        return self.states.pop(0) if len(self.states) > 1 else self.states[0]

    def rest(self, _deadline):
        self._ask("rest", "rested")

    def open(self, _deadline):
        self._ask("open", "open")


def group(*links, has_died=lambda _rank: False):
    names = {number: f"process {number} (python3)" for number in range(len(links))}
    return GroupRest(dict(enumerate(links)), names, has_died)


def test_a_group_halts_passes_nobody_and_rests():
    links = [Link(IDLE), Link(ASLEEP)]
    group(*links).run(Deadline(5))
    assert [link.asked for link in links] == [["halt", "let_pass", "rest"]] * 2


@pytest.mark.parametrize("links", [[Link(IDLE)], [Link(IDLE), Link(IDLE, knows_groups=False)]])
def test_one_process_and_older_preloads_rest_one_by_one(links):
    group(*links).run(Deadline(5))
    assert [link.asked for link in links] == [["rest"]] * len(links)


def test_the_deadline_opens_all_gates_and_names_each_rank():
    links = [Link(passed(BUSY, 3)), Link(ASLEEP), Link(dataclasses.replace(BUSY, is_capturing=True))]
    with pytest.raises(DeadlineExceeded) as caught:
        group(*links).run(Deadline(0.5))
    assert all(link.phase == "open" for link in links)
    assert re.search(
        r"process 0 \(python3\) has work on its device that does not end \(3 calls let through\); "
        r"process 1 \(python3\) is idle, .* no thread at its gate \(0 calls let through\); "
        r"process 2 \(python3\) captures a stream and does not end it",
        str(caught.value),
    )


@pytest.mark.parametrize("at", ["halt", "let_pass"])
def test_a_rank_that_dies_leaves_no_other_closed(at):
    links = [Link(IDLE), Link(IDLE, dies_at=at), Link(BUSY)]
    with pytest.raises(PreloadFailed, match="its connection ended"):
        group(*links).run(Deadline(5))
    assert links[0].phase == links[2].phase == "open"


@pytest.mark.parametrize("at", ["halt", "let_pass", "rest"])
def test_a_rank_that_came_to_its_end_is_missed_by_nobody(at):
    links = [Link(IDLE), Link(IDLE, dies_at=at), Link(ASLEEP)]
    group(*links, has_died=lambda rank: rank == 1).run(Deadline(5))
    assert links[0].phase == links[2].phase == "rested"


def test_a_rank_that_was_killed_while_others_wait_for_it_opens_their_gates_soon(monkeypatch):
    monkeypatch.setattr(group_rest, "DEATH_S", 0.1)
    links = [Link(BUSY), Link(IDLE, dies_at="let_pass"), Link(BUSY)]
    with pytest.raises(PreloadFailed, match="its connection ended"):
        group(*links, has_died=lambda rank: rank == 1).run(Deadline(60))
    assert links[0].phase == links[2].phase == "open"
