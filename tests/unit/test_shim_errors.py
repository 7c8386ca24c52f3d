"""How an error reaches the engine: the forms that runc uses, in the places where engines look."""

import json

import pytest

from runtime_shim.error_channel import json_line, message_of, sanitized, text_line
from tests.simulators.shim_install import ShimInstall
from vgpu_errors import BadConfiguration, RestoreFailed


@pytest.fixture
def broken(tmp_path):
    """A shim whose create fails with BadConfiguration (exit code 11)."""
    install = ShimInstall(tmp_path)
    install.configure(inject="perhaps")
    return install


def fail(install, *global_words):
    done = install.call(*global_words, "create", "--bundle", install.bundle(), "c1")
    assert done.returncode == BadConfiguration.exit_code
    assert done.stdout == b""
    return done.stderr.decode()


def test_podman_without_json_gets_one_plain_line_on_stderr(broken):
    line = fail(broken)
    assert line.startswith("vgpu-runtime: ")
    assert line.count("\n") == 1
    assert "inject" in line
    assert BadConfiguration.remedy in line


def test_podman_with_json_and_containerd_get_a_json_line_in_the_log(broken):
    log = broken.folder / "oci-log"
    stderr = fail(broken, "--log-format=json", "--log", log)
    entry = json.loads(log.read_text())
    assert set(entry) == {"level", "msg", "time"}
    assert entry["level"] == "error"
    assert "inject" in entry["msg"]
    assert stderr == f"vgpu-runtime: {entry['msg']}\n"


def test_an_existing_log_is_added_to(broken):
    log = broken.folder / "oci-log"
    log.write_text('{"level":"warning","msg":"before"}\n')
    fail(broken, "--log", log, "--log-format", "json")
    assert [json.loads(line)["level"] for line in log.read_text().splitlines()] == ["warning", "error"]


def test_a_text_log_gets_a_logrus_line(broken):
    log = broken.folder / "oci-log"
    fail(broken, "--log", log)
    assert log.read_text().startswith('time="')
    assert ' level=error msg="' in log.read_text()


def test_json_without_a_log_goes_to_stderr(broken):
    assert json.loads(fail(broken, "--log-format", "json"))["level"] == "error"


def test_a_log_that_cannot_be_written_leaves_stderr(broken):
    assert "inject" in fail(broken, "--log", "/nowhere/oci-log", "--log-format", "json")


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("open /x: no such file or directory", "open /x: it does not exist"),
        ("No Such File Or Directory: y", "it does not exist: y"),
        ("no such file, no such file", "it does not exist, it does not exist"),
        ("exec: executable file not found in $PATH", "exec: program is missing in $PATH"),
        ("two\nlines\r\n  and blanks", "two lines and blanks"),
    ],
)
def test_words_that_podman_misreads_do_not_appear(text, clean):
    assert sanitized(text) == clean


def test_the_message_ends_with_the_remedy():
    assert message_of(RestoreFailed(what="it broke")) == f"it broke. {RestoreFailed.remedy}"
    error = RestoreFailed(what="it broke.")
    error.add_note("images are kept in /i")
    assert message_of(error) == f"it broke. images are kept in /i. {RestoreFailed.remedy}"
    assert message_of(ValueError("odd")) == "unexpected ValueError: odd"
    assert message_of(ValueError()) == "unexpected ValueError: ValueError"


def test_quotes_and_odd_characters_survive():
    assert json.loads(json_line('say "\udcff" ü\\'))["msg"] == 'say "\udcff" ü\\'
    assert 'msg="say \\"x\\" \\\\"' in text_line('say "x" \\')


def test_an_unexpected_error_is_one_line_without_traceback(tmp_path):
    install = ShimInstall(tmp_path)
    install.run_dir.write_text("a file in the way")
    done = install.call("create", "--bundle", install.bundle(), "c1")
    assert done.returncode == 1
    assert b"Traceback" not in done.stderr
    assert done.stderr.count(b"\n") == 1
