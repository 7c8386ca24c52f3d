"""Push and pull against a registry in this process: what comes out is what was sealed, and only what is missing moves."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import random
import shutil
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from image_format.record import Container
from image_format.references import reference
from image_format.registry import Reference, Registry, Retries
from image_format.sealing import seal
from image_format.store import Store
from image_format.transport import Notes, fetch_missing, look, open_source, pull_into_directory, pull_into_store, push
from image_format.transport.manifest import TransportManifest
from image_format.transport.pulling import PullOptions
from image_format.transport.pushing import PushOptions
from image_format.trust.keys import make_node_key
from image_format.trust.policy import Policy
from image_format.verifying import verify_directory
from tests.format.make_vectors import base_files, base_record
from tests.format.store_stage import Stage
from tests.simulators.registry import Fault, RegistrySimulator, Settings
from vgpu_errors import (
    ContentMismatch,
    DeadlineExceeded,
    FormatTooNew,
    ImageError,
    NoSuchImage,
    NotInRegistry,
    RegistryError,
    RegistryGaveUp,
    StoreBusy,
    Unsigned,
    UntrustedKey,
    UserError,
    VgpuError,
)

MIB = 1 << 20
FAST = Retries(attempts=4, base_s=0.01, cap_s=0.02, connect_timeout_s=2, read_timeout_s=3)
BULK = 32 * MIB


def random_bytes(size, seed=0):
    return random.Random(seed).randbytes(size)


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
def other_store(tmp_path):
    return Store.open(tmp_path / "second-store", deadline_s=5)


def seal_bulk(stage, name, bulk, generation=1, **container):
    """A sealed directory with one large file."""
    folder = stage.folder / name
    folder.mkdir()
    for file, data in base_files().items():
        (folder / file).write_bytes(data)
    (folder / "memory.img").write_bytes(bulk)
    record = dataclasses.replace(
        base_record(),
        generation=generation,
        created=f"2026-11-0{generation}T12:00:00Z",
        container=Container(container.get("container", "a" * 64), "podman", name="bulk"),
    )
    seal(folder, record, stage.key)
    return folder


def client(simulator, repository="team/model", tag="1"):
    return Registry(f"{simulator.address}/{repository}:{tag}", retries=FAST, environ={})


def push_it(simulator, directory, policy, *, store=None, repository="team/model", tag="1", options=None):
    root = store.root if store else directory.parent / "no-store"
    with open_source(str(directory), policy, root) as source, client(simulator, repository, tag) as registry:
        return push(source, registry, Notes.of_store(store.root if store else None), options=options)


def pull_it(simulator, store, policy, *, repository="team/model", tag="1", watcher=None):
    with client(simulator, repository, tag) as registry:
        remote = look(registry, policy)
        return pull_into_store(registry, remote, store, Notes.of_store(store.root), watcher=watcher)


def same_files(first, second):
    assert sorted(os.listdir(first)) == sorted(os.listdir(second))
    for name in os.listdir(first):
        assert (first / name).read_bytes() == (second / name).read_bytes(), name


# ---- there and back ------------------------------------------------------------------------------


def test_a_checkpoint_comes_back_as_it_was_sealed(simulator, stage, policy, other_store):
    directory = stage.seal()
    pushed = push_it(simulator, directory, policy)
    pulled = pull_it(simulator, other_store, policy)
    assert pulled.manifest_digest == pushed.manifest_digest
    assert pulled.directory == other_store.directory_of(pushed.manifest_digest)
    assert verify_directory(pulled.directory, policy).manifest_digest == pushed.manifest_digest
    for name in os.listdir(directory):
        if not name.startswith("vgpu-pack-"):  # unused rests of slots may differ
            assert (directory / name).read_bytes() == (pulled.directory / name).read_bytes(), name


def test_into_a_directory(simulator, stage, policy, tmp_path):
    directory = seal_bulk(stage, "one", random_bytes(BULK))
    push_it(simulator, directory, policy)
    with client(simulator) as registry:
        pull_into_directory(registry, look(registry, policy), tmp_path / "out")
    same_files(directory, tmp_path / "out")


def test_the_manifest_is_an_artifact_that_any_registry_tool_reads(simulator, stage, policy):
    pushed = push_it(simulator, stage.seal(), policy)
    data, media_type = simulator.manifests["team/model"][pushed.digest]
    doc = json.loads(data)
    assert media_type == doc["mediaType"] == "application/vnd.oci.image.manifest.v1+json"
    assert doc["artifactType"] == "application/vnd.vgpu.checkpoint.v1+json"
    assert doc["config"]["mediaType"] == "application/vnd.vgpu.checkpoint.record.v1+json"
    for descriptor in (doc["config"], *doc["layers"]):
        assert simulator.path_of(descriptor["digest"]).stat().st_size == descriptor["size"]
    assert simulator.tags["team/model"] == {"1": pushed.digest}


def test_the_same_checkpoint_gives_the_same_manifest_anywhere(simulator, stage, policy):
    directory = stage.seal()
    shutil.copytree(directory, stage.folder / "copy")
    digests = {
        push_it(simulator, stage.folder / name, policy, repository=repository).digest
        for name, repository in (("image", "one"), ("copy", "two"))
    }
    digests.add(push_it(simulator, directory, policy, store=stage.store).digest)
    digests.add(push_it(simulator, directory, policy, store=stage.store).digest)  # with its own packs as earlier ones
    assert len(digests) == 1


def test_a_checkpoint_of_the_store_is_pushed_by_its_name(simulator, stage, policy, other_store):
    kept = stage.store.add(stage.seal())
    with open_source("name-cccc", policy, stage.store.root) as source, client(simulator) as registry:
        pushed = push(source, registry, Notes.of_store(stage.store.root))
    assert pushed.manifest_digest == kept.manifest_digest
    assert pull_it(simulator, other_store, policy).manifest_digest == kept.manifest_digest


# ---- only what is missing ------------------------------------------------------------------------


def test_a_second_push_sends_nothing(simulator, stage, policy):
    directory = seal_bulk(stage, "one", random_bytes(BULK))
    first = push_it(simulator, directory, policy)
    before = simulator.received()
    second = push_it(simulator, directory, policy)
    assert second.digest == first.digest
    assert second.counts.sent == 0
    assert second.counts.skipped == first.counts.sent
    assert simulator.received() == before


def test_a_later_checkpoint_sends_what_changed(simulator, stage, policy, other_store):
    """One chunk of 25 changed: that one, and the small documents, cross the wire; in both directions."""
    bulk = bytearray(random_bytes(100 * MIB))
    push_it(simulator, seal_bulk(stage, "one", bulk), policy, store=stage.store)
    pull_it(simulator, other_store, policy)
    bulk[50 * MIB : 50 * MIB + 8] = b"changed!"
    later = seal_bulk(stage, "two", bulk, generation=2)
    pushed = push_it(simulator, later, policy, store=stage.store, tag="2")
    assert pushed.counts.sent < 5 * MIB
    pulled = pull_it(simulator, other_store, policy, tag="2")
    assert pulled.counts.fetched < 5 * MIB
    assert pulled.counts.reused >= 96 * MIB
    same_files(later, pulled.directory)


def test_a_sibling_repository_gives_its_blobs(simulator, stage, policy):
    directory = seal_bulk(stage, "one", random_bytes(BULK))
    push_it(simulator, directory, policy, store=stage.store, repository="team/one")
    before = simulator.received()
    pushed = push_it(simulator, directory, policy, store=stage.store, repository="team/two")
    assert pushed.counts.sent == 0
    assert pushed.counts.mounted > BULK
    assert simulator.received() == before


def test_a_named_repository_gives_its_blobs_to_a_node_that_never_pushed_there(simulator, stage, policy):
    directory = seal_bulk(stage, "one", random_bytes(BULK))
    push_it(simulator, directory, policy, repository="team/one")
    pushed = push_it(simulator, directory, policy, repository="team/two", options=PushOptions(("team/one",)))
    assert pushed.counts.sent == 0


def test_without_mounts_everything_is_sent(simulator, stage, policy):
    simulator.settings.mounts = False
    directory = seal_bulk(stage, "one", random_bytes(BULK))
    push_it(simulator, directory, policy, store=stage.store, repository="team/one")
    pushed = push_it(simulator, directory, policy, store=stage.store, repository="team/two")
    assert pushed.counts.sent > BULK
    assert pushed.counts.mounted == 0


def test_packs_that_the_registry_lost_are_made_anew(simulator, stage, policy, other_store):
    bulk = bytearray(random_bytes(BULK))
    push_it(simulator, seal_bulk(stage, "one", bulk), policy, store=stage.store)
    for digest in list(simulator.blobs["team/model"]):
        if simulator.path_of(digest).stat().st_size > MIB:
            simulator.blobs["team/model"].remove(digest)
    bulk[0] ^= 1
    later = seal_bulk(stage, "two", bulk, generation=2)
    push_it(simulator, later, policy, store=stage.store, tag="2")
    same_files(later, pull_it(simulator, other_store, policy, tag="2").directory)


def test_a_pull_of_what_is_there_fetches_only_the_documents(simulator, stage, policy, other_store):
    push_it(simulator, seal_bulk(stage, "one", random_bytes(BULK)), policy)
    pull_it(simulator, other_store, policy)
    asked = len(simulator.asked("GET", "/blobs/"))
    again = pull_it(simulator, other_store, policy)
    assert again.was_there
    assert len(simulator.asked("GET", "/blobs/")) == asked + 4


# ---- faults --------------------------------------------------------------------------------------


def test_a_pull_that_was_cut_off_goes_on(simulator, stage, policy, other_store):
    directory = seal_bulk(stage, "one", random_bytes(BULK))
    push_it(simulator, directory, policy)
    path = max(simulator.blobs["team/model"], key=lambda digest: simulator.path_of(digest).stat().st_size)
    simulator.faults = [
        Fault("cut", "GET", path, after_bytes=20 * MIB),
        Fault("status", "GET", path, status=500, times=99),
    ]
    with pytest.raises(RegistryGaveUp):
        pull_it(simulator, other_store, policy)
    assert other_store.checkpoints() == ()
    simulator.faults = []
    pulled = pull_it(simulator, other_store, policy)
    assert pulled.counts.fetched < BULK - 15 * MIB
    same_files(directory, pulled.directory)


def test_a_push_that_was_cut_off_goes_on(simulator, stage, policy):
    directory = seal_bulk(stage, "one", random_bytes(BULK))
    simulator.faults = [Fault("status", "PUT", "/manifests/", status=403)]
    with pytest.raises(RegistryError):
        push_it(simulator, directory, policy)
    assert not simulator.tags.get("team/model")
    pushed = push_it(simulator, directory, policy)
    assert pushed.counts.sent == 0
    assert simulator.tags["team/model"] == {"1": pushed.digest}


def test_the_manifest_comes_last_and_packs_first(simulator, stage, policy):
    push_it(simulator, seal_bulk(stage, "one", random_bytes(BULK)), policy)
    writes = [seen for seen in simulator.log if seen.method in ("PUT", "PATCH")]
    assert "/manifests/" in writes[-1].path
    assert writes[0].received == BULK


FLAKY = {
    "cut uploads": Settings(max_body=3 * MIB),
    "slow": Settings(bytes_per_s=80e6),
    "no ranges": Settings(ranges=False),
    "no whole put": Settings(whole_put=False),
}


@pytest.mark.parametrize("kind", FLAKY)
def test_whatever_the_registry_is_like(simulator, stage, policy, other_store, kind):
    simulator.settings = FLAKY[kind]
    simulator.faults = [
        Fault("cut", "", "/blobs/", skip=5, times=3, after_bytes=MIB),
        Fault("status", "", "/v2/", skip=20, times=3, status=429, headers={"Retry-After": "0"}),
    ]
    directory = seal_bulk(stage, "one", random_bytes(BULK))
    push_it(simulator, directory, policy)
    same_files(directory, pull_it(simulator, other_store, policy).directory)


def largest(simulator):
    return max(simulator.blobs["team/model"], key=lambda digest: simulator.path_of(digest).stat().st_size)


def layer_of(simulator, pushed, suffix):
    doc = json.loads(simulator.manifests["team/model"][pushed.digest][0])
    return next(item["digest"] for item in (doc["config"], *doc["layers"]) if item["mediaType"].endswith(suffix))


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "suffix", ["pack.v1.raw", "packed-index.v1", "criu.v1.tar+zstd", ".record.v1+json", "bundle.v0.3+json"]
)
def test_a_changed_blob_is_refused_and_nothing_is_taken_for_whole(simulator, stage, policy, other_store, suffix):
    pushed = push_it(simulator, seal_bulk(stage, "one", random_bytes(BULK)), policy)
    path = simulator.path_of(layer_of(simulator, pushed, suffix))
    flip(path, path.stat().st_size // 2)
    with pytest.raises(VgpuError):
        pull_it(simulator, other_store, policy)
    assert other_store.checkpoints() == ()


def put_changed(simulator, pushed, change):
    doc = json.loads(simulator.manifests["team/model"][pushed.digest][0])
    change(doc)
    with client(simulator) as registry:
        registry.put_manifest(json.dumps(doc).encode(), doc["mediaType"])


def swap_packs(doc):
    doc["layers"][5]["digest"], doc["layers"][4]["digest"] = doc["layers"][4]["digest"], doc["layers"][5]["digest"]


CHANGED_MANIFESTS = {
    "packs and small files swapped": (swap_packs, ImageError),
    "a layer missing": (lambda doc: doc["layers"].pop(), ContentMismatch),
    "no signature": (lambda doc: doc["layers"].pop(3), ImageError),
    "an unknown layer": (lambda doc: doc["layers"].append({**doc["layers"][0], "mediaType": "text/plain"}), ImageError),
    "another root": (
        lambda doc: doc["annotations"].update({"vgpu.checkpoint.content-root": "0" * 64}),
        ContentMismatch,
    ),
    "a later version": (
        lambda doc: doc.update(artifactType="application/vnd.vgpu.checkpoint.v2+json"),
        FormatTooNew,
    ),
    "a terminal escape": (
        lambda doc: doc["annotations"].update({"org.opencontainers.image.created": "\x1b[2J"}),
        ImageError,
    ),
    "a huge layer": (lambda doc: doc["layers"][3].update(size=1 << 40), ImageError),
}


@pytest.mark.parametrize("kind", CHANGED_MANIFESTS)
def test_a_changed_manifest_is_refused(simulator, stage, policy, other_store, kind):
    change, error = CHANGED_MANIFESTS[kind]
    put_changed(simulator, push_it(simulator, seal_bulk(stage, "one", random_bytes(BULK)), policy), change)
    with pytest.raises(error):
        pull_it(simulator, other_store, policy)
    assert other_store.checkpoints() == ()


def test_a_stranger_s_checkpoint_is_refused_before_its_packs_are_fetched(
    simulator, stage, policy, other_store, tmp_path
):
    push_it(simulator, seal_bulk(stage, "one", random_bytes(BULK)), policy)
    (tmp_path / "stranger").mkdir()
    make_node_key(tmp_path / "stranger")
    with pytest.raises(UntrustedKey):
        pull_it(simulator, other_store, Policy.load(tmp_path / "stranger"))
    assert not simulator.asked("GET", largest(simulator))
    assert len(simulator.asked("GET", "/blobs/")) == 1  # the signature alone


def test_what_changed_after_the_seal_is_not_pushed(simulator, stage, policy):
    directory = seal_bulk(stage, "one", random_bytes(BULK))
    flip(directory / "memory.img", 5 * MIB)
    with pytest.raises(ContentMismatch):
        push_it(simulator, directory, policy)
    assert simulator.received() == 0  # a pack is compared as a whole before a byte of it is sent
    assert not simulator.tags.get("team/model")


def test_what_is_not_sealed_is_not_pushed(simulator, stage, policy):
    directory = seal_bulk(stage, "one", random_bytes(MIB))
    (directory / "vgpu-signature.json").unlink()
    with pytest.raises(Unsigned):
        push_it(simulator, directory, policy)


# ---- archives ------------------------------------------------------------------------------------


def archive_of(directory, path, mode="w"):
    with tarfile.open(path, mode) as tar:
        for name, data in (("config.dump", b'{"name":"x"}'), ("spec.dump", b"{}"), ("rootfs-diff.tar", bytes(10240))):
            (directory.parent / name).write_bytes(data)
            tar.add(directory.parent / name, name)
        tar.add(directory, "checkpoint")
    return path


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_an_archive_is_pushed_without_a_store(simulator, stage, policy, other_store, mode):
    directory = seal_bulk(stage, "one", random_bytes(BULK))
    pushed = push_it(simulator, archive_of(directory, stage.folder / "one.tar", mode), policy)
    same_files(directory, pull_it(simulator, other_store, policy).directory)
    doc = json.loads(simulator.manifests["team/model"][pushed.digest][0])
    assert doc["layers"][-1]["mediaType"] == "application/vnd.vgpu.checkpoint.engine.v1.tar+zstd"


def test_a_reference_is_pushed_out_of_the_store(simulator, stage, policy, other_store):
    directory = seal_bulk(stage, "one", random_bytes(BULK))
    kept = stage.store.add(directory, links=False)
    reference.refer(directory, stage.store, kept, names_it="a test")
    assert not (directory / "memory.img").exists()
    with open_source(str(directory), policy, stage.store.root) as source, client(simulator) as registry:
        push(source, registry, Notes(None))
    assert (pull_it(simulator, other_store, policy).directory / "memory.img").stat().st_size == BULK


# ---- what a reference lacks ----------------------------------------------------------------------


def note_for(pushed, *locations):
    return reference.ReferenceNote(pushed.manifest_digest, ("memory.img",), locations)


def test_what_a_reference_lacks_is_fetched(simulator, stage, policy, other_store):
    directory = seal_bulk(stage, "one", random_bytes(BULK))
    pushed = push_it(simulator, directory, policy)
    note = note_for(pushed, f"127.0.0.1:1/gone@{pushed.digest}", str(pushed.reference))

    def connect(where):
        return Registry(where, retries=FAST, environ={})

    fetched = fetch_missing(note, policy, other_store, deadline_s=60, connect=connect)
    same_files(directory, fetched.directory)


def test_another_checkpoint_is_not_taken_for_the_missing_one(simulator, stage, policy, other_store):
    pushed = push_it(simulator, seal_bulk(stage, "one", random_bytes(MIB)), policy)
    other = push_it(simulator, seal_bulk(stage, "two", random_bytes(MIB, 1), generation=2), policy, tag="2")
    with pytest.raises(ContentMismatch):
        fetch_missing(note_for(pushed, str(other.reference)), policy, other_store, deadline_s=60)
    assert other_store.checkpoints() == ()


def test_no_location_says_so(policy, other_store):
    note = reference.ReferenceNote("a" * 64, ("memory.img",), ())
    with pytest.raises(ImageError, match="names no registry"):
        fetch_missing(note, policy, other_store, deadline_s=60)


def test_notes_survive_nonsense(tmp_path):
    notes = Notes(tmp_path / "transfers")
    digest = "a" * 64
    where = Reference.parse(f"registry.example/team/model@sha256:{'b' * 64}")
    notes.add(digest, where)
    notes.add(digest, where)
    assert notes.locations(digest) == (where,)
    assert notes.on_host("registry.example", ["../x", digest]) == [where]
    (tmp_path / "transfers" / f"{digest}.json").write_bytes(b"{")
    assert notes.locations(digest) == ()
    assert notes.on_host("registry.example", []) == []
    assert Notes(None).on_host("registry.example", [digest]) == []


def test_an_index_without_a_checkpoint_is_none(simulator, policy, other_store):
    index = {"schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json", "manifests": []}
    with client(simulator) as registry:
        registry.put_manifest(json.dumps(index).encode(), index["mediaType"])
    with pytest.raises(NoSuchImage):
        pull_it(simulator, other_store, policy)
    with pytest.raises(NotInRegistry):
        pull_it(simulator, other_store, policy, tag="none")


def test_the_manifest_reads_back_as_it_was(simulator, stage, policy):
    pushed = push_it(simulator, stage.seal(), policy)
    data = simulator.manifests["team/model"][pushed.digest][0]
    assert TransportManifest.from_bytes(data, where="test").to_bytes() == data


def test_options_are_bounds(simulator, stage, policy, other_store):
    directory = seal_bulk(stage, "one", random_bytes(BULK))
    push_it(simulator, directory, policy, options=PushOptions(threads=1, in_flight=1))
    assert simulator.most_in_flight <= 16
    with client(simulator) as registry:
        remote = look(registry, policy)
        pull_into_store(registry, remote, other_store, Notes(None), options=PullOptions(threads=1, in_flight=1))


# ---- what was found in review ----------------------------------------------------------------------


def seal_two(stage, name, first, second, generation=1):
    """A sealed directory with two large files, which share some chunks."""
    folder = stage.folder / name
    folder.mkdir()
    for file, data in {**base_files(), "first.img": first, "second.img": second}.items():
        (folder / file).write_bytes(data)
    created = f"2026-11-0{generation}T12:00:00Z"
    seal(folder, dataclasses.replace(base_record(), generation=generation, created=created), stage.key)
    return folder


def test_a_file_that_the_store_has_is_linked_and_not_copied(simulator, stage, policy, other_store):
    shared, changed = random_bytes(16 * MIB), random_bytes(16 * MIB, 1)
    first = seal_two(stage, "one", shared, shared[: 8 * MIB] + random_bytes(4 * MIB, 2))
    push_it(simulator, first, policy)
    kept = pull_it(simulator, other_store, policy).directory
    later = seal_two(stage, "two", shared, shared[: 8 * MIB] + changed, generation=2)
    push_it(simulator, later, policy, tag="2")
    pulled = pull_it(simulator, other_store, policy, tag="2")
    same_files(later, pulled.directory)
    assert (pulled.directory / "first.img").samefile(kept / "first.img")
    assert pulled.counts.fetched < 17 * MIB
    same_files(first, kept)
    verify_directory(pulled.directory, policy)


def test_damaged_content_of_the_store_is_not_linked(simulator, stage, policy, other_store):
    bulk = random_bytes(BULK)
    push_it(simulator, seal_bulk(stage, "one", bulk), policy)
    kept = pull_it(simulator, other_store, policy).directory
    with (kept / "memory.img").open("r+b") as file:
        file.write(b"damage")
    later = seal_bulk(stage, "two", bulk, generation=2)
    push_it(simulator, later, policy, tag="2")
    pulled = pull_it(simulator, other_store, policy, tag="2")
    same_files(later, pulled.directory)
    assert (kept / "memory.img").read_bytes()[:6] == b"damage"


def test_a_pull_that_was_cut_off_goes_on_beside_linked_files(simulator, stage, policy, other_store):
    shared = random_bytes(16 * MIB)
    push_it(simulator, seal_two(stage, "one", shared, random_bytes(4 * MIB, 1)), policy)
    pull_it(simulator, other_store, policy)
    later = seal_two(stage, "two", shared, random_bytes(BULK, 2), generation=2)
    push_it(simulator, later, policy, tag="2")
    path = max(simulator.blobs["team/model"], key=lambda digest: simulator.path_of(digest).stat().st_size)
    simulator.faults = [
        Fault("cut", "GET", path, after_bytes=20 * MIB),
        Fault("status", "GET", path, status=500, times=99),
    ]
    with pytest.raises(RegistryGaveUp):
        pull_it(simulator, other_store, policy, tag="2")
    simulator.faults = []
    same_files(later, pull_it(simulator, other_store, policy, tag="2").directory)


@pytest.mark.parametrize("kind", ["somebody's", "another checkpoint", "in use"])
def test_a_directory_of_something_else_is_left_alone(simulator, stage, policy, tmp_path, kind):
    push_it(simulator, seal_bulk(stage, "one", random_bytes(MIB)), policy)
    target = tmp_path / "target"
    if kind == "another checkpoint":
        seal_bulk(stage, "two", random_bytes(MIB, 1), generation=2).rename(target)
    else:
        target.mkdir()
    if kind == "somebody's":
        (target / "memory.img").write_bytes(b"mine")
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    held = os.open(target, os.O_RDONLY)
    if kind == "in use":
        fcntl.flock(held, fcntl.LOCK_EX)
    with client(simulator) as registry, pytest.raises(StoreBusy if kind == "in use" else UserError):
        pull_into_directory(registry, look(registry, policy), target)
    os.close(held)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before


def test_a_sibling_that_may_not_be_read_costs_bytes_and_no_more(simulator, stage, policy):
    push_it(simulator, seal_bulk(stage, "one", random_bytes(MIB)), policy, store=stage.store)
    simulator.faults = [Fault("status", "GET", "/v2/team/model/manifests/", status=403, times=99)]
    later = seal_bulk(stage, "two", random_bytes(MIB), generation=2)
    push_it(simulator, later, policy, store=stage.store, repository="team/other")


def test_a_fetch_ends_with_the_time_and_the_next_one_goes_on(simulator, stage, policy, other_store):
    directory = seal_bulk(stage, "one", random_bytes(BULK))
    pushed = push_it(simulator, directory, policy)
    note = note_for(pushed, str(pushed.reference))
    simulator.settings.bytes_per_s = 8e6

    def connect(where):
        return Registry(where, retries=FAST, environ={})

    started = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        fetch_missing(note, policy, other_store, deadline_s=1.0, connect=connect)
    assert time.monotonic() - started < 10
    simulator.settings.bytes_per_s = 0
    fetched = fetch_missing(note, policy, other_store, deadline_s=60, connect=connect)
    assert fetched.counts.fetched < BULK
    same_files(directory, fetched.directory)


def test_a_fetch_waits_for_another_one_of_the_same(simulator, stage, policy, other_store):
    directory = seal_bulk(stage, "one", random_bytes(MIB))
    pushed = push_it(simulator, directory, policy)
    note = note_for(pushed, str(pushed.reference))
    with ThreadPoolExecutor(1) as pool:
        with other_store.receive(pushed.manifest_digest):
            with pytest.raises(StoreBusy):
                fetch_missing(note, policy, other_store, deadline_s=0.7)
            waiting = pool.submit(fetch_missing, note, policy, other_store, deadline_s=60)
            time.sleep(0.7)
            assert not waiting.done()
        same_files(directory, waiting.result(30).directory)
