"""Writes a sealed directory out of packs, chunk by chunk, each compared with its signed id before it is written.

The sealed documents say what must come out and were believed before (`seal_documents.check`); the packed index only
says where chunks lie in the packs and is held against the sealed one: the same content root. Ordered steps:
  0. an old signature, then all other old `vgpu-*` files are removed     -> a crash leaves an unsigned directory
  1. the mark `.vgpu-partial-unpack` is written                          -> every reader refuses the directory
  2. files get their size and their zeros, chunks and small files come, in any order and from any thread
  3. everything is synchronised; vgpu-index.bin, vgpu-record.json, vgpu-manifest.json
  4. the mark is removed                                                 -> unsigned, though nothing is missing
  5. vgpu-signature.json: the commit point                               -> sealed
A second run on the same directory goes on where the first was cut off (`find_present`). Refuses to finish before every
chunk is there. Memory is bounded: two chunks per thread. The transport verbs call it.
"""

from __future__ import annotations

import bisect
import itertools
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Self

import zstandard
from blake3 import blake3

from image_format import chunk_index
from image_format.archives.small_files import unpack_small_files
from image_format.file_names import (
    INDEX_NAME,
    MANIFEST_NAME,
    PARTIAL_PREFIX,
    RECORD_NAME,
    SIGNATURE_NAME,
    is_ours,
    is_pack,
)
from image_format.hashing import thread_count
from image_format.index_model import Codec
from image_format.packs.pack_model import PlannedChunk
from image_format.packs.pack_streams import SourceFiles
from image_format.packs.target_files import TargetFiles, aligned_buffer
from image_format.packs.unpack_targets import (
    Entry,
    Range,
    check_pair,
    entries_of,
    gaps,
    local_chunks,
    sizes_of,
    without,
)
from image_format.verifying import Directory, check_sizes
from image_format.whole_files import WholeFiles, explained_removal, open_directory
from vgpu_errors import ContentMismatch, ImageError, Truncated, VgpuError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from image_format.archives.tar_reader import Readable
    from image_format.index_model import Index
    from image_format.packs.pack_model import Source

__all__ = ["MARK_NAME", "Range", "Unpacker", "unpack"]

MARK_NAME = f"{PARTIAL_PREFIX}unpack"
_SKIP_BYTES = 1 << 16


