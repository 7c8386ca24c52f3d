"""containerd through `ctr`: `ctr task checkpoint`, `ctr container checkpoint` and `restore --live`, image export and import."""

from __future__ import annotations

import contextlib
import json
import pathlib
import tarfile

from tests.engines.engine_drivers.base import IMAGE, PROGRAM, RUNC, EngineDriver, EngineRefused, first_number
from tests.engines.prepared import SOFTWARE_DRIVER, SOFTWARE_STATE

BLOBS = "var/lib/containerd/io.containerd.content.v1.content/blobs/sha256"
CRIU_TAR = "application/vnd.containerd.container.criu.checkpoint.criu.tar"
LIBRARY = f"{SOFTWARE_DRIVER}/libcuda.so.1"
# The machine's cgroup v2 has no cpu controller, hence no shares.
RUN = ("ctr", "run", "-d", "--net-host", "--cpu-shares", "0", "--runc-binary", "/usr/bin/vgpu-runtime")
GPU = (
    *(word for name in ("nvidia0", "nvidiactl", "nvidia-uvm") for word in ("--device", f"/dev/{name}")),
    *("--mount", f"type=bind,src={LIBRARY},dst=/usr/lib/x86_64-linux-gnu/libcuda.so.1,options=bind:ro"),
    *("--mount", f"type=bind,src={SOFTWARE_STATE},dst={SOFTWARE_STATE},options=bind:rw"),
)


class Ctr(EngineDriver):
    """Both versions; the low-level runtime is runc, because containerd's `-no-subreaper` is no option of crun's."""

    low_level = RUNC

    def __init__(self, host) -> None:
        super().__init__(host)
        self._execs = 0

    def set_up(self) -> None:
        self.host.start_containerd()
        self.run("ctr", "image", "import", self.host.image_archive("glibc"))

    def start(self, name: str) -> None:
        self.run(*RUN, *GPU, IMAGE, name, *PROGRAM)

    def exec(self, name: str, *command: str) -> str:
        self._execs += 1
        words = ["ctr", "task", "exec", "--exec-id", f"exec{self._execs}", name, *command]
        return self.host.run(words, check=False).stdout

    def is_running(self, name: str) -> bool:
        return self._status(name) == "RUNNING"

    def checkpoint_running(self, name: str) -> None:
        try:
            self.run("ctr", "task", "checkpoint", name)
        finally:
            # containerd 1.7 takes equal content of two checkpoints for an error: the first has to go before the second.
            self.host.run(["sh", "-c", "ctr image ls -q | grep ^containerd.io/ | xargs -r ctr image rm --sync"])

    def freeze(self, name: str) -> None:
        """An image of the same name goes first, and at once: containerd 1.7 stumbles over equal content of two."""
        reference = self._frozen(name)
        self.host.run(["ctr", "image", "rm", "--sync", reference], check=False)
        self.run("ctr", "container", "checkpoint", "--image", "--task", "--rw", name, reference)
        self._end(name)

    def bring_back(self, name: str) -> None:
        self._end(name)  # a refused restore leaves a task that was created and not started
        self.run("ctr", "container", "restore", "--live", "--rw", name, self._frozen(name))

    def frozen_pages(self, name: str) -> tuple[pathlib.Path, int]:
        listed = self.run("ctr", "image", "ls", f"name=={self._frozen(name)}").splitlines()[-1].split()
        digest = next(word for word in listed if word.startswith("sha256:"))
        index = json.loads(self._blob(digest).read_text())
        path = self._blob(next(item["digest"] for item in index["manifests"] if item["mediaType"] == CRIU_TAR))
        with tarfile.open(path) as tar:
            return path, tar.getmember("pages-1.img").offset_data + 4096

    def export(self, name: str) -> str:
        path = f"/var/tmp/{name}.tar"
        self.freeze(name)
        self.run("ctr", "image", "export", "--skip-manifest-json", path, self._frozen(name))
        return path

    def bring_in(self, path: str, name: str) -> None:
        self.run("ctr", "image", "import", "--no-unpack", path)
        self.run("ctr", "container", "restore", "--live", "--rw", name, self._frozen(pathlib.Path(path).stem))

    def remove(self, name: str) -> None:
        self._end(name)
        with contextlib.suppress(EngineRefused):
            self.run("ctr", "image", "rm", "--sync", self._frozen(name))

    def versions(self) -> dict[str, str]:
        return {"containerd": first_number(self.run("containerd", "--version")), **self.low_level_version()}

    def _frozen(self, name: str) -> str:
        return f"localhost/frozen-{name}:1"

    def _blob(self, digest: str) -> pathlib.Path:
        return pathlib.Path(self.host.root, BLOBS, digest.partition(":")[2])

    def _status(self, name: str) -> str:
        lines = [line.split() for line in self.host.run(["ctr", "task", "ls"]).stdout.splitlines()]
        return next((words[-1] for words in lines if words[0] == name), "GONE")

    def _end(self, name: str) -> None:
        script = (
            'ctr task kill -s KILL "$0"; for i in $(seq 100); do ctr task rm "$0" && break; '
            'ctr task ls | grep -q "^$0 " || break; sleep 0.05; done; ctr container rm "$0"'
        )
        self.host.run(["sh", "-c", script, name], check=False)


class Ctr17(Ctr):
    label = "ctr, containerd 1.7"
    row = "trixie"


class Ctr21(Ctr):
    label = "ctr, containerd 2.1"
    row = "testing"
