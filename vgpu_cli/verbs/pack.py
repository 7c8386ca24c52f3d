"""`vgpu pack SOURCE -o TARGET`: an archive or directory that holds everything becomes a small one that refers to the store.

Verifies the source before anything of it is used, brings packs and bulk files into the store, and replaces nothing that is
there (spec/archive-layout.md, section 7). Prints spec/pack-output.schema.json.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from vgpu_cli.store_choice import add_store_option, open_store
from vgpu_cli.wording import count_text, size_text
from vgpu_errors import UserError

if TYPE_CHECKING:
    import argparse

    from image_format.references.reference_archive import Repacked
    from image_format.store import Store
    from vgpu_cli.output import Output

HELP = "move an archive's bulk into the store, so that a small archive is left"
DESCRIPTION = (
    "Makes of an archive or a checkpoint directory a small one that refers to this node's store: packs and files over 1 MiB "
    "are verified and brought there. The small one restores on every node whose store has them; 'vgpu unpack' makes it "
    "whole again."
)
EXAMPLES = (
    ("vgpu pack trainer.tar.zst -o trainer.ref.tar.zst", "keep the content in the store and a small archive"),
    ("vgpu pack trainer.tar -o t.ref.tar --location registry.example/team/trainer@sha256:...", "say where else it is"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """From what, to what."""
    parser.add_argument("source", metavar="SOURCE", help="an engine's archive or a checkpoint directory")
    parser.add_argument("-o", "--output", metavar="TARGET", required=True, help="the archive or directory to make")
    parser.add_argument("--compress", choices=("none", "gzip", "zstd"), help="of an archive (default: as the source)")
    parser.add_argument(
        "--location", metavar="REF", action="append", default=[], help="registry/repository@sha256:... that has it too"
    )
    parser.add_argument("--threads", type=int, metavar="N", help="hash with N threads (default: one per core)")
    add_store_option(parser)


def run(args: argparse.Namespace, out: Output) -> int:
    """Make it, and say how small it is."""
    from image_format.references.reference import check_location  # noqa: PLC0415 - cryptography takes 40 ms

    for text in args.location:
        check_location(text, where="--location")
    done = _pack(args, open_store(args, "vgpu pack", create=True))
    target = Path(args.output)
    doc = {"source": args.source, "target": args.output, "manifestDigest": done.manifest_digest}
    out.json(doc | {"files": list(done.names), "movedBytes": done.moved_bytes})
    moved = f"{count_text(len(done.names), 'file')}, {size_text(done.moved_bytes)}"
    size = f", {size_text(target.stat().st_size)}" if target.is_file() else ""
    out.line(f"{moved} are in the store as checkpoint {done.manifest_digest[:12]}; {target} refers to it{size}")
    return 0


def _pack(args: argparse.Namespace, store: Store) -> Repacked:
    from image_format.references import reference_archive, reference_directory  # noqa: PLC0415 - as above
    from image_format.trust.policy import Policy  # noqa: PLC0415

    source, target, policy = Path(args.source), Path(args.output), Policy.load(args.etc)
    more = {"locations": args.location, "threads": args.threads}
    if not source.is_dir():
        return reference_archive.pack(source, target, policy, store, compression=args.compress, **more)
    if args.compress:
        raise UserError(what="--compress is for archives", remedy="Leave it out: the target is a directory.")
    return reference_directory.pack(source, target, policy, store, **more)
