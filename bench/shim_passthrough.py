"""What a runtime call that passes through the shim costs over the low-level runtime alone.

Paired: each round runs both, in alternating order, on the same machine state; the figure is the median difference.
The low-level runtime is a small C program that does nothing, or the one that `--runtime` names (`RT state absent`).
The shim is installed as `vgpu setup` installs it: a byte-compiled copy, an entry script with `/usr/bin/python3 -IS`.

    python3 bench/shim_passthrough.py [--runs 200] [--python /usr/bin/python3] [--runtime /usr/bin/runc] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("vgpu_errors", "oci_hook", "runtime_shim")
NOTHING = "int main(void) { return 0; }\n"
LIMIT_MS = 25.0
BUNDLE_SPEC = {"process": {"args": ["/bin/sh"]}, "root": {"path": "rootfs"}, "linux": {}}


def main() -> int:
    options = read_options()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        low_level = options.runtime or build_nothing(folder)
        shim = install_shim(folder, low_level, options.python)
        bundles = {kind: make_bundle(folder / kind, has_gpu=kind == "gpu") for kind in ("cpu", "gpu")}
        calls = {
            "pass_through": ["state", "absent"],
            "exec_other": ["exec", "absent", "true"],
            "delete_other": ["delete", "absent"],
        }
        if options.runtime is None:
            calls |= {f"create_{kind}": ["create", "--bundle", str(bundle), kind] for kind, bundle in bundles.items()}
        rows = [measure(key, words, low_level, shim, options.runs) for key, words in calls.items()]
    report = describe(options, low_level, rows)
    text = json.dumps(report, indent=1)
    if options.json:
        Path(options.json).write_text(text + "\n")
    else:
        print(text)
    for row in rows:
        print(f"{row['key']}: {row['value']:.1f} ms over {row['baseline']:.1f} ms", file=sys.stderr)
    return 0 if rows[0]["value"] < LIMIT_MS else 1


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--python", default="/usr/bin/python3")
    parser.add_argument("--runtime")
    parser.add_argument("--json")
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


def measure(key: str, words: list[str], low_level: str, shim: str, runs: int) -> dict[str, object]:
    alone: list[float] = []
    through: list[float] = []
    for number in range(runs + 5):
        pair = [(alone, low_level), (through, shim)]
        for times, program in pair if number % 2 else reversed(pair):
            milliseconds = timed([program, *words])
            if number >= 5:  # the first rounds warm the caches
                times.append(milliseconds)
    added = [with_shim - without for with_shim, without in zip(through, alone, strict=True)]
    return {
        "key": f"shim_{key}",
        "what": f"`{' '.join(words[:1])}` through the shim, added time (median of paired differences)",
        "value": round(statistics.median(added), 3),
        "unit": "ms",
        "raw": [round(value, 3) for value in added],
        "baseline_what": "the same call of the low-level runtime alone",
        "baseline": round(statistics.median(alone), 3),
        "ratio": round(statistics.median(added) / statistics.median(alone), 3),
    }


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


def describe(options: argparse.Namespace, low_level: str, rows: list[dict[str, object]]) -> dict[str, object]:
    version = subprocess.run([options.python, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    commit = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "name": "shim_passthrough",
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}, {version}",
        "gpu": None,
        "driver": None,
        "command": f"bench/shim_passthrough.py --runs {options.runs} (low-level runtime: {Path(low_level).name})",
        "commit": commit.stdout.strip() if commit.returncode == 0 else None,
        "rows": rows,
    }


if __name__ == "__main__":
    sys.exit(main())
