"""NRI's multiplexer: several byte streams over one socket (frame: stream id, length, both 32-bit big-endian; then bytes).

The frames of one stream put together are its bytes; where frames begin and end means nothing to the reader. Refuses a
frame above the protocol's own limit before it reads it. Every write has a deadline, and every read that is given one.
Called by `plugin` and by the tests' simulator of containerd's side.
"""

from __future__ import annotations

import contextlib
import struct
import time
from typing import TYPE_CHECKING

from vgpu_errors import EngineFailed

if TYPE_CHECKING:
    import socket

HEADER = struct.Struct(">II")
# ttrpc's largest message and its header.
LARGEST_FRAME = (4 << 20) + 10
# containerd reads a message's first frame into a buffer of this size.
FIRST_FRAME = 4096

# A runtime that reads nothing for so long has given the plugin up.
WRITE_S = 5.0

PLUGIN_STREAM = 1
RUNTIME_STREAM = 2


class ConnectionLost(Exception):
    """The other side went away; `keep_serving` comes back, so no user ever sees it."""


class Multiplexer:
    """Both directions of one socket."""

    def __init__(self, trunk: socket.socket) -> None:
        self._trunk = trunk
        self._streams: dict[int, bytearray] = {}

    def write(self, stream: int, message: bytes | bytearray) -> None:
        """One message; its first bytes go in a frame of their own."""
        view = memoryview(message)
        frames = bytearray()
        for piece in (view[:FIRST_FRAME], view[FIRST_FRAME:]):
            if piece:
                frames += HEADER.pack(stream, len(piece)) + piece
        try:
            self._trunk.settimeout(WRITE_S)
            self._trunk.sendall(frames)
        except OSError as error:
            raise ConnectionLost(str(error)) from error

    def take(self, stream: int, size: int) -> bytes | None:
        """The next bytes of a stream, if as many have arrived."""
        arrived = self._streams.get(stream, b"")
        if len(arrived) < size:
            return None
        found = bytes(arrived[:size])
        del self._streams[stream][:size]
        return found

    def peek(self, stream: int, size: int) -> bytes | None:
        """As `take`, and the bytes stay."""
        arrived = self._streams.get(stream, b"")
        return bytes(arrived[:size]) if len(arrived) >= size else None

    def read_frame(self, deadline: float | None) -> bool:
        """Wait for one frame; False when the deadline passes before it begins."""
        header = self._read(HEADER.size, deadline)
        if header is None:
            return False
        stream, size = HEADER.unpack(header)
        if size > LARGEST_FRAME:
            raise EngineFailed(engine="NRI", what=f"a frame of {size} bytes, above the limit of {LARGEST_FRAME}")
        content = self._read(size, deadline, has_begun=True) if size else b""
        self._streams.setdefault(stream, bytearray()).extend(content or b"")
        return True

    def _read(self, size: int, deadline: float | None, *, has_begun: bool = False) -> bytes | None:
        found = bytearray()
        while len(found) < size:
            self._trunk.settimeout(None if deadline is None else max(deadline - time.monotonic(), 0.001))
            try:
                piece = self._trunk.recv(size - len(found))
            except TimeoutError:
                if not found and not has_begun:
                    return None
                raise ConnectionLost("the runtime stopped in the middle of a message") from None
            except OSError as error:
                raise ConnectionLost(str(error)) from error
            if not piece:
                raise ConnectionLost("the runtime closed the connection")
            found += piece
        return bytes(found)

    def close(self) -> None:
        """Close the socket; that it is closed already is fine."""
        with contextlib.suppress(OSError):
            self._trunk.close()
