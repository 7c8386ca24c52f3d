"""The hooks.d documents (hooks.d format 1.0.0, oci-hooks(5)) that make podman call `vgpu-hook`.

They lie in a directory of their own, because CRI-O reads podman's default directory and refuses to start on the
stage `precreate`. They match only containers that ask with the annotation `vgpu.snapshot/inject=true`: a container
run by `vgpu-runtime` is already served by the runtime itself.
Podman ignores a missing hook program without a word, so `vgpu doctor` checks that the program is there.
Called by `vgpu setup podman`; refuses nothing, because the stages are fixed here.
"""

from __future__ import annotations

import json

HOOKS_DIRECTORY = "/etc/vgpu/hooks.d"
HOOK_PROGRAM = "/usr/bin/vgpu-hook"
OPT_IN_ANNOTATION = {r"^vgpu\.snapshot/inject$": "^true$"}

# A hook without `env` inherits the container's own environment in some runtimes: an LD_PRELOAD that the image brings
# would then be loaded by a host program (CVE-2025-23266).
HOOK_ENVIRONMENT = ["PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C.UTF-8"]

# Podman sets no time limit of its own and creates no container while a hook runs.
HOOK_TIMEOUT_S = 20

CLEANING_STAGES = ("createRuntime", "poststop")
INJECTING_STAGE = "precreate"


def hook_document(stage: str, program: str = HOOK_PROGRAM) -> dict[str, object]:
    """One hooks.d document; the stage is also the program's only argument."""
    return {
        "version": "1.0.0",
        "hook": {
            "path": program,
            "args": [program.rsplit("/", 1)[-1], stage],
            "env": list(HOOK_ENVIRONMENT),
            "timeout": HOOK_TIMEOUT_S,
        },
        "when": {"annotations": dict(OPT_IN_ANNOTATION)},
        "stages": [stage],
    }


def hook_files(*, injects: bool, program: str = HOOK_PROGRAM) -> dict[str, str]:
    """Path and text of every hooks.d file; `injects` is for users who keep their own runtime."""
    stages = (INJECTING_STAGE, *CLEANING_STAGES) if injects else CLEANING_STAGES
    return {f"{HOOKS_DIRECTORY}/50-vgpu-{stage.lower()}.json": _text(hook_document(stage, program)) for stage in stages}


def _text(document: dict[str, object]) -> str:
    return json.dumps(document, indent=2) + "\n"
