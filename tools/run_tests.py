"""Runs the whole suite in parts, two pytest processes at a time: native tests, tests in test hosts in two parts, all others.

Most of their time is waiting, so two fit two cores. The output of a part in the background follows when it has ended; the
last line sums all up. Called by `make test`.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ENGINES, NATIVE = Path("tests/engines"), Path("tests/native")
# The other half of the engines' time; what is in no list goes with the first.
SECOND_HALF = ("bad_input", "containerd", "cosign", "cri", "deploy", "docker", "interrupted", "nri", "registry")
COUNTED = re.compile(r"(\d+) (passed|failed|skipped|error)s?\b")
AT_A_TIME = 2
TELL_S = 30.0

Part = tuple[str, list[str]]


def main() -> int:
    """The worst of the exit statuses."""
    with_hosts = "--without-hosts" not in sys.argv[1:]
    native = ("the preload and the agent on the software driver", ["-m", "not gpu", str(NATIVE)])
    others = ("all others", ["-m", "not engines and not gpu", f"--ignore={NATIVE}"])
    waiting = [native, *(_engine_parts() if with_hosts else []), others]
    running: list[tuple[str, subprocess.Popen[bytes], Path]] = []
    status, text, tells_at = 0, "", 0.0
    while waiting or running:
        while waiting and len(running) < AT_A_TIME:
            name, arguments = waiting.pop(0)
            running.append((name, *_start(arguments)))
        if time.monotonic() > tells_at:
            print("; ".join(f"{name}: {_progress(path)}" for name, _, path in running), flush=True)
            tells_at = time.monotonic() + TELL_S
        time.sleep(1)
        for part in [part for part in running if part[1].poll() is not None]:
            running.remove(part)
            name, process, path = part
            said = path.read_text(encoding="utf-8", errors="replace")
            path.unlink()
            print(f"\n== {name}\n{said}", flush=True)
            status, text = max(status, process.returncode), text + said
    counts = _counts(text)
    print(
        f"{counts['passed']} passed, {counts['failed'] + counts['error']} failed, {counts['skipped']} skipped",
        flush=True,
    )
    return status


def _engine_parts() -> list[Part]:
    files = sorted(ENGINES.glob("test_*.py"))
    second = [file for file in files if file.stem.removeprefix("test_").startswith(SECOND_HALF)]
    marks = ["-m", "engines and not gpu"]
    return [
        ("tests in test hosts, first half", [*marks, *(str(file) for file in files if file not in second)]),
        ("tests in test hosts, second half", [*marks, *map(str, second)]),
    ]


def _start(arguments: list[str]) -> tuple[subprocess.Popen[bytes], Path]:
    with tempfile.NamedTemporaryFile(prefix="vgpu-tests-", suffix=".log", delete=False) as log:
        command = [sys.executable, "-u", "-m", "pytest", *arguments]
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL), Path(log.name)


def _progress(log: Path) -> str:
    """How far a part is, by the last line of dots that is whole."""
    said = re.findall(r"\[ *(\d+%)\]", log.read_text(encoding="utf-8", errors="replace"))
    return said[-1] if said else "begun"


def _counts(text: str) -> Counter[str]:
    counts: Counter[str] = Counter()
    for line in text.splitlines():
        if re.search(r" in \d+\.\d+s", line):
            for number, what in COUNTED.findall(line):
                counts[what] += int(number)
    return counts


if __name__ == "__main__":
    sys.exit(main())
