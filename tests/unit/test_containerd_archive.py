"""An exported containerd checkpoint is verified and inspected without containerd, and refused when it is damaged."""

from __future__ import annotations

import io
import json
import os
import shutil
import tarfile
from pathlib import Path

import pytest

from containerd_integration.exported_file import write_file
from containerd_integration.flat_tar import FlatTar
from containerd_integration.imported_file import ImportedFile
from image_format import source
from image_format.archives import containerd_archive, containerd_index
from image_format.archives.containerd_index import CheckpointIndex, Descriptor
from image_format.trust.policy import Policy
from vgpu_errors import ContentMismatch, ImageError, NoSuchImage, UnexpectedEntry

REFUSED = (ImageError, NoSuchImage)
VECTORS = Path(__file__).parents[2] / "spec" / "vectors" / "1.0"


class Blobs:
    """A content store of one node, in memory."""

    def __init__(self) -> None:
        self.data: dict[str, bytes] = {}

    def stream(self, digest):
        return iter([self.data[digest]])

    def write(self, blob, pieces, labels=None):
        self.data[blob.digest] = b"".join(pieces)

    def add(self, media_type: str, data: bytes) -> Descriptor:
        blob = containerd_index.described(data)
        self.data[blob.digest] = data
        return Descriptor(media_type, blob.digest, blob.size)


@pytest.fixture
def policy(tmp_path):
    trusted = tmp_path / "etc" / "trusted"
    trusted.mkdir(parents=True)
    shutil.copy(VECTORS / "keys" / "trusted.pub", trusted)
    return Policy.load(str(tmp_path / "etc"))


def exported(tmp_path, *, compression="none", folder="plain") -> Path:
    store, tar = Blobs(), FlatTar(VECTORS / "good" / folder)
    spec = store.add(containerd_index.SPEC_TYPE, b"\x0a\x01t\x12\x02{}")
    criu = tar.described()
    index = CheckpointIndex((spec, criu), ((containerd_index.IMAGE_KEY, "img:1"),)).to_bytes()
    path = tmp_path / "x.tar"
    write_file(path, index, store, [spec], tar, criu, compression=compression, on_bytes=lambda _: None)
    return path


@pytest.mark.parametrize("compression", ["none", "gzip", "zstd"])
def test_verify_and_inspect_find_the_sealed_directory(tmp_path, policy, compression):
    path = exported(tmp_path, compression=compression)
    found = source.verify(str(path), policy)
    assert found.kind == "containerd archive"
    assert found.result.verified.key_id is not None
    assert [one.name for one in found.result.outside] == [containerd_index.SPEC_TYPE]
    claimed = source.read_claims(str(path))
    assert claimed.claims.documents.keys() == {
        f"vgpu-{name}" for name in ("index.bin", "record.json", "manifest.json", "signature.json")
    }


def test_import_brings_every_blob_to_its_place(tmp_path):
    images, store = tmp_path / "images", Blobs()
    images.mkdir()
    ImportedFile(exported(tmp_path, compression="zstd")).bring_in(store, images)
    assert {entry.name: entry.read_bytes() for entry in images.iterdir()} == {
        entry.name: entry.read_bytes() for entry in (VECTORS / "good" / "plain").iterdir()
    }
    assert len(store.data) == 1


def test_the_index_is_looked_for_in_one_reading_of_the_layout(tmp_path, monkeypatch):
    found = members(exported(tmp_path))
    top = next(n for n, (entry, _) in enumerate(found) if entry.name == "index.json")
    found.insert(0, found.pop(top))
    blobs = [(tarfile.TarInfo(f"blobs/sha256/{n:064}"), b"x") for n in range(50)]
    write(tmp_path / "y.tar", [found[0], *blobs, *found[1:]])
    parsed = []
    read = containerd_archive.canonical_json.read_object
    monkeypatch.setattr(
        containerd_archive.canonical_json, "read_object", lambda *args, **more: parsed.append(1) or read(*args, **more)
    )
    assert containerd_archive.read_index(tmp_path / "y.tar").entries
    assert len(parsed) == 2


