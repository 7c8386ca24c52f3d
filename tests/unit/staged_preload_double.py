"""A GPU process in staged mode for the agent's tests: counts in shareable VMM objects and speaks the preload's protocol v2.

    staged_preload_double.py SOCKET OUT [--objects N] [--mib M] [--rewrite K] [--device D] [--faults FILE]
                             [--rank R --ranks N --board FILE [--calls C]] [--give PATH] [--take PATH ...] [--opened] [--hold]

The objects are the software driver's (cuMemCreate with a POSIX handle, mapped at addresses that stay reserved). Each step adds 1
to the first word of every object, rewrites K whole objects, checks every byte that it wrote before, and appends
"step N sum S ok" to OUT; a wrong byte is "WRONG" and the end. The gate stands around each part of a step. FILE names faults, one
word a line, each used up once unless it ends in "!":
    refuse-rest  refuse-release  half-release  refuse-map  slow-rest  slow-map  die-in-rest  die-in-pass  die-in-release
    die-in-map  vanish-in-release  hide  block:KIND  obstacle  lone  beyond  stuck

`--give PATH` makes one more object and hands its descriptor to everybody who connects there; `--take PATH` imports such a one, as
an opened handle with `--opened`. In each of them rank R has a page of its own that it writes at every step, and reads the others'.
With `--hold` the application itself keeps a descriptor of each, close-on-exec where the rank is even, which must be of what it has
mapped. With `--board` a step is a collective of all ranks: C calls through the gate, the last of which submits this rank's part, and then a
wait, outside of the gate, until the parts of all ranks are there. The board is a file that says how far each rank has submitted; it
stands for the work on the devices, so a rank is idle when nobody is behind it.
"""

import argparse
import array
import ctypes
import json
import mmap
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


PAGE = 4096


class Held:
    """One object: physical memory, its address, and the descriptor that is kept."""

    kind = "alloc"

    def __init__(self, number, size, device):
        self.id, self.size, self.device = number, size, device
        self.va, self.handle, self.fd = U64(), None, -1
        self.content = None
        call("cuMemAddressReserve", ctypes.byref(self.va), ctypes.c_size_t(size), ctypes.c_size_t(0), U64(0), U64(0))
        self.make()
        self.map()

    def make(self):
        handle = U64()
        wanted = Properties(type=1, handle_types=1, location=Location(1, self.device))
        call("cuMemCreate", ctypes.byref(handle), ctypes.c_size_t(self.size), ctypes.byref(wanted), U64(0))
        fd = ctypes.c_int()
        call("cuMemExportToShareableHandle", ctypes.byref(fd), handle, 1, U64(0))
        self.handle, self.fd = handle, fd.value

    def map(self):
        call("cuMemMap", self.va, ctypes.c_size_t(self.size), ctypes.c_size_t(0), self.handle, U64(0))
        access = Access(Location(1, self.device), 3)
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
        place = {"va": hex(self.va.value), "size": self.size, "offset": 0, "access": [[self.device, 3]]}
        doc = {"id": self.id, "size": self.size, "device": self.device, "uuid": uuid(self.device), "kind": self.kind}
        return doc | {"requested": self.size - 5, "mappings": [place]}

    def write(self, content):
        self.put(0, content)
        self.content = content

    def put(self, offset, content):
        call("cuMemcpyHtoD_v2", U64(self.va.value + offset), content, ctypes.c_size_t(len(content)))

    def get(self, offset, size):
        read = ctypes.create_string_buffer(size)
        call("cuMemcpyDtoH_v2", read, U64(self.va.value + offset), ctypes.c_size_t(size))
        return read.raw

    def is_right(self):
        return self.get(0, len(self.content)) == self.content


class Given(Held):
    """An object that others import; each rank has a page in it."""

    kind, way = "vmm", "descriptor"

    def to_json(self):
        return super().to_json() | {"shared": {"ways": [self.way], "peers": [], "peer_count": 0}}


class Taken(Held):
    """An object of another process."""

    kind, exporter = "import", None

    def __init__(self, number, device, fd, told, *, is_opened):
        self.told = told
        self.source = fd
        if is_opened:
            self.kind, self.exporter = "opened", {"process": told["pid"], "object": told["id"]}
        super().__init__(number, told["size"], device)

    def make(self):
        handle = U64()
        call("cuMemImportFromShareableHandle", ctypes.byref(handle), ctypes.c_void_p(self.source), 1)
        self.handle, self.fd = handle, self.source

    def to_json(self):
        return super().to_json() | ({"exporter": self.exporter} if self.exporter else {})


