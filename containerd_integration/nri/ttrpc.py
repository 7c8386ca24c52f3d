"""ttrpc messages over a stream of the multiplexer: a header of 10 bytes, then a protobuf Request or Response.

Header: length (32 bit), stream id (32 bit), type (1 request, 2 response), flags; big-endian. Unary calls only, which is
all that NRI has. Refuses a message above ttrpc's limit of 4 MiB by name, and any type that it does not know.
Called by `plugin` and by the tests' simulator of containerd's side.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, NamedTuple

from containerd_integration.api.wire import message
from vgpu_errors import EngineFailed

if TYPE_CHECKING:
    from containerd_integration.nri.multiplex import Multiplexer

HEADER = struct.Struct(">IIBB")
LARGEST_MESSAGE = 4 << 20
REQUEST, RESPONSE = 1, 2

# google.rpc codes.
OK, UNKNOWN, UNIMPLEMENTED = 0, 2, 12


class Message(NamedTuple):
    """One call or one answer."""

    stream_id: int
    kind: int
    body: Any

    @property
    def is_request(self) -> bool:
        """A call of the other side's."""
        return self.kind == REQUEST


def next_message(multiplexer: Multiplexer, stream: int) -> Message | None:
    """The next whole message that has arrived on a stream, or None."""
    header = multiplexer.peek(stream, HEADER.size)
    if header is None:
        return None
    size, stream_id, kind, _ = HEADER.unpack(header)
    if size > LARGEST_MESSAGE:
        raise EngineFailed(engine="NRI", what=f"a ttrpc message of {size} bytes, above the limit of {LARGEST_MESSAGE}")
    if kind not in (REQUEST, RESPONSE):
        raise EngineFailed(engine="NRI", what=f"a ttrpc message of the unknown type {kind}")
    whole = multiplexer.take(stream, HEADER.size + size)
    if whole is None:
        return None
    body = parsed(message("ttrpc.Request" if kind == REQUEST else "ttrpc.Response"), whole[HEADER.size :])
    return Message(stream_id, kind, body)


def send_request(
    multiplexer: Multiplexer, stream: int, stream_id: int, path: str, payload: Any, *, timeout_s: float
) -> None:
    """Call a method of the other side, `service/method`."""
    service, _, method = path.partition("/")
    request = message("ttrpc.Request")(
        service=service, method=method, payload=payload.SerializeToString(), timeout_nano=int(timeout_s * 1e9)
    )
    _send(multiplexer, stream, stream_id, REQUEST, request)


def send_answer(multiplexer: Multiplexer, stream: int, stream_id: int, payload: Any) -> None:
    """Answer a call."""
    _send(multiplexer, stream, stream_id, RESPONSE, message("ttrpc.Response")(payload=payload.SerializeToString()))


def send_failure(multiplexer: Multiplexer, stream: int, stream_id: int, code: int, words: str) -> None:
    """Answer a call with an error."""
    status = message("ttrpc.Status")(code=code, message=words)
    _send(multiplexer, stream, stream_id, RESPONSE, message("ttrpc.Response")(status=status))


def parsed(kind: Any, data: bytes) -> Any:
    """A protobuf message; what is none is the engine's failure."""
    from google.protobuf.message import DecodeError  # noqa: PLC0415 - named by the one function that needs it

    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise EngineFailed(engine="NRI", what=f"{kind.DESCRIPTOR.full_name}: {error}") from error


def _send(multiplexer: Multiplexer, stream: int, stream_id: int, kind: int, body: Any) -> None:
    data = body.SerializeToString()
    if len(data) > LARGEST_MESSAGE:
        raise EngineFailed(engine="NRI", what=f"an answer of {len(data)} bytes, above the limit of {LARGEST_MESSAGE}")
    multiplexer.write(stream, HEADER.pack(len(data), stream_id, kind, 0) + data)
