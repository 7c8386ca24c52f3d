"""Gathers what `vgpu inspect` shows: the claims of a checkpoint, who vouches for them, and whether it fits this node.

Trusts nothing and changes nothing: claims are shown with the state of their signature, the content is not read.
The document follows spec/inspect-output.schema.json. `vgpu diff` uses the same looks at a source.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vgpu_cli import registry_source, store_choice
from vgpu_errors import ImageError, NoSuchImage, Unsigned, UntrustedKey, VgpuError

if TYPE_CHECKING:
    import argparse

    from image_format.record import Record
    from image_format.seal_documents import Claimed
    from image_format.source import ClaimedSource
    from image_format.trust.policy import Policy

AGENT_DEADLINE_S = 15.0


SOURCES = (
    "directory, archive, OCI layout, oci-archive, checkpoint of the store, image of podman, or "
    "HOST/REPOSITORY[:TAG][@DIGEST] in a registry"
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Where the store is, and how to reach a registry."""
    store_choice.add_store_option(parser)
    registry_source.add_options(parser)


def look(source: str, args: argparse.Namespace, policy: Policy) -> tuple[ClaimedSource, Claimed, dict[str, Any]]:
    """A source, what it claims, and the state of its signature; the index is parsed once where the signature holds."""
    found = _read(source, args)
    signature, claimed = check_signature(source, found, policy)
    return found, claimed or found.claims.claimed, signature


def _read(source: str, args: argparse.Namespace) -> ClaimedSource:
    from image_format import source as sources  # noqa: PLC0415 - cryptography and blake3 take 60 ms

    if not source.startswith(registry_source.PREFIX):
        try:
            return sources.read_claims(source, store_root=store_choice.store_root(args))
        except NoSuchImage:
            if not registry_source.names_registry(source):
                raise
    with registry_source.open_registry(source, args) as registry:
        return sources.read_remote_claims(registry)


def check_signature(name: str, found: ClaimedSource, policy: Policy) -> tuple[dict[str, Any], Claimed | None]:
    """Whether the documents (not the content) are vouched for, and what they claim if they hold together."""
    from image_format import seal_documents  # noqa: PLC0415

    documents = found.claims.documents
    try:
        claims = seal_documents.check(documents, policy, where=name)
    except Unsigned:
        return {"state": "unsigned", "what": "nobody vouches for this checkpoint"}, None
    except UntrustedKey as error:
        hint = seal_documents.signer_hint(documents, where=name)
        return {"state": "unknown key", "keyId": hint, "what": error.message}, None
    except ImageError as error:
        return {"state": "invalid", "what": error.message}, None
    if claims is None:
        return {"state": "unsigned", "what": "nobody vouches for this checkpoint"}, None
    claimed = seal_documents.Claimed(claims.record, claims.index)
    if claims.key is None:
        what = "nobody vouches for this checkpoint; the policy of this node allows that"
        return {"state": "unsigned", "what": what}, claimed
    key = {"keyId": claims.key.key.key_id, "keyName": claims.key.name}
    return {"state": "trusted", **key, "manifestDigest": claims.manifest_digest}, claimed


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


def describe(
    name: str, found: ClaimedSource, claimed: Claimed, signature: dict[str, Any], fitness: dict[str, Any]
) -> dict[str, Any]:
    """The `--json` document."""
    from image_format.sharing_layout import sharing_layout  # noqa: PLC0415

    return {
        "source": name,
        "kind": found.kind,
        "compression": found.claims.compression,
        "signature": signature,
        "record": claimed.record.to_json(),
        "sharing": [held.to_json() for held in sharing_layout(claimed.record.processes)],
        "content": describe_content(claimed),
        "outside": [{"name": member.name, "bytes": member.size} for member in found.claims.outside],
        "fitness": fitness,
    }


def describe_content(claimed: Claimed) -> dict[str, Any]:
    """The index in numbers."""
    from image_format.content_summary import summarise, total  # noqa: PLC0415

    index = claimed.index
    regions = summarise(index)
    gpu = index.vram
    return {
        **total(regions).to_json(),
        "files": len(index.files),
        "gpuObjects": len(gpu),
        "gpuBytes": sum(region.length for region in gpu),
        "chunks": len(index.chunks),
        "chunkSize": index.chunk_size,
        "regions": [
            {"name": region.name, "kind": region.kind, "chunks": region.chunks, **region.extent.to_json()}
            for region in regions
        ],
        "packs": [{"name": pack.name, "bytes": pack.size} for pack in index.vram_packs],
    }
