"""A node without an engine: a real agent, and programs that run as its containers would, each in a cgroup of its own.

A program gets the preload and, in a mount namespace of its own, its control directory at /run/vgpu. Serves the benches of
staged mode, where an engine's archive would only add its own time; works on the real and on the software driver.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any, Self

from gpu_state.client import AgentClient
from tests.hosts import gpus
from vgpu_errors import AgentUnreachable

ROOT = pathlib.Path(__file__).resolve().parents[2]
ENTER = 'echo 0 >"$1/cgroup.procs"; shift; exec unshare -m sh -c \'mount --make-rprivate / && mkdir -p /run/vgpu && mount --bind "$0" /run/vgpu && exec "$@"\' "$@"'


class BareNode:
    """Agent, state folder and cgroups; a context manager."""

    def __init__(
        self, *, mode: str = "staged", software_memory: int = 512 << 20, software_devices: int = 1, reserve: str = "0"
    ) -> None:
        self.mode = mode
        self.reserve = reserve
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="vgpu-bare-"))
        self.run_dir = self.folder / "run"
        self.preload = built_preload()
        self.programs: list[Program] = []
        self.environment = dict(os.environ) | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
        if not gpus.is_real():
            self.environment |= software_environment(self.folder, software_memory, software_devices)

    def __enter__(self) -> Self:
        for name in ("state", "containers"):
            (self.run_dir / name).mkdir(parents=True)
        command = [sys.executable, "-m", "gpu_state.agent", "--foreground", "--state-dir", str(self.run_dir)]
        command += ["--staging-reserve", self.reserve]
        if gpus.is_real():
            command += ["--driver-dir", gpus.setup_options()[1]]
        else:
            command += ["--driver-dir", str(self.environment["LD_LIBRARY_PATH"])]
        log = (self.folder / "agent.log").open("ab")
        self.agent = subprocess.Popen(command, env=self.environment, cwd=ROOT, stdout=log, stderr=log)
        self.client = self.connect()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            print((self.folder / "agent.log").read_text()[-6000:], flush=True)
        for program in self.programs:
            program.end()
        self.client.close()
        self.agent.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.agent.wait(timeout=30)
        self.agent.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def connect(self) -> AgentClient:
        ends = time.monotonic() + 20
        while True:
            try:
                return AgentClient.connect(str(self.run_dir / "agent.sock"), start_on_demand=False)
            except AgentUnreachable:
                if time.monotonic() > ends or self.agent.poll() is not None:
                    print((self.folder / "agent.log").read_text()[-6000:], flush=True)
                    raise
                time.sleep(0.05)

    def wait_for_reserve(self, timeout: float = 300) -> float:
        """Until the agent's spare staging worker is ready; how long that took."""
        began = time.monotonic()
        while True:
            found = self.request("facts", {})["staging_reserve"]
            if found is None or found["problem"] or time.monotonic() - began > timeout:
                message = f"the reserve is not ready: {found}"
                raise AssertionError(message)
            if found["state"] == "ready":
                return time.monotonic() - began
            time.sleep(0.2)

    def start(
        self, name: str, command: list[str], *, has_preload: bool = True, says: pathlib.Path | None = None
    ) -> Program:
        """`says` takes the program's own output, which otherwise goes where this process's goes."""
        program = Program(self, name, command, has_preload=has_preload, says=says)
        self.programs.append(program)
        return program

    def request(self, verb: str, args: dict[str, Any], deadline_s: float = 180) -> dict[str, Any]:
        return self.client.request(verb, {"deadline_s": deadline_s, **args}, deadline_s=deadline_s + 60)


