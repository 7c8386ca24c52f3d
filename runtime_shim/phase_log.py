"""Times the phases of a verb and notes them in the debug log, one JSON object a verb (docs/operations.md).

Prints nothing. Called by checkpoint.py and restore.py; tests/gpu/podman_run.py reads the lines back.
"""

from __future__ import annotations

import json
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from runtime_shim import debug_log

if TYPE_CHECKING:
    from collections.abc import Iterator

    from oci_hook.settings import Settings


class PhaseLog:
    """Phases with their seconds, in order."""

    def __init__(self) -> None:
        self.taken: list[tuple[str, float]] = []
        self._began = time.monotonic()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Run one phase; one that fails is noted as well, since its time was spent."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.taken.append((phase, time.monotonic() - began))

    @property
    def seconds(self) -> float:
        """Since the verb began."""
        return time.monotonic() - self._began

    def write(self, settings: Settings, verb: str, container_id: str) -> None:
        """The line `phases {"verb": ..., "container": ..., "seconds": ..., "phases": {...}}`."""
        phases = {phase: round(seconds, 4) for phase, seconds in self.taken}
        doc = {"verb": verb, "container": container_id, "seconds": round(self.seconds, 4), "phases": phases}
        debug_log.write(settings, "phases " + json.dumps(doc))
