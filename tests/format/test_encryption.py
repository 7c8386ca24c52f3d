"""Encrypted images: what comes back, what is refused, and that no two different frames ever share key and nonce."""

import base64
import hashlib
import hmac
import io
import json
import os
from dataclasses import replace

import pytest
from blake3 import blake3
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from image_format import canonical_json
from image_format.encryption import (
    FRAME_SIZE,
    DecryptingWriter,
    EncryptedRecord,
    Identity,
    ImageCipher,
    Recipient,
    open_stream,
    plain_size_of,
    seal_stream,
)
from image_format.encryption.frame_cipher import HEADER_BYTES, OVERHEAD
from image_format.trust import key_files
from tests.format.make_encryption_vectors import VECTORS, make
from vgpu_errors import (
    BadConfiguration,
    ContentMismatch,
    FormatTooNew,
    ImageError,
    LimitExceeded,
    NotARecipient,
    Truncated,
    Undecryptable,
    UnknownFeature,
    UnsafeName,
)

SEALED_FRAME = FRAME_SIZE + OVERHEAD
NAME = "vgpu-pack-00000.bin"
SIZES = [0, 1, 4096, FRAME_SIZE - 1, FRAME_SIZE, FRAME_SIZE + 1, 2 * FRAME_SIZE, 2 * FRAME_SIZE + 77]


@pytest.fixture
def image():
    return ImageCipher.generate()


