"""Fuzz targets: what comes from a registry, from other people's credential files, from the store, and encrypted images."""

import io
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from image_format import chunk_index, pagemap
from image_format.archives import containerd_index, small_files
from image_format.encryption.encrypted_record import EncryptedRecord
from image_format.encryption.recipients import Identity, Recipient
from image_format.references.reference import ReferenceNote
from image_format.registry import credentials, referrers, tokens
from image_format.registry.manifests import read_doc
from image_format.registry.reference import Reference
from image_format.registry.session import said_by
from image_format.store import checkpoints, locks, references
from image_format.transport import manifest
from image_format.trust import freshness, key_files, seen_generations, simple_signing
from image_format.trust.image_statement import ImageStatement
from image_format.trust.policy import parse_rules
from tests.format.make_vectors import CONTAINER_ID, SMALL_CHUNK, Sealed, base_files
from tests.fuzz.image_targets import BytesSource
from tests.fuzz.target import SCRATCH, Target, as_bytes, in_file, written
from vgpu_errors import VgpuError

DIGEST = "sha256:" + "ab" * 32
SIGNING = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
IDENTITY = Identity.of(X25519PrivateKey.from_private_bytes(bytes(range(32))))
PAGEMAP = bytes.fromhex("1943565425405608") + b"".join(
    len(entry).to_bytes(4, "little") + entry for entry in (b"\x08\x01", b"\x08\x80\x80\x04\x10\x02\x20\x04", b"\x08\x80\x80\x08\x10\x01\x20\x04")
)  # fmt: skip
ENCRYPTED_RECORD = EncryptedRecord.new([IDENTITY.public])[0].to_bytes()
AUTH_FILE = as_bytes(
    {
        "auths": {"registry.example": {"auth": "dXNlcjpwYXNz"}, "other.example/a": {"identitytoken": "x"}},
        "credsStore": "",
    }
)
CONTAINERD_INDEX = as_bytes(
    {
        "schemaVersion": 2, "annotations": {containerd_index.LABELS_KEY: '{"a":"b"}', containerd_index.IMAGE_KEY: "docker.io/x:1"},
        "manifests": [{"mediaType": containerd_index.CRIU_TYPE, "digest": DIGEST, "size": 5, "platform": {"os": "linux"}}],
    }
)  # fmt: skip
REFERRERS = as_bytes(
    {
        "schemaVersion": 2,
        "manifests": [
            {"mediaType": "a/b", "digest": DIGEST, "size": 5, "artifactType": "x", "annotations": {"a": "b"}}
        ],
    }
)
CHALLENGE = (
    'Bearer realm="https://auth.example/token",service="registry.example",scope="repository:a:pull", Basic realm=x'
)


SIGNATURE_MANIFEST = simple_signing.make_manifest([simple_signing.SignatureLayer.of(b"{}", b"x" * 64)])[0]
SIGNED_PAYLOAD = simple_signing.Payload("registry.example/a", DIGEST, "2027-01-01T00:00:00Z", 1).to_bytes()
IMAGE_STATEMENT = ImageStatement(DIGEST, "2026-01-01T00:00:00Z", "2027-01-01T00:00:00Z").to_bytes()
REFERENCE_NOTE = ReferenceNote(
    "ab" * 32, ("pages-1.img", "vgpu-pack-00000.bin"), (f"registry.example/a@{DIGEST}",)
).to_bytes()


def transport_manifest():
    """One of each layer."""

    def described(media_type):
        return manifest.Descriptor(media_type, "ab" * 32, 5)

    first = [described(kind) for kind in manifest._FIRST]
    return manifest.TransportManifest(
        described(manifest.RECORD_TYPE), *first, (described(manifest.RAW_PACK_TYPE),), "2026-11-29T12:00:00Z", "cd" * 32,
        described(manifest.ENGINE_FILES_TYPE),
    ).to_bytes()  # fmt: skip


SMALL = Sealed(base_files(), chunk_size=SMALL_CHUNK)
SMALL_INDEX = chunk_index.from_bytes(SMALL.documents["vgpu-index.bin"])


def small_files_blob():
    for name, data in base_files().items():
        written(f"small/{name}", data)
    out = io.BytesIO()
    small_files.write_small_files(SMALL_INDEX, SCRATCH / "small", out)
    return out.getvalue()


