"""Packs a host's root for a machine without a network: the engines and what they load, and no more.

`carry` adds what a host is filled with: third-party packages, preload builds, test programs, all built here.
Refuses to touch the cached root: what is left out is left out of the archive only.
"""

from __future__ import annotations

import fnmatch
import lzma
import os
import shutil
import tarfile
from pathlib import Path

from tests.hosts import project
from tests.hosts.host import TestHost
from tests.hosts.roots import REPOSITORY, root_for
from tests.software_gpu import build as gpu_build
from vgpu_preload import build as preload_build

# Each was looked at in a trimmed root that still checkpoints and restores (tests/engines/test_host_smoke.py).
LEFT_OUT = (
    "var/cache/*",
    "var/lib/apt/*",
    "var/lib/dpkg/*",
    "var/log/*",
    "tmp/*",
    "boot/*",
    "root/.*",
    "usr/share/doc*",
    "usr/share/man",
    "usr/share/locale",
    "usr/share/i18n",
    "usr/share/zoneinfo",
    "usr/share/info",
    "usr/share/lintian",
    "usr/share/bash-completion",
    "usr/share/zsh",
    "usr/share/fish",
    "usr/share/perl*",
    "usr/share/common-licenses",
    "usr/share/bug",
    "usr/share/debconf",
    "usr/share/python3",
    "usr/share/pixmaps",
    "usr/share/gcc",
    "usr/share/gdb",
    "usr/share/polkit-1",
    "usr/share/systemtap",
    "usr/share/nvim",
    "usr/share/vim",
    "usr/lib/x86_64-linux-gnu/gconv",
    "usr/lib/x86_64-linux-gnu/perl*",
    "usr/lib/x86_64-linux-gnu/libperl*",
    "usr/lib/x86_64-linux-gnu/*.a",
    "usr/lib/x86_64-linux-gnu/systemd",
    "usr/lib/x86_64-linux-gnu/security",
    "usr/lib/x86_64-linux-gnu/libicu*",
    "usr/lib/x86_64-linux-gnu/libapt*",
    "usr/lib/x86_64-linux-gnu/libdb-5*",
    "usr/lib/apt",
    "usr/lib/systemd",
    "usr/lib/udev",
    "usr/lib/dpkg",
    "usr/lib/locale",
    "usr/lib/compat-ld",
    "usr/lib/python3*/lib2to3",
    "usr/lib/python3*/pydoc_data",
    "usr/lib/python3*/idlelib",
    "usr/lib/python3*/test",
    "usr/lib/python3*/__pycache__",
    "usr/lib/python3*/*/__pycache__",
    "usr/lib/python3*/*/*/__pycache__",
    "usr/libexec/podman/podman-testing",
    "usr/libexec/podman/quadlet",
    "usr/libexec/podman/rootlessport",
    "usr/bin/perl*",
    "usr/bin/apt*",
    "usr/bin/dpkg*",
    "usr/bin/podmansh",
    "usr/bin/crun-wasm",
    "usr/bin/buildah",
    "usr/bin/containerd-stress",
    "usr/bin/localedef",
    "usr/bin/gpg*",
    "usr/bin/sq*",
    "usr/bin/systemd*",
    "usr/lib/podman/netavark-dhcp-proxy-client",
    "usr/sbin/tc",
    "usr/bin/dirmngr",
    "usr/bin/pzstd",
    "usr/bin/openssl",
    "usr/bin/crit*",
    "usr/sbin/aa-*",
    "usr/sbin/fs-idmap",
    "usr/sbin/pidfd-kill",
    "usr/sbin/recvtty",
    "usr/sbin/remap-rootfs",
    "usr/sbin/sd-helper",
    "usr/sbin/seccompagent",
    "usr/lib/cni",
    "usr/sbin/apparmor*",
    "etc/apparmor*",
    "usr/games",
    "usr/include",
)
# Most of a root is machine code: the branch converter and a wide window are worth a sixth of it.
FILTERS = [{"id": lzma.FILTER_X86}, {"id": lzma.FILTER_LZMA2, "preset": 9}]
CONTAINERD = ("usr/bin/containerd*", "usr/bin/ctr", "usr/lib/containerd")
REGISTRY = ("usr/bin/docker-registry", "usr/bin/skopeo")


ENVIRONMENT = """\
# Source this from anywhere before 'python -m tests.hosts', pytest or the demo: hosts are made from this folder alone.
here=$(cd "$(dirname "${BASH_SOURCE:-$0}")" && pwd)
unpacked=${TMPDIR:-/tmp}/vgpu-vendor-$(id -u)
[ -d "$unpacked" ] || { mkdir "$unpacked" && tar -C "$unpacked" -xJf "$here/vendor.tar.xz"; }
export VGPU_HOST_ROOT_ARCHIVE=$here/root.tar.xz VGPU_ROWS=@ROW@
export VGPU_VENDOR=$unpacked VGPU_PRELOAD=$here/preload VGPU_SOFTWARE_GPU=$here/software_gpu
export VGPU_HOSTS_CACHE=${VGPU_HOSTS_CACHE:-${TMPDIR:-/tmp}/vgpu-hosts}
"""


def carry(row: str, folder: Path) -> None:
    """Fill `folder` with all that test hosts of this row need; `. FOLDER/env.sh` on the other machine uses it."""
    folder.mkdir(parents=True, exist_ok=True)
    pack(root_for(row), folder / "root.tar.xz")
    with TestHost(row, "packer") as host:
        vendor = project.vendor_folder(host)
    compress(vendor, kept_files(vendor, ("*__pycache__",)), folder / "vendor.tar.xz")
    preload = REPOSITORY / "build" / "preload"
    preload_build.build(preload)
    for name, built in (("preload", preload), ("software_gpu", gpu_build.build())):
        shutil.rmtree(folder / name, ignore_errors=True)
        shutil.copytree(built, folder / name, symlinks=True)
    (folder / "env.sh").write_text(ENVIRONMENT.replace("@ROW@", row), encoding="utf-8")


def pack(root: Path, out: Path, *, with_containerd: bool = False, with_registry: bool = False) -> None:
    """Write the trimmed root."""
    left_out = LEFT_OUT + (() if with_containerd else CONTAINERD) + (() if with_registry else REGISTRY)
    compress(root, kept_files(root, left_out), out)


def compress(root: Path, files: list[Path], out: Path) -> None:
    """Write a tar.xz, unless it is newer than the root; a reader never sees half of it under the final name."""
    if out.exists() and out.stat().st_mtime > root.stat().st_ctime:
        return
    partial = out.with_name(out.name + ".partial")
    with (
        lzma.open(partial, "wb", format=lzma.FORMAT_XZ, filters=FILTERS) as packed,
        tarfile.open(fileobj=packed, mode="w|") as tar,
    ):
        for path in files:
            tar.add(path, arcname=str(path.relative_to(root)), recursive=False)
    partial.rename(out)


def kept_files(root: Path, left_out: tuple[str, ...]) -> list[Path]:
    """Everything below the root that no pattern names, folders before their content."""
    kept: list[Path] = []
    for folder, folders, names in os.walk(root):
        here = Path(folder)
        folders[:] = sorted(name for name in folders if not _matches(here / name, root, left_out))
        entries = sorted({*folders, *(name for name in names if not _matches(here / name, root, left_out))})
        kept += [here / name for name in entries if not _is_device(here / name)]
    return kept


def _matches(path: Path, root: Path, patterns: tuple[str, ...]) -> bool:
    name = str(path.relative_to(root))
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _is_device(path: Path) -> bool:
    return path.is_char_device() or path.is_block_device() or path.is_socket() or path.is_fifo()
