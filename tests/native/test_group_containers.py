"""Two containers that come to rest at one cut: real libvgpu.so, real agent, a group of ranks in each, the software driver.

The library's places are fixed when it is built, so each container has a build of its own. The ranks of one container wait for each
other on the device and check every word; tests/unit/test_group_meeting.py has ranks that wait across containers.
"""

import os
import secrets
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gpu_state.group_terms import group_json
from tests.native.test_staged_system import System, drain, release
from tests.unit.agent_stage import CONTAINER, Group, cgroup2_mount, wait_until
from tests.unit.test_group_meeting import Place
from vgpu_errors import DeadlineExceeded, GroupMemberFailed, VgpuError
from vgpu_preload import build as preload_build

pytestmark = [
    pytest.mark.skipif(cgroup2_mount() is None, reason="needs root and a writable cgroup2 hierarchy"),
    pytest.mark.timeout(120),
]
OTHER = "other"


class Elsewhere:
    """The second container, as its programs see the node."""

    def __init__(self, system, library, link):
        self.system, self.library = system, library
        self.folder, self.driver = system.folder, system.driver
        self.place = Place(system, OTHER)
        link.symlink_to(self.place.socket.parent)

    def spawn(self, command, *, cgroup=None, **options):
        assert cgroup == ""
        entry = f'echo 0 > "{self.place.folder}/cgroup.procs" && LD_PRELOAD={self.library} exec "$@"'
        return self.system.spawn(["sh", "-c", entry, "sh", *command], **options)


class Containers:
    """Both, with a group of ranks in each."""

    def __init__(self, system, elsewhere):
        self.system, self.elsewhere = system, elsewhere
        self.at = {CONTAINER: system.cgroup, OTHER: elsewhere.place.cgroup}
        self.image = {CONTAINER: system.image, OTHER: elsewhere.place.image}
        self.groups = [
            Group(system, "here", "--share", "mixed", mode="ring", ranks=2),
            Group(elsewhere, "there", mode="ring", ranks=2),
        ]
        self.await_registered()

    def add_one_that_stalls(self):
        options = ("--stall-rank", "1", "--stall-step", "3", "--beat", "10")
        stalling = Group(self.elsewhere, "stall", *options, mode="ring", ranks=2)
        self.groups.append(stalling)
        self.await_registered()
        wait_until(lambda: set(stalling.steps().values()) == {2}, "the step before the stall")
        return stalling

    def await_registered(self):
        wait_until(lambda: self.registered() >= {pid for group in self.groups for pid in group.pids}, "registrations")

    def registered(self):
        asked = [self.system.ask("inventory", container=name, cgroup=cgroup) for name, cgroup in self.at.items()]
        return {process["pid"] for one in asked for process in one["processes"] if process["registered"]}

    def both(self, verb, clients=None, **more):
        """The requests of both at a time; answers or problems."""

        def ask(container):
            args = {"container": container, "cgroup": self.at[container], "deadline_s": 15, **more}
            if verb == "freeze":
                args["image_path"] = str(self.image[container])
            if verb != "resume":
                args["group"] = group_json("train", self.at)
            try:
                if clients is None:
                    return self.system.ask(verb, **args)
                return clients[container].request(verb, args, deadline_s=40)
            except VgpuError as problem:
                return problem

        with ThreadPoolExecutor(2) as threads:
            return list(threads.map(ask, self.at))

    def go_on(self):
        for group in self.groups:
            group.goes_on()

    def stand_still(self):
        return all(group.stands_still() for group in self.groups)


@pytest.fixture
def containers(tmp_path):
    links = [Path(f"/tmp/vgpu-pair-{secrets.token_hex(4)}") for _ in range(2)]
    libraries = [tmp_path / f"{link.name}.so" for link in links]
    for link, library in zip(links, libraries, strict=True):
        places = (f'VGPU_SOCKET_PATH="{link}/agent.sock"', f'VGPU_MODE_PATH="{link}/mode"')
        preload_build.compile_library(library, "glibc", defines=places)
    system = System(links[0], libraries[0], gpus=2)
    elsewhere = Elsewhere(system, libraries[1], links[1])
    try:
        containers = Containers(system, elsewhere)
        yield containers
        for group in containers.groups:
            group.end()
        if os.environ.get("VGPU_SHOW_LOG"):
            print(system.log())
    finally:
        elsewhere.place.close()
        system.close()
        for link in links:
            link.unlink(missing_ok=True)


def test_two_containers_come_to_rest_together_or_not_at_all(containers):
    """One story, because the start costs more than the rest: left running, suspended, then a cut that cannot be reached."""
    system = containers.system
    with system.connect() as here, system.connect() as there:
        clients = {CONTAINER: here, OTHER: there}
        frozen = containers.both("freeze", clients, leave_running=True)
        assert all(isinstance(one, dict) for one in frozen), frozen
        assert [{process["mode"] for process in one["processes"]} for one in frozen] == [{"staged"}] * 2
        assert containers.stand_still()
        for client, one in zip(clients.values(), frozen, strict=True):
            release(client, one)
        containers.go_on()
        drain(here)
        there.request("drain", {"container": OTHER, "deadline_s": 30}, deadline_s=40)
    suspended = containers.both("suspend")
    assert all(isinstance(one, dict) for one in suspended), suspended
    assert containers.stand_still()
    resumed = containers.both("resume")
    assert all(isinstance(one, dict) for one in resumed), resumed
    containers.go_on()

    stalling = containers.add_one_that_stalls()
    for problem in containers.both("suspend", deadline_s=4):
        assert isinstance(problem, DeadlineExceeded), problem
        assert f"process {stalling.pids[1]} (ring) of container {OTHER} is idle" in str(problem)
    stalling.goes_on(of="beat")
    stalling.let_stalled_come()
    containers.go_on()

    (system.folder / "gpus" / "fault-lock").write_text("999")
    problems = containers.both("suspend")
    assert sum(isinstance(problem, GroupMemberFailed) for problem in problems) == 1
    assert all("999" in str(problem) for problem in problems)
    containers.go_on()
    assert system.journal() == []
