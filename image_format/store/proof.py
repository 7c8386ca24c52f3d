"""Whether the checkpoints of a store are whole: signature, names, sizes and every chunk (spec/store.md, section 7).

A file that several checkpoints share is read once. Changes nothing. Called by `Store.verify`, and by `incoming` for content that
another checkpoint is about to share.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from blake3 import blake3

from image_format import seal_documents
from image_format.hashing import read_exactly, thread_count
from image_format.store.identity import content_id, extents
from image_format.store.placing import open_sized
from image_format.verifying import Directory, check_sizes
from vgpu_errors import ContentMismatch, Unsigned, VgpuError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from image_format.chunk_index import Index
    from image_format.store.checkpoints import StoredCheckpoint
    from image_format.store.identity import Extent
    from image_format.trust.policy import Policy


@dataclass(frozen=True)
class Proof:
    """One checkpoint: what is wrong with it, or nothing, and how many bytes were read for it."""

    checkpoint: StoredCheckpoint
    problem: VgpuError | None
    read_bytes: int
    shared_bytes: int


class Prover:
    """Proves checkpoints one after the other and remembers the files it has read."""

    def __init__(
        self, policy: Policy, *, threads: int | None = None, on_bytes: Callable[[int], None] | None = None
    ) -> None:
        self._policy = policy
        self._hasher = _Hasher(threads, on_bytes)
        self._proven: set[tuple[int, str]] = set()

    def prove(self, checkpoint: StoredCheckpoint) -> Proof:
        """Look at all of one checkpoint."""
        counts = [0, 0]
        try:
            self._check(checkpoint, counts)
        except VgpuError as problem:
            return Proof(checkpoint, problem, *counts)
        return Proof(checkpoint, None, *counts)

    def _check(self, checkpoint: StoredCheckpoint, counts: list[int]) -> None:
        where = str(checkpoint.path)
        with Directory(checkpoint.path) as directory:
            claims = seal_documents.check(directory.documents(), self._policy, where=where)
            if claims is None:
                raise Unsigned(where=where)
            if claims.manifest_digest != checkpoint.manifest_digest:
                raise ContentMismatch(where=where, what=f"its manifest is {claims.manifest_digest}")
            entries = directory.entries()
            check_sizes({name: status.st_size for name, status in entries.items()}, claims.index, where=where)
            self._check_files(checkpoint.path, entries, claims.index, counts)

    def _check_files(self, folder: Path, entries: dict[str, os.stat_result], index: Index, counts: list[int]) -> None:
        covered = extents(index)
        for pack in index.packs:
            key = (entries[pack.name].st_ino, content_id(pack.size, covered[pack.name]))
            is_known = key in self._proven
            counts[is_known] += pack.size
            if not is_known:
                self._hasher.check(folder / pack.name, pack.size, covered[pack.name])
                self._proven.add(key)


def holds(path: Path, size: int, covered: Sequence[Extent]) -> bool:
    """The file has this content, read now from its first extent to its last."""
    try:
        _Hasher(None, None).check(path, size, covered)
    except VgpuError:
        return False
    return True


class _Hasher:
    """Compares the extents of files with their ids, in threads with a buffer each."""

    def __init__(self, threads: int | None, on_bytes: Callable[[int], None] | None) -> None:
        self._threads = thread_count(threads)
        self._on_bytes = on_bytes
        self._local = threading.local()

    def check(self, path: Path, size: int, covered: Sequence[Extent]) -> None:
        """Raise the first fault in the order of the file."""
        descriptor = open_sized(path, size)
        try:
            with ThreadPoolExecutor(self._threads, "vgpu-proof") as pool:
                # All of them, also after a fault: nobody may read through a descriptor that is closed.
                found = list(pool.map(lambda extent: self._fault(descriptor, extent, str(path)), covered))
        finally:
            os.close(descriptor)
        for fault in found:
            if fault is not None:
                raise fault

    def _fault(self, descriptor: int, extent: Extent, where: str) -> VgpuError | None:
        view = self._buffer(extent.length)
        try:
            read_exactly(descriptor, view, extent.offset, where=where)
        except VgpuError as problem:
            return problem
        if self._on_bytes is not None:
            self._on_bytes(extent.length)
        if blake3(view).digest() == extent.id:
            return None
        return ContentMismatch(where=where, what=f"bytes {extent.offset} to {extent.offset + extent.length}")

    def _buffer(self, length: int) -> memoryview:
        if len(getattr(self._local, "view", b"")) < length:
            self._local.view = memoryview(bytearray(length))
        view: memoryview = self._local.view
        return view[:length]
