"""The staging reserve on the software driver: one worker serves suspends, checkpoints and crashes, and is there again afterwards."""

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from gpu_state import doctor
from gpu_state.staging_reserve import POOL_PREFIX, bytes_of
from image_format.vram import read_fragment
from oci_hook import settings
from tests.unit.agent_stage import CONTAINER, Stage, cgroup2_mount, wait_until
from tests.unit.test_staged_flows import StagedCounter, drain, freeze, release, resume, suspend, used_bytes
from vgpu_errors import PreloadFailed, VgpuError

needs_cgroup = pytest.mark.skipif(cgroup2_mount() is None, reason="needs root and a writable cgroup2 hierarchy")
pytestmark = pytest.mark.timeout(120)
SHM = Path("/dev/shm")


class ReservedStage(Stage):
    """A stage whose agent keeps a reserve."""

    size = "64M"

    def start_agent(self, *options):
        return super().start_agent("--staging-reserve", self.size, *options)

    def reserve(self):
        return self.ask("facts")["staging_reserve"]

    def ready_worker(self):
        wait_until(lambda: self.reserve()["state"] == "ready", "the reserve", 30.0)
        return self.reserve()["worker_pid"]

    def pools(self):
        mark = hashlib.sha256(str(self.run_dir).encode()).hexdigest()[:8]
        return sorted(SHM.glob(f"{POOL_PREFIX}{mark}-*"))

    def restart_agent(self):
        self.agent.kill()
        self.agent.wait(5)
        self.start_agent()


@pytest.fixture
def stage():
    stage = ReservedStage(memory_mib=512)
    stage.python = sys.executable
    stage.start_agent()
    stage.write_state()
    wait_until(stage.control_socket().is_socket, "the control socket")
    (stage.control_socket().parent / "mode").write_text("staged")
    stage.image = stage.folder / "image"
    stage.image.mkdir()
    yield stage
    if os.environ.get("VGPU_SHOW_LOG"):
        print(stage.log())
    stage.close()
    for path in stage.pools():
        path.unlink()


@pytest.fixture
def counter(stage):
    counter = StagedCounter(stage)
    wait_until(lambda: stage.registered() == {counter.pid}, "the registration")
    return counter


@needs_cgroup
def test_one_worker_serves_one_suspend_after_the_other(stage, counter):
    worker = stage.ready_worker()
    pool, size = stage.pools(), stage.pools()[0].stat().st_size
    used = []
    for _ in range(3):
        done = suspend(stage)
        assert done["staged"]["copied_s"] > 0
        assert stage.reserve() == {"bytes": 64 << 20, "state": "in use", "problem": "", "worker_pid": None}
        assert stage.pools() == pool, "the content is where a new agent finds it"
        assert counter.stands_still()
        back = resume(stage)
        assert back["fill"]["bytes"] == 3 * (2 << 20)
        assert counter.is_counting()
        assert stage.ready_worker() == worker
        assert (stage.pools(), pool[0].stat().st_size) == (pool, size)
        assert not list((stage.run_dir / "suspended").iterdir())
        used.append(used_bytes(stage))
    assert len(set(used)) == 1, "the worker holds no object any more"


@needs_cgroup
def test_checkpoints_borrow_the_same_worker(stage, counter):
    worker = stage.ready_worker()
    for _ in range(2):
        with stage.connect() as client:
            release(client, freeze(stage, client, leave_running=True))
            assert counter.is_counting()
            assert stage.reserve()["state"] == "in use"
            assert read_fragment(drain(client)["fragment"]).length == 3 * (2 << 20)
        assert stage.ready_worker() == worker
    suspend(stage)
    resume(stage)
    assert counter.is_counting()
    assert stage.ready_worker() == worker


@needs_cgroup
@pytest.mark.parametrize("verb", ["suspend", "freeze"])
def test_what_fails_gives_the_worker_back_without_a_trace(stage, counter, verb):
    worker = stage.ready_worker()
    counter.faults("refuse-release")
    with pytest.raises(PreloadFailed), stage.connect() as client:
        suspend(stage) if verb == "suspend" else freeze(stage, client)
    assert counter.is_counting()
    assert list(stage.image.iterdir()) == []
    assert stage.ready_worker() == worker
    suspend(stage)
    resume(stage)
    assert counter.is_counting()


@needs_cgroup
def test_a_container_that_holds_more_gets_more(stage, counter):
    big = StagedCounter(stage, "big", "--objects", "24")
    wait_until(lambda: len(stage.registered()) == 2, "the registration")
    worker = stage.ready_worker()
    for _ in range(2):
        suspend(stage)
        assert len(stage.pools()) == 2, "27 chunks of 4 MiB do not fit into 64 MiB"
        resume(stage)
        assert counter.is_counting()
        assert big.is_counting()
        assert stage.ready_worker() == worker
        assert len(stage.pools()) == 1


