"""Memory shared by legacy CUDA IPC, plain and with the preload in staged mode: `python3 -m tests.gpu.ipc_run` (root).

Runs every scenario of tests/native/preload_programs/ipc_share.c and a PyTorch program that shares tensors through
torch.multiprocessing, each without the preload and with it, and compares what they print. A difference that is written down
(`KNOWN`) is told and is no failure. Says where the plain driver answers otherwise than the software driver does (`ANSWERS`),
because the native tests rest on that. Needs gcc; takes the preload from VGPU_PRELOAD or builds it. `--rehearse` takes the
software driver where there is no NVIDIA GPU, without PyTorch.
"""

from __future__ import annotations

import argparse
import glob
import importlib.util
import itertools
import os
import pathlib
import subprocess
import sys
import tempfile

from tests.gpu.bare_node import built_preload, software_environment
from tests.hosts import gpus

ROOT = pathlib.Path(__file__).resolve().parents[2]
SOURCE = ROOT / "tests/native/preload_programs/ipc_share.c"
TORCH_PROGRAM = ROOT / "tests/gpu/programs/ipc_torch.py"
BOTH = (
    *("share", "two-importers", "faults", "facts", "queue", "contexts", "threads", "many"),
    *("exporter-ends", "exporter-is-killed", "exporter-is-replaced", "exporter-forks", "exporter-is-stopped"),
)
PRELOAD_ONLY = ("freed",)  # undefined with the plain driver
SIZES_MIB = (64, 4, 1)
MANY_MIB = 2  # a thousand of them
DEADLINE_S = 240
# A mount namespace in which the preload finds the word `staged`; no agent runs there, and none is needed.
STAGED = 'mount --make-rprivate / && mkdir -p /run/vgpu && mount --bind "$0" /run/vgpu && exec "$@"'

#: The driver looks at a part of the handle's bytes (measured: 0 or 208), the preload at all of them: 1.
NOT_COMPARED = frozenset({"open a damaged handle"})
#: What the preload answers otherwise, and has to: scenario and question -> plain, with the preload, why.
KNOWN = {
    ("exporter-forks", "open without the exporter"): (
        "0",
        "400",
        "a forked child that lives on keeps the memory open for the driver; for the preload the exporter is gone",
    ),
}
#: What the software driver answers: as a real one did on H200s, driver 580.159.04.
ANSWERS = {
    "open zeros": "1",
    "open garbage": "1",
    "open memory that was freed": "1",
    "open without the flag": "1",
    "open with another flag": "1",
    "open into nowhere": "1",
    "open without a context": "201",
    "open": "0",
    "open again": "0",
    "at the same address": "1",
    "close an address inside": "1",
    "free what was opened": "1",
    "handle of what was opened": "1",
    "close": "0",
    "close without a context": "201",
    "close the last": "0",
    "close once more": "1",
    "the address is free": "0",
    "its range": "500",
    "open a third time": "0",
    "close the third": "0",
    "close what is the process's own": "1",
    "open one's own": "201",
    "handle of an address inside": "0",
    "is the same handle": "1",
    "handle into nowhere": "1",
    "handle behind the end": "1",
    "handle of nothing": "1",
    "handle of freed memory": "1",
    "two handles differ": "1",
    "handle of VMM memory": "1",
    "handle of pool memory": "1",
    "handle of host memory": "1",
    "handle without a context": "201",
    "new memory has a new handle": "1",
    "after its context": "0",
    "open without the exporter": "400",
    "at once": "1",
    "memory lost": "0",
    "still open": "0",
    "address range": "0",
    "its context": "1",
    "memory type": "0 2",
    "host pointer": "1 0",
    "managed": "0 0",
    "device": "0 0",
    "start": "0 0",
    "length": "0 0",
    "mapped": "0 1",
    "handle types": "0 0",
    "pool": "0 0",
    "unmap": "1",
    "retain": "1",
}


def main() -> int:
    args = parse_arguments()
    if not gpus.is_real() and not args.rehearse:
        print("no NVIDIA GPU here; --rehearse takes the software driver", file=sys.stderr)
        return 1
    say(gpus.describe())
    with tempfile.TemporaryDirectory(prefix="vgpu-ipc-") as folder:
        bench = Bench(pathlib.Path(folder))
        failures = bench.compare_all(args.scenarios or BOTH)
    say("every program said the same with the preload" if not failures else f"FAILED: {', '.join(failures)}")
    return 1 if failures else 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenarios", nargs="*", help="only these, with the PyTorch program")
    parser.add_argument("--rehearse", action="store_true")
    return parser.parse_args()


