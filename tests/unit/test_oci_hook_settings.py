"""runtime.conf: defaults, values, faults by path and key."""

import pytest

from oci_hook.settings import Settings, parse_settings, read_settings
from vgpu_errors import BadConfiguration


def test_a_missing_file_means_the_defaults(tmp_path):
    found = read_settings(str(tmp_path / "none"))
    assert (found.deadline_restore_s, found.deadline_freeze_s, found.deadline_checkpoint_s) == (220, 120, 900)
    assert (found.progress, found.inject, found.low_level_runtime, found.log) == ("auto", "auto", None, None)
    assert (found.run_dir, found.library_dir) == ("/run/vgpu", "/usr/lib/vgpu-snapshot")


def test_the_restore_deadline_is_below_podmans():
    assert Settings().deadline_restore_s < 240


def test_values_and_comments(tmp_path):
    path = tmp_path / "runtime.conf"
    path.write_text(
        "# a comment\n\nlow_level_runtime = /usr/bin/crun\n  inject=never  \ndeadline_restore_s=30.5\n"
        "log = /var/log/vgpu/runtime.log\nnew_key = a = b\n"
    )
    found = read_settings(str(path))
    assert found.low_level_runtime == "/usr/bin/crun"
    assert found.inject == "never"
    assert found.deadline_restore_s == 30.5
    assert found.log == "/var/log/vgpu/runtime.log"
    assert found.other == {"new_key": "a = b"}


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ("low_level_runtime = runc", "low_level_runtime"),
        ("low_level_runtime =", "low_level_runtime"),
        ("deadline_restore_s = soon", "deadline_restore_s"),
        ("deadline_restore_s = 0", "deadline_restore_s"),
        ("deadline_freeze_s = -1", "deadline_freeze_s"),
        ("deadline_checkpoint_s = nan", "deadline_checkpoint_s"),
        ("deadline_checkpoint_s = inf", "deadline_checkpoint_s"),
        ("inject = sometimes", "inject"),
        ("progress = loud", "progress"),
        ("log = here", "log"),
        ("nonsense", "nonsense"),
    ],
)
def test_a_bad_value_is_named_with_path_and_key(line, key):
    with pytest.raises(BadConfiguration) as caught:
        parse_settings(f"# one\n{line}\n", "/etc/vgpu/runtime.conf")
    assert "/etc/vgpu/runtime.conf" in str(caught.value)
    assert "line 2" in str(caught.value)
    assert key in str(caught.value)


def test_not_strict_keeps_the_default_and_the_good_rest():
    found = parse_settings("inject = x\nlow_level_runtime = /usr/bin/crun\n", "p", is_strict=False)
    assert (found.inject, found.low_level_runtime) == ("auto", "/usr/bin/crun")


def test_an_unreadable_file_is_an_error_only_where_strict(tmp_path):
    with pytest.raises(BadConfiguration):
        read_settings(str(tmp_path))
    assert read_settings(str(tmp_path), is_strict=False).inject == "auto"


def test_bytes_that_are_no_text_do_not_stop_the_rest(tmp_path):
    path = tmp_path / "runtime.conf"
    path.write_bytes(b"# \xff\xfe\ninject = always\n")
    assert read_settings(str(path)).inject == "always"
