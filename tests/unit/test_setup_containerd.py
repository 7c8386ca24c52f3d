"""`vgpu setup containerd` into another tree: the drop-in in both config versions, the import, and undo."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from containerd_integration import config
from containerd_integration.runtime_class import runtime_class
from containerd_integration.toml_text import to_toml
from vgpu_cli.main import main
from vgpu_errors import BadConfiguration

MAIN, DROP_IN = "etc/containerd/config.toml", "etc/containerd/conf.d/50-vgpu.toml"
V2, V3 = config.PLUGIN_V2, config.PLUGIN_V3


def put(root: Path, name: str, text: str) -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def setup(root: Path, *arguments: str) -> int:
    return main(["setup", "containerd", *arguments, "--destdir", str(root)])


def read(root: Path, name: str) -> dict:
    return tomllib.loads((root / name).read_text())


def handler(document: dict, plugin: str) -> dict:
    return document["plugins"][plugin]["containerd"]["runtimes"]["vgpu-runtime"]


def test_node_without_configuration_gets_version_3_and_the_import(tmp_path):
    assert setup(tmp_path) == 0
    assert read(tmp_path, MAIN) == {"version": 3, "imports": ["/etc/containerd/conf.d/*.toml"]}
    found = handler(read(tmp_path, DROP_IN), V3)
    assert found["runtime_type"] == "io.containerd.runc.v2"
    assert found["options"] == {"BinaryName": "/usr/bin/vgpu-runtime"}
    assert found["pod_annotations"] == found["container_annotations"] == ["vgpu.snapshot/*"]


@pytest.mark.parametrize(
    ("main", "installed", "expected"),
    [
        (None, (1, 7, 24), 2),
        (None, (2, 1, 9), 3),
        (None, None, 3),
        ({"version": 2}, (2, 1, 9), 2),
        ({"version": 3}, None, 3),
        ({"version": 4}, None, 3),
    ],
)
def test_drop_in_is_never_newer_than_the_main_file(main, installed, expected):
    assert config.config_version(main, installed) == expected


@pytest.mark.parametrize("main", [{}, {"version": 1}, {"version": "3"}])
def test_version_1_file_is_refused_with_the_way_out(main):
    with pytest.raises(BadConfiguration, match="version 1") as caught:
        config.config_version(main, (1, 7, 24))
    assert "containerd config migrate" in caught.value.remedy


def test_version_2_drop_in_carries_the_section_that_it_replaces(tmp_path):
    put(
        tmp_path,
        MAIN,
        f'version = 2\nimports = ["/etc/containerd/conf.d/*.toml"]\n[plugins."{V2}"]\nsandbox_image = "pause:3"\n[plugins."{V2}".containerd.runtimes.mine]\nruntime_type = "io.containerd.mine.v2"\n',
    )
    setup(tmp_path)
    section = read(tmp_path, DROP_IN)["plugins"][V2]
    assert section["sandbox_image"] == "pause:3"
    assert set(section["containerd"]["runtimes"]) == {"mine", "runc", "vgpu-runtime"}
    assert section["enable_cdi"] is True


def test_version_2_drop_in_builds_on_the_last_of_the_other_drop_ins(tmp_path):
    put(tmp_path, MAIN, f'version = 2\nimports = ["conf.d/*.toml"]\n[plugins."{V2}"]\nsandbox_image = "main"\n')
    put(
        tmp_path,
        "etc/containerd/conf.d/10-other.toml",
        f'version = 2\n[plugins."{V2}"]\nsandbox_image = "other"\nenable_cdi = false\n',
    )
    with pytest.raises(BadConfiguration):
        config.main_file("x", read(tmp_path, MAIN), 2)  # a relative pattern is not recognised as ours
    put(tmp_path, MAIN, (tmp_path / MAIN).read_text().replace('"conf.d', '"/etc/containerd/conf.d'))
    setup(tmp_path)
    section = read(tmp_path, DROP_IN)["plugins"][V2]
    assert section["sandbox_image"] == "other"
    assert section["enable_cdi"] is False, "what the administrator decided stays"


def test_import_is_added_to_a_main_file_without_one_and_taken_back(tmp_path):
    text = '# mine\nversion = 3\n[plugins."io.containerd.cri.v1.images"]\nsnapshotter = "overlayfs"\n'
    path = put(tmp_path, MAIN, text)
    setup(tmp_path)
    found = read(tmp_path, MAIN)
    assert found.pop("imports") == ["/etc/containerd/conf.d/*.toml"]
    assert found == tomllib.loads(text)
    setup(tmp_path)
    setup(tmp_path, "--undo")
    assert path.read_text() == text


def test_main_file_that_imports_the_folder_is_not_touched(tmp_path):
    text = 'version = 3\nimports = ["/etc/containerd/conf.d/*.toml"]\n'
    path = put(tmp_path, MAIN, text)
    inode = path.stat().st_ino
    setup(tmp_path)
    assert (path.read_text(), path.stat().st_ino) == (text, inode)


def test_list_of_imports_is_never_edited(tmp_path, capsys):
    text = 'version = 3\nimports = ["/etc/other/*.toml"]\n'
    path = put(tmp_path, MAIN, text)
    assert setup(tmp_path) == BadConfiguration.exit_code
    assert '"/etc/containerd/conf.d/*.toml"' in capsys.readouterr().err
    assert path.read_text() == text
    assert not (tmp_path / DROP_IN).exists()


def test_broken_main_file_is_named(tmp_path, capsys):
    put(tmp_path, MAIN, "version = = 3\n")
    assert setup(tmp_path) == BadConfiguration.exit_code
    assert "/etc/containerd/config.toml" in capsys.readouterr().err


def test_runtime_class_names_the_handler_of_the_drop_in():
    doc = json.loads(runtime_class())
    assert (doc["apiVersion"], doc["kind"]) == ("node.k8s.io/v1", "RuntimeClass")
    assert doc["handler"] == config.HANDLER


texts = st.text(st.characters(exclude_categories=["Cs"]))
scalars = st.one_of(st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False), texts)
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3), max_leaves=5)
tables = st.recursive(
    st.dictionaries(texts, values, max_size=3),
    lambda inner: st.dictionaries(texts, st.one_of(values, inner), max_size=3),
)


@given(tables)
def test_every_document_survives_writing_and_reading(document):
    assert tomllib.loads(to_toml(document)) == document


def test_tables_in_lists_survive():
    document = {"plugins": {"a": [{"b": 1, "c": {"d": [True, "x"]}}, {}]}}
    assert tomllib.loads(to_toml(document)) == document


def test_what_toml_cannot_hold_is_refused():
    with pytest.raises(TypeError):
        to_toml({"a": None})


@pytest.mark.parametrize(("version", "is_said"), [(2, True), (3, False)])
def test_a_drop_in_that_copies_other_files_says_so(tmp_path, capsys, version, is_said):
    """The copy hides later changes of the file that it was made of."""
    put(tmp_path, MAIN, f"version = {version}\n")
    assert setup(tmp_path) == 0
    assert ("run the setup again after you change them" in capsys.readouterr().out) is is_said