class Bench:
    """The compiled program, the preload, and the two ways to run something."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.control = folder / "control"
        self.control.mkdir()
        (self.control / "mode").write_text("staged\n")
        self.preload = built_preload()
        self.environment = dict(os.environ) | {"PYTHONPATH": str(ROOT)}
        if not gpus.is_real():
            self.environment |= software_environment(folder, 2560 << 20)
        self.program = folder / "ipc_share"
        command = ["gcc", "-O1", "-pthread", str(SOURCE), str(self.driver()), "-o", str(self.program)]
        subprocess.run(command, check=True, timeout=120)

    def driver(self) -> pathlib.Path:
        """libcuda.so.1."""
        if not gpus.is_real():
            return pathlib.Path(self.environment["LD_LIBRARY_PATH"]) / "libcuda.so.1"
        return pathlib.Path(next(iter(glob.glob(f"{gpus.driver_folder()}/**/libcuda.so.1", recursive=True))))

    def run(self, command: list[str], *, has_preload: bool) -> str:
        """What it prints; a status other than 0 and what went to standard error are a part of it."""
        if has_preload:
            inner = ["env", f"LD_PRELOAD={self.preload}", *command]
            command = ["unshare", "-m", "sh", "-c", STAGED, str(self.control), *inner]
        environment = self.environment
        if gpus.is_real():
            folders = f"{self.driver().parent}:{environment.get('LD_LIBRARY_PATH', '')}".rstrip(":")
            environment = environment | {"LD_LIBRARY_PATH": folders}
        try:
            done = subprocess.run(
                command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S, check=False
            )
        except subprocess.TimeoutExpired as late:
            return f"no end after {late.timeout} s"
        end = "" if done.returncode == 0 else f"status {done.returncode}\n{done.stderr[-3000:]}"
        return done.stdout + end

    def compare_all(self, scenarios: tuple[str, ...]) -> list[str]:
        """The names of those that said something else with the preload."""
        failures = []
        for scenario in scenarios:
            for mib in (MANY_MIB,) if scenario == "many" else SIZES_MIB:
                failures += self.compare(f"{scenario} {mib} MiB", [str(self.program), scenario, str(mib)])
        for scenario in PRELOAD_ONLY:
            said = self.run([str(self.program), scenario], has_preload=True)
            failures += [] if said == "open what was freed: 1\n" else [show(scenario, "with the preload", said)]
        if gpus.is_real() and importlib.util.find_spec("torch") is not None:
            failures += self.compare("PyTorch", [sys.executable, str(TORCH_PROGRAM)], is_shown=True)
        else:
            say("PyTorch: left out, there is none or no GPU for it")
        return failures

    def compare(self, name: str, command: list[str], *, is_shown: bool = False) -> list[str]:
        plain = self.run(command, has_preload=False)
        ours = self.run(command, has_preload=True)
        for line in plain.splitlines():
            what, _, answer = line.partition(": ")
            if answer and ANSWERS.get(what, answer) != answer:
                say(f"{name}: the plain driver answers {answer} to `{what}`, the software driver {ANSWERS[what]}")
        if is_shown:
            show(name, "with the preload", ours)
        known, others = differences(name.partition(" ")[0], plain, ours)
        for line in known:
            say(f"{name}: known to differ: {line}")
        if not others and is_well(plain):
            say(f"{name}: {'the same' if not known else 'the same beside that'}")
            return []
        show(name, "plain", plain)
        show(name, "with the preload", ours)
        if not is_well(plain) and is_well(ours):
            say(f"{name}: the plain driver alone does not do it, so there is nothing to compare with")
            return []
        return [name]


def answers(said: str) -> list[tuple[str, str]]:
    """Question and answer of each line, of those that are compared."""
    pairs = [(what, answer) for what, _, answer in (line.partition(": ") for line in said.splitlines())]
    return [(what, answer) for what, answer in pairs if what not in NOT_COMPARED]


def differences(scenario: str, plain: str, ours: str) -> tuple[list[str], list[str]]:
    """Where the two differ: as it is written down, and otherwise."""
    known, others = [], []
    for one, other in itertools.zip_longest(answers(plain), answers(ours), fillvalue=("", "nothing")):
        if one == other:
            continue
        expected = KNOWN.get((scenario, one[0]))
        line = f"`{one[0]}`: plain {one[1]}, with the preload {other[1]}"
        if expected is not None and one[0] == other[0] and (one[1], other[1]) == expected[:2]:
            known.append(f"{line}: {expected[2]}")
        else:
            others.append(line)
    return known, others


def is_well(said: str) -> bool:
    """Whether the program ended by itself with status 0."""
    return not any(line.startswith(("status ", "no end ")) for line in said.splitlines())


def show(name: str, way: str, text: str) -> str:
    say(f"{name}, {way}:\n    " + text.strip().replace("\n", "\n    "))
    return name


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
