"""Staged mode end to end on the software driver: a real agent, a real staging worker, processes that count in GPU memory.

The preload is a double (staged_preload_double.py); tests/native/test_staged_system.py has the real one. Every test ends with the
processes counting on with the right bytes, or says why not.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from gpu_state.staging_session import pool_prefix
from image_format.fields import Fields
from image_format.gpu_objects import ObjectEntry
from image_format.record import Container, LowLevelRuntime, ProcessEntry, Record
from image_format.sealing import seal
from image_format.trust.keys import make_node_key
from image_format.trust.policy import Policy, TrustedKey
from image_format.verifying import read_claims, verify_directory
from image_format.vram import read_fragment
from tests.unit.agent_stage import CONTAINER, ROOT, STEP, Stage, cgroup2_mount, wait_until
from vgpu_errors import (
    AgentRefused,
    ContentMismatch,
    GpuObjectBlocks,
    InventoryMismatch,
    PreloadFailed,
    StagingWorkerLost,
    VgpuError,
)

pytestmark = [
    pytest.mark.skipif(cgroup2_mount() is None, reason="needs root and a writable cgroup2 hierarchy"),
    pytest.mark.timeout(120),
]
DOUBLE = str(ROOT / "tests/unit/staged_preload_double.py")


class StagedCounter:
    """A staged process that counts."""

    def __init__(self, stage, name="double", *options, cgroup=""):
        self.out, self.fault_file = stage.folder / f"{name}.out", stage.folder / f"{name}.faults"
        socket_path = str(stage.control_socket())
        command = [stage.python, DOUBLE, socket_path, str(self.out), "--faults", str(self.fault_file), *options]
        self.process = stage.spawn(command, cgroup=cgroup)
        wait_until(lambda: self.step() > 0, f"first step of {name}")

    @property
    def pid(self):
        return self.process.pid

    def step(self):
        text = self.out.read_text() if self.out.exists() else ""
        assert "WRONG" not in text, text[-200:]
        found = STEP.findall(text)
        return int(found[-1]) if found else 0

    def faults(self, *words):
        self.fault_file.write_text("\n".join(words))

    def is_counting(self):
        before = self.step()
        wait_until(lambda: self.step() > before + 2, "counting on", 10.0)
        return True

    def stands_still(self):
        time.sleep(0.1)
        before = self.step()
        time.sleep(0.25)
        return self.step() == before


@pytest.fixture
def stage():
    stage = Stage(memory_mib=256)
    stage.python = sys.executable
    try:
        stage.start_agent()
        stage.write_state()
        wait_until(stage.control_socket().is_socket, "the control socket")
        (stage.control_socket().parent / "mode").write_text("staged")
        stage.image = stage.folder / "image"
        stage.image.mkdir()
        yield stage
        if os.environ.get("VGPU_SHOW_LOG"):
            print(stage.log())
    finally:
        stage.close()
        for path in pools(stage):
            path.unlink()


@pytest.fixture
def counter(stage):
    counter = StagedCounter(stage)
    wait_until(lambda: stage.registered() == {counter.pid}, "the registration")
    return counter


def freeze(stage, client, **more):
    return stage.freeze(client, image_path=str(stage.image), **more)


def release(client, frozen, *, keep=False):
    return client.request("release", {"lease": frozen["lease"], "keep": keep}, deadline_s=30)


def drain(client):
    return client.request("drain", {"container": CONTAINER, "deadline_s": 30}, deadline_s=40)


def pools(stage):
    """The memory of this stage's suspended containers; other stages have theirs in the same place."""
    prefix = pool_prefix(stage.run_dir / "suspended" / CONTAINER)
    return [path for path in Path("/dev/shm").iterdir() if path.name.startswith(prefix)]


def used_bytes(stage):
    hello = stage.ask("hello")
    return hello["devices"][0]["memory_bytes"] - hello["devices"][0]["free_bytes"]


def suspend(stage, **more):
    return stage.ask("suspend", container=CONTAINER, cgroup=stage.cgroup, deadline_s=20, **more)


def resume(stage):
    return stage.ask("resume", container=CONTAINER, deadline_s=20)


