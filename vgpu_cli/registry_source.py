"""An image in a registry as a SOURCE of `vgpu sign` and `vgpu verify`: which words mean one, and how it is reached.

Refuses a name without a registry's host. Decides nothing about trust; `image_format.trust.referrer_signatures` does.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from image_format.registry import Registry

PREFIX = "docker://"
# A first part with a dot, a port, or the name localhost is a host; podman's local images need none.
_HOST = re.compile(r"(localhost|[^/]*[.:][^/]*)/[^/].*")


def add_options(parser: argparse.ArgumentParser) -> None:
    """How to reach the registry."""
    group = parser.add_argument_group("images in a registry")
    group.add_argument("--plain-http", action="store_true", default=None, help="speak http without TLS")
    group.add_argument("--ca-file", metavar="FILE", help="trust the certificates of this file, too")
    group.add_argument("--authfile", metavar="FILE", help="credentials, in the form of podman's auth.json")


def names_registry(source: str) -> bool:
    """The word begins with a host, or says so itself."""
    return source.startswith(PREFIX) or _HOST.fullmatch(source) is not None


def open_registry(source: str, args: argparse.Namespace, on_notice: Callable[[str], None] | None = None) -> Registry:
    """The client of the image's repository; use as a context manager. `on_notice` hears of waits."""
    from image_format.registry import Reference, Registry  # noqa: PLC0415 - urllib3 takes 90 ms

    reference = Reference.parse(source.removeprefix(PREFIX))
    return Registry(
        reference, plain_http=args.plain_http, ca_file=args.ca_file, auth_file=args.authfile, progress=on_notice
    )
