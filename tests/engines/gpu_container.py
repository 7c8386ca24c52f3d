"""A GPU container of the tests: starts the counter program under podman, follows its steps, names what went wrong.

The program checks its own GPU memory at every step (tests/software_gpu/programs/counter.c), so "the steps go on"
means "the memory is right". Called by the engine tests and by the demo; works on the software and the real driver.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.hosts.host import TestHost

RUNTIME = "vgpu-runtime"
OUT = "/tmp/steps"
DEVICES = "vgpu.snapshot/gpu"
DEVICE = f"{DEVICES}=all"
STEP = re.compile(r"(?:process (?P<process>\d+) )?step (?P<step>\d+) .*\bok$")


class GpuContainer:
    """One container on one host."""

    def __init__(self, host: TestHost, name: str = "counter", *, out: str = OUT) -> None:
        self.host = host
        self.name = name
        self.out = out

    def start(
        self,
        image: str,
        *,
        mib: int = 16,
        processes: int = 1,
        interval_ms: int = 50,
        options: Sequence[str] = (),
        program: Sequence[str] = (),
        runtime: str = RUNTIME,
        device: str = "all",
    ) -> GpuContainer:
        """`podman run -d` with the counter in it, or with another program that writes such steps."""
        counter = ["counter", "--out", self.out, "--mib", str(mib), "--interval", str(interval_ms)]
        if processes > 1:
            counter += ["--processes", str(processes)]
        run = ["podman", "run", "-d", "--runtime", runtime, "--device", f"{DEVICES}={device}", "--name", self.name]
        self.host.run([*run, *options, image, *(program or counter)], timeout=90)
        return self

    def lines(self) -> list[str]:
        """What the program has written so far."""
        done = self.host.run(["podman", "exec", self.name, "cat", self.out], check=False)
        return [line for line in done.stdout.splitlines() if line.strip()]

    def step(self) -> int:
        """The last step, after every line was looked at: a wrong byte is a failure."""
        lines = self.lines()
        wrong = [line for line in lines if not STEP.search(line)]
        assert not wrong, f"{self.name} on {self.host.name} found wrong memory: {wrong[:3]}"
        return max((int(STEP.search(line)["step"]) for line in lines), default=0)

    def wait_for_step(self, number: int, *, timeout: float = 30) -> int:
        """Wait until the program has reached a step; its logs are in the failure."""
        ends = time.monotonic() + timeout
        while (step := self.step()) < number:
            if time.monotonic() > ends:
                logs = self.host.run(["podman", "logs", self.name], check=False)
                message = f"{self.name} on {self.host.name} is at step {step}, not {number}: {logs.stdout}{logs.stderr}"
                raise AssertionError(message)
            time.sleep(0.1)
        return step

    def goes_on(self, after: int, *, steps: int = 3) -> int:
        """The program has gone on from where it was and not from the beginning."""
        now = self.wait_for_step(after + steps)
        first = int(STEP.search(self.lines()[0])["step"])
        assert first == 1, f"{self.name} started anew: its first line is step {first}"
        return now

    def podman(self, *words: str, check: bool = True, timeout: float = 120):
        """`podman container VERB ... NAME`."""
        return self.host.run(["podman", "container", *words, self.name], check=check, timeout=timeout)

    def export(self, path: str, *options: str, check: bool = True):
        """`podman container checkpoint --export`."""
        return self.podman("checkpoint", "--export", path, *options, check=check)

    def remove(self) -> None:
        self.host.run(["podman", "rm", "-f", "-t", "0", self.name])


def restore(host: TestHost, path: str, *options: str, name: str = "counter", check: bool = True):
    """`podman container restore --import`; returns the container, or the failed command where check is False."""
    done = host.run(["podman", "container", "restore", "--import", path, *options], check=check, timeout=120)
    return GpuContainer(host, name) if check else done
