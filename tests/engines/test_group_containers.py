"""Containers that belong together, under real podman: their checkpoints are started at the same time, or wait in vain.

What a common cut is, and who hears of a failure, is in tests/unit/test_group_meeting.py.
"""

from __future__ import annotations

import json

import pytest

from tests.engines.gpu_container import GpuContainer, restore
from tests.engines.prepared import configured

pytestmark = [pytest.mark.engines, pytest.mark.timeout(200), pytest.mark.first_row]

NAMES = ("rank0", "rank1")
OPTIONS = ["--annotation", "vgpu.snapshot/mode=staged", "--annotation", "vgpu.snapshot/group=train"]


@pytest.fixture
def ranks(node):
    ranks = [GpuContainer(node, name) for name in NAMES]
    try:
        for rank in ranks:  # both on one GPU, each with a staging worker of its own
            rank.start(node.image("glibc"), options=OPTIONS)
        for rank in ranks:
            rank.wait_for_step(3)
        yield ranks
    finally:
        node.run(["podman", "rm", "-a", "-f", "-t", "0"])
        node.run(["sh", "-c", "rm -f /var/tmp/rank?.tar.zst"])


def test_checkpoints_that_are_started_together_end_together_and_one_alone_waits_in_vain(node, ranks):
    listed = json.loads(node.run(["vgpu", "ps", "--json"]).stdout)["containers"]
    assert [one["group"] for one in listed] == ["train"] * 2
    refused = node.run(["vgpu", "suspend", listed[0]["id"]], check=False)
    assert "--group train" in refused.stderr

    with configured(node, deadline_freeze_s=3):
        alone = ranks[0].export("/var/tmp/rank0.tar.zst", check=False)
    assert alone.returncode != 0
    assert "waited 3 s for container" in alone.stderr
    steps = [rank.goes_on(rank.step()) for rank in ranks]

    node.run(["vgpu", "suspend", "--group", "train"])
    node.run(["vgpu", "resume", "--group", "train"])
    steps = [rank.goes_on(step) for rank, step in zip(ranks, steps, strict=True)]

    checkpoint = "podman container checkpoint --export /var/tmp/{0}.tar.zst {0} & ".format
    together = "".join(f"{checkpoint(name)} {name}=$!; " for name in NAMES)
    node.run(["sh", "-c", f"{together} wait $rank0 && wait $rank1"], timeout=120)
    for rank, step in zip(ranks, steps, strict=True):
        rank.remove()
        restore(node, f"/var/tmp/{rank.name}.tar.zst", name=rank.name).goes_on(step)
