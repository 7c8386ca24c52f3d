"""`vgpu pull REF`: a checkpoint out of a registry into this node's store, a directory or an archive (docs/registry.md).

The signature is checked before anything but the four sealed documents is fetched, each chunk before it is written; what
this node has is not fetched. A pull that was cut off goes on where it was. Output: spec/pull-output.schema.json.
"""

from __future__ import annotations

import shutil
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vgpu_cli import passphrases, registry_source
from vgpu_cli.store_choice import add_store_option, open_store
from vgpu_cli.wording import size_text

if TYPE_CHECKING:
    import argparse

    from image_format.registry import Registry
    from image_format.transport.pulling import Pulled, PullOptions, Remote
    from image_format.transport.watching import Watcher
    from image_format.trust.policy import Policy
    from vgpu_cli.output import Output

HELP = "pull a checkpoint from a registry into the store, a directory or an archive"
DESCRIPTION = (
    "Pulls a checkpoint that 'vgpu push' made, and verifies every byte as it comes. Without --output it becomes one of "
    "this node's store, where a restore of a reference archive or of podman's image finds it. With --output it becomes a "
    "sealed directory, or, where the name ends in .tar, .tar.gz or .tar.zst, the engine's archive that was pushed."
)
EXAMPLES = (
    ("vgpu pull registry.example/team/trainer:1", "bring it into the store, fetching only what is missing"),
    ("vgpu pull registry.example/team/trainer:1 -o /var/tmp/trainer.tar.zst", "make an archive for podman to import"),
    ("vgpu pull registry.example/team/trainer:1 --identity lab.key", "decrypt an image that was encrypted to lab.pub"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What, where to, and how."""
    parser.add_argument("reference", metavar="REF", help="HOST[:PORT]/REPOSITORY[:TAG][@sha256:DIGEST]")
    parser.add_argument("-o", "--output", metavar="PATH", help="a directory or an archive (default: the store)")
    parser.add_argument("--identity", metavar="FILE", action="append", default=[], help="a recipient's private key")
    parser.add_argument("--threads", type=int, metavar="N", help="hash with N threads (default: one per core)")
    parser.add_argument("--in-flight", type=int, metavar="N", default=8, help="transfers at a time (default: 8)")
    passphrases.add_options(parser)
    add_store_option(parser)
    registry_source.add_options(parser)


def run(args: argparse.Namespace, out: Output) -> int:
    """Pull and say what crossed the wire."""
    from image_format.encryption import Identity  # noqa: PLC0415 - urllib3 and cryptography take 150 ms
    from image_format.transport import look  # noqa: PLC0415
    from image_format.trust.policy import Policy  # noqa: PLC0415
    from vgpu_cli.transfer_view import watching  # noqa: PLC0415

    started, policy = time.monotonic(), Policy.load(args.etc)
    identities = [Identity.load(path, passphrases.asker(args, path)) for path in args.identity]
    with watching() as watcher, registry_source.open_registry(args.reference, args, watcher.note) as registry:
        remote = look(registry, policy, identities=identities)
        pulled = _pull(args, policy, registry, remote, watcher)
    doc = _describe(args, remote, pulled, time.monotonic() - started)
    out.json(doc)
    _print(doc, out)
    return 0


def _pull(args: argparse.Namespace, policy: Policy, registry: Registry, remote: Remote, watcher: Watcher) -> Pulled:
    from image_format.transport import Notes, pull_into_directory, pull_into_store  # noqa: PLC0415
    from image_format.transport.archives import compression_of  # noqa: PLC0415

    options = _options(args)
    if args.output is None:
        store = open_store(args, "vgpu pull", create=True)
        notes = Notes.of_store(store.root)
        return pull_into_store(registry, remote, store, notes, options=options, watcher=watcher)
    target = Path(args.output)
    if compression_of(target) is None:
        return pull_into_directory(registry, remote, target, options=options, watcher=watcher)
    return _pull_archive(registry, remote, target, policy, options, watcher)


def _pull_archive(
    registry: Registry, remote: Remote, target: Path, policy: Policy, options: PullOptions, watcher: Watcher
) -> Pulled:
    """Into a folder beside the archive, which stays after a fault so that the next pull goes on with it."""
    from image_format.archives.tar_editing import refuse_existing  # noqa: PLC0415
    from image_format.transport import pull_into_directory  # noqa: PLC0415
    from image_format.transport.archives import require_engine_files, write_archive  # noqa: PLC0415
    from image_format.trust.referrer_signatures import verify_image  # noqa: PLC0415

    refuse_existing(target)
    require_engine_files(remote)
    # The seal does not cover the engine's files: somebody this node trusts must have signed the image as a whole.
    where = str(registry.reference)
    verify_image(registry, policy, where=where, now=datetime.now(UTC), target=remote.reference.digest)
    folder = target.with_name(f".{target.name}.pull")
    pulled = pull_into_directory(registry, remote, folder, options=options, watcher=watcher)
    write_archive(remote, folder, target, policy)
    shutil.rmtree(folder)
    return pulled


def _options(args: argparse.Namespace) -> PullOptions:
    from image_format.transport.pulling import PullOptions  # noqa: PLC0415

    return PullOptions(threads=args.threads, in_flight=max(1, min(args.in_flight, 16)))


def _describe(args: argparse.Namespace, remote: Remote, pulled: Pulled, seconds: float) -> dict[str, Any]:
    key = remote.claims.key
    return {
        "reference": args.reference,
        "digest": remote.reference.digest,
        "manifestDigest": pulled.manifest_digest,
        "contentRoot": pulled.content_root,
        "keyId": key.key.key_id if key else None,
        "keyName": key.name if key else None,
        "encrypted": remote.is_encrypted,
        "target": args.output or str(pulled.directory),
        "wasThere": pulled.was_there,
        "bytesFetched": pulled.counts.fetched,
        "bytesReused": pulled.counts.reused,
        "milliseconds": round(seconds * 1000),
    }


def _print(doc: dict[str, Any], out: Output) -> None:
    moved = [("fetched", doc["bytesFetched"]), ("on this node already", doc["bytesReused"])]
    out.table("Pulled", ["what", "size"], [[what, size_text(size)] for what, size in moved])
    out.line(f"checkpoint {doc['manifestDigest'][:12]} is in {doc['target']}")
    signer = f"the key {doc['keyId']} ({doc['keyName']})" if doc["keyId"] else "nobody; the policy allows it"
    out.line(f"sealed by {signer}; every byte was verified")
