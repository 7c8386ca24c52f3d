"""What a restore and a checkpoint do with bad input and on bad nodes: a clear error, nothing lost, nothing hanging.

After every refusal: podman says 125 with our error in its text, the container that did not come can be removed, the
archive is byte for byte the same, the GPUs are free, nothing ran, and the good archive still restores.
"""

from __future__ import annotations

import contextlib
import time

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

import vgpu_errors
from image_format.file_names import INDEX_NAME, RECORD_NAME, SIGNATURE_NAME
from image_format.trust.keys import SigningKey
from tests.engines.archives import PREFIX, Archive, node_key
from tests.engines.gpu_container import GpuContainer, restore
from tests.engines.prepared import LOW_LEVEL, configured, digest, used_bytes

pytestmark = [pytest.mark.engines, pytest.mark.timeout(180)]

GOOD = "/var/tmp/good.tar"
BAD = "/var/tmp/bad.tar"
TRACE = "/var/tmp/hook-ran"
AGENT = "^/usr/bin/python3 -IS /usr/bin/vgpu-agent"
OTHER_RUNTIME = {"trixie": "/usr/sbin/runc", "testing": "/usr/bin/crun"}


@pytest.fixture(scope="session")
def good(node):
    """An archive that restores, and the step it was taken at."""
    container = GpuContainer(node).start(node.image("glibc"), mib=4)
    step = container.wait_for_step(3)
    container.export(GOOD, "--compress", "none")
    container.remove()
    return step


@pytest.fixture
def archive(node, good):
    """The good archive, to be changed."""
    return Archive.read(node, GOOD)


def refused(node, path: str, error: type[vgpu_errors.VgpuError], *words: str) -> str:
    """Try to restore the archive; it must be refused in the way that the module's docstring says."""
    sealed, started = digest(node, path), time.monotonic()
    done = restore(node, path, "--name", "bad", check=False)
    assert time.monotonic() - started < 30
    assert done.returncode == 125, done
    told(done.stderr, error, *words)
    assert node.run(["podman", "ps", "-q", "--filter", "status=running"]).stdout == ""
    node.run(["podman", "rm", "-i", "bad"])
    assert node.run(["podman", "ps", "-aq"]).stdout == ""
    assert digest(node, path) == sealed
    nothing_left(node)
    return done.stderr


def told(text: str, error: type[vgpu_errors.VgpuError], *words: str) -> None:
    """The error of that class, by its remedy, and what the test expects to be named."""
    remedy = error.remedy.partition("{")[0]
    assert remedy in text, f"{error.__name__} says '{remedy}', not: {text}"
    missing = [word for word in words if word not in text]
    assert not missing, f"{missing} not in: {text}"
    assert "Traceback" not in text
    assert "unexpected" not in text


def nothing_left(node) -> None:
    """No state file, no control directory, no process of a container, and all device memory free."""
    left = node.run(["sh", "-c", "ls -A /run/vgpu/state /run/vgpu/containers; ps -eo args | grep ^counter; true"])
    assert not [line for line in left.stdout.splitlines() if line and not line.startswith("/run/vgpu/")], left.stdout
    assert used_bytes(node) == 0


def still_restores(node, step: int) -> None:
    """The good archive comes back as before."""
    try:
        restore(node, GOOD).goes_on(step, steps=1)
    finally:
        node.run(["podman", "rm", "-af", "-t", "0"])


# ---- the archive ---------------------------------------------------------------------------------


def unknown_key(archive, _node):
    archive.seal(SigningKey.of(ec.generate_private_key(ec.SECP256R1())))


def resealed(edit):
    """A change of the record that this node's own key vouches for."""

    def change(archive, node):
        archive.edit_record(edit)
        archive.seal(node_key(node))

    return change


def huge_count(archive, node):
    archive.claim_regions(1 << 60)
    archive.seal(node_key(node))


def without_files_in_the_index(archive, node):
    archive.claim_regions(0)
    archive.seal(node_key(node))


