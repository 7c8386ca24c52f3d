"""A second reader of checkpoints, written from the pages under spec/ alone; shares no line with image_format.

Accepts or refuses, and returns the content root. Slow and simple on purpose: whole files in memory, standard tarfile.
The vectors are held against both readers, so that a mistake in ours does not become the format.
"""

import base64
import gzip
import hashlib
import io
import itertools
import json
import os
import re
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

OBJECT_FIELDS = {"id", "size", "device", "uuid", "kind", "requested", "mappings"}


class RefusedError(Exception):
    """The checkpoint breaks a rule of the spec."""


def need(condition, rule):
    if not condition:
        raise RefusedError(rule)


def verify(path: Path, trusted_pems: list[bytes], features=frozenset({"staged"})) -> str:
    """Content root of a checkpoint that may be used; RefusedError otherwise. Version 1.0 knows no feature."""
    files = read_directory(path) if path.is_dir() and not (path / "oci-layout").exists() else read_any_archive(path)
    return check(files, trusted_pems, features)


# ---- archive-layout.md ---------------------------------------------------------------------------


def read_directory(path: Path) -> dict[str, bytes]:
    files, inodes = {}, set()
    for entry in os.scandir(path):
        status = entry.stat(follow_symlinks=False)
        need(stat.S_ISREG(status.st_mode), "section 1: plain files")
        need(status.st_nlink == 1 or is_pack(entry.name), "section 1: hard links")
        need(status.st_ino not in inodes, "section 1: a file under two names")
        inodes.add(status.st_ino)
        files[entry.name] = Path(entry.path).read_bytes()
    return files


def is_pack(name: str) -> bool:
    return re.fullmatch(r"vgpu-pack-[0-9]{5}\.bin", name) is not None


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


def check(files: dict[str, bytes], trusted_pems: list[bytes], features) -> str:
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
    record = read_record(files["vgpu-record.json"], features)
    chunk_size, regions, vram, packs, root = read_index(files["vgpu-index.bin"])
    check_objects(record, vram)
    predicate, annotations = statement["predicate"], manifest["annotations"]
    need(root == record["contentRoot"] == predicate["contentRoot"], "step 6: root")
    need(root == annotations["vgpu.checkpoint.content-root"], "step 6: root of the manifest")
    need(record["container"]["id"] == predicate["containerId"], "step 6: container")
    need(record["generation"] == predicate["generation"], "step 6: generation")
    need(
        record["created"] == predicate["created"] == annotations["org.opencontainers.image.created"], "step 6: created"
    )
    check_files(files, chunk_size, regions, packs)
    check_packs(files, packs, vram)
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


def read_record(data: bytes, features) -> dict:
    record = read_json(data, 8 << 20)
    major, dot, minor = record.get("formatVersion", "").partition(".")
    need(dot and major == "1" and minor.isdigit(), "versioning: major")
    for feature in record["features"]["required"]:
        need(feature in features, f"versioning: feature {feature}")
    need(isinstance(record.get("container"), dict), "record.md, section 2: container")
    for field in ("processes", "devices", "requirements", "parents", "phases", "regionsSummary"):
        need(isinstance(record.get(field), list), f"record.md, section 2: {field}")
    for process in record["processes"]:
        objects = process.get("objects") or []
        if process["mode"] == "staged" or objects:
            need("staged" in record["features"]["required"], "record.md, section 3: feature")
        read_objects(objects)
    return record


# ---- record.md, section 3 ------------------------------------------------------------------------


