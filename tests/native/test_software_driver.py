"""The software GPU driver behaves as its README says: unmodified cuda-bindings and a plain C program run on it.

Every test uses real processes: one holds GPU state, another steers it through cuCheckpointProcess*. Nothing here is a GPU result.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.software_gpu.build import DRIVER, build, build_sanitized
from tests.software_gpu.devices import make_devices
from tests.stopping import stop

MIB = 1 << 20
CHILD = Path(__file__).with_name("software_driver_child.py")
RUNNING, LOCKED, CHECKPOINTED = range(3)
INVALID_VALUE, OUT_OF_MEMORY, NOT_INITIALIZED, NO_DEVICE, INVALID_DEVICE = 1, 2, 3, 100, 101
INVALID_CONTEXT, INVALID_HANDLE, UNKNOWN = 201, 400, 999
OPERATING_SYSTEM, ILLEGAL_STATE, NOT_FOUND, NOT_READY, ILLEGAL_ADDRESS, NOT_PERMITTED, NOT_SUPPORTED = (
    304,
    401,
    500,
    600,
    700,
    800,
    801,
)


class Child:
    """A child process that runs Python on the software driver."""

    def __init__(self, environment, prefix=()):
        self.process = subprocess.Popen(
            [*prefix, sys.executable, str(CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env=environment,
        )
        self.pid = self.process.pid

    def send(self, source):
        self.process.stdin.write(json.dumps(source) + "\n")
        self.process.stdin.flush()

    def is_answering(self, within_s):
        return bool(select.select([self.process.stdout], [], [], within_s)[0])

    def receive(self, within_s=20):
        assert self.is_answering(within_s), "the child does not answer"
        line = self.process.stdout.readline()
        assert line, f"the child ended: {self.process.wait(5)}"
        answer = json.loads(line)
        assert "failure" not in answer, answer
        return answer["result"]

    def run(self, source, within_s=20):
        self.send(source)
        return self.receive(within_s)

    def kill(self):
        self.process.kill()
        self.process.wait(10)
        self.process.stdin.close()
        self.process.stdout.close()


class Node:
    """A folder of devices, and the processes a test starts on it."""

    def __init__(self, libraries, directory, count=2, memory=64 * MIB, salt="a"):
        self.directory = directory
        self.uuids = [
            uuid.removeprefix("GPU-").replace("-", "") for uuid in make_devices(directory, count, memory, salt)
        ]
        nodes = directory / "no-nodes"
        nodes.mkdir()
        self.libraries = libraries
        self.environment = {
            **os.environ,
            "LD_LIBRARY_PATH": str(libraries),
            "SOFTWARE_GPU_DIR": str(directory),
            "SOFTWARE_GPU_NODE_DIR": str(nodes),
        }
        self.children = []

    def child(self, source="", **environment):
        child = Child({**self.environment, **environment})
        self.children.append(child)
        child.run(source)
        return child

    def target(self, source=""):
        """A process with a context and `p` = 1 MiB of known content."""
        return self.child(f"start(); p = ok(d.cuMemAlloc({MIB})); write(p, bytes(range(256)) * 4096); " + source)

    def caller(self):
        """A process that only steers others."""
        return self.child("ok(d.cuInit(0))")

    def counter(self, *arguments, program="counter"):
        command = [str(self.libraries / program), *map(str, arguments)]
        process = subprocess.Popen(command, env=self.environment, stderr=subprocess.PIPE, text=True)
        self.children.append(process)
        return process


@pytest.fixture(scope="session")
def libraries():
    return build()


@pytest.fixture
def nodes(libraries, tmp_path):
    made = []

    def make(name="node", **options):
        made.append(Node(libraries, tmp_path / name, **options))
        return made[-1]

    yield make
    for node in made:
        for child in node.children:
            if isinstance(child, subprocess.Popen):
                child.kill()
                child.communicate()
            else:
                child.kill()


@pytest.fixture
def node(nodes):
    return nodes()


@pytest.fixture(scope="session")
def ptx():
    """The PTX text as the C compiler sees it."""
    program = f'#include <stdio.h>\n#include "{DRIVER}/kernels_ptx.h"\nint main(void) {{ return fputs(kernels_ptx, stdout) < 0; }}\n'
    folder = Path(os.environ.get("TMPDIR", "/tmp")) / f"software-gpu-ptx-{os.getpid()}"
    compiler = [sys.executable, "-m", "ziglang", "cc", "-x", "c", "-", "-o", str(folder)]
    subprocess.run(compiler, input=program, text=True, check=True)
    try:
        return subprocess.run([folder], check=True, capture_output=True, text=True).stdout
    finally:
        folder.unlink()


def device_traces(pid):
    """Descriptors and mappings of a process that belong to the software devices."""
    marks = ("memfd:software-gpu", "/gpu0", "/gpu1", "/nvidia")
    found = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append(str(fd.readlink()))
    found += [
        line.split(None, 5)[5].strip() for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if line.count("/")
    ]
    return [name for name in found if any(mark in name for mark in marks)]


def wait_until(condition, within_s=10):
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


# ---- what is built


def exported_calls():
    table = (DRIVER / "calls.h").read_text()
    return re.findall(r"^CALL(?:_SELF)?\((\w+), (\d+), (\w+)\)", table, re.MULTILINE)


LAYOUTS = {
    "CUuuid": ("bytes",),
    "CUmemLocation": ("type", "id"),
    "CUmemAllocationProp": ("type", "requestedHandleTypes", "location", "win32HandleMetaData", "allocFlags"),
    "CUmemAccessDesc": ("location", "flags"),
    "CUDA_GRAPH_INSTANTIATE_PARAMS": ("flags", "hUploadStream", "hErrNode_out", "result_out"),
    "CUlaunchConfig": ("gridDimX", "blockDimZ", "sharedMemBytes", "hStream", "attrs", "numAttrs"),
    "CUcheckpointLockArgs": ("timeoutMs", "reserved0", "reserved1"),
    "CUcheckpointCheckpointArgs": ("reserved",),
    "CUcheckpointGpuPair": ("oldUuid", "newUuid"),
    "CUcheckpointRestoreArgs": ("gpuPairs", "gpuPairsCount", "reserved", "reserved1"),
    "CUcheckpointUnlockArgs": ("reserved",),
}
CONSTANTS = sorted(
    set(re.findall(r"\b(CUDA_ERROR_\w+|CU_[A-Z_0-9]+)\b = ?\d", (DRIVER / "software_cuda.h").read_text()))
)


def layout_program(header):
    lines = [f'#include "{header}"', "#include <stdio.h>", "#include <stddef.h>", "int main(void) {"]
    for name, fields in LAYOUTS.items():
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        lines += [f'printf("{name}.{field} %zu\\n", offsetof({name}, {field}));' for field in fields]
    lines += [f'printf("{name} %d\\n", (int){name});' for name in CONSTANTS]
    return "\n".join([*lines, "return 0; }"])


def real_cuda_header():
    places = [*Path("/usr/local").glob("cuda*/include/cuda.h"), Path("/usr/include/cuda.h")]
    return next(
        (
            place
            for place in places
            if place.is_file() and "cuCheckpointProcessLock" in place.read_text(errors="replace")
        ),
        None,
    )


def test_structs_and_constants_equal_those_of_the_real_header(tmp_path):
    header = real_cuda_header()
    if header is None:
        pytest.skip("this machine has no CUDA toolkit; the comparison needs the real cuda.h")
    answers = []
    for n, name in enumerate((header, DRIVER / "software_cuda.h")):
        program = tmp_path / f"layout{n}"
        compiler = [sys.executable, "-m", "ziglang", "cc", "-w", "-x", "c", "-", "-o", str(program)]
        subprocess.run(compiler, input=layout_program(name), text=True, check=True)
        answers.append(subprocess.run([program], check=True, capture_output=True, text=True).stdout)
    assert answers[0] == answers[1]
    assert len(CONSTANTS) > 60


def test_every_call_of_the_table_is_exported_and_found_by_name_and_version(libraries, node):
    source = f"""
library = ctypes.CDLL({str(libraries / "libcuda.so.1")!r})
address, status = ctypes.c_void_p(), ctypes.c_int()
def find(name, version):
    rc = library.cuGetProcAddress_v2(name.encode(), ctypes.byref(address), version, ctypes.c_uint64(0), ctypes.byref(status))
    return rc, address.value, status.value
result = [(*find(base, version), ctypes.cast(getattr(library, symbol), ctypes.c_void_p).value)
          for base, version, symbol in {[(b, int(v), s) for b, v, s in exported_calls()]!r}]
