"""The CDI spec: the published rules, discovery in a tree of files, and the command."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import jsonschema
import pytest

from containerd_integration import driver_files
from containerd_integration.cdi import DriverFiles, Mount, cdi_spec, lowest_version, parse_mount
from vgpu_cli.main import main

TEXT = {"type": "string", "minLength": 1}
EDITS = {
    "type": "object",
    "minProperties": 1,
    "additionalProperties": False,
    "properties": {
        "env": {"type": "array", "items": {"type": "string", "pattern": "^[^=]+=.*$"}},
        "deviceNodes": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["path"],
                "additionalProperties": False,
                "properties": {"path": {"type": "string", "pattern": "^/"}, "hostPath": TEXT},
            },
        },
        "mounts": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["hostPath", "containerPath"],
                "additionalProperties": False,
                "properties": {
                    "hostPath": TEXT,
                    "containerPath": TEXT,
                    "type": {"const": "bind"},
                    "options": {"type": "array", "items": TEXT},
                },
            },
        },
    },
}
# The part of the CDI 0.5.0 schema that this spec may use; unknown fields make an engine refuse the file.
SCHEMA = {
    "type": "object",
    "required": ["cdiVersion", "kind", "devices"],
    "additionalProperties": False,
    "properties": {
        "cdiVersion": {"enum": ["0.3.0", "0.4.0", "0.5.0"]},
        "kind": {
            "type": "string",
            "pattern": r"^[A-Za-z][A-Za-z0-9_.-]*[A-Za-z0-9]/[A-Za-z][A-Za-z0-9_-]*[A-Za-z0-9]$",
        },
        "devices": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["name", "containerEdits"],
                "additionalProperties": False,
                "properties": {
                    "name": {"type": "string", "pattern": r"^[A-Za-z0-9]([A-Za-z0-9_.:-]*[A-Za-z0-9])?$"},
                    "containerEdits": EDITS,
                },
            },
        },
        "containerEdits": EDITS,
    },
}
LIBCUDA = (Mount("/drv/libcuda.so.580", "/usr/lib64/libcuda.so.1"),)
FOUND = [
    DriverFiles(
        gpu_nodes=(("0", "/dev/nvidia0"), ("1", "/dev/nvidia1")), control_nodes=("/dev/nvidiactl",), mounts=LIBCUDA
    ),
    DriverFiles(gpu_nodes=(("3", "/dev/nvidia3"),)),
    DriverFiles(mounts=LIBCUDA),
    DriverFiles(),
]


def put(root: Path, name: str, link: str | None = None) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if link is None:
        path.write_bytes(b"")
    else:
        path.symlink_to(link)


@pytest.mark.parametrize("found", FOUND)
@pytest.mark.parametrize("extra", [(), (Mount("/run/x", "/run/x", ("rw", "bind")),)])
def test_spec_follows_the_schema(found, extra):
    jsonschema.validate(cdi_spec(found, extra), SCHEMA)


def test_device_names_are_unique_and_all_has_every_gpu():
    devices = {device["name"]: device["containerEdits"] for device in cdi_spec(FOUND[0])["devices"]}
    assert list(devices) == ["0", "1", "all"]
    assert [node["path"] for node in devices["all"]["deviceNodes"]] == ["/dev/nvidia0", "/dev/nvidia1"]
    assert [node["path"] for node in devices["1"]["deviceNodes"]] == ["/dev/nvidia1"]


@pytest.mark.parametrize(("names", "version"), [(["all"], "0.3.0"), (["0", "all"], "0.5.0")])
def test_version_is_the_lowest_that_covers_the_fields(names, version):
    assert lowest_version({"devices": [{"name": name} for name in names]}) == version


def test_a_mount_with_its_type_needs_version_0_4():
    assert cdi_spec(FOUND[2], ())["cdiVersion"] == "0.4.0"


def test_spec_sets_no_loader_variable():
    """podman appends a CDI variable: the container's own LD_LIBRARY_PATH or LD_PRELOAD would be lost."""
    variables = re.findall(r'"(\w+)=', json.dumps(cdi_spec(FOUND[0])))
    assert set(variables) == {"NVIDIA_VISIBLE_DEVICES"}


def test_libraries_are_mounted_read_only_in_both_layouts(tmp_path):
    put(tmp_path, "usr/lib/x86_64-linux-gnu/libcuda.so.580.1")
    put(tmp_path, "usr/lib/x86_64-linux-gnu/libcuda.so.1", "libcuda.so.580.1")
    mounts = driver_files.find_driver_files(root=tmp_path).mounts
    folders = {str(Path(mount.container_path).parent) for mount in mounts}
    assert len(folders) == 2
    assert "/usr/lib64" in folders
    for mount in mounts:
        assert mount.host_path == "/usr/lib/x86_64-linux-gnu/libcuda.so.580.1"
        assert Path(mount.container_path).name == "libcuda.so.1"
        assert set(mount.options) == {"ro", "nosuid", "nodev", "bind", "rprivate"}


