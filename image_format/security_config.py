"""The part of config.json that decides what a container may do (spec/security-config.md).

`project` reduces a bundle's config to it, in a form that an engine's legitimate restore does not change; `differences`
compares two such forms. The checkpoint signs the first, the restore gate refuses any difference.
Pure, standard library only: the runtime shim loads it. Reads no file.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
import re
from typing import Any

PROJECTION_VERSION = 1
ENGINE = "<engine>"

# What our own injection adds; it differs by node and is checked by the preload's build id instead.
OWN_DESTINATIONS = ("/run/vgpu", "/run/vgpu-preload")

_CAPABILITY_SETS = ("bounding", "effective", "inheritable", "permitted", "ambient")
_HOOK_STAGES = ("prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop")
# Only an engine-made id counts as one: a container named "etc" must not turn /etc into an engine's path.
_ENGINE_ID = re.compile(r"[0-9a-f]{32,64}")
_POD_UID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_POD_ANNOTATIONS = (
    (("io.kubernetes.cri.sandbox-id", "io.kubernetes.cri-o.SandboxID"), _ENGINE_ID, "<sandbox>"),
    (("io.kubernetes.cri.sandbox-uid", "io.kubernetes.pod.uid"), _POD_UID, "<pod>"),
)
_KUBELET_PODS = ["", "var", "lib", "kubelet", "pods"]

_KNOWN_KEYS = {
    key.casefold(): key
    for key in (
        "process", "args", "terminal", "user", "uid", "gid", "additionalGids", "capabilities", *_CAPABILITY_SETS,
        "noNewPrivileges", "apparmorProfile", "rlimits", "type", "hard", "soft", "root", "readonly", "mounts",
        "destination", "source", "options", "hooks", *_HOOK_STAGES, "path", "linux", "namespaces", "devices",
        "fileMode", "major", "minor", "resources", "allow", "access", "seccomp", "sysctl", "maskedPaths",
        "readonlyPaths", "uidMappings", "gidMappings", "containerID", "hostID", "size", "rootfsPropagation",
    )
}  # fmt: skip
# Types of namespaces that are the host's own although the config joins them by path (runtime_shim/host_namespaces.py).
HOST_NAMESPACES = "hostNamespaces"
_FREE_MAPS = ("annotations", "sysctl", "seccomp", "unified")

# podman writes its own files' mounts with rprivate at start and with private at an import; nothing is mounted below them.
_PROPAGATION = {"rprivate": "private"}

# What systemd and shells set anew whenever an engine is started; no loader and no hook takes code from these.
_OF_ONE_START = frozenset(
    (
        "INVOCATION_ID", "JOURNAL_STREAM", "LANG", "LISTEN_FDNAMES", "LISTEN_FDS", "LISTEN_PID", "LISTEN_PIDFDID",
        "MAINPID", "MANAGERPID", "MANAGERPIDFDID", "MEMORY_PRESSURE_WATCH", "MEMORY_PRESSURE_WRITE", "NOTIFY_SOCKET",
        "OLDPWD", "PWD", "SHLVL", "SYSTEMD_EXEC_PID", "TERM", "WATCHDOG_PID", "WATCHDOG_USEC", "_",
    )
)  # fmt: skip

Json = dict[str, Any]


def project(config: Json, *, bundle: str, container_id: str) -> Json:
    """What matters for security in config.json, canonicalised."""
    process, linux = _dict(config.get("process")), _dict(config.get("linux"))
    place = _Place(bundle, container_id, _pod_ids(config))
    devices = [_device(item) for item in _dicts(linux.get("devices"))]
    return {
        "projection": PROJECTION_VERSION,
        "oddKeys": odd_keys(config),
        **_project_process(process),
        "rootfsPropagation": str(linux.get("rootfsPropagation") or ""),
        "rootReadonly": bool(_dict(config.get("root")).get("readonly")),
        "mounts": _unique([_mount(item, place) for item in _dicts(config.get("mounts")) if not _is_own(item)]),
        "hooks": _hooks(_dict(config.get("hooks")), place),
        "namespaces": _unique([_namespace(item) for item in _dicts(linux.get("namespaces"))]),
        "devices": _unique(devices),
        "deviceRules": _device_rules(linux),
        "seccomp": _digest(linux.get("seccomp")),
        "sysctl": {str(key): str(value) for key, value in sorted(_dict(linux.get("sysctl")).items())},
        "maskedPaths": _texts(linux.get("maskedPaths")),
        "readonlyPaths": _texts(linux.get("readonlyPaths")),
        "uidMappings": [_mapping(item) for item in _dicts(linux.get("uidMappings"))],
        "gidMappings": [_mapping(item) for item in _dicts(linux.get("gidMappings"))],
    }


def load(data: bytes | str) -> Json:
    """Parse config.json; raises ValueError where two readers could disagree (the same key twice, no object)."""
    try:
        config = json.loads(data, object_pairs_hook=_object_without_duplicates)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(config, dict):
        raise ValueError("the top level is not an object")  # noqa: TRY004 - one error for every bad document
    return config


def _object_without_duplicates(pairs: list[tuple[str, Any]]) -> Json:
    doc = dict(pairs)
    if len(doc) != len(pairs):
        raise ValueError("an object has the same key twice")
    return doc


def odd_keys(config: Json) -> list[str]:
    """Keys that runtimes written in Go take for one of ours although they are spelt otherwise ("Hooks" for "hooks")."""
    found = []
    stack: list[tuple[str, Any]] = [("", config)]
    while stack:
        at, value = stack.pop()
        if isinstance(value, dict):
            for key, item in value.items():
                if _KNOWN_KEYS.get(key.casefold(), key) != key:
                    found.append(f"{at}{key}")
                if key not in _FREE_MAPS:
                    stack.append((f"{at}{key}.", item))
        elif isinstance(value, list):
            stack.extend((at, item) for item in value)
    return sorted(found)


def differences(signed: Json, now: Json) -> list[str]:
    """One line for each difference, empty where the two are equal. `hostNamespaces` is for those who see the host."""
    if signed.get("projection") != now.get("projection"):
        return [
            f"projection: version {signed.get('projection')} was signed, this version makes {now.get('projection')}"
        ]
    return _compare("", {key: signed[key] for key in signed if key != HOST_NAMESPACES}, now)


# ---- projection ----------------------------------------------------------------------------------


class _Place:
    """Recognises paths that the engine made for this one container."""

    def __init__(self, bundle: str, container_id: str, pod_ids: dict[str, str]) -> None:
        self._pod_ids = pod_ids
        self.bundle = posixpath.normpath(bundle) if bundle.startswith("/") else ""
        self.id = container_id if _ENGINE_ID.fullmatch(container_id) else ""

    def is_engines(self, path: str) -> bool:
        """The path lies in the bundle, or one of its components is the container's id."""
        if not path.startswith("/") or posixpath.normpath(path) != path:
            return False
        in_bundle = self.bundle not in ("", "/") and (path == self.bundle or path.startswith(self.bundle + "/"))
        return in_bundle or bool(self.id and self.id in path.split("/"))

    def without_pod(self, path: str) -> str:
        """The path with the ids of the pod's sandbox and of the pod as words; both are new where a pod is restored."""
        if not self._pod_ids or posixpath.normpath(path) != path:
            return path
        parts = [self._pod_ids.get(part, part) for part in path.split("/")]
        if parts[:6] == [*_KUBELET_PODS, "<pod>"] and parts[6:7] == ["containers"] and len(parts) == 9:
            parts[8] = ENGINE  # the kubelet's file for the termination message has a random name
        return "/".join(parts)

    def neutral(self, text: str) -> str:
        """The text without the bundle's path and the id, which a restore may change."""
        if self.id:
            text = text.replace(self.id, "<id>")
        elif self.bundle not in ("", "/"):
            text = text.replace(self.bundle, "<bundle>")
        return text


