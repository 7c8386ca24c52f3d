"""`vgpu setup podman` into another tree: texts that podman must understand, and undo."""

from __future__ import annotations

import json
import os
import re
import stat
import tomllib
from pathlib import Path

import pytest

from image_format.trust.keys import load_public_key, load_signing_key
from image_format.trust.policy import Policy
from oci_hook.settings import parse_settings
from podman_integration import containers_conf, hooks
from podman_integration.existing_settings import configuration_before_ours, parse_version
from vgpu_cli import node_files
from vgpu_cli.main import main
from vgpu_errors import BadConfiguration

DROP_IN = "etc/containers/containers.conf.d/50-vgpu.conf"


@pytest.fixture
def node(tmp_path):
    """A node with two GPUs, a driver and some settings of its own."""
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        put(tmp_path, f"dev/{name}", b"")
    put(tmp_path, "usr/lib/x86_64-linux-gnu/libcuda.so.1", b"lib")
    put(tmp_path, "etc/containers/containers.conf", b'[engine]\nhooks_dir = ["/opt/hooks"]\n')
    put(tmp_path, "usr/bin/crun", b"", 0o755)
    return tmp_path


def put(root: Path, name: str, content: bytes, mode: int = 0o644) -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    path.chmod(mode)
    return path


def tree(root: Path) -> dict[str, object]:
    return {
        str(path.relative_to(root)): (path.lstat().st_mode, path.read_bytes() if path.is_file() else None)
        for path in sorted(root.rglob("*"))
    }


def setup(node: Path, *arguments: str) -> int:
    return main(["setup", *arguments, "--destdir", str(node)])


def setup_json(node: Path, capsys, *arguments: str) -> dict:
    capsys.readouterr()
    assert main(["--json", "setup", *arguments, "--destdir", str(node)]) == 0
    return json.loads(capsys.readouterr().out)


def test_undo_gives_the_tree_back_byte_for_byte(node):
    before = tree(node)
    assert setup(node, "podman") == 0
    assert tree(node) != before
    assert setup(node, "podman", "--undo") == 0
    assert tree(node) == before


def test_undo_without_a_name_takes_back_every_setup(node):
    before = tree(node)
    assert setup(node, "podman") == setup(node, "containerd") == setup(node, "cdi") == 0
    assert setup(node, "--undo") == 0
    assert tree(node) == before


def test_second_run_changes_nothing_and_keeps_the_key(node, capsys):
    setup(node, "podman")
    before = tree(node)
    found = setup_json(node, capsys, "podman")
    assert {file["what"] for file in found["files"]} == {"unchanged"}
    assert tree(node) == before


def test_dry_run_names_every_file_and_writes_none(node, capsys):
    before = tree(node)
    planned = {file["path"] for file in setup_json(node, capsys, "podman", "--dry-run")["files"]}
    assert tree(node) == before
    setup(node, "podman")
    written = {f"/{name}" for name, (mode, _) in tree(node).items() if stat.S_ISREG(mode)} - {
        f"/{name}" for name in before
    }
    assert written == planned | {"/etc/vgpu/setup.json"}


def test_user_edited_file_is_kept_and_named(node, capsys):
    setup(node, "podman")
    conf = node / "etc/vgpu/runtime.conf"
    conf.write_text(conf.read_text() + "inject = never\n")
    found = {file["path"]: file["what"] for file in setup_json(node, capsys, "podman", "--undo")["files"]}
    assert found["/etc/vgpu/runtime.conf"] == "kept: changed since the setup"
    assert found["/etc/vgpu"] == "kept: not empty"
    assert conf.read_text().endswith("inject = never\n")


def test_a_second_setup_does_not_make_the_users_lines_its_own(node):
    setup(node, "podman")
    conf = node / "etc/vgpu/runtime.conf"
    conf.write_text(conf.read_text() + "store = on\n")
    assert setup(node, "podman") == setup(node, "containerd") == 0
    assert setup(node, "--undo") == 0
    assert conf.read_text().endswith("store = on\n")


