"""Reads containerd's main file, the drop-ins that it imports before ours, and containerd's version.

Only looks; a file that does not parse is named in the error. Called by `vgpu setup containerd`.
"""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

from containerd_integration.config import DROP_IN_PATH, MAIN_PATH
from vgpu_errors import BadConfiguration

VERSION_DEADLINE_S = 15


def main_text(root: Path) -> str | None:
    """Text of config.toml, or None where there is none."""
    path = root / MAIN_PATH.lstrip("/")
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else None


def parse(text: str, path: object) -> dict[str, Any]:
    """The document in the text; `path` names it in the error."""
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # tomllib lets those of long numbers and deep arrays through
        raise BadConfiguration(path=path, what=f"not valid TOML: {error}") from error


def documents_before_ours(root: Path, main: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The main file and its imports in containerd's order, without our own drop-in.

    Imports of imports are followed no further: nobody was seen to nest them.
    """
    documents = [main] if main is not None else []
    imported = [
        parse(path.read_text(encoding="utf-8", errors="replace"), path) for path in imported_files(root, main or {})
    ]
    return documents + imported


def imported_files(root: Path, main: dict[str, Any]) -> list[Path]:
    """Files that the main file's `imports` name, patterns expanded, ours left out."""
    found: list[Path] = []
    patterns = main.get("imports", [])
    if not isinstance(patterns, list) or not all(isinstance(pattern, str) for pattern in patterns):
        raise BadConfiguration(path=root / MAIN_PATH.lstrip("/"), what="'imports' must be a list of paths")
    for pattern in patterns:
        absolute = pattern if pattern.startswith("/") else f"{Path(MAIN_PATH).parent}/{pattern}"
        try:
            found += sorted(root.glob(absolute.lstrip("/")))
        except (ValueError, NotImplementedError, IndexError) as error:  # "**" in a name, a NUL, nothing at all
            raise BadConfiguration(path=root / MAIN_PATH.lstrip("/"), what=f"imports {pattern!a}: {error}") from error
    ours = root / DROP_IN_PATH.lstrip("/")
    return [path for path in found if path != ours and path.is_file()]


def containerd_version() -> tuple[int, ...] | None:
    """Version of the containerd in PATH, or None when there is none or it does not answer."""
    try:
        answer = subprocess.run(
            ["containerd", "--version"], capture_output=True, text=True, timeout=VERSION_DEADLINE_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"\bv?(?<!\d)(\d{1,9})\.(\d{1,9})\.(\d{1,9})", answer.stdout)
    return tuple(int(number) for number in found.groups()) if found else None
