"""Packs an installation made below a folder into one archive that is unpacked at /. Standard library only.

The archive belongs to one Python version, whose byte code and extension modules it holds. Called by `make package`.
"""

from __future__ import annotations

import sys
import tarfile
import tomllib
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]


def main(root: Path, python_version: str) -> None:
    """Write build/vgpu-snapshot-<version>-py<python>.tar.gz with root as every file's owner."""
    version = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    out = REPOSITORY / "build" / f"vgpu-snapshot-{version}-py{python_version}.tar.gz"
    partial = out.with_suffix(".partial")
    with tarfile.open(partial, "w:gz") as tar:
        tar.add(root, arcname=".", filter=owned_by_root)
    partial.rename(out)
    print(f"{out}: {out.stat().st_size / 1e6:.1f} MB")


def owned_by_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Who built it must not show."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = "root"
    return entry


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
