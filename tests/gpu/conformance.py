"""What cuCheckpointProcess* answers in each state: one table, asked of the real driver and of the software driver.

`EXPECTED` is what driver 580.159.04 answered on an H200 (docs/measurements/2026-11-29-driver-states.log). The software
driver has to give the same answers, or the tests that run on it prove nothing.
Called by tests/native/test_driver_conformance.py (software driver) and tests/gpu/test_driver_states.py (real driver).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from tests.stopping import stop

PROGRAM = """
import os, socket, subprocess, sys, time
import cuda.bindings.driver as cuda
what = sys.argv[1]
size = 2 << 20
fd_type = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
def good(answer):
    assert int(answer[0]) == 0, answer
    return answer[-1]
def properties():
    wanted = cuda.CUmemAllocationProp()
    wanted.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    wanted.requestedHandleTypes = fd_type
    wanted.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    return wanted
def map_whole(handle):
    address = good(cuda.cuMemAddressReserve(size, 0, 0, 0))
    good(cuda.cuMemMap(address, size, 0, handle, 0))
    access = cuda.CUmemAccessDesc()
    access.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    good(cuda.cuMemSetAccess(address, size, [access], 1))
if what != "loaded":
    cuda.cuInit(0)
if what in ("context", "memory", "managed", "forked", "exporter", "importer"):
    _, context = cuda.cuDevicePrimaryCtxRetain(0)
    cuda.cuCtxSetCurrent(context)
if what == "memory":
    kept = cuda.cuMemAlloc(1 << 22)
if what == "managed":
    kept = cuda.cuMemAllocManaged(1 << 20, 1)
if what == "importer":
    ours, theirs = socket.socketpair()
    exporter = subprocess.Popen([sys.executable, "-c", sys.argv[2], "exporter", "", str(theirs.fileno())], pass_fds=[theirs.fileno()])
    fd = socket.recv_fds(ours, 1, 1)[1][0]
    map_whole(good(cuda.cuMemImportFromShareableHandle(fd, fd_type)))
    os.close(fd)
    exporter.kill()
    exporter.wait()
if what == "exporter":
    handle = good(cuda.cuMemCreate(size, properties(), 0))
    socket.send_fds(socket.socket(fileno=int(sys.argv[3])), [b"x"], [int(good(cuda.cuMemExportToShareableHandle(handle, fd_type, 0)))])
    time.sleep(60)
if what == "forked" and (child := os.fork()):
    os.waitpid(child, 0)
    sys.exit()
