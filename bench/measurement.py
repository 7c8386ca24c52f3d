"""Writes measurement files in the one form the docs read (tools/measurement.schema.json): rows of key, value, unit, raw.

Called by every script under bench/ and tests/gpu/; refuses a row without raw values.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "docs" / "measurements"


def row(key: str, what: str, unit: str, raw: list[float], **baseline: Any) -> dict[str, Any]:
    """One row; `value` is the median of `raw`. With baseline_what= and baseline_raw= the ratio is added."""
    if not raw:
        message = f"row {key} has no raw values"
        raise ValueError(message)
    value = statistics.median(raw)
    made = {"key": key, "what": what, "value": significant(value), "unit": unit, "raw": raw}
    if "baseline_raw" in baseline:
        base = statistics.median(baseline["baseline_raw"])
        made |= {
            "baseline_what": baseline["baseline_what"],
            "baseline": significant(base),
            "baseline_raw": baseline["baseline_raw"],
            "ratio": round(value / base, 4),
        }
    return made


def significant(value: float) -> float:
    """Six digits, however small the figure."""
    return float(f"{value:.6g}")


def write(
    name: str,
    rows: list[dict[str, Any]],
    *,
    log: str | None = None,
    folder: pathlib.Path = FOLDER,
    gpu: str | None = None,
    driver: str | None = None,
) -> pathlib.Path:
    """Write `<date>-<name>.json` into `folder` and what the run printed beside it; without `log` the caller does that."""
    today = dt.datetime.now(tz=dt.UTC).date().isoformat()
    document = {
        "name": name,
        "date": today,
        "machine": machine(),
        "gpu": gpu,
        "driver": driver,
        "command": " ".join([pathlib.Path(sys.executable).name, "-m", module_name(), *sys.argv[1:]]),
        "commit": commit(),
        "rows": rows,
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{today}-{name}.json"
    if log is not None:
        path.with_suffix(".log").write_text(log)
    path.write_text(json.dumps(document, indent=2) + "\n")
    return path


class Transcript:
    """Prints a run's lines and keeps them for the log beside its measurement."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def say(self, line: str) -> None:
        """Print one line, at once."""
        print(line, flush=True)
        self._lines.append(line)

    def say_load(self, when: str) -> None:
        """What else the machine was doing, which figures of a busy machine must be read with."""
        way = "as usual" if os.sched_getscheduler(0) == os.SCHED_OTHER else "before all others (real time)"
        self.say(f"load average {when} the run: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; scheduled {way}")

    def text(self) -> str:
        """All of it."""
        return "".join(f"{line}\n" for line in self._lines)


def interleaved_rates(
    runs: dict[str, Callable[[], object]], rounds: int, size_bytes: int, out: Transcript
) -> dict[str, list[float]]:
    """GB/s of each run in each round, all runs once a round and once before; each works on `size_bytes`."""
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for number in range(rounds):
        for name, run in runs.items():
            started = time.perf_counter()
            run()
            rates[name].append(round(size_bytes / (time.perf_counter() - started) / 1e9, 3))
            out.say(f"round {number} {name}: {rates[name][-1]} GB/s")
    return rates


def module_name() -> str:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec.name if spec else pathlib.Path(sys.argv[0]).stem


def machine() -> str:
    """Processor, cores, memory and kernel; no host name."""
    info = pathlib.Path("/proc/cpuinfo").read_text()
    model = next(
        (line.split(":", 1)[1].strip() for line in info.splitlines() if line.startswith("model name")), "unknown"
    )
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{model}, {os.cpu_count()} cores, {gib:.0f} GiB, Linux {platform.release().split('-')[0]}"


def commit() -> str:
    """The commit that was measured, with + where the tree had changes; 'unknown' outside a checkout."""
    try:
        head = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
        changes = subprocess.run(["git", "status", "--porcelain"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("VGPU_COMMIT", "unknown")
    return head.stdout.strip() + ("+" if changes.stdout.strip() else "")


def gpu_names() -> dict[str, str]:
    """`gpu` and `driver` of a measurement file: the first GPU's name and the driver's release."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    name, driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0].split(", ")
    return {"gpu": name, "driver": driver}
