"""Makes the test vectors of format version 1.1 under spec/vectors/1.1: checkpoints with GPU memory in packs.

Built like those of 1.0 (make_vectors.py, whose files and keys they share); a second run writes the same bytes.
Run as `python -m tests.format.make_staged_vectors`. A released folder is never changed.
"""

from __future__ import annotations

import gzip
import json
import shutil
import struct
import sys
from dataclasses import replace
from pathlib import Path

from blake3 import blake3

from image_format import chunk_index, vram
from image_format.chunk_index import CHUNK_SIZE, Codec
from image_format.content_root import content_root
from image_format.file_names import FRAGMENT_NAME
from image_format.gpu_objects import Access, ObjectEntry, ObjectMapping
from image_format.record import DeviceEntry, Parent, ProcessEntry, Record
from image_format.vram import ChunkPlace, VramFragment, VramRegion, pack_name, region_name
from tests.format.make_vectors import (
    FOLDER,
    GPU,
    SMALL_CHUNK,
    TRUSTED,
    HardLink,
    Link,
    Sealed,
    Vectors,
    base_files,
    base_record,
    flip,
    inside,
    make_tar,
    outside,
    pattern,
    with_fields,
    write_directory,
)

VECTORS = Path(__file__).parents[2] / "spec" / "vectors" / "1.1"
OTHER_GPU = "GPU-1d2c3b4a-5968-4776-8594-a3b2c1d0e0ff"
TAIL = 2048
FIRST, SECOND, THIRD = pack_name(0), pack_name(2), pack_name(3)


# ---- objects and packs ---------------------------------------------------------------------------


def entry(number: int, size: int, device: int = 0, uuid: str = GPU, **more) -> ObjectEntry:
    va = 0x7F00_0000_0000 + (number << 24)
    mappings = (ObjectMapping(va, size, 0, (Access(device, 3),)),)
    return ObjectEntry(number, size, device, uuid, requested=size - 8, **{"kind": "alloc", "mappings": mappings} | more)


def staged_record(objects: dict[int, tuple[ObjectEntry, ...]]) -> Record:
    base = base_record()
    processes = (
        ProcessEntry(7, "train", "staged", (GPU,), 1 << 30, objects.get(7, ())),
        ProcessEntry(12, "worker", "staged", (OTHER_GPU,), 1 << 20, objects.get(12, ())),
    )
    devices = (*base.devices, DeviceEntry(OTHER_GPU, "NVIDIA H200", 150_754_820_096))
    return replace(base, mode="staged", processes=processes, devices=devices, parents=(Parent("5e" * 32, 2),))


class Staged:
    """A checkpoint whose GPU memory is written slot by slot, as the data plane does it."""

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size
        self.packs: dict[str, bytearray] = {}
        self.regions: list[VramRegion] = []
        self.objects: dict[int, tuple[ObjectEntry, ...]] = {}
        self._free: dict[str, int] = {}

    def slot(self, pack: str, data: bytes) -> int:
        """Put bytes into the next slot."""
        offset = self._free.get(pack, 0)
        self._free[pack] = offset + self.chunk_size
        content = self.packs.setdefault(pack, bytearray())
        content.extend(bytes(offset - len(content)) + data)
        return offset

    def place(self, pack: str | None, data: bytes) -> ChunkPlace:
        offset = 0 if pack is None else self.slot(pack, data)
        return ChunkPlace(blake3(data).digest(), pack, offset, len(data))

    def add(self, pid: int, obj: ObjectEntry, chunks: list[ChunkPlace]) -> None:
        address = obj.mappings[0].va if obj.mappings else 0
        name = region_name(pid, obj.id)
        assert sum(place.length for place in chunks) == obj.size
        self.regions.append(VramRegion(obj.device, obj.uuid, address, obj.size, name, tuple(chunks)))
        self.objects[pid] = (*self.objects.get(pid, ()), obj)

    @property
    def record(self) -> Record:
        return staged_record(self.objects)

    @property
    def files(self) -> dict[str, bytes]:
        return base_files() | {name: bytes(data) for name, data in self.packs.items()}

    def extend(self, index):
        fragment = VramFragment.of(self.regions, chunk_size=self.chunk_size)
        return vram.merge(index, fragment, [len(self.packs[pack.name]) for pack in fragment.packs])

    def seal(self, **bends) -> Sealed:
        return Sealed(base_files(), chunk_size=self.chunk_size, base=self.record, extend=self.extend, **bends)

    @property
    def bytes_checked(self) -> int:
        return sum(map(len, base_files().values())) + sum(region.length for region in self.regions)


