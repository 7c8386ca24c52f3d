"""Reads the kernel's tables of TCP connections and Unix sockets in a container's network namespace.

TCP from /proc/<pid>/net/tcp and tcp6; peers of Unix sockets from a sock_diag socket made inside the namespace (include/uapi/
linux/unix_diag.h), because /proc does not tell them. Changes nothing. The calling thread stays where it is: a short-lived
thread enters the namespace and ends. Stops at MAX_BYTES of a table and says so. Called by host_ties_found.py.
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
import socket
import struct
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_BYTES = 16 << 20
LISTEN, CLOSED = 0x0A, 0x07
_CLONE_NEWNET = 0x40000000
_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY = 4, 20
_NLMSG_ERROR, _NLMSG_DONE, _DUMP_REQUEST = 2, 3, 0x301
_SHOW_NAME_AND_PEER = 0x1 | 0x4
_NAME, _PEER = 0, 2
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBHIII2I")
_SOCKET = struct.Struct("=BBBBI2I")
_ATTRIBUTE = struct.Struct("=HH")
_ANSWER_S = 2.0


class TcpEntry(NamedTuple):
    """One line of /proc/net/tcp."""

    local: tuple[str, int]
    remote: tuple[str, int]
    state: int
    waiting: int
    inode: int

    @property
    def is_loopback(self) -> bool:
        """Both ends are addresses of the loopback interface."""
        return all(ipaddress.ip_address(address).is_loopback for address, _ in (self.local, self.remote))

    def __str__(self) -> str:
        return " - ".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self[:2])


@dataclass(frozen=True, slots=True)
class UnixEntry:
    """One Unix socket: its type (socket.SOCK_STREAM...), the inode of its peer (0 for none) and its name."""

    type: int
    peer: int
    name: str


def tcp_connections(pid: int) -> tuple[list[TcpEntry], bool]:
    """All TCP sockets of the namespace that process `pid` is in, and whether that is all of them."""
    found: list[TcpEntry] = []
    is_whole = True
    for table in ("tcp", "tcp6"):
        try:
            with open(f"/proc/{pid}/net/{table}", "rb") as file:  # noqa: PTH123 - a bounded read
                data = file.read(MAX_BYTES)
                is_whole = is_whole and not file.read(1)
        except OSError:
            continue
        found += tcp_entries(data.decode("ascii", "replace"))
    return found, is_whole


def tcp_entries(text: str) -> Iterator[TcpEntry]:
    """The lines of a table; what is no line of one is left out."""
    for line in text.splitlines()[1:]:
        words = line.split()
        try:
            local, remote, state = _endpoint(words[1]), _endpoint(words[2]), int(words[3], 16)
            yield TcpEntry(local, remote, state, int(words[4].partition(":")[2], 16), int(words[9]))
        except (IndexError, ValueError):
            continue


def _endpoint(word: str) -> tuple[str, int]:
    """An address as the kernel prints it, `0100007F:1F90`: in 32-bit words of the machine's byte order."""
    digits, _, port = word.partition(":")
    data = b"".join(struct.pack("=I", int(digits[at : at + 8], 16)) for at in range(0, len(digits), 8))
    address = ipaddress.ip_address(data)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address), int(port, 16)


def unix_sockets(pid: int) -> dict[int, UnixEntry]:
    """Inode -> socket, of the namespace that process `pid` is in; OSError where the kernel does not tell."""
    with _socket_in_namespace_of(pid) as asking:
        asking.settimeout(_ANSWER_S)
        states, any_cookie = 0xFFFFFFFF, 0xFFFFFFFF
        body = _REQUEST.pack(socket.AF_UNIX, 0, 0, states, 0, _SHOW_NAME_AND_PEER, any_cookie, any_cookie)
        head = _HEADER.pack(_HEADER.size + len(body), _SOCK_DIAG_BY_FAMILY, _DUMP_REQUEST, 1, 0)
        asking.send(head + body)
        found: dict[int, UnixEntry] = {}
        received = 0
        while received < MAX_BYTES:
            data = asking.recv(1 << 16)
            received += len(data)
            is_last = add_unix_entries(data, found)
            if is_last:
                return found
    raise OSError("the table of Unix sockets has no end")


def add_unix_entries(data: bytes, found: dict[int, UnixEntry]) -> bool:
    """Take one datagram of the answer in; whether it was the last."""
    at = 0
    while at + _HEADER.size <= len(data):
        length, kind = _HEADER.unpack_from(data, at)[:2]
        if kind == _NLMSG_DONE:
            return True
        if kind == _NLMSG_ERROR or not _HEADER.size <= length <= len(data) - at:
            raise OSError("the kernel does not tell of Unix sockets")
        message = data[at + _HEADER.size : at + length]
        if len(message) >= _SOCKET.size:
            _, kind_of_socket, _, _, inode, *_ = _SOCKET.unpack_from(message)
            attributes = dict(_attributes(message[_SOCKET.size :]))
            peer = attributes.get(_PEER, b"")
            name = attributes.get(_NAME, b"").rstrip(b"\0").replace(b"\0", b"@").decode("utf-8", "replace")
            found[inode] = UnixEntry(kind_of_socket, int.from_bytes(peer[:4], "little"), name)
        at += (length + 3) & ~3
    return False


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + _ATTRIBUTE.size <= len(data):
        length, kind = _ATTRIBUTE.unpack_from(data, at)
        if length < _ATTRIBUTE.size:
            return
        yield kind, data[at + _ATTRIBUTE.size : at + length]
        at += (length + 3) & ~3


def _socket_in_namespace_of(pid: int) -> socket.socket:
    """A sock_diag socket of that namespace; a socket stays in the namespace that it was made in."""
    made: list[socket.socket | OSError] = []
    maker = threading.Thread(target=lambda: made.append(_made_there(pid)), name="network namespace")
    maker.start()
    maker.join()
    if isinstance(made[0], OSError):
        raise made[0]
    return made[0]


def _made_there(pid: int) -> socket.socket | OSError:
    libc = ctypes.CDLL(None, use_errno=True)  # os.setns comes with Python 3.12
    try:
        namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            if libc.setns(namespace, _CLONE_NEWNET) != 0:
                return OSError(ctypes.get_errno(), f"setns: {os.strerror(ctypes.get_errno())}")
        finally:
            os.close(namespace)
        return socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG)
    except OSError as problem:
        return problem
