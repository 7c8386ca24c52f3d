"""installed_files: what is written, remembered, kept and taken back."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from vgpu_cli.installed_files import InstalledFiles, PlannedFile, write_atomically
from vgpu_errors import BadConfiguration

CONF = "/etc/tool/a.conf"


def plan(content: bytes = b"one\n", path: str = CONF, mode: int = 0o644, if_present: str = "replace") -> PlannedFile:
    return PlannedFile(path, content, mode, "a test", if_present)


def tree(root: Path) -> dict[str, tuple]:
    """Every path below root with its kind, mode and content."""
    found = {}
    for path in sorted(root.rglob("*")):
        status = path.lstat()
        content = path.read_bytes() if stat.S_ISREG(status.st_mode) else None
        found[str(path.relative_to(root))] = (stat.S_IFMT(status.st_mode), stat.S_IMODE(status.st_mode), content)
    return found


def write(root: Path, *planned: PlannedFile, target: str = "podman", **options) -> dict[str, str]:
    outcomes = InstalledFiles.load(root).write(target, planned, **options)
    return {outcome.path: outcome.what for outcome in outcomes}


def undo(root: Path, target: str = "podman", **options) -> dict[str, str]:
    return {outcome.path: outcome.what for outcome in InstalledFiles.load(root).undo(target, **options)}


def test_undo_restores_the_tree_byte_for_byte(tmp_path):
    old = tmp_path / "etc/tool/old.conf"
    old.parent.mkdir(parents=True)
    old.write_bytes(b"\xff\x00 the administrator's own")
    old.chmod(0o640)
    before = tree(tmp_path)
    write(tmp_path, plan(), plan(b"ours", "/etc/tool/old.conf"), plan(b"deep", "/var/x/y/z"))
    assert tree(tmp_path) != before
    assert old.read_bytes() == b"ours"
    undo(tmp_path)
    assert tree(tmp_path) == before


def test_second_run_changes_nothing(tmp_path):
    write(tmp_path, plan(), plan(b"k", "/etc/tool/key", 0o600))
    before = tree(tmp_path)
    inode = (tmp_path / "etc/tool/a.conf").stat().st_ino
    assert set(write(tmp_path, plan(), plan(b"k", "/etc/tool/key", 0o600)).values()) == {"unchanged"}
    assert tree(tmp_path) == before
    assert (tmp_path / "etc/tool/a.conf").stat().st_ino == inode


def test_new_content_of_ours_replaces_our_old_one_and_undo_still_finds_the_first(tmp_path):
    file = tmp_path / "etc/tool/a.conf"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"first")
    assert write(tmp_path, plan(b"v1"))[CONF] == "replaced"
    assert write(tmp_path, plan(b"v2"))[CONF] == "brought up to date"
    assert undo(tmp_path)[CONF] == "put back as before"
    assert file.read_bytes() == b"first"


@pytest.mark.parametrize("step", ["write", "undo"])
def test_file_changed_by_the_user_is_kept_and_named(tmp_path, step):
    write(tmp_path, plan(), plan(b"b", "/etc/tool/b.conf"))
    (tmp_path / "etc/tool/a.conf").write_bytes(b"the user's own")
    found = write(tmp_path, plan(b"newer")) if step == "write" else undo(tmp_path)
    assert found[CONF] == "kept: changed since the setup"
    assert (tmp_path / "etc/tool/a.conf").read_bytes() == b"the user's own"
    assert not (tmp_path / "etc/tool/b.conf").exists(), "what nobody changed goes"


def test_undo_names_the_directory_that_a_kept_file_holds_open(tmp_path):
    write(tmp_path, plan())
    (tmp_path / "etc/tool/a.conf").write_bytes(b"the user's own")
    found = undo(tmp_path)
    assert found["/etc/tool"] == "kept: not empty"
    assert found["/etc/vgpu"] == "removed"


def test_file_that_was_there_is_not_ours_when_it_is_to_be_kept(tmp_path):
    file = tmp_path / "etc/tool/a.conf"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"mine")
    assert write(tmp_path, plan(if_present="keep"))[CONF] == "kept: was there before"
    assert undo(tmp_path) == {}
    assert file.read_bytes() == b"mine"


def test_equal_file_that_was_there_is_not_removed_by_undo(tmp_path):
    file = tmp_path / "etc/tool/a.conf"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"one\n")
    file.chmod(0o644)
    assert write(tmp_path, plan())[CONF] == "unchanged"
    undo(tmp_path)
    assert file.read_bytes() == b"one\n"


def test_kept_file_of_ours_stays_ours(tmp_path):
    write(tmp_path, plan(b"key one", if_present="keep"))
    assert write(tmp_path, plan(b"key two", if_present="keep"))[CONF] == "unchanged"
    assert undo(tmp_path)[CONF] == "removed"


def test_a_file_two_setups_want_goes_with_the_last(tmp_path):
    before = tree(tmp_path)
    write(tmp_path, plan(), target="podman")
    write(tmp_path, plan(), target="containerd")
    assert undo(tmp_path, "podman")[CONF] == "kept: containerd needs it"
    assert (tmp_path / "etc/tool/a.conf").exists()
    assert undo(tmp_path, "containerd")[CONF] == "removed"
    assert tree(tmp_path) == before


def test_file_that_is_planned_no_more_is_taken_back(tmp_path):
    write(tmp_path, plan(), plan(b"hook", "/etc/tool/hook.json"))
    assert write(tmp_path, plan())["/etc/tool/hook.json"] == "removed"
    assert not (tmp_path / "etc/tool/hook.json").exists()
    assert list(InstalledFiles.load(tmp_path).files) == [CONF]


@pytest.mark.parametrize("step", ["write", "undo"])
def test_dry_run_touches_nothing(tmp_path, step):
    write(tmp_path, plan())
    before = tree(tmp_path)
    if step == "write":
        found = write(tmp_path, plan(b"new"), plan(b"n", "/etc/new/file"), is_dry_run=True)
        assert found == {CONF: "brought up to date", "/etc/new/file": "written"}
    else:
        assert undo(tmp_path, is_dry_run=True) == {CONF: "removed"}
    assert tree(tmp_path) == before


def test_undo_leaves_what_it_is_asked_to_keep(tmp_path):
    write(tmp_path, plan(), plan(b"key", "/etc/vgpu/node.key", 0o600))
    found = undo(tmp_path, keep=["/etc/vgpu/node.key"])
    assert found["/etc/vgpu/node.key"] == "kept: as asked"
    assert (tmp_path / "etc/vgpu/node.key").read_bytes() == b"key"
    assert not (tmp_path / "etc/vgpu/setup.json").exists()


@pytest.mark.parametrize("crash_at", [1, 2])
def test_crash_between_manifest_and_files_is_undone_by_undo(tmp_path, monkeypatch, crash_at):
    """Write 1 is the manifest, write 2 the first file."""
    old = tmp_path / "etc/tool/a.conf"
    old.parent.mkdir(parents=True)
    old.write_bytes(b"mine")
    before, calls = tree(tmp_path), []

    def crashing(path, content, mode):
        calls.append(path)
        if len(calls) > crash_at:
            raise KeyboardInterrupt
        write_atomically(path, content, mode)

    monkeypatch.setattr("vgpu_cli.installed_files.write_atomically", crashing)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, plan(b"ours"), plan(b"second", "/etc/tool/second"))
    monkeypatch.undo()
    undo(tmp_path)
    assert tree(tmp_path) == before


def test_crash_while_bringing_up_to_date_does_not_make_our_own_file_the_users(tmp_path, monkeypatch):
    write(tmp_path, plan(b"v1"))

    def only_manifest(path, content, mode):
        if path.name != "setup.json":
            raise KeyboardInterrupt
        write_atomically(path, content, mode)

    monkeypatch.setattr("vgpu_cli.installed_files.write_atomically", only_manifest)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, plan(b"v2"))
    monkeypatch.undo()
    assert write(tmp_path, plan(b"v2"))[CONF] == "brought up to date"
    assert undo(tmp_path)[CONF] == "removed"


def test_symbolic_link_is_refused_and_left(tmp_path):
    link = tmp_path / "etc/tool/a.conf"
    link.parent.mkdir(parents=True)
    link.symlink_to("/etc/passwd")
    with pytest.raises(BadConfiguration, match="symbolic link"):
        write(tmp_path, plan())
    assert os.readlink(link) == "/etc/passwd"


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"formatVersion": 2, "files": {}, "directories": []}', '{"files": 1}']
)
def test_unreadable_manifest_is_refused_by_name(tmp_path, text):
    path = tmp_path / "etc/vgpu/setup.json"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(BadConfiguration, match=r"setup\.json"):
        InstalledFiles.load(tmp_path)


def test_manifest_is_for_root_alone_and_files_have_their_mode_whatever_the_umask(tmp_path):
    old = os.umask(0o077)
    try:
        write(tmp_path, plan(), plan(b"key", "/etc/tool/key", 0o600))
    finally:
        os.umask(old)
    modes = {
        path: stat.S_IMODE((tmp_path / path).stat().st_mode)
        for path in ("etc/tool/a.conf", "etc/tool/key", "etc/vgpu/setup.json", "etc/tool")
    }
    assert modes == {"etc/tool/a.conf": 0o644, "etc/tool/key": 0o600, "etc/vgpu/setup.json": 0o600, "etc/tool": 0o755}


def test_manifest_survives_a_round_trip(tmp_path):
    (tmp_path / "etc/tool").mkdir(parents=True)
    (tmp_path / "etc/tool/a.conf").write_bytes(b"before")
    write(tmp_path, plan())
    loaded = InstalledFiles.load(tmp_path)
    doc = json.loads((tmp_path / "etc/vgpu/setup.json").read_text())
    assert {path: entry.to_json() for path, entry in loaded.files.items()} == doc["files"]
    assert loaded.directories == doc["directories"]


def test_failed_write_leaves_no_partial_file(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        write_atomically(tmp_path / "file", b"x", 0o644)
    assert list(tmp_path.iterdir()) == []
