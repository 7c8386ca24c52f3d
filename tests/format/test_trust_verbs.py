"""`vgpu keys`, `sign`, `verify` and `trust` as a user calls them: files, passphrases, documents, exit codes."""

import json
import os
import shutil
from datetime import UTC, datetime
from pathlib import Path

import pytest

from image_format.encryption.recipients import Recipient
from image_format.registry import Registry
from image_format.trust import seen_generations
from image_format.trust.keys import load_public_key, make_node_key
from image_format.trust.seen_generations import SeenGenerations
from tests.format.make_vectors import CONTAINER_ID
from tests.format.test_referrer_signatures import IMAGE, put_checkpoint
from tests.format.test_spec_examples import validator
from tests.simulators.registry import RegistrySimulator
from vgpu_cli import main as cli
from vgpu_cli.verbs import keys as keys_verb

VECTORS = Path(__file__).parents[2] / "spec" / "vectors" / "1.0"
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"


@pytest.fixture
def etc(tmp_path, monkeypatch):
    folder = tmp_path / "vgpu"
    folder.mkdir()
    make_node_key(folder)
    monkeypatch.setitem(seen_generations.refuse_stale.__kwdefaults__, "folder", tmp_path / "var")
    return folder


@pytest.fixture
def vgpu(etc, capsys):
    def call(*arguments):
        code = cli.main(["--etc", str(etc), *map(str, arguments)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def said(vgpu):
    """Runs a command with --json, holds its document to the verb's schema and returns it."""

    def call(verb, *arguments, code=0):
        found, out, err = vgpu("--json", verb, *arguments)
        assert (found, err) == (code, ""), out
        doc = json.loads(out)
        validator("error-output.schema.json" if code else f"{verb}-output.schema.json").validate(doc)
        return doc

    return call


@pytest.fixture
def checkpoint(tmp_path, vgpu):
    assert vgpu("trust", "add", VECTORS / "keys/trusted.pub")[0] == 0
    return shutil.copytree(VECTORS / "good/plain", tmp_path / "checkpoint")


# ---- keys ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", keys_verb.TYPES)
def test_a_key_pair_is_made_and_shown(said, tmp_path, kind):
    made = said("keys", "new", "--type", kind, tmp_path / "a.key")
    assert (made["type"], made["publicPath"], made["hasPassphrase"]) == (kind, str(tmp_path / "a.pub"), False)
    assert (tmp_path / "a.key").stat().st_mode & 0o777 == 0o600
    load = Recipient.load if kind == "x25519" else load_public_key
    assert load(tmp_path / "a.pub").key_id == made["keyId"]
    for half in ("a.key", "a.pub"):
        shown = said("keys", "show", tmp_path / half)
        assert (shown["keyId"], shown["type"]) == (made["keyId"], kind)
        assert shown["purpose"] == ("encryption" if kind == "x25519" else "signing")


def test_a_key_is_never_replaced(vgpu, tmp_path):
    assert vgpu("keys", "new", tmp_path / "a")[0] == 0
    before = [(tmp_path / name).read_bytes() for name in ("a", "a.pub")]
    assert vgpu("keys", "new", tmp_path / "a")[0] == 11
    assert [(tmp_path / name).read_bytes() for name in ("a", "a.pub")] == before


def test_a_passphrase_comes_from_a_file_or_the_environment(said, vgpu, tmp_path, monkeypatch, checkpoint):
    secret = tmp_path / "secret"
    secret.write_text("correct horse\n")
    secret.chmod(0o600)
    assert said("keys", "new", "--passphrase-file", secret, tmp_path / "a.key")["hasPassphrase"]
    assert b"ENCRYPTED" in (tmp_path / "a.key").read_bytes()
    monkeypatch.setenv("PHRASE", "correct horse")
    for option in (["--passphrase-file", secret], ["--passphrase-env", "PHRASE"]):
        assert vgpu("sign", checkpoint, "--key", tmp_path / "a.key", *option)[0] == 0
        shutil.rmtree(checkpoint)
        shutil.copytree(VECTORS / "good/plain", checkpoint)
    monkeypatch.setenv("PHRASE", "battery staple")
    code, _, err = vgpu("sign", checkpoint, "--key", tmp_path / "a.key", "--passphrase-env", "PHRASE")
    assert code == 11
    assert "does not open" in err
    assert "battery" not in err


def test_without_a_terminal_nobody_is_asked(vgpu, tmp_path, monkeypatch):
    class NoTerminal:
        def isatty(self):
            return False

    monkeypatch.setattr("sys.stdin", NoTerminal())
    code, _, err = vgpu("keys", "new", "--passphrase", tmp_path / "a.key")
    assert code == 10
    assert "--passphrase-file" in err
    assert not (tmp_path / "a.key").exists()


def test_on_a_terminal_the_passphrase_is_typed_twice(vgpu, tmp_path, monkeypatch):
    class Terminal:
        def isatty(self):
            return True

    monkeypatch.setattr("sys.stdin", Terminal())
    answers = iter(["one", "two", "one", "one", "one"])
    monkeypatch.setattr("getpass.getpass", lambda prompt: next(answers))
    assert vgpu("keys", "new", "--passphrase", tmp_path / "a.key")[0] == 10
    assert vgpu("keys", "new", "--passphrase", tmp_path / "a.key")[0] == 0
    assert vgpu("keys", "show", tmp_path / "a.key")[0] == 0


@pytest.mark.parametrize("problem", ["readable by all", "absent", "unset variable"])
def test_a_passphrase_that_cannot_be_had_is_told(vgpu, tmp_path, problem):
    secret = tmp_path / "secret"
    if problem == "readable by all":
        secret.write_text("x")
        secret.chmod(0o644)
    option = ["--passphrase-env", "NOT_SET_AT_ALL"] if problem == "unset variable" else ["--passphrase-file", secret]
    assert vgpu("keys", "new", *option, tmp_path / "a.key")[0] in (10, 11)
    assert not (tmp_path / "a.key").exists()


# ---- a directory ---------------------------------------------------------------------------------


def test_a_directory_is_signed_for_a_while(said, vgpu, checkpoint):
    doc = said("sign", checkpoint, "--expires", "90d")
    assert (doc["kind"], doc["expires"][:2]) == ("directory", "20")
    verified = said("verify", checkpoint)
    assert (verified["expires"], verified["keyName"]) == (doc["expires"], "this node")
    assert [f"sha256:{verified['manifestDigest']}"] == doc["digests"]
    code, out, _ = vgpu("verify", checkpoint)
    assert code == 0
    assert doc["expires"] in out


def test_an_expired_signature_is_refused_with_its_own_code(vgpu, said, checkpoint, monkeypatch):
    said("sign", checkpoint, "--expires", "12h")
    later = datetime(2999, 1, 1, tzinfo=UTC)
    monkeypatch.setitem(seen_generations.refuse_stale.__kwdefaults__, "now", later)
    assert said("verify", checkpoint, code=64)["error"]["class"] == "Expired"


@pytest.mark.parametrize(("rule", "code"), [("allow", 0), ("warn", 0), ("refuse", 65)])
def test_an_older_generation_is_treated_as_the_policy_says(said, checkpoint, etc, tmp_path, rule, code):
    SeenGenerations(tmp_path / "var").note(CONTAINER_ID, 99)
    (etc / "policy.json").write_text(json.dumps({"version": 2, "default": "refuse-untrusted", "olderGeneration": rule}))
    doc = said("verify", checkpoint, code=code)
    if code == 0:
        assert len(doc["warnings"]) == (rule == "warn")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["{checkpoint}", "--expires", "soon"], 10),
        (["{checkpoint}", "--key", "/nowhere/x.key"], 11),
        (["{checkpoint}/pages-1.img"], 14),
        (["no-such-thing"], 14),
    ],
)
def test_what_cannot_be_signed_is_told(said, checkpoint, arguments, code):
    words = [word.replace("{checkpoint}", str(checkpoint)) for word in arguments]
    doc = said("sign", *words, code=code)["error"]
    assert doc["exit_code"] == code
    assert doc["remedy"]


