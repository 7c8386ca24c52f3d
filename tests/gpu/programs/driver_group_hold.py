"""What torch_group_hold.py does, in bare driver calls and without NCCL: so that its benches can be rehearsed without a GPU.

N ranks, one device each, hold filled memory and sum up a message in a ring; each line and option means the same as there.
With `--share` the message lies in VMM memory that the right-hand neighbour imports by descriptor, else in memory of its own and
goes over the host. Runs on the software driver and on a real one.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import pathlib
import socket
import sys
import time

import cuda.bindings.driver as cuda

FD = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
DEVICE = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
MESSAGE_BYTES = 2 << 20
WAIT_S = 300


def main() -> int:
    args = parse_arguments()
    rings = [socket.socketpair() for _ in range(args.ranks)]
    children = []
    for rank in range(args.ranks):
        child = os.fork()
        if child == 0:
            left, right = rings[rank - 1][1], rings[rank][0]
            os._exit(0 if Rank(rank, args, left, right).run() else 3)
        children.append(child)
    worst = 0
    for _ in children:
        _, status = os.wait()
        worst = max(worst, os.waitstatus_to_exitcode(status), key=abs)
    return abs(worst)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mib", type=int, default=64, help="MiB of held memory, each rank")
    parser.add_argument("--interval", type=float, default=0.005)
    parser.add_argument("--blocks", type=int, default=0)
    parser.add_argument("--gate", type=pathlib.Path)
    parser.add_argument("--share", action="store_true")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    return parser.parse_args()


class Rank:
    """One rank; `left` and `right` are sockets to its neighbours, for words and descriptors."""

    def __init__(self, rank: int, args: argparse.Namespace, left: socket.socket, right: socket.socket) -> None:
        self.rank, self.args, self.left, self.right = rank, args, left, right
        good("cuInit", cuda.cuInit(0))
        devices = good("cuDeviceGetCount", cuda.cuDeviceGetCount())
        self.device = rank % devices
        good("cuCtxSetCurrent", cuda.cuCtxSetCurrent(good("retain", cuda.cuDevicePrimaryCtxRetain(self.device))))
        self.stream = good("cuStreamCreate", cuda.cuStreamCreate(1))
        self.held = [good("cuMemAlloc", cuda.cuMemAlloc(4 << 20)) for _ in range(max(1, args.mib // 4))]
        for number, address in enumerate(self.held):
            good("fill", cuda.cuMemsetD32(address, self.word_of(number), 1 << 20))
        self.share()

    def share(self) -> None:
        """The memory that the right-hand neighbour reads, and that of the left-hand one."""
        if not self.args.share:
            self.ours = good("cuMemAlloc", cuda.cuMemAlloc(MESSAGE_BYTES))
            return
        wanted = cuda.CUmemAllocationProp()
        wanted.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        wanted.requestedHandleTypes = FD
        wanted.location.type, wanted.location.id = DEVICE, self.device
        handle = good("cuMemCreate", cuda.cuMemCreate(MESSAGE_BYTES, wanted, 0))
        self.ours = self.map(handle)
        descriptor = int(good("export", cuda.cuMemExportToShareableHandle(handle, FD, 0)))
        socket.send_fds(self.right, [b"f"], [descriptor])
        os.close(descriptor)
        imported = socket.recv_fds(self.left, 1, 1)[1][0]
        self.theirs = self.map(good("import", cuda.cuMemImportFromShareableHandle(imported, FD)))
        os.close(imported)

    def map(self, handle: object) -> int:
        address = good("reserve", cuda.cuMemAddressReserve(MESSAGE_BYTES, 0, 0, 0))
        good("map", cuda.cuMemMap(address, MESSAGE_BYTES, 0, handle, 0))
        access = cuda.CUmemAccessDesc()
        access.location.type, access.location.id = DEVICE, self.device
        access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        good("access", cuda.cuMemSetAccess(address, MESSAGE_BYTES, [access], 1))
        return int(address)

    def run(self) -> bool:
        with self.args.out.open("a", buffering=1) as out:
            return self.blocks(out) if self.args.blocks else self.loop(out)

    def loop(self, out: object) -> bool:
        for number in range(1, 2**30):
            ok = self.step(number)
            self.write(out, step=number, ok=ok)
            if not ok or (self.args.gate and pathlib.Path(f"{self.args.gate}.stop").exists()):
                return ok
            time.sleep(self.args.interval)
        return True

    def blocks(self, out: object) -> bool:
        self.write(out, ready=True, ok=self.step(1))
        for block in range(10**6):
            while not pathlib.Path(f"{self.args.gate}.{block}").exists():
                if pathlib.Path(f"{self.args.gate}.stop").exists():
                    return True
                time.sleep(0.001)
            taken, ok = [], True
            for number in range(self.args.blocks):
                began = time.perf_counter()
                ok = self.step(number + 2) and ok
                taken.append(time.perf_counter() - began)
            self.write(out, block=block, ok=ok, seconds=[round(value, 7) for value in taken])
        return True

    def step(self, number: int) -> bool:
        """Write our word, read the left-hand neighbour's, and check a piece of what is held."""
        good("memset", cuda.cuMemsetD32Async(self.ours, 1000 * number + self.rank, MESSAGE_BYTES // 4, self.stream))
        good("synchronise", cuda.cuStreamSynchronize(self.stream))
        left = (self.rank - 1) % self.args.ranks
        expected = 1000 * number + left
        if self.args.share:
            self.turn(b"w")
            ok = self.holds(self.theirs, MESSAGE_BYTES, expected)
            self.turn(b"r")  # read by everybody before anybody writes again
        else:
            self.right.sendall(self.read(self.ours, 4))
            ok = int.from_bytes(self.heard(4), "little") == expected
        at = number % len(self.held)
        return ok and self.holds(self.held[at], 4 << 20, self.word_of(at))

    def turn(self, word: bytes) -> None:
        """To both neighbours and from both."""
        self.right.sendall(word)
        self.left.sendall(word)
        self.heard(1)
        answer = self.right.recv(1)
        if answer != word:
            message = f"rank {self.rank}: the neighbour said {answer!r}"
            raise RuntimeError(message)

    def heard(self, size: int) -> bytes:
        taken = self.left.recv(size, socket.MSG_WAITALL)
        if len(taken) != size:
            message = f"rank {self.rank}: the neighbour has gone"
            raise RuntimeError(message)
        return taken

    def holds(self, address: int, size: int, word: int) -> bool:
        return self.read(address, size) == word.to_bytes(4, "little") * (size // 4)

    def read(self, address: int, size: int) -> bytes:
        host = ctypes.create_string_buffer(size)
        good("copy", cuda.cuMemcpyDtoHAsync(host, address, size, self.stream))
        good("synchronise", cuda.cuStreamSynchronize(self.stream))
        return host.raw

    def word_of(self, number: int) -> int:
        return 7919 * (number + 1) + self.rank

    def write(self, out: object, **line: object) -> None:
        out.write(json.dumps({"rank": self.rank, "t": time.monotonic(), **line}) + "\n")


def good(name: str, answer: tuple) -> object:
    if int(answer[0]) != 0:
        message = f"{name}: {answer[0]}"
        raise RuntimeError(message)
    return answer[1] if len(answer) == 2 else None


if __name__ == "__main__":
    sys.exit(main())
