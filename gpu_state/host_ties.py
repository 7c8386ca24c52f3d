"""What a container's processes hold of the host beside GPU memory, and what that means for CRIU: restored, or named with a remedy.

Pure: ties in, findings out; host_ties_found.py looks at /proc, runtime_shim/host_side.py knows CRIU's options. Refuses nothing
by itself, and calls nothing refused that CRIU takes along: the rules are in host_tie_rules.py. Called by the runtime shim before the freeze and by `vgpu doctor CONTAINER`.
docs/multi-gpu.md lists the same for users; the wire form is in spec/agent-protocol.md, "inventory".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from gpu_state.host_tie_rules import Rule, rule_of

if TYPE_CHECKING:
    from collections.abc import Iterable

Outcome = Literal["refused", "note", "restored"]

MIB = 1 << 20
GHOST_LIMIT_BYTES = 1 * MIB  # criu/include/cr_options.h, DEFAULT_GHOST_LIMIT
# Linux 6.16 refuses SO_PASSCRED of other sockets than Unix and netlink ones; CRIU asked for it of all of them until 4.2
# (its commit 4b7398595, "Restrict SO_PASSCRED and SO_PASSSEC to supported families").
KERNEL_WITHOUT_PASSCRED = (6, 16)
CRIU_WITHOUT_PASSCRED = (4, 2)
# What the engines hand on from their own command line; everything else has to stand in CRIU's configuration file.
_ENGINE_OPTIONS = ("tcp-established", "file-locks")
_ENGINE_COMMANDS = {
    "podman": "'podman container checkpoint' and to 'podman container restore'",
    "containerd": "'vgpu containerd checkpoint'",
}


@dataclass(frozen=True, slots=True)
class Tie:
    """Things of one kind that one process holds; `what` is the first of them, `bytes` the largest."""

    kind: str
    pid: int
    ns_pid: int
    comm: str
    what: str
    bytes: int = 0
    count: int = 1

    @classmethod
    def from_json(cls, doc: dict[str, Any]) -> Tie:
        """Read what the agent sent."""
        kind, comm, what = (str(doc[key]) for key in ("kind", "comm", "what"))
        pid, ns_pid, size, count = (int(doc[key]) for key in ("pid", "ns_pid", "bytes", "count"))
        return cls(kind, pid, ns_pid, comm, what, size, count)

    def to_json(self) -> dict[str, Any]:
        """The form in the agent's answer."""
        return {
            "kind": self.kind,
            "pid": self.pid,
            "ns_pid": self.ns_pid,
            "comm": self.comm,
            "what": self.what,
            "bytes": self.bytes,
            "count": self.count,
        }


@dataclass(frozen=True, slots=True)
class CriuSide:
    """What CRIU will be told, and where: the options of this call and of CRIU's configuration files."""

    options: frozenset[str] = frozenset()
    ghost_limit_bytes: int = GHOST_LIMIT_BYTES
    can_lock_network: bool = True
    version: tuple[int, ...] = ()
    kernel: tuple[int, ...] = ()
    engine: str = "unknown"
    config_file: str = "/etc/criu/runc.conf"
    carries_shm: bool = True
    leaves_running: bool = False


@dataclass(frozen=True, slots=True)
class Finding:
    """One tie, judged."""

    tie: Tie
    outcome: Outcome
    text: str
    remedy: str = ""
    passes: bool = False
    by_engine_option: bool = False


def judge(tie: Tie, side: CriuSide) -> Finding:
    """What becomes of it with these options."""
    rule = rule_of(tie.kind)
    special = _SPECIAL.get(tie.kind)
    if special is not None and (finding := special(tie, rule, side)) is not None:
        return finding
    if rule.severity == "option":
        return _by_option(tie, rule, side)
    if rule.severity == "restored":
        return Finding(tie, "restored", _named(tie, rule))
    return Finding(tie, rule.severity, _sentence(tie, rule), _full_stop(rule.remedy), passes=rule.passes)


def judge_all(ties: Iterable[Tie], side: CriuSide) -> list[Finding]:
    """Each of them, in the order found."""
    return [judge(tie, side) for tie in ties]


def refused(findings: Iterable[Finding]) -> list[Finding]:
    """Those that CRIU would refuse."""
    return [finding for finding in findings if finding.outcome == "refused"]


def summary(findings: Iterable[Finding]) -> str:
    """What is restored, by kind: "2 x a file lock, 1 x memory of memfd_create"; empty where there is nothing."""
    counts: dict[str, int] = {}
    for finding in findings:
        if finding.outcome == "restored" and finding.tie.kind != "inet":
            counts[finding.tie.kind] = counts.get(finding.tie.kind, 0) + finding.tie.count
    return ", ".join(f"{count} x {rule_of(kind).what}" for kind, count in sorted(counts.items()))


# ---- kinds that depend on more than one option --------------------------------------------------------