# ---- a registry ----------------------------------------------------------------------------------


@pytest.fixture
def simulator(tmp_path):
    with RegistrySimulator(tmp_path / "registry") as found:
        yield found


def test_an_image_in_a_registry_is_signed_and_verified(said, vgpu, simulator):
    reference = f"{simulator.address}/team/train:1"
    with Registry(reference, plain_http=True) as registry:
        registry.put_manifest(IMAGE, MANIFEST_TYPE)
    for name in (reference, f"docker://{reference}"):
        assert said("verify", name, code=60)["error"]["class"] == "Unsigned"
    signed = said("sign", reference, "--expires", "4w")
    doc = said("verify", reference)
    assert (doc["kind"], doc["trusted"], doc["checkpoint"]) == ("registry image", True, None)
    assert [doc["digest"]] == signed["digests"]
    assert {entry["expires"] for entry in doc["signatures"]} == {signed["expires"]}
    code, out, _ = vgpu("verify", reference)
    assert code == 0
    assert out.rstrip().endswith("verified")


def test_a_checkpoint_in_a_registry_is_verified_with_its_seal(said, vgpu, simulator):
    reference = f"{simulator.address}/team/train:1"
    with Registry(reference, plain_http=True) as registry:
        put_checkpoint(registry)
    said("sign", reference)
    assert said("verify", reference, code=61)["error"]["class"] == "UntrustedKey"  # the seal's own signer
    assert vgpu("trust", "add", VECTORS / "keys/trusted.pub")[0] == 0
    doc = said("verify", reference)
    assert (doc["checkpoint"]["containerId"], doc["checkpoint"]["generation"]) == (CONTAINER_ID, 3)
    assert "generation 3" in vgpu("verify", reference)[1]


