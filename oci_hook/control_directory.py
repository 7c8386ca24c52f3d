"""Makes and removes what a container has on the host side: /run/vgpu/containers/<id>/ and /run/vgpu/state/<id>.json.

The control directory is bind-mounted into the container; the agent puts its socket there. Refuses ids that are no
plain file name, since they come from a command line. Called by the hook and the shim.
"""

from __future__ import annotations

import os
import stat

MODE_NAME = "mode"
ID_EXTRA = "_+.-"  # runc's own rule for container ids


def is_safe_id(container_id: str) -> bool:
    """Whether an id can name a file: letters, digits and `_+.-`, at most 255 of them."""
    if not 0 < len(container_id) <= 255 or container_id in (".", ".."):
        return False
    return all(sign.isalnum() or sign in ID_EXTRA for sign in container_id) and container_id.isascii()


def control_path(run_dir: str, container_id: str) -> str:
    """Where the control directory of a container is."""
    return f"{run_dir}/containers/{container_id}"


def state_path(run_dir: str, container_id: str) -> str:
    """Where the state file of a container is."""
    return f"{run_dir}/state/{container_id}.json"


def make_control_directory(run_dir: str, container_id: str) -> bool:
    """Make it, world-readable because a user namespace sees its owner as nobody; False if it was there already."""
    _make(run_dir, 0o755)
    _make(f"{run_dir}/containers", 0o711)
    return _make(control_path(run_dir, container_id), 0o755)


def write_mode(run_dir: str, container_id: str, mode: str) -> None:
    """Tell the container's preload libraries how GPU memory is to be moved: "staged" or "driver"."""
    write_atomically(f"{control_path(run_dir, container_id)}/{MODE_NAME}", mode.encode("ascii") + b"\n", 0o644)


def remove_control_directory(run_dir: str, container_id: str) -> None:
    """Remove it with what lies in it; nothing to remove is fine."""
    path = control_path(run_dir, container_id)
    for name in _names(path):
        _unlink(f"{path}/{name}")
    try:
        os.rmdir(path)  # noqa: PTH106 - pathlib costs more than the whole call
    except FileNotFoundError:
        return


def is_injected(run_dir: str, container_id: str) -> bool:
    """Whether the container was created with a control directory."""
    try:
        return stat.S_ISDIR(os.lstat(control_path(run_dir, container_id)).st_mode)
    except OSError:
        return False


def forget_container(run_dir: str, container_id: str) -> None:
    """Remove all traces, the state file first: who finds one believes that the container lives."""
    _unlink(state_path(run_dir, container_id))
    remove_control_directory(run_dir, container_id)


def write_atomically(path: str, content: bytes, mode: int) -> None:
    """Replace a file in one step: a reader sees the old content or the new."""
    partial = f"{path}.partial-{os.getpid()}"
    _unlink(partial)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)  # the folder may be /tmp
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, mode)
            file.write(content)
        os.replace(partial, path)  # noqa: PTH105
    except OSError:
        _unlink(partial)
        raise


def write_state_file(run_dir: str, container_id: str, content: bytes) -> None:
    """Write /run/vgpu/state/<id>.json; the host's root alone reads it."""
    _make(run_dir, 0o755)
    _make(f"{run_dir}/state", 0o700)
    write_atomically(state_path(run_dir, container_id), content, 0o600)


def _make(path: str, mode: int) -> bool:
    try:
        os.mkdir(path)  # noqa: PTH102
    except FileExistsError:
        return False
    os.chmod(path, mode)  # noqa: PTH101 - whatever umask the engine has
    return True


def _unlink(path: str) -> None:
    try:
        os.unlink(path)  # noqa: PTH108
    except FileNotFoundError:
        return


def _names(path: str) -> list[str]:
    try:
        return os.listdir(path)  # noqa: PTH208
    except OSError:
        return []
