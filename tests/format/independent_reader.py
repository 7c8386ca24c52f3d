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
import uuid
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
OBJECT_NAME = "[1-9][0-9]{0,9}/(0|[1-9][0-9]{0,19})"
UUID = "GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
HEX_ID = "[0-9a-f]{1,256}"


class RefusedError(Exception):
    """The checkpoint breaks a rule of the spec."""


def need(condition, rule):
    if not condition:
        raise RefusedError(rule)


def verify(path: Path, trusted_pems: list[bytes], features=frozenset({"staged", "shared"})) -> str:
    """Content root of a checkpoint that may be used; RefusedError otherwise. Version 1.0 knows no feature."""
    files = read_directory(path) if path.is_dir() and not (path / "oci-layout").exists() else read_any_archive(path)
    return check(files, trusted_pems, features)


# ---- archive-layout.md ---------------------------------------------------------------------------


def read_directory(path: Path) -> dict[str, bytes]:
    files, inodes = {}, set()
    for entry in os.scandir(path):
        status = entry.stat(follow_symlinks=False)
        need(stat.S_ISREG(status.st_mode), "section 1: plain files")
        is_shared = is_pack(entry.name) or status.st_size > 1 << 20
        need(status.st_nlink == 1 or is_shared, "section 1: hard links")
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
    index = check_documents(files, trusted_pems, features)
    check_files(files, index)
    return index["root"].hex()


def check_documents(files: dict[str, bytes], trusted_pems: list[bytes], features) -> dict:
    """Steps 1 to 6; the sealed index."""
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
    index = read_index(files["vgpu-index.bin"])
    check_objects(record, index)
    predicate, annotations, root = statement["predicate"], manifest["annotations"], index["root"].hex()
    need(root == record["contentRoot"] == predicate["contentRoot"], "step 6: root")
    need(root == annotations["vgpu.checkpoint.content-root"], "step 6: root of the manifest")
    need(record["container"]["id"] == predicate["containerId"], "step 6: container")
    need(record["generation"] == predicate["generation"], "step 6: generation")
    times = (record["created"], predicate["created"], annotations["org.opencontainers.image.created"])
    need(len(set(times)) == 1, "step 6: created")
    return index


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
        objects, imports = process.get("objects") or [], process.get("imports") or []
        descriptors = process.get("descriptors") or []
        if process["mode"] == "staged" or objects or imports or descriptors:
            need("staged" in record["features"]["required"], "record.md, section 3: feature")
        if imports or descriptors or any(entry.get("kind") in ("import", "opened") for entry in objects):
            need("shared" in record["features"]["required"], "record.md, section 4: feature")
        read_objects(objects, imports)
        read_descriptors(process.get("descriptors", []))
    check_imports(record)
    check_groups(record)
    return record


# ---- record.md, section 3 ------------------------------------------------------------------------


def read_objects(objects, imports) -> None:
    spans = []
    for entry in objects:
        need(set(entry) >= OBJECT_FIELDS, "section 3: fields of an object")
        need(entry["kind"] in ("alloc", "vmm", "import", "opened"), "section 3: kind")
        need(type(entry["size"]) is int and entry["size"] > 0, "section 3: size")
        if "shared" in entry:
            need(all(isinstance(way, str) for way in entry["shared"]["ways"]), "section 3: ways")
            need(all(type(pid) is int and pid >= 0 for pid in entry["shared"]["peers"]), "section 3: peers")
            need(is_count(entry["shared"].get("peerCount", 0)), "section 3: peerCount")
    for entry in imports:
        need(set(entry) >= OBJECT_FIELDS - {"device"} | {"of"}, "section 4: fields of an import")
        need(entry["kind"] in ("import", "opened"), "section 4: kind")
        need(isinstance(entry["of"], str) and re.fullmatch(OBJECT_NAME, entry["of"]), "section 4: of")
    both = [*objects, *imports]
    need(len({entry["id"] for entry in both}) == len(both), "section 3: ids")
    for entry in both:
        numbers = [entry["id"], entry["size"], entry["requested"], entry.get("device", 0)]
        need(all(map(is_count, numbers)), "section 3: numbers")
        need(entry["size"] >= entry["requested"] and numbers[3] <= 65535, "section 3: size and device")
        need(re.fullmatch(UUID, entry["uuid"]), "section 3: uuid")
        spans += [read_mapping(mapping, entry["size"]) for mapping in entry["mappings"]]
    spans.sort()
    need(all(end <= start for (_, end), (start, _) in itertools.pairwise(spans)), "section 3: addresses overlap")


