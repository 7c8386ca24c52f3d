"""A second reader of checkpoints, written from the pages under spec/ alone; shares no line with image_format.

Accepts or refuses, and returns the content root. Slow and simple on purpose: whole files in memory, standard tarfile.
The vectors are held against both readers, so that a mistake in ours does not become the format.
"""

import base64
import gzip
import hashlib
import io
import json
import os
import stat
import struct
import tarfile
from pathlib import Path

import blake3
import zstandard
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

DOCUMENTS = ("vgpu-index.bin", "vgpu-record.json", "vgpu-manifest.json", "vgpu-signature.json")
MAY_CHANGE = {
    "dump.log", "restore.log", "criu.log", "criu-dump.log", "criu-restore.log", "stats-dump", "stats-restore"
}  # fmt: skip


class RefusedError(Exception):
    """The checkpoint breaks a rule of the spec."""


def need(condition, rule):
    if not condition:
        raise RefusedError(rule)


def verify(path: Path, trusted_pems: list[bytes]) -> str:
    """Content root of a checkpoint that may be used; RefusedError otherwise."""
    files = read_directory(path) if path.is_dir() and not (path / "oci-layout").exists() else read_any_archive(path)
    return check(files, trusted_pems)


# ---- archive-layout.md ---------------------------------------------------------------------------


def read_directory(path: Path) -> dict[str, bytes]:
    files = {}
    for entry in os.scandir(path):
        status = entry.stat(follow_symlinks=False)
        need(stat.S_ISREG(status.st_mode) and status.st_nlink == 1, "section 1: plain files")
        files[entry.name] = Path(entry.path).read_bytes()
    return files


def read_any_archive(path: Path) -> dict[str, bytes]:
    if path.is_dir():
        return read_tar(oci_layer(lambda name: (path / name).read_bytes()))
    data = path.read_bytes()
    if data[257:262] == b"ustar":
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            names = tar.getnames()
            if "oci-layout" in names:
                return read_tar(oci_layer(lambda name: tar.extractfile(name).read()))
    return read_tar(data)


def oci_layer(read) -> bytes:
    def blob(descriptor):
        data = read("blobs/" + descriptor["digest"].replace(":", "/"))
        need(len(data) == descriptor["size"], "section 6: size")
        need("sha256:" + hashlib.sha256(data).hexdigest() == descriptor["digest"], "section 6: digest")
        return data

    (entry,) = json.loads(read("index.json"))["manifests"]
    (layer,) = json.loads(blob(entry))["layers"]
    return blob(layer)


def read_tar(data: bytes) -> dict[str, bytes]:
    if data[:2] == b"\x1f\x8b":
        data = gzip.decompress(data)
    elif data[:4] == b"\x28\xb5\x2f\xfd":
        data = zstandard.ZstdDecompressor().stream_reader(data).read()
    files, seen = {}, set()
    with tarfile.open(fileobj=io.BytesIO(data), errorlevel=2) as tar:
        for member in tar:
            need(not member.name.startswith("/"), "section 4: absolute")
            parts = [part for part in member.name.split("/") if part != "."]
            need(".." not in parts and "" not in parts, "section 4: ..")
            name = "/".join(parts)
            need(member.isdir() or name not in seen, "section 4: twice")
            seen.add(name)
            need(name != "checkpoint" or member.isdir(), "section 4: checkpoint is a directory")
            if name.startswith("checkpoint/"):
                need(member.isreg(), "section 1: plain files")
                files[name.removeprefix("checkpoint/")] = tar.extractfile(member).read()
    return files


def check_name(name: str) -> None:
    need(1 <= len(name) <= 255 and all(0x21 <= ord(c) <= 0x7E for c in name), "section 2: bytes")
    need("/" not in name and "\\" not in name and not name.startswith("."), "section 2: letters")


# ---- record.md, section 1 ------------------------------------------------------------------------


def read_json(data: bytes, limit: int) -> dict:
    def no_duplicates(pairs):
        need(len(dict(pairs)) == len(pairs), "a key twice")
        return dict(pairs)

    def no_float(_):
        raise RefusedError("a number that is no integer")

    need(len(data) <= limit, "too large")
    try:
        doc = json.loads(data.decode(), object_pairs_hook=no_duplicates, parse_float=no_float, parse_constant=no_float)
    except ValueError as error:
        raise RefusedError("not JSON") from error
    walk(doc, 0)
    need(isinstance(doc, dict), "an object")
    return doc


