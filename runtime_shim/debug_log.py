"""Appends lines to the file that `log =` of runtime.conf names; without it, nothing.

Refuses to write anywhere else: stdout and stderr are the container's. Never makes a call fail. Environments are not
logged, they hold secrets. Called by every verb that does more than pass through.
"""

from __future__ import annotations

import os
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from oci_hook.settings import Settings


def write(settings: Settings, text: str) -> None:
    """One line, with time and process."""
    if settings.log is None:
        return
    now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    line = f"{now} vgpu-runtime[{os.getpid()}] {' '.join(text.splitlines())}\n"
    try:
        descriptor = os.open(settings.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError:
        return
    try:
        os.write(descriptor, line.encode("utf-8", "surrogateescape"))
    except OSError:
        return
    finally:
        os.close(descriptor)
