"""Finds the one container that a word on the command line means. Used by doctor, and by together.py for suspend and resume."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpu_state.known_containers import known_containers
from vgpu_cli.container_names import container_names
from vgpu_errors import NoSuchContainer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gpu_state.known_containers import KnownContainer


def find_container(wanted: str) -> KnownContainer:
    """The one container with that name, id or beginning of an id."""
    return find_containers([wanted])[0]


def find_containers(wanted: Sequence[str]) -> list[KnownContainer]:
    """One container for each word; the engines are asked once."""
    known = known_containers()
    names = container_names()
    return [_find(one, known, names) for one in wanted]


def _find(wanted: str, known: Sequence[KnownContainer], names: Mapping[str, str]) -> KnownContainer:
    exact = [container for container in known if wanted in {container.id, names.get(container.id)}]
    found = exact or [container for container in known if container.id.startswith(wanted)]
    if len(found) != 1:
        raise NoSuchContainer(container=wanted)
    return found[0]