def read_descriptors(descriptors) -> None:
    need(isinstance(descriptors, list), "section 4: descriptors")
    for entry in descriptors:
        need(set(entry) >= {"number", "of", "closeOnExec", "token"}, "section 4: fields of a descriptor")
        need(is_count(entry["number"]) and entry["number"] < 1 << 31, "section 4: number")
        need(isinstance(entry["of"], str) and re.fullmatch(OBJECT_NAME, entry["of"]), "section 4: of")
        need(type(entry["closeOnExec"]) is bool, "section 4: closeOnExec")
        need(isinstance(entry["token"], str) and re.fullmatch("[0-9a-f]{16}", entry["token"]), "section 4: token")
    need(len({entry["number"] for entry in descriptors}) == len(descriptors), "section 4: a number twice")


def is_count(number) -> bool:
    return type(number) is int and number >= 0


def read_mapping(mapping, of_size) -> tuple[int, int]:
    need({"va", "size", "offset", "access"} <= set(mapping), "section 3: fields")
    need(isinstance(mapping["va"], str), "section 3: va is text")
    need(re.fullmatch("0x[1-9a-f][0-9a-f]{0,15}", mapping["va"]), "section 3: va")
    va, size, offset = int(mapping["va"], 16), mapping["size"], mapping["offset"]
    need(size > 0 and 0 <= offset <= of_size - size and va + size <= 1 << 64, "section 3: mapping")
    for device, flags in mapping["access"]:
        need(0 <= device <= 65535 and 0 <= flags < 1 << 32, "section 3: access")
    return va, va + size


# ---- record.md, sections 4 and 5 -----------------------------------------------------------------


def check_imports(record) -> None:
    objects = {
        f"{process['nsPid']}/{entry['id']}": entry
        for process in record["processes"]
        for entry in process.get("objects") or []
    }
    for process in record["processes"]:
        for entry in process.get("imports") or []:
            need(entry["of"] in objects, "section 4: of names no object")
            need(entry["of"].split("/")[0] != str(process["nsPid"]), "section 4: of the same process")
            held = objects[entry["of"]]
            need(entry["uuid"] == held["uuid"] and entry["size"] <= held["size"], "section 4: another object")
        for entry in process.get("descriptors") or []:
            need(entry["of"] in objects, "section 4: a descriptor of no object")


def check_groups(record) -> None:
    names = {
        process["nsPid"]: {
            f"{process['nsPid']}/{entry['id']}"
            for entry in [*(process.get("objects") or []), *(process.get("imports") or [])]
        }
        for process in record["processes"]
    }
    communicators, elements = record.get("communicators") or [], record.get("nvshmem") or []
    need(isinstance(communicators, list) and len(communicators) <= 8192, "section 5: communicators")
    need(isinstance(elements, list) and len(elements) <= 1024, "section 5: nvshmem")
    try:
        for entry in communicators:
            check_member(entry, "rank", names)
            ids = [entry["id"], entry.get("parent", "0")]
            need(all(isinstance(text, str) and re.fullmatch(HEX_ID, text) for text in ids), "section 5: id")
            calls = [entry["sequence"]["collectives"], entry["sequence"]["pointToPoint"]]
            split = entry.get("split", {"color": 0, "key": 0})
            need(all(map(is_count, [*calls, split["color"]])), "section 5: numbers")
            need(type(split["key"]) is int and isinstance(entry.get("name", ""), str), "section 5: key and name")
            need(entry.get("finalized", True) is True, "section 5: finalized")
        for entry in elements:
            need(("device" in entry) == ("uuid" in entry), "section 5: device and uuid")
            check_member({"device": 0, "uuid": f"GPU-{uuid.UUID(int=0)}"} | entry, "pe", names)
            need(set(entry.get("heap", ())) <= names[entry["nsPid"]], "section 5: heap")
            need(len(entry["teams"]) <= 4096, "section 5: teams")
            for team in entry["teams"]:
                need(is_count(team["pe"]) and is_count(team["size"]) and team["pe"] < team["size"], "section 5: team")
                need(isinstance(team["name"], str) and isinstance(team.get("parent", ""), str), "section 5: team")
    except (KeyError, TypeError) as error:
        raise RefusedError("section 5: fields") from error


