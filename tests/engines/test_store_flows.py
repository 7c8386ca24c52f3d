"""The store and reference mode with real podman: small archives, what they need on which node, and what gc leaves alone.

The row makes no difference: everything here happens in the image path and in the store, before and after the runtime.
"""

from __future__ import annotations

import json
import pathlib

import pytest

from tests.engines.ctr_container import RUNC, CtrContainer
from tests.engines.gpu_container import GpuContainer, restore
from tests.engines.prepared import LOG, SETTINGS, configured, image_path, trust
from tests.engines.test_documentation import FOLDER, Reader
from tools.doc_examples import examples

pytestmark = [pytest.mark.engines, pytest.mark.first_row, pytest.mark.timeout(300)]

WHOLE, SMALL, AGAIN = "/var/tmp/whole.tar", "/var/tmp/small.tar", "/var/tmp/again.tar"
STORE = "/var/lib/vgpu/store"
BESIDE_PODMAN = "/var/lib/containers/vgpu-store"
STAGED = ["--annotation", "vgpu.snapshot/mode=staged"]
REFERENCE = {"store": "on", "archive": "reference"}
MIB = 1 << 20


@pytest.fixture(autouse=True)
def clean(nodes):
    yield
    for node in nodes:
        node.run(["podman", "rm", "-a", "-f", "-t", "0"], check=False)
        node.run(["rm", "-rf", WHOLE, SMALL, AGAIN, STORE, BESIDE_PODMAN])


def vgpu(host, *words, **options):
    """A command's document."""
    return json.loads(host.run(["vgpu", *words, "--json"], timeout=120, **options).stdout)


def size_of(host, path):
    return pathlib.Path(host.root, path.lstrip("/")).stat().st_size


def stored(host):
    return vgpu(host, "store", "ls")["checkpoints"]


@pytest.mark.parametrize("options", [pytest.param([], id="driver"), pytest.param(STAGED, id="staged")])
def test_a_reference_archive_is_small_and_restores_where_its_content_is(nodes, options):
    first, second = nodes
    trust(second, first)
    container = GpuContainer(first).start(first.image("glibc"), options=options, mib=24)
    step = container.wait_for_step(3)
    with configured(first, **REFERENCE):
        container.export(SMALL, "--compress", "none")
    container.remove()
    assert size_of(first, SMALL) < MIB
    (entry,) = stored(first)
    assert "archive of container" in entry["neededBy"][0]
    kept = vgpu(first, "gc", "--keep", "0")
    assert (kept["removed"], len(kept["kept"])) == ([], 1)

    step = restore(first, SMALL).goes_on(step)  # whatever the settings are now
    GpuContainer(first).remove()

    first.copy_to(second, SMALL)
    refused = restore(second, SMALL, check=False)
    assert refused.returncode != 0
    assert "is a reference" in refused.stderr
    assert "vgpu unpack" in refused.stderr
    GpuContainer(second).remove()

    first.run(["vgpu", "unpack", SMALL, "-o", AGAIN], timeout=120)
    assert size_of(first, AGAIN) > 16 * MIB
    first.copy_to(second, AGAIN)
    restore(second, AGAIN).goes_on(3)

    vgpu(first, "store", "rm", "--force", entry["manifestDigest"])
    assert "is a reference" in restore(first, SMALL, check=False).stderr
    assert vgpu(first, "store", "du")["totalBytes"] == 0


def test_checkpoint_and_restore_in_place_again_and_again(node):
    container = GpuContainer(node).start(node.image("glibc"), options=STAGED)
    step = container.wait_for_step(3)
    with configured(node, **REFERENCE):
        for generation in (1, 2):
            container.podman("checkpoint")
            names = [path.name for path in pathlib.Path(node.root, image_path(container).lstrip("/")).iterdir()]
            assert "vgpu-reference.json" in names
            assert not any(name.startswith("vgpu-pack-") for name in names)
            container.podman("restore")
            step = container.goes_on(step)
            assert [entry["generation"] for entry in stored(node)] == list(range(1, generation + 1))
    assert all(proof["problem"] is None for proof in vgpu(node, "store", "verify")["checkpoints"])


