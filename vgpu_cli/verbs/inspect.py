"""`vgpu inspect SOURCE`: what a checkpoint says of itself, who signed it, and whether it would run here.

Reads the sealed documents only, not the content (`vgpu verify` does). Shows claims even of a checkpoint that nobody
vouches for, and says so. Output: spec/inspect-output.schema.json.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vgpu_errors import ImageError, Unsigned, UntrustedKey, VgpuError

if TYPE_CHECKING:
    import argparse

    from image_format.policy import Policy
    from image_format.record import Record
    from image_format.source import ClaimedSource
    from vgpu_cli.output import Output

HELP = "show what is in a checkpoint, who signed it, and whether it fits this node"

AGENT_DEADLINE_S = 15.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The source, and whether to ask the agent."""
    parser.add_argument("source", metavar="SOURCE", help="directory, archive, OCI layout, oci-archive, or image name")
    parser.add_argument("--no-fitness", action="store_true", help="do not ask the node agent what this node offers")


def run(args: argparse.Namespace, out: Output) -> int:
    """Print the claims; exit code 0 says that they could be read, nothing more."""
    from image_format import source  # noqa: PLC0415 - cryptography and blake3 take 60 ms, only this verb needs them
    from image_format.policy import Policy  # noqa: PLC0415

    found = source.read_claims(args.source)
    signature = check_signature(args.source, found, Policy.load(args.etc))
    fitness = {"state": "skipped"} if args.no_fitness else check_fitness(found.claims.claimed.record)
    doc = describe(args.source, found, signature, fitness)
    out.json(doc)
    _print(doc, out)
    return 0


def describe(name: str, found: ClaimedSource, signature: dict[str, Any], fitness: dict[str, Any]) -> dict[str, Any]:
    """The `--json` document."""
    claims, index = found.claims, found.claims.claimed.index
    zero_bytes = sum(chunk.length for chunk in index.chunks if chunk.stored_length == 0)
    return {
        "source": name,
        "kind": found.kind,
        "compression": claims.compression,
        "signature": signature,
        "record": claims.claimed.record.to_json(),
        "content": {
            "files": len(index.files),
            "bytes": sum(region.length for region in index.regions),
            "gpuObjects": len(index.vram),
            "gpuBytes": sum(region.length for region in index.vram),
            "zeroBytes": zero_bytes,
            "chunks": len(index.chunks),
            "chunkSize": index.chunk_size,
            "largest": [{"name": name, "bytes": size} for size, name in _largest(found)],
        },
        "outside": [{"name": member.name, "bytes": member.size} for member in claims.outside],
        "fitness": fitness,
    }


def check_signature(name: str, found: ClaimedSource, policy: Policy) -> dict[str, Any]:
    """Whether the documents (not the content) are vouched for."""
    from image_format import seal_documents  # noqa: PLC0415

    documents = found.claims.documents
    try:
        claims = seal_documents.check(documents, policy, where=name)
    except Unsigned:
        return {"state": "unsigned", "what": "nobody vouches for this checkpoint"}
    except UntrustedKey as error:
        hint = seal_documents.signer_hint(documents, where=name)
        return {"state": "unknown key", "keyId": hint, "what": error.message}
    except ImageError as error:
        return {"state": "invalid", "what": error.message}
    if claims is None or claims.key is None:
        return {"state": "unsigned", "what": "nobody vouches for this checkpoint; the policy of this node allows that"}
    entry = claims.key
    return {
        "state": "trusted",
        "keyId": entry.key.key_id,
        "keyName": entry.name,
        "manifestDigest": claims.manifest_digest,
    }


def check_fitness(record: Record) -> dict[str, Any]:
    """Ask the agent what this node offers, and compare; without an agent say so."""
    from gpu_state import fitness, node_facts  # noqa: PLC0415
    from gpu_state.client import AgentClient  # noqa: PLC0415
    from oci_hook.settings import read_settings  # noqa: PLC0415

    try:
        with AgentClient.connect(deadline_s=AGENT_DEADLINE_S) as agent:
            args = {"runtime": read_settings(is_strict=False).low_level_runtime}
            facts = node_facts.NodeFacts.from_json(agent.request("facts", args, deadline_s=AGENT_DEADLINE_S))
    except (VgpuError, ValueError, OSError) as error:
        return {"state": "unknown", "what": f"this node could not be looked at: {error}"}
    found = fitness.findings(record, facts)
    state = "unfit" if fitness.musts(found) else "fit"
    return {"state": state, "findings": [finding.to_json() for finding in found]}


