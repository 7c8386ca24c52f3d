"""Ends a half restored container when this process is killed: a child that outlives it by one step.

Between the low-level runtime's restore and the thaw of the GPU side the container exists and must not run. A shim that
is killed there (containerd does so to end a runtime) would leave it frozen for ever, and podman waiting for its output.
Refuses to act on a pid file that was there before: it is removed first, the low-level runtime writes it anew.
Holds no descriptor of the engine's and no terminal. Called by restore.py.
"""

from __future__ import annotations

import contextlib
import os
import signal
from typing import TYPE_CHECKING

from oci_hook.state import cgroup_of
from runtime_shim import freezer
from vgpu_errors import VgpuError

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

ALL_IS_WELL = b"."


class Guard:
    """A context manager around the dangerous part; without a pid file there is nothing to go by, and no child."""

    def __init__(self, pid_file: str | None) -> None:
        self._pid_file = pid_file
        self._child = 0
        self._pipe = -1

    def __enter__(self) -> Self:
        if self._pid_file is not None:
            self._start(self._pid_file)
        return self

    def _start(self, pid_file: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(pid_file)  # noqa: PTH108
        report_end, self._pipe = os.pipe()
        self._child = os.fork()
        if self._child == 0:
            try:
                os.close(self._pipe)
                _stand_by(report_end, pid_file)
            finally:
                os._exit(0)
        os.close(report_end)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stand_down()

    def stand_down(self) -> None:
        """The container runs, or has been dealt with; does nothing the second time."""
        if self._pipe < 0:
            return
        with contextlib.suppress(BrokenPipeError):
            os.write(self._pipe, ALL_IS_WELL)
        os.close(self._pipe)
        self._pipe = -1
        with contextlib.suppress(ChildProcessError):  # an engine that ignores SIGCHLD leaves nothing to wait for
            os.waitpid(self._child, 0)


def _stand_by(report_end: int, pid_file: str) -> None:
    """Wait for the parent's word, or for its end."""
    _let_go_of_everything_but(report_end)
    if os.read(0, 1) != ALL_IS_WELL:
        end_container(pid_file)


def _let_go_of_everything_but(report_end: int) -> None:
    os.setsid()
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.dup2(report_end, 0)
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    # Not up to SC_OPEN_MAX: engines set that to a thousand million, which takes minutes without close_range(2).
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        if int(name) > 2:
            with contextlib.suppress(OSError):  # the listing's own
                os.close(int(name))
    os.chdir("/")


def end_container(pid_file: str) -> None:
    """SIGKILL for all that the pid file's process stands for; it runs no instruction more."""
    try:
        with open(pid_file, encoding="ascii") as file:  # noqa: PTH123
            pid = int(file.read())
    except (OSError, ValueError):
        return  # the low-level runtime had not got so far
    cgroup = cgroup_of(pid)
    if cgroup is not None:
        with contextlib.suppress(VgpuError):
            freezer.kill(cgroup, pid)
