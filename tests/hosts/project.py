"""Puts vgpu-snapshot into a test host: third-party packages for the host's own Python, then packaging/install.py.

The packages are fetched and byte-compiled once per Python version and lock (build/vendor/<version>-<lock>).
Refuses to reuse this machine's site-packages: their extension modules are another Python's.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tests.hosts.roots import REPOSITORY, HostUnavailable

if TYPE_CHECKING:
    from tests.hosts.host import TestHost

PACKAGING = REPOSITORY / "packaging"
DEADLINE_S = 700
INSTALLED_VENDOR = "/usr/lib/vgpu-snapshot/vendor"


def python_version(root: Path) -> str:
    """The version of the root's /usr/bin/python3, read from the link's target (`python3.13`)."""
    found = re.fullmatch(r"python(\d+\.\d+)", (root / "usr/bin/python3").readlink().name)
    if not found:
        message = f"{root} has no /usr/bin/python3 of a known version"
        raise HostUnavailable(message)
    return found[1]


def install(host: TestHost) -> None:
    """Install the working tree into the host's writable root. VGPU_PRELOAD names preload builds that were carried here."""
    options = ["--destdir", str(host.root), "--vendor", str(vendor_folder(host))]
    if os.environ.get("VGPU_PRELOAD"):
        options += ["--preload", os.environ["VGPU_PRELOAD"]]
    _run("install.py", *options)


def vendor_folder(host: TestHost) -> Path:
    """The third-party packages for the host's Python. VGPU_VENDOR names a folder that was carried here instead."""
    if os.environ.get("VGPU_VENDOR"):
        return Path(os.environ["VGPU_VENDOR"])
    version = python_version(host.root_image)
    recipe = hashlib.sha256()
    for path in (REPOSITORY / "requirements.lock", PACKAGING / "vendor.py"):
        recipe.update(path.read_bytes())
    final = REPOSITORY / "build" / "vendor" / f"{version}-{recipe.hexdigest()[:12]}"
    final.parent.mkdir(parents=True, exist_ok=True)
    with (final.parent / f".{version}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not final.is_dir():
            fetched = final.with_name(final.name + ".fetched")
            _run("vendor.py", "--python-version", version, str(fetched))
            _compile(host, fetched, final)
    return final


def _compile(host: TestHost, fetched: Path, final: Path) -> None:
    """Byte-compile with the host's interpreter; sources keep their times, so that copies stay valid."""
    inside = host.root / "var/tmp/vendor"
    shutil.copytree(fetched, inside)
    place = ["-s", "/var/tmp/vendor", "-p", INSTALLED_VENDOR]
    # Not every file of every package compiles on every version (templates, Python 2 remains): their own affair.
    host.run(
        ["/usr/bin/python3", "-IS", "-m", "compileall", "-qq", *place, "/var/tmp/vendor"], timeout=300, check=False
    )
    partial = final.with_name(final.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(inside, partial)
    partial.rename(final)
    shutil.rmtree(fetched)
    shutil.rmtree(inside)


def _run(script: str, *arguments: str) -> None:
    command = [sys.executable, str(PACKAGING / script), *arguments]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        stdin=subprocess.DEVNULL,
        cwd=REPOSITORY,
        check=False,
    )
    if done.returncode:
        message = f"packaging/{script} ended with status {done.returncode}:\n{done.stdout}{done.stderr[-3000:]}"
        raise HostUnavailable(message)