class Gate:
    """What the library has in front of each call: open, closed, or closed with permits."""

    def __init__(self):
        self.changed = threading.Condition()
        self.is_closed = False
        self.permits = self.inside = self.waiting = self.passed = 0

    def __enter__(self):
        with self.changed:
            self.waiting += 1
            while self.is_closed and not self.permits:
                self.changed.wait()
            self.waiting -= 1
            if self.is_closed:
                self.permits -= 1
                self.passed += 1
            self.inside += 1

    def __exit__(self, *_):
        with self.changed:
            self.inside -= 1
            self.changed.notify_all()

    def shut(self):
        with self.changed:
            self.is_closed, self.permits, self.passed = True, 0, 0

    def permit(self, calls):
        with self.changed:
            self.permits = calls
            self.changed.notify_all()

    def open(self):
        with self.changed:
            self.is_closed = False
            self.changed.notify_all()


class Board:
    """How many collectives each rank has submitted, for all ranks to see; without a file this rank is alone."""

    def __init__(self, options):
        self.rank, self.ranks = options.rank, options.ranks
        self.words = None
        if options.board:
            with Path(options.board).open("r+b") as file:
                self.words = mmap.mmap(file.fileno(), 8 * self.ranks)

    def submit(self, number):
        if self.words:
            self.words[8 * self.rank : 8 * self.rank + 8] = struct.pack("<Q", number)

    def is_done(self):
        if not self.words:
            return True
        submitted = struct.unpack(f"<{self.ranks}Q", self.words[:])
        return min(submitted) >= submitted[self.rank]


def exchange(place, fd):
    """Put a descriptor under a number where the same file is as was seen there."""
    number, device, inode = place
    seen = os.fstat(number)
    if (seen.st_dev, seen.st_ino) == (device, inode):
        os.dup2(fd, number, os.get_inheritable(number))
    os.close(fd)


uuids = {}


