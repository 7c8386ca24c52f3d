"""Preload libraries and the agent: who may register, and letting go around a freeze."""

import contextlib
import json
import os
import socket
import struct
import time
from pathlib import Path

import pytest

from gpu_state.client import AgentClient
from gpu_state.deadline import Deadline
from gpu_state.preload_frames import MAX_PAYLOAD, Frame, FrameError, FrameReader, FrameType, Hello
from gpu_state.registration import Registration
from tests.unit.agent_stage import CONTAINER, Stage, cgroup2_mount, wait_until
from vgpu_errors import DeadlineExceeded

needs_cgroup = pytest.mark.skipif(cgroup2_mount() is None, reason="needs root and a writable cgroup2 hierarchy")
HELLO = {
    "pid": 7,
    "devices": [{"ordinal": 0, "uuid": "GPU-x"}],
    "build_id": "ab",
    "libc": "musl",
    "driver_version": 13000,
}


@pytest.fixture
def stage():
    stage = Stage()
    yield stage
    stage.close()


def assert_hung_up(sock):
    with contextlib.suppress(ConnectionResetError):  # closed with some of what we sent unread
        assert sock.recv(100) == b""


# ---- a real agent ---------------------------------------------------------------------------------


@needs_cgroup
def test_a_process_registers_lets_go_and_comes_back(stage):
    stage.start_agent()
    stage.write_state()
    wait_until(stage.control_socket().is_socket, "the control socket")
    assert stage.control_socket().stat().st_mode & 0o777 == 0o666
    assert stage.control_socket().parent.stat().st_mode & 0o777 == 0o755
    preload = stage.preload()
    with AgentClient.connect(stage.socket, start_on_demand=False) as client:
        frozen = stage.freeze(client)
        assert [process["pid"] for process in frozen["processes"]] == [preload.pid]
        assert frozen["processes"][0]["registered"]
        assert not stage.control_socket().exists()
        held = [os.readlink(link) for link in Path(f"/proc/{preload.pid}/fd").iterdir()]
        assert not [path for path in held if path.startswith("socket:")]
        client.request("release", {"lease": frozen["lease"], "keep": False}, deadline_s=20)
    wait_until(stage.registered, "the registration after the thaw")


@needs_cgroup
def test_a_process_of_another_cgroup_is_turned_away(stage):
    stage.start_agent()
    stage.write_state()
    wait_until(stage.control_socket().is_socket, "the control socket")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(5)
        sock.connect(str(stage.control_socket()))
        with contextlib.suppress(BrokenPipeError):
            sock.sendall(Frame(FrameType.HELLO, 1, HELLO).to_bytes())
        assert_hung_up(sock)


@needs_cgroup
def test_the_socket_comes_when_asked_and_goes_with_the_container(stage):
    stage.start_agent()
    stage.write_state()
    assert stage.ask("watch", container=CONTAINER) == {}
    assert stage.control_socket().is_socket()
    (stage.run_dir / "state" / f"{CONTAINER}.json").unlink()
    wait_until(lambda: not stage.control_socket().exists(), "the end of the control socket", 2.0)


@needs_cgroup
def test_containers_known_before_the_agent_started_get_their_socket(stage):
    stage.start_agent()
    stage.write_state()
    stage.agent.kill()
    stage.agent.wait(5)
    stage.start_agent()
    assert stage.control_socket().is_socket()


@needs_cgroup
def test_a_preload_that_does_not_let_go_ends_the_freeze_and_changes_nothing(stage):
    """Its helper is too slow here; CRIU would meet its open socket."""
    stage.start_agent()
    stage.write_state()
    preload = stage.preload(delay_s=2.0)
    with (
        AgentClient.connect(stage.socket, start_on_demand=False) as client,
        pytest.raises(DeadlineExceeded, match="detach"),
    ):
        stage.freeze(client, deadline_s=1)
    assert stage.journal() == []
    wait_until(lambda: stage.registered() == {preload.pid}, "the registration afterwards")


# ---- the server side alone, this process being the container -----------------------------------------


@pytest.fixture
def registration(tmp_path):
    own_cgroup = Path("/proc/self/cgroup").read_text().splitlines()
    named = [line.split(":", 2)[2] for line in own_cgroup if line.split(":", 2)[2] != "/"]
    if not named:
        pytest.skip("this process lies in the root cgroup")
    registration = Registration(tmp_path)
    (tmp_path / "containers" / "c1").mkdir()
    (tmp_path / "state" / "c1.json").write_text(json.dumps({"cgroup": named[0]}))
    registration.start()
    registration.path = str(tmp_path / "containers" / "c1" / "agent.sock")
    yield registration
    registration.close()


def connected(registration):
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(5)
    sock.connect(registration.path)
    return sock


