"""`vgpu setup`: makes an engine of this node know vgpu-runtime, and takes exactly that back with `--undo`.

Starts no service and restarts no engine. Which files are wanted is in `setup_plans`, writing and undoing in
`installed_files`; docs/install.md lists every file. Called by people and by packages' install scripts.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from vgpu_errors import NeedsRoot, UserError

if TYPE_CHECKING:
    import argparse

    from containerd_integration.cdi import Mount
    from vgpu_cli.installed_files import Outcome
    from vgpu_cli.output import Output
    from vgpu_cli.setup_plans import SetupOptions

HELP = "make podman, containerd or Docker know vgpu-runtime, or undo that"
DESCRIPTION = (
    "Makes an engine of this node know vgpu-runtime: writes settings, a node key, a trust policy, hooks and the engine's "
    "drop-in files. Files that exist are kept, a second run writes only what differs, and --undo takes back exactly what "
    "was written and not changed since. Starts and restarts nothing."
)
EXAMPLES = (
    ("vgpu setup podman", "set this node up for podman"),
    ("vgpu setup podman --dry-run", "say what that would write"),
    ("vgpu setup --undo", "take everything back"),
)

TARGETS = ("podman", "containerd", "docker", "cdi")
ETC = "/etc/vgpu"
LOW_LEVEL_RUNTIMES = ("/usr/bin/runc", "/usr/sbin/runc", "/usr/bin/crun")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "target",
        nargs="?",
        choices=TARGETS,
        help="what to set up; 'cdi' writes the CDI spec alone, again after a driver change; without it, --undo undoes all",
    )
    parser.add_argument(
        "--undo", action="store_true", help="remove exactly what the setup wrote and nobody changed since"
    )
    parser.add_argument("--keep-keys", action="store_true", help="with --undo: leave node.key and node.pub in place")
    parser.add_argument("--dry-run", action="store_true", help="say what would happen and write nothing")
    parser.add_argument(
        "--low-level-runtime", metavar="PATH", help="runc, crun or another OCI runtime to stand in front of"
    )
    parser.add_argument("--driver-dir", metavar="DIR", help="folder of libcuda.so.1, where the loader does not find it")
    parser.add_argument(
        "--cdi-mount",
        metavar="SRC:DST[:OPTIONS]",
        action="append",
        default=[],
        help="one more bind mount in the CDI spec; may be repeated",
    )
    parser.add_argument(
        "--default-runtime", action="store_true", help="podman, docker: use vgpu-runtime without being asked"
    )
    parser.add_argument(
        "--kubelet", action="store_true", help="containerd: a service that seals and signs the kubelet's checkpoints"
    )
    parser.add_argument("--push-to", metavar="REGISTRY/REPO", default="", help="with --kubelet: push them there, too")
    parser.add_argument(
        "--hooks-only", action="store_true", help="podman: keep the runtime, inject through a precreate hook only"
    )
    parser.add_argument("--destdir", metavar="D", default="/", help="write below this folder, for packages and images")


def run(args: argparse.Namespace, out: Output) -> int:
    """Write or take back the files and show each."""
    _check(args)
    if args.undo:
        return _undo(args, out)
    return _write(args, out)


def _write(args: argparse.Namespace, out: Output) -> int:
    from vgpu_cli.installed_files import InstalledFiles  # noqa: PLC0415 - 'vgpu setup --help' does not need it
    from vgpu_cli.setup_plans import PLANS, notes  # noqa: PLC0415

    options = _options(args)
    installed = InstalledFiles.load(options.root)
    planned = PLANS[args.target](options, installed)
    outcomes = installed.write(args.target, planned, is_dry_run=args.dry_run)
    hints = notes(args.target, options, planned)
    if args.target != "cdi" and not args.low_level_runtime and not _has_low_level_runtime(options.root):
        hints.append("Neither runc nor crun was found: install one, or name yours with --low-level-runtime.")
    _show(args, out, outcomes, hints)
    return 0


def _undo(args: argparse.Namespace, out: Output) -> int:
    from vgpu_cli.installed_files import InstalledFiles  # noqa: PLC0415
    from vgpu_cli.node_files import NODE_KEY, NODE_PUBLIC_KEY  # noqa: PLC0415

    installed = InstalledFiles.load(Path(args.destdir))
    keep = (NODE_KEY, NODE_PUBLIC_KEY) if args.keep_keys else ()
    targets = [args.target] if args.target else list(installed.targets())
    outcomes = [one for target in targets for one in installed.undo(target, keep=keep, is_dry_run=args.dry_run)]
    hints = [] if outcomes else ["Nothing was set up here."]
    if any(one.path == NODE_KEY and one.what == "removed" for one in outcomes):
        hints.append("The node key is gone: checkpoints it signed are accepted only where its node.pub is trusted.")
    _show(args, out, outcomes, hints)
    return 0


def _show(args: argparse.Namespace, out: Output, outcomes: list[Outcome], hints: list[str]) -> None:
    out.json(
        {
            "target": args.target,
            "undo": args.undo,
            "dryRun": args.dry_run,
            "files": [outcome.to_json() for outcome in outcomes],
            "notes": hints,
        }
    )
    if outcomes:
        title = "Would do:" if args.dry_run else ""
        out.table(title, ("file", "what", "why"), [(one.path, one.what, one.why) for one in outcomes])
    for hint in hints:
        out.line(hint)


def _check(args: argparse.Namespace) -> None:
    if args.target is None and not args.undo:
        raise UserError(what="vgpu setup: name what to set up: podman, containerd, docker or cdi")
    if args.etc != ETC:
        raise UserError(
            what="vgpu setup writes to /etc/vgpu only", remedy="Leave --etc out; --destdir moves the whole tree."
        )
    if args.destdir == "/" and os.geteuid() != 0:
        raise NeedsRoot(what="vgpu setup")
    if args.push_to and not args.kubelet:
        raise UserError(what="--push-to goes with --kubelet")
    if args.kubelet and args.target != "containerd":
        raise UserError(what="--kubelet goes with 'vgpu setup containerd'")
    if args.low_level_runtime:
        _check_low_level_runtime(args.low_level_runtime, Path(args.destdir))


def _check_low_level_runtime(path: str, root: Path) -> None:
    real = root / path.lstrip("/")
    if not path.startswith("/") or not real.is_file() or not os.access(real, os.X_OK):
        raise UserError(what=f"--low-level-runtime {path} is not the absolute path of a program")
    if Path(path).name == "vgpu-runtime":
        raise UserError(what="--low-level-runtime must not be vgpu-runtime itself")


def _options(args: argparse.Namespace) -> SetupOptions:
    from vgpu_cli.setup_plans import SetupOptions  # noqa: PLC0415

    given = {"low_level_runtime": args.low_level_runtime, "driver_dir": args.driver_dir}
    return SetupOptions(
        root=Path(args.destdir),
        settings=tuple((key, value) for key, value in given.items() if value),
        is_default_runtime=args.default_runtime,
        is_hooks_only=args.hooks_only,
        cdi_mounts=tuple(_mount(text) for text in args.cdi_mount),
        watches_kubelet=args.kubelet,
        push_to=args.push_to,
    )


def _mount(text: str) -> Mount:
    from containerd_integration.cdi import parse_mount  # noqa: PLC0415

    try:
        return parse_mount(text)
    except ValueError as error:
        raise UserError(what=f"--cdi-mount: {error}") from error


def _has_low_level_runtime(root: Path) -> bool:
    return any((root / path.lstrip("/")).exists() for path in LOW_LEVEL_RUNTIMES)
