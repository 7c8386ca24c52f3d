"""What a runtime call that passes through the shim costs over the low-level runtime alone.

Paired: each round runs both, in alternating order, on the same machine state; the figure is the median difference.
The low-level runtime is a small C program that does nothing, or the one that `--runtime` names (`RT state absent`).
The shim is installed as `vgpu setup` installs it: a byte-compiled copy, an entry script with `/usr/bin/python3 -IS`.
On a machine that does other work as well, start it under `chrt -r 1`: then neither of the two waits for a core.
Ends with 1 when a call costs more than the 25 ms that a container start may lose to it. Called by `make bench`:

    python3 -m bench.shim_passthrough [--runs 200] [--python /usr/bin/python3] [--runtime /usr/bin/runc] [--write]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench import measurement

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("vgpu_errors", "oci_hook", "runtime_shim")
NOTHING = "int main(void) { return 0; }\n"
LIMIT_MS = 25.0
WARMING_ROUNDS = 5
WHATS = {
    "pass_through": "`state`, which passes through",
    "exec_other": "`exec` into a container that is not ours",
    "delete_other": "`delete` of a container that is not ours",
    "create_cpu": "`create` of a container without a GPU",
    "create_gpu": "`create` of a container with a GPU",
}
BUNDLE_SPEC = {"process": {"args": ["/bin/sh"]}, "root": {"path": "rootfs"}, "linux": {}}


def main() -> int:
    options = read_options()
    out = measurement.Transcript()
    out.say_load("before")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        low_level = options.runtime or build_nothing(folder)
        shim = install_shim(folder, low_level, options.python)
        out.say(
            f"{python_version(options.python)}, low-level runtime: {Path(low_level).name}, {options.runs} pairs each"
        )
        pairs = {key: measure(words, low_level, shim, options.runs) for key, words in calls(options, folder).items()}
    out.say_load("after")
    for key, (alone, through) in pairs.items():
        out.say(describe(key, alone, through))
    rows = [made_row(key, alone, through) for key, (alone, through) in pairs.items()]
    if options.write:
        print(measurement.write("shim-passthrough", rows, log=out.text()))
    return 0 if rows[0]["value"] < LIMIT_MS else 1


def calls(options: argparse.Namespace, folder: Path) -> dict[str, list[str]]:
    """The command lines that are measured; a real low-level runtime is not asked to make a container."""
    found = {
        "pass_through": ["state", "absent"],
        "exec_other": ["exec", "absent", "true"],
        "delete_other": ["delete", "absent"],
    }
    if options.runtime is None:
        bundles = {kind: make_bundle(folder / kind, has_gpu=kind == "gpu") for kind in ("cpu", "gpu")}
        found |= {f"create_{kind}": ["create", "--bundle", str(bundle), kind] for kind, bundle in bundles.items()}
    return found


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--python", default="/usr/bin/python3")
    parser.add_argument("--runtime")
    parser.add_argument("--write", action="store_true", help="write docs/measurements/<date>-shim-passthrough.json")
    return parser.parse_args()


def build_nothing(folder: Path) -> str:
    (folder / "nothing.c").write_text(NOTHING)
    subprocess.run(["cc", "-O2", "-o", folder / "nothing", folder / "nothing.c"], check=True)
    return str(folder / "nothing")


def install_shim(folder: Path, low_level: str, python: str) -> str:
    library = folder / "lib"
    for package in PACKAGES:
        shutil.copytree(ROOT / package, library / package, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run([python, "-m", "compileall", "-q", library], check=True)
    preload = library / "preload" / "glibc"
    (preload / "ab12").mkdir(parents=True)
    (preload / "ab12" / "libvgpu.so").touch()
    (preload / "current").write_text("ab12\n")
    configuration = folder / "runtime.conf"
    configuration.write_text(f"low_level_runtime = {low_level}\nrun_dir = {folder}/run\nlibrary_dir = {library}\n")
    shim = folder / "vgpu-runtime"
    shim.write_text(
        f"#!{python} -IS\nimport sys\nsys.path.insert(0, {str(library)!r})\n"
        f"from runtime_shim.main import main\nsys.exit(main(config_path={str(configuration)!r}))\n"
    )
    shim.chmod(0o755)
    return str(shim)


def make_bundle(folder: Path, *, has_gpu: bool) -> Path:
    (folder / "rootfs/lib64").mkdir(parents=True)
    (folder / "rootfs/lib64/ld-linux-x86-64.so.2").touch()
    devices = [{"path": "/dev/nvidia0"}] if has_gpu else []
    (folder / "config.json").write_text(json.dumps({**BUNDLE_SPEC, "linux": {"devices": devices}}))
    return folder


def measure(words: list[str], low_level: str, shim: str, runs: int) -> tuple[list[float], list[float]]:
    alone: list[float] = []
    through: list[float] = []
    for number in range(runs + WARMING_ROUNDS):
        pair = [(alone, low_level), (through, shim)]
        for times, program in pair if number % 2 else reversed(pair):
            milliseconds = timed([program, *words])
            if number >= WARMING_ROUNDS:
                times.append(round(milliseconds, 3))
    return alone, through


def made_row(key: str, alone: list[float], through: list[float]) -> dict[str, Any]:
    added = [round(with_shim - without, 3) for with_shim, without in zip(through, alone, strict=True)]
    what = f"{WHATS[key]}: time the shim adds (median of paired differences)"
    base = "the same call of the low-level runtime alone"
    return measurement.row(f"shim_{key}", what, "ms", added, baseline_what=base, baseline_raw=alone)


def describe(key: str, alone: list[float], through: list[float]) -> str:
    added = sorted(with_shim - without for with_shim, without in zip(through, alone, strict=True))
    quarter = len(added) // 4
    return (
        f"{key}: alone {statistics.median(alone):.2f} ms, through the shim {statistics.median(through):.2f} ms, "
        f"added {statistics.median(added):.2f} ms (quartiles {added[quarter]:.2f} and {added[-1 - quarter]:.2f}, "
        f"least {added[0]:.2f}, most {added[-1]:.2f})"
    )


def timed(argv: list[str]) -> float:
    started = time.perf_counter()
    child = os.posix_spawn(
        argv[0],
        argv,
        {},
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 2, "/dev/null", os.O_WRONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, "/dev/null", os.O_WRONLY, 0),
        ],
    )
    os.waitpid(child, 0)
    return (time.perf_counter() - started) * 1000


def python_version(python: str) -> str:
    return subprocess.run([python, "--version"], capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
