"""Compares a checkpoint's requirements with a node and maps its GPUs onto the node's (spec/record.md, `requirements`).

Pure: a record and facts in, findings out. Looks at no file, no driver, no clock; refuses nothing by itself.
Called by the runtime shim before a restore, by `vgpu doctor`, and (requirements_from) when a record is written.

Driver rule: in driver mode the GPU state is an image private to one driver release. NVIDIA documents no guarantee across
releases (and container mounts name versioned library files), so "driver.release" must be equal until a pair is measured.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from gpu_state.node_facts import NodeFacts
    from gpu_state.processes import GpuProcess
    from image_format.record import DeviceEntry, Record

    _Checker: TypeAlias = Callable[[str, Any, "Level", NodeFacts], "Finding | None"]

from gpu_state import gpu_pairs
from gpu_state.finding import Finding, Level, level_of
from gpu_state.pair_fitness import PAIR_KEYS, pair_findings
from image_format.record import Requirement

__all__ = [
    "Finding",
    "device_map",
    "findings",
    "group_requirements",
    "musts",
    "requirements_from",
    "user_flags",
    "version_tuple",
]

# Flags that user code can execute by; the rest (mitigations, virtualisation, power) differs between equal machines.
_USER_FLAGS = re.compile(
    r"^(mmx|sse.*|ssse3|pni|avx.*|amx.*|bmi[12]|aes|vaes|v?pclmulqdq|sha_ni|sha512|sm[34]|gfni|fma4?|f16c|popcnt|abm|movbe|adx"
    r"|rdrand|rdseed|cx16|cx8|cmov|fsgsbase|xsave.*|pku|ospke|clflush.*|clwb|cldemote|movdiri|movdir64b|serialize|rdpid|rdtscp"
    r"|waitpkg|rtm|hle|lahf_lm|3dnow.*|xop|tbm|user_shstk)$"
)
ARM_MACHINES = ("aarch64", "arm64")


def findings(record: Record, facts: NodeFacts, free_bytes: Mapping[str, int] | None = None) -> list[Finding]:
    """Every requirement that `facts` does not meet, all at once; an empty list means the node is fit.

    `free_bytes` (device uuid -> free device memory now) adds the memory check: a driver restore that runs out of
    device memory cannot be undone on real drivers, so it must not be tried.
    """
    plain = [requirement for requirement in record.requirements if requirement.key not in PAIR_KEYS]
    found = [finding for requirement in plain if (finding := _check(requirement, facts)) is not None]
    found += _device_findings(record, facts)
    if free_bytes is not None and not any(finding.key.startswith("gpu.") for finding in musts(found)):
        found += _memory_findings(record, device_map(record, facts), free_bytes)
    return found


def musts(found: Iterable[Finding]) -> list[Finding]:
    """Those findings that forbid the restore."""
    return [finding for finding in found if finding.level == "must"]


def device_map(record: Record, facts: NodeFacts) -> dict[str, str]:
    """Old uuid -> new uuid for every recorded GPU; empty where each is present and nothing has to move.

    A GPU that is present keeps its place; the others go, in recorded order, to the node's free GPUs of the same model,
    unless more pairs of `gpu.peers` and `gpu.nvlink` hold another way. The driver wants all checkpointed GPUs named or none. GPUs that find no place are left out (see `findings`).
    """
    placed = _placed(record, facts)
    return {} if all(old == new for old, new in placed.items()) else placed


def requirements_from(
    facts: NodeFacts,
    processes: Sequence[GpuProcess],
    *,
    preload_build: str | None = None,
) -> list[Requirement]:
    """The record's `requirements` for a checkpoint taken on this node; `preload_build` is `<libc>/<build-id>`."""
    used = {uuid for process in processes for uuid in process.devices}
    listed: list[tuple[str, Any, Level]] = [
        ("machine", facts.machine, "must"),
        ("cgroup.version", facts.cgroup_version, "must"),
        ("kernel.version", facts.kernel, "should"),
        ("cpu.flags", user_flags(facts.cpu_flags, facts.machine), "must"),
        ("criu.version", facts.criu_version, "must"),
    ]
    if facts.runtime is not None:
        listed += [("runtime.name", facts.runtime.name, "must"), ("runtime.version", facts.runtime.version, "should")]
    if processes:
        listed += [
            ("driver.release", facts.driver_release, "must"),
            ("cuda.version", facts.cuda_version, "must"),
            ("gpu.count", len(used) or len(facts.devices), "must"),
        ]
    listed.append(("preload.build", preload_build, "must"))
    return [Requirement(key, value, level) for key, value, level in listed if value is not None]


