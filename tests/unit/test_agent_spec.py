"""The written protocol: every example is valid, and what a real agent sends is what the schema says."""

import json
import re

import pytest
from jsonschema import Draft202012Validator

from gpu_state.requests import Request
from tests.unit.agent_stage import CONTAINER, ROOT, Stage, cgroup2_mount
from vgpu_errors import AgentRefused, all_errors

PAGE = (ROOT / "spec/agent-protocol.md").read_text()
SCHEMA = json.loads((ROOT / "spec/agent-protocol.schema.json").read_text())
EXAMPLES = re.findall(r"```json (\w+)\n(.*?)\n```", PAGE, re.DOTALL)


def validator(kind):
    return Draft202012Validator({"$ref": f"#/$defs/{kind}", "$defs": SCHEMA["$defs"]})


def test_the_schema_is_one():
    Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize(("kind", "text"), EXAMPLES, ids=[f"{n}-{kind}" for n, (kind, _) in enumerate(EXAMPLES)])
def test_an_example_is_valid(kind, text):
    doc = json.loads(text)
    validator(kind).validate(doc)
    Draft202012Validator(SCHEMA).validate(doc)
    if kind == "request":
        assert Request.from_line(text.encode()).verb == doc["verb"]
    if kind == "failure":
        codes = {error.__name__: error.exit_code for error in all_errors()}
        assert codes[doc["error"]["class"]] == doc["error"]["exit_code"]


def test_every_fence_names_what_it_shows():
    assert PAGE.count("```json") == len(EXAMPLES) == PAGE.count("```") // 2


def test_every_verb_is_described():
    from gpu_state.service import _VERBS

    assert set(re.findall(r"^### (\w+)$", PAGE, re.MULTILINE)) == set(_VERBS)
    assert set(SCHEMA["$defs"]["request"]["properties"]["verb"]["enum"]) == set(_VERBS)


def test_one_sentence_a_line():
    outside = re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL)
    two = [line for line in outside.splitlines() if re.search(r"[a-z)`]\. [A-Z]", line)]
    assert two == []


@pytest.mark.parametrize(
    "doc",
    [
        {"id": "1", "verb": "hello"},
        {"verb": "hello"},
        {"id": 1},
        {"id": 1, "verb": "hello", "args": []},
    ],
)
def test_schema_and_parser_refuse_the_same(doc):
    assert not validator("request").is_valid(doc)
    with pytest.raises(AgentRefused):
        Request.from_line(json.dumps(doc).encode())


@pytest.mark.skipif(cgroup2_mount() is None, reason="needs root and a writable cgroup2 hierarchy")
def test_a_real_agent_sends_what_the_schema_says():
    stage = Stage()
    try:
        stage.start_agent()
        stage.counter("one")
        asked = [
            ("hello", {}),
            ("facts", {}),
            ("inventory", {"cgroup": stage.cgroup}),
            ("freeze", {"container": CONTAINER, "cgroup": stage.cgroup, "deadline_s": 15}),
            ("watch", {"container": CONTAINER}),
            ("nonsense", {}),
        ]
        for line in conversation(stage, asked):
            Draft202012Validator(SCHEMA).validate(line)
    finally:
        stage.close()


def conversation(stage, asked):
    """Every line that the agent sends for these requests."""
    import socket

    seen = []
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(20)
        sock.connect(stage.socket)
        with sock.makefile("rwb") as lines:
            for number, (verb, args) in enumerate(asked):
                lines.write(json.dumps({"id": number, "verb": verb, "args": args}).encode() + b"\n")
                lines.flush()
                while "ok" not in (line := json.loads(lines.readline())):
                    seen.append(line)
                seen.append(line)
    assert [line["ok"] for line in seen if "ok" in line] == [True] * (len(asked) - 1) + [False]
    assert any("event" in line for line in seen)
    return seen
