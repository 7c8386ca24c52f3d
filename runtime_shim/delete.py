"""The verb `delete`: the low-level runtime deletes, then our traces of the container go.

A forced delete ends a container that is frozen first, without letting it run. A container of which there are no traces is deleted by the low-level runtime in this process's place. If the delete fails the
traces stay, because so does the container.
"""

from __future__ import annotations

import os

from oci_hook.control_directory import control_path, forget_container, is_safe_id, state_path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from oci_hook.settings import Settings
    from runtime_shim.arguments import Arguments
    from runtime_shim.low_level import LowLevel


STATE_CALL_S = 10.0


def delete(call: Arguments, settings: Settings, low_level: LowLevel) -> int:
    """Run the verb; returns the low-level runtime's status."""
    container_id = call.container_id or ""
    if not is_safe_id(container_id) or not _has_traces(settings, container_id):
        low_level.replace_process(call)
    from runtime_shim.supervise import run_child  # noqa: PLC0415 - ctypes, not for containers that are left alone

    if call.has("force") or call.has("f"):
        _end_the_frozen(call, settings, low_level)
    done = run_child(call.argv_with(program=low_level.path))
    if done.status == 0:
        try:
            forget_container(settings.run_dir, container_id)
        except OSError as error:
            from runtime_shim.debug_log import write  # noqa: PLC0415

            write(settings, f"delete {container_id}: traces stay, {error}")
    return done.status


def _end_the_frozen(call: Arguments, settings: Settings, low_level: LowLevel) -> None:
    """A restore that was killed before its thaw leaves the container frozen, and a version 1 freezer holds even the killed."""
    import json  # noqa: PLC0415

    from runtime_shim import freezer, state_file  # noqa: PLC0415
    from vgpu_errors import VgpuError  # noqa: PLC0415

    try:
        found = low_level.call(call.global_words, "state", call.container_id or "", deadline_s=STATE_CALL_S)
        pid = int(json.loads(found.stdout)["pid"])
        if pid > 0 and freezer.is_held(pid):
            freezer.kill(state_file.cgroup_of(pid), pid)
    except (VgpuError, ValueError, KeyError, TypeError) as problem:
        from runtime_shim.debug_log import write  # noqa: PLC0415

        write(settings, f"delete {call.container_id}: not looked at before, {problem}")


def _has_traces(settings: Settings, container_id: str) -> bool:
    paths = (control_path(settings.run_dir, container_id), state_path(settings.run_dir, container_id))
    return any(os.path.lexists(path) for path in paths)
