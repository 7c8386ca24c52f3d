"""What `vgpu push` asks podman's own command: an image as an OCI layout on disk, and which container has a name.

Changes nothing in podman's storage. Every call has a deadline.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from image_format.archives.ocistore import LayoutDirectory
from vgpu_errors import EngineFailed, NoSuchImage, ToolMissing

if TYPE_CHECKING:
    from collections.abc import Iterator

SAVE_DEADLINE_S = 1800
NAME_DEADLINE_S = 30


def container_id(name: str) -> str | None:
    """The id of podman's container of that name; None without podman or without such a container."""
    podman = shutil.which("podman")
    if podman is None or name.startswith("-"):
        return None
    command = [podman, "container", "inspect", "--format", "{{.Id}}", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=NAME_DEADLINE_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


@contextlib.contextmanager
def saved_image(name: str) -> Iterator[LayoutDirectory]:
    """What `podman save` writes of it."""
    podman = shutil.which("podman")
    if podman is None:
        raise ToolMissing(tool="podman", what="its image is asked for with --with-image")
    if name.startswith("-"):
        raise NoSuchImage(path=name, what="that is no name of an image")
    with tempfile.TemporaryDirectory(prefix="vgpu-image-") as folder:
        layout = Path(folder, "layout")
        command = [podman, "save", "--quiet", "--format", "oci-dir", "--output", str(layout), name]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SAVE_DEADLINE_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise EngineFailed(engine="podman save", what=str(error)) from error
        if done.returncode != 0:
            raise EngineFailed(engine="podman save", what=done.stderr.strip()[-400:])
        yield LayoutDirectory(layout)
