"""What cannot be moved, by name: the rule that it breaks, the remedy, and whether the driver's own checkpoint can still take it.

Pure. The preload reports blockers of its process (spec/preload-protocol.md, "INVENTORY_IS"); this page says what each means.
Used by staged_freeze.py, which refuses or falls back before anything is stopped, and by `vgpu doctor CONTAINER`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpu_state.preload_objects import Blocker


@dataclass(frozen=True, slots=True)
class Rule:
    """One kind: grave, unless it leaves the process to the driver, passes, or stays with the driver and hinders nobody."""

    what: str
    why: str
    remedy: str
    is_for_driver: bool = False
    is_passing: bool = False
    is_kept: bool = False


# Measured on H200s with driver 580.159.04: a checkpoint of managed memory is refused with 801; one of imported memory, and one of
# host memory made by cuMemCreate, succeeds and its restore fails (801 and 999, then 401), so that the process is lost. What others
# have mapped comes back as a copy of its own. Events shared by legacy handles work on after checkpoint and restore of both
# processes. Fabric handles were not measured, so nothing is risked.
_RULES = {
    "managed": Rule(
        "managed memory", "neither staged mode nor the driver moves it", "Use device memory (cudaMalloc) in its place."
    ),
    "import": Rule(
        "memory imported from another process",
        "the driver would accept the checkpoint and could not restore it",
        "Close the imported memory before the checkpoint.",
    ),
    "export": Rule(
        "memory exported to another process",
        "after a restore the two would no longer share it",
        "Close the shared memory in the other process and free it before the checkpoint.",
    ),
    "descriptor": Rule(
        "a descriptor of shared memory in a process that is not staged",
        "nobody could give it the memory that comes back",
        "Close the descriptor once it has been sent.",
    ),
    "multicast": Rule(
        "a multicast object",
        "neither staged mode nor the driver moves it",
        "Set NCCL_NVLS_ENABLE=0 (NVSHMEM: NVSHMEM_DISABLE_NVLS=1), or release it first.",
    ),
    "ipc-exported": Rule(
        "memory offered to other processes by a legacy IPC handle",
        "after a restore the two processes would no longer share it",
        "Free it before the checkpoint, or do not call cudaIpcGetMemHandle.",
    ),
    "ipc-opened": Rule(
        "memory of another process, opened by a legacy IPC handle",
        "the driver would accept the checkpoint and could not restore it",
        "Close it (cudaIpcCloseMemHandle) before the checkpoint.",
    ),
    "ipc-event": Rule(
        "an event shared with another process by a legacy IPC handle",
        "it stays with the driver, which keeps it",
        "Nothing, where both processes and /dev/shm are the container's own.",
        is_kept=True,
    ),
    "host-vmm": Rule(
        "host memory of cuMemCreate",
        "the driver would accept the checkpoint and could not restore it",
        "Set NCCL_CUMEM_HOST_ENABLE=0 when the processes start (NCCL then uses /dev/shm), or release it first.",
    ),
    "fabric": Rule(
        "memory shared by a fabric handle",
        "nobody can say who has it, nor whether it comes back",
        "Set NCCL_MNNVL_ENABLE=0 when the processes start, or release it first.",
    ),
    "pool-shared": Rule(
        "a memory pool shared with another process",
        "after a restore the two processes would no longer share it",
        "Destroy the pool before the checkpoint.",
    ),
    "external-memory": Rule(
        "memory of another API (cuImportExternalMemory)",
        "neither staged mode nor the driver brings it back",
        "Destroy the external memory before the checkpoint.",
    ),
    "dmabuf": Rule(
        "memory exported as a dma-buf",
        "after a restore the other side would no longer share it",
        "Close the dma-buf and free the memory before the checkpoint.",
    ),
    "unknown-call": Rule(
        "memory from a call that this version does not know",
        "nobody can say whether it comes back",
        "Use a newer vgpu-snapshot.",
    ),
    "more": Rule("further objects", "the list of blockers is full", "Mend those that are named first."),
    "vmm": Rule(
        "VMM memory in a form that staged mode does not move",
        "the driver's own checkpoint takes it",
        "Nothing; it is slower.",
        is_for_driver=True,
    ),
    "capture": Rule(
        "a stream capture in progress",
        "work that is being captured cannot be stopped half way",
        "Wait until the capture has ended.",
        is_passing=True,
    ),
}
# A kind that a newer preload names: what it means for the driver is not known, so nothing is risked.
_OTHER = Rule("something that cannot be moved", "this version does not know it", "Use a newer vgpu-snapshot.")


def rule_of(kind: str) -> Rule:
    """The rule of a kind; one that this version does not know is refused."""
    return _RULES.get(kind, _OTHER)


def grave(blockers: Iterable[Blocker]) -> list[Blocker]:
    """Those with which no checkpoint of the process can be taken at all."""
    return [blocker for blocker in blockers if _is_grave(rule_of(blocker.kind))]


def for_driver(blockers: Iterable[Blocker]) -> list[Blocker]:
    """Those for which the process is left to the driver's own checkpoint."""
    return [blocker for blocker in blockers if rule_of(blocker.kind).is_for_driver]


def is_passing(blocker: Blocker) -> bool:
    """It goes away by itself; the process is waited for."""
    return rule_of(blocker.kind).is_passing


def _is_grave(rule: Rule) -> bool:
    return not (rule.is_for_driver or rule.is_passing or rule.is_kept)


def sentence(blocker: Blocker) -> str:
    """The object by owner-facing name, size and address, and the rule that it breaks."""
    rule = rule_of(blocker.kind)
    size = f" of {blocker.bytes} bytes" if blocker.bytes else ""
    place = f" at {blocker.va:#x}" if blocker.va else ""
    more = f" ({blocker.what})" if blocker.what else ""
    return f"{rule.what}{size}{place}{more}: {rule.why}"
