"""Brings into the node's store what a reference archive lacks, from the registries that it names (docs/registry.md).

    fetch_missing(read_note(directory), policy, store, deadline_s=200)     # then reference.complete(directory, policy, store.root)

The locations are unsigned: they say where to ask and nothing more. What comes must be the very checkpoint that the
note and the signed documents mean, signed by somebody this node trusts, and every byte of it is verified.
Where another restore brings the same in, it waits for that. A deadline ends it in the middle; what has come stays in the store, and the next try goes on.
The runtime shim calls it at a restore whose store has not got the files, `vgpu pull` does the same by hand.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING

from image_format.registry import Registry, Retries
from image_format.registry.reference import Reference
from image_format.transport.notes import Notes
from image_format.transport.pulling import Pulled, PullOptions, Remote, look, pull_into_store
from vgpu_errors import Cancelled, ContentElsewhere, ContentMismatch, DeadlineExceeded, StoreBusy, VgpuError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from image_format.references.reference import ReferenceNote
    from image_format.store import Store
    from image_format.transport.watching import Watcher
    from image_format.trust.policy import Policy

BUSY_POLL_S = 0.5
# Somebody waits for the container: a registry that says nothing for so long is not waited for.
IMPATIENT = Retries(connect_timeout_s=5.0, read_timeout_s=15.0)


def fetch_missing(
    note: ReferenceNote,
    policy: Policy,
    store: Store,
    *,
    deadline_s: float,
    connect: Callable[[Reference], Registry] | None = None,
    options: PullOptions | None = None,
    watcher: Watcher | None = None,
) -> Pulled:
    """Pull the checkpoint into the store from the first location that has it; the last one's error otherwise."""
    problems: list[str] = []
    last: VgpuError | None = None
    notes, ends_s = Notes.of_store(store.root), time.monotonic() + deadline_s
    for location in note.locations:
        try:
            with (connect or _connect)(Reference.parse(location)) as registry, _ended(registry, ends_s, deadline_s):
                remote = _the_same(registry, note, policy)
                while True:
                    try:
                        return pull_into_store(registry, remote, store, notes, options=options, watcher=watcher)
                    except StoreBusy:  # a restore of a replica brings the same in
                        if registry.stop.wait(BUSY_POLL_S):
                            raise
        except DeadlineExceeded:
            raise
        except VgpuError as error:
            problems.append(f"{location}: {error}")
            last = error
    if last is None:
        what = "and it names no registry"
        raise ContentElsewhere(where="the archive", count=len(note.missing), size_bytes="unknown size", what=what)
    for problem in problems[:-1]:
        last.add_note(problem)
    raise last


def _connect(reference: Reference) -> Registry:
    return Registry(reference, retries=IMPATIENT)


@contextlib.contextmanager
def _ended(registry: Registry, ends_s: float, deadline_s: float) -> Iterator[None]:
    """Stops the registry's transfers when the time is over."""
    timer = threading.Timer(max(0.0, ends_s - time.monotonic()), registry.stop.set)
    timer.daemon = True
    timer.start()
    try:
        yield
    except Cancelled as error:  # nobody else stops them
        raise DeadlineExceeded(phase=f"The fetch from {registry.reference}", seconds=f"{deadline_s:g}") from error
    finally:
        timer.cancel()


def _the_same(registry: Registry, note: ReferenceNote, policy: Policy) -> Remote:
    remote = look(registry, policy)
    if remote.claims.manifest_digest != note.manifest_digest:
        raise ContentMismatch(where=str(registry.reference), what="it is another checkpoint")
    return remote