def group_requirements(record: Record, facts: NodeFacts) -> list[Requirement]:
    """What several GPUs and the libraries between them need, of a record whose objects and communicators are there."""
    versions = sorted({entry.version for entry in record.communicators if entry.library == "nccl"}, key=version_tuple)
    listed: list[tuple[str, Sequence[str], Level]] = [
        (gpu_pairs.PEERS, gpu_pairs.pair_texts(gpu_pairs.peer_pairs(record)), "must"),
        (gpu_pairs.NVLINK, gpu_pairs.pair_texts(gpu_pairs.nvlink_pairs(record, facts)), "should"),
        ("nccl.version", tuple(versions), "should"),
    ]
    return [Requirement(key, value, level) for key, value, level in listed if value]


def user_flags(flags: Sequence[str], machine: str) -> list[str]:
    """The CPU flags that a process may have chosen its code by."""
    return [flag for flag in flags if machine in ARM_MACHINES or _USER_FLAGS.match(flag)]


def _check(requirement: Requirement, facts: NodeFacts) -> Finding | None:
    level = level_of(requirement)
    checker = _CHECKERS.get(requirement.key)
    if checker is None:
        return Finding(
            requirement.key, level, str(requirement.value), "unknown",
            f"This version does not know the requirement {requirement.key}",
            "Use a newer vgpu-snapshot on this node.",
        )  # fmt: skip
    return checker(requirement.key, requirement.value, level, facts)


def _equal(pick: Callable[[NodeFacts], object], what: str, remedy: str) -> _Checker:
    def check(key: str, needed: Any, level: Level, facts: NodeFacts) -> Finding | None:
        found = pick(facts)
        return None if str(found) == str(needed) else Finding(key, level, str(needed), _said(found), what, remedy)

    return check


def _at_least(pick: Callable[[NodeFacts], object], what: str, remedy: str, parts: int = 4) -> _Checker:
    def check(key: str, needed: Any, level: Level, facts: NodeFacts) -> Finding | None:
        found = pick(facts)
        if found is not None and version_tuple(str(found))[:parts] >= version_tuple(str(needed))[:parts]:
            return None
        return Finding(key, level, f"{needed} or newer", _said(found), what, remedy)

    return check


def _gpu_count(key: str, needed: Any, level: Level, facts: NodeFacts) -> Finding | None:
    if isinstance(needed, int) and 0 <= needed <= len(facts.devices):
        return None
    return Finding(
        key, level, str(needed), str(len(facts.devices)), "This node has too few GPUs",
        "Restore on a node with as many GPUs of the same model.",
    )  # fmt: skip


def _cpu_flags(key: str, needed: Any, level: Level, facts: NodeFacts) -> Finding | None:
    wanted = needed if isinstance(needed, list | tuple) else [needed]
    missing = sorted({str(flag) for flag in wanted} - set(facts.cpu_flags))
    if not missing:
        return None
    return Finding(
        key, level, " ".join(missing), "absent", "This CPU lacks features that the processes may use",
        "Restore on a node with the same or a newer CPU generation.",
    )  # fmt: skip


def _preload_build(key: str, needed: Any, level: Level, facts: NodeFacts) -> Finding | None:
    if needed in facts.preload_builds:
        return None
    return Finding(
        key, level, str(needed), ", ".join(facts.preload_builds) or "none",
        "The preload library that is mapped in the processes is not on this node",
        "Install the vgpu-snapshot version that made the checkpoint beside this one; CRIU maps that very file again.",
    )  # fmt: skip


def _nccl_version(key: str, needed: Any, level: Level, facts: NodeFacts) -> Finding | None:
    wanted = [str(version) for version in needed] if isinstance(needed, list | tuple) else [str(needed)]
    if (
        facts.nccl_version is None or facts.nccl_version in wanted
    ):  # a container brings its own unless the node gives one
        return None
    return Finding(
        key, level, ", ".join(wanted), facts.nccl_version,
        "This node's NCCL is another version than the one that the processes have loaded",
        "Make sure that the container does not mount NCCL from the node, or install that version here.",
    )  # fmt: skip


