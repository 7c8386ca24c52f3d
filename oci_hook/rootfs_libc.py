"""Finds out which C library a container's program runs on: glibc, musl, or none that can preload.

Reads headers of files of the image, which may be hostile: symbolic links are resolved inside the container's own
tree and never by the kernel, only regular files are opened, and every length is bounded. Refuses to guess: two
libraries with nothing to choose between them give None and a reason.
Called by injection.py. ELF: System V gABI, chapters 4 and 5 (read interface only).
"""

from __future__ import annotations

import os
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

GLIBC, MUSL = "glibc", "musl"

MOST_LINKS = 40  # as the kernel's ELOOP
MOST_SCRIPTS = 4
HEAD_BYTES = 64 * 1024
MACHINES = {"x86_64": 62, "aarch64": 183}
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
LOADER_FOLDERS = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")


class Found:
    """The library, or None, and what led there in words."""

    __slots__ = ("libc", "reason")

    def __init__(self, libc: str | None, reason: str) -> None:
        self.libc = libc
        self.reason = reason


class Tree:
    """The container's file tree as it will be: the root file system with the bind mounts over it."""

    __slots__ = ("_mounts", "_root")

    def __init__(self, root: str, mounts: list[tuple[str, str | None]]) -> None:
        self._root = root
        self._mounts = sorted(mounts, key=lambda mount: len(mount[0]))[::-1]  # of equal ones the later first

    def resolve(self, path: str) -> str | None:
        """The host path of a file of the container with every link followed inside the container; None if it is absent."""
        left = [part for part in reversed(path.split("/")) if part]
        here: list[str] = []
        links = 0
        while left:
            part = left.pop()
            if part in (".", ".."):
                here = here[:-1] if part == ".." else here
                continue
            host = self._host_path([*here, part])
            mode = _mode(host)
            if host is None or mode is None:
                return None
            if not stat.S_ISLNK(mode):
                here.append(part)
                continue
            links += 1
            if links > MOST_LINKS:
                return None
            target = os.readlink(host)  # noqa: PTH115 - pathlib costs 10 ms
            here = [] if target.startswith("/") else here
            left.extend(step for step in reversed(target.split("/")) if step)
        return self._host_path(here)

    def head(self, path: str) -> bytes | None:
        """The first bytes of a regular file of the container."""
        host = self.resolve(path)
        if host is None:
            return None
        try:
            descriptor = os.open(host, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY)
        except OSError:
            return None
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return None
            return os.pread(descriptor, HEAD_BYTES, 0)
        finally:
            os.close(descriptor)

    def names(self, path: str) -> list[str]:
        """The names in a folder of the container."""
        host = self.resolve(path)
        try:
            return os.listdir(host) if host is not None else []  # noqa: PTH208 - pathlib costs 10 ms at every start
        except OSError:
            return []

    def _host_path(self, parts: list[str]) -> str | None:
        """Where the kernel would look: under the longest mount above the path, else in the root file system."""
        path = "/" + "/".join(parts)
        for destination, source in self._mounts:
            if path == destination or path.startswith(destination.rstrip("/") + "/"):
                if source is None:
                    return None
                return source + path[len(destination.rstrip("/")) :] if path != destination else source
        return self._root + path if parts else self._root


def tree_of(spec: dict[str, Any], bundle: str) -> Tree:
    """The tree that a spec describes; mounts that are no bind mounts hide what lies below them."""
    root = str((spec.get("root") or {}).get("path") or "rootfs")
    if not root.startswith("/"):
        root = f"{bundle}/{root}"
    mounts: list[tuple[str, str | None]] = []
    for mount in spec.get("mounts") or ():
        destination = "/" + str(mount.get("destination", "")).strip("/")
        options = mount.get("options") or ()
        is_bind = mount.get("type") == "bind" or "bind" in options or "rbind" in options
        source = str(mount.get("source", ""))
        if is_bind and not source.startswith("/"):
            source = f"{bundle}/{source}"
        # Links in the source are the host's own: podman's catatonit is one.
        mounts.append((destination, os.path.realpath(source) if is_bind else None))
    return Tree(root, mounts)


