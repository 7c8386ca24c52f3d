"""What is known of a running container on the host: the content of /run/vgpu/state/<id>.json.

Pure but for one look into /proc/<pid>/cgroup. Refuses nothing: an engine that it does not know is "unknown".
Called by the hook's createRuntime and by the shim after create, run and restore; read by the agent and the commands
(spec/agent-protocol.md).
"""

from __future__ import annotations

import os
import time

from oci_hook.control_directory import is_safe_id
from oci_hook.edits import BUILD_ID_ANNOTATION, LIBC_ANNOTATION
from oci_hook.gpu_detection import GROUP_ANNOTATION
from oci_hook.injection import parse_object, to_bytes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from oci_hook.settings import Settings

CONTAINERD_TASKS = "/io.containerd.runtime.v2.task/"


def new_state(
    *,
    container_id: str,
    bundle: str,
    pid: int,
    root: str | None,
    runtime: str,
    annotations: dict[str, Any],
    build_id: str | None,
    libc: str | None,
) -> dict[str, Any]:
    """The state of a container that has just been created or restored."""
    return {
        "id": container_id,
        "bundle": bundle,
        "pid": pid,
        "cgroup": cgroup_of(pid),
        "root": root,
        "runtime": runtime,
        "engine": engine_of(bundle, root, annotations),
        "group": _text(annotations.get(GROUP_ANNOTATION)),  # whoever uses it looks whether it is a name
        "created": int(time.time()),
        "preload_build_id": build_id,
        "preload_libc": libc,
        "last_checkpoint": None,
        "leave_running": None,
    }


def state_from_hook(settings: Settings, document: bytes) -> tuple[str, bytes] | None:
    """The id and the state file's content from the OCI state that a hook gets on stdin."""
    state = parse_object(document) or {}
    container_id, pid, bundle = str(state.get("id", "")), state.get("pid"), str(state.get("bundle", ""))
    if not is_safe_id(container_id) or not isinstance(pid, int) or pid <= 0:
        return None
    annotations = state.get("annotations")
    annotations = annotations if isinstance(annotations, dict) else {}
    content = new_state(
        container_id=container_id,
        bundle=bundle,
        pid=pid,
        root=None,
        runtime=settings.low_level_runtime or "",
        annotations=annotations,
        build_id=_text(annotations.get(BUILD_ID_ANNOTATION)),
        libc=_text(annotations.get(LIBC_ANNOTATION)),
    )
    return container_id, to_bytes(content)


def engine_of(bundle: str, root: str | None, annotations: dict[str, Any]) -> str:
    """Which engine started the container: by what it writes into the spec, else by where it keeps its bundles."""
    manager = annotations.get("io.container.manager")
    if manager == "cri-o" or any(str(name).startswith("io.kubernetes.cri-o.") for name in annotations):
        return "cri-o"
    if manager == "libpod":
        return "podman"
    if CONTAINERD_TASKS in bundle or "/containerd/" in (root or ""):
        namespace = bundle.partition(CONTAINERD_TASKS)[2].partition("/")[0] or (root or "").rpartition("/")[2]
        return "docker" if namespace == "moby" else "containerd"
    if "/runtime-runc/moby" in (root or ""):
        return "docker"
    if bundle.rstrip("/").endswith("/userdata") and "-containers/" in bundle:
        return "podman"
    return "unknown"


def cgroup_of(pid: int) -> str | None:
    """The container's cgroup path, as the mounted cgroup version names it."""
    try:
        with open(f"/proc/{pid}/cgroup", encoding="utf-8", errors="surrogateescape") as file:  # noqa: PTH123
            text = file.read()
    except OSError:
        return None
    return cgroup_from(text, is_v2=os.path.exists("/sys/fs/cgroup/cgroup.controllers"))  # noqa: PTH110


def cgroup_from(text: str, *, is_v2: bool) -> str | None:
    """Version 2's line; in version 1 the freezer's, since that is what a checkpoint stops."""
    lines = [line.split(":", 2) for line in text.splitlines() if line.count(":") >= 2]
    unified = [path for number, _, path in lines if number == "0"]
    freezer = [path for _, controllers, path in lines if "freezer" in controllers.split(",")]
    others = [path for number, _, path in lines if number != "0"]
    wanted = [*unified, *freezer, *others] if is_v2 else [*freezer, *others, *unified]
    return wanted[0] if wanted else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
