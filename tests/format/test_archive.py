"""Archives: names of every tar dialect, damage of every compression, one pass with bounded memory, podman's storage."""

import gzip
import io
import json
import os
import shutil
import tarfile
import tracemalloc

import pytest
import zstandard

from image_format import source
from image_format.archives.archive import read_archive_claims, verify_archive
from image_format.chunk_index import CHUNK_SIZE
from image_format.sealing import seal
from image_format.trust.keys import load_signing_key
from tests.format.make_vectors import CONFIG, make_tar, oci_files
from vgpu_errors import ImageError, LimitExceeded, NoSuchImage, Truncated, UnsafeName, Unsigned, VgpuError

DIALECTS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


@pytest.fixture
def sealed(image, record, node):
    seal(image, record, load_signing_key(node / "node.key"))
    return image


def pack(folder, target, *, mode="w", fmt=tarfile.PAX_FORMAT, more=()):
    with tarfile.open(target, mode, format=fmt) as tar:
        tar.add(folder, "checkpoint")
        for name, data in more:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return target


@pytest.mark.parametrize("fmt", DIALECTS.values(), ids=DIALECTS)
@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_every_dialect_and_compression_is_read(sealed, tmp_path, policy, fmt, mode):
    long = "volumes/" + "v" * 90 + "/" + "n" * 60 + ".tar"
    path = pack(sealed, tmp_path / "a.tar", mode=mode, fmt=fmt, more=[(long, b"x" * 1000)])
    found = verify_archive(path, policy)
    assert [member.name for member in found.outside] == [long]
    assert found.compression == ("gzip" if mode == "w:gz" else "none")


def test_several_gzip_and_zstd_frames_are_one_stream(sealed, tmp_path, policy):
    data = pack(sealed, tmp_path / "a.tar").read_bytes()
    for name, compress in (("gz", gzip.compress), ("zst", zstandard.ZstdCompressor().compress)):
        path = tmp_path / f"b.tar.{name}"
        path.write_bytes(compress(data[:5000]) + compress(data[5000:]))
        assert verify_archive(path, policy).verified.bytes_checked > 0


@pytest.mark.parametrize(
    "compress", [bytes, gzip.compress, zstandard.ZstdCompressor().compress], ids=["none", "gz", "zst"]
)
def test_an_archive_cut_anywhere_is_refused(sealed, tmp_path, policy, compress):
    data = compress(pack(sealed, tmp_path / "a.tar").read_bytes())
    path = tmp_path / "cut"
    for length in range(0, len(data) - (10240 if compress is bytes else 1), max(1, len(data) // 60)):
        path.write_bytes(data[:length])
        with pytest.raises(VgpuError):
            verify_archive(path, policy)


def test_an_empty_file_is_no_archive(tmp_path, policy):
    (tmp_path / "empty").touch()
    with pytest.raises(Truncated):
        verify_archive(tmp_path / "empty", policy)
    with pytest.raises(NoSuchImage):
        verify_archive(tmp_path / "absent", policy)


def test_an_archive_without_checkpoint_is_unsigned(tmp_path, policy):
    path = tmp_path / "a.tar"
    path.write_bytes(make_tar([("config.dump", b"{}")]))
    with pytest.raises(Unsigned):
        verify_archive(path, policy)
    with pytest.raises(Unsigned):
        read_archive_claims(path)


def bent(members, change):
    data = bytearray(make_tar(members))
    change(data)
    checksum = sum(data[:148]) + 8 * 32 + sum(data[156:512])
    data[148:156] = b"%06o\0 " % checksum
    return bytes(data)


def setter(at, value):
    def change(data):
        data[at : at + len(value)] = value

    return change


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (setter(156, b"S"), ImageError),
        (setter(156, b"V"), ImageError),
        (setter(124, b"\xff" * 12), ImageError),
        (setter(124, b"\x80" + b"\x7f" * 11), ImageError),
        (setter(124, b"00000000009\0"), ImageError),
        (setter(124, b"77777777777\0"), Truncated),
        (setter(0, b"/abs\0"), UnsafeName),
        (setter(0, b"a/../../b\0"), UnsafeName),
        (setter(0, b"a//b\0"), UnsafeName),
        (setter(0, b"\0"), UnsafeName),
        (setter(345, b"..\0"), UnsafeName),
    ],
)
def test_a_bent_header_is_refused(tmp_path, policy, change, error):
    path = tmp_path / "a.tar"
    path.write_bytes(bent([("name", b"content")], change))
    with pytest.raises(error):
        verify_archive(path, policy)


