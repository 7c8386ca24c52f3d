"""The shell blocks of the documentation do what their page says: run in order, as a reader would type them.

A block's marker says where it runs (`<!-- run on: first node -->`) or why it does not; tools/doc_examples.py reads them.
Only names that stand for the reader's own are replaced: IMAGE, registry.example and the `scp` between two machines.
"""

from __future__ import annotations

import shlex

import pytest

from tests.engines.gpu_container import OUT, GpuContainer
from tests.engines.prepared import prepare
from tools.doc_examples import examples

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]

FOLDER = "/var/tmp/reader"
PROGRAM = f"counter --out {OUT} --mib 16 --interval 50"


class Reader:
    """Types the commands of a page at two machines."""

    def __init__(self, machines, image="", registry=""):
        self.machines = machines
        self.replaced = {" IMAGE": f" {image} {PROGRAM}", "registry.example": registry}
        for machine in machines.values():
            machine.run(["mkdir", "-p", FOLDER])

    def type(self, where, line):
        machine = self.machines[where]
        for name, value in self.replaced.items():
            line = line.replace(name, value)
        if line.startswith("scp "):
            return self.copy(machine, *shlex.split(line)[1:])
        return machine.run(["sh", "-c", f"cd {FOLDER} && {line}"], timeout=120)

    def copy(self, machine, source, target):
        name, _, path = source.partition(":")
        there = self.machines[f"{name} node"].root / (path if path.startswith("/") else f"{FOLDER}/{path}").lstrip("/")
        target = there.name if target == "." else target
        machine.copy_in(there, f"{FOLDER}/{target}")


@pytest.fixture
def readers_nodes(nodes):
    first, second = nodes
    yield {"first node": first, "second node": second}
    for machine in nodes:
        machine.run(["podman", "rm", "-a", "-f", "-t", "0"], check=False)
        machine.run(["rm", "-rf", FOLDER, "/etc/vgpu/trusted"], check=False)


@pytest.mark.parametrize("page", ["README.md", "docs/first-checkpoint.md"])
def test_the_page_leads_a_container_from_start_to_restore(page, readers_nodes, registry):
    first, second = readers_nodes.values()
    reader = Reader(readers_nodes, first.image("glibc"), registry)
    restores = 0
    step = 0
    for example in examples(page):
        for line in example.commands if example.where else ():
            if example.where == "second node" and "restore" in line:
                second.run(["podman", "rm", "-a", "-f", "-t", "0"])
            if "checkpoint" in line:
                step = GpuContainer(first, "job").wait_for_step(step + 3)
            reader.type(example.where, line)
            if "restore" in line:
                restores += 1
                GpuContainer(readers_nodes[example.where], "job").goes_on(step)
    assert restores >= 1


def test_the_setup_commands_of_the_install_page_work_in_its_order(fresh_host):
    prepare(fresh_host, images=())
    reader = Reader({"node": fresh_host})
    for example in examples("docs/install.md"):
        for line in example.commands if example.where else ():
            reader.type(example.where, line)
    assert not (fresh_host.root / "etc/containers/containers.conf.d/50-vgpu.conf").exists()
