"""Verification of directories: threads agree with one thread, memory stays bounded, races are noticed, trust is asked first."""

import os
import tracemalloc

import pytest

from image_format import hashing, sealing, verifying
from image_format.chunk_index import CHUNK_SIZE, Codec
from image_format.hashing import FileToHash, hash_files
from image_format.sealing import remove_old_seal, seal
from image_format.trust.keys import SigningKey, load_signing_key
from image_format.trust.policy import ALLOW_UNSIGNED, Policy
from image_format.verifying import read_claims, verify_directory
from vgpu_errors import ContentMismatch, NoSuchImage, Truncated, Unsigned, UntrustedKey


@pytest.fixture
def big(tmp_path):
    """A file of several spans with zero chunks, a hole, and an odd end; and a few small ones."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    with (folder / "pages-1.img").open("wb") as file:
        file.write(os.urandom(CHUNK_SIZE * 18))
        file.write(bytes(CHUNK_SIZE * 2))
        file.seek(CHUNK_SIZE * 22)
        file.write(b"end")
    for n in range(5):
        (folder / f"core-{n}.img").write_bytes(os.urandom(100 + n))
    return folder


def test_threads_find_what_one_thread_finds(big):
    fd = os.open(big, os.O_RDONLY)
    files = [FileToHash(path.name, path.stat().st_size) for path in sorted(big.iterdir())]
    one, four = (hash_files(fd, files, where="x", threads=threads) for threads in (1, 4))
    os.close(fd)
    assert one == four


def test_zero_chunks_and_holes_are_known_as_zero(big, record, node, policy):
    seal(big, record, load_signing_key(node / "node.key"))
    index = verify_directory(big, policy).index
    pages = next(region for region in index.regions if region.name == "pages-1.img")
    codecs = [chunk.codec for chunk in index.chunks_of(pages)]
    assert codecs == [Codec.RAW] * 18 + [Codec.ZERO] * 4 + [Codec.RAW]


def test_a_byte_in_a_hole_is_found(big, record, node, policy):
    seal(big, record, load_signing_key(node / "node.key"))
    with (big / "pages-1.img").open("r+b") as file:
        file.seek(CHUNK_SIZE * 21)
        file.write(b"x")
    with pytest.raises(ContentMismatch, match=f"bytes {CHUNK_SIZE * 21} to {CHUNK_SIZE * 22}"):
        verify_directory(big, policy)


def test_memory_is_one_buffer_for_each_thread(big, record, node, policy):
    seal(big, record, load_signing_key(node / "node.key"))
    verify_directory(big, policy)
    tracemalloc.start()
    verify_directory(big, policy, threads=2)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * CHUNK_SIZE + (2 << 20)


def test_a_file_that_shrinks_under_the_reader_is_noticed(big, record, node, policy, monkeypatch):
    seal(big, record, load_signing_key(node / "node.key"))
    real = os.preadv

    def shrinking(fd, buffers, offset):
        os.truncate(big / "pages-1.img", CHUNK_SIZE)
        return real(fd, buffers, offset)

    monkeypatch.setattr(hashing.os, "preadv", shrinking)
    with pytest.raises((ContentMismatch, Truncated)):
        verify_directory(big, policy)


def test_the_signature_is_looked_at_before_any_file(image, record, policy, monkeypatch):
    seal(image, record, SigningKey.generate())
    monkeypatch.setattr(verifying, "hash_files", lambda *_, **__: pytest.fail("content was read before the signature"))
    with pytest.raises(UntrustedKey):
        verify_directory(image, policy)


def test_unsigned_is_accepted_only_by_a_policy_that_says_so(image, record, node, policy):
    lenient = Policy(default=ALLOW_UNSIGNED, keys=policy.keys)
    with pytest.raises(Unsigned):
        verify_directory(image, policy)
    assert verify_directory(image, lenient).record is None
    seal(image, record, load_signing_key(node / "node.key"))
    (image / "vgpu-signature.json").unlink()
    with pytest.raises(Unsigned):
        verify_directory(image, policy)
    found = verify_directory(image, lenient)
    assert (found.key_id, found.record.container.id) == (None, record.container.id)
    (image / "core-1.img").write_bytes(b"y" * 300)
    with pytest.raises(ContentMismatch):
        verify_directory(image, lenient)


def test_half_a_seal_is_refused_even_by_a_lenient_policy(image, record, node, policy):
    lenient = Policy(default=ALLOW_UNSIGNED, keys=policy.keys)
    seal(image, record, load_signing_key(node / "node.key"))
    for name in ("vgpu-signature.json", "vgpu-manifest.json"):
        (image / name).unlink()
    with pytest.raises(Unsigned):
        verify_directory(image, lenient)


def test_a_strange_signature_is_refused_even_by_a_lenient_policy(image, record, policy):
    seal(image, record, SigningKey.generate())
    with pytest.raises(UntrustedKey):
        verify_directory(image, Policy(default=ALLOW_UNSIGNED, keys=policy.keys))


def test_claims_can_be_read_without_trust(image, record):
    seal(image, record, SigningKey.generate())
    found, index = read_claims(image)
    assert found.container == record.container
    assert [region.name for region in index.regions] == sorted(region.name for region in index.regions)
    remove_old_seal(image)
    with pytest.raises(Unsigned):
        read_claims(image)


@pytest.mark.parametrize("name", ["absent", "file"])
def test_what_is_no_directory_is_no_checkpoint(tmp_path, policy, name):
    (tmp_path / "file").touch()
    with pytest.raises(NoSuchImage):
        verify_directory(tmp_path / name, policy)


def test_files_are_sealed_in_order_of_their_names(big, record, node):
    made = sealing.make_documents(sealing.build_index([]), record, load_signing_key(node / "node.key"))
    assert list(made) == ["vgpu-index.bin", "vgpu-record.json", "vgpu-manifest.json", "vgpu-signature.json"]
