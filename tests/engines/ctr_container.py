"""One container under `ctr` in a test host; its steps are read through `ctr task exec`. Called by the containerd tests."""

from __future__ import annotations

import pathlib
import time

from tests.engines.gpu_container import STEP
from tests.engines.prepared import SOFTWARE_DRIVER, SOFTWARE_STATE

IMAGE = "localhost/vgpu-test:glibc"
RUNC = "/usr/sbin/runc"
OUT = "/tmp/steps"


class CtrContainer:
    """One container under `ctr`; its steps are read through `ctr task exec`."""

    def __init__(self, node, name: str, *, namespace: str = "default") -> None:
        self.node = node
        self.name = name
        self.namespace = namespace
        self._execs = 0

    def ctr(self, *words: str, check: bool = True, timeout: float = 90):
        """`ctr` in the container's namespace."""
        return self.node.run(["ctr", "-n", self.namespace, *words], check=check, timeout=timeout)

    def start(self, *options: str):
        devices = [word for name in ("nvidia0", "nvidiactl", "nvidia-uvm") for word in ("--device", f"/dev/{name}")]
        library = f"{SOFTWARE_DRIVER}/libcuda.so.1"
        mounts = [
            *("--mount", f"type=bind,src={library},dst=/usr/lib/x86_64-linux-gnu/libcuda.so.1,options=bind:ro"),
            *("--mount", f"type=bind,src={SOFTWARE_STATE},dst={SOFTWARE_STATE},options=bind:rw"),
        ]
        # The machine's cgroup v2 has no cpu controller, hence no shares.
        run = ["run", "-d", "--net-host", "--cpu-shares", "0", "--runc-binary", "/usr/bin/vgpu-runtime"]
        program = ["counter", "--out", OUT, "--mib", "8", "--interval", "50"]
        self.ctr(*run, *devices, *mounts, *options, IMAGE, self.name, *program)
        return self

    def exec(self, *command: str, check: bool = True):
        self._execs += 1
        return self.ctr("task", "exec", "--exec-id", f"exec{self._execs}", self.name, *command, check=check)

    def step(self) -> int:
        lines = [line for line in self.exec("cat", OUT, check=False).stdout.splitlines() if line.strip()]
        wrong = [line for line in lines if not STEP.search(line)]
        assert not wrong, f"{self.name} found wrong memory: {wrong[:3]}"
        return max((int(STEP.search(line)["step"]) for line in lines), default=0)

    def wait_for_step(self, number: int, *, timeout: float = 30) -> int:
        ends = time.monotonic() + timeout
        while (step := self.step()) < number:
            assert time.monotonic() < ends, f"{self.name} is at step {step}, not {number}"
            time.sleep(0.05)
        return step

    def goes_on(self, after: int) -> int:
        now = self.wait_for_step(after + 3)
        assert int(STEP.search(self.exec("head", "-1", OUT).stdout)["step"]) == 1, f"{self.name} started anew"
        return now

    def task(self, verb: str, *words: str, check: bool = True):
        return self.ctr("task", verb, *words, self.name, check=check)

    def listed(self) -> list[str]:
        """Name, pid and status as `ctr task ls` has them."""
        lines = [line.split() for line in self.ctr("task", "ls").stdout.splitlines()]
        return next((words for words in lines if words[0] == self.name), [self.name, "0", "GONE"])

    def status(self) -> str:
        return self.listed()[-1]

    def is_frozen(self) -> bool:
        """By its cgroup of version 2, whatever containerd says."""
        cgroup = self.node.run(["grep", "^0::", f"/proc/{self.listed()[1]}/cgroup"]).stdout.strip()[len("0::/") :]
        return "frozen 1" in pathlib.Path(self.node.root, "sys/fs/cgroup", cgroup, "cgroup.events").read_text()

    def remove(self) -> None:
        self.task("kill", "-s", "KILL", check=False)
        ends = time.monotonic() + 10
        while self.status() not in ("STOPPED", "GONE") and time.monotonic() < ends:
            time.sleep(0.05)
        self.task("rm", check=False)
        self.ctr("container", "rm", self.name, check=False)
