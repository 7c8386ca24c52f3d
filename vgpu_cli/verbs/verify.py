"""`vgpu verify SOURCE`: is this checkpoint whole and fresh, and did somebody whom this node trusts make it?

Reads every byte and changes nothing; of an image in a registry, only signatures and documents (`registry_report`).
Says what was checked and what no signature covers.
Exit code 0 means verified; otherwise the code of the error's class (docs/errors.md). Output: spec/verify-output.schema.json.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from vgpu_cli import passphrases, registry_report, registry_source, store_choice
from vgpu_errors import ConfigurationChanged, NoSuchImage

if TYPE_CHECKING:
    import argparse

    from image_format.source import VerifiedSource
    from vgpu_cli.output import Output

HELP = "check a checkpoint's signature and every byte of it"
DESCRIPTION = (
    "Checks that a checkpoint was signed by a key that this node trusts and that every byte of it is as it was signed. "
    "Says what no signature covers, and compares an archive's spec.dump with the signed security settings. Reads "
    "everything and changes nothing. A checkpoint that passes is one that a restore accepts. Of an image in a registry it "
    "checks the signatures and the sealed documents, and reads no pack."
)
EXAMPLES = (
    ("vgpu verify /var/tmp/train.tar", "check an exported checkpoint"),
    ("vgpu verify --threads 4 train.tar", "hash with four threads"),
    ("vgpu verify registry.example/team/train:1", "check who signed an image in a registry"),
    ("vgpu --json verify train.tar", "the same for programs; an error is one JSON document, too"),
)

OUTSIDE_NOTE = "not covered by the signature; spec.dump is compared with the signed security settings"
PROGRESS_INTERVAL_S = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The source, and how many threads hash it."""
    what = "directory, archive, OCI layout, oci-archive, checkpoint of the store, image of podman, or HOST/REPOSITORY[:TAG][@DIGEST] in a registry"
    parser.add_argument("source", metavar="SOURCE", help=what)
    parser.add_argument("--threads", type=int, metavar="N", help="hash with N threads (default: one per core)")
    parser.add_argument(
        "--deep", action="store_true", help="of an image in a registry, fetch and check every byte, too"
    )
    parser.add_argument(
        "--identity", metavar="FILE", action="append", default=[], help="with --deep, decrypt with this key"
    )
    store_choice.add_store_option(parser)
    passphrases.add_options(parser)
    registry_source.add_options(parser)


def run(args: argparse.Namespace, out: Output) -> int:
    """Verify and print what was checked; a fault is raised."""
    from image_format import source  # noqa: PLC0415 - cryptography and blake3 take 60 ms, only this verb needs them
    from image_format.trust.policy import Policy  # noqa: PLC0415
    from image_format.trust.seen_generations import refuse_stale  # noqa: PLC0415

    policy = Policy.load(args.etc)
    if args.source.startswith(registry_source.PREFIX):
        registry_report.verify(args, policy, out)
        return 0
    try:
        root = store_choice.store_root(args)
        found = source.verify(args.source, policy, threads=args.threads, on_progress=_progress(out), store_root=root)
    except NoSuchImage:
        if not registry_source.names_registry(args.source):
            raise
        registry_report.verify(args, policy, out)
        return 0
    warnings = refuse_stale(found.result.verified.signed, policy, where=args.source)
    _print(args.source, found, list(map(str, warnings)), out)
    if found.result.config_differences:
        raise ConfigurationChanged(what="; ".join(found.result.config_differences))
    return 0


def describe(name: str, found: VerifiedSource, warnings: list[str]) -> dict[str, Any]:
    """The `--json` document."""
    result, verified = found.result, found.result.verified
    record, index = verified.record, verified.index
    return {
        "source": name,
        "kind": found.kind,
        "compression": result.compression,
        "trusted": verified.key_id is not None,
        "keyId": verified.key_id,
        "keyName": verified.key_name,
        "manifestDigest": verified.manifest_digest,
        "contentRoot": record.content_root if record else None,
        "containerId": record.container.id if record else None,
        "generation": record.generation if record else None,
        "expires": verified.signed.expires if verified.signed else None,
        "warnings": warnings,
        "filesChecked": len(index.files) if index else 0,
        "gpuObjectsChecked": len(index.vram) if index else 0,
        "bytesChecked": verified.bytes_checked,
        "milliseconds": round(verified.seconds * 1000),
        "outside": [{"name": member.name, "bytes": member.size} for member in result.outside],
        "configDifferences": None if result.config_differences is None else list(result.config_differences),
    }


def _print(name: str, found: VerifiedSource, warnings: list[str], out: Output) -> None:
    if found.result.config_differences and out.is_json:
        return  # the error is the one document of this call
    doc = describe(name, found, warnings)
    out.json(doc)
    rows = [
        ["source", f"{name} ({found.kind}, compression {doc['compression']})"],
        [
            "signature",
            f"holds, key {doc['keyId']} ({doc['keyName']})" if doc["trusted"] else "NONE; the policy allows it",
        ],
        ["expires", doc["expires"] or "never"],
        ["manifest", f"sha256:{doc['manifestDigest']}" if doc["manifestDigest"] else "none"],
        ["content root", doc["contentRoot"] or "none"],
        ["content", f"{_counted(doc)}, {doc['bytesChecked']} bytes, every chunk compared"],
        ["time", f"{found.result.verified.seconds:.2f} s"],
    ]
    out.table("Checked", ["what", "result"], rows)
    if found.result.outside:
        rows = [[member.name, str(member.size)] for member in found.result.outside]
        out.table(f"Outside of the signature ({OUTSIDE_NOTE})", ["file", "bytes"], rows)
    if found.result.config_differences == ():
        out.line("spec.dump: its security settings are the signed ones")
    if found.result.config_differences:
        return  # the error that follows names them
    for warning in warnings:
        out.line(f"warning: {warning}")
    out.line("verified" if doc["trusted"] else "whole as far as it goes, but nobody vouches for it")


def _counted(doc: dict[str, Any]) -> str:
    objects = f" and {doc['gpuObjectsChecked']} GPU objects" if doc["gpuObjectsChecked"] else ""
    return f"{doc['filesChecked']} files{objects}"


def _progress(out: Output) -> Any:
    if out.is_json or not sys.stderr.isatty():
        return None
    last = time.monotonic()

    def show(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last > PROGRESS_INTERVAL_S or done == total:
            last = time.monotonic()
            end = "\r\x1b[K" if done == total else ""
            sys.stderr.write(f"\rchecking {100 * done // max(total, 1):3d}% of {total / 1e9:.2f} GB{end}")
            sys.stderr.flush()

    return show