def uuid(device):
    """As the driver said when it was first asked: while the process is checkpointed it does not answer."""
    if device not in uuids:
        raw = (ctypes.c_ubyte * 16)()
        call("cuDeviceGetUuid", raw, device)
        uuids[device] = bytes(raw).hex()
    text = uuids[device]
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
        self.gate = Gate()
        self.board = Board(options)
        self.phase = "open"
        self.step = 0
        self.context = ctypes.c_void_p()
        call("cuInit", 0)
        call("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), options.device)
        call("cuCtxSetCurrent", self.context)
        self.last_id = 0
        self.objects, self.given, self.taken = {}, [], []
        for _ in range(options.objects):
            self.add()
        if options.give:
            self.give(options.give)
        for path in options.take:
            self.take(path)
        self.held = {}
        for shared in (*self.given, *self.taken) if options.hold else ():
            number = self.held[shared.id] = os.dup(shared.fd)
            os.set_inheritable(number, options.rank % 2 == 1)
        self.known = set()
        self.seen = {}

    def next_id(self):
        self.last_id += 1
        return self.last_id

    def add(self):
        number = self.next_id()
        held = self.objects[number] = Held(number, self.options.mib << 20, self.options.device)
        held.write(self.pattern(held, 0))

    def give(self, path):
        number = self.next_id()
        held = self.objects[number] = Given(number, self.options.mib << 20, self.options.device)
        held.way = "handle" if self.options.opened else held.way
        self.given.append(held)
        held.put(0, bytes(PAGE * 64))
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(path)
        listener.listen(16)
        threading.Thread(target=self.hand_out, args=(listener, held), daemon=True).start()

    def hand_out(self, listener, held):
        while True:
            with listener.accept()[0] as connection:
                told = {"pid": os.getpid(), "id": held.id, "size": held.size}
                socket.send_fds(connection, [json.dumps(told).encode()], [held.fd])

    def take(self, path):
        ends_at = time.monotonic() + 10
        while True:
            try:
                with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
                    connection.connect(path)
                    told, fds, _, _ = socket.recv_fds(connection, 4096, 1)
                    break
            except OSError:
                if time.monotonic() > ends_at:
                    raise
                time.sleep(0.02)
        number, is_opened = self.next_id(), self.options.opened
        self.taken.append(Taken(number, self.options.device, fds[0], json.loads(told), is_opened=is_opened))

    def all(self):
        return {held.id: held for held in (*self.objects.values(), *self.taken)}

    def pattern(self, held, step):
        word = struct.pack("<QQ", held.id << 32 | step, held.id * 0x9E3779B97F4A7C15 % (1 << 64))
        return word * (held.size // len(word))

    # ---- the application ------------------------------------------------------------------------------

    def count(self):
        call("cuCtxSetCurrent", self.context)
        while True:
            for _ in range(self.options.calls - 1):
                with self.gate:
                    self.check_shared()
            with self.gate:
                self.compute()
                self.board.submit(self.step)
            while not self.board.is_done():
                time.sleep(0.001)
            self.say(f"step {self.step} sum {len(self.objects)} ok")
            while self.faults.has("stuck"):
                time.sleep(0.05)
            time.sleep(0.01)

    def compute(self):
        own = [held for held in self.objects.values() if held not in self.given]
        if not all(held.is_right() for held in own):
            self.fail("its own memory")
        self.step += 1
        for number, held in enumerate(own):
            if number < self.options.rewrite:
                held.write(self.pattern(held, self.step))
            else:
                first = struct.pack("<Q", self.step)
                held.put(0, first)
                held.content = first + held.content[8:]
        self.check_shared()
        for held in (*self.given, *self.taken):
            held.put(PAGE * self.options.rank, self.page(self.options.rank, self.step))

    def page(self, rank, step):
        return struct.pack("<Q", (rank + 1) << 32 | step) * (PAGE // 8)

    def check_shared(self):
        """Every rank's page is as that rank wrote it once, and never older than what was seen before."""
        for place, held in enumerate((*self.given, *self.taken)):
            for rank in range(self.options.ranks):
                step = self.read_page(held, rank)
                if step < self.seen.get((place, rank), 0):
                    self.fail(f"page {rank} of shared object {place} went back to {step}")
                self.seen[place, rank] = step
        for number, held in self.held.items():
            if os.fstat(held).st_ino != os.fstat(self.all()[number].fd).st_ino:
                self.fail(f"its own descriptor {held} of object {number}")
            if os.get_inheritable(held) != (self.options.rank % 2 == 1):
                self.fail(f"descriptor {held} is not close-on-exec as it was")
        if self.given or self.taken:
            seen = {f"{place}/{rank}": step for (place, rank), step in self.seen.items()}
            partial = Path(f"{self.options.out}.partial")
            partial.write_text(json.dumps(seen))
            partial.rename(f"{self.options.out}.seen")

    def read_page(self, held, rank):
        for _ in range(200):  # its owner may be writing just now
            page = held.get(PAGE * rank, PAGE)
            step = struct.unpack_from("<Q", page)[0] & 0xFFFFFFFF
            if page in (self.page(rank, step), bytes(PAGE)):
                return step
            time.sleep(0.001)
        return self.fail(f"page {rank} of a shared object is nobody's")

    def fail(self, what):
        self.say(f"step {self.step} WRONG: {what}")
        os._exit(3)

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
            if self.phase in ("halted", "rested"):  # nobody is there to open it
                self.phase = "open"
                self.gate.open()
            time.sleep(0.02)

    def converse(self, connection):
        devices = [{"ordinal": number, "uuid": uuid(number)} for number in range(self.options.device + 1)]
        hello = {"pid": os.getpid(), "ns_tid": 1, "comm": "double", "build_id": "ab", "libc": "glibc"}
        hello |= {"driver_version": 13000, "devices": devices, "mode": "staged", "protocol": 2, "phase": self.phase}
        hello |= {"minor": self.options.minor}
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
                24: self.shares, 26: self.halt, 28: self.let_pass, 30: self.communicators,
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
        for item in (*self.given, *self.taken):
            kind = {"vmm": "export", "import": "import", "opened": "ipc-opened"}[item.kind]
            blockers.append({"kind": kind, "va": hex(item.va.value), "bytes": item.size, "object": item.id})
        doc = {"objects": [item.to_json() for item in held], "blockers": blockers, "imports": self.imports()}
        return 11, sequence, doc | {"driver_held": [{"kind": "small", "count": 1, "bytes": 4096}]}

    def export(self, connection, sequence, payload, _fds):
        for start in range(0, len(payload["objects"]), 200):
            part = payload["objects"][start : start + 200]
            self.send(connection, 22, sequence, {"objects": part}, [self.objects[number].fd for number in part])
        return 13, sequence, {"count": len(payload["objects"])}

    def imports(self):
        docs = [held.to_json() for held in self.taken]
        if self.faults.has("obstacle"):
            docs = [doc | {"obstacle": "it came by a fabric handle"} for doc in docs]
        if self.faults.has("beyond"):
            docs = [doc | {"mappings": [doc["mappings"][0] | {"offset": doc["size"]}]} for doc in docs]
        return docs

    def shares(self, connection, sequence, _payload, _fds):
        docs = [held.to_json() | {"role": "exporter"} for held in self.given]
        docs += [doc | {"role": "importer"} for doc in self.imports()]
        held = [] if self.faults.has("lone") else [one for one in (*self.given, *self.taken) if one.fd >= 0]
        if held:
            self.send(connection, 22, sequence, {"objects": [one.id for one in held]}, [one.fd for one in held])
        return 25, sequence, {"shares": docs}

    def communicators(self, _connection, sequence, _payload, _fds):
        return 31, sequence, {"communicators": [], "nvshmem": []}

    def is_idle(self):
        return not self.gate.inside and self.board.is_done()

    def halt(self, _connection, sequence, _payload, _fds):
        self.gate.shut()
        self.phase = "halted"
        return 27, sequence, {}

    def let_pass(self, _connection, sequence, payload, _fds):
        if self.faults.has("die-in-pass"):
            os._exit(9)
        calls, ends_at = payload["calls"], time.monotonic() + payload["wait_ms"] / 1000
        self.gate.permit(calls)
        while time.monotonic() < ends_at and (self.gate.permits or not self.is_idle()):
            if calls and not self.gate.permits and not self.gate.inside and not self.is_idle():
                break
            time.sleep(0.001)
        state = {"passed": self.gate.passed, "waiting": self.gate.waiting, "inside": self.gate.inside}
        return 29, sequence, state | {"capturing": False, "idle": self.is_idle()}

    def rest(self, _connection, sequence, payload, _fds):
        if self.faults.has("refuse-rest"):
            self.open(_connection, sequence, payload, _fds)
            return 21, sequence, {"what": "capture in progress", "code": 900}
        if self.faults.has("slow-rest"):
            time.sleep(3)
        if self.faults.has("die-in-rest"):
            os._exit(9)
        if self.phase == "open":
            self.gate.shut()
        self.gate.permit(0)
        ends_at = time.monotonic() + payload["deadline_ms"] / 1000
        while not self.is_idle():
            if time.monotonic() > ends_at:
                self.open(_connection, sequence, payload, _fds)
                return 21, sequence, {"what": "work does not end", "code": 0}
            time.sleep(0.001)
        self.phase = "rested"
        new = sorted(set(self.objects) - self.known)
        return 15, sequence, {"waited_ms": 1, "sync_ms": 0, "new": new, "gone": []}

    def release(self, connection, sequence, payload, _fds):
        if self.taken and not payload.get("imports"):
            return 21, sequence, {"what": "it holds imports", "code": 0}
        if self.faults.has("refuse-release"):
            return 21, sequence, {"what": "not now", "code": 1}
        half = self.faults.has("half-release")
        if self.faults.has("die-in-release"):
            os._exit(9)
        self.phase = "released"
        for number, held in enumerate(self.all().values()):
            if half and number:
                return 21, sequence, {"what": "stuck", "code": 2, "object": held.id}
            if held.handle is not None:
                held.give_away()
        if self.faults.has("vanish-in-release"):
            connection.close()
            raise ConnectionError
        self.park(payload)
        return 17, sequence, {"objects": len(self.objects), "ms": 1}

    def park(self, payload):
        seen = zip(*(payload.get(key, []) for key in ("numbers", "devices", "inodes")), strict=True)
        for place, token in zip(seen, payload.get("tokens", []), strict=True):
            fd = os.memfd_create("vgpu-placeholder")
            os.write(fd, b"VGPUHELD" + struct.pack("<Q", token))
            exchange(place, fd)

    def map(self, _connection, sequence, payload, fds):
        came = [pair for part in fds for pair in part]
        fds.clear()
        if self.faults.has("slow-map"):
            time.sleep(1)
        if self.faults.has("refuse-map"):
            for _, fd in came:
                os.close(fd)
            return 21, sequence, {"what": "out of patience", "code": 2}
        if self.faults.has("die-in-map"):
            os._exit(9)
        assert [number for number, _ in came] == payload["objects"]
        for number, fd in came:
            held = self.all()[number]
            if held.handle is None:
                held.take_back(fd)
            else:
                os.close(fd)
        self.phase = "rested"
        return 19, sequence, {"ms": 1}

    def open(self, _connection, sequence, _payload, _fds):
        if any(held.handle is None for held in self.all().values()):
            return 21, sequence, {"what": "its memory is not back", "code": 0}
        self.phase = "open"
        self.gate.open()
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
        if kind == 22 and "numbers" in payload:
            seen = zip(*(payload[key] for key in ("numbers", "devices", "inodes")), strict=True)
            for place, fd in zip(seen, numbers, strict=True):
                exchange(place, fd)
            payload["objects"] = []
        elif kind == 22:
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
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--minor", type=int, default=2)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--board")
    parser.add_argument("--calls", type=int, default=1)
    parser.add_argument("--give")
    parser.add_argument("--take", action="append", default=[])
    parser.add_argument("--opened", action="store_true")
    parser.add_argument("--hold", action="store_true")
    double = Double(parser.parse_args())
    threading.Thread(target=double.serve, daemon=True).start()
    double.count()


main()
