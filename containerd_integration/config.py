"""The containerd drop-in that adds the runtime handler `vgpu-runtime`, and the import that makes containerd read it.

Two rules of containerd decide the shape: a drop-in's config version must not be above the main file's, and containerd 1.x
replaces a plugin's whole section by the last file's, so there the drop-in carries a copy of what the others say.
Pure: documents in, text out. Called by `vgpu setup containerd`; the files are read by `existing_settings`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from containerd_integration.toml_text import to_toml
from vgpu_errors import BadConfiguration

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MAIN_PATH = "/etc/containerd/config.toml"
DROP_IN_DIRECTORY = "/etc/containerd/conf.d"
DROP_IN_PATH = f"{DROP_IN_DIRECTORY}/50-vgpu.toml"
IMPORT_PATTERN = f"{DROP_IN_DIRECTORY}/*.toml"

# containerd stores the absolute path of the runtime in every checkpoint.
HANDLER = "vgpu-runtime"
RUNTIME_PATH = "/usr/bin/vgpu-runtime"
ANNOTATIONS = ["vgpu.snapshot/*"]
CDI_SPEC_DIRECTORIES = ["/etc/cdi", "/var/run/cdi"]

PLUGIN_V2 = "io.containerd.grpc.v1.cri"
PLUGIN_V3 = "io.containerd.cri.v1.runtime"
HEADER = "# Written by 'vgpu setup containerd'; 'vgpu setup containerd --undo' removes it.\n"


def config_version(main: Mapping[str, Any] | None, containerd_version: tuple[int, ...] | None) -> int:
    """Version for the drop-in: at most the main file's, and the newest of the installed containerd without one."""
    if main is None:
        return 2 if containerd_version is not None and containerd_version < (2, 0) else 3
    found = main.get("version", 1)
    if not isinstance(found, int) or found < 2:
        raise BadConfiguration(
            path=MAIN_PATH,
            what="has config version 1, which knows no runtime handlers",
            remedy="Bring it to version 2 or 3 with 'containerd config migrate', then run the setup again.",
        )
    return min(found, 3)


def drop_in(version: int, others: Sequence[Mapping[str, Any]]) -> str:
    """The whole text of the drop-in; `others` are the files that containerd reads before it."""
    if version >= 3:
        return HEADER + to_toml({"version": 3, "plugins": {PLUGIN_V3: _handler_section()}})
    section: dict[str, Any] = {}
    for document in others:
        found = document.get("plugins", {}).get(PLUGIN_V2)
        section = dict(found) if found is not None else section
    section = _merged(section, _handler_section())
    section.setdefault("enable_cdi", True)
    section.setdefault("cdi_spec_dirs", CDI_SPEC_DIRECTORIES)
    # The copied section replaces containerd's defaults for this table: without runc the default runtime is gone.
    section["containerd"]["runtimes"].setdefault("runc", {"runtime_type": "io.containerd.runc.v2"})
    return HEADER + to_toml({"version": 2, "plugins": {PLUGIN_V2: section}})


def carries_others(content: bytes) -> bool:
    """Whether a drop-in has a copy of what other files say: of the first version that containerd 1.x reads."""
    return b"version = 2" in content.splitlines()


def main_file(text: str | None, main: Mapping[str, Any] | None, version: int) -> str | None:
    """The new text of config.toml, or None where it reads the drop-in folder already."""
    if text is None or main is None:
        return HEADER + to_toml({"version": version, "imports": [IMPORT_PATTERN]})
    imports = main.get("imports")
    if imports is None:
        return f'imports = ["{IMPORT_PATTERN}"] # added by vgpu setup containerd\n' + text
    if IMPORT_PATTERN in imports or DROP_IN_PATH in imports:
        return None
    raise BadConfiguration(
        path=MAIN_PATH,
        what=f"its 'imports' list does not name {IMPORT_PATTERN}",
        remedy=f'Add "{IMPORT_PATTERN}" to the list and run the setup again; it does not edit a list of yours.',
    )


def _handler_section() -> dict[str, Any]:
    handler = {
        "runtime_type": "io.containerd.runc.v2",
        "pod_annotations": ANNOTATIONS,
        "container_annotations": ANNOTATIONS,
        "options": {"BinaryName": RUNTIME_PATH},
    }
    return {"containerd": {"runtimes": {HANDLER: handler}}}


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Both documents, `above` wins where they differ."""
    result = dict(below)
    for key, value in above.items():
        old = result.get(key)
        result[key] = _merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result
