"""The same scenarios on every engine; the outcome is the support matrix of docs/support-matrix.md.

One container of each engine goes through all of them, in their order: each begins where the last one left it.

A scenario that an engine cannot do is run all the same: it has to fail in the way that the driver's `gaps` state, and the
matrix has the reason. The outcome must equal docs/support-matrix.json; VGPU_RECORD_MATRIX=1 writes that file and the table.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path

import pytest

from tests.engines.engine_drivers.base import EngineRefused, flip, kill_agent
from tests.engines.engine_drivers.cri import Cri
from tests.engines.engine_drivers.ctr import Ctr17, Ctr21
from tests.engines.engine_drivers.docker_engine import DockerEngine
from tests.engines.engine_drivers.podman import PodmanCrun, PodmanRunc
from tests.engines.prepared import configured, prepare, trust
from tests.hosts.host import two_hosts
from tests.hosts.rows import is_wanted
from tools import support_matrix

# In the order of their rows, so that two hosts are left before the next two are entered.
ALL_ENGINES = (PodmanRunc, PodmanCrun, Ctr21, Cri, Ctr17, DockerEngine)
ENGINES = [engine for engine in ALL_ENGINES if is_wanted(engine.row)]
IS_RECORDING = bool(os.environ.get("VGPU_RECORD_MATRIX"))
OUTCOMES: dict[str, dict] = {}
pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(240),
    pytest.mark.host_rows(*{engine.row for engine in ENGINES}),
]


class Journey:
    """One container of an engine on its way through all scenarios; one that fails leaves the next a container of its own."""

    NAME = "traveller"

    def __init__(self, engine, other) -> None:
        self.engine, self.other = engine, other
        self.is_under_way = self.has_been_restored = self.has_moved = False

    def begin(self) -> None:
        """A container that runs on the first node, or, once it has moved, on the second."""
        if not self.is_under_way:
            self.end()
            self.engine.start(self.NAME)
            self.engine.wait_for_step(self.NAME, 3)
        self.is_under_way = False  # until the scenario has come to its end

    def end(self) -> None:
        for engine in (self.engine, self.other):
            engine.remove(self.NAME)
        self.has_been_restored = self.has_moved = False

    def restore(self) -> None:
        """Bring the frozen container back here."""
        self.engine.bring_back(self.NAME)
        self.has_been_restored = True

    def move(self) -> None:
        """To the other node, as one file."""
        path = self.engine.export(self.NAME)
        self.engine.host.copy_to(self.other.host, path)
        self.other.bring_in(path, self.NAME)
        self.has_moved = True


def run_with_gpu(engine, name, journey):
    """It runs on the GPU, under our runtime, with the preload library in it."""
    # The image's own programs are static, so only the GPU program can have loaded it.
    maps = engine.exec(name, "sh", "-c", "cat /proc/[0-9]*/maps")
    assert "/run/vgpu-preload/libvgpu.so" in maps


def checkpoint_leave_running(engine, name, journey):
    step = engine.step(name)
    engine.checkpoint_running(name)
    assert engine.is_running(name)
    engine.goes_on(name, step)


def restore_in_place(engine, name, journey):
    step = engine.step(name)
    engine.freeze(name)
    assert not engine.is_running(name)
    journey.restore()
    assert engine.is_running(name)
    engine.goes_on(name, step)


def second_checkpoint(engine, name, journey):
    if not journey.has_been_restored:
        restore_in_place(engine, name, journey)
    step = engine.step(name)
    engine.freeze(name)
    journey.restore()
    engine.goes_on(name, step)


def tampered_refused(engine, name, journey):
    """One bit of the CPU side's memory; the intact image is restored afterwards."""
    step = engine.step(name)
    engine.freeze(name)
    path, at = engine.frozen_pages(name)
    flip(path, at)
    with pytest.raises(EngineRefused, match=r"pages-1\.img: content differs from the signed digest"):
        engine.bring_back(name)
    assert not engine.is_running(name)
    flip(path, at)
    journey.restore()
    engine.goes_on(name, step)


def agent_killed(engine, name, journey):
    step = engine.step(name)
    kill_agent(engine.host)
    engine.freeze(name)
    kill_agent(engine.host)
    journey.restore()
    engine.goes_on(name, step)


def move_to_another_node(engine, name, journey):
    step = engine.step(name)
    journey.move()
    journey.other.goes_on(name, step, has_its_files=engine.keeps_files)


def files_come_along(engine, name, journey):
    """What the container wrote into its own file system is there on the other node."""
    if not journey.has_moved:
        journey.move()
    journey.other.goes_on(name, journey.other.step(name))


SCENARIOS = (
    run_with_gpu,
    checkpoint_leave_running,
    restore_in_place,
    second_checkpoint,
    tampered_refused,
    agent_killed,
    move_to_another_node,
    files_come_along,
)


@pytest.fixture(scope="module")
def machines():
    """Two hosts of a row, kept until another row is asked for."""
    with contextlib.ExitStack() as stack:
        held = {}

        def of_engine(kind):
            row, key = kind.row, (kind.row, kind.host_group)
            if key not in held:
                held.clear()
                stack.close()
                hosts = stack.enter_context(two_hosts(row, names=("node-a", "node-b")))
                if row != "docker":
                    for host in hosts:
                        prepare(host, memory=256 << 20)
                    trust(hosts[1], hosts[0])
                held[key] = hosts
            return held[key]

        yield of_engine


@pytest.fixture(scope="module")
def journey(machines, request):
    """One engine on two nodes, the second trusting the first."""
    hosts = machines(request.param)
    found = tuple(request.param(host) for host in hosts)
    with contextlib.ExitStack() as stack:
        for engine in found:
            engine.set_up()
            stack.enter_context(configured(engine.host, low_level_runtime=engine.low_level))
        if request.param.row == "docker":
            trust(hosts[1], hosts[0])
        OUTCOMES[request.param.label] = {"versions": found[0].versions(), "results": {}}
        journey = Journey(*found)
        yield journey
        journey.end()


@pytest.mark.parametrize("journey", ENGINES, ids=lambda engine: engine.label, indirect=True)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_the_scenario_does_what_the_matrix_says(journey, scenario):
    engine, name = journey.engine, journey.NAME
    words, reason = engine.gaps.get(scenario.__name__, (None, None))
    journey.begin()
    if words is None:
        scenario(engine, name, journey)
    else:
        with pytest.raises(AssertionError, match=re.compile(words, re.DOTALL)):
            scenario(engine, name, journey)
    journey.is_under_way = True
    OUTCOMES[engine.label]["results"][scenario.__name__] = "yes" if words is None else reason


def test_the_outcome_is_the_recorded_one():
    """The last test of the module; versions may move on, results may not."""
    everything = {scenario.__name__ for scenario in SCENARIOS}
    if any(set(outcome["results"]) != everything for outcome in OUTCOMES.values()) or len(OUTCOMES) != len(ENGINES):
        pytest.fail("not every scenario was run to its end on every engine, so there is no matrix")
    if IS_RECORDING:
        support_matrix.record(OUTCOMES)
    recorded = json.loads(Path(support_matrix.OUTCOME).read_text(encoding="utf-8"))
    found = {label: outcome["results"] for label, outcome in OUTCOMES.items()}
    assert found == {item["engine"]: item["results"] for item in recorded["engines"] if item["engine"] in found}
    assert {item["engine"] for item in recorded["engines"] if item["isTested"]} == {item.label for item in ALL_ENGINES}
