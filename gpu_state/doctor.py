"""The rules by which `vgpu doctor` judges a node and a container's processes.

Pure: values in, checks out; vgpu_cli/verbs/doctor.py looks at the node. Each check says what was found, and where it is not
good, what to do. Used by that verb alone. docs/operations explains every key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from gpu_state.blockers import rule_of, sentence
from gpu_state.driver import FIRST_VERSION_WITH_CHECKPOINT
from gpu_state.fitness import version_tuple
from gpu_state.host_ties import Finding, summary
from gpu_state.preload_objects import Blocker

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gpu_state.node_facts import NodeFacts, RuntimeFacts

Status = Literal["ok", "warn", "fail"]

FIRST_DRIVER_BRANCH = 570
CRIU_FOR_NEW_KERNELS = (4, 1)
KERNEL_WITH_NEW_VDSO = (6, 13)
RUNC_THAT_CHECKPOINTS_TWICE = (1, 2)
CRIU_PLUGIN_FOLDERS = (
    "/usr/lib/criu",
    "/usr/lib64/criu",
    "/usr/libexec/criu",
    "/usr/local/lib/criu",
    "/usr/lib/x86_64-linux-gnu/criu",
    "/usr/lib/aarch64-linux-gnu/criu",
)
# What `criu check` lacks in a pid namespace or without soft-dirty tracking, and no GPU container needs.
CRIU_CHECK_TOLERATED = ("soft-dirty", "dirty track", "CLONE_PARENT", "autofs")
LITTLE_SPACE_BYTES = 8 << 30


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at."""

    key: str
    status: Status
    what: str
    remedy: str = ""

    def to_json(self) -> dict[str, str]:
        """The entry of `checks` in `--json` output."""
        return {"key": self.key, "status": self.status, "what": self.what, "remedy": self.remedy}


def driver(facts: NodeFacts, problem: str) -> Check:
    """The driver library loads and has the checkpoint calls."""
    if facts.cuda_version is None:
        return Check(
            "driver", "fail", problem or "No NVIDIA driver could be loaded",
            "Install the NVIDIA driver 570 or newer, or set 'driver_dir' in /etc/vgpu/runtime.conf.",
        )  # fmt: skip
    branch = (version_tuple(facts.driver_release or "") or (0,))[0]
    major, minor = (*version_tuple(facts.cuda_version), 0)[:2]
    named = f"driver {facts.driver_release or 'of unknown release'}, CUDA {facts.cuda_version}"
    if branch >= FIRST_DRIVER_BRANCH or (not branch and major * 1000 + minor * 10 >= FIRST_VERSION_WITH_CHECKPOINT):
        return Check("driver", "ok", named)
    return Check("driver", "fail", f"{named} has no checkpoint calls", "Install the NVIDIA driver 570 or newer.")


def device_nodes(nodes: Sequence[str], gpu_count: int) -> Check:
    """The device files that containers are given exist."""
    if gpu_count and not nodes:
        return Check(
            "device nodes", "warn", f"{gpu_count} GPUs, but no /dev/nvidia* files",
            "Run 'nvidia-modprobe -u -c0', or let the NVIDIA container toolkit make them at boot.",
        )  # fmt: skip
    return Check("device nodes", "ok", ", ".join(nodes) or "none, and no GPU either")


def gpu_links(facts: NodeFacts) -> Check | None:
    """How many pairs of GPUs reach each other's memory; None where there is no pair."""
    count = len(facts.devices) * (len(facts.devices) - 1) // 2
    if not count:
        return None
    key, told = "gpu links", [link.reaches for link in facts.links]
    linked = sum(bool(link.nvlinks) for link in facts.links)
    text = f"{told.count(True)} of {count} pairs of GPUs reach each other's memory, {linked} by NVLink"
    unknown = count - told.count(True) - told.count(False)
    if not unknown:
        return Check(key, "ok", text)
    return Check(
        key, "warn", f"{text}; of {unknown} nothing is known",
        "Give the node agent the driver's libnvidia-ml.so.1, so that a restore of processes that share memory can be checked.",
    )  # fmt: skip


def criu(version: str | None, kernel: str) -> Check:
    """CRIU is there and runs on this kernel."""
    if version is None:
        return Check("criu", "fail", "CRIU was not found", "Install CRIU 4.1.1 or newer.")
    if version_tuple(kernel)[:2] >= KERNEL_WITH_NEW_VDSO and version_tuple(version) < CRIU_FOR_NEW_KERNELS:
        return Check(
            "criu", "fail", f"CRIU {version} does not run on kernel {kernel} (it does not know its vDSO)",
            "Install CRIU 4.1.1 or newer.",
        )  # fmt: skip
    return Check("criu", "ok", f"CRIU {version}")


