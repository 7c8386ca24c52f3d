"""What `vgpu verify` does with an image in a registry: who signed it, and whether its own documents hold.

Downloads no pack unless asked for: what a trusted key has signed is the manifest, and that names every blob by digest.
Prints nothing of an image that is refused. Called by the verb; decisions are `image_format.trust.referrer_signatures`' and `seal_documents`'.
"""

from __future__ import annotations

import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vgpu_cli import passphrases, registry_source

if TYPE_CHECKING:
    import argparse

    from image_format.registry import Registry
    from image_format.seal_documents import Claims
    from image_format.trust.policy import Policy
    from image_format.trust.referrer_signatures import VerifiedImage
    from vgpu_cli.output import Output

SCRATCH = "/var/tmp"  # noqa: S108 - a folder of its own below it, 0700
NOT_READ = "packs and other large blobs were not read; the signed manifest names each by digest, and a pull checks them"
READ = "every chunk was fetched and compared with its signed id"


def verify(args: argparse.Namespace, policy: Policy, out: Output) -> None:
    """Verify the image and print what was found; a fault is raised."""
    from image_format import seal_documents  # noqa: PLC0415
    from image_format.trust import referrer_signatures, remote_documents  # noqa: PLC0415
    from image_format.trust.seen_generations import refuse_stale  # noqa: PLC0415

    with registry_source.open_registry(args.source, args) as registry:
        where = str(registry.reference)
        image = referrer_signatures.verify_image(registry, policy, where=where, now=datetime.now(UTC))
        manifest = remote_documents.find(registry, image.manifest, where=where)
        remote = remote_documents.read(registry, manifest, where=where) if manifest else None
        is_plain = remote is not None and remote.encrypted is None
        claims = seal_documents.check(remote.documents, policy, where=where) if remote and is_plain else None
        if args.deep:
            claims = _check_content(args, registry, policy, image.digest)
    warnings = refuse_stale(claims.signed if claims else None, policy, where=where)
    recipients = [entry.key_id for entry in remote.encrypted.recipients] if remote and remote.encrypted else None
    doc = describe(args.source, image, claims, recipients, list(map(str, warnings)))
    _print(doc | {"deep": args.deep}, out)


def _check_content(args: argparse.Namespace, registry: Registry, policy: Policy, digest: str) -> Claims:
    """Fetch the checkpoint into a folder that is thrown away; a pull compares every chunk with its signed id."""
    from image_format.encryption import Identity  # noqa: PLC0415
    from image_format.transport import look, pull_into_directory  # noqa: PLC0415

    identities = [Identity.load(path, passphrases.asker(args, path)) for path in args.identity]
    remote = look(registry, policy, target=digest, identities=identities)
    with tempfile.TemporaryDirectory(prefix="vgpu-verify-", dir=SCRATCH) as folder:
        pull_into_directory(registry, remote, Path(folder, "checkpoint"))
    return remote.claims


def describe(
    source: str, image: VerifiedImage, claims: Claims | None, recipients: list[str] | None, warnings: list[str]
) -> dict[str, Any]:
    """The `--json` document."""
    trusted = image.trusted
    return {
        "source": source,
        "kind": "registry image",
        "digest": image.digest,
        "mediaType": image.media_type,
        "trusted": trusted is not None,
        "keyId": trusted.key_id if trusted else None,
        "keyName": trusted.key_name if trusted else None,
        "signatures": [
            {
                "form": found.form,
                "state": found.state,
                "keyId": found.key_id,
                "keyName": found.key_name,
                "expires": found.expires,
                "what": found.what,
            }
            for found in image.signatures
        ],
        "checkpoint": None if claims is None else _checkpoint(claims),
        "encryptedTo": recipients,
        "warnings": warnings,
    }


def _checkpoint(claims: Claims) -> dict[str, Any]:
    return {
        "manifestDigest": claims.manifest_digest,
        "contentRoot": claims.record.content_root,
        "containerId": claims.record.container.id,
        "generation": claims.record.generation,
        "keyId": claims.key.key.key_id if claims.key else None,
        "expires": claims.signed.expires if claims.signed else None,
    }


def _print(doc: dict[str, Any], out: Output) -> None:
    out.json(doc)
    rows = [
        [found["form"], found["state"], found["keyName"] or "", found["keyId"] or "", found["expires"] or "never"]
        for found in doc["signatures"]
    ]
    out.table(f"Signatures of {doc['digest']}", ["form", "state", "by", "key", "expires"], rows)
    checkpoint = doc["checkpoint"]
    if checkpoint:
        what = f"generation {checkpoint['generation']} of {checkpoint['containerId']}"
        out.line(f"checkpoint: {what}, sealed as sha256:{checkpoint['manifestDigest']}")
    if doc["encryptedTo"]:
        out.line(f"encrypted to {', '.join(doc['encryptedTo'])}; its seal can be verified after decryption only")
    for warning in doc["warnings"]:
        out.line(f"warning: {warning}")
    out.line(READ if doc["deep"] else NOT_READ)
    out.line("verified" if doc["trusted"] else "nobody vouches for it; the policy allows that")
