"""Makes the test vectors of format version 1.2 under spec/vectors/1.2: files of memory pages, and checkpoints in packs.

Built like those of 1.0 and 1.1, whose files and keys they share; a second run writes the same bytes, with the same zstd.
A checkpoint in packs is a folder of the blobs that a registry would hold; a bad one names the good one and what of it
is replaced. Run as `python -m tests.format.make_packed_vectors`. A released folder is never changed.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import sys
import tarfile
import tempfile
from dataclasses import replace
from pathlib import Path

import zstandard
from blake3 import blake3

from image_format import chunk_index, sealing
from image_format.archives.small_files import write_small_files
from image_format.content_root import content_root
from image_format.file_names import SEAL_NAMES
from image_format.hashing import HashedFile
from image_format.index_model import Codec
from image_format.packs.pack_streams import measure_packs, open_pack
from image_format.packs.packed import packed_index, packed_index_bytes, plan_packs
from tests.format.make_vectors import (
    TRUSTED,
    Sealed,
    Vectors,
    flip,
    hash_content,
    inside,
    make_tar,
    outside,
    patch,
    pattern,
    write_directory,
)
from tests.format.packed_images import Image, text
from tests.format.pages_images import Run, pagemap, pages

VECTORS = Path(__file__).parents[2] / "spec" / "vectors" / "1.2"
CHUNK = 16384
RUNS = (
    Run(0x55_5555_5000, 2),
    Run(0x55_5555_8000, 4),
    Run(0x7FFC_0000_0000, 1, is_present=False),
    Run(0x7FFC_0000_4000, 6),
)
PACKED_CHUNK = 64 << 10
PACKED_INDEX, SMALL_FILES = "packed-index.bin", "small-files.tar.zst"


# ---- files of pages ------------------------------------------------------------------------------


def pages_files() -> dict[str, bytes]:
    last = 0x7FFC_0000_9000
    data = pages(RUNS, lambda address: bytes(4096) if address >= last - 4096 else pattern(4096, address))
    return {
        "core-1.img": pattern(300, 1),
        "empty.img": b"",
        "pagemap-1.img": pagemap(1, RUNS, form="wide"),
        "pages-1.img": data,
        "zeta.img": pattern(CHUNK + 5, 6),
    }


LENGTHS = (4096, 20480 - 4096, 4096, 16384, 8192)


def cut(files, lengths=LENGTHS):
    """The index with the file of pages cut into these lengths."""

    def extend(index):
        del index
        hashed = hash_content(files, CHUNK)
        at = next(n for n, file in enumerate(hashed) if file.name == "pages-1.img")
        data, ids, start = files["pages-1.img"], b"", 0
        for length in lengths:
            ids += blake3(data[start : start + length]).digest()
            start += length
        hashed[at] = HashedFile("pages-1.img", len(data), bytearray(ids), lengths)
        return sealing.build_index(hashed, chunk_size=CHUNK)

    return extend


def seal_pages(lengths=LENGTHS, **bends) -> Sealed:
    files = pages_files()
    return Sealed(files, chunk_size=CHUNK, extend=cut(files, lengths), **bends)


def reindexed(change):
    return lambda data: chunk_index.to_bytes(change(chunk_index.from_bytes(data)))


def with_chunk(position: int, **changes):
    """One chunk of the pages bent."""

    def change(index):
        chunks = list(index.chunks)
        at = pages_region(index).first_chunk + position
        chunks[at] = chunks[at]._replace(**changes)
        return replace(index, chunks=tuple(chunks))

    return reindexed(change)


def pages_region(index):
    return next(region for region in index.regions if region.name == "pages-1.img")


def with_region(**changes):
    def change(index):
        regions = tuple(r._replace(**changes) if r.name == "pages-1.img" else r for r in index.regions)
        return replace(index, regions=regions)

    return reindexed(change)


def kind_4(data: bytes) -> bytes:
    return patch(10, "<H", 2)(with_region(kind=4)(data))


def pages_last(index):
    """Files of the two kinds apart, as no version has it."""
    order = [*(r for r in index.regions if r.kind == 1), pages_region(index)]
    regions, chunks, packs = [], [], []
    for number, region in enumerate(order):
        moved = [chunk._replace(pack=number) for chunk in index.chunks_of(region)]
        regions.append(region._replace(first_chunk=len(chunks)))
        chunks += moved
        packs.append(index.packs[index.regions.index(region)])
    return replace(index, regions=tuple(regions), chunks=tuple(chunks), packs=tuple(packs))


def root_without_lengths(data: bytes) -> bytes:
    """The root that version 1.1 would compute."""
    index = chunk_index.from_bytes(data)
    return data[:72] + content_root(CHUNK, index.regions, (chunk.id for chunk in index.chunks)) + data[104:]


def make_pages(vectors: Vectors) -> None:
    files = pages_files()
    beside = ["config.dump", "rootfs-diff.tar", "spec.dump"]
    cases = {"pages": seal_pages(), "pages-cut-otherwise": seal_pages((1, 4095, 16384, 100, 16384, 12188))}
    for name, sealed in cases.items():
        whole = sealed.all(files)
        write_directory(vectors.root / f"good/{name}", whole)
        vectors.good(name, "directory", sealed, files)
        members = inside(whole)
        vectors.write(f"good/{name}.tar", make_tar(members + outside()))
        vectors.good(f"{name}.tar", "archive", sealed, files, outside=beside)
    late = [members[0], *reversed(members[1:])]
    vectors.write("good/pages-backwards.tar", make_tar(late + outside()))
    vectors.good("pages-backwards.tar", "archive", sealed, files, outside=beside)
    make_bad_pages(vectors)


def make_bad_pages(vectors: Vectors) -> None:
    files = pages_files()
    whole = seal_pages().all(files)

    def changed(name, what, data, error="ContentMismatch", code=52):
        vectors.bad(name, what, inside({**whole, "pages-1.img": data}) + outside(), error, code)

    data = files["pages-1.img"]
    changed("pages-flipped", "one bit of the first chunk", flip(data, 0))
    changed("pages-flipped-edge", "the first bit behind the first chunk's end", flip(data, 4096))
    changed("pages-flipped-zeros", "one bit of zeros", flip(data, -1))
    changed("pages-truncated", "a page cut", data[:-4096], "Truncated", 51)
    changed("pages-swapped", "two chunks exchanged", data[20480:24576] + data[4096:20480] + data[:4096] + data[24576:])
    other = flip(files["pagemap-1.img"], -1)
    vectors.bad(
        "pagemap-flipped",
        "one bit of the pagemap",
        inside({**whole, "pagemap-1.img": other}) + outside(),
        "ContentMismatch",
        52,
    )

    def bad(name, what, error="ImageError", code=50, **bends):
        vectors.bad(name, what, inside(seal_pages(**bends).all(files)) + outside(), error, code)

    bad("pages-in-minor-1", "a kind of region of version 1.2", "UnknownFeature", 54, index=patch(10, "<H", 1))
    bad("kind-4", "an unknown kind of region", "UnknownFeature", 54, index=kind_4)
    bad("pages-device", "a device on a file of pages", index=with_region(device=1))
    bad("pages-last", "kinds of files not in one order of names", index=reindexed(pages_last))
    bad("pages-length-zero", "a chunk of nothing", index=with_chunk(0, length=0, stored_length=0))
    bad("pages-length-over", "a chunk above the chunk size", index=with_chunk(3, length=16385, stored_length=16385))
    bad("pages-length-short", "chunks that do not fill the region", index=with_chunk(4, length=8191))
    bad("pages-offset", "a chunk elsewhere in the file", index=with_chunk(1, offset=0))
    bad("pages-pack", "a chunk in another file", index=with_chunk(1, pack=0))
    bad("pages-codec-2", "zstd in a sealed index", "UnknownFeature", 54, index=with_chunk(1, codec=2))
    bad("pages-count", "fewer chunks than the length needs", index=with_region(length=1 << 40))
    bad("root-without-lengths", "a content root without lengths", index=root_without_lengths)
    bad("flag-unknown", "an unknown flag in the header", index=patch(36, "<I", 2))
    bad("flag-packed", "a packed index that is none", index=patch(36, "<I", 1))
    bad("reserved", "reserved bytes", index=patch(104, "<Q", 1))
    bad("packed-as-sealed", "a packed index in the place of the sealed one", index=as_packed)


def as_packed(data: bytes) -> bytes:
    """The packed index of the same content."""
    index = chunk_index.from_bytes(data)
    with tempfile.TemporaryDirectory() as folder:
        write_directory(Path(folder) / "a", pages_files())
        return packed_index_bytes(measure_packs(plan_packs(index), Path(folder) / "a"))


# ---- packs ---------------------------------------------------------------------------------------


def packed_image() -> Image:
    return Image(
        files={"core-1.img": pattern(300, 1), "empty.img": b"", "log.img": text((1 << 20) + 100)},
        objects={1: [pattern(PACKED_CHUNK, 21), bytes(PACKED_CHUNK), pattern(2048, 22)], 4: [pattern(2048, 22)]},
        runs=(Run(0x5000_0000, 3), Run(0x7000_0000, 2)),
        chunk_size=PACKED_CHUNK,
    )


class Packed:
    """A checkpoint as the blobs of a transport image."""

    def __init__(self) -> None:
        self.files, self.index = packed_image().seal()
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "sealed"
            write_directory(source, self.files)
            self.plan = measure_packs(plan_packs(self.index), source)
            self.blobs = {name: self.files[name] for name in SEAL_NAMES}
            self.blobs[PACKED_INDEX] = packed_index_bytes(self.plan)
            out = io.BytesIO()
            write_small_files(self.index, source, out)
            self.blobs[SMALL_FILES] = out.getvalue()
            for number in range(len(self.plan.packs)):
                with open_pack(self.plan, number, source) as stream:
                    self.blobs[f"pack-{number}"] = stream.read()

    def bent(self, change) -> bytes:
        """The packed index with another table; `change` gets regions by name, and lists of chunks and packs."""
        index = packed_index(self.plan)
        chunks, packs = list(index.chunks), list(index.packs)
        change({region.name: region for region in index.regions}, chunks, packs)
        return chunk_index.to_bytes(replace(index, chunks=tuple(chunks), packs=tuple(packs)))


def chunk_of(region: str, position: int, **changes):
    def change(regions, chunks, packs):
        del packs
        at = regions[region].first_chunk + position
        chunks[at] = chunks[at]._replace(**changes)

    return change


def pack_of(number: int, **changes):
    def change(regions, chunks, packs):
        del regions, chunks
        packs[number] = packs[number]._replace(**changes)

    return change


def one_pack_more(regions, chunks, packs):
    del regions, chunks
    packs.append(packs[-1]._replace(name="vgpu-pack-00004.bin"))


def swap_packs(regions, chunks, packs):
    del regions, chunks
    packs[-1], packs[-2] = packs[-1]._replace(name=packs[-2].name), packs[-2]._replace(name=packs[-1].name)


class PackedVectors:
    """Writes the good one, and of each bad one what differs."""

    def __init__(self, vectors: Vectors) -> None:
        self.vectors = vectors
        self.made = Packed()

    def good(self) -> None:
        made = self.made
        for name, data in made.blobs.items():
            self.vectors.write(f"good/packed/{name}", data)
        record = json.loads(made.files["vgpu-record.json"])
        packs = [
            {"sha256": pack.layout.sha256.hex(), "size": pack.layout.size, "mediaType": pack.media_type}
            for pack in made.plan.packs
        ]
        expect = {
            "ok": True,
            "contentRoot": record["contentRoot"],
            "manifestDigest": hashlib.sha256(made.files["vgpu-manifest.json"]).hexdigest(),
            "keyId": TRUSTED.key_id,
            "packs": packs,
            "files": {name: hashlib.sha256(data).hexdigest() for name, data in sorted(made.files.items())},
        }
        self.vectors.cases.append({"path": "good/packed", "kind": "packed", "expect": expect})

    def bad(self, name: str, what: str, blob: str, data: bytes, error: str = "ImageError", code: int = 50) -> None:
        path = f"bad/{name}/{blob}"
        self.vectors.write(path, data)
        expect = {"ok": False, "error": error, "exitCode": code}
        case = {"path": "good/packed", "kind": "packed", "name": name, "what": what, "replace": {blob: path}}
        self.vectors.cases.append(case | {"expect": expect})

    def index(self, name: str, what: str, change, error: str = "ImageError", code: int = 50) -> None:
        self.bad(f"packed-{name}", what, PACKED_INDEX, self.made.bent(change), error, code)


def make_packed(vectors: Vectors) -> None:
    packed = PackedVectors(vectors)
    packed.good()
    make_bad_places(packed)
    make_bad_blobs(packed)
    make_bad_small_files(packed)


def make_bad_places(packed: PackedVectors) -> None:
    first = len(packed.made.index.small_files)
    last = first + len(packed.made.plan.packs) - 1
    bad = packed.index
    bad("offset", "a chunk at no multiple of 4096", chunk_of("7/1", 0, offset=100))
    bad("beyond", "a chunk behind the end of its pack", chunk_of("7/1", 0, offset=1 << 30))
    bad("over", "two contents at one place", chunk_of("7/1", 2, offset=0))
    bad("overlap", "a chunk that begins inside another", chunk_of("7/1", 2, offset=4096))
    bad("raw-length", "a raw chunk of another length", chunk_of("7/1", 0, stored_length=100))
    bad("frame-length", "a frame as long as its content", chunk_of("log.img", 0, stored_length=PACKED_CHUNK))
    bad("codec-3", "an unknown codec", chunk_of("7/1", 0, codec=3), "UnknownFeature", 54)
    bad("class", "a chunk in a pack of another class", chunk_of("7/1", 2, pack=first, offset=0))
    bad("no-such-pack", "a pack that is not there", chunk_of("7/1", 0, pack=99))
    bad("in-file", "a bulk chunk in a small file", chunk_of("7/1", 0, pack=0))
    bad("zero-place", "a zero chunk with a place", chunk_of("7/1", 1, offset=4096))
    bad(
        "zero-content",
        "content said to be zeros",
        chunk_of("7/1", 0, codec=Codec.ZERO, pack=0, offset=0, stored_length=0),
    )
    bad("small-file", "a small file's chunk in a pack", chunk_of("core-1.img", 0, pack=last))
    bad("other-root", "the ids of another checkpoint", chunk_of("7/1", 0, id=b"\x55" * 32), "ContentMismatch", 52)
    bad("pack-class", "a pack of no class", pack_of(last, flags=0))
    bad("pack-digest", "a pack without sha256", pack_of(last, sha256=bytes(32)))
    bad(
        "pack-size",
        "a size that is no multiple of 4096",
        pack_of(last, size=packed.made.plan.packs[-1].layout.size + 1),
    )
    bad("pack-huge", "a pack of more than 128 chunk sizes", pack_of(last, size=129 * PACKED_CHUNK), "LimitExceeded", 55)
    bad("pack-name", "a name that is not its number's", pack_of(last, name="vgpu-pack-00009.bin"))
    bad("pack-unused", "a pack that holds nothing", one_pack_more)
    bad("pack-order", "packs under each other's name", swap_packs)
    data = packed.made.blobs[PACKED_INDEX]
    packed.bad("packed-no-flag", "the flag missing", PACKED_INDEX, patch(36, "<I", 0)(data))
    packed.bad("packed-minor-1", "the flag in version 1.1", PACKED_INDEX, patch(10, "<H", 1)(data))
    packed.bad("packed-truncated", "cut", PACKED_INDEX, data[:-1], "Truncated", 51)
    sealed = packed.made.blobs["vgpu-index.bin"]
    packed.bad("packed-is-sealed", "the sealed index in its place", PACKED_INDEX, sealed)


def frame_of(data: bytes, room: int, **more) -> bytes:
    frame = zstandard.ZstdCompressor(level=1, **more).compress(data)
    return frame.ljust(room, b"\0")[:room]


def make_bad_blobs(packed: PackedVectors) -> None:
    made = packed.made
    place = made.plan.packs[0].layout.places[0]
    content = text((1 << 20) + 100)[:PACKED_CHUNK]

    def frame(name, what, data, error="ContentMismatch", code=52):
        blob = data + made.blobs["pack-0"][place.stored_length :]
        packed.bad(f"frame-{name}", what, "pack-0", blob, error, code)

    room = place.stored_length
    other = b"another" + content[7:]
    frame("other", "another content of the same length", frame_of(other, room), "ImageError", 50)
    frame("longer", "a frame that says it holds more", frame_of(bytes(PACKED_CHUNK * 64), room))
    frame("shorter", "a frame that holds less", frame_of(content[:-1], room))
    sizeless = frame_of(content, room, write_content_size=False)
    frame("no-size", "a frame without its content size", sizeless)
    frame("raw", "the content itself", content[:room], "ImageError", 50)
    first = len(made.plan.packs) - 1
    data = made.blobs[f"pack-{first}"]
    packed.bad("pack-flipped", "one bit of a raw chunk", f"pack-{first}", flip(data, 9), "ContentMismatch", 52)
    packed.bad("pack-truncated", "a pack cut", f"pack-{first}", data[:1000], "Truncated", 51)
    packed.bad("pack-other", "another pack", f"pack-{first}", bytes(len(data)), "ContentMismatch", 52)


def small_blob(members) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.mode = 0o600
            if content is None:
                info.type, info.linkname = tarfile.SYMTYPE, "core-1.img"
                tar.addfile(info)
            else:
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return zstandard.ZstdCompressor(level=3).compress(out.getvalue())


def make_bad_small_files(packed: PackedVectors) -> None:
    made = packed.made
    files = {region.name: made.files[region.name] for region in made.index.small_files}

    def bad(name, what, change, error="UnexpectedEntry", code=57):
        content = {key: value for key, value in {**files, **change}.items() if value != "gone"}
        packed.bad(f"small-{name}", what, SMALL_FILES, small_blob(content.items()), error, code)

    bad("missing", "a file missing", {"core-1.img": "gone"})
    bad("extra", "a file more", {"stranger.img": b"x"})
    bad("own", "a file with a name of ours", {"vgpu-signature.json": b"x"})
    bad("link", "a link in a file's place", {"empty.img": None})
    bad("path", "a path upwards", {"../core-1.img": b"x"}, "UnsafeName", 56)
    bad("flipped", "one bit of a file", {"core-1.img": flip(files["core-1.img"], 5)}, "ContentMismatch", 52)
    bad("longer", "a byte more in a file", {"core-1.img": files["core-1.img"] + b"x"}, "ContentMismatch", 52)
    twice = small_blob([*files.items(), ("core-1.img", files["core-1.img"])])
    packed.bad("small-twice", "a file twice", SMALL_FILES, twice, "UnexpectedEntry", 57)
    blob = made.blobs[SMALL_FILES]
    packed.bad("small-damaged", "a damaged stream", SMALL_FILES, blob[:20] + b"\xff" * 8 + blob[28:])
    packed.bad("small-truncated", "cut", SMALL_FILES, blob[: len(blob) // 2], "Truncated", 51)


def make(root: Path) -> None:
    """Write all vectors into an empty folder."""
    vectors = Vectors(root)
    vectors.write("keys/trusted.pub", TRUSTED.public.to_pem())
    make_pages(vectors)
    make_packed(vectors)
    zstd = ".".join(map(str, zstandard.ZSTD_VERSION))
    doc = {"formatVersion": "1.2", "zstd": zstd, "trusted": ["keys/trusted.pub"], "cases": vectors.cases}
    vectors.write("expected.json", json.dumps(doc, indent=1).encode() + b"\n")


if __name__ == "__main__":
    if VECTORS.exists() and "--replace" not in sys.argv:
        sys.exit(f"{VECTORS} exists; released vectors are never changed (--replace before the first release only)")
    shutil.rmtree(VECTORS, ignore_errors=True)
    make(VECTORS)
