"""Fetches the third-party packages of requirements.lock for a given Python version, into one folder.

The installed programs run isolated from the system's site-packages (entry.py.in), so what they import beside the
standard library travels with them. Uses this interpreter's pip as the machine has it set up; takes wheels only, except
for the pure-Python packages that are published as source. Called by `make install`, `make package` and the test hosts.

A crash leaves `OUT.partial`, which the next run deletes: the final name appears by one rename.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

LOCK = Path(__file__).resolve().parents[1] / "requirements.lock"
PIP_DEADLINE_S = 600
PLATFORMS = ("manylinux_2_34_x86_64", "manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
SOURCE_ONLY = ("pyinotify",)
NOT_NEEDED = ("*.pxd", "*.pyx", "*.pyi", "tests", "test")
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")


def main() -> int:
    """Parse the command line and fetch."""
    parser = argparse.ArgumentParser(description="Fetch the third-party packages for one Python version.")
    parser.add_argument("--python-version", default=f"{sys.version_info.major}.{sys.version_info.minor}")
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    try:
        fetch(options.python_version, options.out)
    except subprocess.SubprocessError as error:
        print(f"vendor: {error}", file=sys.stderr)
        return 1
    return 0


def fetch(version: str, out: Path) -> None:
    """Fill `out`, unless it is there already."""
    if out.is_dir():
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    wheels = partial / "wheels"
    run([*PIP, "wheel", "--no-deps", "--wheel-dir", str(wheels), *pins(SOURCE_ONLY)])
    command = [*PIP, "install", "--target", str(partial / "vendor"), "--no-deps", "--no-compile"]
    command += ["--only-binary=:all:", "--find-links", str(wheels), "--implementation", "cp"]
    command += ["--python-version", version]
    command += [part for platform in PLATFORMS for part in ("--platform", platform)]
    run([*command, *pins(None)])
    trim(partial / "vendor")
    (partial / "vendor").rename(out)
    shutil.rmtree(partial)


def pins(names: tuple[str, ...] | None) -> list[str]:
    """`name==version` of the lock file, all or the named ones. Markers stay out: they speak of this Python."""
    found = re.findall(r"^([A-Za-z0-9_.-]+)==([^\s;\\]+)", LOCK.read_text(encoding="utf-8"), re.MULTILINE)
    return [f"{name}=={release}" for name, release in found if names is None or name in names]


def run(command: list[str]) -> None:
    """Run pip within a deadline; its own words go to stderr."""
    subprocess.run(command, check=True, timeout=PIP_DEADLINE_S, stdin=subprocess.DEVNULL)


def trim(folder: Path) -> None:
    """Leave out what only builds and tests of those packages need."""
    for pattern in NOT_NEEDED:
        for path in list(folder.rglob(pattern)):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    shutil.rmtree(folder / "bin", ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
