"""Gives processes that `exec` starts in an injected container the same LD_PRELOAD as its first one.

podman builds the process of an exec from its own database, where our edit of config.json never was. Only the
`--process` file is touched, and only for a container with a control directory; a process without the library would
still run, so nothing here is worth failing an exec for. Called by the shim's exec.
"""

from __future__ import annotations

import os

from oci_hook.control_directory import is_injected, is_safe_id, write_atomically

TYPE_CHECKING = False
if TYPE_CHECKING:
    from oci_hook.settings import Settings


def edit_process_file(settings: Settings, container_id: str, path: str) -> bool:
    """Merge our library into the file's environment; False where there was nothing to do."""
    if not is_safe_id(container_id) or not is_injected(settings.run_dir, container_id):
        return False
    try:
        with open(path, "rb") as file:  # noqa: PTH123
            mode = os.fstat(file.fileno()).st_mode & 0o7777
            content = file.read()
    except OSError:
        return False  # the low-level runtime reports it in its own words
    edited = edited_process(content)
    if edited is None or edited == content:
        return False
    write_atomically(path, edited, mode)
    return True


def edited_process(content: bytes) -> bytes | None:
    """The process JSON with the library first in LD_PRELOAD; None for what is no process."""
    from oci_hook.edits import LIBRARY_IN_CONTAINER, MergePreload  # noqa: PLC0415
    from oci_hook.injection import parse_spec, to_bytes  # noqa: PLC0415

    process = parse_spec(content)
    if process is None:
        return None
    before = list(process.get("env") or ())
    MergePreload(LIBRARY_IN_CONTAINER).apply({"process": process})
    return content if process["env"] == before else to_bytes(process)