print(os.getpid(), flush=True)
time.sleep(120)
"""
NO_SUCH_PID = 4_194_000
NO_ANSWER = -1
WAITED_S = 0.5

#: question -> (result code, state afterwards or None where there is none)
EXPECTED: dict[str, tuple[int, int | None]] = {
    "state of a process without CUDA": (3, None),
    "state of a dead process": (304, None),
    "state of a process that only loaded the driver": (3, None),
    "state of an initialised process": (0, 0),
    "lock a process without CUDA": (3, None),
    "lock a dead process": (304, None),
    "checkpoint while running": (401, 0),
    "unlock while running": (401, 0),
    "restore while running": (401, 0),
    "lock": (0, 1),
    "lock again": (401, 1),
    "restore while locked": (401, 1),
    "checkpoint": (0, 2),
    "checkpoint again": (401, 2),
    "unlock while checkpointed": (401, 2),
    "lock while checkpointed": (401, 2),
    "restore": (0, 1),
    "unlock": (0, 0),
    "initialised only: lock, checkpoint": (0, 2),
    "initialised only: restore, unlock": (0, 0),
    "managed memory: checkpoint": (801, 1),
    "managed memory: restore": (401, 1),
    "managed memory: unlock": (0, 0),
    "state of a child forked without exec": (3, None),
    "imported memory: checkpoint": (0, 2),
    "imported memory: restore": (801, 2),
    "imported memory: unlock": (401, 2),
    "state of a stopped process": (NO_ANSWER, None),
    "state of a stopped process that goes on": (0, 0),
}


def answers() -> dict[str, tuple[int, int | None]]:
    """Ask every question of the driver that this process finds; keys as in EXPECTED."""
    import cuda.bindings.driver as cuda

    cuda.cuInit(0)
    found: dict[str, tuple[int, int | None]] = {}

    def state(pid: int) -> tuple[int, int | None]:
        code, value = cuda.cuCheckpointProcessGetState(pid)
        return int(code), None if value is None else int(value)

    def after(pid: int, call: Any) -> tuple[int, int | None]:
        return int(call(pid)[0]), state(pid)[1]

    def lock(pid: int) -> Any:
        args = cuda.CUcheckpointLockArgs()
        args.timeoutMs = 5000
        return cuda.cuCheckpointProcessLock(pid, args)

    def checkpoint(pid: int) -> Any:
        return cuda.cuCheckpointProcessCheckpoint(pid, None)

    def restore(pid: int) -> Any:
        return cuda.cuCheckpointProcessRestore(pid, None)

    def unlock(pid: int) -> Any:
        return cuda.cuCheckpointProcessUnlock(pid, None)

    with subprocess.Popen(["sleep", "120"]) as plain:
        found["state of a process without CUDA"] = state(plain.pid)
        found["lock a process without CUDA"] = after(plain.pid, lock)
        plain.kill()
    found["state of a dead process"] = state(NO_SUCH_PID)
    found["lock a dead process"] = after(NO_SUCH_PID, lock)
    with program("loaded") as pid:
        found["state of a process that only loaded the driver"] = state(pid)
    with program("memory") as pid:
        found["state of an initialised process"] = state(pid)
        for question, call in (
            ("checkpoint while running", checkpoint),
            ("unlock while running", unlock),
            ("restore while running", restore),
            ("lock", lock),
            ("lock again", lock),
            ("restore while locked", restore),
            ("checkpoint", checkpoint),
            ("checkpoint again", checkpoint),
            ("unlock while checkpointed", unlock),
            ("lock while checkpointed", lock),
            ("restore", restore),
            ("unlock", unlock),
        ):
            found[question] = after(pid, call)
    with program("initialised") as pid:
        lock(pid)
        found["initialised only: lock, checkpoint"] = after(pid, checkpoint)
        restore(pid)
        found["initialised only: restore, unlock"] = after(pid, unlock)
    with program("managed") as pid:
        lock(pid)
        found["managed memory: checkpoint"] = after(pid, checkpoint)
        found["managed memory: restore"] = after(pid, restore)
        found["managed memory: unlock"] = after(pid, unlock)
    with program("forked") as pid:
        found["state of a child forked without exec"] = state(pid)
    with program("importer") as pid:
        lock(pid)
        found["imported memory: checkpoint"] = after(pid, checkpoint)
        found["imported memory: restore"] = after(pid, restore)
        found["imported memory: unlock"] = after(pid, unlock)
    with program("memory") as pid, ThreadPoolExecutor(1) as thread:
        stop(pid)
        late = thread.submit(state, pid)
        time.sleep(WAITED_S)
        found["state of a stopped process"] = late.result() if late.done() else (NO_ANSWER, None)
        os.kill(pid, signal.SIGCONT)
        found["state of a stopped process that goes on"] = late.result(timeout=10)
    return found


@contextmanager
def program(what: str) -> Iterator[int]:
    """The pid of a process that has gone as far with CUDA as `what` says."""
    with subprocess.Popen([sys.executable, "-c", PROGRAM, what, PROGRAM], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        said = next((line for line in child.stdout if line.strip().isdigit()), "0")
        try:
            yield int(said)
        finally:
            for pid in {int(said), child.pid} - {0}:
                os.kill(pid, signal.SIGKILL)


def main() -> int:
    """Print each question with the answer, and what was expected where it differs; status 1 if any differs."""
    wrong = 0
    for question, answer in answers().items():
        expected = EXPECTED[question]
        mark = "" if answer == expected else f"   EXPECTED {expected}"
        wrong += bool(mark)
        print(f"{question}: {answer}{mark}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
