"""Device memory that crosses processes as POSIX descriptors: imported from an application, or created here to be handed over.

An object is mapped at an address of this process only; the application maps it at its own. Knows nothing of content.
Facts relied upon (measured on an H200): an importer cannot export again, so the descriptor that came is the one that is kept; a
descriptor alone keeps the memory alive. Used by worker.py, copy_out.py and copy_in.py.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

from cuda.bindings import driver as cuda

from gpu_state.driver import OUT_OF_MEMORY
from gpu_state.staging.cuda_calls import call
from gpu_state.undo import Undo
from vgpu_errors import DriverCallFailed, NotEnoughDeviceMemory, VgpuError

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from gpu_state.staging.cuda_calls import DeviceContext

ALIGNMENT = 4096  # what O_DIRECT needs of offsets and lengths; the driver's granularity is 2 MiB
_POSIX_FD = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


class DeviceObject:
    """One piece of physical device memory. `ptr` is None when only the descriptor is kept."""

    def __init__(self, context: DeviceContext, size: int, fd: int, handle: Any, *, is_created: bool) -> None:
        self.context = context
        self.size = size
        self.fd = fd
        self.is_created = is_created
        self._handle = handle
        self.ptr: int | None = _map(context, size, handle)

    def address(self) -> int:
        """Where this process sees the memory."""
        if self.ptr is None:
            raise VgpuError(what="a device object was used after its mapping was let go")
        return self.ptr

    def let_mapping_go(self) -> None:
        """Keep nothing but the descriptor: the memory and its content stay."""
        if self.ptr is None:
            return
        self.context.make_current()
        ptr, self.ptr = self.ptr, None
        call("cuMemUnmap", ptr, self.size)
        call("cuMemAddressFree", ptr, self.size)
        call("cuMemRelease", self._handle)

    def close(self) -> None:
        """Let mapping and descriptor go; the memory is free when nobody else holds it."""
        try:
            self.let_mapping_go()
        finally:
            fd, self.fd = self.fd, -1
            if fd >= 0:
                os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def import_object(fd: int, size: int, context: DeviceContext) -> DeviceObject:
    """Map memory that another process exported. Takes the descriptor over, also when it fails."""
    with Undo() as undo:
        undo.push(os.close, fd)
        _check_size(size)
        context.make_current()
        handle = call("cuMemImportFromShareableHandle", fd, _POSIX_FD)
        undo.push(call, "cuMemRelease", handle)
        return DeviceObject(context, size, fd, handle, is_created=False)


def create_object(size: int, context: DeviceContext) -> DeviceObject:
    """New device memory whose descriptor an application can import; content undefined."""
    with Undo() as undo:
        _check_size(size)
        context.make_current()
        handle = _create(size, context)
        undo.push(call, "cuMemRelease", handle)
        fd = int(call("cuMemExportToShareableHandle", handle, _POSIX_FD, 0))
        undo.push(os.close, fd)
        return DeviceObject(context, size, fd, handle, is_created=True)


def close_all(objects: list[DeviceObject]) -> None:
    """Close every object; the first failure is raised when all were tried."""
    with contextlib.ExitStack() as stack:
        for held in objects:
            stack.callback(held.close)


def _check_size(size: int) -> None:
    if size <= 0 or size % ALIGNMENT:
        raise VgpuError(what=f"a device object of {size} bytes is no multiple of {ALIGNMENT}")


def _create(size: int, context: DeviceContext) -> Any:
    wanted = cuda.CUmemAllocationProp()
    wanted.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    wanted.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    wanted.location.id = context.ordinal
    wanted.requestedHandleTypes = _POSIX_FD
    try:
        return call("cuMemCreate", size, wanted, 0)
    except DriverCallFailed as problem:
        if problem.fields["code"] != OUT_OF_MEMORY:
            raise
        free_bytes, _ = context.memory()
        raise NotEnoughDeviceMemory(
            device=context.uuid, free_bytes=free_bytes, pid=os.getpid(), needed_bytes=size
        ) from problem


def _map(context: DeviceContext, size: int, handle: Any) -> int:
    access = cuda.CUmemAccessDesc()
    access.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = context.ordinal
    access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    with Undo() as undo:
        ptr = int(call("cuMemAddressReserve", size, 0, 0, 0))
        undo.push(call, "cuMemAddressFree", ptr, size)
        call("cuMemMap", ptr, size, 0, handle, 0)
        undo.push(call, "cuMemUnmap", ptr, size)
        call("cuMemSetAccess", ptr, size, [access], 1)
        return ptr
