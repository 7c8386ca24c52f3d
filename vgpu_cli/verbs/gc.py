"""`vgpu gc`: remove old checkpoints from this node's store, and what crashes left there (spec/store.md, section 6).

Without `--keep` and `--older-than` no checkpoint goes, only what nothing needs. Never removes what somebody uses, what a
transfer needs or what an archive refers to. Prints spec/gc-output.schema.json.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vgpu_cli.store_choice import add_store_option, open_store, seconds_of
from vgpu_cli.wording import count_text, size_text
from vgpu_errors import UserError

if TYPE_CHECKING:
    import argparse

    from image_format.store import Collected, StoredCheckpoint
    from vgpu_cli.output import Output

HELP = "remove old checkpoints from this node's store"
DESCRIPTION = (
    "Removes checkpoints from this node's store, and what crashes and removals left there. Without --keep and "
    "--older-than no checkpoint goes; with both, one goes only where both say so. What somebody uses, what a transfer "
    "needs and what an archive refers to stays."
)
EXAMPLES = (
    ("vgpu gc --keep 3 --older-than 7d --dry-run", "show what would go"),
    ("vgpu gc --keep 3", "keep the three newest checkpoints of each container"),
    (
        "vgpu gc --keep 0 --references-older-than 90d",
        "forget archives made 90 days ago, and remove all that is not used",
    ),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What may go."""
    parser.add_argument("--keep", type=int, metavar="N", help="keep the N newest checkpoints of each container")
    parser.add_argument("--older-than", metavar="SPAN", help="only what came into the store so long ago, as 12h or 30d")
    parser.add_argument(
        "--references-older-than",
        metavar="SPAN",
        help="forget archives that were made so long ago and refer to the store",
    )
    parser.add_argument("--dry-run", action="store_true", help="show what would go, and remove nothing")
    add_store_option(parser)


def run(args: argparse.Namespace, out: Output) -> int:
    """Collect, and say what went."""
    if args.keep is not None and args.keep < 0:
        raise UserError(what=f"--keep {args.keep} is no number of checkpoints", remedy="Give 0 or more.")
    spans = [None if text is None else seconds_of(text) for text in (args.older_than, args.references_older_than)]
    store = open_store(args, "vgpu gc")
    done = store.gc(keep=args.keep, older_than_s=spans[0], references_older_than_s=spans[1], dry_run=args.dry_run)
    out.json(describe(done))
    _print(done, out)
    return 0


def describe(done: Collected) -> dict[str, Any]:
    """The `--json` document; also of `vgpu store rm`."""
    return {
        "dryRun": done.is_dry_run,
        "removed": [named(entry) for entry in done.removed],
        "kept": [named(entry) | {"why": why} for entry, why in done.kept],
        "freedBytes": done.freed_bytes,
        "swept": list(done.swept),
        "forgotten": list(done.forgotten),
    }


def named(entry: StoredCheckpoint) -> dict[str, Any]:
    """A checkpoint by what people and programs call it."""
    return {
        "manifestDigest": entry.manifest_digest,
        "containerId": entry.container_id,
        "containerName": entry.container_name,
        "generation": entry.generation,
        "created": entry.created,
    }


def row(entry: StoredCheckpoint) -> list[str]:
    """The same for a table."""
    container = entry.container_name or entry.container_id[:12]
    return [entry.manifest_digest[:12], container or "not readable", str(entry.generation), entry.created]


COLUMNS = ["checkpoint", "container", "generation", "made"]


def _print(done: Collected, out: Output) -> None:
    if done.removed:
        title = "Would be removed" if done.is_dry_run else "Removed"
        out.table(title, COLUMNS, [row(entry) for entry in done.removed], numbers=["generation"])
    if done.kept:
        out.table("Kept, although old", [*COLUMNS, "why"], [[*row(entry), why] for entry, why in done.kept])
    swept = f", and swept {count_text(len(done.swept), 'leftover')}" if done.swept else ""
    forgotten = f", forgot {count_text(len(done.forgotten), 'archive')}" if done.forgotten else ""
    verb = "would free" if done.is_dry_run else "freed"
    out.line(f"{verb} {size_text(done.freed_bytes)} of {count_text(len(done.removed), 'checkpoint')}{swept}{forgotten}")