def test_keep_keys_leaves_the_pair(node):
    setup(node, "podman")
    pair = [(node / f"etc/vgpu/node.{kind}").read_bytes() for kind in ("key", "pub")]
    setup(node, "podman", "--undo", "--keep-keys")
    assert [(node / f"etc/vgpu/node.{kind}").read_bytes() for kind in ("key", "pub")] == pair
    setup(node, "podman")
    assert (node / "etc/vgpu/node.key").read_bytes() == pair[0]


def test_key_and_policy_are_what_sealing_and_verifying_read(node):
    setup(node, "podman")
    key = load_signing_key(node / "etc/vgpu/node.key")
    assert load_public_key(node / "etc/vgpu/node.pub").key_id == key.key_id
    policy = Policy.load(node / "etc/vgpu")
    assert policy.find(key.key_id) is not None
    assert not policy.allows_unsigned
    assert stat.S_IMODE((node / "etc/vgpu/node.key").stat().st_mode) == 0o600


def test_a_key_that_was_there_is_kept_by_setup_and_by_undo(node):
    put(node, "etc/vgpu/node.key", b"mine", 0o600)
    put(node, "etc/vgpu/node.pub", b"mine too")
    before = tree(node)
    setup(node, "podman")
    setup(node, "podman", "--undo")
    assert tree(node) == before


def test_a_pair_that_was_moved_away_is_followed_by_a_new_one(node):
    setup(node, "podman")
    etc = node / "etc/vgpu"
    old = load_public_key(etc / "node.pub")
    for name in ("node.key", "node.pub"):
        (etc / name).rename(node / f"old-{name}")
    assert setup(node, "podman") == 0
    assert main(["--etc", str(etc), "trust", "add", str(node / "old-node.pub"), "--name", "old-node"]) == 0
    policy, key = Policy.load(etc), load_signing_key(etc / "node.key")
    assert policy.find(key.key_id).name == "this node"
    assert policy.find(old.key_id).name == "old-node"
    assert key.key_id != old.key_id


def test_no_key_is_made_beside_the_public_half_of_another(node, capsys):
    setup(node, "podman")
    (node / "etc/vgpu/node.key").unlink()
    before = tree(node)
    assert setup(node, "podman") == BadConfiguration.exit_code
    assert "Move it away" in capsys.readouterr().err
    assert tree(node) == before


def test_switching_to_hooks_only_and_back_leaves_no_injecting_hook(node):
    setup(node, "podman", "--hooks-only")
    injecting = node / "etc/vgpu/hooks.d/50-vgpu-precreate.json"
    assert injecting.exists()
    assert "runtimes" not in tomllib.loads((node / DROP_IN).read_text())["engine"]
    setup(node, "podman")
    assert not injecting.exists()
    assert tomllib.loads((node / DROP_IN).read_text())["engine"]["runtimes"]["vgpu-runtime"] == [
        "/usr/bin/vgpu-runtime"
    ]


# ---- runtime.conf --------------------------------------------------------------------------------


def test_every_key_of_the_settings_file_is_read_by_the_runtime_and_shows_its_default():
    active = "\n".join(
        line[1:] if re.match(r"#\w+ = ", line) else line for line in node_files.RUNTIME_CONF_TEXT.splitlines()
    )
    shown, default = parse_settings(active, "runtime.conf"), parse_settings("", "runtime.conf")
    assert shown.other == {}
    named_paths = {"low_level_runtime", "driver_dir", "log"}
    for name in set(default.__slots__) - named_paths:
        assert getattr(shown, name) == getattr(default, name), name
    assert all(getattr(shown, name).startswith("/") for name in named_paths)


def test_untouched_settings_file_means_the_defaults():
    found, default = parse_settings(node_files.RUNTIME_CONF_TEXT, "runtime.conf"), parse_settings("", "runtime.conf")
    assert {name: getattr(found, name) for name in found.__slots__} == {
        name: getattr(default, name) for name in found.__slots__
    }


def test_low_level_runtime_is_written_and_changed_later(node):
    put(node, "opt/runc", b"", 0o755)
    for program in ("/usr/bin/crun", "/opt/runc"):
        assert setup(node, "podman", "--low-level-runtime", program) == 0
        found = parse_settings((node / "etc/vgpu/runtime.conf").read_text(), "runtime.conf")
        assert found.low_level_runtime == program