def unpacked_small_files(data):
    return list(small_files.read_small_files(BytesSource(data), SMALL_INDEX, where="x"))


class Answer:
    """A registry's answer with this body."""

    def __init__(self, body):
        self.body = body


class Session:
    """Where the answer came from."""

    host = "registry.example"


def pages(data):
    found = pagemap.read(data)
    return found and found.cuts(3 << 12, 4096)


def credentials_in(data):
    path = written("auth.json", data)
    return [
        credentials.find(Reference.parse(name), auth_file=path, environ={})
        for name in ("registry.example/a/b", "other.example/a", "docker.io/x")
    ]


def containerd_image(data):
    found = containerd_index.parse(data, where="x")
    return found.image_name, found.container_labels, found.to_bytes()


def stored(text):
    """What a word on the command line means among some checkpoints."""
    listed = [
        checkpoints.StoredCheckpoint("ab" * 32, Path("/x"), CONTAINER_ID, "train", 1),
        checkpoints.StoredCheckpoint("cd" * 32, Path("/y"), CONTAINER_ID, "train", 2),
    ]
    return checkpoints.find(listed, text, root=Path("/s"))


TRANSFER = {
    "registry reference": Target(Reference.parse, f"registry.example:5000/team/app:v1@{DIGEST}", "text"),
    "manifest of signatures": Target(lambda data: simple_signing.read_manifest(data, where="x"), SIGNATURE_MANIFEST, "json bytes"),
    "signed payload": Target(
        lambda data: simple_signing.Payload.from_bytes(data, digest=DIGEST, where="x"), SIGNED_PAYLOAD, "json bytes"
    ),
    "statement on an image": Target(lambda data: ImageStatement.from_bytes(data, digest=DIGEST), IMAGE_STATEMENT, "json bytes"),
    "reference note": Target(ReferenceNote.from_bytes, REFERENCE_NOTE, "json bytes"),
    "transport manifest": Target(
        lambda data: manifest.TransportManifest.from_bytes(data, where="x"), transport_manifest(), "json bytes"
    ),
    "small files of a transport image": Target(unpacked_small_files, small_files_blob()),
    "registry's JSON": Target(lambda data: read_doc(Session(), Answer(data)), REFERRERS, "json bytes"),
    "registry's errors": Target(said_by, b'{"errors":[{"code":"DENIED","message":"no"}]}', "json bytes", ()),
    "registry's challenge": Target(lambda text: list(tokens.challenges([text])), CHALLENGE, "text", ()),
    "list of referrers": Target(lambda data: referrers._descriptors(data, "x"), REFERRERS, "json bytes"),
    "registry credentials": Target(credentials_in, AUTH_FILE, "json bytes"),
    "containerd index": Target(containerd_image, CONTAINERD_INDEX, "json bytes"),
    "pagemap": Target(pages, PAGEMAP, "bytes", ()),
    "encrypted record": Target(lambda data: EncryptedRecord.from_bytes(data).open([IDENTITY]), ENCRYPTED_RECORD, "json bytes"),
    "private key": Target(lambda data: key_files.parse_private(data, where="x"), key_files.private_pem(SIGNING)),
    "public key of a recipient": Target(lambda data: Recipient.parse(data, where="x"), IDENTITY.public.to_pem()),
    "policy rules": Target(lambda data: parse_rules(data, Path("p")), b'{"version":1,"default":"refuse-untrusted"}', "json bytes"),
    "time": Target(lambda text: freshness.parse_time(text, where="x"), "2026-11-29T12:00:00.123Z", "text"),
    "expiry": Target(lambda text: freshness.expiry_of(text, now=freshness.parse_time("2026-11-29T12:00:00Z", where="x")), "90d", "text"),
    "seen generations": Target(seen_generations.parse, seen_generations.encode({"0f3c": 4, "ab": 1}), "json bytes"),
    "word for a stored checkpoint": Target(stored, "train:2", "text"),
    "name of a stored checkpoint": Target(stored, "train", "text"),
    "note of a store's lease": Target(locks._note, b'{"why": "a push", "pid": 7}', "json bytes", ()),
    "note of a reference": Target(
        in_file(references.Reference.read, "note"), as_bytes({"version": 1, "manifestDigest": "ab" * 32, "where": "/x", "created": "x"}),
        "json bytes", VgpuError,
    ),
}  # fmt: skip