# ---- suspend and resume ---------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["memory", "disk"])
def test_suspend_and_resume_again_and_again(stage, counter, target):
    more = {"to": str(stage.image)} if target == "disk" else {}
    for _ in range(2):
        assert counter.is_counting()
        done = suspend(stage, **more)
        assert [process["mode"] for process in done["processes"]] == ["staged"]
        assert done["staged"]["bytes"] == 3 * (2 << 20)
        assert counter.stands_still()
        assert stage.inventory()[0]["state"] == "checkpointed"
        assert not stage.inventory()[0]["gpu_bytes"]
        assert stage.ask("inventory", container=CONTAINER, cgroup=stage.cgroup)["suspended"] is True
        resume(stage)
        assert counter.is_counting()
    assert stage.journal() == []
    assert list(stage.image.iterdir()) == []
    assert not list(Path("/dev/shm").glob(f"vgpu-suspended-{CONTAINER}*"))


def test_a_suspended_container_is_not_frozen_and_a_running_one_not_resumed(stage, counter):
    with pytest.raises(AgentRefused, match="not suspended"):
        resume(stage)
    suspend(stage)
    with stage.connect() as client, pytest.raises(AgentRefused, match="is suspended; resume it first"):
        freeze(stage, client)
    resume(stage)
    assert counter.is_counting()


@pytest.mark.parametrize("target", ["memory", "disk"])
def test_a_killed_agent_leaves_a_suspended_container_suspended(stage, counter, target):
    suspend(stage, **({"to": str(stage.image)} if target == "disk" else {}))
    stage.agent.kill()
    stage.agent.wait(5)
    stage.start_agent()
    assert counter.stands_still()
    resume(stage)
    assert counter.is_counting()


def test_the_content_of_a_suspended_container_goes_with_its_processes(stage, counter):
    suspend(stage)
    assert pools(stage)
    counter.process.kill()
    counter.process.wait()
    wait_until(lambda: not pools(stage), "the end of the pool")
    wait_until(lambda: stage.journal() == [], "the end of the journal entry")


def test_a_suspend_that_fails_leaves_the_container_running_and_nothing_behind(stage, counter):
    for fault in ("refuse-rest", "half-release"):
        counter.faults(fault)
        with pytest.raises(PreloadFailed):
            suspend(stage, to=str(stage.image))
        assert counter.is_counting()
    with pytest.raises(AgentRefused, match="no folder"):
        suspend(stage, to="relative")
    assert list(stage.image.iterdir()) == []
    assert stage.journal() == []


def test_resume_refuses_a_changed_pool_and_the_container_stays_suspended(stage, counter):
    suspend(stage)
    pool = pools(stage)[0]
    good = pool.read_bytes()
    with pool.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * 8)
    with pytest.raises(VgpuError, match="differs"):
        resume(stage)
    assert counter.stands_still()
    with pool.open("r+b") as file:
        file.write(good)
    resume(stage)
    assert counter.is_counting()


# ---- leave running ------------------------------------------------------------------------------------------


def test_leave_running_three_times_in_a_row(stage, counter):
    for _ in range(3):
        with stage.connect() as client:
            assert counter.is_counting()
            frozen = freeze(stage, client, leave_running=True)
            assert counter.stands_still()
            assert [process["mode"] for process in frozen["processes"]] == ["staged"]
            assert holds_no_object(counter.pid)
            release(client, frozen)
            assert counter.is_counting()
            done = drain(client)
            fragment = read_fragment(done["fragment"])
            assert fragment.length == 3 * (2 << 20)
            assert {region.name for region in fragment.regions} == {f"{counter.pid}/{n}" for n in (1, 2, 3)}
        for path in stage.image.iterdir():
            path.unlink()
    assert stage.journal() == []


def holds_no_object(pid):
    held = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
    return not [path for path in held if "software-gpu:" in path or path.startswith("socket:")]