@needs_cgroup
@pytest.mark.parametrize("dies", ["the spare worker", "the suspended container's worker", "the agent"])
def test_deaths_cost_no_content_and_leave_one_reserve(stage, counter, dies):
    worker = stage.ready_worker()
    if dies == "the spare worker":
        os.kill(worker, signal.SIGKILL)
        wait_until(lambda: stage.reserve()["worker_pid"] not in (None, worker), "another", 30.0)
        suspend(stage)
    else:
        suspend(stage)
        (pool,) = stage.pools()
        if dies == "the agent":
            stage.restart_agent()
        else:
            os.kill(worker, signal.SIGKILL)
        stage.ready_worker()  # another one is made, and the content is left alone
        assert pool in stage.pools()
    assert counter.stands_still()
    resume(stage)
    assert counter.is_counting()
    stage.ready_worker()
    wait_until(lambda: len(stage.pools()) == 1, "the end of the old pool")
    suspend(stage)
    resume(stage)
    assert counter.is_counting()


@needs_cgroup
def test_an_agent_that_was_killed_leaves_no_pool_behind(stage):
    stage.ready_worker()
    (before,) = stage.pools()
    stage.restart_agent()
    stage.ready_worker()
    wait_until(lambda: len(stage.pools()) == 1 and before not in stage.pools(), "the end of the old pool")
    stage.agent.send_signal(signal.SIGTERM)
    stage.agent.wait(10)
    assert stage.pools() == []


@needs_cgroup
def test_changed_content_is_refused_and_good_content_taken(stage, counter):
    stage.ready_worker()
    suspend(stage)
    (pool,) = stage.pools()
    with pool.open("r+b") as file:
        good = file.read(8)
        file.seek(0)
        file.write(b"\xff" * 8)
    with pytest.raises(VgpuError, match="differs"):
        resume(stage)
    assert counter.stands_still()
    with pool.open("r+b") as file:
        file.write(good)
    resume(stage)
    assert counter.is_counting()
    stage.ready_worker()


@needs_cgroup
def test_a_pool_without_a_name_is_not_used(stage, counter):
    worker = stage.ready_worker()
    stage.pools()[0].unlink()
    suspend(stage)
    note = json.loads((stage.run_dir / "suspended" / CONTAINER / "store.json").read_text())
    assert Path(note["pool"]).name.startswith("vgpu-suspended-"), "a worker of its own"
    resume(stage)
    assert counter.is_counting()
    assert stage.ready_worker() != worker


@needs_cgroup
def test_a_reserve_that_cannot_be_made_says_why(stage):
    stage.agent.send_signal(signal.SIGTERM)
    stage.agent.wait(10)
    stage.size = "900T"
    stage.start_agent()
    wait_until(lambda: stage.reserve()["problem"], "the problem")
    assert stage.reserve()["state"] == "missing"
    assert "/dev/shm" in stage.reserve()["problem"]
    check = doctor.staging_reserve(900 << 40, stage.ask("facts"))
    assert (check.status, "/dev/shm" in check.what) == ("warn", True)


@needs_cgroup
def test_an_agent_with_a_reserve_stays(stage):
    stage.agent.send_signal(signal.SIGTERM)
    stage.agent.wait(10)
    stage.start_agent("--on-demand", "--idle-exit", "0.2")
    stage.ready_worker()
    for client in stage.clients:
        client.close()
    time.sleep(1.5)
    assert stage.agent.poll() is None


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("40G", 40 << 30), ("512m", 512 << 20), ("7", 7), ("1T", 1 << 40), ("8K", 8192), ("", None), ("G", None)]
    + [(text, None) for text in ("1.5G", "-1", "40GB", "40 G", "²", "1" * 30)],
)
def test_sizes(text, size):
    assert bytes_of(text) == settings.bytes_of(text) == size


def test_doctor_tells_of_the_reserve():
    assert doctor.staging_reserve(0, None) is None
    assert doctor.staging_reserve(0, {"staging_reserve": None}) is None
    assert doctor.staging_reserve(1 << 30, {"staging_reserve": None}).status == "warn"
    found = {"bytes": 40 << 30, "state": "ready", "problem": "", "worker_pid": 7}
    check = doctor.staging_reserve(40 << 30, {"staging_reserve": found})
    assert (check.status, check.what) == ("ok", "40.0 GiB, ready")
