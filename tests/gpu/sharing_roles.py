"""The processes of tests/gpu/sharing_facts.py: each plays one role, does what it is told in JSON lines, and ends with its stdin.

    python3 -m tests.gpu.sharing_roles ROLE [FD of a socket to the other process]

`{"do": NAME, ...}` calls the role's method of that name and is answered with its result, or with {"failed": TEXT}; the first line
of all says that the role is ready. Asserts nothing: the facts are what the driver answers.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import pathlib
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import cuda.bindings.driver as cuda

from gpu_state.nvml import Nvml

FD = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
DEVICE = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
HOST = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_HOST_NUMA
READ_WRITE = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
INTERPROCESS_WITHOUT_TIMING = 2 | 4
HANDLE_BYTES = 64
SMALL_BYTES = 4 << 20
WORDS = b"these are the words that must be there afterwards"


class DriverFailed(Exception):
    """A call that a role needs was refused."""


def good(name: str, answer: tuple) -> Any:
    if int(answer[0]) != 0:
        raise DriverFailed(f"{name} answers {int(answer[0])}")
    return answer[1] if len(answer) == 2 else None


class Role:
    """A context on device 0, and a socket to the other process where there is one."""

    def __init__(self, peer: socket.socket | None) -> None:
        self.peer = peer
        good("cuInit", cuda.cuInit(0))
        good("cuCtxSetCurrent", cuda.cuCtxSetCurrent(good("retain", cuda.cuDevicePrimaryCtxRetain(0))))
        self.set_up()

    def set_up(self) -> None:
        """What the role holds."""

    def shared_maps(self) -> list[str]:
        """The files that are mapped for others to see."""
        lines = (line.split(maxsplit=5) for line in pathlib.Path("/proc/self/maps").read_text().splitlines())
        files = {words[5] for words in lines if len(words) == 6 and words[1].startswith("rw-s")}
        return sorted(file for file in files if file.startswith(("/dev/shm", "/memfd", "/tmp")))

    def create(self, kind: Any, size: int) -> Any:
        wanted = cuda.CUmemAllocationProp()
        wanted.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        wanted.requestedHandleTypes = FD
        wanted.location.type, wanted.location.id = kind, 0
        return good("cuMemCreate", cuda.cuMemCreate(size, wanted, 0))

    def map(self, handle: Any, size: int, kinds: tuple[Any, ...]) -> int:
        address = good("cuMemAddressReserve", cuda.cuMemAddressReserve(size, 0, 0, 0))
        good("cuMemMap", cuda.cuMemMap(address, size, 0, handle, 0))
        accesses = []
        for kind in kinds:
            access = cuda.CUmemAccessDesc()
            access.location.type, access.location.id, access.flags = kind, 0, READ_WRITE
            accesses.append(access)
        good("cuMemSetAccess", cuda.cuMemSetAccess(address, size, accesses, len(accesses)))
        return int(address)

    def send(self, handle: Any) -> None:
        descriptor = int(good("cuMemExportToShareableHandle", cuda.cuMemExportToShareableHandle(handle, FD, 0)))
        socket.send_fds(self.peer, [b"x"], [descriptor])
        os.close(descriptor)

    def receive(self) -> Any:
        self.peer.settimeout(20)
        descriptor = socket.recv_fds(self.peer, 1, 1)[1][0]
        try:
            return good("cuMemImportFromShareableHandle", cuda.cuMemImportFromShareableHandle(descriptor, FD))
        finally:
            os.close(descriptor)


# ---- events ------------------------------------------------------------------------------------------


class EventMaker(Role):
    """Records an interprocess event behind a stream that waits for a word in host memory."""

    def set_up(self) -> None:
        self.stream = good("cuStreamCreate", cuda.cuStreamCreate(1))
        self.event = good("cuEventCreate (interprocess)", cuda.cuEventCreate(INTERPROCESS_WITHOUT_TIMING))
        self.word = good("cuMemHostAlloc", cuda.cuMemHostAlloc(4096, 0))
        self.seen = ctypes.cast(int(self.word), ctypes.POINTER(ctypes.c_uint32))
        self.seen[0] = 0
        handle = good("cuIpcGetEventHandle", cuda.cuIpcGetEventHandle(self.event))
        self.peer.sendall(ctypes.string_at(handle.getPtr(), HANDLE_BYTES))

    def record(self) -> None:
        wait = cuda.cuStreamWaitValue32(self.stream, int(self.word), self.seen[0] + 1, 0)
        good("cuStreamWaitValue32", wait)
        good("cuEventRecord", cuda.cuEventRecord(self.event, self.stream))

    def let_go(self) -> None:
        self.seen[0] += 1
        good("cuStreamSynchronize", cuda.cuStreamSynchronize(self.stream))


class EventOpener(Role):
    """Lets a stream of its own wait for the other process's event."""

    def set_up(self) -> None:
        self.stream = good("cuStreamCreate", cuda.cuStreamCreate(1))
        self.peer.settimeout(20)
        handle = cuda.CUipcEventHandle()
        ctypes.memmove(handle.getPtr(), self.peer.recv(HANDLE_BYTES, socket.MSG_WAITALL), HANDLE_BYTES)
        self.event = good("cuIpcOpenEventHandle", cuda.cuIpcOpenEventHandle(handle))

    def wait(self) -> None:
        good("cuStreamWaitEvent", cuda.cuStreamWaitEvent(self.stream, self.event, 0))

    def is_waiting(self) -> bool:
        time.sleep(0.1)
        return int(cuda.cuStreamQuery(self.stream)[0]) != 0

    def goes_on(self) -> bool:
        ends = time.monotonic() + 5
        while time.monotonic() < ends:
            if int(cuda.cuStreamQuery(self.stream)[0]) == 0:
                return True
            time.sleep(0.01)
        return False


