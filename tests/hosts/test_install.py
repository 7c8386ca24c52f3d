"""packaging/install.py: puts in what it lists, takes out what it put in, keeps what others made and what is needed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

INSTALLER = Path(__file__).resolve().parents[2] / "packaging" / "install.py"
LIBRARY = "usr/lib/vgpu-snapshot"


@pytest.fixture
def preload(tmp_path):
    return make_preload(tmp_path / "preload", "aa11")


def make_preload(folder, build_id):
    for libc in ("glibc", "musl"):
        (folder / libc / build_id).mkdir(parents=True)
        (folder / libc / build_id / "libvgpu.so").write_bytes(b"\x7fELF")
        (folder / libc / "current").write_text(build_id)
    return folder


def run(root, *options):
    root.joinpath("usr/bin").mkdir(parents=True, exist_ok=True)
    command = [sys.executable, INSTALLER, "--destdir", root, "--python", sys.executable, *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, umask=0o077)


def files(root):
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def test_every_installed_file_is_listed_and_removed_again(tmp_path, preload):
    root = tmp_path / "root"
    (root / "etc/vgpu").mkdir(parents=True)
    (root / "etc/vgpu/node.key").write_text("a key")
    assert run(root, "--preload", preload).stderr == ""
    listed = set((root / LIBRARY / "installed-files.txt").read_text().splitlines())
    assert files(root) - listed == {"etc/vgpu/node.key", f"{LIBRARY}/installed-files.txt"}
    assert {"usr/bin/vgpu", "usr/bin/vgpu-runtime", "usr/bin/vgpu-hook", "usr/bin/vgpu-agent"} <= listed
    assert run(root, "--uninstall").returncode == 0
    assert files(root) == {"etc/vgpu/node.key"}
    assert not (root / LIBRARY).exists()


def test_man_pages_and_completions_go_where_they_are_looked_for(tmp_path, preload):
    root = tmp_path / "root"
    assert run(root, "--preload", preload).stderr == ""
    for name in ("man1/vgpu.1", "man8/vgpu-runtime.8", "man8/vgpu-agent.8", "man8/vgpu-hook.8", "man5/runtime.conf.5"):
        assert (root / "usr/share/man" / name).read_text().startswith(".TH ")
    shells = ("bash-completion/completions/vgpu", "zsh/vendor-completions/_vgpu", "fish/vendor_completions.d/vgpu.fish")
    for name in shells:
        assert "vgpu inspect" in (root / "usr/share" / name).read_text()
        assert (root / "usr/share" / name).stat().st_mode & 0o777 == 0o644


def test_the_entry_scripts_are_isolated_and_start(tmp_path, preload):
    root = tmp_path / "root"
    run(root, "--preload", preload)
    first = (root / "usr/bin/vgpu-runtime").read_text().splitlines()[0]
    assert first == f"#!{sys.executable} -IS"
    assert (root / "usr/bin/vgpu-runtime").stat().st_mode & 0o777 == 0o755


def test_an_upgrade_keeps_older_preload_builds_and_drops_other_files(tmp_path, preload):
    root = tmp_path / "root"
    run(root, "--preload", preload)
    gone = root / LIBRARY / "vgpu_cli" / "left_by_the_old_version.py"
    gone.write_text("")
    manifest = root / LIBRARY / "installed-files.txt"
    manifest.write_text(manifest.read_text() + f"{LIBRARY}/vgpu_cli/{gone.name}\n")
    assert run(root, "--preload", make_preload(tmp_path / "newer", "bb22")).returncode == 0
    assert not gone.exists()
    for build_id in ("aa11", "bb22"):
        assert (root / LIBRARY / "preload/glibc" / build_id / "libvgpu.so").exists()
    assert (root / LIBRARY / "preload/glibc/current").read_text() == "bb22"
    run(root, "--uninstall")
    assert files(root) == set()


def test_a_foreign_program_of_the_same_name_stays(tmp_path, preload):
    root = tmp_path / "root"
    (root / "usr/bin").mkdir(parents=True)
    (root / "usr/bin/vgpu").write_text("#!/bin/sh\n")
    done = run(root, "--preload", preload)
    assert done.returncode == 1
    assert "was not installed by this script" in done.stderr
    assert files(root) == {"usr/bin/vgpu"}


def test_the_preload_library_is_readable_for_every_user(tmp_path, preload):
    root = tmp_path / "root"
    previous = (preload / "glibc/aa11/libvgpu.so").stat().st_mode
    (preload / "glibc/aa11/libvgpu.so").chmod(0o600)
    run(root, "--preload", preload)
    (preload / "glibc/aa11/libvgpu.so").chmod(previous)
    path = root / LIBRARY / "preload/glibc/aa11/libvgpu.so"
    assert path.stat().st_mode & 0o044 == 0o044
    assert all(parent.stat().st_mode & 0o055 == 0o055 for parent in list(path.parents)[:4])
