"""The agent as a process, on software GPUs: freeze and thaw, and what happens when somebody dies in between."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from gpu_state.client import AgentClient
from tests.stopping import stop as stop_now
from tests.unit.agent_stage import CONTAINER, ROOT, Stage, cgroup2_mount, wait_until
from vgpu_errors import (
    AgentRefused,
    AgentUnreachable,
    DeadlineExceeded,
    GpuProcessUnreadable,
    GpuStateLost,
    NotEnoughDeviceMemory,
)

pytestmark = pytest.mark.skipif(cgroup2_mount() is None, reason="needs root and a writable cgroup2 hierarchy")


@pytest.fixture
def stage():
    stage = Stage()
    yield stage
    stage.close()


@pytest.fixture
def two_gpus():
    stage = Stage(gpus=2)
    yield stage
    stage.close()


def frozen_by_a_client_process(stage, unfreeze_cgroup=None):
    """A client in a process of its own that holds a lease until it is killed."""
    code = """
import json, sys, time
from gpu_state.client import AgentClient
client = AgentClient.connect(sys.argv[1], start_on_demand=False)
print(client.request("freeze", json.loads(sys.argv[2]), deadline_s=30)["lease"], flush=True)
for line in sys.stdin:
    client = AgentClient.connect(sys.argv[1], start_on_demand=False)
    print(json.dumps(client.request("release", json.loads(line), deadline_s=30)), flush=True)
