"""The verb `resume`: a GPU container that runs already has been resumed.

An engine that pauses the container around a checkpoint (containerd, CRI-O) resumes it in the end. Where the shim was
killed in between, the agent has set the container free to undo the freeze; the low-level runtime would call a further
resume an error, and containerd would hold the container for paused ever after.
Every other container is resumed by the low-level runtime in this process's place.
"""

from __future__ import annotations

from runtime_shim import freezer, state_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from oci_hook.settings import Settings
    from runtime_shim.arguments import Arguments
    from runtime_shim.low_level import LowLevel


def resume(call: Arguments, settings: Settings, low_level: LowLevel) -> int:
    """Run the verb; returns only where there is nothing to do."""
    state = state_file.read(call.container_id or "", run_dir=settings.run_dir)
    cgroup = state.get("cgroup") if state is not None else None
    if not isinstance(cgroup, str) or not freezer.is_running(cgroup):
        low_level.replace_process(call)
    return 0
