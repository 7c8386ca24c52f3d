"""A client for OCI registries: blobs, manifests and referrers, over urllib3 alone (docs/registry.md).

    reference    what a user may write              credentials  what podman and docker keep for it
    network      TLS, proxies, connections          tokens       Basic, bearer and identity tokens
    session      one exchange: auth, redirects      patience     how often, how long
    uploads, downloads, manifests, referrers        the four things that are moved
    client       all of it for one repository       parallel     many transfers at once

Knows nothing of checkpoints: `image_format.transport` says what to move, `image_format.packs.packed` what is in it.
Importing this package costs as much as urllib3; the names are loaded when they are asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from image_format.registry.client import Registry
    from image_format.registry.credentials import Credentials
    from image_format.registry.patience import Retries
    from image_format.registry.reference import Reference

__all__ = ["Credentials", "Reference", "Registry", "Retries"]

_HOMES = {"Credentials": "credentials", "Reference": "reference", "Registry": "client", "Retries": "patience"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(name)
    from importlib import import_module  # noqa: PLC0415 - this is the lazy import

    return getattr(import_module(f"image_format.registry.{_HOMES[name]}"), name)