# ---- memory ------------------------------------------------------------------------------------------


class HostMaker(Role):
    """Host memory made by cuMemCreate, as NCCL makes it for its own communication."""

    def set_up(self) -> None:
        handle = self.create(HOST, SMALL_BYTES)
        self.address = self.map(handle, SMALL_BYTES, (DEVICE, HOST))
        ctypes.memmove(self.address, WORDS, len(WORDS))
        if self.peer is not None:
            self.send(handle)

    def is_right(self) -> bool:
        return ctypes.string_at(self.address, len(WORDS)) == WORDS


class HostImporter(HostMaker):
    """The other end of it."""

    def set_up(self) -> None:
        self.address = self.map(self.receive(), SMALL_BYTES, (DEVICE, HOST))


class Registered(Role):
    """A MAP_SHARED memfd that is registered with the driver."""

    def set_up(self) -> None:
        descriptor = os.memfd_create("registered")
        os.ftruncate(descriptor, SMALL_BYTES)
        self.memory = mmap.mmap(descriptor, SMALL_BYTES)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        good("cuMemHostRegister", cuda.cuMemHostRegister(self.address, SMALL_BYTES, 2))
        self.seen = good("cuMemHostGetDevicePointer", cuda.cuMemHostGetDevicePointer(self.address, 0))
        self.memory[: len(WORDS)] = WORDS

    def is_right(self) -> bool:
        """By the device's eyes: from host memory to device memory and back."""
        size = len(WORDS)
        device = good("cuMemAlloc", cuda.cuMemAlloc(size))
        good("cuMemcpyDtoD", cuda.cuMemcpyDtoD(device, self.seen, size))
        back = ctypes.create_string_buffer(size)
        good("cuMemcpyDtoH", cuda.cuMemcpyDtoH(back, device, size))
        good("cuMemFree", cuda.cuMemFree(device))
        return back.raw == WORDS


class DeviceMaker(Role):
    """Device memory for the other process."""

    size = 1 << 30

    def set_up(self) -> None:
        self.size = int(os.environ.get("SHARING_FACTS_BYTES", self.size))
        self.handle = self.create(DEVICE, self.size)
        self.address = self.map(self.handle, self.size, (DEVICE,))
        self.send(self.handle)

    def let_go(self) -> None:
        good("cuMemUnmap", cuda.cuMemUnmap(self.address, self.size))
        good("cuMemRelease", cuda.cuMemRelease(self.handle))


class DeviceImporter(Role):
    """Maps it when it is told to."""

    def take(self) -> None:
        size = int(os.environ.get("SHARING_FACTS_BYTES", DeviceMaker.size))
        self.map(self.receive(), size, (DEVICE,))


# ---- time slices -------------------------------------------------------------------------------------

WAIT_FOR_WORD = """
.version 5.0
.target sm_52
.address_size 64
.visible .entry vgpu_wait_word(.param .u64 flag, .param .u64 counter, .param .u64 more)
{
  .reg .pred %p<2>;
  .reg .b64 %rd<5>;
  ld.param.u64 %rd1, [flag];
  ld.param.u64 %rd2, [counter];
  ld.param.u64 %rd3, [more];
  cvta.to.global.u64 %rd1, %rd1;
  cvta.to.global.u64 %rd2, %rd2;
  ld.volatile.global.u64 %rd4, [%rd2];
  add.u64 %rd3, %rd3, %rd4;
AGAIN:
  ld.volatile.global.u64 %rd4, [%rd1];
  sub.s64 %rd4, %rd4, %rd3;
  setp.lt.s64 %p1, %rd4, 0;
  @%p1 bra AGAIN;
  ret;
}
"""


