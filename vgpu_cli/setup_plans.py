"""Which files each setup wants on this node: the engines' packages give the texts, this puts them together.

Reads what is there (settings, engines' configuration, devices), writes nothing. Called by the verb `setup`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import containerd_integration.config as containerd_config
import containerd_integration.existing_settings as containerd_settings
import docker_integration.existing_settings as docker_settings
import podman_integration.existing_settings as podman_settings
from containerd_integration import kubelet_unit, runtime_class
from containerd_integration.cdi import SPEC_PATH, Mount, cdi_spec
from containerd_integration.driver_files import find_driver_files
from docker_integration import daemon_json
from podman_integration import containers_conf, hooks
from vgpu_cli import node_files
from vgpu_cli.installed_files import InstalledFiles, PlannedFile
from vgpu_errors import BadConfiguration

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclass(frozen=True)
class SetupOptions:
    """What the command line asked for."""

    root: Path = Path("/")
    settings: tuple[tuple[str, str], ...] = ()
    """Keys of runtime.conf that were given: `low_level_runtime`, `driver_dir`."""
    is_default_runtime: bool = False
    is_hooks_only: bool = False
    cdi_mounts: tuple[Mount, ...] = ()
    watches_kubelet: bool = False
    push_to: str = ""
    """Where the kubelet's checkpoints are pushed; nowhere if empty."""

    @property
    def is_this_node(self) -> bool:
        """False when the files go to another tree, whose programs cannot be asked."""
        return self.root == Path("/")


def plan_podman(options: SetupOptions, installed: InstalledFiles) -> list[PlannedFile]:
    """Everything for podman: the node's files, hooks, drop-in, CDI spec."""
    return [
        *_node(options, installed),
        *_podman_hooks(options),
        _podman_drop_in(options),
        *plan_cdi(options, installed),
    ]


def plan_containerd(options: SetupOptions, installed: InstalledFiles) -> list[PlannedFile]:
    """Everything for containerd: the node's files, drop-in and its import, RuntimeClass, CDI spec."""
    return [
        *_node(options, installed),
        *_containerd_configuration(options, installed),
        _text(runtime_class.MANIFEST_PATH, runtime_class.runtime_class(), "for 'kubectl apply -f', on a cluster"),
        *_kubelet_watch(options, installed),
        *plan_cdi(options, installed),
    ]


def plan_docker(options: SetupOptions, installed: InstalledFiles) -> list[PlannedFile]:
    """Everything for Docker Engine: the node's files, our keys in its daemon.json, CDI spec."""
    merged = _docker_keys(options, installed)
    why = "registers vgpu-runtime; turns checkpoints and CDI on"
    keys = PlannedFile(daemon_json.PATH, merged.text.encode(), 0o644, why, keys=merged.added)
    file = [keys] if merged.added else _as_it_is(daemon_json.PATH, installed)
    return [*_node(options, installed), *file, *plan_cdi(options, installed)]


def plan_cdi(options: SetupOptions, installed: InstalledFiles) -> list[PlannedFile]:
    """The CDI spec alone; nothing new on a node without GPU."""
    found = find_driver_files(root=options.root, driver_dir=_driver_dir(options, installed))
    if found.is_empty and not options.cdi_mounts:
        return _as_it_is(SPEC_PATH, installed)
    text = json.dumps(cdi_spec(found, options.cdi_mounts), indent=2) + "\n"
    return [_text(SPEC_PATH, text, "GPUs and driver libraries for '--device'")]


PLANS: dict[str, Callable[[SetupOptions, InstalledFiles], list[PlannedFile]]] = {
    "podman": plan_podman,
    "containerd": plan_containerd,
    "docker": plan_docker,
    "cdi": plan_cdi,
}


def notes(target: str, options: SetupOptions, planned: Sequence[PlannedFile]) -> list[str]:
    """What the user may want to do next."""
    paths = {file.path for file in planned}
    found = []
    if SPEC_PATH not in paths:
        found.append("No GPU and no driver library was found: run 'vgpu setup cdi' when the driver is loaded.")
    if target == "podman" and not options.is_hooks_only:
        found.append("Run a container with: podman run --runtime vgpu-runtime --device vgpu.snapshot/gpu=all IMAGE")
    if target == "containerd":
        found.append("Restart containerd to make it read the new handler.")
        drop_in = next(file for file in planned if file.path == containerd_config.DROP_IN_PATH)
        if containerd_config.carries_others(drop_in.content):
            found.append(
                f"{containerd_config.DROP_IN_PATH} carries the CRI settings of the other files along, because containerd 1.x "
                "takes one file's only: run the setup again after you change them."
            )
        if options.watches_kubelet:
            unit = kubelet_unit.UNIT_PATH.rpartition("/")[2]
            found.append(
                f"The kubelet's folder is watched after: systemctl daemon-reload; systemctl enable --now {unit}"
            )
    if target == "docker":
        found += _docker_notes(options)
    if target != "cdi":
        found.append(
            "The agent starts on demand; as a service: systemctl daemon-reload; systemctl enable --now vgpu-agent"
        )
    nvidia = [name for name in _NVIDIA_SPECS if (options.root / name.lstrip("/")).exists()]
    if nvidia:
        found.append(
            f"{nvidia[0]} is there as well: '--device nvidia.com/gpu=all' works as well as ours, use one of them."
        )
    return found


_NVIDIA_SPECS = ("/etc/cdi/nvidia.yaml", "/etc/cdi/nvidia.json", "/var/run/cdi/nvidia.yaml", "/var/run/cdi/nvidia.json")


