"""The one process of the agent that loads the NVIDIA driver: requests in, results out, JSON lines over a socketpair.

Loads cuda-bindings and calls cuInit once (2.7 s on large nodes), so that no step pays for it again. Has no deadline of
its own: whoever started it (worker_pool.py) kills it when a call takes too long. Ends when the agent's end closes.
Several processes are worked on at a time, one thread each; the driver calls release the interpreter lock.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from gpu_state.driver import Driver
from gpu_state.nvml import Nvml, driver_release_from_proc, minors_from_proc
from gpu_state.nvml_links import links
from vgpu_errors import DriverCallFailed, DriverMissing, VgpuError

if TYPE_CHECKING:
    from collections.abc import Callable

THREADS = 64


class Worker:
    """Answers requests on one socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._starting = threading.Lock()
        self._driver: Driver | None = None
        self._nvml: Nvml | None = None
        self._links: list[dict[str, Any]] = []

    def serve(self) -> None:
        """Answer until the agent closes its end."""
        with self._connection.makefile("rb") as lines, ThreadPoolExecutor(THREADS) as threads:
            for line in lines:
                threads.submit(self._answer, json.loads(line))
            # A thread may hang in the driver for ever: leave without waiting for it.
            os._exit(0)

    def _answer(self, request: dict[str, Any]) -> None:
        reply: dict[str, Any] = {"id": request["id"]}
        try:
            reply["value"] = _CALLS[request["call"]](self, **request["args"])
        except DriverCallFailed as error:
            reply["failed"] = {key: error.fields[key] for key in ("call", "pid", "code", "name")}
        except DriverMissing as error:
            reply["missing"] = str(error.fields.get("what"))
        except Exception as error:  # noqa: BLE001 - the agent reports it as a bug, with the text
            reply["bug"] = f"{type(error).__name__}: {error}"
        with self._sending:
            self._connection.sendall(json.dumps(reply).encode() + b"\n")

    def driver(self) -> Driver:
        """The driver, initialised at first use."""
        with self._starting:
            if self._driver is None:
                self._driver = Driver()
                self._nvml = Nvml.load()
                self._links = [link.to_json() for link in links(self._nvml)] if self._nvml else []
            return self._driver

    def node(self) -> dict[str, Any]:
        """Versions, GPUs, free memory and memory per process, in one answer."""
        driver = self.driver()
        seen = {device.uuid: device for device in (self._nvml.devices() if self._nvml else [])}
        minors = minors_from_proc() | {d.minor: d.uuid for d in seen.values() if d.minor is not None}
        used: dict[int, int] = {}
        for device in seen.values():
            for pid, size_bytes in device.process_bytes.items():
                used[pid] = used.get(pid, 0) + size_bytes
        devices = [device.to_json() for device in driver.devices()]
        for entry in devices:
            entry["free_bytes"] = seen[entry["uuid"]].free_bytes if entry["uuid"] in seen else None
        return {
            "version": driver.version(),
            "release": (self._nvml.driver_release() if self._nvml else None) or driver_release_from_proc(),
            "devices": devices,
            "links": self._links,
            "minors": {str(minor): name for minor, name in minors.items()},
            "process_bytes": {str(pid): size_bytes for pid, size_bytes in used.items()},
            "device_bytes": {
                device.uuid: {str(pid): size_bytes for pid, size_bytes in device.process_bytes.items()}
                for device in seen.values()
            },
        }


_CALLS: dict[str, Callable[..., Any]] = {
    "node": Worker.node,
    "get_state": lambda worker, pid: worker.driver().get_state(pid).value,
    "lock": lambda worker, pid, timeout_ms: worker.driver().lock(pid, timeout_ms),
    "checkpoint": lambda worker, pid: worker.driver().checkpoint(pid),
    "restore": lambda worker, pid, device_map: worker.driver().restore(pid, device_map),
    "unlock": lambda worker, pid: worker.driver().unlock(pid),
}


def main(fd: int) -> int:
    """Serve on the inherited socket `fd`."""
    try:
        Worker(socket.socket(fileno=fd)).serve()
    except (OSError, VgpuError) as problem:
        print(f"driver worker: {problem}", file=sys.stderr)
        return 1
    return 0