def small() -> Staged:
    """Chunks of 4 KiB: a shared slot, zeros, short chunks, a dead slot, numbers that are missing."""
    size, made = SMALL_CHUNK, Staged(SMALL_CHUNK)
    shared = made.place(FIRST, pattern(size, 11))
    zeros = made.place(None, bytes(size))
    made.add(7, entry(1, 2 * size + TAIL), [shared, zeros, made.place(FIRST, pattern(TAIL, 12))])
    made.slot(FIRST, pattern(size, 99))
    made.add(7, entry(2, 2 * size), [made.place(FIRST, pattern(size, 13)), shared])
    unmapped = entry(9, TAIL, kind="vmm", mappings=())
    made.add(7, unmapped, [made.place(None, bytes(TAIL))])
    parts = (ObjectMapping(0x10_0000, size, TAIL, (Access(0, 1), Access(1, 3))), ObjectMapping(0x20_0000, TAIL, 0, ()))
    made.add(7, entry(10, size + TAIL, mappings=parts), [made.place(SECOND, pattern(n, n)) for n in (size, TAIL)])
    made.add(12, entry(1, size, 1, OTHER_GPU), [made.place(THIRD, pattern(size, 14))])
    made.slot(THIRD, b"dead")
    return made


def large() -> Staged:
    """Chunks of 4 MiB; each pack has one short one, the first with dead bytes behind it."""
    made = Staged(CHUNK_SIZE)
    made.add(7, entry(1, 2 * TAIL), [made.place(FIRST, pattern(2 * TAIL, 21))])
    made.packs[FIRST].extend(pattern(500, 22))
    made.add(12, entry(1, TAIL, 1, OTHER_GPU), [made.place(SECOND, pattern(TAIL, 23))])
    made.add(12, entry(3, 3 * TAIL, 1, OTHER_GPU), [made.place(None, bytes(3 * TAIL))])
    return made


# ---- bending -------------------------------------------------------------------------------------


def reindexed(change):
    """Another index with a matching content root; `change` gets and returns the parsed one."""
    return lambda data: chunk_index.to_bytes(change(chunk_index.from_bytes(data)))


def with_chunk(region_name_: str, position: int, **changes):
    """One VRAM chunk bent."""

    def change(index):
        region = next(region for region in index.regions if region.name == region_name_)
        chunks = list(index.chunks)
        at = region.first_chunk + position
        chunks[at] = chunks[at]._replace(**changes)
        return replace(index, chunks=tuple(chunks))

    return reindexed(change)


def with_region(of: str, /, **changes):
    """One region bent."""

    def change(index):
        regions = tuple(r._replace(**changes) if r.name == of else r for r in index.regions)
        return replace(index, regions=regions)

    return reindexed(change)


def with_pack(of: str, /, **changes):
    """One pack bent."""

    def change(index):
        return replace(index, packs=tuple(p._replace(**changes) if p.name == of else p for p in index.packs))

    return reindexed(change)


def with_object(change, process: int = 0, position: int = 0):
    """One object of the record bent; `change` returns the new one."""

    def bend(doc):
        objects = doc["processes"][process]["objects"]
        objects[position] = change(objects[position])
        return doc

    return bend


def with_mapping(**changes):
    return with_object(lambda obj: obj | {"mappings": [obj["mappings"][0] | changes]})


def swap_first_regions(index):
    """VRAM before the files."""
    count = len(index.files)
    moved = (*index.vram, *index.files)
    first, regions = 0, []
    for region in moved:
        regions.append(region._replace(first_chunk=first))
        first += region.chunk_count
    start = index.vram[0].first_chunk
    chunks = index.chunks[start:] + index.chunks[:start]
    return replace(index, regions=tuple(regions), chunks=chunks, packs=index.packs[:count] + index.packs[count:])


def later_minor(data: bytes) -> bytes:
    """What version 1.2 may write: longer records, and values in what version 1.1 reserves."""
    index = chunk_index.from_bytes(data)
    tables, at, out = [], 128, bytearray(data[:128])
    for count in (len(index.regions), len(index.chunks), len(index.packs)):
        tables.append(b"".join(data[at + 64 * n : at + 64 * n + 64] + b"\x07" * 16 for n in range(count)))
        at += 64 * count
    struct.pack_into("<HHIIII", out, 8, 1, 2, 144, 80, 80, 80)
    return bytes(out) + b"\x09" * 16 + b"".join(tables) + data[at:]