def unpack(
    documents: Mapping[str, bytes],
    packed: Index,
    directory: Path | str,
    *,
    open_pack: Callable[[int, int], Readable],
    small_files: Readable,
    threads: int | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> None:
    """All of it: `open_pack(number, start)` gives each pack's bytes from there on."""
    sealed = chunk_index.from_bytes(documents[INDEX_NAME], where=INDEX_NAME)
    with Unpacker(sealed, packed, directory, on_bytes=on_bytes) as unpacker:
        unpacker.write_small_files(small_files)

        def bring(number: int) -> None:
            for stretch in unpacker.missing(number):
                unpacker.write(number, open_pack(number, stretch.start), stretch)

        with ThreadPoolExecutor(thread_count(threads), "vgpu-unpack") as pool:
            try:
                list(pool.map(bring, range(unpacker.pack_count)))
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        unpacker.finish(documents)


class Unpacker:
    """A directory that is being filled. `write` may be called from several threads, for different stretches.

    Files that are `ready` are there, whole and compared, maybe under other names besides: they are not opened.
    """

    def __init__(
        self,
        sealed: Index,
        packed: Index,
        directory: Path | str,
        *,
        on_bytes: Callable[[int], None] | None = None,
        ready: Collection[str] = (),
    ) -> None:
        check_pair(sealed, packed)
        self._sealed = sealed
        self._path = Path(directory)
        self._on_bytes = on_bytes
        self._ready = frozenset(ready)
        self._entries = [[without(entry, self._ready) for entry in entries] for entries in entries_of(sealed, packed)]
        self._done = [bytearray(not entry.targets for entry in entries) for entries in self._entries]
        self._sizes = {name: size for name, size in sizes_of(sealed).items() if name not in self._ready}
        self._has_small_files = False
        self._local = threading.local()
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._directory_fd = stack.enter_context(open_directory(self._path))
            self._files = stack.enter_context(TargetFiles(self._directory_fd, self._path))
            self._documents = WholeFiles(self._directory_fd, self._path)
            self._remove_old()
            self._make_files()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    @property
    def pack_count(self) -> int:
        """How many packs there are."""
        return len(self._entries)

    def missing(self, number: int) -> list[Range]:
        """What of a pack is still needed, as few stretches as there are."""
        found: list[Range] = []
        for entry, is_done in zip(self._entries[number], self._done[number], strict=True):
            if is_done:
                continue
            if found and found[-1].end == entry.offset:
                found[-1] = found[-1]._replace(end=entry.end)
            else:
                found.append(Range(entry.offset, entry.end))
        return found

    def write(self, number: int, source: Readable, stretch: Range | None = None) -> None:
        """Take the bytes of a pack from the stretch's start on, and put every chunk in it in place as it comes."""
        position = stretch.start if stretch else 0
        entries = self._entries[number]
        first = bisect.bisect_left(entries, position, key=attrgetter("offset"))
        for place, entry in enumerate(itertools.islice(entries, first, None), first):
            if stretch and entry.offset >= stretch.end:
                break
            self._skip(source, entry.offset - position)
            view = self._stored[: entry.stored_length]
            _read(source, view, f"pack {number}")
            self._put(entry, self._decoded(entry, view, number), f"pack {number}")
            self._done[number][place] = 1
            position = entry.offset + entry.stored_length

    def write_small_files(self, source: Readable) -> None:
        """Take the blob of small files."""
        unpack_small_files(source, self._sealed, self._directory_fd, self._path)
        self._has_small_files = True

    def find_present(self, *, threads: int | None = None) -> int:
        """Look at what an earlier run left, chunk by chunk; how many bytes need not come again."""

        def look(number: int) -> int:
            found = 0
            for place, entry in enumerate(self._entries[number]):
                if not self._done[number][place] and self._is_present(entry):
                    self._done[number][place] = 1
                    found += entry.length
            return found

        with ThreadPoolExecutor(thread_count(threads), "vgpu-look") as pool:
            return sum(pool.map(look, range(self.pack_count)))

    def fill_from(self, directory: Path | str, index: Index) -> int:
        """Take chunks that another sealed directory on this node has; how many bytes. What is damaged there is left."""
        local = local_chunks(index)
        taken = 0
        with SourceFiles(directory) as files:
            for number, entries in enumerate(self._entries):
                for place, entry in enumerate(entries):
                    if not self._done[number][place] and self._take_local(entry, local.get(entry.id), files):
                        self._done[number][place] = 1
                        taken += entry.length
        return taken

    def finish(self, documents: Mapping[str, bytes]) -> None:
        """Seal the directory with these documents, if nothing is missing."""
        self._expect_all()
        sizes = {name: status.st_size for name, status in Directory.listed(self._directory_fd).items()}
        sizes.pop(MARK_NAME, None)
        check_sizes(sizes, self._sealed, where=str(self._path))
        self._files.sync()
        for name in (INDEX_NAME, RECORD_NAME, MANIFEST_NAME):
            self._documents.write(name, documents[name])
        self._documents.remove(MARK_NAME)
        self._documents.sync()
        self._documents.write(SIGNATURE_NAME, documents[SIGNATURE_NAME])

    def _expect_all(self) -> None:
        for number in range(self.pack_count):
            ranges = self.missing(number)
            if ranges:
                raise ImageError(where=self._path, what=f"lacks what is at {ranges[0].start} of pack {number}")
        if not self._has_small_files:
            raise ImageError(where=self._path, what="lacks the small files")

    # ---- making the files ------------------------------------------------------------------------

    def _remove_old(self) -> None:
        """Signature first; packs and bulk files that are wanted stay, for `find_present`."""
        with explained_removal(self._path):
            self._documents.remove(SIGNATURE_NAME)
            self._documents.sync()
            flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            os.close(os.open(MARK_NAME, flags, 0o600, dir_fd=self._directory_fd))
            self._documents.sync()
            kept = self._ready | set(self._sizes)
            for name in Directory.listed(self._directory_fd):
                if is_ours(name) and name != MARK_NAME and not (is_pack(name) and name in kept):
                    os.unlink(name, dir_fd=self._directory_fd)

    def _make_files(self) -> None:
        covered: dict[str, list[Range]] = {name: [] for name in self._sizes}
        for entry in (entry for entries in self._entries for entry in entries):
            for name, offset in entry.targets:
                covered[name].append(Range(offset, offset + entry.length))
        for name, size in self._sizes.items():
            self._files.create(name, size)
            for gap in gaps(sorted(covered[name]), size):
                self._files.fill(name, gap.start, gap.end)

    # ---- chunks ----------------------------------------------------------------------------------

    def _decoded(self, entry: Entry, view: memoryview, number: int) -> memoryview:
        if entry.codec == Codec.RAW:
            return view
        where = f"pack {number} at {entry.offset}"
        try:
            # Before anything is allocated for what a frame claims to hold.
            if zstandard.frame_content_size(view) != entry.length:
                raise ContentMismatch(where=where, what=f"its frame does not hold {entry.length} bytes")
            data = self._zstd.decompress(view, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise ImageError(where=where, what=f"damaged zstd frame: {error}") from error
        plain = self._plain[: len(data)]
        plain[:] = data
        return plain

    def _put(self, entry: Entry, view: memoryview, where: str) -> None:
        if len(view) != entry.length or blake3(view).digest() != entry.id:
            raise ContentMismatch(where=f"{where} at {entry.offset}", what=f"{entry.length} bytes")
        for name, offset in entry.targets:
            self._files.write(name, offset, view)
        if self._on_bytes is not None:
            self._on_bytes(entry.length)

    def _is_present(self, entry: Entry) -> bool:
        view = self._plain[: entry.length]
        for name, offset in entry.targets:
            self._files.read(name, offset, view)
            if blake3(view).digest() != entry.id:
                return False
        return True

    def _take_local(self, entry: Entry, source: Source | None, files: SourceFiles) -> bool:
        if source is None:
            return False
        view = self._plain[: entry.length]
        try:
            files.read(PlannedChunk(entry.id, entry.length, source), view)
        except VgpuError:
            return False
        if blake3(view).digest() != entry.id:
            return False
        self._put(entry, view, str(self._path))
        return True

    def _skip(self, source: Readable, count: int) -> None:
        while count:
            view = self._stored[: min(count, _SKIP_BYTES)]
            _read(source, view, "pack")
            count -= len(view)

    @property
    def _stored(self) -> memoryview:
        return self._buffer("stored")

    @property
    def _plain(self) -> memoryview:
        return self._buffer("plain")

    @property
    def _zstd(self) -> zstandard.ZstdDecompressor:
        if not hasattr(self._local, "zstd"):
            self._local.zstd = zstandard.ZstdDecompressor()
        zstd: zstandard.ZstdDecompressor = self._local.zstd
        return zstd

    def _buffer(self, name: str) -> memoryview:
        if not hasattr(self._local, name):
            setattr(self._local, name, aligned_buffer(self._sealed.chunk_size))
        view: memoryview = getattr(self._local, name)
        return view


def _read(source: Readable, view: memoryview, where: str) -> None:
    done = 0
    while done < len(view):
        count = source.readinto(view[done:])
        if not count:
            raise Truncated(where=where, found=done, needed=len(view))
        done += count
