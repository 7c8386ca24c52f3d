"""What a checkpoint and a restore do with the node's store: keep a copy, leave the bulk there, bring it back.

`store = on` keeps every sealed checkpoint in the store as well; with `archive = reference` its bulk is then only there,
and the engine's archive stays small. A store that fails leaves the sealed checkpoint as it is: whole, and without a store.
Called by checkpoint.py after the seal and by restore.py before it verifies (spec/store.md, spec/archive-layout.md, 7).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpu_state.deadline import Deadline
from image_format.references import reference
from image_format.store import Store
from oci_hook.settings import CONFIG_PATH
from runtime_shim import debug_log
from vgpu_errors import BadConfiguration, ContentElsewhere, UnsupportedRequest, VgpuError

if TYPE_CHECKING:
    from pathlib import Path

    from image_format.trust.policy import Policy
    from oci_hook.settings import Settings
    from runtime_shim.arguments import Arguments
    from runtime_shim.phase_log import PhaseLog
    from runtime_shim.progress import Progress

PHASE = "bringing the content back from the store"


def refuse_reference_without_store(settings: Settings) -> None:
    """Before anything is touched: an archive cannot refer to what is kept nowhere."""
    if settings.archive == "reference" and settings.store == "off":
        raise BadConfiguration(
            path=CONFIG_PATH,
            what="archive = reference needs store = on: the archive's content has to be somewhere",
            remedy="Set store = on, or archive = embedded.",
        )


def keep(settings: Settings, image_path: Path, container_id: str, progress: Progress, clock: PhaseLog) -> None:
    """Take a sealed checkpoint into the store, where the settings want it; an error is told and changes nothing."""
    if settings.store == "off":
        return
    try:
        with progress.phase("keep in the store"), clock("store"):
            _keep(settings, image_path, container_id)
    except (VgpuError, OSError) as problem:
        debug_log.write(settings, f"checkpoint {container_id}: not in the store: {problem}")
        progress.note(f"the checkpoint is whole, but not in the store: {problem}")


def _keep(settings: Settings, image_path: Path, container_id: str) -> None:
    store = Store.open(settings.store_dir)
    kept = store.add(image_path)
    if settings.archive == "reference":
        names_it = f"an archive of container {container_id} (generation {kept.generation})"
        reference.refer(image_path, store, kept, names_it=names_it)


def bring_back(
    settings: Settings, image_path: Path, container_id: str, policy: Policy, deadline: Deadline | None = None
) -> None:
    """Make a reference whole again, in the time of the restore; a directory that is whole is left alone."""
    reference.sweep(image_path)
    if not reference.is_reference(image_path):
        return
    deadline = deadline or Deadline(settings.deadline_restore_s)

    def complete() -> tuple[str, ...]:
        return reference.complete(image_path, policy, settings.store_dir, check=lambda: deadline.check(PHASE))

    try:
        names = complete()
    except ContentElsewhere as problem:
        _fetch(settings, image_path, policy, problem, deadline)
        names = complete()
    debug_log.write(settings, f"restore {container_id}: {len(names)} files from {settings.store_dir}")


def _fetch(settings: Settings, image_path: Path, policy: Policy, problem: ContentElsewhere, deadline: Deadline) -> None:
    """Ask the registries that the archive names, into the store; where that fails the first problem is told, and why.

    A fetch that the restore's deadline ends is not lost: the next try, or `vgpu pull`, goes on with it.
    """
    note = reference.read_note(image_path)
    if not note.locations:
        raise problem
    from image_format.transport.fetching import fetch_missing  # noqa: PLC0415 - urllib3 takes 90 ms

    try:
        fetch_missing(note, policy, Store.open(settings.store_dir), deadline_s=deadline.remaining())
    except VgpuError as error:
        problem.add_note(f"The registry was asked: {error}")
        raise problem from error


def refuse_writing_to_images(call: Arguments) -> None:
    """CRIU's --auto-dedup punches holes into the images that it reads; those may be the store's own files."""
    if call.has("auto-dedup"):
        raise UnsupportedRequest(what="a restore with --auto-dedup would change the images that were sealed")