def check_member(entry, place, names) -> None:
    need(entry["nsPid"] in names, "section 5: nsPid")
    need(all(is_count(entry[key]) for key in (place, "size", "device")), "section 5: numbers")
    need(isinstance(entry["library"], str), "section 5: library")
    need(entry[place] < entry["size"] and entry["device"] <= 65535, "section 5: place")
    need(re.fullmatch(UUID, entry["uuid"]) and isinstance(entry["version"], str), "section 5: uuid and version")


def check_objects(record, index) -> None:
    found = {}
    for process in record["processes"]:
        for entry in process.get("objects") or []:
            name = f"{process['nsPid']}/{entry['id']}"
            need(name not in found, "section 3: twice")
            found[name] = (entry["size"], entry["device"], bytes.fromhex(entry["uuid"][4:].replace("-", "")))
    vram = [region for region in index["regions"] if region["kind"] == 2]
    regions = {region["name"]: (region["length"], region["device"], region["uuid"]) for region in vram}
    need(found == regions, "section 3: same objects")


def check_files(files, index) -> None:
    packs = index["packs"]
    need(set(files) - set(DOCUMENTS) - MAY_CHANGE == {name for name, *_ in packs}, "step 7: files")
    for name, size, *_ in packs:
        need(len(files[name]) == size, "step 7: size")
    for region in index["regions"]:
        start = 0
        for chunk_id, pack, codec, offset, _, length in region["chunks"]:
            if region["kind"] != 2:
                need(blake3.blake3(files[region["name"]][start : start + length]).digest() == chunk_id, "step 8: chunk")
            elif codec:
                data = files[packs[pack][0]][offset : offset + length]
                need(blake3.blake3(data).digest() == chunk_id, "step 8: VRAM chunk")
            start += length


# ---- chunk-index.md ------------------------------------------------------------------------------

SMALL = 1048576


def read_index(data: bytes, *, packed: bool = False) -> dict:
    """Regions with their chunks; a chunk is (id, pack, codec, offset, stored length, length)."""
    need(128 <= len(data) <= 512 << 20, "size")
    need(data[:8] == b"VGPUIDX1", "magic")
    major, minor = struct.unpack_from("<HH", data, 8)
    header_size, region_size, chunk_record, pack_size, chunk_size, hash_id, flags = struct.unpack_from("<7I", data, 12)
    region_count, chunk_count, pack_count, names_size = struct.unpack_from("<4Q", data, 40)
    need(major == 1 and hash_id == 1, "version and hash")
    sizes = (region_size, chunk_record, pack_size)
    need(128 <= header_size <= 4096 and all(64 <= size <= 1024 for size in sizes), "sizes")
    need(4096 <= chunk_size <= 64 << 20 and chunk_size & (chunk_size - 1) == 0, "chunk size")
    if minor <= 1:
        need((header_size, *sizes) == (128, 64, 64, 64) and flags == 0, "section 2: minor versions 0 and 1")
    if minor <= 2:
        need(flags in (0, 1) and not any(data[104:128]), "section 2: reserved")
    need(bool(flags & 1) == packed, "section 8: a packed index is no sealed one")
    need(region_count <= 1 << 20 and pack_count <= 1 << 20 and chunk_count <= 1 << 23, "limits")
    need(names_size <= 64 << 20, "limits")
    chunks_at = header_size + region_count * region_size
    packs_at = chunks_at + chunk_count * chunk_record
    names_at = packs_at + pack_count * pack_size
    need(names_at + names_size == len(data), "exact size")
    names = data[names_at:]

    def name_of(offset, length):
        need(offset + length <= len(names), "name inside the names")
        return names[offset : offset + length].decode("latin-1")

    packs = []
    for n in range(pack_count):
        record = data[packs_at + n * pack_size :][:64]
        offset, size, pack_bytes, sha256, pack_flags = struct.unpack_from("<IIQ32sI", record)
        need(minor > 2 or not any(record[52:64]), "section 5: reserved")
        need(minor > 2 or packed or pack_flags == 0, "section 5: flags")
        packs.append((name_of(offset, size), pack_bytes, sha256, pack_flags))
    chunks = [read_chunk(data[chunks_at + n * chunk_record :][:64], minor) for n in range(chunk_count)]
    regions = []
    for n in range(region_count):
        record = data[header_size + n * region_size :][:64]
        regions.append(read_region(record, minor, name_of, chunks, sum(len(r["chunks"]) for r in regions)))
    need(sum(len(region["chunks"]) for region in regions) == chunk_count, "all chunks used")
    index = {"chunk_size": chunk_size, "regions": regions, "packs": packs}
    check_regions(index)
    check_packed_places(index) if packed else check_sealed_places(index)
    index["root"] = content_root(index)
    need(index["root"] == data[72:104], "section 6: content root")
    return index


