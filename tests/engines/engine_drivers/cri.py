"""containerd's CRI plugin, driven as the kubelet drives it: CheckpointContainer, and a pod whose image is the archive."""

from __future__ import annotations

import itertools
import pathlib
import tarfile
from typing import TYPE_CHECKING

from tests.engines import cri_pod
from tests.engines.engine_drivers.base import EngineDriver, EngineRefused, first_number
from vgpu_errors import VgpuError

if TYPE_CHECKING:
    from containerd_integration.api.connection import Connection

CONTAINER_RUNNING = 1
CHECKPOINTS = "/var/lib/kubelet/checkpoints"


class Cri(EngineDriver):
    """Pods of the handler `vgpu-runtime`; the kubelet's part is done here."""

    label = "CRI, containerd 2.1"
    row = "testing"
    host_group = "cri"
    low_level = cri_pod.LOW_LEVEL

    def __init__(self, host) -> None:
        super().__init__(host)
        self.connection: Connection | None = None
        self._pods: dict[str, cri_pod.Pod] = {}
        self._archives: dict[str, str] = {}
        self._numbers = itertools.count(1)

    def set_up(self) -> None:
        cri_pod.prepare_cri(self.host)
        self.host.run(["mkdir", "-p", CHECKPOINTS])
        self.connection = cri_pod.connection(self.host)
        self.connection.__enter__()

    def start(self, name: str) -> None:
        self._run(name, cri_pod.IMAGE)

    def exec(self, name: str, *command: str) -> str:
        try:
            return self._pods[name].exec(*command)
        except VgpuError:
            return ""

    def is_running(self, name: str) -> bool:
        if name not in self._pods:
            return False
        pod = self._pods[name]
        return pod.call("ContainerStatus", container_id=pod.container).status.state == CONTAINER_RUNNING

    def checkpoint_running(self, name: str) -> None:
        self._checkpoint(name)

    def freeze(self, name: str) -> None:
        """The kubelet leaves the container running; who preempts a pod deletes it."""
        self._archives[name] = self._checkpoint(name)
        self._pods.pop(name).remove()

    def bring_back(self, name: str) -> None:
        self._run(name, self._archives[name])

    def frozen_pages(self, name: str) -> tuple[pathlib.Path, int]:
        path = pathlib.Path(self.host.root, self._archives[name].lstrip("/"))
        with tarfile.open(path) as tar:
            return path, tar.getmember("checkpoint/pages-1.img").offset_data + 4096

    def export(self, name: str) -> str:
        self.freeze(name)
        return self._archives[name]

    def bring_in(self, path: str, name: str) -> None:
        self._run(name, path)

    def remove(self, name: str) -> None:
        if name in self._pods:
            self._pods.pop(name).remove()

    def versions(self) -> dict[str, str]:
        return {"containerd": first_number(self.run("containerd", "--version")), **self.low_level_version()}

    def _run(self, name: str, image: str) -> None:
        """A pod; where its container cannot be made, the pod goes again, as a kubelet would have it."""
        pod = cri_pod.Pod(self.host, self.connection, name)
        try:
            pod.run(image)
        except VgpuError as error:
            pod.remove()
            raise EngineRefused(str(error)) from error
        self._pods[name] = pod

    def _checkpoint(self, name: str) -> str:
        path = f"{CHECKPOINTS}/checkpoint-{name}_default-counter-{next(self._numbers)}.tar"
        try:
            self._pods[name].checkpoint(path)
        except VgpuError as error:
            raise EngineRefused(str(error)) from error
        return path
