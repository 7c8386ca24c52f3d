"""Fuzz targets: the agent, the preload, the hook, the shim, engines' files and the setup."""

import base64
import contextlib
import copy
from dataclasses import replace

from gpu_state import (
    fitness,
    known_containers,
    leases,
    node_facts,
    preload_frames,
    requests,
)
from gpu_state.communicators import Communicators
from gpu_state.nvml_links import Link
from gpu_state.open_descriptors import read_token
from gpu_state.preload_frames import FrameError, FrameReader, Hello
from gpu_state.preload_link import GateState
from gpu_state.preload_objects import Holdings, shares_from_json
from gpu_state.processes import GpuProcess
from image_format.record import Record, Requirement
from oci_hook import edits, injection, settings, state
from oci_hook.injection import parse_spec
from runtime_shim import arguments, low_level, restore
from runtime_shim.record_building import with_groups
from tests.format.make_shared_vectors import Shared
from tests.format.make_vectors import (
    CONFIG,
    base_record,
)
from tests.fuzz.target import SCRATCH, Target, as_bytes, in_file
from vgpu_errors import VgpuError
from vgpu_errors import from_json as error_from_json

# ---- the agent and the preload -------------------------------------------------------------------

UUID = "GPU-6f0c4d1e-2b6a-4d0e-9a61-0d5a6c3b2f10"
HELLO = {
    "pid": 7, "build_id": "aa11", "libc": "glibc", "driver_version": 13000, "devices": [{"uuid": UUID}], "mode": "staged",
    "protocol": 2, "phase": "open",
}  # fmt: skip
OBJECT = {
    "id": 1, "size": 2 << 20, "device": 0, "uuid": UUID, "kind": "alloc", "requested": 5,
    "mappings": [{"va": "0x7f0000000000", "size": 2 << 20, "offset": 0, "access": [[0, 3]]}],
}  # fmt: skip
IMPORT = {
    "id": 9,
    "kind": "import",
    "size": 2 << 20,
    "mappings": OBJECT["mappings"],
    "exporter": {"process": 8, "object": 1},
}
SHARES = {
    "shares": [
        {"role": "exporter", **OBJECT, "shared": {"ways": ["fd"], "peers": [8], "peer_count": 1}},
        {"role": "importer", **IMPORT},
    ]
}
GATE = {"passed": 3, "waiting": 1, "inside": 0, "capturing": False, "idle": True}
RANK = {
    "library": "nccl", "version": "2.28.3", "id": "0f" * 16, "rank": 1, "size": 2, "device": 0,
    "sequence": {"collectives": 7, "pointToPoint": 2},
}  # fmt: skip
TEAM = {"name": "6", "pe": 0, "size": 2, "parent": "world"}
COMMUNICATORS = {
    "communicators": [RANK, RANK | {"parent": "0f" * 16, "split": {"color": 1, "key": 0}, "finalized": True}],
    "nvshmem": [{"library": "nvshmem", "version": "3.4.5", "pe": 1, "size": 4, "device": 0, "teams": [TEAM]}],
    "starting": 1,
    "unlisted": 2,
}
HOLDINGS = {
    "objects": [OBJECT | {"shared": {"ways": ["ipc"], "peers": [8], "peer_count": 2}}],
    "imports": [IMPORT],
    "driver_held": [{"kind": "small", "count": 3, "bytes": 4096}],
    "blockers": [{"kind": "ipc", "va": "0x7f0000000000", "bytes": 1, "what": "an import"}],
}
IMPORTED = OBJECT | {"id": 9, "of": "8/1", "kind": "opened"}
PARKED = {"number": 9, "of": "8/1", "closeOnExec": True, "token": "0" * 16}
LEASE = {
    "lease": "a" * 32, "container": "0f3c", "cgroup": "/c", "owner": {"pid": 1, "start_time": 2},
    "processes": [{"pid": 7, "start_time": 3, "comm": "train"}], "unfreeze_cgroup": None, "device_map": {UUID: UUID},
    "staged": {
        "processes": [{"pid": 7, "start_time": 3, "comm": "train", "ns_pid": 7, "objects": [OBJECT], "imports": [IMPORTED], "descriptors": [PARKED]}],
        "store": "/run/x", "is_complete": False, "is_suspend": False, "is_suspended": True,
    },
}  # fmt: skip
STATE = {
    "id": "0f3c", "bundle": "/b", "pid": 7, "cgroup": "/c", "root": None, "runtime": "/usr/bin/runc", "engine": "podman",
    "created": 1, "preload_build_id": "aa11", "preload_libc": "glibc", "last_checkpoint": {"time": 1, "image_path": "/i"},
}  # fmt: skip
FACTS = node_facts.NodeFacts(
    "580.1", "13.0", (node_facts.DeviceFacts(0, UUID, "NVIDIA H200", 1 << 37),), "4.2",
    node_facts.RuntimeFacts("runc", "1.3.6"), "6.18", 2, "x86_64", ("avx2",), {"glibc": "aa11"},
    links=(Link(UUID, UUID.replace("0", "1"), True, None, 4, "node"),), nccl_version="2.28.9",
).to_json()  # fmt: skip
PROCESS = GpuProcess(7, 7, "train", "running", devices=(UUID,), gpu_bytes=1).to_json()
REQUEST = {"id": 1, "verb": "freeze", "args": {
    "container": "0f3c", "cgroup": "/c", "deadline_s": 5, "device_map": {UUID: UUID}, "image_path": "/i", "keep": True,
    "folders": ["/a"], "group": {"name": "train", "members": ["0f3c", "77aa"]},
}}  # fmt: skip


