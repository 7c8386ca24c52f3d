"""The keys of dockerd's daemon.json that register `vgpu-runtime` (dockerd(8), "daemon configuration file").

Docker reads one file and no drop-ins, so the keys are merged into what the administrator wrote; every other key, and the
order of all, stays. A key that is there already is the administrator's: it is kept, and it is not ours to take back.
Pure: a document in, the merged one and the list of the added keys out. Called by `vgpu setup docker`.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from docker_integration import json_keys
from docker_integration.json_keys import Key, NotATable
from vgpu_errors import BadConfiguration

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PATH = "/etc/docker/daemon.json"
RUNTIME_NAME = "vgpu-runtime"
RUNTIME_PATH = "/usr/bin/vgpu-runtime"

RUNTIME: Key = ("runtimes", RUNTIME_NAME)
DEFAULT_RUNTIME: Key = ("default-runtime",)
# `docker checkpoint` and `docker start --checkpoint` are refused without.
EXPERIMENTAL: Key = ("experimental",)
# `--device vgpu.snapshot/gpu=all`; on by itself from Docker 28.3 on.
CDI: Key = ("features", "cdi")


@dataclass(frozen=True)
class Merged:
    """daemon.json with our keys in it."""

    text: str
    added: tuple[tuple[Key, Any], ...]
    """What was not there before, with its value; undo takes out these and no others."""
    notes: tuple[str, ...] = ()
    """What the administrator's own keys stand in the way of."""


def merge(
    found: Mapping[str, Any], *, is_default_runtime: bool = False, ours: Sequence[tuple[Key, Any]] = ()
) -> Merged:
    """Add what is missing; `ours` is what an earlier setup added and nobody changed since."""
    document: dict[str, Any] = copy.deepcopy(dict(found))
    wanted = _wanted(is_default_runtime=is_default_runtime)
    try:
        stale = [key for key, value in ours if key not in wanted and json_keys.get(document, key) == value]
        for key in stale:
            json_keys.take_out(document, key)
        added = [(key, value) for key, value in wanted.items() if _is_ours_to_set(document, key, ours)]
        for key, value in added:
            json_keys.put(document, key, value)
        notes = _notes(document, wanted)
    except NotATable as error:
        raise BadConfiguration(path=PATH, what=f"has no table at '{error}'") from error
    return Merged(json_keys.to_text(document), tuple(added), notes)


def _wanted(*, is_default_runtime: bool) -> dict[Key, Any]:
    wanted: dict[Key, Any] = {RUNTIME: {"path": RUNTIME_PATH}, EXPERIMENTAL: True, CDI: True}
    return {**wanted, DEFAULT_RUNTIME: RUNTIME_NAME} if is_default_runtime else wanted


def _is_ours_to_set(document: Mapping[str, Any], key: Key, ours: Sequence[tuple[Key, Any]]) -> bool:
    value = json_keys.get(document, key)
    return value is None or (key, value) in ours


def _notes(document: Mapping[str, Any], wanted: Mapping[Key, Any]) -> tuple[str, ...]:
    runtime = json_keys.get(document, RUNTIME)
    if not isinstance(runtime, dict) or runtime.get("path") != RUNTIME_PATH:
        raise BadConfiguration(
            path=PATH,
            what=f"registers {RUNTIME_NAME} as something else than {RUNTIME_PATH}",
            remedy=f"Take 'runtimes.{RUNTIME_NAME}' out of it and run the setup again.",
        )
    kept = [key for key, value in wanted.items() if key != RUNTIME and json_keys.get(document, key) != value]
    return tuple(f"{PATH} has its own '{'.'.join(key)}', which stays: {_WHAT_IS_LOST[key]}" for key in kept)


_WHAT_IS_LOST = {
    EXPERIMENTAL: "without it Docker refuses every 'docker checkpoint' command.",
    CDI: "without it '--device vgpu.snapshot/gpu=all' does not work before Docker 28.3.",
    DEFAULT_RUNTIME: "containers need '--runtime vgpu-runtime'.",
}