def requirement(key, value):
    def edit(record):
        record["requirements"] = [item for item in record["requirements"] if item["key"] != key]
        record["requirements"].append({"key": key, "value": value, "level": "must"})

    return edit


def other_model(record):
    for device in record["devices"]:
        device["name"] = "NVIDIA H200"
        device["uuid"] = "GPU-00000000-0000-4000-8000-000000000001"
    for process in record["processes"]:
        process["devices"] = ["GPU-00000000-0000-4000-8000-000000000001"]


def much_memory(record):
    for process in record["processes"]:
        process["gpuBytes"] = 1 << 40


ARCHIVES = {
    "bit in the pages": (lambda a, _: a.flip(a.pages()), vgpu_errors.ContentMismatch, ["pages-"]),
    "bit in the record": (lambda a, _: a.flip(PREFIX + RECORD_NAME), vgpu_errors.ContentMismatch, [RECORD_NAME]),
    "bit in the index": (lambda a, _: a.flip(PREFIX + INDEX_NAME), vgpu_errors.ContentMismatch, [INDEX_NAME]),
    "unknown key": (unknown_key, vgpu_errors.UntrustedKey, ["does not trust"]),
    "no signature": (lambda a, _: a.remove(PREFIX + SIGNATURE_NAME), vgpu_errors.Unsigned, ["no signature"]),
    "file missing": (lambda a, _: a.remove(a.pages()), vgpu_errors.UnexpectedEntry, ["is missing"]),
    "file added": (lambda a, _: a.add(PREFIX + "extra.img"), vgpu_errors.UnexpectedEntry, ["extra.img"]),
    "folder added": (lambda a, _: a.add(PREFIX + "sub/evil"), vgpu_errors.UnexpectedEntry, ["sub"]),
    "link for a file": (
        lambda a, _: (a.remove(a.pages()), a.add(PREFIX + "pages-1.img", link="/etc/passwd")),
        vgpu_errors.UnexpectedEntry,
        [],
    ),
    "future version": (
        resealed(lambda record: record.update(formatVersion="9.0")),
        vgpu_errors.FormatTooNew,
        ["9.0"],
    ),
    "unknown feature": (
        resealed(lambda record: record["features"]["required"].append("time-travel")),
        vgpu_errors.UnknownFeature,
        ["time-travel"],
    ),
    "huge count": (huge_count, vgpu_errors.LimitExceeded, [INDEX_NAME]),
    "other GPU model": (resealed(other_model), vgpu_errors.NodeUnfit, ["NVIDIA H200", "same model"]),
    "more GPUs": (resealed(requirement("gpu.count", 7)), vgpu_errors.NodeUnfit, ["too few GPUs", "needed 7"]),
    "more memory": (resealed(much_memory), vgpu_errors.NodeUnfit, ["Too little device memory", str(1 << 40)]),
    "other driver": (
        resealed(requirement("driver.release", "999.1")),
        vgpu_errors.NodeUnfit,
        ["999.1", "that driver release"],
    ),
    "other processor": (resealed(requirement("cpu.flags", ["avx9"])), vgpu_errors.NodeUnfit, ["avx9"]),
    "unknown requirement": (resealed(requirement("moon.phase", "full")), vgpu_errors.NodeUnfit, ["moon.phase"]),
}


# One per gate on every row; what the others show is decided before the engine makes a difference.
ON_EVERY_ROW = ("bit in the pages", "no signature", "other GPU model", "hook", "mount")


def cases(table):
    return [name if name in ON_EVERY_ROW else pytest.param(name, marks=pytest.mark.first_row) for name in table]


@pytest.mark.parametrize("case", cases(ARCHIVES))
def test_a_changed_archive_is_refused(node, archive, good, case):
    change, error, words = ARCHIVES[case]
    change(archive, node)
    archive.write(node, BAD)
    refused(node, BAD, error, *words)
    still_restores(node, good)


