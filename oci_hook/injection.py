"""Decides what one container gets, and turns its config.json into the edited one.

Reads the bundle's config.json, the container's root file system and the installed preload builds; writes nothing.
A container without a GPU is answered without parsing wherever its bytes show that. Called by the hook's precreate and
by the shim's create, run and restore. Rules: docs/how-it-works, "Which containers".
"""

from __future__ import annotations

import os

from oci_hook.control_directory import control_path, is_safe_id
from oci_hook.gpu_detection import gpu_reason, may_use_gpu, user_switch, wanted_mode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from oci_hook.settings import Settings

LONGEST_BUILD_ID = 128


class Preload:
    """One build of libvgpu.so."""

    __slots__ = ("build_id", "libc", "path")

    def __init__(self, libc: str, build_id: str, path: str) -> None:
        self.libc = libc
        self.build_id = build_id
        self.path = path


class Injection:
    """The decision for a GPU container.

    `preload` and `edited` are None where no build fits the image (static program, unknown C library): such a container
    runs unchanged and is checkpointed by the driver alone. `reason` says in words what decided.
    """

    __slots__ = ("container_id", "edited", "original", "preload", "reason", "spec")

    def __init__(
        self,
        *,
        container_id: str,
        reason: str,
        spec: dict[str, Any],
        original: bytes,
        preload: Preload | None,
        edited: bytes | None,
    ) -> None:
        self.container_id = container_id
        self.reason = reason
        self.spec = spec
        self.original = original
        self.preload = preload
        self.edited = edited


def plan_injection(
    settings: Settings,
    bundle: str,
    container_id: str,
    config: bytes,
    *,
    pinned: tuple[str, str] | None = None,
) -> Injection | None:
    """The injection for a container, None if it uses no GPU or its spec is none.

    `pinned` (libc, build id) is what a checkpoint was made with: its restore needs the same build, whatever is current.
    """
    if not is_safe_id(container_id) or (pinned is None and not _is_worth_parsing(settings, config)):
        return None
    spec = parse_spec(config)
    if spec is None:
        return None
    reason = f"checkpoint with preload {pinned[1]}" if pinned else decide(settings, spec)
    if reason is None:
        return None
    preload, why = _pinned_preload(settings, *pinned) if pinned else choose_preload(settings, spec, bundle)
    return Injection(
        container_id=container_id,
        reason=f"{reason}; {why}",
        spec=spec,
        original=config,
        preload=preload,
        edited=edited_config(settings, config, container_id, preload) if preload else None,
    )


def decide(settings: Settings, spec: dict[str, Any]) -> str | None:
    """Why the container is a GPU container; None if it is none.

    The administrator's `inject = never` wins over all, then the container's annotation, then what the spec shows.
    """
    if settings.inject == "never":
        return None
    wanted = user_switch(spec)
    if wanted is not None:
        return "its annotation asks for it" if wanted else None
    if settings.inject == "always":
        return "inject = always"
    runtime = os.path.basename(settings.low_level_runtime or "")  # noqa: PTH119
    return gpu_reason(spec, runtime_adds_devices="nvidia" in runtime)


def mode_of(settings: Settings, spec: dict[str, Any]) -> str:
    """How the container's GPU memory is moved: its annotation wins over `mode` of runtime.conf."""
    return wanted_mode(spec) or settings.mode


def choose_preload(settings: Settings, spec: dict[str, Any], bundle: str) -> tuple[Preload | None, str]:
    """The current build for the image's C library, and the reason in words."""
    from oci_hook.rootfs_libc import find_libc, tree_of  # noqa: PLC0415 - GPU containers alone need it

    found = find_libc(tree_of(spec, bundle), spec.get("process") or {})
    if found.libc is None:
        return None, f"no preload: {found.reason}"
    build_id = current_build_id(settings, found.libc)
    if build_id is None:
        return None, f"no preload: no {found.libc} build is installed"
    preload, why = _pinned_preload(settings, found.libc, build_id)
    return preload, f"{why}, {found.reason}"