def _node(options: SetupOptions, installed: InstalledFiles) -> list[PlannedFile]:
    files = node_files.node_files(_runtime_conf(options, installed))
    if installed.content(node_files.NODE_KEY) is None:
        _refuse_half_a_key(options, installed)
        return [*files, *node_files.node_key_files()]
    return [
        *files,
        *_as_it_is(node_files.NODE_KEY, installed),
        *_as_it_is(node_files.NODE_PUBLIC_KEY, installed),
    ]


def _refuse_half_a_key(options: SetupOptions, installed: InstalledFiles) -> None:
    """A new private key beside an old public one: the node would refuse whatever it signs."""
    if installed.content(node_files.NODE_PUBLIC_KEY) is not None:
        path = options.root / node_files.NODE_PUBLIC_KEY.lstrip("/")
        remedy = (
            "Move it away; then 'vgpu trust add' it under its new path, if what it has signed shall still be restored."
        )
        raise BadConfiguration(path=path, what="is there without its private half node.key", remedy=remedy)


def _runtime_conf(options: SetupOptions, installed: InstalledFiles) -> str:
    """The settings text: new, or as it is, or with the given keys where the file is still ours."""
    given = dict(options.settings)
    found = installed.content(node_files.RUNTIME_CONF)
    if found is None:
        return node_files.with_settings(node_files.RUNTIME_CONF_TEXT, given)
    text = found.decode("utf-8", errors="replace")
    differing = {key: value for key, value in given.items() if node_files.settings_in(text).get(key) != value}
    if not differing:
        return text
    if not installed.is_ours(node_files.RUNTIME_CONF):
        key, value = next(iter(differing.items()))
        raise BadConfiguration(
            path=node_files.RUNTIME_CONF,
            what=f"was edited by hand, so setup does not set {key}",
            remedy=f"Write the line '{key} = {value}' into it yourself and leave the option out.",
        )
    return node_files.with_settings(text, differing)


def _driver_dir(options: SetupOptions, installed: InstalledFiles) -> str | None:
    given = dict(options.settings).get("driver_dir")
    found = installed.content(node_files.RUNTIME_CONF)
    if given is not None or found is None:
        return given
    return node_files.settings_in(found.decode("utf-8", errors="replace")).get("driver_dir")


def _podman_hooks(options: SetupOptions) -> list[PlannedFile]:
    texts = hooks.hook_files(injects=options.is_hooks_only)
    return [_text(path, text, "calls vgpu-hook for containers that ask") for path, text in texts.items()]


def _podman_drop_in(options: SetupOptions) -> PlannedFile:
    version = podman_settings.podman_version() if options.is_this_node else None
    text = containers_conf.drop_in(
        podman_settings.configuration_before_ours(options.root),
        hooks_directory=hooks.HOOKS_DIRECTORY,
        can_append=version is None or version >= containers_conf.FIRST_WITH_APPEND,
        is_default_runtime=options.is_default_runtime,
        registers_runtime=not options.is_hooks_only,
    )
    return _text(containers_conf.DROP_IN_PATH, text, "tells podman about vgpu-runtime and the hooks")


def _containerd_configuration(options: SetupOptions, installed: InstalledFiles) -> list[PlannedFile]:
    text = containerd_settings.main_text(options.root)
    main = containerd_settings.parse(text, containerd_config.MAIN_PATH) if text is not None else None
    version = containerd_config.config_version(
        main, containerd_settings.containerd_version() if options.is_this_node else None
    )
    others = containerd_settings.documents_before_ours(options.root, main)
    drop_in = containerd_config.drop_in(version, others)
    new_main = containerd_config.main_file(text, main, version)
    main_files = (
        _as_it_is(containerd_config.MAIN_PATH, installed)
        if new_main is None
        else [_text(containerd_config.MAIN_PATH, new_main, "makes containerd read the drop-in folder")]
    )
    return [_text(containerd_config.DROP_IN_PATH, drop_in, "the runtime handler vgpu-runtime"), *main_files]


def _kubelet_watch(options: SetupOptions, installed: InstalledFiles) -> list[PlannedFile]:
    if not options.watches_kubelet:
        return _as_it_is(kubelet_unit.UNIT_PATH, installed)
    text = kubelet_unit.unit(options.push_to)
    return [_text(kubelet_unit.UNIT_PATH, text, "seals, signs and pushes what the kubelet checkpoints")]


def _docker_keys(options: SetupOptions, installed: InstalledFiles) -> daemon_json.Merged:
    found = docker_settings.parse(installed.content(daemon_json.PATH))
    ours = installed.keys(daemon_json.PATH)
    return daemon_json.merge(found, is_default_runtime=options.is_default_runtime, ours=ours)


def _docker_notes(options: SetupOptions) -> list[str]:
    merged = _docker_keys(options, InstalledFiles.load(options.root))
    run = "docker run --runtime vgpu-runtime --device vgpu.snapshot/gpu=all IMAGE"
    return [*merged.notes, "Restart dockerd to make it read the new keys.", f"Run a container with: {run}"]


def _as_it_is(path: str, installed: InstalledFiles) -> list[PlannedFile]:
    """Plans the file as it stands, so that one an earlier setup wrote is not taken back."""
    found = installed.content(path)
    if found is None:
        return []
    return [PlannedFile(path, found, 0o600, "stays as it is", "keep")]


def _text(path: str, text: str, why: str) -> PlannedFile:
    return PlannedFile(path, text.encode("utf-8"), 0o644, why)
