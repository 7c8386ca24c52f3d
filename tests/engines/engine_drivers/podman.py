"""podman with runc and with crun: `podman container checkpoint` and `restore`, in place and through an archive."""

from __future__ import annotations

import contextlib
import json
import pathlib

from tests.engines.engine_drivers.base import CRUN, IMAGE, PROGRAM, RUNC, EngineDriver, EngineRefused, first_number
from tests.engines.gpu_container import DEVICE, RUNTIME


class Podman(EngineDriver):
    """Both low-level runtimes; `prepare` has run `vgpu setup podman`."""

    row = "testing"

    def set_up(self) -> None:
        self.host.image("glibc")

    def start(self, name: str) -> None:
        self.run("podman", "run", "-d", "--runtime", RUNTIME, "--device", DEVICE, "--name", name, IMAGE, *PROGRAM)

    def exec(self, name: str, *command: str) -> str:
        return self.host.run(["podman", "exec", name, *command], check=False).stdout

    def is_running(self, name: str) -> bool:
        done = self.host.run(["podman", "inspect", "-f", "{{.State.Status}}", name], check=False)
        return done.stdout.strip() == "running"

    def checkpoint_running(self, name: str) -> None:
        self.run("podman", "container", "checkpoint", "--leave-running", name)

    def freeze(self, name: str) -> None:
        self.run("podman", "container", "checkpoint", name)

    def bring_back(self, name: str) -> None:
        self.run("podman", "container", "restore", name)

    def frozen_pages(self, name: str) -> tuple[pathlib.Path, int]:
        identifier = json.loads(self.run("podman", "inspect", name))[0]["Id"]
        folder = f"var/lib/containers/storage/overlay-containers/{identifier}/userdata/checkpoint"
        return pathlib.Path(self.host.root, folder, "pages-1.img"), 4096

    def export(self, name: str) -> str:
        path = f"/var/tmp/{name}.tar"
        self.run("podman", "container", "checkpoint", "--compress", "none", "--export", path, name)
        return path

    def bring_in(self, path: str, name: str) -> None:
        self.run("podman", "container", "restore", "--import", path, "--name", name)

    def remove(self, name: str) -> None:
        with contextlib.suppress(EngineRefused):
            self.run("podman", "rm", "-f", "-t", "0", name)

    def versions(self) -> dict[str, str]:
        return {"podman": first_number(self.run("podman", "--version")), **self.low_level_version()}


class PodmanRunc(Podman):
    label = "podman, runc"
    low_level = RUNC


class PodmanCrun(Podman):
    label = "podman, crun"
    low_level = CRUN