def test_configured_folder_wins_over_everything(tmp_path):
    put(tmp_path, "usr/lib/x86_64-linux-gnu/libcuda.so.1")
    put(tmp_path, "opt/driver/libcuda.so.1")
    cached = {"libcuda.so.1": str(tmp_path / "usr/lib/x86_64-linux-gnu/libcuda.so.1")}
    folders = driver_files.library_folders("/opt/driver")
    assert driver_files.find_library("libcuda.so.1", tmp_path, folders, cached) == "/opt/driver/libcuda.so.1"


def test_loader_cache_wins_over_the_usual_folders(tmp_path):
    put(tmp_path, "usr/lib64/libcuda.so.1")
    put(tmp_path, "opt/cached/libcuda.so.1")
    cached = {"libcuda.so.1": str(tmp_path / "opt/cached/libcuda.so.1")}
    found = driver_files.find_library("libcuda.so.1", tmp_path, driver_files.library_folders(None), cached)
    assert found == "/opt/cached/libcuda.so.1"


def test_library_named_by_release_keeps_its_full_name(tmp_path):
    put(tmp_path, "usr/lib64/libnvidia-gpucomp.so.580.159.04")
    mounts = driver_files.find_driver_files(root=tmp_path).mounts
    assert {Path(mount.container_path).name for mount in mounts} == {"libnvidia-gpucomp.so.580.159.04"}


def test_only_what_exists_is_named(tmp_path):
    for name in ("nvidia0", "nvidia12", "nvidia2", "nvidiactl", "nvidia-uvm", "nvidia-caps", "nvidiax"):
        put(tmp_path, f"dev/{name}")
    put(tmp_path, "usr/lib64/libcuda.so.1", "nowhere")
    found = driver_files.find_driver_files(root=tmp_path)
    assert found.gpu_nodes == (("0", "/dev/nvidia0"), ("2", "/dev/nvidia2"), ("12", "/dev/nvidia12"))
    assert found.control_nodes == ("/dev/nvidiactl", "/dev/nvidia-uvm")
    assert found.mounts == ()


def test_loader_cache_is_read_for_the_right_word_size():
    text = (
        "2 libs found in cache `/etc/ld.so.cache'\n"
        "\tlibcuda.so.1 (libc6) => /lib/i386-linux-gnu/libcuda.so.1\n"
        "\tlibcuda.so.1 (libc6,x86-64) => /lib/x86_64-linux-gnu/libcuda.so.1\n"
        "\tlibcuda.so.1 (libc6,x86-64) => /opt/second/libcuda.so.1\n"
        "Cache generated by: ldconfig (Debian GLIBC 2.36) stable release version 2.36\n"
    )
    assert driver_files.parse_loader_cache(text) == {"libcuda.so.1": "/lib/x86_64-linux-gnu/libcuda.so.1"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/a:/b", Mount("/a", "/b")),
        ("/a:/b:rw,rbind", Mount("/a", "/b", ("rw", "rbind"))),
        ("/a:/b:rw", Mount("/a", "/b", ("rw", "bind"))),
    ],
)
def test_extra_mount_is_read(text, expected):
    assert parse_mount(text) == expected


@pytest.mark.parametrize("text", ["", "/a", "a:/b", "/a:b", ":/b"])
def test_extra_mount_that_is_none_is_refused(text, tmp_path, capsys):
    assert main(["setup", "cdi", "--cdi-mount", text, "--destdir", str(tmp_path)]) == 10
    assert "--cdi-mount" in capsys.readouterr().err
    assert os.listdir(tmp_path) == []


def test_command_writes_again_after_a_driver_change(tmp_path):
    put(tmp_path, "dev/nvidia0")
    assert main(["setup", "podman", "--destdir", str(tmp_path)]) == 0
    put(tmp_path, "dev/nvidia1")
    assert main(["setup", "cdi", "--cdi-mount", "/run/x:/run/x:rw", "--destdir", str(tmp_path)]) == 0
    spec = json.loads((tmp_path / "etc/cdi/vgpu.json").read_text())
    jsonschema.validate(spec, SCHEMA)
    assert [device["name"] for device in spec["devices"]] == ["0", "1", "all"]
    assert spec["containerEdits"]["mounts"] == [
        {"hostPath": "/run/x", "containerPath": "/run/x", "type": "bind", "options": ["rw", "bind"]}
    ]


def test_node_without_gpu_gets_no_spec_and_is_told(tmp_path, capsys):
    assert main(["setup", "podman", "--destdir", str(tmp_path)]) == 0
    assert not (tmp_path / "etc/cdi").exists()
    assert "vgpu setup cdi" in capsys.readouterr().out


def test_driver_folder_from_the_settings_file_is_used(tmp_path):
    put(tmp_path, "opt/driver/libcuda.so.1")
    assert main(["setup", "podman", "--driver-dir", "/opt/driver", "--destdir", str(tmp_path)]) == 0
    (tmp_path / "etc/cdi/vgpu.json").unlink()
    assert main(["setup", "cdi", "--destdir", str(tmp_path)]) == 0
    assert "/opt/driver/libcuda.so.1" in (tmp_path / "etc/cdi/vgpu.json").read_text()