def plain_of(size):
    return (bytes(range(256)) * (size // 256 + 1))[:size]


def seal(image, plain, name=NAME):
    return seal_stream(image, name, io.BytesIO(plain), len(plain)).read()


def unseal(image, sealed, name=NAME, size=None):
    return open_stream(image, name, io.BytesIO(sealed), len(sealed) if size is None else size).read()


def fed(image, sealed, name=NAME, size=None, step=1_000_003):
    plain = bytearray()
    writer = DecryptingWriter(image.blob(name), plain.extend, len(sealed) if size is None else size)
    for at in range(0, len(sealed), step):
        writer.write(memoryview(sealed)[at : at + step])
    writer.close()
    return bytes(plain)


# ---- what comes back -----------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_a_blob_comes_back_by_both_ways(image, size):
    plain = plain_of(size)
    sealed = seal(image, plain)
    assert len(sealed) == image.sealed_size(size)
    assert plain_size_of(len(sealed), where="x") == size
    assert unseal(image, sealed) == plain
    assert fed(image, sealed) == plain
    assert size < 256 or plain[:256] not in sealed


def test_both_streams_read_the_same_from_any_offset_on(image):
    plain = plain_of(2 * FRAME_SIZE + 77)
    sealed = seal(image, plain)
    stream = seal_stream(image, NAME, io.BytesIO(plain), len(plain))
    opened = open_stream(image, NAME, io.BytesIO(sealed), len(sealed))
    for at in (0, 5, HEADER_BYTES, HEADER_BYTES + 1, SEALED_FRAME - 1, SEALED_FRAME + HEADER_BYTES, len(plain) - 3):
        assert stream.seek(at) == at
        assert stream.read(200_000) == sealed[at : at + 200_000]
        opened.seek(at)
        assert opened.read(200_000) == plain[at : at + 200_000]
    assert stream.seek(0, os.SEEK_END) == len(sealed)
    assert (stream.read(10), opened.seek(-1, os.SEEK_END)) == (b"", len(plain) - 1)


def test_memory_holds_one_frame(image, tmp_path):
    path = tmp_path / "big"
    with path.open("wb") as file:
        file.truncate(40 * FRAME_SIZE)
    import tracemalloc

    tracemalloc.start()
    with seal_stream(image, NAME, path.open("rb"), 40 * FRAME_SIZE) as stream:
        writer = DecryptingWriter(image.blob(NAME), lambda frame: None, stream.size)
        while piece := stream.read(1 << 20):
            writer.write(piece)
        writer.close()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * FRAME_SIZE


# ---- nonces --------------------------------------------------------------------------------------


def nonces(sealed):
    return [sealed[at : at + 12] for at in range(HEADER_BYTES, len(sealed), SEALED_FRAME)]


def test_the_same_content_gives_the_same_bytes_and_another_content_another_nonce(image):
    plain = bytearray(plain_of(2 * FRAME_SIZE))
    first = seal(image, plain)
    assert seal(image, plain) == first
    plain[FRAME_SIZE + 1000] ^= 1
    second = seal(image, plain)
    assert nonces(second)[0] == nonces(first)[0]
    assert nonces(second)[1] != nonces(first)[1]
    assert second[:SEALED_FRAME] == first[:SEALED_FRAME]


def test_a_file_that_changed_during_an_upload_shares_no_nonce_with_what_was_sent(image):
    source = io.BytesIO(plain_of(FRAME_SIZE + 5))
    stream = seal_stream(image, NAME, source, FRAME_SIZE + 5)
    before = stream.read()
    source.getbuffer()[7] ^= 1
    stream.seek(0)
    stream.seek(HEADER_BYTES + SEALED_FRAME)
    stream.read(1)
    stream.seek(0)
    after = stream.read()
    assert nonces(before)[0] != nonces(after)[0]
    assert before[-33:] == after[-33:]


def test_equal_frames_look_different_in_other_places_blobs_and_images(image):
    twice = seal(image, bytes(2 * FRAME_SIZE))
    frames = [twice[HEADER_BYTES:][:SEALED_FRAME], twice[HEADER_BYTES + SEALED_FRAME :]]
    frames.append(seal(image, bytes(2 * FRAME_SIZE), "vgpu-pack-00001.bin")[HEADER_BYTES:][:SEALED_FRAME])
    frames.append(seal(ImageCipher.generate(), bytes(2 * FRAME_SIZE))[HEADER_BYTES:][:SEALED_FRAME])
    assert len({frame[12:] for frame in frames}) == len({frame[:12] for frame in frames}) == 4


def test_keyed_ids_show_equality_inside_one_image_only(image):
    other = ImageCipher.generate()
    assert image.keyed_id(b"a") == image.keyed_id(b"a") != image.keyed_id(b"b")
    assert image.keyed_id(b"a") != other.keyed_id(b"a")


# ---- what is refused -----------------------------------------------------------------------------


def swapped(sealed):
    first, second = sealed[HEADER_BYTES:][:SEALED_FRAME], sealed[HEADER_BYTES + SEALED_FRAME :][:SEALED_FRAME]
    return sealed[:HEADER_BYTES] + second + first + sealed[HEADER_BYTES + 2 * SEALED_FRAME :]


def flipped(at):
    return lambda sealed: sealed[:at] + bytes([sealed[at] ^ 1]) + sealed[at + 1 :]


CHANGES = {
    "a bit of the header's magic": (flipped(0), Undecryptable),
    "a bit of the frame size": (flipped(9), Undecryptable),
    "a bit of the image id": (flipped(20), Undecryptable),
    "a bit of a nonce": (flipped(HEADER_BYTES), Undecryptable),
    "a bit of the first frame": (flipped(HEADER_BYTES + 100), Undecryptable),
    "a bit of a tag": (flipped(-1 % (HEADER_BYTES + SEALED_FRAME)), Undecryptable),
    "frames in another order": (swapped, Undecryptable),
    "the last frame cut off": (lambda sealed: sealed[: HEADER_BYTES + 2 * SEALED_FRAME], Undecryptable),
    "two frames cut off": (lambda sealed: sealed[: HEADER_BYTES + SEALED_FRAME], Undecryptable),
    "the first frame cut out": (lambda sealed: sealed[:HEADER_BYTES] + sealed[HEADER_BYTES + SEALED_FRAME :], Undecryptable),
    "a frame doubled": (lambda sealed: sealed + sealed[HEADER_BYTES:][:SEALED_FRAME], ImageError),
    "cut inside the last frame": (lambda sealed: sealed[:-1], Undecryptable),
    "nothing but the header": (lambda sealed: sealed[:HEADER_BYTES], Truncated),
    "empty": (lambda sealed: b"", Truncated),
    "bytes after the end": (lambda sealed: sealed + b"x", Undecryptable),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("way", [unseal, fed], ids=["stream", "writer"])
def test_a_changed_blob_is_refused(image, change, way):
    edit, error = CHANGES[change]
    sealed = seal(image, plain_of(2 * FRAME_SIZE + 77))
    with pytest.raises(error):
        way(image, edit(sealed))


@pytest.mark.parametrize("way", [unseal, fed], ids=["stream", "writer"])
def test_a_blob_under_another_name_or_of_another_image_is_refused(image, way):
    sealed = seal(image, b"content")
    with pytest.raises(Undecryptable):
        way(image, sealed, name="vgpu-pack-00001.bin")
    with pytest.raises(Undecryptable):
        way(ImageCipher.generate(), sealed)
    with pytest.raises(Undecryptable):  # the right id with another key
        way(ImageCipher(image.image_id, os.urandom(32)), sealed)


@pytest.mark.parametrize("way", [unseal, fed], ids=["stream", "writer"])
def test_a_blob_shorter_than_announced_is_truncated(image, way):
    sealed = seal(image, plain_of(FRAME_SIZE + 10))
    with pytest.raises(Truncated):
        way(image, sealed[:-5], size=len(sealed))


def test_a_writer_takes_no_more_than_announced_and_gives_out_only_proved_frames(image):
    sealed = bytearray(seal(image, plain_of(FRAME_SIZE + 10)))
    plain = bytearray()
    writer = DecryptingWriter(image.blob(NAME), plain.extend, len(sealed))
    with pytest.raises(ContentMismatch):
        writer.write(bytes(sealed) + b"x")
    sealed[-1] ^= 1
    with pytest.raises(Undecryptable):
        writer.write(sealed)
    assert len(plain) == FRAME_SIZE


@pytest.mark.parametrize(("size", "error"), [(9, ContentMismatch), (11, Truncated)])
def test_a_source_of_another_size_is_refused(image, size, error):
    with pytest.raises(error):
        seal_stream(image, NAME, io.BytesIO(bytes(10)), size).read()


def test_sizes_that_no_blob_has_and_sizes_beyond_the_limit_are_refused(image):
    for size in (-1, 0, HEADER_BYTES + OVERHEAD - 1, HEADER_BYTES + SEALED_FRAME + OVERHEAD):
        with pytest.raises(Truncated):
            plain_size_of(size, where="x")
    with pytest.raises(LimitExceeded):
        plain_size_of(1 << 62, where="x")
    with pytest.raises(LimitExceeded):
        image.sealed_size(1 << 62)
    with pytest.raises(ImageError):
        image.blob(NAME).seal(b"short", 0, is_last=False)
    with pytest.raises(UnsafeName):
        image.blob("../x")


# ---- recipients and the record -------------------------------------------------------------------


def test_each_recipient_opens_the_image_and_nobody_else_does():
    lab, home, stranger = (Identity.generate() for _ in range(3))
    record, image = EncryptedRecord.new([lab.public, home.public, lab.public])
    again = EncryptedRecord.from_bytes(record.to_bytes())
    assert again.to_bytes() == record.to_bytes()
    assert len(again.recipients) == 2
    for identity in (lab, home):
        assert again.open([stranger, identity]) == image
    with pytest.raises(NotARecipient) as caught:
        again.open([stranger])
    assert lab.public.key_id in caught.value.message
    with pytest.raises(NotARecipient):
        again.open([])


def test_the_image_key_is_not_printed():
    record, image = EncryptedRecord.new([Identity.generate().public])
    assert image.wrapped_key().hex() not in repr(image)
    assert repr(image.wrapped_key()) not in repr(image)
    assert image.wrapped_key().hex() not in repr(record)


def test_a_wrap_moved_to_another_image_does_not_open():
    lab = Identity.generate()
    first, second = (EncryptedRecord.new([lab.public])[0] for _ in range(2))
    moved = replace(first, recipients=second.recipients)
    with pytest.raises(Undecryptable):
        moved.open([lab])


def change_recipient(doc, key, value):
    return doc | {"recipients": [doc["recipients"][0] | {key: value}]}


ZERO_POINT = base64.b64encode(bytes(32)).decode()
RECORDS = {
    "no recipients field": (lambda doc: {k: v for k, v in doc.items() if k != "recipients"}, ImageError),
    "a required feature more": (
        lambda doc: doc | {"features": {"required": ["encrypted", "shredded"], "optional": []}}, UnknownFeature,
    ),
    "the feature missing": (lambda doc: doc | {"features": {"required": [], "optional": []}}, ImageError),
    "another cipher": (lambda doc: doc | {"cipher": {"name": "rot13", "frameBytes": FRAME_SIZE}}, UnknownFeature),
    "another frame size": (lambda doc: doc | {"cipher": doc["cipher"] | {"frameBytes": 1 << 40}}, ImageError),
    "a parameter more": (lambda doc: doc | {"cipher": doc["cipher"] | {"rounds": 1}}, ImageError),
    "another major version": (lambda doc: doc | {"formatVersion": "2.0"}, FormatTooNew),
    "a short mac": (lambda doc: doc | {"mac": "00"}, ImageError),
    "too many recipients": (lambda doc: doc | {"recipients": doc["recipients"] * 65}, LimitExceeded),
    "a long ephemeral key": (lambda doc: change_recipient(doc, "ephemeral", base64.b64encode(bytes(33)).decode()), ImageError),
}  # fmt: skip


@pytest.mark.parametrize("case", RECORDS)
def test_a_bad_record_is_refused_by_name(case):
    edit, error = RECORDS[case]
    record, _ = EncryptedRecord.new([Identity.generate().public])
    with pytest.raises(error):
        EncryptedRecord.from_bytes(canonical_json.write(edit(record.to_json())))


CHANGED = {
    "an unknown field added": lambda doc: doc | {"extra": 1},
    "a recipient of an unknown kind added": lambda doc: doc | {"recipients": [*doc["recipients"], {"type": "hsm"}]},
    "a point of small order": lambda doc: change_recipient(doc, "ephemeral", ZERO_POINT),
    "the wrapped key": lambda doc: change_recipient(doc, "wrapped", base64.b64encode(bytes(48)).decode()),
    "the image id": lambda doc: doc | {"imageId": "00" * 16},
    "the mac": lambda doc: doc | {"mac": "00" * 32},
}


@pytest.mark.parametrize("case", CHANGED)
def test_a_record_that_somebody_changed_is_refused_when_it_is_opened(case):
    lab = Identity.generate()
    record, _ = EncryptedRecord.new([lab.public])
    changed = EncryptedRecord.from_bytes(canonical_json.write(CHANGED[case](record.to_json())))
    with pytest.raises(Undecryptable):
        changed.open([lab])


def test_a_record_keeps_what_it_does_not_know_and_opens_beside_other_kinds_of_wraps():
    lab = Identity.generate()
    record, image = EncryptedRecord.new([lab.public])
    body = {**record.body, "later": {"x": 1}, "recipients": [{"type": "hsm", "slot": 1}, *record.body["recipients"]]}
    mac = image.record_mac(canonical_json.write(body))
    data = canonical_json.write(body | {"mac": mac.hex()})
    again = EncryptedRecord.from_bytes(data)
    assert (again.to_bytes(), again.open([lab])) == (data, image)


def test_one_record_opens_to_one_image_key_whoever_opens_it():
    honest, fooled = Identity.generate(), Identity.generate()
    image, other = ImageCipher.generate(), os.urandom(32)
    wraps = [
        honest.public.wrap(image.wrapped_key(), image_id=image.image_id),
        fooled.public.wrap(other, image_id=image.image_id),
    ]
    record = EncryptedRecord.from_bytes(EncryptedRecord.of(image, wraps).to_bytes())
    record.open([honest])
    with pytest.raises(Undecryptable, match="changed"):
        record.open([fooled])


def test_a_record_whose_wraps_are_all_of_unknown_kinds_says_so():
    record = replace(EncryptedRecord.new([Identity.generate().public])[0], recipients=())
    with pytest.raises(NotARecipient, match="kinds of keys that this version does not know"):
        record.open([Identity.generate()])


def test_keys_of_another_kind_are_refused(tmp_path):
    signing = generate_private_key(SECP256R1())
    with pytest.raises(BadConfiguration):
        Recipient.parse(key_files.public_pem(signing.public_key()), where="x")
    path = tmp_path / "k"
    key_files.write_new(path, key_files.private_pem(signing), 0o600)
    with pytest.raises(BadConfiguration):
        Identity.load(path)
    with pytest.raises(ImageError):
        EncryptedRecord.new([])


def test_an_identity_comes_back_from_its_file_with_and_without_a_passphrase(tmp_path):
    identity = Identity.generate()
    for name, passphrase in (("plain", None), ("locked", b"secret")):
        key_files.write_new(tmp_path / name, identity.to_pem(passphrase), 0o600)
        assert Identity.load(tmp_path / name, lambda: b"secret").public == identity.public
        key_files.write_new(tmp_path / f"{name}.pub", identity.public.to_pem(), 0o644)
        assert Recipient.load(tmp_path / f"{name}.pub").key_id == identity.public.key_id


# ---- vectors -------------------------------------------------------------------------------------


def test_vectors_are_what_their_generator_makes():
    for name, data in make().items():
        assert (VECTORS / name).read_bytes() == data, name
    assert {path.name for path in VECTORS.iterdir()} == set(make())


CASES = json.loads((VECTORS / "vectors.json").read_text())


@pytest.mark.parametrize("case", CASES["blobs"], ids=lambda case: case["what"])
def test_a_vector_opens_or_is_refused(case):
    identity = Identity.of(key_files.parse_private((VECTORS / "identity.pem").read_bytes(), where="x"))
    image = EncryptedRecord.from_bytes((VECTORS / "record.json").read_bytes()).open([identity])
    sealed = bytes.fromhex(case["sealed"])
    if case["plain"] is None:
        with pytest.raises(ImageError):
            unseal(image, sealed, case["name"])
        return
    assert unseal(image, sealed, case["name"]) == bytes.fromhex(case["plain"])
    assert seal(image, bytes.fromhex(case["plain"]), case["name"]) == sealed


def independent_open(record, image_key, name, sealed):
    """Written from spec/encryption.md alone, for blobs of one frame."""
    image_id = bytes.fromhex(record["imageId"])
    info = b"vgpu-snapshot encryption v1: blob " + name.encode()
    keys = HKDF(algorithm=hashes.SHA256(), length=64, salt=image_id, info=info).derive(image_key)
    place = (0).to_bytes(8, "little") + b"\1"
    header = b"VGPUENC1" + (4 << 20).to_bytes(4, "little") + bytes(4) + image_id
    assert sealed[:32] == header
    covered = header + len(name).to_bytes(2, "little") + name.encode() + place
    plain = AESGCM(keys[:32]).decrypt(sealed[32:44], sealed[44:], covered)
    assert sealed[32:44] == blake3(place + plain, key=keys[32:]).digest()[:12]
    return plain


def independent_unwrap(record, identity):
    """The image key for the first recipient, and that it vouches for the record."""
    entry, image_id = record["recipients"][0], bytes.fromhex(record["imageId"])
    ephemeral, sealed = base64.b64decode(entry["ephemeral"]), base64.b64decode(entry["wrapped"])
    shared = identity.exchange(X25519PublicKey.from_public_bytes(ephemeral))
    salt = ephemeral + identity.public_key().public_bytes_raw() + image_id
    info = b"vgpu-snapshot encryption v1: wrap"
    wrapping = HKDF(algorithm=hashes.SHA256(), length=32, salt=salt, info=info).derive(shared)
    image_key = AESGCM(wrapping).decrypt(bytes(12), sealed, image_id)
    info = b"vgpu-snapshot encryption v1: record"
    mac_key = HKDF(algorithm=hashes.SHA256(), length=32, salt=image_id, info=info).derive(image_key)
    body = {key: value for key, value in record.items() if key != "mac"}
    text = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    assert hmac.digest(mac_key, text, "sha256").hex() == record["mac"]
    return image_key


@pytest.mark.parametrize(
    "case", [case for case in CASES["blobs"] if case["plain"] is not None], ids=lambda case: case["what"]
)
def test_a_reader_written_from_the_specification_opens_the_vectors(case):
    record = json.loads((VECTORS / "record.json").read_text())
    identity = load_pem_private_key((VECTORS / "identity.pem").read_bytes(), None)
    image_key = independent_unwrap(record, identity)
    assert image_key.hex() == CASES["imageKey"]
    assert independent_open(record, image_key, case["name"], bytes.fromhex(case["sealed"])).hex() == case["plain"]


def test_the_key_schedule_of_the_vectors_holds():
    image = ImageCipher(bytes.fromhex(CASES["imageId"]), bytes.fromhex(CASES["imageKey"]))
    assert image.keyed_id(b"content").hex() == CASES["keyedIdOfContent"]
    large = seal(image, bytes(FRAME_SIZE) + b"tail", "vgpu-pack-00000.bin")
    assert hashlib.sha256(large).hexdigest() == CASES["sha256OfZeroFrameAndTail"]
