"""Builds the software GPU driver, its NVML and the test programs: `python -m tests.software_gpu.build --out build/software_gpu`.

Compiles with `zig cc` against glibc 2.17 and against musl, so that one result can be bind-mounted into any container.
Does nothing when the sources, this file and the compiler are the same as at the last build. Tests and the test hosts call it.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
DRIVER = HERE / "driver"
PROGRAMS = HERE / "programs"
DEFAULT_OUT = HERE.parent.parent / "build" / "software_gpu"
FLAGS = (
    "-std=gnu11",
    "-O2",
    "-g",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wno-unused-parameter",
    "-fno-strict-aliasing",
    "-fPIC",
    "-pthread",
)
LIBRARY = ("-shared", "-fvisibility=hidden", "-Wl,-z,nodelete", "-Wl,-z,defs", "-ldl")
NVML_SOURCES = ("nvml.c", "state_file.c")
GCC_SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O1", "-fno-omit-frame-pointer")
ZIG_SANITIZERS = ("-fsanitize=undefined", "-fsanitize-trap=undefined", "-O1")


def zig_target(libc: str) -> str:
    """The compiler's name of this machine with the given C library; glibc 2.17 is what the oldest images have."""
    machine = platform.machine()
    return f"{machine}-linux-gnu.2.17" if libc == "glibc" else f"{machine}-linux-musl"


def source_hash() -> str:
    """Changes when anything that goes into the build changes."""
    digest = hashlib.sha256(zig_version().encode() + platform.machine().encode())
    for path in sorted([*DRIVER.iterdir(), *PROGRAMS.iterdir(), Path(__file__)]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def zig_version() -> str:
    """The compiler, as part of the cache key."""
    return subprocess.run(
        [sys.executable, "-m", "ziglang", "version"], check=True, capture_output=True, text=True
    ).stdout.strip()


def driver_sources() -> list[str]:
    """All of driver/ except what belongs to NVML alone."""
    return [str(path) for path in sorted(DRIVER.glob("*.c")) if path.name != "nvml.c"]


def compile_with(compiler: list[str], out: Path, sources: list[str], *flags: str) -> None:
    """One compiler run; prints what it makes."""
    print(f"software_gpu: building {out.parent.name}/{out.name}", flush=True)
    subprocess.run([*compiler, *FLAGS, *flags, f"-I{DRIVER}", "-o", str(out), *sources], check=True)


def build_libc(libc: str, out: Path) -> None:
    """Both libraries and every program for one C library."""
    out.mkdir(parents=True, exist_ok=True)
    compiler = [sys.executable, "-m", "ziglang", "cc", "-target", zig_target(libc), "-fno-sanitize=undefined"]
    compile_with(compiler, out / "libcuda.so.1", driver_sources(), *LIBRARY, "-Wl,-soname,libcuda.so.1")
    (out / "libcuda.so").symlink_to("libcuda.so.1")
    nvml = [str(DRIVER / name) for name in NVML_SOURCES]
    compile_with(compiler, out / "libnvidia-ml.so.1", nvml, *LIBRARY, "-Wl,-soname,libnvidia-ml.so.1")
    for program in sorted(PROGRAMS.glob("*.c")):
        dynamic = ["-dynamic"] if libc == "musl" else []
        compile_with(compiler, out / program.stem, [str(program)], *dynamic, "-ldl")


def sanitizing_compiler(folder: Path) -> tuple[list[str], tuple[str, ...]]:
    """gcc with AddressSanitizer and UBSan where it links; zig has no AddressSanitizer, so UBSan alone elsewhere."""
    if shutil.which("gcc"):
        trial = ["gcc", "-fsanitize=address,undefined", "-x", "c", "-", "-o", str(folder / "trial")]
        if (
            subprocess.run(
                trial, input="int main(void){return 0;}", text=True, check=False, stderr=subprocess.DEVNULL
            ).returncode
            == 0
        ):
            return ["gcc"], GCC_SANITIZERS
    return [sys.executable, "-m", "ziglang", "cc", "-target", zig_target("glibc")], ZIG_SANITIZERS


def build_sanitized(out: Path) -> Path:
    """The driver and the programs with sanitizers; for the driver's own tests only."""
    out.mkdir(parents=True, exist_ok=True)
    compiler, flags = sanitizing_compiler(out)
    compile_with(compiler, out / "libcuda.so.1", driver_sources(), *LIBRARY, *flags, "-Wl,-soname,libcuda.so.1")
    for program in sorted(PROGRAMS.glob("*.c")):
        compile_with(compiler, out / program.stem, [str(program)], *flags, "-ldl")
    return out


def build(out: Path = DEFAULT_OUT) -> Path:
    """Builds into `out` unless it is current. Another process that builds the same folder is waited for."""
    out = out.resolve()
    out.parent.mkdir(parents=True, exist_ok=True)
    with (out.parent / f".{out.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        wanted, stamp = source_hash(), out / "source-hash"
        if stamp.is_file() and stamp.read_text() == wanted:
            return out
        fresh = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
        try:
            build_libc("glibc", fresh)
            build_libc("musl", fresh / "musl")
            (fresh / "source-hash").write_text(wanted)
            fresh.chmod(0o755)
            replace_folder(fresh, out)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    return out


def replace_folder(fresh: Path, out: Path) -> None:
    """Running programs keep the old files mapped, so the old folder goes as a whole and is never written into."""
    if out.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{out.name}-old-", dir=out.parent))
        out.rename(old / "old")
        fresh.rename(out)
        shutil.rmtree(old)
    else:
        fresh.rename(out)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT)
    parser.add_argument(
        "--sanitize", action="store_true", help="build the driver with AddressSanitizer and UBSan instead"
    )
    options = parser.parse_args()
    done = build_sanitized(options.out) if options.sanitize else build(options.out)
    print(f"software_gpu: ready in {os.path.relpath(done)}")


if __name__ == "__main__":
    main()
