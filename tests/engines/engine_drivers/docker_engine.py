"""Docker Engine, driven through the `docker` package; its checkpoint calls are in the API and not in the package."""

from __future__ import annotations

import contextlib
import itertools
import json
import pathlib
import time
from types import MappingProxyType

import docker
import docker.errors
import requests

from tests.engines.engine_drivers.base import (
    IMAGE,
    PROGRAM,
    RUNC,
    SETUP_OPTIONS,
    EngineDriver,
    EngineRefused,
    first_number,
)
from tests.engines.prepared import LOG, configure

DEVICE = "vgpu.snapshot/gpu=all"
# A test host has no firewall to manage and no bridge; containers share its network.
ADMINISTRATORS = {"bridge": "none", "iptables": False, "ip6tables": False, "log-driver": "json-file"}
ROOT = "/var/lib/docker"
API_DEADLINE_S = 60
LEFT_OVERS_DEADLINE_S = 15


class DockerEngine(EngineDriver):
    """dockerd with its own containerd, as Debian ships both."""

    label = "Docker"
    row = "docker"
    low_level = RUNC
    keeps_files = False
    gaps = MappingProxyType(
        {
            "files_come_along": (
                "its first line is step",
                "Docker's checkpoint holds processes and their memory, not the files that the container wrote.",
            )
        }
    )

    def __init__(self, host) -> None:
        super().__init__(host)
        self.client: docker.DockerClient | None = None
        self._numbers = itertools.count(1)
        self._latest: dict[str, str] = {}

    def set_up(self) -> None:
        self.install()
        self.start_daemon()
        self.run("docker", "load", "-q", "-i", self.host.image_archive("glibc"))

    def install(self) -> None:
        """What an administrator does; daemon.json has keys of the administrator's own."""
        self.host.install_software_gpu(memory=256 << 20)
        self.host.install_project()
        self.host.write("/etc/docker/daemon.json", json.dumps(ADMINISTRATORS))
        self.run("vgpu", "setup", "docker", *SETUP_OPTIONS, "--low-level-runtime", RUNC)
        self.host.write(LOG, "")
        configure(self.host, log=LOG)

    def start_daemon(self) -> None:
        self.host.run(["sh", "-c", f"mkdir -p {ROOT} && mount -t tmpfs tmpfs {ROOT}"])  # overlay on overlay is refused
        self.host.daemon(["dockerd"], log="/var/log/dockerd.log")
        self.host.wait_for(["docker", "version"], timeout=30)
        socket = f"unix://{self.host.root}/run/docker.sock"
        self.client = docker.DockerClient(base_url=socket, timeout=API_DEADLINE_S, version="auto")

    def start(self, name: str) -> None:
        self._container_of("run", name)

    def exec(self, name: str, *command: str) -> str:
        try:
            return self.client.containers.get(name).exec_run(list(command), stderr=False).output.decode()
        except docker.errors.APIError:
            return ""

    def is_running(self, name: str) -> bool:
        with contextlib.suppress(docker.errors.NotFound):
            return self.client.containers.get(name).status == "running"
        return False

    def checkpoint(self, name: str, checkpoint: str, *, leave_running: bool, folder: str | None = None) -> None:
        """POST /containers/NAME/checkpoints."""
        asked = {"CheckpointID": checkpoint, "Exit": not leave_running, **({"CheckpointDir": folder} if folder else {})}
        self._post(f"/containers/{name}/checkpoints", json=asked)

    def start_from(self, name: str, checkpoint: str, **words: str) -> None:
        """POST /containers/NAME/start?checkpoint=..., again while Docker stumbles over its own left-overs.

        containerd forgets the content of a checkpoint a moment after dockerd has copied it out; a start before that
        writes the same content again and takes "already exists" for a failure.
        """
        ends = time.monotonic() + LEFT_OVERS_DEADLINE_S
        while True:
            try:
                self._post(f"/containers/{name}/start", params={"checkpoint": checkpoint, **words})
            except EngineRefused as refusal:
                if "already exists" not in str(refusal) or time.monotonic() > ends:
                    raise
                time.sleep(0.2)
            else:
                return

    def checkpoints(self, name: str) -> list[str]:
        """GET /containers/NAME/checkpoints."""
        return sorted(item["Name"] for item in self._get(f"/containers/{name}/checkpoints"))

    def checkpoint_running(self, name: str) -> None:
        self.checkpoint(name, f"running{next(self._numbers)}", leave_running=True)

    def freeze(self, name: str) -> None:
        self._latest[name] = f"frozen{next(self._numbers)}"
        self.checkpoint(name, self._latest[name], leave_running=False)

    def bring_back(self, name: str) -> None:
        self.start_from(name, self._latest[name])

    def folder(self, name: str) -> str:
        """Where dockerd keeps the container's checkpoints, inside the host."""
        return f"{ROOT}/containers/{self.client.containers.get(name).id}/checkpoints"

    def frozen_pages(self, name: str) -> tuple[pathlib.Path, int]:
        inside = f"{self.folder(name)}/{self._latest[name]}/pages-1.img"
        return pathlib.Path(self.host.root, inside.lstrip("/")), 4096

    def export(self, name: str) -> str:
        """Docker has no export of checkpoints: the folder is taken as it lies."""
        self.freeze(name)
        path = f"/var/tmp/{name}.tar"
        self.host.run(["tar", "-C", f"{self.folder(name)}/{self._latest[name]}", "-cf", path, "."])
        return path

    def bring_in(self, path: str, name: str) -> None:
        """`docker create` from the same image, the folder in its place, `docker start --checkpoint`."""
        self._container_of("create", name)
        target = f"{self.folder(name)}/moved"
        self.host.run(["sh", "-c", f"mkdir -p -m 0700 {target} && tar -C {target} -xf {path}"])
        self.start_from(name, "moved")

    def remove(self, name: str) -> None:
        with contextlib.suppress(docker.errors.NotFound):
            self.client.containers.get(name).remove(force=True)

    def versions(self) -> dict[str, str]:
        found = {part["Name"]: part["Version"] for part in self.client.version()["Components"]}
        containerd = first_number(self.run("containerd", "--version"))
        return {"docker": first_number(found["Engine"]), "containerd": containerd, **self.low_level_version()}

    def _container_of(self, verb: str, name: str, **settings: object) -> None:
        devices = docker.types.DeviceRequest(driver="cdi", device_ids=[DEVICE])
        make = getattr(self.client.containers, verb)
        options = {"detach": True} if verb == "run" else {}
        try:
            make(
                IMAGE,
                list(PROGRAM),
                name=name,
                runtime="vgpu-runtime",
                network_mode="host",
                device_requests=[devices],
                **options,
                **settings,
            )
        except docker.errors.APIError as error:
            raise EngineRefused(error.explanation) from error

    def _post(self, path: str, **arguments: object) -> None:
        self._checked(self.client.api._post(self.client.api._url(path), **arguments))

    def _get(self, path: str) -> list[dict]:
        return self._checked(self.client.api._get(self.client.api._url(path))).json() or []

    def _checked(self, answer: requests.Response) -> requests.Response:
        if answer.status_code >= 400:
            raise EngineRefused(answer.json()["message"])
        return answer