@pytest.mark.first_row
def test_a_truncated_archive_is_refused(node, good):
    """podman itself cannot unpack it; `vgpu verify` says where it ends."""
    sealed = digest(node, GOOD)
    node.run(["sh", "-c", f"head -c 3000000 {GOOD} >{BAD}"])
    done = restore(node, BAD, "--name", "bad", check=False)
    assert done.returncode == 125
    assert "unexpected EOF" in done.stderr
    node.run(["podman", "rm", "-i", "bad"])
    verified = node.run(["vgpu", "verify", BAD], check=False)
    assert verified.returncode == vgpu_errors.Truncated.exit_code
    assert "ends after" in verified.stderr
    assert digest(node, GOOD) == sealed
    nothing_left(node)


@pytest.mark.first_row
@pytest.mark.parametrize("name", ["checkpoint/../../evil", "/evil", "checkpoint/a/../../evil", "checkpoint/e\nvil"])
def test_path_tricks_reach_nothing(node, archive, good, name):
    archive.add(name, b"evil")
    archive.write(node, BAD)
    verified = node.run(["vgpu", "verify", BAD], check=False)
    assert verified.returncode in (vgpu_errors.UnsafeName.exit_code, vgpu_errors.UnexpectedEntry.exit_code)
    done = restore(node, BAD, "--name", "bad", check=False)
    assert done.returncode == 125 or "\n" not in name
    found = node.run(["find", "/", "-xdev", "-name", "e*vil", "-not", "-path", "/proc/*"], check=False).stdout
    assert found == ""
    node.run(["podman", "rm", "-af", "-t", "0"])
    nothing_left(node)
    still_restores(node, good)


# ---- the configuration ---------------------------------------------------------------------------


def hook(spec):
    ran = {"path": "/usr/bin/touch", "args": ["touch", TRACE]}
    spec["hooks"] = {stage: [ran] for stage in ("prestart", "createRuntime", "createContainer", "startContainer")}


def capability(spec):
    for kept in spec["process"]["capabilities"].values():
        kept.append("CAP_SYS_ADMIN")


def mount(spec):
    spec["mounts"].append({"destination": "/host", "type": "bind", "source": "/", "options": ["rbind"]})


def privileged(spec):
    spec["linux"].pop("seccomp", None)
    spec["linux"]["maskedPaths"] = []
    spec["linux"]["resources"]["devices"] = [{"allow": True, "access": "rwm"}]
    spec["process"]["noNewPrivileges"] = False


CONFIGURATIONS = {
    "capability": (capability, ["CAP_SYS_ADMIN"]),
    "hook": (hook, ["hooks"]),
    "mount": (mount, ["/host"]),
    "privileged": (privileged, ["maskedPaths"]),
    "arguments": (lambda spec: spec["process"]["args"].append("--seed=2"), ["args"]),
}


@pytest.mark.parametrize("case", cases(CONFIGURATIONS))
def test_a_changed_configuration_is_refused_before_anything_runs(node, archive, good, case):
    edit, words = CONFIGURATIONS[case]
    archive.edit_json("spec.dump", edit)
    archive.write(node, BAD)
    refused(node, BAD, vgpu_errors.ConfigurationChanged, *words)
    assert node.run(["test", "-e", TRACE], check=False).returncode != 0, "a hook of the archive ran"
    still_restores(node, good)


@pytest.mark.first_row
def test_all_findings_are_listed_at_once(node, archive, good):
    archive.edit_json("spec.dump", capability)
    archive.edit_record(other_model)
    archive.edit_record(requirement("driver.release", "999.1"))
    archive.edit_record(requirement("gpu.count", 7))
    archive.seal(node_key(node))
    archive.write(node, BAD)
    words = ["CAP_SYS_ADMIN", "NVIDIA H200", "999.1", "needed 7"]
    refused(node, BAD, vgpu_errors.ConfigurationChanged, *words)
    still_restores(node, good)


# ---- the node ------------------------------------------------------------------------------------


@contextlib.contextmanager
def moved_away(node, path):
    node.run(["mv", path, f"{path}.away"])
    try:
        yield
    finally:
        node.run(["mv", f"{path}.away", path])


