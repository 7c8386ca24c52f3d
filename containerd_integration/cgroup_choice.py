"""Which cgroup a restored container gets: one of its own name where its runtime can move it, else the checkpoint's.

runc before 1.2 leaves the processes in the cgroup of the dump whatever the configuration says; a container that still
runs there would share it, and what is done to one would be done to both. So the old cgroup is kept then, and must be empty.
Measured with runc 1.1.15 and 1.3.6. Called by `restoring`.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

VERSION_S = 30
FIRST_THAT_MOVES = (1, 2)
CGROUPS = Path("/sys/fs/cgroup")


def moves_cgroups(runtime: str) -> bool:
    """Whether this runtime restores into the cgroup that the configuration names."""
    try:
        answer = subprocess.run([runtime, "--version"], capture_output=True, text=True, timeout=VERSION_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False  # the restore says what is wrong with it
    found = re.search(r"runc version (\d+)\.(\d+)", answer.stdout)
    return found is not None and (int(found[1]), int(found[2])) >= FIRST_THAT_MOVES


def is_populated(cgroups_path: str, *, root: Path = CGROUPS) -> bool:
    """Whether processes live in a cgroup of version 2; systemd's spelling is resolved by nobody but systemd."""
    if not cgroups_path.startswith("/"):
        return False
    try:
        return "populated 1" in (root / cgroups_path.lstrip("/") / "cgroup.events").read_text(encoding="ascii")
    except OSError:
        return False
