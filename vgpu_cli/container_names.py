"""Asks the engines of this node for the names of their containers.

podman by its API where its socket is there, else by `podman ps`; Docker by `docker ps`; containerd's containers are called by
their ids. Never fails: an engine that does not answer in time leaves its containers with their ids. Used by the verbs that take
or show a container.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

PODMAN_SOCKET = Path("/run/podman/podman.sock")
ENGINE_COMMANDS = ("podman", "docker")
_TIMEOUT_S = 5
_LISTING = ("ps", "--all", "--no-trunc", "--format", "{{.ID}} {{.Names}}")


def container_names() -> dict[str, str]:
    """Container id -> name, of all engines that answer."""
    names: dict[str, str] = {}
    for engine in ENGINE_COMMANDS:
        names |= (_by_podman_api(PODMAN_SOCKET) if engine == "podman" else None) or _by_command(engine)
    return names


def _by_podman_api(socket: Path) -> dict[str, str]:
    if not socket.is_socket():
        return {}
    try:
        from podman import PodmanClient  # noqa: PLC0415 - 100 ms that only a node with the socket pays

        with PodmanClient(base_url=f"unix://{socket}", timeout=_TIMEOUT_S) as client:
            return {container.id: container.name for container in client.containers.list(all=True)}
    except Exception:  # noqa: BLE001 - the package raises whatever requests and urllib3 raise; names are a comfort
        return {}


def _by_command(engine: str) -> dict[str, str]:
    program = shutil.which(engine)
    if program is None:
        return {}
    try:
        done = subprocess.run(
            [program, *_LISTING],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    pairs = (line.split() for line in done.stdout.splitlines()) if done.returncode == 0 else ()
    return {pair[0]: pair[1].split(",")[0] for pair in pairs if len(pair) == 2}
