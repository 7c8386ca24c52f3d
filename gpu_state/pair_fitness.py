"""Judges the requirements on pairs of GPUs: whether the places that the recorded ones get are connected as they need.

Pure, like fitness.py, which calls it and makes the placement. What nobody knows is told and forbids nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpu_state import gpu_pairs
from gpu_state.finding import Finding, level_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from gpu_state.node_facts import NodeFacts
    from gpu_state.nvml_links import Link
    from image_format.record import Record, Requirement


MAX_SHOWN = 200
PAIRS_SHOWN = 4


@dataclass(frozen=True, slots=True)
class _PairRule:
    """How a requirement on pairs of GPUs is told."""

    holds: Callable[[Link | None], bool | None]
    what: str
    unknown: str
    remedy: str


_RULES = {
    gpu_pairs.PEERS: _PairRule(
        gpu_pairs.reaches,
        "The processes use memory of one GPU from another, which these GPUs cannot",
        "Nothing tells whether the GPUs here reach each other's memory",
        "Restore on a node whose GPUs are peers; 'nvidia-smi topo -p2p rw' shows them.",
    ),
    gpu_pairs.NVLINK: _PairRule(
        gpu_pairs.is_linked,
        "GPUs that were connected by NVLink are not here, so that their exchange is slower",
        "Nothing tells whether NVLink connects the GPUs here",
        "Prefer a node with NVLink between them; 'nvidia-smi topo -m' shows it.",
    ),
}
PAIR_KEYS = frozenset(_RULES)


def pair_findings(
    requirement: Requirement, record: Record, placed: Mapping[str, str], facts: NodeFacts
) -> list[Finding]:
    """The pairs that do not hold where the GPUs go, in one finding, and those of which nobody knows in another."""
    rule = _RULES.get(requirement.key)
    if rule is None:
        return []
    pairs = gpu_pairs.pairs_in(requirement.value, len(record.devices))
    if pairs is None:
        return [_not_understood(requirement)]
    names = [(record.devices[a].uuid, record.devices[b].uuid) for a, b in pairs]
    homes = [(placed[a], placed[b]) for a, b in names if a in placed and b in placed]
    links = gpu_pairs.by_pair(facts.links)
    told = {pair: rule.holds(links.get(frozenset(pair))) for pair in homes}
    broken = [pair for pair, holds in told.items() if holds is False]
    unsaid = [pair for pair, holds in told.items() if holds is None]
    found = []
    if broken:
        here = f"not {_text(broken)}"
        found.append(Finding(requirement.key, level_of(requirement), _text(names), here, rule.what, rule.remedy))
    if unsaid:
        remedy = "Give the node agent the driver's libnvidia-ml.so.1."
        found.append(Finding(requirement.key, "should", _text(unsaid), "unknown", rule.unknown, remedy))
    return found


def _not_understood(requirement: Requirement) -> Finding:
    return Finding(
        requirement.key, level_of(requirement), str(requirement.value)[:MAX_SHOWN], "unknown",
        f"This version does not understand what the requirement {requirement.key} says",
        "Use a newer vgpu-snapshot on this node.",
    )  # fmt: skip


def _text(pairs: Sequence[tuple[str, str]]) -> str:
    shown = ", ".join(" with ".join(pair) for pair in pairs[:PAIRS_SHOWN])
    return shown if len(pairs) <= PAIRS_SHOWN else f"{shown} and {len(pairs) - PAIRS_SHOWN} more pairs"
