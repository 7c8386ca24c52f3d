"""Says what a SOURCE on the command line is, and verifies or reads it accordingly.

A directory, an engine's archive, an OCI layout or oci-archive, or an image in podman's storage; in this order, so that
a path always wins over an image of the same name. `vgpu inspect` and `vgpu verify` call it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from image_format import archive, ocistore, seal_documents
from image_format.archive import ArchiveClaims, Outside, VerifiedArchive
from image_format.file_names import ALLOWED_UNSIGNED, SEAL_NAMES
from image_format.hashing import open_plain
from image_format.verifying import Directory, verify_directory
from vgpu_errors import UnexpectedEntry, Unsigned

if TYPE_CHECKING:
    from collections.abc import Callable

    from image_format.policy import Policy

INNER_FOLDER = "checkpoint"


@dataclass(frozen=True)
class VerifiedSource:
    """What was verified, and what kind of thing it was in."""

    kind: str
    result: VerifiedArchive


@dataclass(frozen=True)
class ClaimedSource:
    """What a source says of itself, without trust."""

    kind: str
    claims: ArchiveClaims


def verify(
    source: str, policy: Policy, *, threads: int | None = None, on_progress: Callable[[int, int], None] | None = None
) -> VerifiedSource:
    """Verify a checkpoint wherever it lies."""
    path = Path(source)
    if path.is_dir() and not ocistore.is_oci_layout(path):
        folder = _checkpoint_folder(path)
        return VerifiedSource("directory", _verify_folder(folder, policy, threads, on_progress))
    layout = _layout(path)
    if layout is not None:
        with ocistore.open_layer(layout) as layer:
            result = archive.verify_stream(layer, policy, where=source, threads=threads)
            layer.expect_whole()
        return VerifiedSource("OCI image", result)
    if path.exists():
        return VerifiedSource("archive", archive.verify_archive(path, policy, threads=threads, on_progress=on_progress))
    with ocistore.mounted_image(source) as root:
        result = _verify_folder(root / INNER_FOLDER, policy, threads, on_progress)
        record = result.verified.record
        differences = archive.config_differences(record, _read_spec(root)) if record else None
        outside = result.outside + _beside(root)
        return VerifiedSource("podman image", replace(result, outside=outside, config_differences=differences))


def read_claims(source: str) -> ClaimedSource:
    """Read what a checkpoint says of itself, to be shown and not to be used."""
    path = Path(source)
    if path.is_dir() and not ocistore.is_oci_layout(path):
        return ClaimedSource("directory", _read_folder(_checkpoint_folder(path)))
    layout = _layout(path)
    if layout is not None:
        with ocistore.open_layer(layout) as layer:
            return ClaimedSource("OCI image", archive.read_stream_claims(layer, where=source))
    if path.exists():
        return ClaimedSource("archive", archive.read_archive_claims(path))
    with ocistore.mounted_image(source) as root:
        claims = _read_folder(root / INNER_FOLDER)
        return ClaimedSource("podman image", replace(claims, outside=claims.outside + _beside(root)))


def _layout(path: Path) -> ocistore.Layout | None:
    if path.is_dir():
        return ocistore.LayoutDirectory(path)
    return ocistore.open_oci_archive(path) if path.is_file() else None


def _checkpoint_folder(path: Path) -> Path:
    """A bundle or an unpacked archive holds the checkpoint one level down."""
    has_seal = any((path / name).exists() for name in SEAL_NAMES)
    inner = path / INNER_FOLDER
    return inner if not has_seal and inner.is_dir() else path


def _verify_folder(
    folder: Path, policy: Policy, threads: int | None, on_progress: Callable[[int, int], None] | None
) -> VerifiedArchive:
    verified = verify_directory(folder, policy, threads=threads, on_progress=on_progress)
    return VerifiedArchive(verified, _unsigned_files(folder), "none", None)


def _read_folder(folder: Path) -> ArchiveClaims:
    with Directory(folder) as directory:
        documents = directory.documents()
    if not documents:
        raise Unsigned(where=folder)
    claimed = seal_documents.read_claimed(documents, where=str(folder))
    return ArchiveClaims(claimed, documents, _unsigned_files(folder), "none")


def _read_spec(root: Path) -> bytes | None:
    with Directory(root) as directory:
        try:
            descriptor, size = open_plain(directory.fd, archive.SPEC_NAME, where=str(root))
        except UnexpectedEntry:
            return None
        with os.fdopen(descriptor, "rb") as file:
            return file.read() if size <= archive.MAX_SPEC_BYTES else None


def _unsigned_files(folder: Path) -> tuple[Outside, ...]:
    files = sorted(entry for entry in folder.iterdir() if entry.name in ALLOWED_UNSIGNED)
    return tuple(Outside(entry.name, entry.lstat().st_size) for entry in files)


def _beside(root: Path) -> tuple[Outside, ...]:
    entries = sorted(entry for entry in root.iterdir() if entry.name != INNER_FOLDER and not entry.is_dir())
    return tuple(Outside(entry.name, entry.lstat().st_size) for entry in entries)
