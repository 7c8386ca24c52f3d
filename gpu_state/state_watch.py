"""Notices changes in a folder: /run/vgpu/state, where the shim writes one file per GPU container, and the kubelet's checkpoints.

Only wakes its owner up, who then lists the folder, so that a lost event costs seconds and not a container.
Through pyinotify; where that package is missing the owner's listing from time to time is all there is.
Called by registration.py and containerd_integration/kubelet_watch.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path


class StateWatch:
    """An inotify watch of one folder."""

    def __init__(self, folder: Path, *, arrivals_only: bool = False) -> None:
        self._notifier: Any = None
        try:
            import pyinotify  # noqa: PLC0415 - optional: without it the listing alone serves
        except ImportError:
            return
        manager = pyinotify.WatchManager()
        mask = pyinotify.IN_MOVED_TO | pyinotify.IN_CLOSE_WRITE
        if not arrivals_only:
            mask |= pyinotify.IN_DELETE | pyinotify.IN_MOVED_FROM
        manager.add_watch(str(folder), mask)
        self._notifier = pyinotify.Notifier(manager, default_proc_fun=lambda _event: None, timeout=0)
        self._fd: int = manager.get_fd()

    def fileno(self) -> int | None:
        """The descriptor to wait on; None where there is no inotify."""
        return None if self._notifier is None else self._fd

    def clear(self) -> None:
        """Take the events away that woke the owner."""
        while self._notifier.check_events(timeout=0):
            self._notifier.read_events()
            self._notifier.process_events()

    def close(self) -> None:
        """Stop watching."""
        if self._notifier is not None:
            self._notifier.stop()
