"""A node for one test: a real agent process, software GPUs, and GPU programs in a cgroup of their own.

Everything lies in one folder under /tmp with short paths, and everything started is ended. No result is a GPU result.
"""

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from gpu_state.client import AgentClient
from tests.software_gpu import build, devices
from vgpu_errors import AgentUnreachable

ROOT = Path(__file__).resolve().parents[2]
CONTAINER = "c0ffee"
STEP = re.compile(r"step (\d+) sum \S+ ok")


def cgroup2_mount():
    """Where a cgroup2 hierarchy can be written, None where the tests cannot run."""
    for mount in (Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup")):
        if os.geteuid() == 0 and (mount / "cgroup.procs").exists() and os.access(mount, os.W_OK):
            return mount
    return None


def wait_until(condition, what, timeout_s=10.0):
    """The first true value of `condition`."""
    ends_at = time.monotonic() + timeout_s
    while time.monotonic() < ends_at:
        if value := condition():
            return value
        time.sleep(0.02)
    raise AssertionError(f"{what} did not happen within {timeout_s} s")


class Counter:
    """A program that counts in GPU memory and ends when a byte is wrong."""

    def __init__(self, stage, name, *options, cgroup=None):
        self.out = stage.folder / f"{name}.out"
        arguments = ["--out", str(self.out), "--mib", "2", "--interval", "10", *options]
        self.process = stage.spawn([str(stage.driver / "counter"), *arguments], cgroup=cgroup)
        wait_until(lambda: self.step() > 0, f"first step of {name}")

    @property
    def pid(self):
        return self.process.pid

    def step(self):
        text = self.out.read_text() if self.out.exists() else ""
        assert "WRONG" not in text
        found = STEP.findall(text)
        return int(found[-1]) if found else 0

    def is_counting(self):
        before = self.step()
        with contextlib.suppress(AssertionError):
            return wait_until(lambda: self.step() > before + 2, "counting", 3.0)
        return False

    def stands_still(self):
        time.sleep(0.1)  # a step that had been computed may still be written
        before = self.step()
        time.sleep(0.25)
        return self.step() == before


def children_of(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class Group:
    """Processes that share device memory and wait for each other on the device; each checks what it gets."""

    def __init__(self, stage, name, *options, mode="ring", ranks=4, cgroup="", begun=True):
        self.stage, self.ranks = stage, ranks
        self.out = stage.folder / f"{name}.out"
        arguments = ["--out", str(self.out), "--mode", mode, "--ranks", str(ranks), "--interval", "5", *options]
        self.process = stage.spawn([str(stage.driver / "ring"), *arguments], cgroup=cgroup)
        self.members = set(range(1 if mode == "outlive" else 0, ranks - 1 if mode == "guests" else ranks))
        if begun:
            wait_until(lambda: self.members <= self.steps().keys(), f"the first step of each rank of {name}")

    @property
    def pids(self):
        """Those of the ranks that live, in the order in which they were started; a fork server stands between."""
        children = children_of(self.process.pid)
        return [pid for child in children for pid in children_of(child)] or children

    def steps(self, of="step"):
        """Rank -> its last step, or its last beat."""
        out = self.out if of == "step" else self.out.with_suffix(".out.beat")
        text = out.read_text() if out.exists() else ""
        assert "WRONG" not in text, next(line for line in text.splitlines() if "WRONG" in line)
        return {int(rank): int(step) for rank, step in re.findall(rf"rank (\d+) {of} (\d+) .*ok\n", text)}

    def goes_on(self, *, of="step", members=None, by=3, timeout_s=15.0):
        """Every rank gets further, and finds what it must."""
        before = self.steps(of)

        def is_further():
            now = self.steps(of)
            return all(now.get(rank, 0) >= before.get(rank, 0) + by for rank in members or self.members)

        return wait_until(is_further, f"{by} more of each rank's {of}s than {before}", timeout_s)

    def stands_still(self):
        time.sleep(0.1)  # a step that had been computed may still be written
        before = self.steps()
        time.sleep(0.15)
        return self.steps() == before

    def late(self):
        """What late ranks have done so far."""
        path = self.out.with_suffix(".out.late")
        return path.read_text().splitlines() if path.exists() else []

    def let_stalled_come(self):
        self.out.with_suffix(".out.go").touch()

    def end(self):
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(10)


class Stage:
    """The node."""

    def __init__(self, gpus=1, memory_mib=64):
        self.driver = build.build(ROOT / "build" / "software_gpu")
        self.folder = Path(tempfile.mkdtemp(prefix="vgpu-agent-"))
        self.folder.chmod(0o755)
        self.run_dir = self.folder / "run"
        self.socket = str(self.run_dir / "agent.sock")
        self.nodes = self.folder / "dev"
        self.nodes.mkdir()
        for name in ("nvidiactl", "nvidia-uvm", *(f"nvidia{n}" for n in range(gpus))):
            (self.nodes / name).touch(0o666)
        self.uuids = devices.make_devices(self.folder / "gpus", gpus, memory_mib << 20, salt="test")
        self.cgroup = f"/vgpu-test-{secrets.token_hex(4)}"
        self.cgroup_folder = cgroup2_mount() / self.cgroup[1:]
        self.cgroup_folder.mkdir()
        self.started = []
        self.agent = None
        self.clients = []

    @property
    def environment(self):
        return {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT),
            "LD_LIBRARY_PATH": str(self.driver),
            "SOFTWARE_GPU_DIR": str(self.folder / "gpus"),
            "SOFTWARE_GPU_NODE_DIR": str(self.nodes),
            "VGPU_DEVICE_PREFIX": str(self.nodes / "nvidia"),
        }

    def spawn(self, command, *, cgroup=None, **options):
        """Start a program, in the container's cgroup or one below it when that is named."""
        entry = None
        if cgroup is not None:
            folder = self.cgroup_folder / cgroup
            folder.mkdir(exist_ok=True)
            entry = str(folder / "cgroup.procs")
        # A shell that joins the cgroup and becomes the program; preexec_fn is not safe beside threads.
        join = f'echo 0 > "{entry}" && ' if entry else ""
        script = join + 'exec "$@"'
        process = subprocess.Popen(["sh", "-c", script, "sh", *command], env=self.environment, **options)
        self.started.append(process)
        return process

    def counter(self, name, *options, cgroup=""):
        return Counter(self, name, *options, cgroup=cgroup)

    def agent_command(self, *options):
        places = ["--state-dir", str(self.run_dir), "--driver-dir", str(self.driver)]
        return [sys.executable, "-m", "gpu_state.agent", *places, *options]

    def start_agent(self, *options):
        with (self.folder / "agent.log").open("a") as log:
            self.agent = self.spawn(self.agent_command(*options), stderr=log)
        wait_until(lambda: self._is_served() or self.agent.poll() is not None, "the agent's socket")
        assert self.agent.poll() is None, self.log()
        return self.agent

    def _is_served(self):
        with contextlib.suppress(AgentUnreachable):
            AgentClient.connect(self.socket, start_on_demand=False).close()
            return True
        return False  # no file yet, or that of an agent that was killed

    def log(self):
        return (self.folder / "agent.log").read_text()

    def connect(self):
        client = AgentClient.connect(self.socket, start_on_demand=False)
        self.clients.append(client)
        return client

    def ask(self, verb, **args):
        with AgentClient.connect(self.socket, start_on_demand=False) as client:
            return client.request(verb, args, deadline_s=20.0)

    def freeze(self, client, deadline_s=15.0, **more):
        args = {"container": CONTAINER, "cgroup": self.cgroup, "deadline_s": deadline_s, **more}
        return client.request("freeze", args, deadline_s=30.0)

    def inventory(self):
        return self.ask("inventory", container=CONTAINER, cgroup=self.cgroup)["processes"]

    def states(self):
        return {process["pid"]: process["state"] for process in self.inventory()}

    def write_state(self, container=CONTAINER, cgroup=None, **more):
        """What the runtime shim writes for a GPU container."""
        self.control_socket().parent.mkdir(parents=True, exist_ok=True)  # by the shim, where it injects the preload
        folder = self.run_dir / "state"
        partial = folder / f".{container}.partial"
        doc = {"id": container, "engine": "podman", "pid": 1, "cgroup": cgroup or self.cgroup, "created": 1}
        doc |= more
        partial.write_text(json.dumps(doc))
        partial.rename(folder / f"{container}.json")

    def control_socket(self):
        return self.run_dir / "containers" / CONTAINER / "agent.sock"

    def preload(self, delay_s=0.0):
        """A GPU process in the container that registers, lets go after `delay_s` when told, and comes back."""
        program = str(ROOT / "tests/unit/gpu_client.py")
        command = [sys.executable, program, "preload", str(self.control_socket()), str(delay_s)]
        process = self.spawn(command, cgroup="", stdout=subprocess.DEVNULL)
        wait_until(lambda: self.registered() == {process.pid}, "the registration")
        return process

    def registered(self):
        return {process["pid"] for process in self.inventory() if process["registered"]}

    def journal(self):
        return sorted(path.name for path in (self.run_dir / "journal").glob("*.json"))

    def close(self):
        for client in self.clients:
            client.close()
        if self.agent is not None and self.agent.poll() is None:
            self.agent.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.agent.wait(5)
        for process in self.started:
            process.kill()
            process.wait(5)
        for folder, _, _ in os.walk(self.cgroup_folder, topdown=False):
            self._remove_cgroup(Path(folder))
        shutil.rmtree(self.folder, ignore_errors=True)

    def _remove_cgroup(self, folder):
        (folder / "cgroup.kill").write_text("1")
        wait_until(lambda: not (folder / "cgroup.procs").read_text(), f"end of the processes in {folder}")
        folder.rmdir()
