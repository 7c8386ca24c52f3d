"""Seals an archive of the kubelet's that vgpu-runtime did not seal: a container without a GPU, or of another handler.

The record says what the archive and the node say: container, configuration, CPU, kernel, CRIU, low-level runtime; no
GPU processes. A sealed archive restores through vgpu-runtime alone with its checks; others ignore the added files.
The new archive is written beside the old one and takes its place by one rename; until then the old one stands.
Refuses links, sub-folders and unsafe names below checkpoint/. Called by `kubelet_watch`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tarfile
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from containerd_integration.work_folder import locked
from gpu_state.node_facts import gather
from image_format import canonical_json, security_config
from image_format.archives.archive import PREFIX, SPEC_NAME
from image_format.file_names import check_name, is_ours
from image_format.record import LowLevelRuntime
from image_format.sealing import seal
from image_format.trust.keys import NODE_KEY, load_signing_key
from oci_hook.settings import read_settings
from runtime_shim.low_level import choose
from runtime_shim.record_building import build_record
from vgpu_errors import ImageError, LimitExceeded, UnexpectedEntry

if TYPE_CHECKING:
    from image_format.record import Record

CONFIG_NAME = "config.dump"
MAX_DOCUMENT_BYTES = 16 << 20
MAX_FILES = 100_000


def seal_archive(path: Path, *, etc: Path) -> None:
    """Add record, index, manifest and signature to the archive."""
    key = load_signing_key(etc / NODE_KEY)
    before = path.stat()
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as name, locked(Path(name)):
        folder = Path(name)
        documents = _take_apart(path, folder)
        seal(folder, _record(documents, path), key)
        partial = folder / ".new-archive"
        _write(path, folder, partial)
        partial.chmod(before.st_mode & 0o777)
        now = path.stat()
        if (now.st_ino, now.st_mtime_ns, now.st_size) != (before.st_ino, before.st_mtime_ns, before.st_size):
            raise ImageError(where=path, what="it was changed while it was being sealed", remedy="It is tried again.")
        partial.replace(path)


def remove_half_sealed(parent: Path) -> None:
    """What a killed service left beside the archives: a copy of a whole checkpoint. One that is at work holds its lock."""
    for folder in parent.glob(".checkpoint-*.tar.*"):
        with contextlib.suppress(OSError), locked(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _take_apart(path: Path, folder: Path) -> dict[str, bytes]:
    documents: dict[str, bytes] = {}
    with _opened(path) as tar:
        for number, entry in enumerate(tar):
            if number >= MAX_FILES:
                raise LimitExceeded(where=path, what="the number of members", found=number, limit=MAX_FILES)
            if entry.name in (SPEC_NAME, CONFIG_NAME) and entry.isreg() and entry.size <= MAX_DOCUMENT_BYTES:
                documents[entry.name] = _content(tar, entry).read()
            elif entry.name.startswith(PREFIX) and not (entry.isdir() and entry.name == PREFIX.rstrip("/")):
                _extract(tar, entry, folder, path)
    return documents


def _extract(tar: tarfile.TarFile, entry: tarfile.TarInfo, folder: Path, path: Path) -> None:
    name = check_name(entry.name.removeprefix(PREFIX), where=str(path))
    if not entry.isreg() or is_ours(name):
        raise UnexpectedEntry(where=path, entry=entry.name, what="is no file of an unsealed checkpoint")
    with (folder / name).open("xb") as file:
        shutil.copyfileobj(_content(tar, entry), file, 1 << 20)


def _record(documents: dict[str, bytes], path: Path) -> Record:
    if set(documents) != {SPEC_NAME, CONFIG_NAME}:
        raise ImageError(where=path, what=f"it has no {SPEC_NAME} or no {CONFIG_NAME}")
    try:
        config: dict[str, Any] = security_config.load(documents[SPEC_NAME])
    except ValueError as problem:
        raise ImageError(where=f"{path}: {SPEC_NAME}", what=str(problem)) from problem
    dump = canonical_json.read_object(documents[CONFIG_NAME], where=f"{path}: {CONFIG_NAME}")
    low_level = choose(read_settings())
    return build_record(
        container_id=str(dump.get("id") or ""),
        bundle="",
        config=config,
        state={"engine": "containerd"},
        facts=gather(driver_release=None, cuda_version=None, devices=(), runtime_path=low_level.path),
        processes=(),
        runtime=LowLevelRuntime(low_level.name, low_level.version(), low_level.path),
        phases=(),
    )


def _write(path: Path, folder: Path, partial: Path) -> None:
    """The old members in their order, and the seal with the checkpoint's files."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(partial, flags, 0o600), "wb") as file:
        with _opened(path) as old, tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as new:
            for entry in old:
                new.addfile(entry, old.extractfile(entry) if entry.isreg() else None)
            for seal_file in sorted(entry for entry in folder.iterdir() if is_ours(entry.name)):
                new.add(seal_file, f"{PREFIX}{seal_file.name}", filter=_plain)
        file.flush()
        os.fsync(file.fileno())


def _plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mode = 0o600
    return entry


def _opened(path: Path) -> tarfile.TarFile:
    try:
        return tarfile.open(path, mode="r:")
    except tarfile.TarError as problem:
        raise ImageError(where=path, what=f"is no tar: {problem}") from problem


def _content(tar: tarfile.TarFile, entry: tarfile.TarInfo) -> Any:
    return tar.extractfile(entry)
