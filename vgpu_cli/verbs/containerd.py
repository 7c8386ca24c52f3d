"""`vgpu containerd checkpoint|restore|watch|clean`: whole checkpoints of containerd's containers in one command each.

The work is done by containerd_integration over containerd's own socket; this reads the command line, shows progress and
says what came out. Output: spec/containerd-output.schema.json. Guide: docs/containerd.md.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vgpu_cli import registry_source
from vgpu_cli.output import printable
from vgpu_cli.parsing import add_action, add_actions
from vgpu_cli.wording import size_text
from vgpu_errors import NeedsRoot, UserError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from vgpu_cli.output import Output

HELP = "checkpoint and restore containers of containerd in one command"
DESCRIPTION = (
    "Makes a checkpoint image or one file of a running container, and a running container of either, over containerd's "
    "own socket: pause, GPU and CPU state, changed files, base image, options and labels. 'watch' seals, signs and "
    "pushes what the kubelet writes; 'clean' removes what containerd and killed commands leave behind."
)
EXAMPLES = (
    (
        "vgpu containerd restore registry.example/train:1 train-2",
        "restore an image; one that containerd does not have is pulled",
    ),
    (
        "vgpu containerd checkpoint train localhost/train:1 --leave-running",
        "checkpoint image of a container that goes on",
    ),
    ("vgpu containerd checkpoint train --export train.tar", "checkpoint into one file, and end the container"),
    ("vgpu containerd restore --import train.tar train-2", "restore the file under another name"),
)
PROGRESS_INTERVAL_S = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One action and what it works on."""
    actions = add_actions(parser)
    _checkpoint_arguments(add_action(actions, "checkpoint", "make a checkpoint of a running container"))
    _restore_arguments(add_action(actions, "restore", "start a container from a checkpoint"))
    _watch_arguments(add_action(actions, "watch", "seal, sign and push the checkpoints that the kubelet writes"))
    recover = add_action(actions, "recover", "start a container again whose checkpoint was killed after it had ended")
    recover.add_argument("folder", metavar="FOLDER", help="as 'vgpu containerd clean' names it")
    recover.add_argument(
        "-a", "--address", metavar="SOCKET", default="/run/containerd/containerd.sock", help="default: %(default)s"
    )
    clean = add_action(actions, "clean", "remove temporary folders that containerd and killed commands left")
    clean.add_argument(
        "--min-age", type=float, metavar="SECONDS", default=900.0, help="spare what is younger (default: 900)"
    )
    clean.add_argument("--dry-run", action="store_true", help="say what would be removed and remove nothing")


def _checkpoint_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("container", metavar="CONTAINER", help="id of a running container")
    parser.add_argument("reference", metavar="REF", nargs="?", default="", help="name of the checkpoint image to make")
    parser.add_argument("--export", metavar="FILE", help="write one file instead of an image")
    parser.add_argument("--compress", choices=("none", "gzip", "zstd"), help="with --export (default: none)")
    parser.add_argument("-R", "--leave-running", action="store_true", help="let the container go on")
    parser.add_argument("--no-image", action="store_true", help="leave the base image out")
    parser.add_argument(
        "--label", metavar="KEY=VALUE", action="append", default=[], help="label of the checkpoint image"
    )
    _criu_arguments(parser)
    _connection_arguments(parser)


def _restore_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "words",
        metavar="REF NAME",
        nargs="+",
        help="checkpoint image, pulled where containerd has none of this name, and the new container's id",
    )
    parser.add_argument(
        "--import", dest="file", metavar="FILE", help="restore an exported file; NAME alone is given then"
    )
    parser.add_argument("--snapshotter", metavar="NAME", default="", help="default: the checkpoint's own")
    parser.add_argument(
        "--label", metavar="KEY=VALUE", action="append", default=[], help="further label of the container"
    )
    parser.add_argument(
        "--log-uri", metavar="URI", default="file:///dev/null", help="where its output goes (default: %(default)s)"
    )
    _criu_arguments(parser)
    _connection_arguments(parser)
    registry_source.add_options(parser)


def _watch_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--directory", metavar="DIR", default="/var/lib/kubelet/checkpoints", help="default: %(default)s"
    )
    parser.add_argument(
        "--state", metavar="FILE", default="/var/lib/vgpu/kubelet-watch.json", help="what was done already"
    )
    parser.add_argument(
        "--push-to", metavar="REGISTRY/REPO", help="push every checkpoint there, tagged by its file's name"
    )
    parser.add_argument("--once", action="store_true", help="do what lies there now, and end")


