"""The cipher of encrypted images: keys from one image key, frames under AES-256-GCM (spec/encryption.md, sections 1 and 2).

Pure: bytes in, bytes out. Refuses, as `Undecryptable`, what was changed, moved, cut, or taken from another blob or image.
No two different frames share key and nonce: the nonce is a keyed hash of the frame's place and content.
`encryption` is the way in for callers; `encrypted_streams` walks over files with it.
"""

from __future__ import annotations

import hmac
import os
import struct
from dataclasses import dataclass

from blake3 import blake3
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from image_format.file_names import check_name
from vgpu_errors import ImageError, LimitExceeded, Truncated, Undecryptable

Bytes = bytes | bytearray | memoryview

FRAME_SIZE = 4 << 20
KEY_BYTES = 32
IMAGE_ID_BYTES = 16
NONCE_BYTES = 12
TAG_BYTES = 16
OVERHEAD = NONCE_BYTES + TAG_BYTES
MAGIC = b"VGPUENC1"
_HEADER = struct.Struct("<8sII16s")
HEADER_BYTES = _HEADER.size
_PLACE = struct.Struct("<QB")
MAX_FRAMES = 1 << 24

INFO = b"vgpu-snapshot encryption v1: "


@dataclass(frozen=True)
class ImageCipher:
    """Everything that follows from one image key. Print neither it nor its key."""

    image_id: bytes
    _key: bytes

    def __post_init__(self) -> None:
        if len(self._key) != KEY_BYTES or len(self.image_id) != IMAGE_ID_BYTES:
            raise ImageError(where="image key", what="has the wrong size")

    def __repr__(self) -> str:
        return f"ImageCipher({self.image_id.hex()})"

    @classmethod
    def generate(cls) -> ImageCipher:
        """A fresh image id and key; never used for two images."""
        return cls(os.urandom(IMAGE_ID_BYTES), os.urandom(KEY_BYTES))

    def blob(self, name: str) -> Blob:
        """The cipher of the blob of that name; a name means one blob in an image."""
        check_name(name, where="encrypted blob")
        derived = self._derive(b"blob " + name.encode(), 2 * KEY_BYTES)
        return Blob(self.image_id, name, AESGCM(derived[:KEY_BYTES]), derived[KEY_BYTES:])

    def keyed_id(self, data: Bytes) -> bytes:
        """An id of content that shows equality inside this image only."""
        return blake3(data, key=self._derive(b"ids", KEY_BYTES)).digest()

    def record_mac(self, data: bytes) -> bytes:
        """Vouches for the encrypted record among those who hold the image key."""
        return hmac.digest(self._derive(b"record", KEY_BYTES), data, "sha256")

    def wrapped_key(self) -> bytes:
        """The key itself, for wrapping."""
        return self._key

    def _derive(self, purpose: bytes, length: int) -> bytes:
        return HKDF(algorithm=hashes.SHA256(), length=length, salt=self.image_id, info=INFO + purpose).derive(self._key)

    @staticmethod
    def sealed_size(plain_size: int) -> int:
        """How long a blob of so many bytes becomes."""
        return HEADER_BYTES + frame_count(plain_size) * OVERHEAD + plain_size


@dataclass(frozen=True)
class Blob:
    """The cipher of one blob: pure functions over frames."""

    image_id: bytes
    name: str
    _aead: AESGCM
    _nonce_key: bytes

    @property
    def header(self) -> bytes:
        """The first bytes of the blob; they are covered by every frame."""
        return _HEADER.pack(MAGIC, FRAME_SIZE, 0, self.image_id)

    def check_header(self, data: bytes) -> None:
        """Refuse a blob that does not begin like one of this image."""
        if len(data) < HEADER_BYTES:
            raise Truncated(where=self.name, found=len(data), needed=HEADER_BYTES)
        magic, frame_size, zero, image_id = _HEADER.unpack(data[:HEADER_BYTES])
        if magic != MAGIC:
            raise Undecryptable(where=self.name, what="it does not begin like an encrypted blob")
        if image_id != self.image_id:
            raise Undecryptable(where=self.name, what=f"it belongs to the image {image_id.hex()}")
        if (frame_size, zero) != (FRAME_SIZE, 0):
            raise Undecryptable(where=self.name, what=f"its frames are of {frame_size} bytes, not of {FRAME_SIZE}")

    def seal(self, frame: Bytes, number: int, *, is_last: bool) -> bytes:
        """Nonce, ciphertext and tag of a frame.

        The nonce is a keyed hash of place and content: the same frame gives the same bytes, another content another nonce.
        """
        check_frame(frame, is_last=is_last, where=self.name)
        place = _PLACE.pack(number, is_last)
        hasher = blake3(place, key=self._nonce_key)
        hasher.update(frame)
        nonce = hasher.digest(length=NONCE_BYTES)
        return nonce + self._aead.encrypt(nonce, frame, self._covered(place))

    def open(self, frame: Bytes, number: int, *, is_last: bool) -> bytes:
        """The plain bytes of a frame, or `Undecryptable`."""
        view = memoryview(frame)
        if not OVERHEAD <= len(view) <= FRAME_SIZE + OVERHEAD:
            raise Undecryptable(where=self.name, what=f"frame {number} has {len(view)} bytes")
        covered = self._covered(_PLACE.pack(number, is_last))
        try:
            return self._aead.decrypt(bytes(view[:NONCE_BYTES]), view[NONCE_BYTES:], covered)
        except InvalidTag as error:
            raise Undecryptable(where=self.name, what=f"frame {number} does not open") from error

    def _covered(self, place: bytes) -> bytes:
        name = self.name.encode()
        return self.header + struct.pack("<H", len(name)) + name + place


def frame_count(plain_size: int) -> int:
    """How many frames so many bytes need; nothing is one empty frame."""
    if plain_size < 0 or plain_size > MAX_FRAMES * FRAME_SIZE:
        limit = MAX_FRAMES * FRAME_SIZE
        raise LimitExceeded(where="encrypted blob", what="its plain size", found=plain_size, limit=limit)
    return max(1, -(-plain_size // FRAME_SIZE))


def plain_size_of(sealed_size: int, *, where: str) -> int:
    """The plain size of a blob of so many bytes; refuses a size that no blob has."""
    body, full = sealed_size - HEADER_BYTES, FRAME_SIZE + OVERHEAD
    if body < OVERHEAD:
        raise Truncated(where=where, found=max(sealed_size, 0), needed=HEADER_BYTES + OVERHEAD)
    if body > MAX_FRAMES * full:
        raise LimitExceeded(where=where, what="its size", found=sealed_size, limit=HEADER_BYTES + MAX_FRAMES * full)
    frames = -(-body // full)
    rest = body - (frames - 1) * full
    if rest < OVERHEAD or (rest == OVERHEAD and frames > 1):
        raise Truncated(where=where, found=sealed_size, needed=sealed_size + OVERHEAD + 1 - rest)
    return body - frames * OVERHEAD


def check_frame(frame: Bytes, *, is_last: bool, where: str) -> None:
    """All frames but the last are full."""
    size = memoryview(frame).nbytes
    if size > FRAME_SIZE or (size < FRAME_SIZE and not is_last):
        raise ImageError(where=where, what=f"a frame of {size} bytes")