@contextlib.contextmanager
def replaced(node, path, script):
    """A program of the node by a script; `$0.away` is the program."""
    with moved_away(node, path):
        node.write(path, script, 0o755)
        yield


@pytest.mark.parametrize(
    ("device", "error", "words"),
    [
        pytest.param("0", vgpu_errors.NodeUnfit, "Too little device memory is free", id="one-gpu"),
        # How much lies on which of its GPUs a process does not say: then the driver finds out, and the thaw fails.
        pytest.param("all", vgpu_errors.NotEnoughDeviceMemory, "bytes free", id="several-gpus"),
    ],
)
def test_a_full_gpu_is_refused(node, good, device, error, words):
    container = GpuContainer(node).start(node.image("glibc"), mib=8, device=device)
    container.wait_for_step(1)
    container.export(BAD)
    container.remove()
    holder = GpuContainer(node, "holder").start(node.image("glibc"), mib=507, interval_ms=5000)
    try:
        holder.wait_for_step(1)
        held = used_bytes(node)
        done = restore(node, BAD, "--name", "bad", check=False)
        assert done.returncode == 125
        told(done.stderr, error, words)
        assert used_bytes(node) == held
    finally:
        node.run(["podman", "rm", "-af", "-t", "0"])
    nothing_left(node)
    still_restores(node, good)


def test_a_missing_criu_is_podmans_own_finding(node, good):
    with moved_away(node, "/usr/sbin/criu"):
        done = restore(node, GOOD, "--name", "bad", check=False)
    assert done.returncode == 125
    assert "criu" in done.stderr.lower()
    node.run(["podman", "rm", "-i", "bad"])
    still_restores(node, good)


def test_an_old_criu_is_refused(node, good):
    """podman asks CRIU's service for its version, we ask the program that will do the work."""
    script = '#!/bin/sh\n[ "$1" = --version ] && exec echo "Version: 3.11"\nexec "$0.away" "$@"\n'
    with replaced(node, "/usr/sbin/criu", script):
        refused(node, GOOD, vgpu_errors.NodeUnfit, "CRIU is missing or too old", "3.11")
    still_restores(node, good)


def test_the_other_low_level_runtime_is_refused(node, good):
    with configured(node, low_level_runtime=OTHER_RUNTIME[node.row]):
        refused(node, GOOD, vgpu_errors.NodeUnfit, "low-level runtime", LOW_LEVEL[node.row].rpartition("/")[2])
    still_restores(node, good)


def test_a_missing_preload_build_is_refused(node, good):
    build = node.read("/usr/lib/vgpu-snapshot/preload/glibc/current").strip()
    with moved_away(node, f"/usr/lib/vgpu-snapshot/preload/glibc/{build}"):
        refused(node, GOOD, vgpu_errors.NodeUnfit, f"glibc/{build}", "preload")
    still_restores(node, good)


def end_agent(node):
    """Let the agent end as a service manager would; the next client starts another."""
    node.run(["pkill", "-TERM", "-f", AGENT], check=False)
    node.wait_for(["sh", "-c", f"! pgrep -f '{AGENT}'"])


def test_a_dead_agent_is_named_and_not_waited_for(node, good):
    end_agent(node)
    script = "#!/bin/sh\necho 'vgpu-agent: no luck today' >&2\nexit 3\n"
    with replaced(node, "/usr/bin/vgpu-agent", script):
        refused_without_agent(node, vgpu_errors.AgentUnreachable, "status 3")
        container = GpuContainer(node).start(node.image("glibc"))
        step = container.wait_for_step(1)
        done = container.podman("checkpoint", check=False)
        assert done.returncode == 125
        told(done.stderr, vgpu_errors.AgentUnreachable, "status 3", "exit status 21")
        container.goes_on(step)
        container.remove()
    still_restores(node, good)


def refused_without_agent(node, error, *words):
    started = time.monotonic()
    done = restore(node, GOOD, "--name", "bad", check=False)
    assert time.monotonic() - started < 10
    assert done.returncode == 125
    told(done.stderr, error, *words)
    node.run(["podman", "rm", "-i", "bad"])


