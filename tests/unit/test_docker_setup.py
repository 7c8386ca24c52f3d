"""`vgpu setup docker` into another tree: our keys in the administrator's daemon.json, and out of it again."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from docker_integration import daemon_json, json_keys
from vgpu_cli.main import main
from vgpu_errors import BadConfiguration

DAEMON_JSON = "etc/docker/daemon.json"
OURS = {
    "runtimes": {"vgpu-runtime": {"path": "/usr/bin/vgpu-runtime"}},
    "experimental": True,
    "features": {"cdi": True},
}


def put(root: Path, text: str, mode: int = 0o644) -> Path:
    path = root / DAEMON_JSON
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)
    return path


def setup(root: Path, *arguments: str) -> int:
    return main(["setup", "docker", *arguments, "--destdir", str(root)])


def read(root: Path) -> dict:
    return json.loads((root / DAEMON_JSON).read_text())


def test_a_node_without_the_file_gets_our_keys_and_loses_all_with_undo(tmp_path):
    assert setup(tmp_path) == 0
    assert read(tmp_path) == OURS
    assert (tmp_path / "etc/vgpu/node.key").exists()
    assert setup(tmp_path, "--undo") == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "text",
    [
        '{"log-level":"debug"}',
        '{\n\t"bridge": "none",\n\t"data-root": "/srv/d\\u00f6cker"\n}',
        '{"runtimes": {"nvidia": {"path": "/usr/bin/nvidia-container-runtime", "args": []}}, "features": {"buildkit": true}}',
        "{}\n",
        "",
    ],
)
def test_other_keys_stay_and_undo_gives_the_file_back_to_the_byte(tmp_path, text):
    path = put(tmp_path, text, 0o640)
    assert setup(tmp_path) == 0
    found, before = read(tmp_path), json.loads(text or "{}")
    assert found["runtimes"]["vgpu-runtime"] == {"path": "/usr/bin/vgpu-runtime"}
    for key, value in before.items():
        assert found[key] == ({**value, **OURS[key]} if key in OURS else value)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert setup(tmp_path, "--undo") == 0
    assert path.read_text() == text
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_second_setup_changes_nothing(tmp_path, capsys):
    put(tmp_path, '{"debug": true}')
    setup(tmp_path)
    before = (tmp_path / DAEMON_JSON).read_bytes()
    capsys.readouterr()
    assert setup(tmp_path, "--json") == 0
    outcome = {file["path"]: file["what"] for file in json.loads(capsys.readouterr().out)["files"]}
    assert outcome["/etc/docker/daemon.json"] == "unchanged"
    assert (tmp_path / DAEMON_JSON).read_bytes() == before
    setup(tmp_path, "--undo")
    assert (tmp_path / DAEMON_JSON).read_text() == '{"debug": true}'


def test_what_the_administrator_adds_later_survives_undo(tmp_path):
    put(tmp_path, '{"debug": true}')
    setup(tmp_path)
    put(tmp_path, json.dumps({**read(tmp_path), "log-driver": "journald"}))
    assert setup(tmp_path, "--undo") == 0
    assert read(tmp_path) == {"debug": True, "log-driver": "journald"}


def test_what_the_administrator_adds_between_two_setups_survives_undo(tmp_path):
    setup(tmp_path)
    put(tmp_path, json.dumps({**read(tmp_path), "log-driver": "journald"}))
    setup(tmp_path, "--default-runtime")
    assert read(tmp_path) == {**OURS, "log-driver": "journald", "default-runtime": "vgpu-runtime"}
    setup(tmp_path)
    assert "default-runtime" not in read(tmp_path)
    assert setup(tmp_path, "--undo") == 0
    assert read(tmp_path) == {"log-driver": "journald"}


@pytest.mark.parametrize(
    ("text", "key", "words"),
    [
        ('{"experimental": false}', "experimental", "docker checkpoint"),
        ('{"features": {"cdi": false}}', "features", "vgpu.snapshot/gpu=all"),
    ],
)
def test_a_key_of_the_administrators_stays_and_is_named(tmp_path, capsys, text, key, words):
    put(tmp_path, text)
    assert setup(tmp_path) == 0
    assert read(tmp_path)[key] == json.loads(text)[key]
    assert words in capsys.readouterr().out
    setup(tmp_path, "--undo")
    assert (tmp_path / DAEMON_JSON).read_text() == text


def test_a_key_that_was_turned_off_since_is_not_turned_on_or_taken_out(tmp_path):
    setup(tmp_path)
    put(tmp_path, json.dumps({**read(tmp_path), "experimental": False}))
    setup(tmp_path)
    assert read(tmp_path)["experimental"] is False
    setup(tmp_path, "--undo")
    assert read(tmp_path) == {"experimental": False}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not valid JSON"),
        ("[]", "not a JSON object"),
        ("[" * 100_000, "not valid JSON"),
        ('{"runtimes": 7}', "no table at 'runtimes'"),
        ('{"features": "cdi"}', "no table at 'features'"),
        ('{"runtimes": {"vgpu-runtime": {"path": "/opt/other"}}}', "something else"),
    ],
)
def test_a_file_that_cannot_be_merged_is_refused_and_untouched(tmp_path, capsys, text, words):
    put(tmp_path, text)
    assert setup(tmp_path) == BadConfiguration.exit_code
    assert words in capsys.readouterr().err
    assert (tmp_path / DAEMON_JSON).read_text() == text
    assert not (tmp_path / "etc/vgpu").exists()


def test_a_dry_run_writes_nothing(tmp_path):
    put(tmp_path, '{"debug": true}')
    assert setup(tmp_path, "--dry-run") == 0
    assert (tmp_path / DAEMON_JSON).read_text() == '{"debug": true}'


def test_files_of_two_engines_go_with_the_last(tmp_path):
    setup(tmp_path)
    main(["setup", "podman", "--destdir", str(tmp_path)])
    setup(tmp_path, "--undo")
    assert not (tmp_path / DAEMON_JSON).exists()
    assert (tmp_path / "etc/vgpu/runtime.conf").exists()


names = st.text(st.sampled_from("abc"), min_size=1, max_size=2)
documents = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.dictionaries(names, inner, max_size=3),
    max_leaves=8,
).filter(lambda value: isinstance(value, dict))


@given(documents, st.lists(names, min_size=1, max_size=3).map(tuple))
def test_taking_out_what_was_put_in_gives_the_document_back(document, key):
    before = json.loads(json.dumps(document))
    try:
        if json_keys.get(document, key) is not None:
            return
        json_keys.put(document, key, "ours")
    except json_keys.NotATable:
        return
    assert json_keys.get(document, key) == "ours"
    rest = json_keys.without(json.dumps(document).encode(), [(key, "ours")])
    left = {} if rest is None else json.loads(rest)
    assert without_empty(left) == without_empty(before)


def without_empty(value):
    """Empty tables and nulls say nothing to dockerd."""
    if not isinstance(value, dict):
        return value
    kept = {name: without_empty(inner) for name, inner in value.items() if inner is not None}
    return {name: inner for name, inner in kept.items() if inner != {}}


def test_the_registered_name_and_path_are_those_of_every_checkpoint():
    from podman_integration import containers_conf

    assert (daemon_json.RUNTIME_NAME, daemon_json.RUNTIME_PATH) == (
        containers_conf.RUNTIME_NAME,
        containers_conf.RUNTIME_PATH,
    )
