"""`--json`: every verb has a written schema or says why not, and prints what the schema says, errors included.

What verbs print in any test is held to the schemas by tests/conftest.py; here is one real document of each.
"""

from __future__ import annotations

import json

import pytest
from jsonschema import Draft202012Validator, ValidationError

from gpu_state.known_containers import known_containers
from tests.conftest import SPEC, output_validator
from tests.unit.agent_stage import CONTAINER, Stage, cgroup2_mount
from vgpu_cli import container_names, known
from vgpu_cli.main import main, texts_of, verbs
from vgpu_cli.output import Output
from vgpu_cli.verbs import ps
from vgpu_errors import all_errors

VECTORS = SPEC / "vectors"
PLAIN, STAGED = VECTORS / "1.0/good/plain", VECTORS / "1.1/good/small-chunks"
needs_cgroup = pytest.mark.skipif(cgroup2_mount() is None, reason="needs root and a writable cgroup2 hierarchy")


@pytest.mark.parametrize("verb", verbs())
def test_a_verb_has_a_schema_or_says_why_it_prints_no_document(verb):
    reason = texts_of(verb).get("NO_JSON")
    validator = output_validator(verb)
    assert (validator is None) == bool(reason), f"write spec/{verb}-output.schema.json, or NO_JSON = why"
    if validator is not None:
        Draft202012Validator.check_schema(validator.schema)
        assert f"vgpu {verb} --json" in validator.schema["title"]
        assert f"{verb}-output.schema.json" in (SPEC / "README.md").read_text(encoding="utf-8")


def test_every_output_schema_belongs_to_a_verb():
    named = {path.name.removesuffix("-output.schema.json") for path in SPEC.glob("*-output.schema.json")}
    assert named - {"error"} <= set(verbs())


def run_json(capsys, *arguments):
    code = main(["--json", *map(str, arguments)])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "verb"),
    [
        (["version"], "version"),
        (["setup", "podman", "--dry-run", "--destdir", "{tmp}"], "setup"),
        (["setup", "--undo", "--destdir", "{tmp}"], "setup"),
        (["--etc", "{tmp}", "trust", "ls"], "trust"),
        (["--etc", "{tmp}", "trust", "add", VECTORS / "1.0/keys/trusted.pub"], "trust"),
        (["--etc", "{tmp}", "inspect", "--no-fitness", STAGED], "inspect"),
        (["--etc", "{tmp}", "diff", PLAIN, STAGED], "diff"),
        (["--etc", "{tmp}", "diff", STAGED, STAGED], "diff"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_verb_prints_what_its_schema_says(arguments, verb, tmp_path, capsys):
    code, doc = run_json(capsys, *[str(word).replace("{tmp}", str(tmp_path)) for word in arguments])
    assert code == 0
    output_validator(verb).validate(doc)


@pytest.mark.parametrize("error", list(all_errors()), ids=lambda cls: cls.__name__)
def test_an_error_prints_what_the_schema_of_errors_says(error, monkeypatch, capsys):
    raised = error(what="it", path="/x", where="there")
    raised.add_note("a note")

    def run(args, out):
        raise raised

    monkeypatch.setattr("vgpu_cli.verbs.version.run", run)
    code, doc = run_json(capsys, "version")
    assert code == doc["error"]["exit_code"] == error.exit_code
    output_validator("error").validate(doc)


def test_the_net_below_the_verbs_holds(capsys):
    """A document that is not as written fails the test that prints it."""

    namespace = {"__name__": "vgpu_cli.verbs.version", "Output": Output}
    exec("def broken():\n    Output(True).json({'version': 1})", namespace)
    with pytest.raises(ValidationError):
        namespace["broken"]()


@pytest.mark.parametrize("text", ["caf\u00e9", "name-\udcff", "\x1b[31mred"])
def test_any_text_gets_through_as_json_and_as_text(text, capsys):
    Output(is_json=True).json({"name": text})
    assert json.loads(capsys.readouterr().out) == {"name": text}
    Output(is_json=False).table("", ["name"], [[text]])
    Output(is_json=False).line(text)
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "\udcff" not in shown


# ---- verbs that ask the agent --------------------------------------------------------------------


@pytest.fixture
def stage(monkeypatch):
    stage = Stage()
    monkeypatch.setattr(container_names, "PODMAN_SOCKET", stage.folder / "no-podman.sock")
    monkeypatch.setattr(container_names, "ENGINE_COMMANDS", ())
    for module in (ps, known):
        monkeypatch.setattr(module, "known_containers", lambda: known_containers(stage.run_dir / "state"))
    stage.start_agent()
    stage.write_state()
    yield stage
    stage.close()


@needs_cgroup
def test_the_verbs_that_ask_the_agent_print_what_their_schemas_say(stage, capsys, monkeypatch):
    counter = stage.counter("one")
    socket = ["--socket", str(stage.socket)]
    code, doc = run_json(capsys, "ps", *socket)
    output_validator("ps").validate(doc)
    assert [process["pid"] for process in doc["containers"][0]["processes"]] == [counter.pid]
    code, doc = run_json(capsys, "doctor", CONTAINER, *socket)
    output_validator("doctor").validate(doc)
    assert doc["container"] == CONTAINER
    for verb in ("suspend", "resume"):
        code, doc = run_json(capsys, verb, CONTAINER, *socket)
        assert code == 0, doc
        output_validator(verb).validate(doc)
        assert doc["container"] == CONTAINER
    assert counter.is_counting()