def read_objects(objects) -> None:
    spans = []
    for entry in objects:
        need(set(entry) >= OBJECT_FIELDS, "section 3: fields of an object")
        need(
            all({"va", "size", "offset", "access"} <= set(mapping) for mapping in entry["mappings"]),
            "section 3: fields",
        )
        need(all(isinstance(mapping["va"], str) for mapping in entry["mappings"]), "section 3: va is text")
    need(len({entry["id"] for entry in objects}) == len(objects), "section 3: ids")
    for entry in objects:
        for number in (entry["id"], entry["size"], entry["requested"], entry["device"]):
            need(type(number) is int and number >= 0, "section 3: numbers")
        need(0 < entry["size"] >= entry["requested"] and entry["device"] <= 65535, "section 3: size and device")
        need(entry["kind"] in ("alloc", "vmm"), "section 3: kind")
        need(re.fullmatch("GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", entry["uuid"]), "section 3: uuid")
        for mapping in entry["mappings"]:
            need(re.fullmatch("0x[1-9a-f][0-9a-f]{0,15}", mapping["va"]), "section 3: va")
            va, size, offset = int(mapping["va"], 16), mapping["size"], mapping["offset"]
            need(size > 0 and 0 <= offset <= entry["size"] - size and va + size <= 1 << 64, "section 3: mapping")
            for device, flags in mapping["access"]:
                need(0 <= device <= 65535 and 0 <= flags < 1 << 32, "section 3: access")
            spans.append((va, va + size))
    spans.sort()
    need(all(end <= start for (_, end), (start, _) in itertools.pairwise(spans)), "section 3: addresses overlap")


def check_objects(record, vram) -> None:
    found = {}
    for process in record["processes"]:
        for entry in process.get("objects") or []:
            name = f"{process['nsPid']}/{entry['id']}"
            need(name not in found, "section 3: twice")
            found[name] = (entry["size"], entry["device"], bytes.fromhex(entry["uuid"][4:].replace("-", "")))
    need(found == {name: (length, device, uuid) for name, length, device, uuid, _ in vram}, "section 3: same objects")


def check_packs(files, packs, vram) -> None:
    for name, size in packs:
        need(len(files[name]) == size, "step 7: size of a pack")
    for _, _, _, _, places in vram:
        for chunk_id, pack, offset, length in places:
            need(blake3.blake3(files[pack][offset : offset + length]).digest() == chunk_id, "step 8: VRAM chunk")


