"""Verifies a reference together with what the node's store has of it (spec/archive-layout.md, section 7).

Puts the small files of the reference beside the store's bulk, in a folder of the store that goes away again, and verifies
that as any directory. Nothing is unpacked before the signature holds; the reference and the store stay as they are.
Refuses, as `ContentElsewhere`, where the store has not got all of it. `image_format.source` calls it for `vgpu verify`.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from image_format import seal_documents
from image_format.archives.archive import VerifiedArchive, config_differences, read_archive_claims
from image_format.archives.archive_scan import MAX_SPEC_BYTES, SPEC_NAME
from image_format.archives.tar_reader import Kind
from image_format.file_names import ALLOWED_UNSIGNED, REFERENCE_NAME
from image_format.references import reference
from image_format.references.reference_archive import Look, members_of
from image_format.store.placing import explained, place
from image_format.verifying import Directory, check_sizes
from image_format.verifying import verify_directory as verify_whole
from vgpu_errors import ContentMismatch, VgpuError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from image_format.references.reference import ReferenceNote
    from image_format.seal_documents import Claims
    from image_format.trust.policy import Policy
    from image_format.verifying import Verified

    Progress = Callable[[int, int], None] | None

_NO_PART = ALLOWED_UNSIGNED | {REFERENCE_NAME}


def verify_directory(
    directory: Path,
    policy: Policy,
    store_root: Path | str,
    *,
    threads: int | None = None,
    on_progress: Progress = None,
) -> Verified:
    """A directory that is a reference, with its content in the store."""
    note, where = reference.read_note(directory), str(directory)
    with Directory(directory) as opened:
        claims = seal_documents.check(opened.documents(), policy, where=where)
        sizes = {name: status.st_size for name, status in opened.entries().items()}
    with _beside_the_bulk(note, claims, sizes, store_root, where) as folder:
        for name in sorted(set(sizes) - _NO_PART):
            place(directory / name, folder / name, sizes[name], links=False, lasting=False)
        return verify_whole(folder, policy, threads=threads, on_progress=on_progress)


def verify_archive(
    source: Path,
    policy: Policy,
    store_root: Path | str,
    *,
    threads: int | None = None,
    on_progress: Progress = None,
) -> VerifiedArchive:
    """The same for an archive, with what lies outside of the signature."""
    look = Look.at(source)
    claims = look.believed(policy)
    note = look.note
    if note is None:
        raise ContentMismatch(where=source, what="it was replaced while it was read")
    with _beside_the_bulk(note, claims, look.sizes, store_root, str(source)) as folder:
        spec = _extract(source, folder, look.sizes)
        verified = verify_whole(folder, policy, threads=threads, on_progress=on_progress)
    outside = read_archive_claims(source).outside
    return VerifiedArchive(verified, outside, look.compression, config_differences(claims.record, spec))


@contextlib.contextmanager
def _beside_the_bulk(
    note: ReferenceNote, claims: Claims | None, sizes: Mapping[str, int], store_root: Path | str, where: str
) -> Iterator[Path]:
    """A folder with the files that the reference lacks; errors speak of the reference."""
    wanted = reference.lacking(note, claims, sizes, where=where)
    assert claims is not None  # `lacking` refuses that
    check_sizes({**sizes, **{file.name: file.size for file in wanted}}, claims.index, where=where)
    store = reference.open_store(store_root, note, wanted, where=where)
    names = [file.name for file in wanted]
    with reference.told(note), store.borrow(claims.manifest_digest, names, index=claims.index) as folder:
        try:
            yield folder
        except VgpuError as problem:
            fields = {key: str(value).replace(str(folder), where) for key, value in problem.fields.items()}
            raise type(problem)(**fields) from problem


def _extract(source: Path, folder: Path, sizes: Mapping[str, int]) -> bytes | None:
    """The sealed files into the folder; spec.dump, if there is one."""
    spec = None
    for raw, name, editor in members_of(source):
        if raw.member.name == SPEC_NAME and raw.member.kind is Kind.FILE and raw.member.size <= MAX_SPEC_BYTES:
            spec = b"".join(map(bytes, editor.data()))
        elif name is not None and name not in _NO_PART and raw.member.size == sizes[name]:
            with explained(folder / name, sizes[name]), (folder / name).open("xb") as file:
                for piece in editor.data():
                    file.write(piece)
    return spec
