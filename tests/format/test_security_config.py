"""The security projection: what an engine's restore changes makes no difference, what an attacker would change does."""

import copy
import json

import pytest

from image_format import canonical_json
from image_format.security_config import differences, load, odd_keys, project

OLD, NEW = "a1" * 32, "b2" * 32
STORE = "/var/lib/containers/storage/overlay-containers"


def config(container_id=OLD):
    """As podman 5.8 writes it, shortened."""
    userdata = f"/run/containers/storage/overlay-containers/{container_id}/userdata"
    return {
        "ociVersion": "1.2.0",
        "process": {
            "terminal": False,
            "user": {"uid": 0, "gid": 0, "umask": 18, "additionalGids": [10, 1]},
            "args": ["sh", "-c", "sleep 1000"],
            "env": ["PATH=/bin"],
            "cwd": "/",
            "capabilities": {
                "bounding": ["CAP_KILL", "CAP_CHOWN"],
                "effective": ["CAP_CHOWN", "CAP_KILL"],
                "permitted": ["CAP_CHOWN", "CAP_KILL"],
            },
            "rlimits": [{"type": "RLIMIT_NPROC", "hard": 18446744073709551615, "soft": 18446744073709551615}],
            "noNewPrivileges": True,
            "apparmorProfile": "containers-default",
            "selinuxLabel": "system_u:system_r:container_t:s0:c1,c2",
        },
        "root": {"path": f"/var/lib/containers/storage/overlay/{container_id[:10]}/merged", "readonly": True},
        "hostname": container_id[:12],
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc", "options": ["nosuid", "noexec", "nodev"]},
            {"destination": "/etc/hosts", "type": "bind", "source": f"{userdata}/hosts", "options": ["bind", "rprivate"]},
            {"destination": "/dev/shm", "type": "bind", "source": f"{STORE}/{container_id}/userdata/shm", "options": ["bind"]},
            {"destination": "/data", "type": "bind", "source": "/srv/data", "options": ["rbind", "ro"]},
        ],
        "hooks": {"createRuntime": [{"path": "/usr/bin/hook", "args": ["hook", f"--id={container_id}"], "env": ["A=1"]}]},
        "annotations": {"io.container.manager": "libpod", "HOOKS": "free text"},
        "linux": {
            "namespaces": [{"type": "pid"}, {"type": "network", "path": f"/run/netns/netns-{container_id[:4]}"}, {"type": "mount"}],
            "devices": [
                {"path": "/dev/nvidia0", "type": "c", "major": 195, "minor": 0, "fileMode": 438, "uid": 0, "gid": 0},
                {"path": "/dev/nvidia-uvm", "type": "c", "major": 508, "minor": 0, "fileMode": 438},
                {"path": "/dev/fuse", "type": "c", "major": 10, "minor": 229, "fileMode": 438},
            ],
            "resources": {
                "devices": [
                    {"allow": False, "access": "rwm"},
                    {"allow": True, "type": "c", "major": 508, "minor": 0, "access": "rwm"},
                    {"allow": True, "type": "c", "major": 10, "minor": 229, "access": "rwm"},
                ],
                "pids": {"limit": 2048},
            },
            "cgroupsPath": f"/libpod_parent/libpod-{container_id}",
            "sysctl": {"net.ipv4.ping_group_range": "0 0"},
            "seccomp": {"defaultAction": "SCMP_ACT_ERRNO", "syscalls": [{"names": ["read"], "action": "SCMP_ACT_ALLOW"}]},
            "maskedPaths": ["/proc/kcore", "/proc/acpi"],
            "readonlyPaths": ["/proc/sys"],
            "mountLabel": "system_u:object_r:container_file_t:s0:c1,c2",
            "uidMappings": [{"containerID": 0, "hostID": 100000, "size": 65536}],
        },
    }  # fmt: skip


def projected(doc, container_id=OLD):
    return project(doc, bundle=f"{STORE}/{container_id}/userdata", container_id=container_id)


def changed(change):
    doc = config()
    change(doc)
    return differences(projected(config()), projected(doc))


def test_an_import_under_a_new_id_makes_no_difference():
    assert differences(projected(config()), projected(config(NEW), NEW)) == []


def test_the_projection_survives_the_record():
    now = projected(config())
    assert differences(json.loads(canonical_json.write(now)), now) == []


def set_uvm_major(doc):
    doc["linux"]["devices"][1]["major"] = 234
    doc["linux"]["resources"]["devices"][1]["major"] = 234