def check_files(files, chunk_size, regions, packs) -> None:
    wanted = {name for name, _, _ in regions} | {name for name, _ in packs}
    need(set(files) - set(DOCUMENTS) - MAY_CHANGE == wanted, "step 7: files")
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
    if minor <= 1:
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

    def name_of(offset, length):
        need(offset + length <= len(names), "name inside the names")
        return names[offset : offset + length].decode("latin-1")

    regions, vram, used, previous, hashed = [], [], 0, "", blake3.blake3(b"vgpu-content-root-v1\0")
    hashed.update(struct.pack("<IQ", chunk_size, region_count))
    all_ids = b""
    for n in range(region_count):
        at = header_size + n * region_size
        kind, device, flags, address, length, first, count, offset, size = struct.unpack_from("<HHIQQQQII", data, at)
        need(kind == 1 or (kind == 2 and minor >= 1), "region kind")
        name = name_of(offset, size)
        need(minor > 1 or flags == 0, "no flags")
        need(first == used and count == (length + chunk_size - 1) // chunk_size, "chunks of a region")
        need(used + count <= chunk_count, "chunks of all regions")
        used += count
        if kind == 2:
            numbers = range(first, first + count)
            vram.append((name, length, device, data[at + 48 : at + 64], numbers))
            fields = struct.pack("<HHIQQQI", kind, device, flags, 0, length, count, len(name))
            hashed.update(fields + name.encode())
            continue
        need(not vram, "files come first")
        need(minor > 1 or not (device or address or any(data[at + 48 : at + 64])), "zero for a file")
        check_name(name)
        need(not name.startswith("vgpu-") and name not in MAY_CHANGE, "archive-layout.md, section 2")
        need(name > previous, "ascending names")
        need(n < pack_count, "a pack for each file")
        pack_at = packs_at + n * pack_size
        pack_offset, pack_name_size, pack_bytes = struct.unpack_from("<IIQ", data, pack_at)
        need(name_of(pack_offset, pack_name_size) == name and pack_bytes == length, "pack is the file")
        need(minor > 1 or not any(data[pack_at + 48 : pack_at + 64]), "pack reserved")
        ids = read_chunks(data, chunks_at, chunk_record, range(first, first + count), n, length, chunk_size, minor)
        fields = struct.pack("<HHIQQQI", kind, device, flags, address, length, count, len(name))
        hashed.update(fields + name.encode())
        all_ids += b"".join(ids)
        regions.append((name, length, ids))
        previous = name
    need(used == chunk_count, "all chunks used")
    packs = []
    for n in range(len(regions), pack_count):
        pack_at = packs_at + n * pack_size
        pack_offset, pack_name_size, pack_bytes = struct.unpack_from("<IIQ", data, pack_at)
        packs.append((name_of(pack_offset, pack_name_size), pack_bytes))
        need(minor > 1 or not any(data[pack_at + 48 : pack_at + 64]), "pack reserved")
    need(all(is_pack(name) for name, _ in packs), "section 5: name of a pack")
    need(all(a < b for (a, _), (b, _) in itertools.pairwise(packs)), "section 5: order of packs")
    vram_ids, placed = read_vram(data, chunks_at, chunk_record, len(regions), packs, vram, chunk_size, minor)
    hashed.update(all_ids + vram_ids)
    need(hashed.digest() == root, "section 6: content root")
    return chunk_size, regions, placed, packs, root.hex()


def read_vram(data, chunks_at, chunk_record, first_pack, packs, vram, chunk_size, minor):
    keys = [object_key(name) for name, _, _, _, _ in vram]
    need(all(a < b for a, b in itertools.pairwise(keys)), "section 3: order of objects")
    slots, placed, all_ids = {}, [], b""
    for name, length, device, uuid, numbers in vram:
        records = [data[chunks_at + n * chunk_record : chunks_at + n * chunk_record + 64] for n in numbers]
        ids, places = read_vram_chunks(records, first_pack, packs, length, chunk_size, minor, slots)
        all_ids += b"".join(ids)
        placed.append((name, length, device, uuid, places))
    need({pack for pack, _ in slots} == {name for name, _ in packs}, "section 5: a pack without chunk")
    return all_ids, placed


def object_key(name):
    need(re.fullmatch("[1-9][0-9]{0,9}/(0|[1-9][0-9]{0,19})", name), "section 3: name of an object")
    pid, _, number = name.partition("/")
    return int(pid), int(number)


def read_vram_chunks(records, first_pack, packs, length, chunk_size, minor, slots):
    ids, places = [], []
    for position, record in enumerate(records):
        chunk_id, pack, codec, reserved, offset, stored, size = struct.unpack_from("<32sIHHQII", record)
        need(size == min(chunk_size, length - position * chunk_size), "section 4: length")
        need(codec in (0, 1), "codec")
        if minor <= 1:
            need(reserved == 0 and not any(record[56:64]), "chunk reserved")
        ids.append(chunk_id)
        if codec == 0:
            need((pack, offset, stored) == (0, 0, 0), "section 4: no place")
            need(chunk_id == blake3.blake3(bytes(size)).digest(), "section 4: zeros")
            continue
        need(first_pack <= pack < first_pack + len(packs), "section 4: a pack of slots")
        name, pack_bytes = packs[pack - first_pack]
        need(stored == size and offset % chunk_size == 0 and offset + size <= pack_bytes, "section 4: slot")
        need(slots.setdefault((name, offset), (chunk_id, size)) == (chunk_id, size), "section 4: one content in a slot")
        places.append((chunk_id, name, offset, size))
    return ids, places


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
        if minor <= 1:
            need(reserved == 0 and not any(data[at + 56 : at + 64]), "chunk reserved")
        ids.append(chunk_id)
    return ids
