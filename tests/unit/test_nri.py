"""The NRI plugin against a simulated runtime: registration, what a container gets, bad input, reconnecting."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import struct
import subprocess
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from containerd_integration.api.wire import message
from containerd_integration.nri import multiplex as nri_multiplex
from containerd_integration.nri import plugin as nri_plugin
from containerd_integration.nri import rootfs, ttrpc
from containerd_integration.nri.multiplex import PLUGIN_STREAM, ConnectionLost, Multiplexer
from containerd_integration.nri.plugin import EVENTS, Plugin, connected, keep_serving
from oci_hook.settings import Settings
from tests.simulators.nri import PACKAGE, CallFailed, Runtime
from vgpu_errors import EngineFailed, NodeError

LIBRARY = "/run/vgpu-preload/libvgpu.so"


def new(name, /, **fields):
    return message(f"{PACKAGE}.{name}")(**fields)


def gpu_container(**fields):
    device = new("LinuxDevice", path="/dev/nvidiactl", type="c")
    base = {"id": "c0ffee", "name": "train", "args": ["/bin/program"], "env": ["PATH=/bin"]}
    return new("Container", **{**base, "linux": new("LinuxContainer", devices=[device]), **fields})


@pytest.fixture
def node(tmp_path):
    """Settings of a node with one glibc and one musl build."""
    found = Settings()
    found.run_dir, found.library_dir = str(tmp_path / "run"), str(tmp_path / "lib")
    for libc in ("glibc", "musl"):
        folder = tmp_path / "lib/preload" / libc
        (folder / "abc123").mkdir(parents=True)
        (folder / "abc123/libvgpu.so").write_bytes(b"x")
        (folder / "current").write_text("abc123\n")
    return found


@pytest.fixture
def image(tmp_path):
    """Two layers: the loader below, the program above."""
    below, above = tmp_path / "layers/below", tmp_path / "layers/above"
    for folder in (below / "lib64", below / "bin", above / "bin"):
        folder.mkdir(parents=True)
    shutil.copy(shutil.which("true"), above / "bin/program")
    interpreter = subprocess.run(["readelf", "-l", above / "bin/program"], capture_output=True, text=True, check=True)
    assert "ld-linux" in interpreter.stdout
    return rootfs.LayeredTree([str(above), str(below)])


@pytest.fixture
def runtime(tmp_path):
    found = Runtime(tmp_path / "nri.sock")
    yield found
    found.close()


class Served:
    """A plugin in a thread."""

    def __init__(self, node, runtime, tree):
        self.log = []
        self.plugin = Plugin(node, self.log.append, lambda _: tree)
        self.thread = threading.Thread(target=self._run, args=(runtime.address,), daemon=True)
        self.thread.start()

    def _run(self, address):
        try:
            self.plugin.serve(connected(address))
        except (ConnectionLost, EngineFailed, NodeError) as error:
            self.log.append(f"ended: {error}")


@pytest.fixture
def served(node, runtime, image):
    found = Served(node, runtime, image)
    registration = runtime.accept()
    assert (registration.plugin_name, registration.plugin_idx) == ("vgpu", "90")
    yield found
    runtime.hang_up()
    found.thread.join(timeout=5)
    assert not found.thread.is_alive()


def create(runtime, container, **pod):
    answer = runtime.call(
        "CreateContainer", new("CreateContainerRequest", pod=new("PodSandbox", **pod), container=container)
    )
    return answer.adjust


def test_it_subscribes_to_what_it_answers(served, runtime):
    answer = runtime.call("Configure", new("ConfigureRequest", runtime_name="containerd", runtime_version="2.1"))
    assert answer.events == EVENTS == (1 << 3 | 1 << 6 | 1 << 10)
    assert runtime.call("Synchronize", new("SynchronizeRequest", more=True)).more
    assert not runtime.call("Synchronize", new("SynchronizeRequest")).more


def test_a_gpu_container_gets_mounts_environment_and_annotations(served, runtime, node):
    adjust = create(runtime, gpu_container(env=["PATH=/bin", "LD_PRELOAD=/theirs.so"]))
    library, control = adjust.mounts
    assert (library.destination, library.source) == (LIBRARY, f"{node.library_dir}/preload/glibc/abc123/libvgpu.so")
    assert "ro" in library.options
    assert (control.destination, control.source) == ("/run/vgpu", f"{node.run_dir}/containers/c0ffee")
    assert [(one.key, one.value) for one in adjust.env] == [("LD_PRELOAD", f"{LIBRARY}:/theirs.so")]
    assert dict(adjust.annotations) == {
        "vgpu.snapshot/preload-build-id": "abc123",
        "vgpu.snapshot/preload-libc": "glibc",
    }
    assert Path(control.source, "mode").read_text() == "driver\n"
    assert "injected: device /dev/nvidiactl" in served.log[-1]


@pytest.mark.parametrize(
    ("container", "pod"),
    [
        ({"linux": new("LinuxContainer")}, {}),
        ({"annotations": {"vgpu.snapshot/inject": "false"}}, {}),
        ({}, {"annotations": {"vgpu.snapshot/inject": "false"}}),
        ({}, {"runtime_handler": "vgpu-runtime"}),
        ({"id": "../../etc"}, {}),
    ],
    ids=["no GPU", "switched off", "switched off for the pod", "our own handler", "an id that is no name"],
)
def test_others_are_left_alone(served, runtime, node, container, pod):
    adjust = create(runtime, gpu_container(**container), **pod)
    assert adjust.SerializeToString() == b""
    assert not Path(node.run_dir, "containers").exists()


@pytest.mark.parametrize("name", ["nvidia.com/gpu=0", "vgpu.snapshot/gpu=all"])
def test_a_cdi_device_of_a_gpu_is_enough(served, runtime, name):
    container = gpu_container(linux=new("LinuxContainer"), CDI_devices=[new("CDIDevice", name=name)])
    assert len(create(runtime, container).mounts) == 2


def test_an_annotation_asks_for_staged_mode(served, runtime, node):
    create(runtime, gpu_container(), annotations={"vgpu.snapshot/mode": "staged"})
    assert Path(node.run_dir, "containers/c0ffee/mode").read_text() == "staged\n"


@pytest.mark.parametrize(
    ("annotations", "libc"), [({}, None), ({"vgpu.snapshot/libc": "musl"}, "musl"), ({"vgpu.snapshot/libc": "x"}, None)]
)
def test_without_a_look_at_its_files_the_annotation_decides(node, runtime, annotations, libc):
    served = Served(node, runtime, None)
    runtime.accept()
    adjust = create(runtime, gpu_container(annotations=annotations))
    assert adjust.annotations.get("vgpu.snapshot/preload-libc") == libc
    assert ("left alone" in served.log[-1]) == (libc is None)
    runtime.hang_up()
    served.thread.join(timeout=5)


def test_a_container_that_asks_and_cannot_be_served_is_refused(node, runtime):
    served = Served(node, runtime, None)
    runtime.accept()
    with pytest.raises(CallFailed, match="asks for the preload library"):
        create(runtime, gpu_container(annotations={"vgpu.snapshot/inject": "true"}))
    assert create(runtime, gpu_container(annotations={"vgpu.snapshot/libc": "glibc"})).mounts
    runtime.hang_up()
    served.thread.join(timeout=5)


@pytest.mark.parametrize("has_own_calls", [True, False], ids=["new containerd", "containerd up to 2.1"])
def test_the_state_file_comes_with_the_start_and_goes_with_the_removal(served, runtime, node, has_own_calls):
    adjust = create(runtime, gpu_container())
    started = gpu_container(pid=os.getpid(), annotations=dict(adjust.annotations))
    tell(runtime, "PostStartContainer", 7, started, has_own_calls)
    state = Path(node.run_dir, "state/c0ffee.json")
    assert '"preload_build_id":"abc123"' in state.read_text()
    tell(runtime, "RemoveContainer", 11, started, has_own_calls)
    assert not state.exists()
    assert not Path(node.run_dir, "containers/c0ffee").exists()


def tell(runtime, method, event, container, has_own_calls):
    if has_own_calls:
        runtime.call(method, new(f"{method}Request", container=container))
    else:
        runtime.call("StateChange", new("StateChangeEvent", event=event, container=container), answer="Empty")


def test_a_container_of_others_gets_no_state_file(served, runtime, node):
    tell(runtime, "PostStartContainer", 7, gpu_container(pid=os.getpid()), True)
    assert not Path(node.run_dir, "state").exists()


def test_a_call_that_is_not_known_is_answered_and_the_plugin_goes_on(served, runtime):
    with pytest.raises(CallFailed, match="not implemented"):
        runtime.call("NewInSomeVersion", answer="Empty")
    with pytest.raises(CallFailed, match="not implemented"):
        runtime.call("CreateContainer", service="other.Service", answer="Empty")
    assert create(runtime, gpu_container()).mounts


def test_a_message_that_is_none_is_answered_and_the_plugin_goes_on(served, runtime):
    with pytest.raises(CallFailed, match="CreateContainerRequest"):
        runtime.call("CreateContainer", message("ttrpc.Status")(code=9, message="\xff"), answer="Empty")
    assert create(runtime, gpu_container()).mounts


@given(st.lists(st.integers(1, 40), max_size=6))
@settings(max_examples=15, deadline=None)
def test_where_frames_end_means_nothing(sizes):
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        runtime = Runtime(Path(folder, "nri.sock"))
        served = Served(Settings(), runtime, None)
        runtime.accept()
        assert (
            runtime.send_in_pieces("Configure", new("ConfigureRequest", runtime_name="x" * 90), sizes).events == EVENTS
        )
        runtime.close()
        served.thread.join(timeout=5)


def test_a_large_message_comes_through(served, runtime):
    adjust = create(runtime, gpu_container(env=[f"NAME{n}={'x' * 1000}" for n in range(400)]))
    assert len(adjust.mounts) == 2


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (struct.pack(">II", PLUGIN_STREAM, 1 << 30), "above the limit"),
        (struct.pack(">II", PLUGIN_STREAM, 10) + struct.pack(">IIBB", 1 << 30, 1, 1, 0), "above the limit"),
        (struct.pack(">II", PLUGIN_STREAM, 10) + struct.pack(">IIBB", 0, 1, 7, 0), "unknown type 7"),
    ],
    ids=["frame", "message", "type"],
)
def test_what_is_no_protocol_ends_the_connection(served, runtime, data, words):
    runtime.send_raw(data)
    served.thread.join(timeout=5)
    assert words in served.log[-1]


def test_a_refused_registration_says_why(node, runtime):
    served = Served(node, runtime, None)
    runtime.accept(refuse="no plugins today")
    served.thread.join(timeout=5)
    assert "no plugins today" in served.log[-1]


def test_a_runtime_that_never_answers_is_given_up(node, runtime, monkeypatch):
    monkeypatch.setattr(nri_plugin, "REGISTER_S", 0.2)
    served = Served(node, runtime, None)
    served.thread.join(timeout=5)
    assert "registering with NRI" in served.log[-1]


def test_it_comes_back_when_the_runtime_restarts(node, tmp_path, monkeypatch):
    class Enough(Exception):
        pass

    pauses = []

    def pause(seconds):
        pauses.append(seconds)
        if len(pauses) == 4:
            raise Enough

    monkeypatch.setattr(nri_plugin.time, "sleep", pause)
    log = []
    plugin = Plugin(node, log.append, lambda _: None)
    with contextlib.suppress(Enough):
        keep_serving(plugin, str(tmp_path / "absent.sock"), log.append)
    assert pauses == [1.0, 2.0, 4.0, 8.0]
    assert "absent.sock" in log[0]
    monkeypatch.undo()
    runtime = Runtime(tmp_path / "nri.sock")
    monkeypatch.setattr(nri_plugin, "FIRST_PAUSE_S", 0.01)
    threading.Thread(target=keep_serving, args=(plugin, runtime.address, log.append), daemon=True).start()
    for _ in range(3):
        runtime.accept()
        assert runtime.call("Configure", new("ConfigureRequest")).events == EVENTS
        runtime.hang_up()
        time.sleep(0.05)


def test_a_plugin_that_the_runtime_started_ends_with_its_connection(node, runtime, monkeypatch):
    """The descriptor is closed by then, and may be another file's."""
    trunk = connected(runtime.address)
    monkeypatch.setenv(nri_plugin.GIVEN_SOCKET, str(trunk.detach()))
    thread = threading.Thread(target=keep_serving, args=(Plugin(node, print, lambda _: None), "", print), daemon=True)
    thread.start()
    runtime.accept()
    runtime.hang_up()
    thread.join(timeout=5)
    assert not thread.is_alive()