def _criu_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tcp-established", action="store_true", help="keep established TCP connections")
    parser.add_argument("--file-locks", action="store_true", help="keep file locks")
    parser.add_argument(
        "--timeout", type=float, metavar="SECONDS", default=1800.0, help="for the runtime's part (default: 1800)"
    )
    parser.add_argument("--work-dir", metavar="DIR", default="/var/lib/vgpu/containerd", help="default: %(default)s")


def _connection_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-n", "--namespace", metavar="NAME", default="default", help="containerd's (default: default)")
    parser.add_argument(
        "-a", "--address", metavar="SOCKET", default="/run/containerd/containerd.sock", help="default: %(default)s"
    )


def run(args: argparse.Namespace, out: Output) -> int:
    """Do the one action."""
    if os.geteuid() != 0:
        raise NeedsRoot(what=f"vgpu containerd {args.action}")
    from containerd_integration.interruption import Interrupted  # noqa: PLC0415 - like the rest, where it is needed

    actions = {"checkpoint": _checkpoint, "restore": _restore, "recover": _recover, "watch": _watch, "clean": _clean}
    try:
        return actions[args.action](args, out)
    except Interrupted as signal:
        lines = [f"vgpu: ended by {signal}; what was begun is undone", *getattr(signal, "__notes__", [])]
        print("\n  note: ".join(map(printable, lines)), file=sys.stderr, flush=True)
        return 128 + signal.number


def _checkpoint(args: argparse.Namespace, out: Output) -> int:
    from containerd_integration.api.connection import Connection  # noqa: PLC0415 - grpc takes 60 ms
    from containerd_integration.checkpointing import Wish, checkpoint  # noqa: PLC0415

    if bool(args.reference) == bool(args.export):
        raise UserError(what="vgpu containerd checkpoint: give either REF or --export FILE")
    if args.compress and not args.export:
        raise UserError(what="vgpu containerd checkpoint: --compress goes with --export")
    wish = Wish(
        container=args.container,
        reference=args.reference,
        export=Path(args.export) if args.export else None,
        compression=args.compress or "none",
        leaves_running=args.leave_running,
        keeps_tcp=args.tcp_established,
        keeps_file_locks=args.file_locks,
        carries_image=not args.no_image,
        labels=_labels(args.label),
        work_directory=Path(args.work_dir),
        deadline_s=args.timeout,
    )
    progress = Progress(out)
    with Connection(args.address, args.namespace) as connection:
        _sweep(wish.work_directory)
        made = checkpoint(connection, wish, progress)
    name = str(wish.export or wish.reference)
    size = sum(entry.size for entry in made.entries)
    out.json(
        {
            "container": wish.container,
            "checkpoint": name,
            "digest": made.index.digest,
            "bytes": size,
            "leftRunning": wish.leaves_running,
            "phases": progress.phases(),
            "notes": made.notes,
        }
    )
    for note in made.notes:
        out.line(note)
    out.line(f"{name}: {size_text(size)}, {made.index.digest}")
    return 0


def _restore(args: argparse.Namespace, out: Output) -> int:
    from containerd_integration.api.connection import Connection  # noqa: PLC0415
    from containerd_integration.restoring import Wish, restore  # noqa: PLC0415

    if len(args.words) != (1 if args.file else 2):
        raise UserError(what="vgpu containerd restore: give REF NAME, or --import FILE NAME")
    wish = Wish(
        name=args.words[-1],
        reference="" if args.file else args.words[0],
        file=Path(args.file) if args.file else None,
        open_registry=lambda reference: registry_source.open_registry(reference, args),
        snapshotter=args.snapshotter,
        labels=_labels(args.label),
        log_uri=args.log_uri,
        keeps_tcp=args.tcp_established,
        keeps_file_locks=args.file_locks,
        work_directory=Path(args.work_dir),
        deadline_s=args.timeout,
    )
    progress = Progress(out)
    with Connection(args.address, args.namespace) as connection:
        _sweep(wish.work_directory)
        restored = restore(connection, wish, progress)
    out.json(
        {
            "container": wish.name,
            "pid": restored.pid,
            "image": restored.image,
            "snapshotter": restored.snapshotter,
            "phases": progress.phases(),
        }
    )
    out.line(f"{wish.name} runs, pid {restored.pid}")
    return 0