"""
    child = node.child()
    found = child.run(source)
    assert len(found) > 150
    assert all(rc == 0 and status == 0 and address == symbol for rc, address, status, symbol in found)
    assert child.run("result = [find('cuNoSuchCall', 13000), find('cuMemCreate', 9000)]") == [
        [0, None, 1],
        [0, None, 2],
    ]


def test_nothing_but_the_table_and_the_control_block_is_exported(libraries):
    library = ctypes.CDLL(str(libraries / "libcuda.so.1"))
    assert library.software_gpu_control
    for path in DRIVER.glob("*.c"):
        for name in re.findall(
            r"^(?:\w+ )+\**((?:gate|device|stream|memory|range|vmm|save|op|state|graph|kernel)_\w+)\(",
            path.read_text(),
            re.MULTILINE,
        ):
            assert not hasattr(library, name), name


def test_libraries_load_in_old_glibc_and_in_musl(libraries):
    for name in ("libcuda.so.1", "libnvidia-ml.so.1", "counter"):
        versions = {
            tuple(map(int, v.split(b".")))
            for v in re.findall(rb"GLIBC_([0-9]+\.[0-9]+)\b", (libraries / name).read_bytes())
        }
        assert versions, name
        assert max(versions) <= (2, 17), name
        assert b"GLIBC_" not in (libraries / "musl" / name).read_bytes()
    assert b"/lib/ld-musl-" in (libraries / "musl" / "counter").read_bytes()


# ---- init, devices, contexts


def test_calls_before_init_are_refused(node):
    assert node.child().run(
        "result = [code(d.cuDeviceGetCount()), code(d.cuMemAlloc(8)), code(d.cuCheckpointProcessGetState(1))]"
    ) == [3, 3, 3]


def test_no_device_files_means_no_device(node):
    assert node.child(SOFTWARE_GPU_DIR="/nonexistent").run("result = code(d.cuInit(0))") == NO_DEVICE


def test_devices_are_made_from_the_environment_where_the_folder_is_absent(node, tmp_path):
    fresh = {
        "SOFTWARE_GPU_DIR": str(tmp_path / "made"),
        "SOFTWARE_GPU_COUNT": "3",
        "SOFTWARE_GPU_MEMORY": str(32 * MIB),
    }
    source = "ok(d.cuInit(0)); result = [ok(d.cuDeviceGetCount()), ok(d.cuDeviceTotalMem(2)), ok(d.cuDeviceGetUuid(1)).bytes.hex()]"
    first = node.child(**fresh).run(source)
    assert first[:2] == [3, 32 * MIB]
    assert node.child(**fresh).run(source) == first


def test_device_questions(node):
    child = node.child("ok(d.cuInit(0))")
    assert (
        child.run("result = [ok(d.cuDeviceGetUuid(n)).bytes.hex() for n in range(ok(d.cuDeviceGetCount()))]")
        == node.uuids
    )
    assert "test double" in child.run("result = ok(d.cuDeviceGetName(80, 0)).decode()")
    assert child.run("result = [ok(d.cuDriverGetVersion()), ok(d.cuDeviceGetPCIBusId(13, 1)).decode()[:12]]") == [
        13000,
        "0000:02:00.0",
    ]
    assert child.run("result = code(d.cuDeviceGet(7))") == INVALID_DEVICE
    attribute = "d.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"
    assert child.run(f"result = ok(d.cuDeviceGetAttribute({attribute}, 0))") == 1


def test_contexts_are_a_stack_per_thread_and_give_their_memory_back(node):
    child = node.child("ok(d.cuInit(0))")
    assert child.run("result = code(d.cuMemAlloc(8))") == 201
    child.run(
        "c = ok(d.cuCtxCreate(None, 0, 1)); assert int(ok(d.cuCtxGetDevice())) == 1; p = ok(d.cuMemAlloc(8 << 20))"
    )
    assert child.run("result = list(ok(d.cuMemGetInfo()))") == [56 * MIB, 64 * MIB]
    child.run("ok(d.cuCtxPushCurrent(ok(d.cuDevicePrimaryCtxRetain(1))))")
    assert child.run("ok(d.cuCtxDestroy(c)); result = list(ok(d.cuMemGetInfo()))") == [64 * MIB, 64 * MIB]
    assert child.run("result = list(ok(d.cuDevicePrimaryCtxGetState(1)))[1]") == 1
    assert child.run("ok(d.cuDevicePrimaryCtxRelease(1)); result = list(ok(d.cuDevicePrimaryCtxGetState(1)))[1]") == 0


def test_errors_have_the_real_names(node):
    child = node.child()
    assert child.run("result = [ok(d.cuGetErrorName(d.CUresult(n))).decode() for n in (0, 600, 801)]") == [
        "CUDA_SUCCESS",
        "CUDA_ERROR_NOT_READY",
        "CUDA_ERROR_NOT_SUPPORTED",
    ]


# ---- memory


def test_copies_and_memsets_reach_every_byte(node):
    child = node.target()
    child.run(
        "q = ok(d.cuMemAlloc(4096)); ok(d.cuMemcpyDtoD(q, p, 4096)); assert read(q, 4096) == bytes(range(256)) * 16"
    )
    child.run("ok(d.cuMemsetD8(q, 7, 10)); assert read(q, 11) == b'\\x07' * 10 + b'\\x0a'")
    child.run("ok(d.cuMemsetD16(q, 0x1234, 4)); assert read(q, 10) == b'\\x34\\x12' * 4 + b'\\x07\\x07'")
    child.run("ok(d.cuMemsetD32(q, 0xdeadbeef, 2)); assert read(q, 8) == b'\\xef\\xbe\\xad\\xde' * 2")
    child.run("ok(d.cuMemcpy(q, p, 256)); assert read(q, 256) == bytes(range(256))")
    child.run(
        "pitched, pitch = ok(d.cuMemAllocPitch(100, 4, 4)); assert pitch == 512; ok(d.cuMemsetD2D8(pitched, pitch, 5, 100, 4))"
    )
    assert child.run("result = read(int(pitched) + 3 * 512, 101).hex()") == "05" * 100 + "00"


@pytest.mark.parametrize(
    "call",
    [
        "d.cuMemcpyHtoD(int(p) + (1 << 20) - 4, b'12345678', 8)",
        "d.cuMemcpyDtoH(bytearray(8), 4096, 8)",
        "d.cuMemsetD8(int(p), 1, (1 << 20) + 1)",
        "d.cuMemsetD32(int(p) + 1, 1, 1)",
        "d.cuMemFree(int(p) + 8)",
        "d.cuMemFree(4096)",
        "d.cuMemAlloc(0)",
    ],
)
def test_memory_that_is_not_there_is_refused(node, call):
    child = node.target()
    assert child.run(f"result = code({call})") == INVALID_VALUE
    assert child.run("result = read(p, 4).hex()") == "00010203"


def test_host_and_managed_memory(node):
    child = node.target()
    child.run(
        "h = ok(d.cuMemAllocHost(4096)); ctypes.memset(int(h), 9, 4096); ok(d.cuMemcpyHtoDAsync(p, int(h), 4096, 0)); ok(d.cuCtxSynchronize())"
    )
    child.run(
        "assert read(p, 4096) == b'\\x09' * 4096; assert int(ok(d.cuMemHostGetDevicePointer(int(h), 0))) == int(h)"
    )
    child.run(
        "m = ok(d.cuMemAllocManaged(4096, 1)); ok(d.cuMemsetD8(m, 3, 4096)); assert ctypes.string_at(int(m), 4096) == b'\\x03' * 4096"
    )
    child.run("b = ctypes.create_string_buffer(8192); ok(d.cuMemHostRegister(ctypes.addressof(b), 8192, 0))")
    assert child.run("result = code(d.cuMemHostRegister(ctypes.addressof(b), 8192, 0))") == 712
    assert (
        child.run(
            "ok(d.cuMemHostUnregister(ctypes.addressof(b))); result = code(d.cuMemHostUnregister(ctypes.addressof(b)))"
        )
        == 713
    )
    child.run("ok(d.cuMemFreeHost(int(h))); ok(d.cuMemFree(m))")


def test_pointer_questions(node):
    child = node.target(
        "base, size = ok(d.cuMemGetAddressRange(int(p) + 99)); assert (int(base), size) == (int(p), 1 << 20)"
    )
    kinds = "d.CUpointer_attribute.CU_POINTER_ATTRIBUTE_"
    assert child.run(f"result = int(ok(d.cuPointerGetAttribute({kinds}MEMORY_TYPE, p)))") == 2
    assert child.run(
        f"result = [int(x) for x in ok(d.cuPointerGetAttributes(2, [{kinds}DEVICE_ORDINAL, {kinds}RANGE_SIZE], p))]"
    ) == [0, MIB]
    assert child.run(f"result = code(d.cuPointerGetAttribute({kinds}MEMORY_TYPE, 4096))") == INVALID_VALUE


def test_stream_ordered_allocation_is_freed_in_stream_order(node, ptx):
    child = node.target(f"k = kernels({ptx!r}); s = ok(d.cuStreamCreate(1)); pool = ok(d.cuDeviceGetDefaultMemPool(0))")
    child.run(
        "a = ok(d.cuMemAllocAsync(4 << 20, s)); ok(launch(k['vgpu_spin_ms'], s, 200)); ok(d.cuMemFreeAsync(a, s))"
    )
    assert (
        child.run(
            "before = ok(d.cuMemGetInfo())[0]; ok(d.cuStreamSynchronize(s)); result = ok(d.cuMemGetInfo())[0] - before"
        )
        == 4 * MIB
    )


EVENT_MAKER = """
k = kernels({ptx!r}); s = ok(d.cuStreamCreate(1)); e = ok(d.cuEventCreate(2 | 4)); steps = 0
words = ok(d.cuMemAlloc(16)); ok(d.cuMemsetD8(words, 0, 16))
def record(): ok(launch(k["vgpu_wait_word"], s, words, int(words) + 8, steps + 1)); ok(d.cuEventRecord(e, s))
def let_go(): globals()["steps"] += 1; ok(d.cuMemcpyHtoD(words, steps.to_bytes(8, "little"), 8)); ok(d.cuStreamSynchronize(s))
"""
EVENT_OPENER = "t = ok(d.cuStreamCreate(1)); f = opened_event({!r}); q = ok(d.cuMemAlloc(8)); ok(d.cuMemsetD8(q, 0, 8))"
WAITS = "ok(d.cuStreamWaitEvent(t, f, 0)); ok(d.cuMemsetD8Async(q, {}, 8, t)); result = code(d.cuStreamQuery(t))"


def stream_waits_for_the_other_process(maker, opener, value):
    """The opener's work comes after what the maker has recorded, and comes then."""
    maker.run("record()")
    assert opener.run(WAITS.format(value)) == NOT_READY
    assert (
        opener.run("time.sleep(0.05); result = [code(d.cuStreamQuery(t)), code(d.cuEventQuery(f))]") == [NOT_READY] * 2
    )
    maker.run("let_go()")
    return opener.run("ok(d.cuEventSynchronize(f)); ok(d.cuStreamSynchronize(t)); result = read(q, 1)[0]") == value