def _project_process(process: Json) -> Json:
    user, capabilities = _dict(process.get("user")), _dict(process.get("capabilities"))
    return {
        "args": [str(item) for item in _items(process.get("args"))],
        "terminal": bool(process.get("terminal")),
        "user": {
            "uid": _number(user.get("uid")),
            "gid": _number(user.get("gid")),
            "additionalGids": sorted(_number(gid) for gid in _items(user.get("additionalGids"))),
        },
        "capabilities": {name: _texts(capabilities.get(name)) for name in _CAPABILITY_SETS},
        "noNewPrivileges": bool(process.get("noNewPrivileges")),
        "apparmorProfile": str(process.get("apparmorProfile") or ""),
        "rlimits": _unique([_rlimit(item) for item in _dicts(process.get("rlimits"))]),
    }


def _rlimit(item: Json) -> Json:
    # RLIM_INFINITY is 2^64-1, which JSON readers may round: written as text.
    return {"type": str(item.get("type")), "hard": str(item.get("hard")), "soft": str(item.get("soft"))}


def _is_own(mount: Json) -> bool:
    destination = posixpath.normpath(str(mount.get("destination") or ""))
    return any(destination == own or destination.startswith(own + "/") for own in OWN_DESTINATIONS)


def _source(path: str, place: _Place) -> str:
    return ENGINE if place.is_engines(path) else place.without_pod(path)


