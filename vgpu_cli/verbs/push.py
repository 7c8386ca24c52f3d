"""`vgpu push SOURCE REF`: a sealed checkpoint into a registry; only what the registry lacks is sent (docs/registry.md).

The signature must hold, and every chunk is compared with its signed id, before a byte of it leaves this node.
Signs the image with the node's key, so that the engine's files in it are vouched for, too.
Output: spec/push-output.schema.json.
"""

from __future__ import annotations

import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vgpu_cli import passphrases, registry_source
from vgpu_cli.store_choice import add_store_option, store_root
from vgpu_cli.wording import count_text, size_text
from vgpu_errors import NoSuchCheckpoint

if TYPE_CHECKING:
    import argparse

    from image_format.registry import Registry
    from image_format.transport.pushing import Pushed, PushOptions
    from image_format.transport.tying import Tied
    from image_format.transport.watching import Watcher
    from image_format.trust.policy import Policy
    from vgpu_cli.output import Output

HELP = "push a checkpoint to a registry, sending only what it lacks"
DESCRIPTION = (
    "Pushes a sealed directory, an engine's archive, or a checkpoint of this node's store as an OCI artifact. Packs that "
    "the registry has, in this or a sibling repository, are not sent; a push that was cut off goes on where it was. With "
    "--with-image, podman's own checkpoint image and the artifact get one tag, so that 'podman pull' and 'podman container "
    "restore' on another node find what they need."
)
EXAMPLES = (
    ("vgpu push trainer registry.example/team/trainer:1", "push the newest checkpoint of a container out of the store"),
    ("vgpu push /var/tmp/trainer.tar.zst registry.example/team/trainer:1", "push an exported archive"),
    ("vgpu push trainer registry.example/team/trainer:1 --with-image localhost/frozen:1", "with podman's image"),
    ("vgpu push trainer registry.example/team/trainer:1 --encrypt-to lab.pub", "encrypt it to the owner of lab.key"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What, where to, and how."""
    parser.add_argument("source", metavar="SOURCE", help="directory, archive, container, or checkpoint of the store")
    parser.add_argument("reference", metavar="REF", help="HOST[:PORT]/REPOSITORY[:TAG]")
    parser.add_argument("--with-image", metavar="IMAGE", help="podman's checkpoint image of the same checkpoint")
    parser.add_argument(
        "--mount-from", metavar="REPO", action="append", default=[], help="take blobs from this repository, too"
    )
    parser.add_argument("--encrypt-to", metavar="FILE", action="append", default=[], help="a recipient's public key")
    parser.add_argument("--no-compress", action="store_true", help="store every chunk as it is")
    parser.add_argument("--key", metavar="FILE", help="sign with this key (default: node.key of the settings)")
    parser.add_argument("--no-sign", action="store_true", help="put no signature beside the image")
    parser.add_argument("--threads", type=int, metavar="N", help="hash with N threads (default: one per core)")
    parser.add_argument("--in-flight", type=int, metavar="N", default=8, help="transfers at a time (default: 8)")
    passphrases.add_options(parser)
    add_store_option(parser)
    registry_source.add_options(parser)


def run(args: argparse.Namespace, out: Output) -> int:
    """Push, sign, and say what crossed the wire."""
    from image_format.trust.policy import Policy  # noqa: PLC0415 - urllib3 and cryptography take 150 ms
    from vgpu_cli.transfer_view import watching  # noqa: PLC0415

    started = time.monotonic()
    key = _signing_key(args)
    with watching() as watcher, registry_source.open_registry(args.reference, args, watcher.note) as registry:
        pushed, tied = _push(args, Policy.load(args.etc), registry, watcher)
        if key is not None:
            _sign(registry, key, tied.digest if tied else pushed.digest)
    doc = _describe(args, pushed, tied, time.monotonic() - started) | {"keyId": key.key_id if key else None}
    out.json(doc)
    _print(doc, out)
    return 0


def _push(args: argparse.Namespace, policy: Policy, registry: Registry, watcher: Watcher) -> tuple[Pushed, Tied | None]:
    from image_format.transport import Notes, open_source, push  # noqa: PLC0415
    from image_format.transport.tying import tie  # noqa: PLC0415
    from vgpu_cli.podman_command import saved_image  # noqa: PLC0415

    root = store_root(args)
    notes = Notes.of_store(root if root.is_dir() else None)
    with open_source(_source_word(args.source, root), policy, root) as source:
        if not args.with_image:
            return push(source, registry, notes, options=_options(args), watcher=watcher), None
        with saved_image(
            args.with_image
        ) as layout:  # an image that podman has not got is known before anything is sent
            pushed = push(source, registry, notes, target="", options=_options(args), watcher=watcher)
            return pushed, tie(layout, pushed, registry, pushed.counts, watcher)


def _source_word(word: str, root: Path) -> str:
    """The word, or the id of podman's container of that name: a checkpoint's record need not know the name."""
    from image_format.store import Store  # noqa: PLC0415
    from vgpu_cli.podman_command import container_id  # noqa: PLC0415

    if Path(word).exists():
        return word
    try:
        Store.open(root, create=False).find(word)
    except NoSuchCheckpoint:
        return container_id(word) or word
    return word


def _options(args: argparse.Namespace) -> PushOptions:
    from image_format.encryption import Recipient  # noqa: PLC0415
    from image_format.packs.packed import Compression  # noqa: PLC0415
    from image_format.transport.pushing import PushOptions  # noqa: PLC0415

    return PushOptions(
        mount_from=tuple(args.mount_from),
        compression=Compression.none() if args.no_compress else None,
        threads=args.threads,
        in_flight=max(1, min(args.in_flight, 16)),
        encrypt_to=tuple(map(Recipient.load, args.encrypt_to)),
    )


def _signing_key(args: argparse.Namespace) -> Any:
    from image_format.trust.keys import load_signing_key  # noqa: PLC0415

    if args.no_sign:
        return None
    path = Path(args.key) if args.key else Path(args.etc, "node.key")
    if not args.key and not path.exists():
        print(f"vgpu: note: {path} does not exist, so the image gets no signature", file=sys.stderr)
        return None
    return load_signing_key(path, passphrases.asker(args, str(path)))


def _sign(registry: Registry, key: Any, digest: str) -> None:
    from image_format.trust.referrer_signatures import sign_image  # noqa: PLC0415

    reference = registry.reference
    claimed = f"{reference.name}:{reference.tag}" if reference.tag else reference.name
    sign_image(registry, key, reference=claimed, now=datetime.now(UTC), target=digest)


def _describe(args: argparse.Namespace, pushed: Pushed, tied: Tied | None, seconds: float) -> dict[str, Any]:
    counts = pushed.counts
    return {
        "source": args.source,
        "reference": args.reference,
        "digest": tied.digest if tied else pushed.digest,
        "artifactDigest": pushed.digest,
        "imageDigest": tied.image_digest if tied else None,
        "imageIsReference": tied.is_reference if tied else None,
        "manifestDigest": pushed.manifest_digest,
        "contentRoot": pushed.content_root,
        "encrypted": bool(args.encrypt_to),
        "packs": pushed.packs,
        "bytesSent": counts.sent,
        "bytesSkipped": counts.skipped,
        "bytesMounted": counts.mounted,
        "milliseconds": round(seconds * 1000),
    }


def _print(doc: dict[str, Any], out: Output) -> None:
    moved = [
        ("sent", doc["bytesSent"]),
        ("there already", doc["bytesSkipped"]),
        ("mounted", doc["bytesMounted"]),
    ]
    out.table("Pushed", ["what", "size"], [[what, size_text(size)] for what, size in moved])
    out.line(f"{doc['reference']}@{doc['digest']}")
    if doc["imageDigest"]:
        needs = "needs the artifact" if doc["imageIsReference"] else "holds the whole checkpoint itself"
        out.line(f"podman's image {doc['imageDigest']} {needs}: {doc['artifactDigest']}")
    signed = f"signed with the key {doc['keyId']}" if doc["keyId"] else "not signed beside its own seal"
    out.line(f"checkpoint {doc['manifestDigest'][:12]}, {count_text(doc['packs'], 'pack')}, {signed}")
