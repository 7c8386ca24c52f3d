"""Which containers a checkpoint has to wait for, because they work together with this one (annotation `vgpu.snapshot/group`).

Reads the state files alone; the agent does the waiting (gpu_state/group_meeting.py). Refuses an annotation that is no name.
Empty for a container without a group, for one that is the last of its group, and with `group = alone` in runtime.conf.
Called by checkpoint.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_state.group_terms import group_json
from gpu_state.known_containers import checked_group, known_containers, members_of

if TYPE_CHECKING:
    from oci_hook.settings import Settings
    from runtime_shim.target import Target


def group_args(settings: Settings, target: Target) -> dict[str, Any]:
    """The argument `group` of `freeze`, where there is one."""
    group = checked_group(target.state.get("group"), target.id)
    if group is None or settings.group == "alone":
        return {}
    members = {one.id for one in members_of(group, known_containers(Path(settings.run_dir, "state")))} | {target.id}
    return {"group": group_json(group, members)} if len(members) > 1 else {}
