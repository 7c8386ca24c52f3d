"""Fuzzes the image format as a whole: what is written comes back, and spoilt archives and directories are refused.

Single parsers are fuzzed in test_every_parser.py. Bounded to a few seconds; see mutations.py for longer runs.
"""

import gzip
import hashlib
import json
import os
from pathlib import Path

import pytest
import zstandard
from blake3 import blake3
from hypothesis import strategies as st

from image_format import canonical_json, chunk_index, security_config, source, vram
from image_format.archives import archive, containerd_index
from image_format.archives.containerd_index import Descriptor
from image_format.chunk_index import Index, Pack, Region, chunk_count_of
from image_format.fields import Fields
from image_format.hashing import HashedFile
from image_format.record import Record
from image_format.sealing import build_index
from image_format.trust.dsse import Envelope, pre_authentication_encoding
from image_format.trust.policy import Policy, TrustedKey
from image_format.verifying import verify_directory
from image_format.vram import ChunkPlace, VramFragment, VramRegion, pack_name
from tests.format.make_staged_vectors import OTHER_GPU, small
from tests.format.make_vectors import (
    CONFIG,
    SMALL_CHUNK,
    TRUSTED,
    Sealed,
    base_files,
    inside,
    make_tar,
    oci_files,
    outside,
)
from tests.fuzz.mutations import EXTRA_SECONDS, JSON, TEXT, attempt, fuzz, mutated
from vgpu_errors import VgpuError

pytestmark = pytest.mark.timeout(0 if EXTRA_SECONDS else 120)


# ---- properties ----------------------------------------------------------------------------------

NAME = st.text(alphabet="abcdefghijklmnopqrstuvwxyz0123456789-_.", min_size=1, max_size=30).filter(
    lambda name: name[0] != "." and not name.startswith("vgpu-") and "log" not in name and "stats" not in name
)  # fmt: skip


def test_canonical_json_comes_back_and_has_one_form():
    def check(doc):
        data = canonical_json.write(doc)
        assert canonical_json.read(data, where="x") == doc
        assert canonical_json.write(json.loads(data)) == data

    fuzz(check, JSON)


def test_index_comes_back():
    def check(files, chunk_size):
        hashed = [
            HashedFile(name, size, bytearray(os.urandom(32) * chunk_count_of(size, chunk_size)))
            for name, size in files.items()
        ]
        index = build_index(hashed, chunk_size=chunk_size)
        again = chunk_index.from_bytes(chunk_index.to_bytes(index))
        assert (again.regions, again.packs, again.chunks) == (index.regions, index.packs, index.chunks)
        assert again.content_root == index.compute_content_root()

    sizes = st.dictionaries(NAME, st.integers(min_value=0, max_value=200_000), max_size=8)
    fuzz(check, sizes, st.sampled_from([4096, 65536, 4 << 20]))


def test_a_fragment_is_written_exactly_where_each_slot_has_one_content():
    size = SMALL_CHUNK
    ids = {length: [blake3(bytes([n]) * length).digest() for n in (1, 2)] for length in (size, 5)}
    chunk = st.tuples(st.sampled_from([None, 0, 3]), st.sampled_from([0, size, 2 * size, 7 * size, 100]), st.booleans())

    def check(objects, tails):
        regions = []
        for number, (chunks, has_tail) in enumerate(zip(objects, tails, strict=True)):
            lengths = [size] * (len(chunks) - 1) + [5 if has_tail else size]
            places = tuple(
                ChunkPlace(chunk_index.zero_id(length), None, 0, length)
                if pack is None
                else ChunkPlace(ids[length][which], pack_name(pack), offset, length)
                for (pack, offset, which), length in zip(chunks, lengths, strict=True)
            )
            regions.append(VramRegion(0, OTHER_GPU, 0, sum(lengths), f"1/{number}", places))
        fragment = VramFragment.of(regions, chunk_size=size)
        stored = {
            (place.pack, place.offset, place.id, place.length) for r in regions for place in r.chunks if place.pack
        }
        is_sound = len({key[:2] for key in stored}) == len(stored) and all(key[1] % size == 0 for key in stored)
        outcome = attempt(lambda: vram.from_bytes(vram.to_bytes(fragment)))
        assert (outcome == fragment) == is_sound
        assert is_sound or isinstance(outcome, VgpuError)

    objects = st.lists(st.lists(chunk, min_size=1, max_size=3), max_size=4)
    fuzz(lambda pair: check(*pair), objects.flatmap(
        lambda found: st.tuples(st.just(found), st.lists(st.booleans(), min_size=len(found), max_size=len(found)))
    ))  # fmt: skip


