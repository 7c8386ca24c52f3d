"""The container images of the tests, made without an engine and without a network: a root file system of a few files.

Reproducible: the same inputs give the same bytes, so an image has one ID on every host, which
`podman container restore --import` demands. Refuses to pull anything.
"""

from __future__ import annotations

import hashlib
import io
import json
import stat
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING

from tests.hosts import software_gpu
from tests.hosts.roots import REPOSITORY, HostUnavailable

if TYPE_CHECKING:
    from tests.hosts.host import TestHost

REPOSITORY_NAME = "localhost/vgpu-test"
APPLETS = (
    "sh",
    "cat",
    "sleep",
    "ls",
    "echo",
    "env",
    "kill",
    "ps",
    "id",
    "grep",
    "head",
    "tail",
    "true",
    "false",
    "mkdir",
    "rm",
    "touch",
    "dd",
    "stat",
    "test",
    "mount",
    "wc",
    "cut",
    "seq",
    "date",
    "nc",
    "readlink",
    "find",
    "od",
)
LIBRARIES = {
    "glibc": (
        "lib64/ld-linux-x86-64.so.2",
        *(
            f"lib/x86_64-linux-gnu/{name}"
            for name in ("libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "libgcc_s.so.1")
        ),
    ),
    "plain": (),
    "machine": (),
    "musl": ("lib/ld-musl-x86_64.so.1", "lib/x86_64-linux-musl/libc.so"),
}
# The image `machine` has no files: its /usr is to be bind-mounted from a machine whose /bin and /lib lead there.
MERGED_USR = {name: f"usr/{name}" for name in ("bin", "lib", "lib64", "sbin")}
FOLDERS = ("bin", "dev", "etc", "lib", "lib64", "proc", "run", "sys", "tmp", "usr", "usr/bin", "usr/lib", "opt", "var")


def load(host: TestHost, libc: str) -> str:
    """Make the image if need be, load it into the host's podman storage and return its reference."""
    reference = f"{REPOSITORY_NAME}:{libc}"
    if host.run(["podman", "image", "exists", reference], check=False).returncode == 0:
        return reference
    archive = archive_for(libc, host.root_image)
    inside = f"/var/tmp/{archive.name}"
    host.copy_in(archive, inside)
    host.run(["podman", "load", "-q", "-i", inside])
    host.run(["rm", inside])
    return reference


def archive_for(libc: str, root: Path) -> Path:
    """The image as a docker archive under build/images, named by its content."""
    layer = _layer(
        _files(libc, root), MERGED_USR if libc == "machine" else {f"bin/{name}": "busybox" for name in APPLETS}
    )
    archive = _docker_archive(layer, f"{REPOSITORY_NAME}:{libc}")
    path = REPOSITORY / "build" / "images" / f"{libc}-{hashlib.sha256(archive).hexdigest()[:16]}.tar"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_bytes(archive)
        partial.rename(path)
    return path


def _files(libc: str, root: Path) -> dict[str, bytes]:
    if libc not in LIBRARIES:
        message = f"no test image {libc}; there are {sorted(LIBRARIES)}"
        raise HostUnavailable(message)
    files = {} if libc == "machine" else {"bin/busybox": (root / "usr/bin/busybox").read_bytes()}
    files |= {name: _library(root, name) for name in LIBRARIES[libc] if (root / "usr" / name).exists()}
    files |= (
        {f"usr/bin/{name}": path.read_bytes() for name, path in software_gpu.programs(libc).items()}
        if LIBRARIES[libc]
        else {}
    )
    files["etc/passwd"] = b"root:x:0:0:root:/:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/sh\n"
    files["etc/group"] = b"root:x:0:\nnogroup:x:65534:\n"
    return files


def _library(root: Path, name: str) -> bytes:
    """Follow links inside the root, whose absolute ones must not lead out of it."""
    path = root / "usr" / name
    while path.is_symlink():
        link = path.readlink()
        path = root / link.relative_to("/") if link.is_absolute() else path.parent / link
    return path.read_bytes()


def _layer(files: dict[str, bytes], links: dict[str, str]) -> bytes:
    out = io.BytesIO()
    folders = {*FOLDERS, *(str(parent) for file in files for parent in Path(file).parents)} - {".", *links}
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name in sorted(folders):
            _add(tar, name, tarfile.DIRTYPE, mode=0o1777 if name == "tmp" else 0o755)
        for name, data in sorted(files.items()):
            _add(tar, name, tarfile.REGTYPE, data=data, mode=0o644 if name.startswith("etc/") else 0o755)
        for name, target in sorted(links.items()):
            _add(tar, name, tarfile.SYMTYPE, link=target, mode=0o777)
    return out.getvalue()


def _add(tar: tarfile.TarFile, name: str, kind: bytes, *, data: bytes = b"", link: str = "", mode: int) -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname, entry.size, entry.mode = kind, link, len(data), stat.S_IMODE(mode)
    tar.addfile(entry, io.BytesIO(data))


def _docker_archive(layer: bytes, reference: str) -> bytes:
    config = json.dumps(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Env": ["PATH=/usr/bin:/bin"], "Cmd": ["/bin/sh"], "WorkingDir": "/"},
            "created": "1970-01-01T00:00:00Z",
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
            "history": [{"created": "1970-01-01T00:00:00Z", "created_by": "tests/hosts/images.py"}],
        },
        sort_keys=True,
    ).encode()
    config_name = f"{hashlib.sha256(config).hexdigest()}.json"
    manifest = json.dumps([{"Config": config_name, "RepoTags": [reference], "Layers": ["layer.tar"]}]).encode()
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, data in ((config_name, config), ("layer.tar", layer), ("manifest.json", manifest)):
            _add(tar, name, tarfile.REGTYPE, data=data, mode=0o644)
    return out.getvalue()