def kind_3(data: bytes) -> bytes:
    """A kind of region that version 1.1 does not define; the root is what a reader of 1.1 would compute."""
    index = chunk_index.from_bytes(data)
    last = len(index.regions) - 1
    regions = [region._replace(address=0) for region in index.regions[:last]]
    root = content_root(
        index.chunk_size, [*regions, index.regions[last]._replace(kind=3)], (c.id for c in index.chunks)
    )
    out = bytearray(data)
    struct.pack_into("<H", out, 128 + 64 * last, 3)
    out[72:104] = root
    return bytes(out)


def minor_0(data: bytes) -> bytes:
    """The kind of region of a later version under the number of an earlier one."""
    return data[:10] + b"\0\0" + data[12:]


# ---- the cases -----------------------------------------------------------------------------------


def make_good(vectors: Vectors) -> None:
    def good(name, made, sealed, kind="directory", **more):
        vectors.good(name, kind, sealed, {}, bytesChecked=made.bytes_checked, **more)

    beside = ["config.dump", "rootfs-diff.tar", "spec.dump"]
    for name, made in (("large-chunks", large()), ("small-chunks", small())):
        sealed = made.seal()
        whole = sealed.all(made.files)
        write_directory(vectors.root / f"good/{name}", whole)
        good(name, made, sealed)
        members = inside(whole)
        late = [members[0], *reversed(members[1:])]
        archives = {
            f"{name}.tar": make_tar(members + outside()),
            f"{name}.tar.gz": gzip.compress(make_tar(members + outside()), mtime=0),
            f"{name}-index-last.tar": make_tar(late + outside()),
        }
        for path, data in archives.items():
            vectors.write(f"good/{path}", data)
            good(path, made, sealed, "archive", outside=beside)
    make_good_variants(vectors, good)


def make_good_variants(vectors: Vectors, good) -> None:
    made = small()
    novelty = with_fields(formatVersion="1.8", novelty=[1])
    later = made.seal(index=later_minor, record=novelty)
    write_directory(vectors.root / "good/later-minor-version", later.all(made.files))
    good("later-minor-version", made, later)
    rewritten = made.seal()
    made.packs[FIRST][2 * SMALL_CHUNK + 5] ^= 1  # in the dead slot, which nothing vouches for and nobody reads
    write_directory(vectors.root / "good/dead-slot-differs", rewritten.all(made.files))
    good("dead-slot-differs", made, rewritten)
    without = Staged(CHUNK_SIZE)
    sealed = without.seal()
    write_directory(vectors.root / "good/staged-without-objects", sealed.all(base_files()))
    good("staged-without-objects", without, sealed)
    zero = Staged(CHUNK_SIZE)
    zero.add(7, entry(1, TAIL), [zero.place(None, bytes(TAIL))])
    sealed = zero.seal()
    write_directory(vectors.root / "good/all-zero", sealed.all(base_files()))
    good("all-zero", zero, sealed)


def make_tampered(vectors: Vectors) -> None:
    """Changed after the seal."""
    made = small()
    files, sealed = made.files, made.seal()
    whole = sealed.all(files)
    tail_at = SMALL_CHUNK + TAIL - 1

    def bad(name, what, changes, error="ContentMismatch", code=52, **more):
        content = {key: value for key, value in {**whole, **changes}.items() if value is not None}
        vectors.bad(name, what, inside(content) + outside(), error, code, **more)

    bad("pack-flipped", "one bit of a chunk", {FIRST: flip(files[FIRST], 7)})
    bad("pack-tail-flipped", "the last byte of a short chunk", {FIRST: flip(files[FIRST], tail_at)})
    bad("pack-last-flipped", "one bit of the last object", {THIRD: flip(files[THIRD], 0)})
    bad("pack-truncated", "a pack cut", {SECOND: files[SECOND][:-1]}, "Truncated", 51)
    bad("pack-longer", "a byte more behind the last slot", {SECOND: files[SECOND] + b"x"})
    bad("pack-empty", "a pack emptied", {THIRD: b""}, "Truncated", 51)
    bad("pack-missing", "a pack removed", {SECOND: None}, "UnexpectedEntry", 57)
    bad("pack-added", "a pack added", {pack_name(1): b"x"}, "UnexpectedEntry", 57)
    bad("pack-of-another", "the content of another pack", {THIRD: files[SECOND][: len(files[THIRD])]})
    bad("pack-is-link", "a pack replaced by a symbolic link", {SECOND: Link("/dev/zero")}, "UnexpectedEntry", 57)
    bad("pack-is-folder", "a pack replaced by a directory", {SECOND: FOLDER}, "UnexpectedEntry", 57)
    again = {THIRD: HardLink(f"checkpoint/{FIRST}")}
    bad("pack-is-hard-link", "a pack that is another one", again, "UnexpectedEntry", 57)
    left = {FRAGMENT_NAME: vram.to_bytes(VramFragment.of(made.regions, chunk_size=SMALL_CHUNK))}
    bad("fragment-left", "the fragment left behind", left, "UnsafeName", 56, archiveOnly=True)
    big = large()
    content = big.seal().all(big.files) | {FIRST: flip(big.files[FIRST], 2 * TAIL - 1)}
    members = inside(content)
    late = [members[0], *reversed(members[1:])]
    vectors.bad("flipped-index-last", "a flipped short chunk before the index", late, "ContentMismatch", 52)


