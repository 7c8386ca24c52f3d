"""The runtime's side of NRI, as containerd has it: listens, takes the registration, calls the plugin.

Speaks the real protocol over a real socket; what it cannot show is containerd's own behaviour (tests/engines/test_nri.py).
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import struct
import time
from pathlib import Path

from containerd_integration.api.wire import message
from containerd_integration.nri import ttrpc
from containerd_integration.nri.multiplex import PLUGIN_STREAM, RUNTIME_STREAM, Multiplexer

PACKAGE = "nri.pkg.api.v1alpha1"
DEADLINE_S = 5.0


class CallFailed(Exception):
    """The plugin answered with an error."""


class Runtime:
    """One listening socket, one plugin at a time."""

    def __init__(self, path: Path) -> None:
        self.address = str(path)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.address)
        self._listener.listen()
        self._listener.settimeout(DEADLINE_S)
        self._multiplexer: Multiplexer | None = None
        self._trunk: socket.socket | None = None
        self._ids = itertools.count(1, 2)

    def accept(self, *, refuse: str | None = None):
        """Wait for a plugin; its registration, answered or refused."""
        self._trunk, _ = self._listener.accept()
        self._multiplexer = Multiplexer(self._trunk)
        call = self._next(RUNTIME_STREAM)
        assert (call.body.service, call.body.method) == (f"{PACKAGE}.Runtime", "RegisterPlugin")
        if refuse is None:
            ttrpc.send_answer(self._multiplexer, RUNTIME_STREAM, call.stream_id, message(f"{PACKAGE}.Empty")())
        else:
            ttrpc.send_failure(self._multiplexer, RUNTIME_STREAM, call.stream_id, ttrpc.UNKNOWN, refuse)
        return message(f"{PACKAGE}.RegisterPluginRequest").FromString(call.body.payload)

    def call(self, method: str, request=None, *, answer: str | None = None, service: str = f"{PACKAGE}.Plugin"):
        """Call the plugin, as containerd does."""
        payload = request if request is not None else message(f"{PACKAGE}.Empty")()
        stream_id = next(self._ids)
        ttrpc.send_request(
            self._multiplexer, PLUGIN_STREAM, stream_id, f"{service}/{method}", payload, timeout_s=DEADLINE_S
        )
        found = self._next(PLUGIN_STREAM)
        assert found.stream_id == stream_id
        if found.body.status.code:
            raise CallFailed(found.body.status.message)
        return message(f"{PACKAGE}.{answer or method + 'Response'}").FromString(found.body.payload)

    def send_raw(self, data: bytes) -> None:
        """Bytes that are no protocol."""
        self._trunk.sendall(data)

    def send_in_pieces(self, method: str, request, sizes) -> object:
        """A call cut into frames of these sizes, the rest in the last."""
        body = message("ttrpc.Request")(
            service=f"{PACKAGE}.Plugin", method=method, payload=request.SerializeToString()
        ).SerializeToString()
        whole = ttrpc.HEADER.pack(len(body), next(self._ids), ttrpc.REQUEST, 0) + body
        for size in (*sizes, len(whole)):
            piece, whole = whole[:size], whole[size:]
            self._trunk.sendall(struct.pack(">II", PLUGIN_STREAM, len(piece)) + piece)
        return message(f"{PACKAGE}.{method}Response").FromString(self._next(PLUGIN_STREAM).body.payload)

    def hang_up(self) -> None:
        """As a runtime that ends."""
        if self._multiplexer is not None:
            self._multiplexer.close()

    def close(self) -> None:
        self.hang_up()
        with contextlib.suppress(OSError):
            self._listener.close()

    def _next(self, stream: int):
        ends = time.monotonic() + DEADLINE_S
        while (found := ttrpc.next_message(self._multiplexer, stream)) is None:
            assert self._multiplexer.read_frame(ends), "the plugin says nothing"
        return found
