"""Reads and writes /run/vgpu/state/<id>.json, what the agent and the commands know of a container.

The content is oci_hook/state.py's. Written in one step, so that the agent's watch never reads half of it.
Called by create.py, checkpoint.py, restore.py and target.py.
"""

from __future__ import annotations

import time

from oci_hook import state
from oci_hook.control_directory import is_safe_id, state_path, write_state_file
from oci_hook.injection import parse_spec, to_bytes
from vgpu_errors import NodeError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from oci_hook.injection import Injection
    from oci_hook.settings import Settings
    from runtime_shim.arguments import Arguments
    from runtime_shim.low_level import LowLevel

RUN_DIR = "/run/vgpu"


def read(container_id: str, *, run_dir: str = RUN_DIR) -> dict[str, Any] | None:
    """The state of a container; None if the shim did not create it as a GPU container."""
    if not is_safe_id(container_id):
        return None
    try:
        with open(state_path(run_dir, container_id), "rb") as file:  # noqa: PTH123
            return _document(file.read())
    except OSError:
        return None


def _document(content: bytes) -> dict[str, Any] | None:
    """The object in a state file; anything else counts as none."""
    import json  # noqa: PLC0415 - 8 ms that most containers do not pay

    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def write_running(
    settings: Settings,
    call: Arguments,
    low_level: LowLevel,
    *,
    bundle: str,
    pid: int,
    injection: Injection | None = None,
    generation: int | None = None,
) -> None:
    """Note a container that was just created or restored; `generation` is that of the checkpoint it came from."""
    container_id = call.container_id or ""
    preload = injection.preload if injection is not None else None
    content = state.new_state(
        container_id=container_id,
        bundle=bundle,
        pid=pid,
        root=call.get_global("root"),
        runtime=low_level.path,
        annotations=_annotations(injection.spec if injection is not None else _spec(bundle)),
        build_id=preload.build_id if preload is not None else None,
        libc=preload.libc if preload is not None else None,
    )
    if generation is not None:
        content["generation"] = generation
    write_state_file(settings.run_dir, container_id, to_bytes(content))


def note_checkpoint(container_id: str, image_path: str, *, seconds: float, run_dir: str = RUN_DIR) -> None:
    """Remember the last checkpoint of a container that goes on; one that has ended is forgotten already."""
    content = read(container_id, run_dir=run_dir)
    if content is None:
        return
    content["last_checkpoint"] = {"time": int(time.time()), "image_path": image_path, "seconds": seconds}
    write_state_file(run_dir, container_id, to_bytes(content))


def cgroup_of(pid: int) -> str:
    """The cgroup of a process that must be there."""
    found = state.cgroup_of(pid)
    if found is None:
        raise NodeError(what=f"process {pid} has ended, or /proc does not name its cgroup")
    return found


def _spec(bundle: str) -> dict[str, Any]:
    try:
        with open(f"{bundle}/config.json", "rb") as file:  # noqa: PTH123
            return parse_spec(file.read()) or {}
    except OSError:
        return {}


def _annotations(spec: dict[str, Any]) -> dict[str, Any]:
    found = spec.get("annotations")
    return found if isinstance(found, dict) else {}