def _pod_ids(config: Json) -> dict[str, str]:
    """Id -> the word it becomes, as the engines note them; what has not the form of an id counts for nothing."""
    annotations = _dict(config.get("annotations"))
    found: dict[str, str] = {}
    for keys, form, word in _POD_ANNOTATIONS:
        found |= {value: word for key in keys if form.fullmatch(value := str(annotations.get(key) or ""))}
    return found


def _mount(item: Json, place: _Place) -> Json:
    options = sorted({_PROPAGATION.get(str(option), str(option)) for option in _items(item.get("options"))})
    kind, source = str(item.get("type") or ""), str(item.get("source") or "")
    is_bind = kind == "bind" or "bind" in options or "rbind" in options
    doc = {
        "destination": str(item.get("destination")),
        "type": "bind" if is_bind else kind,
        "source": _source(source, place) if is_bind else source,
        "options": options,
    }
    # An id-mapped mount shows files as another user's: with it a process may write what its own user must not.
    mappings = {key: [_mapping(entry) for entry in _dicts(item.get(key))] for key in ("uidMappings", "gidMappings")}
    return doc | {key: entries for key, entries in mappings.items() if entries}


def _hooks(hooks: Json, place: _Place) -> Json:
    stages = {}
    for stage in (*_HOOK_STAGES, *sorted(set(hooks) - set(_HOOK_STAGES))):
        entries = [_hook(item, place) for item in _dicts(hooks.get(stage))]
        if entries:
            stages[stage] = _unique(entries, keep_order=True)
    return stages


def _hook(item: Json, place: _Place) -> Json:
    doc = {
        "path": place.neutral(str(item.get("path"))),
        "args": [place.neutral(str(argument)) for argument in _items(item.get("args"))],
    }
    # A hook runs as root on the node: an LD_PRELOAD in its environment is as good as another path. A digest, because
    # Docker hands on the whole environment that it was started with ('docker run --gpus'), secrets included.
    entries = [place.neutral(str(entry)) for entry in _items(item.get("env"))]
    environment = sorted(entry for entry in entries if entry.partition("=")[0] not in _OF_ONE_START)
    return doc | ({"env": _digest(environment)} if environment else {})


def _namespace(item: Json) -> Json:
    kind = str(item.get("type"))
    # The engine makes a network namespace per container and names it in the path, each time another.
    return {"type": kind} if kind == "network" else {"type": kind, "joined": bool(item.get("path"))}


def _is_gpu_device(path: str) -> bool:
    return path.startswith("/dev/nvidia")


def _device(item: Json) -> Json:
    path = str(item.get("path"))
    doc = {"path": path, "type": str(item.get("type")), "fileMode": _number(item.get("fileMode"), none=-1)}
    if not _is_gpu_device(path):  # nvidia-uvm and the capability devices get their major number from the kernel
        doc |= {"major": _number(item.get("major"), none=-1), "minor": _number(item.get("minor"), none=-1)}
    return doc


def _device_rules(linux: Json) -> list[Json]:
    gpu_paths = {
        (doc["type"], major, minor): doc["path"]
        for item in _dicts(linux.get("devices"))
        if _is_gpu_device((doc := _device(item))["path"])
        and (major := _number(item.get("major"), none=-1)) >= 0
        and (minor := _number(item.get("minor"), none=-1)) >= 0
    }
    rules = _dicts(_dict(linux.get("resources")).get("devices"))
    return _without_idle_repeats([_device_rule(item, gpu_paths) for item in rules])


