"""Runs the whole suite as two pytest processes at a time: the tests in test hosts, and all others.

Most of their time is waiting, so two fit two cores and `make test` takes as long as the longer one. The output of the one
in the background follows when the other has ended; the last line sums both up. Called by `make test`.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

PARTS = {"in test hosts": "engines and not gpu", "all others": "not engines and not gpu"}
COUNTED = re.compile(r"(\d+) (passed|failed|skipped|error)s?\b")


def main() -> int:
    """The worse of the two exit statuses."""
    with_hosts = "--without-hosts" not in sys.argv[1:]
    hosts = _start(PARTS["in test hosts"]) if with_hosts else None
    status, text = _finish(_start(PARTS["all others"]), echo=True)
    if hosts is not None:
        hosts_status, hosts_text = _finish(hosts, echo=False)
        print(f"\n== the tests in test hosts\n{hosts_text}", flush=True)
        status, text = max(status, hosts_status), text + hosts_text
    counts = _counts(text)
    print(
        f"{counts['passed']} passed, {counts['failed'] + counts['error']} failed, {counts['skipped']} skipped",
        flush=True,
    )
    return status


def _start(marks: str) -> tuple[subprocess.Popen[bytes], Path]:
    with tempfile.NamedTemporaryFile(prefix="vgpu-tests-", suffix=".log", delete=False) as log:
        command = [sys.executable, "-u", "-m", "pytest", "-m", marks]
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL), Path(log.name)


def _finish(part: tuple[subprocess.Popen[bytes], Path], *, echo: bool) -> tuple[int, str]:
    process, path = part
    with path.open(encoding="utf-8", errors="replace") as log:
        text = ""
        while True:
            has_ended = process.poll() is not None
            piece = log.read()
            text += piece
            if echo and piece:
                print(piece, end="", flush=True)
            if has_ended:
                break
            try:
                process.wait(timeout=1)
            except subprocess.TimeoutExpired:
                continue
    path.unlink()
    return process.returncode, text


def _counts(text: str) -> Counter[str]:
    counts: Counter[str] = Counter()
    for line in text.splitlines():
        if re.search(r" in \d+\.\d+s", line):
            for number, what in COUNTED.findall(line):
                counts[what] += int(number)
    return counts


if __name__ == "__main__":
    sys.exit(main())