def event_files(child):
    return sorted(Path("/dev/shm").glob(f"cuda.shm.{os.getuid()}.{child.pid:x}.*"))


def test_events_of_two_processes_order_their_streams_through_checkpoints_of_both(node, ptx):
    """As measured on a real GPU, and in the same place."""
    maker, opener, caller = node.child("start()"), node.child("import time; start()"), node.caller()
    maker.run(EVENT_MAKER.format(ptx=ptx))
    opener.run(EVENT_OPENER.format(maker.run("result = offer_event(e)")))
    try:
        assert [path.name.rpartition(".")[2] for path in event_files(maker)] == ["1"]
        assert stream_waits_for_the_other_process(maker, opener, 1)
        for pids in ([maker.pid], [opener.pid], [maker.pid, opener.pid]):
            for pid in pids:
                caller.run(f"freeze({pid})")
            for pid in pids:
                caller.run(f"thaw({pid})")
            assert stream_waits_for_the_other_process(maker, opener, pids[0] % 200)
        opener.run("ok(d.cuEventDestroy(f))")
        assert event_files(maker)
        maker.run("ok(d.cuEventDestroy(e))")
        assert event_files(maker) == []
    finally:
        for path in event_files(maker):
            path.unlink()


def test_events_that_cannot_be_shared_are_refused(node):
    child = node.target("e = ok(d.cuEventCreate(0))")
    assert child.run("result = code(d.cuIpcGetEventHandle(e))") == INVALID_HANDLE
    assert child.run("result = code(d.cuEventCreate(4))") == INVALID_VALUE
    assert child.run("result = code(d.cuIpcOpenEventHandle(event_from('5a' * 64)))") == INVALID_VALUE
    handle = child.run("f = ok(d.cuEventCreate(6)); result = offer_event(f)")
    assert child.run(f"result = code(d.cuIpcOpenEventHandle(event_from({handle!r})))") == INVALID_CONTEXT
    child.run("ok(d.cuEventDestroy(f))")
    assert node.target().run(f"result = code(d.cuIpcOpenEventHandle(event_from({handle!r})))") == INVALID_HANDLE


HOST_MEMORY = "h = ok(d.cuMemCreate(4 << 20, host_properties(), 0)); m = map_host_memory(h, 4 << 20); ctypes.memmove(int(m), b'host', 4)"
EXPORTED = "result = int(ok(d.cuMemExportToShareableHandle(h, d.CUmemAllocationHandleType(1), 0)))"
IMPORTED = """
import os
fd = ctypes.CDLL(None).syscall(438, os.pidfd_open({}), {}, 0)
i = ok(d.cuMemImportFromShareableHandle(fd, d.CUmemAllocationHandleType(1))); os.close(fd); m = map_host_memory(i, 4 << 20)
"""
HOST_KIND = "result = int(ok(d.cuMemGetAllocationPropertiesFromHandle({})).location.type)"


def test_a_process_with_memory_made_on_the_host_is_checkpointed_and_lost(node):
    """As measured: 999, and 401 ever after; one that has imported it: 801."""
    owner, other, caller = node.target(HOST_MEMORY), node.child("start()"), node.caller()
    other.run(IMPORTED.format(owner.pid, owner.run(EXPORTED)))
    assert (
        owner.run("result = read(m, 4).decode()")
        == other.run("result = ctypes.string_at(int(m), 4).decode()")
        == "host"
    )
    assert [owner.run(HOST_KIND.format("h")), other.run(HOST_KIND.format("i"))] == [3, 3]
    free = owner.run("result = ok(d.cuMemGetInfo())[0]")
    for child in (owner, other):
        caller.run(f"freeze({child.pid})")
    assert [caller.run(f"result = restore({owner.pid})") for _ in range(2)] == [UNKNOWN, ILLEGAL_STATE]
    assert caller.run(f"result = code(d.cuCheckpointProcessUnlock({owner.pid}, None))") == ILLEGAL_STATE
    assert caller.run(f"result = restore({other.pid})") == NOT_SUPPORTED
    assert free == 63 * MIB


def test_a_process_that_has_let_go_of_memory_made_on_the_host_is_restored(node):
    child, caller = node.target(HOST_MEMORY), node.caller()
    child.run("ok(d.cuMemRelease(h)); ok(d.cuMemUnmap(m, 4 << 20)); ok(d.cuMemAddressFree(m, 4 << 20))")
    caller.run(f"freeze({child.pid}); thaw({child.pid})")
    assert child.run("result = read(p, 256) == bytes(range(256))")


GIVEN = "result = offer(p)"
TAKEN = "q = opened({!r})"


def test_memory_is_shared_by_a_legacy_handle(node):
    owner, other = node.target(), node.child("start()")
    other.run(TAKEN.format(owner.run(GIVEN)))
    assert other.run("result = read(q, 256) == bytes(range(256))")
    other.run("write(q, b'written by the other')")
    assert owner.run("result = read(p, 20).decode()") == "written by the other"
    free = "result = ok(d.cuMemGetInfo())[0]"
    before = owner.run(free)
    assert other.run("result = [code(d.cuIpcCloseMemHandle(q)), code(d.cuIpcCloseMemHandle(q))]") == [0, INVALID_VALUE]
    assert owner.run("ok(d.cuMemFree(p)); " + free) == before + MIB


def test_a_process_that_has_opened_memory_of_another_is_checkpointed_and_not_restored(node):
    """As measured for memory imported by descriptor; assumed for legacy handles."""
    owner, other, caller = node.target(), node.child("start()"), node.caller()
    other.run(TAKEN.format(owner.run(GIVEN)))
    caller.run(f"freeze({other.pid})")
    assert caller.run(f"result = restore({other.pid})") == NOT_SUPPORTED