def test_two_processes_and_one_without_preload(stage, counter):
    """The mixed container: two are staged, the third goes the driver's way, with the reason."""
    second = StagedCounter(stage, "second", "--objects", "2")
    plain = stage.counter("plain")
    wait_until(lambda: stage.registered() == {counter.pid, second.pid}, "the registrations")
    with stage.connect() as client:
        frozen = freeze(stage, client, leave_running=True)
        modes = {process["pid"]: process["mode"] for process in frozen["processes"]}
        assert modes == {counter.pid: "staged", second.pid: "staged", plain.pid: "driver"}
        assert frozen["driver_reasons"] == {str(plain.pid): "it has no preload library in staged mode"}
        release(client, frozen)
        assert all(process.is_counting() for process in (counter, second, plain))
        assert read_fragment(drain(client)["fragment"]).length == 5 * (2 << 20)


def test_a_process_that_the_driver_must_not_touch_is_refused_without_its_preload(stage, counter):
    """After one cycle its memory is imported: the driver would checkpoint it and lose it."""
    with stage.connect() as client:
        release(client, freeze(stage, client, leave_running=True))
    with stage.connect() as client, pytest.raises(GpuObjectBlocks, match="it maps memory that the agent gave it"):
        stage.freeze(client)
    assert counter.is_counting()


@pytest.mark.parametrize("kind", ["managed", "import", "export", "multicast", "ipc-opened", "from-the-future"])
def test_blockers_are_refused_by_name_before_anything_stops(stage, counter, kind):
    counter.faults(f"block:{kind}!")
    with stage.connect() as client, pytest.raises(GpuObjectBlocks, match=r"of 4096 bytes at 0x1000"):
        freeze(stage, client)
    shown = stage.ask("inventory", container=CONTAINER, cgroup=stage.cgroup, blockers=True)
    assert shown["holdings"][str(counter.pid)]["blockers"][0]["kind"] == kind
    counter.faults()
    assert counter.is_counting()
    assert stage.journal() == []


def test_a_blocker_that_the_driver_can_take_leaves_the_process_to_it(stage, counter):
    counter.faults("block:vmm!")
    with stage.connect() as client:
        frozen = freeze(stage, client)
        assert frozen["processes"][0]["mode"] == "driver"
        assert "the driver's own checkpoint takes it" in frozen["driver_reasons"][str(counter.pid)]
        assert frozen["staged"] is None
        release(client, frozen)
    assert counter.is_counting()


# ---- faults and kills -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["refuse-rest", "refuse-release", "half-release", "vanish-in-release"])
def test_a_preload_that_fails_in_the_stop_goes_on_and_leaves_no_image(stage, counter, fault):
    counter.faults(fault)
    with stage.connect() as client, pytest.raises(PreloadFailed):
        freeze(stage, client)
    assert counter.is_counting()
    assert list(stage.image.iterdir()) == []
    assert stage.journal() == []
    with stage.connect() as client:  # and the next one works
        release(client, freeze(stage, client))
    assert counter.is_counting()


def test_a_process_that_dies_in_release_does_not_hold_up_the_other(stage, counter):
    second = StagedCounter(stage, "second")
    wait_until(lambda: len(stage.registered()) == 2, "the registrations")
    second.faults("die-in-release")
    with stage.connect() as client, pytest.raises(PreloadFailed):
        freeze(stage, client)
    assert counter.is_counting()
    assert stage.journal() == []


def test_memory_that_the_preload_did_not_list_is_noticed_before_release(stage, counter):
    stage.agent.send_signal(signal.SIGTERM)
    stage.agent.wait(10)
    stage.start_agent("--own-most", "0")
    counter.faults("hide!")
    wait_until(lambda: stage.registered() == {counter.pid}, "the registration")
    more = StagedCounter(stage, "more", "--objects", "40")  # 80 MiB, of which 2 are hidden: more than rounding explains
    more.faults("hide!")
    big = StagedCounter(stage, "big", "--objects", "2", "--mib", "66")
    big.faults("hide!")
    wait_until(lambda: len(stage.registered()) == 3, "the registrations")
    with stage.connect() as client, pytest.raises(InventoryMismatch, match="are listed"):
        freeze(stage, client)
    assert all(process.is_counting() for process in (counter, more, big))


def test_map_is_asked_for_again(stage, counter):
    with stage.connect() as client:
        frozen = freeze(stage, client)
        counter.faults("refuse-map")
        release(client, frozen)
    assert counter.is_counting()


