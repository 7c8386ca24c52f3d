"""The peer of the comparison: freezes and thaws processes by the driver's own calls, nothing else, from one attached process.

Reads commands `freeze PID...` and `thaw PID...` on stdin, answers each with one JSON line of seconds per call.
Runs inside a test host, on the vendored cuda-bindings; called by podman_run.py.
"""

from __future__ import annotations

import json
import sys
import time

sys.path.append("/usr/lib/vgpu-snapshot/vendor")

import cuda.bindings.driver as cuda


def main() -> int:
    check("cuInit", cuda.cuInit(0))
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        verb, *pids = line.split()
        calls = FREEZE if verb == "freeze" else THAW
        taken = {}
        for name, call in calls:
            began = time.monotonic()
            for pid in pids:
                check(name, call(int(pid)))
            taken[name] = round(time.monotonic() - began, 4)
        print(json.dumps(taken), flush=True)
    return 0


def lock(pid: int) -> tuple:
    args = cuda.CUcheckpointLockArgs()
    args.timeoutMs = 10_000
    return cuda.cuCheckpointProcessLock(pid, args)


FREEZE = (("lock", lock), ("checkpoint", lambda pid: cuda.cuCheckpointProcessCheckpoint(pid, None)))
THAW = (
    ("restore", lambda pid: cuda.cuCheckpointProcessRestore(pid, None)),
    ("unlock", lambda pid: cuda.cuCheckpointProcessUnlock(pid, None)),
)


def check(name: str, result: tuple) -> None:
    if int(result[0]) != 0:
        message = f"{name}: {result[0]}"
        raise SystemExit(message)


if __name__ == "__main__":
    sys.exit(main())
