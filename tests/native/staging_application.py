"""An application for the staging worker's tests: holds VMM memory, exports or imports it, and rewrites it while asked to.

Speaks JSON lines with descriptors (gpu_state/staging/fd_lines.py) on the socket that it inherits. Runs on the software driver.
"""

from __future__ import annotations

import hashlib
import random
import socket
import sys
import threading

from cuda.bindings import driver as d

from gpu_state.staging.fd_lines import FdLines

CHUNK = 4 << 20
POSIX_FD = d.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def ok(answer):
    if int(answer[0]) != 0:
        raise RuntimeError(f"call failed: {answer[0]!r}")
    return answer[1] if len(answer) == 2 else answer[1:]


class Application:
    def __init__(self):
        ok(d.cuInit(0))
        self.contexts = [ok(d.cuDevicePrimaryCtxRetain(n)) for n in range(ok(d.cuDeviceGetCount()))]
        self.objects = []  # device, pointer, size, handle
        self.churning = threading.Event()
        self.is_paused = threading.Event()
        self.wrote = 0

    def alloc(self, sizes, device=0, fds=()):
        ok(d.cuCtxSetCurrent(self.contexts[device]))
        out = []
        for size in sizes:
            wanted = d.CUmemAllocationProp()
            wanted.type = d.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
            wanted.location.type = d.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            wanted.location.id = device
            wanted.requestedHandleTypes = POSIX_FD
            handle = ok(d.cuMemCreate(size, wanted, 0))
            out.append(int(ok(d.cuMemExportToShareableHandle(handle, POSIX_FD, 0))))
            self.map(device, size, handle)
        return {"addresses": [hex(pointer) for _, pointer, _, _ in self.objects[-len(sizes) :]]}, out

    def take(self, sizes, device=0, fds=()):
        ok(d.cuCtxSetCurrent(self.contexts[device]))
        for size, fd in zip(sizes, fds, strict=True):
            self.map(device, size, ok(d.cuMemImportFromShareableHandle(fd, POSIX_FD)))
        return {}, []

    def map(self, device, size, handle):
        pointer = int(ok(d.cuMemAddressReserve(size, 0, 0, 0)))
        ok(d.cuMemMap(pointer, size, 0, handle, 0))
        access = d.CUmemAccessDesc()
        access.location.type = d.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = device
        access.flags = d.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        ok(d.cuMemSetAccess(pointer, size, [access], 1))
        self.objects.append((device, pointer, size, handle))

    def write(self, number, chunk, seed, fds=()):
        """Fill one chunk with what follows from the seed; None is zeros."""
        device, pointer, size, _ = self.objects[number]
        ok(d.cuCtxSetCurrent(self.contexts[device]))
        length = min(CHUNK, size - chunk * CHUNK)
        content = bytes(length) if seed is None else random.Random(seed).randbytes(length)
        ok(d.cuMemcpyHtoD(pointer + chunk * CHUNK, content, length))
        return {}, []

    def fill(self, seed, fds=()):
        for number, (_, _, size, _) in enumerate(self.objects):
            for chunk in range(-(-size // CHUNK)):
                self.write(number, chunk, f"{seed}/{number}/{chunk}")
        return {}, []

    def digests(self, fds=()):
        found = []
        for device, pointer, size, _ in self.objects:
            ok(d.cuCtxSetCurrent(self.contexts[device]))
            host = bytearray(size)
            ok(d.cuMemcpyDtoH(host, pointer, size))
            found.append(hashlib.sha256(host).hexdigest())
        return {"digests": found}, []

    def free_bytes(self, device=0, fds=()):
        ok(d.cuCtxSetCurrent(self.contexts[device]))
        return {"free": int(ok(d.cuMemGetInfo())[0])}, []

    def churn(self, number, chunks, fds=()):
        """Rewrite the first chunks of an object in a thread until `rest`."""
        self.churning.set()
        threading.Thread(target=self._churn, args=(number, chunks), daemon=True).start()
        return {}, []

    def _churn(self, number, chunks):
        self.is_paused.clear()
        while self.churning.is_set():
            for chunk in range(chunks):
                self.write(number, chunk, f"churn {self.wrote}")
                self.wrote += 1
        self.is_paused.set()

    def rest(self, fds=()):
        self.churning.clear()
        assert self.is_paused.wait(10)
        return {"wrote": self.wrote}, []

    def drop(self, fds=()):
        """Unmap and release everything."""
        while self.objects:
            device, pointer, size, handle = self.objects.pop()
            ok(d.cuCtxSetCurrent(self.contexts[device]))
            ok(d.cuMemUnmap(pointer, size))
            ok(d.cuMemAddressFree(pointer, size))
            ok(d.cuMemRelease(handle))
        return {}, []


def main(fd):
    lines = FdLines(socket.socket(fileno=fd))
    application = Application()
    while (received := lines.receive()) is not None:
        request, fds = received
        try:
            result, out = getattr(application, request.pop("do"))(**request, fds=fds)
            lines.send({"result": result}, out)
        except Exception as failure:  # noqa: BLE001
            lines.send({"failure": repr(failure)})


if __name__ == "__main__":
    main(int(sys.argv[1]))
