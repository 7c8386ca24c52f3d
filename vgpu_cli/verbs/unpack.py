"""`vgpu unpack SOURCE -o TARGET`: a reference becomes an archive or directory that holds everything again.

Takes what is missing from the store, verifies the result from its first byte to its last, and replaces nothing that is
there (spec/archive-layout.md, section 7). Prints spec/unpack-output.schema.json.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from vgpu_cli.store_choice import add_store_option, store_root
from vgpu_cli.wording import count_text, size_text
from vgpu_errors import UserError

if TYPE_CHECKING:
    import argparse

    from image_format.references.reference_archive import Repacked
    from vgpu_cli.output import Output

HELP = "make an archive that refers to the store whole again"
DESCRIPTION = (
    "Makes of an archive or directory that refers to this node's store one that holds everything, for nodes whose store "
    "lacks the content and for safe keeping. Reads the store and changes nothing there."
)
EXAMPLES = (("vgpu unpack trainer.ref.tar.zst -o trainer.tar.zst", "make an archive for another node"),)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """From what, to what."""
    parser.add_argument("source", metavar="SOURCE", help="an archive or directory that refers to the store")
    parser.add_argument("-o", "--output", metavar="TARGET", required=True, help="the archive or directory to make")
    parser.add_argument("--compress", choices=("none", "gzip", "zstd"), help="of an archive (default: as the source)")
    parser.add_argument("--threads", type=int, metavar="N", help="hash with N threads (default: one per core)")
    add_store_option(parser)


def run(args: argparse.Namespace, out: Output) -> int:
    """Make it, and say what came from the store."""
    done = _unpack(args)
    doc = {"source": args.source, "target": args.output, "manifestDigest": done.manifest_digest}
    out.json(doc | {"files": list(done.names), "movedBytes": done.moved_bytes})
    moved = f"{count_text(len(done.names), 'file')}, {size_text(done.moved_bytes)}"
    out.line(f"{args.output} is whole and verified; from the store came {moved}")
    return 0


def _unpack(args: argparse.Namespace) -> Repacked:
    from image_format.references import reference_archive, reference_directory  # noqa: PLC0415 - cryptography takes 40 ms
    from image_format.trust.policy import Policy  # noqa: PLC0415

    source, target, policy = Path(args.source), Path(args.output), Policy.load(args.etc)
    root = store_root(args)
    if not source.is_dir():
        chosen = {"compression": args.compress, "threads": args.threads}
        return reference_archive.unpack(source, target, policy, root, **chosen)
    if args.compress:
        raise UserError(what="--compress is for archives", remedy="Leave it out: the target is a directory.")
    return reference_directory.unpack(source, target, policy, root, threads=args.threads)