def extended(kind, payload):
    info = tarfile.TarInfo("ext")
    info.type, info.size = kind, len(payload)
    return info.tobuf() + payload + bytes(-len(payload) % 512) + make_tar([("name", b"x")])


@pytest.mark.parametrize(
    ("kind", "payload", "error"),
    [
        (b"x", b"20 path=../../evil\n\n", UnsafeName),
        (b"x", b"19 path=../../evil\n", UnsafeName),
        (b"x", b"99 path=a\n", ImageError),
        (b"x", b"nonsense", ImageError),
        (b"x", b"23 GNU.sparse.major=1\n", ImageError),
        (b"x", b"11 size=-1\n", ImageError),
        (b"g", b"11 path=ab\n", ImageError),
        (b"L", b"../evil\0", UnsafeName),
        (b"x", b" " * ((1 << 20) + 1), LimitExceeded),
    ],
)
def test_a_bent_extended_header_is_refused(tmp_path, policy, kind, payload, error):
    path = tmp_path / "a.tar"
    path.write_bytes(extended(kind, payload))
    with pytest.raises(error):
        verify_archive(path, policy)


def test_data_behind_the_end_is_refused(sealed, tmp_path, policy):
    path = pack(sealed, tmp_path / "a.tar")
    with path.open("ab") as file:
        file.write(make_tar([("checkpoint/core-1.img", b"hidden")]))
    with pytest.raises(ImageError, match="follows the end"):
        verify_archive(path, policy)


def test_another_spec_dump_is_named(sealed, tmp_path, policy):
    config = json.loads(json.dumps(CONFIG))
    config["process"]["capabilities"]["bounding"].append("CAP_SYS_ADMIN")
    config["hooks"] = {"prestart": [{"path": "/tmp/evil", "args": ["evil"]}]}
    path = pack(sealed, tmp_path / "a.tar", more=[("spec.dump", json.dumps(config).encode())])
    found = verify_archive(path, policy).config_differences
    assert any(line == "capabilities.bounding: CAP_SYS_ADMIN added" for line in found)
    assert any("/tmp/evil" in line for line in found)


@pytest.mark.parametrize("spec", [b"{", b"[]", b'{"process":{},"process":{}}', b"[" * 100_000])
def test_a_spec_dump_that_cannot_be_read_is_a_difference(sealed, tmp_path, policy, spec):
    path = pack(sealed, tmp_path / "a.tar", more=[("spec.dump", spec)])
    assert "spec.dump" in verify_archive(path, policy).config_differences[0]


def test_a_large_archive_takes_bounded_memory(tmp_path, record, node, policy):
    folder = tmp_path / "big"
    folder.mkdir()
    (folder / "pages-1.img").write_bytes(os.urandom(CHUNK_SIZE) * 24)
    seal(folder, record, load_signing_key(node / "node.key"))
    path = pack(folder, tmp_path / "a.tar")
    tracemalloc.start()
    found = verify_archive(path, policy, threads=2)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.verified.bytes_checked == CHUNK_SIZE * 24
    assert peak < 3 * CHUNK_SIZE + (4 << 20)


