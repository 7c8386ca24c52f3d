"""Checkpoints of real containers through a real registry (Debian's): pushed on one node, restored on the other.

Whatever comes back is read with other people's tools, too: skopeo for what lies in the registry, podman for what restores.
Where podman's own images come in, the row makes a difference; elsewhere the first one is enough.
"""

from __future__ import annotations

import json

import pytest

import vgpu_errors
from tests.engines.gpu_container import RUNTIME, GpuContainer, restore
from tests.engines.prepared import configured, trust
from tests.engines.test_documentation import FOLDER, Reader
from tools.doc_examples import examples

pytestmark = [pytest.mark.engines, pytest.mark.timeout(240)]

ARCHIVE = "/var/tmp/flow.tar.zst"
PULLED = "/var/tmp/pulled.tar.zst"
STORE = "/var/lib/vgpu/store"
UNCHANGED = 20 << 20
ARTIFACT = "application/vnd.vgpu.checkpoint.v1+json"


@pytest.fixture(scope="module")
def pair_of_nodes(nodes):
    """The two nodes, the second trusting the first."""
    first, second = nodes
    trust(second, first)
    return nodes


@pytest.fixture
def started(pair_of_nodes, registry):
    """A running container of an image that both nodes can pull; everything is removed afterwards."""
    first, second = pair_of_nodes
    base = f"{registry}/vgpu-test:glibc"
    first.run(["podman", "tag", first.image("glibc"), base])
    first.run(["podman", "push", "-q", base])
    # Besides the counter, whose memory changes at every step, a shell with 32 MB that never do.
    hold = "X=$(head -c 24000000 /dev/urandom | base64); counter --out /tmp/steps --mib 16 --interval 50 & wait"
    container = GpuContainer(first).start(base, program=["sh", "-c", hold])
    container.wait_for_step(3)
    yield container
    for node in (first, second):
        node.run(["podman", "rm", "-a", "-f", "-t", "0"], check=False)
        node.run(["rm", "-rf", ARCHIVE, PULLED, STORE])


def vgpu(node, *words, check=True):
    done = node.run(["vgpu", *words, "--json"], check=check, timeout=120)
    return json.loads(done.stdout)


def raw(node, reference):
    return json.loads(node.run(["skopeo", "inspect", "--tls-verify=false", "--raw", f"docker://{reference}"]).stdout)


@pytest.mark.first_row
def test_an_archive_goes_through_the_registry_and_restores(started, pair_of_nodes, registry):
    first, second = pair_of_nodes
    step = started.step()
    started.export(ARCHIVE)
    started.remove()
    reference = f"{registry}/flow/archive:1"
    pushed = vgpu(first, "push", ARCHIVE, reference)
    assert pushed["bytesSent"] > 16 << 20
    assert vgpu(first, "push", ARCHIVE, reference)["bytesSent"] == 0
    manifest = raw(first, reference)
    assert manifest["artifactType"] == ARTIFACT
    copied = ["skopeo", "copy", "-q", "--src-tls-verify=false", "--dest-tls-verify=false"]
    first.run([*copied, f"docker://{reference}", f"docker://{registry}/flow/copy:1"])
    first.run([*copied, f"docker://{reference}", "oci:/var/tmp/layout:1"])
    first.run(["rm", "-rf", "/var/tmp/layout"])
    pulled = vgpu(second, "pull", reference, "-o", PULLED)
    assert pulled["manifestDigest"] == pushed["manifestDigest"]
    assert vgpu(second, "verify", f"docker://{registry}/flow/archive:1", "--json")
    restore(second, PULLED).goes_on(step)


@pytest.mark.first_row
def test_only_what_changed_crosses_the_wire(started, pair_of_nodes, registry):
    first, second = pair_of_nodes
    with configured(first, store="on"):
        started.podman("checkpoint", "--leave-running")
        one = vgpu(first, "push", "counter", f"{registry}/flow/trainer:1")
        vgpu(second, "pull", f"{registry}/flow/trainer:1")
        started.podman("checkpoint", "--leave-running")
        two = vgpu(first, "push", "counter", f"{registry}/flow/trainer:2")
    assert two["manifestDigest"] != one["manifestDigest"]
    assert two["bytesSent"] < one["bytesSent"] - UNCHANGED
    sibling = vgpu(first, "push", "counter", f"{registry}/flow/sibling:2")
    assert sibling["bytesSent"] == 0
    assert sibling["bytesMounted"] > 0
    pulled = vgpu(second, "pull", f"{registry}/flow/trainer:2")
    assert pulled["bytesReused"] > UNCHANGED
    assert pulled["bytesFetched"] < one["bytesSent"] - UNCHANGED
    assert vgpu(second, "pull", f"{registry}/flow/trainer:2")["wasThere"] is True


