"""What every engine's driver offers: start a GPU container, freeze it, bring it back, carry it to another host.

`step` and `goes_on` look at every line that the counter program wrote, so "goes on" means "the GPU memory is right".
A driver belongs to one host. Called by test_support_matrix.py and by the engines' own tests.
"""

from __future__ import annotations

import abc
import pathlib
import time
from typing import TYPE_CHECKING, ClassVar

from tests.engines.gpu_container import STEP
from tests.engines.prepared import SOFTWARE_DRIVER, SOFTWARE_STATE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.hosts.host import TestHost

IMAGE = "localhost/vgpu-test:glibc"
OUT = "/tmp/steps"
PROGRAM = ("counter", "--out", OUT, "--mib", "8", "--interval", "40")
RUNC = "/usr/sbin/runc"
CRUN = "/usr/bin/crun"
SETUP_OPTIONS = ("--driver-dir", SOFTWARE_DRIVER, "--cdi-mount", f"{SOFTWARE_STATE}:{SOFTWARE_STATE}:rw")
FREEZE_DEADLINE_S = 60
STEP_DEADLINE_S = 30


class EngineRefused(AssertionError):
    """The engine ended a command with a failure; the text is what its user reads."""


class EngineDriver(abc.ABC):
    """One engine on one host."""

    label: ClassVar[str]
    row: ClassVar[str]
    host_group: ClassVar[str] = ""
    """Engines of a row share hosts, but for those of another group."""
    low_level: ClassVar[str] = RUNC
    keeps_files: ClassVar[bool] = True
    """Whether a checkpoint that moves has the files that the container wrote."""
    gaps: ClassVar[Mapping[str, tuple[str, str]]] = {}
    """Scenario -> words of the failure that shows it, and the reason for people."""

    def __init__(self, host: TestHost) -> None:
        self.host = host

    # ---- what differs between engines -----------------------------------------------------------

    @abc.abstractmethod
    def set_up(self) -> None:
        """Start the engine where it is a daemon and put the image into it; vgpu-snapshot is installed already."""

    @abc.abstractmethod
    def start(self, name: str) -> None:
        """Run the counter with a GPU under vgpu-runtime."""

    @abc.abstractmethod
    def exec(self, name: str, *command: str) -> str:
        """Standard output of a command in the container; empty where it failed."""

    @abc.abstractmethod
    def is_running(self, name: str) -> bool:
        """As the engine has it."""

    @abc.abstractmethod
    def checkpoint_running(self, name: str) -> None:
        """A checkpoint beside which the container goes on."""

    @abc.abstractmethod
    def freeze(self, name: str) -> None:
        """A checkpoint that ends the container."""

    @abc.abstractmethod
    def bring_back(self, name: str) -> None:
        """Restore what `freeze` left, on this host; may be tried again after a refusal."""

    @abc.abstractmethod
    def frozen_pages(self, name: str) -> tuple[pathlib.Path, int]:
        """The file that holds the pages of the frozen container, from outside, and a place inside them."""

    @abc.abstractmethod
    def export(self, name: str) -> str:
        """A checkpoint that ends the container, as one file for another host; returns its path."""

    @abc.abstractmethod
    def bring_in(self, path: str, name: str) -> None:
        """Restore such a file on this host, under a name that may be new."""

    @abc.abstractmethod
    def remove(self, name: str) -> None:
        """End and forget the container and its checkpoints; one that is not there is fine."""

    @abc.abstractmethod
    def versions(self) -> dict[str, str]:
        """Program -> version, for the table."""

    # ---- the same for all -----------------------------------------------------------------------

    def lines(self, name: str) -> list[str]:
        return [line for line in self.exec(name, "cat", OUT).splitlines() if line.strip()]

    def step(self, name: str) -> int:
        """The last step, after every line was looked at: a wrong byte is a failure."""
        lines = self.lines(name)
        wrong = [line for line in lines if not STEP.search(line)]
        assert not wrong, f"{name} found wrong memory: {wrong[:3]}"
        return max((int(STEP.search(line)["step"]) for line in lines), default=0)

    def wait_for_step(self, name: str, number: int) -> int:
        ends = time.monotonic() + STEP_DEADLINE_S
        while (step := self.step(name)) < number:
            assert time.monotonic() < ends, f"{name} is at step {step}, not {number}"
            time.sleep(0.05)
        return step

    def goes_on(self, name: str, after: int, *, has_its_files: bool = True) -> int:
        """It has gone on from where it was and writes to the file it had; without its files it writes a new one."""
        now = self.wait_for_step(name, after + 3)
        first = int(STEP.search(self.lines(name)[0])["step"])
        assert (first == 1) == has_its_files, f"{name} on {self.host.name}: its first line is step {first}"
        return now

    def run(self, *command: str, timeout: float = FREEZE_DEADLINE_S) -> str:
        """A command of the engine's user; a failure raises what the user reads."""
        done = self.host.run(command, check=False, timeout=timeout)
        if done.returncode:
            raise EngineRefused(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout

    def is_frozen(self, pid: int) -> bool:
        """By the version 2 cgroup of a process, whatever the engine says."""
        cgroup = self.host.run(["grep", "^0::", f"/proc/{pid}/cgroup"]).stdout.strip()[len("0::/") :]
        return "frozen 1" in pathlib.Path(self.host.root, "sys/fs/cgroup", cgroup, "cgroup.events").read_text()

    def low_level_version(self) -> dict[str, str]:
        words = self.host.run([self.low_level, "--version"]).stdout.split()
        return {words[0]: words[2].partition("+")[0]}


def flip(path: pathlib.Path, at: int) -> None:
    """Change one bit of a file in place; a second call changes it back."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def first_number(text: str) -> str:
    """`5.8.6` of `podman version 5.8.6` and of the like."""
    import re

    return re.search(r"\d+\.\d+\.\d+", text)[0]


def kill_agent(host: TestHost) -> None:
    """The node's agent is killed where it runs; the next call that needs one starts another."""
    host.run(["pkill", "-KILL", "-f", "vgpu-agent"], check=False)


__all__ = ["IMAGE", "PROGRAM", "EngineDriver", "EngineRefused", "first_number", "flip", "kill_agent"]
