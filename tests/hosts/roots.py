"""Builds the roots of the test hosts with mmdebstrap and keeps them in a cache, one directory per row and recipe.

Refuses to use a half-built root: a root appears under its final name by one rename. `host` mounts it read-only.
Called by the fixtures of tests/engines and by `python -m tests.hosts`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING

from tests.hosts.mirror import debian_mirror
from tests.hosts.rows import ENGINE_ROWS, ROWS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.hosts.rows import Row

REPOSITORY = Path(__file__).resolve().parents[2]
BUILD_DEADLINE_S = 900
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
LEFT_OUT = ("man", "doc", "locale", "info", "lintian", "bug")


class HostUnavailable(Exception):
    """A test host could not be built or entered; the message says why."""


def cache_folder() -> Path:
    """Where roots are kept; VGPU_HOSTS_CACHE moves it to another disk."""
    folder = Path(os.environ.get("VGPU_HOSTS_CACHE", REPOSITORY / "build" / "hosts"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def root_for(row_name: str, archive: str | None = None) -> Path:
    """The row's root directory, built now if the cache does not have it; a packed root takes the builder's place."""
    archive = archive or os.environ.get("VGPU_HOST_ROOT_ARCHIVE")
    row = (ROWS | ENGINE_ROWS)[row_name]
    if archive:
        stamp = int(Path(archive).stat().st_mtime)
        return _cached(f"{row.name}-packed-{stamp}", lambda root: _unpack(Path(archive), root))
    return _cached(f"{row.name}-{row.fingerprint()}", lambda root: _debootstrap(row, root))


def _cached(name: str, make) -> Path:
    final = cache_folder() / name
    with _locked(cache_folder() / f".{name}.lock"):
        if final.is_dir():
            return final
        partial = cache_folder() / f".{name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        try:
            make(partial)
            partial.chmod(0o755)
            partial.rename(final)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return final


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _debootstrap(row: Row, root: Path) -> None:
    if not shutil.which("mmdebstrap"):
        message = "mmdebstrap is not installed; 'make dev' installs it"
        raise HostUnavailable(message)
    log = cache_folder() / f"{row.name}.log"
    with log.open("w") as out:
        done = subprocess.run(
            _mmdebstrap_command(row, root),
            stdout=out,
            stderr=out,
            stdin=subprocess.DEVNULL,
            timeout=BUILD_DEADLINE_S,
            check=False,
        )
    if done.returncode:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        message = f"mmdebstrap of {row.suite} ended with status {done.returncode}:\n{tail}"
        raise HostUnavailable(message)


def _mmdebstrap_command(row: Row, root: Path) -> list[str]:
    command = ["mmdebstrap", "--variant=minbase", "--format=directory", f"--include={','.join(row.packages)}"]
    command += ['--aptopt=Acquire::Languages "none"', '--aptopt=Acquire::Retries "3"']
    command += [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in LEFT_OUT]
    if not row.checks_valid_until:
        command.append('--aptopt=Acquire::Check-Valid-Until "false"')
    if Path(KEYRING).exists():
        command.append(f"--keyring={KEYRING}")
    mirror = debian_mirror(_os_release(), _apt_sources())
    return [*command, row.suite, str(root), *([mirror] if mirror else [])]


def _os_release() -> str:
    return Path("/etc/os-release").read_text(encoding="utf-8")


def _apt_sources() -> Iterator[tuple[str, str]]:
    parts = Path("/etc/apt/sources.list.d")
    for path in [Path("/etc/apt/sources.list"), *sorted(parts.glob("*.list")), *sorted(parts.glob("*.sources"))]:
        if path.exists():
            yield path.name, path.read_text(encoding="utf-8", errors="replace")


def _unpack(archive: Path, root: Path) -> None:
    root.mkdir(parents=True)
    with tarfile.open(archive) as tar:
        # An attribute, not extractall's argument: Debian 12's Python 3.11.2 does not know the argument yet.
        tar.extraction_filter = getattr(tarfile, "fully_trusted_filter", None)
        tar.extractall(root)
