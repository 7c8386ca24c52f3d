"""A GPU process for the agent's tests: `gpu_client.py import` maps imported memory, `gpu_client.py preload SOCKET DELAY` registers.

Through ctypes on whatever libcuda.so.1 the loader finds; speaks the preload's protocol as spec/preload-protocol.md has it.
"""

import ctypes
import json
import os
import socket
import struct
import sys
import time

from cuda_by_ctypes import GRANULARITY, Access, Location, Properties, call

HEADER = struct.Struct("<IHHII")
MAGIC = 0x55504756


def begin():
    context = ctypes.c_void_p()
    call("cuInit", 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
    call("cuCtxSetCurrent", context)
    call("cuMemAlloc_v2", ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(1 << 20))


def map_imported_memory():
    exported, imported, address = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_uint64()
    properties = Properties(type=1, handle_types=1, location=Location(1, 0))
    size, fd = ctypes.c_size_t(GRANULARITY), ctypes.c_int()
    call("cuMemCreate", ctypes.byref(exported), size, ctypes.byref(properties), ctypes.c_uint64(0))
    call("cuMemExportToShareableHandle", ctypes.byref(fd), exported, 1, ctypes.c_uint64(0))
    call("cuMemImportFromShareableHandle", ctypes.byref(imported), ctypes.c_void_p(fd.value), 1)
    call("cuMemAddressReserve", ctypes.byref(address), size, ctypes.c_size_t(0), ctypes.c_uint64(0), ctypes.c_uint64(0))
    call("cuMemMap", address, size, ctypes.c_size_t(0), imported, ctypes.c_uint64(0))
    access = Access(Location(1, 0), 3)
    call("cuMemSetAccess", address, size, ctypes.byref(access), ctypes.c_size_t(1))
    os.close(fd.value)


def send(connection, kind, payload):
    body = json.dumps(payload).encode()
    connection.sendall(HEADER.pack(MAGIC, 1, kind, len(body), 0) + body)


def receive(connection):
    head = connection.recv(HEADER.size, socket.MSG_WAITALL)
    if len(head) < HEADER.size:
        return None
    _, _, kind, length, _ = HEADER.unpack(head)
    if length:
        connection.recv(length, socket.MSG_WAITALL)
    return kind


def register_for_ever(path, delay_s):
    """Connect, say HELLO, let go when told, wait for the socket to come back."""
    hello = {"pid": os.getpid(), "ns_tid": 1, "comm": "gpu_client", "build_id": "ab", "libc": "glibc"}
    hello |= {"driver_version": 13000, "devices": [{"ordinal": 0, "uuid": "GPU-x"}], "mode": "driver"}
    while True:
        if not os.access(path, os.F_OK):
            time.sleep(0.02)
            continue
        with socket.socket(socket.AF_UNIX) as connection:
            try:
                connection.connect(path)
                send(connection, 1, hello)
                while (kind := receive(connection)) is not None:
                    print(kind, flush=True)
                    if kind == 3:
                        time.sleep(delay_s)
                        send(connection, 4, {})
                        break
            except ConnectionError:
                pass
        print("gone", flush=True)
        time.sleep(0.02)


begin()
if sys.argv[1] == "import":
    map_imported_memory()
    print("ready", flush=True)
    time.sleep(60)
else:
    register_for_ever(sys.argv[2], float(sys.argv[3]))
