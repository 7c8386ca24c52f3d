"""What CRIU will be told at a checkpoint, and the refusal of what it would then refuse, before anything is frozen.

Reads the options of the runtime call and CRIU's configuration files as runc and crun choose them; changes neither. Lets
everything through that CRIU takes along with these options, and looks again for a while where something passes by itself.
The rules are gpu_state/host_ties.py; the agent has looked (spec/agent-protocol.md, "inventory"). Called by checkpoint.py and,
without a call, by `vgpu doctor CONTAINER`.
"""

from __future__ import annotations

import os
import shutil
import time
from typing import TYPE_CHECKING, Any

from gpu_state.fitness import version_tuple
from gpu_state.host_ties import GHOST_LIMIT_BYTES, CriuSide, Finding, Tie, judge_all, refused
from vgpu_errors import HostTieBlocks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gpu_state.node_facts import NodeFacts, RuntimeFacts
    from runtime_shim.arguments import Arguments

CONFIG_FOLDER = "/etc/criu"
DEFAULT_FILE = "default.conf"
CRUN_WITH_CONFIG_FILE = (1, 26)
RUNC_WITH_LINK_REMAP = (1, 3)
ANNOTATION = "org.criu.config"
SHM = "/dev/shm"  # noqa: S108 - the container's, as a mount point
PASSES_S = 2.0
LOOK_AGAIN_S = 0.2
_MAX_CONFIG_BYTES = 1 << 20
# What the runtimes call it -> what CRIU calls it.
_RUNTIME_OPTIONS = {
    "tcp-established": "tcp-established",
    "tcp-close": "tcp-close",
    "tcp-skip-in-flight": "skip-in-flight",
    "ext-unix-sk": "ext-unix-sk",
    "file-locks": "file-locks",
    "link-remap": "link-remap",
}
_ALWAYS_SENT = ("tcp-established", "tcp-close", "ext-unix-sk", "file-locks")
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_LOCKS_WITHOUT_IPTABLES = ("nftables", "skip")


def criu_side(
    call: Arguments | None,
    runtime: RuntimeFacts,
    config: Mapping[str, Any],
    facts: NodeFacts,
    engine: str,
    folder: str = CONFIG_FOLDER,
) -> CriuSide:
    """What CRIU is told in this call; without one, what it would be told by an engine that adds nothing."""
    default, named = f"{folder}/{DEFAULT_FILE}", config_file(runtime, config, folder)
    sent = _sent_by(runtime)
    told = {name: value for name, value in options_in(_text(default)).items() if name not in sent}
    told |= options_in(_text(named)) if named else {}
    names = {name for written, name in _RUNTIME_OPTIONS.items() if call is not None and call.has(written)}
    lock = told.get("network-lock") or (call.get("network-lock") if call is not None else None)
    return CriuSide(
        options=frozenset(names | set(told)),
        ghost_limit_bytes=size_of(told.get("ghost-limit", "")),
        can_lock_network=lock in _LOCKS_WITHOUT_IPTABLES or shutil.which("iptables-restore") is not None,
        version=version_tuple(facts.criu_version or ""),
        kernel=version_tuple(facts.kernel)[:2],
        engine=engine,
        config_file=named or default,
        carries_shm=carries_shm(config),
        leaves_running=call is not None and call.has("leave-running"),
    )


def config_file(runtime: RuntimeFacts, config: Mapping[str, Any], folder: str = CONFIG_FOLDER) -> str | None:
    """The file that the low-level runtime names to CRIU; None where it names none, and CRIU's own default is left.

    runc: libcontainer/criu_linux.go, handleCriuConfigurationFile; crun: src/libcrun/criu.c, handle_criu_config_file.
    """
    if runtime.name == "crun" and version_tuple(runtime.version) < CRUN_WITH_CONFIG_FILE:
        return None
    annotation = (config.get("annotations") or {}).get(ANNOTATION)
    if annotation is not None:
        return str(annotation) or None
    crun = f"{folder}/crun.conf"
    return crun if runtime.name == "crun" and os.path.exists(crun) else f"{folder}/runc.conf"  # noqa: PTH110


def _sent_by(runtime: RuntimeFacts) -> tuple[str, ...]:
    """What the runtime tells CRIU at every call, yes or no, so that a line in CRIU's own default file counts for nothing."""
    is_new_runc = runtime.name == "runc" and version_tuple(runtime.version) >= RUNC_WITH_LINK_REMAP
    return (*_ALWAYS_SENT, *(("link-remap", "skip-in-flight") if is_new_runc else ()))


def options_in(text: str) -> dict[str, str]:
    """Option -> value of a CRIU configuration file: one a line, `name`, `name value` or `name=value`, comments with #."""
    found = {}
    for line in text.splitlines():
        words = line.partition("#")[0].strip().replace("=", " ", 1).split(maxsplit=1)
        if words:
            found[words[0].removeprefix("--")] = words[1].strip("\"' ") if len(words) > 1 else ""
    return found


def size_of(text: str) -> int:
    """A size as CRIU writes it, `64M`; what is none leaves CRIU's own."""
    number, unit = (text[:-1], _UNITS[text[-1].upper()]) if text[-1:].upper() in _UNITS else (text, 1)
    return int(number) * unit if number.isdigit() else GHOST_LIMIT_BYTES


def carries_shm(config: Mapping[str, Any]) -> bool:
    """Whether /dev/shm is in the checkpoint: CRIU dumps the container's own tmpfs, podman packs the one that it made."""
    mounts = [mount for mount in config.get("mounts") or () if mount.get("destination") == SHM]
    if not mounts or mounts[-1].get("type") == "tmpfs":
        return True
    return str(mounts[-1].get("source", "")).endswith("/userdata/shm")


def refuse_what_criu_refuses(
    found: Mapping[str, Any],
    look: Callable[[], Mapping[str, Any]],
    side: CriuSide,
    container: str,
    *,
    passes_s: float = PASSES_S,
) -> list[Finding]:
    """Raise for what CRIU would refuse of an inventory; the findings otherwise.

    `look` brings another one while all that is in the way passes by itself. An older agent's inventory tells of nothing.
    """
    ends_at = time.monotonic() + passes_s
    while True:
        findings = judge_all(map(Tie.from_json, found.get("host_ties") or ()), side)
        grave = refused(findings)
        if not grave:
            return findings
        if not all(finding.passes for finding in grave) or time.monotonic() >= ends_at:
            raise _error(grave, container)
        time.sleep(LOOK_AGAIN_S)
        found = look()


def _error(grave: list[Finding], container: str) -> HostTieBlocks:
    first, *others = grave
    tie = first.tie
    error = HostTieBlocks(pid=tie.pid, comm=tie.comm, container=container, what=first.text, remedy=first.remedy)
    for finding in others:
        error.add_note(f"Process {finding.tie.pid} holds {finding.text}; {finding.remedy.removesuffix('.')}")
    return error


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:  # noqa: PTH123 - a bounded read
            return file.read(_MAX_CONFIG_BYTES)
    except OSError:
        return ""
