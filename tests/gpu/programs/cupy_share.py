"""CuPy processes that share an array by legacy CUDA IPC handles: each writes all of it by turns with CuPy's own kernels, all check.

Party 0 allocates `--mib` past CuPy's pool, because a handle names a whole allocation, and gives the handle to the others. A wrong
word ends it with status 3. Real driver only.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import turns

if TYPE_CHECKING:
    import cupy

WORDS_A_MIB = 2**18


def main() -> int:
    args = turns.parser(__doc__).parse_args()
    return turns.run_parties(args, lambda _number: CupyMemory(args.mib))


class CupyMemory:
    """The array in this process. CuPy is imported by each party, because its import may touch the driver."""

    def __init__(self, mib: int) -> None:
        self._words = mib * WORDS_A_MIB
        self._array: cupy.ndarray | None = None
        self._expected: cupy.ndarray | None = None

    def offer(self) -> tuple[dict[str, Any], list[int]]:
        import cupy

        memory = cupy.cuda.Memory(self._words * 4)
        self._hold(memory)
        return {"handle": bytes(cupy.cuda.runtime.ipcGetMemHandle(memory.ptr)).hex()}, []

    def take(self, offered: dict[str, Any], descriptors: list[int]) -> None:
        import cupy

        assert not descriptors
        cupy.cuda.Device(0).use()
        cupy.zeros(1)  # a context: opening a handle wants one
        address = cupy.cuda.runtime.ipcOpenMemHandle(bytes.fromhex(offered["handle"]))
        self._hold(cupy.cuda.UnownedMemory(address, self._words * 4, owner=self, device_id=0))

    def write(self, number: int) -> None:
        import cupy

        self._array[...] = self._words_of(number)
        cupy.cuda.Device().synchronize()

    def is_right(self, number: int) -> bool:
        return bool((self._array == self._words_of(number)).all())

    def _words_of(self, number: int) -> cupy.ndarray:
        return self._expected * 3 + number

    def _hold(self, memory: Any) -> None:
        import cupy

        self._array = cupy.ndarray((self._words,), dtype=cupy.uint32, memptr=cupy.cuda.MemoryPointer(memory, 0))
        self._expected = cupy.arange(self._words, dtype=cupy.uint32)


if __name__ == "__main__":
    sys.exit(main())