def asked(line):
    """A request, and every way in which a verb takes its arguments."""
    request = requests.Request.from_line(line)
    args = request.args
    takes = [
        args.container, args.deadline_s, args.device_map, lambda: args.text("cgroup"), lambda: args.text_or_none("image_path"),
        lambda: args.flag("keep"), lambda: args.flag_or("keep", default=False), lambda: args.folders("folders"),
        lambda: args.seconds_or("deadline_s", 1.0), args.group,
    ]  # fmt: skip
    problems = [problem for take in takes if (problem := taken(take)) is not None]
    if problems:
        raise problems[0]
    return request


def taken(take):
    try:
        take()
    except VgpuError as error:
        return error
    return None


def framed(data):
    """Everything that a preload may send before and after HELLO."""
    frames = list(FrameReader().feed(data))
    for frame in frames:
        for parse in (Hello.from_json, Holdings.from_json):
            with contextlib.suppress(FrameError):
                parse(frame.payload)
    return frames


def containers_in(data):
    folder = SCRATCH / "state"
    folder.mkdir(exist_ok=True)
    (folder / "0f3c.json").write_bytes(data)
    (folder / "ffff.json").write_bytes(as_bytes(STATE | {"id": "ffff"}))
    found = known_containers.known_containers(folder)
    assert "ffff" in [container.id for container in found], "a damaged file hides the others"
    return found


def leases_in(data):
    folder = SCRATCH / "journal"
    journal = leases.Journal(folder)
    (folder / "0f3c.json").write_bytes(data)
    (folder / "ffff.json").write_bytes(as_bytes(LEASE | {"container": "ffff"}))
    found = [lease.container for lease in journal.entries()]
    assert "ffff" in found, "a damaged entry hides the others"
    return found


def fitness_of(data):
    """What `vgpu inspect` says of a record that nobody vouches for."""
    facts = node_facts.NodeFacts.from_json(FACTS)
    record = Record.from_bytes(data)
    return [str(finding) for finding in fitness.findings(record, facts, {UUID: 1})], fitness.device_map(record, facts)


KEYS = ("kernel.version", "cpu.flags", "criu.version", "runtime.name", "driver.release", "cuda.version", "gpu.count")
FIT_RECORD = replace(
    base_record(), requirements=tuple(Requirement(key, "9" * 5000 if key == "criu.version" else "6.18") for key in KEYS)
).to_bytes()
SHARED_RECORD = Shared().record.stamped()
GROUPS = {key: SHARED_RECORD.to_json()[key] for key in ("communicators", "nvshmem")}


