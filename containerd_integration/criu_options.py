"""What CRIU must be told at a restore that containerd has no option for: connections and file locks.

containerd hands `--tcp-established` and `--file-locks` on at a checkpoint and forgets them at the restore. runc reads
further options from the file that the annotation org.criu.config names, so such a container gets the annotation and the
node one file for each set of options. The files stay: the container's next checkpoint reads them again.
Called by `restoring`.
"""

from __future__ import annotations

import json
from pathlib import Path

ANNOTATION = "org.criu.config"
FOLDER = Path("/run/vgpu/criu")
# What runc reads without the annotation; one named file replaces it, so its lines go along.
DEFAULT_FILE = Path("/etc/criu/runc.conf")


def with_options(spec: bytes, *, keeps_tcp: bool, keeps_file_locks: bool, folder: Path = FOLDER) -> bytes:
    """The container's configuration with the annotation; as it was where no option is needed."""
    options = [
        name for name, is_wanted in (("tcp-established", keeps_tcp), ("file-locks", keeps_file_locks)) if is_wanted
    ]
    document = json.loads(spec)
    annotations = document.get("annotations") or {}
    if not options or ANNOTATION in annotations:
        return spec
    document["annotations"] = annotations | {ANNOTATION: str(_written(options, folder))}
    return json.dumps(document).encode()


def _written(options: list[str], folder: Path) -> Path:
    own = DEFAULT_FILE.read_text(encoding="utf-8") if DEFAULT_FILE.is_file() else ""
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    path = folder / f"{'-'.join(options)}.conf"
    partial = path.with_suffix(".partial")
    partial.write_text("".join(f"{line}\n" for line in [*own.splitlines(), *options]), encoding="utf-8")
    partial.replace(path)
    return path
