"""Runs transfers side by side, a bounded number at a time; the first fault stops the others (docs/registry.md)."""

from __future__ import annotations

from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterable, Iterator

IN_FLIGHT = 8
Item = TypeVar("Item")


def for_each(
    work: Callable[[Item], None], items: Iterable[Item], stop: threading.Event, *, in_flight: int = IN_FLIGHT
) -> None:
    """Call `work` for every item in threads; items are taken as threads become free, so that none waits in memory."""
    pool = ThreadPoolExecutor(in_flight, "vgpu-transfer")
    try:
        _run_all(pool, work, iter(items), in_flight)
    except BaseException:
        was_set = stop.is_set()
        stop.set()
        pool.shutdown(cancel_futures=True)
        if not was_set:
            stop.clear()  # all threads have ended; the client can be used again
        raise
    pool.shutdown()


def _run_all(pool: ThreadPoolExecutor, work: Callable[[Item], None], items: Iterator[Item], in_flight: int) -> None:
    running: set[Future[None]] = {pool.submit(work, item) for item in islice(items, in_flight)}
    while running:
        # The time-out lets the main thread see an interrupt.
        done, running = wait(running, timeout=1, return_when=FIRST_COMPLETED)
        for future in done:
            future.result()
        running |= {pool.submit(work, item) for item in islice(items, in_flight - len(running))}
