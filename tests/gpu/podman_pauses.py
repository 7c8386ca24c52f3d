"""Looks for pauses of podman itself on this machine: a plain container started under several conditions, each timed.

An earlier set-up had 10 s at each spec generation (docs/decisions/0004-podman-pauses.md). Where a start takes longer than `--slow` seconds it is done
again under strace, and the longest waits are printed with the call that waited. Changes nothing on the machine.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time

from tests.engines.gpu_container import DEVICE
from tests.engines.prepared import LOW_LEVEL
from tests.hosts import gpus
from tests.hosts.host import TestHost

IMAGE = "localhost/vgpu-test:plain"
TIMED = re.compile(r"^(\d+) +(\d+\.\d+) (.*)$")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--row", default="trixie")
    parser.add_argument("--slow", type=float, default=3.0)
    args = parser.parse_args()
    with TestHost(args.row, "pause-node", binds=gpus.binds()) as host:
        gpus.install(host)
        host.install_project()
        host.run(
            ["vgpu", "setup", "podman", *gpus.setup_options(), "--low-level-runtime", LOW_LEVEL[args.row]], timeout=120
        )
        host.image("plain")
        machine = subprocess.run(["cat", "/etc/resolv.conf"], capture_output=True, text=True, check=False).stdout
        print(f"the machine's resolv.conf: {machine!r}", flush=True)
        own = host.read("/etc/hosts")
        for has_network in (False, True):
            for resolver, hosts in (("", own), (machine, own), (machine, "")):
                for device in ((), ("--device", DEVICE)):
                    host.write("/etc/resolv.conf", resolver)
                    host.write("/etc/hosts", hosts)
                    label = f"{'the machine' if has_network else 'its own'} network, "
                    label += (
                        f"{'the machine' if resolver else 'empty'} resolv.conf, {'own' if hosts else 'empty'} hosts, "
                    )
                    label += "GPU" if device else "no GPU"
                    look(host, args.slow, label, has_network=has_network, device=device)
    return 0


def look(host: TestHost, slow: float, label: str, *, has_network: bool, device: tuple[str, ...]) -> None:
    command = ["podman", "run", "--rm", *device, IMAGE, "true"]
    took = run(host, command, has_network=has_network)
    print(f"{took:7.2f} s  {label}", flush=True)
    if took > slow:
        traced = ["strace", "-f", "-ttt", "-s", "120", "-o", "/var/tmp/trace", *command]
        run(host, traced, has_network=has_network)
        for line in longest_waits(host.read("/var/tmp/trace")):
            print("           " + line, flush=True)


def run(host: TestHost, command: list[str], *, has_network: bool) -> float:
    began = time.monotonic()
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = host.popen(command, network=not has_network, **streams)
    _, errors = process.communicate(timeout=120)
    if process.returncode:
        print(f"    status {process.returncode}: {errors.strip()[-300:]}", flush=True)
    return time.monotonic() - began


def longest_waits(trace: str, count: int = 12) -> list[str]:
    """The calls after which a thread was silent longest, other than futex and poll waits of idle threads."""
    last: dict[str, tuple[float, str]] = {}
    gaps: list[tuple[float, str]] = []
    for line in trace.splitlines():
        found = TIMED.match(line)
        if not found:
            continue
        thread, moment, call = found[1], float(found[2]), found[3]
        if thread in last and not last[thread][1].startswith(
            ("futex", "epoll", "nanosleep", "<... futex", "<... epoll")
        ):
            gaps.append((moment - last[thread][0], f"{last[thread][1][:110]}  ->  {call[:60]}"))
        last[thread] = (moment, call)
    return [f"{gap:6.2f} s after {what}" for gap, what in sorted(gaps, reverse=True)[:count]]


if __name__ == "__main__":
    sys.exit(main())
