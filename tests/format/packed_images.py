"""Sealed checkpoints with small chunks for the tests and vectors of packs: files, pages and GPU memory, hundreds of chunks."""

from dataclasses import dataclass, replace

from blake3 import blake3

from image_format import chunk_index, sealing, vram
from image_format import pagemap as pagemap_reader
from image_format.file_names import pack_name
from image_format.hashing import HashedFile
from image_format.vram import ChunkPlace, VramFragment, VramRegion
from tests.format.make_staged_vectors import entry, staged_record
from tests.format.make_vectors import GPU, TRUSTED, hash_content, pattern
from tests.format.pages_images import pagemap, pages

CHUNK = 8192


@dataclass
class Image:
    """What goes into a directory: files, objects as lists of chunk contents, runs of pages."""

    files: dict[str, bytes]
    objects: dict[int, list[bytes]]
    runs: tuple = ()
    slots_from: int = 0
    chunk_size: int = CHUNK

    def seal(self):
        """The directory's files, documents among them, and the sealed index."""
        files = dict(self.files)
        if self.runs:
            files |= {"pagemap-1.img": pagemap(1, self.runs), "pages-1.img": pages(self.runs)}
        packs, fragment = self._vram()
        index = sealing.build_index(self._hashed(files), chunk_size=self.chunk_size)
        if fragment.regions:
            index = vram.merge(index, fragment, [len(packs[pack.name]) for pack in fragment.packs])
        documents = sealing.make_documents(index, self._record(), TRUSTED)
        return {**files, **packs, **documents}, chunk_index.from_bytes(documents["vgpu-index.bin"])

    def write(self, folder):
        """The same in a new directory; returns the sealed index."""
        folder.mkdir(parents=True)
        content, index = self.seal()
        for name, data in content.items():
            (folder / name).write_bytes(data)
        return index

    def _hashed(self, files):
        hashed = hash_content(files, self.chunk_size)
        return [self._cut(file, files[file.name]) for file in hashed]

    def _cut(self, file, data):
        if file.name != "pages-1.img" or not self.runs:
            return file

        lengths = pagemap_reader.read(pagemap(1, self.runs)).cuts(len(data), self.chunk_size)
        ids, start = b"", 0
        for length in lengths:
            ids += blake3(data[start : start + length]).digest()
            start += length
        return HashedFile(file.name, len(data), bytearray(ids), lengths)

    def _vram(self):
        """Slots in order, from a slot on that tells replicas apart."""
        content, offset, regions = bytearray(bytes(self.slots_from * self.chunk_size)), 0, []
        for number, chunks in self.objects.items():
            places = []
            for data in chunks:
                if not any(data):
                    places.append(ChunkPlace(blake3(data).digest(), None, 0, len(data)))
                    continue
                offset = -(-len(content) // self.chunk_size) * self.chunk_size
                content.extend(bytes(offset - len(content)) + data)
                places.append(ChunkPlace(blake3(data).digest(), pack_name(0), offset, len(data)))
            length = sum(map(len, chunks))
            regions.append(VramRegion(0, GPU, 0, length, f"7/{number}", tuple(places)))
        fragment = VramFragment.of(regions, chunk_size=self.chunk_size)
        return ({pack_name(0): bytes(content)} if fragment.packs else {}), fragment

    def _record(self):
        objects = {
            7: tuple(
                replace(entry(number, sum(map(len, chunks))), mappings=()) for number, chunks in self.objects.items()
            )
        }
        return staged_record(objects)


def chunks(count, seed, tail=0, chunk_size=CHUNK):
    """So many chunks of different content, and a shorter one."""
    whole = [pattern(chunk_size, (seed << 32) + n) for n in range(count)]
    return whole + ([pattern(tail, (seed << 32) + count)] if tail else [])


def text(size):
    """Content that compresses, and is nowhere the same."""
    lines = (b"%08d the same line again and again, as logs and tables have it\n" % n for n in range(size // 60))
    return b"".join(lines)[:size]
