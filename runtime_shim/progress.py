"""Says what a checkpoint or restore is doing: phases on a terminal, JSON lines when asked, else nothing.

Writes to standard error only, and only in verbs whose standard error is the engine's own, never the container's.
`progress = auto|json|none` in runtime.conf; auto writes where standard error is a terminal.
Called by checkpoint.py (a restore's stdio belongs to the container).
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from oci_hook.settings import Settings

REFRESH_S = 0.5


class Progress:
    """One line per phase, rewritten while bytes are counted."""

    def __init__(self, settings: Settings) -> None:
        wish = settings.progress
        self.is_json = wish == "json"
        self.is_on = self.is_json or (wish == "auto" and sys.stderr.isatty())
        self._last_shown = 0.0
        self._phase = ""
        self._since = 0.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Announce a phase, and at its end how long it took."""
        self._phase, self._since = name, time.monotonic()
        self._say({"phase": name, "state": "start"}, f"vgpu: {name} ...")
        yield
        seconds = time.monotonic() - self._since
        self._say({"phase": name, "state": "end", "seconds": round(seconds, 3)}, f"vgpu: {name}: {seconds:.2f} s")

    def note(self, text: str) -> None:
        """Something a user should know of, inside a phase."""
        self._say({"phase": self._phase, "state": "note", "detail": text}, f"vgpu: {text}")

    def event(self, event: Mapping[str, Any]) -> None:
        """A phase event of the agent, inside the phase that asked for it."""
        if event.get("event") == "bytes":
            self.bytes(int(event.get("done") or 0), int(event.get("total") or 0))
            return
        if event.get("state") != "end":
            return
        detail = {key: event[key] for key in ("phase", "state", "seconds", "detail") if key in event}
        self._say(detail, f"vgpu:   {event.get('phase')}: {float(event.get('seconds') or 0):.2f} s")

    def bytes(self, done: int, total: int) -> None:
        """Bytes hashed so far; rate and time left follow from the phase's start."""
        now = time.monotonic()
        if now - self._last_shown < REFRESH_S:
            return
        self._last_shown = now
        rate = done / max(now - self._since, 1e-6)
        left = (total - done) / rate if rate else 0.0
        text = (
            f"vgpu: {self._phase}: {done / 1e9:.1f} of {total / 1e9:.1f} GB, {rate / 1e9:.1f} GB/s, {left:.0f} s left"
        )
        self._say({"phase": self._phase, "state": "bytes", "done": done, "total": total}, text)

    def _say(self, event: Mapping[str, Any], text: str) -> None:
        if self.is_on:
            print(json.dumps(dict(event)) if self.is_json else text, file=sys.stderr, flush=True)