def find_libc(tree: Tree, process: dict[str, Any]) -> Found:
    """The library of the program that the container starts.

    A static program often starts others (podman's `--init` does), so there the image's shell and then its loaders decide.
    """
    program = _program_path(tree, process)
    if program is None:
        return _libc_of_image(tree, "the program is not in the image")
    found = _libc_of_program(tree, program, MOST_SCRIPTS)
    if found.libc is not None or found.reason.startswith("other"):
        return found
    return _libc_of_image(tree, f"{program}: {found.reason}")


def _program_path(tree: Tree, process: dict[str, Any]) -> str | None:
    arguments = process.get("args") or [""]
    name = str(arguments[0])
    cwd = str(process.get("cwd") or "/")
    if "/" in name:
        path = name if name.startswith("/") else f"{cwd}/{name}"
        return path if tree.resolve(path) is not None else None
    for folder in _search_path(process).split(":"):
        path = f"{folder or cwd}/{name}"
        if name and tree.resolve(path) is not None:
            return path
    return None


def _search_path(process: dict[str, Any]) -> str:
    found = DEFAULT_PATH
    for entry in process.get("env") or ():
        if str(entry).startswith("PATH="):
            found = str(entry)[len("PATH=") :]
    return found


def _libc_of_program(tree: Tree, path: str, scripts_left: int) -> Found:
    head = tree.head(path)
    if head is None:
        return Found(None, "cannot be read")
    if head[:2] == b"#!":
        words = head[2:256].split(b"\n", 1)[0].split()
        if not words or scripts_left == 0:
            return Found(None, "its interpreter is not to be found")
        return _libc_of_program(tree, os.fsdecode(words[0]), scripts_left - 1)
    if head[:4] != b"\x7fELF":
        return Found(None, "is neither ELF nor a script")
    return _libc_of_elf(head)


def _libc_of_elf(head: bytes) -> Found:
    """By the name of the loader that the file asks for."""
    if len(head) < 64 or head[4] != 2 or head[5] != 1:
        return Found(None, "other architecture: not 64-bit little-endian ELF")
    if int.from_bytes(head[18:20], "little") != MACHINES.get(os.uname().machine):
        return Found(None, "other architecture")
    interpreter = _interpreter(head)
    if interpreter is None:
        return Found(None, "statically linked")
    return _libc_of_loader(interpreter)


def _interpreter(head: bytes) -> str | None:
    """The PT_INTERP string of a 64-bit little-endian file."""
    table = int.from_bytes(head[32:40], "little")
    size, count = int.from_bytes(head[54:56], "little"), int.from_bytes(head[56:58], "little")
    for number in range(count):
        entry = head[table + number * size : table + number * size + 56]
        if len(entry) < 56:
            return None
        if int.from_bytes(entry[0:4], "little") == 3:
            start, length = int.from_bytes(entry[8:16], "little"), int.from_bytes(entry[32:40], "little")
            return os.fsdecode(head[start : start + min(length, 4096)].split(b"\0", 1)[0]) or None
    return None


def _libc_of_loader(path: str) -> Found:
    name = path.rpartition("/")[2]
    if name.startswith("ld-musl-"):
        return Found(MUSL, f"loader {path}")
    if name.startswith(("ld-linux", "ld-2.")):
        return Found(GLIBC, f"loader {path}")
    return Found(None, f"unknown loader {path}")


def _libc_of_image(tree: Tree, why: str) -> Found:
    """What the image's shell runs on, else which loaders it has."""
    shell = _libc_of_program(tree, "/bin/sh", MOST_SCRIPTS)
    if shell.libc is not None:
        return Found(shell.libc, f"{why}; /bin/sh has {shell.reason}")
    loaders = [name for folder in LOADER_FOLDERS for name in tree.names(folder)]
    found = {_libc_of_loader(name).libc for name in loaders if name.startswith("ld-") and ".so" in name} - {None}
    if len(found) == 1:
        return Found(found.pop(), f"{why}; the image has this loader alone")
    return Found(None, f"{why}; the image has {'several loaders' if found else 'no loader'}")


def _mode(host: str | None) -> int | None:
    if host is None:
        return None
    try:
        return os.lstat(host).st_mode
    except OSError:
        return None