def criu_check(status: int | None, output: str) -> Check:
    """`criu check` says what the kernel lacks; None means that it could not be run or did not end."""
    if status == 0:
        return Check("criu check", "ok", "the kernel has what CRIU needs")
    errors = [line.strip() for line in output.splitlines() if "Error" in line or "Warn" in line]
    grave = [line for line in errors if not any(word in line for word in CRIU_CHECK_TOLERATED)]
    if status is not None and errors and not grave:
        return Check("criu check", "warn", "; ".join(errors), "None of these is needed for a GPU container.")
    said = "; ".join(grave[:3]) or ("it did not end" if status is None else f"status {status}")
    return Check("criu check", "fail", f"criu check: {said}", "Run 'criu check' as root and mend what it names.")


def cuda_plugin(paths: Sequence[str]) -> Check:
    """Whether CRIU brings a GPU plugin of its own."""
    if not paths:
        return Check("criu cuda_plugin", "ok", "none; the agent freezes GPU processes before CRIU looks")
    return Check(
        "criu cuda_plugin", "warn",
        f"{', '.join(paths)}: CRIU also knows GPUs. It must find every process already checkpointed and do nothing",
        "Remove the plugin if a checkpoint fails in it; the agent does its work.",
    )  # fmt: skip


def runtime(found: RuntimeFacts | None) -> Check:
    """The low-level runtime is there and can checkpoint."""
    if found is None:
        return Check(
            "low-level runtime", "fail", "neither runc nor crun was found", "Install runc 1.3 or newer, or crun."
        )
    if found.name == "runc" and version_tuple(found.version)[:2] < RUNC_THAT_CHECKPOINTS_TWICE:
        return Check(
            "low-level runtime", "warn", f"runc {found.version} cannot checkpoint a container that was itself restored",
            "Install runc 1.3 or newer, or use crun.",
        )  # fmt: skip
    return Check("low-level runtime", "ok", f"{found.name} {found.version}")


def libcriu(found: RuntimeFacts | None, is_present: bool) -> Check | None:
    """Crun loads CRIU as a library; runc does not."""
    if found is None or found.name != "crun":
        return None
    if is_present:
        return Check("libcriu", "ok", "libcriu.so.2")
    return Check("libcriu", "fail", "crun needs libcriu.so.2 and does not find it", "Install the package libcriu2.")


def registered_runtime(path: str | None, expected: str) -> Check:
    """Podman knows vgpu-runtime under the path that every checkpoint names."""
    if path is None:
        return Check("podman", "fail", "podman does not know vgpu-runtime", "Run 'vgpu setup podman'.")
    if path != expected:
        return Check(
            "podman", "fail", f"podman has vgpu-runtime at {path}; checkpoints name {expected}",
            "Remove that entry and run 'vgpu setup podman'.",
        )  # fmt: skip
    return Check("podman", "ok", f"vgpu-runtime is registered at {path}")


def cgroup(version: int, has_freezer: bool) -> Check:
    """CRIU and the shim freeze through the cgroup."""
    if has_freezer:
        return Check("cgroup", "ok", f"version {version}, with freezer")
    return Check("cgroup", "fail", f"version {version}, no freezer", "Mount the cgroup2 hierarchy or the v1 freezer.")


def key_file(mode: int | None, owner: int) -> Check:
    """The node key is there and private."""
    if mode is None:
        return Check(
            "node key", "fail", "no /etc/vgpu/node.key, so checkpoints cannot be signed", "Run 'vgpu setup podman'."
        )
    if mode & 0o077 or owner != 0:
        return Check(
            "node key", "fail", f"/etc/vgpu/node.key has mode {mode:04o} and owner {owner}; others may have read it",
            "Make a new key with 'vgpu setup' and keep it 0600 and root's.",
        )  # fmt: skip
    return Check("node key", "ok", "0600, root's")


def preload(builds: dict[str, str | None]) -> Check:
    """Both builds of the preload library are installed."""
    missing = [libc for libc in ("glibc", "musl") if not builds.get(libc)]
    if missing:
        return Check(
            "preload", "warn", f"no preload library for {' and '.join(missing)}",
            "Reinstall vgpu-snapshot; such containers run without registration.",
        )  # fmt: skip
    return Check("preload", "ok", ", ".join(f"{libc} {builds[libc]}" for libc in sorted(builds)))


