"""The same scenarios on every engine; the outcome is the support matrix of docs/support-matrix.md.

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


def run_with_gpu(engine, other, name):
    """It runs on the GPU, under our runtime, with the preload library in it."""
    # The image's own programs are static, so only the GPU program can have loaded it.
    maps = engine.exec(name, "sh", "-c", "cat /proc/[0-9]*/maps")
    assert "/run/vgpu-preload/libvgpu.so" in maps


def checkpoint_leave_running(engine, other, name):
    step = engine.step(name)
    engine.checkpoint_running(name)
    assert engine.is_running(name)
    engine.goes_on(name, step)


def restore_in_place(engine, other, name):
    step = engine.step(name)
    engine.freeze(name)
    assert not engine.is_running(name)
    engine.bring_back(name)
    assert engine.is_running(name)
    engine.goes_on(name, step)


def second_checkpoint(engine, other, name):
    engine.freeze(name)
    engine.bring_back(name)
    step = engine.wait_for_step(name, 3)
    engine.freeze(name)
    engine.bring_back(name)
    engine.goes_on(name, step)


def tampered_refused(engine, other, name):
    """One bit of the CPU side's memory; the intact image is restored afterwards."""
    step = engine.step(name)
    engine.freeze(name)
    path, at = engine.frozen_pages(name)
    flip(path, at)
    with pytest.raises(EngineRefused, match=r"pages-1\.img: content differs from the signed digest"):
        engine.bring_back(name)
    assert not engine.is_running(name)
    flip(path, at)
    engine.bring_back(name)
    engine.goes_on(name, step)


def agent_killed(engine, other, name):
    step = engine.step(name)
    kill_agent(engine.host)
    engine.freeze(name)
    kill_agent(engine.host)
    engine.bring_back(name)
    engine.goes_on(name, step)


def move_to_another_node(engine, other, name):
    step = engine.step(name)
    path = engine.export(name)
    engine.host.copy_to(other.host, path)
    try:
        other.bring_in(path, name)
        other.goes_on(name, step, has_its_files=engine.keeps_files)
    finally:
        other.remove(name)


def files_come_along(engine, other, name):
    """What the container wrote into its own file system is there on the other node."""
    step = engine.step(name)
    path = engine.export(name)
    engine.host.copy_to(other.host, path)
    try:
        other.bring_in(path, name)
        other.goes_on(name, step)
    finally:
        other.remove(name)


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
def engines(machines, request):
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
        yield found


@pytest.mark.parametrize("engines", ENGINES, ids=lambda engine: engine.label, indirect=True)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_the_scenario_does_what_the_matrix_says(engines, scenario):
    engine, other = engines
    name = scenario.__name__.replace("_", "-")
    words, reason = engine.gaps.get(scenario.__name__, (None, None))
    engine.start(name)
    try:
        engine.wait_for_step(name, 3)
        if words is None:
            scenario(engine, other, name)
        else:
            with pytest.raises(AssertionError, match=re.compile(words, re.DOTALL)):
                scenario(engine, other, name)
    finally:
        engine.remove(name)
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
