"""Makes the test vectors of format version 1.0 under spec/vectors/1.0: good and bad checkpoints with what must come out.

Everything is fixed, keys and signatures (RFC 6979) included, so that a second run writes the same bytes
(tests/format/test_vectors.py holds it to that). Released vectors are never changed; a later version gets its own folder.
Run as `python -m tests.format.make_vectors`. The keys here sign test vectors and nothing else.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import shutil
import struct
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import zstandard
from blake3 import blake3
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from image_format import canonical_json, chunk_index, sealing, security_config
from image_format.chunk_index import CHUNK_SIZE, chunk_count_of
from image_format.file_names import INDEX_NAME, MANIFEST_NAME, RECORD_NAME, SIGNATURE_NAME
from image_format.hashing import HashedFile
from image_format.record import Container, DeviceEntry, LowLevelRuntime, Phase, ProcessEntry, Record, Requirement
from image_format.trust.bundle import Bundle
from image_format.trust.dsse import Envelope, pre_authentication_encoding
from image_format.trust.keys import SigningKey
from image_format.trust.statement import PAYLOAD_TYPE

VECTORS = Path(__file__).parents[2] / "spec" / "vectors" / "1.0"
CONTAINER_ID = "3f" * 32
SMALL_CHUNK = 4096
GPU = "GPU-6f0c4d1e-2b6a-4d0e-9a61-0d5a6c3b2f10"
MTIME = 1_790_000_000
NAMES = (INDEX_NAME, RECORD_NAME, MANIFEST_NAME, SIGNATURE_NAME)


class FixedKey(SigningKey):
    """Signs the same bytes the same way each time."""

    def sign(self, data: bytes) -> bytes:
        return self._key.sign(data, ec.ECDSA(hashes.SHA256(), deterministic_signing=True))


def fixed_key(seed: bytes) -> SigningKey:
    return FixedKey.of(ec.derive_private_key(int.from_bytes(hashlib.sha256(seed).digest()) >> 1, ec.SECP256R1()))


TRUSTED = fixed_key(b"vgpu-snapshot test vectors, trusted")
UNKNOWN = fixed_key(b"vgpu-snapshot test vectors, unknown")

CONFIG = {
    "process": {
        "args": ["/usr/bin/train", "--steps", "100"],
        "user": {"uid": 0, "gid": 0},
        "capabilities": {"bounding": ["CAP_CHOWN", "CAP_KILL"], "effective": ["CAP_CHOWN", "CAP_KILL"]},
        "noNewPrivileges": True,
        "rlimits": [{"type": "RLIMIT_NOFILE", "hard": 1048576, "soft": 1048576}],
    },
    "root": {"path": "/var/lib/containers/storage/overlay/aa/merged", "readonly": False},
    "mounts": [
        {"destination": "/proc", "type": "proc", "source": "proc", "options": ["nosuid", "noexec", "nodev"]},
        {
            "destination": "/etc/hosts",
            "type": "bind",
            "source": f"/run/containers/storage/overlay-containers/{CONTAINER_ID}/userdata/hosts",
            "options": ["bind", "rprivate"],
        },
        {"destination": "/data", "type": "bind", "source": "/srv/data", "options": ["rbind", "ro"]},
    ],
    "linux": {
        "namespaces": [{"type": "pid"}, {"type": "network", "path": "/run/netns/netns-1"}, {"type": "mount"}],
        "devices": [{"path": "/dev/nvidia0", "type": "c", "major": 195, "minor": 0, "fileMode": 438}],
        "resources": {"devices": [{"allow": False, "access": "rwm"}]},
        "maskedPaths": ["/proc/kcore"],
        "readonlyPaths": ["/proc/sys"],
    },
}


def pattern(size: int, seed: int) -> bytes:
    return blake3(seed.to_bytes(8)).digest(size)


def base_files() -> dict[str, bytes]:
    return {
        "core-1.img": pattern(300, 1),
        "empty.img": b"",
        "inventory.img": pattern(45, 2),
        "pages-1.img": pattern(SMALL_CHUNK * 2, 3) + bytes(SMALL_CHUNK) + pattern(100, 4),
    }


def base_record() -> Record:
    return Record(
        created="2026-11-29T12:00:00Z",
        generation=3,
        container=Container(CONTAINER_ID, "podman", "trainer", "registry.example/train:1", {"org.example/owner": "a"}),
        low_level_runtime=LowLevelRuntime("runc", "1.3.6", "/usr/bin/runc"),
        processes=(ProcessEntry(7, "train", "driver", (GPU,), 1 << 30),),
        devices=(DeviceEntry(GPU, "NVIDIA H200", 150_754_820_096),),
        requirements=(
            Requirement("driver", "580.159.04", "must"),
            Requirement("cpuFlags", ("avx2", "sse4_2"), "should"),
            Requirement("gpuCount", 1),
        ),
        security=security_config.project(CONFIG, bundle=f"/x/{CONTAINER_ID}/userdata", container_id=CONTAINER_ID),
        phases=(Phase("lock", 0.0003), Phase("checkpoint", 0.3)),
    )


def hash_content(files: dict[str, bytes], chunk_size: int) -> list[HashedFile]:
    hashed = []
    for name, data in sorted(files.items()):
        starts = range(0, len(data), chunk_size)
        ids = b"".join(blake3(data[start : start + chunk_size]).digest() for start in starts)
        assert len(ids) == 32 * chunk_count_of(len(data), chunk_size)
        hashed.append(HashedFile(name, len(data), bytearray(ids)))
    return hashed


def keep(value):
    return value


class Sealed:
    """The documents of a checkpoint, where each stage may be bent before the next one signs it."""

    def __init__(
        self,
        files,
        *,
        chunk_size=CHUNK_SIZE,
        index=keep,
        record=keep,
        record_bytes=keep,
        manifest=keep,
        manifest_bytes=keep,
        statement=keep,
        payload_type=PAYLOAD_TYPE,
        bundle=keep,
        key=TRUSTED,
        base=None,
        extend=keep,
    ) -> None:
        made_index = extend(sealing.build_index(hash_content(files, chunk_size), chunk_size=chunk_size))
        documents = sealing.make_documents(made_index, base or base_record(), key)
        index_bytes = index(documents[INDEX_NAME])
        record_doc = json.loads(documents[RECORD_NAME])
        record_doc["contentRoot"] = index_bytes[72:104].hex() if len(index_bytes) >= 104 else record_doc["contentRoot"]
        made_record = record_bytes(canonical_json.write(record(record_doc)))
        manifest_doc = json.loads(documents[MANIFEST_NAME])
        manifest_doc["config"] |= describe(made_record)
        manifest_doc["layers"][0] |= describe(index_bytes)
        manifest_doc["annotations"]["vgpu.checkpoint.content-root"] = record_doc["contentRoot"]
        made_manifest = manifest_bytes(canonical_json.write(manifest(manifest_doc)))
        statement_doc = json.loads(Bundle.from_bytes(documents[SIGNATURE_NAME]).envelope.payload)
        statement_doc["subject"][0]["digest"]["sha256"] = hashlib.sha256(made_manifest).hexdigest()
        statement_doc["predicate"]["contentRoot"] = record_doc["contentRoot"]
        payload = canonical_json.write(statement(statement_doc))
        envelope = Envelope(payload_type, payload, key.sign(pre_authentication_encoding(payload_type, payload)))
        bundle_doc = bundle(json.loads(Bundle(key.key_id, envelope).to_bytes()))
        self.documents = {
            INDEX_NAME: index_bytes,
            RECORD_NAME: made_record,
            MANIFEST_NAME: made_manifest,
            SIGNATURE_NAME: canonical_json.write(bundle_doc),
        }

    def all(self, files) -> dict[str, bytes]:
        return {**files, **self.documents}


def describe(data: bytes) -> dict:
    return {"digest": f"sha256:{hashlib.sha256(data).hexdigest()}", "size": len(data)}


# ---- writing -------------------------------------------------------------------------------------


class Link(str):
    """A symbolic link's target, in place of content."""

    __slots__ = ()


