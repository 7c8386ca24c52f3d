"""Driver calls of the staging worker: one function that turns a failed call into an error, and device contexts with streams.

Only the staging worker imports this, because cuInit attaches a process to every GPU. Decides nothing about the data.
Contexts are the devices' primary ones; whatever thread makes a call has made the context current first.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from cuda.bindings import driver as cuda

from gpu_state.driver import NOT_READY, uuid_string
from vgpu_errors import DriverCallFailed, DriverMissing, NodeUnfit

if TYPE_CHECKING:
    from collections.abc import Callable

    Check = Callable[[], None]

NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: never waits for, nor holds up, the default stream
DISABLE_TIMING = 2  # CU_EVENT_DISABLE_TIMING
SHORTEST_WAIT_S, LONGEST_WAIT_S = 20e-6, 500e-6


def call(name: str, *args: object) -> Any:
    """One driver call; its single value, a tuple of several, or None."""
    code, *values = getattr(cuda, name)(*args)
    if int(code) != 0:
        raise DriverCallFailed(call=name, pid=os.getpid(), code=int(code), name=str(getattr(code, "name", code)))
    if not values:
        return None
    return values[0] if len(values) == 1 else tuple(values)


def start() -> None:
    """cuInit; DriverMissing where there is no driver."""
    try:
        call("cuInit", 0)
    except DriverCallFailed as problem:
        raise DriverMissing(what=problem.message) from problem
    except Exception as problem:
        # cuda-bindings raises RuntimeError or its pathfinder's own class, by version, when libcuda.so.1 is not there.
        raise DriverMissing(what=str(problem)) from problem


def device_uuids() -> list[str]:
    """The uuids of all GPUs by ordinal."""
    handles = (call("cuDeviceGet", ordinal) for ordinal in range(int(call("cuDeviceGetCount"))))
    return [uuid_string(call("cuDeviceGetUuid", handle).bytes) for handle in handles]


def ordinal_of(uuid: str) -> int:
    """The ordinal of a GPU in this process."""
    known = device_uuids()
    if uuid not in known:
        raise NodeUnfit(what=f"the GPU {uuid} is not on this node, or not visible to the agent")
    return known.index(uuid)


def first_uuid() -> str:
    """A GPU whose context may serve to pin memory for all."""
    start()
    known = device_uuids()
    if not known:
        raise NodeUnfit(what="there is no GPU on this node")
    return known[0]


def is_done(event: Any) -> bool:
    """Whether everything before the event has run; a failure of that work is raised here."""
    code = int(cuda.cuEventQuery(event)[0])
    if code == NOT_READY:
        return False
    if code != 0:
        raise DriverCallFailed(call="cuEventQuery", pid=os.getpid(), code=code, name=str(code))
    return True


def wait_for(event: Any, check: Check = lambda: None, *, pause_s: float = SHORTEST_WAIT_S) -> None:
    """Poll an event, in pauses short against a copy of 32 MiB (0.6 ms); `check` raises when nobody wants the result any more."""
    while not is_done(event):
        check()
        time.sleep(pause_s)
        pause_s = max(pause_s, min(pause_s * 1.5, LONGEST_WAIT_S))


class DeviceContext:
    """The primary context of one GPU, held until `close`."""

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self.handle = call("cuDeviceGet", ordinal)
        self.uuid = uuid_string(call("cuDeviceGetUuid", self.handle).bytes)
        self._context = call("cuDevicePrimaryCtxRetain", self.handle)
        self.make_current()

    def make_current(self) -> None:
        """For the calling thread."""
        call("cuCtxSetCurrent", self._context)

    def new_stream(self, *, is_urgent: bool = True) -> Any:
        """A stream; one that is not urgent gives way to others of this process."""
        least, greatest = call("cuCtxGetStreamPriorityRange")
        return call("cuStreamCreateWithPriority", NON_BLOCKING, greatest if is_urgent else least)

    def new_event(self) -> Any:
        """An event without timing, to be polled."""
        return call("cuEventCreate", DISABLE_TIMING)

    def memory(self) -> tuple[int, int]:
        """Free and total bytes of the device."""
        self.make_current()
        free_bytes, total_bytes = call("cuMemGetInfo")
        return int(free_bytes), int(total_bytes)

    def close(self) -> None:
        """Let the context, and the half gigabyte it costs, go."""
        if self._context is not None:
            self._context = None
            call("cuDevicePrimaryCtxRelease", self.handle)
