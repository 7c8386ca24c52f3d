"""`vgpu-hook precreate | createRuntime | poststop`: the same injection for podman users who keep their runtime.

precreate (podman only) gets config.json on stdin and answers with it on stdout, edited for a GPU container and byte
for byte the same for any other; cwd is the bundle, the environment empty. createRuntime and poststop get the OCI state
on stdin and write and remove the container's state file. Refuses to print anything but the answer of precreate.
Called by podman and the low-level runtime as hooks.d 1.0.0 says (docs/operations, "hooks.d").
"""

from __future__ import annotations

import os
import sys

from oci_hook.control_directory import (
    forget_container,
    is_injected,
    is_safe_id,
    make_control_directory,
    write_mode,
)
from oci_hook.settings import CONFIG_PATH, Settings, read_settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

USAGE = "usage: vgpu-hook precreate|createRuntime|poststop\n"
LARGEST_INPUT = 64 * 1024 * 1024


def main(argv: Sequence[str] | None = None, config_path: str = CONFIG_PATH) -> int:
    """The hook's exit status; podman fails the container if it is not 0."""
    words = list(sys.argv if argv is None else argv)
    stage = words[1] if len(words) == 2 else ""
    stages = {"precreate": precreate, "createRuntime": create_runtime, "poststop": poststop}
    if stage not in stages:
        os.write(2, USAGE.encode())
        return 10
    try:
        stages[stage](read_settings(config_path), _read_all(0))
    except Exception as error:  # noqa: BLE001 - a hook must end with one line and a status, never with a traceback
        os.write(2, f"vgpu-hook {stage}: {error}\n".encode())
        return int(getattr(error, "exit_code", 1))
    return 0


def precreate(settings: Settings, config: bytes) -> None:
    """Answer with the edited config, and have the mount sources ready: a stock runtime mounts them as they stand."""
    bundle = os.getcwd()  # noqa: PTH109
    container_id = container_id_of(bundle)
    _write_all(1, edited_for_precreate(settings, bundle, container_id, config))


def edited_for_precreate(settings: Settings, bundle: str, container_id: str, config: bytes) -> bytes:
    """The config to answer with; makes the control directory where it is a GPU container."""
    from oci_hook.injection import mode_of, plan_injection, without_own_edits  # noqa: PLC0415

    injection = plan_injection(settings, bundle, container_id, config)
    if injection is None or injection.edited is None:
        return without_own_edits(config) if b"vgpu" in config else config
    make_control_directory(settings.run_dir, container_id)
    write_mode(settings.run_dir, container_id, mode_of(settings, injection.spec))
    return injection.edited


def create_runtime(settings: Settings, state: bytes) -> None:
    """Write the state file of a container that precreate injected; the shim, where it is in use, completes it."""
    from oci_hook.state import state_from_hook  # noqa: PLC0415

    found = state_from_hook(settings, state)
    if found is None:
        return
    container_id, content = found
    if is_injected(settings.run_dir, container_id):
        from oci_hook.control_directory import write_state_file  # noqa: PLC0415

        write_state_file(settings.run_dir, container_id, content)


def poststop(settings: Settings, state: bytes) -> None:
    """Remove the control directory and the state file."""
    from oci_hook.injection import parse_object  # noqa: PLC0415

    container_id = str((parse_object(state) or {}).get("id", ""))
    if is_safe_id(container_id):
        forget_container(settings.run_dir, container_id)


def container_id_of(bundle: str) -> str:
    """podman's bundles end in <id>/userdata, others in the id."""
    above, _, name = bundle.rstrip("/").rpartition("/")
    return above.rpartition("/")[2] if name == "userdata" else name


def _read_all(descriptor: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    while part := os.read(descriptor, 1 << 20):
        parts.append(part)
        size += len(part)
        if size > LARGEST_INPUT:
            raise ValueError(f"more than {LARGEST_INPUT} bytes on stdin")
    return b"".join(parts)


def _write_all(descriptor: int, content: bytes) -> None:
    left = memoryview(content)
    while left:
        left = left[os.write(descriptor, left) :]
