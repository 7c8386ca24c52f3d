"""`vgpu inspect`, `diff` and `verify` of checkpoints that are no path: in the node's store, and in a registry."""

from __future__ import annotations

import hashlib
import io
import json

import pytest

from image_format.encryption.encrypted_record import EncryptedRecord
from image_format.encryption.recipients import Identity
from image_format.registry import Registry
from image_format.transport import Notes, open_source, push
from image_format.transport.pushing import PushOptions
from image_format.trust.policy import Policy
from tests.conftest import output_validator
from tests.format.make_vectors import GPU
from tests.format.store_stage import Stage
from tests.simulators.registry import RegistrySimulator
from vgpu_cli import main as cli

EMPTY = hashlib.sha256(b"{}").hexdigest()


@pytest.fixture
def stage(tmp_path, node):
    return Stage(tmp_path, node)


@pytest.fixture
def vgpu(node, capsys, stage):
    def call(verb, *arguments, code=0):
        found = cli.main(["--json", "--etc", str(node), verb, "--store", str(stage.store.root), *map(str, arguments)])
        doc = json.loads(capsys.readouterr().out)
        assert found == code, doc
        if not code:
            output_validator(verb).validate(doc)
        return doc

    return call


@pytest.fixture
def stored(stage):
    for generation, seed in ((1, 1), (2, 2)):
        stage.store.add(stage.seal(f"g{generation}", generation=generation, pages_seed=seed, day=generation))
    return stage


@pytest.mark.parametrize(("word", "generation"), [("name-cccc", 2), ("name-cccc:1", 1), ("c" * 12, 2)])
def test_a_checkpoint_of_the_store_is_found_by_its_container(stored, vgpu, word, generation):
    doc = vgpu("inspect", "--no-fitness", word)
    assert (doc["kind"], doc["record"]["generation"], doc["signature"]["state"]) == ("store", generation, "trusted")
    assert doc["content"]["gpuObjects"] > 0
    assert vgpu("verify", word)["kind"] == "store"


def test_a_path_wins_over_a_name_of_the_store(stored, vgpu, tmp_path, monkeypatch):
    (tmp_path / "g1").rename(tmp_path / "name-cccc")
    monkeypatch.chdir(tmp_path)
    assert vgpu("inspect", "--no-fitness", "name-cccc")["kind"] == "directory"


def test_a_word_that_nobody_knows_is_no_checkpoint(stored, vgpu):
    assert vgpu("inspect", "--no-fitness", "nobody", code=14)["error"]["class"] == "NoSuchImage"
    assert vgpu("verify", "nobody", code=14)


def test_two_generations_differ_in_what_was_written(stored, vgpu):
    doc = vgpu("diff", "name-cccc:1", "name-cccc:2")
    assert [(fact["path"], fact["after"]) for fact in doc["facts"]] == [
        ("created", "2026-11-02T12:00:00Z"),
        ("generation", 2),
    ]
    assert [region["name"] for region in doc["regions"]] == ["pages-2.img"]
    assert doc["content"]["equalBytes"] > 0
    assert 0 < doc["transfer"]["newBytes"] <= doc["transfer"]["sentBytes"]


# ---- in a registry -------------------------------------------------------------------------------


@pytest.fixture
def simulator(tmp_path):
    with RegistrySimulator(tmp_path / "registry") as started:
        yield started


def pushed(simulator, stage, node, directory, *, options=None):
    word = f"{simulator.address}/team/model:1"
    with (
        open_source(str(directory), Policy.load(node), stage.store.root) as source,
        Registry(word, environ={}) as registry,
    ):
        push(source, registry, Notes.of_store(None), options=options)
    return word


def test_an_image_in_a_registry_is_inspected_without_its_packs(simulator, stage, node, vgpu):
    word = pushed(simulator, stage, node, stage.seal())
    before = len(simulator.log)
    doc = vgpu("inspect", "--no-fitness", word)
    assert (doc["kind"], doc["signature"]["state"]) == ("registry image", "trusted")
    assert GPU in [device["uuid"] for device in doc["record"]["devices"]]
    assert len(simulator.log) - before < 12
    assert vgpu("inspect", "--no-fitness", f"docker://{word}")["record"] == doc["record"]
    assert vgpu("diff", word, stage.folder / "image")["isSameContent"] is True


def test_an_encrypted_image_says_whose_key_opens_it(simulator, stage, node, vgpu):
    identity = Identity.generate()
    word = pushed(simulator, stage, node, stage.seal(), options=PushOptions(encrypt_to=(identity.public,)))
    error = vgpu("inspect", "--no-fitness", word, code=67)["error"]
    assert identity.public.key_id in error["message"]
    assert EncryptedRecord.__name__ not in error["message"]


def test_an_image_that_is_no_checkpoint_is_said_to_be_none(simulator, stage, vgpu):
    word = f"{simulator.address}/team/other:1"
    with Registry(word, environ={}) as registry:
        registry.upload_blob(lambda at: io.BytesIO(b"{}"[at:]), f"sha256:{EMPTY}", 2)
        config = {"mediaType": "application/vnd.oci.empty.v1+json", "digest": f"sha256:{EMPTY}", "size": 2}
        data = json.dumps({"schemaVersion": 2, "config": config, "layers": []}).encode()
        registry.put_manifest(data, "application/vnd.oci.image.manifest.v1+json")
    assert "no checkpoint artifact" in vgpu("inspect", "--no-fitness", word, code=14)["error"]["message"]