def test_an_archive_without_the_blob_leaves_no_file_open(tmp_path):
    path = exported(tmp_path)
    criu = containerd_archive.read_index(path).need(containerd_index.CRIU_TYPE, where="")
    write(path, [(entry, data) for entry, data in members(path) if not entry.name.endswith(criu.digest[7:])])
    before = os.listdir("/proc/self/fd")
    with pytest.raises(NoSuchImage):
        containerd_archive.read_file_claims(path)
    (tmp_path / "damaged").write_bytes(b"\x1f\x8b" + bytes(600))
    with pytest.raises(ImageError):
        containerd_archive.read_index(tmp_path / "damaged")
    assert len(os.listdir("/proc/self/fd")) == len(before)


def members(path: Path):
    with tarfile.open(path) as tar:
        return [(entry, tar.extractfile(entry).read()) for entry in tar]


def write(path: Path, found) -> None:
    with tarfile.open(path, "w") as tar:
        for entry, data in found:
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))


@pytest.mark.parametrize("number", range(5))
def test_one_flipped_bit_anywhere_is_refused(tmp_path, policy, number):
    """oci-layout alone says nothing that is used; every other member counts."""
    path = exported(tmp_path)
    found = members(path)
    entry, data = found[number]
    changed = bytearray(data)
    changed[len(data) // 2] ^= 1
    found[number] = (entry, bytes(changed))
    write(path, found)
    if entry.name == "oci-layout":
        assert containerd_archive.verify_file(path, policy).verified.key_id
        return
    with pytest.raises(REFUSED):
        containerd_archive.verify_file(path, policy)
    images = tmp_path / "images"
    images.mkdir()
    with pytest.raises(REFUSED):
        ImportedFile(path).bring_in(Blobs(), images)


@pytest.mark.parametrize("number", range(1, 5))
def test_a_missing_member_is_refused(tmp_path, policy, number):
    path = exported(tmp_path)
    found = members(path)
    del found[number]
    write(path, found)
    with pytest.raises(REFUSED):
        containerd_archive.verify_file(path, policy)


def test_members_in_another_order_are_found(tmp_path, policy):
    path = exported(tmp_path)
    write(path, sorted(members(path), key=lambda member: member[0].name))  # as `ctr image export` writes them
    assert source.verify(str(path), policy).kind == "containerd archive"


def test_a_file_more_in_the_sealed_tar_is_refused_though_its_digest_fits(tmp_path, policy):
    folder = tmp_path / "folder"
    shutil.copytree(VECTORS / "good" / "plain", folder)
    (folder / "core-666.img").write_bytes(b"x")
    store, tar = Blobs(), FlatTar(folder)
    criu = tar.described()
    path = tmp_path / "x.tar"
    write_file(path, CheckpointIndex((criu,), ()).to_bytes(), store, [], tar, criu, compression="none", on_bytes=print)
    with pytest.raises(UnexpectedEntry):
        containerd_archive.verify_file(path, policy)


def test_two_checkpoints_in_one_file_are_refused(tmp_path, policy):
    path = exported(tmp_path)
    found = members(path)
    document = json.loads(found[1][1])
    document["manifests"] *= 2
    found[1] = (found[1][0], json.dumps(document).encode())
    write(path, found)
    with pytest.raises(NoSuchImage, match="2 images"):
        containerd_archive.read_index(path)


@pytest.mark.parametrize("name", ["exported.tar", "exported.tar.zst", "oci-archive.tar"])
def test_other_archives_are_not_taken_for_ours(policy, name):
    assert containerd_archive.find_index(VECTORS / "good" / name) is None
    assert source.verify(str(VECTORS / "good" / name), policy).kind != "containerd archive"


def test_a_failed_export_leaves_no_file(tmp_path):
    store, tar = Blobs(), FlatTar(VECTORS / "good" / "plain")
    criu = tar.described()
    missing = Descriptor("x", f"sha256:{'0' * 64}", 5)
    with pytest.raises(KeyError):
        write_file(tmp_path / "x.tar", b"{}", store, [missing], tar, criu, compression="none", on_bytes=print)
    assert list(tmp_path.iterdir()) == []


def test_content_of_another_digest_is_refused_on_import(tmp_path):
    path = exported(tmp_path)
    found = members(path)
    entry, data = found[3]
    found[3] = (entry, bytes(reversed(data)))
    write(path, found)
    images = tmp_path / "images"
    images.mkdir()
    with pytest.raises(ContentMismatch):
        ImportedFile(path).bring_in(Blobs(), images)
