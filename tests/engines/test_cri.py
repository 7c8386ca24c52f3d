"""Kubernetes' way with real containerd 2.1: CheckpointContainer, restore through CreateContainer and StartContainer,
and the service that seals, signs and pushes what lands in the kubelet's folder.
"""

from __future__ import annotations

import io
import json
import re
import subprocess
import tarfile
import time

import pytest

from tests.engines.cri_pod import IMAGE, LOW_LEVEL, Pod, connection, prepare_cri
from tests.engines.engine_drivers.base import flip
from tests.engines.prepared import configured, prepare
from tests.hosts.host import TestHost
from tests.hosts.roots import REPOSITORY
from vgpu_errors import EngineFailed

pytestmark = [pytest.mark.engines, pytest.mark.timeout(180)]

FOLDER = "/var/lib/kubelet/checkpoints"
ARCHIVE = f"{FOLDER}/checkpoint-trainer_default-counter-2026-11-29T18:00:00Z.tar"


@pytest.fixture(scope="module")
def cri_node(row, row_root):
    """A node as `vgpu setup containerd` leaves it, with a registry of its own."""
    if row != "testing":
        pytest.skip("containerd 1.7 has no CheckpointContainer in its CRI plugin")
    with TestHost(row, "cri") as node:
        prepare(node)
        prepare_cri(node)
        node.run(["mkdir", "-p", "-m", "700", FOLDER])
        with configured(node, low_level_runtime=LOW_LEVEL):
            yield node


@pytest.fixture
def pods(cri_node):
    """Makes pods that are removed afterwards."""
    made = []
    with connection(cri_node) as cri:

        def make(name, image=IMAGE, *, gpu=True):
            pod = Pod(cri_node, cri, name, gpu=gpu)
            made.append(pod)
            return pod.run(image)

        yield make
        for pod in made:
            pod.remove()
    cri_node.run(["sh", "-c", f"rm -f {FOLDER}/* /var/lib/vgpu/kubelet-watch.json"])


@pytest.fixture
def trainer(pods):
    pod = pods("trainer")
    pod.wait_for_step(3)
    return pod


def watch_once(node, *words, check=True):
    return node.run(["vgpu", "containerd", "watch", "--once", *words], check=check, timeout=120)


def test_checkpoint_goes_on_and_restores_in_another_pod(trainer, pods):
    node, step = trainer.node, trainer.step()
    trainer.checkpoint(ARCHIVE)
    trainer.goes_on(step)
    verified = json.loads(node.run(["vgpu", "verify", ARCHIVE, "--json"]).stdout)
    assert (verified["kind"], verified["trusted"], verified["configDifferences"]) == ("archive", True, [])
    restored = pods("second", ARCHIVE)
    step = restored.goes_on(step)
    assert "LD_PRELOAD=/run/vgpu-preload/libvgpu.so" in restored.exec("env")
    restored.checkpoint(ARCHIVE)
    pods("third", ARCHIVE).goes_on(step)


def test_a_damaged_archive_is_refused_before_anything_runs(trainer, pods):
    node = trainer.node
    trainer.checkpoint(ARCHIVE)
    flip_page(node)
    with pytest.raises(EngineFailed, match=r"content differs from the signed digest"):
        pods("second", ARCHIVE)


def test_other_arguments_than_the_signed_ones_are_refused(trainer, pods, monkeypatch):
    trainer.checkpoint(ARCHIVE)
    written = Pod.container_config

    def other(self, image):
        config = written(self, image)
        config.command.append("--mib=1")
        return config

    monkeypatch.setattr(Pod, "container_config", other)
    with pytest.raises(EngineFailed, match=r"args: was"):
        pods("second", ARCHIVE)


def test_watch_verifies_and_pushes_each_archive_once(trainer):
    node = trainer.node
    trainer.checkpoint(ARCHIVE)
    target = "localhost:5000/team/trainer"
    said = watch_once(node, "--push-to", target).stderr
    assert "verified, manifest sha256:" in said
    assert f"pushed to {target}:checkpoint-trainer_default-counter-2026-11-29T18-00-00Z" in said
    assert watch_once(node, "--push-to", target).stderr == ""
    trainer.checkpoint(ARCHIVE)
    assert "verified" in watch_once(node, "--push-to", target).stderr