def _largest(found: ClaimedSource) -> list[tuple[int, str]]:
    return sorted(((region.length, region.name) for region in found.claims.claimed.index.files), reverse=True)[:5]


# ---- for people ----------------------------------------------------------------------------------


def _print(doc: dict[str, Any], out: Output) -> None:
    out.table("Checkpoint", ["what", "value"], _summary_rows(doc))
    record, fitness = doc["record"], doc["fitness"]
    rows = [
        [entry["nsPid"], entry["comm"], entry["mode"], ", ".join(entry["devices"]), _size(entry.get("gpuBytes"))]
        for entry in record["processes"]
    ]
    out.table("GPU processes", ["pid", "command", "mode", "devices", "GPU memory"], _as_text(rows))
    rows = [[entry["uuid"], entry["name"], _size(entry["memoryBytes"])] for entry in record["devices"]]
    out.table("Devices", ["uuid", "name", "memory"], _as_text(rows))
    holds = _holds(fitness)
    rows = [
        [entry["key"], _short(entry["value"]), entry["level"], holds(entry["key"])] for entry in record["requirements"]
    ]
    out.table("Requirements", ["key", "needed", "level", "here"], _as_text(rows))
    for finding in fitness.get("findings", ()):
        out.line(f"  {finding['what']}: {finding['remedy']}")
    rows = [[entry["phase"], entry["seconds"]] for entry in record["phases"]]
    out.table("Phases", ["phase", "seconds"], _as_text(rows))
    rows = [[entry["name"], _size(entry["bytes"])] for entry in doc["content"]["largest"]]
    out.table("Largest files", ["file", "size"], _as_text(rows))
    rows = [[entry["name"], _size(entry["bytes"])] for entry in doc["outside"]]
    if rows:
        out.table("Outside of the signature", ["file", "size"], _as_text(rows))
    out.line("The content was not read; 'vgpu verify' does that.")


def _summary_rows(doc: dict[str, Any]) -> list[list[str]]:
    record, content, signature = doc["record"], doc["content"], doc["signature"]
    container, runtime = record["container"], record["lowLevelRuntime"]
    signer = f"{signature.get('keyName')}, key {signature.get('keyId')}"
    return [
        ["source", f"{doc['source']} ({doc['kind']}, compression {doc['compression']})"],
        [
            "signature",
            f"trusted: {signer}" if signature["state"] == "trusted" else f"{signature['state']}: {signature['what']}",
        ],
        ["container", f"{container.get('name') or container['id']} of {container['engine']}"],
        ["image", container.get("image") or "not recorded"],
        ["made", f"{record['created']}, generation {record['generation']}, format {record['formatVersion']}"],
        ["runtime", f"{record['registeredRuntime']} with {runtime['name']} {runtime['version']} ({runtime['path']})"],
        ["mode", record["mode"]],
        ["content", f"{content['files']} files, {_size(content['bytes'])}, of it {_size(content['zeroBytes'])} zero"],
        ["content root", record["contentRoot"]],
        ["fits here", f"{doc['fitness']['state']} {doc['fitness'].get('what', '')}".rstrip()],
    ]


def _holds(fitness: dict[str, Any]) -> Any:
    if "findings" not in fitness:
        return lambda _key: "not known"
    found = {finding["key"]: finding["found"] for finding in fitness["findings"]}
    return lambda key: f"no: {found[key]}" if key in found else "yes"


def _short(value: Any) -> str:
    text = ", ".join(value) if isinstance(value, list) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _size(value: int | None) -> str:
    if value is None:
        return "not known"
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if value >= 1 << shift:
            return f"{value / (1 << shift):.2f} {unit}"
    return f"{value} B"


def _as_text(rows: list[list[Any]]) -> list[list[str]]:
    # A record is somebody else's: control characters must not reach the terminal.
    return [["".join(c if c.isprintable() else "?" for c in str(cell)) for cell in row] for row in rows]
