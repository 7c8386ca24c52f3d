"""A GPU process in staged mode for the agent's tests: counts in shareable VMM objects and speaks the preload's protocol v2.

    staged_preload_double.py SOCKET OUT [--objects N] [--mib M] [--rewrite K] [--faults FILE]

The objects are the software driver's (cuMemCreate with a POSIX handle, mapped at addresses that stay reserved). Each step adds 1
to the first word of every object, rewrites K whole objects, checks every byte that it wrote before, and appends
"step N sum S ok" to OUT; a wrong byte is "WRONG" and the end. What the library does with a gate around driver calls is a lock
around a step here. FILE names faults, one word a line, each used up once unless it ends in "!":
    refuse-rest  refuse-release  half-release  refuse-map  slow-rest  slow-map  die-in-release  vanish-in-release  hide  block:KIND
"""

import argparse
import array
import ctypes
import json
import os
import socket
import struct
import threading
import time
from pathlib import Path

from cuda_by_ctypes import Access, CallFailed, Location, Properties, call

HEADER = struct.Struct("<IHHII")
MAGIC, VERSION = 0x55504756, 2
U64 = ctypes.c_uint64


class Held:
    """One object: physical memory, its address, and the descriptor that is kept."""

    def __init__(self, number, size):
        self.id, self.size = number, size
        self.va, self.handle, self.fd = U64(), None, -1
        self.content = None
        call("cuMemAddressReserve", ctypes.byref(self.va), ctypes.c_size_t(size), ctypes.c_size_t(0), U64(0), U64(0))
        handle = U64()
        wanted = Properties(type=1, handle_types=1, location=Location(1, 0))
        call("cuMemCreate", ctypes.byref(handle), ctypes.c_size_t(size), ctypes.byref(wanted), U64(0))
        fd = ctypes.c_int()
        call("cuMemExportToShareableHandle", ctypes.byref(fd), handle, 1, U64(0))
        self.handle, self.fd = handle, fd.value
        self.map()

    def map(self):
        call("cuMemMap", self.va, ctypes.c_size_t(self.size), ctypes.c_size_t(0), self.handle, U64(0))
        access = Access(Location(1, 0), 3)
        call("cuMemSetAccess", self.va, ctypes.c_size_t(self.size), ctypes.byref(access), ctypes.c_size_t(1))

    def give_away(self):
        call("cuMemUnmap", self.va, ctypes.c_size_t(self.size))
        call("cuMemRelease", self.handle)
        os.close(self.fd)
        self.handle, self.fd = None, -1

    def take_back(self, fd):
        handle = U64()
        call("cuMemImportFromShareableHandle", ctypes.byref(handle), ctypes.c_void_p(fd), 1)
        self.handle, self.fd = handle, fd
        self.map()

    def to_json(self):
        place = {"va": hex(self.va.value), "size": self.size, "offset": 0, "access": [[0, 3]]}
        doc = {"id": self.id, "size": self.size, "device": 0, "uuid": uuid(), "kind": "alloc"}
        return doc | {"requested": self.size - 5, "mappings": [place]}

    def write(self, content):
        call("cuMemcpyHtoD_v2", self.va, content, ctypes.c_size_t(len(content)))
        self.content = content

    def is_right(self):
        read = ctypes.create_string_buffer(len(self.content))
        call("cuMemcpyDtoH_v2", read, self.va, ctypes.c_size_t(len(self.content)))
        return read.raw == self.content


def uuid():
    raw = (ctypes.c_ubyte * 16)()
    call("cuDeviceGetUuid", raw, 0)
    text = bytes(raw).hex()
    return f"GPU-{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


class Faults:
    def __init__(self, path):
        self.path = Path(path) if path else None

    def has(self, word):
        if self.path is None or not self.path.exists():
            return None
        lines = self.path.read_text().split()
        for line in lines:
            if line.rstrip("!").partition(":")[0] == word:
                if not line.endswith("!"):
                    lines.remove(line)
                    self.path.write_text("\n".join(lines))
                return line.rstrip("!").partition(":")[2] or True
        return None


