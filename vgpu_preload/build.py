"""Builds libvgpu.so for glibc and musl with the `ziglang` package: `python -m vgpu_preload.build --out build/preload`.

Makes `<out>/{glibc,musl}/<build-id>/libvgpu.so` and `<out>/{glibc,musl}/current`, and compiles for the other machine as
a check. Refuses to hand out a library that exports anything beside the table of calls, needs a libc newer than 2.17, or
has a constructor: such a library would harm every process of a container. Called by the installer, by the tests and by
`make`. The same sources give the same build id on every machine, because CRIU wants the very same file on both nodes.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from vgpu_errors import BuildFailed, ToolMissing, VgpuError
from vgpu_preload.elf_facts import ElfFacts, read_elf_facts

SOURCES = Path(__file__).resolve().parent
LIBRARY = "libvgpu.so"
TARGETS = {"glibc": "{machine}-linux-gnu.2.17", "musl": "{machine}-linux-musl"}
MACHINES = ("x86_64", "aarch64")
NEWEST_GLIBC = (2, 17)
COMPILE_DEADLINE_S = 300

# No stack protector, no fortify: their symbols are not in every libc. Initial-exec: thread-local storage without an
# allocation. Nodelete: the helper thread runs in this library's code. No debug information: it holds paths.
FLAGS = (
    *("-std=gnu11", "-O2", "-g0", "-fPIC", "-shared", "-fvisibility=hidden", "-ftls-model=initial-exec"),
    *("-fno-stack-protector", "-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=0", "-fno-sanitize=all"),
    *("-Wall", "-Wextra", "-Werror", "-Wl,--build-id=sha1", "-Wl,-z,nodelete", "-Wl,-z,noexecstack", "-s"),
    f"-Wl,-soname,{LIBRARY}",
)


def build(out: Path, *, machine: str | None = None, say: bool = False) -> dict[str, dict[str, str]]:
    """Build what is not built yet; gives build id and path per libc."""
    machine = machine or platform.machine()
    key = inputs_key(machine)
    built = _built_before(out, key)
    if built is not None:
        _say(say, f"preload: {out} is up to date")
        return built
    _check_other_machine(machine, say=say)
    built = {libc: _build_one(out / libc, libc, machine, say=say) for libc in TARGETS}
    _write_text(out / "build.json", json.dumps({"key": key, "built": built}, indent=1, sort_keys=True) + "\n")
    return built


def inputs_key(machine: str) -> str:
    """A digest over all that the libraries are made from: sources, this script, flags, compiler, machine."""
    digest = hashlib.sha256()
    digest.update(json.dumps([machine, FLAGS, TARGETS, _compiler_version()]).encode())
    for path in sorted([*SOURCES.rglob("*.[chd]*"), *SOURCES.glob("*.py")]):
        if "__pycache__" not in path.parts:
            digest.update(f"\0{path.relative_to(SOURCES)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def exported_names(libc: str, machine: str | None = None) -> frozenset[str]:
    """The names that calls.def gives to this libc: all that the library may export."""
    have_dlvsym = int(libc == "glibc")
    macros = "-DCALL(result,name,...)=name", "-DLINKER_CALL(result,name,...)=name"
    command = [*_compiler(libc, machine), "-E", "-P", "-x", "c", *macros, f"-DVGPU_HAVE_DLVSYM={have_dlvsym}"]
    return frozenset(_run([*command, str(SOURCES / "calls.def")], "the list of calls").split())


def compile_library(output: Path, libc: str, *, machine: str | None = None, defines: tuple[str, ...] = ()) -> ElfFacts:
    """Compile one library and look at the result; the tests name another socket path with `defines`."""
    sources = sorted(str(path.relative_to(SOURCES)) for path in SOURCES.rglob("*.c"))
    options = [*FLAGS, *(f"-D{define}" for define in defines)]
    _run([*_compiler(libc, machine), *options, *sources, "-o", str(output.absolute())], f"{LIBRARY} for {libc}")
    facts = read_elf_facts(output.read_bytes(), str(output))
    _refuse_unsafe(facts, exported_names(libc, machine), f"{LIBRARY} for {libc}")
    return facts


def _build_one(folder: Path, libc: str, machine: str, *, say: bool) -> dict[str, str]:
    _say(say, f"preload: compiling {LIBRARY} for {libc} on {machine}")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".building-", dir=folder) as temporary:
        fresh = Path(temporary) / LIBRARY
        facts = compile_library(fresh, libc, machine=machine)
        fresh.chmod(0o755)
        place = folder / facts.build_id
        place.mkdir(exist_ok=True)
        fresh.replace(place / LIBRARY)
    _write_text(folder / "current", facts.build_id + "\n")
    _remove_others(folder, facts.build_id)
    _say(say, f"preload: {place / LIBRARY}")
    return {"build_id": facts.build_id, "path": str((place / LIBRARY).absolute())}


def _check_other_machine(machine: str, *, say: bool) -> None:
    for other in MACHINES:
        if other == machine:
            continue
        _say(say, f"preload: checking that it compiles for {other}")
        with tempfile.TemporaryDirectory() as temporary:
            compile_library(Path(temporary) / LIBRARY, "glibc", machine=other)


def _refuse_unsafe(facts: ElfFacts, allowed: frozenset[str], target: str) -> None:
    faults = []
    if facts.exported != allowed:
        faults.append(f"it exports {sorted(facts.exported)}, the table of calls has {sorted(allowed)}")
    faults += [
        f"it needs {version}" for version in sorted(facts.needed_versions) if _glibc_version(version) > NEWEST_GLIBC
    ]
    if len(facts.needed) > 1 or not all(name.startswith("libc.so") for name in facts.needed):
        faults.append(f"it needs {', '.join(facts.needed)}, not libc alone")
    if facts.has_constructors:
        faults.append("it has constructors, which run in every process")
    if not facts.build_id:
        faults.append("it has no build id")
    if faults:
        raise BuildFailed(target=target, what="; ".join(faults))


def _glibc_version(version: str) -> tuple[int, ...]:
    """GLIBC_2.17 as (2, 17); anything else counts as newer than all."""
    prefix, _, numbers = version.partition("_")
    if prefix != "GLIBC" or not numbers.replace(".", "").isdigit():
        return (sys.maxsize,)
    return tuple(int(number) for number in numbers.split("."))


def _built_before(out: Path, key: str) -> dict[str, dict[str, str]] | None:
    try:
        stamp = json.loads((out / "build.json").read_text())
        if stamp["key"] != key:
            return None
        # The folder may have been copied or moved since: paths are made new, files are looked at.
        built = {libc: dict(stamp["built"][libc], path=str((out / libc).absolute())) for libc in TARGETS}
        for entry in built.values():
            entry["path"] = str(Path(entry["path"]) / entry["build_id"] / LIBRARY)
            found = read_elf_facts(Path(entry["path"]).read_bytes(), entry["path"])
            if found.build_id != entry["build_id"]:
                return None
    except (OSError, ValueError, KeyError, TypeError, BuildFailed):
        return None
    return built


def _remove_others(folder: Path, build_id: str) -> None:
    """Older builds of a work tree go, or an install would carry them; on a node old versions stay side by side."""
    for entry in folder.iterdir():
        if entry.is_dir() and entry.name != build_id and not entry.name.startswith("."):
            shutil.rmtree(entry)


def _compiler(libc: str, machine: str | None) -> list[str]:
    if importlib.util.find_spec("ziglang") is None:
        raise ToolMissing(tool="ziglang", what=f"python -m ziglang cc compiles {LIBRARY}")
    target = TARGETS[libc].format(machine=machine or platform.machine())
    return [sys.executable, "-m", "ziglang", "cc", "-target", target]


def _compiler_version() -> str:
    try:
        return importlib.metadata.version("ziglang")
    except importlib.metadata.PackageNotFoundError:
        raise ToolMissing(tool="ziglang", what=f"python -m ziglang cc compiles {LIBRARY}") from None


def _run(command: list[str], target: str) -> str:
    try:
        # Relative source names from a fixed folder, so that no path of this machine can get into the library.
        done = subprocess.run(
            command, cwd=SOURCES, capture_output=True, text=True, check=False, timeout=COMPILE_DEADLINE_S
        )
    except subprocess.TimeoutExpired:
        raise BuildFailed(target=target, what=f"no result after {COMPILE_DEADLINE_S} s") from None
    if done.returncode != 0:
        raise BuildFailed(target=target, what=done.stderr.strip() or f"exit status {done.returncode}")
    return done.stdout


def _write_text(path: Path, text: str) -> None:
    fresh = path.with_name(f".{path.name}-{os.getpid()}")
    fresh.write_text(text)
    fresh.replace(path)


def _say(wanted: bool, line: str) -> None:
    if wanted:
        print(line, flush=True)


def main() -> int:
    """Entry point of `python -m vgpu_preload.build`."""
    parser = argparse.ArgumentParser(prog="python -m vgpu_preload.build", description="Builds libvgpu.so.")
    parser.add_argument("--out", type=Path, default=Path("build/preload"), help="folder to build into")
    arguments = parser.parse_args()
    try:
        build(arguments.out, say=True)
    except VgpuError as error:
        print(f"{error.message}\n{error.remedy}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