def test_watch_sees_what_appears_while_it_runs(trainer):
    node = trainer.node
    with (node.root / "var/tmp/watch.log").open("wb") as log:
        process = node.popen(["vgpu", "containerd", "watch"], stdout=subprocess.DEVNULL, stderr=log)
    try:
        time.sleep(1)
        trainer.checkpoint(ARCHIVE)
        node.wait_for(["grep", "-q", "verified, manifest", "/var/tmp/watch.log"], timeout=10)
    finally:
        node.run(["pkill", "-f", "vgpu containerd watch"])
        process.wait(timeout=20)
    assert watch_once(node).stderr == ""  # a restart does nothing twice


def test_watch_seals_what_came_unsealed(trainer):
    node = trainer.node
    trainer.checkpoint(ARCHIVE)
    path = node.root / ARCHIVE.lstrip("/")
    path.write_bytes(without_seal(path.read_bytes()))
    assert node.run(["vgpu", "verify", ARCHIVE], check=False).returncode == 60
    assert "sealed and signed with this node's key" in watch_once(node).stderr
    node.run(["vgpu", "verify", ARCHIVE])
    assert node.run(["ls", "-A", FOLDER]).stdout.splitlines() == [ARCHIVE.rpartition("/")[2]]


def test_what_watch_sealed_restores_in_another_pod_with_every_check(trainer, pods):
    """A container that vgpu-runtime did not seal: here one without a GPU, whose record says so."""
    node, step = trainer.node, trainer.step()
    plain = pods("plain", gpu=False)
    step = plain.wait_for_step(3)
    plain.checkpoint(ARCHIVE)
    assert node.run(["vgpu", "verify", ARCHIVE], check=False).returncode == 60
    assert "sealed and signed with this node's key" in watch_once(node).stderr
    record = json.loads(node.run(["vgpu", "inspect", ARCHIVE, "--json"]).stdout)["record"]
    assert record["processes"] == []
    pods("second", ARCHIVE, gpu=False).goes_on(step)
    flip_page(node)
    with pytest.raises(EngineFailed, match=r"content differs from the signed digest"):
        pods("third", ARCHIVE, gpu=False)


def test_a_checkpoint_image_restores_too_and_runs_nothing_but_the_checkpoint(trainer, pods):
    """As deploy/node/fetch.sh has it: pushed, pulled with its signature, made an image, imported."""
    node, step = trainer.node, trainer.step()
    trainer.checkpoint(ARCHIVE)
    target = "localhost:5000/team/image"
    pushed = re.search(r"pushed to (\S+)", watch_once(node, "--push-to", target).stderr)[1]
    node.copy_in(REPOSITORY / "deploy/node/fetch.sh", "/opt/vgpu/fetch.sh")
    node.copy_in(REPOSITORY / "deploy/node/checkpoint_image.py", "/opt/vgpu/checkpoint_image.py")
    image = "localhost/vgpu/trainer:frozen"
    environment = {"CHECKPOINT": pushed, "IMAGE": image, "CONTAINER": "counter", "VGPU_HOST": "/"}
    node.run(["/opt/vgpu/fetch.sh"], env=environment, timeout=60)
    assert node.run(["ls", "-A", "/var/lib/vgpu/fetched"]).stdout == ""
    restored = pods("second", image)
    assert "libvgpu.so" in restored.exec("sh", "-c", "cat /proc/[0-9]*/maps")
    restored.goes_on(step)
    node.run(["ctr", "-n", "k8s.io", "image", "rm", "--sync", image])


def test_watch_names_what_is_damaged_and_waits_for_what_is_being_written(cri_node, pods):
    node = cri_node
    node.write(f"{FOLDER}/checkpoint-broken.tar", b"no tar at all" * 100)
    node.write(f"{FOLDER}/other.tar", b"nobody's")
    done = watch_once(node, check=False)
    assert done.returncode == 1
    assert "checkpoint-broken.tar: " in done.stderr
    assert "what to do: " in done.stderr
    assert "other.tar" not in done.stderr
    with (node.root / f"{FOLDER}/checkpoint-broken.tar".lstrip("/")).open("ab"):
        assert watch_once(node).stderr == ""


def flip_page(node):
    path = node.root / ARCHIVE.lstrip("/")
    with tarfile.open(path) as tar:
        member = tar.getmember("checkpoint/pages-1.img")
    flip(path, member.offset_data + member.size // 2)


def without_seal(data: bytes) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=io.BytesIO(data)) as old, tarfile.open(fileobj=out, mode="w") as new:
        for entry in old:
            if not entry.name.startswith("checkpoint/vgpu-"):
                new.addfile(entry, old.extractfile(entry) if entry.isreg() else None)
    return out.getvalue()
