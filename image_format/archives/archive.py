"""Verifies a checkpoint inside an engine's archive, in one pass and without unpacking it (spec/archive-layout.md, 4).

Takes tar, tar+gzip and tar+zstd as podman, CRI-O and containerd's CRI plugin write them: the sealed files lie under
`checkpoint/`. Where the chunks end in packs and in files of pages is said by what comes before them (`stream_cuts`);
where that was not what the index says, a second pass is needed. What lies beside `checkpoint/` is not signed; it is
listed, and spec.dump is compared with the signed security settings.
`vgpu verify`, `vgpu inspect` and `ocistore` call it.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from image_format import seal_documents, security_config
from image_format.archives.archive_scan import MAX_SPEC_BYTES, PREFIX, SPEC_NAME, Outside, Scan
from image_format.archives.archive_sources import FileSource, RewindableSource
from image_format.index_model import CHUNK_SIZE
from image_format.verifying import Verified, check_files, check_sizes, check_vram
from vgpu_errors import Unsigned

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from image_format.record import Record
    from image_format.seal_documents import Claimed
    from image_format.trust.policy import Policy

__all__ = [
    "MAX_SPEC_BYTES",
    "PREFIX",
    "SPEC_NAME",
    "ArchiveClaims",
    "FileSource",
    "Outside",
    "RewindableSource",
    "VerifiedArchive",
    "config_differences",
    "read_archive_claims",
    "read_stream_claims",
    "verify_archive",
    "verify_stream",
]


@dataclass(frozen=True)
class VerifiedArchive:
    """What was verified, what was not, and how the unsigned spec.dump differs (None: there is none)."""

    verified: Verified
    outside: tuple[Outside, ...]
    compression: str
    config_differences: tuple[str, ...] | None


@dataclass(frozen=True)
class ArchiveClaims:
    """The sealed documents without trust; parsed when they are asked for."""

    documents: dict[str, bytes]
    outside: tuple[Outside, ...]
    compression: str
    where: str

    @cached_property
    def claimed(self) -> Claimed:
        """Record and index."""
        return seal_documents.read_claimed(self.documents, where=self.where)


def verify_archive(
    path: Path | str,
    policy: Policy,
    *,
    threads: int | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> VerifiedArchive:
    """Verify a checkpoint archive on disk; progress counts bytes of the file."""
    with FileSource(path, on_progress) as source:
        return verify_stream(source, policy, where=str(path), threads=threads)


def read_archive_claims(path: Path | str) -> ArchiveClaims:
    """Record and index of an archive without trust, to be shown and not to be used."""
    with FileSource(path) as source:
        return read_stream_claims(source, where=str(path))


def verify_stream(
    source: RewindableSource, policy: Policy, *, where: str, threads: int | None = None, prefix: str = PREFIX
) -> VerifiedArchive:
    """Verify what a source holds.

    A second pass is needed only for an index with another chunk size than ours, or one that comes after packs whose
    slots hold shorter chunks. `prefix` is "" for a tar of the checkpoint directory alone, as containerd keeps it.
    """
    started = time.monotonic()
    scan = Scan.of(source, where, chunk_size=CHUNK_SIZE, threads=threads, prefix=prefix)
    claims = seal_documents.check(scan.documents, policy, where=where)
    differences = None
    if claims is not None:
        check_sizes(scan.sizes, claims.index, where=where)
        if not scan.is_cut_as(claims.index):
            source.rewind()
            scan = Scan.of(
                source, where, chunk_size=claims.index.chunk_size, threads=threads, index=claims.index, prefix=prefix
            )
            check_sizes(scan.sizes, claims.index, where=where)
        check_files(scan.hashed, claims.index, where=where)
        check_vram(scan.hashed, claims.index, where=where)
        differences = config_differences(claims.record, scan.spec)
    verified = Verified.of(claims, started=started)
    return VerifiedArchive(verified, tuple(scan.outside), scan.compression, differences)


def read_stream_claims(source: RewindableSource, *, where: str, prefix: str = PREFIX) -> ArchiveClaims:
    """The same without trust and without hashing."""
    scan = Scan.of(source, where, chunk_size=CHUNK_SIZE, threads=None, is_hashing=False, prefix=prefix)
    if not scan.documents:
        raise Unsigned(where=where)
    return ArchiveClaims(scan.documents, tuple(scan.outside), scan.compression, where)


def config_differences(record: Record, spec: bytes | None) -> tuple[str, ...] | None:
    """How an unsigned spec.dump differs from the signed security settings; None where one of them is absent."""
    if spec is None or not record.security:
        return None
    try:
        config = security_config.load(spec)
    except (ValueError, RecursionError) as error:
        return (f"{SPEC_NAME} is not acceptable JSON: {error}",)
    # The engine's bundle is not known here; the paths it makes carry the container's id.
    now = security_config.project(config, bundle="", container_id=record.container.id)
    return tuple(security_config.differences(json.loads(json.dumps(record.security, default=dict)), now))
