"""VMM memory that processes share by POSIX descriptor, through cuda-bindings: one exporter, importers, each writes by turns.

Two objects, of 2 MiB and of `--mib`. A wrong word ends it with status 3. With FILE.leave beside the gate the exporter ends and
the importers go on. `--devices N` puts party n on device n modulo N, which then reach the memory of device 0 as peers. Works on
the real and on the software driver.
"""

from __future__ import annotations

import os
import struct
import sys
from typing import Any

import cuda.bindings.driver as cuda
import turns

MIB = 1 << 20
STRIPES = 8
POSIX_FD = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
DEVICE = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE


def main() -> int:
    parser = turns.parser(__doc__)
    parser.add_argument("--devices", type=int, default=1)
    args = parser.parse_args()
    sizes = (args.mib * MIB, 2 * MIB)
    return turns.run_parties(args, lambda number: VmmMemory(sizes, number % args.devices))


class VmmMemory:
    """The objects, mapped in this process; nothing is asked of the driver before the party runs in a process of its own."""

    def __init__(self, sizes: tuple[int, ...], device: int) -> None:
        self._sizes, self._device = sizes, device
        self._addresses: list[int] = []
        self._read = bytearray(max(sizes))

    def offer(self) -> tuple[dict[str, Any], list[int]]:
        self._attach()
        wanted = cuda.CUmemAllocationProp()
        wanted.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        wanted.location.type, wanted.location.id = DEVICE, self._device
        wanted.requestedHandleTypes = POSIX_FD
        handles = [call("cuMemCreate", size, wanted, 0) for size in self._sizes]
        descriptors = [int(call("cuMemExportToShareableHandle", handle, POSIX_FD, 0)) for handle in handles]
        self._map(handles)
        return {}, descriptors

    def take(self, offered: dict[str, Any], descriptors: list[int]) -> None:
        assert not offered
        self._attach()
        self._map([call("cuMemImportFromShareableHandle", descriptor, POSIX_FD) for descriptor in descriptors])
        for descriptor in descriptors:
            os.close(descriptor)

    def write(self, number: int) -> None:
        for address, size, words in self._objects(number):
            for at, word in enumerate(words):
                call("cuMemsetD32", address + at * size // STRIPES, word, size // STRIPES // 4)
        call("cuCtxSynchronize")

    def is_right(self, number: int) -> bool:
        found = memoryview(self._read)
        for address, size, words in self._objects(number):
            call("cuMemcpyDtoH", self._read, address, size)
            part = size // STRIPES
            for at, word in enumerate(words):
                if found[at * part : (at + 1) * part] != struct.pack("<I", word) * (part // 4):
                    return False
        return True

    def is_right_by(self, descriptors: list[int], number: int) -> bool:
        again = VmmMemory(self._sizes, self._device)
        handles = [call("cuMemImportFromShareableHandle", descriptor, POSIX_FD) for descriptor in descriptors]
        again._map(handles)
        is_right = again.is_right(number)
        for handle, address, size in zip(handles, again._addresses, self._sizes, strict=True):
            call("cuMemUnmap", address, size)
            call("cuMemRelease", handle)
            call("cuMemAddressFree", address, size)
        return is_right

    def _objects(self, number: int) -> list[tuple[int, int, list[int]]]:
        """Address, size and the words of each stripe; the round, the object and the stripe tell them apart."""
        words = [[(number * 64 + which * STRIPES + at + 1) % 2**32 for at in range(STRIPES)] for which in range(2)]
        return list(zip(self._addresses, self._sizes, words, strict=True))

    def _attach(self) -> None:
        call("cuInit", 0)
        call("cuCtxSetCurrent", call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", self._device)))

    def _map(self, handles: list[Any]) -> None:
        access = cuda.CUmemAccessDesc()
        access.location.type, access.location.id = DEVICE, self._device
        access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        for handle, size in zip(handles, self._sizes, strict=True):
            address = int(call("cuMemAddressReserve", size, 0, 0, 0))
            call("cuMemMap", address, size, 0, handle, 0)
            call("cuMemSetAccess", address, size, [access], 1)
            self._addresses.append(address)


def call(name: str, *args: Any) -> Any:
    """One driver call; its result, or an end with the call's name."""
    code, *results = getattr(cuda, name)(*args)
    if int(code) != 0:
        message = f"{name}: {code}"
        raise SystemExit(message)
    return results[0] if results else None


if __name__ == "__main__":
    sys.exit(main())
