"""Encrypts the blobs of one image, frame by frame (spec/encryption.md): AES-256-GCM under keys from one image key.

How to use it:

    record, image = EncryptedRecord.new([Recipient.load("lab.pub")])       # push: a fresh image key, wrapped
    image.sealed_size(plain_size)                                          # known before anything is read
    stream = seal_stream(image, "vgpu-pack-00000.bin", open(path, "rb"), plain_size)   # seekable, deterministic
    record.to_bytes()                                                      # the config blob of the transport manifest

    image = EncryptedRecord.from_bytes(data).open([Identity.load("lab.key")])          # pull
    plain = open_stream(image, "vgpu-pack-00000.bin", file, sealed_size)   # seekable over a file that can seek
    writer = DecryptingWriter(image, name, write, sealed_size); writer.write(piece); writer.close()    # or as it comes
    image.keyed_id(content_root)                                           # in place of any public digest of content

Nonces are derived from key, place and content (`frame_cipher.Blob.seal`), so that no two different frames ever share key and nonce,
and the same frame always comes out as the same bytes: an upload can go on in the middle, a file that changed meanwhile
costs a digest that does not match and nothing else. Each name may be used for one blob of an image only. Refuses, as `Undecryptable`, what was changed, cut, put into another
order, taken from another blob or another image. The caller holds the plain content against its signed ids afterwards as always: encryption says nothing of who made it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from image_format.encryption.encrypted_record import ENCRYPTED_BLOB_TYPE, ENCRYPTED_RECORD_TYPE, EncryptedRecord
from image_format.encryption.encrypted_streams import DecryptingStream, DecryptingWriter, EncryptingStream
from image_format.encryption.frame_cipher import FRAME_SIZE, ImageCipher, plain_size_of
from image_format.encryption.recipients import Identity, Recipient

if TYPE_CHECKING:
    from typing import BinaryIO

__all__ = [
    "ENCRYPTED_BLOB_TYPE",
    "ENCRYPTED_RECORD_TYPE",
    "FRAME_SIZE",
    "DecryptingStream",
    "DecryptingWriter",
    "EncryptedRecord",
    "EncryptingStream",
    "Identity",
    "ImageCipher",
    "Recipient",
    "open_stream",
    "plain_size_of",
    "seal_stream",
]


def seal_stream(image: ImageCipher, name: str, readable: BinaryIO, plain_size: int) -> EncryptingStream:
    """The encrypted blob as a file that can seek; `readable` must be able to seek, too."""
    return EncryptingStream(image.blob(name), readable, plain_size)


def open_stream(image: ImageCipher, name: str, readable: BinaryIO, sealed_size: int) -> DecryptingStream:
    """The plain blob as a file that can seek; each frame is proved before a byte of it comes out."""
    return DecryptingStream(image.blob(name), readable, sealed_size)
