"""`vgpu containerd checkpoint|restore` with real containerd 2.1 and 1.7: one command each, on one node and across two."""

from __future__ import annotations

import json
import subprocess
import time

import pytest
from jsonschema import Draft202012Validator

from tests.engines.ctr_container import IMAGE, RUNC, CtrContainer
from tests.engines.prepared import configured, trust
from tests.hosts.roots import REPOSITORY

pytestmark = [pytest.mark.engines, pytest.mark.timeout(180)]

SCHEMA = json.loads((REPOSITORY / "spec/containerd-output.schema.json").read_text())
FILE = "/var/tmp/counter.tar"
REFERENCE = "localhost/frozen:1"


@pytest.fixture(scope="module")
def pair_of_nodes(nodes):
    """Both nodes with containerd; only the first one has the image, so that it must travel along."""
    first, second = nodes
    for node in nodes:
        node.start_containerd()
        node.run(["sh", "-c", "rm -rf /tmp/ctrd-checkpoint*"])  # of other modules' plain ctr
    first.run(["ctr", "image", "import", first.image_archive("glibc")])
    trust(second, first)
    with configured(first, low_level_runtime=RUNC), configured(second, low_level_runtime=RUNC):
        yield first, second


@pytest.fixture
def counter(pair_of_nodes):
    first, _ = pair_of_nodes
    container = CtrContainer(first, "counter").start()
    container.wait_for_step(3)
    yield container
    for node in pair_of_nodes:
        for name in ("counter", "again", "third"):
            CtrContainer(node, name).remove()
        node.run(["sh", "-c", "ctr image ls -q | grep -v vgpu-test | xargs -r ctr image rm --sync"])
        node.run(["sh", "-c", f"rm -rf {FILE} /tmp/ctrd-checkpoint*"])


def vgpu(node, *words, check=True):
    done = node.run(["vgpu", "containerd", *words], check=check, timeout=120)
    if "--json" in words and done.returncode == 0:
        Draft202012Validator(SCHEMA).validate(json.loads(done.stdout))
    return done


def checkpoint(container, *words, check=True):
    return vgpu(container.node, "checkpoint", container.name, *words, check=check)


def nothing_is_left(node):
    """No lease, no folder, nothing of containerd's in /tmp."""
    assert node.run(["ctr", "leases", "ls", "-q"]).stdout == ""
    assert (
        node.run(["sh", "-c", "ls /var/lib/vgpu/containerd; ls -d /tmp/ctrd-checkpoint* 2>/dev/null; true"]).stdout
        == ""
    )


def test_it_goes_on_and_comes_back_beside_itself(counter):
    node, step = counter.node, counter.step()
    made = json.loads(checkpoint(counter, REFERENCE, "--leave-running", "--json").stdout)
    assert made["leftRunning"] is True
    assert [phase["phase"] for phase in made["phases"]] == ["pause", "checkpoint", "files", "resume", "hash", "store"]
    assert not counter.is_frozen()
    counter.goes_on(step)
    nothing_is_left(node)
    if node.row == "trixie":
        refused = vgpu(node, "restore", REFERENCE, "again", check=False)
        assert refused.returncode == 15
        assert "cgroup" in refused.stderr
        counter.goes_on(step)
        counter.remove()
    vgpu(node, "restore", REFERENCE, "again", "--label", "tier=second", "--json")
    again = CtrContainer(node, "again")
    again.goes_on(step)
    assert '"tier": "second"' in node.run(["ctr", "container", "info", "again"]).stdout
    nothing_is_left(node)


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_one_file_brings_it_to_a_node_without_its_image(counter, pair_of_nodes, compression):
    first, second = pair_of_nodes
    step = counter.step()
    checkpoint(counter, "--export", FILE, "--compress", compression)
    assert counter.status() == "GONE"
    verified = json.loads(first.run(["vgpu", "verify", FILE, "--json"]).stdout)
    assert (verified["kind"], verified["trusted"], verified["configDifferences"]) == ("containerd archive", True, [])
    assert (
        json.loads(first.run(["vgpu", "inspect", FILE, "--json"]).stdout)["record"]["container"]["engine"]
        == "containerd"
    )
    nothing_is_left(first)
    first.copy_to(second, FILE)
    vgpu(second, "restore", "--import", FILE, "again")
    again = CtrContainer(second, "again")
    step = again.goes_on(step)
    assert IMAGE in second.run(["ctr", "image", "ls", "-q"]).stdout.split()
    nothing_is_left(second)
    if second.row == "testing":  # runc 1.1 of trixie cannot checkpoint a container that was restored
        checkpoint(again, REFERENCE)
        vgpu(second, "restore", REFERENCE, "third")
        CtrContainer(second, "third").goes_on(step)


