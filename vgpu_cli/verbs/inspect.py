"""`vgpu inspect SOURCE`: what a checkpoint says of itself, who signed it, and whether it would run here.

Reads the sealed documents only, not the content (`vgpu verify` does). Shows claims even of a checkpoint that nobody
vouches for, and says so. `inspection` gathers, here are the tables. Output: spec/inspect-output.schema.json.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vgpu_cli import inspection
from vgpu_cli.sharing_view import print_sharing
from vgpu_cli.wording import count_text, short_text, size_text

if TYPE_CHECKING:
    import argparse

    from vgpu_cli.output import Output

HELP = "show what is in a checkpoint, who signed it, and whether it fits this node"
DESCRIPTION = (
    "Shows what a checkpoint says of itself: the container, when and how it was frozen, its processes, GPUs, files and "
    "GPU memory with their sizes, what processes share and the communicators between them, who signed it and whether this node trusts that key, what no signature covers, and "
    "whether it would run here. The content is not read and nothing is trusted or changed; 'vgpu verify' checks every byte."
)
EXAMPLES = (
    ("vgpu inspect /var/tmp/train.tar", "show an exported checkpoint"),
    ("vgpu inspect --all --no-fitness train.tar", "show every file and GPU object, without asking the node agent"),
    ("vgpu inspect train:3", "show generation 3 of a container in the store"),
    (
        "vgpu inspect registry.example/team/train:1",
        "show a pushed checkpoint, of which the small documents alone are fetched",
    ),
    ("vgpu --json inspect train.tar", "the same for programs"),
)

SHOWN = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The source, how much of it, and whether to ask the agent."""
    parser.add_argument("source", metavar="SOURCE", help=inspection.SOURCES)
    parser.add_argument("--all", action="store_true", help="list every region, not the largest alone")
    parser.add_argument("--no-fitness", action="store_true", help="do not ask the node agent what this node offers")
    inspection.add_options(parser)


def run(args: argparse.Namespace, out: Output) -> int:
    """Print the claims; exit code 0 says that they could be read, nothing more."""
    from image_format.trust.policy import Policy  # noqa: PLC0415 - cryptography takes 40 ms, only this verb needs it

    found, claimed, signature = inspection.look(args.source, args, Policy.load(args.etc))
    fitness = {"state": "skipped"} if args.no_fitness else inspection.check_fitness(claimed.record)
    doc = inspection.describe(args.source, found, claimed, signature, fitness)
    out.json(doc)
    if not out.is_json:
        _print(doc, out, shown=None if args.all else SHOWN)
    return 0


def _print(doc: dict[str, Any], out: Output, *, shown: int | None) -> None:
    out.table("Checkpoint", ["what", "value"], _summary_rows(doc))
    _print_record(doc["record"], doc["fitness"], out)
    print_sharing(doc, out, shown)
    _print_content(doc["content"], out, shown)
    if doc["outside"]:
        rows = [[entry["name"], size_text(entry["bytes"])] for entry in doc["outside"]]
        out.table("Outside of the signature", ["file", "size"], rows, numbers=["size"])
    out.line("The content was not read; 'vgpu verify' does that.")


def _summary_rows(doc: dict[str, Any]) -> list[list[str]]:
    record, content = doc["record"], doc["content"]
    container, runtime = record["container"], record["lowLevelRuntime"]
    rows = [
        ["source", f"{doc['source']} ({doc['kind']}, compression {doc['compression']})"],
        ["signature", _signature_text(doc["signature"])],
        ["container", f"{container.get('name') or container['id']} of {container['engine']}"],
        ["image", container.get("image") or "not recorded"],
        ["made", f"{record['created']}, generation {record['generation']}, format {record['formatVersion']}"],
        ["runtime", f"{record['registeredRuntime']} with {runtime['name']} {runtime['version']} ({runtime['path']})"],
        ["mode", record["mode"]],
        ["files", count_text(content["files"], "file")],
        ["GPU memory", f"{count_text(content['gpuObjects'], 'object')}, {size_text(content['gpuBytes'])}"],
        ["content", _extent_text(content)],
        ["content root", record["contentRoot"]],
    ]
    features = record["features"]["required"]
    rows += [["needs", ", ".join(features)]] if features else []
    rows += [
        ["parent", f"sha256:{entry['manifestDigest']}, generation {entry['generation']}"] for entry in record["parents"]
    ]
    return [*rows, ["fits here", _fitness_text(doc["fitness"])]]


