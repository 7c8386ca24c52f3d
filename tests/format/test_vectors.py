"""Every vector of every released version comes out as its expected.json says, from each reader that can take it.

The verifier of directories gets the archives unpacked; the independent reader, written from the spec's text alone,
must accept and refuse the same ones.
"""

import hashlib
import io
import json
import os
import tarfile
from pathlib import Path

import pytest
import zstandard

from image_format import chunk_index, seal_documents, source
from image_format.file_names import SEAL_NAMES
from image_format.packs import unpacking
from image_format.trust.keys import load_public_key
from image_format.trust.policy import Policy, TrustedKey
from image_format.verifying import verify_directory
from tests.format import (
    independent_reader,
    make_packed_vectors,
    make_shared_vectors,
    make_staged_vectors,
    make_vectors,
)
from vgpu_errors import VgpuError

ROOT = Path(__file__).parents[2] / "spec" / "vectors"
VERSIONS = sorted(path.name for path in ROOT.iterdir() if (path / "expected.json").is_file())


def read_cases(version):
    return json.loads((ROOT / version / "expected.json").read_text())["cases"]


CASES = [
    pytest.param(version, case, id=f"{version}/{case['path']}")
    for version in VERSIONS
    for case in read_cases(version)
    if case["kind"] != "packed"
]
PACKED_CASES = [
    pytest.param(version, case, id=f"{version}/{case.get('name', case['path'])}")
    for version in VERSIONS
    for case in read_cases(version)
    if case["kind"] == "packed"
]


def policy_of(version):
    keys = [load_public_key(ROOT / version / "keys" / "trusted.pub")]
    return Policy(keys={key.key_id: TrustedKey("vectors", Path("trusted.pub"), key) for key in keys})


@pytest.mark.parametrize(("version", "case"), CASES)
def test_vector_comes_out_as_expected(version, case):
    path, expect = ROOT / version / case["path"], case["expect"]
    if not expect["ok"]:
        with pytest.raises(VgpuError) as caught:
            source.verify(str(path), policy_of(version))
        assert (type(caught.value).__name__, caught.value.exit_code) == (expect["error"], expect["exitCode"])
        assert "{" not in caught.value.message
        return
    found = source.verify(str(path), policy_of(version))
    verified = found.result.verified
    assert found.kind == case["kind"]
    assert verified.index.content_root.hex() == verified.record.content_root == expect["contentRoot"]
    assert verified.manifest_digest == expect["manifestDigest"]
    assert verified.bytes_checked == expect["bytesChecked"]
    assert verified.key_id == expect["keyId"]
    if "outside" in expect:
        assert sorted(member.name for member in found.result.outside) == expect["outside"]
        assert found.result.config_differences == ()


def can_be_unpacked(doc):
    return doc["kind"] == "archive" and doc["path"].endswith(".tar") and not doc.get("archiveOnly")


def unpack(archive: Path, target: Path) -> Path:
    """Nearly as an engine would; written here because tarfile's filters refuse what these archives hold."""
    with tarfile.open(archive) as tar:
        for member in tar:
            path = target / member.name
            path.parent.mkdir(exist_ok=True)
            if member.isdir():
                path.mkdir(exist_ok=True)
            elif member.issym():
                path.symlink_to(member.linkname)
            elif member.islnk():
                os.link(target / member.linkname, path)
            elif member.isfifo():
                os.mkfifo(path)
            else:
                path.write_bytes(tar.extractfile(member).read())
    return target / "checkpoint"


@pytest.mark.parametrize(("version", "case"), [case for case in CASES if can_be_unpacked(case.values[1])])
def test_unpacked_vector_comes_out_the_same(version, case, tmp_path):
    folder = unpack(ROOT / version / case["path"], tmp_path)
    expect = case["expect"]
    if not expect["ok"]:
        with pytest.raises(VgpuError) as caught:
            verify_directory(folder, policy_of(version))
        assert (type(caught.value).__name__, caught.value.exit_code) == (expect["error"], expect["exitCode"])
        return
    assert verify_directory(folder, policy_of(version)).manifest_digest == expect["manifestDigest"]


@pytest.mark.parametrize(("version", "case"), CASES)
def test_reader_written_from_the_spec_agrees(version, case):
    path, expect = ROOT / version / case["path"], case["expect"]
    trusted = [(ROOT / version / "keys" / "trusted.pub").read_bytes()]
    if not expect["ok"]:
        with pytest.raises(independent_reader.RefusedError):
            independent_reader.verify(path, trusted)
        return
    assert independent_reader.verify(path, trusted) == expect["contentRoot"]


