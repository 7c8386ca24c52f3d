"""Pods of containerd's ordinary handler, without a kubelet, for the NRI plugin: one pod and one container at a time.

What a test host needs for any pod is in cri_pod.py. Called by test_nri.py.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from containerd_integration.api.connection import Connection
from tests.engines import cri_pod
from tests.engines.prepared import SOFTWARE_DRIVER, SOFTWARE_STATE

if TYPE_CHECKING:
    from tests.hosts.host import TestHost

# As the kubelet asks: a process namespace for each container. The network is the host's, which needs no CNI.
NAMESPACES = {"network": 2, "pid": 1}
IMAGE = "localhost/vgpu-test:glibc"
CONFIGURATION = f"""\
{cri_pod.MAIN_CONFIG}
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
pod_annotations = ["vgpu.snapshot/*"]
container_annotations = ["vgpu.snapshot/*"]
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
BinaryName = "{cri_pod.LOW_LEVEL}"
"""


def prepare_cri(host: TestHost) -> None:
    """containerd with images for pods and nothing of vgpu-snapshot's in its configuration."""
    host.write(cri_pod.LOW_LEVEL, cri_pod.WITHOUT_RESOURCES, 0o755)
    host.write("/etc/containerd/config.toml", CONFIGURATION)
    host.start_containerd()
    host.write("/var/tmp/pause.tar", cri_pod.pause_archive(host))
    for path in ("/var/tmp/pause.tar", host.image_archive("glibc")):
        host.run(["ctr", "-n", "k8s.io", "image", "import", path])


class Pod:
    """One pod in the host's network, with at most one container."""

    def __init__(
        self, host: TestHost, name: str, *, handler: str = "", annotations: dict[str, str] | None = None
    ) -> None:
        self.host = host
        self.name = name
        self.config = {
            "metadata": {"name": name, "uid": name, "namespace": "default"},
            "annotations": annotations or {},
            "linux": {"security_context": {"namespace_options": NAMESPACES}},
        }
        self.connection = Connection(f"{host.root}/run/containerd/containerd.sock", "k8s.io")
        self.connection.__enter__()
        self.id = self.call("RunPodSandbox", config=self.config, runtime_handler=handler).pod_sandbox_id
        self.container = ""

    def call(self, method: str, **fields: object):
        return self.connection.call(cri_pod.RUNTIME, method, **fields)

    def create(self, *command: str, gpu: bool = True, annotations: dict[str, str] | None = None) -> str:
        """CreateContainer."""
        devices = [{"container_path": path, "host_path": path, "permissions": "rwm"} for path in GPU_DEVICES]
        mounts = [
            {
                "container_path": "/usr/lib/x86_64-linux-gnu/libcuda.so.1",
                "host_path": f"{SOFTWARE_DRIVER}/libcuda.so.1",
            },
            {"container_path": SOFTWARE_STATE, "host_path": SOFTWARE_STATE},
        ]
        config = {
            "metadata": {"name": "work"},
            "image": {"image": IMAGE},
            "command": list(command),
            "annotations": annotations or {},
            "linux": {"security_context": {"namespace_options": NAMESPACES}},
            **({"devices": devices, "mounts": mounts} if gpu else {}),
        }
        answer = self.call("CreateContainer", pod_sandbox_id=self.id, config=config, sandbox_config=self.config)
        self.container = answer.container_id
        return self.container

    def start(self, *command: str, **settings: object) -> Pod:
        """CreateContainer and StartContainer."""
        self.create(*command, **settings)
        self.call("StartContainer", container_id=self.container)
        return self

    def exec(self, *command: str) -> str:
        """ExecSync."""
        return self.call("ExecSync", container_id=self.container, cmd=list(command), timeout=10).stdout.decode()

    def wait_for_line(self, path: str, word: str, *, timeout: float = 20) -> str:
        """The text of a file in the container, once a word is in it."""
        ends = time.monotonic() + timeout
        while word not in (text := self.exec("cat", path)):
            assert time.monotonic() < ends, f"no {word!r} in {path} of {self.name}: {text[-200:]!r}"
            time.sleep(0.1)
        return text

    def remove(self) -> None:
        self.call("StopPodSandbox", pod_sandbox_id=self.id)
        self.call("RemovePodSandbox", pod_sandbox_id=self.id)
        self.connection.__exit__()


GPU_DEVICES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-uvm")
