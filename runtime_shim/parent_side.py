"""The checkpoint that the next one of a container builds on: its newest in the node's store.

What its packs hold of GPU memory is neither copied nor written again. A parent saves work and is never needed: without a
store, a parent or its signature the checkpoint is made whole from nothing. The lease keeps gc away until the block ends.
Called by checkpoint.py for containers in staged mode.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from image_format import seal_documents
from image_format.record import Parent
from image_format.store import Store
from image_format.trust.policy import Policy
from image_format.verifying import Directory
from image_format.vram import read_fragment
from runtime_shim import debug_log
from vgpu_errors import VgpuError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from oci_hook.settings import Settings

# A store that is busy is not worth waiting for: a parent only saves time.
LOCK_DEADLINE_S = 2.0


@dataclass(frozen=True)
class ParentCheckpoint:
    """A verified checkpoint in the store, and the ids of what its packs hold."""

    directory: Path
    entry: Parent
    ids: frozenset[bytes]

    def shares_with(self, fragment: Path | None) -> bool:
        """The new checkpoint has content of this one."""
        if fragment is None:
            return False
        regions = read_fragment(fragment).regions
        return any(place.pack is not None and place.id in self.ids for region in regions for place in region.chunks)


@contextlib.contextmanager
def leased_parent(settings: Settings, container_id: str, *, is_wanted: bool) -> Iterator[ParentCheckpoint | None]:
    """The newest checkpoint of the container, for as long as the block lasts; None where there is none to build on."""
    with contextlib.ExitStack() as stack:
        found = None
        if settings.store == "on" and is_wanted:
            try:
                found = _parent(settings, container_id, stack)
            except (VgpuError, OSError) as problem:
                debug_log.write(settings, f"checkpoint {container_id}: no parent: {problem}")
        yield found


def _parent(settings: Settings, container_id: str, stack: contextlib.ExitStack) -> ParentCheckpoint | None:
    store = Store.open(settings.store_dir, deadline_s=LOCK_DEADLINE_S)
    latest = store.latest_of(container_id)
    if latest is None:
        return None
    why = f"parent of the next checkpoint of {container_id}"
    directory = stack.enter_context(store.lease(latest.manifest_digest, why))
    with Directory(directory) as opened:
        claims = seal_documents.check(opened.documents(), Policy.load(), where=str(directory))
    if claims is None or claims.key is None:
        return None
    ids = frozenset(
        chunk.id for region in claims.index.vram for chunk in claims.index.chunks_of(region) if chunk.stored_length
    )
    return ParentCheckpoint(directory, Parent(claims.manifest_digest, claims.record.generation), ids)
