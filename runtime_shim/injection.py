"""The bundle of a GPU container as the low-level runtime is to see it, for the length of one call.

One ordered list with its undo: signals held back, control directory made, config.json replaced; afterwards config.json
is put back, always, so that the engine never sees our edits (reference: podman carries them into checkpoints,
CRI-O refuses them). A kill in between is repaired by the next call (oci_hook/bundle_file.py).
Called by create.py and restore.py.
"""

from __future__ import annotations

import os

from oci_hook.bundle_file import BundleFile
from oci_hook.control_directory import make_control_directory, remove_control_directory, write_mode
from oci_hook.injection import Injection, mode_of, plan_injection

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType

    from oci_hook.settings import Settings
    from runtime_shim.supervise import Shield

CURRENT = "current"


class InjectedBundle:
    """A context manager around the call; `injection` is None for a container that is left alone."""

    __slots__ = ("_file", "_has_made_directory", "_mode", "_settings", "_shield", "injection")

    def __init__(
        self, settings: Settings, file: BundleFile, injection: Injection | None, mode: str | None = None
    ) -> None:
        self.injection = injection
        self._mode = mode
        self._settings = settings
        self._file = file
        self._has_made_directory = False
        self._shield: Shield | None = None

    def __enter__(self) -> Injection | None:
        """Make the edits; where one of them fails the ones before are undone."""
        if self.injection is None or self.injection.edited is None:
            return self.injection
        from runtime_shim.supervise import Shield  # noqa: PLC0415 - ctypes, not for containers that are left alone

        self._shield = Shield()
        self._shield.__enter__()
        try:
            container_id = self.injection.container_id
            self._has_made_directory = make_control_directory(self._settings.run_dir, container_id)
            write_mode(self._settings.run_dir, container_id, self._mode or mode_of(self._settings, self.injection.spec))
            self._file.put_in(self.injection.edited)
        except BaseException:
            self._leave(has_failed=True)
            raise
        return self.injection

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave(has_failed=error is not None)

    def put_back(self) -> None:
        """Put config.json back before the end: a `run` in the foreground has read it long before it returns."""
        self._file.put_back()

    def forget(self) -> None:
        """The container did not come to be: remove the control directory if it was made for it."""
        if self._has_made_directory and self.injection is not None:
            remove_control_directory(self._settings.run_dir, self.injection.container_id)
            self._has_made_directory = False

    def _leave(self, *, has_failed: bool) -> None:
        shield, self._shield = self._shield, None
        try:
            self._file.put_back()
            if has_failed:
                self.forget()
        finally:
            if shield is not None:
                shield.__exit__(None, None, None)


def injected_bundle(
    settings: Settings,
    bundle: str | os.PathLike[str],
    container_id: str,
    *,
    preload_build: str | None = CURRENT,
    mode: str | None = None,
) -> InjectedBundle:
    """Decide for one bundle; nothing is changed before the context is entered.

    `preload_build` is for a restore: `<libc>/<build-id>` that the checkpoint was made with, None if it had no preload.
    So is `mode`, where the checkpoint decides it.
    """
    file = BundleFile(os.path.abspath(bundle))  # noqa: PTH100
    config = file.read()
    if config is None or preload_build is None:
        return InjectedBundle(settings, file, None)
    pinned = None
    if preload_build != CURRENT:
        libc, _, build_id = preload_build.partition("/")
        pinned = (libc, build_id)
    injection = plan_injection(settings, file.bundle, container_id, config, pinned=pinned)
    if pinned is not None and (injection is None or injection.preload is None):
        from vgpu_errors import ToolMissing  # noqa: PLC0415 - the good case does without the error tree

        raise ToolMissing(
            tool=f"preload build {preload_build}", what=injection.reason if injection else "bad config.json"
        )
    return InjectedBundle(settings, file, injection, mode)