def test_setup_without_the_option_keeps_the_low_level_runtime(node):
    setup(node, "podman", "--low-level-runtime", "/usr/bin/crun")
    setup(node, "podman")
    assert "\nlow_level_runtime = /usr/bin/crun\n" in (node / "etc/vgpu/runtime.conf").read_text()


def test_option_that_contradicts_an_edited_settings_file_is_refused(node, capsys):
    put(node, "etc/vgpu/runtime.conf", b"low_level_runtime = /usr/bin/runc\n")
    before = tree(node)
    assert setup(node, "podman", "--low-level-runtime", "/usr/bin/crun") == BadConfiguration.exit_code
    assert "low_level_runtime = /usr/bin/crun" in capsys.readouterr().err
    assert tree(node) == before


@pytest.mark.parametrize("program", ["crun", "/usr/bin/nothing", "/etc/containers/containers.conf"])
def test_low_level_runtime_must_be_a_program(node, program):
    assert setup(node, "podman", "--low-level-runtime", program) == 10


def test_low_level_runtime_must_not_be_ourselves(node):
    put(node, "usr/bin/vgpu-runtime", b"", 0o755)
    assert setup(node, "podman", "--low-level-runtime", "/usr/bin/vgpu-runtime") == 10


# ---- containers.conf drop-in ---------------------------------------------------------------------

EXISTING = [
    ([], ["/usr/share/containers/oci/hooks.d"]),
    ([{"engine": {"hooks_dir": ["/a"]}}], ["/a"]),
    ([{"engine": {"hooks_dir": ["/a"]}}, {"engine": {"hooks_dir": ["/b"]}}], ["/b"]),
    ([{"engine": {"hooks_dir": ["/a", {"append": True}]}}], ["/usr/share/containers/oci/hooks.d", "/a"]),
    (
        [{"engine": {"hooks_dir": ["/a", {"append": True}]}}, {"engine": {"hooks_dir": ["/b"]}}],
        ["/usr/share/containers/oci/hooks.d", "/a", "/b"],
    ),
    (
        [{"engine": {"hooks_dir": ["/a", {"append": True}]}}, {"engine": {"hooks_dir": ["/b", {"append": False}]}}],
        ["/b"],
    ),
    ([{"containers": {}}], ["/usr/share/containers/oci/hooks.d"]),
]


def uses_append(documents: list[dict]) -> bool:
    return "append" in json.dumps(documents)


# A podman that does not know the attribute refuses to start on a file that has it: such a list needs no answer.
CASES = [(can, *case) for case in EXISTING for can in (True, False) if can or not uses_append(case[0])]


@pytest.mark.parametrize(("can_append", "documents", "expected"), CASES)
def test_podman_ends_up_with_its_own_hook_folders_and_ours(can_append, documents, expected):
    text = containers_conf.drop_in(documents, hooks_directory=hooks.HOOKS_DIRECTORY, can_append=can_append)
    after = containers_conf.effective_list(
        [*documents, tomllib.loads(text)], "hooks_dir", containers_conf.DEFAULT_HOOKS_DIRS
    )
    assert after == [*expected, hooks.HOOKS_DIRECTORY]


@pytest.mark.parametrize("can_append", [True, False])
def test_podman_keeps_the_runtimes_that_speak_json(can_append):
    text = containers_conf.drop_in([], hooks_directory=None, can_append=can_append)
    after = containers_conf.effective_list(
        [tomllib.loads(text)], "runtime_supports_json", containers_conf.DEFAULT_JSON_RUNTIMES
    )
    assert after == [*containers_conf.DEFAULT_JSON_RUNTIMES, "vgpu-runtime"]


def test_old_podman_gets_no_append_attribute():
    assert "append" not in containers_conf.drop_in([], hooks_directory="/h", can_append=False)


@pytest.mark.parametrize("is_default", [True, False])
def test_default_runtime_is_set_only_when_asked(node, is_default):
    setup(node, "podman", *(["--default-runtime"] if is_default else []))
    engine = tomllib.loads((node / DROP_IN).read_text())["engine"]
    assert engine.get("runtime") == ("vgpu-runtime" if is_default else None)