@pytest.mark.parametrize("recipient", [None, "lab"])
def test_a_deep_look_fetches_and_compares_everything(said, vgpu, simulator, checkpoint, tmp_path, recipient):
    reference = f"{simulator.address}/team/train:1"
    encrypt, identity = [], []
    if recipient:
        said("keys", "new", "--type", "x25519", tmp_path / "lab.key")
        encrypt, identity = ["--encrypt-to", tmp_path / "lab.pub"], ["--identity", tmp_path / "lab.key"]
    assert vgpu("push", checkpoint, reference, *encrypt, "--store", tmp_path / "store")[0] == 0
    doc = said("verify", reference)
    assert (doc["deep"], doc["encryptedTo"] is None) == (False, recipient is None)
    assert (doc["checkpoint"] is None) == (recipient is not None)
    doc = said("verify", "--deep", *identity, reference)
    assert (doc["deep"], doc["checkpoint"]["generation"]) == (True, 3)
    if recipient:
        assert said("verify", "--deep", reference, code=67)["error"]["class"] == "NotARecipient"
    blob = max(simulator.blobs["team/train"], key=lambda digest: simulator.path_of(digest).stat().st_size)
    data = bytearray(simulator.blob(blob))
    data[len(data) // 2] ^= 1
    simulator.path_of(blob).write_bytes(data)
    assert vgpu("verify", reference)[0] == 0  # no pack was read
    assert vgpu("verify", "--deep", *identity, reference)[0] == (66 if recipient else 52)


def test_a_name_without_a_registry_stays_a_name_of_podman(said):
    assert said("verify", "train", code=14)["error"]["class"] == "NoSuchImage"


# ---- trust ---------------------------------------------------------------------------------------


def test_trusted_keys_are_listed_with_their_fingerprints_and_removed_by_them(said, vgpu, tmp_path):
    made = said("keys", "new", "--type", "ed25519", tmp_path / "lab.key")
    code, out, _ = vgpu("trust", "add", tmp_path / "lab.pub")
    shown = said("keys", "show", tmp_path / "lab.pub")
    assert code == 0
    assert shown["fingerprint"] in out
    listed = said("trust", "ls")["keys"]
    assert [(entry["name"], entry["type"]) for entry in listed] == [("this node", "ecdsa-p256"), ("lab", "ed25519")]
    assert listed[1]["fingerprint"] == shown["fingerprint"]
    assert said("trust", "rm", shown["fingerprint"]) == {"removed": "lab", "keyId": made["keyId"]}


def test_trust_on_a_node_that_was_not_set_up_says_what_to_do(tmp_path, capsys):
    assert cli.main(["--etc", str(tmp_path / "none"), "trust", "add", str(VECTORS / "keys/trusted.pub")]) == 11
    assert "vgpu setup podman" in capsys.readouterr().err


def test_a_passphrase_need_not_be_text(vgpu, tmp_path, monkeypatch):
    monkeypatch.setitem(os.environb, b"SECRET", b"\xff\xfe")
    assert vgpu("keys", "new", "--passphrase-env", "SECRET", tmp_path / "k.key")[0] == 0
    assert vgpu("keys", "show", "--passphrase-env", "SECRET", tmp_path / "k.key")[0] == 0


def test_an_empty_passphrase_file_is_told_and_nobody_is_asked(vgpu, tmp_path):
    assert vgpu("keys", "new", "--passphrase-file", secret(tmp_path, b"x\n"), tmp_path / "k.key")[0] == 0
    code, _, err = vgpu("keys", "show", "--passphrase-file", secret(tmp_path, b"\n"), tmp_path / "k.key")
    assert (code, "holds no passphrase" in err) == (11, True)


def secret(folder, data):
    path = folder / "secret"
    path.touch(mode=0o600)
    path.write_bytes(data)
    return path


def test_a_key_for_encryption_is_no_key_to_trust(vgpu, tmp_path):
    assert vgpu("keys", "new", "--type", "x25519", tmp_path / "lab.key")[0] == 0
    assert vgpu("trust", "add", tmp_path / "lab.pub")[0] == 11
    assert seen_generations.FOLDER == "/var/lib/vgpu"