def test_offered_memory_survives_the_owners_checkpoint_and_its_handle_does_not(node):
    owner, other, caller = node.target(), node.child("start()"), node.caller()
    handle = owner.run(GIVEN)
    caller.run(f"freeze({owner.pid}); thaw({owner.pid})")
    assert owner.run("result = read(p, 256) == bytes(range(256))")
    with pytest.raises(AssertionError, match="INVALID_VALUE"):
        other.run(TAKEN.format(handle))
    other.run(TAKEN.format(owner.run(GIVEN)))
    assert other.run("result = read(q, 256) == bytes(range(256))")


# ---- accounting


def test_memory_is_counted_across_processes_and_freed_when_a_process_is_killed(node):
    first, second = node.target("big = ok(d.cuMemAlloc(40 << 20))"), node.target()
    assert second.run("result = code(d.cuMemAlloc(32 << 20))") == OUT_OF_MEMORY
    assert second.run("result = ok(d.cuMemGetInfo())[0]") == (64 - 42) * MIB
    first.kill()
    assert second.run("result = ok(d.cuMemGetInfo())[0]") == 63 * MIB
    second.run("big = ok(d.cuMemAlloc(63 << 20))")


def test_a_forked_child_cannot_use_cuda_and_keeps_no_device(node):
    child = node.target()
    source = """
import os, time
reader, writer = os.pipe()
forked = os.fork()
if forked == 0:
    os.write(writer, json.dumps([code(d.cuInit(0)), code(d.cuMemAlloc(8)), code(d.cuCtxGetCurrent())]).encode())
    time.sleep(60)
result = [forked, json.loads(os.read(reader, 100))]
"""
    forked, codes = child.run(source)
    try:
        assert codes == [NOT_INITIALIZED] * 3
        assert not [
            name for name in os.listdir(f"/proc/{forked}/fd") if "/gpu" in os.readlink(f"/proc/{forked}/fd/{name}")
        ]
        assert node.caller().run(f"result = code(d.cuCheckpointProcessGetState({forked}))") == NOT_INITIALIZED
        child.kill()
        assert node.target().run("result = ok(d.cuMemGetInfo())[0]") == 63 * MIB
    finally:
        os.kill(forked, signal.SIGKILL)


def test_a_child_forked_before_init_is_an_ordinary_process(node):
    source = """
import os
reader, writer = os.pipe()
if os.fork() == 0:
    start(); p = ok(d.cuMemAlloc(4096)); write(p, b'12345678'); os.write(writer, read(p, 8)); os._exit(0)
result = os.read(reader, 100).decode()
"""
    assert node.child().run(source) == "12345678"


# ---- streams, events, kernels, graphs


def test_streams_work_asynchronously_and_in_order(node, ptx):
    child = node.target(f"k = kernels({ptx!r}); s = ok(d.cuStreamCreate(1))")
    child.run(
        "ok(launch(k['vgpu_spin_ms'], s, 300)); ok(launch(k['vgpu_fill'], s, p, 4, 7)); ok(launch(k['vgpu_increment'], s, p, 4, 5))"
    )
    assert child.run("result = code(d.cuStreamQuery(s))") == NOT_READY
    words = child.run(
        "ok(d.cuStreamSynchronize(s)); assert code(d.cuStreamQuery(s)) == 0; result = list(memoryview(read(p, 32)).cast('Q'))"
    )
    assert words == [(fill_word(7, n) + 5) % 2**64 for n in range(4)]


def fill_word(seed, index):
    x = (seed + index * 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    return x ^ (x >> 27)


def test_events_order_streams_and_measure_time(node, ptx):
    child = node.target(
        f"k = kernels({ptx!r}); s, t = ok(d.cuStreamCreate(1)), ok(d.cuStreamCreate(1)); a, b = ok(d.cuEventCreate(0)), ok(d.cuEventCreate(0))"
    )
    child.run(
        "ok(d.cuEventRecord(a, s)); ok(launch(k['vgpu_spin_ms'], s, 200)); ok(d.cuMemsetD8Async(p, 1, 8, s)); ok(d.cuEventRecord(b, s))"
    )
    assert child.run("result = code(d.cuEventQuery(b))") == NOT_READY
    child.run("ok(d.cuStreamWaitEvent(t, b, 0)); ok(d.cuMemsetD8Async(p, 2, 4, t)); ok(d.cuStreamSynchronize(t))")
    assert child.run("result = read(p, 8).hex()") == "0202020201010101"
    assert child.run("ok(d.cuEventSynchronize(b)); result = ok(d.cuEventElapsedTime(a, b))") >= 199


def test_a_kernel_waits_on_the_device_for_a_word_that_another_process_writes(node, ptx):
    waiting = node.target(f"k = kernels({ptx!r}); s = ok(d.cuStreamCreate(1)); write(p, bytes(16))")
    other = node.child(f"start(); k = kernels({ptx!r}); s = ok(d.cuStreamCreate(1))")
    other.run(f"q = opened({waiting.run('result = offer(p)')!r})")
    waiting.run(
        "ok(launch(k['vgpu_wait_word'], s, p, int(p) + 8, 3)); ok(launch(k['vgpu_fill'], s, int(p) + 16, 1, 7))"
    )
    for value, state in ((2, NOT_READY), (4, 0)):
        other.run(f"ok(launch(k['vgpu_post_word'], s, q, int(q) + 8, {value})); ok(d.cuStreamSynchronize(s))")
        time.sleep(0.05)
        assert waiting.run("result = code(d.cuStreamQuery(s))") == state
    waiting.send("ok(d.cuCtxSynchronize()); result = read(p, 24).hex()")
    assert waiting.receive() == (4).to_bytes(8, "little").hex() + "0" * 16 + fill_word(7, 0).to_bytes(8, "little").hex()


def test_waiting_for_a_context_waits_for_its_waiting_kernels(node, ptx):
    child = node.target(
        f"k = kernels({ptx!r}); s, t = ok(d.cuStreamCreate(1)), ok(d.cuStreamCreate(1)); write(p, bytes(16))"
    )
    child.run("ok(launch(k['vgpu_wait_word'], s, p, int(p) + 8, 1))")
    child.send("ok(d.cuCtxSynchronize())")
    assert not child.is_answering(0.3)
    used = Path(f"/proc/{child.pid}/stat").read_text().split()[13:15]
    assert (
        sum(map(int, used)) < 100
    )  # 1 s of processor time, start of the interpreter included: it sleeps between looks


def test_a_waiting_kernel_ends_with_its_context_and_what_follows_it_is_not_done(node, ptx):
    child = node.target(
        f"k = kernels({ptx!r}); other = ok(d.cuCtxCreate(None, 0, 0)); s = ok(d.cuStreamCreate(1)); write(p, bytes(16))"
    )
    child.run("ok(launch(k['vgpu_wait_word'], s, p, int(p) + 8, 1)); ok(launch(k['vgpu_fill'], s, p, 1, 7))")
    child.run("ok(d.cuCtxDestroy(other))", within_s=5)
    assert child.run("result = read(p, 16)[:8].hex()") == "0" * 16


def test_a_launch_waits_for_room_in_its_streams_queue(node, ptx):
    child = node.target(
        f"import threading; k = kernels({ptx!r}); s, t = ok(d.cuStreamCreate(1)), ok(d.cuStreamCreate(1)); write(p, bytes(24))"
    )
    child.run(
        """
context, launched = ok(d.cuCtxGetCurrent()), [0]
ok(launch(k['vgpu_wait_word'], s, p, int(p) + 8, 1))
def many():
    ok(d.cuCtxSetCurrent(context))
    for n in range(2000):
        ok(launch(k['vgpu_increment'], s, int(p) + 16, 1, 1)); launched[0] += 1
thread = threading.Thread(target=many); thread.start()
"""
    )
    wait_until(lambda: child.run("result = launched[0]") >= 1023)
    time.sleep(0.2)
    assert child.run("result = launched[0]") == 1023
    child.run("ok(launch(k['vgpu_post_word'], t, p, int(p) + 8, 1)); thread.join(); ok(d.cuStreamSynchronize(s))")
    assert child.run("result = int.from_bytes(read(int(p) + 16, 8), 'little')") == 2000


def test_a_kernel_reaches_memory_of_another_device_only_where_it_was_let_in(node, ptx):
    child = node.child(
        f"start(1); k = kernels({ptx!r}); s = ok(d.cuStreamCreate(1)); h = ok(d.cuMemCreate(2 << 20, properties(0), 0))"
    )
    child.run("a = ok(d.cuMemAddressReserve(2 << 20, 0, 0, 0)); ok(d.cuMemMap(a, 2 << 20, 0, h, 0))")
    child.run(
        "ok(d.cuMemSetAccess(a, 2 << 20, [access(1)], 1)); ok(launch(k['vgpu_fill'], s, a, 1, 7)); ok(d.cuStreamSynchronize(s))"
    )
    assert child.run("result = int.from_bytes(read(a, 8), 'little')") == fill_word(7, 0)
    child.run("ok(d.cuMemSetAccess(a, 2 << 20, [access(0), access(1, 0)], 2)); ok(launch(k['vgpu_fill'], s, a, 1, 7))")
    assert child.run("d.cuStreamSynchronize(s); result = code(d.cuStreamQuery(s))") == ILLEGAL_ADDRESS


@pytest.mark.parametrize(("flags", "waits"), [(0, True), (1, False)], ids=["blocking", "non_blocking"])
def test_the_legacy_default_stream_waits_for_blocking_streams_only(node, ptx, flags, waits):
    child = node.target(f"import time; k = kernels({ptx!r}); s = ok(d.cuStreamCreate({flags}))")
    source = "ok(launch(k['vgpu_spin_ms'], s, 300)); t = time.monotonic(); ok(d.cuMemsetD8(p, 1, 8)); result = time.monotonic() - t"
    assert (child.run(source) > 0.2) == waits


def test_host_functions_run_in_order_and_may_not_call_the_driver(node):
    source = """
seen = []
def callback(user):
    seen.append(code(d.cuMemAlloc(8)))
fn = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(callback)
ok(d.cuLaunchHostFunc(0, d.CUhostFn(_ptr=ctypes.addressof(fn)), 0)) if False else None
library = ctypes.CDLL('libcuda.so.1')
library.cuLaunchHostFunc(None, fn, None)
ok(d.cuCtxSynchronize())
result = seen
"""
    assert node.target().run(source) == [NOT_PERMITTED]


def test_a_kernel_on_memory_that_is_gone_faults_every_later_call(node, ptx):
    child = node.target(
        f"k = kernels({ptx!r}); q = int(ok(d.cuMemAlloc(4096))); ok(d.cuMemFree(q)); ok(launch(k['vgpu_increment'], 0, q, 8, 1))"
    )
    wait_until(lambda: child.run("result = code(d.cuCtxSynchronize())") == ILLEGAL_ADDRESS)
    assert child.run("result = code(d.cuMemAlloc(8))") == ILLEGAL_ADDRESS


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (".version 5.0\\n.visible .entry somebody_elses_kernel()\\n", 218),
        ("\\x7fELF\\x02\\x01\\x01 .version", 209),
        ("hello, this is no program", 200),
    ],
    ids=["unknown_kernel", "cubin", "text"],
)
def test_images_it_cannot_run_are_refused(node, image, expected):
    assert node.target().run(f"result = code(d.cuModuleLoadData(b'{image}'))") == expected


