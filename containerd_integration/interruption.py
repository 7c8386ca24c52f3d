"""Ctrl-C, SIGTERM and SIGHUP end a command as an error does: what was begun is undone, and nothing tears the undo apart.

The first signal raises `Interrupted` in a long call or between two steps. It waits where a step and the note of its undo
belong together, and from the commit on; every further one is passed over. A signal that was ignored when the command
began (nohup) stays ignored. Away from the main thread, where Python takes no signals, this does nothing.
Called by `checkpointing` and `restoring`.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from typing import TYPE_CHECKING, Any, Self

from gpu_state.undo import Undo

if TYPE_CHECKING:
    from collections.abc import Iterator

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(KeyboardInterrupt):
    """A signal ended the command."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Interruption:
    """A context manager around one command."""

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._holds = 0
        self._waiting = 0

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            heard = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._arrived) for number in heard}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def hold(self) -> None:
        """From now on signals change nothing any more."""
        self._holds += 1

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """A signal inside the block takes effect at its end; one inside a block that fails does not hide the failure."""
        self._holds += 1
        yield
        self._holds -= 1
        if self._waiting and not self._holds:
            self._raise()

    @contextlib.contextmanager
    def undoing(self) -> Iterator[Undo]:
        """Steps with their undo; once one has failed, or a signal has come, the rest is not disturbed."""
        with Undo() as undo:
            try:
                yield undo
            except BaseException:
                self.hold()
                raise

    def _arrived(self, number: int, _frame: object) -> None:
        self._waiting = self._waiting or number
        if not self._holds:
            self._raise()

    def _raise(self) -> None:
        self._holds += 1
        raise Interrupted(self._waiting)
