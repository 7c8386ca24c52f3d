"""`vgpu diff A B`: what changed between two checkpoints, usually two generations of one container.

Reads the sealed documents only: equal chunk ids mean equal content. Trusts nothing and says who signed either side.
The comparison is image_format/difference.py; here it is put into words. Output: spec/diff-output.schema.json.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vgpu_cli import inspection
from vgpu_cli.wording import count_text, short_text, size_text

if TYPE_CHECKING:
    import argparse

    from image_format.difference import ContentCount, Difference, Fact
    from vgpu_cli.output import Output

HELP = "show what changed between two checkpoints"
DESCRIPTION = (
    "Compares two checkpoints, usually two generations of one container: facts of the record, processes, and content "
    "region by region, with the bytes that are equal, changed or now zero, and how much a push of B would send where A "
    "already is. The content itself is not read; equal chunk ids mean equal content."
)
EXAMPLES = (
    ("vgpu diff monday.tar tuesday.tar", "compare two exported checkpoints"),
    ("vgpu diff train:3 train:4", "compare two generations in the store"),
    ("vgpu --json diff a.tar b.tar", "the same for programs"),
)

SHOWN = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Two sources."""
    parser.add_argument("before", metavar="A", help=f"the earlier checkpoint: {inspection.SOURCES}")
    parser.add_argument("after", metavar="B", help="the later checkpoint")
    parser.add_argument("--all", action="store_true", help="list every region that differs, not the most changed alone")
    inspection.add_options(parser)


def run(args: argparse.Namespace, out: Output) -> int:
    """Compare and print; exit code 0 says that both could be read, nothing more."""
    from image_format import difference  # noqa: PLC0415 - blake3 takes 10 ms, only this verb needs it
    from image_format.trust.policy import Policy  # noqa: PLC0415

    policy = Policy.load(args.etc)
    sides = [inspection.look(source, args, policy) for source in (args.before, args.after)]
    claims = [(claimed.record, claimed.index) for _, claimed, _ in sides]
    found = difference.compare(claims[0], claims[1])
    named = [
        {"source": source, "kind": side.kind, "signature": signature, "contentRoot": claimed.record.content_root}
        for source, (side, claimed, signature) in zip((args.before, args.after), sides, strict=True)
    ]
    doc = describe(named[0], named[1], found)
    out.json(doc)
    if not out.is_json:
        _print(doc, out, shown=None if args.all else SHOWN)
    return 0


def describe(before: dict[str, Any], after: dict[str, Any], found: Difference) -> dict[str, Any]:
    """The `--json` document."""
    return {
        "before": before,
        "after": after,
        "isSameContent": before["contentRoot"] == after["contentRoot"],
        "facts": [_fact(fact) for fact in found.facts],
        "processes": [
            {"nsPid": p.ns_pid, "comm": p.comm, "change": p.what, "facts": [_fact(fact) for fact in p.facts]}
            for p in found.processes
        ],
        "content": _count(found.count),
        "regions": [
            {
                "name": region.name,
                "kind": region.kind,
                "change": region.change,
                "bytesBefore": region.before,
                "bytesAfter": region.after,
                **_count(region.count),
            }
            for region in found.regions
            if region.change != "equal"
        ],
        "equalRegions": sum(region.change == "equal" for region in found.regions),
        "transfer": {
            "newBytes": found.transfer.bytes,
            "newChunks": found.transfer.chunks,
            "sentBytes": found.transfer.sent_bytes,
            "sentPacks": found.transfer.packs,
        },
    }


def _fact(fact: Fact) -> dict[str, Any]:
    return {"path": fact.path, "before": fact.before, "after": fact.after}


def _count(count: ContentCount) -> dict[str, int]:
    return {
        "equalBytes": count.equal_bytes,
        "changedBytes": count.changed_bytes,
        "zeroedBytes": count.zeroed_bytes,
        "equalChunks": count.equal_chunks,
        "changedChunks": count.changed_chunks,
        "zeroedChunks": count.zeroed_chunks,
    }


# ---- for people ----------------------------------------------------------------------------------


def _print(doc: dict[str, Any], out: Output, *, shown: int | None) -> None:
    rows = [
        [side, doc[side]["source"], doc[side]["kind"], doc[side]["signature"]["state"], doc[side]["contentRoot"][:16]]
        for side in ("before", "after")
    ]
    out.table("Compared", ["", "source", "kind", "signature", "content root"], rows)
    _print_facts(doc, out)
    _print_regions(doc, out, shown)
    content, transfer = doc["content"], doc["transfer"]
    out.line(
        f"Content: {size_text(content['equalBytes'])} equal, {size_text(content['changedBytes'])} changed, "
        f"{size_text(content['zeroedBytes'])} zero now, {count_text(doc['equalRegions'], 'equal region')}."
    )
    out.line(
        f"New content: {size_text(transfer['newBytes'])} in {count_text(transfer['newChunks'], 'chunk')}. A push of B where "
        f"A is sends about {size_text(transfer['sentBytes'])} in {count_text(transfer['sentPacks'], 'pack')}, before compression."
    )


def _print_facts(doc: dict[str, Any], out: Output) -> None:
    rows = [[fact["path"], short_text(fact["before"]), short_text(fact["after"])] for fact in doc["facts"]]
    for process in doc["processes"]:
        at = f"process {process['nsPid']} ({process['comm']})"
        if not process["facts"]:
            rows.append([at, *(("there", "gone") if process["change"] == "removed" else ("not there", "new"))])
        rows += [[f"{at}: {f['path']}", short_text(f["before"]), short_text(f["after"])] for f in process["facts"]]
    if rows:
        out.table("Facts that differ", ["what", "before", "after"], rows)


def _print_regions(doc: dict[str, Any], out: Output, shown: int | None) -> None:
    changed = sorted(
        doc["regions"], key=lambda region: (-region["changedBytes"] - region["zeroedBytes"], region["name"])
    )
    sizes = ("bytesBefore", "bytesAfter", "equalBytes", "changedBytes", "zeroedBytes")
    rows = [[r["name"], r["kind"], r["change"], *[size_text(r[key]) for key in sizes]] for r in changed[:shown]]
    columns = ["region", "kind", "", "size before", "size after", "equal", "changed", "zero now"]
    if rows:
        out.table("Regions that differ, most changed first", columns, rows, numbers=columns[3:])
    if len(rows) < len(changed):
        out.line(f"... and {len(changed) - len(rows)} more; --all lists them")
