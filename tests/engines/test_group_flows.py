"""Groups of processes with real podman, runc or crun and CRIU: four ranks on two devices that share memory and wait for each other.

The program (tests/software_gpu/programs/ring.c) checks every word it gets at every step, so "all ranks go on" means that content,
sharing and addresses are as they were. What a single process does is in test_staged_flows.py.
"""

from __future__ import annotations

import json

import pytest

from tests.engines.gpu_container import OUT, STEP, GpuContainer, restore
from tests.engines.prepared import trust

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]

ARCHIVE = "/var/tmp/group.tar.zst"
STAGED = ["--annotation", "vgpu.snapshot/mode=staged"]
RANKS = 4


class GroupContainer(GpuContainer):
    """A container with a group in it; its step is that of the rank that is last."""

    def step(self) -> int:
        super().step()  # looks at every line
        last: dict[str, int] = {}
        for line in self.lines():
            last[line.split(" step ")[0]] = int(STEP.search(line)["step"])
        return min(last.values()) if len(last) == RANKS else 0


def start(host, mode, *options):
    program = [
        "ring",
        "--out",
        OUT,
        "--mode",
        mode,
        "--ranks",
        str(RANKS),
        "--devices",
        "2",
        "--interval",
        "15",
        *options,
    ]
    container = GroupContainer(host)
    container.start(host.image("glibc"), options=STAGED, program=program)
    return container


def imported(host, *options):
    restore(host, ARCHIVE, *options)
    return GroupContainer(host)


def clean(*hosts):
    for host in hosts:
        host.run(["podman", "rm", "-a", "-f", "-t", "0"])
        host.run(["rm", "-f", ARCHIVE])


def record_of(host):
    return json.loads(host.run(["vgpu", "inspect", ARCHIVE, "--json"]).stdout)["record"]


def vgpu(host, verb):
    identifier = host.run(["podman", "inspect", "--format", "{{.Id}}", "counter"]).stdout.strip()
    return host.run(["vgpu", verb, identifier], timeout=120)


def test_export_remove_import_and_again(node):
    """What comes back maps memory that the agent made, in exporters and importers alike, and is shared as before.

    Descriptors that they keep too: CRIU brings placeholders back, and importers map what is put in their place.
    """
    try:
        group = start(node, "ring", "--share", "mixed", "--hold", "1")
        step = group.wait_for_step(3)
        group.export(ARCHIVE)
        assert_shared(record_of(node))
        group.remove()
        group = imported(node)
        step = group.goes_on(step, steps=5)
        group.export(ARCHIVE)
        record = record_of(node)
        assert record["generation"] == 2
        assert_shared(record)
        group.remove()
        imported(node).goes_on(step, steps=5)
    finally:
        clean(node)


def assert_shared(record):
    """Each of four ranks has its own memory, and imports from two neighbours; the record says of whom."""
    assert "shared" in record["features"]["required"]
    ranks = [process for process in record["processes"] if process["mode"] == "staged"]
    assert len(ranks) == RANKS
    names = {f"{rank['nsPid']}/{held['id']}" for rank in ranks for held in rank["objects"]}
    for rank in ranks:
        assert len(rank["imports"]) >= 2  # one more while a kept descriptor is being mapped
        assert len(rank["descriptors"]) == 2
        others = {entry["of"] for entry in rank["imports"]}
        assert others <= names
        assert not any(name.startswith(f"{rank['nsPid']}/") for name in others)
    assert len({held["uuid"] for rank in ranks for held in rank["objects"]}) == 2


@pytest.mark.first_row
def test_leave_running_and_import_on_the_second_node(nodes):
    first, second = nodes
    trust(second, first)
    try:
        group = start(first, "graph", "--share", "handle")
        step = group.wait_for_step(3)
        group.export(ARCHIVE, "--leave-running")
        later = group.goes_on(step)
        group.export(ARCHIVE, "-R")
        group.goes_on(later)
        first.copy_to(second, ARCHIVE)
        restored = imported(second)
        step = restored.goes_on(later)
        restored.export(ARCHIVE)  # the second node's devices have other names
        restored.remove()
        imported(second).goes_on(step)
    finally:
        clean(first, second)


@pytest.mark.first_row
@pytest.mark.parametrize("mode", ["ring", "outlive"])
def test_suspend_and_resume(node, mode):
    try:
        group = GroupContainer(node)
        ranks = RANKS + 1 if mode == "outlive" else RANKS  # the first one ends
        program = ["ring", "--out", OUT, "--mode", mode, "--ranks", str(ranks), "--devices", "2", "--interval", "15"]
        group.start(node.image("glibc"), options=STAGED, program=program)
        step = group.wait_for_step(3)
        for _ in range(2):
            vgpu(node, "suspend")
            vgpu(node, "resume")
            step = group.goes_on(step)
    finally:
        clean(node)
