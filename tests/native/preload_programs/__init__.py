"""Compiles the small programs of the preload's tests, once per test session and C library, and starts them.

Uses the compiler that builds the preload itself (`ziglang`), so nothing else is needed; called by test_preload.py.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

from vgpu_preload.build import compile_library

HERE = Path(__file__).resolve().parent
DEADLINE_S = 10
# Old: symbols as they were bound on CentOS 7, with libdl and libpthread apart. New: all in libc.so.6.
TARGETS = {
    "glibc-old": "x86_64-linux-gnu.2.17",
    "glibc-new": "x86_64-linux-gnu.2.34",
    "musl": "x86_64-linux-musl",
}
_DRIVER = ("stub_libcuda.c", "-Wl,-soname,libcuda.so.1")
LIBRARIES = {
    "libcuda.so.1": (*_DRIVER, "-Wl,-Bsymbolic"),
    "global/libcuda.so.1": _DRIVER,
    "libearly.so": ("early_library.c", "libcuda.so.1"),
    "libchain_one.so": ("chain_one.c",),
    "libchain_two.so": ("chain_two.c",),
    "libinterposer.so": ("interposer.c",),
}
PROGRAMS = {
    "direct": ("direct.c", "libcuda.so.1"),
    "weak": ("weak.c",),
    "early": ("early.c", "libearly.so", "libcuda.so.1"),
    "asking": ("asking.c",),
    "behaviours": ("behaviours.c",),
    "lookups": ("lookups.c", "libchain_one.so", "libchain_two.so"),
    "hello": ("hello.c",),
    "hello_static": ("hello.c", "-static"),
}


class Programs:
    """What is compiled for one C library, and how it is started with the preload in front."""

    def __init__(self, libc: str, folder: Path, socket_path: Path) -> None:
        self.libc = libc
        self.folder = folder
        self.preload = folder / "libvgpu.so"
        (folder / "global").mkdir(parents=True)
        defines = (f'VGPU_SOCKET_PATH="{socket_path}"',)
        self.facts = compile_library(self.preload, libc.partition("-")[0], defines=defines)

    def need(self, name: str) -> Path:
        """The path of a program or library, compiled at first use."""
        path = self.folder / name
        if not path.exists():
            source, *others = LIBRARIES.get(name) or PROGRAMS[name]
            links = [other for other in others if not other.startswith("-")]
            for link in links:
                self.need(link)
            options = [other for other in others if other.startswith("-")]
            options += ["-shared"] if name in LIBRARIES else []
            self._compile([str(HERE / source), *map(str, links), *options], path)
        return path

    def _compile(self, arguments: list[str], path: Path) -> None:
        # The machine's own compiler for the static program: zig would first compile all of musl, half a minute.
        zig = [sys.executable, "-m", "ziglang", "cc", "-target", TARGETS[self.libc], "-fPIC"]
        compiler = ["gcc"] if "-static" in arguments else zig + (["-dynamic"] if self.libc == "musl" else [])
        command = [*compiler, "-O1", "-g0", "-Wall", "-Wextra", "-Werror", *arguments, "-ldl", "-lpthread"]
        subprocess.run([*command, "-o", str(path)], cwd=self.folder, check=True, timeout=120)

    def environment(self, *, preload: str | None = None, cuda: str = ".", **variables: str) -> dict[str, str]:
        """As in a container: LD_PRELOAD set, the driver on the library path."""
        libraries = f"{self.folder / cuda}:{self.folder}"
        wanted = str(self.preload) if preload is None else preload
        return {"PATH": os.environ["PATH"], "LD_LIBRARY_PATH": libraries, "LD_PRELOAD": wanted, **variables}

    def output(self, name: str, *arguments: str, preload: str | None = None, **variables: str) -> str:
        """Run to the end; standard error must stay empty and the status 0."""
        done = subprocess.run(
            [self.need(name), *arguments],
            env=self.environment(preload=preload, **variables),
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    @contextlib.contextmanager
    def started(self, name: str, *arguments: str, ready: str = "ready", preload: str | None = None, **variables: str):
        """Run until it says ready; after the body it must end by itself, well, and in silence."""
        self.need("libcuda.so.1")
        process = subprocess.Popen(
            [self.need(name), *arguments],
            env=self.environment(preload=preload, **variables),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        try:
            if ready:
                assert process.stdout.readline().decode().strip() == ready, process.stderr.read1()
            yield process
            out, err = process.communicate(timeout=DEADLINE_S)
            assert (process.returncode, out, err) == (0, b"", b"")
        finally:
            process.kill()
            process.wait()


def sockets_of(pid: int) -> dict[int, str]:
    """The descriptors of a process that are sockets."""
    found = {}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            link = str(entry.readlink())
            if link.startswith("socket:"):
                found[int(entry.name)] = link
    return found


def helper_thread(pid: int) -> Path | None:
    """The task folder of the helper, once it runs under its name."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            if (task / "comm").read_text() == "vgpu-helper\n":
                return task
    return None


def wait_until(claim, deadline_s: float = 5.0):
    """The first true value of `claim`."""
    end = time.monotonic() + deadline_s
    while not (value := claim()):
        assert time.monotonic() < end, "the deadline passed"
        time.sleep(0.01)
    return value