@pytest.mark.parametrize(
    "change",
    [
        set_uvm_major,
        lambda doc: doc.update(hostname="other"),
        lambda doc: doc["process"]["env"].append("LD_PRELOAD=/run/vgpu-preload/libvgpu.so"),
        lambda doc: doc["process"].update(selinuxLabel="system_u:system_r:container_t:s0:c3,c4"),
        lambda doc: doc["linux"].update(mountLabel="x", cgroupsPath="/other"),
        lambda doc: doc["annotations"].update({"io.podman.x": "y"}),
        lambda doc: doc["linux"]["resources"].update(memory={"limit": 1}),
        lambda doc: doc["mounts"].reverse(),
        lambda doc: doc["mounts"].append(
            {"destination": "/run/vgpu", "type": "bind", "source": "/run/vgpu/containers/x"}
        ),
        lambda doc: doc["mounts"].append(
            {"destination": "/run/vgpu-preload/libvgpu.so", "type": "bind", "source": "/usr/lib/x"}
        ),
        lambda doc: doc["mounts"].extend(copy.deepcopy(doc["mounts"])),
        lambda doc: doc["hooks"]["createRuntime"].extend(copy.deepcopy(doc["hooks"]["createRuntime"])),
        lambda doc: doc["hooks"].update(prestart=None, poststop=[]),
        lambda doc: doc["hooks"]["createRuntime"][0].update(env=["INVOCATION_ID=2", "A=1", "_=/usr/bin/dockerd"]),
        lambda doc: doc["linux"]["resources"]["devices"].extend(
            copy.deepcopy(doc["linux"]["resources"]["devices"][1:])
        ),
        lambda doc: doc["process"]["capabilities"]["bounding"].reverse(),
        lambda doc: doc["linux"]["namespaces"].reverse(),
        lambda doc: doc["linux"]["namespaces"][1].update(path="/run/netns/other"),
        lambda doc: doc["mounts"][1].update(options=["rprivate", "bind"]),
        lambda doc: doc["mounts"][1].update(type="none"),
    ],
)
def test_what_an_engine_may_change_makes_no_difference(change):
    assert changed(change) == []


def add_mount(**mount):
    return lambda doc: doc["mounts"].append(mount)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda doc: doc["process"]["capabilities"]["bounding"].append("CAP_SYS_ADMIN"), "capabilities.bounding: CAP_SYS_ADMIN added"),
        (lambda doc: doc["process"]["capabilities"]["effective"].remove("CAP_KILL"), "capabilities.effective: CAP_KILL removed"),
        (lambda doc: doc["process"].update(noNewPrivileges=False), "noNewPrivileges: was true, is false"),
        (lambda doc: doc["process"].update(args=["sh"]), 'args: was ["sh", "-c", "sleep 1000"], is ["sh"]'),
        (lambda doc: doc["process"]["user"].update(uid=7), "user.uid: was 0, is 7"),
        (lambda doc: doc["process"]["user"]["additionalGids"].append(0), "user.additionalGids: 0 added"),
        (lambda doc: doc["process"].update(apparmorProfile="unconfined"), "apparmorProfile: was containers-default, is unconfined"),
        (lambda doc: doc["process"]["rlimits"][0].update(hard=1), "rlimits[RLIMIT_NPROC].hard: was 18446744073709551615, is 1"),
        (lambda doc: doc["root"].update(readonly=False), "rootReadonly: was true, is false"),
        (lambda doc: doc["mounts"][3].update(options=["rbind", "rw"]), "mounts[/data].options: ro removed"),
        (lambda doc: doc["mounts"][3].update(source="/etc"), "mounts[/data].source: was /srv/data, is /etc"),
        (lambda doc: doc["mounts"][1].update(source="/etc/shadow"), "mounts[/etc/hosts].source: was <engine>, is /etc/shadow"),
        (lambda doc: doc["hooks"]["createRuntime"][0].update(path="/tmp/x"), 'hooks.createRuntime: {"args"'),
        (lambda doc: doc["hooks"]["createRuntime"][0].update(env=["A=1", "LD_PRELOAD=/tmp/x.so"]), "hooks.createRuntime[/usr/bin/hook].env: was sha256:"),
        (lambda doc: doc["hooks"]["createRuntime"][0].pop("env"), "hooks.createRuntime[/usr/bin/hook].env: sha256:"),
        (lambda doc: doc["mounts"][3].update(uidMappings=[{"containerID": 0, "hostID": 1000, "size": 1}]), "mounts[/data].uidMappings: "),
        (lambda doc: doc["hooks"].update(poststop=[{"path": "/tmp/x"}]), 'hooks.poststop: [{"args": [], "path": "/tmp/x"}] added'),
        (lambda doc: doc["linux"]["namespaces"].pop(0), 'namespaces: {"joined": false, "type": "pid"} removed'),
        (lambda doc: doc["linux"]["namespaces"][0].update(path="/proc/1/ns/pid"), "namespaces[pid].joined: was false, is true"),
        (lambda doc: doc["linux"]["namespaces"].pop(1), 'namespaces: {"type": "network"} removed'),
        (lambda doc: doc["linux"]["devices"].append({"path": "/dev/sda", "type": "b", "major": 8, "minor": 0}), 'devices: {"fileMode": -1'),
        (lambda doc: doc["linux"]["devices"][2].update(minor=1), "devices[/dev/fuse].minor: was 229, is 1"),
        (lambda doc: doc["linux"]["resources"]["devices"].append({"allow": True, "access": "rwm"}), "deviceRules: was "),
        (lambda doc: doc["linux"]["resources"]["devices"].reverse(), "deviceRules: was "),
        (lambda doc: doc["linux"].pop("seccomp"), "seccomp: was sha256:"),
        (lambda doc: doc["linux"]["sysctl"].update({"kernel.core_pattern": "|/x"}), "sysctl.kernel.core_pattern: |/x added"),
        (lambda doc: doc["linux"]["maskedPaths"].pop(), "maskedPaths: /proc/acpi removed"),
        (lambda doc: doc["linux"].update(readonlyPaths=[]), "readonlyPaths: /proc/sys removed"),
        (lambda doc: doc["linux"]["uidMappings"][0].update(hostID=0), "uidMappings: "),
        (lambda doc: doc["linux"].update(rootfsPropagation="rshared"), 'rootfsPropagation: was "", is rshared'),
        (lambda doc: doc.update(Hooks={"prestart": [{"path": "/tmp/x"}]}), "oddKeys: Hooks added"),
        (lambda doc: doc["process"].update({"arg\u017f": ["x"]}), "oddKeys: process.arg\u017f added"),
        (add_mount(destination="/run/vgpu-evil", type="bind", source="/"), 'mounts: {"destination": "/run/vgpu-evil"'),
        (add_mount(destination="/run/vgpu/../../etc", type="bind", source="/x"), 'mounts: {"destination": "/run/vgpu/../../etc"'),
        (add_mount(destination="/x", type="bind", source=f"{STORE}/{OLD}/../../.."), f'mounts: {{"destination": "/x", "options": [], "source": "{STORE}'),
        (add_mount(destination="/x", type="bind", source=f"/home/{OLD}-x"), f'mounts: {{"destination": "/x", "options": [], "source": "/home/{OLD}-x'),
    ],
)  # fmt: skip
def test_what_an_attacker_would_change_is_said_in_a_line(change, line):
    lines = changed(change)
    assert any(found.startswith(line) for found in lines), lines


