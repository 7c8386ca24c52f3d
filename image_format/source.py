"""Says what a SOURCE on the command line is, and verifies or reads it accordingly.

A directory, an engine's archive, an OCI layout or oci-archive; else a checkpoint of the node's store, by digest,
container or `container:generation`; else an image in podman's storage. In this order, so that a path always wins over
a name. A reference is verified together with its content where the store has that. An image in a registry is read through a client that the caller opens, because only he knows how to reach it.
`vgpu inspect`, `vgpu diff` and `vgpu verify` call it.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from image_format.archives import archive, containerd_archive, ocistore
from image_format.archives.archive import ArchiveClaims, Outside, VerifiedArchive
from image_format.file_names import ALLOWED_UNSIGNED, SEAL_NAMES
from image_format.hashing import open_plain
from image_format.references import reference, reference_checking
from image_format.store import Store
from image_format.trust import remote_documents
from image_format.verifying import Directory, verify_directory
from vgpu_errors import ContentElsewhere, NoSuchCheckpoint, NoSuchImage, NotARecipient, UnexpectedEntry, Unsigned

if TYPE_CHECKING:
    from collections.abc import Callable

    from image_format.registry import Registry
    from image_format.trust.policy import Policy

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
    source: str,
    policy: Policy,
    *,
    threads: int | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    store_root: Path | str | None = None,
) -> VerifiedSource:
    """Verify a checkpoint wherever it lies; names are looked up in the store where its folder is given."""
    path = Path(source)
    if path.is_dir() and not ocistore.is_oci_layout(path):
        folder = _checkpoint_folder(path)
        return VerifiedSource("directory", _verify_folder(folder, policy, threads, on_progress, store_root))
    if containerd_archive.find_index(path) is not None:
        result = containerd_archive.verify_file(path, policy, threads=threads, on_progress=on_progress)
        return VerifiedSource("containerd archive", result)
    layout = _layout(path)
    if layout is not None:
        with ocistore.open_layer(layout) as layer:
            result = archive.verify_stream(layer, policy, where=source, threads=threads)
            layer.expect_whole()
        return VerifiedSource("OCI image", result)
    if path.exists():
        return VerifiedSource("archive", _verify_archive(path, policy, threads, on_progress, store_root))
    digest = _find_stored(source, store_root)
    if digest is not None and store_root is not None:
        with _open_store(store_root).lease(digest, "verify") as folder:
            return VerifiedSource("store", _verify_folder(folder, policy, threads, on_progress))
    with ocistore.mounted_image(source) as root:
        result = _verify_folder(root / INNER_FOLDER, policy, threads, on_progress, store_root)
        record = result.verified.record
        differences = archive.config_differences(record, _read_spec(root)) if record else None
        outside = result.outside + _beside(root)
        return VerifiedSource("podman image", replace(result, outside=outside, config_differences=differences))


def read_claims(source: str, *, store_root: Path | str | None = None) -> ClaimedSource:
    """Read what a checkpoint says of itself, to be shown and not to be used."""
    path = Path(source)
    if path.is_dir() and not ocistore.is_oci_layout(path):
        return ClaimedSource("directory", _read_folder(_checkpoint_folder(path)))
    if containerd_archive.find_index(path) is not None:
        return ClaimedSource("containerd archive", containerd_archive.read_file_claims(path))
    layout = _layout(path)
    if layout is not None:
        with ocistore.open_layer(layout) as layer:
            return ClaimedSource("OCI image", archive.read_stream_claims(layer, where=source))
    if path.exists():
        return ClaimedSource("archive", archive.read_archive_claims(path))
    digest = _find_stored(source, store_root)
    if digest is not None and store_root is not None:
        return ClaimedSource("store", _read_folder(_open_store(store_root).directory_of(digest)))
    with ocistore.mounted_image(source) as root:
        claims = _read_folder(root / INNER_FOLDER)
        return ClaimedSource("podman image", replace(claims, outside=claims.outside + _beside(root)))


def read_remote_claims(registry: Registry) -> ClaimedSource:
    """The same for an image in a registry; fetches the sealed documents and no pack."""
    where = str(registry.reference)
    manifest = remote_documents.find(registry, registry.get_manifest()[0], where=where)
    remote = remote_documents.read(registry, manifest, where=where) if manifest is not None else None
    if remote is None:
        raise NoSuchImage(path=where, what="it is no checkpoint artifact, nor an index that names one")
    if remote.encrypted is not None:
        recipients = ", ".join(entry.key_id for entry in remote.encrypted.recipients)
        raise NotARecipient(where=where, recipients=recipients, remedy="'vgpu pull --identity KEY' decrypts it.")
    return ClaimedSource("registry image", ArchiveClaims(remote.documents, (), "none", where))


def _open_store(root: Path | str) -> Store:
    return Store.open(root, create=False)


def _find_stored(word: str, root: Path | str | None) -> str | None:
    """The digest of the checkpoint that the store knows by this word; None where there is no store, or no such one."""
    if root is None:
        return None
    with contextlib.suppress(NoSuchImage, NoSuchCheckpoint, PermissionError):
        return _open_store(root).find(word).manifest_digest
    return None


def _layout(path: Path) -> ocistore.Layout | None:
    if path.is_dir():
        return ocistore.LayoutDirectory(path)
    return ocistore.open_oci_archive(path) if path.is_file() else None


def _checkpoint_folder(path: Path) -> Path:
    """A bundle or an unpacked archive holds the checkpoint one level down."""
    has_seal = any((path / name).exists() for name in SEAL_NAMES)
    inner = path / INNER_FOLDER
    return inner if not has_seal and inner.is_dir() else path


def _verify_archive(
    path: Path,
    policy: Policy,
    threads: int | None,
    on_progress: Callable[[int, int], None] | None,
    store_root: Path | str | None,
) -> VerifiedArchive:
    try:
        return archive.verify_archive(path, policy, threads=threads, on_progress=on_progress)
    except ContentElsewhere:
        if store_root is None:
            raise
    return reference_checking.verify_archive(path, policy, store_root, threads=threads, on_progress=on_progress)


def _verify_folder(
    folder: Path,
    policy: Policy,
    threads: int | None,
    on_progress: Callable[[int, int], None] | None,
    store_root: Path | str | None = None,
) -> VerifiedArchive:
    check = verify_directory
    if store_root is not None and reference.is_reference(folder):
        check = partial(reference_checking.verify_directory, store_root=store_root)
    verified = check(folder, policy, threads=threads, on_progress=on_progress)
    return VerifiedArchive(verified, _unsigned_files(folder), "none", None)


def _read_folder(folder: Path) -> ArchiveClaims:
    with Directory(folder) as directory:
        documents = directory.documents()
    if not documents:
        raise Unsigned(where=folder)
    return ArchiveClaims(documents, _unsigned_files(folder), "none", str(folder))


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