class HardLink(str):
    """A hard link's target, in place of content."""

    __slots__ = ()


FOLDER, FIFO = object(), object()


def make_tar(members) -> bytes:
    """Members in the order given: (name, bytes | Link | HardLink | FOLDER | FIFO)."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.mtime, info.mode = MTIME, 0o600
            if isinstance(content, bytes):
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
                continue
            info.type = {Link: tarfile.SYMTYPE, HardLink: tarfile.LNKTYPE}.get(type(content), b"")
            if content is FOLDER:
                info.type, info.mode = tarfile.DIRTYPE, 0o700
            elif content is FIFO:
                info.type = tarfile.FIFOTYPE
            else:
                info.linkname = str(content)
            tar.addfile(info)
    return out.getvalue()


def inside(content: dict) -> list:
    """The members as an engine walks them: the folder, then its files in order of names."""
    return [("checkpoint", FOLDER), *((f"checkpoint/{name}", content[name]) for name in sorted(content))]


def outside() -> list:
    """What podman's export puts beside the checkpoint; none of it is signed."""
    spec = json.dumps(CONFIG).encode()
    return [("config.dump", b'{"id":"x"}'), ("spec.dump", spec), ("rootfs-diff.tar", make_tar([]))]


def write_directory(path: Path, content: dict[str, bytes]) -> None:
    path.mkdir(parents=True)
    for name, data in content.items():
        (path / name).write_bytes(data)


