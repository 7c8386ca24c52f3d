"""Says where the sockets of a container's processes lead: within the container, to the agent, or outside.

Joins the sockets that the processes hold with the kernel's tables of their network namespace (socket_tables.py). Changes nothing.
The other end of a connection counts as inside where a process of the container holds it. Called by host_ties_found.py.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from gpu_state import socket_tables
from gpu_state.socket_tables import CLOSED, LISTEN

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gpu_state.deadline import Deadline
    from gpu_state.host_ties_found import Collected, Process
    from gpu_state.socket_tables import TcpEntry, UnixEntry

_STREAMS = (1, 5)  # socket.SOCK_STREAM, socket.SOCK_SEQPACKET
# Names of sk_prot in the kernel, as the attribute system.sockprotoname tells them, that criu/sockets.c has a dump for.
_INET = ("TCP", "TCPv6", "UDP", "UDPv6", "UDP-Lite", "UDPLITEv6", "PING", "PINGv6", "RAW", "RAWv6")
_KNOWN_SOCKETS = (*_INET, "UNIX", "UNIX-STREAM", "NETLINK", "PACKET")


def add_connections(processes: Sequence[Process], found: Collected, deadline: Deadline) -> None:
    """Add what the sockets of these processes are tied to."""
    owners = {inode: process for process in processes for inode in process.sockets}
    for process in processes:
        _families(process, found)
    for network in sorted({process.network for process in processes}):
        deadline.check("looking at the connections of the processes")
        first = next(process for process in processes if process.network == network)
        entries, is_whole = socket_tables.tcp_connections(first.pid)
        if not is_whole:
            found.add("unseen", first, "the node's table of TCP connections is too long")
        _tcp(entries, owners, found)
        if any(name.startswith("UNIX") for process in processes for name in process.sockets.values()):
            _unix(first, owners, found)


def _families(process: Process, found: Collected) -> None:
    for name in process.sockets.values():
        if name in _INET:
            found.add("inet", process, "")
        elif name in ("MPTCP", "MPTCPv6"):
            found.add("mptcp", process, "")
        elif name and name not in _KNOWN_SOCKETS:
            found.add("socket-family", process, name)


def _tcp(entries: list[TcpEntry], owners: Mapping[int, Process], found: Collected) -> None:
    inside = {(entry.local, entry.remote) for entry in entries if entry.inode in owners}
    for entry in entries:
        if (owner := owners.get(entry.inode)) is None or entry.state == CLOSED:
            continue
        if entry.state == LISTEN:
            if entry.waiting:
                found.add("tcp-waiting", owner, f"port {entry.local[1]}", count=entry.waiting)
        elif (entry.remote, entry.local) not in inside:
            found.add("tcp-outside", owner, str(entry))
        else:
            found.add("tcp-loopback" if entry.is_loopback else "tcp-inside", owner, str(entry))


def _unix(first: Process, owners: Mapping[int, Process], found: Collected) -> None:
    try:
        entries = socket_tables.unix_sockets(first.pid)
    except OSError as problem:
        found.add("unseen", first, f"the peers of Unix sockets: {problem.strerror or problem}")
        return
    own = _own_sockets()
    for inode, owner in owners.items():
        entry = entries.get(inode)
        if entry is not None and entry.peer and entry.peer not in owners and entry.peer not in own:
            kind = "unix-outside" if entry.type in _STREAMS else "unix-outside-datagram"
            found.add(kind, owner, _peer_name(entry, entries))


def _peer_name(entry: UnixEntry, entries: Mapping[int, UnixEntry]) -> str:
    peer = entries.get(entry.peer)
    return peer.name if peer is not None and peer.name else f"socket {entry.peer}"


def _own_sockets() -> frozenset[int]:
    """The agent's: a preload library lets go of its connection before the freeze (spec/preload-protocol.md, DETACH)."""
    found = set()
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names are enough
        try:
            target = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115
        except OSError:
            continue  # the descriptor that listed the folder, or one that another thread has closed
        if target.startswith("socket:["):
            found.add(int(target[8:-1]))
    return frozenset(found)