def space(path: str, free_bytes: int, gpu_bytes: int) -> Check:
    """There is room for a checkpoint: in driver mode the device memory in use ends up in files."""
    needed = max(gpu_bytes, LITTLE_SPACE_BYTES)
    text = f"{path}: {free_bytes / (1 << 30):.1f} GiB free"
    if free_bytes >= needed:
        return Check("space", "ok", text)
    return Check("space", "warn", f"{text}, a checkpoint may need {needed / (1 << 30):.1f} GiB", "Free space there.")


def staging_reserve(wanted_bytes: int, facts: Mapping[str, Any] | None) -> Check | None:
    """The agent keeps what `staging_reserve` asks for; None where it asks for nothing."""
    key, found = "staging reserve", (facts or {}).get("staging_reserve")
    if found is None:
        if not wanted_bytes or facts is None:
            return None
        return Check(key, "warn", "the running agent was started without it", "Restart the agent.")
    text = f"{found['bytes'] / (1 << 30):.1f} GiB, {found['state']}"
    if not found["problem"]:
        return Check(key, "ok", text)
    return Check(
        key, "warn", f"{text}: {found['problem']}",
        "Lower 'staging_reserve', or give the node's memory file system (/dev/shm, or hugetlbfs) that much room.",
    )  # fmt: skip


def blockers(pid: int, comm: str, files: Sequence[str]) -> list[Check]:
    """Device files of the driver's that its own checkpoint does not close; what CRIU refuses is in `host_ties`."""
    named = f"process {pid} ({comm})"
    return [
        Check(f"process {pid}", "fail", f"{named} holds {path}: {why}", remedy)
        for prefix, why, remedy in _BLOCKING_FILES
        for path in sorted(set(files))
        if path.startswith(prefix)
    ]


def host_ties(findings: Sequence[Finding]) -> list[Check]:
    """What the processes hold of the host: what CRIU refuses, what only an option lets through, and what comes back."""
    checks = [_tie(finding) for finding in findings if finding.outcome != "restored"]
    restored = summary(findings)
    return [*checks, *([Check("host side", "ok", f"restored: {restored}")] if restored else [])]


def _tie(finding: Finding) -> Check:
    tie = finding.tie
    # An option of the engine's own command is the caller's choice at the checkpoint; the rest has to be mended first.
    is_grave = finding.outcome == "refused" and not (finding.by_engine_option or finding.passes)
    return Check(
        f"process {tie.pid}", "fail" if is_grave else "warn", f"{tie.comm} holds {finding.text}", finding.remedy
    )


_BLOCKING_FILES = (
    ("/dev/nvidia-caps/", "a MIG instance, which the driver does not checkpoint", "Use a whole GPU."),
    ("/dev/nvidia-fs", "GPUDirect Storage, which the driver does not checkpoint", "Close the GDS files first."),
    ("/dev/nvidia-modeset", "graphics, which the driver does not checkpoint", "Use compute only."),
)


def holdings(pid: int, comm: str, held: Mapping[str, Any]) -> list[Check]:
    """What a preload library in staged mode says of its process: bytes that move, and each object that blocks."""
    key = f"process {pid}"
    if "problem" in held:
        return [Check(key, "warn", f"{comm}: {held['problem']}", "Look again; a busy process answers late.")]
    found = [Blocker.from_json(doc) for doc in held["blockers"]]
    checks = [_blocking(key, comm, blocker) for blocker in found]
    moved, kept = held["object_bytes"] / (1 << 30), held["driver_bytes"] / (1 << 30)
    text = f"{comm}: {held['objects']} objects, {moved:.2f} GiB to move, {kept:.2f} GiB stay with the driver"
    return [*checks, Check(key, "ok", text)]


def _blocking(key: str, comm: str, blocker: Blocker) -> Check:
    rule = rule_of(blocker.kind)
    status: Status = "ok" if rule.is_kept else "warn" if rule.is_for_driver or rule.is_passing else "fail"
    return Check(key, status, f"{comm} holds {sentence(blocker)}", rule.remedy)


UNSEEN = Check(
    "unseen memory",
    "warn",
    "managed memory, host memory of cuMemCreate, and memory exported to or imported from other processes, cannot be seen from "
    "outside in driver mode (descriptors and mappings look alike): the driver refuses the first at the checkpoint, but host and "
    "imported memory only at the restore, where the process is lost",
    "Set NCCL_CUMEM_HOST_ENABLE=0 for NCCL, and take the first checkpoint of a new application with '--leave-running' while nothing is at stake.",
)