def oci_files(layer: bytes, kind: str = "tar") -> dict[str, bytes]:
    config = b'{"architecture":"amd64","os":"linux"}'
    manifest = canonical_json.write(
        {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": {"mediaType": "application/vnd.oci.image.config.v1+json", **describe(config)},
            "layers": [{"mediaType": f"application/vnd.oci.image.layer.v1.{kind}", **describe(layer)}],
        }
    )
    entry = {"mediaType": "application/vnd.oci.image.manifest.v1+json", **describe(manifest)}
    index = canonical_json.write({"schemaVersion": 2, "manifests": [entry]})
    blobs = {f"blobs/sha256/{hashlib.sha256(data).hexdigest()}": data for data in (config, layer, manifest)}
    return {**blobs, "index.json": index, "oci-layout": b'{"imageLayoutVersion":"1.0.0"}'}


# ---- bending -------------------------------------------------------------------------------------


def with_fields(**changes):
    return lambda doc: {**doc, **changes}


def flip(data: bytes, at: int) -> bytes:
    at %= len(data)
    return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]


def patch(offset: int, fmt: str, value):
    def change(data: bytes) -> bytes:
        bent = bytearray(data)
        struct.pack_into(fmt, bent, offset, value)
        return bytes(bent)

    return change


def renamed(old: str, new: str):
    """Another name in both the region and the pack table, of the same length, with a matching content root."""
    assert len(old) == len(new)

    def change(data: bytes) -> bytes:
        index = chunk_index.from_bytes(data)
        regions = tuple(replace_name(region, old, new) for region in index.regions)
        packs = tuple(replace_name(pack, old, new) for pack in index.packs)
        return chunk_index.to_bytes(replace(index, regions=regions, packs=packs))

    return change


def replace_name(entry, old, new):
    return entry._replace(name=new) if entry.name == old else entry


REGION_0, FIRST_REGION_SIZE = 128, 64


def future_minor_index(data: bytes) -> bytes:
    """What a later 1.x may write: longer records, and values in what version 1.0 reserves."""
    index = chunk_index.from_bytes(data)
    counts = (len(index.regions), len(index.chunks), len(index.packs))
    tables, at, out = [], 128, bytearray(data[:128])
    for count in counts:
        tables.append(b"".join(data[at + 64 * n : at + 64 * n + 64] + b"\x07" * 16 for n in range(count)))
        at += 64 * count
    struct.pack_into("<HHIIII", out, 8, 1, 3, 144, 80, 80, 80)
    out[104:128] = b"\x05" * 24
    return bytes(out) + b"\x09" * 16 + b"".join(tables) + data[at:]


# ---- the cases -----------------------------------------------------------------------------------