def test_files_that_podman_reads_after_ours_do_not_count(tmp_path):
    put(tmp_path, "etc/containers/containers.conf.d/10-a.conf", b'[engine]\nhooks_dir = ["/a"]\n')
    put(tmp_path, "etc/containers/containers.conf.d/90-z.conf", b'[engine]\nhooks_dir = ["/z"]\n')
    put(tmp_path, DROP_IN, b'[engine]\nhooks_dir = ["/ours"]\n')
    assert configuration_before_ours(tmp_path) == [{"engine": {"hooks_dir": ["/a"]}}]


def test_configuration_that_podman_could_not_read_is_named(node, capsys):
    put(node, "etc/containers/containers.conf", b"[engine\n")
    before = tree(node)
    assert setup(node, "podman") == BadConfiguration.exit_code
    assert "etc/containers/containers.conf" in capsys.readouterr().err
    assert tree(node) == before


@pytest.mark.parametrize(
    ("text", "version"), [("podman version 5.8.6\n", (5, 8, 6)), ("podman version 4.3.1", (4, 3, 1)), ("", None)]
)
def test_podman_version_is_read(text, version):
    assert parse_version(text) == version


# ---- hooks.d 1.0.0 -------------------------------------------------------------------------------

STAGES = {"precreate", "createRuntime", "createContainer", "startContainer", "poststart", "poststop", "prestart"}


@pytest.mark.parametrize("injects", [True, False])
def test_hook_files_follow_the_format(injects):
    for path, text in hooks.hook_files(injects=injects).items():
        doc = json.loads(text)
        assert path.startswith(f"{hooks.HOOKS_DIRECTORY}/")
        assert path.endswith(".json")
        assert set(doc) == {"version", "hook", "when", "stages"}
        assert doc["version"] == "1.0.0"
        assert set(doc["hook"]) <= {"path", "args", "env", "timeout"}
        assert os.path.isabs(doc["hook"]["path"])
        assert set(doc["stages"]) <= STAGES
        assert doc["hook"]["args"] == ["vgpu-hook", doc["stages"][0]]


@pytest.mark.parametrize("injects", [True, False])
def test_every_hook_has_its_own_environment_and_a_time_limit(injects):
    """Without `env` a hook inherits the container's LD_PRELOAD (CVE-2025-23266)."""
    for text in hooks.hook_files(injects=injects).values():
        hook = json.loads(text)["hook"]
        assert hook["env"]
        assert not [entry for entry in hook["env"] if entry.startswith("LD_")]
        assert 0 < hook["timeout"] <= 60


def test_only_users_who_keep_their_runtime_get_the_injecting_stage():
    assert {json.loads(text)["stages"][0] for text in hooks.hook_files(injects=False).values()} == {
        "createRuntime",
        "poststop",
    }
    assert "precreate" in {json.loads(text)["stages"][0] for text in hooks.hook_files(injects=True).values()}


@pytest.mark.parametrize(
    ("annotations", "matches"),
    [
        ({"vgpu.snapshot/inject": "true"}, True),
        ({"vgpu.snapshot/inject": "false"}, False),
        ({"vgpuXsnapshot/inject": "true"}, False),
        ({"other": "vgpu.snapshot/inject=true"}, False),
        ({}, False),
    ],
)
def test_hooks_match_only_containers_that_ask(annotations, matches):
    """hooks.d: a pair of unanchored expressions matches when some annotation matches both."""
    patterns = hooks.hook_document("poststop")["when"]["annotations"]
    found = all(
        any(re.search(key, name) and re.search(value, text) for name, text in annotations.items())
        for key, value in patterns.items()
    )
    assert found is matches


def test_agent_unit_hides_nothing_that_the_agent_needs():
    text = node_files.AGENT_UNIT_TEXT
    for option in (
        "ProtectControlGroups",
        "ProtectProc",
        "PrivateDevices",
        "DeviceAllow",
        "ProtectClock",
        "RuntimeDirectory",
    ):
        assert not re.search(rf"^{option}=", text, re.MULTILINE), option