def test_a_client_that_vanishes_sets_the_container_free_and_takes_its_packs_with_it(stage, counter):
    client = stage.connect()
    freeze(stage, client)
    assert counter.stands_still()
    client.close()
    assert counter.is_counting()
    wait_until(lambda: stage.journal() == [], "the end of the journal entry")
    wait_until(lambda: list(stage.image.iterdir()) == [], "the end of the packs")


def test_a_client_that_vanishes_while_the_copy_runs(stage):
    counter = StagedCounter(stage, "big", "--objects", "24", "--rewrite", "24")
    wait_until(lambda: stage.registered() == {counter.pid}, "the registration")
    client = stage.connect()
    client._send({"id": 1, "verb": "freeze", "args": freeze_args(stage)}, time.monotonic() + 5, "freeze", 5)
    wait_until(lambda: list(stage.image.iterdir()), "the first pack")
    client.close()
    wait_until(lambda: list(stage.image.iterdir()) == [], "the end of the packs")
    assert counter.is_counting()
    assert stage.journal() == []


def freeze_args(stage, **more):
    return {"container": CONTAINER, "cgroup": stage.cgroup, "deadline_s": 20, "image_path": str(stage.image)} | more


def test_an_agent_killed_after_release_hands_the_memory_on_to_the_next(stage, counter):
    with stage.connect() as client:
        frozen = freeze(stage, client)
        stage.agent.kill()
        stage.agent.wait(5)
        assert counter.stands_still()
        stage.start_agent()
        with stage.connect() as again:  # we are still alive, so it waits for us
            assert counter.stands_still()
            release(again, frozen)
    assert counter.is_counting()
    assert stage.journal() == []


def test_agent_worker_and_keeper_killed_after_the_drain_memory_is_made_from_the_packs(stage, counter):
    from gpu_state.fd_keeper import Keeper

    with stage.connect() as client:
        frozen = freeze(stage, client)
        drain(client)
        stage.agent.kill()
        stage.agent.wait(5)
        Keeper(stage.run_dir / "keep", CONTAINER).drop()
        stage.start_agent()
        with stage.connect() as again:
            release(again, frozen)
    assert counter.is_counting()


def test_memory_that_nobody_holds_any_more_is_named_as_lost(stage, counter):
    from gpu_state.fd_keeper import Keeper

    with stage.connect() as client:
        frozen = freeze(stage, client)
        stage.agent.kill()
        stage.agent.wait(5)
        Keeper(stage.run_dir / "keep", CONTAINER).drop()
        stage.start_agent()
        with stage.connect() as again, pytest.raises(VgpuError, match=r"6291456 bytes in 3 objects.*held by no one"):
            release(again, frozen)
    assert counter.stands_still()


