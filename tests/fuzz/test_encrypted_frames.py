"""Encrypted blobs of small frames: any content comes back by every way, and no rearrangement of frames opens as another.

Frames are made 64 bytes long here, so that a blob has many of them; everything else is as it is.
"""

import io

import pytest
from hypothesis import strategies as st

from image_format.encryption import (
    DecryptingWriter,
    ImageCipher,
    encrypted_streams,
    frame_cipher,
    open_stream,
    seal_stream,
)
from image_format.encryption.frame_cipher import HEADER_BYTES, OVERHEAD
from tests.fuzz.mutations import fuzz
from vgpu_errors import VgpuError

FRAME = 64
SEALED = FRAME + OVERHEAD
IMAGE = ImageCipher(bytes(16), bytes(range(32)))
NAME = "vgpu-pack-00000.bin"


@pytest.fixture(autouse=True)
def small_frames(monkeypatch):
    monkeypatch.setattr(frame_cipher, "FRAME_SIZE", FRAME)
    monkeypatch.setattr(encrypted_streams, "FRAME_SIZE", FRAME)
    monkeypatch.setattr(encrypted_streams, "SEALED_FRAME", SEALED)


def sealed_of(plain):
    return seal_stream(IMAGE, NAME, io.BytesIO(plain), len(plain)).read()


def opened(sealed):
    return open_stream(IMAGE, NAME, io.BytesIO(sealed), len(sealed)).read()


def written(sealed, steps=(7,)):
    plain, at = bytearray(), 0
    writer = DecryptingWriter(IMAGE.blob(NAME), plain.extend, len(sealed))
    while at < len(sealed):
        for step in steps:
            writer.write(sealed[at : at + step])
            at += step
    writer.close()
    return bytes(plain)


CONTENT = st.integers(min_value=0, max_value=6 * FRAME).flatmap(lambda size: st.binary(min_size=size, max_size=size))


def test_any_content_comes_back_whole_and_from_any_offset():
    def check(plain, steps, at, count):
        sealed = sealed_of(plain)
        assert len(sealed) == IMAGE.sealed_size(len(plain))
        assert opened(sealed) == written(sealed, steps) == plain
        for make, whole in (
            (lambda: seal_stream(IMAGE, NAME, io.BytesIO(plain), len(plain)), sealed),
            (lambda: open_stream(IMAGE, NAME, io.BytesIO(sealed), len(sealed)), plain),
        ):
            stream = make()
            stream.seek(at)
            assert stream.read(count) == whole[at : at + count]

    steps = st.lists(st.integers(min_value=1, max_value=3 * SEALED), min_size=1, max_size=4)
    numbers = st.integers(min_value=0, max_value=7 * SEALED)
    fuzz(lambda given: check(*given), st.tuples(CONTENT, steps, numbers, numbers))


def test_no_rearrangement_of_frames_opens_as_another_content():
    def check(plain, other, order, cut):
        frames = []
        for content in (plain, other):
            body = sealed_of(content)[HEADER_BYTES:]
            frames += [body[at : at + SEALED] for at in range(0, len(body), SEALED)]
        data = sealed_of(plain)[:HEADER_BYTES] + b"".join(frames[n % len(frames)] for n in order)
        data = data[: len(data) - cut]
        for way in (opened, written):
            try:
                found = way(data)
            except VgpuError:
                continue
            assert found in (plain, other) or _is_spliced(found, plain, other)

    order = st.lists(st.integers(min_value=0, max_value=12), min_size=1, max_size=7)
    cut = st.sampled_from([0, 0, 0, 1, SEALED])
    fuzz(lambda given: check(*given), st.tuples(CONTENT, CONTENT, order, cut))


def _is_spliced(found, plain, other):
    """Every frame is one of the two contents at its own place, and the end is the end of one of them.

    One image key has one blob of a name; a writer who encrypts two contents under one name lets a registry mix them.
    """
    pieces = [found[at : at + FRAME] for at in range(0, len(found), FRAME)]
    ends = {(len(content) - 1) // FRAME for content in (plain, other) if content}
    fits = all(piece in (plain[n * FRAME :][:FRAME], other[n * FRAME :][:FRAME]) for n, piece in enumerate(pieces))
    return fits and len(pieces) - 1 in ends
