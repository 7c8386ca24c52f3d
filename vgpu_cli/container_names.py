"""Asks podman for the names of its containers, when its API socket is there.

Never starts podman, never fails: without an answer a container is shown by its id. Used by `vgpu ps` and `vgpu doctor`.
"""

from __future__ import annotations

from pathlib import Path

PODMAN_SOCKET = Path("/run/podman/podman.sock")
_TIMEOUT_S = 5


def podman_names(socket: Path = PODMAN_SOCKET) -> dict[str, str]:
    """Container id -> name."""
    if not socket.is_socket():
        return {}
    try:
        from podman import PodmanClient  # noqa: PLC0415 - 100 ms that only a node with the socket pays

        with PodmanClient(base_url=f"unix://{socket}", timeout=_TIMEOUT_S) as client:
            return {container.id: container.name for container in client.containers.list(all=True)}
    except Exception:  # noqa: BLE001 - the package raises whatever requests and urllib3 raise; names are a comfort
        return {}