_CHECKERS: dict[str, _Checker] = {
    "machine": _equal(
        lambda facts: facts.machine,
        "The checkpoint is from another processor architecture",
        "Restore on a node of that architecture.",
    ),
    "cgroup.version": _equal(
        lambda facts: facts.cgroup_version,
        "The cgroup layout differs",
        "Boot this node with the same cgroup version (systemd.unified_cgroup_hierarchy).",
    ),
    "kernel.version": _at_least(
        lambda facts: facts.kernel,
        "The kernel is older than the one the processes ran on",
        "Prefer a node with the same or a newer kernel.",
        parts=2,
    ),
    "cpu.flags": _cpu_flags,
    "criu.version": _at_least(
        lambda facts: facts.criu_version,
        "CRIU is missing or too old to read these images",
        "Install that CRIU or newer.",
    ),
    "runtime.name": _equal(
        lambda facts: None if facts.runtime is None else facts.runtime.name,
        "The low-level runtime is another one; runc and crun cannot read each other's checkpoints",
        "Set 'low_level_runtime' in /etc/vgpu/runtime.conf to that runtime.",
    ),
    "runtime.version": _at_least(
        lambda facts: None if facts.runtime is None else facts.runtime.version,
        "The low-level runtime is older than the one that made the checkpoint",
        "Install that version or newer.",
        parts=2,
    ),
    "driver.release": _equal(
        lambda facts: facts.driver_release,
        "The NVIDIA driver is another release; GPU state made by one release is only known to load into the same",
        "Restore on a node with that driver release.",
    ),
    "cuda.version": _at_least(
        lambda facts: facts.cuda_version,
        "The driver's CUDA version is older than the one the processes use",
        "Install a newer NVIDIA driver.",
    ),
    "gpu.count": _gpu_count,
    "nccl.version": _nccl_version,
    "preload.build": _preload_build,
}


def _device_findings(record: Record, facts: NodeFacts) -> list[Finding]:
    placed = _placed(record, facts)
    found = [_homeless(device, facts) for device in record.devices if device.uuid not in placed]
    for requirement in record.requirements:
        found += pair_findings(requirement, record, placed, facts)
    return found


def _homeless(device: DeviceEntry, facts: NodeFacts) -> Finding:
    same_model = [d for d in facts.devices if d.name == device.name]
    if any(d.memory_bytes < device.memory_bytes for d in same_model):
        return Finding(
            "gpu.memory", "must", f"{device.memory_bytes} bytes",
            ", ".join(str(d.memory_bytes) for d in same_model),
            f"The {device.name} here is smaller than recorded, or already taken by another recorded GPU",
            "Restore on a node whose GPUs have that much memory.",
        )  # fmt: skip
    return Finding(
        "gpu.model", "must", f"{device.name} for {device.uuid}",
        ", ".join(d.name for d in facts.devices) or "no GPU",
        "No GPU of the same model is free for a recorded one",
        "Restore on a node with that model; the driver restores onto the same chip only.",
    )  # fmt: skip


def _placed(record: Record, facts: NodeFacts) -> dict[str, str]:
    return gpu_pairs.place(record.devices, facts, gpu_pairs.wishes_of(record))


def _memory_findings(record: Record, moves: Mapping[str, str], free_bytes: Mapping[str, int]) -> list[Finding]:
    # A process on several GPUs does not say how much lies on which, so those GPUs are judged by their sum.
    needed: dict[tuple[str, ...], int] = {}
    for process in record.processes:
        homes = tuple(sorted(moves.get(uuid, uuid) for uuid in process.devices))
        needed[homes] = needed.get(homes, 0) + (process.gpu_bytes or 0)
    known = [homes for homes in needed if homes and all(uuid in free_bytes for uuid in homes)]
    free = {homes: sum(free_bytes[uuid] for uuid in homes) for homes in known}
    return [_too_full(homes, needed[homes], free[homes]) for homes in known if needed[homes] > free[homes]]


def _too_full(homes: tuple[str, ...], wanted: int, free: int) -> Finding:
    return Finding(
        "gpu.free", "must", f"{wanted} bytes", f"{free} bytes",
        f"Too little device memory is free on {', '.join(homes)}",
        "Free device memory there or restore on another node.",
    )  # fmt: skip


def version_tuple(text: str) -> tuple[int, ...]:
    """The leading dotted numbers of a version: "6.18.44-2-amd64" -> (6, 18, 44)."""
    match = re.match(r"\d{1,18}(?:\.\d{1,18})*", text.strip())
    return tuple(int(part) for part in match.group(0).split(".")) if match else ()


def _said(found: object) -> str:
    return "none" if found is None else str(found)