def test_functions_globals_and_libraries_by_name(node, ptx):
    child = node.target(
        f"ptx = {ptx!r}.encode(); m = ok(d.cuModuleLoadData(ptx + b'.visible .global .align 8 .b8 table[128];\\n.global .u32 one;'))"
    )
    assert child.run("result = code(d.cuModuleGetFunction(m, b'vgpu_nothing'))") == NOT_FOUND
    assert child.run(
        "a, n = ok(d.cuModuleGetGlobal(m, b'table')); write(a, b'x' * 128); result = [n, ok(d.cuModuleGetGlobal(m, b'one'))[1]]"
    ) == [128, 4]
    child.run(
        "l = ok(d.cuLibraryLoadData(ptx, [], [], 0, [], [], 0)); f = ok(d.cuKernelGetFunction(ok(d.cuLibraryGetKernel(l, b'vgpu_fill'))))"
    )
    assert child.run("ok(launch(f, 0, p, 1, 3)); result = list(memoryview(read(p, 8)).cast('Q'))") == [fill_word(3, 0)]
    child.run("ok(d.cuLibraryUnload(l)); ok(d.cuModuleUnload(m))")


CAPTURE = """
s = ok(d.cuStreamCreate(1)); q = ok(d.cuMemAlloc(64)); h = ok(d.cuMemAllocHost(8)); ok(d.cuMemsetD8(q, 0, 64))
ok(d.cuStreamBeginCapture(s, d.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL))
ok(launch(k['vgpu_increment'], s, q, 2, 1)); ok(d.cuMemsetD8Async(int(q) + 16, 9, 4, s)); ok(d.cuMemcpyDtoHAsync(int(h), q, 8, s))
g = ok(d.cuStreamEndCapture(s)); e = ok(d.cuGraphInstantiate(g, 0)); ok(d.cuGraphDestroy(g))
def replay():
    ok(d.cuGraphLaunch(e, s)); ok(d.cuStreamSynchronize(s))
    return [*memoryview(read(q, 24)).cast('Q'), int.from_bytes(ctypes.string_at(int(h), 8), 'little')]
"""


def test_graphs_replay_kernels_memsets_and_copies(node, ptx):
    child = node.target(f"k = kernels({ptx!r})\n{CAPTURE}")
    assert child.run("result = read(q, 8).hex()") == "00" * 8
    assert [child.run("result = replay()") for _ in range(3)] == [[n, n, 0x09090909, n] for n in (1, 2, 3)]
    child.run("ok(d.cuGraphExecDestroy(e))")


def test_capture_joins_streams_through_events_and_lists_its_nodes(node, ptx):
    child = node.target(
        f"k = kernels({ptx!r}); s, t = ok(d.cuStreamCreate(1)), ok(d.cuStreamCreate(1)); a, b = ok(d.cuEventCreate(2)), ok(d.cuEventCreate(2))"
    )
    child.run(
        "ok(d.cuStreamBeginCapture(s, d.CUstreamCaptureMode(0))); ok(d.cuMemsetD8Async(p, 1, 8, s)); ok(d.cuEventRecord(a, s)); ok(d.cuStreamWaitEvent(t, a, 0))"
    )
    assert child.run("result = int(ok(d.cuStreamIsCapturing(t)))") == 1
    child.run(
        "ok(launch(k['vgpu_increment'], t, p, 1, 1)); ok(d.cuEventRecord(b, t)); ok(d.cuStreamWaitEvent(s, b, 0)); g = ok(d.cuStreamEndCapture(s))"
    )
    assert child.run("result = [ok(d.cuGraphGetNodes(g))[-1], int(ok(d.cuStreamIsCapturing(t)))]") == [2, 0]
    child.run("e = ok(d.cuGraphInstantiate(g, 0)); ok(d.cuGraphLaunch(e, s)); ok(d.cuStreamSynchronize(s))")
    assert child.run("result = read(p, 8).hex()") == "0201010101010101"


def test_waiting_for_a_capturing_stream_spoils_the_capture(node):
    child = node.target("s = ok(d.cuStreamCreate(0)); ok(d.cuStreamBeginCapture(s, d.CUstreamCaptureMode(0)))")
    assert child.run("result = code(d.cuStreamSynchronize(s))") == 900
    assert child.run("result = code(d.cuStreamEndCapture(s))") == 901
    assert child.run("result = code(d.cuStreamSynchronize(s))") == 0


# ---- virtual memory management


def test_mappings_come_and_go_and_obey_access(node):
    child = node.target(
        "h = ok(d.cuMemCreate(4 << 20, properties(), 0)); a = map_memory(h, 4 << 20); ok(d.cuMemRelease(h))"
    )
    child.run("write(int(a) + 100, b'hello'); assert int(ok(d.cuMemGetAccess(access().location, a))) == 3")
    assert child.run("result = code(d.cuMemMap(a, 2 << 20, 0, ok(d.cuMemRetainAllocationHandle(a)), 0))") == 208
    child.run("ok(d.cuMemSetAccess(a, 4 << 20, [access(flags=1)], 1))")
    assert child.run("result = code(d.cuMemcpyHtoD(a, b'x', 1))") == INVALID_VALUE
    assert child.run("result = read(int(a) + 100, 5).decode()") == "hello"
    assert child.run("result = code(d.cuMemAddressFree(a, 4 << 20))") == INVALID_VALUE
    child.run(
        "h = ok(d.cuMemRetainAllocationHandle(a)); ok(d.cuMemRelease(h)); ok(d.cuMemRelease(h)); before = ok(d.cuMemGetInfo())[0]"
    )
    assert child.run(
        "ok(d.cuMemUnmap(a, 4 << 20)); ok(d.cuMemAddressFree(a, 4 << 20)); result = ok(d.cuMemGetInfo())[0] - before"
    ) in (0, 4 * MIB)