@pytest.mark.first_row
def test_a_stopped_agent_runs_into_the_deadline(node, good):
    """It accepts connections and answers none."""
    container = GpuContainer(node).start(node.image("glibc"))
    step = container.wait_for_step(1)
    node.run(["vgpu", "ps"])
    node.run(["pkill", "-STOP", "-f", AGENT])
    try:
        with configured(node, deadline_freeze_s=1, deadline_restore_s=2):
            done = container.podman("checkpoint", check=False)
            assert done.returncode == 125
            told(done.stderr, vgpu_errors.DeadlineExceeded, "facts", "exit status 23")
            container.goes_on(step)
            container.remove()
            refused_without_agent(node, vgpu_errors.DeadlineExceeded, "facts")
    finally:
        node.run(["pkill", "-CONT", "-f", AGENT])
        node.run(["podman", "rm", "-af", "-t", "0"])
    still_restores(node, good)


# ---- checkpoints that cannot be written ----------------------------------------------------------


@pytest.fixture
def counter(node):
    container = GpuContainer(node).start(node.image("glibc"), mib=16)
    container.wait_for_step(3)
    yield container
    node.run(["podman", "rm", "-af", "-t", "0"])


@contextlib.contextmanager
def storage_of(node, mib):
    """Container storage with so much space left."""
    storage = "/var/lib/containers"
    used = int(node.run(["df", "--output=used", "-m", storage]).stdout.split()[-1])
    node.run(["mount", "-o", f"remount,size={used + mib}m", storage])
    try:
        yield
    finally:
        node.run(["rm", "-f", f"{storage}/filler"])
        node.run(["mount", "-o", "remount,size=90%", storage])


def goes_on_and_can_be_checkpointed(counter):
    step = counter.goes_on(counter.step())
    counter.podman("checkpoint")
    counter.podman("restore")
    counter.goes_on(step)


def test_too_little_space_is_seen_before_the_freeze(counter):
    with storage_of(counter.host, 16):
        done = counter.podman("checkpoint", check=False)
    assert done.returncode == 125
    told(done.stderr, vgpu_errors.NotEnoughSpace, "bytes free", "exit status 28")
    goes_on_and_can_be_checkpointed(counter)


FILL = "dd if=/dev/zero of=/var/lib/containers/filler bs=64k 2>/dev/null"
FULL = {
    "before the dump": f'{FILL}\nexec "$RT" "$@"',
    "before the seal": f'"$RT" "$@" || exit\n{FILL}\ndd if=/dev/zero of=/var/lib/containers/filler2 bs=1 2>/dev/null',
}


@pytest.mark.parametrize("moment", FULL)
def test_a_disk_that_fills_up_costs_the_checkpoint_and_nothing_else(counter, moment):
    node = counter.host
    script = f'#!/bin/sh\nRT={LOW_LEVEL[node.row]}\ncase " $* " in *" --image-path "*) ;; *) exec "$RT" "$@";; esac\n'
    node.write("/usr/local/bin/filling", script + FULL[moment] + "\n", 0o755)
    with configured(node, low_level_runtime="/usr/local/bin/filling"), storage_of(node, 160):
        done = counter.podman("checkpoint", check=False)
        node.run(["sh", "-c", "rm -f /var/lib/containers/filler*"])
        assert done.returncode == 125
        assert "panic" not in done.stderr
        left = node.run(["sh", "-c", "ls /var/lib/containers/storage/overlay-containers/*/userdata/checkpoint"])
        assert not [name for name in left.stdout.split() if name.endswith(".img") or name.startswith("vgpu-")]
    goes_on_and_can_be_checkpointed(counter)


@pytest.mark.first_row
def test_a_node_without_a_key_says_so_before_the_freeze(counter):
    with moved_away(counter.host, "/etc/vgpu/node.key"):
        done = counter.podman("checkpoint", check=False)
    assert done.returncode == 125
    assert "/etc/vgpu/node.key" in done.stderr
    assert "vgpu setup" in done.stderr
    goes_on_and_can_be_checkpointed(counter)