def _without_idle_repeats(rules: list[Json]) -> list[Json]:
    """The rules without repeats that change nothing; a later rule overrides an earlier one, so one behind its opposite stays."""
    kept: list[Json] = []
    since_opposite: list[Json] = []
    for rule in rules:
        if since_opposite and since_opposite[-1]["allow"] != rule["allow"]:
            since_opposite = []
        if rule not in since_opposite:
            since_opposite.append(rule)
            kept.append(rule)
    return kept


def _device_rule(item: Json, gpu_paths: dict[tuple[str, Any, Any], str]) -> Json:
    doc = {"allow": bool(item.get("allow")), "access": "".join(sorted(str(item.get("access") or "")))}
    numbers = {key: _number(item.get(key), none=-1) for key in ("major", "minor")}
    path = gpu_paths.get((str(item.get("type")), numbers["major"], numbers["minor"]))
    if path is not None:
        return doc | {"path": path}
    return doc | {"type": str(item.get("type") or "a")} | numbers


def _mapping(item: Json) -> Json:
    return {key: _number(item.get(key)) for key in ("containerID", "hostID", "size")}


def _digest(value: Any) -> str:
    if not value:
        return ""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


# ---- shapes: what has another type than the runtime-spec says is refused by every runtime ------------


def _dict(value: Any) -> Json:
    return value if isinstance(value, dict) else {}


def _dicts(value: Any) -> list[Json]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _texts(value: Any) -> list[str]:
    return sorted({str(item) for item in value}) if isinstance(value, list) else []


def _number(value: Any, *, none: int = 0) -> int:
    return value if isinstance(value, int) and abs(value) < 2**53 else none


def _unique(items: list[Json], *, keep_order: bool = False) -> list[Json]:
    """Without repeats: engines apply CDI edits twice when a restored container is started again."""
    by_text = {json.dumps(item, sort_keys=True): item for item in items}
    return list(by_text.values()) if keep_order else [by_text[text] for text in sorted(by_text)]


# ---- comparison ----------------------------------------------------------------------------------

_IDENTITY = ("destination", "path", "type")
_ORDERED = ("args", "deviceRules")


def _compare(at: str, signed: Any, now: Any) -> list[str]:
    if signed == now:
        return []
    if isinstance(signed, dict) and isinstance(now, dict):
        lines = []
        for key in sorted(set(signed) | set(now)):
            lines += _compare_field(f"{at}.{key}" if at else key, signed, now, key)
        return lines
    if isinstance(signed, list) and isinstance(now, list) and at.rpartition(".")[2] not in _ORDERED:
        return _compare_lists(at, signed, now)
    return [f"{at}: was {_show(signed)}, is {_show(now)}"]


def _compare_field(at: str, signed: Json, now: Json, key: str) -> list[str]:
    if key not in now:
        return [f"{at}: {_show(signed[key])} removed"]
    if key not in signed:
        return [f"{at}: {_show(now[key])} added"]
    return _compare(at, signed[key], now[key])


def _compare_lists(at: str, signed: list[Any], now: list[Any]) -> list[str]:
    gone = [item for item in signed if item not in now]
    new = [item for item in now if item not in signed]
    lines = []
    for item in list(gone):
        twin = next((other for other in new if _same_object(item, other)), None)
        if twin is not None:
            lines += _compare(f"{at}[{_name(item)}]", item, twin)
            gone.remove(item)
            new.remove(twin)
    lines += [f"{at}: {_show(item)} removed" for item in gone] + [f"{at}: {_show(item)} added" for item in new]
    return lines or [f"{at}: the order changed"]


def _name(item: Any) -> str:
    return next((str(item[key]) for key in _IDENTITY if key in item), "") if isinstance(item, dict) else ""


def _same_object(left: Any, right: Any) -> bool:
    return bool(_name(left)) and _name(left) == _name(right)


def _show(value: Any) -> str:
    return value if isinstance(value, str) and value else json.dumps(value, sort_keys=True)