def test_sizes_and_kinds_that_cannot_be_had_are_refused(node):
    child = node.target()
    assert child.run("result = code(d.cuMemCreate(4096, properties(), 0))") == INVALID_VALUE
    assert child.run("result = code(d.cuMemCreate(1 << 30, properties(), 0))") == OUT_OF_MEMORY
    assert (
        child.run(
            "w = properties(); w.requestedHandleTypes = d.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC; result = code(d.cuMemCreate(2 << 20, w, 0))"
        )
        == NOT_SUPPORTED
    )
    assert (
        child.run("result = ok(d.cuMemGetAllocationGranularity(properties(), d.CUmemAllocationGranularity_flags(0)))")
        == 2 * MIB
    )


EXPORT_TYPE = "d.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR"


def share(node, exporter_source=""):
    """An exporter with `h` mapped at `a`, an importer with the same memory as `h` mapped at `a`."""
    exporter = node.target(
        f"h = ok(d.cuMemCreate(2 << 20, properties(), 0)); a = map_memory(h, 2 << 20); write(a, b'shared'); {exporter_source}"
    )
    fd = exporter.run(f"result = int(ok(d.cuMemExportToShareableHandle(h, {EXPORT_TYPE}, 0)))")
    importer = node.target(f"import os; fd = os.open('/proc/{exporter.pid}/fd/{fd}', os.O_RDWR)")
    importer.run(
        f"h = ok(d.cuMemImportFromShareableHandle(fd, {EXPORT_TYPE})); os.close(fd); a = map_memory(h, 2 << 20)"
    )
    return exporter, importer


def test_memory_is_shared_through_a_descriptor(node):
    exporter, importer = share(node)
    assert importer.run("result = read(a, 6).decode()") == "shared"
    importer.run("write(a, b'SHARED')")
    assert exporter.run("result = read(a, 6).decode()") == "SHARED"
    assert importer.run(f"result = code(d.cuMemExportToShareableHandle(h, {EXPORT_TYPE}, 0))") == INVALID_VALUE
    exporter.kill()
    assert importer.run("result = read(a, 6).decode()") == "SHARED"


def test_only_descriptors_of_device_memory_can_be_imported(node):
    child = node.target("import os; fd = os.memfd_create('other'); os.ftruncate(fd, 2 << 20)")
    assert child.run(f"result = code(d.cuMemImportFromShareableHandle(fd, {EXPORT_TYPE}))") == INVALID_VALUE
    assert (
        child.run(
            f"h = ok(d.cuMemCreate(2 << 20, properties(shareable=False), 0)); result = code(d.cuMemExportToShareableHandle(h, {EXPORT_TYPE}, 0))"
        )
        == INVALID_VALUE
    )


# ---- checkpoint


def test_a_checkpoint_takes_the_device_away_and_a_restore_brings_everything_back(node, ptx):
    target = node.target(
        f"k = kernels({ptx!r})\n{CAPTURE}\nh2 = ok(d.cuMemCreate(2 << 20, properties(), 0)); a = map_memory(h2, 2 << 20); write(a, b'mapped')"
    )
    caller, watcher = node.caller(), node.target()
    assert target.run("result = replay()")[0] == 1
    before = watcher.run("result = ok(d.cuMemGetInfo())[0]")
    assert device_traces(target.pid)
    caller.run(f"freeze({target.pid})")
    assert caller.run(f"result = state({target.pid})") == CHECKPOINTED
    assert device_traces(target.pid) == []
    assert watcher.run("result = ok(d.cuMemGetInfo())[0]") - before >= 3 * MIB
    caller.run(f"thaw({target.pid})")
    assert caller.run(f"result = state({target.pid})") == RUNNING
    assert watcher.run("result = ok(d.cuMemGetInfo())[0]") == before
    target.run("assert read(p, 1 << 20) == bytes(range(256)) * 4096; assert read(a, 6) == b'mapped'")
    assert [target.run("result = replay()")[0] for _ in range(2)] == [2, 3]
    target.run(
        "q2 = ok(d.cuMemAlloc(4096)); ok(d.cuMemFree(q2)); ok(d.cuMemUnmap(a, 2 << 20)); ok(d.cuMemRelease(h2)); ok(d.cuMemFree(p))"
    )


def test_device_nodes_are_held_open_except_while_checkpointed(node, tmp_path):
    for name in ("nvidiactl", "nvidia0"):
        (tmp_path / name).touch()
    target = node.child("start()", SOFTWARE_GPU_NODE_DIR=str(tmp_path))
    caller = node.caller()
    held = {str(tmp_path / "nvidiactl"), str(tmp_path / "nvidia0")}
    assert held <= set(device_traces(target.pid))
    caller.run(f"freeze({target.pid})")
    assert device_traces(target.pid) == []
    caller.run(f"thaw({target.pid})")
    assert held <= set(device_traces(target.pid))


def test_a_node_that_cannot_be_opened_means_no_device(node, tmp_path):
    (tmp_path / "nvidia0").mkdir()
    assert node.child(SOFTWARE_GPU_NODE_DIR=str(tmp_path)).run("result = code(d.cuInit(0))") == NO_DEVICE


@pytest.mark.parametrize(
    ("reach", "refused"),
    [
        ("", ["Checkpoint", "Restore", "Unlock"]),
        ("Lock", ["Lock", "Restore"]),
        ("Lock Checkpoint", ["Lock", "Checkpoint", "Unlock"]),
        ("Lock Checkpoint Restore", ["Lock", "Restore"]),
        ("Lock Checkpoint Restore Unlock", ["Checkpoint", "Restore", "Unlock"]),
    ],
    ids=["running", "locked", "checkpointed", "restored", "unlocked"],
)
def test_calls_that_the_state_does_not_allow_are_refused(node, reach, refused):
    target, caller = node.target(), node.caller()
    for verb in reach.split():
        caller.run(f"ok(d.cuCheckpointProcess{verb}({target.pid}, None))")
    before = caller.run(f"result = state({target.pid})")
    for verb in refused:
        assert caller.run(f"result = code(d.cuCheckpointProcess{verb}({target.pid}, None))") == ILLEGAL_STATE, verb
    assert caller.run(f"result = state({target.pid})") == before


@pytest.mark.parametrize("verb", ["GetState", "GetRestoreThreadId", "Lock", "Checkpoint", "Restore", "Unlock"])
def test_processes_without_cuda_and_pids_without_a_process_are_told_apart(node, verb):
    caller, idle = node.caller(), node.child()
    dead = subprocess.Popen(["/bin/true"])
    dead.wait(5)
    more = "" if verb.startswith("Get") else ", None"
    expected = {
        os.getpid(): NOT_INITIALIZED,
        idle.pid: NOT_INITIALIZED,
        dead.pid: OPERATING_SYSTEM,
        -1: OPERATING_SYSTEM,
        0: OPERATING_SYSTEM,
    }
    for pid, answer in expected.items():
        assert caller.run(f"result = code(d.cuCheckpointProcess{verb}({pid}{more}))") == answer, pid


def test_the_restore_thread_is_a_thread_of_the_target(node):
    target, caller = node.target(), node.caller()
    tid = caller.run(f"result = ok(d.cuCheckpointProcessGetRestoreThreadId({target.pid}))")
    assert tid != target.pid
    assert Path(f"/proc/{target.pid}/task/{tid}").exists()


def test_a_lock_blocks_calls_until_the_unlock(node):
    target, caller = node.target(), node.caller()
    caller.run(f"ok(d.cuCheckpointProcessLock({target.pid}, lock_args(1000)))")
    target.send("result = read(p, 4).hex()")
    assert not target.is_answering(0.3)
    caller.run(
        f"ok(d.cuCheckpointProcessCheckpoint({target.pid}, None)); ok(d.cuCheckpointProcessRestore({target.pid}, None))"
    )
    assert not target.is_answering(0.2)
    caller.run(f"ok(d.cuCheckpointProcessUnlock({target.pid}, None))")
    assert target.receive() == "00010203"


def test_a_lock_waits_for_submitted_work_and_gives_up_at_its_time_out(node, ptx):
    target = node.target(f"k = kernels({ptx!r}); s = ok(d.cuStreamCreate(1)); ok(launch(k['vgpu_spin_ms'], s, 1200))")
    launched = time.monotonic()
    caller = node.caller()
    started = time.monotonic()
    assert caller.run(f"result = code(d.cuCheckpointProcessLock({target.pid}, lock_args(200)))") == NOT_READY
    assert 0.15 < time.monotonic() - started < 0.8
    assert caller.run(f"result = state({target.pid})") == RUNNING
    assert target.run("result = read(p, 4).hex()") == "00010203"
    caller.run(f"ok(d.cuCheckpointProcessLock({target.pid}, lock_args(5000)))")
    assert time.monotonic() - launched > 1.1
    caller.run(f"ok(d.cuCheckpointProcessUnlock({target.pid}, None)); freeze({target.pid}); thaw({target.pid})")