def test_record_comes_back_with_unknown_fields():
    base = json.loads(Sealed(base_files()).documents["vgpu-record.json"])

    def check(extra, inner):
        doc = base | {key: value for key, value in extra.items() if key not in base}
        known = doc["container"]
        doc["container"] = known | {key: value for key, value in inner.items() if key not in (*known, "image", "name")}
        assert Record.from_bytes(canonical_json.write(doc)).to_json() == doc

    fuzz(check, st.dictionaries(TEXT, JSON, max_size=5), st.dictionaries(TEXT, JSON, max_size=5))


def test_envelope_comes_back_and_no_two_have_the_same_signed_bytes():
    def check(first, second):
        envelopes = [Envelope(*parts) for parts in (first, second)]
        again = Envelope.from_json(
            Fields(canonical_json.read(canonical_json.write(envelopes[0].to_json()), where="x"), "x")
        )
        assert again == envelopes[0]
        signed = [pre_authentication_encoding(envelope.payload_type, envelope.payload) for envelope in envelopes]
        assert (signed[0] == signed[1]) == (first[:2] == second[:2])

    parts = st.tuples(TEXT, st.binary(max_size=50), st.binary(max_size=80))
    fuzz(check, parts, parts)


# ---- mutations -----------------------------------------------------------------------------------


SEALED = Sealed(base_files(), chunk_size=SMALL_CHUNK)
DOCUMENTS = SEALED.documents
BUNDLE = DOCUMENTS["vgpu-signature.json"]
TAR = make_tar(inside(SEALED.all(base_files())) + outside())
STAGED = small()
STAGED_CONTENT = STAGED.seal().all(STAGED.files)
STAGED_TARS = {
    "index first": make_tar(inside(STAGED_CONTENT) + outside()),
    "index last": make_tar(list(reversed(inside(STAGED_CONTENT)))),
}
POLICY = Policy(keys={TRUSTED.key_id: TrustedKey("fuzz", Path("fuzz.pub"), TRUSTED.public)})


def test_index_of_any_bytes_fails_only_with_our_errors():
    header = DOCUMENTS["vgpu-index.bin"][:128]

    def check(numbers, tail):
        data = bytearray(header + tail)
        for at, value in numbers:
            data[at : at + 4] = value.to_bytes(4, "little")
        outcome = attempt(lambda: chunk_index.from_bytes(bytes(data)))
        assert isinstance(outcome, Index) or outcome.exit_code in (50, 51, 53, 54, 55, 56)

    numbers = st.lists(
        st.tuples(st.integers(min_value=8, max_value=124), st.integers(min_value=0, max_value=2**32 - 1)), max_size=5
    )
    fuzz(check, numbers, st.binary(max_size=600))


COMPRESSIONS = {"none": bytes, "gzip": gzip.compress, "zstd": zstandard.ZstdCompressor().compress}


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_an_archive_fails_only_with_our_errors_and_never_verifies_another_content(compression, tmp_path):
    path = tmp_path / "archive"
    whole = COMPRESSIONS[compression](TAR)
    path.write_bytes(whole)
    expected = archive.verify_archive(path, POLICY).verified.manifest_digest

    def check(data):
        path.write_bytes(data)
        try:
            found = archive.verify_archive(path, POLICY)
        except VgpuError:
            return
        assert found.verified.manifest_digest == expected

    fuzz(check, mutated(whole))


@pytest.mark.parametrize("order", STAGED_TARS)
def test_a_staged_archive_fails_only_with_our_errors_and_never_verifies_another_content(order, tmp_path):
    path = tmp_path / "archive"
    path.write_bytes(STAGED_TARS[order])
    expected = archive.verify_archive(path, POLICY).verified.manifest_digest

    def check(data):
        path.write_bytes(data)
        outcome = attempt(lambda: archive.verify_archive(path, POLICY).verified.manifest_digest)
        assert isinstance(outcome, VgpuError) or outcome == expected

    fuzz(check, mutated(STAGED_TARS[order]))


def test_a_staged_directory_holds_the_sealed_chunks_or_is_refused(tmp_path):
    for name, data in STAGED_CONTENT.items():
        (tmp_path / name).write_bytes(data)
    names = sorted(name for name in STAGED_CONTENT if name.startswith("vgpu-"))
    places = [place for region in STAGED.regions for place in region.chunks if place.pack]

    def check(name, data):
        (tmp_path / name).write_bytes(data)
        outcome = attempt(lambda: verify_directory(tmp_path, POLICY))
        found = [(tmp_path / place.pack).read_bytes()[place.offset : place.offset + place.length] for place in places]
        (tmp_path / name).write_bytes(STAGED_CONTENT[name])
        assert isinstance(outcome, VgpuError) or [blake3(chunk).digest() for chunk in found] == [p.id for p in places]

    pairs = st.sampled_from(names).flatmap(lambda name: st.tuples(st.just(name), mutated(STAGED_CONTENT[name])))
    fuzz(lambda pair: check(*pair), pairs)