class Vectors:
    """Collects cases and writes them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.cases: list[dict] = []

    def good(self, name: str, kind: str, sealed: Sealed, files: dict[str, bytes], **more) -> None:
        record = json.loads(sealed.documents[RECORD_NAME])
        expect = {
            "ok": True,
            "contentRoot": record["contentRoot"],
            "manifestDigest": hashlib.sha256(sealed.documents[MANIFEST_NAME]).hexdigest(),
            "bytesChecked": sum(map(len, files.values())),
            "keyId": TRUSTED.key_id,
            **more,
        }
        self.cases.append({"path": f"good/{name}", "kind": kind, "expect": expect})

    def bad(self, name: str, what: str, members: list, error: str, code: int, **more) -> None:
        """As a tar; a reader of directories unpacks it first, where it can be unpacked."""
        path = f"bad/{name}.tar"
        self.write(path, make_tar(members))
        expect = {"ok": False, "error": error, "exitCode": code}
        self.cases.append({"path": path, "kind": "archive", "what": what, "expect": expect, **more})

    def write(self, path: str, data: bytes) -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)


def make_good(vectors: Vectors) -> None:
    files = base_files()
    sealed = Sealed(files)
    whole = sealed.all(files)
    write_directory(vectors.root / "good/plain", whole)
    vectors.good("plain", "directory", sealed, files)
    small = Sealed(files, chunk_size=SMALL_CHUNK)
    write_directory(vectors.root / "good/small-chunks", small.all(files))
    vectors.good("small-chunks", "directory", small, files)
    logged = {**whole, "dump.log": b"(00.000001) Version: 4.2.1\n", "stats-dump": b"\x00"}
    write_directory(vectors.root / "good/with-logs", logged)
    vectors.good("with-logs", "directory", sealed, files)
    later = Sealed(
        files,
        chunk_size=SMALL_CHUNK,
        index=future_minor_index,
        record=with_fields(formatVersion="1.7", novelty={"a": [1, "zwei"]}),
    )
    write_directory(vectors.root / "good/later-minor-version", later.all(files))
    vectors.good("later-minor-version", "directory", later, files)
    tar = make_tar(inside(logged) + outside())
    beside = ["checkpoint/dump.log", "checkpoint/stats-dump", "config.dump", "rootfs-diff.tar", "spec.dump"]
    archives = {
        "exported.tar": tar,
        "exported.tar.gz": gzip.compress(tar, mtime=0),
        "exported.tar.zst": zstandard.ZstdCompressor(level=3, write_checksum=True).compress(tar),
        "small-chunks.tar": make_tar(inside(small.all(files)) + outside()),
    }
    for name, data in archives.items():
        vectors.write(f"good/{name}", data)
        of, names = (small, beside[2:]) if name.startswith("small") else (sealed, beside)
        vectors.good(name, "archive", of, files, outside=names)
    for name, data in oci_files(tar).items():
        vectors.write(f"good/oci-layout/{name}", data)
    vectors.good("oci-layout", "OCI image", sealed, files, outside=beside)
    layout = oci_files(gzip.compress(tar, mtime=0), "tar+gzip")
    vectors.write("good/oci-archive.tar", make_tar(sorted(layout.items())))
    vectors.good("oci-archive.tar", "OCI image", sealed, files, outside=beside)


def make_tampered(vectors: Vectors) -> None:
    """Changed after the seal."""
    files, sealed = base_files(), Sealed(base_files())
    whole = sealed.all(files)

    def bad(name, what, changes, error, code, **more):
        content = {key: value for key, value in {**whole, **changes}.items() if value is not None}
        vectors.bad(name, what, inside(content) + outside(), error, code, **more)

    signature, manifest = sealed.documents[SIGNATURE_NAME], sealed.documents[MANIFEST_NAME]
    record, index = sealed.documents[RECORD_NAME], sealed.documents[INDEX_NAME]
    bad("truncated-signature", "signature cut in half", {SIGNATURE_NAME: signature[:200]}, "BadSignature", 62)
    bad("truncated-manifest", "manifest cut", {MANIFEST_NAME: manifest[:-1]}, "ContentMismatch", 52)
    bad("truncated-record", "record cut", {RECORD_NAME: record[:-1]}, "Truncated", 51)
    bad("truncated-index", "index cut", {INDEX_NAME: index[:-1]}, "Truncated", 51)
    bad("truncated-file", "a file cut", {"pages-1.img": files["pages-1.img"][:-1]}, "Truncated", 51)
    bad("empty-signature", "signature file empty", {SIGNATURE_NAME: b""}, "BadSignature", 62)
    bad("flipped-manifest", "one bit of the manifest", {MANIFEST_NAME: flip(manifest, 40)}, "ContentMismatch", 52)
    bad("flipped-record", "one bit of the record", {RECORD_NAME: flip(record, 90)}, "ContentMismatch", 52)
    bad("flipped-index", "one bit of the index", {INDEX_NAME: flip(index, 140)}, "ContentMismatch", 52)
    bad("flipped-file", "one bit of a file", {"pages-1.img": flip(files["pages-1.img"], -1)}, "ContentMismatch", 52)
    bad(
        "flipped-zero-chunk",
        "one bit of zeros",
        {"pages-1.img": flip(files["pages-1.img"], 9000)},
        "ContentMismatch",
        52,
    )
    bad("longer-file", "a byte more in a file", {"core-1.img": files["core-1.img"] + b"x"}, "ContentMismatch", 52)
    bad("longer-record", "a byte more in the record", {RECORD_NAME: record + b" "}, "ContentMismatch", 52)
    bad("filled-empty-file", "an empty file filled", {"empty.img": b"x"}, "ContentMismatch", 52)
    bad("unsigned", "signature removed", {SIGNATURE_NAME: None}, "Unsigned", 60)
    bad("unsealed", "all four documents removed", dict.fromkeys(NAMES), "Unsigned", 60)
    bad("unfinished-seal", "record and signature missing", {RECORD_NAME: None, SIGNATURE_NAME: None}, "Unsigned", 60)
    bad("missing-manifest", "manifest removed", {MANIFEST_NAME: None}, "UnexpectedEntry", 57)
    bad("missing-record", "record removed", {RECORD_NAME: None}, "UnexpectedEntry", 57)
    bad("missing-index", "index removed", {INDEX_NAME: None}, "UnexpectedEntry", 57)
    bad("missing-file", "a file removed", {"core-1.img": None}, "UnexpectedEntry", 57)
    bad("missing-empty-file", "an empty file removed", {"empty.img": None}, "UnexpectedEntry", 57)
    bad("extra-file", "a file added", {"core-2.img": b"x"}, "UnexpectedEntry", 57)
    bad("extra-own-file", "a vgpu file added", {"vgpu-pack-00001.bin": b"x"}, "UnexpectedEntry", 57)
    bad(
        "extra-script",
        "a script added that a runtime may know",
        {"pre-restore.sh": b"#!/bin/sh\n"},
        "UnexpectedEntry",
        57,
    )
    bad("sub-directory", "a sub-directory added", {"sub": FOLDER}, "UnexpectedEntry", 57)
    bad("link-file", "a file replaced by a symbolic link", {"core-1.img": Link("/etc/passwd")}, "UnexpectedEntry", 57)
    bad("link-log", "a log replaced by a symbolic link", {"restore.log": Link("/etc/shadow")}, "UnexpectedEntry", 57)
    bad("link-record", "the record replaced by a link", {RECORD_NAME: Link("core-1.img")}, "UnexpectedEntry", 57)
    bad(
        "hard-link",
        "a file replaced by a hard link",
        {"empty.img": HardLink("checkpoint/core-1.img")},
        "UnexpectedEntry",
        57,
    )
    bad("pipe", "a file replaced by a pipe", {"empty.img": FIFO}, "UnexpectedEntry", 57)
    other = Sealed({"core-1.img": b"other"}).documents
    bad(
        "signature-of-another",
        "another checkpoint's signature",
        {SIGNATURE_NAME: other[SIGNATURE_NAME]},
        "ContentMismatch",
        52,
    )
    bad("files-of-another", "another checkpoint's documents", dict(other), "UnexpectedEntry", 57)


def make_path_tricks(vectors: Vectors) -> None:
    """Only an archive can hold these."""
    whole = Sealed(base_files()).all(base_files())
    plain = inside(whole)

    def bad(name, what, members, error, code):
        vectors.bad(name, what, members, error, code, archiveOnly=True)

    bad("path-parent", "a member named ..", [*plain, ("checkpoint/../evil", b"x")], "UnsafeName", 56)
    bad("path-parent-outside", "a member above the root", [*plain, ("../evil", b"x")], "UnsafeName", 56)
    bad("path-absolute", "an absolute member", [*plain, ("/etc/cron.d/evil", b"x")], "UnsafeName", 56)
    bad("path-nested", "a member in a sub-directory", [*plain, ("checkpoint/a/b", b"x")], "UnsafeName", 56)
    bad("path-hidden", "a member with a leading dot", [*plain, ("checkpoint/.core-1.img", b"x")], "UnsafeName", 56)
    bad("path-control", "a control character", [*plain, ("checkpoint/a\nb", b"x")], "UnsafeName", 56)
    bad(
        "path-look-alike",
        "a letter that looks like another",
        [*plain, ("checkpoint/c\u043ere-1.img", b"x")],
        "UnsafeName",
        56,
    )
    bad("path-backslash", "a backslash", [*plain, ("checkpoint/a\\b", b"x")], "UnsafeName", 56)
    again = ("checkpoint/core-1.img", b"x")
    bad("duplicate-member", "a file twice", [*plain, again], "UnexpectedEntry", 57)
    dotted = ("./checkpoint/core-1.img", b"x")
    bad("duplicate-member-dotted", "a file twice, spelt otherwise", [*plain, dotted], "UnexpectedEntry", 57)
    bad("duplicate-outside", "spec.dump twice", [*plain, *outside(), ("spec.dump", b"{}")], "UnexpectedEntry", 57)
    bad("folder-is-link", "checkpoint is a link", [("checkpoint", Link("/tmp")), *plain[1:]], "UnexpectedEntry", 57)


def make_signed_badly(vectors: Vectors) -> None:
    """What a trusted key signed all the same, or what carries another signature."""
    files = base_files()

    def bad(name, what, error, code, *, of=files, **bends):
        vectors.bad(name, what, inside(Sealed(of, **bends).all(of)), error, code)

    bad("unknown-key", "signed by a key nobody trusts", "UntrustedKey", 61, key=UNKNOWN)
    hint = {"verificationMaterial": {"publicKey": {"hint": TRUSTED.key_id}}}
    bad(
        "wrong-hint",
        "signed by another key under a trusted hint",
        "BadSignature",
        62,
        key=UNKNOWN,
        bundle=with_fields(**hint),
    )
    bad(
        "bundle-0.4",
        "a later bundle",
        "FormatTooNew",
        53,
        bundle=with_fields(mediaType="application/vnd.dev.sigstore.bundle.v0.4+json"),
    )
    bad("bundle-other-type", "no bundle", "BadSignature", 62, bundle=with_fields(mediaType="application/json"))
    bad("two-signatures", "two signatures in one envelope", "BadSignature", 62, bundle=twice_signed)
    bad("sloppy-base64", "base64 with stray bits", "BadSignature", 62, bundle=sloppy)
    bad("payload-type", "another payload type, correctly signed", "BadSignature", 62, payload_type="application/json")
    bad(
        "predicate-v2",
        "a later predicate",
        "FormatTooNew",
        53,
        statement=with_fields(predicateType="https://vgpu-snapshot.dev/checkpoint/v2"),
    )
    bad(
        "predicate-other",
        "another predicate",
        "ImageError",
        50,
        statement=with_fields(predicateType="https://slsa.dev/provenance/v1"),
    )
    bad(
        "statement-container",
        "another container in the statement",
        "ContentMismatch",
        52,
        statement=predicate(containerId="ab" * 32),
    )
    bad(
        "statement-generation",
        "another generation in the statement",
        "ContentMismatch",
        52,
        statement=predicate(generation=4),
    )
    bad(
        "statement-root",
        "another content root in the statement",
        "ContentMismatch",
        52,
        statement=predicate(contentRoot="0" * 64),
    )
    bad(
        "artifact-v2",
        "a later manifest",
        "FormatTooNew",
        53,
        manifest=with_fields(artifactType="application/vnd.vgpu.checkpoint.v2+json"),
    )
    bad(
        "manifest-created",
        "another time in the manifest",
        "ContentMismatch",
        52,
        manifest=annotated("org.opencontainers.image.created", "2026-11-30T12:00:00Z"),
    )
    bad("manifest-no-layer", "a manifest without index", "ImageError", 50, manifest=with_fields(layers=[]))
    bad("manifest-not-json", "a manifest that is no JSON", "ImageError", 50, manifest_bytes=lambda _: b"{]")
    bad("record-2.0", "a later major version", "FormatTooNew", 53, record=with_fields(formatVersion="2.0"))
    bad("record-version-text", "a version that is none", "ImageError", 50, record=with_fields(formatVersion="one"))
    feature = {"required": ["staged-vram"], "optional": []}
    bad("unknown-feature", "an unknown required feature", "UnknownFeature", 54, record=with_fields(features=feature))
    bad(
        "record-other-root",
        "another content root in the record",
        "ContentMismatch",
        52,
        record=with_fields(contentRoot="1" * 64),
    )
    bad("record-missing-field", "no container", "ImageError", 50, record=without("container"))
    bad("record-wrong-type", "processes is an object", "ImageError", 50, record=with_fields(processes={}))
    bad(
        "record-duplicate-key",
        "a key twice",
        "ImageError",
        50,
        record_bytes=lambda data: b'{"mode":"driver",' + data[1:],
    )
    bad("record-float", "a float", "ImageError", 50, record_bytes=lambda data: b'{"x":1.5,' + data[1:])
    bad(
        "record-big-integer",
        "an integer beyond 2^53",
        "LimitExceeded",
        55,
        record_bytes=lambda data: b'{"x":9007199254740993,' + data[1:],
    )
    bad(
        "record-deep",
        "nesting",
        "LimitExceeded",
        55,
        record_bytes=lambda data: b'{"x":' + b"[" * 50 + b"]" * 50 + b"," + data[1:],
    )
    bad(
        "record-surrogate",
        "a lone surrogate",
        "ImageError",
        50,
        record_bytes=lambda data: b'{"x":"\\ud800",' + data[1:],
    )
    make_bad_indexes(bad)


def make_bad_indexes(bad) -> None:
    bad("index-magic", "another magic", "ImageError", 50, index=patch(0, "<8s", b"VGPUIDX9"))
    bad("index-major-2", "a later major version", "FormatTooNew", 53, index=patch(8, "<H", 2))
    bad("index-short", "shorter than its header", "Truncated", 51, index=lambda data: data[:100])
    bad("index-hash", "another hash", "UnknownFeature", 54, index=patch(32, "<I", 2))
    bad("index-header-size", "a huge header", "LimitExceeded", 55, index=patch(12, "<I", 0xFFFFFFFF))
    bad("index-record-size", "region records of no size", "LimitExceeded", 55, index=patch(16, "<I", 0))
    bad("index-chunk-size", "chunks of no size", "LimitExceeded", 55, index=patch(28, "<I", 0))
    bad("index-chunk-size-odd", "a chunk size that is no power of two", "ImageError", 50, index=patch(28, "<I", 5000))
    bad("index-huge-regions", "2^64-1 regions", "LimitExceeded", 55, index=patch(40, "<Q", 2**64 - 1))
    bad("index-huge-chunks", "2^60 chunks", "LimitExceeded", 55, index=patch(48, "<Q", 1 << 60))
    bad("index-huge-packs", "2^40 packs", "LimitExceeded", 55, index=patch(56, "<Q", 1 << 40))
    bad("index-huge-names", "2^32 bytes of names", "LimitExceeded", 55, index=patch(64, "<Q", 1 << 32))
    bad("index-many-regions", "more regions than the file holds", "Truncated", 51, index=patch(40, "<Q", 50_000))
    bad("index-trailing", "bytes after the last table", "ImageError", 50, index=lambda data: data + b"\0")
    bad("index-reserved", "reserved bytes in use", "ImageError", 50, index=patch(120, "<Q", 1))
    bad("index-root", "another content root", "ImageError", 50, index=patch(72, "<Q", 1))
    bad("index-region-kind", "an unknown kind of region", "UnknownFeature", 54, index=patch(REGION_0, "<H", 2))
    bad("index-region-address", "an address on a file region", "ImageError", 50, index=patch(REGION_0 + 8, "<Q", 1))
    bad(
        "index-region-length",
        "a region longer than its chunks",
        "ImageError",
        50,
        index=patch(REGION_0 + 16, "<Q", 1 << 62),
    )
    bad("index-region-start", "a region that begins elsewhere", "ImageError", 50, index=patch(REGION_0 + 24, "<Q", 1))
    bad(
        "index-name-range",
        "a name outside the name table",
        "Truncated",
        51,
        index=patch(REGION_0 + 40, "<I", 0xFFFFFF00),
    )
    bad("index-name-parent", "a name with ..", "UnsafeName", 56, index=renamed("core-1.img", "../e-1.img"))
    bad("index-name-slash", "a name with a slash", "UnsafeName", 56, index=renamed("core-1.img", "core/1.img"))
    bad("index-name-control", "a name with an escape", "UnsafeName", 56, index=renamed("core-1.img", "core\x1b1.img"))
    bad(
        "index-name-own",
        "a name of ours",
        "UnsafeName",
        56,
        of={**base_files(), "core-record.json": b"x"},
        index=renamed("core-record.json", "vgpu-record.json"),
    )
    bad(
        "index-name-log",
        "a name that may change",
        "UnsafeName",
        56,
        of={**base_files(), "aaaa.log": b"x"},
        index=renamed("aaaa.log", "dump.log"),
    )
    bad(
        "index-name-repeat",
        "a name twice",
        "ImageError",
        50,
        of={**base_files(), "core-2.img": b"x"},
        index=renamed("core-2.img", "core-1.img"),
    )
    bad("index-name-order", "names out of order", "ImageError", 50, index=renamed("core-1.img", "zore-1.img"))
    first_chunk = REGION_0 + FIRST_REGION_SIZE * len(base_files())
    bad("index-codec", "an unknown codec", "UnknownFeature", 54, index=patch(first_chunk + 36, "<H", 2))
    bad(
        "index-chunk-offset",
        "a chunk from elsewhere in the file",
        "ImageError",
        50,
        index=patch(first_chunk + 40, "<Q", 8),
    )
    bad("index-chunk-length", "a chunk of another length", "ImageError", 50, index=patch(first_chunk + 52, "<I", 1))
    bad("index-chunk-pack", "a chunk in another file", "ImageError", 50, index=patch(first_chunk + 32, "<I", 1))
    chunks = 3  # one for each file that is not empty
    first_pack = first_chunk + 64 * chunks
    bad("index-pack-size", "a file of another size", "ImageError", 50, index=patch(first_pack + 8, "<Q", 1))
    bad("index-pack-flags", "flags of a later version", "ImageError", 50, index=patch(first_pack + 48, "<I", 1))


def twice_signed(doc):
    return {**doc, "dsseEnvelope": {**doc["dsseEnvelope"], "signatures": doc["dsseEnvelope"]["signatures"] * 2}}


def sloppy(doc):
    signature = doc["dsseEnvelope"]["signatures"][0]["sig"]
    return {**doc, "dsseEnvelope": {**doc["dsseEnvelope"], "signatures": [{"sig": " " + signature}]}}


def predicate(**changes):
    return lambda doc: {**doc, "predicate": {**doc["predicate"], **changes}}


def annotated(key, value):
    return lambda doc: {**doc, "annotations": {**doc["annotations"], key: value}}


def without(name):
    return lambda doc: {key: value for key, value in doc.items() if key != name}


def make(root: Path) -> None:
    """Write all vectors into an empty folder."""
    vectors = Vectors(root)
    for name, key in (("trusted", TRUSTED), ("unknown", UNKNOWN)):
        vectors.write(f"keys/{name}.pub", key.public.to_pem())
    make_good(vectors)
    make_tampered(vectors)
    make_path_tricks(vectors)
    make_signed_badly(vectors)
    doc = {"formatVersion": "1.0", "trusted": ["keys/trusted.pub"], "cases": vectors.cases}
    vectors.write("expected.json", json.dumps(doc, indent=1).encode() + b"\n")


if __name__ == "__main__":
    if VECTORS.exists() and "--replace" not in sys.argv:
        sys.exit(f"{VECTORS} exists; released vectors are never changed (--replace before the first release only)")
    shutil.rmtree(VECTORS, ignore_errors=True)
    make(VECTORS)
