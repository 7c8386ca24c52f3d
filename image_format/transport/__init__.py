"""A checkpoint on its way to and from a registry (spec/transport.md; docs/registry.md).

    sources      what can be pushed                 manifest   the one document that names it all
    blobs        which of it the registry lacks     notes      where this node knows checkpoints to lie
    pushing      sealed directory -> registry       pulling    registry -> store or sealed directory
    tying        podman's image and ours in one     fetching   what a reference archive lacks
    watching     what a transfer tells meanwhile

Trust carries over by the content root: the packed index that was pushed has the same one as the sealed index, which the
signature covers. `image_format.packs.packed` decides what is in a pack, `image_format.registry` moves bytes; this ties them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from image_format.transport.fetching import fetch_missing
    from image_format.transport.notes import Notes
    from image_format.transport.pulling import look, pull_into_directory, pull_into_store
    from image_format.transport.pushing import push
    from image_format.transport.sources import open_source

__all__ = ["Notes", "fetch_missing", "look", "open_source", "pull_into_directory", "pull_into_store", "push"]

_HOMES = {
    "Notes": "notes",
    "fetch_missing": "fetching",
    "look": "pulling",
    "open_source": "sources",
    "pull_into_directory": "pulling",
    "pull_into_store": "pulling",
    "push": "pushing",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(name)
    from importlib import import_module  # noqa: PLC0415 - whoever pulls need not load what pushes

    return getattr(import_module(f"image_format.transport.{_HOMES[name]}"), name)