def groups_of(doc):
    """What an agent relays of communication libraries; whatever it is, the record can be written and read."""
    record = with_groups(SHARED_RECORD, node_facts.NodeFacts.from_json(FACTS), doc)
    return Record.from_bytes(record.stamped().to_bytes())


HELLO_FRAME = preload_frames.Frame(1, 1, HELLO).to_bytes()
HOLDINGS_FRAME = preload_frames.Frame(11, 2, HOLDINGS, 2).to_bytes()
AGENT = {
    "agent request": Target(asked, as_bytes(REQUEST), "json bytes"),
    "error of the agent": Target(lambda doc: error_from_json(doc).to_json(), VgpuError(what="x").to_json(), "object"),
    "preload frames": Target(framed, HELLO_FRAME + HOLDINGS_FRAME, "bytes", FrameError),
    "preload hello": Target(Hello.from_json, HELLO, "object", FrameError),
    "preload holdings": Target(Holdings.from_json, HOLDINGS, "object", FrameError),
    "preload shares": Target(shares_from_json, SHARES, "object", FrameError),
    "placeholder": Target(read_token, b"VGPUHELD" + bytes(range(8))),
    "state of a gate": Target(GateState.from_json, GATE, "object"),
    "preload communicators": Target(Communicators.from_json, COMMUNICATORS, "object", FrameError),
    "state files": Target(containers_in, as_bytes(STATE), "json bytes"),
    "journal": Target(leases_in, as_bytes(LEASE), "json bytes"),
    "fitness of a record": Target(fitness_of, FIT_RECORD, "json bytes"),
    "fitness of a record with shared memory": Target(fitness_of, SHARED_RECORD.to_bytes(), "json bytes"),
    "groups that processes told": Target(groups_of, GROUPS, "object"),
    "node facts": Target(node_facts.NodeFacts.from_json, FACTS, "object", node_facts.NodeFactsError),
}

# ---- the hook and the shim -----------------------------------------------------------------------

SETTINGS_TEXT = (
    "# comment\nlow_level_runtime = /usr/bin/crun\ndeadline_freeze_s = 5\nstaging_reserve = 40G\nmode = staged\n"
)
GPU_CONFIG = CONFIG | {
    "linux": {**CONFIG.get("linux", {}), "devices": [{"path": "/dev/nvidia0", "type": "c", "major": 195, "minor": 0}]},
    "annotations": {"vgpu.snapshot/inject": "true"},
}
OCI_STATE = {
    "ociVersion": "1.2.0",
    "id": "0f3c",
    "pid": 7,
    "status": "creating",
    "bundle": "/b",
    "annotations": {"a": "b"},
}
COMMAND_LINES = [
    "vgpu-runtime", "--root", "/run/runc", "--log=/l", "--systemd-cgroup", "create", "checkpoint", "restore", "exec", "--bundle",
    "-b", "/b", "--pid-file", "/p", "--image-path=/i", "--", "-d", "-process", "id", "--leave-running", "--detach=false", "-",
]  # fmt: skip


def planned_edits(data):
    """What the hook does to a config.json: decide, edit, and take its own edits out again."""
    found = injection.plan_injection(settings.Settings(), "/nonexistent", "0f3c", data)
    stripped = injection.without_own_edits(data)
    spec = parse_spec(data)
    if spec is not None:
        context = edits.Context(
            libc="glibc",
            build_id="aa11",
            library_source="/usr/lib/vgpu-snapshot/preload/glibc/aa11/libvgpu.so",
            control_source="/run/vgpu/containers/0f3c",
            links={},
        )
        edits.apply_edits(spec, edits.plan_edits(spec, context))
        once = copy.deepcopy(spec)
        edits.apply_edits(spec, edits.plan_edits(spec, context))
        assert spec == once, "the edits are not idempotent"
    return found, stripped


