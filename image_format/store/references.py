"""Which checkpoints somebody's archive needs: notes that keep gc away (spec/store.md, section 5).

A note is written before the files of a reference archive are taken away. Where an archive goes later nobody can know, so
a note lasts until somebody says that it may go. Called by the store.
"""

from __future__ import annotations

import datetime as dt
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from image_format import canonical_json
from image_format.fields import Fields
from image_format.store.placing import write_whole
from vgpu_errors import VgpuError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MAX_NOTE_BYTES = 64 << 10


@dataclass(frozen=True)
class Reference:
    """An archive or image path that needs a checkpoint of the store."""

    digest: str
    where: str
    made_s: float
    path: Path

    @classmethod
    def read(cls, path: Path) -> Self:
        """One note; raises what canonical_json and fields raise."""
        with path.open("rb") as file:
            doc = canonical_json.read_object(file.read(MAX_NOTE_BYTES + 1), where=str(path), max_bytes=MAX_NOTE_BYTES)
        fields = Fields(doc, str(path))
        return cls(fields.hex_digest("manifestDigest"), fields.text("where"), path.stat().st_mtime, path)


def note(folder: Path, digest: str, where: str) -> Path:
    """Write down that what lies at `where` needs the checkpoint."""
    now = dt.datetime.now(tz=dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    path = folder / f"{digest}.{secrets.token_hex(8)}"
    doc = {"version": 1, "manifestDigest": digest, "where": where, "created": now}
    write_whole(path, canonical_json.write(doc, where="reference note"))
    return path


def notes(folder: Path) -> Iterator[Reference]:
    """All of them; a note that cannot be read still keeps the checkpoint that its name tells."""
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        try:
            yield Reference.read(path)
        except FileNotFoundError:
            continue
        except (VgpuError, OSError):
            made_s = path.lstat().st_mtime
            yield Reference(path.name.partition(".")[0], "an archive that its note does not name", made_s, path)