def test_an_oci_archive_fails_only_with_our_errors(tmp_path):
    path = tmp_path / "image.tar"
    whole = make_tar(sorted(oci_files(TAR).items()))
    path.write_bytes(whole)
    assert source.verify(str(path), POLICY).kind == "OCI image"

    def check(data):
        path.write_bytes(data)
        for run in (lambda: source.verify(str(path), POLICY), lambda: source.read_claims(str(path))):
            outcome = attempt(run)
            assert not isinstance(outcome, VgpuError) or outcome.exit_code >= 10

    fuzz(check, mutated(whole))


def test_a_directory_fails_only_with_our_errors(tmp_path):
    content = SEALED.all(base_files())
    for name, data in content.items():
        (tmp_path / name).write_bytes(data)

    def check(choice, data):
        name, is_same = choice, data == content[choice]
        (tmp_path / name).write_bytes(data)
        try:
            verify_directory(tmp_path, POLICY)
        except VgpuError:
            assert not is_same
        else:
            # JSON has white space that changes no value, but every document is under a digest or a signature.
            assert is_same or name == "vgpu-signature.json"
        finally:
            (tmp_path / name).write_bytes(content[name])

    pairs = st.sampled_from(sorted(content)).flatmap(lambda name: st.tuples(st.just(name), mutated(content[name])))
    fuzz(lambda pair: check(*pair), pairs)


def test_the_security_projection_takes_any_shape():
    keys = st.sampled_from([*security_config._KNOWN_KEYS.values(), "other"])
    shapes = st.recursive(
        st.none() | st.booleans() | st.integers() | TEXT,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=5),
        max_leaves=30,
    )
    docs = st.dictionaries(keys, shapes, max_size=8)
    base = security_config.project(CONFIG, bundle="/b", container_id="c")

    def check(doc, replaced):
        for config in (doc, {**CONFIG, **replaced}, {**CONFIG, "process": doc}, {**CONFIG, "linux": doc}):
            found = security_config.project(config, bundle="/b", container_id="c")
            canonical_json.write(found)
            assert security_config.differences(found, found) == []
            lines = security_config.differences(base, found)
            assert (lines == []) == (base == found)

    fuzz(check, docs, docs)


def test_an_index_whose_pack_is_another_file_is_refused():
    def check(name, other, size):
        chunks = build_index([HashedFile(name, 5, bytearray(32))]).chunks
        index = Index((Region(name, 5, 0, 1),), chunks, (Pack(other, size),))
        outcome = attempt(lambda: chunk_index.from_bytes(chunk_index.to_bytes(index)))
        assert isinstance(outcome, Index) == ((name, 5) == (other, size))

    fuzz(check, st.sampled_from("ab"), st.sampled_from("ab"), st.integers(min_value=0, max_value=6))


def containerd_file():
    """An archive as `vgpu containerd checkpoint --export` writes it, with a sealed checkpoint in it."""

    def described(media_type, data):
        return Descriptor(media_type, f"sha256:{hashlib.sha256(data).hexdigest()}", len(data))

    flat = make_tar(sorted(SEALED.all(base_files()).items()))
    criu = described(containerd_index.CRIU_TYPE, flat)
    index = containerd_index.CheckpointIndex(
        (criu,), ((containerd_index.IMAGE_KEY, "docker.io/library/x:1"),)
    ).to_bytes()
    entry = described(containerd_index.INDEX_TYPE, index)
    top = {
        "schemaVersion": 2,
        "manifests": [{"mediaType": entry.media_type, "digest": entry.digest, "size": entry.size}],
    }
    blobs = [(f"blobs/sha256/{hashlib.sha256(data).hexdigest()}", data) for data in (index, flat)]
    return make_tar(
        [("oci-layout", b'{"imageLayoutVersion":"1.0.0"}'), ("index.json", json.dumps(top).encode()), *blobs]
    )


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_a_containerd_file_fails_only_with_our_errors_and_never_verifies_another_content(compression, tmp_path):
    path = tmp_path / "archive"
    whole = COMPRESSIONS[compression](containerd_file())
    path.write_bytes(whole)
    expected = source.verify(str(path), POLICY).result.verified.manifest_digest
    assert source.verify(str(path), POLICY).kind == "containerd archive"

    def check(data):
        path.write_bytes(data)
        attempt(lambda: source.read_claims(str(path)).claims.claimed)
        outcome = attempt(lambda: source.verify(str(path), POLICY).result.verified.manifest_digest)
        assert isinstance(outcome, VgpuError) or outcome == expected

    fuzz(check, mutated(whole))
