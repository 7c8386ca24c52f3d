"""Finds the one container that a word on the command line means. Used by doctor, suspend and resume."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpu_state.known_containers import known_containers
from vgpu_cli.container_names import container_names
from vgpu_errors import NoSuchContainer

if TYPE_CHECKING:
    from gpu_state.known_containers import KnownContainer


def find_container(wanted: str) -> KnownContainer:
    """The one container with that name, id or beginning of an id."""
    known = known_containers()
    names = container_names()
    exact = [container for container in known if wanted in {container.id, names.get(container.id)}]
    found = exact or [container for container in known if container.id.startswith(wanted)]
    if len(found) != 1:
        raise NoSuchContainer(container=wanted)
    return found[0]
