"""What this node's CRIU writes is what `image_format.pagemap` reads: real dumps of a real process, cut by address.

One process with private and shared memory, dumped twice; in between it grows at a low address and writes one page.
Needs no engine and no GPU.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from image_format import chunk_index
from image_format.file_names import INDEX_NAME
from image_format.index_model import CHUNK_SIZE, RegionKind
from image_format.sealing import seal
from image_format.trust.keys import SigningKey
from image_format.trust.policy import Policy, TrustedKey
from image_format.verifying import verify_directory
from tests.format.make_vectors import base_record

pytestmark = [pytest.mark.engines, pytest.mark.first_row]

MIB = 1 << 20
PROGRAM = """
import mmap, os, time
shared = mmap.mmap(-1, 6 << 20)
private = mmap.mmap(-1, 24 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
low = mmap.mmap(-1, 8 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # mappings grow downwards
for memory, seed in ((shared, 1), (private, 2)):
    for at in range(0, len(memory), 4096):
        memory[at : at + 8] = (at + seed).to_bytes(8, "little")
open("/run/memory-ready", "w").close()
while not os.path.exists("/run/memory-change"):
    time.sleep(0.05)
for at in range(0, len(low), 8192):
    low[at] = 7
private[(9 << 20) + 5] ^= 1
open("/run/memory-changed", "w").close()
time.sleep(600)
"""


def wait_for(machine, path):
    ends = time.monotonic() + 20
    while machine.run(["test", "-e", path], check=False).returncode:
        assert time.monotonic() < ends, f"{path} does not appear"
        time.sleep(0.05)


@pytest.fixture
def dumps(host):
    host.write("/run/memory.py", PROGRAM)
    start = "setsid python3 /run/memory.py </dev/null >/dev/null 2>&1 & echo $!"
    pid = host.run(["sh", "-c", start]).stdout.strip()
    try:
        wait_for(host, "/run/memory-ready")
        first = dump(host, pid, "/var/tmp/dump-1")
        host.write("/run/memory-change", "")
        wait_for(host, "/run/memory-changed")
        yield first, dump(host, pid, "/var/tmp/dump-2")
    finally:
        host.run(["kill", "-9", pid], check=False)
        host.run(["sh", "-c", "rm -rf /var/tmp/dump-? /run/memory*"])


def dump(machine, pid, folder):
    machine.run(["mkdir", "-p", folder])
    machine.run(["criu", "dump", "-t", pid, "-D", folder, "--leave-running", "--shell-job", "-o", "dump.log"])
    return Path(machine.root) / folder.lstrip("/")


def sealed(folder):
    key = SigningKey.generate()
    policy = Policy(keys={key.key_id: TrustedKey("here", Path("here.pub"), key.public)})
    seal(folder, base_record(), key)
    verify_directory(folder, policy)
    return chunk_index.from_bytes((folder / INDEX_NAME).read_bytes())


def test_real_dumps_are_cut_by_address_and_keep_their_chunks(dumps):
    indexes = [sealed(folder) for folder in dumps]
    found = []
    for index in indexes:
        pages = [region for region in index.regions if region.kind == RegionKind.PAGES]
        large = [r for r in index.files if r.name.startswith("pages-") and r.length > MIB]
        assert [region.name for region in large] == [region.name for region in pages]
        assert sum(region.length for region in pages) >= 30 * MIB
        found.append({chunk.id: chunk.length for region in pages for chunk in index.chunks_of(region)})
    lost = {chunk_id: length for chunk_id, length in found[0].items() if chunk_id not in found[1]}
    # The changed page, and what the interpreter itself touched meanwhile: its heap, its stack.
    assert sum(lost.values()) <= 3 * CHUNK_SIZE
    assert sum(found[0].values()) - sum(lost.values()) >= 20 * MIB
