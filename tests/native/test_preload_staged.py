"""libvgpu.so in staged mode on the software driver: an application sees no difference, an agent can take its memory away.

Real processes, the real library, an agent double on a real socket (spec/preload-protocol.md, version 2). No GPU; nothing
measured here is a GPU result.
"""

from __future__ import annotations

import json
import os
import queue
import re
import shutil
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.native.agent_double import (
    DETACH,
    DETACHED,
    EXPORT,
    FAILED,
    INVENTORY,
    MAP,
    MAPPED,
    OPEN,
    PING,
    PONG,
    RELEASE,
    REST,
    RESTED,
    AgentDouble,
)
from tests.native.preload_programs import helper_thread, wait_until
from tests.native.test_software_driver import MIB, Node
from tests.software_gpu import build as software_gpu
from vgpu_preload import build as preload_build

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(__file__).parent / "preload_programs"
# The software driver knows its kernels by name; see tests/software_gpu/driver/kernels.c.
KERNELS = (
    *("vgpu_fill", "vgpu_increment", "vgpu_checksum", "vgpu_spin_ms"),
    *("vgpu_add", "vgpu_wait_word", "vgpu_post_word"),
)
PTX = ".version 5.0\n.target sm_52\n.address_size 64\n" + "".join(
    f".visible .entry {name}()\n{{ ret; }}\n" for name in KERNELS
)
MUSL_LOADER = Path("/lib/ld-musl-x86_64.so.1")
TOOLKITS = sorted(Path("/usr/local").glob("cuda*/include/cuda.h"))


@pytest.fixture(scope="session")
def libraries():
    return software_gpu.build(ROOT / "build/software_gpu")


_run_folders = []


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory):
    """One for all modules that use this fixture by name: a fixture that is imported is made again in each of them."""
    if not _run_folders:
        _run_folders.append(tmp_path_factory.mktemp("staged"))
    return _run_folders[0]


@pytest.fixture(scope="session")
def preload(run_folder):
    return compiled(run_folder, "libvgpu.so")


SMALL_TABLES = ("MOST_OBJECTS=4", "MOST_IMPORT_DESCRIPTORS=1")


def compiled(folder, name, *defines, libc="glibc"):
    """The library under this name, which the tests of a session share."""
    if (folder / name).exists():
        return folder / name
    paths = (f'VGPU_SOCKET_PATH="{folder}/agent.sock"', f'VGPU_MODE_PATH="{folder}/mode"')
    preload_build.compile_library(folder / name, libc, defines=(*paths, *defines))
    return folder / name


