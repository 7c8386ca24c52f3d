"""Takes an exported archive apart, changes it and puts it together again, sealed anew where a test asks for it.

The seal is made with image_format and a real key, so a changed archive is exactly what an attacker with that key, or a
later version of the format, would hand over. Called by the tests of bad input.
"""

from __future__ import annotations

import hashlib
import io
import json
import pathlib
import struct
import tarfile
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from image_format import canonical_json
from image_format.file_names import INDEX_NAME, MANIFEST_NAME, RECORD_NAME, SIGNATURE_NAME
from image_format.sealing import sign
from image_format.trust.bundle import Bundle
from image_format.trust.keys import SigningKey, load_signing_key

if TYPE_CHECKING:
    from tests.hosts.host import TestHost

PREFIX = "checkpoint/"
REGION_COUNT_AT = 40


class Archive:
    """The members of one uncompressed archive, in their order."""

    def __init__(self, data: bytes) -> None:
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            self.members = [(entry, tar.extractfile(entry).read() if entry.isreg() else b"") for entry in tar]

    @classmethod
    def read(cls, host: TestHost, path: str) -> Archive:
        """The archive at a path of a host."""
        return cls(pathlib.Path(host.root, path.lstrip("/")).read_bytes())

    def write(self, host: TestHost, path: str) -> str:
        """Put it into a host and return the path."""
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for entry, data in self.members:
                tar.addfile(entry, io.BytesIO(data) if entry.isreg() else None)
        host.write(path, out.getvalue(), 0o600)
        return path

    def __getitem__(self, name: str) -> bytes:
        return next(data for entry, data in self.members if entry.name == name)

    def __setitem__(self, name: str, data: bytes) -> None:
        place = next(number for number, (entry, _) in enumerate(self.members) if entry.name == name)
        entry = self.members[place][0]
        entry.size = len(data)
        self.members[place] = (entry, data)

    def names(self) -> list[str]:
        """All members' names."""
        return [entry.name for entry, _ in self.members]

    def remove(self, name: str) -> None:
        """Leave a member out."""
        self.members = [member for member in self.members if member[0].name != name]

    def add(self, name: str, data: bytes = b"x", *, link: str | None = None) -> None:
        """A further member: a file, or a symbolic link."""
        entry = tarfile.TarInfo(name)
        entry.mode = 0o600
        if link is None:
            entry.size = len(data)
        else:
            entry.type, entry.linkname, data = tarfile.SYMTYPE, link, b""
        self.members.append((entry, data))

    def flip(self, name: str, at: int | None = None) -> None:
        """One bit, in the middle unless a place is given."""
        data = bytearray(self[name])
        data[len(data) // 2 if at is None else at] ^= 1
        self[name] = bytes(data)

    def pages(self) -> str:
        """The name of the largest sealed file: CRIU's pages."""
        return max(
            (entry for entry, _ in self.members if entry.name.startswith(PREFIX + "pages-")),
            key=lambda entry: entry.size,
        ).name

    def edit_json(self, name: str, edit: Callable[[dict[str, Any]], object]) -> None:
        """Change a JSON member."""
        document = json.loads(self[name])
        edit(document)
        self[name] = json.dumps(document).encode()

    def edit_record(self, edit: Callable[[dict[str, Any]], object]) -> None:
        """Change the record; `seal` afterwards makes it believed again."""
        document = json.loads(self[PREFIX + RECORD_NAME])
        edit(document)
        self[PREFIX + RECORD_NAME] = canonical_json.write(document)

    def seal(self, key: SigningKey) -> None:
        """Manifest and signature for the record and the index as they are now."""
        manifest = json.loads(self[PREFIX + MANIFEST_NAME])
        for descriptor, name in ((manifest["config"], RECORD_NAME), (manifest["layers"][0], INDEX_NAME)):
            descriptor["digest"] = f"sha256:{hashlib.sha256(self[PREFIX + name]).hexdigest()}"
            descriptor["size"] = len(self[PREFIX + name])
        self[PREFIX + MANIFEST_NAME] = canonical_json.write(manifest)
        bundle = Bundle.from_bytes(self[PREFIX + SIGNATURE_NAME], where="test")
        statement = json.loads(bundle.envelope.payload)
        statement["subject"][0]["digest"]["sha256"] = hashlib.sha256(self[PREFIX + MANIFEST_NAME]).hexdigest()
        self[PREFIX + SIGNATURE_NAME] = sign(canonical_json.write(statement), key)

    def claim_regions(self, count: int) -> None:
        """Let the index's header claim a number of regions."""
        index = bytearray(self[PREFIX + INDEX_NAME])
        struct.pack_into("<Q", index, REGION_COUNT_AT, count)
        self[PREFIX + INDEX_NAME] = bytes(index)


def node_key(host: TestHost) -> SigningKey:
    """The host's own key."""
    return load_signing_key(pathlib.Path(host.root, "etc/vgpu/node.key"))
