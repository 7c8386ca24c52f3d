"""Frames of the preload's protocol (spec/preload-protocol.md): a 16-byte header, then JSON.

Pure: bytes in, frames out. Believes nothing of a peer: magic, version and length are checked before anything is kept.
Version 1 registers a process; version 2 adds the requests of staged mode and long payloads.
Used by registration.py and preload_peer.py.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

MAGIC = 0x55504756  # "VGPU"
VERSION = 1
STAGED_VERSION = 2
SHARES_MINOR = 1  # of version 2
GROUP_MINOR = 2  # of version 2
MAX_PAYLOAD = 65536
MAX_ANSWER_PAYLOAD = 8 << 20
MAX_FDS = 200  # of one frame; the kernel's limit is 253
_HEADER = struct.Struct("<IHHII")


class FrameType(IntEnum):
    """What a frame says; other numbers are ignored."""

    HELLO = 1
    WELCOME = 2
    DETACH = 3
    DETACHED = 4
    PING = 5
    PONG = 6
    INVENTORY = 10
    INVENTORY_IS = 11
    EXPORT = 12
    EXPORTED = 13
    REST = 14
    RESTED = 15
    RELEASE = 16
    RELEASED = 17
    MAP = 18
    MAPPED = 19
    OPEN = 20
    FAILED = 21
    FDS = 22
    OPENED = 23
    SHARES = 24
    SHARES_ARE = 25
    HALT = 26
    HALTED = 27
    LET_PASS = 28
    PASSED = 29
    COMMUNICATORS = 30
    COMMUNICATORS_ARE = 31


class FrameError(ValueError):
    """The peer does not speak the protocol; the connection is closed."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame."""

    type: int
    sequence: int
    payload: dict[str, Any]
    version: int = VERSION

    def to_bytes(self) -> bytes:
        """The frame on the wire."""
        body = json.dumps(self.payload, separators=(",", ":")).encode()
        return _HEADER.pack(MAGIC, self.version, self.type, len(body), self.sequence) + body


class FrameReader:
    """Cuts what arrives into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        # Raised while an answer is awaited that can be long; an uninvited peer gets no more room than in version 1.
        self.max_payload = MAX_PAYLOAD

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Every frame that `data` completes."""
        self._buffer += data
        while len(self._buffer) >= _HEADER.size:
            magic, version, kind, length, sequence = _HEADER.unpack_from(self._buffer)
            if magic != MAGIC or version not in (VERSION, STAGED_VERSION) or length > self.max_payload:
                raise FrameError(f"magic {magic:#x}, version {version}, length {length}")
            if len(self._buffer) < _HEADER.size + length:
                return
            body = bytes(self._buffer[_HEADER.size : _HEADER.size + length])
            del self._buffer[: _HEADER.size + length]
            yield Frame(kind, sequence, _payload(body), version)


@dataclass(frozen=True, slots=True)
class Hello:
    """What a preload says of its process. Claims of the container.

    The agent acts on `mode`, `protocol` and `phase`: a process that lies there hurts none but itself.
    """

    ns_pid: int
    build_id: str
    libc: str
    driver_version: int
    devices: tuple[str, ...]
    mode: str = "driver"
    protocol: int = VERSION
    minor: int = 0
    phase: str = "open"

    @property
    def is_staged(self) -> bool:
        """The preload can hand its process's memory over."""
        return self.mode == "staged" and self.protocol >= STAGED_VERSION

    @property
    def tells_shares(self) -> bool:
        """It answers SHARES; older preloads ignore the request."""
        return self.is_staged and self.minor >= SHARES_MINOR

    @property
    def knows_groups(self) -> bool:
        """It lets single calls through its closed gate, gives imports away and takes them back, and tells communicators."""
        return self.is_staged and self.minor >= GROUP_MINOR

    @classmethod
    def from_json(cls, doc: dict[str, Any]) -> Hello:
        """Read the payload of HELLO."""
        devices = doc.get("devices", [])
        if not isinstance(devices, list) or not isinstance(doc.get("pid"), int):
            raise FrameError("HELLO without pid or with devices that are no list")
        uuids = (device.get("uuid") for device in devices if isinstance(device, dict))
        return cls(
            ns_pid=doc["pid"],
            build_id=str(doc.get("build_id", "")),
            libc=str(doc.get("libc", "")),
            driver_version=version if isinstance(version := doc.get("driver_version"), int) else 0,
            devices=tuple(uuid for uuid in uuids if isinstance(uuid, str)),
            mode=str(doc.get("mode", "driver")),
            protocol=protocol if isinstance(protocol := doc.get("protocol"), int) else VERSION,
            minor=minor if isinstance(minor := doc.get("minor"), int) else 0,
            phase=str(doc.get("phase", "open")),
        )


def _payload(body: bytes) -> dict[str, Any]:
    try:
        doc = json.loads(body) if body else {}
    except (ValueError, RecursionError) as problem:
        raise FrameError("payload is no JSON") from problem
    if not isinstance(doc, dict):
        raise FrameError("payload is no object")
    return doc
