"""Makes blake3.ptx from blake3.cu: `python -m gpu_state.staging.build_kernel [--check]`.

The PTX is committed, because nodes and most build machines have no nvcc. Its first line carries a hash of the source and of this
file: --check compares it, and the constants that chunk_hasher.py repeats, and needs no nvcc; a test runs it.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from vgpu_errors import BuildFailed, ToolMissing

HERE = Path(__file__).resolve().parent
SOURCE, PTX, HASHER = HERE / "blake3.cu", HERE / "blake3.ptx", HERE / "chunk_hasher.py"
# nvcc 13 starts at compute_75 and writes the newest PTX version, which driver 570 would refuse. The code uses nothing
# that version 6.3 for sm_70 lacks; ptxas and every driver since 410 read it.
NVCC = ("nvcc", "-ptx", "-arch=compute_75", "-O3")
VERSION, TARGET = ".version 6.3", ".target sm_70"
HASH_LINE = re.compile(r"// made by build_kernel\.py; source sha256 ([0-9a-f]{64})")
CONSTANTS = ("TILE", "NODES_PER_TILE", "LAUNCH_CHUNKS")


def source_hash() -> str:
    """Changes with the kernel and with how it is compiled."""
    text = SOURCE.read_bytes() + " ".join([*NVCC, VERSION, TARGET]).encode()
    return hashlib.sha256(text).hexdigest()


def compile_source() -> str:
    """The PTX text; the assembler of the same toolkit, where it is, has accepted it."""
    if shutil.which("nvcc") is None:
        raise ToolMissing(tool="nvcc", what="it compiles gpu_state/staging/blake3.cu")
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "blake3.ptx"
        run(*NVCC, "-o", str(made), str(SOURCE))
        text = re.sub(r"^\.version .*$", VERSION, made.read_text(), count=1, flags=re.MULTILINE)
        text = re.sub(r"^\.target .*$", TARGET, text, count=1, flags=re.MULTILINE)
        made.write_text(text)
        if shutil.which("ptxas"):
            for machine in ("sm_75", "sm_80", "sm_90", "sm_100", "sm_120"):
                run("ptxas", f"-arch={machine}", "-o", str(Path(folder) / "blake3.cubin"), str(made))
    code = "\n".join(line for line in text.splitlines() if line and not line.startswith("//"))
    return f"// made by build_kernel.py; source sha256 {source_hash()}\n{code}\n"


def run(*command: str) -> None:
    """One tool; its own messages are the error."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildFailed(target=PTX.name, what=f"{command[0]}: {done.stdout}{done.stderr}".strip())


def faults() -> list[str]:
    """Why the committed PTX is not that of the source."""
    found = []
    match = HASH_LINE.match(PTX.read_text()) if PTX.exists() else None
    if match is None or match[1] != source_hash():
        found.append("blake3.ptx is older than blake3.cu: run python -m gpu_state.staging.build_kernel")
    source, hasher = SOURCE.read_text(), HASHER.read_text()
    for name in CONSTANTS:
        here = re.search(rf"^#define {name} (\d+)", source, re.MULTILINE)
        there = re.search(rf"^{name} = (\d+)", hasher, re.MULTILINE)
        if not here or not there or here[1] != there[1]:
            found.append(f"{name} differs between blake3.cu and chunk_hasher.py")
    return found


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say whether blake3.ptx is current")
    if not parser.parse_args().check:
        PTX.write_text(compile_source())
    for fault in faults():
        print(fault, file=sys.stderr)
    return 1 if faults() else 0


if __name__ == "__main__":
    sys.exit(main())
