"""`vgpu keys new|show`: makes keys for signing and for encryption, and says whose a key file is (spec/signature.md, section 1).

Writes the private half 0600 and the public half beside it, or neither; refuses to replace a key.
Prints ids and fingerprints, never a private key or a passphrase.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from vgpu_cli import passphrases
from vgpu_cli.parsing import add_action, add_actions

if TYPE_CHECKING:
    import argparse

    from vgpu_cli.output import Output

HELP = "make a key for signing or for encryption, or show one"
DESCRIPTION = (
    "Makes a key pair: for signing (ecdsa-p256, the default, or ed25519) or for encrypted images (x25519). The private "
    "half is written to PATH with mode 0600, the public half beside it with the ending .pub. A key that exists is never "
    "replaced."
)
EXAMPLES = (
    ("vgpu keys new release.key", "make a signing key without a passphrase"),
    ("vgpu keys new --passphrase release.key", "the same with one, asked on the terminal"),
    ("vgpu keys new --type x25519 lab.key", "make a key that images can be encrypted to"),
    ("vgpu keys show lab.pub", "show a key's kind, id and fingerprint"),
)

X25519 = "x25519"
TYPES = ("ecdsa-p256", "ed25519", X25519)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One action and its key file."""
    actions = add_actions(parser)
    new = add_action(actions, "new", "make a key pair", "Makes a key pair; refuses to replace a file.")
    new.add_argument("path", metavar="PATH", help="where to write the private half; the public one ends in .pub")
    new.add_argument("--type", choices=TYPES, default=TYPES[0], help="what kind of key (default: ecdsa-p256)")
    new.add_argument("--passphrase", action="store_true", help="protect it with a passphrase asked on the terminal")
    passphrases.add_options(new)
    show = add_action(actions, "show", "show a key's kind, id and fingerprint")
    show.add_argument("path", metavar="PATH", help="a public or a private key; of a private one only the public half")
    passphrases.add_options(show)


def run(args: argparse.Namespace, out: Output) -> int:
    """Do the one action."""
    {"new": _new, "show": _show}[args.action](args, out)
    return 0


def public_path(path: Path) -> Path:
    """Where the public half of a key lies: `lab.key` has `lab.pub`, `lab` has `lab.pub`."""
    return path.with_suffix(".pub") if path.suffix == ".key" else path.with_name(f"{path.name}.pub")


def _new(args: argparse.Namespace, out: Output) -> None:
    from image_format.trust import key_files  # noqa: PLC0415 - cryptography takes 40 ms

    path = Path(args.path)
    passphrase = passphrases.typed_twice(str(path)) if args.passphrase else passphrases.given(args)
    private, public, key_id = _made(args.type, passphrase)
    key_files.write_pair(path, private, public_path(path), public)
    doc = {
        "path": str(path),
        "publicPath": str(public_path(path)),
        "type": args.type,
        "keyId": key_id,
        "hasPassphrase": passphrase is not None,
    }
    out.json(doc)
    out.line(f"{path} and {public_path(path)} are a new {args.type} key, id {key_id}")


def _made(key_type: str, passphrase: bytes | None) -> tuple[bytes, bytes, str]:
    """Private half, public half, id."""
    from image_format.encryption.recipients import Identity  # noqa: PLC0415
    from image_format.trust.keys import SigningKey  # noqa: PLC0415

    if key_type == X25519:
        identity = Identity.generate()
        return identity.to_pem(passphrase), identity.public.to_pem(), identity.public.key_id
    key = SigningKey.generate(key_type)
    return key.to_pem(passphrase), key.public.to_pem(), key.key_id


def _show(args: argparse.Namespace, out: Output) -> None:
    doc = describe(Path(args.path), passphrases.asker(args, args.path))
    out.json(doc)
    rows = [["type", doc["type"]], ["for", doc["purpose"]], ["id", doc["keyId"]], ["fingerprint", doc["fingerprint"]]]
    out.table(f"Key {args.path}", ["what", "value"], rows)


def describe(path: Path, passphrase: Any) -> dict[str, str]:
    """What there is to say of a key file."""
    import base64  # noqa: PLC0415

    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey  # noqa: PLC0415

    from image_format.encryption.recipients import Recipient  # noqa: PLC0415
    from image_format.trust import key_files  # noqa: PLC0415
    from image_format.trust.keys import parse_public_key  # noqa: PLC0415

    data = key_files.read_public(path)
    if b"PRIVATE KEY" in data:
        data = key_files.public_pem(key_files.read_private(path, passphrase).public_key())
    if isinstance(key_files.parse_public(data, where=path), X25519PublicKey):
        key_id, key_type, purpose = Recipient.parse(data, where=path).key_id, X25519, "encryption"
    else:
        key = parse_public_key(data, where=path)
        key_id, key_type, purpose = key.key_id, key.type, "signing"
    fingerprint = base64.b64decode(key_id).hex()
    return {"path": str(path), "type": key_type, "purpose": purpose, "keyId": key_id, "fingerprint": fingerprint}
