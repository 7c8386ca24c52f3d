"""A process for the software driver's tests: runs the Python it is sent, one JSON string a line, and answers with `result`.

Started by test_software_driver.py with LD_LIBRARY_PATH set, so that the unmodified cuda-bindings find the software libcuda.so.1.
"""

from __future__ import annotations

import ctypes
import json
import sys
import threading

from cuda.bindings import driver as d


def code(answer):
    """The CUresult of a call, as a number."""
    return int(answer[0])


def ok(answer):
    """What a call returned; an error is an exception."""
    if code(answer) != 0:
        raise RuntimeError(f"call failed: {answer[0]!r}")
    return answer[1] if len(answer) == 2 else answer[1:]


def start(device=0):
    """cuInit and the primary context made current."""
    ok(d.cuInit(0))
    context = ok(d.cuDevicePrimaryCtxRetain(device))
    ok(d.cuCtxSetCurrent(context))
    return context


def read(pointer, size):
    """Bytes of device memory."""
    host = bytearray(size)
    ok(d.cuMemcpyDtoH(host, pointer, size))
    return bytes(host)


def write(pointer, content):
    """Bytes into device memory."""
    ok(d.cuMemcpyHtoD(pointer, content, len(content)))


def properties(device=0, shareable=True):
    """For cuMemCreate."""
    wanted = d.CUmemAllocationProp()
    wanted.type = d.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    wanted.location.type = d.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    wanted.location.id = device
    if shareable:
        wanted.requestedHandleTypes = d.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    return wanted


def host_properties():
    """For cuMemCreate of memory on the host, as NCCL makes it."""
    wanted = properties()
    wanted.location.type = d.CUmemLocationType.CU_MEM_LOCATION_TYPE_HOST_NUMA
    return wanted


def access(device=0, flags=3):
    """For cuMemSetAccess."""
    wanted = d.CUmemAccessDesc()
    wanted.location.type = d.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    wanted.location.id = device
    wanted.flags = d.CUmemAccess_flags(flags)
    return wanted


def map_memory(handle, size, *more):
    """A fresh address with the handle's memory behind it, readable and writable."""
    address = ok(d.cuMemAddressReserve(size, 0, 0, 0))
    ok(d.cuMemMap(address, size, 0, handle, 0))
    ok(d.cuMemSetAccess(address, size, [access(), *more], 1 + len(more)))
    return address


def map_host_memory(handle, size):
    """The same for memory on the host, which reaches it too."""
    host = access()
    host.location = host_properties().location
    return map_memory(handle, size, host)


def offer(pointer):
    """A legacy IPC handle as hex."""
    handle = ok(d.cuIpcGetMemHandle(pointer))
    return ctypes.string_at(handle.getPtr(), 64).hex()


def handle_from(text):
    """A CUipcMemHandle from hex."""
    handle = d.CUipcMemHandle()
    ctypes.memmove(handle.getPtr(), bytes.fromhex(text), 64)
    return handle


def opened(text):
    """The address of memory that another process has offered."""
    return ok(d.cuIpcOpenMemHandle(handle_from(text), 1))


def offer_event(event):
    """A legacy IPC handle of an event as hex."""
    return ctypes.string_at(ok(d.cuIpcGetEventHandle(event)).getPtr(), 64).hex()


def event_from(text):
    """A CUipcEventHandle from hex."""
    handle = d.CUipcEventHandle()
    ctypes.memmove(handle.getPtr(), bytes.fromhex(text), 64)
    return handle


def opened_event(text):
    """An event of another process."""
    return ok(d.cuIpcOpenEventHandle(event_from(text)))


def kernels(ptx):
    """Functions by name from the test kernels' PTX text."""
    module = ok(d.cuModuleLoadData(ptx.encode()))
    plain = ("vgpu_fill", "vgpu_increment", "vgpu_checksum", "vgpu_spin_ms")
    names = (*plain, "vgpu_add", "vgpu_wait_word", "vgpu_post_word")
    return {name: ok(d.cuModuleGetFunction(module, name.encode())) for name in names}


def launch(function, stream, *values):
    """One kernel launch; 64-bit parameters, or one 32-bit one."""
    types = (ctypes.c_uint64,) * len(values) if len(values) > 1 else (ctypes.c_uint32,)
    return d.cuLaunchKernel(function, 4, 1, 1, 32, 1, 1, 0, stream, (tuple(int(v) for v in values), types), 0)


def lock_args(timeout_ms):
    """For cuCheckpointProcessLock."""
    wanted = d.CUcheckpointLockArgs()
    wanted.timeoutMs = timeout_ms
    return wanted


def state(pid):
    """CUprocessState as a number."""
    return int(ok(d.cuCheckpointProcessGetState(pid)))


def uuid_from(text):
    """A CUuuid is read-only in cuda-bindings; one of our own making starts as memory. Returns it and the memory to keep."""
    memory = ctypes.create_string_buffer(bytes.fromhex(text), 16)
    return d.CUuuid(ctypes.addressof(memory)), memory


def restore(pid, pairs=()):
    """cuCheckpointProcessRestore with pairs of UUIDs as 16-byte hex strings."""
    wanted = d.CUcheckpointRestoreArgs()
    gpu_pairs, kept = [], []
    for old, new in pairs:
        pair = d.CUcheckpointGpuPair()
        pair.oldUuid, memory = uuid_from(old)
        pair.newUuid, more = uuid_from(new)
        kept += [memory, more]
        gpu_pairs.append(pair)
    wanted.gpuPairs = gpu_pairs
    wanted.gpuPairsCount = len(gpu_pairs)
    return code(d.cuCheckpointProcessRestore(pid, wanted))


def freeze(pid):
    """Lock and checkpoint."""
    ok(d.cuCheckpointProcessLock(pid, lock_args(5000)))
    ok(d.cuCheckpointProcessCheckpoint(pid, None))


def thaw(pid):
    """Restore on the same devices and unlock."""
    ok(d.cuCheckpointProcessRestore(pid, None))
    ok(d.cuCheckpointProcessUnlock(pid, None))


def main():
    names = dict(globals())
    for line in sys.stdin:
        names.pop("result", None)
        try:
            exec(json.loads(line), names)
            answer = {"result": names.get("result")}
        except Exception as failure:  # noqa: BLE001
            answer = {"failure": repr(failure)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    threading.stack_size(1 << 20)
    main()