def test_a_lock_whose_caller_died_is_given_up_for_the_next_request(node, ptx):
    target = node.target(f"k = kernels({ptx!r}); s = ok(d.cuStreamCreate(1)); ok(launch(k['vgpu_spin_ms'], s, 1500))")
    first = node.caller()
    first.send(f"d.cuCheckpointProcessLock({target.pid}, None)")
    time.sleep(0.2)
    first.kill()
    second = node.caller()
    assert second.run(f"result = code(d.cuCheckpointProcessLock({target.pid}, lock_args(100)))") == NOT_READY
    assert target.run("result = read(p, 4).hex()") == "00010203"


def test_a_process_can_lock_itself_from_a_thread_of_its_own(node):
    target = node.target("import os; freeze(os.getpid()); thaw(os.getpid())")
    assert target.run("result = read(p, 4).hex()") == "00010203"


def test_managed_memory_cannot_be_checkpointed(node):
    target, caller = node.target("m = ok(d.cuMemAllocManaged(4096, 1))"), node.caller()
    caller.run(f"ok(d.cuCheckpointProcessLock({target.pid}, None))")
    assert caller.run(f"result = code(d.cuCheckpointProcessCheckpoint({target.pid}, None))") == NOT_SUPPORTED
    assert caller.run(f"ok(d.cuCheckpointProcessUnlock({target.pid}, None)); result = state({target.pid})") == RUNNING
    target.run("ok(d.cuMemFree(m))")
    caller.run(f"freeze({target.pid}); thaw({target.pid})")


def test_imported_memory_lets_itself_be_checkpointed_and_then_the_process_is_lost(node):
    _, importer = share(node)
    caller = node.caller()
    caller.run(f"freeze({importer.pid})")
    assert not device_files(importer.pid, node)
    for _ in range(2):
        assert caller.run(f"result = restore({importer.pid})") == NOT_SUPPORTED
        assert caller.run(f"result = code(d.cuCheckpointProcessUnlock({importer.pid}, None))") == ILLEGAL_STATE
        assert caller.run(f"result = state({importer.pid})") == CHECKPOINTED
        assert len(device_files(importer.pid, node)) == 2  # the devices are held again, each once
    importer.send("result = read(p, 4)")
    assert not importer.is_answering(0.2)


def test_the_state_of_a_stopped_process_is_told_when_it_goes_on(node):
    target, caller, other = node.target(), node.caller(), node.caller()
    stop(target.pid)
    try:
        caller.send(f"result = state({target.pid})")
        other.send(f"result = state({target.pid})")
        assert not caller.is_answering(0.3)
        assert not other.is_answering(0)
    finally:
        os.kill(target.pid, signal.SIGCONT)
    assert caller.receive() == other.receive() == RUNNING


def test_a_lock_of_a_stopped_process_waits_past_its_time_out_and_comes_when_it_goes_on(node):
    target, caller = node.target(), node.caller()
    stop(target.pid)
    try:
        caller.send(f"result = code(d.cuCheckpointProcessLock({target.pid}, lock_args(50)))")
        assert not caller.is_answering(0.4)
    finally:
        os.kill(target.pid, signal.SIGCONT)
    assert caller.receive() == 0
    assert caller.run(f"result = state({target.pid})") == LOCKED


def test_the_state_of_a_process_that_waits_for_its_lock_is_told(node, ptx):
    target = node.target(f"k = kernels({ptx!r}); s = ok(d.cuStreamCreate(1))")
    locking, asking = node.caller(), node.caller()
    target.run("ok(launch(k['vgpu_spin_ms'], s, 1500))")
    locking.send(f"result = code(d.cuCheckpointProcessLock({target.pid}, lock_args(5000)))")
    time.sleep(0.2)
    assert asking.run(f"result = state({target.pid})", within_s=1) == RUNNING
    assert locking.receive() == 0


def device_files(pid, node):
    links = (os.readlink(entry.path) for entry in os.scandir(f"/proc/{pid}/fd"))
    return [link for link in links if link.startswith(str(node.directory))]


def test_a_process_that_released_its_imports_can_be_restored(node):
    _, importer = share(node)
    caller = node.caller()
    importer.run("ok(d.cuMemUnmap(a, 2 << 20)); ok(d.cuMemRelease(h))")
    caller.run(f"freeze({importer.pid}); thaw({importer.pid})")
    assert importer.run("result = read(p, 4).hex()") == "00010203"


def test_too_little_memory_at_restore_is_refused_and_can_be_tried_again(node):
    target, caller = node.target("big = ok(d.cuMemAlloc(40 << 20)); write(big, b'big')"), node.caller()
    caller.run(f"freeze({target.pid})")
    other = node.target("big = ok(d.cuMemAlloc(40 << 20))")
    assert caller.run(f"result = restore({target.pid})") == OUT_OF_MEMORY
    assert caller.run(f"result = state({target.pid})") == CHECKPOINTED
    assert device_traces(target.pid) == []
    other.kill()
    caller.run(f"thaw({target.pid})")
    assert target.run("result = read(big, 3).decode() + read(p, 4).hex()") == "big00010203"


def swap_devices(node, other):
    """What a migration does: the same path holds another node's devices."""
    for n in range(2):
        shutil.copy(other.directory / f"gpu{n}", node.directory / f".new{n}")
        (node.directory / f".new{n}").rename(node.directory / f"gpu{n}")


def test_other_devices_need_a_map_that_names_every_device_in_use(nodes):
    node, other = nodes("a", salt="a"), nodes("b", salt="b")
    target, caller = (
        node.target(
            "ok(d.cuCtxPushCurrent(ok(d.cuDevicePrimaryCtxRetain(1)))); q = ok(d.cuMemAlloc(4096)); write(q, b'one')"
        ),
        node.caller(),
    )
    caller.run(f"freeze({target.pid})")
    swap_devices(node, other)
    old, new = node.uuids, other.uuids
    assert caller.run(f"result = restore({target.pid})") == INVALID_DEVICE
    assert caller.run(f"result = restore({target.pid}, {[(old[0], old[1])]})") == INVALID_DEVICE
    assert caller.run(f"result = restore({target.pid}, {[(old[0], new[0])]})") == INVALID_VALUE
    assert caller.run(f"result = restore({target.pid}, {[(old[0], new[0]), (old[1], new[0])]})") == INVALID_VALUE
    assert caller.run(f"result = state({target.pid})") == CHECKPOINTED
    assert caller.run(f"result = restore({target.pid}, {[(old[0], new[1]), (old[1], new[0])]})") == 0
    caller.run(f"ok(d.cuCheckpointProcessUnlock({target.pid}, None))")
    assert target.run("result = [ok(d.cuDeviceGetUuid(n)).bytes.hex() for n in (0, 1)]") == [new[1], new[0]]
    assert target.run("result = read(p, 4).hex() + read(q, 3).decode()") == "00010203one"
    target.run("more = ok(d.cuMemAlloc(8 << 20)); ok(d.cuMemFree(more))")


def test_an_injected_fault_is_returned_once_and_changes_nothing(node):
    target, caller = node.target(), node.caller()
    (node.directory / "fault-checkpoint").write_text("999 100")
    caller.run(f"ok(d.cuCheckpointProcessLock({target.pid}, None))")
    assert caller.run(f"result = code(d.cuCheckpointProcessCheckpoint({target.pid}, None))") == 999
    assert caller.run(f"result = state({target.pid})") == LOCKED
    caller.run(f"ok(d.cuCheckpointProcessCheckpoint({target.pid}, None)); thaw({target.pid})")