def test_hello_is_welcomed_and_ping_answered(registration):
    with connected(registration) as sock:
        frames = Frame(FrameType.HELLO, 5, HELLO).to_bytes() + Frame(99, 6, {}).to_bytes()
        sock.sendall(frames + Frame(FrameType.PING, 7, {}).to_bytes())
        reader, seen = FrameReader(), []
        while len(seen) < 2:
            seen += reader.feed(sock.recv(4096))
        assert [(frame.type, frame.sequence) for frame in seen] == [(FrameType.WELCOME, 5), (FrameType.PONG, 7)]
        assert registration.registered("c1") == {os.getpid(): ("GPU-x",)}
    wait_until(lambda: registration.registered("c1") == {}, "the end of the registration")


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("<IHHII", 0x55504756, 2, 1, 0, 0),
        struct.pack("<IHHII", 0x55504756, 1, 1, MAX_PAYLOAD + 1, 0),
        struct.pack("<IHHII", 0x55504756, 1, 1, 2, 0) + b"[]",
        struct.pack("<IHHII", 0x55504756, 1, 1, 2, 0) + b"{]",
        struct.pack("<IHHII", 0x55504756, 1, 1, 2, 0) + b"{}",
        struct.pack("<IHHII", 0x55504756, 1, 1, 30000, 0) + b"[" * 30000,
    ],
)
def test_a_peer_that_speaks_otherwise_is_hung_up_on(registration, garbage):
    with connected(registration) as sock, connected(registration) as good:
        sock.sendall(garbage)
        assert_hung_up(sock)
        good.sendall(Frame(FrameType.PING, 1, {}).to_bytes())
        assert good.recv(100)


def test_pause_waits_for_every_peer_and_takes_the_socket_away(registration):
    with connected(registration) as sock:
        sock.sendall(Frame(FrameType.HELLO, 1, HELLO).to_bytes())
        sock.recv(4096)
        with pytest.raises(DeadlineExceeded, match="detach"):
            registration.pause("c1", Deadline(0.2))
        assert not Path(registration.path).exists()
        (frame,) = FrameReader().feed(sock.recv(4096))
        assert frame.type == FrameType.DETACH
        sock.sendall(Frame(FrameType.DETACHED, 2, {}).to_bytes())
        registration.pause("c1", Deadline(5))
        assert sock.recv(100) == b""
    registration.resume("c1")
    wait_until(lambda: Path(registration.path).is_socket(), "the control socket")


def test_a_paused_container_is_not_listened_for_however_often_its_state_changes(registration, tmp_path):
    registration.pause("c1", Deadline(5))
    state = tmp_path / "state" / "c1.json"
    state.write_text(state.read_text())
    registration.watch("c1", Deadline(5))
    time.sleep(0.1)
    assert not Path(registration.path).exists()


def test_a_container_that_nobody_knows_is_paused_trivially(registration):
    registration.pause("unknown", Deadline(5))
    registration.resume("unknown")


@pytest.mark.parametrize("state", ["", "{", "[]", "{}", '{"cgroup": "/"}', '{"cgroup": 7}'])
def test_a_state_file_without_a_cgroup_gets_no_socket(registration, tmp_path, state):
    (tmp_path / "state" / "c2.json").write_text(state)
    registration.watch("c2", Deadline(5))
    assert not (tmp_path / "containers" / "c2").exists()


def test_a_container_without_a_control_directory_has_no_preload_and_gets_none(registration, tmp_path):
    """The folder says to `exec` that the preload is in the container."""
    (tmp_path / "state" / "c2.json").write_bytes((tmp_path / "state" / "c1.json").read_bytes())
    registration.watch("c2", Deadline(5))
    assert not (tmp_path / "containers" / "c2").exists()


# ---- frames -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3, 16, 17, 1000])
def test_frames_arrive_whole_however_they_are_cut(size):
    frames = [Frame(FrameType.HELLO, 1, HELLO), Frame(FrameType.PING, 2, {}), Frame(42, 3, {"a": "ü" * 300})]
    data = b"".join(frame.to_bytes() for frame in frames)
    reader = FrameReader()
    assert [frame for at in range(0, len(data), size) for frame in reader.feed(data[at : at + size])] == frames


@pytest.mark.parametrize("claim", [{}, {"pid": "7"}, {"pid": 7, "devices": {}}])
def test_a_hello_without_its_parts_is_an_error(claim):
    with pytest.raises(FrameError):
        Hello.from_json(claim)


def test_a_hello_with_strange_parts_keeps_what_it_can_use():
    hello = Hello.from_json({"pid": 7, "devices": [1, {"uuid": 2}, {"uuid": "GPU-x"}], "driver_version": "x"})
    assert (hello.devices, hello.driver_version, hello.build_id) == (("GPU-x",), 0, "")
