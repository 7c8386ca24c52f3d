"""Takes a sealed directory into the store, by hard links where that is possible (spec/store.md, section 3).

Believes the directory: the shim calls it right after its own seal, the commands after they have verified it.
The directory is left as it is; afterwards its bulk files and those in the store may be the same files.
Called by `Store.add`.
"""

from __future__ import annotations

import hashlib
import secrets
from typing import TYPE_CHECKING

from image_format.file_names import ALLOWED_UNSIGNED, MANIFEST_NAME, REFERENCE_NAME, SIGNATURE_NAME
from image_format.store.identity import bulk_files
from image_format.store.incoming import Incoming
from image_format.store.placing import place
from image_format.verifying import Directory, check_sizes, read_claims
from vgpu_errors import Unsigned

if TYPE_CHECKING:
    from pathlib import Path

    from image_format.store.layout import Layout
    from image_format.store.locks import StoreLock

ADDING_PREFIX = "adding-"


def add(layout: Layout, lock: StoreLock, directory: Path, *, links: bool) -> Path:
    """The directory in the store; the same checkpoint a second time is the first one."""
    digest, sizes = _look(directory)
    target = layout.checkpoint(digest)
    if target.exists():
        return target
    incoming = Incoming(layout, lock, digest, layout.incoming / f"{ADDING_PREFIX}{digest}.{secrets.token_hex(8)}")
    incoming.open()
    try:
        _fill(incoming, directory, sizes, links=links)
        return incoming.commit()
    except BaseException:
        incoming.abandon()
        raise


def _look(directory: Path) -> tuple[str, dict[str, int]]:
    with Directory(directory) as opened:
        documents, entries = opened.documents(), opened.entries()
    if SIGNATURE_NAME not in documents or MANIFEST_NAME not in documents:
        raise Unsigned(where=directory)
    return hashlib.sha256(documents[MANIFEST_NAME]).hexdigest(), {name: s.st_size for name, s in entries.items()}


def _fill(incoming: Incoming, directory: Path, sizes: dict[str, int], *, links: bool) -> None:
    _, index = read_claims(directory)
    check_sizes(sizes, index, where=str(directory))
    bulk = {file.name: file for file in bulk_files(index)}
    for name in sorted(set(sizes) - ALLOWED_UNSIGNED - {REFERENCE_NAME}):
        if name not in bulk or not incoming.take(bulk[name], directory / name):
            # What lasts is the commit's business: it brings every file to disk.
            place(directory / name, incoming.image / name, sizes[name], links=links and name in bulk, lasting=False)
