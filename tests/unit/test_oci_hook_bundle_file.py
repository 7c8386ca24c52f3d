"""config.json in and out, and what the next call makes of a call that was killed at any step."""

import json
import os

import pytest

from oci_hook.bundle_file import BundleFile
from oci_hook.injection import plan_injection
from oci_hook.settings import Settings
from tests.simulators.shim_install import ShimInstall, gpu_spec

EDITED = b'{"edited": true}'


@pytest.fixture
def bundle(tmp_path):
    (tmp_path / "config.json").write_bytes(json.dumps(gpu_spec(), indent=2).encode())
    return tmp_path


def names(bundle):
    return sorted(entry.name for entry in bundle.iterdir())


def test_in_and_back_is_the_same_file(bundle):
    path = bundle / "config.json"
    path.chmod(0o640)
    before, original = path.stat(), path.read_bytes()
    file = BundleFile(str(bundle))
    file.put_in(EDITED)
    assert path.read_bytes() == EDITED
    assert path.stat().st_mode == before.st_mode
    file.put_back()
    after = path.stat()
    assert path.read_bytes() == original
    assert (after.st_ino, after.st_mtime_ns, after.st_mode) == (before.st_ino, before.st_mtime_ns, before.st_mode)
    assert names(bundle) == ["config.json"]
    file.put_back()
    assert path.read_bytes() == original


def test_a_reader_sees_one_or_the_other_never_half(bundle):
    inode = os.stat(bundle / "config.json").st_ino
    BundleFile(str(bundle)).put_in(EDITED)
    assert os.stat(bundle / "config.json").st_ino != inode
    assert os.stat(bundle / "config.json.vgpu-original").st_ino == inode


@pytest.mark.parametrize("killed_at", ["os.link", "os.rename", "os.stat"])
def test_a_failing_step_is_undone(bundle, monkeypatch, killed_at):
    original = (bundle / "config.json").read_bytes()
    file = BundleFile(str(bundle))
    with monkeypatch.context() as patch:
        patch.setattr(killed_at, _full_disk)
        with pytest.raises(OSError, match="full"):
            file.put_in(EDITED)
    file.put_back()
    assert (bundle / "config.json").read_bytes() == original
    assert names(bundle) == ["config.json"]


def _full_disk(*_args, **_options):
    raise OSError(28, "full")


@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_the_next_call_repairs_a_killed_one(bundle, step):
    """The steps are those of the module's docstring."""
    path = bundle / "config.json"
    original = path.read_bytes()
    (bundle / "config.json.vgpu-edited").write_bytes(EDITED)
    if step in (2, 3):
        os.link(path, bundle / "config.json.vgpu-original")
    if step == 2:
        (bundle / "config.json.vgpu-partial").write_bytes(EDITED[:5])
    if step == 3:
        (bundle / "new").write_bytes(EDITED)
        os.rename(bundle / "new", path)
    assert BundleFile(str(bundle)).read() == original
    assert path.read_bytes() == original
    assert names(bundle) == ["config.json"]


@pytest.mark.parametrize("torn", [b"", b'{"half": '])
def test_a_torn_config_gives_way_to_the_original(bundle, torn):
    original = (bundle / "config.json").read_bytes()
    BundleFile(str(bundle)).put_in(EDITED)
    (bundle / "config.json").write_bytes(torn)
    assert BundleFile(str(bundle)).read() == original


def test_what_the_engine_wrote_since_stands(bundle):
    BundleFile(str(bundle)).put_in(EDITED)
    (bundle / "config.json").unlink()
    fresh = json.dumps({"fresh": 1}, indent=4).encode()
    (bundle / "config.json").write_bytes(fresh)
    assert BundleFile(str(bundle)).read() == fresh
    assert names(bundle) == ["config.json"]


def test_what_the_engine_made_of_our_edited_one_loses_the_edits(tmp_path):
    """podman's restore reads config.json from disk, changes it and writes it back."""
    install = ShimInstall(tmp_path / "i")
    bundle = install.bundle()
    settings = Settings()
    settings.run_dir, settings.library_dir = str(install.run_dir), str(install.library_dir)
    original = (bundle / "config.json").read_bytes()
    injection = plan_injection(settings, str(bundle), "c1", original)
    BundleFile(str(bundle)).put_in(injection.edited)
    changed = {**json.loads(injection.edited), "hostname": "new"}
    (bundle / "config.json").unlink()
    (bundle / "config.json").write_text(json.dumps(changed))
    assert json.loads(BundleFile(str(bundle)).read()) == {**json.loads(original), "hostname": "new"}


def test_a_removed_bundle_is_no_error(tmp_path):
    bundle = tmp_path / "b"
    bundle.mkdir()
    (bundle / "config.json").write_text("{}")
    file = BundleFile(str(bundle))
    file.put_in(EDITED)
    for entry in bundle.iterdir():
        entry.unlink()
    bundle.rmdir()
    file.put_back()
    assert BundleFile(str(bundle)).read() is None


def test_an_untouched_bundle_is_only_read(bundle):
    before = {entry.name: entry.stat() for entry in bundle.iterdir()}
    folder = bundle.stat()
    BundleFile(str(bundle)).read()
    assert {entry.name: entry.stat().st_mtime_ns for entry in bundle.iterdir()} == {
        name: status.st_mtime_ns for name, status in before.items()
    }
    assert bundle.stat().st_mtime_ns == folder.st_mtime_ns
