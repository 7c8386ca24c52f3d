"""Runs the parts of a GPU bench one after the other: each bounded in time, a failed one never in the way of the next.

A part is a generator of measurement rows; what it has yielded before it fails is kept, and rows are written after each part,
because a run on a lent machine can end at any time. Called by the benches that need a GPU; decides nothing of what is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from bench import measurement
from tests.hosts import gpus

Part = Callable[[argparse.Namespace], Iterable[dict[str, Any]]]
PART_LIMIT_S = 240


class PartTimedOut(Exception):
    """The part has had its time."""


def parser_of(doc: str | None, parts: Mapping[str, Part], *, name: str, rounds: int = 3) -> argparse.ArgumentParser:
    """The options that all benches on a GPU have."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=sorted(parts))
    parser.add_argument("--measurements", type=pathlib.Path, help="folder for <date>-<name>.json")
    parser.add_argument("--name", default=name)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--part-limit", type=float, default=PART_LIMIT_S, help="seconds that one part may take")
    parser.add_argument("--rehearse", action="store_true", help="go through the steps on the software driver")
    parser.set_defaults(has_failed=False)
    return parser


def run(args: argparse.Namespace, parts: Mapping[str, Part], after_part: Callable[[], None] = lambda: None) -> int:
    """Run what was asked for; 0 where all of it went well."""
    if not gpus.is_real() and not args.rehearse:
        print("no NVIDIA GPU here; --rehearse goes through the steps on the software driver", file=sys.stderr)
        return 1
    # Whoever ends this program means all that it has started, and the undo of it is in `with` blocks.
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(143))
    rows: list[dict[str, Any]] = []
    for name in args.parts:
        print(f"\n== {time.strftime('%H:%M:%S')} {name}", flush=True)
        began = time.monotonic()
        with going_on(args, name), bounded(args.part_limit):
            for row in parts[name](args):
                rows.append(row)
                print(f"    {line_of(row)}", flush=True)
        after_part()
        print(f"    ({time.monotonic() - began:.1f} s)", flush=True)
        if args.measurements and gpus.is_real() and rows:
            measurement.write(args.name, rows, folder=args.measurements, **measurement.gpu_names())
    print("\n" + "\n".join(line_of(row) for row in rows), flush=True)
    return 1 if args.has_failed else 0


@contextlib.contextmanager
def going_on(args: argparse.Namespace, what: str) -> Iterator[None]:
    """Say what failed and go on: the other figures are worth having."""
    try:
        yield
    except Exception as problem:  # noqa: BLE001 - whatever it was, it is told and counted
        print(f"    FAILED {what}: {type(problem).__name__}: {str(problem)[:2000]}", flush=True)
        place = traceback.extract_tb(problem.__traceback__)[-3:]
        print("".join(f"      {at.filename}:{at.lineno} {at.line}\n" for at in place), end="", flush=True)
        args.has_failed = True


@contextlib.contextmanager
def bounded(limit_s: float) -> Iterator[None]:
    """PartTimedOut in this thread after so long, whatever it waits for."""

    def end(_number: int, _frame: object) -> None:
        raise PartTimedOut(f"more than {limit_s:.0f} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def line_of(row: dict[str, Any]) -> str:
    """One row as the log shows it."""
    base = f"  baseline {row['baseline']} ratio {row['ratio']}" if "ratio" in row else ""
    return f"{row['key']:32} {row['value']:12} {row['unit']:6} {row['what']}{base}  raw {row['raw']}"
