"""`vgpu-agent`: the node agent's process (spec/agent-protocol.md, "The agent process").

Puts the parts together and keeps them alive: one agent per node (flock), the main socket, signals, the way out. Does no GPU
work itself. Started by systemd (socket activation and readiness notice are understood) or on demand by client.py.
SIGTERM or SIGINT: no new clients; requests and leases get a while to end by themselves, then they are undone.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import logging
import math
import os
import resource
import select
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from gpu_state.deadline import Deadline
from gpu_state.driver_location import driver_folder
from gpu_state.freeze import Tools
from gpu_state.inventory import Inventory
from gpu_state.inventory_proof import OWN_MOST_BYTES, Tolerance
from gpu_state.leases import Journal
from gpu_state.registration import Registration
from gpu_state.remote_driver import RemoteDriver
from gpu_state.server import Server
from gpu_state.service import Service
from gpu_state.staged_service import WARM_S, StagedService
from gpu_state.staging.worker_client import StagingWorker
from gpu_state.staging_reserve import StagingReserve, bytes_of, configured_bytes
from gpu_state.staging_session import StagingWorkers
from gpu_state.worker_pool import IDLE_S, WorkerPool
from vgpu_errors import VgpuError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

RUN_DIR = Path("/run/vgpu")
IDLE_EXIT_S = 300.0
STOP_GRACE_S = 20.0
WARM_UP_S = 60.0
_TICK_S = 0.5
_SWEEP_S = 2.0
_FIRST_PASSED_FD = 3
log = logging.getLogger("vgpu-agent")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the agent until it is told to stop or has been idle on demand for long enough."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="vgpu-agent: %(message)s", stream=sys.stderr)
    if os.geteuid() != 0:
        log.error("needs root")
        return 12
    os.chdir("/")
    os.umask(0o077)
    _raise_descriptor_limit()
    run_dir = Path(options.state_dir)
    run_dir.mkdir(mode=0o755, parents=True, exist_ok=True)
    run_dir.chmod(0o755)  # containers' folders below it are bind-mounted; the private ones are 0700 each
    with _only_one(run_dir / "agent.lock") as is_ours:
        if not is_ours:
            log.info("another agent serves %s", run_dir)
            return 0 if options.on_demand else 1
        return Agent(options, run_dir).run()


class Agent:
    """The parts of a running agent."""

    def __init__(self, options: argparse.Namespace, run_dir: Path) -> None:
        self._socket_path = Path(options.socket or run_dir / "agent.sock")
        self._idle_s: float | None = options.idle_exit if options.on_demand else None
        self._grace_s: float = options.stop_grace
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._is_stopping = threading.Event()
        self._last_sweep = time.monotonic()
        driver_dir = options.driver_dir or driver_folder()
        self._reserve = _reserve(options.staging_reserve, run_dir, driver_dir)
        # A node with a reserve is there for suspends: the driver worker's start would be a fifth of one.
        worker_idle = options.worker_idle if self._reserve is None else math.inf
        self._pool = WorkerPool(driver_dir, idle_s=worker_idle)
        self._driver = driver = RemoteDriver(self._pool)
        self._registration = Registration(run_dir)
        inventory = Inventory(driver, self._registration.registered)
        journal = Journal(run_dir / "journal")
        tools = Tools(driver, inventory, self._registration, journal)
        staged = StagedService(
            run_dir,
            driver,
            journal,
            self._registration,
            StagingWorkers(driver_dir, self._reserve),
            tolerance=Tolerance(own_most_bytes=options.own_most),
            warm_s=WARM_S if self._reserve is None else math.inf,
        )
        self._service = Service(tools, self._registration, staged, self.stop, self._reserve)
        self._server = Server(self._service)

    def run(self) -> int:
        """Serve until the end."""
        self._hear_signals()
        passed = _passed_listener()
        listener = passed or _listen(self._socket_path)
        self._registration.start()
        recovery = threading.Thread(target=self._service.take_over(), name="recovery")
        recovery.start()
        if self._reserve is not None:
            self._reserve.start()
            threading.Thread(target=self._warm_up, daemon=True, name="warm-up").start()
        _notify("READY=1")
        try:
            self._serve(listener, may_leave=passed is None)
        finally:
            _notify("STOPPING=1")
            if passed is None:
                self._socket_path.unlink(missing_ok=True)
            listener.close()
            recovery.join()
            self._finish()
        return 0

    def _warm_up(self) -> None:
        """Have the driver worker load the driver now."""
        with contextlib.suppress(VgpuError):
            self._driver.node(Deadline(WARM_UP_S))

    def stop(self) -> None:
        """Ask the main thread to end; safe from any thread and from a signal handler."""
        self._is_stopping.set()
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b"\0")

    def _hear_signals(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self.stop())
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)

    def _serve(self, listener: socket.socket, *, may_leave: bool) -> None:
        waiting = select.poll()
        waiting.register(listener, select.POLLIN)
        waiting.register(self._wake_read, select.POLLIN)
        while not self._is_stopping.is_set():
            if waiting.poll(_TICK_S * 1000):
                self._server.accept(listener)
            self._pool.release_when_idle()
            self._sweep()
            if may_leave and self._has_been_idle() and self._leave(listener):
                return

    def _sweep(self) -> None:
        if time.monotonic() - self._last_sweep > _SWEEP_S:
            self._last_sweep = time.monotonic()
            threading.Thread(target=self._service.sweep, daemon=True, name="sweep").start()

    def _has_been_idle(self) -> bool:
        if self._idle_s is None or self._reserve is not None:
            return False
        if not self._server.is_idle() or self._service.has_suspended():
            return False
        return time.monotonic() - self._server.last_active >= self._idle_s

    def _leave(self, listener: socket.socket) -> bool:
        """Give the socket's name up; a client that got in just before is served, under a new socket."""
        self._socket_path.unlink(missing_ok=True)
        if not self._server.accept(listener):
            return True
        again = _listen(self._socket_path)
        os.dup2(again.fileno(), listener.fileno(), inheritable=False)
        again.close()
        return False

    def _finish(self) -> None:
        """Let work under way end by itself for a while, then undo it."""
        grace = Deadline(self._grace_s)
        while self._service.has_work() and grace.remaining() > 0:
            time.sleep(0.05)
        self._server.cancel_all("the agent must stop")
        self._service.abandon_all()
        while self._service.has_work():  # bounded by the deadlines of what is being undone
            time.sleep(0.05)
        self._registration.close()
        self._pool.close()
        if self._reserve is not None:
            self._reserve.close()