def current_build_id(settings: Settings, libc: str) -> str | None:
    """The build id that new containers get."""
    try:
        with open(f"{settings.library_dir}/preload/{libc}/current", encoding="utf-8") as file:  # noqa: PTH123
            build_id = file.read(LONGEST_BUILD_ID + 1).strip()
    except (OSError, UnicodeDecodeError):
        return None
    return build_id if _is_build_id(build_id) else None


def edited_config(settings: Settings, config: bytes, container_id: str, preload: Preload) -> bytes:
    """The config.json with our edits; the edits of an earlier run do not count twice."""
    from oci_hook.edits import Context, apply_edits, plan_edits  # noqa: PLC0415

    spec = parse_spec(config) or {}
    context = Context(
        libc=preload.libc,
        build_id=preload.build_id,
        library_source=preload.path,
        control_source=control_path(settings.run_dir, container_id),
        links=_links(spec),
    )
    apply_edits(spec, plan_edits(spec, context))
    return to_bytes(spec)


def _links(spec: dict[str, Any]) -> dict[str, str]:
    """What the bind mounts' sources lead to, for those that are symbolic links at their last step."""
    from oci_hook.edits import bind_mounts  # noqa: PLC0415

    sources = [str(mount.get("source", "")) for mount in bind_mounts(spec)]
    return {
        source: os.path.realpath(source)
        for source in sources
        if os.path.isabs(source) and os.path.islink(source)  # noqa: PTH114, PTH117
    }


def without_own_edits(config: bytes) -> bytes:
    """The config.json with the edits of an earlier run taken out, to the byte the same if there are none."""
    from oci_hook.edits import apply_edits, plan_edits  # noqa: PLC0415

    spec = parse_spec(config)
    if spec is None:
        return config
    untouched = to_bytes(spec)
    apply_edits(spec, plan_edits(spec, None))
    stripped = to_bytes(spec)
    return config if stripped == untouched else stripped


def parse_spec(config: bytes) -> dict[str, Any] | None:
    """The spec, or None for what is none: the low-level runtime says what is wrong with it."""
    spec = parse_object(config)
    return spec if spec is not None and _has_shape(spec) else None


def parse_object(document: bytes) -> dict[str, Any] | None:
    """The JSON object in a document, or None where it is none."""
    import json  # noqa: PLC0415 - 8 ms that most containers do not pay

    try:
        found = json.loads(document)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _has_shape(spec: dict[str, Any]) -> bool:
    """Whether the parts that are read and changed here are the objects and lists that the OCI specification makes them."""
    objects = ("annotations", "root", "process", "linux", "hooks")
    if not all(isinstance(spec.get(name) or {}, dict) for name in objects) or not _all_are(dict, spec.get("mounts")):
        return False
    process = spec.get("process") or {}
    texts = [process.get("args"), process.get("env"), *[mount.get("options") for mount in spec.get("mounts") or ()]]
    return all(_all_are(str, value) for value in texts)


def _all_are(kind: type, value: object) -> bool:
    return not value or (isinstance(value, list) and all(isinstance(item, kind) for item in value))


def to_bytes(spec: dict[str, Any]) -> bytes:
    """A spec as engines write it."""
    import json  # noqa: PLC0415

    return json.dumps(spec, separators=(",", ":")).encode("ascii")


def _is_worth_parsing(settings: Settings, config: bytes) -> bool:
    if settings.inject == "never":
        return False
    return settings.inject == "always" or may_use_gpu(config)


def _pinned_preload(settings: Settings, libc: str, build_id: str) -> tuple[Preload | None, str]:
    path = f"{settings.library_dir}/preload/{libc}/{build_id}/libvgpu.so"
    if libc not in ("glibc", "musl") or not _is_build_id(build_id):
        return None, f"no preload: '{libc}/{build_id}' names no build"
    if not os.path.isfile(path):  # noqa: PTH113
        return None, f"no preload: {path} is missing"
    return Preload(libc, build_id, path), f"{libc} build {build_id}"


def _is_build_id(text: str) -> bool:
    return 0 < len(text) <= LONGEST_BUILD_ID and all(sign in "0123456789abcdef" for sign in text)
