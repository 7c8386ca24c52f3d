"""A pod and a container in it, driven over the CRI as the kubelet drives containerd; with what a test host needs for it.

The pod shares the host's network, so no CNI plugin is asked. The container's image comes from a registry on the node
itself, because containerd restores a checkpoint only of an image that it can pull by digest. Called by test_cri*.py.
"""

from __future__ import annotations

import io
import json
import pathlib
import tarfile
import time

from containerd_integration.api.connection import Connection
from containerd_integration.api.wire import message
from tests.engines.gpu_container import STEP
from tests.engines.prepared import SOFTWARE_DRIVER, SOFTWARE_STATE

HANDLER = "vgpu-runtime"
OUT = "/tmp/steps"
WITHOUT_GPU = ["sh", "-c", f"n=0; while :; do n=$((n+1)); echo step $n - ok >> {OUT}; sleep 0.05; done"]
IMAGE = "localhost:5000/vgpu-test:glibc"
PAUSE = "localhost/vgpu-test-pause:1"
RUNTIME, IMAGES = "runtime.v1.RuntimeService", "runtime.v1.ImageService"
HOST_NETWORK = 2
LOW_LEVEL = "/usr/local/bin/runc-without-resources"

# The machine's cgroup v2 has no controller but hugetlb, and the CRI plugin asks for more whatever the pod says.
WITHOUT_RESOURCES = """\
#!/usr/bin/python3 -IS
import json, os, sys
words = sys.argv[1:]
if {"create", "restore"} & set(words) and "--bundle" in words:
    path = os.path.join(words[words.index("--bundle") + 1], "config.json")
    with open(path) as file:
        spec = json.load(file)
    spec["linux"].get("resources", {}).pop("cpu", None)
    for key in ("memory", "pids", "unified", "hugepageLimits"):
        spec["linux"].get("resources", {}).pop(key, None)
    with open(path, "w") as file:
        json.dump(spec, file)
os.execv("/usr/sbin/runc", ["/usr/sbin/runc", *words])
"""
# What the administrator of such a machine would have in the main file.
MAIN_CONFIG = f"""\
version = 3
imports = ["/etc/containerd/conf.d/*.toml"]
[plugins.'io.containerd.cri.v1.images'.pinned_images]
sandbox = '{PAUSE}'
[plugins.'io.containerd.cri.v1.runtime']
disable_apparmor = true
disable_hugetlb_controller = true
restrict_oom_score_adj = true
"""


def prepare_cri(node) -> None:
    """containerd with our handler, a pause image, the test image in a registry on the node."""
    options = ["--driver-dir", SOFTWARE_DRIVER, "--cdi-mount", f"{SOFTWARE_STATE}:{SOFTWARE_STATE}:rw"]
    node.write(LOW_LEVEL, WITHOUT_RESOURCES, 0o755)
    node.write("/etc/containerd/config.toml", MAIN_CONFIG)
    node.run(["vgpu", "setup", "containerd", *options], timeout=120)
    node.start_containerd()
    node.start_registry()
    node.write("/var/tmp/pause.tar", pause_archive(node))
    node.run(["ctr", "-n", "k8s.io", "image", "import", "/var/tmp/pause.tar"])
    node.run(["ctr", "image", "import", node.image_archive("glibc")])
    node.run(["ctr", "image", "tag", "--force", "localhost/vgpu-test:glibc", IMAGE])
    node.run(["ctr", "image", "push", "--plain-http", IMAGE])
    with connection(node) as cri:
        cri.call(IMAGES, "PullImage", image={"image": IMAGE})


def pause_archive(node) -> bytes:
    """An image whose program sleeps, made of the image without libraries."""
    data = pathlib.Path(node.root, node.image_archive("plain").lstrip("/")).read_bytes()
    out = io.BytesIO()
    with tarfile.open(fileobj=io.BytesIO(data)) as old, tarfile.open(fileobj=out, mode="w") as new:
        for entry in old:
            content = old.extractfile(entry).read()
            if entry.name == "manifest.json":
                manifest = json.loads(content)
                manifest[0]["RepoTags"] = [PAUSE]
                content = json.dumps(manifest).encode()
            elif entry.name.endswith(".json"):
                config = json.loads(content)
                config["config"]["Cmd"] = ["/bin/sleep", "1000000"]
                content = json.dumps(config).encode()
            entry.size = len(content)
            new.addfile(entry, io.BytesIO(content))
    return out.getvalue()


