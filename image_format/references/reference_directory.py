"""The same for checkpoint directories: pack one into a reference, unpack a reference into a whole one.

The source stays as it is and shares no file with the store: who owns it may write to it. A directory is made beside its
target and gets its name when it is whole and verified. Called by `vgpu pack` and `vgpu unpack`.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
from typing import TYPE_CHECKING

from image_format import seal_documents
from image_format.archives.tar_editing import refuse_existing
from image_format.file_names import REFERENCE_NAME
from image_format.references import reference
from image_format.references.reference_archive import Repacked
from image_format.store.identity import bulk_files
from image_format.store.placing import explained, place, sync, write_whole
from image_format.verifying import Directory, read_claims, verify_directory
from vgpu_errors import UnsupportedRequest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from image_format.store.store import Store
    from image_format.trust.policy import Policy


def pack(
    source: Path,
    target: Path,
    policy: Policy,
    store: Store,
    *,
    locations: Sequence[str] = (),
    threads: int | None = None,
) -> Repacked:
    """A whole directory, verified, into the store, and a reference to that beside it."""
    if reference.is_reference(source):
        raise UnsupportedRequest(what=f"{source} is a reference already", remedy="There is nothing to do.")
    with contextlib.ExitStack() as undo:
        with _new_directory(target) as partial:
            digest = _keep(source, policy, store, threads)
            _, index = read_claims(source)
            bulk = bulk_files(index)
            names = tuple(file.name for file in bulk)
            _copy_all_but(source, partial, {*names})
            write_whole(partial / REFERENCE_NAME, reference.ReferenceNote(digest, names, tuple(locations)).to_bytes())
            pin = store.refer(digest, str(target.absolute()))
            undo.callback(pin.unlink, missing_ok=True)
        undo.pop_all()
    return Repacked(digest, names, sum(file.size for file in bulk))


def _keep(source: Path, policy: Policy, store: Store, threads: int | None) -> str:
    """The digest of the directory, whose whole content the store has."""
    verified = verify_directory(source, policy, threads=threads)
    was_there = verified.manifest_digest is not None and store.has(verified.manifest_digest)
    digest = store.add(source, links=False).manifest_digest
    if was_there:
        reference.expect_whole(store, digest, policy, threads=threads)
    return digest


def unpack(
    source: Path, target: Path, policy: Policy, store_root: Path | str, *, threads: int | None = None
) -> Repacked:
    """A reference, and a whole directory of its own beside it."""
    if not reference.is_reference(source):
        raise UnsupportedRequest(what=f"{source} is no reference: it is whole", remedy="There is nothing to do.")
    with Directory(source) as opened:
        seal_documents.check(opened.documents(), policy, where=str(source))
    with _new_directory(target) as partial:
        _copy_all_but(source, partial, set())
        names = reference.complete(partial, policy, store_root, links=False, lasting=True)
        verified = verify_directory(partial, policy, threads=threads)
        moved = sum((partial / name).stat().st_size for name in names)
    return Repacked(verified.manifest_digest or "", names, moved)


@contextlib.contextmanager
def _new_directory(target: Path) -> Iterator[Path]:
    refuse_existing(target)
    partial = target.with_name(f".{target.name}.{secrets.token_hex(8)}.partial")
    with explained(target, 0):
        try:
            partial.mkdir(mode=0o700)
            yield partial
            sync(partial)
            refuse_existing(target)
            partial.rename(target)
            sync(target.parent)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def _copy_all_but(source: Path, target: Path, left_out: set[str]) -> None:
    with Directory(source) as opened:
        sizes = {name: status.st_size for name, status in opened.entries().items()}
    for name in sorted(set(sizes) - left_out):
        place(source / name, target / name, sizes[name], links=False)
        (target / name).chmod(0o600)