def staging_workers(stage):
    """Those of the stage's agent, also one that is just ending."""
    children = Path(f"/proc/{stage.agent.pid}/task")
    pids = [int(pid) for task in children.iterdir() for pid in (task / "children").read_text().split()]
    return {pid for pid in pids if b"gpu_state.staging.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()}


def staging_worker(stage, others=frozenset()):
    """One that is not among the others; None while there is none."""
    return max(staging_workers(stage) - others, default=None)


def test_a_worker_killed_after_release_costs_the_checkpoint_and_not_the_application(stage, counter):
    with stage.connect() as client:
        frozen = freeze(stage, client, leave_running=True)
        os.kill(staging_worker(stage), signal.SIGKILL)
        release(client, frozen)
        assert counter.is_counting()
        with pytest.raises(StagingWorkerLost):
            drain(client)
    wait_until(lambda: list(stage.image.iterdir()) == [], "the end of the packs")


def test_a_worker_killed_while_the_copy_runs(stage):
    counter = StagedCounter(stage, "big", "--objects", "24", "--rewrite", "24")
    wait_until(lambda: stage.registered() == {counter.pid}, "the registration")
    with stage.connect() as client:
        client._send({"id": 1, "verb": "freeze", "args": freeze_args(stage)}, time.monotonic() + 5, "freeze", 5)
        wait_until(lambda: list(stage.image.iterdir()), "the first pack")
        os.kill(wait_until(lambda: staging_worker(stage), "the worker"), signal.SIGKILL)
        reply = json.loads(client._read_line(time.monotonic() + 20, "freeze", 20))
        while "ok" not in reply:
            reply = json.loads(client._read_line(time.monotonic() + 20, "freeze", 20))
        assert reply["error"]["class"] == "StagingWorkerLost"
    assert counter.is_counting()
    assert list(stage.image.iterdir()) == []


def test_a_stopped_agent_thaws_first(stage, counter):
    client = stage.connect()
    freeze(stage, client)
    stage.agent.send_signal(signal.SIGTERM)
    with contextlib.suppress(VgpuError):
        client.request("hello", {}, deadline_s=1)
    client.close()
    stage.agent.wait(40)
    assert counter.is_counting()


# ---- restore: filling beside the low-level runtime -------------------------------------------------------------


def sealed_image(stage, client, counter, key):
    """A checkpoint of the counter, sealed; the process stays as CRIU would bring it back: frozen, its memory given away."""
    frozen = freeze(stage, client)
    done = drain(client)
    (stage.image / "core-1.img").write_bytes(b"as CRIU leaves it")
    objects = tuple(
        ObjectEntry.from_json(Fields(doc, "objects")) for doc in done["staged"]["objects"][str(counter.pid)]
    )
    process = ProcessEntry(counter.pid, "python", "staged", (stage.uuids[0],), objects=objects)
    record = Record(
        created="2026-01-01T00:00:00Z",
        container=Container(CONTAINER, "podman"),
        low_level_runtime=LowLevelRuntime("runc", "1", "/usr/bin/runc"),
        processes=(process,),
        mode="staged",
    )
    seal(stage.image, record, key, vram=Path(done["fragment"]))
    release(client, frozen, keep=True)
    return read_claims(stage.image)[0]


@pytest.fixture
def key(tmp_path):
    return make_node_key(tmp_path)


def prefill(stage, client, record, **more):
    args = {"container": CONTAINER, "image_path": str(stage.image), "content_root": record.content_root}
    return client.request("prefill", args | {"deadline_s": 20} | more, deadline_s=30)["handle"]


def thaw(stage, client, handle):
    args = {"container": CONTAINER, "cgroup": stage.cgroup, "deadline_s": 20, "prefill": handle}
    return client.request("thaw", args, deadline_s=30)


def test_a_restore_fills_new_memory_and_the_process_goes_on(stage, counter, key):
    with stage.connect() as client:
        record = sealed_image(stage, client, counter, key)
        assert (record.format_version, record.required_features) == ("1.1", ("staged",))
        assert verify_directory(stage.image, policy(key)).bytes_checked > 3 * (2 << 20)
        wait_until(lambda: used_bytes(stage) == 0, "the end of the worker, which nobody waits for")
        # As after a CRIU restore: the shim writes the state file when everything is done.
        (stage.run_dir / "state" / f"{CONTAINER}.json").unlink()
        thawed = thaw(stage, client, prefill(stage, client, record))
        assert [process["ns_pid"] for process in thawed["processes"]] == [counter.pid]
        assert counter.is_counting()
    assert stage.journal() == []
    stage.write_state()
    wait_until(lambda: stage.registered() == {counter.pid}, "the registration")
    with stage.connect() as client:  # a restored process can be checkpointed again
        release(client, freeze(stage, client))
    assert counter.is_counting()


def policy(key):
    return Policy("refuse-untrusted", {key.public.key_id: TrustedKey("node", Path("node.pub"), key.public)})


def test_a_tampered_pack_is_refused_by_the_gpu_before_the_process_sees_it(stage, counter, key):
    with stage.connect() as client:
        record = sealed_image(stage, client, counter, key)
        pack = next(stage.image.glob("vgpu-pack-*.bin"))
        with pack.open("r+b") as file:
            file.seek(12345)
            file.write(b"\xff\xfe")
        handle = prefill(stage, client, record)
        with pytest.raises(ContentMismatch):
            thaw(stage, client, handle)
        assert counter.stands_still()


def test_an_image_exchanged_after_the_gates_is_refused(stage, counter, key):
    with stage.connect() as client:
        record = sealed_image(stage, client, counter, key)
        other = replace(record, content_root="ab" * 32)
        with pytest.raises(ContentMismatch, match="the verified one"):
            prefill(stage, client, other)


def test_an_agent_killed_while_a_restore_hands_memory_over_makes_it_anew(stage, counter, key):
    """The client has gone with it; the next agent finds the journal entry and the image."""
    with stage.connect() as client:
        record = sealed_image(stage, client, counter, key)
    counter.faults("slow-map")
    thawing = f"""
import sys
from gpu_state.client import AgentClient
agent = AgentClient.connect({stage.socket!r}, start_on_demand=False)
args = {{"container": {CONTAINER!r}, "cgroup": {stage.cgroup!r}, "deadline_s": 20}}
image = {{"image_path": {str(stage.image)!r}, "content_root": {record.content_root!r}}}
handle = agent.request("prefill", args | image, deadline_s=20)["handle"]
agent.request("thaw", args | {{"prefill": handle}}, deadline_s=20)
"""
    client = stage.spawn([stage.python, "-c", thawing], stderr=subprocess.DEVNULL)
    wait_until(lambda: not counter.fault_file.read_text(), "the MAP to begin")
    stage.agent.kill()
    stage.agent.wait(5)
    client.wait(10)
    stage.start_agent()
    assert counter.is_counting()
    wait_until(lambda: stage.journal() == [], "the end of the journal entry")


def test_a_prefill_that_nobody_fetches_gives_its_memory_back(stage, counter, key):
    with stage.connect() as client:
        record = sealed_image(stage, client, counter, key)
        with stage.connect() as other:
            prefill(stage, other, record)
            wait_until(lambda: used_bytes(stage) >= 3 * (2 << 20), "the memory to be made")
        wait_until(lambda: used_bytes(stage) == 0, "the memory to be free again")
        thaw(stage, client, prefill(stage, client, record))
        assert counter.is_counting()


def test_a_staging_worker_killed_during_a_restore_is_named_and_the_restore_can_be_tried_again(stage, key):
    big = StagedCounter(stage, "big", "--objects", "60")
    wait_until(lambda: stage.registered() == {big.pid}, "the registration")
    with stage.connect() as client:
        record = sealed_image(stage, client, big, key)
        others = staging_workers(stage)
        handle = prefill(stage, client, record)
        os.kill(wait_until(lambda: staging_worker(stage, others), "the worker"), signal.SIGKILL)
        with pytest.raises(StagingWorkerLost):
            thaw(stage, client, handle)
        thaw(stage, client, prefill(stage, client, record))
        assert big.is_counting()


def test_a_staged_conversation_is_as_the_schema_says(stage, counter, key):
    schema = json.loads((ROOT / "spec/agent-protocol.schema.json").read_text())
    image = {"container": CONTAINER, "cgroup": stage.cgroup, "deadline_s": 20, "image_path": str(stage.image)}
    with stage.connect() as client:
        events = []
        answers = [
            client.request("inventory", image | {"blockers": True}, deadline_s=20),
            frozen := client.request("freeze", image | {"leave_running": True}, deadline_s=20, on_event=events.append),
            drain(client),
            release(client, frozen),
            client.request("suspend", image, deadline_s=20),
            client.request("resume", image, deadline_s=20, on_event=events.append),
        ]
        record = sealed_image(stage, client, counter, key)
        args = image | {"content_root": record.content_root}
        answers.append(filling := client.request("prefill", args, deadline_s=20))
        answers.append(client.request("thaw", image | {"prefill": filling["handle"]}, deadline_s=20))
    for line in [*events, *({"id": 1, "ok": True, "result": answer} for answer in answers)]:
        Draft202012Validator(schema).validate(line)
    for verb in ("freeze", "drain", "prefill", "thaw", "suspend", "resume"):
        request = {"id": 1, "verb": verb, "args": {key: value for key, value in args.items() if key != "deadline"}}
        Draft202012Validator(schema).validate(request)
    assert counter.is_counting()
