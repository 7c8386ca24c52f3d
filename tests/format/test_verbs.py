"""`vgpu inspect`, `verify` and `trust` as a user calls them: what they print, their JSON, their exit codes."""

import json
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from image_format.trust.keys import make_node_key
from tests.format.make_vectors import TRUSTED, UNKNOWN
from tests.format.test_spec_examples import validator
from vgpu_cli import main as cli

VECTORS = Path(__file__).parents[2] / "spec" / "vectors" / "1.0"


@pytest.fixture
def etc(tmp_path):
    folder = tmp_path / "vgpu"
    folder.mkdir()
    make_node_key(folder)
    return folder


@pytest.fixture
def vgpu(etc, capsys):
    def call(*arguments):
        code = cli.main(["--etc", str(etc), *map(str, arguments)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def trusting(vgpu):
    assert vgpu("trust", "add", VECTORS / "keys/trusted.pub")[0] == 0
    return vgpu


GOOD = ["plain", "exported.tar", "exported.tar.gz", "exported.tar.zst", "oci-layout", "oci-archive.tar"]


@pytest.mark.parametrize("name", GOOD)
def test_verify_and_inspect_json_follow_their_schemas(trusting, name):
    code, out, err = trusting("--json", "verify", VECTORS / "good" / name)
    assert (code, err) == (0, "")
    validator("verify-output.schema.json").validate(json.loads(out))
    code, out, err = trusting("--json", "inspect", "--no-fitness", VECTORS / "good" / name)
    assert (code, err) == (0, "")
    doc = json.loads(out)
    validator("inspect-output.schema.json").validate(doc)
    assert doc["signature"]["state"] == "trusted"
    assert doc["content"]["files"] == 4
    assert isinstance(validator("verify-output.schema.json"), Draft202012Validator)


def test_verify_says_what_no_signature_covers(trusting):
    code, out, _ = trusting("verify", VECTORS / "good/exported.tar.zst")
    assert code == 0
    assert "Outside of the signature" in out
    assert "rootfs-diff.tar" in out
    assert out.rstrip().endswith("verified")


@pytest.mark.parametrize(
    ("name", "state"),
    [
        ("bad/unknown-key.tar", "unknown key"),
        ("bad/flipped-record.tar", "invalid"),
        ("bad/flipped-manifest.tar", "invalid"),
        ("bad/truncated-signature.tar", "invalid"),
        ("bad/unsigned.tar", "unsigned"),
        ("bad/flipped-file.tar", "trusted"),
    ],
)
def test_inspect_shows_claims_and_says_who_vouches(trusting, name, state):
    code, out, _ = trusting("--json", "inspect", "--no-fitness", VECTORS / name)
    doc = json.loads(out)
    assert (code, doc["signature"]["state"]) == (0, state)
    validator("inspect-output.schema.json").validate(doc)


def test_inspect_prints_the_tables(trusting):
    code, out, _ = trusting("inspect", "--no-fitness", VECTORS / "good/plain")
    assert code == 0
    for word in ("Checkpoint", "trusted: trusted, key", "NVIDIA H200", "cpuFlags", "0.300", "vgpu verify"):
        assert word in out


SHARED = VECTORS.parent / "1.3" / "good"


@pytest.mark.parametrize("name", ["shared", "shared.tar", "told", "later-minor-version"])
def test_inspect_of_shared_memory_follows_its_schema(trusting, name):
    code, out, _ = trusting("--json", "inspect", "--no-fitness", SHARED / name)
    doc = json.loads(out)
    assert code == 0
    validator("inspect-output.schema.json").validate(doc)
    parties = {held["object"]: [(p["name"], p["role"], p["holds"]) for p in held["parties"]] for held in doc["sharing"]}
    if name == "told":
        assert parties == {"7/1": [("7/1", "exporter", True)]}
        return
    assert parties == {
        "7/1": [("7/1", "exporter", True), ("12/2", "opened", False), ("15/5", "import", False)],
        "12/1": [("12/1", "exporter", True), ("15/6", "import", False)],
        "15/4": [("15/4", "import", True), ("12/3", "import", False)],
    }


def test_inspect_prints_who_shares_what_and_the_groups(trusting):
    code, out, _ = trusting("inspect", "--no-fitness", SHARED / "shared")
    assert code == 0
    for words in (
        "import, its exporter is gone",
        "0x7f8000000000+0x1000, 0x7f8001000000+0x1000 from 0x1000  1:rw",
        "not mapped",
        "0 of 3    7       0          40961",
        "5cf0a19d33e871b2 color 1 key -3  tensor parallel",
        "12/1, 12/2      world 1 of 2, right 0 of 1",
        "needs         staged, shared",
    ):
        assert words in out
    assert "Shared GPU memory" not in trusting("inspect", "--no-fitness", VECTORS / "good/plain")[1]


def test_diff_tells_what_changed_between_processes(trusting):
    code, out, _ = trusting("--json", "diff", SHARED / "told", SHARED / "shared")
    doc = json.loads(out)
    validator("diff-output.schema.json").validate(doc)
    assert code == 0
    facts = {fact["path"]: (fact["before"], fact["after"]) for fact in doc["facts"]}
    assert facts["communicators.5cf0a19d33e871b2.1.sequence.collectives"] == (None, 40961)
    assert facts["features.required"] == (["staged"], ["staged", "shared"])
    (worker,) = [process for process in doc["processes"] if process["nsPid"] == 12]
    assert {"path": "imports.2.of", "before": None, "after": "7/1"} in worker["facts"]
    assert "imports.2.of" in trusting("diff", SHARED / "told", SHARED / "shared")[1]


def test_inspect_without_an_agent_says_that_it_does_not_know(trusting, monkeypatch):
    from gpu_state import client

    def connect(cls, *_, **__):
        raise client.AgentUnreachable(socket="/x", what="nobody there")

    monkeypatch.setattr(client.AgentClient, "connect", classmethod(connect))
    code, out, _ = trusting("--json", "inspect", VECTORS / "good/plain")
    fitness = json.loads(out)["fitness"]
    assert (code, fitness["state"]) == (0, "unknown")
    assert "nobody there" in fitness["what"]


@pytest.mark.parametrize(
    ("name", "code"),
    [("bad/unknown-key.tar", 61), ("bad/unsigned.tar", 60), ("bad/flipped-file.tar", 52), ("absent", 14)],
)
def test_verify_exits_with_the_code_of_the_error(trusting, name, code):
    found, out, err = trusting("verify", VECTORS / name)
    assert (found, out) == (code, "")
    assert "what to do: " in err
    found, out, _ = trusting("--json", "verify", VECTORS / name)
    assert json.loads(out)["error"]["exit_code"] == found == code


def test_verify_refuses_another_spec_dump(trusting, tmp_path):
    data = bytearray((VECTORS / "good/exported.tar").read_bytes())
    at = data.rindex(b'"CAP_KILL"')  # the last one is spec.dump's, the others are the signed record's
    data[at : at + 10] = b'"CAP_BPF "'
    (tmp_path / "a.tar").write_bytes(data)
    code, out, err = trusting("verify", tmp_path / "a.tar")
    assert code == 63
    assert "CAP_BPF" in err
    assert "verified" not in out.splitlines()
    code, out, _ = trusting("--json", "verify", tmp_path / "a.tar")
    assert json.loads(out)["error"]["exit_code"] == code == 63


def test_trust_is_given_and_taken(vgpu, etc):
    assert vgpu("verify", VECTORS / "good/plain")[0] == 61
    code, out, _ = vgpu("--json", "trust", "add", VECTORS / "keys/trusted.pub", "--name", "lab-2")
    assert (code, json.loads(out)) == (0, {"added": True, "name": "lab-2", "keyId": TRUSTED.key_id})
    assert vgpu("verify", VECTORS / "good/plain")[0] == 0
    listed = json.loads(vgpu("trust", "ls", "--json")[1])["keys"]
    assert [entry["name"] for entry in listed] == ["this node", "lab-2"]
    assert vgpu("trust", "rm", "lab-2")[0] == 0
    assert vgpu("verify", VECTORS / "good/plain")[0] == 61
    assert sorted(path.name for path in (etc / "trusted").iterdir()) == []


def test_trust_can_be_taken_by_key_id(trusting):
    assert trusting("trust", "rm", TRUSTED.key_id)[0] == 0
    assert trusting("verify", VECTORS / "good/plain")[0] == 61


def test_trusting_twice_changes_nothing(trusting, etc):
    code, out, _ = trusting("--json", "trust", "add", VECTORS / "keys/trusted.pub", "--name", "again")
    assert (code, json.loads(out)["added"]) == (0, False)
    assert [path.name for path in (etc / "trusted").iterdir()] == ["trusted.pub"]


def test_a_node_key_gets_a_name_that_says_something(vgpu, tmp_path):
    (tmp_path / "node.pub").write_bytes(UNKNOWN.public.to_pem())
    name = json.loads(vgpu("--json", "trust", "add", tmp_path / "node.pub")[1])["name"]
    assert name.startswith("node-")
    assert len(name) == len("node-") + 8


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("trust", "rm", "nobody"), 10),
        (("trust", "rm", "this node"), 10),
        (("trust", "add", "/nonexistent.pub"), 11),
        (("trust", "add", VECTORS / "expected.json"), 11),
        (("trust", "add", VECTORS / "keys/unknown.pub", "--name", "../evil"), 10),
        (("trust", "add", VECTORS / "keys/unknown.pub", "--name", "trusted"), 10),
        (("trust",), 10),
    ],
)
def test_trust_refuses_with_a_remedy(trusting, etc, arguments, code):
    found, _, err = trusting(*arguments)
    assert found == code
    assert "what to do: " in err
    assert [path.name for path in (etc / "trusted").iterdir()] == ["trusted.pub"]