def test_claims_of_a_large_archive_are_read_by_seeking(tmp_path, sealed):
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as tar:
        info = tarfile.TarInfo("rootfs-diff.tar")
        info.size = 1 << 36
        tar.fileobj.write(info.tobuf())
        tar.fileobj.seek(info.size, 1)
        tar.add(sealed, "checkpoint")
    claims = read_archive_claims(path)  # 64 GiB of hole: reading it would time the test out
    assert claims.outside[0].size == 1 << 36


# ---- OCI images ----------------------------------------------------------------------------------


@pytest.fixture
def layout(sealed, tmp_path):
    layer = pack(sealed, tmp_path / "layer.tar").read_bytes()
    for name, data in oci_files(layer).items():
        path = tmp_path / "layout" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return tmp_path / "layout"


def test_a_blob_that_is_not_the_described_one_is_refused(layout, policy):
    assert source.verify(str(layout), policy).kind == "OCI image"
    for blob in (layout / "blobs/sha256").iterdir():
        if b"architecture" in (whole := blob.read_bytes()):
            continue
        blob.write_bytes(whole + b"\0" * 512)
        with pytest.raises(ImageError):
            source.verify(str(layout), policy)
        blob.write_bytes(whole[:-1])
        with pytest.raises(ImageError):
            source.verify(str(layout), policy)
        blob.write_bytes(whole)
    source.verify(str(layout), policy)


@pytest.mark.parametrize("index", [b"{}", b'{"manifests":[]}', b"[", b'{"manifests":[{"mediaType":"x"}]}'])
def test_a_layout_without_one_image_is_refused(layout, policy, index):
    (layout / "index.json").write_bytes(index)
    with pytest.raises(VgpuError):
        source.verify(str(layout), policy)


def test_a_digest_that_is_a_path_is_refused(layout, policy):
    (layout / "index.json").write_text(
        '{"manifests":[{"mediaType":"application/vnd.oci.image.manifest.v1+json",'
        '"digest":"sha256:../../../etc/passwd","size":1}]}'
    )
    with pytest.raises(ImageError, match="digest"):
        source.verify(str(layout), policy)


PODMAN = """#!/bin/sh
echo "$*" >> {log}
case "$*" in
"image exists snap") exit 0 ;;
"image exists "*) exit 1 ;;
"image mount snap") echo {root} ;;
"image unmount snap") exit 0 ;;
*) exit 125 ;;
esac
"""


@pytest.fixture
def podman(sealed, tmp_path, monkeypatch):
    """Answers as podman does, for the three calls that are made."""
    root = tmp_path / "mounted"
    root.mkdir()
    shutil.copytree(sealed, root / "checkpoint")
    (root / "spec.dump").write_text(json.dumps(CONFIG))
    tools = tmp_path / "bin"
    tools.mkdir()
    log = tmp_path / "podman.log"
    (tools / "podman").write_text(PODMAN.format(log=log, root=root))
    (tools / "podman").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    return log


def test_an_image_in_podmans_storage_is_mounted_and_unmounted(podman, policy):
    found = source.verify("snap", policy)
    assert found.kind == "podman image"
    assert found.result.config_differences == ()
    assert [member.name for member in found.result.outside] == ["spec.dump"]
    assert podman.read_text().splitlines() == ["image exists snap", "image mount snap", "image unmount snap"]
    assert source.read_claims("snap").claims.claimed.record.container.name == "trainer"


def test_an_image_is_unmounted_after_a_fault_too(podman, policy, tmp_path):
    (tmp_path / "mounted/checkpoint/core-1.img").write_bytes(b"x" * 300)
    with pytest.raises(VgpuError):
        source.verify("snap", policy)
    assert podman.read_text().splitlines()[-1] == "image unmount snap"


@pytest.mark.parametrize("name", ["absent", "--help"])
def test_an_unknown_name_is_no_image(podman, policy, name):
    with pytest.raises(NoSuchImage):
        source.verify(name, policy)


def test_a_bundle_holds_the_checkpoint_one_level_down(sealed, policy):
    assert source.verify(str(sealed.parent), policy).kind == "directory"