def _by_option(tie: Tie, rule: Rule, side: CriuSide) -> Finding:
    if rule.option not in side.options:
        why = "; ".join(part for part in (f"CRIU refuses it without the option {rule.option}", rule.why) if part)
        return _refused_for_option(tie, rule, rule.option, why, side)
    if rule.option == "tcp-established" and not side.can_lock_network:
        # criu/netfilter.c runs iptables-restore and ip6tables-restore unless told otherwise.
        return Finding(
            tie, "refused", f"{_named(tie, rule)}: CRIU locks it with iptables, which is not installed",
            f"Install iptables, or write the line 'network-lock nftables' into {side.config_file}.",
        )  # fmt: skip
    outcome: Outcome = "note" if rule.why and not rule.passes else "restored"
    return Finding(tie, outcome, _sentence(tie, rule), _full_stop(rule.remedy) if outcome == "note" else "")


def _inet(tie: Tie, rule: Rule, side: CriuSide) -> Finding | None:
    if not side.version or side.version >= CRIU_WITHOUT_PASSCRED or side.kernel < KERNEL_WITHOUT_PASSCRED:
        return None
    versions = [".".join(map(str, part)) for part in (side.version, side.kernel)]
    text = f"{_named(tie, rule)}: CRIU {versions[0]} cannot dump any on Linux {versions[1]}"
    return Finding(tie, "refused", text, "Install CRIU 4.2 or newer.")


def _deleted(tie: Tie, rule: Rule, side: CriuSide) -> Finding | None:
    """criu/files-reg.c, dump_ghost_remap: each deleted file up to the limit is in the images, whatever file system it was on."""
    if tie.bytes <= side.ghost_limit_bytes:
        return Finding(tie, "restored", _named(tie, rule))
    limit = side.ghost_limit_bytes / MIB
    why = f"CRIU takes deleted files of up to {limit:g} MiB along (its option ghost-limit)"
    return _refused_for_option(tie, rule, f"ghost-limit {_power_of_two_mib(tie.bytes)}M", why, side, _instead(tie.what))


def _shm(tie: Tie, rule: Rule, side: CriuSide) -> Finding | None:
    if not side.carries_shm:
        return Finding(
            tie, "note", f"{_named(tie, rule)}: this engine's checkpoint has no copy of it, so a restore elsewhere fails",
            _full_stop(_instead(tie.what) or "Unlink it once all processes have it open: then it is in CRIU's images"),
        )  # fmt: skip
    if side.engine == "podman" and side.leaves_running:
        # podman packs /dev/shm itself, after the low-level runtime has returned (libpod, container_internal_common.go).
        return Finding(
            tie, "note", f"{_named(tie, rule)}: podman copies it only after the application goes on",
            "Checkpoint without '--leave-running', or unlink it once all processes have it open.",
        )  # fmt: skip
    return None


_SPECIAL = {"inet": _inet, "deleted-file": _deleted, "shm": _shm}


# ---- words --------------------------------------------------------------------------------------------


def _refused_for_option(tie: Tie, rule: Rule, line: str, why: str, side: CriuSide, instead: str = "") -> Finding:
    is_engines = line in _ENGINE_OPTIONS and side.engine in _ENGINE_COMMANDS
    told = (
        f"Give --{line} to {_ENGINE_COMMANDS[side.engine]}"
        if is_engines
        else f"Write the line '{line}' into {side.config_file}"
    )
    more = rule.remedy or instead
    remedy = _full_stop(told) + (f" {_full_stop(more)}" if more else "")
    return Finding(tie, "refused", f"{_named(tie, rule)}: {why}", remedy, rule.passes, is_engines)


def _instead(what: str) -> str:
    """How the libraries that we know do without."""
    if "/shm/nccl-" in what:
        return "NCCL_SHM_DISABLE=1 keeps NCCL out of /dev/shm, where GPUs reach each other or a network is fast enough"
    if "/shm/cuda.shm." in what:
        return "Destroy the events that processes share by IPC handle (PyTorch makes one for each CUDA tensor that it sends)"
    if "/shm/torch_" in what:
        return "torch.multiprocessing.set_sharing_strategy('file_system') keeps the names of such tensors"
    return ""


def _sentence(tie: Tie, rule: Rule) -> str:
    return f"{_named(tie, rule)}: {rule.why}" if rule.why else _named(tie, rule)


def _named(tie: Tie, rule: Rule) -> str:
    size = f" of {tie.bytes} bytes" if tie.bytes else ""
    more = f" and {tie.count - 1} more" if tie.count > 1 else ""
    example = f" ({tie.what}{more})" if tie.what else more
    return f"{rule.what}{size}{example}"


def _full_stop(text: str) -> str:
    return text if not text or text.endswith(".") else f"{text}."


def _power_of_two_mib(size: int) -> int:
    return 1 << max(0, (size - 1) // MIB).bit_length()
