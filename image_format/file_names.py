"""Which file names a checkpoint may hold (spec/archive-layout.md, section 2).

Flat printable ASCII, no separators, no leading dot: such a name means the same to every file system, tar reader and terminal.
Sealing refuses to sign another name, verifying refuses to follow one.
"""

from __future__ import annotations

from vgpu_errors import UnsafeName

MAX_NAME_BYTES = 255
OWN_PREFIX = "vgpu-"
PARTIAL_PREFIX = ".vgpu-partial-"

INDEX_NAME = "vgpu-index.bin"
RECORD_NAME = "vgpu-record.json"
MANIFEST_NAME = "vgpu-manifest.json"
SIGNATURE_NAME = "vgpu-signature.json"
SEAL_NAMES = (INDEX_NAME, RECORD_NAME, MANIFEST_NAME, SIGNATURE_NAME)

# CRIU and the runtimes write these beside the images after the seal, at restore at the latest.
ALLOWED_UNSIGNED = frozenset(
    {"dump.log", "restore.log", "stats-dump", "stats-restore", "criu.log", "criu-dump.log", "criu-restore.log"}
)


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