class Double:
    def __init__(self, options):
        self.options = options
        self.faults = Faults(options.faults)
        self.gate = threading.Lock()
        self.is_closed = False
        self.phase = "open"
        self.step = 0
        self.context = ctypes.c_void_p()
        call("cuInit", 0)
        call("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), 0)
        call("cuCtxSetCurrent", self.context)
        self.last_id = 0
        self.objects = {}
        for _ in range(options.objects):
            self.add()
        self.known = set()

    def add(self):
        self.last_id += 1
        held = self.objects[self.last_id] = Held(self.last_id, self.options.mib << 20)
        held.write(self.pattern(held, 0))

    def pattern(self, held, step):
        word = struct.pack("<QQ", held.id << 32 | step, held.id * 0x9E3779B97F4A7C15 % (1 << 64))
        return word * (held.size // len(word))

    # ---- the application ------------------------------------------------------------------------------

    def count(self):
        call("cuCtxSetCurrent", self.context)
        while True:
            with self.gate:
                if not all(held.is_right() for held in self.objects.values()):
                    self.say(f"step {self.step} WRONG")
                    os._exit(3)
                self.step += 1
                for number, held in enumerate(self.objects.values()):
                    if number < self.options.rewrite:
                        held.write(self.pattern(held, self.step))
                    else:
                        first = struct.pack("<Q", self.step)
                        held.write(first + held.content[8:])
                self.say(f"step {self.step} sum {len(self.objects)} ok")
            time.sleep(0.01)

    def say(self, line):
        with Path(self.options.out).open("a") as out:
            out.write(line + "\n")

    # ---- the helper -----------------------------------------------------------------------------------

    def serve(self):
        call("cuCtxSetCurrent", self.context)
        while True:
            if os.access(self.options.socket, os.F_OK):
                with socket.socket(socket.AF_UNIX) as connection:
                    try:
                        connection.connect(self.options.socket)
                        self.converse(connection)
                    except (ConnectionError, OSError):
                        pass
            time.sleep(0.02)

    def converse(self, connection):
        devices = [{"ordinal": 0, "uuid": uuid()}] if self.phase == "open" else [{"ordinal": 0, "uuid": self.uuid}]
        self.uuid = devices[0]["uuid"]
        hello = {"pid": os.getpid(), "ns_tid": 1, "comm": "double", "build_id": "ab", "libc": "glibc"}
        hello |= {"driver_version": 13000, "devices": devices, "mode": "staged", "protocol": 2, "phase": self.phase}
        self.send(connection, 1, 0, hello)
        fds = []
        while (frame := self.receive(connection, fds)) is not None:
            kind, sequence, payload = frame
            if kind == 3:
                self.send(connection, 4, sequence, {})
                return
            self.answer(connection, kind, sequence, payload, fds)

    def answer(self, connection, kind, sequence, payload, fds):
        try:
            answer = {
                10: self.inventory, 12: self.export, 14: self.rest, 16: self.release, 18: self.map, 20: self.open,
            }.get(kind)  # fmt: skip
            if kind == 22:
                fds.append(payload["objects"])
            elif answer is not None:
                self.send(connection, *answer(connection, sequence, payload, fds))
        except CallFailed as problem:
            self.send(connection, 21, sequence, {"what": str(problem), "code": 1})

    def inventory(self, _connection, sequence, _payload, _fds):
        held = list(self.objects.values())
        self.known = set(self.objects)
        if self.faults.has("hide"):
            held = held[1:]
        kind = self.faults.has("block")
        blockers = [{"kind": kind, "va": "0x1000", "bytes": 4096, "what": "from a test"}] if kind else []
        doc = {"objects": [item.to_json() for item in held], "blockers": blockers}
        return 11, sequence, doc | {"driver_held": [{"kind": "small", "count": 1, "bytes": 4096}]}

    def export(self, connection, sequence, payload, _fds):
        for start in range(0, len(payload["objects"]), 200):
            part = payload["objects"][start : start + 200]
            self.send(connection, 22, sequence, {"objects": part}, [self.objects[number].fd for number in part])
        return 13, sequence, {"count": len(payload["objects"])}

    def rest(self, _connection, sequence, _payload, _fds):
        if self.faults.has("refuse-rest"):
            return 21, sequence, {"what": "capture in progress", "code": 900}
        if self.faults.has("slow-rest"):
            time.sleep(3)
        if not self.is_closed:
            self.gate.acquire()
            self.is_closed = True
        self.phase = "rested"
        new = sorted(set(self.objects) - self.known)
        return 15, sequence, {"waited_ms": 1, "sync_ms": 0, "new": new, "gone": []}

    def release(self, connection, sequence, _payload, _fds):
        if self.faults.has("refuse-release"):
            return 21, sequence, {"what": "not now", "code": 1}
        half = self.faults.has("half-release")
        if self.faults.has("die-in-release"):
            os._exit(9)
        self.phase = "released"
        for number, held in enumerate(self.objects.values()):
            if half and number:
                return 21, sequence, {"what": "stuck", "code": 2, "object": held.id}
            if held.handle is not None:
                held.give_away()
        if self.faults.has("vanish-in-release"):
            connection.close()
            raise ConnectionError
        return 17, sequence, {"objects": len(self.objects), "ms": 1}

    def map(self, _connection, sequence, payload, fds):
        came = [pair for part in fds for pair in part]
        fds.clear()
        if self.faults.has("slow-map"):
            time.sleep(1)
        if self.faults.has("refuse-map"):
            for _, fd in came:
                os.close(fd)
            return 21, sequence, {"what": "out of patience", "code": 2}
        assert [number for number, _ in came] == payload["objects"]
        for number, fd in came:
            held = self.objects[number]
            if held.handle is None:
                held.take_back(fd)
            else:
                os.close(fd)
        self.phase = "rested"
        return 19, sequence, {"ms": 1}

    def open(self, _connection, sequence, _payload, _fds):
        if self.is_closed:
            self.is_closed = False
            self.phase = "open"
            self.gate.release()
        return 23, sequence, {}

    def send(self, connection, kind, sequence, payload, fds=()):
        body = json.dumps(payload).encode()
        data = HEADER.pack(MAGIC, VERSION, kind, len(body), sequence) + body
        extra = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        sent = connection.sendmsg([data], extra)
        connection.sendall(data[sent:])

    def receive(self, connection, fds):
        """A frame; what came with an FDS frame replaces its list of ids by pairs."""
        got, numbers = b"", array.array("i")
        while len(got) < HEADER.size:
            piece, extra, _, _ = connection.recvmsg(HEADER.size - len(got), socket.CMSG_SPACE(253 * 4))
            for _, _, raw in extra:
                numbers.frombytes(raw)
            if not piece:
                return None
            got += piece
        _, _, kind, length, sequence = HEADER.unpack(got)
        body = connection.recv(length, socket.MSG_WAITALL) if length else b"{}"
        payload = json.loads(body)
        if kind == 22:
            payload["objects"] = list(zip(payload["objects"], numbers, strict=True))
        return kind, sequence, payload


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("socket")
    parser.add_argument("out")
    parser.add_argument("--objects", type=int, default=3)
    parser.add_argument("--mib", type=int, default=2)
    parser.add_argument("--rewrite", type=int, default=1)
    parser.add_argument("--faults")
    double = Double(parser.parse_args())
    threading.Thread(target=double.serve, daemon=True).start()
    double.count()


main()