def _raise_descriptor_limit() -> None:
    """Staged mode holds a descriptor for each object of every container that is frozen."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="vgpu-agent", description="Freezes and thaws the GPU state of containers.")
    parser.add_argument("--on-demand", action="store_true", help="end when there has been nothing to do for a while")
    parser.add_argument("--socket", metavar="PATH", help="main socket (default: agent.sock in the state folder)")
    parser.add_argument("--state-dir", metavar="DIR", default=str(RUN_DIR), help="default: %(default)s")
    parser.add_argument("--foreground", action="store_true", help="stay attached (the agent never detaches by itself)")
    parser.add_argument("--driver-dir", metavar="DIR", help="folder of libcuda.so.1 (default: from runtime.conf)")
    parser.add_argument(
        "--own-most", type=int, default=OWN_MOST_BYTES, metavar="BYTES",
        help="device memory that a process's contexts may take for themselves (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--staging-reserve", type=_size, metavar="SIZE",
        help="host memory to keep pinned for the next suspend, as 40G; 0 is none (default: from runtime.conf)",
    )  # fmt: skip
    for name, default in (("idle-exit", IDLE_EXIT_S), ("worker-idle", IDLE_S), ("stop-grace", STOP_GRACE_S)):
        parser.add_argument(
            f"--{name}", type=float, default=default, metavar="S", help="seconds (default: %(default)s)"
        )
    return parser


def _size(text: str) -> int:
    size = bytes_of(text)
    if size is None:
        raise argparse.ArgumentTypeError(f"'{text}' is no size")
    return size


def _reserve(size: int | None, run_dir: Path, driver_dir: str | None) -> StagingReserve | None:
    if size is None:
        size = configured_bytes()
    return StagingReserve(size, run_dir, lambda: StagingWorker(driver_dir)) if size else None


@contextlib.contextmanager
def _only_one(path: Path) -> Iterator[bool]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
    finally:
        os.close(fd)


def _listen(path: Path) -> socket.socket:
    """Take the socket's place; whoever held it before is dead, for the lock is ours."""
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    listener.bind(str(path))
    path.chmod(0o600)  # the umask, 0077, has kept others out until here
    listener.listen(64)
    return listener


def _passed_listener() -> socket.socket | None:
    """The socket that systemd passed, if it did."""
    if os.environ.get("LISTEN_PID") != str(os.getpid()) or os.environ.get("LISTEN_FDS") != "1":
        return None
    listener = socket.socket(fileno=_FIRST_PASSED_FD)
    listener.set_inheritable(False)
    listener.setblocking(False)
    return listener


def _notify(state: str) -> None:
    """Tell systemd, where it listens."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as out:
        out.sendto(state.encode(), "\0" + address[1:] if address.startswith("@") else address)


if __name__ == "__main__":
    sys.exit(main())