def walk(value, depth):
    need(depth <= 32, "nesting")
    if isinstance(value, dict):
        for key, item in value.items():
            walk(key, depth)
            walk(item, depth + 1)
    elif isinstance(value, list):
        for item in value:
            walk(item, depth + 1)
    elif isinstance(value, str):
        need(not any(0xD800 <= ord(c) <= 0xDFFF for c in value), "a lone surrogate")
    elif isinstance(value, int):
        need(abs(value) <= 2**53 - 1, "an integer beyond 2^53")


# ---- signature.md, section 5 ---------------------------------------------------------------------


def check(files: dict[str, bytes], trusted_pems: list[bytes]) -> str:
    need("vgpu-signature.json" in files, "step 1: unsigned")
    statement = verified_statement(files["vgpu-signature.json"], trusted_pems)
    for name in DOCUMENTS:
        need(name in files, f"{name} is missing")
    manifest_bytes = files["vgpu-manifest.json"]
    need(statement["subject"][0]["name"] == "vgpu-manifest.json", "section 3: subject")
    need(hashlib.sha256(manifest_bytes).hexdigest() == statement["subject"][0]["digest"]["sha256"], "step 3")
    manifest = read_json(manifest_bytes, 1 << 20)
    need(manifest.get("artifactType") == "application/vnd.vgpu.checkpoint.v1+json", "artifact type")
    need(len(manifest["layers"]) == 1, "one layer")
    for name, descriptor in (("vgpu-record.json", manifest["config"]), ("vgpu-index.bin", manifest["layers"][0])):
        need(len(files[name]) == descriptor["size"], "step 4: size")
        need("sha256:" + hashlib.sha256(files[name]).hexdigest() == descriptor["digest"], "step 4: sha256")
    record = read_record(files["vgpu-record.json"])
    chunk_size, regions, root = read_index(files["vgpu-index.bin"])
    predicate, annotations = statement["predicate"], manifest["annotations"]
    need(root == record["contentRoot"] == predicate["contentRoot"], "step 6: root")
    need(root == annotations["vgpu.checkpoint.content-root"], "step 6: root of the manifest")
    need(record["container"]["id"] == predicate["containerId"], "step 6: container")
    need(record["generation"] == predicate["generation"], "step 6: generation")
    need(
        record["created"] == predicate["created"] == annotations["org.opencontainers.image.created"], "step 6: created"
    )
    check_files(files, chunk_size, regions)
    return root


def verified_statement(data: bytes, trusted_pems: list[bytes]) -> dict:
    bundle = read_json(data, 1 << 20)
    need(bundle.get("mediaType") == "application/vnd.dev.sigstore.bundle.v0.3+json", "step 1: bundle")
    envelope = bundle["dsseEnvelope"]
    need(len(envelope["signatures"]) == 1, "section 2: one signature")
    payload, signature = strict_base64(envelope["payload"]), strict_base64(envelope["signatures"][0]["sig"])
    kind = envelope["payloadType"]
    need(kind == "application/vnd.in-toto+json", "step 2: payload type")
    signed = b" ".join([b"DSSEv1", str(len(kind)).encode(), kind.encode(), str(len(payload)).encode(), payload])
    keys = {}
    for pem in trusted_pems:
        key = serialization.load_pem_public_key(pem)
        der = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
        keys[base64.b64encode(hashlib.sha256(der).digest()).decode()] = key
    hint = bundle["verificationMaterial"]["publicKey"]["hint"]
    need(hint in keys, "step 2: key")
    try:
        keys[hint].verify(signature, signed, ec.ECDSA(hashes.SHA256()))
    except InvalidSignature as error:
        raise RefusedError("step 2: signature") from error
    statement = read_json(payload, 256 << 10)
    need(statement["_type"] == "https://in-toto.io/Statement/v1", "section 3: type")
    need(statement["predicateType"] == "https://vgpu-snapshot.dev/checkpoint/v1", "section 3: predicate type")
    return statement


def strict_base64(text: str) -> bytes:
    try:
        data = base64.b64decode(text, validate=True)
    except ValueError as error:
        raise RefusedError("section 2: base64") from error
    need(base64.b64encode(data).decode() == text, "section 2: base64")
    return data


def read_record(data: bytes) -> dict:
    record = read_json(data, 8 << 20)
    major, dot, minor = record.get("formatVersion", "").partition(".")
    need(dot and major == "1" and minor.isdigit(), "versioning: major")
    need(record["features"]["required"] == [], "versioning: features")
    need(isinstance(record.get("container"), dict), "record.md, section 2: container")
    for field in ("processes", "devices", "requirements", "parents", "phases", "regionsSummary"):
        need(isinstance(record.get(field), list), f"record.md, section 2: {field}")
    return record


