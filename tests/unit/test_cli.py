"""`vgpu`: verbs, help, errors, exit codes, output forms and what start-up loads."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from vgpu_cli import VERSION
from vgpu_cli.main import build_parser, chosen_verb, full_parser, help_of, main, texts_of, verbs
from vgpu_cli.output import Output, plain_table
from vgpu_errors import NeedsRoot, ToolMissing, UserError, VgpuError

REPOSITORY = Path(__file__).parents[2]
HEAVY = {
    "rich",
    "cryptography",
    "jsonschema",
    "podman",
    "docker",
    "requests",
    "urllib3",
    "cuda",
    "blake3",
    "zstandard",
    "yaml",
    "asyncio",
}


def run_vgpu(*arguments: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "vgpu_cli.main", *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        **options,
    )


@pytest.fixture
def verb(monkeypatch):
    """Puts a verb of the test's own in place of `version`."""

    def install(run):
        monkeypatch.setattr("vgpu_cli.verbs.version.run", run)

    return install


def raising(error):
    def run(args, out):
        raise error

    return run


# ---- verbs and help ------------------------------------------------------------------------------


def test_help_lists_every_verb_with_its_help():
    text = run_vgpu("--help").stdout
    assert verbs()
    for name in verbs():
        assert name in text
        assert help_of(name)
        assert help_of(name).split()[0] in text


@pytest.mark.parametrize("name", verbs())
def test_every_verb_explains_itself(name):
    done = run_vgpu(name, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: vgpu {name}")


@pytest.mark.parametrize("name", verbs())
def test_every_verb_has_a_line_a_paragraph_and_examples_that_parse(name):
    texts = texts_of(name)
    line, paragraph, examples = texts.get("HELP", ""), texts.get("DESCRIPTION", ""), texts.get("EXAMPLES", ())
    assert line[:1].islower()
    assert not line.endswith(".")
    assert len(line) < 90
    assert paragraph.endswith(".")
    assert len(paragraph) > len(line)
    assert examples
    for command, what in examples:
        assert what
        words = shlex.split(command.partition("<(")[2].rstrip(")") or command.partition(" > ")[0])
        assert words.pop(0) == "vgpu", command
        assert full_parser().parse_args(words).verb == name


@pytest.mark.parametrize("arguments", [["--help"], *[[name, "--help"] for name in verbs()]])
def test_help_loads_nothing_heavy(arguments):
    script = (
        "import sys\nfrom vgpu_cli.main import main\n"
        f"try: main({arguments!r})\nexcept SystemExit: pass\n"
        "print('\\n' + ' '.join(sorted({name.partition('.')[0] for name in sys.modules})))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=True
    )
    loaded = set(done.stdout.splitlines()[-1].split())
    assert not loaded & HEAVY


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["setup", "podman"], "setup"),
        (["--etc", "setup", "version"], "version"),
        (["--json", "version"], "version"),
        (["nothing"], None),
        ([], None),
        (["--etc"], None),
    ],
)
def test_verb_is_found_behind_global_options(arguments, expected):
    assert chosen_verb(arguments) == expected


@pytest.mark.parametrize("arguments", [["--json", "--etc", "/x", "version"], ["version", "--json", "--etc", "/x"]])
def test_global_options_stand_before_or_behind_the_verb(arguments):
    args = build_parser("version").parse_args(arguments)
    assert (args.json, args.etc) == (True, "/x")


# ---- errors and exit codes -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments", [[], ["nothing"], ["setup", "lxc"], ["--unknown", "version"], ["setup", "--low-level-runtime"]]
)
def test_wrong_command_line_is_a_user_error_with_a_remedy(arguments, capsys):
    assert main(arguments) == UserError.exit_code
    out, err = capsys.readouterr()
    assert out == ""
    first, second = err.splitlines()
    assert first.startswith("vgpu: error: ")
    assert second.startswith("  what to do: ")


def test_error_is_one_json_document_on_stdout(capsys):
    assert main(["--json", "nothing"]) == UserError.exit_code
    out, err = capsys.readouterr()
    assert err == ""
    assert json.loads(out)["error"]["class"] == "UserError"


def test_exit_code_is_the_one_of_the_class(verb, capsys):
    verb(raising(NeedsRoot(what="it")))
    assert main(["version"]) == NeedsRoot.exit_code
    assert capsys.readouterr().err == f"vgpu: error: it needs root.\n  what to do: {NeedsRoot.remedy}\n"


def test_notes_of_an_error_stand_between_message_and_remedy(verb, capsys):
    error = NeedsRoot(what="it")
    error.add_note("the undo failed as well")
    verb(raising(error))
    main(["version"])
    assert capsys.readouterr().err.splitlines()[1] == "  note: the undo failed as well"


def test_missing_file_and_full_disk_are_node_errors(verb, capsys):
    verb(raising(OSError(28, "No space left on device", "/var/x")))
    assert main(["version"]) == 20
    assert "/var/x: No space left on device" in capsys.readouterr().err


def test_missing_package_is_named(verb, capsys):
    verb(raising(ModuleNotFoundError("No module named 'blake3'", name="blake3")))
    assert main(["version"]) == ToolMissing.exit_code
    assert "the Python package blake3 was not found" in capsys.readouterr().err


def test_bug_still_gets_a_message_and_a_remedy(verb, capsys):
    verb(raising(RuntimeError("boom")))
    assert main(["version"]) == VgpuError.exit_code
    assert "unexpected RuntimeError: boom" in capsys.readouterr().err


def test_bug_shows_its_traceback_when_asked(verb, monkeypatch):
    monkeypatch.setenv("VGPU_TRACEBACK", "1")
    verb(raising(RuntimeError("boom")))
    with pytest.raises(RuntimeError):
        main(["version"])


def test_interrupt_ends_with_130_and_no_traceback(verb, capsys):
    verb(raising(KeyboardInterrupt()))
    assert main(["version"]) == 130
    assert capsys.readouterr() == ("", "")


def test_reader_that_goes_away_is_no_error_message():
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "vgpu_cli.main", "version"],
        cwd=REPOSITORY,
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("arguments", [["podman"], ["--undo"], ["podman", "--dry-run"]])
def test_setup_of_this_node_needs_root(arguments, monkeypatch):
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert main(["setup", *arguments]) == NeedsRoot.exit_code


def test_setup_refuses_another_etc(tmp_path):
    assert main(["--etc", str(tmp_path), "setup", "podman", "--destdir", str(tmp_path)]) == UserError.exit_code


# ---- output forms --------------------------------------------------------------------------------


def test_json_output_prints_the_document_alone(capsys):
    out = Output(is_json=True)
    out.line("hidden")
    out.table("hidden", ("a",), [("b",)])
    out.json({"a": "ä"})
    assert capsys.readouterr().out == '{"a": "ä"}\n'


def test_output_for_people_hides_the_document(capsys):
    out = Output(is_json=False)
    out.json({"a": 1})
    out.line("shown")
    out.table("", ("name", "n"), [("x", 1), ("longer", None)])
    assert capsys.readouterr().out == "shown\nname    n\nx       1\nlonger\n"


def test_plain_table_aligns_and_names():
    assert plain_table("Title", ("a", "b"), [("long cell", "x")]) == "Title\na          b\nlong cell  x"


def test_terminal_table_shows_brackets_as_they_are(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    Output(is_json=False).table("", ("a",), [("[red]not markup[/red]",)])
    assert "[red]not markup[/red]" in capsys.readouterr().out


def test_version_is_the_one_of_the_distribution(capsys):
    declared = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
    assert declared == VERSION
    assert main(["version", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["version"] == declared
