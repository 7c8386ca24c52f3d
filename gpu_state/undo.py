"""Runs the undo of every finished step in reverse when a later step fails.

Swallows nothing: the first error goes on, failures of the undo itself hang on it as notes. Used by freeze.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ParamSpec

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Self

Args = ParamSpec("Args")


class Undo:
    """A stack of undo calls; a context manager.

    with Undo() as undo:
        gpu.lock(pid)
        undo.push(gpu.unlock, pid)
        undo.keep()
    """

    def __init__(self) -> None:
        self._steps: list[Callable[[], object]] = []
        self.failures: list[BaseException] = []

    def push(self, step: Callable[Args, object], *args: Args.args, **kwargs: Args.kwargs) -> None:
        """Remember how to take back what was (or is about to be) done."""
        self._steps.append(lambda: step(*args, **kwargs))

    def keep(self) -> None:
        """The steps stand: forget how to undo them."""
        self._steps.clear()

    def run(self) -> None:
        """Undo everything now, newest first; a failure does not stop the older ones."""
        while self._steps:
            try:
                self._steps.pop()()
            except Exception as failure:  # noqa: BLE001 - the other steps must still be undone; reported as a note
                self.failures.append(failure)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            return
        self.run()
        for failure in self.failures:
            error.add_note(f"while undoing: {failure}")