class Spinner(Role):
    """Runs a kernel that looks at a word of host memory until it is there, as a collective's kernel looks for its peers."""

    def set_up(self) -> None:
        self.stream = good("cuStreamCreate", cuda.cuStreamCreate(1))
        module = good("cuModuleLoadData", cuda.cuModuleLoadData(WAIT_FOR_WORD.encode()))
        self.kernel = good("cuModuleGetFunction", cuda.cuModuleGetFunction(module, b"vgpu_wait_word"))
        self.memory = int(good("cuMemHostAlloc", cuda.cuMemHostAlloc(4096, 0)))
        self.words = ctypes.cast(self.memory, ctypes.POINTER(ctypes.c_uint64))
        self.words[0] = self.words[1] = 0

    def begin(self) -> None:
        arguments = ((self.memory, self.memory + 8, 1), (ctypes.c_uint64,) * 3)
        launch = cuda.cuLaunchKernel(self.kernel, 1, 1, 1, 1, 1, 1, 0, self.stream, arguments, 0)
        good("cuLaunchKernel", launch)

    def end_it(self) -> int:
        """The code of the stream's synchronisation, once the word is there."""
        self.words[0] += 1
        code = int(cuda.cuStreamSynchronize(self.stream)[0])
        self.words[0] = 0
        return code


class ShortWork(Role):
    """Wants a little of the same GPU now and then."""

    def set_up(self) -> None:
        self.memory = good("cuMemAlloc", cuda.cuMemAlloc(SMALL_BYTES))

    def slowest_s(self, times: int) -> float:
        """The longest of so many small pieces of work, in seconds."""
        slowest = 0.0
        for _ in range(times):
            began = time.monotonic()
            good("cuMemsetD32", cuda.cuMemsetD32(self.memory, 7, SMALL_BYTES // 4))
            good("cuCtxSynchronize", cuda.cuCtxSynchronize())
            slowest = max(slowest, time.monotonic() - began)
        return round(slowest, 4)


# ---- the driver's own calls ----------------------------------------------------------------------------


class Driver(Role):
    """Makes the driver's checkpoint calls of several processes at once; dispensable, should one of them never return."""

    def __init__(self, peer: socket.socket | None) -> None:
        good("cuInit", cuda.cuInit(0))
        self.nvml = Nvml.load()

    def each(self, call: str, pids: list[int]) -> dict[str, list[float]]:
        """pid -> code and seconds."""
        with ThreadPoolExecutor(len(pids)) as pool:
            answers = pool.map(lambda pid: self.one(call, pid), pids)
            return dict(zip(map(str, pids), answers, strict=True))

    def one(self, call: str, pid: int) -> list[float]:
        wanted = None
        if call == "lock":
            wanted = cuda.CUcheckpointLockArgs()
            wanted.timeoutMs = 10_000
        began = time.monotonic()
        code = int(getattr(cuda, f"cuCheckpointProcess{call.capitalize()}")(pid, wanted)[0])
        return [code, round(time.monotonic() - began, 3)]

    def used(self) -> dict[str, int]:
        """pid -> bytes of device memory, by NVML."""
        devices = self.nvml.devices() if self.nvml is not None else []
        return {str(pid): size for device in devices for pid, size in device.process_bytes.items()}


ROLES: dict[str, Callable[[socket.socket | None], Role]] = {
    "event-maker": EventMaker,
    "event-opener": EventOpener,
    "host-maker": HostMaker,
    "host-importer": HostImporter,
    "registered": Registered,
    "device-maker": DeviceMaker,
    "device-importer": DeviceImporter,
    "spinner": Spinner,
    "short-work": ShortWork,
    "driver": Driver,
}


def main() -> int:
    peer = socket.socket(fileno=int(sys.argv[2])) if len(sys.argv) > 2 else None
    try:
        role = ROLES[sys.argv[1]](peer)
    except DriverFailed as refused:
        answer({"failed": str(refused)})
        return 2
    answer({"ready": True})
    for line in sys.stdin:
        order = json.loads(line)
        try:
            answer({"result": getattr(role, order.pop("do"))(**order)})
        except DriverFailed as refused:
            answer({"failed": str(refused)})
    return 0


def answer(document: dict[str, Any]) -> None:
    print(json.dumps(document), flush=True)


if __name__ == "__main__":
    code = main()
    os._exit(code)  # the driver's own end can wait for ever where a restore has failed