def _recover(args: argparse.Namespace, out: Output) -> int:
    from containerd_integration.api.connection import Connection  # noqa: PLC0415
    from containerd_integration.checkpointing import recover  # noqa: PLC0415
    from containerd_integration.leftovers import Leftover, remove  # noqa: PLC0415
    from containerd_integration.work_folder import WorkFolder, locked, whose  # noqa: PLC0415

    folder = WorkFolder(Path(args.folder))
    owner = whose(folder.path)
    if owner is None:
        raise UserError(
            what=f"{args.folder} holds no container's state",
            remedy="'vgpu containerd clean --dry-run' lists those that do.",
        )
    with Connection(args.address, owner.namespace) as connection, locked(folder.path):
        container = connection.call("containers", "Get", id=owner.container).container
        pid = recover(connection, container, folder)
    remove(Leftover(folder.path, 0, None))
    out.json({"container": owner.container, "pid": pid})
    out.line(f"{owner.container} runs, pid {pid}")
    return 0


def _watch(args: argparse.Namespace, out: Output) -> int:
    from containerd_integration.interruption import Interrupted, Interruption  # noqa: PLC0415
    from containerd_integration.kubelet_watch import KubeletWatch  # noqa: PLC0415

    watch = KubeletWatch(
        Path(args.directory),
        Path(args.state),
        push_to=args.push_to,
        etc=Path(args.etc),
        say=lambda line: _say(out, line),
    )
    try:
        with Interruption():
            if args.once:
                return 1 if watch.catch_up() else 0
            watch.run()
    except Interrupted as signal:  # how a service ends; an archive that was being sealed is as it was
        if args.once:
            raise
        _say(out, f"ended by {signal}")
    return 0


def _clean(args: argparse.Namespace, out: Output) -> int:
    from containerd_integration.leftovers import find_leftovers, remove  # noqa: PLC0415

    found = find_leftovers(min_age_s=args.min_age)
    for leftover in found:
        if leftover.reason is None and not args.dry_run:
            remove(leftover)
    out.json(
        {
            "dryRun": args.dry_run,
            "folders": [{"path": str(one.path), "bytes": one.size, "kept": one.reason} for one in found],
        }
    )
    rows = [(one.path, size_text(one.size), one.reason or ("would go" if args.dry_run else "removed")) for one in found]
    if rows:
        out.table("", ("folder", "size", "what"), rows)
    else:
        out.line("Nothing was left behind.")
    return 0


def _sweep(work_directory: Path) -> None:
    """Folders of killed commands; what another command is at work in stays."""
    from containerd_integration.leftovers import find_own, remove  # noqa: PLC0415

    for leftover in find_own(work_directory):
        if leftover.reason is None:
            remove(leftover)


def _labels(texts: list[str]) -> tuple[tuple[str, str], ...]:
    pairs = [text.partition("=") for text in texts]
    if any(not key or not sign for key, sign, _ in pairs):
        raise UserError(what="--label takes KEY=VALUE")
    return tuple((key, value) for key, _, value in pairs)


def _say(out: Output, line: str) -> None:
    """Into the service's journal; never into a document."""
    print(line, file=sys.stderr, flush=True)
    del out


class Progress:
    """Phases and bytes on stderr of a terminal; the seconds of each phase for the document."""

    def __init__(self, out: Output) -> None:
        self._is_shown = sys.stderr.isatty() and not out.is_json
        self._taken: list[tuple[str, float]] = []
        self._phase = ""
        self._last = 0.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A phase; nothing is said of it before it ends, but for its bytes."""
        started, self._phase = time.monotonic(), name
        try:
            yield
        finally:
            self._taken.append((name, round(time.monotonic() - started, 3)))
            if self._is_shown:
                print(f"\r\x1b[K{name}: {self._taken[-1][1]:.2f} s", file=sys.stderr, flush=True)

    def bytes(self, done: int, whole: int) -> None:
        """How far the phase is."""
        if self._is_shown and time.monotonic() - self._last > PROGRESS_INTERVAL_S:
            self._last = time.monotonic()
            print(
                f"\r\x1b[K{self._phase}: {size_text(done)} of {size_text(whole)}", end="", file=sys.stderr, flush=True
            )

    def phases(self) -> list[dict[str, Any]]:
        """For the document."""
        return [{"phase": name, "seconds": seconds} for name, seconds in self._taken]
