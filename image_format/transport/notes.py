"""Where in registries the checkpoints of this node's store lie: `transfers/<manifest sha256>.json` in the store.

A push or pull that ended well writes down registry, repository and digest. The next one finds there what a sibling
repository can give without sending it, and which packs of earlier checkpoints can be used again: only manifests that
this node pushed, or pulled and verified, are ever taken for that. Losing the notes costs bytes, nothing else.
Refuses to read what is no such note. `pushing` and `pulling` call it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from image_format import canonical_json
from image_format.fields import Fields, is_hex_digest
from image_format.registry.reference import Reference
from image_format.store.layout import TRANSFERS
from image_format.store.placing import write_whole
from vgpu_errors import BadReference, ImageError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

VERSION = 1
MAX_NOTE_BYTES = 64 << 10
MAX_LOCATIONS = 16
MAX_NOTES = 1000


@dataclass(frozen=True)
class Notes:
    """The notes of one store; `folder` None where there is no store."""

    folder: Path | None

    @classmethod
    def of_store(cls, root: Path | None) -> Notes:
        """Those below a store's root."""
        return cls(root / TRANSFERS if root is not None else None)

    def locations(self, manifest_digest: str) -> tuple[Reference, ...]:
        """Where that checkpoint lies, newest first; a note that cannot be read says nothing."""
        if self.folder is None or not is_hex_digest(manifest_digest):
            return ()
        try:
            data = (self.folder / f"{manifest_digest}.json").read_bytes()
            fields = Fields(canonical_json.read_object(data, where="note", max_bytes=MAX_NOTE_BYTES), "note")
            if fields.integer("version") != VERSION:
                return ()
            found = [Reference.parse(text) for text in fields.texts("locations")[:MAX_LOCATIONS]]
        except (OSError, ImageError, BadReference):
            return ()
        return tuple(reference for reference in found if reference.digest)

    def on_host(self, host: str, first: Iterable[str]) -> list[Reference]:
        """All that lies on that host, that of the named checkpoints first, then the newest."""
        digests = dict.fromkeys((*first, *self._newest()))
        found = (reference for digest in digests for reference in self.locations(digest) if reference.host == host)
        return list(dict.fromkeys(found))

    def add(self, manifest_digest: str, where: Reference) -> None:
        """Note that the checkpoint lies there. What cannot be written is not noted."""
        if self.folder is None:
            return
        known = [str(reference) for reference in self.locations(manifest_digest)]
        locations = list(dict.fromkeys((str(where), *known)))[:MAX_LOCATIONS]
        doc = {"version": VERSION, "locations": locations}
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            write_whole(self.folder / f"{manifest_digest}.json", canonical_json.write(doc))
            for digest in self._newest()[MAX_NOTES:]:
                (self.folder / f"{digest}.json").unlink(missing_ok=True)
        except (OSError, ImageError):
            return

    def _newest(self) -> list[str]:
        if self.folder is None:
            return []
        try:
            entries = [entry for entry in os.scandir(self.folder) if is_hex_digest(entry.name.removesuffix(".json"))]
            entries.sort(key=lambda entry: entry.stat().st_mtime, reverse=True)
        except OSError:
            return []
        return [entry.name.removesuffix(".json") for entry in entries]