def blobs_of(version, case):
    """The blobs of a transport image; a bad one replaces some of a good one's."""
    folder = ROOT / version / case["path"]
    replaced = {name: ROOT / version / path for name, path in case.get("replace", {}).items()}
    return {path.name: replaced.get(path.name, path).read_bytes() for path in folder.iterdir()}


def unpack_with_ours(blobs, policy, into):
    documents = {name: blobs[name] for name in SEAL_NAMES}
    seal_documents.check(documents, policy, where="vector")
    packed = chunk_index.from_bytes(blobs["packed-index.bin"], where="packed index")

    def open_pack(number, start):
        return io.BytesIO(blobs[f"pack-{number}"][start:])

    small_files = io.BytesIO(blobs["small-files.tar.zst"])
    unpacking.unpack(documents, packed, into, open_pack=open_pack, small_files=small_files, threads=1)
    return packed


@pytest.mark.parametrize(("version", "case"), PACKED_CASES)
def test_checkpoint_in_packs_comes_out_as_expected(version, case, tmp_path):
    blobs, expect = blobs_of(version, case), case["expect"]
    if not expect["ok"]:
        with pytest.raises(VgpuError) as caught:
            unpack_with_ours(blobs, policy_of(version), tmp_path)
        assert (type(caught.value).__name__, caught.value.exit_code) == (expect["error"], expect["exitCode"])
        assert not (tmp_path / "vgpu-signature.json").exists()
        return
    packed = unpack_with_ours(blobs, policy_of(version), tmp_path)
    assert packed.content_root.hex() == expect["contentRoot"]
    packs = [(pack["sha256"], pack["size"]) for pack in expect["packs"]]
    assert [(pack.sha256.hex(), pack.size) for pack in packed.transport_packs] == packs
    assert [hashlib.sha256(blobs[f"pack-{n}"]).hexdigest() for n in range(len(packs))] == [
        sha256 for sha256, _ in packs
    ]
    assert {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in tmp_path.iterdir()} == expect["files"]
    assert verify_directory(tmp_path, policy_of(version)).manifest_digest == expect["manifestDigest"]


@pytest.mark.parametrize(("version", "case"), PACKED_CASES)
def test_reader_written_from_the_spec_unpacks_the_same(version, case):
    trusted = [(ROOT / version / "keys" / "trusted.pub").read_bytes()]
    blobs, expect = blobs_of(version, case), case["expect"]
    if not expect["ok"]:
        with pytest.raises(independent_reader.RefusedError):
            independent_reader.unpack(blobs, trusted)
        return
    files = independent_reader.unpack(blobs, trusted)
    assert {name: hashlib.sha256(data).hexdigest() for name, data in files.items()} == expect["files"]


def test_a_reader_of_version_1_0_names_the_feature():
    trusted = [(ROOT / "1.1" / "keys" / "trusted.pub").read_bytes()]
    for name in ("large-chunks", "small-chunks.tar", "staged-without-objects", "all-zero"):
        with pytest.raises(independent_reader.RefusedError, match="feature staged"):
            independent_reader.verify(ROOT / "1.1/good" / name, trusted, features=frozenset())


def test_a_reader_of_version_1_2_names_the_feature():
    trusted = [(ROOT / "1.3" / "keys" / "trusted.pub").read_bytes()]
    for name in ("shared", "shared.tar", "later-minor-version"):
        with pytest.raises(independent_reader.RefusedError, match="feature shared"):
            independent_reader.verify(ROOT / "1.3/good" / name, trusted, features=frozenset({"staged"}))
    assert independent_reader.verify(ROOT / "1.3/good/told", trusted, features=frozenset({"staged"}))


GENERATORS = {
    "1.0": make_vectors.make,
    "1.1": make_staged_vectors.make,
    "1.2": make_packed_vectors.make,
    "1.3": make_shared_vectors.make,
}


def test_every_version_has_a_generator():
    assert sorted(GENERATORS) == VERSIONS


@pytest.mark.parametrize("version", VERSIONS)
def test_generator_writes_the_same_bytes_again(version, tmp_path):
    GENERATORS[version](tmp_path)
    folder = ROOT / version
    committed = {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    made = {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    # zlib builds differ in what they compress to; what is inside is compared by the vector itself.
    same = {name for name in made if name.suffix not in (".gz", ".zst") and name.name != "oci-archive.tar"}
    zstd = json.loads((folder / "expected.json").read_text()).get("zstd")
    if zstd not in (None, ".".join(map(str, zstandard.ZSTD_VERSION))):
        # Another zstd: frames differ, and with them all that names their digests.
        same = {name for name in same if name.suffix == ".tar"}
    assert set(made) == set(committed)
    assert [str(name) for name in sorted(same) if made[name] != committed[name]] == []