def make_signed_badly(vectors: Vectors) -> None:
    """Vouched for by a trusted key, and wrong all the same."""

    def bad(name, what, error="ImageError", code=50, **bends):
        made = small()
        vectors.bad(name, what, inside(made.seal(**bends).all(made.files)) + outside(), error, code)

    make_bad_regions(bad)
    make_bad_places(bad)
    make_bad_records(bad)


def make_bad_regions(bad) -> None:
    bad("kind-in-minor-0", "VRAM under version 1.0", "UnknownFeature", 54, index=minor_0)
    bad("kind-3", "an unknown kind of region", "UnknownFeature", 54, index=kind_3)
    bad("region-flags", "flags of a later version", index=with_region("7/1", flags=1))
    bad("file-with-uuid", "a uuid on a file", index=with_region("core-1.img", uuid=b"\1" * 16))
    bad("file-with-address", "an address on a file", index=with_region("core-1.img", address=1))
    bad("files-last", "VRAM before the files", index=reindexed(swap_first_regions))
    bad("object-order", "objects out of order", index=with_region("7/1", name="7/3"))
    bad("object-order-text", "objects in the order of text", index=with_region("7/2", name="7/11"))
    bad("object-repeat", "an object twice", index=with_region("7/1", name="7/2"))
    bad("process-order", "processes out of order", index=with_region("12/1", name="6/1"))
    for name, text in (("zero", "0/1"), ("leading", "07/1"), ("plain", "seven"), ("parent", "../1"), ("sign", "7/-1")):
        bad(f"object-name-{name}", f"the name {text}", "UnsafeName", 56, index=with_region("7/1", name=text))
    bad("object-length", "a region longer than its chunks", index=with_region("7/1", length=1 << 40))


def make_bad_places(bad) -> None:
    zeros, other = blake3(bytes(SMALL_CHUNK)).digest(), b"\x44" * 32
    bad("slot-over-slot", "two contents in one slot", index=with_chunk("7/2", 0, offset=0))
    bad("slot-other-length", "one slot, two lengths", index=with_chunk("7/1", 2, offset=0, id=small_id()))
    bad("slot-inside", "a chunk between slots", index=with_chunk("7/2", 0, offset=2048))
    bad("slot-beyond", "a chunk behind the end of its pack", index=with_chunk("12/1", 0, offset=SMALL_CHUNK))
    bad("slot-far", "a chunk at 2^63", index=with_chunk("12/1", 0, offset=1 << 63))
    bad("chunk-in-file", "a VRAM chunk in a file", index=with_chunk("12/1", 0, pack=3))
    bad("chunk-pack-range", "a pack that is not there", index=with_chunk("12/1", 0, pack=99))
    bad("chunk-stored", "another stored length", index=with_chunk("7/2", 0, stored_length=100))
    bad("chunk-length", "another length", index=with_chunk("7/2", 0, length=100, stored_length=100))
    bad("chunk-codec", "an unknown codec", "UnknownFeature", 54, index=with_chunk("7/2", 0, codec=2))
    bad("zero-with-place", "a zero chunk with a place", index=with_chunk("7/1", 1, pack=4))
    bad("zero-with-id", "zeros with another id", index=with_chunk("7/1", 1, id=other))
    zero = {"codec": Codec.ZERO, "pack": 0, "offset": 0, "stored_length": 0}
    bad("zero-for-content", "content called zero", index=with_chunk("7/2", 0, **zero))
    bad("pack-unused", "a pack without chunk", index=with_chunk("12/1", 0, id=zeros, **zero))
    bad("other-id", "another id of a chunk", "ContentMismatch", 52, index=with_chunk("12/1", 0, id=other))
    bad("pack-name", "a pack of another name", "UnsafeName", 56, index=with_pack(THIRD, name="vgpu-pack-3.bin"))
    bad("pack-name-record", "the record as a pack", "UnsafeName", 56, index=with_pack(THIRD, name="vgpu-record.json"))
    bad("pack-name-parent", "a pack elsewhere", "UnsafeName", 56, index=with_pack(THIRD, name="../pack-00003.bin"))
    bad("pack-order", "packs out of order", index=with_pack(THIRD, name=pack_name(1)))
    bad("pack-repeat", "a pack twice", index=with_pack(THIRD, name=SECOND))
    bad("pack-flags", "flags of a later version", index=with_pack(THIRD, flags=1))
    bad("pack-short", "a pack too short for its chunks", index=with_pack(THIRD, size=SMALL_CHUNK - 1))
    bad("packs-without-objects", "packs and no VRAM", index=reindexed(without_vram))


