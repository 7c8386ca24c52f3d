"""Which file names a checkpoint may hold (spec/archive-layout.md, section 2).

Flat printable ASCII, no separators, no leading dot: such a name means the same to every file system, tar reader and terminal.
Sealing refuses to sign another name, verifying refuses to follow one.
"""

from __future__ import annotations

import re

from vgpu_errors import LimitExceeded, UnsafeName

MAX_NAME_BYTES = 255
OWN_PREFIX = "vgpu-"
PARTIAL_PREFIX = ".vgpu-partial-"

INDEX_NAME = "vgpu-index.bin"
RECORD_NAME = "vgpu-record.json"
MANIFEST_NAME = "vgpu-manifest.json"
SIGNATURE_NAME = "vgpu-signature.json"
SEAL_NAMES = (INDEX_NAME, RECORD_NAME, MANIFEST_NAME, SIGNATURE_NAME)
# In an archive whose packs and bulk files lie in a store (spec/archive-layout.md, section 7).
REFERENCE_NAME = "vgpu-reference.json"
# What the data plane hands to the seal; never part of a sealed checkpoint.
FRAGMENT_NAME = f"{PARTIAL_PREFIX}vram.bin"
MAX_PACKS = 100_000

# CRIU and the runtimes write these beside the images after the seal, at restore at the latest.
ALLOWED_UNSIGNED = frozenset(
    {"dump.log", "restore.log", "stats-dump", "stats-restore", "criu.log", "criu-dump.log", "criu-restore.log"}
)

_PACK = re.compile(r"vgpu-pack-[0-9]{5}\.bin")
_OBJECT = re.compile(r"([1-9][0-9]{0,9})/(0|[1-9][0-9]{0,19})")


def is_ours(name: str) -> bool:
    """A file that sealing made, or was making when it was cut off; removed before a new checkpoint."""
    return name.startswith((OWN_PREFIX, PARTIAL_PREFIX))


def is_plain(name: str) -> bool:
    """The name is one path component of printable ASCII that does not begin with a dot."""
    if not name or len(name) > MAX_NAME_BYTES or name[0] == ".":
        return False
    return all("!" <= letter <= "~" and letter not in "/\\" for letter in name)


def check_name(name: str, *, where: str) -> str:
    """The name, if a checkpoint may hold a file of that name."""
    if not is_plain(name):
        raise UnsafeName(where=where, name=ascii(name[:MAX_NAME_BYTES]))
    return name


def check_content_name(name: str, *, where: str) -> str:
    """The name, if it may be a region's file: plain, not one of ours, not one that changes after the seal."""
    check_name(name, where=where)
    if name.startswith(OWN_PREFIX) or name in ALLOWED_UNSIGNED:
        raise UnsafeName(where=where, name=ascii(name))
    return name


def pack_name(number: int) -> str:
    """The name of the pack of that number, from 0."""
    if not 0 <= number < MAX_PACKS:
        raise LimitExceeded(where="packs", what="the number of a pack", found=number, limit=MAX_PACKS - 1)
    return f"vgpu-pack-{number:05}.bin"


def is_pack(name: str) -> bool:
    """The name is that of a pack of VRAM chunks."""
    return _PACK.fullmatch(name) is not None


def check_pack_name(name: str, *, where: str) -> str:
    """The name, if a pack of VRAM chunks may have it."""
    if not is_pack(name):
        raise UnsafeName(where=where, name=ascii(name[:MAX_NAME_BYTES]))
    return name


def object_key(name: str, *, where: str) -> tuple[int, int]:
    """Pid and object id out of a VRAM region's name `<nsPid>/<object id>`; regions are in order of these."""
    match = _OBJECT.fullmatch(name)
    if not match:
        raise UnsafeName(where=where, name=ascii(name[:MAX_NAME_BYTES]))
    return int(match[1]), int(match[2])