"""
    args = {"container": CONTAINER, "cgroup": stage.cgroup, "deadline_s": 15, "unfreeze_cgroup": unfreeze_cgroup}
    command = [sys.executable, "-c", code, stage.socket, json.dumps(args)]
    client = stage.spawn(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
    lease = client.stdout.readline().strip()
    assert lease
    return client, lease


@pytest.fixture(scope="module")
def agent_at_rest():
    """One agent for all tests that only ask for what is refused."""
    stage = Stage()
    stage.start_agent()
    yield stage
    stage.close()


# ---- freeze and thaw ------------------------------------------------------------------------------


def test_several_processes_freeze_and_go_on(stage):
    stage.start_agent()
    counters = [stage.counter("one"), stage.counter("two", cgroup="below"), stage.counter("three", cgroup="below/more")]
    events = []
    with AgentClient.connect(stage.socket, start_on_demand=False) as client:
        before = client.request("inventory", {"cgroup": stage.cgroup}, deadline_s=15)["processes"]
        assert {process["pid"] for process in before} == {counter.pid for counter in counters}
        assert all(process["state"] == "running" and process["devices"] == stage.uuids for process in before)
        assert all(process["gpu_bytes"] >= 2 << 20 for process in before)
        args = {"container": CONTAINER, "cgroup": stage.cgroup, "deadline_s": 15}
        frozen = client.request("freeze", args, deadline_s=20, on_event=events.append)
        assert {process["state"] for process in frozen["processes"]} == {"checkpointed"}
        assert [phase["phase"] for phase in frozen["phases"]] == ["find", "detach", "lock", "checkpoint", "verify"]
        assert [event["phase"] for event in events if event["state"] == "start"] == [
            phase["phase"] for phase in frozen["phases"]
        ]
        assert stage.journal() == [f"{CONTAINER}.json"]
        assert all(counter.stands_still() for counter in counters)
        held = [os.readlink(link) for link in Path(f"/proc/{counters[0].pid}/fd").iterdir()]
        assert not [path for path in held if path.startswith(str(stage.nodes))]
        released = client.request("release", {"lease": frozen["lease"], "keep": False}, deadline_s=20)
    assert {process["state"] for process in released["processes"]} == {"running"}
    assert all(counter.is_counting() for counter in counters)
    assert stage.journal() == []


def test_a_container_without_gpu_processes_freezes_trivially(stage):
    stage.start_agent()
    stage.spawn(["sleep", "60"], cgroup="")
    client = stage.connect()
    assert stage.freeze(client)["processes"] == []


def test_a_kept_freeze_is_thawed_by_a_later_request(stage):
    stage.start_agent()
    counter = stage.counter("one")
    client = stage.connect()
    lease = stage.freeze(client)["lease"]
    client.request("release", {"lease": lease, "keep": True}, deadline_s=10)
    client.close()
    assert counter.stands_still()
    thawed = stage.ask("thaw", container=CONTAINER, cgroup=stage.cgroup, deadline_s=15, device_map={})
    assert [process["state"] for process in thawed["processes"]] == ["running"]
    assert counter.is_counting()


def test_a_device_map_moves_a_process(two_gpus):
    stage = two_gpus
    stage.start_agent()
    counter = stage.counter("one")
    first, second = stage.uuids
    client = stage.connect()
    lease = stage.freeze(client)["lease"]
    client.request("release", {"lease": lease, "keep": True}, deadline_s=10)
    mapping = {first: second, second: first}
    stage.ask("thaw", container=CONTAINER, cgroup=stage.cgroup, deadline_s=15, device_map=mapping)
    assert counter.is_counting()
    free = {device["uuid"]: device["free_bytes"] for device in stage.ask("hello")["devices"]}
    assert free[first] == 64 << 20
    assert free[second] < 64 << 20


def test_a_device_map_that_names_no_uuids_is_refused(agent_at_rest):
    stage = agent_at_rest
    with pytest.raises(AgentRefused, match="device_map"):
        stage.ask("thaw", container=CONTAINER, cgroup=stage.cgroup, deadline_s=5, device_map={"GPU-1": "GPU-2"})


def test_a_process_that_cannot_be_locked_in_time_undoes_the_others(stage):
    """It is stopped between the look at it and the lock; when it goes on, no lock may come late."""
    stage.start_agent()
    victim, *others = [stage.counter("one"), stage.counter("two"), stage.counter("three")]
    client = stage.connect()

    def stop(event):
        if (event["phase"], event["state"]) == ("detach", "start"):
            stop_now(victim.pid)
            threading.Timer(3, victim.process.send_signal, [signal.SIGCONT]).start()

    args = {"container": CONTAINER, "cgroup": stage.cgroup, "deadline_s": 2}
    stage.write_state()
    preload = stage.preload(delay_s=0.5)  # so long lasts the phase before the lock
    with pytest.raises(DeadlineExceeded, match=f"lock of process {victim.pid}"):
        client.request("freeze", args, deadline_s=30, on_event=stop)
    preload.kill()
    assert all(counter.is_counting() for counter in [victim, *others])
    wait_until(lambda: stage.journal() == [], "the end of the journal entry")


@pytest.mark.parametrize("how", ["stopped", "frozen"])
def test_a_process_that_cannot_run_is_refused_at_once(stage, how):
    stage.start_agent()
    counter = stage.counter("one")
    if how == "stopped":
        stop_now(counter.pid)
    else:
        (stage.cgroup_folder / "cgroup.freeze").write_text("1")
        wait_until(lambda: "frozen 1" in (stage.cgroup_folder / "cgroup.events").read_text(), "the frozen cgroup")
    client = stage.connect()
    began = time.monotonic()
    with pytest.raises(GpuProcessUnreadable, match=how):
        stage.freeze(client)
    assert time.monotonic() - began < 5
    (stage.cgroup_folder / "cgroup.freeze").write_text("0")
    counter.process.send_signal(signal.SIGCONT)
    assert counter.is_counting()


def test_too_little_device_memory_at_the_thaw_is_named_and_can_be_mended(stage):
    stage.start_agent()
    counter = stage.counter("one", "--mib", "40")
    client = stage.connect()
    lease = stage.freeze(client)["lease"]
    hog = stage.counter("hog", "--mib", "40", cgroup=None)
    with pytest.raises(NotEnoughDeviceMemory, match=f"process {counter.pid} needs"):
        client.request("release", {"lease": lease, "keep": False}, deadline_s=20)
    hog.process.terminate()
    hog.process.wait(5)
    stage.ask("thaw", container=CONTAINER, cgroup=stage.cgroup, deadline_s=15, device_map={})
    assert counter.is_counting()


def test_a_process_that_holds_a_device_but_is_unknown_to_the_driver_is_refused(stage):
    stage.start_agent()
    counter = stage.counter("one")
    holder = stage.spawn(["sh", "-c", f"exec 9<{stage.nodes}/nvidia0; exec sleep 60"], cgroup="")
    wait_until(lambda: Path(f"/proc/{holder.pid}/comm").read_text() == "sleep\n", "the holder")
    client = stage.connect()
    with pytest.raises(GpuProcessUnreadable, match=f"Process {holder.pid} .sleep. .*nvidia0"):
        stage.freeze(client)
    assert counter.is_counting()


def test_imported_memory_is_reported_loudly_at_the_thaw(stage):
    stage.start_agent()
    importer = stage.spawn([sys.executable, str(ROOT / "tests/unit/gpu_client.py"), "import"], cgroup="", stdout=-1)
    assert importer.stdout.readline() == b"ready\n"
    client = stage.connect()
    lease = stage.freeze(client)["lease"]
    with pytest.raises(GpuStateLost, match=rf"Process {importer.pid} .*801.*imported"):
        client.request("release", {"lease": lease, "keep": False}, deadline_s=20)


def test_a_second_freeze_of_a_frozen_container_is_refused(stage):
    stage.start_agent()
    stage.counter("one")
    client, other = stage.connect(), stage.connect()
    lease = stage.freeze(client)["lease"]
    with pytest.raises(AgentRefused, match="frozen under a lease"):
        stage.freeze(other)
    with pytest.raises(AgentRefused, match="holds no such lease"):
        other.request("release", {"lease": lease, "keep": False}, deadline_s=10)
    client.request("release", {"lease": lease, "keep": False}, deadline_s=10)


# ---- somebody dies --------------------------------------------------------------------------------


def test_a_killed_client_gets_its_container_thawed(stage):
    stage.start_agent()
    counters = [stage.counter("one"), stage.counter("two")]
    client, _ = frozen_by_a_client_process(stage, unfreeze_cgroup=str(stage.cgroup_folder))
    assert all(counter.stands_still() for counter in counters)
    (stage.cgroup_folder / "cgroup.freeze").write_text("1")
    client.kill()
    assert all(counter.is_counting() for counter in counters)
    assert (stage.cgroup_folder / "cgroup.freeze").read_text().strip() == "0"
    wait_until(lambda: stage.journal() == [], "the end of the journal entry")


def test_an_agent_that_was_killed_is_cleaned_up_after_by_the_next(stage):
    stage.start_agent()
    counters = [stage.counter("one"), stage.counter("two")]
    client, _ = frozen_by_a_client_process(stage)
    stage.agent.kill()
    stage.agent.wait(5)
    client.kill()
    client.wait(5)
    assert all(counter.stands_still() for counter in counters)
    stage.start_agent()
    assert all(counter.is_counting() for counter in counters)
    wait_until(lambda: stage.journal() == [], "the end of the journal entry")


@pytest.mark.parametrize("end", ["release", "die"])
def test_a_lease_outlives_its_agent_while_its_owner_lives(stage, end):
    stage.start_agent()
    counter = stage.counter("one")
    client, lease = frozen_by_a_client_process(stage)
    stage.agent.kill()
    stage.agent.wait(5)
    stage.start_agent()
    stage.ask("hello")
    assert counter.stands_still()
    if end == "release":
        client.stdin.write(json.dumps({"lease": lease, "keep": False}) + "\n")
        client.stdin.flush()
        assert json.loads(client.stdout.readline())["processes"][0]["state"] == "running"
    else:
        client.kill()
        client.wait(5)
    assert counter.is_counting()


def test_sigterm_thaws_what_is_frozen(stage):
    agent = stage.start_agent("--stop-grace", "0.5")
    counter = stage.counter("one")
    client = stage.connect()
    stage.freeze(client)
    agent.send_signal(signal.SIGTERM)
    assert agent.wait(15) == 0
    assert counter.is_counting()
    assert stage.journal() == []
    assert not Path(stage.socket).exists()


def test_sigterm_waits_for_a_lease_that_is_given_back(stage):
    agent = stage.start_agent("--stop-grace", "10")
    counter = stage.counter("one")
    client = stage.connect()
    lease = stage.freeze(client)["lease"]
    agent.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    client.request("release", {"lease": lease, "keep": False}, deadline_s=10)
    assert agent.wait(10) == 0
    assert counter.is_counting()


def test_a_dead_driver_worker_is_replaced(stage):
    stage.start_agent()
    counter = stage.counter("one")
    assert stage.states() == {counter.pid: "running"}
    (worker,) = worker_pids(stage)
    os.kill(worker, signal.SIGKILL)
    wait_until(lambda: worker not in worker_pids(stage), "the end of the worker")
    assert stage.states() == {counter.pid: "running"}


def test_an_idle_driver_worker_goes(stage):
    stage.start_agent("--worker-idle", "0.3")
    stage.ask("hello")
    assert worker_pids(stage)
    wait_until(lambda: not worker_pids(stage), "the end of the idle worker", 5)
    assert stage.ask("hello")["driver_version"] == "13.0"


def worker_pids(stage):
    children = Path(f"/proc/{stage.agent.pid}/task").glob("*/children")
    pids = {int(pid) for file in children for pid in file.read_text().split()}
    return [pid for pid in pids if "driver_worker" in Path(f"/proc/{pid}/cmdline").read_text()]


# ---- who may ask, and how -------------------------------------------------------------------------


def test_hello_and_facts_describe_the_node(agent_at_rest):
    stage = agent_at_rest
    hello, facts = stage.ask("hello"), stage.ask("facts")
    assert hello["driver_version"] == facts["cuda_version"] == "13.0"
    assert [device["uuid"] for device in hello["devices"]] == stage.uuids
    assert hello["devices"][0]["free_bytes"] == hello["devices"][0]["memory_bytes"] == 64 << 20
    assert facts["kernel"] == os.uname().release


def test_without_a_driver_the_node_has_no_gpu(stage):
    for library in ("libcuda.so.1", "libnvidia-ml.so.1"):
        assert not Path("/usr/lib/x86_64-linux-gnu", library).exists() or pytest.skip("this machine has a driver")
    stage.driver = stage.folder / "empty"
    stage.driver.mkdir()
    stage.start_agent()
    assert stage.ask("hello")["driver_version"] is None
    assert stage.ask("facts")["devices"] == []


def test_a_thaw_waits_for_a_process_that_does_not_run_yet(stage):
    stage.start_agent()
    counter = stage.counter("one")
    client = stage.connect()
    lease = stage.freeze(client)["lease"]
    client.request("release", {"lease": lease, "keep": True}, deadline_s=10)
    stop_now(counter.pid)
    threading.Timer(0.5, counter.process.send_signal, [signal.SIGCONT]).start()
    stage.ask("thaw", container=CONTAINER, cgroup=stage.cgroup, deadline_s=15, device_map={})
    assert counter.is_counting()


def test_another_user_is_refused(agent_at_rest, request):
    stage = agent_at_rest
    Path(stage.socket).chmod(0o666)
    request.addfinalizer(lambda: Path(stage.socket).chmod(0o600))
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(stage.socket)
            os.write(write, sock.makefile("rb").readline())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answers:
        answer = json.loads(answers.readline())
    os.waitpid(child, 0)
    assert answer["error"]["class"] == "AgentRefused"
    assert "65534" in answer["error"]["message"]


def test_the_socket_file_keeps_other_users_out_as_well(agent_at_rest):
    stage = agent_at_rest
    assert Path(stage.socket).stat().st_mode & 0o777 == 0o600
    assert (stage.run_dir / "state").stat().st_mode & 0o777 == 0o700
    assert (stage.run_dir / "journal").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "garbage",
    [
        b"\n",
        b"\0" * 4096 + b"\n",
        b"{\n",
        b"[]\n",
        b'{"id": "1", "verb": "hello"}\n',
        b'{"id": 1}\n',
        b'{"id": 1, "verb": "hello", "args": []}\n',
        b"[" * 100000 + b"\n",
        b"x" * (2 << 20),
    ],
)
def test_garbage_gets_one_refusal_and_harms_nobody(agent_at_rest, garbage):
    stage = agent_at_rest
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(10)
        sock.connect(stage.socket)
        with contextlib.suppress(BrokenPipeError):
            sock.sendall(garbage)
        answer = json.loads(sock.makefile("rb").readline())
        assert answer["id"] is None
        assert answer["error"]["class"] == "AgentRefused"
        with contextlib.suppress(ConnectionResetError):  # what it had not read yet
            assert sock.recv(1) == b""
    assert stage.ask("hello")["pid"] == stage.agent.pid


@pytest.mark.parametrize(
    ("verb", "args"),
    [
        ("nothing", {}),
        ("freeze", {}),
        ("freeze", {"container": "../x", "cgroup": "/c"}),
        ("freeze", {"container": "c", "cgroup": 7}),
        ("freeze", {"container": "c", "cgroup": "CGROUP", "deadline_s": 0}),
        ("freeze", {"container": "c", "cgroup": "CGROUP", "deadline_s": float("nan")}),
        ("release", {"lease": "none", "keep": True}),
        ("release", {"lease": "none"}),
        ("freeze", {"container": "c", "cgroup": "/no/such/cgroup"}),
    ],
)
def test_a_senseless_request_is_refused_by_name(agent_at_rest, verb, args):
    stage = agent_at_rest
    with pytest.raises(AgentRefused, match=verb):
        stage.ask(verb, **{key: stage.cgroup if value == "CGROUP" else value for key, value in args.items()})


@pytest.mark.parametrize("cgroup", ["/", "", "/.", "/../x", "a/../.."])
def test_the_whole_node_is_no_container(agent_at_rest, cgroup):
    from vgpu_errors import VgpuError

    stage = agent_at_rest
    with pytest.raises(VgpuError, match=r"not the cgroup of a container|must be a string"):
        stage.ask("freeze", container="c", cgroup=cgroup, deadline_s=5)


def test_two_agents_never_run(agent_at_rest):
    stage = agent_at_rest
    for option, status in ((), 1), (("--on-demand",), 0):
        second = stage.spawn(stage.agent_command(*option), stderr=subprocess.DEVNULL)
        assert second.wait(10) == status
    assert stage.ask("hello")["pid"] == stage.agent.pid


def test_shutdown_ends_the_agent(stage):
    agent = stage.start_agent()
    assert stage.ask("shutdown") == {}
    assert agent.wait(10) == 0


# ---- on demand ------------------------------------------------------------------------------------


def on_demand_program(stage, *options):
    """A stand-in for /usr/bin/vgpu-agent that knows this stage."""
    program = stage.folder / "vgpu-agent"
    exports = "".join(f"export {key}='{value}'\n" for key, value in stage.environment.items())
    command = " ".join(stage.agent_command(*options))
    program.write_text(f'#!/bin/sh\n{exports}exec {command} "$@" 2>>{stage.folder}/agent.log\n')
    program.chmod(0o755)
    return str(program)


def test_the_agent_starts_when_it_is_needed_and_ends_when_it_is_not(stage):
    program = on_demand_program(stage, "--idle-exit", "0.6")
    pids = []
    for _ in range(2):
        with AgentClient.connect(stage.socket, program=program) as client:
            pids.append(client.request("hello", deadline_s=10)["pid"])
        wait_until(lambda: not Path(stage.socket).exists(), "the end of the idle agent", 5)
    assert pids[0] != pids[1]


def test_an_on_demand_agent_stays_while_a_lease_is_held(stage):
    program = on_demand_program(stage, "--idle-exit", "0.3")
    counter = stage.counter("one")
    with AgentClient.connect(stage.socket, program=program) as client:
        lease = stage.freeze(client)["lease"]
        time.sleep(1.5)
        client.request("release", {"lease": lease, "keep": False}, deadline_s=10)
    assert counter.is_counting()
    wait_until(lambda: not Path(stage.socket).exists(), "the end of the idle agent", 5)


def test_an_agent_on_demand_holds_nothing_of_its_client(stage):
    program = on_demand_program(stage)
    read, write = os.pipe()
    os.set_inheritable(write, True)
    with AgentClient.connect(stage.socket, program=program) as client:
        client.request("hello", deadline_s=10)
        os.close(write)
        os.set_blocking(read, True)
        assert os.read(read, 1) == b""  # everybody who held the other end has closed it
        client.request("shutdown", deadline_s=10)
    os.close(read)


def test_an_agent_that_fails_again_and_again_is_not_waited_for(stage):
    began = time.monotonic()
    with pytest.raises(AgentUnreachable, match="/bin/false ended with status 1"):
        AgentClient.connect(stage.socket, program="/bin/false", deadline_s=20)
    assert time.monotonic() - began < 5


def test_a_client_knows_when_its_agent_has_gone(stage):
    stage.start_agent()
    with AgentClient.connect(stage.socket, start_on_demand=False) as client:
        assert client.is_connected()
        stage.agent.kill()
        stage.agent.wait(5)
        assert not client.is_connected()


@pytest.mark.parametrize("program", ["/nonexistent/vgpu-agent", "/bin/false"])
def test_an_agent_that_does_not_start_is_reported_in_time(stage, program):
    began = time.monotonic()
    with pytest.raises(AgentUnreachable, match=r"agent\.sock"):
        AgentClient.connect(stage.socket, program=program, deadline_s=1)
    assert time.monotonic() - began < 3


def test_without_an_agent_the_client_says_so(stage):
    with pytest.raises(AgentUnreachable, match="No such file"):
        AgentClient.connect(stage.socket, start_on_demand=False)


def test_a_client_gives_up_on_an_agent_that_hangs(tmp_path):
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.bind(str(tmp_path / "s"))
        deaf.listen()
        client = AgentClient.connect(str(tmp_path / "s"), start_on_demand=False)
        with client, pytest.raises(DeadlineExceeded, match="hello"):
            client.request("hello", deadline_s=0.3)


# ---- the client's imports --------------------------------------------------------------------------


def test_the_client_loads_nothing_heavy():
    code = "import sys; import gpu_state.client; print(*sorted(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(ROOT)},
        timeout=10,
        check=True,
    )
    loaded = set(done.stdout.split())
    assert "gpu_state.client" in loaded
    assert not loaded & {"dataclasses", "logging", "subprocess", "tempfile", "pathlib", "argparse", "threading"}