@pytest.mark.first_row
def test_the_image_that_came_along_is_held_like_one_that_was_pulled(counter, pair_of_nodes):
    first, second = pair_of_nodes
    checkpoint(counter, "--export", FILE)
    first.copy_to(second, FILE)
    second.run(["ctr", "image", "rm", "--sync", IMAGE], check=False)
    vgpu(second, "restore", "--import", FILE, "again")
    CtrContainer(second, "again").remove()
    second.run(["ctr", "content", "prune", "references"])
    assert "complete" in second.run(["ctr", "image", "check", f"name=={IMAGE}"]).stdout


@pytest.mark.first_row
def test_a_damaged_file_is_refused_by_digest_and_nothing_is_left(counter):
    node = counter.node
    checkpoint(counter, "--export", FILE)
    path = node.root / FILE.lstrip("/")
    data = bytearray(path.read_bytes())
    data[-len(data) // 3] ^= 1
    path.write_bytes(data)
    done = vgpu(node, "restore", "--import", FILE, "again", check=False)
    assert done.returncode == 52
    assert CtrContainer(node, "again").status() == "GONE"
    assert "again" not in node.run(["ctr", "container", "ls", "-q"]).stdout.split()
    nothing_is_left(node)


def test_images_of_ctr_and_of_vgpu_restore_with_the_others_command(counter):
    node, step = counter.node, counter.step()
    checkpoint(counter, REFERENCE)
    node.run(["ctr", "container", "restore", "--rw", "--live", "again", REFERENCE], timeout=90)
    again = CtrContainer(node, "again")
    step = again.goes_on(step)
    if node.row == "testing":
        node.run(
            ["ctr", "container", "checkpoint", "--rw", "--image", "--task", "again", "localhost/frozen:2"], timeout=90
        )
        again.remove()
        vgpu(node, "restore", "localhost/frozen:2", "third")
        CtrContainer(node, "third").goes_on(step)


@pytest.mark.first_row
def test_what_containerd_leaves_in_tmp_is_removed_when_nobody_needs_it(counter):
    node = counter.node
    checkpoint(counter, REFERENCE)
    node.run(["ctr", "container", "restore", "--rw", "--live", "again", REFERENCE], timeout=90)
    node.run(["sh", "-c", "mkdir /tmp/ctrd-checkpoint1; touch /tmp/ctrd-checkpoint1/other"])  # not ours
    leaked = json.loads(vgpu(node, "clean", "--json").stdout)["folders"]
    assert [folder["kept"] for folder in leaked] == ["younger than 900 s"]
    reader = node.popen(["sh", "-c", "exec sleep 60 < $(ls /tmp/ctrd-checkpoint*/inventory.img)"])
    try:
        vgpu(node, "clean", "--min-age", "0")
        kept = json.loads(vgpu(node, "clean", "--min-age", "0", "--json").stdout)["folders"]
        assert [folder["kept"] for folder in kept] == ["in use"]
    finally:
        node.run(["pkill", "-f", "^sleep 60"])
        reader.wait(timeout=10)
    assert "removed" in vgpu(node, "clean", "--min-age", "0").stdout
    assert node.run(["sh", "-c", "ls -d /tmp/ctrd-checkpoint*"]).stdout.split() == ["/tmp/ctrd-checkpoint1"]
    node.run(["rm", "-r", "/tmp/ctrd-checkpoint1"])


def test_a_failed_checkpoint_leaves_it_running_and_no_half_image(counter):
    node, step = counter.node, counter.step()
    node.run(["pkill", "-STOP", "-f", "^counter"])
    try:
        done = checkpoint(counter, REFERENCE, check=False)
    finally:
        node.run(["pkill", "-CONT", "-f", "^counter"])
    assert done.returncode == 81
    assert "(counter)" in done.stderr
    assert REFERENCE not in node.run(["ctr", "image", "ls", "-q"]).stdout.split()
    assert not counter.is_frozen()
    counter.goes_on(step)
    nothing_is_left(node)


def test_a_failure_after_the_end_starts_it_again(counter):
    """The export's disk is full: the container had ended, and comes back from the sealed folder."""
    node, step = counter.node, counter.step()
    node.run(["mkdir", "-p", "/var/tmp/small"])
    node.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", "/var/tmp/small"])
    try:
        done = checkpoint(counter, "--export", "/var/tmp/small/x.tar", check=False)
        assert done.returncode != 0
        assert "No space left" in done.stderr
        assert node.run(["ls", "-A", "/var/tmp/small"]).stdout == ""
    finally:
        node.run(["umount", "/var/tmp/small"])
    assert counter.status() == "RUNNING"
    counter.goes_on(step)
    nothing_is_left(node)


@pytest.mark.first_row
def test_a_killed_command_leaves_what_the_next_one_sweeps(counter):
    node, step = counter.node, counter.step()
    process = node.popen(
        ["vgpu", "containerd", "checkpoint", "counter", "--export", "/run/pipe", "-R"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    node.wait_for(["sh", "-c", "test -e /var/lib/vgpu/containerd/checkpoint-*/images"], interval=0.01)
    process.kill()
    process.wait(timeout=10)
    deadline = time.monotonic() + 20
    while counter.status() != "PAUSED" and not counter.is_frozen() and time.monotonic() < deadline:
        if counter.status() == "RUNNING":
            break
        time.sleep(0.1)
    counter.task("resume", check=False)
    counter.goes_on(step)
    checkpoint(counter, REFERENCE, "-R")
    left = node.run(["sh", "-c", "ls /var/lib/vgpu/containerd"]).stdout
    assert left == ""
    for lease in node.run(["ctr", "leases", "ls", "-q"]).stdout.split():
        assert lease.startswith("vgpu-checkpoint-")  # expires by itself
        node.run(["ctr", "leases", "rm", lease])


@pytest.mark.first_row
def test_a_command_that_was_killed_after_the_end_loses_nothing(counter):
    """The only state of the ended container is the folder; nobody sweeps it, and the container comes back from it."""
    node, step = counter.node, counter.step()
    node.run(["mkfifo", "/var/tmp/.x.tar.partial"])  # the export blocks here, after the container has ended
    process = node.popen(
        ["vgpu", "containerd", "checkpoint", "counter", "--export", "/var/tmp/x.tar"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    node.wait_for(["sh", "-c", "ctr task ls | grep -q STOPPED"])
    node.run(["pkill", "-KILL", "-f", "vgpu containerd checkpoint"])
    process.wait(timeout=10)
    node.run(["rm", "-f", "/var/tmp/.x.tar.partial"])
    kept = json.loads(vgpu(node, "clean", "--json").stdout)["folders"]
    assert [one["kept"] for one in kept] == ["holds the state of counter, which had ended"]
    vgpu(node, "recover", kept[0]["path"], "--json")
    counter.goes_on(step)
    for lease in node.run(["ctr", "leases", "ls", "-q"]).stdout.split():
        node.run(["ctr", "leases", "rm", lease])  # expires by itself
    nothing_is_left(node)


@pytest.mark.first_row
def test_a_container_that_its_user_paused_stays_paused(counter):
    step = counter.step()
    counter.task("pause")
    checkpoint(counter, REFERENCE, "-R")
    assert counter.is_frozen()
    counter.task("resume")
    counter.goes_on(step)


def test_options_of_the_checkpoint_hold_for_the_restore(counter):
    """containerd forgets CRIU's options at a restore; they come back through the annotation that runc reads."""
    node, step = counter.node, counter.step()
    checkpoint(counter, REFERENCE, "--file-locks")
    vgpu(node, "restore", REFERENCE, "again")
    again = CtrContainer(node, "again")
    step = again.goes_on(step)
    options = json.loads(node.run(["ctr", "container", "info", "again"]).stdout)["Spec"]["annotations"][
        "org.criu.config"
    ]
    assert node.read(options).splitlines()[-1] == "file-locks"
    if node.row == "testing":
        checkpoint(again, "localhost/frozen:2", "-R")
        again.goes_on(step)


@pytest.mark.first_row
@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("checkpoint", "nobody", REFERENCE), 13, "ctr -n default container ls"),
        (("checkpoint", "counter"), 10, "either REF or --export"),
        (("checkpoint", "counter", "x", "--compress", "zstd"), 10, "--compress"),
        (("restore", "only-one"), 10, "REF NAME"),
        (("restore", "localhost/none:1", "again"), 14, "no such image in the namespace default"),
        (("restore", "--import", "/etc/passwd", "again"), 50, "passwd"),
        (("checkpoint", "x", "y", "--address", "/run/none.sock"), 20, "--address"),
    ],
)
def test_mistakes_are_named(pair_of_nodes, words, code, says):
    done = vgpu(pair_of_nodes[0], *words, check=False)
    assert done.returncode == code, done.stderr
    assert says in done.stderr