def test_many_threads_keep_calling_through_lock_and_checkpoint_cycles(node):
    source = """
context, stop, faults, counts = ok(d.cuCtxGetCurrent()), threading.Event(), [], [0] * 6
def work(n):
    try:
        ok(d.cuCtxSetCurrent(context))
        mine, stream = ok(d.cuMemAlloc(65536)), ok(d.cuStreamCreate(1))
        while not stop.is_set():
            value = counts[n] % 256
            ok(d.cuMemsetD8Async(mine, value, 65536, stream)); ok(d.cuStreamSynchronize(stream))
            if read(mine, 65536) != bytes([value]) * 65536: faults.append(f'thread {n}: wrong byte')
            fresh = ok(d.cuMemAlloc(4096)); ok(d.cuMemFree(fresh))
            counts[n] += 1
    except Exception as failure:
        faults.append(repr(failure))
threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
for thread in threads: thread.start()
"""
    target, caller = node.target(source), node.caller()
    for _ in range(8):
        caller.run(
            f"ok(d.cuCheckpointProcessLock({target.pid}, lock_args(5000))); ok(d.cuCheckpointProcessUnlock({target.pid}, None))"
        )
        caller.run(f"freeze({target.pid}); thaw({target.pid})")
        time.sleep(0.02)
    counts, faults = target.run("stop.set(); [thread.join(10) for thread in threads]; result = [counts, faults]")
    assert faults == []
    assert min(counts) > 0


def test_two_callers_at_once_are_served_one_after_the_other(node):
    target, callers = node.target(), [node.caller() for _ in range(3)]
    for caller in callers:
        caller.send(f"result = code(d.cuCheckpointProcessLock({target.pid}, lock_args(2000)))")
    assert sorted(caller.receive() for caller in callers) == [0, ILLEGAL_STATE, ILLEGAL_STATE]


def test_a_process_in_a_pid_namespace_is_steered_and_listed_by_its_host_pid(node):
    prefix = ["unshare", "--fork", "--pid", "--mount-proc", "--kill-child"]
    inner = Child(node.environment, prefix if os.geteuid() == 0 else [*prefix, "--map-root-user"])
    node.children.append(inner)
    assert inner.run(f"import os; start(); p = ok(d.cuMemAlloc({MIB})); write(p, b'inner'); result = os.getpid()") == 1
    host_pid = int(Path(f"/proc/{inner.pid}/task/{inner.pid}/children").read_text().split()[0])
    caller = node.caller()
    assert caller.run(f"result = state({host_pid})") == RUNNING
    tid = caller.run(f"result = ok(d.cuCheckpointProcessGetRestoreThreadId({host_pid}))")
    assert Path(f"/proc/{host_pid}/task/{tid}").exists()
    assert nvml(node)["processes"] == [[host_pid, MIB]]
    caller.run(f"freeze({host_pid})")
    assert device_traces(host_pid) == []
    assert nvml(node)["processes"] == []
    caller.run(f"thaw({host_pid})")
    assert inner.run("result = read(p, 5).decode()") == "inner"


# ---- NVML

NVML = """
library = ctypes.CDLL('libnvidia-ml.so.1')
class Process(ctypes.Structure):
    _fields_ = [('pid', ctypes.c_uint), ('used', ctypes.c_ulonglong), ('gpu', ctypes.c_uint), ('compute', ctypes.c_uint)]
class Memory(ctypes.Structure):
    _fields_ = [('version', ctypes.c_uint), ('total', ctypes.c_ulonglong), ('reserved', ctypes.c_ulonglong), ('free', ctypes.c_ulonglong), ('used', ctypes.c_ulonglong)]
assert library.nvmlInit_v2() == 0
device, text, number, memory = ctypes.c_void_p(), ctypes.create_string_buffer(96), ctypes.c_uint(64), Memory()
assert library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device)) == 0
assert library.nvmlDeviceGetUUID(device, text, 96) == 0; uuid = text.value.decode()
assert library.nvmlDeviceGetHandleByUUID(text, ctypes.byref(device)) == 0
assert library.nvmlDeviceGetName(device, text, 96) == 0; name = text.value.decode()
assert library.nvmlSystemGetDriverVersion(text, 96) == 0
assert library.nvmlDeviceGetMemoryInfo_v2(device, ctypes.byref(memory)) == 0
processes = (Process * 64)()
assert library.nvmlDeviceGetComputeRunningProcesses_v3(device, ctypes.byref(number), processes) == 0
result = {'uuid': uuid, 'name': name, 'driver': text.value.decode(), 'total': memory.total, 'used': memory.used,
          'processes': sorted([p.pid, p.used] for p in processes[:number.value]), 'bad': library.nvmlDeviceGetHandleByUUID(b'GPU-x', ctypes.byref(device))}
"""


def nvml(node):
    return node.child().run(NVML)


def test_nvml_names_devices_memory_and_processes(node):
    targets = sorted([node.target(), node.target("more = ok(d.cuMemAlloc(4096))")], key=lambda child: child.pid)
    seen = nvml(node)
    assert seen["uuid"].removeprefix("GPU-").replace("-", "") == node.uuids[0]
    assert "test double" in seen["name"]
    assert seen["driver"] == "580.0-software"
    assert (seen["total"], seen["used"]) == (64 * MIB, 2 * MIB + 4096)
    assert [pid for pid, _ in seen["processes"]] == [child.pid for child in targets]
    assert seen["bad"] == 6


# ---- the counting program


def steps(path):
    return path.read_text().splitlines() if path.exists() else []


def test_the_counter_goes_on_where_it_was(node, tmp_path):
    out, caller = tmp_path / "out", node.caller()
    counter = node.counter("--out", out, "--mib", 8, "--interval", 5)
    wait_until(lambda: len(steps(out)) > 3)
    caller.run(f"freeze({counter.pid})")
    at_rest = steps(out)
    time.sleep(0.1)
    assert steps(out) == at_rest
    caller.run(f"thaw({counter.pid})")
    wait_until(lambda: len(steps(out)) > len(at_rest) + 10)
    counter.terminate()
    assert counter.wait(10) == 0
    assert all(re.fullmatch(rf"step {n} sum [0-9a-f]+ ok", line) for n, line in enumerate(steps(out), 1))


def test_the_counter_notices_one_wrong_byte(node, tmp_path):
    out, caller = tmp_path / "out", node.caller()
    counter = node.counter("--out", out, "--mib", 8, "--interval", 5)
    wait_until(lambda: len(steps(out)) > 1)
    caller.run(f"ok(d.cuCheckpointProcessLock({counter.pid}, None))")
    maps = Path(f"/proc/{counter.pid}/maps").read_text().splitlines()
    largest = max(
        (line for line in maps if "software-gpu" in line),
        key=lambda line: int.__rsub__(*(int(x, 16) for x in line.split()[0].split("-"))),
    )
    with Path(f"/proc/{counter.pid}/mem").open("r+b", buffering=0) as memory:
        memory.seek(int(largest.split("-")[0], 16) + 12345)
        byte = memory.read(1)[0]
        memory.seek(-1, os.SEEK_CUR)
        memory.write(bytes([byte ^ 1]))
    caller.run(f"ok(d.cuCheckpointProcessUnlock({counter.pid}, None))")
    assert counter.wait(20) == 3
    assert "WRONG" in counter.stderr.read()
    assert "WRONG" in steps(out)[-1]


def test_the_kernels_give_the_sums_an_h200_gave_for_the_same_ptx(nodes, tmp_path):
    out = tmp_path / "out"
    counter = nodes("large", memory=128 * MIB).counter("--out", out, "--mib", 64, "--interval", 0, "--step-limit", 20)
    assert counter.wait(30) == 0
    assert (steps(out)[0], steps(out)[-1]) == ("step 1 sum 37f2e0d8fc348ea1 ok", "step 20 sum 37f2e0d905b48ea1 ok")


def test_several_counting_processes_each_have_their_own_memory(node, tmp_path):
    out = tmp_path / "out"
    counter = node.counter("--out", out, "--mib", 4, "--interval", 0, "--processes", 3, "--step-limit", 5)
    assert counter.wait(20) == 0
    last = sorted(line for line in steps(out) if " step 5 " in line)
    assert [line.split()[0] for line in last] == ["p0", "p1", "p2"]
    assert len({line.split()[4] for line in last}) == 3


def test_checkpoint_cycles_are_clean_under_sanitizers(nodes, tmp_path):
    out = tmp_path / "out"
    node, caller = nodes("sanitized"), nodes("caller").caller()
    node.libraries = build_sanitized(tmp_path / "libraries")
    node.environment |= {"LD_LIBRARY_PATH": str(node.libraries), "ASAN_OPTIONS": "detect_leaks=1:handle_segv=1"}
    counter = node.counter("--out", out, "--mib", 8, "--interval", 1)
    wait_until(lambda: len(steps(out)) > 1)
    for _ in range(3):
        caller.run(f"freeze({counter.pid}); thaw({counter.pid})")
        seen = len(steps(out))
        wait_until(lambda seen=seen: len(steps(out)) > seen)
    counter.terminate()
    _, errors = counter.communicate(timeout=20)
    assert (counter.returncode, errors) == (0, "")