def test_a_device_rule_that_comes_again_behind_its_opposite_counts_again():
    everything, no_disk = {"allow": True, "access": "rwm"}, {"allow": False, "type": "b", "access": "rwm"}

    def rules(*entries):
        return projected({"linux": {"resources": {"devices": list(entries)}}})

    signed = rules(everything, no_disk)
    assert differences(signed, rules(everything, no_disk, everything)) != []
    assert differences(signed, rules(everything, everything, no_disk, no_disk)) == []


def test_a_container_named_like_a_path_does_not_make_it_the_engines():
    doc = config()
    signed = project(doc, bundle="/run/containerd/task/default/etc", container_id="etc")
    doc["mounts"].append({"destination": "/x", "type": "bind", "source": "/etc"})
    now = project(doc, bundle="/run/containerd/task/default/etc", container_id="etc")
    assert differences(signed, now) == [
        'mounts: {"destination": "/x", "options": [], "source": "/etc", "type": "bind"} added'
    ]


@pytest.mark.parametrize("bundle", ["", "/", "relative"])
def test_a_bundle_that_is_no_folder_covers_nothing(bundle):
    doc = {"mounts": [{"destination": "/x", "type": "bind", "source": "/etc"}]}
    assert project(doc, bundle=bundle, container_id="c")["mounts"][0]["source"] == "/etc"


def test_a_source_in_the_bundle_is_the_engines():
    doc = {
        "mounts": [
            {"destination": "/x", "type": "bind", "source": "/run/b/hosts"},
            {"destination": "/y", "type": "bind", "source": "/run/bb"},
        ]
    }
    sources = [mount["source"] for mount in project(doc, bundle="/run/b/", container_id="c")["mounts"]]
    assert sources == ["<engine>", "/run/bb"]


def test_another_version_of_the_projection_is_a_difference():
    signed = projected(config()) | {"projection": 2}
    assert differences(signed, projected(config())) == ["projection: version 2 was signed, this version makes 1"]


def test_keys_in_free_text_are_not_odd():
    assert odd_keys(config()) == []
    assert odd_keys({"linux": {"Seccomp": 1, "sysctl": {"ARGS": "x"}}, "mounts": [{"OPTIONS": []}]}) == [
        "linux.Seccomp",
        "mounts.OPTIONS",
    ]


@pytest.mark.parametrize("text", ["", "[]", "1", '{"a":1,"a":2}', '{"process":{"args":[],"args":["x"]}}'])
def test_a_config_that_two_readers_read_differently_is_refused(text):
    with pytest.raises(ValueError):
        load(text)


@pytest.mark.parametrize("doc", [{}, {"process": None, "mounts": {}, "linux": []}, {"hooks": [], "mounts": [1, None]}])
def test_strange_shapes_have_a_projection(doc):
    assert differences(projected(doc), projected({})) == []


def test_it_is_standard_library_only():
    import subprocess
    import sys

    code = "import sys, image_format.security_config; print([m for m in sys.modules if m.split('.')[0] in ('blake3','cryptography','zstandard')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
