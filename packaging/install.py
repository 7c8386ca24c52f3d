"""Installs vgpu-snapshot from the working tree into a root, or removes it again. Standard library only.

The packages go to /usr/lib/vgpu-snapshot, where their generic names meet nobody else's, with four entry scripts in
/usr/bin; man pages and shell completions, made from the programs' own command lines, go where each is looked for. A manifest lists every file, so that `--uninstall` removes exactly these and nothing that grew beside them
(keys, settings and images are the node's own). Refuses to replace a file of /usr/bin that it did not install.
Called by `make install`, `make package` and the test hosts (tests/hosts/project.py).

A crash in the middle leaves files that the manifest already names: it is written before the first of them.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
LIBRARY = Path("usr/lib/vgpu-snapshot")
MANIFEST = LIBRARY / "installed-files.txt"
MAN = Path("usr/share/man")
COMPLETIONS = {
    "bash": Path("usr/share/bash-completion/completions/vgpu"),
    "zsh": Path("usr/share/zsh/vendor-completions/_vgpu"),
    "fish": Path("usr/share/fish/vendor_completions.d/vgpu.fish"),
}
PACKAGES = (
    "vgpu_errors",
    "image_format",
    "gpu_state",
    "oci_hook",
    "runtime_shim",
    "podman_integration",
    "containerd_integration",
    "docker_integration",
    "vgpu_cli",
)
ENTRIES = {
    "vgpu": "vgpu_cli.main",
    "vgpu-runtime": "runtime_shim.main",
    "vgpu-hook": "oci_hook.main",
    "vgpu-agent": "gpu_state.agent",
}
NOT_INSTALLED = shutil.ignore_patterns("__pycache__", "*.pyc", ".*")
ENTRY_TEMPLATE = Path(__file__).with_name("entry.py.in")
MARK = "# installed by vgpu-snapshot"
COMPILE = ("-IS", "-m", "compileall", "-qq")
COMPILE_DEADLINE_S = 300


class InstallRefused(Exception):
    """The installation would damage something; the message says what."""


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line and do one of the two things."""
    parser = argparse.ArgumentParser(description="Install vgpu-snapshot from the working tree.")
    parser.add_argument("--destdir", type=Path, default=Path("/"), help="root to install into (default: /)")
    parser.add_argument("--python", default="/usr/bin/python3", help="interpreter of the entry scripts, inside destdir")
    parser.add_argument("--vendor", type=Path, help="folder with the third-party packages for that interpreter")
    parser.add_argument("--preload", type=Path, help="folder with preload builds (default: build them now)")
    parser.add_argument("--no-preload", action="store_true", help="install without the preload library")
    parser.add_argument("--uninstall", action="store_true", help="remove what an earlier run installed")
    options = parser.parse_args(arguments)
    os.umask(0o022)  # containers with other user ids reach the preload library through these folders
    try:
        if options.uninstall:
            uninstall(options.destdir)
        else:
            install(options)
    except (InstallRefused, OSError, subprocess.SubprocessError) as error:
        print(f"install: {error}", file=sys.stderr)
        return 1
    return 0


def install(options: argparse.Namespace) -> None:
    """Put everything in place of an older installation, whose preload builds stay: checkpoints name them by build id."""
    with tempfile.TemporaryDirectory() as made:
        install_plan(options, planned_files(options) | pages_and_completions(Path(made)))


def install_plan(options: argparse.Namespace, plan: dict[Path, Path | None]) -> None:
    """Put the planned files in place."""
    root = options.destdir
    refuse_foreign_entries(root)
    older = older_preload_builds(root) - set(plan)
    write_manifest(root, sorted({*plan, *older, *installed_files(root)}))
    remove(root, installed_files(root) - set(plan) - older)
    for target, source in plan.items():
        copy(source, root / target)
    for name, module in ENTRIES.items():
        write_entry(root / "usr/bin" / name, module, options.python)
    compiled = compile_packages(root, options.python)
    write_manifest(root, sorted({*plan, *older, *compiled}))


def planned_files(options: argparse.Namespace) -> dict[Path, Path | None]:
    """Target below destdir -> source file; None for the entry scripts, which are made from the template."""
    plan: dict[Path, Path | None] = {}
    for package in PACKAGES:
        plan |= tree(REPOSITORY / package, LIBRARY / package)
    for schema in sorted((REPOSITORY / "spec").glob("*.schema.json")):
        plan[LIBRARY / "spec" / schema.name] = schema
    if options.vendor:
        plan |= tree(options.vendor, LIBRARY / "vendor", keep_compiled=True)
    if not options.no_preload:
        builds = options.preload or build_preload()
        for libc in ("glibc", "musl"):
            plan |= tree(builds / libc, LIBRARY / "preload" / libc)
    plan |= {Path("usr/bin") / name: None for name in ENTRIES}
    return plan


def pages_and_completions(folder: Path) -> dict[Path, Path | None]:
    """What is made from the command line itself; nothing where this interpreter lacks a package that it loads."""
    try:
        return made_files(folder)
    except ModuleNotFoundError as missing:
        print(f"install: without man pages and shell completion ({missing})", file=sys.stderr)
        return {}