def connection(node) -> Connection:
    """The node's containerd, reached from outside."""
    return Connection(str(node.root / "run/containerd/containerd.sock"), "k8s.io")


class Pod:
    """One pod with one container."""

    def __init__(self, node, cri: Connection, name: str = "trainer", *, gpu: bool = True) -> None:
        self.node, self.cri, self.name, self.has_gpu = node, cri, name, gpu
        self.id = self.container = ""

    def call(self, verb: str, deadline_s: float = 120, **fields):
        """A call of the runtime service."""
        return self.cri.call(RUNTIME, verb, deadline_s=deadline_s, **fields)

    def sandbox_config(self):
        """As the kubelet describes a pod."""
        return message("runtime.v1.PodSandboxConfig")(
            metadata={"name": self.name, "uid": f"uid-{self.name}", "namespace": "default"},
            log_directory=f"/var/log/pods/{self.name}",
            linux={"security_context": {"namespace_options": {"network": HOST_NETWORK}}},
        )

    def container_config(self, image: str):
        """As the kubelet describes a container; `image` is an archive's path or a checkpoint image for a restore."""
        return message("runtime.v1.ContainerConfig")(
            metadata={"name": "counter"},
            image={"image": image},
            command=["counter", "--out", OUT, "--mib", "8", "--interval", "50"] if self.has_gpu else WITHOUT_GPU,
            labels={"io.kubernetes.container.name": "counter", "io.kubernetes.pod.name": self.name},
            log_path="counter.log",
            linux={"security_context": {"namespace_options": {"network": HOST_NETWORK}}},
            CDI_devices=[{"name": "vgpu.snapshot/gpu=all"}] if self.has_gpu else [],
        )

    def run(self, image: str = IMAGE) -> Pod:
        """Sandbox, container, start."""
        self.node.run(["mkdir", "-p", f"/var/log/pods/{self.name}"])
        config = self.sandbox_config()
        self.id = self.call("RunPodSandbox", config=config, runtime_handler=HANDLER).pod_sandbox_id
        created = self.call(
            "CreateContainer", pod_sandbox_id=self.id, config=self.container_config(image), sandbox_config=config
        )
        self.container = created.container_id
        self.call("StartContainer", container_id=self.container)
        return self

    def checkpoint(self, path: str) -> None:
        """What the kubelet's checkpoint API ends in."""
        self.call("CheckpointContainer", container_id=self.container, location=path, timeout=120)

    def exec(self, *command: str) -> str:
        """A command in the container."""
        return self.call("ExecSync", container_id=self.container, cmd=command, timeout=30).stdout.decode()

    def step(self) -> int:
        """The last step; a wrong byte is a failure."""
        lines = [line for line in self.exec("cat", OUT).splitlines() if line.strip()]
        wrong = [line for line in lines if not STEP.search(line)]
        assert not wrong, f"{self.name} found wrong memory: {wrong[:3]}"
        return max((int(STEP.search(line)["step"]) for line in lines), default=0)

    def wait_for_step(self, number: int, *, timeout: float = 30) -> int:
        """Wait until the program has reached a step."""
        ends = time.monotonic() + timeout
        while (step := self.step()) < number:
            assert time.monotonic() < ends, f"{self.name} is at step {step}, not {number}"
            time.sleep(0.05)
        return step

    def goes_on(self, after: int) -> int:
        """The program has gone on from where it was and not from the beginning."""
        now = self.wait_for_step(after + 3)
        assert int(STEP.search(self.exec("head", "-1", OUT))["step"]) == 1, f"{self.name} started anew"
        return now

    def remove(self) -> None:
        """Stop and remove everything."""
        if self.id:
            self.call("StopPodSandbox", pod_sandbox_id=self.id)
            self.call("RemovePodSandbox", pod_sandbox_id=self.id)
