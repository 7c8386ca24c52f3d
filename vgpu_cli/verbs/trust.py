"""`vgpu trust add|ls|rm`: whose checkpoints this node restores (spec/signature.md, section 6).

Changes only files in the `trusted` folder of the settings; the node's own key is always trusted and cannot be removed.
`add` is one rename, `rm` one unlink. Never reads a private key.
"""

from __future__ import annotations

import base64
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from vgpu_cli.parsing import add_action, add_actions
from vgpu_errors import BadConfiguration, NeedsRoot, UserError

if TYPE_CHECKING:
    import argparse

    from image_format.trust.policy import TrustedKey
    from vgpu_cli.output import Output

HELP = "say whose checkpoints this node restores"
DESCRIPTION = (
    "Says whose checkpoints this node restores: adds, lists and removes public keys. A node always trusts its own key. "
    "Never reads a private key."
)
EXAMPLES = (
    ("vgpu trust add other-node.pub --name lab-2", "trust the maker of this key"),
    ("vgpu trust ls", "list the trusted keys"),
    ("vgpu trust rm lab-2", "trust it no longer"),
)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One action and what it works on."""
    actions = add_actions(parser)
    add = add_action(actions, "add", "trust the maker of this key")
    add.add_argument("key", metavar="KEY.pub", help="the public key, usually another node's /etc/vgpu/node.pub")
    add.add_argument("--name", help="what to call it here (default: the file's name)")
    add_action(actions, "ls", "list the trusted keys")
    remove = add_action(actions, "rm", "trust a key no longer")
    remove.add_argument("key", metavar="NAME|KEY", help="its name, id or fingerprint")


def run(args: argparse.Namespace, out: Output) -> int:
    """Do the one action."""
    {"add": _add, "ls": _list, "rm": _remove}[args.action](args, out)
    return 0


def _add(args: argparse.Namespace, out: Output) -> None:
    from image_format.trust.keys import load_public_key  # noqa: PLC0415 - cryptography takes 40 ms

    key = load_public_key(args.key)
    name = _name_for(args.name or _default_name(Path(args.key), key.key_id))
    known = next((entry for entry in _trusted(args) if entry.key.key_id == key.key_id), None)
    if known is not None:
        out.json({"added": False, "name": known.name, "keyId": key.key_id})
        out.line(f"{known.name} is trusted already, key {key.key_id}")
        return
    target = Path(args.etc) / "trusted" / f"{name}.pub"
    if target.exists():
        raise UserError(what=f"another key is called {name} here", remedy="Choose another name with --name.")
    _write(target, key.to_pem())
    out.json({"added": True, "name": name, "keyId": key.key_id})
    out.line(f"{name} is trusted now, {key.type} key {key.key_id}")
    out.line(f"its fingerprint is {key.fingerprint}; compare it with what 'vgpu keys show' says at its maker's")


def _list(args: argparse.Namespace, out: Output) -> None:
    entries = _trusted(args)
    out.json({"keys": [_described(entry) for entry in entries]})
    rows = [[e.name, e.key.type, e.key.key_id, e.key.fingerprint, str(e.path)] for e in entries]
    out.table("Trusted keys", ["name", "type", "key", "fingerprint", "file"], rows)
    if not entries:
        out.line("No key is trusted here; 'vgpu setup' makes the node's own.")


def _described(entry: TrustedKey) -> dict[str, str]:
    return {
        "name": entry.name,
        "type": entry.key.type,
        "keyId": entry.key.key_id,
        "fingerprint": entry.key.fingerprint,
        "path": str(entry.path),
    }


def _remove(args: argparse.Namespace, out: Output) -> None:
    from image_format.trust.keys import NODE_PUB  # noqa: PLC0415

    entry = next(
        (entry for entry in _trusted(args) if args.key in (entry.name, entry.key.key_id, entry.key.fingerprint)), None
    )
    if entry is None:
        raise UserError(what=f"no trusted key is called {args.key}", remedy="'vgpu trust ls' lists them.")
    if entry.path == Path(args.etc) / NODE_PUB:
        remedy = "To change it, move node.key and node.pub away and run 'vgpu setup' again."
        raise UserError(what="a node always trusts its own key", remedy=remedy)
    try:
        entry.path.unlink()
    except PermissionError as error:
        raise NeedsRoot(what="vgpu trust rm") from error
    out.json({"removed": entry.name, "keyId": entry.key.key_id})
    out.line(f"{entry.name} is trusted no longer, key {entry.key.key_id}")


def _trusted(args: argparse.Namespace) -> list[TrustedKey]:
    from image_format.trust.policy import load_trusted  # noqa: PLC0415

    return load_trusted(Path(args.etc))


def _default_name(path: Path, key_id: str) -> str:
    # Every node's key file is called node.pub: such a name says nothing, so a piece of the key's id is added.
    name = path.name.removesuffix(".pub")
    return f"node-{base64.b64decode(key_id)[:4].hex()}" if name == "node" else name


def _name_for(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise UserError(
            what=f"{name!a} is no usable name for a key",
            remedy="Give one of letters, digits, '.', '_' and '-' with --name, such as the other node's host name.",
        )
    return name


def _write(target: Path, data: bytes) -> None:
    partial = target.with_name(f".{target.name}.partial")
    settings = target.parent.parent
    if not settings.is_dir():
        remedy = "Set this node up first: 'vgpu setup podman', 'vgpu setup containerd' or 'vgpu setup docker'."
        raise BadConfiguration(path=settings, what="is not there, so this node has no settings", remedy=remedy)
    try:
        target.parent.mkdir(mode=0o755, exist_ok=True)
        partial.unlink(missing_ok=True)
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, 0o644)
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        partial.replace(target)
    except PermissionError as error:
        raise NeedsRoot(what="vgpu trust add") from error
