"""`vgpu push` and `vgpu pull` as a user calls them: archives, encryption, podman's image, what is printed, exit codes."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import tarfile

import pytest

import vgpu_errors
from image_format.archives import ocistore
from image_format.encryption import Identity
from image_format.references import reference
from image_format.registry import Registry, Retries
from image_format.transport import Notes, look, open_source, push
from image_format.transport.tying import tie
from image_format.transport.watching import Counts, Watcher
from image_format.trust.policy import Policy
from tests.format.store_stage import Stage
from tests.format.test_push_pull import BULK, archive_of, random_bytes, same_files, seal_bulk
from tests.simulators.registry import RegistrySimulator
from vgpu_cli import main as cli
from vgpu_cli.transfer_view import Lines

FAST = Retries(attempts=3, base_s=0.01, cap_s=0.02)
CREATED = {"architecture": "amd64", "os": "linux", "rootfs": {"type": "layers", "diff_ids": []}, "config": {}}


@pytest.fixture
def simulator(tmp_path):
    with RegistrySimulator(tmp_path / "registry") as started:
        yield started


@pytest.fixture
def stage(tmp_path, node):
    folder = tmp_path / "first"
    folder.mkdir()
    return Stage(folder, node)


@pytest.fixture
def vgpu(node, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(tmp_path / "none.json"))

    def call(*words, store=tmp_path / "store", code=0):
        arguments = ["--etc", str(node), "--json", *map(str, words), "--store", str(store)]
        assert cli.main(arguments) == code, capsys.readouterr()
        out, err = capsys.readouterr()
        return json.loads(out), err

    return call


@pytest.fixture
def keys(tmp_path):
    """Key pairs of recipients by name: (private file, public file)."""

    def make(name):
        identity = Identity.generate()
        (tmp_path / f"{name}.key").write_bytes(identity.to_pem())
        (tmp_path / f"{name}.key").chmod(0o600)
        (tmp_path / f"{name}.pub").write_bytes(identity.public.to_pem())
        return tmp_path / f"{name}.key", tmp_path / f"{name}.pub"

    return make


def test_a_directory_goes_up_and_comes_down(vgpu, simulator, stage, tmp_path):
    directory = seal_bulk(stage, "one", random_bytes(BULK))
    where = f"{simulator.address}/team/model:1"
    pushed, told = vgpu("push", directory, where)
    assert pushed["bytesSent"] > BULK
    assert simulator.tags["team/model"]["1"] == pushed["digest"]
    lines = [json.loads(line) for line in told.splitlines()]
    assert lines[-1] == {"phase": "push", "done": lines[-1]["total"], "total": lines[-1]["total"]}
    assert vgpu("push", directory, where)[0]["bytesSent"] == 0
    pulled, _ = vgpu("pull", where)
    assert pulled["manifestDigest"] == pushed["manifestDigest"]
    assert not pulled["wasThere"]
    assert vgpu("pull", where)[0]["wasThere"]
    assert vgpu("pull", where, "-o", tmp_path / "out")[0]["bytesFetched"] > BULK
    same_files(directory, tmp_path / "out")
    assert vgpu("push", pulled["manifestDigest"][:12], f"{simulator.address}/team/again:1")[0]["bytesSent"] == 0


def test_the_image_is_signed_and_verify_says_so(vgpu, simulator, stage, node, capsys):
    directory = seal_bulk(stage, "one", random_bytes(BULK))
    where = f"{simulator.address}/team/model:1"
    vgpu("push", directory, where)
    assert cli.main(["--etc", str(node), "--json", "verify", where]) == 0
    assert json.loads(capsys.readouterr().out)["trusted"] is True
    vgpu("push", directory, f"{simulator.address}/team/bare:1", "--no-sign")
    assert cli.main(["--etc", str(node), "--json", "verify", f"{simulator.address}/team/bare:1"]) != 0


@pytest.mark.parametrize("suffix", ["tar", "tar.gz", "tar.zst"])
def test_an_archive_comes_out_as_an_archive(vgpu, simulator, stage, tmp_path, suffix, node):
    directory = seal_bulk(stage, "one", random_bytes(BULK))
    archive = archive_of(directory, stage.folder / "one.tar")
    where = f"{simulator.address}/team/model:1"
    vgpu("push", archive, where)
    target = tmp_path / f"out.{suffix}"
    vgpu("pull", where, "-o", target)
    assert sorted(path.name for path in tmp_path.iterdir() if "pull" in path.name) == []
    vgpu("push", target, where)  # what came out can go in again, as the same thing
    if suffix == "tar":
        with tarfile.open(archive) as before, tarfile.open(target) as after:
            names = {member.name: member.size for member in before if member.isfile()}
            assert {member.name: member.size for member in after if member.isfile()} == names
            assert after.extractfile("config.dump").read() == b'{"name":"x"}'
    vgpu("pull", where, "-o", target, code=vgpu_errors.UserError.exit_code)  # nothing is replaced


def test_engine_files_that_nobody_signed_are_refused(vgpu, simulator, stage, tmp_path):
    """The seal does not cover them, and a registry could give others."""
    archive = archive_of(seal_bulk(stage, "one", random_bytes(BULK)), stage.folder / "one.tar")
    where = f"{simulator.address}/team/model:1"
    vgpu("push", archive, where, "--no-sign")
    vgpu("pull", where, "-o", tmp_path / "out.tar", code=vgpu_errors.Unsigned.exit_code)
    assert not (tmp_path / "out.tar").exists()
    vgpu("pull", where)  # the checkpoint itself is signed by its seal


def test_without_engine_files_there_is_no_archive(vgpu, simulator, stage, tmp_path):
    where = f"{simulator.address}/team/model:1"
    vgpu("push", seal_bulk(stage, "one", random_bytes(BULK)), where)
    vgpu("pull", where, "-o", tmp_path / "out.tar", code=vgpu_errors.UnsupportedRequest.exit_code)


# ---- encryption ----------------------------------------------------------------------------------


def test_an_encrypted_image_opens_with_its_key_alone(vgpu, simulator, stage, keys, tmp_path):
    archive = archive_of(seal_bulk(stage, "one", bytes(BULK // 2) + random_bytes(BULK // 2)), stage.folder / "one.tar")
    (private, public), (other, _) = keys("lab"), keys("other")
    where = f"{simulator.address}/team/model:1"
    pushed, _ = vgpu("push", archive, where, "--encrypt-to", public)
    assert pushed["encrypted"]
    everything = b"".join(path.read_bytes() for path in (simulator.folder / "blobs").iterdir())
    for secret in (b"config.dump", b"memory.img", random_bytes(BULK // 2)[:64]):
        assert secret not in everything
    vgpu("pull", where, code=vgpu_errors.NotARecipient.exit_code)
    vgpu("pull", where, "--identity", other, code=vgpu_errors.NotARecipient.exit_code)
    assert vgpu("pull", where, "--identity", other, "--identity", private)[0]["encrypted"]
    vgpu("pull", where, "-o", tmp_path / "out", "--identity", private)
    same_files(stage.folder / "one", tmp_path / "out")
    vgpu("pull", where, "-o", tmp_path / "out.tar", "--identity", private)


def test_two_encrypted_pushes_have_nothing_in_common(vgpu, simulator, stage, keys):
    directory = seal_bulk(stage, "one", random_bytes(BULK))
    _, public = keys("lab")
    for tag in ("1", "2"):
        vgpu("push", directory, f"{simulator.address}/team/model:{tag}", "--encrypt-to", public, "--no-sign")
    first, second = (
        {layer["digest"] for layer in json.loads(simulator.manifests["team/model"][digest][0])["layers"]}
        for digest in simulator.tags["team/model"].values()
    )
    assert not first & second


@pytest.mark.parametrize("place", [0, 1, 6])
def test_a_changed_encrypted_blob_is_refused(vgpu, simulator, stage, keys, place):
    """Its digest, too: whoever owns the registry can write a manifest that fits."""
    private, public = keys("lab")
    where = f"{simulator.address}/team/model:1"
    pushed, _ = vgpu("push", seal_bulk(stage, "one", random_bytes(BULK)), where, "--encrypt-to", public, "--no-sign")
    doc = json.loads(simulator.manifests["team/model"][pushed["digest"]][0])
    data = bytearray(simulator.blob(doc["layers"][place]["digest"]))
    data[len(data) // 2] ^= 1
    doc["layers"][place]["digest"] = simulator.add_blob("team/model", bytes(data))
    with Registry(where, retries=FAST, environ={}) as registry:
        registry.put_manifest(json.dumps(doc).encode(), doc["mediaType"])
    vgpu("pull", where, "--identity", private, code=vgpu_errors.Undecryptable.exit_code)


def test_swapped_encrypted_blobs_are_refused(vgpu, simulator, stage, keys):
    private, public = keys("lab")
    where = f"{simulator.address}/team/model:1"
    pushed, _ = vgpu("push", seal_bulk(stage, "one", random_bytes(BULK)), where, "--encrypt-to", public, "--no-sign")
    doc = json.loads(simulator.manifests["team/model"][pushed["digest"]][0])
    doc["layers"][3], doc["layers"][4] = doc["layers"][4], doc["layers"][3]
    with Registry(where, retries=FAST, environ={}) as registry:
        registry.put_manifest(json.dumps(doc).encode(), doc["mediaType"])
    vgpu("pull", where, "--identity", private, code=vgpu_errors.ContentMismatch.exit_code)


# ---- podman's image ------------------------------------------------------------------------------


def layout_of(folder, members):
    """An OCI layout as `podman save` writes it: one image of one gzip layer."""
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w") as archive:
        for name, data in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    layer = gzip.compress(tar.getvalue())
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": put(folder, json.dumps(CREATED).encode(), "application/vnd.oci.image.config.v1+json"),
        "layers": [put(folder, layer, "application/vnd.oci.image.layer.v1.tar+gzip")],
        "annotations": {"io.podman.annotations.checkpoint.name": "counter"},
    }
    described = put(folder, json.dumps(manifest).encode(), manifest["mediaType"])
    (folder / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [described]}))
    (folder / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')
    return ocistore.LayoutDirectory(folder)


def put(folder, data, media_type):
    digest = hashlib.sha256(data).hexdigest()
    (folder / "blobs/sha256").mkdir(parents=True, exist_ok=True)
    (folder / "blobs/sha256" / digest).write_bytes(data)
    return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(data)}


def members_of(directory, note=None):
    kept = {name for name in os.listdir(directory) if name != "memory.img"}
    members = {f"checkpoint/{name}": (directory / name).read_bytes() for name in kept}
    return members | {"config.dump": b"{}"} | ({"checkpoint/vgpu-reference.json": note} if note else {})


def tied(simulator, node, directory, members, folder):
    policy = Policy.load(node)
    layout = layout_of(folder, members)
    with (
        open_source(str(directory), policy, folder) as source,
        Registry(f"{simulator.address}/team/model:1", retries=FAST, environ={}) as registry,
    ):
        pushed = push(source, registry, Notes(None), target="")
        return pushed, tie(layout, pushed, registry, Counts(), Watcher())


def test_podmans_image_learns_where_its_content_is(simulator, stage, node, policy, tmp_path):
    directory = seal_bulk(stage, "one", random_bytes(BULK))
    digest = hashlib.sha256((directory / "vgpu-manifest.json").read_bytes()).hexdigest()
    note = reference.ReferenceNote(digest, ("memory.img",), (), {"other": 1}).to_bytes()
    pushed, result = tied(simulator, node, directory, members_of(directory, note), tmp_path / "layout")
    assert result.is_reference
    index = json.loads(simulator.manifests["team/model"][simulator.tags["team/model"]["1"]][0])
    assert [entry["platform"]["os"] for entry in index["manifests"]] == ["linux", "unknown"]
    assert index["manifests"][1]["digest"] == pushed.digest
    image = json.loads(simulator.manifests["team/model"][result.image_digest][0])
    assert image["annotations"] == {"io.podman.annotations.checkpoint.name": "counter"}
    plain = gzip.decompress(simulator.blob(image["layers"][0]["digest"]))
    config = json.loads(simulator.blob(image["config"]["digest"]))
    assert config["rootfs"]["diff_ids"] == ["sha256:" + hashlib.sha256(plain).hexdigest()]
    with tarfile.open(fileobj=io.BytesIO(plain)) as tar:
        doc = json.loads(tar.extractfile("checkpoint/vgpu-reference.json").read())
        assert tar.extractfile("config.dump").read() == b"{}"
    assert doc["locations"] == [str(pushed.reference)]
    assert doc["other"] == 1
    with Registry(f"{simulator.address}/team/model:1", retries=FAST, environ={}) as registry:
        assert look(registry, policy).claims.manifest_digest == pushed.manifest_digest  # through the index


def test_an_image_of_another_checkpoint_is_not_tied(simulator, stage, node, tmp_path):
    one, two = (seal_bulk(stage, name, random_bytes(1 << 20, n), generation=n) for n, name in ((1, "one"), (2, "two")))
    with pytest.raises(vgpu_errors.ContentMismatch):
        tied(simulator, node, one, members_of(two), tmp_path / "layout")
    with pytest.raises(vgpu_errors.NoSuchImage):
        tied(simulator, node, one, {"config.dump": b"{}"}, tmp_path / "other")
    assert "1" not in simulator.tags.get("team/model", {})


def test_lines_tell_what_moves(capsys):
    view = Lines()
    view.phase("push", 6)
    view.moved("push", 4)
    view.note("a wait")
    view.grow("push", 4)
    view.moved("push", 6)
    view.end()
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert lines[0] == {"phase": "push", "done": 0, "total": 6}
    assert {"note": "a wait"} in lines
    assert lines[-1] == {"phase": "push", "done": 10, "total": 10}
