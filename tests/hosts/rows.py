"""The rows of the engine test table: one Debian suite each, with the engines it ships.

Pure data; `roots` turns a row into a directory, the fixtures of `tests/engines` turn it into a host.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass

PACKAGES = (
    "busybox-static",
    "ca-certificates",
    "catatonit",
    "conmon",
    "containerd",
    "criu",
    "crun",
    "docker-registry",
    "iproute2",
    "libcriu2",
    "musl",
    "netavark",
    "nftables",
    "podman",
    "procps",
    "python3",
    "runc",
    "skopeo",
    "strace",
    "zstd",
)

# Docker beside its own containerd: 100 MB that the other rows, and a root carried to a GPU machine, go without.
DOCKER_PACKAGES = (
    "busybox-static",
    "ca-certificates",
    "catatonit",
    "containerd",
    "criu",
    "docker-cli",
    "docker.io",
    "iproute2",
    "iptables",
    "musl",
    "procps",
    "python3",
    "runc",
    "strace",
    "zstd",
)


# Count up when roots.py builds a root differently from the same packages.
RECIPE = 1


@dataclass(frozen=True)
class Row:
    """One Debian suite and how it is fetched."""

    name: str
    suite: str
    checks_valid_until: bool = True
    packages: tuple[str, ...] = PACKAGES

    def fingerprint(self) -> str:
        """Changes with the recipe, so that a cached root is never a stale one."""
        return hashlib.sha256(f"{RECIPE} {self!r}".encode()).hexdigest()[:12]


ROWS = {
    "trixie": Row("trixie", "trixie"),
    # The suite moves on daily; a mirror may lag behind the release file's own limit.
    "testing": Row("testing", "testing", checks_valid_until=False, packages=tuple(sorted((*PACKAGES, "cosign")))),
}

# Hosts of one engine alone: no row of the table, a test asks for them by name.
ENGINE_ROWS = {
    "docker": Row("docker", "testing", checks_valid_until=False, packages=DOCKER_PACKAGES),
}


def wanted_rows() -> list[str]:
    """The rows the tests run on; VGPU_ROWS (comma-separated) narrows or reorders them."""
    names = [name.strip() for name in os.environ.get("VGPU_ROWS", ",".join(ROWS)).split(",") if name.strip()]
    unknown = sorted(set(names) - set(ROWS) - set(ENGINE_ROWS))
    if unknown:
        message = f"VGPU_ROWS names unknown rows {unknown}; known are {sorted(ROWS)}"
        raise ValueError(message)
    return [name for name in names if name in ROWS]


def is_wanted(name: str) -> bool:
    """Whether tests on hosts of this row, or of this engine alone, are to run; VGPU_ROWS leaves out what it does not name."""
    return "VGPU_ROWS" not in os.environ or name in [part.strip() for part in os.environ["VGPU_ROWS"].split(",")]
