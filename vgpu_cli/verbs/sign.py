"""`vgpu sign TARGET`: signs a sealed directory again, or an image in a registry (spec/signature.md, sections 3 and 8).

A directory is verified byte by byte first, an image in a registry by digest: what is signed there is a manifest, which
names the rest. Changes one file, or adds a bundle and a `.sig` tag; everything else stays as it is.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vgpu_cli import passphrases, registry_source
from vgpu_errors import NoSuchImage

if TYPE_CHECKING:
    import argparse

    from image_format.trust.keys import SigningKey
    from vgpu_cli.output import Output

HELP = "sign a checkpoint directory or an image in a registry"
DESCRIPTION = (
    "Signs a checkpoint. A sealed directory is verified as a restore would verify it, and gets a new signature over the "
    "same manifest. An image in a registry, ours or one that podman made, gets a sigstore bundle, which cosign reads, and "
    "a signature under the tag sha256-DIGEST.sig, which podman reads."
)
EXAMPLES = (
    ("vgpu sign /var/tmp/checkpoint --expires 90d", "sign a directory with the node's key, for 90 days"),
    ("vgpu sign --key release.key registry.example/team/train:1", "sign an image in a registry"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to sign, with which key, for how long."""
    parser.add_argument("target", metavar="TARGET", help="a sealed directory, or HOST/REPOSITORY[:TAG][@DIGEST]")
    parser.add_argument("--key", metavar="FILE", help="the private key (default: node.key of the settings)")
    parser.add_argument("--expires", metavar="WHEN", help="90d, 12h, 4w, 1y, or a time in UTC as 2027-01-31T00:00:00Z")
    passphrases.add_options(parser)
    registry_source.add_options(parser)


def run(args: argparse.Namespace, out: Output) -> int:
    """Sign and say what was signed."""
    from image_format.trust.freshness import expiry_of  # noqa: PLC0415 - cryptography takes 40 ms, only this verb needs it
    from image_format.trust.keys import load_signing_key  # noqa: PLC0415

    now = datetime.now(UTC)
    expires = expiry_of(args.expires, now=now) if args.expires else None
    path = args.key or str(Path(args.etc) / "node.key")
    folder = _folder(args.target)
    key = load_signing_key(path, passphrases.asker(args, path))
    doc = _sign_folder(folder, args, key, expires) if folder else _sign_reference(args, key, expires, now)
    doc |= {"keyId": key.key_id, "expires": expires}
    out.json(doc)
    until = f", until {expires}" if expires else ""
    out.line(f"signed {args.target} ({', '.join(doc['digests'])}) with the key {key.key_id}{until}")
    return 0


def _folder(target: str) -> Path | None:
    path = Path(target)
    if path.is_dir():
        inner = path / "checkpoint"
        return inner if inner.is_dir() and not (path / "vgpu-manifest.json").exists() else path
    if path.exists():
        remedy = "Unpack the archive, or sign the image in a registry; an archive's own signature was made when it was."
        raise NoSuchImage(path=target, what="it is not a directory", remedy=remedy)
    if not registry_source.names_registry(target):
        remedy = "Give a sealed directory, or an image in a registry as HOST/REPOSITORY[:TAG]."
        raise NoSuchImage(path=target, what="there is no such directory, and it names no registry", remedy=remedy)
    return None


def _sign_folder(folder: Path, args: argparse.Namespace, key: SigningKey, expires: str | None) -> dict[str, Any]:
    from image_format.trust.policy import Policy  # noqa: PLC0415
    from image_format.trust.resigning import resign  # noqa: PLC0415

    signed = resign(folder, Policy.load(args.etc), key, expires=expires)
    return {"target": args.target, "kind": "directory", "digests": [f"sha256:{signed.manifest_digest}"]}


def _sign_reference(args: argparse.Namespace, key: SigningKey, expires: str | None, now: datetime) -> dict[str, Any]:
    from image_format.trust.referrer_signatures import sign_image  # noqa: PLC0415

    with registry_source.open_registry(args.target, args) as registry:
        reference = registry.reference
        claimed = f"{reference.name}:{reference.tag}" if reference.tag else reference.name
        digests = sign_image(registry, key, reference=claimed, now=now, expires=expires)
    return {"target": args.target, "kind": "registry image", "digests": list(digests)}