def made_files(folder: Path) -> dict[Path, Path | None]:
    """Write the man pages and completion scripts into the folder; target below destdir -> file there."""
    sys.path.insert(0, str(REPOSITORY))
    os.environ["NO_COLOR"] = "1"  # argparse of Python 3.14 colours its help on a terminal
    from tools import man_pages  # noqa: PLC0415 - they load the whole command line, which --uninstall does not need
    from vgpu_cli.command_tree import tree as command_tree  # noqa: PLC0415
    from vgpu_cli.completion import script  # noqa: PLC0415
    from vgpu_cli.main import full_parser  # noqa: PLC0415

    plan: dict[Path, Path | None] = {MAN / page: folder / page for page in man_pages.write(folder)}
    commands = command_tree(full_parser())
    for shell, target in COMPLETIONS.items():
        (folder / shell).write_text(script(shell, commands), encoding="utf-8")
        plan[target] = folder / shell
    return plan


def tree(source: Path, target: Path, *, keep_compiled: bool = False) -> dict[Path, Path | None]:
    """Every regular file below `source`, without caches."""
    found: dict[Path, Path | None] = {}
    for folder, folders, names in os.walk(source):
        hidden = {} if keep_compiled else NOT_INSTALLED(folder, [*folders, *names])
        folders[:] = sorted(set(folders) - set(hidden))
        for name in sorted(set(names) - set(hidden)):
            path = Path(folder) / name
            found[target / path.relative_to(source)] = path
    return found


def build_preload() -> Path:
    """Build libvgpu.so for both C libraries and return the folder laid out by libc and build id."""
    sys.path.insert(0, str(REPOSITORY))
    from vgpu_preload import build  # noqa: PLC0415 - the tree's own builder, needed only without --preload

    folder = REPOSITORY / "build" / "preload"
    build.build(folder)
    return folder


def refuse_foreign_entries(root: Path) -> None:
    """A program of the same name that is not ours stays."""
    for name in ENTRIES:
        path = root / "usr/bin" / name
        if path.exists() and MARK not in path.read_text(encoding="utf-8", errors="replace"):
            message = f"{path} exists and was not installed by this script; move it away first"
            raise InstallRefused(message)


def copy(source: Path | None, target: Path) -> None:
    """Copy one file readable for all: containers with other user ids load the preload library."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if source is None:
        return
    shutil.copy2(source, target)
    target.chmod(0o755 if os.access(source, os.X_OK) else 0o644)


def write_entry(path: Path, module: str, python: str) -> None:
    """Write one command from the template."""
    text = ENTRY_TEMPLATE.read_text(encoding="utf-8")
    path.write_text(text.replace("@PYTHON@", python).replace("@MODULE@", module), encoding="utf-8")
    path.chmod(0o755)


def compile_packages(root: Path, python: str) -> list[Path]:
    """Byte-compile for the interpreter that will run it, which in another root may be another version."""
    where = root / LIBRARY
    if (root / python.lstrip("/")).exists() and root != Path("/"):
        command = ["chroot", str(root), python, *COMPILE, str("/" / LIBRARY)]
    else:
        command = [python, *COMPILE, "-s", str(root), "-p", "/", str(where)]
    # Third-party packages may hold files that this version of Python does not compile; ours must, and are asked.
    subprocess.run(command, check=False, timeout=COMPILE_DEADLINE_S, stdin=subprocess.DEVNULL)
    for package in PACKAGES:
        if (where / package).is_dir() and not list((where / package / "__pycache__").glob("*.pyc")):
            message = f"{package} was not byte-compiled by {python}"
            raise InstallRefused(message)
    return [path.relative_to(root) for path in sorted(where.rglob("__pycache__/*.pyc"))]


def write_manifest(root: Path, files: list[Path]) -> None:
    """Name every file of the installation, through a rename, so that it is always whole."""
    path = root / MANIFEST
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text("".join(f"{name}\n" for name in files), encoding="utf-8")
    partial.rename(path)


def installed_files(root: Path) -> set[Path]:
    """What the manifest lists; nothing without one."""
    manifest = root / MANIFEST
    return set(map(Path, manifest.read_text(encoding="utf-8").splitlines())) if manifest.exists() else set()


def older_preload_builds(root: Path) -> set[Path]:
    """libvgpu.so of every build installed so far: a restore mounts the very file that the process was dumped with."""
    return {path for path in installed_files(root) if path.name == "libvgpu.so"}


def uninstall(root: Path) -> None:
    """Remove the manifest's files and the folders that this leaves empty; the manifest goes last."""
    files = installed_files(root)
    remove(root, files)
    if files:
        remove(root, {MANIFEST})


def remove(root: Path, files: set[Path]) -> None:
    """Remove files, then the folders of the library that are empty without them."""
    for name in files:
        (root / name).unlink(missing_ok=True)
    folders = {parent for name in files for parent in name.parents if LIBRARY in (parent, *parent.parents)}
    for folder in sorted(folders, key=lambda path: len(path.parts), reverse=True):
        if (root / folder).is_dir() and not any((root / folder).iterdir()):
            (root / folder).rmdir()


if __name__ == "__main__":
    sys.exit(main())
