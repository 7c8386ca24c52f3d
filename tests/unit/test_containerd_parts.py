"""The parts of containerd_integration that need no containerd: wire format, index, flat tar, leftovers, restored settings."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import tarfile
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from containerd_integration import cgroup_choice, criu_options, kubelet_unit, kubelet_watch, leftovers, restored_spec
from containerd_integration.api import definitions, wire
from containerd_integration.flat_tar import FlatTar, unpack
from containerd_integration.kubelet_sealing import remove_half_sealed
from containerd_integration.remote_image import RemoteImage, is_local
from containerd_integration.work_folder import locked, work_folder
from image_format.archives import containerd_index
from image_format.archives.containerd_index import CRIU_TYPE, CheckpointIndex, Descriptor
from vgpu_errors import ImageError, LimitExceeded, NoSuchImage, UnexpectedEntry, UnsafeName, UserError

DIGEST = f"sha256:{'a' * 64}"


# ---- wire ----------------------------------------------------------------------------------------


def test_every_message_and_method_of_the_definitions_can_be_made():
    for package, text in definitions.PACKAGES.items():
        for match in wire._MESSAGE.finditer(text):
            assert wire.message(f"{package}.{match[1]}")().SerializeToString() == b""
        for service in wire._SERVICE.finditer(text):
            for method in wire._METHOD.finditer(service[2]):
                assert wire.method(f"{package}.{service[1]}", method[1]).path == f"/{package}.{service[1]}/{method[1]}"


def test_bytes_are_those_that_containerd_writes():
    """Field numbers and types by hand: 1 = "id" (0x0a), map 2, Any 5 with type_url 1 and value 2, snapshot_key 7 (0x3a)."""
    spec = wire.message("google.protobuf.Any")(type_url="t", value=b"v")
    made = wire.message("containerd.services.containers.v1.Container")(
        id="a", labels={"k": "v"}, spec=spec, snapshot_key="s"
    )
    assert made.SerializeToString() == b"\x0a\x01a\x12\x06\x0a\x01k\x12\x01v\x2a\x06\x0a\x01t\x12\x01v\x3a\x01s"


def test_an_unknown_field_of_a_later_containerd_is_kept():
    data = b"\x0a\x01a\xa2\x06\x03xyz"
    kept = wire.message("containerd.services.containers.v1.Container").FromString(data)
    assert kept.SerializeToString() == data


def test_a_line_that_is_no_field_is_refused():
    with pytest.raises(ValueError, match="is no field"):
        wire._add_message(wire.descriptor_pb2.FileDescriptorProto(), "p", "M", "string name 1;")


# ---- index ---------------------------------------------------------------------------------------


def index(**changes):
    entries = changes.pop(
        "entries", (Descriptor(CRIU_TYPE, DIGEST, 10), Descriptor(containerd_index.SPEC_TYPE, DIGEST, 3))
    )
    annotations = {containerd_index.IMAGE_KEY: "img:1", containerd_index.LABELS_KEY: '{"a":"b"}', **changes}
    return CheckpointIndex(entries, tuple(sorted(annotations.items())))


def test_index_round_trip():
    made = index()
    assert containerd_index.parse(made.to_bytes(), where="x") == made
    assert (made.image_name, made.container_labels) == ("img:1", {"a": "b"})


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda doc: doc.pop("manifests"), ImageError),
        (lambda doc: doc["manifests"].pop(0), NoSuchImage),
        (lambda doc: doc["manifests"][0].update(digest="sha512:00"), ImageError),
        (lambda doc: doc["manifests"][0].update(digest="sha256:../../etc"), ImageError),
        (lambda doc: doc["manifests"][0].update(size=-1), ImageError),
        (lambda doc: doc.update(annotations={"a": 1}), ImageError),
        (lambda doc: doc.update(manifests=doc["manifests"] * 100), LimitExceeded),
    ],
)
def test_bad_index_is_refused(change, error):
    doc = json.loads(index().to_bytes())
    change(doc)
    with pytest.raises(error):
        containerd_index.parse(json.dumps(doc).encode(), where="x")


# ---- flat tar ------------------------------------------------------------------------------------


@given(st.dictionaries(st.from_regex(r"[a-z][a-z0-9.-]{0,120}", fullmatch=True), st.binary(max_size=3000), max_size=6))
def test_tar_round_trip(tmp_path_factory, files):
    source, target = tmp_path_factory.mktemp("a"), tmp_path_factory.mktemp("b")
    for name, data in files.items():
        (source / name).write_bytes(data)
    tar = FlatTar(source)
    data = b"".join(tar.pieces())
    described = tar.described()
    assert (described.size, described.digest) == (len(data), f"sha256:{hashlib.sha256(data).hexdigest()}")
    unpack([data[at : at + 700] for at in range(0, len(data), 700)], target, where="x")
    assert {entry.name: entry.read_bytes() for entry in target.iterdir()} == files
    assert all(entry.stat().st_mode & 0o777 == 0o600 for entry in target.iterdir())


@pytest.mark.parametrize(
    ("name", "kind", "error"),
    [
        ("../x", tarfile.REGTYPE, UnsafeName),
        ("/x", tarfile.REGTYPE, UnsafeName),
        ("a/b", tarfile.REGTYPE, UnsafeName),
        ("x", tarfile.SYMTYPE, UnexpectedEntry),
        ("x", tarfile.CHRTYPE, UnexpectedEntry),
        ("x", tarfile.DIRTYPE, UnexpectedEntry),
    ],
)
def test_tar_with_more_than_plain_files_is_refused(tmp_path, name, kind, error):
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = kind, "/etc/passwd" if kind == tarfile.SYMTYPE else ""
    with pytest.raises(error):
        unpack([entry.tobuf() + bytes(1024)], tmp_path, where="x")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("make", [lambda p: p.mkdir(), lambda p: p.symlink_to("/etc/passwd"), os.mkfifo])
def test_a_directory_with_more_than_plain_files_is_refused(tmp_path, make):
    make(tmp_path / "x")
    with pytest.raises(UnexpectedEntry):
        FlatTar(tmp_path)


# ---- what is left behind -------------------------------------------------------------------------


def leaked(folder: Path, name: str, *, is_ours: bool = True) -> Path:
    path = folder / name
    path.mkdir()
    (path / ("vgpu-manifest.json" if is_ours else "inventory.img")).write_bytes(b"{}")
    return path


def test_only_ours_and_only_unused_ones_may_go(tmp_path):
    ours, used = leaked(tmp_path, "ctrd-checkpoint1"), leaked(tmp_path, "ctrd-checkpoint2")
    leaked(tmp_path, "ctrd-checkpoint3", is_ours=False)
    (tmp_path / "ctrd-checkpoint4").symlink_to(ours)
    with (used / "vgpu-manifest.json").open():
        found = leftovers.find_leftovers(temporary=tmp_path, own=tmp_path / "none", min_age_s=0)
        assert [(one.path, one.reason) for one in found] == [(ours, None), (used, "in use")]
        for one in found:
            leftovers.remove(one)
    assert not ours.exists()
    assert used.exists()
    young = leftovers.find_leftovers(temporary=tmp_path, own=tmp_path / "none", min_age_s=60)
    assert [one.reason for one in young] == ["younger than 60 s"]


def test_a_folder_at_work_or_needed_stays(tmp_path):
    with work_folder(tmp_path, "restore-") as folder:
        assert [one.reason for one in leftovers.find_own(tmp_path)] == ["in use"]
    assert not folder.path.exists()
    with work_folder(tmp_path, "checkpoint-") as folder:
        folder.need("trainer", "default")
    assert [one.reason for one in leftovers.find_own(tmp_path)] == ["holds the state of trainer, which had ended"]
    folder.let_go()
    assert [one.reason for one in leftovers.find_own(tmp_path)] == [None]


# ---- settings of the restored container ----------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/default/old", "/default/new"),
        ("system.slice:containerd:old", "system.slice:containerd:new"),
        ("/default/very-old", "/default/very-old"),
        ("", ""),
    ],
)
def test_cgroup_gets_the_new_name(path, expected):
    spec = json.dumps({"linux": {"cgroupsPath": path}}).encode()
    assert restored_spec.cgroups_path(restored_spec.renamed(spec, "old", "new")) == expected


def test_nothing_else_of_the_settings_changes():
    spec = json.dumps({"process": {"args": ["old"]}, "linux": {"cgroupsPath": "/x/old"}}).encode()
    assert json.loads(restored_spec.renamed(spec, "old", "new"))["process"] == {"args": ["old"]}
    assert restored_spec.renamed(b'{"linux":{}}', "old", "new") == b'{"linux":{}}'


@pytest.mark.parametrize(
    ("tcp", "locks", "lines"), [(True, False, ["tcp-established"]), (True, True, ["tcp-established", "file-locks"])]
)
def test_criu_options_become_a_file_that_runc_reads(tmp_path, tcp, locks, lines):
    done = json.loads(criu_options.with_options(b"{}", keeps_tcp=tcp, keeps_file_locks=locks, folder=tmp_path))
    written = Path(done["annotations"][criu_options.ANNOTATION]).read_text().splitlines()
    assert written[-len(lines) :] == lines


def test_a_container_with_options_of_its_own_keeps_them(tmp_path):
    spec = json.dumps({"annotations": {criu_options.ANNOTATION: "/etc/mine"}}).encode()
    assert criu_options.with_options(spec, keeps_tcp=True, keeps_file_locks=True, folder=tmp_path) == spec
    assert criu_options.with_options(b"{}", keeps_tcp=False, keeps_file_locks=False, folder=tmp_path) == b"{}"


@pytest.mark.parametrize(
    ("version", "moves"),
    [("runc version 1.1.15+ds1", False), ("runc version 1.3.6", True), ("crun version 1.28", False)],
)
def test_old_runc_does_not_move_cgroups(tmp_path, version, moves):
    program = tmp_path / "rt"
    program.write_text(f"#!/bin/sh\necho '{version}'\n")
    program.chmod(0o755)
    assert cgroup_choice.moves_cgroups(str(program)) is moves


@pytest.mark.parametrize(
    ("path", "text", "expected"),
    [("/a", "populated 1\n", True), ("/a", "populated 0\n", False), ("/none", None, False), ("s:c:x", None, False)],
)
def test_populated_cgroup(tmp_path, path, text, expected):
    if text:
        (tmp_path / "a").mkdir()
        (tmp_path / "a/cgroup.events").write_text(text)
    assert cgroup_choice.is_populated(path, root=tmp_path) is expected


# ---- the kubelet's folder ------------------------------------------------------------------------


def test_a_file_that_is_being_written_is_not_whole(tmp_path):
    path = tmp_path / "checkpoint-x.tar"
    with path.open("wb") as file:
        file.write(b"x")
        file.flush()
        assert not kubelet_watch.is_whole(path)
    assert kubelet_watch.is_whole(path)


@pytest.mark.parametrize(
    ("name", "tag"),
    [
        ("checkpoint-pod_ns-c-2026-11-29T18:00:00Z.tar", "checkpoint-pod_ns-c-2026-11-29T18-00-00Z"),
        ("checkpoint-" + "x" * 200 + "-2026.tar", "x" * 123 + "-2026"),
    ],
)
def test_tag_of_an_archive(name, tag):
    assert kubelet_watch.tag_of(name) == tag


def test_failures_are_told_with_the_remedy_and_given_up_after_a_few(tmp_path):
    said: list[str] = []
    (tmp_path / "checkpoint-bad.tar").write_bytes(b"bad" * 1000)
    watch = kubelet_watch.KubeletWatch(tmp_path, tmp_path / "state.json", push_to=None, etc=tmp_path, say=said.append)
    for _ in range(kubelet_watch.MAX_TRIES + 3):
        watch.catch_up()
    assert len(said) == kubelet_watch.MAX_TRIES
    assert "what to do: " in said[0]
    assert said[-1].endswith("It is left alone now.")
    os.utime(tmp_path / "checkpoint-bad.tar")
    assert watch.catch_up() == 1  # another file of that name is looked at again


def test_the_watch_wakes_up_for_a_rename_and_ends_when_asked(tmp_path):
    said: list[str] = []
    watch = kubelet_watch.KubeletWatch(
        tmp_path, tmp_path / "s" / "state.json", push_to=None, etc=tmp_path, say=said.append
    )
    started, rounds = time.monotonic(), []

    def stops():
        rounds.append(1)
        if len(rounds) == 1:
            (tmp_path / "partial").write_bytes(b"bad" * 1000)
            return False
        if len(rounds) == 2:
            (tmp_path / "partial").rename(tmp_path / "checkpoint-bad.tar")
        return bool(said)

    watch.run(rescan_s=30, stops_at=stops)
    assert time.monotonic() - started < 20
    assert said


@pytest.mark.parametrize("text", ["x y", "repo;rm", "-opt", "a\nb"])
def test_a_repository_that_is_no_word_is_refused(text):
    with pytest.raises(UserError):
        kubelet_unit.unit(text)


def test_unit_runs_the_watch():
    assert "ExecStart=/usr/bin/vgpu containerd watch --push-to reg:5000/team\n" in kubelet_unit.unit("reg:5000/team")
    assert "ExecStart=/usr/bin/vgpu containerd watch\n" in kubelet_unit.unit("")


def test_lock_of_a_folder_is_the_kernels(tmp_path):
    with work_folder(tmp_path, "restore-") as folder:
        descriptor = os.open(folder.path, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(descriptor)


def test_a_folder_is_never_seen_unlocked_under_its_name(tmp_path, monkeypatch):
    """Another command sweeps what has no lock, at any moment."""
    seen = []
    rename = Path.rename

    def renamed(self, target):
        seen.append([path.reason for path in leftovers.find_own(tmp_path)])
        found = rename(self, target)
        seen.append([path.reason for path in leftovers.find_own(tmp_path)])
        return found

    monkeypatch.setattr(Path, "rename", renamed)
    with work_folder(tmp_path, "checkpoint-") as folder:
        assert folder.images.is_dir()
    assert seen == [[], ["in use"]]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_somebody_has_begun_to_use_is_not_removed(tmp_path):
    folder = tmp_path / "checkpoint-1"
    folder.mkdir()
    (found,) = leftovers.find_own(tmp_path)
    with locked(folder):
        leftovers.remove(found)
        assert folder.is_dir()
    leftovers.remove(found)
    assert not folder.exists()


def test_what_its_owner_removes_meanwhile_is_no_error(tmp_path, monkeypatch):
    folder = tmp_path / "checkpoint-1"
    folder.mkdir()
    (folder / "pages-1.img").write_bytes(b"x")

    def gone(self):
        raise FileNotFoundError(self)

    monkeypatch.setattr(Path, "lstat", gone)
    assert leftovers.find_own(tmp_path)[0].size == 0


def test_watch_passes_over_what_is_no_archive(tmp_path):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / "checkpoint-a.tar").symlink_to("/etc/passwd")
    (folder / "checkpoint-b.tar").mkdir()
    os.mkfifo(folder / "checkpoint-c.tar")
    said = []
    watch = kubelet_watch.KubeletWatch(folder, tmp_path / "state", push_to=None, etc=tmp_path, say=said.append)
    assert watch.catch_up() == 0
    assert said == []


def test_watch_removes_what_a_killed_one_left_half_sealed(tmp_path):
    left, at_work = tmp_path / ".checkpoint-a.tar.x", tmp_path / ".checkpoint-b.tar.y"
    for folder in (left, at_work):
        folder.mkdir()
        (folder / "pages-1.img").write_bytes(b"x")
    with locked(at_work):
        remove_half_sealed(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == [at_work.name]


@pytest.mark.parametrize(
    ("reference", "expected"),
    [("localhost/a:1", True), ("train:1", True), ("registry.example/a:1", False), ("localhost:5000/a", False)],
)
def test_which_names_are_never_asked_of_a_registry(reference, expected):
    assert is_local(reference) is expected


def test_an_image_that_is_no_checkpoint_is_refused_before_anything_is_fetched():
    from image_format.registry.manifests import MANIFEST_TYPE, StoredManifest

    class Registry:
        reference = "registry.example/a:1"

        def get_manifest(self):
            return StoredManifest(b"{}", MANIFEST_TYPE, "sha256:" + "0" * 64)

    with pytest.raises(NoSuchImage, match="not that of a checkpoint of containerd") as refused:
        RemoteImage(Registry(), has_image=lambda _: False)
    assert "vgpu pull" in refused.value.remedy