def check_files(files, chunk_size, regions) -> None:
    need(set(files) - set(DOCUMENTS) - MAY_CHANGE == {name for name, _, _ in regions}, "step 7: files")
    for name, length, ids in regions:
        data = files[name]
        need(len(data) == length, "step 7: size")
        found = [blake3.blake3(data[start : start + chunk_size]).digest() for start in range(0, length, chunk_size)]
        need(found == ids, "step 8: chunk")


# ---- chunk-index.md ------------------------------------------------------------------------------


def read_index(data: bytes):
    need(128 <= len(data) <= 512 << 20, "size")
    need(data[:8] == b"VGPUIDX1", "magic")
    major, minor = struct.unpack_from("<HH", data, 8)
    header_size, region_size, chunk_record, pack_size, chunk_size, hash_id, reserved = struct.unpack_from(
        "<7I", data, 12
    )
    counts = struct.unpack_from("<4Q", data, 40)
    root = data[72:104]
    need(major == 1 and hash_id == 1, "version and hash")
    need(
        128 <= header_size <= 4096 and all(64 <= size <= 1024 for size in (region_size, chunk_record, pack_size)),
        "sizes",
    )
    need(4096 <= chunk_size <= 64 << 20 and chunk_size & (chunk_size - 1) == 0, "chunk size")
    if minor == 0:
        need((header_size, region_size, chunk_record, pack_size) == (128, 64, 64, 64), "sizes of 1.0")
        need(reserved == 0 and not any(data[104:128]), "reserved")
    region_count, chunk_count, pack_count, names_size = counts
    need(
        region_count <= 1 << 20 and pack_count <= 1 << 20 and chunk_count <= 1 << 23 and names_size <= 64 << 20,
        "limits",
    )
    chunks_at = header_size + region_count * region_size
    packs_at = chunks_at + chunk_count * chunk_record
    names_at = packs_at + pack_count * pack_size
    need(names_at + names_size == len(data), "exact size")
    names = data[names_at:]
    need(pack_count == region_count, "a pack for each region")

    def name_of(offset, length):
        need(offset + length <= len(names), "name inside the names")
        return names[offset : offset + length].decode("latin-1")

    regions, used, previous, hashed = [], 0, "", blake3.blake3(b"vgpu-content-root-v1\0")
    hashed.update(struct.pack("<IQ", chunk_size, region_count))
    all_ids = b""
    for n in range(region_count):
        at = header_size + n * region_size
        kind, device, flags, address, length, first, count, offset, size = struct.unpack_from("<HHIQQQQII", data, at)
        need(kind == 1, "region kind")
        if minor == 0:
            need(not (device or flags or address) and not any(data[at + 48 : at + 64]), "zero for a file")
        name = name_of(offset, size)
        check_name(name)
        need(not name.startswith("vgpu-") and name not in MAY_CHANGE, "archive-layout.md, section 2")
        need(name > previous, "ascending names")
        need(first == used and count == (length + chunk_size - 1) // chunk_size, "chunks of a region")
        need(used + count <= chunk_count, "chunks of all regions")
        pack_at = packs_at + n * pack_size
        pack_offset, pack_name_size, pack_bytes = struct.unpack_from("<IIQ", data, pack_at)
        need(name_of(pack_offset, pack_name_size) == name and pack_bytes == length, "pack is the file")
        if minor == 0:
            need(not any(data[pack_at + 48 : pack_at + 64]), "pack reserved")
        ids = read_chunks(data, chunks_at, chunk_record, range(first, first + count), n, length, chunk_size, minor)
        fields = struct.pack("<HHIQQQI", kind, device, flags, address, length, count, len(name))
        hashed.update(fields + name.encode())
        all_ids += b"".join(ids)
        regions.append((name, length, ids))
        used, previous = used + count, name
    need(used == chunk_count, "all chunks used")
    hashed.update(all_ids)
    need(hashed.digest() == root, "section 6: content root")
    return chunk_size, regions, root.hex()


def read_chunks(data, table_at, record_size, numbers, region, length, chunk_size, minor) -> list[bytes]:
    ids = []
    for position, number in enumerate(numbers):
        at = table_at + number * record_size
        chunk_id, pack, codec, reserved, offset, stored, size = struct.unpack_from("<32sIHHQII", data, at)
        start = position * chunk_size
        wanted = min(chunk_size, length - start)
        need(pack == region and size == wanted, "chunk of this file")
        need(codec in (0, 1), "codec")
        need((offset, stored) == ((start, wanted) if codec == 1 else (0, 0)), "place of the chunk")
        if minor == 0:
            need(reserved == 0 and not any(data[at + 56 : at + 64]), "chunk reserved")
        ids.append(chunk_id)
    return ids
