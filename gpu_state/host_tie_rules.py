"""The table of what a process may hold of the host: what each kind is, whether CRIU takes it along, and what to do about it.

Pure data. A kind is refused only where CRIU's source says so, which each group cites (CRIU 4.2); tests/engines/test_host_ties.py
holds the table against real CRIU. The variables in the remedies are NCCL's, NVSHMEM's and Gloo's own (docs/multi-gpu.md).
Used by host_ties.py, which joins it with the options that CRIU is given.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["refused", "option", "note", "restored"]


@dataclass(frozen=True, slots=True)
class Rule:
    """One kind of tie: with severity "option", CRIU takes it along where it is told `option`."""

    what: str
    severity: Severity
    why: str = ""
    remedy: str = ""
    option: str = ""
    passes: bool = False


_RULES = {
    # ---- connections: criu/sk-inet.c, can_dump_inet_sk
    "tcp-loopback": Rule(
        "a TCP connection over loopback between processes of the container", "option", option="tcp-established"
    ),
    "tcp-inside": Rule(
        "a TCP connection between processes of the container over its network address",
        "option",
        "it comes back only where the restored container has that address again",
        "NCCL_SOCKET_IFNAME=lo and GLOO_SOCKET_IFNAME=lo keep the connections of ranks on loopback",
        "tcp-established",
    ),
    "tcp-outside": Rule(
        "a TCP connection to somebody outside of the container",
        "option",
        "the other side is not checkpointed: it waits until the restore, or gives the connection up",
        "Close it before the checkpoint, or be ready to connect anew",
        "tcp-established",
    ),
    "tcp-waiting": Rule(
        "a TCP connection that nobody has accepted yet",
        "option",
        "CRIU does not take it along",
        "It passes when the listener accepts it",
        "skip-in-flight",
        passes=True,
    ),
    # criu/sockets.c, dump_socket_opts: see CRIU_WITHOUT_PASSCRED
    "inet": Rule("a network socket", "restored"),
    # criu/sockets.c, dump_socket; criu/sk-inet.c, can_dump_ipproto
    "mptcp": Rule(
        "a multipath TCP socket", "refused", "CRIU does not know MPTCP", "Set GODEBUG=multipathtcp=0 in Go programs"
    ),
    "socket-family": Rule(
        "a socket of a family that CRIU does not know", "refused", "CRIU cannot dump it", "Close it first"
    ),
    # criu/sk-unix.c, __dump_external_socket
    "unix-outside": Rule(
        "a Unix socket connected to a process outside of the container",
        "refused",
        "CRIU cannot dump one half of a connection",
        "Close it before the checkpoint, or do not give that socket to the container",
    ),
    "unix-outside-datagram": Rule(
        "a Unix datagram socket connected to a process outside of the container",
        "option",
        "CRIU does not take it along",
        "Close it before the checkpoint (logging to /dev/log is the usual case)",
        "ext-unix-sk",
    ),
    # ---- memory and files: criu/proc_parse.c, handle_vma; criu/files-reg.c, check_path_remap
    "memfd": Rule("memory of memfd_create", "restored"),
    "sysv": Rule("a System V shared-memory segment", "restored"),
    # criu/cr-dump.c, check_sysvipc_map_dump
    "sysv-host": Rule(
        "a System V shared-memory segment of the host's IPC namespace",
        "refused",
        "CRIU takes such segments along with the container's own IPC namespace alone",
        "Run the container without '--ipc host'",
    ),
    "shm": Rule("a shared-memory segment in /dev/shm", "restored"),
    "shm-host": Rule(
        "a shared-memory segment in the host's /dev/shm",
        "note",
        "its content is in no checkpoint: a restore finds what lies there then, or fails",
        "Run the container without '--ipc host' and without a volume at /dev/shm; '--shm-size' gives it room",
    ),
    "deleted-file": Rule("a deleted file that is still in use", "option", "CRIU takes smaller ones along"),
    # criu/files-reg.c, dump_linked_remap
    "deleted-link": Rule(
        "a file whose name was deleted and that has another name",
        "option",
        "CRIU does not look for the other name (named POSIX semaphores are such files)",
        "Unlink semaphores once they are open, as Python's multiprocessing does",
        "link-remap",
    ),
    "hugetlb": Rule(
        "memory of huge pages",
        "note",
        "the node of the restore needs as many free huge pages",
        "Set vm.nr_hugepages there",
    ),
    # criu/file-lock.c
    "file-lock": Rule("a file lock", "option", option="file-locks"),
    # ---- descriptors: criu/files.c, dump_one_file
    "io-uring": Rule(
        "an io_uring instance",
        "refused",
        "CRIU cannot dump io_uring",
        "Turn it off in the program (UV_USE_IO_URING=0 for libuv)",
    ),
    "perf-event": Rule("a performance counter", "refused", "CRIU cannot dump perf events", "Stop the profiler first"),
    "userfaultfd": Rule(
        "a userfaultfd", "refused", "CRIU cannot dump it", "Turn off what handles page faults in the program"
    ),
    "secret-memory": Rule("memory of memfd_secret", "refused", "CRIU cannot dump it", "Use ordinary memory"),
    "dma-buf": Rule("a dma-buf", "refused", "CRIU cannot dump it", "Close it before the checkpoint"),
    "kernel-object": Rule(
        "a kernel object that CRIU does not know", "refused", "CRIU cannot dump it", "Close it first"
    ),
    # criu/pidfd.c, dump_one_pidfd
    "pidfd-outside": Rule(
        "a pidfd of a process outside of the container", "refused", "CRIU cannot find that process", "Close it first"
    ),
    # criu/fsnotify.c, check_open_handle: found by handle, or in /etc and a few places more (criu/irmap.c)
    "inotify-overlay": Rule(
        "an inotify watch on the container's overlay file system",
        "note",
        "CRIU finds such a file again in /etc and a few places more alone, and refuses the dump elsewhere",
        "Stop watching, or name the place in CRIU's configuration ('irmap-scan-path FOLDER')",
    ),
    # ---- devices: criu/files.c, dump_chrdev; criu.org "What cannot be checkpointed", "Devices"
    "rdma": Rule(
        "an RDMA device",
        "refused",
        "neither the driver nor CRIU takes it along",
        "Set NCCL_IB_DISABLE=1 (and UCX_TLS without rc, ud and dc)",
    ),
    "gdrcopy": Rule(
        "GDRCopy's device", "refused", "CRIU cannot dump it", "Set NCCL_GDRCOPY_ENABLE=0 and NVSHMEM_DISABLE_GDRCOPY=1"
    ),
    "imex": Rule(
        "an IMEX channel",
        "note",
        "memory shared by fabric handles does not come back",
        "Set NCCL_MNNVL_ENABLE=0, or run the container without IMEX channels",
    ),
    "device": Rule("a device", "refused", "CRIU cannot dump it", "Close it first, or do not give it to the container"),
    # criu.org "What cannot be checkpointed", "Tasks with debugger attached"
    "traced": Rule("a debugger", "refused", "CRIU attaches as a debugger itself", "Stop the debugger first"),
    "unseen": Rule("something that could not be looked at", "note"),
}
# The agent and the shim are of one version; a kind that is not known comes from a newer agent that was left running.
_OTHER = Rule("something of a kind that this version does not know", "note")
KINDS = tuple(_RULES)


def rule_of(kind: str) -> Rule:
    """The rule of a kind; one that this version does not know is a note."""
    return _RULES.get(kind, _OTHER)
