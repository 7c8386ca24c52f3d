"""The containers.conf drop-in that registers `vgpu-runtime` with podman (containers.conf(5)).

Podman's lists are replaced, not extended, by a later file. From 4.7 a list may carry `{append=true}`, which extends
whatever the files before it say; older versions refuse such a list, so for them the effective list is written out.
Pure: documents in, text out. Called by `vgpu setup podman`; the files are read by `existing_settings`.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

DROP_IN_PATH = "/etc/containers/containers.conf.d/50-vgpu.conf"

# The registered name and path are part of every checkpoint: podman refuses an archive whose runtime name it lacks.
RUNTIME_NAME = "vgpu-runtime"
RUNTIME_PATH = "/usr/bin/vgpu-runtime"

FIRST_WITH_APPEND = (4, 7)
DEFAULT_HOOKS_DIRS = ("/usr/share/containers/oci/hooks.d",)
DEFAULT_JSON_RUNTIMES = ("crun", "runc", "kata", "runsc", "youki", "krun", "ocijail")


def drop_in(
    documents: Sequence[Mapping[str, Any]],
    *,
    hooks_directory: str | None,
    can_append: bool,
    is_default_runtime: bool = False,
    registers_runtime: bool = True,
) -> str:
    """The whole text of the drop-in, given the parsed configuration files that podman reads before it."""
    lines = ["# Written by 'vgpu setup podman'; 'vgpu setup podman --undo' removes it.", "", "[engine]"]
    if registers_runtime:
        json_runtimes = _list_text(documents, "runtime_supports_json", DEFAULT_JSON_RUNTIMES, RUNTIME_NAME, can_append)
        lines += ["# Lets podman show the runtime's own error message.", f"runtime_supports_json = {json_runtimes}"]
    if hooks_directory is not None:
        hooks_dirs = _list_text(documents, "hooks_dir", DEFAULT_HOOKS_DIRS, hooks_directory, can_append)
        lines.append(f"hooks_dir = {hooks_dirs}")
    if is_default_runtime:
        lines.append(f'runtime = "{RUNTIME_NAME}"')
    if registers_runtime:
        lines += ["", "[engine.runtimes]", f'{RUNTIME_NAME} = ["{RUNTIME_PATH}"]']
    return "\n".join(lines) + "\n"


def effective_list(documents: Iterable[Mapping[str, Any]], key: str, default: Sequence[str]) -> list[str]:
    """What podman makes of `[engine] key` after reading the documents in order.

    The append attribute stays set for the files that follow, as in podman's own reader.
    """
    values, is_appending = list(default), False
    for document in documents:
        found = document.get("engine", {}).get(key)
        if found is None:
            continue
        for item in found:
            if isinstance(item, dict) and "append" in item:
                is_appending = bool(item["append"])
        strings = [item for item in found if isinstance(item, str)]
        values = values + strings if is_appending else strings
    return values


def _list_text(
    documents: Sequence[Mapping[str, Any]], key: str, default: Sequence[str], ours: str, can_append: bool
) -> str:
    if can_append:
        return f"[{json.dumps(ours)}, {{append=true}}]"
    before = [value for value in effective_list(documents, key, default) if value != ours]
    return json.dumps([*before, ours])