class Stage:
    """A node of two software GPUs, an agent double, and processes with the preload in front."""

    def __init__(self, node, agent, run_folder, library):
        self.node, self.agent, self.run_folder, self.library = node, agent, run_folder, library

    def set_mode(self, mode):
        (self.run_folder / "mode").write_text(f"{mode}\n")

    def program(self, command, environment):
        """A program in staged mode, which the environment gives the preload; its standard streams are pipes."""
        self.set_mode("staged")
        return subprocess.Popen(
            command,
            env={**self.node.environment, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def child(self, source="", mode="staged", **environment):
        """A process that runs Python, and the agent's connection to it (none without the preload)."""
        self.set_mode(mode)
        if mode == "plain":
            return self.node.child(source, **environment), None
        child = self.node.child("start(); " + source, LD_PRELOAD=str(self.library), **environment)
        peer = self.agent.arrival(20)
        assert peer.pid == child.pid
        return child, peer

    def again(self):
        return self.agent.arrival(20)

    def end(self):
        for child in self.node.children:
            child.kill()


@pytest.fixture
def make_stage(tmp_path, libraries, run_folder):
    stages = []

    def make(library, memory=256 * MIB):
        folder = tmp_path / f"gpu{len(stages)}"
        folder.mkdir()
        agent = AgentDouble(run_folder / "agent.sock")
        agent.start()
        stages.append(Stage(Node(libraries, folder, memory=memory), agent, run_folder, library))
        return stages[-1]

    yield make
    for stage in stages:
        stage.end()
        stage.agent.stop()


@pytest.fixture
def stage(make_stage, preload):
    return make_stage(preload)


def close_all(fds):
    for fd in fds.values():
        os.close(fd)


def take_away(peer):
    """EXPORT, REST, RELEASE; gives the descriptors."""
    fds = peer.export()
    rested = peer.rest()
    fds.update(peer.export(rested["new"]) if rested["new"] else {})
    for gone in rested["gone"]:
        os.close(fds.pop(gone))
    peer.release()
    return fds


def bring_back(peer, fds):
    peer.map(fds)
    peer.open_gate()
    close_all(fds)


def device_mappings(pid):
    return [line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "software-gpu" in line]


# ---- what an application can see -----------------------------------------------------------------

# Each piece of Python gives `result`; it must be the same with the plain driver, in driver mode and in staged mode.
# Sizes are whole MiB, because the software driver rounds its own allocations less than a real one does.
OBSERVABLES = {
    "pointer attributes": """
A = d.CUpointer_attribute
names = ["MEMORY_TYPE", "IS_MANAGED", "DEVICE_ORDINAL", "RANGE_SIZE", "MAPPED", "ALLOWED_HANDLE_TYPES", "ACCESS_FLAGS",
         "MEMPOOL_HANDLE", "HOST_POINTER", "IS_GPU_DIRECT_RDMA_CAPABLE"]
p = ok(d.cuMemAlloc(6 * MIB))
result = []
for name in names:
    answer = d.cuPointerGetAttribute(getattr(A, "CU_POINTER_ATTRIBUTE_" + name), int(p) + 4096)
    result.append([name, code(answer), str(answer[1]) if code(answer) == 0 else None])
for name in ["DEVICE_POINTER", "RANGE_START_ADDR"]:
    result.append([name, int(ok(d.cuPointerGetAttribute(getattr(A, "CU_POINTER_ATTRIBUTE_" + name), int(p) + 4096))) - int(p)])
context = ok(d.cuPointerGetAttribute(A.CU_POINTER_ATTRIBUTE_CONTEXT, p))
result.append(int(context) == int(ok(d.cuCtxGetCurrent())))
ok(d.cuMemFree(p))
""",
    "pointer attributes together": """
A = d.CUpointer_attribute
p = ok(d.cuMemAlloc(6 * MIB))
wanted = [A.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, A.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, A.CU_POINTER_ATTRIBUTE_RANGE_SIZE,
          A.CU_POINTER_ATTRIBUTE_IS_MANAGED, A.CU_POINTER_ATTRIBUTE_HOST_POINTER, A.CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES]
result = [str(v) for v in ok(d.cuPointerGetAttributes(len(wanted), wanted, int(p) + 100))]
ok(d.cuMemFree(p))
result.append(code(d.cuPointerGetAttributes(1, wanted[:1], p)))
""",
    "buffer ids differ and stay": """
A = d.CUpointer_attribute.CU_POINTER_ATTRIBUTE_BUFFER_ID
p, q = ok(d.cuMemAlloc(4 * MIB)), ok(d.cuMemAlloc(4 * MIB))
ids = [ok(d.cuPointerGetAttribute(A, x)) for x in (p, q, p)]
ok(d.cuMemFree(p)); ok(d.cuMemFree(q))
result = [ids[0] == ids[2], ids[0] != ids[1], ids[0] > 0]
""",
    "address range": """
p = ok(d.cuMemAlloc(5 * MIB + 4096))
base, size = ok(d.cuMemGetAddressRange(int(p) + 3 * MIB))
outside = code(d.cuMemGetAddressRange(int(p) + 5 * MIB + 4096))
ok(d.cuMemFree(p))
result = [int(base) - int(p), size, outside, code(d.cuMemGetAddressRange(p))]
""",
    "alignment": """
ps = [ok(d.cuMemAlloc(n * MIB)) for n in (2, 3, 4)]
result = [int(p) % 512 for p in ps]
[ok(d.cuMemFree(p)) for p in ps]
""",
    "memory info": """
before = ok(d.cuMemGetInfo())
ps = [ok(d.cuMemAlloc(n * MIB)) for n in (2, 4, 8)]
during = ok(d.cuMemGetInfo())
[ok(d.cuMemFree(p)) for p in ps]
after = ok(d.cuMemGetInfo())
result = [before[0] - during[0], before[1], after[0] == before[0]]
""",
    "out of memory": """
free, total = ok(d.cuMemGetInfo())
result = [code(d.cuMemAlloc(total + 2 * MIB)), code(d.cuMemAlloc(1 << 60)), code(d.cuMemAlloc(0)), code(d.cuMemAlloc((1 << 64) - 1))]
ps = []
while True:
    answer = d.cuMemAlloc(16 * MIB)
    if code(answer) != 0: break
    ps.append(answer[1])
result += [len(ps), code(answer)]
[ok(d.cuMemFree(p)) for p in ps]
p = ok(d.cuMemAlloc(16 * MIB)); ok(d.cuMemFree(p))
""",
    "wrong frees": """
p = ok(d.cuMemAlloc(4 * MIB))
result = [code(d.cuMemFree(int(p) + 2 * MIB)), code(d.cuMemFree(p)), code(d.cuMemFree(p)), code(d.cuMemFree(0)), code(d.cuMemFree(12345))]
""",
    "free from another thread": """
p = ok(d.cuMemAlloc(4 * MIB)); found = []
def work():
    ok(d.cuCtxSetCurrent(context)); found.append(code(d.cuMemFree(p)))
context = ok(d.cuCtxGetCurrent())
thread = threading.Thread(target=work); thread.start(); thread.join()
result = [found, code(d.cuMemGetAddressRange(p))]
""",
    "no context": """
context = ok(d.cuCtxGetCurrent()); ok(d.cuCtxSetCurrent(0))
result = [code(d.cuMemAlloc(4 * MIB))]
ok(d.cuCtxSetCurrent(context))
""",
    "pitch": """
p, pitch = ok(d.cuMemAllocPitch(3000, 2000, 4))
base, size = ok(d.cuMemGetAddressRange(p))
result = [pitch, size, code(d.cuMemFree(p)), code(d.cuMemAllocPitch(0, 100, 4)), code(d.cuMemAllocPitch(1 << 40, 1 << 40, 4))]
""",
    "copies across whole allocations": """
p, q = ok(d.cuMemAlloc(4 * MIB)), ok(d.cuMemAlloc(4 * MIB))
write(p, bytes(range(256)) * (4 * MIB // 256)); ok(d.cuMemsetD8(q, 7, 4 * MIB)); ok(d.cuMemcpyDtoD(q, p, 2 * MIB))
result = [read(q, 4).hex(), read(int(q) + 3 * MIB, 4).hex(), code(d.cuMemcpyDtoD(q, p, 64 * MIB)), code(d.cuMemsetD32(q, 5, 2 * MIB))]
ok(d.cuMemFree(p)); ok(d.cuMemFree(q))
""",
    "free waits for the work of the context": """
f = kernels(PTX); s = ok(d.cuStreamCreate(1)); p = ok(d.cuMemAlloc(4 * MIB))
ok(launch(f["vgpu_spin_ms"], s, 150)); ok(d.cuMemsetD8Async(p, 1, 4 * MIB, s))
result = [code(d.cuMemFree(p)), code(d.cuStreamQuery(s)), code(d.cuStreamDestroy(s))]
""",
    "a destroyed context takes its memory with it": """
old = ok(d.cuCtxGetCurrent()); before = ok(d.cuMemGetInfo())[0]
c = ok(d.cuCtxCreate(None, 0, 0)); p = ok(d.cuMemAlloc(8 * MIB)); ok(d.cuCtxDestroy(c)); ok(d.cuCtxSetCurrent(old))
result = [code(d.cuMemGetAddressRange(p)), before - ok(d.cuMemGetInfo())[0], code(d.cuMemFree(p))]
""",
    "the last release of a primary context takes its memory with it": """
old = ok(d.cuCtxGetCurrent())
c = ok(d.cuDevicePrimaryCtxRetain(1)); ok(d.cuCtxSetCurrent(c)); p = ok(d.cuMemAlloc(8 * MIB))
ok(d.cuDevicePrimaryCtxRetain(1)); ok(d.cuDevicePrimaryCtxRelease(1)); kept = code(d.cuMemGetAddressRange(p))
ok(d.cuDevicePrimaryCtxRelease(1)); ok(d.cuCtxSetCurrent(old))
result = [kept, code(d.cuMemGetAddressRange(p))]
c = ok(d.cuDevicePrimaryCtxRetain(1)); ok(d.cuCtxSetCurrent(c)); p = ok(d.cuMemAlloc(8 * MIB)); free = ok(d.cuMemGetInfo())
ok(d.cuDevicePrimaryCtxReset(1)); ok(d.cuCtxSetCurrent(old))
result += [free[1] - free[0], code(d.cuMemGetAddressRange(p))]
""",
    "allocation and free during a capture": """
s = ok(d.cuStreamCreate(1)); p = ok(d.cuMemAlloc(4 * MIB)); M = d.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
ok(d.cuStreamBeginCapture(s, M)); ok(d.cuThreadExchangeStreamCaptureMode(M))
q = ok(d.cuMemAlloc(4 * MIB)); ok(d.cuMemsetD8Async(q, 9, 4 * MIB, s)); freed = code(d.cuMemFree(p))
graph = ok(d.cuStreamEndCapture(s)); exec_ = ok(d.cuGraphInstantiate(graph, 0)); ok(d.cuGraphLaunch(exec_, s))
ok(d.cuStreamSynchronize(s))
ok(d.cuThreadExchangeStreamCaptureMode(d.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL))
ok(d.cuMemFree(ok(d.cuMemAlloc(2 * MIB))))
result = [freed, read(q, 2).hex(), code(d.cuMemGetAddressRange(p)), code(d.cuMemFree(q)), code(d.cuStreamDestroy(s))]
""",
    "stream-ordered memory": """
s = ok(d.cuStreamCreate(1)); p = ok(d.cuMemAllocAsync(4 * MIB, s)); ok(d.cuMemsetD8Async(p, 3, 4 * MIB, s)); ok(d.cuStreamSynchronize(s))
first = read(p, 2).hex(); freed = code(d.cuMemFreeAsync(p, s)); q = ok(d.cuMemAllocAsync(4 * MIB, s))
result = [first, freed, code(d.cuMemFree(q)), code(d.cuStreamSynchronize(s)), code(d.cuStreamDestroy(s))]
""",
    "small allocations": """
p = ok(d.cuMemAlloc(1000)); base, size = ok(d.cuMemGetAddressRange(p))
result = [size, int(base) == int(p), code(d.cuMemFree(p)), code(d.cuMemFree(p))]
""",
    "own VMM: handle types stay as asked": """
H = d.CUmemAllocationHandleType
plain, shared = ok(d.cuMemCreate(4 * MIB, properties(shareable=False), 0)), ok(d.cuMemCreate(4 * MIB, properties(), 0))
result = [str(ok(d.cuMemGetAllocationPropertiesFromHandle(h)).requestedHandleTypes) for h in (plain, shared)]
result.append(code(d.cuMemExportToShareableHandle(plain, H.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0)))
p = map_memory(plain, 4 * MIB)
A = d.CUpointer_attribute
result += [str(ok(d.cuPointerGetAttribute(A.CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES, p))),
           int(ok(d.cuPointerGetAttribute(A.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, p))) - int(p)]
result += [code(d.cuMemUnmap(p, 4 * MIB)), code(d.cuMemRelease(plain)), code(d.cuMemRelease(shared)), code(d.cuMemAddressFree(p, 4 * MIB))]
""",
    "own VMM: faults": """
h = ok(d.cuMemCreate(4 * MIB, properties(), 0)); p = ok(d.cuMemAddressReserve(8 * MIB, 0, 0, 0)); q = ok(d.cuMemAlloc(4 * MIB))
result = [code(d.cuMemMap(p, 8 * MIB, 0, h, 0)), code(d.cuMemMap(p, 2 * MIB, 4 * MIB, h, 0)), code(d.cuMemUnmap(p, 4 * MIB))]
ok(d.cuMemMap(p, 4 * MIB, 0, h, 0))
result += [code(d.cuMemMap(p, 4 * MIB, 0, h, 0)), code(d.cuMemUnmap(p, 2 * MIB)), code(d.cuMemAddressFree(p, 8 * MIB))]
result += [code(d.cuMemUnmap(q, 4 * MIB)), code(d.cuMemSetAccess(q, 4 * MIB, [access()], 1)), code(d.cuMemRetainAllocationHandle(int(q))),
           code(d.cuMemGetAccess(access().location, q)), code(d.cuMemAddressFree(q, 4 * MIB)), code(d.cuMemCreate(1000, properties(), 0)), code(d.cuMemRelease(77))]
result += [code(d.cuMemUnmap(p, 4 * MIB)), code(d.cuMemRelease(h)), code(d.cuMemRelease(h)), code(d.cuMemAddressFree(p, 8 * MIB)), code(d.cuMemFree(q))]
""",
    "own VMM: released while mapped, retained, freed at last": """
before = ok(d.cuMemGetInfo())[0]
h = ok(d.cuMemCreate(4 * MIB, properties(), 0)); p = map_memory(h, 4 * MIB); ok(d.cuMemRelease(h))
write(p, b"abcd"); again = ok(d.cuMemRetainAllocationHandle(int(p))); q = map_memory(again, 4 * MIB)
result = [read(q, 4).decode(), code(d.cuMemRelease(again)), before - ok(d.cuMemGetInfo())[0]]
result += [code(d.cuMemUnmap(p, 4 * MIB)), read(q, 4).decode(), code(d.cuMemUnmap(q, 4 * MIB)), before - ok(d.cuMemGetInfo())[0]]
result += [code(d.cuMemAddressFree(x, 4 * MIB)) for x in (p, q)]
""",
    "own VMM: sharing within the process": """
H = d.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
h = ok(d.cuMemCreate(4 * MIB, properties(), 0)); p = map_memory(h, 4 * MIB); write(p, b"abcd")
fd = ok(d.cuMemExportToShareableHandle(h, H, 0)); i = ok(d.cuMemImportFromShareableHandle(fd, H)); q = map_memory(i, 4 * MIB)
import os; os.close(fd)
result = [read(q, 4).decode(), code(d.cuMemExportToShareableHandle(i, H, 0))]
result += [code(d.cuMemUnmap(x, 4 * MIB)) for x in (p, q)] + [code(d.cuMemRelease(x)) for x in (h, i)] + [code(d.cuMemAddressFree(x, 4 * MIB)) for x in (p, q)]
""",
    "managed and host memory": """
p = ok(d.cuMemAllocManaged(4 * MIB, 1)); q = ok(d.cuMemHostAlloc(4 * MIB, 0))
A = d.CUpointer_attribute
result = [ok(d.cuPointerGetAttribute(A.CU_POINTER_ATTRIBUTE_IS_MANAGED, p)), str(ok(d.cuPointerGetAttribute(A.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, int(q))))]
result += [code(d.cuMemFree(p)), code(d.cuMemFreeHost(q))]
""",
    "peers": """
own = ok(d.cuCtxGetCurrent()); other = ok(d.cuDevicePrimaryCtxRetain(1))
result = [code(d.cuCtxEnablePeerAccess(other, 0)), code(d.cuCtxEnablePeerAccess(other, 0)), code(d.cuCtxDisablePeerAccess(other)), code(d.cuCtxDisablePeerAccess(other))]
ok(d.cuDevicePrimaryCtxRelease(1))
""",
    "legacy IPC within the process": """
p = ok(d.cuMemAlloc(4 * MIB)); h = offer(p)
result = [h == offer(int(p) + 4096), code(d.cuIpcOpenMemHandle(handle_from(h), 1)), code(d.cuIpcCloseMemHandle(p)), code(d.cuMemFree(p))]
result += [code(d.cuIpcGetMemHandle(p))]
A = d.CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
p = ok(d.cuMemAlloc(4 * MIB)); result += [ok(d.cuPointerGetAttribute(A, p)), str(ok(d.cuPointerGetAttributes(1, [A], p)))]
ok(d.cuMemFree(p))
""",
}


@pytest.fixture(scope="session")
def seen(tmp_path_factory, libraries, preload, run_folder):
    """What each observable is in each mode."""
    folder, answers = tmp_path_factory.mktemp("observed"), {}
    agent = AgentDouble(run_folder / "agent.sock")
    agent.start()
    stage = Stage(Node(libraries, folder, memory=64 * MIB), agent, run_folder, preload)
    for mode in ("plain", "driver", "staged"):
        child, _ = stage.child("start()" if mode == "plain" else "", mode)
        child.run(f"MIB = {MIB}; PTX = {PTX!r}")
        answers[mode] = {name: outcome(child, source) for name, source in OBSERVABLES.items()}
        child.kill()
    agent.stop()
    return answers


def outcome(child, source):
    try:
        return child.run(source)
    except AssertionError as failure:
        return str(failure)


@pytest.mark.parametrize("observable", OBSERVABLES)
def test_an_application_sees_what_it_sees_with_the_plain_driver(observable, seen):
    assert "failure" not in str(seen["plain"][observable])
    assert seen["driver"][observable] == seen["plain"][observable]
    assert seen["staged"][observable] == seen["plain"][observable]


# ---- a process is moved --------------------------------------------------------------------------

FILL = f"MIB = {MIB}; pattern = lambda n: bytes((n * 31 + i) % 251 for i in range(4096)) * (MIB // 4096)\n"
# Fills `ps` with allocations that hold known content; `same()` says whether they still do.
SEVERAL = (
    FILL
    + """
sizes = [2, 3, 8, 2, 5]
ps = [ok(d.cuMemAlloc(n * MIB)) for n in sizes]
for n, (p, size) in enumerate(zip(ps, sizes)):
    for at in range(size): write(int(p) + at * MIB, pattern(n * 10 + at))
def same():
    return all(read(int(p) + at * MIB, MIB) == pattern(n * 10 + at) for n, (p, size) in enumerate(zip(ps, sizes)) for at in range(size))
result = [hex(int(p)) for p in ps]
"""
)


def test_hello_says_what_is_held(stage):
    child, peer = stage.child()
    assert {key: peer.hello[key] for key in ("mode", "protocol", "phase", "held")} == {
        "mode": "staged",
        "protocol": 2,
        "phase": "open",
        "held": {"objects": 0, "bytes": 0, "driver_bytes": 0},
    }
    child.run(SEVERAL + "small = ok(d.cuMemAlloc(1000))")
    peer.hang_up()
    assert stage.again().hello["held"] == {"objects": 5, "bytes": 22 * MIB, "driver_bytes": 1000}


def test_the_written_protocol_is_what_is_spoken(stage):
    page = (ROOT / "spec/preload-protocol.md").read_text()
    written = json.loads(re.findall(r"```json\n(.*?)```", page, re.DOTALL)[1])
    child, peer = stage.child(SEVERAL)
    assert shape_of(written) == shape_of(peer.hello)
    described = re.findall(r"^\| `((?:objects|imports|driver_held|blockers)[a-z_\[\].`, ]+)` \|", page, re.MULTILINE)
    child.run("small = ok(d.cuMemAlloc(1000)); managed = ok(d.cuMemAllocManaged(4096, 1))")
    _, other = stage.child(f"q = opened({child.run('result = offer(ps[0])')!r})")
    spoken = [*member_names(peer.inventory()), *member_names(other.inventory()), "imports[].obstacle"]  # a rare one
    assert sorted({name.replace("`, `", ", ") for name in described}) == sorted(
        {"driver_held[].count, .bytes" if name == "driver_held[].count" else name for name in spoken}
        - {"driver_held[].bytes", "imports", "objects", "driver_held"}  # the last three: where the list is empty
    )


def shape_of(value):
    if isinstance(value, dict):
        return {name: shape_of(member) for name, member in value.items()}
    return [shape_of(value[0])] if isinstance(value, list) else type(value)


def member_names(value, at=""):
    """The names of all members, as the page writes them; a list stands for its first element."""
    for name, member in value.items():
        path = f"{at}.{name}" if at else name
        if isinstance(member, list) and member and isinstance(member[0], dict):
            yield from member_names(member[0], f"{path}[]")
        elif isinstance(member, dict):
            yield from member_names(member, path)
        else:
            yield path


def test_the_inventory_names_each_object_and_its_mapping(stage):
    child, peer = stage.child()
    addresses = child.run(SEVERAL)
    inventory = peer.inventory()
    uuid = peer.hello["devices"][0]["uuid"]
    assert [(o["size"], o["requested"], o["device"], o["uuid"], o["kind"]) for o in inventory["objects"]] == [
        (size * MIB, requested * MIB, 0, uuid, "alloc") for size, requested in [(2, 2), (4, 3), (8, 8), (2, 2), (6, 5)]
    ]
    assert [o["mappings"] for o in inventory["objects"]] == [
        [{"va": address, "size": o["size"], "offset": 0, "access": [[0, 3]]}]
        for address, o in zip(addresses, inventory["objects"], strict=True)
    ]
    assert (inventory["driver_held"], inventory["blockers"]) == ([], [])
    assert len({o["id"] for o in inventory["objects"]}) == 5


def test_memory_goes_and_comes_back_at_the_same_address_with_its_content(stage):
    child, peer = stage.child()
    child.run(SEVERAL)
    for _ in range(3):
        fds = take_away(peer)
        assert device_mappings(child.pid) == []
        bring_back(peer, fds)
        assert child.run("result = same()")
    assert child.run("result = [code(d.cuMemFree(p)) for p in ps]") == [0] * 5
    assert peer.inventory()["objects"] == []


def test_while_memory_is_away_the_process_waits_and_holds_no_descriptor_of_it(stage):
    child, peer = stage.child()
    child.run(SEVERAL)
    fds = take_away(peer)
    bring_back(peer, fds)
    kept = [link for link in descriptors_of(child.pid) if "memfd:software-gpu" in link[1]]
    assert len(kept) >= 5
    assert min(int(number) for number, link in kept if int(number) >= 200) >= 1000
    fds = take_away(peer)
    own = [number for number, link in descriptors_of(child.pid) if "memfd:software-gpu" in link]
    assert own == []
    child.send("result = same()")
    assert not child.is_answering(0.2)
    bring_back(peer, fds)
    assert child.receive()


def descriptors_of(pid):
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.append((entry.name, str(entry.readlink())))
        except FileNotFoundError:
            continue
    return found


def test_memory_may_come_back_as_another_object_made_by_another_process(stage, tmp_path):
    """As in a restore: new physical memory, filled elsewhere, at the old addresses."""
    child, peer = stage.child()
    child.run(SEVERAL)
    objects = {o["id"]: o["size"] for o in peer.inventory()["objects"]}
    fds = take_away(peer)
    other = maker_of_memory(stage.node, tmp_path / "maker.sock")
    fresh = {}
    for name, size in objects.items():
        fresh[name] = other(size, os.pread(fds[name], size, 0))
    close_all(fds)
    bring_back(peer, fresh)
    assert child.run("result = same()")
    fds = take_away(peer)
    bring_back(peer, fds)
    assert child.run("result = same()")


def maker_of_memory(node, path):
    """A process that owns device memory; gives a function (size, content) -> descriptor."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    child = node.child(
        f"import socket; start(); s = socket.socket(socket.AF_UNIX); s.connect({str(path)!r})\n"
        "H = d.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR\n"
        "def make(size, content):\n"
        "    h = ok(d.cuMemCreate(size, properties(), 0)); p = map_memory(h, size)\n"
        "    write(p, open(content, 'rb').read()); socket.send_fds(s, [b'x'], [ok(d.cuMemExportToShareableHandle(h, H, 0))])\n"
    )
    connection, _ = listener.accept()
    listener.close()

    def make(size, content):
        file = path.with_suffix(".content")
        file.write_bytes(content)
        child.run(f"make({size}, {str(file)!r})")
        return socket.recv_fds(connection, 1, 1)[1][0]

    return make


def test_export_shows_the_living_memory_while_the_application_goes_on(stage):
    child, peer = stage.child()
    child.run(SEVERAL)
    fds = peer.export()
    child.run("write(ps[0], b'later')")
    assert os.pread(fds[min(fds)], 5, 0) == b"later"
    close_all(fds)


def test_an_export_of_some_gives_those_that_still_exist(stage):
    child, peer = stage.child()
    child.run(SEVERAL)
    ids = [o["id"] for o in peer.inventory()["objects"]]
    child.run("ok(d.cuMemFree(ps[1]))")
    fds = peer.export([ids[0], ids[1], ids[4], 999999999])
    assert sorted(fds) == [ids[0], ids[4]]
    close_all(fds)


def test_rest_tells_what_came_and_went_since_the_inventory(stage):
    child, peer = stage.child()
    child.run(SEVERAL)
    ids = [o["id"] for o in peer.inventory()["objects"]]
    child.run(
        "ok(d.cuMemFree(ps[0])); p = ok(d.cuMemAlloc(2 * MIB)); q = ok(d.cuMemAlloc(2 * MIB)); ok(d.cuMemFree(q))"
    )
    rested = peer.rest()
    now = [o["id"] for o in peer.inventory()["objects"]]
    assert rested["gone"] == [ids[0]]
    assert rested["new"] == sorted(set(now) - set(ids))
    assert len(rested["new"]) == 1
    assert peer.rest()["new"] == []
    peer.open_gate()


def test_many_objects_travel_in_frames_of_two_hundred_past_the_limit_of_open_files(make_stage, preload):
    stage = make_stage(preload, memory=2048 * MIB)
    child, peer = stage.child("import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (400, 4096))")
    child.run(
        FILL
        + "ps = [ok(d.cuMemAlloc(2 * MIB)) for _ in range(250)]\nfor n, p in enumerate(ps): write(p, n.to_bytes(8, 'little'))"
    )
    child.run("free = lambda: (ok(d.cuMemGetInfo())[0]); before = free()")
    fds = take_away(peer)
    assert len(fds) == 250
    bring_back(peer, fds)
    assert child.run("result = [int.from_bytes(read(p, 8), 'little') for p in ps] == list(range(250))")
    assert child.run("import resource; result = resource.getrlimit(resource.RLIMIT_NOFILE)") == [400, 4096]
    again = peer.export()
    assert len(again) == 250
    close_all(again)


@pytest.mark.parametrize("closing", ["closes all", "puts files there"])
def test_an_application_that_closes_our_descriptors_is_told_apart(closing, stage):
    child, peer = stage.child()
    child.run(SEVERAL)
    bring_back(peer, take_away(peer))
    child.run("import os; os.closerange(1000, 1100)")
    if closing == "puts files there":
        child.run("f = os.open('/dev/null', 0); [os.dup2(f, n) for n in range(1000, 1020)]")
    kind, answer = peer.ask(EXPORT)
    assert (kind, answer["what"]) == (FAILED, "the descriptor was closed by the application")
    assert child.run("result = same()")
    if closing == "puts files there":
        peer.rest()
        peer.release()
        links = [link for number, link in descriptors_of(child.pid) if 1000 <= int(number) < 1020]
        assert links == ["/dev/null"] * 20


# ---- the application's own VMM -------------------------------------------------------------------

OWN_VMM = (
    FILL
    + """
whole = ok(d.cuMemCreate(8 * MIB, properties(shareable=False), 0))
base = ok(d.cuMemAddressReserve(32 * MIB, 0, 0, 0))
va = lambda n: int(base) + n * MIB
ok(d.cuMemMap(va(0), 4 * MIB, 4 * MIB, whole, 0)); ok(d.cuMemMap(va(8), 8 * MIB, 0, whole, 0))
ok(d.cuMemSetAccess(va(0), 4 * MIB, [access(flags=1)], 1)); ok(d.cuMemSetAccess(va(8), 8 * MIB, [access()], 1))
gone = ok(d.cuMemCreate(4 * MIB, properties(), 0)); ok(d.cuMemMap(va(16), 4 * MIB, 0, gone, 0))
ok(d.cuMemSetAccess(va(16), 4 * MIB, [access()], 1)); ok(d.cuMemRelease(gone))
loose = ok(d.cuMemCreate(2 * MIB, properties(), 0)); ok(d.cuMemMap(va(24), 2 * MIB, 0, loose, 0))
ok(d.cuMemSetAccess(va(24), 2 * MIB, [access()], 1)); write(va(24), b"loose"); ok(d.cuMemUnmap(va(24), 2 * MIB))
write(va(8), pattern(1)); write(va(12), pattern(2)); write(va(16), pattern(3))
"""
)


def test_the_applications_own_mappings_come_back_whatever_became_of_their_handles(stage):
    child, peer = stage.child()
    child.run(OWN_VMM)
    objects = peer.inventory()["objects"]
    base = child.run("result = int(base)")
    shape = [
        (
            o["kind"],
            o["size"] // MIB,
            sorted(
                ((int(m["va"], 16) - base) // MIB, m["size"] // MIB, m["offset"] // MIB, m["access"])
                for m in o["mappings"]
            ),
        )
        for o in objects
    ]
    assert shape == [
        ("vmm", 8, [(0, 4, 4, [[0, 1]]), (8, 8, 0, [[0, 3]])]),
        ("vmm", 4, [(16, 4, 0, [[0, 3]])]),
        ("vmm", 2, []),
    ]
    for _ in range(2):
        bring_back(peer, take_away(peer))
        assert (
            child.run(
                "result = [read(va(8), MIB) == pattern(1), read(va(0), MIB) == pattern(2), read(va(16), MIB) == pattern(3)]"
            )
            == [True] * 3
        )
        assert child.run("result = code(d.cuMemcpyHtoD(va(0), b'x', 1))") != 0  # read-only, as before
        ask = "ok(d.cuMemMap(va(24), 2 * MIB, 0, loose, 0)); ok(d.cuMemSetAccess(va(24), 2 * MIB, [access()], 1)); result = read(va(24), 5).decode(); ok(d.cuMemUnmap(va(24), 2 * MIB))"
        assert child.run(ask) == "loose"
    free = child.run("result = ok(d.cuMemGetInfo())[0]")
    child.run(
        "ok(d.cuMemUnmap(va(0), 4 * MIB)); ok(d.cuMemUnmap(va(8), 12 * MIB)); ok(d.cuMemRelease(whole)); ok(d.cuMemRelease(loose)); ok(d.cuMemAddressFree(base, 32 * MIB))"
    )
    assert peer.inventory()["objects"] == []
    assert child.run("result = ok(d.cuMemGetInfo())[0]") >= free


def test_a_handle_can_still_be_exported_after_its_memory_came_back(stage):
    child, peer = stage.child()
    child.run(FILL + "h = ok(d.cuMemCreate(2 * MIB, properties(), 0)); p = map_memory(h, 2 * MIB); write(p, b'abcd')")
    bring_back(peer, take_away(peer))
    child.run(
        "H = d.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR; fd = ok(d.cuMemExportToShareableHandle(h, H, 0))"
    )
    assert child.run("import os; result = os.pread(fd, 4, 0).decode()") == "abcd"


# ---- what stays with the driver, and what stands in the way --------------------------------------

HELD = {
    "small": (
        "a, b = ok(d.cuMemAlloc(1000)), ok(d.cuMemAlloc(MIB))",
        2,
        1000 + MIB,
        "ok(d.cuMemFree(a)); ok(d.cuMemFree(b))",
    ),
    "pool": (
        "s = ok(d.cuStreamCreate(1)); a = ok(d.cuMemAllocAsync(4 * MIB, s)); b = ok(d.cuMemAllocAsync(MIB, s))",
        2,
        5 * MIB,
        "ok(d.cuMemFreeAsync(a, s)); ok(d.cuMemFree(b))",
    ),
}


@pytest.mark.parametrize("kind", HELD)
def test_what_the_driver_holds_is_counted(kind, stage):
    make, count, size, end = HELD[kind]
    child, peer = stage.child(f"MIB = {MIB}; {make}")
    assert peer.inventory()["driver_held"] == [{"kind": kind, "count": count, "bytes": size}]
    child.run(end)
    assert peer.inventory()["driver_held"] == []


def test_small_memory_of_a_destroyed_context_is_not_counted_any_more(stage):
    child, peer = stage.child("c = ok(d.cuCtxCreate(None, 0, 0)); p = ok(d.cuMemAlloc(1000))")
    assert peer.inventory()["driver_held"] == [{"kind": "small", "count": 1, "bytes": 1000}]
    child.run("ok(d.cuCtxDestroy(c))")
    assert peer.inventory()["driver_held"] == []


BLOCKERS = {
    "managed": ("p = ok(d.cuMemAllocManaged(3 * MIB, 1))", 3 * MIB, "ok(d.cuMemFree(p))"),
    "import": (
        "h = ok(d.cuMemCreate(4 * MIB, properties(), 0)); fd = ok(d.cuMemExportToShareableHandle(h, H, 0)); ok(d.cuMemRelease(h)); i = ok(d.cuMemImportFromShareableHandle(fd, H)); p = map_memory(i, 4 * MIB)",
        4 * MIB,
        "ok(d.cuMemUnmap(p, 4 * MIB)); ok(d.cuMemRelease(i))",
    ),
    "export": (
        "h = ok(d.cuMemCreate(4 * MIB, properties(), 0)); p = map_memory(h, 4 * MIB); fd = ok(d.cuMemExportToShareableHandle(h, H, 0))",
        4 * MIB,
        "ok(d.cuMemUnmap(p, 4 * MIB)); ok(d.cuMemRelease(h))",
    ),
}


@pytest.mark.parametrize("kind", BLOCKERS)
def test_what_cannot_be_moved_is_named(kind, stage):
    make, size, end = BLOCKERS[kind]
    prelude = f"MIB = {MIB}; H = d.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR; "
    child, peer = stage.child(prelude + make)
    (blocker,) = peer.inventory()["blockers"]
    assert (blocker["kind"], blocker["bytes"], int(blocker["va"], 16)) == (kind, size, child.run("result = int(p)"))
    assert kind == "managed" or f"process {child.pid}" in blocker["what"]
    child.run(end)
    assert peer.inventory()["blockers"] == []


def test_live_imports_are_never_released(stage):
    make, _, _ = BLOCKERS["import"]
    child, peer = stage.child(
        f"MIB = {MIB}; H = d.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR; "
        + make
        + "; write(p, b'abcd')"
    )
    peer.rest()
    kind, answer = peer.ask(RELEASE)
    assert (kind, answer["what"]) == (
        FAILED,
        f"memory imported by process {child.pid} with cuMemImportFromShareableHandle, whose owner is not known here",
    )
    peer.open_gate()
    assert child.run("result = read(p, 4).decode()") == "abcd"


# ---- the gate ------------------------------------------------------------------------------------


def test_a_closed_gate_stops_calls_and_an_open_one_lets_them_go_on(stage):
    child, peer = stage.child(SEVERAL)
    peer.rest()
    child.send("result = same()")
    assert not child.is_answering(0.2)
    peer.open_gate()
    assert child.receive()


CALLS_THAT_WAIT = {
    "launch": "launch(f['vgpu_spin_ms'], s, 0)",
    "graph launch": "d.cuGraphLaunch(x, s)",
    "copy": "d.cuMemcpyDtoD(p, q, 16)",
    "copy in a stream": "d.cuMemcpyDtoDAsync(p, q, 16, s)",
    "fill": "d.cuMemsetD8Async(p, 0, 16, s)",
    "allocate": "d.cuMemAlloc(4 << 20)",
    "allocate little": "d.cuMemAlloc(100)",
    "free": "d.cuMemFree(p)",
    "create": "d.cuMemCreate(4 << 20, properties(), 0)",
    "event record": "d.cuEventRecord(e, s)",
    "stream create": "d.cuStreamCreate(1)",
    "module load": "d.cuModuleLoadData(PTX.encode())",
    "host alloc": "d.cuMemHostAlloc(4096, 0)",
    "host function": "d.cuLaunchHostFunc(s, 0, 0)",
    "capture": "d.cuStreamBeginCapture(s, d.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)",
    "context": "d.cuCtxCreate(None, 0, 0)",
    "memory info": "d.cuMemGetInfo()",
    "pointer attribute": "d.cuPointerGetAttribute(d.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, p)",
}
CALLS_THAT_GO_ON = {
    "stream query": "d.cuStreamQuery(s)",
    "stream synchronize": "d.cuStreamSynchronize(s)",
    "event query": "d.cuEventQuery(e)",
    "current context": "d.cuCtxGetCurrent()",
    "device attribute": "d.cuDeviceGetAttribute(d.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_WARP_SIZE, 0)",
}


def test_each_kind_of_call_that_touches_memory_or_submits_work_waits_and_others_do_not(stage):
    child, peer = stage.child(
        f"PTX = {PTX!r}; f = kernels(PTX); s = ok(d.cuStreamCreate(1)); e = ok(d.cuEventCreate(0)); p, q = ok(d.cuMemAlloc(4 << 20)), ok(d.cuMemAlloc(4 << 20))\n"
        "g = ok(d.cuStreamCreate(1)); ok(d.cuStreamBeginCapture(g, d.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)); ok(d.cuMemsetD8Async(q, 1, 16, g)); x = ok(d.cuGraphInstantiate(ok(d.cuStreamEndCapture(g)), 0))\n"
        "context = ok(d.cuCtxGetCurrent()); done = {}\n"
        "def work(name, source):\n    ok(d.cuCtxSetCurrent(context)); eval(source); done[name] = True\n"
        "def begin(calls):\n    for name, source in calls.items(): threading.Thread(target=work, args=(name, source), daemon=True).start()\n"
    )
    peer.rest()
    child.run(f"import time; begin({CALLS_THAT_WAIT!r}); begin({CALLS_THAT_GO_ON!r}); time.sleep(0.4)")
    assert sorted(child.run("result = list(done)")) == sorted(CALLS_THAT_GO_ON)
    peer.open_gate()
    wait_until(lambda: len(child.run("result = list(done)")) == len(CALLS_THAT_WAIT) + len(CALLS_THAT_GO_ON))


def test_rest_waits_for_the_work_on_the_device(stage):
    child, peer = stage.child(f"f = kernels({PTX!r}); s = ok(d.cuStreamCreate(1)); launch(f['vgpu_spin_ms'], s, 400)")
    begin = time.monotonic()
    rested = peer.rest()
    assert time.monotonic() - begin > 0.2
    assert rested["sync_ms"] > 200
    assert child.run("result = code(d.cuStreamQuery(s))") == 0
    peer.open_gate()


def test_rest_waits_for_work_of_every_context(stage):
    child, peer = stage.child(
        f"c = ok(d.cuCtxCreate(None, 0, 1)); f = kernels({PTX!r}); s = ok(d.cuStreamCreate(1)); launch(f['vgpu_spin_ms'], s, 400); ok(d.cuCtxPopCurrent())"
    )
    assert peer.rest()["sync_ms"] > 200
    peer.open_gate()
    child.run("ok(d.cuCtxDestroy(c))")
    peer.rest()
    peer.open_gate()


def test_work_that_does_not_end_fails_the_rest_and_the_gate_is_open(stage):
    child, peer = stage.child(
        f"f = kernels({PTX!r}); s = ok(d.cuStreamCreate(1)); launch(f['vgpu_spin_ms'], s, 1500); p = ok(d.cuMemAlloc(4 << 20))"
    )
    kind, answer = peer.ask(REST, {"deadline_ms": 200})
    assert (kind, answer["what"]) == (FAILED, "work on the device did not end before the deadline")
    assert child.run("result = code(d.cuMemAlloc(4 << 20))") == 0
    kind, answer = peer.ask(REST, {"deadline_ms": 100})
    assert (kind, answer["what"]) == (FAILED, "the synchronisation of an earlier attempt has not ended")
    assert peer.rest(5000)
    peer.open_gate()


def test_a_call_that_does_not_return_fails_the_rest_and_the_gate_is_open(stage):
    child, peer = stage.child(
        f"f = kernels({PTX!r}); launch(f['vgpu_spin_ms'], 0, 1200); p = ok(d.cuMemAlloc(4 << 20)); context = ok(d.cuCtxGetCurrent())\n"
        "def work():\n    ok(d.cuCtxSetCurrent(context)); read(p, 16)\n"
        "t = threading.Thread(target=work); t.start()"
    )
    time.sleep(0.1)
    kind, answer = peer.ask(REST, {"deadline_ms": 200})
    assert (kind, answer["what"]) == (FAILED, "a call did not return before the deadline")
    assert child.run("result = [code(d.cuMemAlloc(4 << 20)), t.join(), t.is_alive()]") == [0, None, False]
    assert peer.rest()
    peer.open_gate()


CAPTURE = "s = ok(d.cuStreamCreate(1)); p = ok(d.cuMemAlloc(4 << 20)); ok(d.cuStreamBeginCapture(s, d.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL))"


def test_a_capture_delays_the_rest_until_it_has_ended(stage):
    child, peer = stage.child(CAPTURE)
    peer.sequence += 1
    peer.send(REST, peer.sequence, b'{"deadline_ms":5000}')
    with pytest.raises(queue.Empty):
        peer.answer(0.3)
    child.run("ok(d.cuMemsetD8Async(p, 7, 16, s)); g = ok(d.cuStreamEndCapture(s))")
    assert peer.answer()[0] == RESTED
    peer.open_gate()
    child.run("x = ok(d.cuGraphInstantiate(g, 0)); ok(d.cuGraphLaunch(x, s)); ok(d.cuStreamSynchronize(s))")
    assert child.run("result = read(p, 4).hex()") == "07070707"


def test_a_capture_that_does_not_end_is_named_at_the_deadline_and_is_unharmed(stage):
    child, peer = stage.child(CAPTURE)
    kind, answer = peer.ask(REST, {"deadline_ms": 200})
    assert (kind, answer["what"]) == (FAILED, "a stream capture is in progress")
    assert child.run("ok(d.cuMemsetD8Async(p, 7, 16, s)); result = code(d.cuStreamEndCapture(s))") == 0


@pytest.mark.parametrize(
    "end",
    [
        "ok(d.cuStreamDestroy(s))",
        "d.cuCtxSynchronize(); d.cuStreamSynchronize(s); d.cuStreamEndCapture(s)",
        "ok(d.cuDevicePrimaryCtxReset(0))",
    ],
)
def test_a_capture_that_ends_in_another_way_does_not_hold_the_rest(end, stage):
    child, peer = stage.child(CAPTURE)
    child.run(end)
    assert peer.rest()
    peer.open_gate()


def test_a_captured_graph_works_after_its_memory_came_back(stage):
    child, peer = stage.child(
        CAPTURE + "; ok(d.cuMemsetD8Async(p, 5, 16, s)); x = ok(d.cuGraphInstantiate(ok(d.cuStreamEndCapture(s)), 0))"
    )
    bring_back(peer, take_away(peer))
    assert child.run("ok(d.cuGraphLaunch(x, s)); ok(d.cuStreamSynchronize(s)); result = read(p, 4).hex()") == "05050505"


# ---- the agent comes, goes, errs -----------------------------------------------------------------


def test_at_rest_the_loss_of_the_agent_opens_the_gate(stage):
    child, peer = stage.child(SEVERAL)
    peer.rest()
    child.send("result = same()")
    assert not child.is_answering(0.1)
    peer.hang_up()
    assert child.receive()
    assert stage.again().hello["phase"] == "open"


def test_while_memory_is_away_the_loss_of_the_agent_keeps_the_gate_closed(stage):
    child, peer = stage.child(SEVERAL)
    fds = take_away(peer)
    child.send("result = same()")
    peer.hang_up()
    peer = stage.again()
    assert peer.hello["phase"] == "released"
    assert peer.hello["held"]["objects"] == 5
    assert not child.is_answering(0.2)
    peer.map(fds)
    peer.hang_up()  # mapped, but nobody has said that the content is right
    assert not child.is_answering(0.2)
    peer = stage.again()
    assert peer.hello["phase"] == "released"
    bring_back(peer, fds)
    assert child.receive()


@pytest.mark.parametrize("phase", ["open", "rested", "released"])
def test_detach_keeps_the_gate_as_it_is(phase, stage):
    child, peer = stage.child(SEVERAL)
    fds = peer.export()
    if phase != "open":
        peer.rest()
    if phase == "released":
        peer.release()
    stage.agent.stop_listening()
    peer.send(DETACH, 77)
    assert peer.expect(DETACHED) == (77, {})
    child.send("result = same()")
    assert child.is_answering(0.3) == (phase == "open")
    stage.agent.start()
    peer = stage.again()
    assert peer.hello["phase"] == phase
    if phase == "released":
        peer.map(fds)
    peer.open_gate()
    assert child.receive()
    close_all(fds)


def test_requests_out_of_order_are_refused_and_change_nothing(stage):
    child, peer = stage.child(SEVERAL)
    for kind, what in [(RELEASE, "the process is not at rest"), (MAP, "nothing is released")]:
        assert peer.ask(kind) == (FAILED, {"what": what, "code": 0})
    peer.open_gate()
    fds = take_away(peer)
    kind, answer = peer.ask(OPEN)
    assert (kind, answer["what"]) == (FAILED, "the object is not mapped")
    assert peer.ask(REST)[1]["what"] == "the memory is released"
    peer.release()
    bring_back(peer, fds)
    assert child.run("result = same()")


def test_a_map_that_fails_can_be_tried_again(stage, tmp_path):
    child, peer = stage.child(SEVERAL)
    fds = take_away(peer)
    first, *others = fds
    kind, answer = peer.ask(MAP, {"objects": list(fds)})
    assert (kind, answer["what"], answer["object"]) == (FAILED, "no descriptor came for it", first)
    wrong = os.memfd_create("not of a device")
    peer.give({**fds, others[1]: wrong})
    kind, answer = peer.ask(MAP, {"objects": list(fds)})
    assert (kind, answer["what"], answer["code"], answer["object"]) == (
        FAILED,
        "cuMemImportFromShareableHandle",
        1,
        others[1],
    )
    short = maker_of_memory(stage.node, tmp_path / "maker.sock")(2 * MIB, b"short")
    peer.give({others[1]: short})
    kind, answer = peer.ask(MAP, {"objects": list(fds)})
    assert (kind, answer["what"], answer["object"]) == (FAILED, "cuMemMap", others[1])
    kind, answer = peer.ask(OPEN)
    assert kind == FAILED
    bring_back(peer, fds)
    assert child.run("result = same()")
    bring_back(peer, take_away(peer))
    assert child.run("result = same()")


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"[]",
        b"{",
        b'{"objects":',
        b'{"objects":[1',
        b'{"objects":[1,"x"]}',
        b'{"objects":["a"]}',
        b'{"objects":[99999999999999999999999]}',
        b'{"objects":{}}',
        b'{"a":"\\',
        b"\xff" * 100,
    ],
)
def test_broken_payloads_change_nothing(payload, stage):
    child, peer = stage.child(SEVERAL)
    for kind in (EXPORT, MAP):
        peer.sequence += 1
        peer.send(kind, peer.sequence, payload)
        kinds = []
        while (answer := peer.answer())[0] not in (FAILED, MAPPED, 13):
            kinds.append(answer[0])
    peer.send(PING, 3)
    assert peer.expect(PONG) == (3, {})
    close_all(dict(enumerate(peer.descriptors)))
    assert child.run("result = same()")


def test_descriptors_that_nobody_asked_for_are_closed(stage):
    child, peer = stage.child(SEVERAL)
    before = len(descriptors_of(child.pid))
    pipe, other = os.pipe()
    peer.send(PING, 5, fds=[pipe] * 100)
    peer.expect(PONG)
    peer.give(dict.fromkeys(range(100), pipe))
    peer.send(INVENTORY, peer.sequence, fds=[pipe] * 3)
    assert peer.answer()[0] == 11
    assert len(descriptors_of(child.pid)) == before
    os.close(pipe), os.close(other)


def test_a_long_frame_is_read_and_one_that_is_too_long_ends_the_connection(stage):
    _child, peer = stage.child(SEVERAL)
    peer.send(PING, 5, b"{" + b" " * (1 << 20) + b"}")
    peer.expect(PONG)
    peer.send(PING, 5, claimed=(8 << 20) + 1)
    peer.wait_end()
    assert stage.again().hello["phase"] == "open"


# ---- forks, modes, fallbacks ---------------------------------------------------------------------

FORK = """
import os, signal
out, into = os.pipe()
child = os.fork()
if child == 0:
    os.write(into, json.dumps([n for n in os.listdir("/proc/self/fd") if int(n) >= 200]).encode()); os._exit(0)
os.close(into)
result = json.loads(os.read(out, 10000)); os.waitpid(child, 0)
"""


def test_a_forked_child_keeps_no_memory_of_its_parent_alive(stage):
    child, peer = stage.child(SEVERAL)
    bring_back(peer, take_away(peer))
    assert len([n for n, _ in descriptors_of(child.pid) if int(n) >= 1000]) == 5
    assert child.run(FORK) == []
    assert child.run("result = same()")
    bring_back(peer, take_away(peer))
    assert child.run("result = same()")


def test_a_child_forked_before_cuda_has_memory_of_its_own(stage):
    """The parent has loaded the driver; the child alone initialises it."""
    stage.set_mode("staged")
    source = (
        "import os, sys\nfrom tests.native.software_driver_child import *\n"
        "if os.fork() == 0:\n    start(); p = ok(d.cuMemAlloc(4 << 20)); write(p, b'abcd'); sys.stdin.read(1); print(read(p, 4).decode(), flush=True); os._exit(0)\n"
        "os.wait()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", source],
        env={**stage.node.environment, "LD_PRELOAD": str(stage.library)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    peer = stage.agent.arrival(20)
    assert peer.pid != process.pid
    wait_until(lambda: len(peer.inventory()["objects"]) == 1)
    bring_back(peer, take_away(peer))
    assert process.communicate(b"x", timeout=20) == (b"abcd\n", None)


@pytest.mark.parametrize("text", ["driver", "", "stagedx", "STAGED", "staged mode"])
def test_any_other_word_means_driver_mode(text, stage):
    child, peer = stage.child(f"MIB = {MIB}; p = ok(d.cuMemAlloc(4 * MIB))", mode=text)
    assert (peer.hello["mode"], peer.version) == ("driver", 1)
    assert "protocol" not in peer.hello
    assert child.run("result = code(d.cuMemFree(p))") == 0


def test_without_the_file_it_is_driver_mode(stage):
    (stage.run_folder / "mode").unlink(missing_ok=True)
    child = stage.node.child("start()", LD_PRELOAD=str(stage.library))
    assert stage.again().hello["mode"] == "driver"
    child.kill()


def test_a_full_table_leaves_the_rest_to_the_driver(make_stage, run_folder):
    library = compiled(run_folder, "libvgpu-small.so", *SMALL_TABLES)
    child, peer = make_stage(library).child(
        SEVERAL
        + "hs = [ok(d.cuMemCreate(2 * MIB, properties(), 0)) for _ in range(2)]; maps = [map_memory(h, 2 * MIB) for h in hs]"
    )
    inventory = peer.inventory()
    assert len(inventory["objects"]) == 4
    assert inventory["driver_held"] == [
        {"kind": "large", "count": 1, "bytes": 5 * MIB},
        {"kind": "vmm", "count": 2, "bytes": 4 * MIB},
    ]
    bring_back(peer, take_away(peer))
    assert child.run("result = same()")
    assert (
        child.run(
            "result = [code(d.cuMemFree(p)) for p in ps] + [code(d.cuMemUnmap(m, 2 * MIB)) for m in maps] + [code(d.cuMemRelease(h)) for h in hs]"
        )
        == [0] * 9
    )
    assert peer.inventory()["driver_held"] == []


def test_a_process_that_gets_no_helper_keeps_its_driver_memory(stage, tmp_path):
    stage.set_mode("staged")
    refusing = tmp_path / "refusing.so"
    subprocess.run(
        ["gcc", "-shared", "-fPIC", PROGRAMS / "no_helper.c", "-o", refusing, "-ldl"], check=True, timeout=60
    )
    child = stage.node.child("start()", LD_PRELOAD=f"{stage.library}:{refusing}")
    assert child.run(SEVERAL + "result = same()")
    assert helper_thread(child.pid) is None
    assert len([line for line in device_mappings(child.pid) if line.split()[1] == "rw-s"]) == 5
    assert child.run("result = code(d.cuMemUnmap(ps[0], 2 * MIB))") != 0
    assert stage.agent.arrivals.empty()


def test_peers_of_a_device_get_access_to_what_was_and_what_comes(stage):
    child, peer = stage.child(SEVERAL)
    child.run(
        "own = ok(d.cuCtxGetCurrent()); other = ok(d.cuDevicePrimaryCtxRetain(1)); ok(d.cuCtxSetCurrent(other)); ok(d.cuCtxEnablePeerAccess(own, 0)); mine = ok(d.cuMemAlloc(2 * MIB)); ok(d.cuCtxSetCurrent(own)); late = ok(d.cuMemAlloc(2 * MIB))"
    )
    shape = lambda: [m["access"] for o in peer.inventory()["objects"] for m in o["mappings"]]  # noqa: E731
    assert shape() == [[[0, 3], [1, 3]]] * 5 + [[[1, 3]], [[0, 3], [1, 3]]]
    bring_back(peer, take_away(peer))
    assert shape() == [[[0, 3], [1, 3]]] * 5 + [[[1, 3]], [[0, 3], [1, 3]]]
    child.run("ok(d.cuCtxSetCurrent(other)); ok(d.cuCtxDisablePeerAccess(own)); ok(d.cuCtxSetCurrent(own))")
    assert shape() == [[[0, 3]]] * 5 + [[[1, 3]], [[0, 3]]]
    assert child.run("result = same()")


# ---- the driver's own checkpoint in between ------------------------------------------------------


def test_the_driver_checkpoints_the_released_process_and_the_memory_comes_back(stage):
    """What a checkpoint that leaves the application running does."""
    child, peer = stage.child(SEVERAL + "small = ok(d.cuMemAlloc(1000)); write(small, b'small')")
    caller = stage.node.caller()
    fds = take_away(peer)
    stage.agent.stop_listening()
    peer.send(DETACH, 1)
    peer.expect(DETACHED)
    caller.run(f"freeze({child.pid})")
    child.send("result = [same(), read(small, 5).decode()]")
    assert device_mappings(child.pid) == []
    caller.run(f"thaw({child.pid})")
    assert not child.is_answering(0.2)
    stage.agent.start()
    bring_back(stage.again(), fds)
    assert child.receive() == [True, "small"]


# ---- the table of calls --------------------------------------------------------------------------

PROTOTYPES = """
#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>
#define VGPU_HAVE_DLVSYM 0
#define LINKER_CALL(result, name, parameters, missing)
#define LIBRARY_CALL(result, name, parameters, missing)
#define CALL(result, name, base, since, threads, parameters, missing) \\
    static result(*check_##name) parameters __attribute__((unused)) = name;
#include "calls.def"
"""

LAYOUTS = """
#include <stdio.h>
#include <stddef.h>
%s
#define SIZE(type) printf(#type " %%zu\\n", sizeof(type));
#define FIELD(type, field) printf(#type "." #field " %%zu\\n", offsetof(type, field));
int main(void) {
    SIZE(CUmemAllocationProp) FIELD(CUmemAllocationProp, location) FIELD(CUmemAllocationProp, allocFlags.gpuDirectRDMACapable)
    SIZE(CUmemAccessDesc) FIELD(CUmemAccessDesc, flags) SIZE(CUmemLocation) SIZE(CUipcMemHandle) SIZE(CUipcEventHandle)
    SIZE(CUarrayMapInfo) FIELD(CUarrayMapInfo, memOperationType) FIELD(CUarrayMapInfo, memHandle) FIELD(CUarrayMapInfo, offset)
    SIZE(CUDA_ARRAY_DESCRIPTOR) SIZE(CUDA_ARRAY3D_DESCRIPTOR) FIELD(CUDA_ARRAY3D_DESCRIPTOR, NumChannels)
    SIZE(CUmulticastObjectProp) FIELD(CUmulticastObjectProp, size) SIZE(CUdeviceptr) SIZE(CUuuid)
    SIZE(CUmemGenericAllocationHandle) SIZE(CUpointer_attribute) SIZE(CUstreamCaptureMode)
    return 0;
}
"""


@pytest.fixture(scope="module")
def toolkit():
    if not TOOLKITS:
        pytest.skip("no CUDA toolkit below /usr/local")
    return TOOLKITS[-1].parent


def test_every_prototype_of_the_table_is_that_of_cuda_h(toolkit, tmp_path):
    source = tmp_path / "prototypes.c"
    source.write_text(PROTOTYPES)
    # cuGetProcAddress alone is redefined in cuda.h for callers without per-thread streams.
    command = [
        "gcc",
        "-fsyntax-only",
        "-Wall",
        "-Werror=incompatible-pointer-types",
        f"-I{toolkit}",
        f"-I{preload_build.SOURCES}",
    ]
    done = subprocess.run([*command, source], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_structure_that_is_looked_into_is_that_of_cuda_h(toolkit, tmp_path):
    layouts = []
    for name, header in [("theirs", "#include <cuda.h>"), ("ours", '#include "cuda_abi.h"')]:
        source = tmp_path / f"{name}.c"
        source.write_text(LAYOUTS % header)
        command = ["gcc", f"-I{toolkit}", f"-I{preload_build.SOURCES}", source, "-o", tmp_path / name]
        subprocess.run(command, check=True, timeout=60)
        layouts.append(subprocess.run([tmp_path / name], capture_output=True, text=True, check=True).stdout)
    assert layouts[0] == layouts[1]


FORMS = [
    ("cuMemAlloc", 3020, 0, "cuMemAlloc_v2"),
    ("cuMemAlloc", 12000, 0, "cuMemAlloc_v2"),
    ("cuMemcpyHtoD", 12000, 0, "cuMemcpyHtoD_v2"),
    ("cuMemcpyHtoD", 12000, 1, "cuMemcpyHtoD_v2"),
    ("cuMemcpyHtoD", 12000, 2, "cuMemcpyHtoD_v2_ptds"),
    ("cuMemcpyHtoDAsync", 12000, 2, "cuMemcpyHtoDAsync_v2_ptsz"),
    ("cuLaunchKernel", 4000, 0, "cuLaunchKernel"),
    ("cuLaunchKernel", 13000, 2, "cuLaunchKernel_ptsz"),
    ("cuMemFree", 13000, 2, "cuMemFree_v2"),
    ("cuCtxCreate", 3020, 0, "cuCtxCreate_v2"),
    ("cuCtxCreate", 11040, 0, "cuCtxCreate_v3"),
    ("cuCtxCreate", 13000, 0, "cuCtxCreate_v4"),
    ("cuStreamBeginCapture", 13000, 0, "cuStreamBeginCapture_v2"),
    ("cuStreamBeginCapture", 13000, 2, "cuStreamBeginCapture_v2_ptsz"),
    ("cuMemCreate", 10020, 0, "cuMemCreate"),
    ("cuMemAllocAsync", 11020, 2, "cuMemAllocAsync_ptsz"),
    ("cuGetProcAddress", 11030, 0, "cuGetProcAddress"),
    ("cuGetProcAddress", 12000, 0, "cuGetProcAddress_v2"),
    ("cuCtxGetCurrent", 12000, 0, None),
    ("cuStreamSynchronize", 12000, 2, None),
]


def test_each_form_asked_for_is_answered_with_its_own_wrapper(stage):
    stage.set_mode("driver")
    child = stage.node.child(
        "lib = ctypes.CDLL('libcuda.so.1'); ask = lib.cuGetProcAddress_v2\n"
        "ask.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p]\n"
        "def form(name, version, flags):\n"
        "    at = ctypes.c_void_p(); assert ask(name.encode(), ctypes.addressof(at), version, flags, None) == 0; return at.value\n"
        "base = next(int(line.split('-')[0], 16) for line in open('/proc/self/maps') if 'libvgpu' in line)",
        LD_PRELOAD=str(stage.library),
    )
    lines = subprocess.run(
        ["nm", "-D", "--defined-only", stage.library], capture_output=True, text=True, check=True
    ).stdout
    names = {int(line.split()[0], 16): line.split()[2] for line in lines.splitlines()}
    for base, version, flags, wanted in FORMS:
        assert names.get(child.run(f"result = form({base!r}, {version}, {flags}) - base")) == wanted, (
            base,
            version,
            flags,
        )


def test_a_form_newer_than_the_table_is_left_alone_and_named(stage, tmp_path):
    """A driver of the future, made of the software driver and a newer cuMemAlloc in front of it."""
    source = tmp_path / "future.c"
    source.write_text(FUTURE_DRIVER)
    future = tmp_path / "future.so"
    subprocess.run(["gcc", "-shared", "-fPIC", source, "-o", future, "-ldl"], check=True, timeout=60)
    child = stage.node.child(
        "lib = ctypes.CDLL(None); ask = lib.cuGetProcAddress_v2\n"
        "ask.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p]\n"
        "def call(name, version):\n"
        "    at = ctypes.c_void_p(); assert ask(name.encode(), ctypes.addressof(at), version, 0, None) == 0\n"
        "    return ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)(at.value)\n"
        "result = 0",
        LD_PRELOAD=f"{stage.library}:{future}",
    )
    stage.set_mode("staged")
    assert child.run("result = call('cuMemAlloc', 99000)(5)") == 4711
    child.run("start()")
    peer = stage.agent.arrival(20)
    (blocker,) = peer.inventory()["blockers"]
    assert blocker["kind"] == "unknown-call"


FUTURE_DRIVER = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <string.h>
static int newer(int one) { return one == 5 ? 4711 : 1; }
int cuGetProcAddress_v2(const char *name, void **out, int version, uint64_t flags, int *status)
{
    static int (*next)(const char *, void **, int, uint64_t, int *);
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (!next) *(void **)&next = dlsym(driver, "cuGetProcAddress_v2");
    if (!strcmp(name, "cuMemAlloc") && version > 50000) { *out = (void *)newer; return 0; }
    return next(name, out, version, flags, status);
}
"""


# ---- many threads at once ------------------------------------------------------------------------


@pytest.mark.parametrize("libc", ["glibc", "musl"])
def test_many_threads_allocate_free_and_launch_while_all_memory_goes_and_comes(
    libc, stage, libraries, run_folder, tmp_path
):
    if libc == "musl" and not MUSL_LOADER.exists():
        pytest.skip(f"{MUSL_LOADER} is missing; the package is called musl")
    program, library, driver = tmp_path / "staged_stress", stage.library, libraries
    options = ["-O1", "-pthread", "-Wall", "-Wextra", "-Werror"]
    if libc == "musl":
        library, driver = compiled(run_folder, "libvgpu-musl.so", libc="musl"), libraries / "musl"
        options.append("-dynamic")
    zig = [sys.executable, "-m", "ziglang", "cc", "-target", software_gpu.zig_target(libc), *options]
    sources = [PROGRAMS / "staged_stress.c", driver / "libcuda.so.1"]
    subprocess.run([*zig, *sources, "-o", program], check=True, timeout=120)
    environment = {"LD_PRELOAD": str(library), "LD_LIBRARY_PATH": str(driver)}
    assert cycle_under_stress(stage, [program], environment, seconds=3) >= 5


# As in test_preload.py: what runs before a sanitizer's runtime is up is compiled without it.
BEFORE_THE_RUNTIME = {"elf_symbols.c", "intercept.c", "loaded_objects.c", "lookup.c", "dlsym.c", "dlvsym.c"}
SANITIZERS = {"thread": "thread", "address and undefined": "address,undefined"}


@pytest.mark.parametrize("name", SANITIZERS)
def test_the_same_is_clean_under_a_sanitizer(name, stage, libraries, tmp_path):
    if shutil.which("gcc") is None:
        pytest.skip("gcc is missing")
    program = with_sanitizer(SANITIZERS[name], stage.run_folder, libraries, tmp_path)
    options = {
        "TSAN_OPTIONS": "halt_on_error=1",
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    # Thread sanitizer needs the address layout of older kernels.
    assert cycle_under_stress(stage, ["setarch", "-R", program], options, seconds=3) >= 2


def with_sanitizer(sanitizer, run_folder, libraries, folder, source="staged_stress.c"):
    """The preload compiled into a program, as it would be found in front of the driver."""
    objects = sanitized_preload(sanitizer, run_folder)
    program = folder / "stress"
    watched = ["gcc", "-O2", "-g1", "-std=gnu11", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    link = [*watched, PROGRAMS / source, "-rdynamic", *objects, libraries / "libcuda.so.1", "-o", program]
    subprocess.run([*link, "-lpthread", "-ldl"], check=True, timeout=120)
    return program


def sanitized_preload(sanitizer, run_folder):
    """The library's object files, which the tests of a session share."""
    folder = run_folder / f"sanitized-{sanitizer}"
    if folder.exists():
        return sorted(folder.glob("*.o"))
    folder.mkdir()
    paths = [f'-DVGPU_SOCKET_PATH="{run_folder}/agent.sock"', f'-DVGPU_MODE_PATH="{run_folder}/mode"']
    common = ["gcc", "-O2", "-g1", "-std=gnu11", "-fPIC", "-fvisibility=hidden", *paths]
    calls = [
        file for file in sorted((preload_build.SOURCES / "calls").glob("*.c")) if file.name not in BEFORE_THE_RUNTIME
    ]
    together = folder / "calls.c"
    together.write_text("".join(f'#include "{file}"\n' for file in calls))
    linker_calls = [preload_build.SOURCES / "calls" / name for name in ("dlsym.c", "dlvsym.c")]

    def compile_one(source):
        watched = [] if source.name in BEFORE_THE_RUNTIME else [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
        subprocess.run([*common, *watched, "-c", source, "-o", folder / f"{source.stem}.o"], check=True, timeout=120)
        return folder / f"{source.stem}.o"

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(compile_one, [*sorted(preload_build.SOURCES.glob("*.c")), *linker_calls, together]))


def cycle_under_stress(stage, command, environment, seconds):
    """Moves the memory of the stress program as often as it goes; how many times."""
    process = stage.program(command, environment)
    try:
        peer = stage.agent.arrival(20)
        end, cycles = time.monotonic() + seconds, 0
        while time.monotonic() < end and process.poll() is None:
            try:
                close_all(peer.export())
                peer.inventory()
                cycles += whole_cycle(peer)
            except AssertionError:
                process.stdin.close()  # a sanitizer takes its time to say what it found
                pytest.fail(process.stderr.read().decode())
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out, err.decode()) == (0, b"ready\n", "")
    finally:
        process.kill()
        process.wait()
    return cycles


def whole_cycle(peer):
    """One move, every object copied to fresh memory on the way; 0 when a capture kept the process from resting."""
    kind, answer = peer.ask(REST, {"deadline_ms": 5000}, 20)
    if kind == FAILED:
        assert answer["what"] == "a stream capture is in progress"
        return 0
    objects = {o["id"]: o["size"] for o in peer.inventory()["objects"]}
    fds = peer.export()
    assert sorted(fds) == sorted(objects)
    peer.release()
    bring_back(peer, fds)
    return 1
