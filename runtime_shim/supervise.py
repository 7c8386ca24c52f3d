"""Runs the low-level runtime as a child that behaves as if the engine had started it directly.

The child keeps argv, cwd, environment, process group, stdio, every inherited descriptor, signal mask and signal
dispositions. It dies when this process dies (containerd kills a runtime through the parent-death signal, which a fork
drops), gets the signals that are sent here, and is ended when its deadline passes.
Refuses to swallow anything: stdio goes through untouched unless the caller asks for a stream.
Called by create.py, exec_verb.py, delete.py, checkpoint.py and restore.py; verbs that pass through use
low_level.replace_process instead and never load this module.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import time

from vgpu_errors import ToolMissing

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType

FORWARDED = frozenset(
    (
        signal.SIGTERM,
        signal.SIGINT,
        signal.SIGHUP,
        signal.SIGQUIT,
        signal.SIGUSR1,
        signal.SIGUSR2,
        signal.SIGWINCH,
    )
)
WATCHED = FORWARDED | {signal.SIGCHLD}
SENT_BY_KERNEL = 0x80  # si_code SI_KERNEL: a terminal signals its whole process group, so the child has it already
LONGEST_NAP_S = 1.0
TICK_S = 0.05
GRACE_S = 10.0
PR_SET_PDEATHSIG = 1

_prctl = ctypes.CDLL(None).prctl
_mask_from_engine = signal.pthread_sigmask(signal.SIG_BLOCK, ())


class Finished:
    """How a child ended: status as a shell counts it (128+n for a signal), and the streams that were asked for."""

    __slots__ = ("has_timed_out", "status", "stderr", "stdout")

    def __init__(self, status: int, has_timed_out: bool, stdout: bytes, stderr: bytes) -> None:
        self.status = status
        self.has_timed_out = has_timed_out
        self.stdout = stdout
        self.stderr = stderr


class Shield:
    """Holds signals back while a step and its undo must both happen; they arrive when it ends.

    `run_child` inside it still forwards them. Nests.
    """

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._before)


def run_child(
    argv: Sequence[str],
    *,
    deadline_s: float | None = None,
    grace_s: float = GRACE_S,
    env: Mapping[str, str] | None = None,
    capture_stdout: bool = False,
    capture_stderr: bool = False,
    forwards_signals: bool = True,
    on_tick: Callable[[], bool] | None = None,
) -> Finished:
    """Run argv[0] (an absolute path) to its end and say how it ended.

    Past `deadline_s` the child gets SIGTERM, after `grace_s` more SIGKILL, and so does what it had started: a CRIU
    whose runtime is gone would go on alone. `on_tick` is called about every 50 ms until it returns True; calls that it
    makes itself must leave the signals to the outer one (`forwards_signals=False`).
    """
    streams = _Streams(capture_stdout, capture_stderr)
    with Shield():
        disposition = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it would make wait lose the status
        try:
            child = _start(argv, env, streams, ignore_children=disposition == signal.SIG_IGN)
            watched = WATCHED if forwards_signals else frozenset((signal.SIGCHLD,))
            status, has_timed_out = _Watch(child, watched, deadline_s, grace_s, on_tick).to_the_end()
        finally:
            signal.signal(signal.SIGCHLD, disposition)
    return Finished(status, has_timed_out, *streams.contents())


class _Streams:
    """Files in memory for the streams to keep: unlike a pipe they never fill up and need nobody to read them."""

    __slots__ = ("_by_number",)

    def __init__(self, keep_stdout: bool, keep_stderr: bool) -> None:
        wanted = ((1, keep_stdout), (2, keep_stderr))
        self._by_number = {number: os.memfd_create(f"fd{number}") for number, is_kept in wanted if is_kept}

    def put_in_place(self) -> None:
        for number, descriptor in self._by_number.items():
            os.dup2(descriptor, number, inheritable=True)

    def contents(self) -> tuple[bytes, bytes]:
        found = {number: self._read(descriptor) for number, descriptor in self._by_number.items()}
        return found.get(1, b""), found.get(2, b"")

    @staticmethod
    def _read(descriptor: int) -> bytes:
        with open(descriptor, "rb") as file:
            file.seek(0)
            return file.read()


def _start(argv: Sequence[str], env: Mapping[str, str] | None, streams: _Streams, *, ignore_children: bool) -> int:
    """Fork and exec; returns when the new program runs, so a missing one is an error of its own and not a status."""
    parent = os.getpid()
    report_end, failure_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            _become(argv, env, streams, parent, ignore_children=ignore_children)
        except OSError as error:
            os.write(failure_end, str(error.errno or 0).encode())
        finally:
            os._exit(127)
    os.close(failure_end)
    with open(report_end, "rb") as report:  # noqa: PTH123
        failure = report.read()
    if failure:
        os.waitpid(child, 0)
        raise ToolMissing(tool=argv[0], what=os.strerror(int(failure)))
    return child


def _become(
    argv: Sequence[str], env: Mapping[str, str] | None, streams: _Streams, parent: int, *, ignore_children: bool
) -> None:
    """Runs in the child: tie it to the parent's life, undo what Python and this module changed, exec."""
    _prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it died before the line above
        os._exit(128 + signal.SIGKILL)
    streams.put_in_place()
    if os.environ.get("LISTEN_PID") == str(parent):  # socket activation names the runtime's pid
        os.environ["LISTEN_PID"] = str(os.getpid())
    for ignored_by_python in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored_by_python, signal.SIG_DFL)
    if ignore_children:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, _mask_from_engine)
    if env is None:
        os.execv(argv[0], list(argv))  # noqa: S606 - keeps the C environment, byte for byte
    os.execve(argv[0], list(argv), dict(env))  # noqa: S606