def _signature_text(signature: dict[str, Any]) -> str:
    if signature["state"] == "trusted":
        return f"trusted: {signature['keyName']}, key {signature['keyId']}"
    return f"{signature['state'].upper()}: {signature['what']}"


def _extent_text(content: dict[str, Any]) -> str:
    parts = (("zero", "zeroBytes"), ("there twice", "sharedBytes"), ("stored", "storedBytes"))
    return f"{size_text(content['bytes'])}: " + ", ".join(f"{size_text(content[key])} {word}" for word, key in parts)


def _fitness_text(fitness: dict[str, Any]) -> str:
    findings = fitness.get("findings", [])
    said = {
        "fit": "yes" if not findings else f"yes, with {count_text(len(findings), 'reservation')}",
        "unfit": "NO, see below",
        "skipped": "not asked",
    }
    return said.get(fitness["state"]) or f"not known: {fitness.get('what', '')}"


def _print_record(record: dict[str, Any], fitness: dict[str, Any], out: Output) -> None:
    if record["processes"]:
        rows = [
            [
                entry["nsPid"],
                entry["comm"],
                entry["mode"],
                ", ".join(entry["devices"]),
                size_text(entry.get("gpuBytes")),
            ]
            for entry in record["processes"]
        ]
        columns = ["pid", "command", "mode", "devices", "GPU memory"]
        out.table("GPU processes", columns, rows, numbers=["pid", "GPU memory"])
    if record["devices"]:
        rows = [[entry["uuid"], entry["name"], size_text(entry["memoryBytes"])] for entry in record["devices"]]
        out.table("Devices", ["uuid", "name", "memory"], rows, numbers=["memory"])
    rows = [
        [entry["key"], short_text(entry["value"]), entry["level"], _holds(entry["key"], fitness)]
        for entry in record["requirements"]
    ]
    out.table("Requirements", ["key", "needed", "level", "here"], rows)
    for finding in fitness.get("findings", ()):
        out.line(f"  {finding['what']}: {finding['remedy']}")
    if record["phases"]:
        rows = [[entry["phase"], entry["seconds"]] for entry in record["phases"]]
        out.table("Phases", ["phase", "seconds"], rows, numbers=["seconds"])


def _holds(key: str, fitness: dict[str, Any]) -> str:
    if "findings" not in fitness:
        return "not known"
    found = {finding["key"]: finding["found"] for finding in fitness["findings"]}
    return f"no: {found[key]}" if key in found else "yes"


def _print_content(content: dict[str, Any], out: Output, shown: int | None) -> None:
    regions = sorted(content["regions"], key=lambda region: (-region["bytes"], region["name"]))
    sizes = ("bytes", "storedBytes", "zeroBytes", "sharedBytes")
    rows = [[r["name"], r["kind"], *[size_text(r[size]) for size in sizes]] for r in regions[:shown]]
    columns = ["region", "kind", "size", "stored", "zero", "there twice"]
    out.table("Content, largest first", columns, rows, numbers=columns[2:])
    if len(rows) < len(regions):
        out.line(f"... and {len(regions) - len(rows)} more; --all lists them")
    if content["packs"]:
        packs = content["packs"]
        rows = [[pack["name"], size_text(pack["bytes"])] for pack in packs[:shown]]
        out.table("Packs", ["file", "size"], rows, numbers=["size"])
        if len(rows) < len(packs):
            out.line(f"... and {len(packs) - len(rows)} more, {size_text(sum(p['bytes'] for p in packs))} in all")
