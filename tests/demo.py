"""The main job, shown: a GPU container is frozen on one node, its archive verified, and goes on on another node.

Runs on the real driver where this machine has an NVIDIA GPU, else on the software driver (a test double, and says so).
Called by `make demo`; its last line is `demo: ok`, or a failure with what went wrong.
"""

from __future__ import annotations

import argparse
import sys
import time

from tests.engines.gpu_container import GpuContainer, restore
from tests.hosts import gpus
from tests.hosts.host import TestHost, two_hosts

ARCHIVE = "/var/tmp/counter.tar.zst"


def main() -> int:
    args = parse_arguments()
    say(f"Two nodes of Debian '{args.row}' in network namespaces of their own; {gpus.describe()}.")
    with two_hosts(args.row, binds=gpus.binds()) as (first, second):
        for node in (first, second):
            prepare(node)
        step = freeze(first)
        look_at(first)
        ship(first, second)
        go_on(second, step)
    print("demo: ok", flush=True)
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--row", default="trixie", help="which Debian the nodes run (python -m tests.hosts --help)")
    return parser.parse_args()


def prepare(node: TestHost) -> None:
    """What an administrator does once on each node."""
    say(f"{node.name}: installing vgpu-snapshot, then 'vgpu setup podman'")
    gpus.install(node)
    node.install_project()
    show(node, "vgpu", "setup", "podman", *gpus.setup_options())
    node.image("glibc")


def freeze(node: TestHost) -> int:
    say(f"{node.name}: a container counts on the GPU and checks all of its GPU memory as it goes")
    container = GpuContainer(node).start(node.image("glibc"), mib=64)
    step = container.wait_for_step(5)
    show(node, "vgpu", "ps")
    say(f"{node.name}: step {step}. Freezing, signing and exporting it with podman's own command")
    show(node, "podman", "container", "checkpoint", "--export", ARCHIVE, "counter")
    show(node, "ls", "-lh", ARCHIVE)
    container.remove()
    return step


def look_at(node: TestHost) -> None:
    say(f"{node.name}: checking the archive's signature and every byte it covers")
    show(node, "vgpu", "verify", ARCHIVE)


def ship(first: TestHost, second: TestHost) -> None:
    say(f"{second.name}: the archive arrives; this node does not trust its maker yet, so it refuses")
    first.copy_to(second, ARCHIVE)
    refused = restore(second, ARCHIVE, check=False)
    if refused.returncode == 0:
        message = "an archive of an unknown key was restored"
        raise AssertionError(message)
    print(indented(refused.stderr), flush=True)
    second.run(["podman", "rm", "-f", "-t", "0", "-i", "counter"])
    say(f"{second.name}: the administrator decides to trust {first.name}'s key")
    second.write("/var/tmp/node-a.pub", first.read("/etc/vgpu/node.pub"))
    show(second, "vgpu", "trust", "add", "/var/tmp/node-a.pub")


def go_on(node: TestHost, step: int) -> None:
    say(f"{node.name}: restoring")
    show(node, "podman", "container", "restore", "--import", ARCHIVE)
    container = GpuContainer(node)
    now = container.goes_on(step)
    print(indented("\n".join(container.lines()[-3:])), flush=True)
    say(f"{node.name}: the program went on from step {step} and is at {now}, every byte of its GPU memory right")


def show(node: TestHost, *command: str) -> None:
    """Run a command on a node and show it as a person there would see it."""
    started = time.monotonic()
    print(f"    {node.name}# {' '.join(command)}", flush=True)
    done = node.run(list(command), timeout=180)
    print(indented(done.stdout + done.stderr), flush=True)
    print(f"    ({time.monotonic() - started:.1f} s)", flush=True)


def say(text: str) -> None:
    print(f"\n== {text}", flush=True)


def indented(text: str) -> str:
    return "\n".join("    " + line for line in text.rstrip().splitlines())


if __name__ == "__main__":
    sys.exit(main())
