"""A connection to containerd's socket: calls with a deadline each, in a namespace, under a lease where there is one.

Refuses nothing by itself; what containerd answers becomes an error of ours, with containerd's own words in it.
`is_missing` and `is_there_already` tell the two answers apart that callers know how to go on from.
Called by `checkpointing`, `restoring`, `base_image` and the CRI tests.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import grpc

from containerd_integration.api.wire import method
from vgpu_errors import DeadlineExceeded, EngineFailed, NodeError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from vgpu_errors import VgpuError

DEFAULT_ADDRESS = "/run/containerd/containerd.sock"
DEFAULT_NAMESPACE = "default"
CALL_S = 30.0
CONNECT_S = 10.0
# Above what either side puts into one message: containerd reads content in pieces of up to 3 MiB.
MAX_MESSAGE_BYTES = 16 << 20
SERVICES = {
    name: f"containerd.services.{name}.v1.{name.title()}"
    for name in ("containers", "content", "diff", "images", "leases", "snapshots", "tasks", "transfer", "version")
}


class Connection:
    """containerd behind one socket."""

    def __init__(
        self, address: str = DEFAULT_ADDRESS, namespace: str = DEFAULT_NAMESPACE, *, connect_s: float = CONNECT_S
    ) -> None:
        self.address, self.namespace, self._connect_s = address, namespace, connect_s
        self._lease = ""
        limits = [
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ]
        # A proxy of the environment is for networks; a socket has no other name than localhost.
        options = [*limits, ("grpc.enable_http_proxy", 0), ("grpc.default_authority", "localhost")]
        self._channel = grpc.insecure_channel(f"unix://{address}", options=options)

    def __enter__(self) -> Self:
        try:
            # A socket that is not there will not come while a command waits for it.
            grpc.channel_ready_future(self._channel).result(
                timeout=self._connect_s if Path(self.address).exists() else 0
            )
        except grpc.FutureTimeoutError as problem:
            self._channel.close()
            raise NodeError(
                what=f"containerd does not answer on {self.address}",
                remedy="Look at 'systemctl status containerd', or name its socket with --address.",
            ) from problem
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def use_lease(self, identifier: str) -> None:
        """Content and snapshots of later calls belong to this lease; "" for none."""
        self._lease = identifier

    def call(self, service: str, name: str, /, *, deadline_s: float = CALL_S, **fields: Any) -> Any:
        """One request, one answer. `service` is a short name of containerd's, or a full one."""
        called = method(SERVICES.get(service, service), name)
        send = self._channel.unary_unary(
            called.path, request_serializer=_bytes_of, response_deserializer=called.response.FromString
        )
        try:
            return send(called.request(**fields), timeout=deadline_s, metadata=self._metadata())
        except grpc.RpcError as problem:
            raise told(problem, called.path, deadline_s) from problem

    def read(self, service: str, name: str, /, *, deadline_s: float, **fields: Any) -> Iterator[Any]:
        """One request, a stream of answers."""
        called = method(SERVICES.get(service, service), name)
        send = self._channel.unary_stream(
            called.path, request_serializer=_bytes_of, response_deserializer=called.response.FromString
        )
        stream = send(called.request(**fields), timeout=deadline_s, metadata=self._metadata())
        return self._answers(stream, called.path, deadline_s)

    def write(self, service: str, name: str, requests: Iterable[Any], *, deadline_s: float) -> Iterator[Any]:
        """A stream of requests, a stream of answers."""
        called = method(SERVICES.get(service, service), name)
        send = self._channel.stream_stream(
            called.path, request_serializer=_bytes_of, response_deserializer=called.response.FromString
        )
        stream = send(iter(requests), timeout=deadline_s, metadata=self._metadata())
        return self._answers(stream, called.path, deadline_s)

    def _answers(self, stream: Any, path: str, deadline_s: float) -> Iterator[Any]:
        try:
            yield from stream
        except grpc.RpcError as problem:
            raise told(problem, path, deadline_s) from problem
        finally:
            stream.cancel()

    def _metadata(self) -> list[tuple[str, str]]:
        lease = [("containerd-lease", self._lease)] if self._lease else []
        return [("containerd-namespace", self.namespace), *lease]


def _bytes_of(message: Any) -> bytes:
    return bytes(message.SerializeToString())


def told(problem: Any, path: str, deadline_s: float) -> EngineFailed | DeadlineExceeded:
    """What the user is told about a failed call."""
    code, words = problem.code(), problem.details() or "no reason given"
    call = path.rsplit(".", 1)[-1]
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded(phase=f"containerd's {call}", seconds=f"{deadline_s:g}")
    return EngineFailed(engine=f"containerd {call}", what=words, status=code.name)


def is_missing(error: VgpuError) -> bool:
    """containerd knows no such object."""
    return bool(error.fields.get("status") == grpc.StatusCode.NOT_FOUND.name)


def is_there_already(error: VgpuError) -> bool:
    """containerd has an object of that name."""
    return bool(error.fields.get("status") == grpc.StatusCode.ALREADY_EXISTS.name)
