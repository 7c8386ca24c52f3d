"""Shows a transfer while it runs: bars on a terminal, one JSON document a line otherwise, both on stderr.

Lines are {"phase","done","total"} at the beginning, once a second and at the end, and {"note"}; no line carries a secret.
Called by `vgpu push` and `vgpu pull`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from image_format.transport.watching import Watcher
from vgpu_cli.output import printable

if TYPE_CHECKING:
    from collections.abc import Iterator

LINE_INTERVAL_S = 1.0


@contextlib.contextmanager
def watching() -> Iterator[Watcher]:
    """What fits where stderr goes."""
    if sys.stderr.isatty() and importlib.util.find_spec("rich"):
        with _bars() as bars:
            yield bars
        return
    watcher = Lines()
    try:
        yield watcher
    finally:
        watcher.end()


class Lines(Watcher):
    """For programs and logs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._phases: dict[str, list[int]] = {}
        self._told_s = 0.0

    def phase(self, name: str, total_bytes: int) -> None:
        """Tell its beginning."""
        with self._lock:
            self._phases[name] = [0, total_bytes]
            self._tell(name)

    def grow(self, name: str, more_bytes: int) -> None:
        """Told with the next bytes."""
        with self._lock:
            self._phases[name][1] += more_bytes

    def moved(self, name: str, count: int) -> None:
        """Tell all phases once a second."""
        with self._lock:
            self._phases[name][0] += count
            if time.monotonic() - self._told_s >= LINE_INTERVAL_S:
                self._tell(*self._phases)

    def note(self, text: str) -> None:
        """Tell at once."""
        _write({"note": text})

    def end(self) -> None:
        """The last state."""
        with self._lock:
            self._tell(*self._phases)

    def _tell(self, *names: str) -> None:
        self._told_s = time.monotonic()
        for name in names:
            done, total = self._phases[name]
            _write({"phase": name, "done": done, "total": total})


def _write(doc: dict[str, object]) -> None:
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps(doc), file=sys.stderr, flush=True)


@contextlib.contextmanager
def _bars() -> Iterator[Watcher]:
    from rich.console import Console  # noqa: PLC0415 - 60 ms that only a terminal pays
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: PLC0415
    from rich.progress import TransferSpeedColumn as Speed  # noqa: PLC0415

    columns = (TextColumn("{task.description:10}"), BarColumn(), DownloadColumn(), Speed(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield _Bars(progress)


class _Bars(Watcher):
    """For people."""

    def __init__(self, progress: Any) -> None:
        self._progress = progress
        self._lock = threading.Lock()
        self._tasks: dict[str, Any] = {}
        self._totals: dict[str, int] = {}

    def phase(self, name: str, total_bytes: int) -> None:
        """A bar for each phase."""
        self._totals[name] = total_bytes
        self._tasks[name] = self._progress.add_task(name, total=total_bytes or None)

    def grow(self, name: str, more_bytes: int) -> None:
        """The bar becomes longer."""
        with self._lock:
            self._totals[name] += more_bytes
            self._progress.update(self._tasks[name], total=self._totals[name])

    def moved(self, name: str, count: int) -> None:
        """rich may be told from any thread."""
        self._progress.advance(self._tasks[name], count)

    def note(self, text: str) -> None:
        """Above the bars."""
        self._progress.console.print(printable(text), markup=False, highlight=False)
