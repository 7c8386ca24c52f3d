"""Brings into the node's store what a reference archive lacks, from the registries that it names (docs/registry.md).

    fetch_missing(read_note(directory), policy, store)     # then reference.complete(directory, policy, store.root)

The locations are unsigned: they say where to ask and nothing more. What comes must be the very checkpoint that the
note and the signed documents mean, signed by somebody this node trusts, and every byte of it is verified.
The runtime shim calls it at a restore whose store has not got the files, `vgpu pull` does the same by hand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from image_format.registry import Registry
from image_format.registry.reference import Reference
from image_format.transport.notes import Notes
from image_format.transport.pulling import Pulled, PullOptions, Remote, look, pull_into_store
from vgpu_errors import ContentElsewhere, ContentMismatch, VgpuError

if TYPE_CHECKING:
    from collections.abc import Callable

    from image_format.references.reference import ReferenceNote
    from image_format.store import Store
    from image_format.transport.watching import Watcher
    from image_format.trust.policy import Policy


def fetch_missing(
    note: ReferenceNote,
    policy: Policy,
    store: Store,
    *,
    connect: Callable[[Reference], Registry] | None = None,
    options: PullOptions | None = None,
    watcher: Watcher | None = None,
) -> Pulled:
    """Pull the checkpoint into the store from the first location that has it; the last one's error otherwise."""
    problems: list[str] = []
    last: VgpuError | None = None
    notes = Notes.of_store(store.root)
    for location in note.locations:
        try:
            with (connect or Registry)(Reference.parse(location)) as registry:
                remote = _the_same(registry, note, policy)
                return pull_into_store(registry, remote, store, notes, options=options, watcher=watcher)
        except VgpuError as error:
            problems.append(f"{location}: {error}")
            last = error
    if last is None:
        what = "and it names no registry"
        raise ContentElsewhere(where="the archive", count=len(note.missing), size_bytes="unknown size", what=what)
    for problem in problems[:-1]:
        last.add_note(problem)
    raise last


def _the_same(registry: Registry, note: ReferenceNote, policy: Policy) -> Remote:
    remote = look(registry, policy)
    if remote.claims.manifest_digest != note.manifest_digest:
        raise ContentMismatch(where=str(registry.reference), what="it is another checkpoint")
    return remote