class _Watch:
    """Waits for one child: forwards signals, keeps its deadline, calls the tick."""

    __slots__ = ("_child", "_deadline", "_grace_s", "_signals", "_tick")

    def __init__(
        self,
        child: int,
        signals: frozenset[signal.Signals],
        deadline_s: float | None,
        grace_s: float,
        tick: Callable[[], bool] | None,
    ) -> None:
        self._child = child
        self._signals = signals
        self._deadline = None if deadline_s is None else time.monotonic() + deadline_s
        self._grace_s = grace_s
        self._tick = tick

    def to_the_end(self) -> tuple[int, bool]:
        """The child's status, and whether it had to be ended."""
        while (status := self._look()) is None:
            if self._is_late():
                return self._end(), True
            if self._tick is not None and self._tick():
                self._tick = None
                continue  # a child of the tick may have taken this one's SIGCHLD along
            self._nap()
        return status, False

    def _end(self) -> int:
        """Ask, wait, insist."""
        started_by_it = _handles(_descendants(self._child))
        os.kill(self._child, signal.SIGTERM)
        self._deadline, self._tick = time.monotonic() + self._grace_s, None
        while (status := self._look()) is None and not self._is_late():
            self._nap()
        if status is None:
            started_by_it += _handles(_descendants(self._child))
            os.kill(self._child, signal.SIGKILL)
            status = _as_shell_counts(os.waitstatus_to_exitcode(os.waitpid(self._child, 0)[1]))
        _kill_all(started_by_it)
        return status

    def _look(self) -> int | None:
        ended, status = os.waitpid(self._child, os.WNOHANG)
        return _as_shell_counts(os.waitstatus_to_exitcode(status)) if ended else None

    def _nap(self) -> None:
        """Sleep until a signal comes or something is due; a child that ends wakes it at once."""
        arrived = signal.sigtimedwait(self._signals, self._nap_s())
        if arrived is None or arrived.si_signo == signal.SIGCHLD or arrived.si_code == SENT_BY_KERNEL:
            return
        os.kill(self._child, arrived.si_signo)

    def _nap_s(self) -> float:
        nap_s = TICK_S if self._tick is not None else LONGEST_NAP_S
        if self._deadline is None:
            return nap_s
        return max(0.0, min(nap_s, self._deadline - time.monotonic()))

    def _is_late(self) -> bool:
        return self._deadline is not None and time.monotonic() >= self._deadline


def _as_shell_counts(code: int) -> int:
    return 128 - code if code < 0 else code


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    waiting = [pid]
    while waiting:
        children = _children(waiting.pop())
        found += children
        waiting += children
    return found


def _children(pid: int) -> list[int]:
    try:
        threads = os.listdir(f"/proc/{pid}/task")  # noqa: PTH208
    except OSError:
        return []
    found: list[int] = []
    for thread in threads:
        try:
            with open(f"/proc/{pid}/task/{thread}/children", encoding="utf-8") as file:  # noqa: PTH123
                found += [int(word) for word in file.read().split()]
        except OSError:
            continue  # the thread ended meanwhile
    return found


def _handles(pids: list[int]) -> list[int]:
    """Process descriptors: unlike a pid they cannot come to mean another process."""
    handles = []
    for pid in pids:
        try:
            handles.append(os.pidfd_open(pid))
        except OSError:
            continue  # it ended meanwhile
    return handles


def _kill_all(handles: list[int]) -> None:
    """End them and wait until they are gone, so that the caller can clean up behind them."""
    left, waiting = select.poll(), 0
    for handle in handles:
        try:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        except ProcessLookupError:
            continue
        left.register(handle, select.POLLIN)  # readable once the process has ended
        waiting += 1
    until = time.monotonic() + GRACE_S
    while waiting and (ended := left.poll(max(0.0, until - time.monotonic()) * 1000)):
        for handle, _ in ended:
            left.unregister(handle)
        waiting -= len(ended)
    for handle in handles:
        os.close(handle)