def test_a_runtime_that_stops_reading_is_given_up(monkeypatch):
    ours, theirs = socket.socketpair()
    monkeypatch.setattr(nri_multiplex, "WRITE_S", 0.1)
    with ours, theirs, pytest.raises(ConnectionLost, match="timed out"):
        Multiplexer(ours).write(1, bytes(4 << 20))


# ---- a container's files in layers ------------------------------------------------------------------------------------


def test_layers_hide_what_lies_below_them(tmp_path):
    above, below = tmp_path / "above", tmp_path / "below"
    (above / "lib").mkdir(parents=True)
    (below / "lib").mkdir(parents=True)
    (below / "lib/a").write_text("below")
    (below / "lib/b").write_text("below")
    (above / "lib/a").write_text("above")
    (below / "link").symlink_to("/lib/b")
    tree = rootfs.LayeredTree([str(above), str(below)])
    assert tree.head("/lib/a") == b"above"
    assert tree.head("/link") == b"below"
    assert tree.head("/absent") is None
    assert tree.names("/lib") == ["a", "b"]


@pytest.mark.skipif(os.geteuid() != 0, reason="a whiteout is a device node")
def test_a_whiteout_is_no_file(tmp_path):
    above, below = tmp_path / "above", tmp_path / "below"
    above.mkdir()
    below.mkdir()
    (below / "gone").write_text("below")
    os.mknod(above / "gone", 0o600 | 0o020000, 0)
    assert rootfs.LayeredTree([str(above), str(below)]).head("/gone") is None


@pytest.mark.parametrize(
    ("mounts", "layers"),
    [
        ([("overlay", "overlay", ["index=off", "upperdir=/u", "workdir=/w", "lowerdir=/b:/a"])], ("/u", "/b", "/a")),
        ([("overlay", "overlay", ["lowerdir=/b:/a"])], ("/b", "/a")),
        ([("bind", "/only", ["rbind", "rw"])], ("/only",)),
        ([("ext4", "/dev/loop0", [])], None),
        ([("overlay", "overlay", [])], None),
        ([], None),
    ],
)
def test_layers_are_read_from_a_snapshots_mounts(mounts, layers):
    kind = message("containerd.types.Mount")
    assert (
        rootfs.layers_in([kind(type=name, source=source, options=options) for name, source, options in mounts])
        == layers
    )


def test_the_first_frame_fits_the_reader_of_containerd():
    import socket

    ours, theirs = socket.socketpair()
    Multiplexer(ours).write(7, bytes(10_000))
    found = theirs.recv(20_000)
    assert struct.unpack(">II", found[:8]) == (7, 4096)
    assert struct.unpack(">II", found[8 + 4096 : 16 + 4096]) == (7, 10_000 - 4096)
    assert ttrpc.HEADER.size == 10