def parsed_line(line):
    call = arguments.parse(["vgpu-runtime", *line])
    assert call.argv_with() == ["vgpu-runtime", *line], "an untouched command line changed"
    call.argv_with({"image-path": "/x", "leave-running": True, "work-path": None})
    return call.container_id, call.remaining, call.asks_for_help, call.get("bundle"), call.has("detach")


HOOK = {
    "runtime.conf": Target(lambda text: settings.parse_settings(text, "c"), SETTINGS_TEXT, "text"),
    "runtime.conf file": Target(in_file(lambda path: settings.read_settings(str(path))), SETTINGS_TEXT.encode()),
    "runtime.conf, not strict": Target(
        lambda text: settings.parse_settings(text, "c", is_strict=False), SETTINGS_TEXT, "text", ()
    ),
    "config.json edits": Target(planned_edits, as_bytes(GPU_CONFIG), "json bytes"),
    "OCI state of a hook": Target(lambda data: state.state_from_hook(settings.Settings(), data), as_bytes(OCI_STATE), "json bytes"),
    "cgroup file": Target(
        lambda text: [state.cgroup_from(text, is_v2=is_v2) for is_v2 in (True, False)],
        "12:freezer:/a\n0::/machine.slice/x\n", "text", (),
    ),
    "command line of the shim": Target(parsed_line, COMMAND_LINES, "words", ()),
    "version of a runtime": Target(low_level.parse_version, "runc version 1.3.6\ncommit: v1\n", "text", ()),
    "pid file": Target(in_file(lambda path: restore.read_pid(str(path))), b"4711\n", "bytes", ()),
}  # fmt: skip

# ---- engines and the command line ----------------------------------------------------------------

CONTAINERS_CONF = (
    b'[engine]\nhooks_dir = ["/opt/hooks"]\nruntime = "crun"\n[engine.runtimes]\ncrun = ["/usr/bin/crun"]\n'
)


def targets_of_engines():
    from containerd_integration import cdi, driver_files
    from containerd_integration import existing_settings as containerd_settings
    from docker_integration import existing_settings as docker_settings
    from podman_integration import existing_settings as podman_settings
    from vgpu_cli.installed_files import InstalledFiles

    manifest = {
        "formatVersion": 1, "directories": ["/etc/vgpu"],
        "files": {"/etc/x": {
            "sha256": "a" * 64, "targets": ["podman"], "before": {"content": base64.b64encode(b"x").decode(), "mode": 420},
            "earlierSha256": None, "keys": [[["a", "b"], 1]],
        }},
    }  # fmt: skip
    manifest_name = "etc/vgpu/setup.json"

    def podman_before(data):
        path = SCRATCH / "podman/etc/containers/containers.conf"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return podman_settings.configuration_before_ours(SCRATCH / "podman")

    def containerd_before(text):
        main = containerd_settings.parse(text, "config.toml")
        return containerd_settings.documents_before_ours(SCRATCH / "containerd", main)

    return {
        "containers.conf": Target(podman_before, CONTAINERS_CONF),
        "containerd's config.toml": Target(
            containerd_before, 'version = 3\nimports = ["/etc/containerd/conf.d/*.toml"]\n[plugins]\n[plugins."a"]\nb = 1\n', "text"
        ),
        "docker's daemon.json": Target(docker_settings.parse, b'{"runtimes": {"a": {"path": "/b"}}}', "json bytes"),
        "podman's version": Target(podman_settings.parse_version, "podman version 5.8.6", "text", ()),
        "CDI mount of the command line": Target(cdi.parse_mount, "/a:/b:ro,bind", "text", (VgpuError, ValueError)),
        "loader cache": Target(driver_files.parse_loader_cache, " libcuda.so.1 (libc6,x86-64) => /usr/lib/libcuda.so.1\n", "text", ()),
        "setup manifest": Target(
            in_file(lambda _: InstalledFiles.load(SCRATCH / "setup"), f"setup/{manifest_name}"), as_bytes(manifest), "json bytes"
        ),
    }  # fmt: skip


NODE = AGENT | HOOK | targets_of_engines()
