"""The changes to a container's spec that make it a vgpu container, each one a small object.

Pure: a parsed spec is planned for and changed in memory, no file is touched. Idempotent: planning starts with taking
out what an earlier run of ours put in (podman carries edited specs into checkpoints), so that applying twice gives
the same spec as applying once. The user's own LD_PRELOAD, mounts and annotations stay.
Called by injection.py and exec_process.py.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Protocol

    class Edit(Protocol):
        """One change of a spec."""

        def apply(self, spec: dict[str, Any]) -> None:
            """Change the spec in place."""


LIBRARY_IN_CONTAINER = "/run/vgpu-preload/libvgpu.so"
CONTROL_IN_CONTAINER = "/run/vgpu"
BUILD_ID_ANNOTATION = "vgpu.snapshot/preload-build-id"
LIBC_ANNOTATION = "vgpu.snapshot/preload-libc"

# `rprivate` as podman writes its own bind mounts: a mount that shares with the host is one that CRIU may refuse.
_LIBRARY_OPTIONS = ("bind", "rprivate", "ro", "nosuid", "nodev")
_CONTROL_OPTIONS = (*_LIBRARY_OPTIONS, "noexec")


class Context:
    """Where this node keeps what is mounted into the container."""

    __slots__ = ("build_id", "control_source", "libc", "library_source", "links")

    def __init__(
        self, *, libc: str, build_id: str, library_source: str, control_source: str, links: dict[str, str] | None = None
    ) -> None:
        self.libc = libc
        self.build_id = build_id
        self.library_source = library_source
        self.control_source = control_source
        self.links = links or {}


class RemoveOwnMounts:
    """Takes out mounts at our destinations whose source looks like ours, whatever node wrote them."""

    __slots__ = ()

    def apply(self, spec: dict[str, Any]) -> None:
        """Keep every other mount in its order."""
        mounts = spec.get("mounts")
        if isinstance(mounts, list) and any(is_own_mount(mount) for mount in mounts):
            spec["mounts"] = [mount for mount in mounts if not is_own_mount(mount)]


_BINDS = {"bind", "rbind"}


def bind_mounts(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """The bind mounts of a spec, by type or by option as runc and crun tell them."""
    found = [mount for mount in spec.get("mounts") or () if isinstance(mount, dict)]
    return [mount for mount in found if str(mount.get("type")) in _BINDS or _BINDS & set(mount.get("options") or ())]


class AddMount:
    """Adds one bind mount at the end, so that it lies over a tmpfs that the engine puts on /run."""

    __slots__ = ("destination", "options", "source")

    def __init__(self, source: str, destination: str, options: tuple[str, ...]) -> None:
        self.source = source
        self.destination = destination
        self.options = options

    def apply(self, spec: dict[str, Any]) -> None:
        """Append the mount."""
        mounts = list(spec.get("mounts") or ())
        mounts.append(
            {"destination": self.destination, "type": "bind", "source": self.source, "options": list(self.options)}
        )
        spec["mounts"] = mounts


class NameBindMounts:
    """Gives every bind mount its type; CDI specs leave it out, and crun 1.21 crashes on that at a restore."""

    __slots__ = ()

    def apply(self, spec: dict[str, Any]) -> None:
        """Add what runc and crun would have assumed."""
        for mount in bind_mounts(spec):
            if not mount.get("type"):
                mount["type"] = "bind"


class FollowLinks:
    """Names what a bind mount's source leads to where that is a symbolic link.

    The kernel follows it at a create; CRIU 4.1 does not at a restore (Debian's `podman run --init` is such a mount).
    """

    __slots__ = ("_targets",)

    def __init__(self, targets: dict[str, str]) -> None:
        self._targets = targets

    def apply(self, spec: dict[str, Any]) -> None:
        """Change the sources that are links, and no others."""
        for mount in bind_mounts(spec):
            source = mount.get("source")
            if isinstance(source, str):
                mount["source"] = self._targets.get(source, source)


class MergePreload:
    """Puts a library first in the process's LD_PRELOAD and keeps the user's own."""

    __slots__ = ("library",)

    def __init__(self, library: str) -> None:
        self.library = library

    def apply(self, spec: dict[str, Any]) -> None:
        """Change the environment of `spec.process`, where there is one."""
        process = spec.get("process")
        if isinstance(process, dict):
            process["env"] = merged_environment(list(process.get("env") or ()), self.library)


class RemovePreload:
    """Takes a library out of the process's LD_PRELOAD."""

    __slots__ = ("library",)

    def __init__(self, library: str) -> None:
        self.library = library

    def apply(self, spec: dict[str, Any]) -> None:
        """Leave an environment without our library as it stands, to the letter."""
        process = spec.get("process")
        environment = process.get("env") if isinstance(process, dict) else None
        if not isinstance(process, dict) or not isinstance(environment, list):
            return
        if any(self.library in _preloads(entry) for entry in environment):
            process["env"] = merged_environment(environment, None, dropped=self.library)


class SetAnnotation:
    """Sets one annotation, or removes it (value None)."""

    __slots__ = ("name", "value")

    def __init__(self, name: str, value: str | None) -> None:
        self.name = name
        self.value = value

    def apply(self, spec: dict[str, Any]) -> None:
        """Make the annotations of the spec say so."""
        annotations = dict(spec.get("annotations") or {})
        if self.value is None:
            if annotations.pop(self.name, None) is None:
                return
        else:
            annotations[self.name] = self.value
        spec["annotations"] = annotations


def plan_edits(spec: dict[str, Any], context: Context | None) -> list[Edit]:
    """The edits in the order to apply them; without a context those that take out what an earlier run put in."""
    edits: list[Edit] = [RemoveOwnMounts()] if _has_own_mount(spec) else []
    if context is None:
        return [
            *edits,
            RemovePreload(LIBRARY_IN_CONTAINER),
            SetAnnotation(BUILD_ID_ANNOTATION, None),
            SetAnnotation(LIBC_ANNOTATION, None),
        ]
    return [
        *edits,
        NameBindMounts(),
        FollowLinks(context.links),
        AddMount(context.library_source, LIBRARY_IN_CONTAINER, _LIBRARY_OPTIONS),
        AddMount(context.control_source, CONTROL_IN_CONTAINER, _CONTROL_OPTIONS),
        MergePreload(LIBRARY_IN_CONTAINER),
        SetAnnotation(BUILD_ID_ANNOTATION, context.build_id),
        SetAnnotation(LIBC_ANNOTATION, context.libc),
    ]


def apply_edits(spec: dict[str, Any], edits: list[Edit]) -> None:
    """Apply in order, in place."""
    for edit in edits:
        edit.apply(spec)


def is_own_mount(mount: object) -> bool:
    """Whether an earlier run of ours put the mount in: our destination and a source of our layout."""
    if not isinstance(mount, dict):
        return False
    source = str(mount.get("source", ""))
    if mount.get("destination") == LIBRARY_IN_CONTAINER:
        return source.endswith("/libvgpu.so")
    if mount.get("destination") == CONTROL_IN_CONTAINER:
        return source.rpartition("/")[0].endswith("/containers")
    return False


def merged_environment(environment: list[str], library: str | None, *, dropped: str | None = None) -> list[str]:
    """The environment with one LD_PRELOAD: ours first, then what the last entry had, each library once.

    The last entry, because runc and crun both let it win; it stays at the place of the first.
    """
    places = [at for at, entry in enumerate(environment) if _is_preload(entry)]
    theirs = _preloads(environment[places[-1]]) if places else []
    wanted = [library] if library is not None else []
    wanted += [name for name in theirs if name != dropped]
    value = ":".join(dict.fromkeys(wanted))
    kept = [entry for entry in environment if not _is_preload(entry)]
    if not value:
        return kept
    at = places[0] if places else len(kept)
    return [*kept[:at], f"LD_PRELOAD={value}", *kept[at:]]


def _is_preload(entry: object) -> bool:
    return isinstance(entry, str) and entry.startswith("LD_PRELOAD=")


def _preloads(entry: object) -> list[str]:
    """The libraries of an LD_PRELOAD entry; the loader takes colons and blanks alike."""
    if not isinstance(entry, str) or not entry.startswith("LD_PRELOAD="):
        return []
    return [name for name in entry.partition("=")[2].replace(":", " ").split(" ") if name]


def _has_own_mount(spec: dict[str, Any]) -> bool:
    mounts = spec.get("mounts")
    return isinstance(mounts, list) and any(is_own_mount(mount) for mount in mounts)