def read_chunk(record, minor):
    chunk_id, pack, codec, reserved, offset, stored, length = struct.unpack_from("<32sIHHQII", record)
    need(minor > 2 or (reserved == 0 and not any(record[56:64])), "section 4: reserved")
    return chunk_id, pack, codec, offset, stored, length


def read_region(record, minor, name_of, chunks, first_free):
    kind, device, flags, address, length, first, count, offset, size = struct.unpack_from("<HHIQQQQII", record)
    need(kind in ((1,), (1, 2), (1, 2, 3))[min(minor, 2)], "section 3: kind")
    need(minor > 2 or flags == 0, "section 3: flags")
    need(kind == 2 or minor > 2 or not (device or address or any(record[48:64])), "section 3: zero for a file")
    need(first == first_free and count <= len(chunks) - first, "section 3: chunks in order")
    numbers = {"kind": kind, "device": device, "flags": flags, "address": address, "length": length}
    return {"name": name_of(offset, size), "uuid": record[48:64], "chunks": chunks[first : first + count]} | numbers


def check_regions(index):
    chunk_size, regions = index["chunk_size"], index["regions"]
    files = [region["name"] for region in regions if region["kind"] != 2]
    need(
        [region["kind"] == 2 for region in regions] == sorted(region["kind"] == 2 for region in regions), "files first"
    )
    need(all(a < b for a, b in itertools.pairwise(files)), "section 3: ascending names")
    keys = [object_key(region["name"]) for region in regions if region["kind"] == 2]
    need(all(a < b for a, b in itertools.pairwise(keys)), "section 3: order of objects")
    for name in files:
        check_name(name)
        need(not name.startswith("vgpu-") and name not in MAY_CHANGE, "archive-layout.md, section 2")
    for region in regions:
        lengths = [chunk[5] for chunk in region["chunks"]]
        if region["kind"] == 3:
            need(all(1 <= length <= chunk_size for length in lengths), "section 4: length of a chunk of pages")
            need(sum(lengths) == region["length"], "section 4: chunks make up the region")
        else:
            need(len(lengths) == -(-region["length"] // chunk_size), "section 3: number of chunks")
            starts = range(0, region["length"], chunk_size)
            need(lengths == [min(chunk_size, region["length"] - start) for start in starts], "section 4: length")


def object_key(name):
    need(re.fullmatch("[1-9][0-9]{0,9}/(0|[1-9][0-9]{0,19})", name), "section 3: name of an object")
    pid, _, number = name.partition("/")
    return int(pid), int(number)


def check_own_file(region, number, pack):
    """Chunks that lie in the file itself."""
    need(pack == (region["name"], region["length"], pack[2], 0), "section 5: pack is the file")
    start = 0
    for _, pack_number, codec, offset, stored, length in region["chunks"]:
        need(pack_number == number, "section 4: pack number of a file")
        need(codec in (0, 1), "section 4: codec")
        need((offset, stored) == ((start, length) if codec else (0, 0)), "section 4: place in a file")
        start += length


def check_sealed_places(index):
    chunk_size, packs = index["chunk_size"], index["packs"]
    files = [region for region in index["regions"] if region["kind"] != 2]
    vram = [region for region in index["regions"] if region["kind"] == 2]
    need(len(packs) >= len(files), "section 5: a pack for each file")
    for number, region in enumerate(files):
        check_own_file(region, number, packs[number])
    slot_packs = packs[len(files) :]
    need(vram or not slot_packs, "section 5: packs without VRAM")
    need(all(is_pack(name) for name, *_ in slot_packs), "section 5: name of a pack")
    need(all(a[0] < b[0] for a, b in itertools.pairwise(slot_packs)), "section 5: order of packs")
    slots = {}
    for chunk in (chunk for region in vram for chunk in region["chunks"]):
        chunk_id, pack, codec, offset, stored, length = chunk
        need(codec in (0, 1), "section 4: codec")
        if codec == 0:
            check_zero(chunk)
            continue
        need(len(files) <= pack < len(packs), "section 4: a pack of slots")
        need(stored == length and offset % chunk_size == 0, "section 4: slot")
        need(offset + length <= packs[pack][1], "section 4: slot inside the pack")
        need(
            slots.setdefault((pack, offset), (chunk_id, length)) == (chunk_id, length),
            "section 4: one content in a slot",
        )
    need({pack for pack, _ in slots} == set(range(len(files), len(packs))), "section 5: a pack without chunk")


def check_zero(chunk):
    chunk_id, pack, _, offset, stored, length = chunk
    need((pack, offset, stored) == (0, 0, 0), "section 4: a zero chunk has no place")
    need(chunk_id == blake3.blake3(bytes(length)).digest(), "section 4: zeros")


def is_small(region):
    return region["kind"] == 1 and region["length"] <= SMALL


def check_packed_places(index):
    chunk_size, packs = index["chunk_size"], index["packs"]
    small = [region for region in index["regions"] if is_small(region)]
    need(len(packs) >= len(small), "section 8: a pack for each small file")
    for number, region in enumerate(small):
        need(packs[number][2] == bytes(32), "section 8: no sha256 for a small file")
        check_own_file(region, number, packs[number])
    for number, (name, size, sha256, kind) in enumerate(packs[len(small) :]):
        need(name == f"vgpu-pack-{number:05}.bin", "section 8: name of a pack")
        need(size % 4096 == 0 and size <= 128 * chunk_size, "section 8: size of a pack")
        need(any(sha256) and kind in (1, 2, 3), "section 8: sha256 and class")
    places = {}
    for region in index["regions"]:
        for chunk in [] if is_small(region) else region["chunks"]:
            chunk_id, pack, codec, offset, stored, length = chunk
            need(codec in (0, 1, 2), "section 8: codec")
            if codec == 0:
                check_zero(chunk)
                continue
            need(len(small) <= pack < len(packs) and packs[pack][3] == region["kind"], "section 8: pack and class")
            need(offset % 4096 == 0 and offset + stored <= packs[pack][1], "section 8: place")
            need(stored == length if codec == 1 else 0 < stored < length, "section 8: stored length")
            content = (codec, stored, chunk_id, length)
            need(places.setdefault((pack, offset), content) == content, "section 8: one content at a place")
    for (pack, offset), (next_pack, next_offset) in itertools.pairwise(sorted(places)):
        need(pack != next_pack or offset + places[pack, offset][1] <= next_offset, "section 8: overlap")
    need({pack for pack, _ in places} == set(range(len(small), len(packs))), "section 8: a pack without chunk")


def content_root(index) -> bytes:
    regions = index["regions"]
    hashed = blake3.blake3(b"vgpu-content-root-v1\0" + struct.pack("<IQ", index["chunk_size"], len(regions)))
    for region in regions:
        address = 0 if region["kind"] == 2 else region["address"]
        numbers = (region["kind"], region["device"], region["flags"], address, region["length"], len(region["chunks"]))
        name = region["name"].encode()
        hashed.update(struct.pack("<HHIQQQI", *numbers, len(name)) + name)
    for region in regions:
        hashed.update(b"".join(chunk[0] for chunk in region["chunks"]))
    for region in regions:
        if region["kind"] == 3:
            hashed.update(b"".join(struct.pack("<I", chunk[5]) for chunk in region["chunks"]))
    return hashed.digest()


# ---- transport.md --------------------------------------------------------------------------------


def unpack(blobs: dict[str, bytes], trusted_pems: list[bytes]) -> dict[str, bytes]:
    """The files of the sealed directory out of the blobs of a transport image; all of them are checked at the end."""
    documents = {name: blobs[name] for name in DOCUMENTS}
    check_documents(documents, trusted_pems, frozenset({"staged"}))
    sealed = read_index(blobs["vgpu-index.bin"])
    packed = read_index(blobs["packed-index.bin"], packed=True)
    need(packed["root"] == sealed["root"], "section 7, step 3: content root")
    small = [region for region in sealed["regions"] if is_small(region)]
    files = documents | read_small_files(blobs["small-files.tar.zst"], small)
    bulk = {r["name"]: bytearray(r["length"]) for r in sealed["regions"] if r["kind"] != 2 and not is_small(r)}
    slots = {
        name: bytearray(size) for name, size, *_ in sealed["packs"][sum(r["kind"] != 2 for r in sealed["regions"]) :]
    }
    for sealed_region, packed_region in zip(sealed["regions"], packed["regions"], strict=True):
        if is_small(sealed_region):
            continue
        start = 0
        for want, place in zip(sealed_region["chunks"], packed_region["chunks"], strict=True):
            content = read_packed_chunk(place, blobs, len(small))
            need(blake3.blake3(content).digest() == want[0], "section 7, step 4: id")
            if sealed_region["kind"] != 2:
                bulk[sealed_region["name"]][start : start + len(content)] = content
            elif want[2]:
                slots[sealed["packs"][want[1]][0]][want[3] : want[3] + len(content)] = content
            start += len(content)
    files |= {name: bytes(data) for name, data in (bulk | slots).items()}
    check(files, trusted_pems, frozenset({"staged"}))
    return files


def read_packed_chunk(place, blobs, small_count) -> bytes:
    _, pack, codec, offset, stored, length = place
    if codec == 0:
        return bytes(length)
    data = blobs[f"pack-{pack - small_count}"][offset : offset + stored]
    need(len(data) == stored, "a pack that is cut")
    if codec == 1:
        return data
    try:
        need(zstandard.frame_content_size(data) == length, "chunk-index.md, section 8: content size")
        return zstandard.ZstdDecompressor().decompress(data, max_output_size=length, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise RefusedError("chunk-index.md, section 8: frame") from error


def read_small_files(blob, regions) -> dict[str, bytes]:
    wanted, found = {region["name"]: region for region in regions}, {}
    try:
        tar_bytes = zstandard.ZstdDecompressor(max_window_size=8 << 20).stream_reader(blob).read()
        with tarfile.open(fileobj=io.BytesIO(tar_bytes), errorlevel=2) as tar:
            for member in tar:
                need(member.name in wanted and member.isreg() and member.name not in found, "section 4: member")
                found[member.name] = tar.extractfile(member).read()
    except (zstandard.ZstdError, tarfile.TarError) as error:
        raise RefusedError("section 4: damaged") from error
    need(set(found) == set(wanted), "section 4: all small files")
    for name, data in found.items():
        start = 0
        need(len(data) == wanted[name]["length"], "section 4: size")
        for chunk in wanted[name]["chunks"]:
            need(blake3.blake3(data[start : start + chunk[5]]).digest() == chunk[0], "section 4: id")
            start += chunk[5]
    return found


def packs_of(index) -> list[tuple[int, list[bytes]]]:
    """Section 2: class and chunk ids of every pack that a writer makes without packs of earlier images."""
    packs = []
    for kind in (1, 2, 3):
        bulk = [region["chunks"] for region in index["regions"] if region["kind"] == kind and not is_small(region)]
        groups = groups_by_content(bulk, index["chunk_size"]) if kind == 3 else groups_by_position(bulk)
        for group in groups:
            ids = list(dict.fromkeys(chunk[0] for chunk in group if not is_zeros(chunk)))
            if ids and (kind, ids) not in packs:
                packs.append((kind, ids))
    return packs


def is_zeros(chunk) -> bool:
    return chunk[0] == blake3.blake3(bytes(chunk[5])).digest()


def groups_by_position(regions):
    groups, small = [], []
    for chunks in regions:
        if len(chunks) >= 128:
            groups += [small, *(chunks[n : n + 128] for n in range(0, len(chunks), 128))]
            small = []
        elif len(small) + len(chunks) > 128:
            groups.append(small)
            small = list(chunks)
        else:
            small = small + list(chunks)
    return [*groups, small]


def groups_by_content(regions, chunk_size):
    groups, group, size = [], [], 0
    for chunk in (chunk for chunks in regions for chunk in chunks if not is_zeros(chunk)):
        rounded = -(-chunk[5] // 4096) * 4096
        if size + rounded > 128 * chunk_size:
            groups.append(group)
            group, size = [], 0
        group.append(chunk)
        size += rounded
        if size >= 16 * chunk_size and chunk[0][0] < 8:
            groups.append(group)
            group, size = [], 0
    return [*groups, group]
