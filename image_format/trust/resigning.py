"""Signs a sealed directory again: a new vgpu-signature.json over the same manifest (spec/signature.md, section 3).

Refuses a directory that `vgpu verify` would refuse: a signature vouches for content, so every chunk is compared first.
One rename; a crash before it leaves the old signature. What a later version put into the predicate stays there.
`vgpu sign` calls it, to give an expiry, or to put one's own key in the place of another trusted one.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from image_format import seal_documents
from image_format.file_names import PARTIAL_PREFIX, SIGNATURE_NAME
from image_format.sealing import sign
from image_format.trust.statement import Statement
from image_format.verifying import Directory, verify_directory
from vgpu_errors import ContentMismatch, ImageError, NeedsRoot, Unsigned

if TYPE_CHECKING:
    from collections.abc import Callable

    from image_format.trust.keys import SigningKey
    from image_format.trust.policy import Policy
    from image_format.verifying import Verified


@dataclass(frozen=True)
class Resigned:
    """What was signed, and who had signed it before."""

    manifest_digest: str
    container_id: str
    generation: int
    expires: str | None
    former_key_id: str | None


def resign(
    path: Path | str,
    policy: Policy,
    key: SigningKey,
    *,
    expires: str | None = None,
    threads: int | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Resigned:
    """Verify the directory as a restore would, then sign its manifest with this key."""
    verified = verify_directory(path, policy, threads=threads, on_progress=on_progress)
    if verified.record is None or verified.manifest_digest is None:
        raise Unsigned(where=path, remedy="There is nothing to sign: only vgpu-runtime makes the documents of a seal.")
    with Directory(path) as directory:
        former = directory.documents().get(SIGNATURE_NAME)
        statement = replace(_statement(verified, former, policy, str(path)), expires=expires)
        _replace_signature(directory.fd, sign(statement.to_bytes(), key), Path(path))
    return Resigned(verified.manifest_digest, statement.container_id, statement.generation, expires, verified.key_id)


def _statement(verified: Verified, former: bytes | None, policy: Policy, where: str) -> Statement:
    """The verified statement, or one made from the record where there was none."""
    if former is not None and verified.key_id is not None:
        statement, _ = seal_documents.verify_signature(former, policy, where=where)
        if statement.manifest_sha256 != verified.manifest_digest:
            raise ContentMismatch(where=f"{where}: {SIGNATURE_NAME}", what="it was replaced while it was verified")
        return statement
    record, digest = verified.record, verified.manifest_digest
    if record is None or digest is None:
        raise Unsigned(where=where)
    return Statement(digest, record.content_root, record.container.id, record.generation, record.created)


def _replace_signature(directory_fd: int, data: bytes, path: Path) -> None:
    partial = PARTIAL_PREFIX + SIGNATURE_NAME
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(partial, flags, 0o600, dir_fd=directory_fd)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        os.replace(partial, SIGNATURE_NAME, src_dir_fd=directory_fd, dst_dir_fd=directory_fd)
        os.fsync(directory_fd)
    except PermissionError as error:
        raise NeedsRoot(what=f"writing {path / SIGNATURE_NAME}") from error
    except OSError as error:
        raise ImageError(where=path / SIGNATURE_NAME, what=f"cannot be written ({error.strerror})") from error