def test_a_whole_archive_is_kept_as_well_and_packed_afterwards(node):
    """With the store where podman has its storage, image path and store are the same files."""
    container = GpuContainer(node).start(node.image("glibc"), options=STAGED)
    step = container.wait_for_step(3)
    with configured(node, store="on", store_dir=BESIDE_PODMAN):
        container.export(WHOLE, "--compress", "none", "--leave-running")
        step = container.goes_on(step)
        image = pathlib.Path(node.root, image_path(container).lstrip("/"))
        pack = next(image.glob("vgpu-pack-*.bin"))
        (entry,) = stored(node)
        assert pack.samefile(pathlib.Path(node.root, entry["path"].lstrip("/"), pack.name))
        container.export(AGAIN, "--compress", "none")  # over the links: what the store has does not change
        container.remove()
        first, second = stored(node)
        record = json.loads(pathlib.Path(node.root, second["path"].lstrip("/"), "vgpu-record.json").read_bytes())
        parent = {"manifestDigest": first["manifestDigest"], "generation": 1}
        assert record["parents"] in ([parent], [])  # empty where the counter has changed every chunk meanwhile
        assert vgpu(node, "verify", WHOLE)["trusted"] is True
        assert all(proof["problem"] is None for proof in vgpu(node, "store", "verify")["checkpoints"])

        packed = vgpu(node, "pack", AGAIN, "-o", SMALL)
        assert size_of(node, SMALL) < MIB < packed["movedBytes"]
        removed = vgpu(node, "gc", "--keep", "0")
        assert len(removed["removed"]) == 1
        restore(node, SMALL).goes_on(step)


def test_a_store_that_fails_leaves_the_archive_whole(node):
    node.write(STORE, "no folder")
    container = GpuContainer(node).start(node.image("glibc"))
    step = container.wait_for_step(3)
    with configured(node, **REFERENCE):
        container.export(WHOLE, "--compress", "none")
    container.remove()
    assert size_of(node, WHOLE) > 8 * MIB
    assert "not in the store" in node.read(LOG)
    restore(node, WHOLE).goes_on(step)


def test_a_reference_without_a_store_is_refused_before_anything_is_touched(node):
    container = GpuContainer(node).start(node.image("glibc"))
    step = container.wait_for_step(3)
    with configured(node, archive="reference"):
        refused = container.export(SMALL, check=False)
    assert "archive = reference needs store = on" in refused.stderr
    container.goes_on(step)


def test_the_page_of_the_store_does_what_it_says(nodes):
    """docs/store.md, typed from its first line to its last; the container goes on after each restore."""
    node = nodes[0]
    settings = node.read(SETTINGS)
    reader = Reader({"first node": node})
    container = GpuContainer(node, "job").start(node.image("glibc"), options=STAGED)
    try:
        step = container.wait_for_step(3)
        for example in examples("docs/store.md"):
            for line in example.commands:
                step = container.wait_for_step(step + 1) if "checkpoint" in line else step
                reader.type(example.where, line)
                if "restore" in line:
                    step = container.goes_on(step)
        assert size_of(node, f"{FOLDER}/small.tar") < MIB < size_of(node, f"{FOLDER}/whole.tar")
    finally:
        node.write(SETTINGS, settings)
        node.run(["rm", "-rf", FOLDER])


def test_a_checkpoint_of_containerd_refers_to_the_store_too(node):
    if node.run(["ctr", "version"], check=False).returncode:
        node.start_containerd()
    node.run(["ctr", "image", "import", node.image_archive("glibc")])
    with configured(node, low_level_runtime=RUNC, **REFERENCE):
        container, restored = CtrContainer(node, "referring"), CtrContainer(node, "referred")
        try:
            container.start()
            step = container.wait_for_step(3)
            container.ctr("container", "checkpoint", "--image", "--task", "--rw", container.name, "localhost/small:1")
            container.goes_on(step)
            container.remove()
            assert [entry["neededBy"] != [] for entry in stored(node)] == [True]
            restored.ctr("container", "restore", "--live", "--rw", restored.name, "localhost/small:1")
            restored.goes_on(step)
        finally:
            container.remove()
            restored.remove()
            node.run(["ctr", "image", "rm", "--sync", "localhost/small:1"], check=False)
