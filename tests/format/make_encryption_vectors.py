"""Makes the test vectors of encryption under spec/vectors/encryption: a record, its identity, blobs good and bad.

Everything is fixed, the image key and the ephemeral keys included, so that a second run writes the same bytes.
Run as `python -m tests.format.make_encryption_vectors`. These keys protect test vectors and nothing else.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from image_format.encryption import EncryptedRecord, Identity, ImageCipher

VECTORS = Path(__file__).parents[2] / "spec" / "vectors" / "encryption"


def fixed(what: str, size: int = 32) -> bytes:
    return hashlib.sha256(f"vgpu-snapshot encryption vectors, {what}".encode()).digest()[:size]


def make() -> dict[str, bytes]:
    image = ImageCipher(fixed("image id", 16), fixed("image key"))
    identities = [Identity.of(X25519PrivateKey.from_private_bytes(fixed(f"identity {n}"))) for n in (1, 2)]
    wraps = [
        identity.public.wrap_with(
            X25519PrivateKey.from_private_bytes(fixed(f"ephemeral {n}")), image.wrapped_key(), image_id=image.image_id
        )
        for n, identity in enumerate(identities)
    ]
    expected = {
        "imageId": image.image_id.hex(),
        "imageKey": image.wrapped_key().hex(),
        "keyedIdOfContent": image.keyed_id(b"content").hex(),
        "sha256OfZeroFrameAndTail": hashlib.sha256(_zero_frame_and_tail(image.blob("vgpu-pack-00000.bin"))).hexdigest(),
        "blobs": list(_blobs(image)),
    }
    return {
        "record.json": EncryptedRecord.of(image, wraps).to_bytes(),
        "identity.pem": identities[0].to_pem(),
        "vectors.json": (json.dumps(expected, indent=1) + "\n").encode(),
    }


def _blobs(image: ImageCipher):
    def sealed(name: str, plain: bytes) -> bytes:
        blob = image.blob(name)
        return blob.header + blob.seal(plain, 0, is_last=True)

    def case(what: str, name: str, data: bytes, plain: bytes | None) -> dict[str, str | None]:
        return {"what": what, "name": name, "sealed": data.hex(), "plain": None if plain is None else plain.hex()}

    text = b"a checkpoint's small files"
    good = sealed("vgpu-record.json", text)
    blob = image.blob("vgpu-record.json")
    yield case("an empty blob", "vgpu-index.bin", sealed("vgpu-index.bin", b""), b"")
    yield case("one short frame", "vgpu-record.json", good, text)
    yield case("the same bytes under another name", "vgpu-manifest.json", good, None)
    yield case(
        "a flipped bit in the ciphertext", "vgpu-record.json", good[:50] + bytes([good[50] ^ 1]) + good[51:], None
    )
    yield case("a flipped bit in the tag", "vgpu-record.json", good[:-1] + bytes([good[-1] ^ 1]), None)
    yield case("a flipped bit in the nonce", "vgpu-record.json", good[:32] + bytes([good[32] ^ 1]) + good[33:], None)
    yield case("another image id in the header", "vgpu-record.json", good[:16] + bytes(16) + good[32:], None)
    yield case("cut by one byte", "vgpu-record.json", good[:-1], None)
    second = blob.header + blob.seal(text, 1, is_last=True)
    yield case("the second frame without the first", "vgpu-record.json", second, None)


def _zero_frame_and_tail(blob) -> bytes:
    return blob.header + blob.seal(bytes(4 << 20), 0, is_last=False) + blob.seal(b"tail", 1, is_last=True)


def main() -> None:
    VECTORS.mkdir(parents=True, exist_ok=True)
    for name, data in make().items():
        (VECTORS / name).write_bytes(data)


if __name__ == "__main__":
    main()
