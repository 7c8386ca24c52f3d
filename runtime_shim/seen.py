"""Which generation of a container this node has seen last, asked at a restore and noted after what succeeded.

The decision is image_format/trust/freshness.py's. A memory that cannot be written is told in the debug log and stops nobody.
Called by checkpoint.py and restore.py.
"""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING

from image_format.trust import freshness
from image_format.trust.seen_generations import SeenGenerations
from runtime_shim import debug_log
from vgpu_errors import VgpuError

if TYPE_CHECKING:
    from image_format.trust.policy import Policy
    from image_format.verifying import Verified
    from oci_hook.settings import Settings


def check(verified: Verified, policy: Policy, settings: Settings, *, where: str) -> None:
    """Refuse what has expired, and what is older than the policy allows; warnings go to the log."""
    if verified.signed is None:
        return
    last = SeenGenerations().newest(verified.signed.container_id)
    now = dt.datetime.now(tz=dt.UTC)
    for warning in freshness.check(verified.signed, now=now, last_generation=last, policy=policy, where=where):
        debug_log.write(settings, f"{where}: {warning}")


def note(settings: Settings, container_id: str, generation: int) -> None:
    """Remember a checkpoint that was made or has come back."""
    try:
        SeenGenerations().note(container_id, generation)
    except (VgpuError, OSError) as problem:
        debug_log.write(settings, f"generation {generation} of {container_id} is not remembered: {problem}")
