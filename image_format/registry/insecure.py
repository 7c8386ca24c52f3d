"""Which registries the administrator allowed plain http for: `insecure = true` in podman's registries.conf.

podman then tries https first and falls back to http; so does the client. Nothing else of these files is followed.
Unreadable files are passed over: podman itself reports them, and without them a registry is merely not insecure.
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from image_format.registry.reference import Reference

SYSTEM_FILE = Path("/etc/containers/registries.conf")
MAX_FILE_BYTES = 1 << 20


def is_insecure(reference: Reference, *, environ: Mapping[str, str] = os.environ) -> bool:
    """The longest entry that fits this repository says so; of equally long ones the one that is read last."""
    longest, found = -1, False
    for path in _files(environ):
        for entry in _entries(path):
            prefix = entry.get("prefix") or entry.get("location") or ""
            if isinstance(prefix, str) and _fits(prefix, reference) and len(prefix) >= longest:
                longest, found = len(prefix), entry.get("insecure") is True
    return found


def _files(environ: Mapping[str, str]) -> Iterator[Path]:
    named = environ.get("CONTAINERS_REGISTRIES_CONF")
    own = Path(environ.get("HOME") or "/root", ".config/containers/registries.conf")
    main = Path(named) if named else (own if own.is_file() else SYSTEM_FILE)
    yield main
    for folder in (SYSTEM_FILE.with_suffix(".conf.d"), own.with_suffix(".conf.d")):
        if folder.is_dir():
            yield from sorted(path for path in folder.iterdir() if path.suffix == ".conf")


def _entries(path: Path) -> list[dict[str, Any]]:
    try:
        with path.open("rb") as file:
            doc = tomllib.loads(file.read(MAX_FILE_BYTES).decode())
    except (OSError, ValueError):
        return []
    entries = doc.get("registry")
    return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []


def _fits(prefix: str, reference: Reference) -> bool:
    if prefix.startswith("*."):
        return reference.host.endswith(prefix[1:]) and bool(prefix[2:])
    return bool(prefix) and (reference.name == prefix or reference.name.startswith(f"{prefix}/"))
