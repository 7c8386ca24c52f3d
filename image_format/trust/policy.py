"""Whose checkpoints this node accepts (spec/signature.md, section 6): policy.json, node.pub and trusted/*.pub.

The default is to refuse what no trusted key has signed. Refuses policy files that others than their owner can change.
Restore gates, `vgpu verify` and `vgpu pull` load it; `vgpu trust` changes the folder of trusted keys.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from image_format import canonical_json
from image_format.fields import Fields
from image_format.trust.freshness import ALLOW, REFUSE, WARN
from image_format.trust.keys import NODE_PUB, PublicKey, load_public_key
from vgpu_errors import BadConfiguration, ImageError

if TYPE_CHECKING:
    from collections.abc import Mapping

POLICY_NAME = "policy.json"
TRUSTED_FOLDER = "trusted"
REFUSE_UNTRUSTED = "refuse-untrusted"
ALLOW_UNSIGNED = "allow-unsigned"
KNOWN_VERSIONS = (1, 2)


@dataclass(frozen=True)
class TrustedKey:
    """A key that this node believes, and the file it came from."""

    name: str
    path: Path
    key: PublicKey


@dataclass(frozen=True)
class Rules:
    """What policy.json says; its defaults hold where there is none."""

    default: str = REFUSE_UNTRUSTED
    older_generation: str = WARN


@dataclass(frozen=True)
class Policy:
    """The default for what is not signed, what happens to older generations, and the trusted keys by id."""

    default: str = REFUSE_UNTRUSTED
    keys: Mapping[str, TrustedKey] = field(default_factory=dict)
    older_generation: str = WARN

    @property
    def allows_unsigned(self) -> bool:
        """A checkpoint without any signature is accepted; one with a strange signature never is."""
        return self.default == ALLOW_UNSIGNED

    def find(self, key_id: str) -> TrustedKey | None:
        """The trusted key of that id."""
        return self.keys.get(key_id)

    @classmethod
    def load(cls, directory: Path | str = "/etc/vgpu") -> Policy:
        """Read the folder; a missing policy.json is the default policy."""
        directory = Path(directory)
        if directory.is_dir():
            _refuse_if_others_write(directory)  # whoever can rename files there can replace each of them
        by_id = {entry.key.key_id: entry for entry in reversed(load_trusted(directory))}
        rules = _read_rules(directory / POLICY_NAME)
        return cls(rules.default, by_id, rules.older_generation)


def load_trusted(directory: Path) -> list[TrustedKey]:
    """The node's own key and the added ones."""
    own = directory / NODE_PUB
    entries = [_load_key(own, "this node")] if own.exists() else []
    return entries + [_load_key(path, path.stem) for path in _added_files(directory / TRUSTED_FOLDER)]


def _added_files(folder: Path) -> list[Path]:
    try:
        added = sorted(path for path in folder.iterdir() if path.suffix == ".pub") if folder.is_dir() else []
    except OSError as error:
        raise BadConfiguration(path=folder, what=f"cannot be read ({error.strerror})") from error
    if added:
        _refuse_if_others_write(folder)
    return added


def _load_key(path: Path, name: str) -> TrustedKey:
    _refuse_if_others_write(path)
    try:
        return TrustedKey(name, path, load_public_key(path))
    except BadConfiguration as error:
        error.remedy = f"Put the right key there, or remove it: 'rm {path}'."
        raise


def _read_rules(path: Path) -> Rules:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return Rules()
    except OSError as error:
        raise BadConfiguration(path=path, what=f"cannot be read ({error.strerror})") from error
    _refuse_if_others_write(path)
    return parse_rules(data, path)


def parse_rules(data: bytes, path: Path) -> Rules:
    """The rules in policy.json; unknown keys are refused, a typing error must not open the gate."""
    try:
        fields = Fields(canonical_json.read_object(data, where="policy"), "policy")
        version = fields.integer("version")
        default = fields.one_of("default", REFUSE_UNTRUSTED, ALLOW_UNSIGNED)
        older = fields.one_of("olderGeneration", ALLOW, WARN, REFUSE) if _has_older(fields, version) else WARN
    except ImageError as error:
        raise BadConfiguration(path=path, what=error.message) from error
    if version not in KNOWN_VERSIONS:
        known = " and ".join(map(str, KNOWN_VERSIONS))
        raise BadConfiguration(path=path, what=f"has version {version}; this version reads {known}")
    if fields.unknown():
        unknown = sorted(fields.unknown())
        needs_2 = version == 1 and unknown == ["olderGeneration"]
        remedy = 'Write "version": 2, which has that key.' if needs_2 else "Correct or remove them."
        raise BadConfiguration(path=path, what=f"has unknown keys: {ascii(', '.join(unknown))[1:-1]}", remedy=remedy)
    return Rules(default, older)


def parse_default(data: bytes, path: Path) -> str:
    """Only the `default`."""
    return parse_rules(data, path).default


def _has_older(fields: Fields, version: int) -> bool:
    return version != 1 and fields.is_there("olderGeneration")


def _refuse_if_others_write(path: Path) -> None:
    try:
        status = path.stat()
    except OSError as error:
        raise BadConfiguration(path=path, what=f"cannot be read ({error.strerror})") from error
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        remedy = f"See who has changed it, then run 'chmod go-w {path}'."
        raise BadConfiguration(path=path, what="can be changed by others than its owner", remedy=remedy)
    if status.st_uid not in (0, os.geteuid()):
        remedy = f"See what that user did with it, then run 'chown root {path}'."
        raise BadConfiguration(path=path, what=f"belongs to user {status.st_uid}, not to root", remedy=remedy)