def test_podmans_image_finds_its_packs(started, pair_of_nodes, registry):
    """What `podman pull` and `podman container restore` need lies under one tag; the image itself is small."""
    first, second = pair_of_nodes
    step = started.step()
    image, reference = "localhost/frozen:1", f"{registry}/flow/frozen:1"
    with configured(first, store="on", archive="reference"):
        first.run(["podman", "--runtime", RUNTIME, "container", "checkpoint", "--create-image", image, "counter"])
    pushed = vgpu(first, "push", "counter", reference, "--with-image", image)
    started.remove()
    assert pushed["imageIsReference"] is True
    index = raw(first, reference)
    assert [entry.get("artifactType") for entry in index["manifests"]] == [None, ARTIFACT]
    assert index["manifests"][1]["platform"] == {"architecture": "unknown", "os": "unknown"}
    inspected = json.loads(first.run(["skopeo", "inspect", "--tls-verify=false", f"docker://{reference}"]).stdout)
    assert sum(layer["Size"] for layer in inspected["LayersData"]) < 4 << 20
    second.run(["podman", "pull", "-q", reference])
    second.run(["podman", "--runtime", RUNTIME, "container", "restore", "--name", "counter", reference], timeout=120)
    GpuContainer(second).goes_on(step)
    first.run(["podman", "rmi", "-f", image])
    second.run(["podman", "rmi", "-f", reference], check=False)


@pytest.mark.first_row
def test_an_encrypted_image_restores_with_its_key_alone(started, pair_of_nodes, registry):
    first, second = pair_of_nodes
    step = started.step()
    started.export(ARCHIVE)
    started.remove()
    reference = f"{registry}/flow/secret:1"
    for node, name in ((second, "lab"), (first, "other")):
        node.run(["rm", "-f", f"/var/tmp/{name}.key", f"/var/tmp/{name}.pub"])
        node.run(["vgpu", "keys", "new", "--type", "x25519", f"/var/tmp/{name}.key"])
    second.copy_to(first, "/var/tmp/lab.pub")
    first.copy_to(second, "/var/tmp/other.key")
    assert vgpu(first, "push", ARCHIVE, reference, "--encrypt-to", "/var/tmp/lab.pub")["encrypted"] is True
    assert {layer["mediaType"] for layer in raw(first, reference)["layers"]} == {
        "application/vnd.vgpu.checkpoint.encrypted-blob.v1"
    }
    for options in ([], ["--identity", "/var/tmp/other.key"]):
        refused = second.run(["vgpu", "pull", reference, "-o", PULLED, *options], check=False)
        assert refused.returncode == vgpu_errors.NotARecipient.exit_code, refused.stderr
    assert vgpu(second, "pull", reference, "-o", PULLED, "--identity", "/var/tmp/lab.key")["encrypted"] is True
    restore(second, PULLED).goes_on(step)


@pytest.mark.first_row
def test_a_node_that_does_not_trust_the_maker_pulls_nothing(started, pair_of_nodes, registry):
    """The second node's own checkpoint, on the first, which was never told to trust it."""
    first, second = pair_of_nodes
    started.remove()
    container = GpuContainer(second).start(f"{registry}/vgpu-test:glibc")
    container.wait_for_step(3)
    container.export(ARCHIVE)
    vgpu(second, "push", ARCHIVE, f"{registry}/flow/strange:1")
    refused = first.run(["vgpu", "pull", f"{registry}/flow/strange:1"], check=False)
    assert refused.returncode == vgpu_errors.UntrustedKey.exit_code, refused.stderr


@pytest.mark.first_row
def test_the_commands_of_the_page_work_in_its_order(pair_of_nodes, registry):
    first, second = pair_of_nodes
    reader = Reader({"first node": first, "second node": second}, registry=registry)
    try:
        job = GpuContainer(first, "job").start(first.image("glibc"))
        step = job.wait_for_step(3)
        for example in examples("docs/registry.md"):
            for line in example.commands if example.where else ():
                reader.type(example.where, line)
        GpuContainer(second, "job").goes_on(step)
    finally:
        for node in pair_of_nodes:
            node.run(["podman", "rm", "-a", "-f", "-t", "0"], check=False)
            node.run(["rm", "-rf", FOLDER])
