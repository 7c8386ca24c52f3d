"""Installs the shim and the hook in a folder, in front of a simulated low-level runtime.

The entry scripts are like the installed ones (shebang with -IS, absolute paths), so that tests run what engines run.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.simulators import low_level_runtime

ROOT = Path(__file__).resolve().parents[2]
BUILD_ID = {"glibc": "ab12", "musl": "cd34"}


class ShimInstall:
    """vgpu-runtime, vgpu-hook, runtime.conf, preload builds and run folder, all below one folder."""

    def __init__(self, folder: Path, **configuration: str):
        self.folder = folder
        self.low_level = low_level_runtime.install(folder / "bin")
        self.run_dir = folder / "run"
        self.library_dir = folder / "lib"
        for libc, build_id in BUILD_ID.items():
            (self.library_dir / "preload" / libc / build_id).mkdir(parents=True)
            (self.library_dir / "preload" / libc / build_id / "libvgpu.so").write_bytes(b"\x7fELF")
            (self.library_dir / "preload" / libc / "current").write_text(build_id + "\n")
        self.configure(**configuration)
        self.runtime = self._entry("vgpu-runtime", "runtime_shim.main")
        self.hook = self._entry("vgpu-hook", "oci_hook.main")

    def configure(self, **configuration: str):
        values = {
            "low_level_runtime": self.low_level.path,
            "run_dir": str(self.run_dir),
            "library_dir": str(self.library_dir),
            **configuration,
        }
        text = "".join(f"{key} = {value}\n" for key, value in values.items())
        (self.folder / "runtime.conf").write_text(text)

    def call(self, *words, **options):
        """Run vgpu-runtime with these words to its end."""
        options = {"capture_output": True, "timeout": 60, "env": {}, "cwd": self.folder, **options}
        return subprocess.run([self.runtime, *map(str, words)], check=False, **options)

    def start(self, *words, **options):
        """Start vgpu-runtime."""
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": {}, "cwd": self.folder, **options}
        return subprocess.Popen([self.runtime, *map(str, words)], **options)

    def bundle(self, name="c1", spec=None, *, podman=False):
        """A bundle with a small image; the spec is written as an engine would."""
        folder = self.folder / "overlay-containers" / name / "userdata" if podman else self.folder / "bundles" / name
        rootfs = folder / "rootfs"
        for place in ("bin", "lib64"):
            (rootfs / place).mkdir(parents=True)
        (rootfs / "bin" / "sh").write_bytes(elf("/lib64/ld-linux-x86-64.so.2"))
        (folder / "config.json").write_bytes(json.dumps(spec or gpu_spec(), indent=1).encode())
        return folder

    def state(self, container_id="c1"):
        path = self.run_dir / "state" / f"{container_id}.json"
        return json.loads(path.read_text()) if path.exists() else None

    def control(self, container_id="c1"):
        return self.run_dir / "containers" / container_id

    def _entry(self, name: str, module: str):
        path = self.folder / "bin" / name
        path.write_text(
            f"#!{sys.executable} -IS\nimport sys\nsys.path.insert(0, {str(ROOT)!r})\n"
            f"from {module} import main\nsys.exit(main(config_path={str(self.folder / 'runtime.conf')!r}))\n"
        )
        path.chmod(0o755)
        return str(path)


def cpu_spec(**changes):
    """A container without a GPU."""
    spec = {
        "ociVersion": "1.2.1",
        "process": {"args": ["/bin/sh"], "env": ["PATH=/usr/bin:/bin"], "cwd": "/"},
        "root": {"path": "rootfs"},
        "mounts": [{"destination": "/proc", "type": "proc", "source": "proc"}],
        "annotations": {"io.container.manager": "libpod"},
        "linux": {"namespaces": [{"type": "pid"}]},
    }
    return {**spec, **changes}


def gpu_spec(**changes):
    """A container with one GPU."""
    devices = [{"path": "/dev/nvidia0", "type": "c", "major": 195, "minor": 0}]
    return cpu_spec(linux={"namespaces": [{"type": "pid"}], "devices": devices}, **changes)


def elf(interpreter: str | None, machine: int | None = None) -> bytes:
    """The first bytes of a 64-bit program that asks for this loader."""
    numbers = {"x86_64": 62, "aarch64": 183}
    machine = machine if machine is not None else numbers[os.uname().machine]
    name = (interpreter or "").encode() + b"\0"
    header = bytearray(64)
    header[:7] = b"\x7fELF\x02\x01\x01"
    header[18:20] = machine.to_bytes(2, "little")
    header[32:40] = (64).to_bytes(8, "little")
    header[54:56] = (56).to_bytes(2, "little")
    header[56:58] = (1).to_bytes(2, "little")
    entry = bytearray(56)
    entry[0:4] = (3 if interpreter else 1).to_bytes(4, "little")
    entry[8:16] = (120).to_bytes(8, "little")
    entry[32:40] = len(name).to_bytes(8, "little")
    return bytes(header + entry) + name
