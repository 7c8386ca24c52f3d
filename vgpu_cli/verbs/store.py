"""`vgpu store ls|du|verify|add|rm`: what lies in this node's store of checkpoints (spec/store.md).

`add` verifies a directory before it takes it in and shares no file with it. `verify` changes nothing; its exit code is that
of the first fault. `rm` refuses what somebody uses. Prints spec/store-output.schema.json.
"""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vgpu_cli.container_names import container_names
from vgpu_cli.parsing import add_action, add_actions
from vgpu_cli.store_choice import add_store_option, open_store
from vgpu_cli.verbs.gc import COLUMNS, describe, named, row
from vgpu_cli.wording import count_text, size_text
from vgpu_errors import NoSuchCheckpoint

if TYPE_CHECKING:
    import argparse

    from image_format.store import Proof, Store, StoredCheckpoint
    from vgpu_cli.output import Output

HELP = "look after this node's store of checkpoints"
DESCRIPTION = (
    "Lists, measures, verifies, adds and removes checkpoints of this node's store, where checkpoints share what they have "
    "in common. A CHECKPOINT is the beginning of a manifest digest, or a container's name or id, with :GENERATION or "
    "without; without it is the newest."
)
EXAMPLES = (
    ("vgpu store ls", "list the checkpoints and who needs them"),
    ("vgpu store du", "show what takes room, and what is shared"),
    ("vgpu store verify", "read every byte and hold it against the signed ids"),
    ("vgpu store rm trainer:3", "remove one checkpoint"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One action and what it works on."""
    actions = add_actions(parser)
    add_store_option(add_action(actions, "ls", help="list the checkpoints, and who uses or refers to them"))
    add_store_option(add_action(actions, "du", help="show the bytes of each checkpoint, shared ones and its own"))
    verify = add_action(actions, "verify", help="check signatures and every byte; shared content is read once")
    verify.add_argument("checkpoints", metavar="CHECKPOINT", nargs="*", help="which (default: all)")
    verify.add_argument("--threads", type=int, metavar="N", help="hash with N threads (default: one per core)")
    add_store_option(verify)
    add = add_action(actions, "add", help="verify a checkpoint directory and take it in")
    add.add_argument("directory", metavar="DIRECTORY", help="a sealed checkpoint directory")
    add_store_option(add)
    remove = add_action(actions, "rm", help="remove checkpoints")
    remove.add_argument("checkpoints", metavar="CHECKPOINT", nargs="+", help="which")
    remove.add_argument("--force", action="store_true", help="also where archives refer to it, which are useless then")
    add_store_option(remove)


def run(args: argparse.Namespace, out: Output) -> int:
    """Do the one action."""
    action = {"ls": _list, "du": _measure, "verify": _verify, "add": _add, "rm": _remove}[args.action]
    return action(args, open_store(args, f"vgpu store {args.action}", create=args.action == "add"), out)


# ---- ls, du --------------------------------------------------------------------------------------


def _list(args: argparse.Namespace, store: Store, out: Output) -> int:
    del args
    entries = _all(store)
    users = _users(store)
    docs = [
        named(entry)
        | {
            "mode": entry.mode,
            "contentRoot": entry.content_root,
            "path": str(entry.path),
            "added": dt.datetime.fromtimestamp(entry.added_s, tz=dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "neededBy": users.get(entry.manifest_digest, []),
            "problem": entry.problem,
        }
        for entry in entries
    ]
    out.json({"store": str(store.root), "checkpoints": docs})
    if not entries:
        out.line(f"{store.root} holds no checkpoint.")
        return 0
    rows = [
        [*row(entry), entry.mode, entry.problem or ", ".join(users.get(entry.manifest_digest, []))] for entry in entries
    ]
    out.table("", [*COLUMNS, "mode", "needed by"], rows, numbers=["generation"])
    return 0


def _users(store: Store) -> dict[str, list[str]]:
    """Digest -> who needs it, in words."""
    found: dict[str, list[str]] = {}
    for lease in store.leases():
        found.setdefault(lease.digest, []).append(f"process {lease.pid} ({lease.why})")
    for note in store.references():
        found.setdefault(note.digest, []).append(note.where)
    return found


def _measure(args: argparse.Namespace, store: Store, out: Output) -> int:
    del args
    usage, names = store.usage(), container_names()
    docs = [
        named(_with_name(entry.checkpoint, names))
        | {"totalBytes": entry.total_bytes, "sharedBytes": entry.shared_bytes, "uniqueBytes": entry.unique_bytes}
        for entry in usage.checkpoints
    ]
    doc = {
        "store": str(store.root),
        "checkpoints": docs,
        "totalBytes": usage.total_bytes,
        "incomingBytes": usage.incoming_bytes,
        "unusedBytes": usage.unused_bytes,
    }
    out.json(doc)
    sizes = ("total_bytes", "shared_bytes", "unique_bytes")
    rows = [
        [*row(_with_name(entry.checkpoint, names)), *(size_text(getattr(entry, size)) for size in sizes)]
        for entry in usage.checkpoints
    ]
    out.table("", [*COLUMNS, "total", "shared", "unique"], rows, numbers=["generation", "total", "shared", "unique"])
    out.line(
        f"{store.root}: {size_text(usage.total_bytes)} in all, of it {size_text(usage.incoming_bytes)} coming in and "
        f"{size_text(usage.unused_bytes)} that 'vgpu gc' would sweep"
    )
    return 0


# ---- verify, add, rm -----------------------------------------------------------------------------


def _verify(args: argparse.Namespace, store: Store, out: Output) -> int:
    from image_format.trust.policy import Policy  # noqa: PLC0415 - cryptography takes 40 ms

    wanted = [_find(store, text) for text in args.checkpoints] or None
    proofs = list(store.verify(Policy.load(args.etc), wanted, threads=args.threads))
    out.json({"store": str(store.root), "checkpoints": [_proof_doc(proof) for proof in proofs]})
    rows = [
        [*row(proof.checkpoint), size_text(proof.read_bytes), proof.problem.message if proof.problem else "whole"]
        for proof in proofs
    ]
    out.table("", [*COLUMNS, "read", "result"], rows, numbers=["generation", "read"])
    problems = [proof.problem for proof in proofs if proof.problem is not None]
    out.line(f"{count_text(len(proofs), 'checkpoint')} verified, {len(problems)} damaged")
    return problems[0].exit_code if problems else 0


def _proof_doc(proof: Proof) -> dict[str, Any]:
    problem = proof.problem.to_json() if proof.problem is not None else None
    counts = {"readBytes": proof.read_bytes, "sharedBytes": proof.shared_bytes}
    return named(proof.checkpoint) | counts | {"problem": problem}


def _add(args: argparse.Namespace, store: Store, out: Output) -> int:
    from image_format.trust.policy import Policy  # noqa: PLC0415 - as above
    from image_format.verifying import verify_directory  # noqa: PLC0415

    verify_directory(args.directory, Policy.load(args.etc))
    kept = store.add(Path(args.directory), links=False)
    out.json({"added": named(kept) | {"path": str(kept.path)}})
    out.line(f"checkpoint {kept.manifest_digest[:12]} is in {store.root}")
    return 0


def _remove(args: argparse.Namespace, store: Store, out: Output) -> int:
    wanted = dict.fromkeys(_find(store, text) for text in args.checkpoints)
    done = [store.remove(entry, force=args.force) for entry in wanted]
    out.json({"removals": [describe(one) for one in done]})
    for one in done:
        forgotten = f"; useless now: {', '.join(one.forgotten)}" if one.forgotten else ""
        out.line(f"removed {one.removed[0].manifest_digest[:12]}, freed {size_text(one.freed_bytes)}{forgotten}")
    return 0


# ---- names ---------------------------------------------------------------------------------------


def _all(store: Store) -> list[StoredCheckpoint]:
    names = container_names()
    return [_with_name(entry, names) for entry in store.checkpoints()]


def _with_name(entry: StoredCheckpoint, names: dict[str, str]) -> StoredCheckpoint:
    """Records do not always name the container; podman knows those that it still has."""
    from dataclasses import replace  # noqa: PLC0415 - stands here alone

    name = names.get(entry.container_id)
    return entry if entry.container_name or name is None else replace(entry, container_name=name)


def _find(store: Store, text: str) -> StoredCheckpoint:
    try:
        return store.find(text)
    except NoSuchCheckpoint:
        word, colon, generation = text.rpartition(":")
        name = word if colon and generation.isdecimal() else text
        for container_id, known in container_names().items():
            if known == name:
                return store.find(container_id + text[len(name) :])
        raise