def small_id() -> bytes:
    return blake3(pattern(SMALL_CHUNK, 11)).digest()


def without_vram(index):
    first = index.vram[0].first_chunk
    return replace(index, regions=index.files, chunks=index.chunks[:first])


def make_bad_records(bad) -> None:
    unknown = {"required": ["staged", "teleport"], "optional": []}
    bad("unknown-feature", "one feature more", "UnknownFeature", 54, record=with_fields(features=unknown))
    none = {"required": [], "optional": ["staged"]}
    bad("feature-missing", "objects without the feature", record=with_fields(features=none))
    bad("feature-missing-mode", "staged mode without the feature", record=mode_without_feature)
    bad("objects-missing", "VRAM that the record does not know", record=without_objects)
    bad("object-added", "an object that the index does not know", record=with_another_object)
    bad("object-size", "another size", record=with_object(lambda obj: obj | {"size": obj["size"] + 1}))
    bad("object-device", "another device", record=with_object(lambda obj: obj | {"device": 1}))
    bad("object-uuid", "another uuid", record=with_object(lambda obj: obj | {"uuid": OTHER_GPU}))
    bad("object-uuid-text", "no uuid", record=with_object(lambda obj: obj | {"uuid": "GPU-0"}))
    bad("object-kind", "an unknown kind", record=with_object(lambda obj: obj | {"kind": "managed"}))
    bad(
        "object-requested", "more requested than there is", record=with_object(lambda obj: obj | {"requested": 1 << 40})
    )
    bad("object-id-twice", "an id twice", record=with_object(lambda obj: obj | {"id": 1}, position=1))
    bad("object-fields", "an object without mappings", record=with_object(lambda obj: {"id": obj["id"]}))
    bad("mapping-size", "a mapping of nothing", record=with_mapping(size=0))
    bad("mapping-beyond", "a mapping beyond its object", record=with_mapping(offset=1 << 20))
    bad("mapping-number", "an address as a number", record=with_mapping(va=4096))
    bad("mapping-upper", "an address in capitals", record=with_mapping(va="0x7F00"))
    bad("mapping-wrap", "a mapping around the end", record=with_mapping(va="0xffffffffffffffff"))
    bad("mapping-overlap", "two objects at one address", record=with_mapping(va=f"{0x7F00_0000_0000 + (2 << 24):#x}"))
    bad("mapping-access", "access of no device", record=with_mapping(access=[[-1, 3]]))


def mode_without_feature(doc):
    processes = [{key: value for key, value in item.items() if key != "objects"} for item in doc["processes"]]
    return doc | {"processes": processes, "features": {"required": [], "optional": []}}


def without_objects(doc):
    return mode_without_feature(doc) | {"features": doc["features"]}


def with_another_object(doc):
    doc["processes"][1]["objects"].append(entry(2, 4096, 1, OTHER_GPU).to_json())
    return doc


def make(root: Path) -> None:
    """Write all vectors into an empty folder."""
    vectors = Vectors(root)
    vectors.write("keys/trusted.pub", TRUSTED.public.to_pem())
    make_good(vectors)
    make_tampered(vectors)
    make_signed_badly(vectors)
    doc = {"formatVersion": "1.1", "trusted": ["keys/trusted.pub"], "cases": vectors.cases}
    vectors.write("expected.json", json.dumps(doc, indent=1).encode() + b"\n")


if __name__ == "__main__":
    if VECTORS.exists() and "--replace" not in sys.argv:
        sys.exit(f"{VECTORS} exists; released vectors are never changed (--replace before the first release only)")
    shutil.rmtree(VECTORS, ignore_errors=True)
    make(VECTORS)
