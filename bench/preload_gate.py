"""What the preload's gate costs a call: nanoseconds per call with the preload in staged and in driver mode, over none.

On the software driver, with a call that the driver refuses at its own entry, so the figure is that of wrapper and gate alone
and says nothing about a GPU. Paired: each round runs all variants in turn on the same machine state.
Called by `make bench`:

    python3 -m bench.preload_gate [--runs 7] [--calls 2000000] [--threads 1] [--write]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from bench import measurement
from tests.software_gpu import build as software_gpu
from vgpu_preload import build as preload_build

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "tests/native/preload_programs/gate_cost.c"
VARIANTS = {
    "plain": "without the preload",
    "driver": "driver mode: wrapper, no gate",
    "staged": "staged mode: wrapper and gate",
}
DEADLINE_S = 120


def main() -> int:
    options = read_options()
    out = measurement.Transcript()
    out.say(f"software driver, {options.calls} calls in each of {options.threads} thread(s), {options.runs} rounds")
    with tempfile.TemporaryDirectory() as name:
        raw = measure(Path(name), options)
    for variant, what in VARIANTS.items():
        out.say(f"{variant:8} {statistics.median(raw[variant]):7.2f} ns a call  {what}")
    for variant in ("driver", "staged"):
        out.say(f"{variant} adds {statistics.median(raw[variant]) - statistics.median(raw['plain']):.2f} ns")
    if options.write:
        print(
            measurement.write(
                "preload-gate-software", rows(raw), log=out.text(), driver="software driver (test double)"
            )
        )
    return 0


def measure(folder: Path, options: argparse.Namespace) -> dict[str, list[float]]:
    """All runs of each variant; the slowest thread of a run counts."""
    program, environments = prepare(folder)
    raw: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for _ in range(options.runs):
        for variant, environment in environments.items():
            (folder / "mode").write_text(f"{variant}\n")
            command = [program, str(options.calls), str(options.threads)]
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, check=True, timeout=DEADLINE_S
            )
            raw[variant].append(max(map(float, done.stdout.split())))
    return raw


def prepare(folder: Path) -> tuple[Path, dict[str, dict[str, str]]]:
    """The program, and the environment of each variant."""
    libraries = software_gpu.build(ROOT / "build/software_gpu")
    paths = (f'VGPU_SOCKET_PATH="{folder}/agent.sock"', f'VGPU_MODE_PATH="{folder}/mode"')
    preload_build.compile_library(folder / "libvgpu.so", "glibc", defines=paths)
    program = folder / "gate_cost"
    zig = [sys.executable, "-m", "ziglang", "cc", "-target", software_gpu.zig_target("glibc"), "-O2", "-pthread"]
    subprocess.run([*zig, SOURCE, libraries / "libcuda.so.1", "-o", program], check=True, timeout=DEADLINE_S)
    plain = {
        **os.environ,
        "LD_LIBRARY_PATH": str(libraries),
        "SOFTWARE_GPU_DIR": str(folder / "gpu"),
        "SOFTWARE_GPU_NODE_DIR": str(folder),
        "SOFTWARE_GPU_COUNT": "1",
    }
    loaded = {**plain, "LD_PRELOAD": str(folder / "libvgpu.so")}
    return program, {"plain": plain, "driver": loaded, "staged": loaded}


def rows(raw: dict[str, list[float]]) -> list[dict[str, object]]:
    """One row for each mode, with the plain call as the baseline."""
    baseline = {"baseline_what": VARIANTS["plain"], "baseline_raw": raw["plain"]}
    return [
        measurement.row(
            f"gate_{variant}", f"a refused call, software driver, {VARIANTS[variant]}", "ns", raw[variant], **baseline
        )
        for variant in ("driver", "staged")
    ]


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python3 -m bench.preload_gate", description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--calls", type=int, default=2_000_000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--write", action="store_true", help="write docs/measurements/<date>-preload-gate-software.json"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