class Program:
    """One program as one container."""

    def __init__(
        self, node: BareNode, name: str, command: list[str], *, has_preload: bool, says: pathlib.Path | None = None
    ) -> None:
        self.node, self.id = node, f"{name}-{secrets.token_hex(3)}"
        self.out = node.folder / f"{self.id}.out"
        self.cgroup = f"/vgpu-bench-{self.id}"
        self.cgroup_folder = pathlib.Path("/sys/fs/cgroup", *cgroup2_prefix(), self.cgroup[1:])
        self.cgroup_folder.mkdir()
        control = node.run_dir / "containers" / self.id
        control.mkdir()
        (control / "mode").write_text(node.mode)
        environment = node.environment | ({"LD_PRELOAD": str(node.preload)} if has_preload else {})
        words = [word.replace("@OUT@", str(self.out)) for word in command]
        inner = ["env", *(f"{k}={environment[k]}" for k in ("LD_PRELOAD",) if k in environment), *words]
        with contextlib.ExitStack() as stack:
            output = None if says is None else stack.enter_context(says.open("ab"))
            self.process = subprocess.Popen(
                ["sh", "-c", ENTER, "sh", str(self.cgroup_folder), str(control), *inner],
                env=node.environment, cwd=ROOT, start_new_session=True, stdout=output, stderr=output,
            )  # fmt: skip
        self.note_state()

    def note_state(self) -> None:
        """What the shim would have written after `create`."""
        state = {
            "id": self.id, "bundle": str(self.node.folder), "pid": self.process.pid, "cgroup": self.cgroup, "root": None,
            "runtime": "none", "engine": "unknown", "created": int(time.time()), "preload_build_id": self.node.preload.parent.name,
            "preload_libc": "glibc", "last_checkpoint": None, "leave_running": None,
        }  # fmt: skip
        partial = self.node.run_dir / "state" / f".{self.id}"
        partial.write_text(json.dumps(state))
        partial.rename(self.node.run_dir / "state" / f"{self.id}.json")

    @property
    def names(self) -> dict[str, str]:
        return {"container": self.id, "cgroup": self.cgroup}

    def lines(self) -> list[dict[str, Any]]:
        text = self.out.read_text() if self.out.exists() else ""
        return [json.loads(line) for line in text.splitlines() if line.endswith("}")]

    def wait_for(self, is_there: object, what: str, timeout: float = 180) -> list[dict[str, Any]]:
        ends = time.monotonic() + timeout
        while True:
            lines = self.lines()
            if is_there(lines):
                return lines
            if self.process.poll() is not None or time.monotonic() > ends:
                message = f"{self.id}: {what} did not come (status {self.process.poll()}), last lines {lines[-3:]}"
                raise AssertionError(message)
            time.sleep(0.02)

    def pids(self) -> list[int]:
        """Every process that is in the container now."""
        listed = self.cgroup_folder / "cgroup.procs"
        return [int(word) for word in listed.read_text().split()] if listed.exists() else []

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for pid in self.pids():  # one that made a session of its own
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(timeout=60)
        with contextlib.suppress(OSError):
            (self.node.run_dir / "state" / f"{self.id}.json").unlink()
        for _ in range(50 if self.cgroup_folder.exists() else 0):  # it may have been ended before
            with contextlib.suppress(OSError):
                self.cgroup_folder.rmdir()
                break
            time.sleep(0.1)


def built_preload() -> pathlib.Path:
    """The preload as VGPU_PRELOAD names it (carried to this machine), or built now."""
    folder = os.environ.get("VGPU_PRELOAD")
    if folder is None:
        from vgpu_preload import build

        folder = str(ROOT / "build" / "preload")
        build.build(pathlib.Path(folder))
    root = pathlib.Path(folder, "glibc").resolve()
    return root / (root / "current").read_text().strip() / "libvgpu.so"


def software_environment(folder: pathlib.Path, memory: int, count: int = 1) -> dict[str, str]:
    from tests.hosts import software_gpu
    from tests.software_gpu import devices

    nodes = folder / "dev"
    nodes.mkdir()
    for name in ("nvidiactl", "nvidia-uvm", *(f"nvidia{number}" for number in range(count))):
        (nodes / name).touch()
    devices.make_devices(folder / "gpus", count, memory, salt="bare")
    return {
        "LD_LIBRARY_PATH": str(software_gpu.built("glibc")),
        "SOFTWARE_GPU_DIR": str(folder / "gpus"),
        "SOFTWARE_GPU_NODE_DIR": str(nodes),
        "VGPU_DEVICE_PREFIX": str(nodes / "nvidia"),
    }


def cgroup2_prefix() -> tuple[str, ...]:
    """("unified",) on a machine that has both cgroup versions."""
    return () if pathlib.Path("/sys/fs/cgroup/cgroup.controllers").exists() else ("unified",)
