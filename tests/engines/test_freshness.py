"""Freshness at a restore under podman: an expired signature and, where the policy says so, an older generation are refused.

The container whose restore was refused can be removed, and what is fresh still comes back.
"""

from __future__ import annotations

import contextlib
import json

import pytest

import vgpu_errors
from image_format import canonical_json
from image_format.file_names import SIGNATURE_NAME
from image_format.sealing import sign
from image_format.trust.bundle import Bundle
from tests.engines.archives import PREFIX, Archive, node_key
from tests.engines.gpu_container import GpuContainer, restore

pytestmark = [pytest.mark.engines, pytest.mark.first_row, pytest.mark.timeout(180)]

POLICY = "/etc/vgpu/policy.json"
FIRST, SECOND = "/var/tmp/first.tar", "/var/tmp/second.tar"


@pytest.fixture(scope="module")
def generations(node):
    """Two checkpoints of one container, and the steps they were taken at."""
    container = GpuContainer(node, "aging").start(node.image("glibc"), mib=4)
    steps = [container.wait_for_step(3)]
    container.export(FIRST, "--compress", "none", "--leave-running")
    steps.append(container.wait_for_step(steps[0] + 3))
    container.export(SECOND, "--compress", "none")
    container.remove()
    yield dict(zip((FIRST, SECOND), steps, strict=True))
    node.run(["rm", "-f", FIRST, SECOND])


@contextlib.contextmanager
def policy(node, **rules):
    before = node.read(POLICY)
    node.write(POLICY, json.dumps({"version": 2, "default": "refuse-untrusted", **rules}))
    try:
        yield
    finally:
        node.write(POLICY, before)


def comes_back(node, path, step):
    try:
        restore(node, path, name="aging").goes_on(step, steps=1)
    finally:
        node.run(["podman", "rm", "-f", "-t", "0", "-i", "aging"])


def refused(node, path, error):
    done = restore(node, path, check=False)
    assert done.returncode == 125
    assert error.remedy.partition('"')[0] in done.stderr
    node.run(["podman", "rm", "-f", "-i", "aging"])
    assert node.run(["podman", "ps", "-aq"]).stdout == ""


def test_an_older_generation_comes_back_unless_the_policy_refuses_it(node, generations):
    comes_back(node, SECOND, generations[SECOND])
    with policy(node, olderGeneration="refuse"):
        refused(node, FIRST, vgpu_errors.OlderGeneration)
        comes_back(node, SECOND, generations[SECOND])  # the same one again is no older one
    assert node.run(["vgpu", "verify", FIRST]).stdout.count("warning: it is generation 1") == 1
    comes_back(node, FIRST, generations[FIRST])


def test_an_expired_signature_is_refused_and_one_that_counts_is_not(node, generations):
    archive = Archive.read(node, SECOND)
    payload = json.loads(Bundle.from_bytes(archive[PREFIX + SIGNATURE_NAME]).envelope.payload)
    for expires, is_fresh in (("2020-01-01T00:00:00Z", False), ("2999-01-01T00:00:00Z", True)):
        payload["predicate"]["expires"] = expires
        archive[PREFIX + SIGNATURE_NAME] = sign(canonical_json.write(payload), node_key(node))
        path = archive.write(node, "/var/tmp/aged.tar")
        if is_fresh:
            comes_back(node, path, generations[SECOND])
        else:
            refused(node, path, vgpu_errors.Expired)
            verified = node.run(["vgpu", "verify", path], check=False)
            assert verified.returncode == vgpu_errors.Expired.exit_code
    node.run(["rm", "/var/tmp/aged.tar"])
